"""Extensions that apps and other packages offer by name: entry points, edgespec's own included.

[project.entry-points."edgespec.commands"]    in the pyproject.toml of any package
hello = "my_package:hello"

edgespec.commands    a function that typer takes, or a typer.Typer: `edgespec NAME`
edgespec.drafters    a class that drafts: `--drafter NAME` (docs/write-a-drafter.md)
edgespec.drafts      a kind of draft (edgespec/drafting/draft.py), by what begins the metadata of its files
edgespec.own_heads   a kind of head in the target's own file, by the word of `--drafter` that asks for it
edgespec.dialects    a function that adds an API to the server (docs/write-a-dialect.md)
edgespec.meters      a function that returns a meter of energy (edgespec/platform/metering.py)
edgespec.parts       a function that the core or another app needs without importing its app: APP.PART

Only `guarded` calls foreign code: any failure of it becomes one line.
"""

from __future__ import annotations

import dis
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from inspect import unwrap
from pathlib import Path
from typing import Any, TypeVar

from edgespec.errors import EdgespecError, UsageError

DEBUG = "EDGESPEC_DEBUG"
"""The environment variable with which tracebacks are shown; `--debug` sets it, for child processes too."""

OWN_HEADS = "edgespec.own_heads"

_OF_OURS = "commands", "drafters", "drafts", "own_heads", "meters", "parts"  # groups that hold some of ours
_LONGEST = 300  # characters of what an error says
_OURS, _PYTHON = f"{Path(__file__).parents[1]}{os.sep}", f"{Path(os.__file__).parent}{os.sep}"
_PACKAGES = f"{os.sep}site-packages{os.sep}"

R = TypeVar("R")


class PluginError(UsageError):
    """Foreign code failed; the line says how and where."""


def guarded(
    what: str,
    call: Callable[[], R],
    *,
    code: Callable[[], object] = lambda: None,
    field: str = "",
    value: object = "",
) -> R:
    """Return the result of `call`, which runs foreign code. Raises PluginError for whatever that raises.

    `what`: the beginning of the line, what failed. `code` returns the foreign function concerned, which is
    named if no foreign line raised the error. Ctrl-C stays KeyboardInterrupt.
    """
    try:
        return call()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and not _is_raised_by_code(error):
            raise
        problem = f"{what}: {describe(error, code)}"
        raise PluginError(problem, field=field, value=value) from error


def describe(error: BaseException, code: Callable[[], object] = lambda: None) -> str:
    """Return an error of foreign code in one line, with its file and line; `code` as for `guarded`."""
    said = ""
    with suppress(BaseException):  # a message is computed by their code, too
        said = " ".join(str(error).split())[:_LONGEST]
    place = _place(error, code)
    return f"{type(error).__name__}{': ' if said else ''}{said}{place and f' ({place})'}"


def traced(line: str, error: BaseException) -> str:
    """Return a line about an error, followed by its traceback if `DEBUG` is set."""
    if not os.environ.get(DEBUG):
        return line
    return f"{line}\n{''.join(traceback.format_exception(error.__cause__ or error)).rstrip()}"


def _is_raised_by_code(error: BaseException) -> bool:
    """Whether the error comes from a `raise` statement, not from a signal."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    if trace is None:
        return False
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"


def _place(error: BaseException, code: Callable[[], object]) -> str:
    """Return FILE:LINE of foreign code: the deepest line in its files, else the beginning of `code`."""
    lines = [
        (frame.f_code.co_filename, number)
        for frame, number in traceback.walk_tb(error.__traceback__)
        if _is_theirs(frame.f_code.co_filename)
    ]
    if lines:
        folder = Path(lines[0][0]).parent
        file, line = [place for place in lines if Path(place[0]).parent == folder][-1]
        return f"{file}:{line}"
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    with suppress(BaseException):
        function: Any = code()
        found = unwrap(getattr(function, "__func__", function)).__code__
        return f"{found.co_filename}:{found.co_firstlineno}"
    return ""


def _is_theirs(file: str) -> bool:
    is_pythons = file.startswith((_PYTHON, "<frozen ")) and _PACKAGES not in file
    return not (is_pythons or file.startswith(_OURS) or f"{_PACKAGES}typer{os.sep}" in file)


def offered(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name: ours in their order, then those of other packages.

    Of two with one name the first is used, so that none of our names can be taken. Raises EdgespecError if
    edgespec is present but not installed, or installed before its code offered all of this.
    """
    return groups().get(group, {})


@cache
def groups() -> dict[str, dict[str, EntryPoint]]:
    """Return the result of `offered` for each group; searching once serves all."""
    try:
        ours = distribution("edgespec").entry_points
    except PackageNotFoundError:
        raise EdgespecError(
            "edgespec is not installed: `pip install` its folder, or call `make run`"
        ) from None
    if lacking := [name for name in _OF_OURS if not ours.select(group=f"edgespec.{name}")]:
        raise EdgespecError(
            f"edgespec's code is newer than its installation, which offers no {lacking[0]}: call `make run`, "
            "or `pip install` its folder again"
        )
    found: dict[str, dict[str, EntryPoint]] = {}
    every = entry_points()
    for group in filter(lambda group: group.startswith("edgespec."), every.groups):
        names = found[group] = {}
        for point in (*ours.select(group=group), *every.select(group=group)):
            names.setdefault(point.name, point)
    return found


def is_ours(point: EntryPoint) -> bool:
    """Whether the entry point is edgespec's own."""
    return point.value.partition(":")[0].strip().partition(".")[0] == "edgespec"


def load(group: str, name: str) -> Any:  # noqa: ANN401 - whatever the group holds
    """Return the object offered under a name, loaded.

    Raises UsageError for an unknown name, or another package's that cannot be imported.
    """
    point = offered(group).get(name)
    if point is None:
        raise UsageError(
            f"{name}: nothing installed offers this ({group}: {', '.join(offered(group)) or 'none'})"
        )
    return point.load() if is_ours(point) else guarded(f"{called(point)} cannot be loaded", point.load)


def load_all(group: str) -> dict[str, Any]:
    """Return the objects of a group by name, loaded. Raises as `load`."""
    return {name: load(group, name) for name in offered(group)}


def called(point: EntryPoint) -> str:
    """Return how messages name an entry point of others: its name, package and place."""
    package = f" of {point.dist.name}" if point.dist else ""
    return f"{point.name}{package} ({point.value})"


def part(name: str) -> Any:  # noqa: ANN401 - a function or a module of an app
    """Return the part of an app called APP.PART, loaded. Raises as `load`."""
    return load("edgespec.parts", name)
