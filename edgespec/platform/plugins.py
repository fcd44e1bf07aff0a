"""Offers of apps and other packages under a name: entry points, ours found as anybody's are.

[project.entry-points."edgespec.commands"]    in the pyproject.toml of any package
hello = "my_package:hello"

edgespec.commands    a function that typer takes, or a typer.Typer: `edgespec NAME`
edgespec.drafters    a class that drafts: `--drafter NAME` (docs/write-a-drafter.md)
edgespec.meters      a function that returns a meter of energy (edgespec/platform/metering.py)
edgespec.parts       what the core or another app asks of an app that it does not import, called APP.PART
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from typing import Any

from edgespec.errors import EdgespecError, UsageError


@cache
def offered(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name: ours in their order, then those of other packages.

    Of two with one name it is the first, so that nobody takes a name of ours. Raises EdgespecError where
    edgespec is not installed but only lies there.
    """
    try:
        ours = distribution("edgespec").entry_points.select(group=group)
    except PackageNotFoundError:
        raise EdgespecError(
            "edgespec is not installed: `pip install` its folder, or call `make run`"
        ) from None
    found: dict[str, EntryPoint] = {}
    for point in (*ours, *entry_points(group=group)):
        found.setdefault(point.name, point)
    return found


def is_ours(point: EntryPoint) -> bool:
    """Whether edgespec itself offers it."""
    return point.module.partition(".")[0] == "edgespec"


def load(group: str, name: str) -> Any:  # noqa: ANN401 - whatever the group holds
    """The object offered under a name, loaded.

    Raises UsageError for a name that nobody offers or another package's that cannot be imported.
    """
    point = offered(group).get(name)
    if point is None:
        raise UsageError(
            f"{name}: nothing installed offers this ({group}: {', '.join(offered(group)) or 'none'})"
        )
    try:
        return point.load()
    except Exception as error:
        if is_ours(point):
            raise
        package = f" of {point.dist.name}" if point.dist else ""
        raise UsageError(
            f"{name}{package} ({point.value}) cannot be loaded: {error!r}; mend or uninstall it"
        ) from error


def part(name: str) -> Any:  # noqa: ANN401 - a function or a module of an app
    """The part of an app called APP.PART, loaded. Raises as `load`."""
    return load("edgespec.parts", name)
