"""A dataset to train drafts on: one target's texts, and its hidden states along them, on disk.

    cache_root()/forge/0123456789abcdef/     0700   one target: the first digits of its file's SHA-256
        dataset.json                                which target, and the budget
        00001.npz 00002.npz ..                      shards, about 64 texts each, complete or missing
        00003.npz.set-aside                         a damaged shard, left for the user to look into
        .lock                                       held by the process that writes

Hidden states are mapped: a dataset may be larger than memory.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from os import SEEK_CUR
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.errors import EdgespecError, MessageFn, describe_os_error, silent
from edgespec.models.hub import check_disk
from edgespec.platform.files import TEMPORARY, locked, replacing, write_atomically
from edgespec.platform.kept import FORGE, DamagedFileError, parse_json

BUILT_IN, FROM_HISTORY, FROM_FILE, READ = "prompt:built-in", "prompt:history", "prompt:file", "read"
"""Sources of texts: the target's answer to such a prompt, or a text that the target only read."""

REJECTED = "rejected"
"""Source of a text of the user's that the target only read, in which drafts were rejected."""

HELD_OUT_SHARE = 0.05
"""Share of prompts that are never trained on: drafts are evaluated on them."""

TEXTS_PER_SHARD = 64

_FORM, _VERSION = "edgespec-forge-dataset", 1
_SHARD = "[0-9]" * 5 + ".npz"
SHARDS = _SHARD + "*"
"""Names of shards, those set aside too, as a pattern."""


@dataclass(frozen=True, slots=True)
class DatasetTarget:
    """The model that wrote a dataset."""

    sha256: str
    """64 hex digits, of its file."""
    name: str
    n_embd: int

    @property
    def folder(self) -> Path:
        """The default folder of its dataset."""
        return FORGE.path() / self.sha256[:16]


@dataclass(frozen=True, slots=True, eq=False)
class TrainingText:
    """A prompt and what follows it."""

    tokens: npt.NDArray[np.int32]
    n_prompt: int
    """Tokens of the prompt; a draft learns those after it."""
    first: int
    """The first token with a stored hidden state."""
    features: npt.NDArray[np.float16]
    """Hidden states, after the last norm, of tokens `first` .. len(tokens) - 2: shape (n, n_embd)."""
    temperature: float
    """Sampling temperature; NaN: the target only read the text."""
    source: str
    key: int
    """`key_of` its prompt."""
    weights: npt.NDArray[np.float16] | None = None
    """Weight of each token in training, by its index; None: 1."""

    @property
    def held_out(self) -> bool:
        """Whether it is for evaluation only."""
        return is_held_out(self.key)


def key_of(beginning: bytes, rest: bytes = b"") -> int:
    """Return the 64-bit number of a prompt that is `beginning` and `rest`.

    Prompts that begin alike, such as a question and the conversation after it, are all held out or none.
    """
    digest = hashlib.sha256(beginning)
    high = digest.digest()[:4]
    digest.update(b"\0" + rest)
    return int.from_bytes(high + digest.digest()[:4], "big")


def is_held_out(key: int) -> bool:
    """Whether the texts of a prompt are never trained on."""
    return (key >> 32) < HELD_OUT_SHARE * (1 << 32)


