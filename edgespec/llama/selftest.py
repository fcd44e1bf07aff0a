"""Decide whether the kernels may be used: a self-test in a child process, whose result is stored.

    a result is stored for these files and this processor  -> use it
    else  a child loads the plugin and runs a tiny model (selftest_child.py)  -> passed, or why not

A crash, a hang or a wrong result stays in the child and becomes one line here. The result is stored in
`selftest-KEY.json` in the cache directory; KEY is a hash of all it depends on: the bytes of the plugin, of
llama.cpp's libraries and of the test, the processor and the instruction set. The child of kernels that pass
also measures which way to prefetch weights is faster on this machine, and from how many tokens on tile
registers are.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from edgespec.errors import UsageError
from edgespec.llama.kernel_timing import Prefetch
from edgespec.platform.kept import SELF_TESTS, StateFile, parse_struct
from edgespec.platform.machine import read_cpu
from edgespec.platform.processes import run_in_child

TIMEOUT_S = 30.0
"""Test and measurement take three seconds, and longer on a busy machine."""

FAILED = 3
"""The child's exit code if the test ran to its end and the kernels failed it."""

_CHILD_FILE = Path(__file__).with_name("selftest_child.py")
_RETEST_S, _REMEASURE_S = 24 * 60 * 60.0, 60 * 60.0


class PrefetchChoice(msgspec.Struct, frozen=True):
    """The chosen way to prefetch weights, and how it was found."""

    prefetch: Prefetch = msgspec.field(default_factory=Prefetch)
    gain: float = 1.0
    """How many times as fast as with the default the products are."""
    reason: str = "it is measured where the result can be stored"
    """Why nothing was measured; "" if it was."""
    wide_from: int = 16
    """From how many tokens on products go through tile registers, where there are any; 0: never."""


class SelfTest(msgspec.Struct, frozen=True):
    """The result of a self-test: passed, or why not."""

    reason: str
    """Why it failed, to follow the words "the self-test of edgespec's kernels"; "" if it passed."""
    certain: bool
    """Whether the same test would give the same result again."""
    isa: str
    when: float
    """Seconds since 1970."""
    choice: PrefetchChoice = msgspec.field(default_factory=PrefetchChoice)
    """How weights are prefetched."""
    build: str = ""
    """The hash that the result is stored under, of all that packs weights; "" if it cannot be stored."""

    @property
    def passed(self) -> bool:
        """Whether the kernels may be used."""
        return not self.reason

    @property
    def outdated(self) -> bool:
        """Whether to test again.

        A crash or a hang may be due to the machine (no memory, too busy), so the test is repeated after a
        day, and a measurement that other programs disturbed after an hour. A wrong result would recur with
        the same files and processor.
        """
        if self.certain and not (self.passed and self.choice.reason):
            return False
        return not 0 <= time.time() - self.when < (_REMEASURE_S if self.certain else _RETEST_S)


def self_test(plugin: Path, isa: str, *, retest: bool = False) -> SelfTest:
    """Return the result for `plugin` with instruction set `isa`; the stored one, unless `retest`."""
    kept = _kept(plugin, isa)
    answer = None if retest else _read(kept)
    if answer is None or answer.outdated:
        answer = _test(plugin, isa, measures=_can_keep(kept))
        _store(kept, answer)
    return replace(answer, build=kept.path.stem if kept else "")


def _test(plugin: Path, isa: str, *, measures: bool) -> SelfTest:
    """Test in a child; it `measures` only if that can be stored, or each start would take the time."""
    arguments = (str(plugin), isa, "measure" if measures else "")
    ended = run_in_child("edgespec.llama.selftest_child", "main", *arguments, timeout_s=TIMEOUT_S)
    choice, passed = PrefetchChoice(), ended.code == 0
    with suppress(msgspec.DecodeError):  # nothing was written, or by somebody else
        choice, passed = msgspec.json.decode(ended.said, type=PrefetchChoice), True
    match ended.code:
        case _ if passed:  # what the measurement after it did is in `choice`
            reason = ""
        case None:
            reason = f"did not end within {TIMEOUT_S:g} s"
        case code if code < 0:
            reason = f"crashed ({_signal_name(-code)})"
        case code:
            reason = f"failed: {ended.complaint or f'exit code {code}'}"
    return SelfTest(reason, passed or ended.code == FAILED, isa, time.time(), choice)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _kept(plugin: Path, isa: str) -> StateFile[SelfTest] | None:
    """Return the file that stores the result; None if its key or the cache directory cannot be found."""
    build = build_hash(isa, plugin, _CHILD_FILE)
    try:
        path = SELF_TESTS.path(build)
    except UsageError:  # no home directory
        return None
    if not build:
        return None
    return StateFile(path, lambda data: parse_struct(data, SelfTest))


def build_hash(kernels: str, *files: Path) -> str:
    """Return 32 hex digits of the processor, `files` and llama.cpp's libraries; "" if one was replaced."""
    cpu = read_cpu()
    digest = hashlib.sha256(f"{kernels}\n{cpu.model}\n{sorted(cpu.flags)}\n".encode())
    try:
        libraries = _mapped_libraries(Path("/proc/self/maps").read_text().splitlines())
        for file in (*files, *sorted(libraries)):
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    except OSError:  # replaced under a running process
        return ""
    return digest.hexdigest()[:32]


def _read(kept: StateFile[SelfTest] | None) -> SelfTest | None:
    try:
        return kept.read() if kept else None
    except OSError:
        return None


def _can_keep(kept: StateFile[SelfTest] | None) -> bool:
    """Whether a result can be stored, judging by the folder."""
    if kept is None:
        return False
    try:
        kept.path.parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(kept.path.parent, os.W_OK)


def _store(kept: StateFile[SelfTest] | None, answer: SelfTest) -> None:
    """Store `answer`. If that fails, the next process tests again."""
    if kept:
        with suppress(OSError):
            kept.update(lambda _: msgspec.json.format(msgspec.json.encode(answer)) + b"\n")


def _mapped_libraries(maps: Iterable[str]) -> set[Path]:
    paths = (Path(fields[5]) for line in maps if len(fields := line.split(maxsplit=5)) == 6)
    return {path for path in paths if path.name.startswith(("libggml", "libllama"))}
