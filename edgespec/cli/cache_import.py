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
from edgespec.models.found.files import is_inside
from edgespec.models.resolve import resolve
from edgespec.models.sources import format_size

_LARGEST = 1_000_000  # bytes of a text file
_BATCH = 32_768  # tokens written at once: few beside a history, many beside the cost of searching it


def import_files(paths: Sequence[Path], target: str | None) -> None:
    """Store the texts of files and directories with the tokenizer of `target`, or of the default one.

    Raises EdgespecError if none of the files is a text.
    """
    skipped: Counter[str] = Counter()
    found = [file for path in paths for file in (_walk(path, skipped) if path.is_dir() else [path])]
    name, _ = choose_models(target, None, "none")
    header = check_model_file(resolve(name, pull_missing=False))
    importer = _Import(tokenizer_fingerprint(header), skipped)
    with Model(header.path, vocab_only=True, header=header) as model, WorkDisplay() as display:
        try:
            for number, file in enumerate(found):
                if err.is_terminal:
                    display.show("importing", number, len(found))
                data = _read(file, skipped)
                if data is not None:
                    tokens = model.tokenize(data.decode(), add_special=False, parse_special=False)
                    importer.add(np.asarray(tokens, np.int32))
        finally:  # also on Ctrl-C: the files read so far are stored
            try:
                importer.store()
            finally:
                importer.report(len(found))
    if importer.is_empty:
        raise EdgespecError("nothing was imported: no text file was found")


class _Import:
    """Stores tokens of texts in a history, many texts at a time."""

    def __init__(self, fingerprint: str, skipped: Counter[str]) -> None:
        self._messages: list[str] = []
        self._history = History(fingerprint, on_message=self._messages.append)
        self._skipped = skipped
        self._waiting: list[npt.NDArray[np.int32]] = []
        self._stored = HistoryUpdate(0, 0, 0)

    @property
    def is_empty(self) -> bool:
        return self._stored.documents + self._stored.duplicates == 0

    def add(self, tokens: npt.NDArray[np.int32]) -> None:
        self._waiting.append(tokens)
        if sum(map(len, self._waiting)) >= _BATCH:
            self.store()

    def store(self) -> None:
        """Store the batch. If interrupted, call it again: nothing is stored twice."""
        if not self._waiting:
            return
        stored = self._history.extend(self._waiting)
        self._waiting = []
        failure = self._messages.pop() if stored is None else ""
        for line in self._messages:
            message(line)
        self._messages.clear()
        if stored is None:
            raise EdgespecError(failure)
        before = self._stored
        self._stored = HistoryUpdate(
            before.documents + stored.documents,
            before.tokens + stored.tokens,
            before.duplicates + stored.duplicates,
        )

    def report(self, n_found: int) -> None:
        """Print how many files were imported, and why others were not."""
        stored = self._stored
        out.print(
            f"imported {stored.documents:,} of {n_found:,} files, {stored.tokens:,} tokens: "
            f"{self._history.path}"
        )
        reasons = [f"{n:,} {reason}" for reason, n in sorted(self._skipped.items()) if n]
        if stored.duplicates:
            reasons.append(f"{stored.duplicates:,} stored already")
        if reasons:
            err.print(f"skipped: {', '.join(reasons)}")
        if stored.tokens + stored.documents > self._history.max_tokens:
            err.print(f"the history keeps {self._history.max_tokens:,} tokens: of these files, the last ones")


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
    try:
        data, reason = _read_text(file)
    except OSError:
        data, reason = b"", "unreadable"
    except UnicodeDecodeError:
        data, reason = b"", "not text"
    if reason:
        skipped[reason] += 1
        return None
    return data


def _read_text(file: Path) -> tuple[bytes, str]:
    if not stat.S_ISREG(file.stat().st_mode):
        return b"", "not regular files"  # reading a pipe would wait
    with file.open("rb") as opened:
        data = opened.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        return b"", f"over {format_size(_LARGEST)}"
    if not data.strip():
        return b"", "empty"
    return data, "not text" if "\0" in data.decode() else ""
