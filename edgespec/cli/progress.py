"""Shows the progress of long work: bars in a terminal, occasional lines elsewhere. All on stderr."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import RLock
from typing import Self

from rich.progress import (
    BarColumn,
    DownloadColumn,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import (
    Progress as Bars,
)
from rich.table import Column
from rich.text import Text

from edgespec.cli.console import err
from edgespec.models.hub import format_size
from edgespec.models.pull import Phase, Puller, PullProgress
from edgespec.models.registry import Entry
from edgespec.models.resolve import ModelRef, ref_of

_VERBS: dict[Phase, str] = {
    "download": "pulling",
    "hash": "checking",
    "quantize": "quantizing",
    "convert": "converting",
}
_LONG = ("pulling", "compiling")  # kinds of work for which more than one line is printed
LINE_EVERY = 0.1
"""Share of the work between lines, if there are no bars."""


def pull_shown(entries: Sequence[Entry]) -> list[Path]:
    """Return the files of `entries`, pulling all missing ones under one display."""
    missing = Puller().plan(entries)
    with PullDisplay([entry.download_bytes for entry in missing if not entry.derived]) as display:
        puller = Puller(on_progress=display.on_progress, on_message=display.on_message)
        return puller.ensure_all(entries)


def pull_named(*models: str | ModelRef | None) -> None:
    """Pull missing models that the registry or a hub knows by name; None is skipped."""
    puller = Puller()
    refs = [ref_of(model) for model in models if model]
    wanted = [ref.name for ref in refs if isinstance(ref.found, Entry)]
    pull_shown([entry for name in wanted for entry in puller.expand(name)])


class ProgressDisplay:
    """Bars in a terminal, which subclasses move; elsewhere they print lines. A context manager."""

    def __init__(self, *columns: ProgressColumn, transient: bool = True, per_second: float = 2) -> None:
        """Draw a bar's `columns`, `per_second` times a second: drawing costs time that is being measured."""
        self.bars = Bars(*columns, console=err, transient=transient, refresh_per_second=per_second)

    def __enter__(self) -> Self:
        if err.is_terminal:
            self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if err.is_terminal:
            self.bars.stop()


class WorkDisplay(ProgressDisplay):
    """In a terminal a bar with the time left; elsewhere a line whenever new work begins."""

    def __init__(self) -> None:
        super().__init__(
            TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
        )
        self._task = self.bars.add_task("", total=None)
        self._last = ""  # what was shown
        self._had_detail = False

    def show(self, what: str, done: float, total: float, detail: str = "") -> None:
        """Show the current work, its progress, and in a terminal a changing `detail`."""
        if err.is_terminal:
            self.bars.update(
                self._task,
                description=what + detail,
                completed=done,
                total=total,
                # A first detail too, lest short work ends before it is drawn.
                refresh=what != self._last or (detail != "" and not self._had_detail),
            )
        elif what != self._last and done < total:
            err.print(what)
        self._last, self._had_detail = what, detail != ""


class _Amount(DownloadColumn):
    """Work done and total, in the row's unit, or in bytes with their speed."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text()
        if unit := task.fields["unit"]:
            return Text(f"{task.completed:.0f}/{task.total:.0f} {unit}", style="progress.download")
        speed = f" {format_size(task.speed)}/s" if task.speed else ""
        return super().render(task).append(speed)


class _Time(TimeRemainingColumn):
    """The time left, or the time taken if the amount of work is not known."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text("{}:{:02}".format(*divmod(int(task.elapsed or 0), 60)), style="progress.elapsed")
        return super().render(task).append(" left")


def columns(width: int | None = 40) -> tuple[ProgressColumn, ...]:
    """Return the columns of a bar of this width: the bar, the amount in its unit, and the time left."""
    return (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=width),
        _Amount(table_column=Column(no_wrap=True)),
        _Time(compact=True, table_column=Column(no_wrap=True)),
    )


class PullDisplay(ProgressDisplay):
    """Shows the progress of a pull: inside a `with`, pass its `on_progress` and `on_message` to the pull.

    `expected` are the sizes in bytes of the files to come, where known; for more than one file there is also
    a bar for all of them. `show` gives other work its own row.
    """

    def __init__(self, expected: Sequence[int | None] = ()) -> None:
        super().__init__(*columns(None), per_second=10)  # bars as wide as the others leave it
        self._total = sum(size or 0 for size in expected)
        self._overall = (
            self.bars.add_task("all files", total=self._total or None, unit="") if len(expected) > 1 else None
        )
        self._tasks: dict[str, tuple[str, TaskID]] = {}
        self._downloaded: dict[str, int] = {}
        self._next_line: dict[tuple[str, str], float] = {}
        self._lock = RLock()

    def on_message(self, line: str) -> None:
        """Print one line above the bars."""
        err.print(line)

    def on_progress(self, progress: PullProgress) -> None:
        """Show the progress of one step of the work on a model."""
        unit = "tensors" if progress.phase in ("quantize", "convert") else ""
        with self._lock:
            self.show(_VERBS[progress.phase], progress.name, progress.done, progress.total, unit)
            if progress.phase == "hash" and progress.done == progress.total:
                self.hide(progress.name)
            if self._overall is not None and progress.phase == "download":
                self._downloaded[progress.name] = progress.done
                done = sum(self._downloaded.values())
                self.bars.update(self._overall, completed=done, visible=done != self._total)

    def show(self, verb: str, name: str, done: int, total: int | None, unit: str = "") -> None:
        """Move the bar of `name`, or print a line if enough was done since the last.

        `unit` is what is counted, "" for bytes. The next work on `name` reuses its row. In a terminal a pull
        also prints a line, which remains after its bar.
        """
        with self._lock:
            key, what, share = (name, verb), f"{verb} {name}", done / total if total else 0.0
            amounts = (f"{done}", f"{total} {unit}") if unit else (format_size(done), format_size(total or 0))
            if err.is_terminal:
                if self._tasks.get(name, ("",))[0] != verb:
                    self.hide(name)
                    self._tasks[name] = verb, self.bars.add_task(what, total=total, unit=unit)
                self.bars.update(self._tasks[name][1], completed=done, total=total, unit=unit)
            is_line = not err.is_terminal or (verb == "pulling" and total)
            if key not in self._next_line and is_line:
                err.print(f"{what} ({amounts[1]})" if total else what)
                self._next_line[key] = share + LINE_EVERY
            elif not err.is_terminal and verb in _LONG and total and share >= self._next_line[key]:
                err.print(f"{what}: {share:.0%}, {' of '.join(amounts)}")
                self._next_line[key] = share + LINE_EVERY

    def hide(self, name: str) -> None:
        """Remove the row of `name`: that work is over."""
        with self._lock:
            if name in self._tasks:
                self.bars.remove_task(self._tasks.pop(name)[1])
