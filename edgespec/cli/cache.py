"""`edgespec cache`: shows and deletes what is kept, and extends the history of prompts and answers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.table import Table

from edgespec.cli.completion import complete_model
from edgespec.cli.console import err, message, out, print_table
from edgespec.cli.options import JsonOption
from edgespec.errors import EdgespecError, UsageError, describe_os_error
from edgespec.models.hub import format_size
from edgespec.models.registry import nearest
from edgespec.models.store import Store
from edgespec.platform.files import cache_root, check_file, expand_user
from edgespec.platform.kept import EVERYTHING, FORGE, HISTORY, MODELS, Kept
from edgespec.platform.plugins import part

if TYPE_CHECKING:
    from edgespec.drafting.history import HistoryInfo

cache_app = typer.Typer(
    rich_help_panel="Models and drafts",
    no_args_is_help=True,
    help="Show and delete what is kept; add texts that drafts are taken from.",
    epilog="Example: edgespec cache info",
)

_NOTE = (
    "Texts are stored as token ids, which whoever can read these files can turn into text; "
    "`edgespec run --no-cache` stores none, `edgespec cache clear` deletes all of yours."
)


@cache_app.command("info", epilog="Example: edgespec cache info --json")
def info_command(
    json: JsonOption = False,
) -> None:
    """Show all that is kept, where it is, and its size; then histories, and what drafts are made from."""
    from edgespec.drafting.history import MAX_TOKENS, find_histories

    forge = part("forge.cache")
    stored = forge.find_stored()
    try:
        histories = find_histories()
    except EdgespecError as error:
        message(str(error))
        histories = []
    if json:
        rows = [_described_row(row) for row in EVERYTHING if row.places]
        facts = {"kept": rows, "directory": str(HISTORY.path()), "max_tokens": MAX_TOKENS}
        sizes = [{"tokenizer": one.tokenizer, **one._asdict()} for one in histories]
        out.print_json(data={**facts, "histories": sizes, "forge": [forge.described(one) for one in stored]})
        return
    there = [(row, size) for row in EVERYTHING if (size := row.bytes())]
    if not there:
        out.print(f"nothing is kept in {cache_root()}")
    for row, size in there:
        personal = ", yours" if row.personal else ""
        out.print(f"{row.name:12} {format_size(size):>9}{personal}: {row.holds}")
        out.print(f"{'':12} {row.path('*')}")
    if histories:
        out.print()
        _print_histories(histories)
    if stored:
        out.print()
        forge.print_stored(stored)
    if histories or stored:
        out.print()
        out.print(_NOTE)


def _described_row(row: Kept) -> dict[str, object]:
    facts = {name: getattr(row, name) for name in ("name", "holds", "personal", "deleted_by")}
    return {**facts, "path": str(row.path("*")), "files": len([*row.files()]), "bytes": row.bytes()}


def _print_histories(found: Sequence[HistoryInfo]) -> None:
    table = Table("tokenizer", "documents", "tokens", box=None, pad_edge=False)
    for one in found:
        table.add_row(one.tokenizer, f"{one.documents:,}", f"{one.tokens:,}")
    print_table(table)


@cache_app.command(
    "clear", epilog="Examples: `edgespec cache clear` · `edgespec cache clear packed-weights --yes`"
)
def clear_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WHAT",
            help="Names of `edgespec cache info`; all: everything but models.",
            show_default="your texts: history, rejected, chat-lines, chats, states, and yours in forge",
            autocompletion=lambda: [row.name for row in EVERYTHING if row.deleted != "never"],
        ),
    ] = None,
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    forge: Annotated[
        bool, typer.Option("--forge", help="Delete also all other texts that drafts are made from (forge).")
    ] = False,
) -> None:
    """Delete what is kept: your texts, or WHAT you name. Models are deleted only if named.

    Files set aside because they were damaged are deleted too. Drafts that were trained on your texts are
    named.
    """
    rows = _rows(names or [])
    whole = bool(names) or forge
    deletions = [found for row in rows if (found := _deletion(row, whole=whole))]
    if not deletions:
        out.print(f"nothing is kept of {', '.join(row.name for row in rows)}")
    elif not yes and not _agreed(" and ".join(deletion.what for deletion in deletions)):
        return
    failed = first_failure(deletion.run for deletion in deletions)
    if FORGE in rows:
        part("forge.cache").name_drafts()
    left = [f"{row.name} ({format_size(size)})" for row in EVERYTHING if (size := row.bytes())]
    if left and not names:
        message(f"still here: {', '.join(left)}; `edgespec cache clear NAME` deletes more")
    if failed:
        raise failed


def first_failure(actions: Iterable[Callable[[], None]]) -> EdgespecError | None:
    """Run all actions, also after one that fails, such as on what is in use; return the first error."""
    failed = None
    for action in actions:
        try:
            action()
        except EdgespecError as error:
            failed = failed or error
    return failed


def _rows(names: Sequence[str]) -> list[Kept]:
    """Return the rows of the names; those with the user's texts for none. Raises UsageError."""
    deletable = [row for row in EVERYTHING if row.deleted != "never"]
    choices, known = [*(row.name for row in deletable), "all"], {row.name: row for row in EVERYTHING}
    for name in names:
        if name not in choices and name in known:
            raise UsageError(f"{name}: not deleted by `edgespec cache clear`, but: {known[name].cure}")
        if name not in choices:
            hint = nearest(name, choices) or f": {', '.join(choices)}"
            raise UsageError(f"nothing is called {name!r}{hint}")
    if not names:
        return [row for row in deletable if row.personal]
    return [row for row in deletable if row.name in names or ("all" in names and row.deleted != "named")]


