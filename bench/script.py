"""Shared by the scripts here: options, facts of the machine, saving of results."""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from edgespec import _core
from edgespec.apps.bench.machine import MachineWatch, facts
from edgespec.errors import EdgespecError
from edgespec.llama import kernels
from edgespec.llama.backend import llama
from edgespec.platform.machine import default_threads, read_cpu
from edgespec.platform.processes import last_line

_RESULTS = Path(__file__).parent / "results"

_T = TypeVar("_T")


def parser(description: str | None, *, pair: bool = True) -> argparse.ArgumentParser:
    """Return a parser of the options that all scripts have; `pair`: a target and a draft too."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if pair:
        made.add_argument("--target", metavar="MODEL", help="path or name; default: the default pair's")
        made.add_argument("--draft", metavar="MODEL")
    made.add_argument("--threads", type=int, default=default_threads())
    made.add_argument("--json", action="store_true", help="print everything measured too, as JSON")
    made.add_argument("--save", action="store_true", help="write it to bench/results/")
    return made


def numbers(kind: Callable[[str], _T]) -> Callable[[str], list[_T]]:
    """Return a parser for an option of several numbers separated by commas."""

    def read(text: str) -> list[_T]:
        return [kind(part) for part in text.split(",")]

    return read


class Measuring:
    """The machine while a script measures: made before, asked after."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._watch = MachineWatch(n_threads=args.threads)
        self._warnings: tuple[str, ...] = ()
        self.machine: dict[str, Any] = {}
        """Facts of the machine and the versions, and what disturbed the measurement; empty before `end`."""

    def end(self) -> dict[str, Any]:
        """Return `machine`, now that everything is measured; print what disturbed it."""
        self._warnings = self._watch.warnings()
        for line in self._warnings:
            print(f"warning: {line}", file=sys.stderr)
        self.machine = {
            **facts(),
            "row kernels": _core.simd(),
            "kernels": kernels.load().name,
            "llama.cpp compiled for": llama.llama_print_system_info().decode(),
            "warnings": self._warnings,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        }
        return self.machine

    def __str__(self) -> str:
        known = self.machine
        return (
            f"{known['processor']}, {self._args.threads} threads, kernels {known['kernels']}, "
            f"llama.cpp {known['llama.cpp']}"
        )

    def store(self, name: str, result: dict[str, Any]) -> None:
        """Print `result` as JSON and write bench/results/NAME-PROCESSOR.json, each if asked for.

        NAME-ISA-PROCESSOR where EDGESPEC_KERNELS_ISA chooses the instruction set. If the machine was
        disturbed, nothing is written and the script ends with the reason.
        """
        command = [Path(part).name if part.startswith("/") else part for part in sys.argv]
        outcome = msgspec.json.encode({"machine": self.machine, "command": command, **result})
        text = msgspec.json.format(outcome, indent=1).decode() + "\n"
        if self._args.json:
            print(text, end="")
        if not self._args.save:
            return
        if self._warnings:
            raise SystemExit("not saved: the machine was disturbed")
        processor = re.sub(r"[^a-z0-9]+", "-", read_cpu().model.lower()).strip("-")
        chosen = os.environ.get("EDGESPEC_KERNELS_ISA")
        file = _RESULTS / f"{name}-{f'{chosen}-' if chosen else ''}{processor}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        print(f"saved {file}", file=sys.stderr)


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and the quartiles, which lie within the values however few they are."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return median, low, high


def shown_spread(values: Sequence[float]) -> str:
    """Return the median and the quartiles for a column; "-" without values."""
    return "{:.2f} ({:.2f} - {:.2f})".format(*spread(values)) if values else "-"


def run_program(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, in an empty folder; return its output. Raises EdgespecError if it fails."""
    with tempfile.TemporaryDirectory() as folder:  # some write a log where they run
        try:
            return subprocess.run(command, cwd=folder, input="", capture_output=True, text=True, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            said = last_line(str(getattr(error, "stderr", None) or error).encode())
            raise EdgespecError(f"{Path(command[0]).name}: {said}") from None


def require_kernels() -> None:
    """End the script with one line if edgespec's kernels are not available."""
    if reason := kernels.load().reason:
        raise SystemExit(f"nothing to compare, only stock kernels here: {reason}")


def in_child(function: Callable[..., _T], *arguments: object) -> _T:
    """Run `function` in a fresh process, so that no model affects the next."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def start(main: Callable[[], None]) -> None:
    """Run a script; an error that its user can act on is one line. SIGTERM ends what it started too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        main()
    except EdgespecError as error:
        raise SystemExit(str(error)) from None
