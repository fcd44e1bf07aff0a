"""`edgespec cache`: shows, deletes and extends the history of earlier prompts and answers."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from edgespec.cli.completion import complete_model
from edgespec.cli.console import err, message, out, print_table
from edgespec.cli.options import JsonOption
from edgespec.errors import UsageError
from edgespec.models.sources import format_size
from edgespec.platform.files import expand_user

if TYPE_CHECKING:
    from edgespec.drafting.history import HistoryInfo
    from edgespec.forge.dataset_store import StoredDataset

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
    json: JsonOption = False,
) -> None:
    """Show what is stored, and where: histories, a file for each tokenizer, and what drafts are made from."""
    from edgespec.drafting.history import MAX_TOKENS, find_histories, history_root
    from edgespec.forge.dataset_store import find_stored

    root = history_root()
    found, kept = [history.info() for history in find_histories(root)], find_stored()
    if json:
        out.print_json(
            data={
                "directory": str(root),
                "max_tokens": MAX_TOKENS,
                "histories": [_described(info) for info in found],
                "forge": [_described_kept(one) for one in kept],
            }
        )
        return
    if not found:
        out.print(f"nothing is stored in {root}")
    else:
        _print_histories(found)
    if kept:
        out.print()
        _print_kept(kept)
    if found or kept:
        out.print()
        out.print(_NOTE)


def _print_histories(found: list[HistoryInfo]) -> None:
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
            out.print(f"{info.path.name}: {info.problem}")
        for path in info.set_aside:
            out.print(f"{path}: set aside, not used; `edgespec cache clear` deletes it")


def _print_kept(kept: list[StoredDataset]) -> None:
    table = Table("drafts for", "texts", "of yours", "size", "checkpoints", "path", box=None, pad_edge=False)
    for one in kept:
        table.add_row(
            one.target or "?",
            f"{one.n_texts:,}",
            f"{one.n_own:,}",
            format_size(one.data_bytes),
            format_size(one.checkpoint_bytes) if one.checkpoint_bytes else "-",
            str(one.folder),
        )
    table.columns[-1].overflow = "fold"
    print_table(table)
    for path in [path for one in kept for path in one.damaged]:
        out.print(f"{path}: damaged, not used; `edgespec cache clear` deletes it")


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


def _described_kept(kept: StoredDataset) -> dict[str, object]:
    return {
        "path": str(kept.folder),
        "target": kept.target or None,
        "target_sha256": kept.sha256,
        "texts": kept.n_texts,
        "own_texts": kept.n_own,
        "data_bytes": kept.data_bytes,
        "checkpoint_bytes": kept.checkpoint_bytes,
        "damaged": [str(path) for path in kept.damaged],
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")


@cache_app.command("clear", epilog="Example: edgespec cache clear --yes")
def clear_command(
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    forge: Annotated[
        bool,
        typer.Option(
            "--forge", help="Delete also all other texts that drafts are made from, and checkpoints."
        ),
    ] = False,
) -> None:
    """Delete all histories, and what of your texts was kept to make drafts from.

    Files set aside because they were damaged are deleted too. A file written by a later edgespec stays, and
    is named; so are drafts that were trained on your texts.
    """
    from edgespec.drafting.history import find_histories, history_root
    from edgespec.forge.dataset import forge_root
    from edgespec.forge.dataset_store import find_stored

    histories = [(history, history.info()) for history in find_histories()]
    kept = [one for one in find_stored() if forge or one.n_own or one.damaged]
    if not histories and not kept:
        out.print(f"nothing is stored in {history_root()}")
        _name_drafts()
        return
    if not yes:
        n_documents = sum(info.documents for _, info in histories)
        parts = [f"{n_documents:,} documents in {history_root()}"] if histories else []
        if kept:
            n_texts = sum(one.n_texts if forge else one.n_own for one in kept)
            parts.append(f"{n_texts:,} texts {'and the checkpoints ' if forge else ''}in {forge_root()}")
        what = " and ".join(parts)
        if sys.stdin is None or not sys.stdin.isatty():
            raise UsageError(f"to delete {what} without a terminal to ask in, give --yes")
        if not typer.confirm(f"Delete {what}?", err=True):
            err.print("nothing was deleted")
            return
    for history, info in histories:
        for path in history.clear():
            what = f"{info.documents:,} documents" if path == info.path else "not in use"
            out.print(f"{path}: deleted, {what}")
        if info.newer:
            out.print(f"{info.path}: kept, a later edgespec wrote it; delete it by hand")
    for one in kept:
        _clear_kept(one, everything=forge)
    _name_drafts()


def _clear_kept(kept: StoredDataset, *, everything: bool) -> None:
    """Delete a target's data, or what of it came from the user, and say so."""
    from edgespec.forge.dataset_store import delete_dataset, delete_user_texts

    if everything:
        _, n_bytes = delete_dataset(kept.target or kept.sha256, kept.sha256)
        what = f"{kept.n_texts:,} texts and checkpoints, {format_size(n_bytes)}"
        out.print(f"{kept.folder}: deleted, {what}")
        return
    n = delete_user_texts(kept)
    out.print(f"{kept.folder}: deleted, {n:,} of {kept.n_texts:,} texts: those of yours")
    if kept.checkpoint_bytes and kept.n_own:
        out.print(
            f"{kept.folder}: its checkpoints may still know of these texts; `edgespec cache clear --forge` "
            "deletes them"
        )


def _name_drafts() -> None:
    """Say which drafts were trained on what is deleted now."""
    from edgespec.models.draft_records import draft_records

    for draft in draft_records(on_message=message):
        if draft.uses_own_texts:
            out.print(
                f"{draft.name}: kept, a draft trained on your texts, of which it may still know; "
                f"`edgespec draft remove {draft.name} --data` deletes it, and what is left of its training"
            )


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
        if not path.is_dir() and not path.is_file():
            raise UsageError(f"{path}: {'not a regular file' if path.exists() else 'no such file'}")
    import_files(paths, target)