def _agreed(what: str) -> bool:
    """Whether the user agrees to delete `what`. Raises UsageError without a terminal to ask in."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(f"to delete {what} without a terminal to ask in, give --yes")
    agreed = typer.confirm(f"Delete {what}?", err=True)
    if not agreed:
        err.print("nothing was deleted")
    return agreed


class Deletion(NamedTuple):
    """How a row of `cache list` is deleted: the question to ask, and the function that does it."""

    what: str
    """The files in words, for the question."""
    run: Callable[[], None]


def _deletion(row: Kept, *, whole: bool) -> Deletion | None:
    """Return how a row is deleted, all of it if `whole`, else the user's texts; None: nothing is there."""
    if row is FORGE:
        found: Deletion | None = part("forge.cache").deletion(whole=whole)
        return found
    if not (size := row.bytes()):
        return None
    delete = _delete_models if row is MODELS else delete_files
    return Deletion(f"{row.name} ({format_size(size)}) in {row.path('*')}", lambda: delete(row))


def delete_files(row: Kept) -> None:
    """Delete the files of a row, and say so. Raises EdgespecError for one that cannot be deleted."""
    n_bytes = row.bytes()
    try:
        for file in list(row.files()):
            file.unlink(missing_ok=True)
    except OSError as error:
        raise EdgespecError(f"not all could be deleted: {describe_os_error(error)}") from None
    out.print(f"{row.path('*')}: deleted, {format_size(n_bytes)}")


def _delete_models(row: Kept) -> None:
    """Delete what was pulled; name the other files in the models directory, which are the user's."""
    store = Store.default()
    for name in store.pulled():
        n_bytes = store.remove_pulled(name)
        out.print(f"{name}: deleted, {format_size(n_bytes)}")
    if others := [file for file in row.files() if file.suffix == ".gguf"]:
        out.print(f"kept, as they were not pulled: {', '.join(map(str, others))}")


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

    Of a directory all text files are taken, but nothing hidden, and no link that leads out of it. Files
    that are not UTF-8 or larger than 1 MB are skipped. Ctrl-C keeps what was read by then.
    """
    from edgespec.cli.cache_import import import_files

    paths = [expand_user(file) for file in files]
    for path in paths:
        if not path.is_dir():
            check_file(path)
    import_files(paths, target)