class Dataset:
    """The texts of one target. Any number of processes may read while one writes."""

    def __init__(
        self, target: DatasetTarget, folder: Path | None = None, *, on_message: MessageFn = silent
    ) -> None:
        """Open the dataset in `folder`, by default the target's; nothing is written yet.

        Raises EdgespecError for a folder of another target, and one that cannot be read.
        """
        self.target = target
        self.folder = target.folder if folder is None else folder
        self._on_message = on_message
        self._checked: set[Path] = set()
        self._waiting: list[TrainingText] = []
        self._check_target()

    def _check_target(self) -> None:
        file = self.folder / "dataset.json"
        try:
            stored = parse_json(file.read_bytes(), form=_FORM, version=_VERSION)
        except FileNotFoundError:
            return
        except DamagedFileError as error:
            raise EdgespecError(f"{file}: {error}; remove {self.folder} to begin anew") from None
        except OSError as error:
            raise EdgespecError(f"cannot read the data: {describe_os_error(error)}") from error
        sha256, mine = str(stored.get("sha256")), self.target.sha256
        if sha256 != mine:
            raise EdgespecError(
                f"{self.folder}: the data of another target, {stored.get('name')} (SHA-256 {sha256[:16]}), "
                f"not of {self.target.name} (SHA-256 {mine[:16]}); name another folder"
            )

    # ---- reading ----

    def texts(self, *, held_out: bool | None = None) -> Iterator[TrainingText]:
        """Yield the texts in the order they were written; `held_out` selects those that are, or are not.

        Hidden states are views on mapped files. A damaged shard is set aside, with a message. Raises
        EdgespecError if the disk fails.
        """
        for path in self.shards():
            for text in self._open(path):
                if held_out is None or text.held_out == held_out:
                    yield text

    def shards(self) -> list[Path]:
        """Return the files of texts, in the order in which they were written."""
        return sorted(self.folder.glob(_SHARD))

    def n_answer_tokens(self) -> int:
        """Return the number of tokens after the prompts."""
        return sum(len(text.tokens) - text.n_prompt for text in self.texts())

    def n_bytes(self) -> int:
        """Return the size of all shards, those set aside included."""
        return sum(path.stat().st_size for path in self.folder.glob(SHARDS))

    def _open(self, path: Path) -> list[TrainingText]:
        """Return the texts of a shard; none if it is damaged, or was set aside meanwhile."""
        try:
            texts = read_texts(path, checked=path in self._checked)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise EdgespecError(f"cannot read the data: {describe_os_error(error)}") from error
        except DamagedFileError as error:
            aside = path.with_name(f"{path.name}.set-aside")
            path.replace(aside)
            self._on_message(f"{path}: damaged ({error}); set aside as {aside.name}, the rest is used")
            return []
        self._checked.add(path)
        return texts

    # ---- writing ----

    @contextmanager
    def writer(self, budget: int) -> Iterator[Dataset]:
        """Lock the folder, to write texts up to `budget` bytes in all until the block is left.

        Raises EdgespecError if another process writes there, if the disk has no room for the budget, and
        if the disk fails.
        """
        busy = f"another process writes the data of {self.target.name} ({self.folder}); wait, or end it"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with locked(self.folder / ".lock", busy):
                self._check_target()
                for leftover in self.folder.iterdir():  # of a process that was killed
                    if re.fullmatch(TEMPORARY, leftover.name) and leftover.is_file():
                        leftover.unlink()
                needed = max(0, budget - self.n_bytes())
                cure = "free some, or choose a smaller budget"
                check_disk(self.folder, needed, f"the data of {self.target.name}", cure)
                document = {"format": _FORM, "version": _VERSION, **asdict(self.target), "budget": budget}
                write_atomically(self.folder / "dataset.json", json.dumps(document, indent=2) + "\n")
                self._budget, self._on_disk = budget, self.n_bytes()
                self._last = max((int(path.name[:5]) for path in self.folder.glob(SHARDS)), default=0)
                try:
                    yield self
                finally:
                    self.flush()
        except OSError as error:
            raise EdgespecError(f"cannot write the data: {describe_os_error(error)}") from error

    def has_room(self, n_bytes: int) -> bool:
        """Whether the budget has room for `n_bytes` more, in addition to the stored and waiting texts."""
        return self._on_disk + sum(map(_bytes_of, self._waiting)) + n_bytes <= self._budget

    def append(self, text: TrainingText) -> bool:
        """Add a text and return True, unless the budget has no room for it.

        Texts are written in whole shards, or at the next `flush`. Raises OSError.
        """
        if not self.has_room(_bytes_of(text)):
            return False
        self._waiting.append(text)
        if len(self._waiting) >= TEXTS_PER_SHARD:
            self.flush()
        return True

    def make_room(self, n_bytes: int, kinds: Sequence[Callable[[TrainingText], bool]]) -> int:
        """Delete texts until there is room for `n_bytes` more, or none is left; return how many are gone.

        They are deleted in the order of `kinds`, oldest first, in whole shards. Raises OSError.
        """
        n_gone = 0
        for is_of_kind in kinds:
            for path in self.shards():
                if self.has_room(n_bytes):
                    return n_gone
                n_gone += delete_texts(path, self._open(path), is_of_kind)
                self._on_disk = self.n_bytes()
        return n_gone

    def flush(self) -> None:
        """Write the waiting texts as a shard. Raises OSError; they then keep waiting."""
        if not self._waiting:
            return
        path = self.folder / f"{self._last + 1:05d}.npz"
        _write_texts(path, self._waiting)
        self._last += 1
        self._on_disk += path.stat().st_size
        self._waiting = []


def delete_texts(shard: Path, texts: Sequence[TrainingText], chosen: Callable[[TrainingText], bool]) -> int:
    """Delete the `chosen` of the texts of a shard; return how many they are.

    An empty shard is deleted. Raises OSError; the shard is then complete, with or without these texts.
    """
    rest = [text for text in texts if not chosen(text)]
    if texts and not rest:
        shard.unlink()
    elif len(rest) < len(texts):
        _write_texts(shard, rest)
    return len(texts) - len(rest)


