"""The work of `edgespec cache import`: reads texts, tokenizes them, and stores the tokens in a history."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgespec.cli.console import err, message, out
from edgespec.cli.progress import WorkDisplay
from edgespec.drafting.history import History, HistoryUpdate
from edgespec.engine.model_choice import choose_models
from edgespec.errors import EdgespecError
from edgespec.llama.gguf_header import check_model_file, tokenizer_fingerprint
from edgespec.llama.weights import Model
from edgespec.models.hub import format_size
from edgespec.models.on_disk import is_inside
from edgespec.models.resolve import resolve

_LARGEST = 1_000_000  # bytes of a text file
_BATCH = 32_768  # tokens written at once: few beside a history, many beside the cost of searching it


def import_files(paths: Sequence[Path], target: str | None) -> None:
    """Store the texts of files and directories with the tokenizer of `target`, or of the default one.

    Raises EdgespecError if none of the files is a text, or nothing can be stored.
    """
    skipped: Counter[str] = Counter()
    found = [file for path in paths for file in (_walk(path, skipped) if path.is_dir() else [path])]
    name, _ = choose_models(target, None, "none")
    header = check_model_file(resolve(name, pull_missing=False))
    messages: list[str] = []
    history = History(tokenizer_fingerprint(header), on_message=messages.append)
    waiting: list[npt.NDArray[np.int32]] = []
    stored: Counter[str] = Counter()

    def store() -> None:
        """Store what waits; if interrupted, it can be called again: nothing is stored twice."""
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
    """Whether a link leads to something in the directory; one that leads nowhere is unreadable later."""
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
