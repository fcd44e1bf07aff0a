"""Shows how far a batch is: a bar in a terminal, a line now and then elsewhere. All on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.progress import BarColumn, TextColumn
from rich.table import Column

from edgespec.apps.batch.run import BatchRate, BatchResults
from edgespec.cli.console import err
from edgespec.cli.progress import ProgressDisplay

_LINE_EVERY = 0.1  # share of the requests between two lines, if there is no bar
_LINES_S = 1.0, 300.0  # seconds between two lines: at least, and at most


class BatchDisplay(ProgressDisplay):
    """Requests done, tokens a second over the last half minute, time left. A context manager."""

    def __init__(
        self,
        results: BatchResults,
        n_requests: int,
        pace: BatchRate,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Show how `results` grow to `n_requests`."""
        self._results = results
        self._n_requests = n_requests
        self._pace = pace
        self._clock = clock
        super().__init__(
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            BarColumn(),
            TextColumn("{task.fields[detail]}", table_column=Column(no_wrap=True)),
        )
        self._task = self.bars.add_task("", total=n_requests, detail="")
        self._said = clock()
        self._said_at = results.n_done
        self._drawn = 0.0

    def update(self) -> None:
        """Show what has changed."""
        now, n_done = self._clock(), self._results.n_done
        if err.is_terminal:
            if now >= self._drawn + 0.5 or n_done == self._n_requests:
                self._drawn = now
                self.bars.update(
                    self._task, completed=n_done, description=self._done(), detail=", ".join(self._details())
                )
        elif n_done < self._n_requests and self._line_is_due(now - self._said, n_done - self._said_at):
            self._said, self._said_at = now, n_done
            err.print(", ".join([self._done(), *self._details()]))

    def _line_is_due(self, seconds: float, n_new: int) -> bool:
        """Return whether to print a line, `seconds` and `n_new` results after the last one."""
        least_s, most_s = _LINES_S
        return seconds >= (least_s if n_new >= self._n_requests * _LINE_EVERY else most_s)

    def _done(self) -> str:
        return f"{self._results.n_done} of {self._n_requests} requests"

    def _details(self) -> list[str]:
        details = []
        if failed := self._results.n_failed:
            details.append(f"{failed} with errors")
        if rate := self._pace.tokens_per_s:
            details.append(f"{rate:.1f} tokens/s")
        left_s = self._pace.left_s(self._n_requests - self._results.n_done)
        if left_s is not None:
            details.append(f"{format_time(left_s)} left")
        return details


def format_time(seconds: float) -> str:
    """Return a time as H:MM:SS, or M:SS below an hour."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
