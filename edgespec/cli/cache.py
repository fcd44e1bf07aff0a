"""`edgespec cache`: shows and deletes what is kept, and extends the history of prompts and answers."""

from __future__ import annotations

import os
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.table import Table

from edgespec.cli.completion import complete_model
from edgespec.cli.console import err, message, out, print_table
from edgespec.cli.options import JsonOption
from edgespec.errors import EdgespecError, UsageError, describe_os_error
from edgespec.models.hub import format_size
from edgespec.models.on_disk import is_inside
from edgespec.models.registry import nearest
from edgespec.models.store import Store
from edgespec.platform.files import cache_root, check_file, expand_user
from edgespec.platform.kept import EVERYTHING, FORGE, HISTORY, MODELS, Kept
from edgespec.platform.plugins import part

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from edgespec.drafting.history import History, HistoryInfo

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
    """Run all actions, even after one fails, for example on a file in use; return the first error."""
    failed = None
    for action in actions:
        try:
            action()
        except EdgespecError as error:
            failed = failed or error
    return failed


def _rows(names: Sequence[str]) -> list[Kept]:
    """Return the rows with these names; without names, those with the user's texts. Raises UsageError."""
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
    """How a row of `cache info` is deleted: the question to ask, and the function that does it."""

    what: str
    """The files in words, for the question."""
    run: Callable[[], None]


def _deletion(row: Kept, *, whole: bool) -> Deletion | None:
    """Return how to delete a row, all of it if `whole`, else the user's texts; None: nothing to delete."""
    if row is FORGE:
        found: Deletion | None = part("forge.cache").deletion(whole=whole)
        return found
    if not (size := row.bytes()):
        return None
    delete = _delete_models if row is MODELS else delete_files
    return Deletion(f"{row.name} ({format_size(size)}) in {row.path('*')}", lambda: delete(row))


def delete_files(row: Kept) -> None:
    """Delete the files of a row, and print that. Raises EdgespecError for one that cannot be deleted."""
    n_bytes = row.bytes()
    try:
        for file in list(row.files()):
            file.unlink(missing_ok=True)
    except OSError as error:
        raise EdgespecError(f"not all could be deleted: {describe_os_error(error)}") from None
    out.print(f"{row.path('*')}: deleted, {format_size(n_bytes)}")


def _delete_models(row: Kept) -> None:
    """Delete pulled models; list the other files in the models directory, which are the user's."""
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
    paths = [expand_user(file) for file in files]
    for path in paths:
        if not path.is_dir():
            check_file(path)
    import_files(paths, target)


# ---- cache import: texts become tokens of a history ----

_LARGEST = 1_000_000  # bytes of a text file
_BATCH = 32_768  # tokens written at once: few beside a history, many beside the cost of searching it


def import_files(paths: Sequence[Path], target: str | None) -> None:
    """Store the texts of files and directories with the tokenizer of `target`, or of the default one.

    Raises EdgespecError if none of the files is a text, or nothing can be stored.
    """
    import numpy as np

    from edgespec.cli.progress import WorkDisplay
    from edgespec.drafting.history import History, HistoryUpdate
    from edgespec.engine.model_choice import choose_models
    from edgespec.llama.gguf_header import check_model_file, tokenizer_fingerprint
    from edgespec.llama.weights import Model
    from edgespec.models.resolve import resolve

    skipped: Counter[str] = Counter()
    found = [file for path in paths for file in (_walk(path, skipped) if path.is_dir() else [path])]
    name, _ = choose_models(target, None, "none")
    header = check_model_file(resolve(name, pull_missing=False))
    messages: list[str] = []
    history = History(tokenizer_fingerprint(header), on_message=messages.append)
    waiting: list[npt.NDArray[np.int32]] = []
    stored: Counter[str] = Counter()

    def store() -> None:
        """Store the waiting texts; after an interruption it can be called again: nothing is stored twice."""
        new = history.extend(waiting) if waiting else HistoryUpdate(0, 0, 0)
        waiting.clear()
        if new is None:
            raise EdgespecError(messages[-1])
        stored.update(new._asdict())
        for line in messages:
            message(line)
        messages.clear()

    with Model(header.path, vocab_only=True, header=header) as model, WorkDisplay() as display:
        try:
            for number, file in enumerate(found):
                if err.is_terminal:
                    display.show("importing", number, len(found))
                if (data := _read(file, skipped)) is not None:
                    tokens = model.tokenize(data.decode(), add_special=False, parse_special=False)
                    waiting.append(np.asarray(tokens, np.int32))
                if sum(map(len, waiting)) >= _BATCH:
                    store()
        finally:  # also on Ctrl-C: the files read so far are stored
            try:
                store()
            finally:
                _report(len(found), stored, skipped, history)
    if not stored.total():
        raise EdgespecError("nothing was imported: no text file was found")


def _report(n_found: int, stored: Counter[str], skipped: Counter[str], history: History) -> None:
    """Print how many files were imported, and why others were not."""
    n, n_tokens = stored["documents"], stored["tokens"]
    out.print(f"imported {n:,} of {n_found:,} files, {n_tokens:,} tokens: {history.path}")
    reasons = [f"{n:,} {reason}" for reason, n in sorted(skipped.items()) if n]
    if stored["duplicates"]:
        reasons.append(f"{stored['duplicates']:,} stored already")
    if reasons:
        err.print(f"skipped: {', '.join(reasons)}")
    if n_tokens + n > history.max_tokens:
        err.print(f"the history keeps {history.max_tokens:,} tokens: of these files, the last ones")


def _walk(directory: Path, skipped: Counter[str]) -> Iterator[Path]:
    """Yield the files below a directory in order, hidden ones left out."""

    def unreadable(_: OSError) -> None:
        skipped["unreadable"] += 1

    for where, directories, names in os.walk(directory, onerror=unreadable):
        skipped["hidden"] += sum(name.startswith(".") for name in (*directories, *names))
        paths = [Path(where, name) for name in (*directories, *names) if not name.startswith(".")]
        outside = {path for path in paths if path.is_symlink() and not _ends_inside(path, directory)}
        skipped["links that lead out"] += len(outside)
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        yield from (path for path in sorted(paths) if path.name in names and path not in outside)


def _ends_inside(link: Path, directory: Path) -> bool:
    """Whether a link leads into the directory; also True for a broken link, which `_read` reports."""
    try:
        return is_inside(link, directory)
    except OSError:
        return True


def _read(file: Path, skipped: Counter[str]) -> bytes | None:
    """Return the bytes of a text file; for one that is not imported return None and count the reason."""
    data, reason = b"", ""
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            reason = "not regular files"  # reading a pipe would wait
        else:
            with file.open("rb") as opened:
                data = opened.read(_LARGEST + 1)
            if len(data) > _LARGEST:
                reason = f"over {format_size(_LARGEST)}"
            elif not data.strip():
                reason = "empty"
            elif "\0" in data.decode():
                reason = "not text"
    except OSError:
        reason = "unreadable"
    except UnicodeDecodeError:
        reason = "not text"
    skipped.update([reason] if reason else [])
    return None if reason else data
