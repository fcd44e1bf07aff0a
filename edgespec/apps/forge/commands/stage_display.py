"""The progress of making a draft, in a terminal and elsewhere."""

from __future__ import annotations

from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn

from edgespec.apps.forge.progress import StageProgress
from edgespec.cli.console import err
from edgespec.cli.progress import LINE_EVERY, ProgressDisplay


class StageDisplay(ProgressDisplay):
    """A row for each stage: its name, a bar, its figures, the time left. All on stderr.

    Elsewhere than in a terminal a line when a stage begins, and one for each tenth of it that has figures.
    """

    def __init__(self) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.fields[left]}", style="progress.remaining"),
            TextColumn("{task.fields[detail]}"),
            transient=False,
        )
        self._tasks: dict[str, TaskID] = {}
        self._next_line: dict[str, float] = {}

    def show(self, step: StageProgress) -> None:
        """Show how far a stage is; the stages before it are over."""
        if err.is_terminal:
            self._draw(step)
        else:
            self._print(step)

    def _draw(self, step: StageProgress) -> None:
        if step.stage not in self._tasks:
            for task in self._tasks.values():
                self.bars.update(task, completed=1.0, left="")
            self._tasks[step.stage] = self.bars.add_task(step.stage, total=1.0, detail="", left="")
        self.bars.update(self._tasks[step.stage], completed=step.share, detail=step.detail, left=_left(step))

    def _print(self, step: StageProgress) -> None:
        if step.stage not in self._next_line:
            err.print(step.stage)
            self._next_line[step.stage] = LINE_EVERY
        elif step.share >= self._next_line[step.stage] and step.detail:
            left = _left(step)
            figures = ", ".join(filter(None, (step.detail, left)))
            err.print(f"{step.stage}: {step.share:.0%}, {figures}")
            while self._next_line[step.stage] <= step.share:
                self._next_line[step.stage] += LINE_EVERY


def _left(step: StageProgress) -> str:
    if step.left_s is None or step.left_s == float("inf"):
        return ""
    hours, minutes = divmod(round(step.left_s / 60), 60)
    if hours:
        return f"{hours} h {minutes:02} min left"
    return f"{minutes} min left" if minutes else f"{step.left_s:.0f} s left"
