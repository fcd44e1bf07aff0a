"""Shows long work while it runs: bars in a terminal, a line now and then elsewhere. All on stderr."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.progress import (
    BarColumn,
    DownloadColumn,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import (
    Progress as Bars,
)

from edgespec.cli.console import err
from edgespec.engine import DrafterName, choose_models
from edgespec.models import Entry, load_registry
from edgespec.pull import Phase, Progress, Puller, locate
from edgespec.sources import format_size

_VERBS: dict[Phase, str] = {"download": "pulling", "hash": "checking", "quantize": "quantizing"}
_LINE_EVERY = 0.1  # of a file, where lines are printed instead of bars


def pull_shown(entries: Sequence[Entry]) -> list[Path]:
    """Return the files of `entries`; those not here are pulled, all planned at once, under one display."""
    missing = Puller().plan(entries)
    with PullDisplay([entry.size for entry in missing if not entry.derived]) as display:
        puller = Puller(on_progress=display.on_progress, on_message=display.on_message)
        return puller.ensure_all(entries)


def pull_named(*names: str | None) -> None:
    """Pull those of the models that the registry or a hub names and that are not here; None is no model."""
    pull_shown([found for name in names if name and isinstance(found := locate(name), Entry)])


def pull_chosen(
    pair: str | None, target: str | None, draft: str | None, drafter: DrafterName
) -> tuple[str, str | None]:
    """Return the names of target and draft, of `pair` or as `choose_models` completes them; pull them."""
    if pair is not None:
        named = load_registry().pair(pair)
        target, draft = named.target, named.draft
    chosen = choose_models(target, draft, drafter)
    pull_named(*chosen)
    return chosen


class WorkDisplay:
    """A bar with the time left in a terminal; elsewhere a line when something else begins."""

    def __init__(self) -> None:
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=err,
            transient=True,
            refresh_per_second=2,  # drawing takes time from what is measured meanwhile
        )
        self._task = self._bars.add_task("", total=None)
        self._last = ""

    def __enter__(self) -> Self:
        if err.is_terminal:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if err.is_terminal:
            self._bars.stop()

    def show(self, what: str, done: float, total: float, detail: str = "") -> None:
        """Show what is being done, how much of how much is, and in a terminal a `detail` that changes."""
        if err.is_terminal:
            self._bars.update(
                self._task,
                description=what + detail,
                completed=done,
                total=total,
                refresh=what != self._last,
            )
        elif what != self._last and done < total:
            err.print(what, markup=False)
        self._last = what


class PullDisplay:
    """Draws what a pull reports: hand its `on_progress` and `on_message` to it, inside a `with`.

    `expected` are the sizes in bytes of the files to come, where known: with more than one file there
    is a bar for all of them as well.
    """

    def __init__(self, expected: Sequence[int | None] = ()) -> None:
        self._bars = Bars(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeElapsedColumn(),
            console=err,
            transient=True,
        )
        self._stack = ExitStack()
        self._expected = expected
        self._overall: TaskID | None = None
        self._tasks: dict[tuple[str, Phase], TaskID] = {}
        self._downloaded: dict[str, int] = {}
        self._next_line: dict[tuple[str, Phase], float] = {}

    def __enter__(self) -> Self:
        if err.is_terminal:
            self._stack.enter_context(self._bars)
            if len(self._expected) > 1:
                total = sum(size or 0 for size in self._expected)
                self._overall = self._bars.add_task("all files", total=total or None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def on_message(self, line: str) -> None:
        """Print one line above the bars."""
        err.print(line, markup=False)

    def on_progress(self, progress: Progress) -> None:
        """Move the bar of this file, or print a line if enough has come since the last."""
        if err.is_terminal:
            self._draw(progress)
        else:
            self._print(progress)

    def _draw(self, progress: Progress) -> None:
        key = (progress.name, progress.phase)
        if key not in self._tasks:
            for (name, _), task in self._tasks.items():  # one bar a file: its last phase is over
                if name == progress.name:
                    self._bars.update(task, visible=False)
            self._tasks[key] = self._bars.add_task(f"{_VERBS[progress.phase]} {progress.name}")
        self._bars.update(self._tasks[key], completed=progress.done, total=progress.total)
        if self._overall is not None and progress.phase == "download":
            self._downloaded[progress.name] = progress.done
            self._bars.update(self._overall, completed=sum(self._downloaded.values()))

    def _print(self, progress: Progress) -> None:
        key = (progress.name, progress.phase)
        verb = f"{_VERBS[progress.phase]} {progress.name}"
        share = progress.done / progress.total if progress.total else 0.0
        if key not in self._next_line:
            size = f" ({format_size(progress.total)})" if progress.total else ""
            err.print(verb + size, markup=False)
            self._next_line[key] = share + _LINE_EVERY
        elif progress.phase == "download" and progress.total and share >= self._next_line[key]:
            done, total = format_size(progress.done), format_size(progress.total)
            err.print(f"{verb}: {share:.0%}, {done} of {total}", markup=False)
            self._next_line[key] = share + _LINE_EVERY
