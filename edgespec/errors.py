"""The errors a user may meet: one clear line each, and an exit code."""

from __future__ import annotations


class EdgespecError(Exception):
    """Something failed that the user can act on. `str(error)` is the one line shown.

    The line says what is wrong, which file or option it concerns and what to do.
    """

    exit_code = 1


def describe_os_error(error: OSError) -> str:
    """Return which file the system refused, and why."""
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"


class UsageError(EdgespecError):
    """The request itself is wrong: an unknown name, a bad option, a missing file."""

    exit_code = 2
