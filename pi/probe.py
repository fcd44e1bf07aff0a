"""Asks a board over ssh what it is, before anything is copied, and says in one line what is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from edgespec.errors import EdgespecError, UsageError
from edgespec.models.sources import format_size
from edgespec.platform.cpu import BOARDS, Board, board_of
from pi.needs import MACHINE

LEAST_MEMORY = 1 << 30  # bytes: the system and the smallest pair of models together need more
LEAST_PYTHON = (3, 11)

SCRIPT = r"""
exec 2>/dev/null
export LC_ALL=C PATH="$PATH:/usr/sbin:/sbin"
case $1 in /*) into=$1 ;; *) into=$HOME/$1 ;; esac
there=$into
while [ ! -e "$there" ]; do there=$(dirname "$there"); done
part() { printf '\n::%s\n' "$1"; }
part machine; uname -m
part bits; getconf LONG_BIT
part glibc; getconf GNU_LIBC_VERSION
part model; cat /proc/device-tree/model | tr -d '\000'
part features; cat /proc/cpuinfo
part system; cat /etc/os-release
part memory; cat /proc/meminfo
part python; python3 -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])'
part venv; python3 -c 'import ensurepip, venv; print("yes")'
part libgomp; ldconfig -p | grep -F libgomp.so.1
part folder; echo "$into"
part writable; [ -d "$there" ] && [ -w "$there" ] && echo yes
part free; df -Pk "$there"
part taken; [ -e "$into/venv" ] && case $(readlink "$into/venv") in .edgespec-venv-*) ;; *) echo yes ;; esac
part end
"""
"""For a POSIX shell, with the folder to install into: below the home folder unless it is absolute."""

_PART = re.compile(r"^::(\w+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts that a board reports; sizes in bytes."""

    host: str
    """How ssh reaches it."""
    machine: str
    """`uname -m`: the kernel's, whose programs may be 32-bit all the same."""
    bits: int
    """Bits of its programs: 32 or 64; 0 if not known."""
    glibc: str
    """Version; "" if the C library is another."""
    model: str
    """/proc/device-tree/model; "" if it has none."""
    features: frozenset[str]
    """Features in /proc/cpuinfo that all processors have."""
    system: str
    """PRETTY_NAME of /etc/os-release."""
    memory: int
    available: int
    python: tuple[int, ...]
    """Version of python3; () if there is none."""
    has_venv: bool
    has_libgomp: bool
    folder: str
    """Where edgespec will be installed, absolute."""
    writable: bool
    """Whether it can be made, or written to."""
    free: int
    taken: bool
    """Whether `folder`/venv exists but was not made by a deploy."""

    @property
    def python_text(self) -> str:
        """The version of python3 as people write it."""
        return ".".join(map(str, self.python))

    def describe(self) -> str:
        """Return the board in one line."""
        memory = f"{format_size(self.memory)} of memory, {format_size(self.available)} available"
        disk = f"{format_size(self.free)} free on disk"
        return f"{self.model or self.machine}, {self.system}, Python {self.python_text}, {memory}, {disk}"


def parse(answer: str, host: str) -> Facts:
    """Return the facts in the script's output. Raises EdgespecError if they are not there."""
    pieces = _PART.split(answer)
    parts = {name: text.strip() for name, text in zip(pieces[1::2], pieces[2::2], strict=True)}
    if "end" not in parts:
        said = " ".join(answer.split())[:120] or "nothing"
        raise EdgespecError(f"{host}: no POSIX shell, or the connection was cut; it answered: {said}")
    lines = parts["features"].splitlines()
    features = [set(line.partition(":")[2].split()) for line in lines if line.startswith("Features")]
    system = re.search(r'^PRETTY_NAME="?([^"\n]*)', parts["system"], re.MULTILINE)
    return Facts(
        host=host,
        machine=parts["machine"],
        bits=_number(r"(\d+)", parts["bits"]),
        glibc=parts["glibc"].removeprefix("glibc "),
        model=parts["model"],
        features=frozenset(set.intersection(*features) if features else ()),
        system=system[1] if system else "an unknown system",
        memory=_number(r"^MemTotal:\s*(\d+)", parts["memory"]) << 10,
        available=_number(r"^MemAvailable:\s*(\d+)", parts["memory"]) << 10,
        python=version(parts["python"]),
        has_venv=bool(parts["venv"]),
        has_libgomp=bool(parts["libgomp"]),
        folder=parts["folder"],
        writable=bool(parts["writable"]),
        free=_number(r"\s(\d+)\s+\d+%\s", parts["free"]) << 10,
        taken=bool(parts["taken"]),
    )


def version(text: str) -> tuple[int, ...]:
    """Return "2.36" as numbers, which compare as versions do; () if there are none."""
    return tuple(map(int, re.findall(r"\d+", text)))


def choose_board(facts: Facts, asked: Board | None) -> Board:
    """Return the board whose wheels fit: the one asked for, else by model, else by features.

    For an unknown model it is the best board whose features are all present. Raises EdgespecError if no
    wheels can run there, UsageError if those of the board asked for cannot.
    """
    if wrong := _wrong_machine(facts):
        raise EdgespecError(f"{facts.host}: {wrong}")
    name = facts.model or "its processor"
    if asked is not None:
        if lacking := _lacking(asked, facts):
            raise UsageError(
                f"--board {asked.name}: wheels for another board: {facts.host} ({name}) lacks "
                f"{' '.join(lacking)}; leave --board out"
            )
        return asked
    fitting = [board for board in BOARDS if not _lacking(board, facts)]
    if not fitting:
        raise EdgespecError(
            f"{facts.host}: {name} lacks {' '.join(_lacking(BOARDS[0], facts))}, which all wheels need; "
            f"they run on a {BOARDS[0].title} and better"
        )
    known = board_of(facts.model)
    return known if known in fitting else fitting[-1]


def check(facts: Facts, *, glibc: str) -> None:
    """Raise EdgespecError for the gravest obstacle to wheels that need this glibc, if there is one."""
    for problem in _problems(facts, glibc):
        raise EdgespecError(f"{facts.host}: {problem}")


def _wrong_machine(facts: Facts) -> str:
    """Return why the board runs no 64-bit programs for ARM; "" if it does."""
    cure = "the wheels need 64-bit Raspberry Pi OS, so write that to its card"
    if facts.machine.startswith("arm"):
        return f"a 32-bit system ({facts.machine}); {cure}"
    if facts.machine != MACHINE:
        return f"its processor is {facts.machine or 'unknown'}, not 64-bit ARM; check that this is the board"
    return "" if facts.bits == 64 else f"a 64-bit kernel with 32-bit programs; {cure}"


def _problems(facts: Facts, glibc: str) -> Iterator[str]:
    newer = "use Raspberry Pi OS bookworm or later"
    if version(facts.glibc) < version(glibc):
        has = f"its glibc is {facts.glibc}" if facts.glibc else "its C library is not glibc"
        yield f"{has}, and the wheels need {glibc} ({facts.system}); {newer}"
    if facts.memory < LEAST_MEMORY:
        yield f"{format_size(facts.memory)} of memory, which is too little; use a board with 2 GB or more"
    if not facts.python:
        yield f"it has no python3; on the board: sudo apt install python3 {' '.join(_missing(facts))}"
    if facts.python < LEAST_PYTHON:
        least = ".".join(map(str, LEAST_PYTHON))
        yield f"its Python is {facts.python_text}, and {least} is needed ({facts.system}); {newer}"
    if packages := _missing(facts):
        yield f"packages are missing; on the board: sudo apt install {' '.join(packages)}"
    if not facts.writable:
        yield f"{facts.folder} cannot be written to there; choose another folder with --into"
    if facts.taken:
        yield f"{facts.folder}/venv there is no deploy's; move it away, or choose another folder with --into"


def _missing(facts: Facts) -> list[str]:
    there = {"python3-venv": facts.has_venv, "libgomp1": facts.has_libgomp}
    return [package for package, is_there in there.items() if not is_there]


def _lacking(board: Board, facts: Facts) -> list[str]:
    return [feature for feature in board.hwcaps if feature not in facts.features]


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text, re.MULTILINE)
    return int(found[1]) if found else 0
