"""`edgespec cache`: shows, deletes and extends the history of earlier prompts and answers."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from edgespec.cli.completion import complete_model
from edgespec.cli.console import err, out, print_table
from edgespec.errors import UsageError
from edgespec.models.sources import format_size
from edgespec.platform.files import expand_user

if TYPE_CHECKING:
    from edgespec.drafting.history import HistoryInfo

cache_app = typer.Typer(
    no_args_is_help=True,
    help="Show, clear and fill the history of prompts and answers that drafts are taken from.",
    epilog="Example: edgespec cache info",
)

_NOTE = (
    "Stored are prompts and answers as token ids, which whoever can read these files can turn into text; "
    "`edgespec run --no-cache` stores none, `edgespec cache clear` deletes all of it."
)


@cache_app.command("info", epilog="Example: edgespec cache info --json")
def info_command(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Show what is stored, and where: a file for each tokenizer."""
    from edgespec.drafting.history import MAX_TOKENS, find_histories, history_root

    root = history_root()
    found = [history.info() for history in find_histories(root)]
    if json:
        out.print_json(
            data={
                "directory": str(root),
                "max_tokens": MAX_TOKENS,
                "histories": [_described(info) for info in found],
            }
        )
        return
    if not found:
        out.print(f"nothing is stored in {root}", markup=False)
        return
    table = Table("tokenizer", "documents", "tokens", "size", "written", "path", box=None, pad_edge=False)
    for info in found:
        table.add_row(
            info.tokenizer,
            f"{info.documents:,}",
            f"{info.tokens:,}",
            format_size(info.bytes),
            "-" if info.modified is None else _time(info.modified),
            str(info.path),
        )
    table.columns[-1].overflow = "fold"  # a path is for copying
    print_table(table)
    for info in found:
        if info.problem:
            out.print(f"{info.path.name}: {info.problem}", markup=False)
        for path in info.set_aside:
            out.print(f"{path}: set aside, not used; `edgespec cache clear` deletes it", markup=False)
    out.print()
    out.print(_NOTE, markup=False)


def _described(info: HistoryInfo) -> dict[str, object]:
    return {
        "path": str(info.path),
        "tokenizer": info.tokenizer,
        "documents": info.documents,
        "tokens": info.tokens,
        "bytes": info.bytes,
        "modified": None if info.modified is None else _time(info.modified),
        "problem": info.problem or None,
        "set_aside": [str(path) for path in info.set_aside],
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")


@cache_app.command("clear", epilog="Example: edgespec cache clear --yes")
def clear_command(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete all histories, and the files set aside because they were damaged.

    A file written by a later edgespec stays, and is named.
    """
    from edgespec.drafting.history import find_histories, history_root

    histories = [(history, history.info()) for history in find_histories()]
    if not histories:
        out.print(f"nothing is stored in {history_root()}", markup=False)
        return
    if not yes:
        what = f"{sum(info.documents for _, info in histories):,} documents in {history_root()}"
        if sys.stdin is None or not sys.stdin.isatty():
            raise UsageError(f"to delete {what} without a terminal to ask in, give --yes")
        if not typer.confirm(f"Delete {what}?", err=True):
            err.print("nothing was deleted")
            return
    for history, info in histories:
        for path in history.clear():
            what = f"{info.documents:,} documents" if path == info.path else "not in use"
            out.print(f"{path}: deleted, {what}", markup=False)
        if info.newer:
            out.print(f"{info.path}: kept, a later edgespec wrote it; delete it by hand", markup=False)


@cache_app.command("import", epilog="Example: edgespec cache import ~/src/project NOTES.md")
def import_command(
    files: Annotated[list[Path], typer.Argument(metavar="FILES...", help="Text files, or directories.")],
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "-t",
            show_default="that of `edgespec run`",
            help="Model whose tokenizer reads them; models of its family share what is stored.",
            autocompletion=complete_model,
        ),
    ] = None,
) -> None:
    """Store texts, such as a codebase, so that drafts are taken from them.

    Of a directory all text files are taken, but nothing hidden. Files that are not UTF-8 or larger than
    1 MB are skipped. Ctrl-C keeps what was read by then.
    """
    from edgespec.cli.cache_import import import_files

    paths = [expand_user(file) for file in files]
    for path in paths:
        if not path.is_dir() and not path.is_file():
            raise UsageError(f"{path}: {'not a regular file' if path.exists() else 'no such file'}")
    import_files(paths, target)