def _bytes_of(text: TrainingText) -> int:
    weights = 0 if text.weights is None else text.weights.nbytes + 256
    return text.features.nbytes + text.tokens.nbytes + weights + 128


# ---- shards ----
#
#     tokens       int32    [sum of length]     all texts, one after another
#     length       int32    [n_texts]           tokens of each, prompt and answer
#     n_prompt     int32    [n_texts]           tokens of its prompt
#     first        int32    [n_texts]           the first token with a stored hidden state
#     features     float16  [sum of (length - 1 - first), n_embd]
#     temperature  float32  [n_texts]
#     source       str      [n_texts]
#     key          uint64   [n_texts]
#     weight       float16  [sum of length]     of each token in training; missing: all 1
#
# The last token of a text was never read, so it has no hidden state.

_COLUMNS: dict[str, Any] = {
    "n_prompt": np.int32,
    "first": np.int32,
    "temperature": np.float32,
    "source": None,
    "key": np.uint64,
}
"""Arrays with a number for each text, and their types."""

_FEATURES = "features"
_BROKEN = zipfile.BadZipFile, ValueError, EOFError, KeyError, RuntimeError, struct.error, zlib.error
_LENGTHS_AT = 26  # in what a zip has before each file: lengths of its name and extra field


def _write_texts(path: Path, texts: Sequence[TrainingText]) -> None:
    arrays: dict[str, Any] = {
        "tokens": np.concatenate([text.tokens for text in texts]).astype(np.int32),
        "length": np.array([len(text.tokens) for text in texts], np.int32),
        _FEATURES: np.concatenate([text.features for text in texts]).astype(np.float16),
        **{name: np.array([getattr(text, name) for text in texts], kind) for name, kind in _COLUMNS.items()},
    }
    if any(text.weights is not None for text in texts):
        weights = [np.ones(len(t.tokens)) if t.weights is None else t.weights for t in texts]
        arrays["weight"] = np.concatenate(weights).astype(np.float16)
    with replacing(path) as file:
        np.savez(file, **arrays)


def read_texts(path: Path, *, checked: bool) -> list[TrainingText]:
    """Return the texts of a shard, their hidden states as views on the file.

    `checked`: skip the checksums, verified before. Raises OSError, and DamagedFileError for an invalid shard.
    """
    shard = read_npz(path, mapped=_FEATURES, checked=checked)
    if missing := sorted({"tokens", "length", *_COLUMNS} - shard.keys()):
        raise DamagedFileError(f"it has no {missing[0]}")
    tokens, weights = shard["tokens"].astype(np.int32), shard.get("weight")
    columns, texts = [shard[name].tolist() for name in ("length", *_COLUMNS)], []
    token = row = 0
    for length, *numbers in zip(*columns, strict=True):
        facts = dict(zip(_COLUMNS, numbers, strict=True))
        here, n = slice(token, token + length), length - 1 - facts["first"]
        texts.append(
            TrainingText(
                tokens=tokens[here],
                features=shard[_FEATURES][row : row + n],
                weights=None if weights is None else weights[here],
                **facts,
            )
        )
        token, row = token + length, row + n
    return texts


def read_npz(path: Path, *, mapped: str = "", checked: bool = False) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of an .npz file, the one called `mapped` as a view on the file.

    `checked`: skip the checksums, which were verified before. Raises OSError, and DamagedFileError.
    """
    try:
        with zipfile.ZipFile(path) as file:
            if not checked and (wrong := file.testzip()):
                raise DamagedFileError(f"{wrong}: wrong checksum")
            views = {mapped: _mapped(path, file.getinfo(f"{mapped}.npy"))} if mapped else {}
        with np.load(path) as stored:
            return {name: stored[name] for name in stored.files if name != mapped} | views
    except (OSError, *_BROKEN) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: a place before the file
            raise
        raise DamagedFileError(str(error) or "damaged") from None


def _mapped(path: Path, member: zipfile.ZipInfo) -> npt.NDArray[Any]:
    """Return the array of an uncompressed .npy in the zip `path` as a view on the file."""
    if member.compress_type != zipfile.ZIP_STORED:
        raise DamagedFileError(f"{member.filename}: compressed")
    with path.open("rb") as file:
        file.seek(member.header_offset + _LENGTHS_AT)
        n_name, n_extra = struct.unpack("<HH", file.read(4))
        file.seek(n_name + n_extra, SEEK_CUR)
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        mapped = np.memmap(file, dtype, "r", file.tell(), shape)
    return mapped.view(np.ndarray)
