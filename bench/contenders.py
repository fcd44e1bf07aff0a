"""Servers that scripts compare: edgespec in several variants, and peers given as NAME=COMMAND."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from edgespec.engine.model_choice import choose_models
from edgespec.errors import UsageError
from edgespec.models.resolve import resolve

OWN = Path(__file__).resolve().parents[1]
"""This checkout."""


@dataclass(frozen=True)
class Contender:
    """A server: how it is started."""

    name: str
    command: tuple[str, ...]
    directory: Path | None = None
    """Where it runs: a checkout of edgespec; None for a peer."""
    ctx: int = 0
    """Tokens of a peer's context for each client."""

    @property
    def is_edgespec(self) -> bool:
        """Whether it must write the same texts with any number of clients."""
        return self.directory is not None

    def command_for(self, n_clients: int) -> list[str]:
        """Return the command that serves so many clients at once."""
        slots = [] if self.is_edgespec else ["-np", str(n_clients), "-c", str(n_clients * self.ctx)]
        return [*self.command, *slots]


def edgespec_command(
    args: argparse.Namespace, drafter: str, python: Path | str = sys.executable
) -> tuple[str, ...]:
    """Return what serves the models of `args` with this drafter, in whatever directory."""
    command = [str(python), "-m", "edgespec", "serve", "--drafter", drafter, "--threads", str(args.threads)]
    command += ["--target", _anywhere(args.target)] if args.target else []
    command += ["--draft", _anywhere(args.draft)] if args.draft and drafter not in ("none", "suffix") else []
    return tuple(command)


def _anywhere(name_or_path: str) -> str:
    path = Path(name_or_path)
    return str(path.absolute()) if path.is_file() else name_or_path


def add_peers(parse: argparse.ArgumentParser) -> None:
    """Add the option that `peers` reads."""
    parse.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND", help="may be repeated")


def peers(args: argparse.Namespace, ctx: int) -> list[Contender]:
    """Return the servers of llama.cpp's kind that were asked for, on the same target. Raises UsageError."""
    found = []
    for text in args.peer:
        name, _, program = text.partition("=")
        if not name or not program:
            raise UsageError("must be NAME=COMMAND", field="peer", value=text)
        path, *options = shlex.split(program)
        model = resolve(choose_models(args.target, None, "none")[0]).absolute()
        command = [_anywhere(path), *options, "-m", str(model), "-t", str(args.threads)]
        found.append(Contender(name, (*command, "--host", "127.0.0.1"), ctx=ctx))
    return found


def distinct(contenders: list[Contender]) -> list[Contender]:
    """Return the contenders. Raises UsageError if there is none, or two have one name."""
    if len({contender.name for contender in contenders}) < len(contenders) or not contenders:
        raise UsageError("name at least one contender, and none twice")
    return contenders
