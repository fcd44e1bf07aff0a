"""The errors a user may meet: one clear line each, and an exit code; and lines that do not end the work."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral, Real
from types import TracebackType
from typing import get_args


class EdgespecError(Exception):
    """Something failed that the user can act on. `str(error)` is the one line shown.

    The line says what is wrong, which file or option it concerns and what to do. An option is named by its
    `field`, the argument's name in Python; command line and server put their own name there (`spelled`).
    """

    exit_code = 1

    def __init__(self, problem: str, *, field: str = "", value: object = "") -> None:
        """Report `problem` with `field` and its `value`, each left out if there is none."""
        super().__init__(problem)
        self.problem = problem
        self.field = field
        self.value = value

    def spelled(self, name: str) -> str:
        """Return the line with the field called `name`."""
        subject = f"{name} {self.value}".strip()
        return f"{subject}: {self.problem}" if subject else self.problem

    def __str__(self) -> str:
        return self.spelled(self.field)


def describe_os_error(error: OSError) -> str:
    """Return which file the system refused, and why."""
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"


class OutputUnread(Exception):  # noqa: N818 - no error: `| head -1` has what it wanted
    """The reader of standard output went away."""


class OutOfMemory(EdgespecError):  # noqa: N818 - what happened, as its reader says it
    """The request does not fit into the available memory."""


class UsageError(EdgespecError):
    """The request itself is wrong: an unknown name, a bad option, a missing file."""

    exit_code = 2


class ServerLost(EdgespecError):  # noqa: N818 - what happened, as its reader says it
    """A server ended before it completed a text for this process."""


class LogitsOf:
    """Context manager: computing with logits that are NaN raises an error that names the model's file.

    The C core refuses such rows, and rows from which nothing can be sampled, with an ArithmeticError. The
    manager may be entered more than once.
    """

    def __init__(self, path: object) -> None:
        """Name the model's file at `path` in errors."""
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, ArithmeticError):
            raise EdgespecError(
                f"{self._path}: {error}; the model file may be damaged (`edgespec models verify`), "
                "or the logit bias forbids every token"
            ) from error


def whole_number(field: str, value: object) -> int:
    """Return a whole number, such as Python's or numpy's, as an int. Raises UsageError for others."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    raise UsageError(f"must be a whole number, not {kind_of(value)}", field=field, value=value)


def check_number(field: str, value: object) -> None:
    """Raise UsageError unless `value` is a number."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise UsageError(f"must be a number, not {kind_of(value)}", field=field, value=value)


def check_text(field: str, value: object) -> None:
    """Raise UsageError unless `value` is text."""
    if not isinstance(value, str):
        cure = "; decode them first" if isinstance(value, (bytes, bytearray, memoryview)) else ""
        raise UsageError(f"must be text, not {kind_of(value)}{cure}", field=field)


def kind_of(value: object) -> str:
    """Return the name of a wrong value's type, for an error."""
    return "None" if value is None else type(value).__name__


def check_choice(field: str, value: str | None, choices: object) -> None:
    """Raise UsageError unless `value` is one of the words of `choices`, a Literal type."""
    if value not in get_args(choices):
        raise UsageError(f"must be one of {', '.join(get_args(choices))}", field=field, value=value)


MessageFn = Callable[[str], None]
"""Takes one line, without its end."""


def silent(_line: str) -> None:
    """Drop the line."""


def once(on_message: MessageFn) -> MessageFn:
    """Return a function that passes each line to `on_message` only the first time."""
    said: set[str] = set()

    def send_new(line: str) -> None:
        if line not in said:
            said.add(line)
            on_message(line)

    return send_new
