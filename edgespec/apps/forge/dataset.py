"""A dataset to train drafts on: one target's texts, and its hidden states along them, on disk.

    cache_root()/forge/0123456789abcdef/     0700   one target: the first digits of its file's SHA-256
        dataset.json                                which target, and the budget
        00001.npz 00002.npz ..                      shards, about 64 texts each, complete or missing
        00003.npz.set-aside                         a damaged shard, left for the user to look into
        .lock                                       held by the process that writes

Hidden states are mapped: a dataset may be larger than memory.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from os import SEEK_CUR
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgespec.errors import EdgespecError, describe_os_error
from edgespec.models.sources import check_disk, format_size
from edgespec.platform.files import TEMPORARY, replacing, write_atomically
from edgespec.platform.kept import FORGE
from edgespec.platform.locks import locked
from edgespec.platform.messages import MessageFn, silent
from edgespec.platform.state_file import DamagedFileError, parse_json

if TYPE_CHECKING:
    from edgespec.llama.gguf_header import GGUFHeader

BUILT_IN, FROM_HISTORY, FROM_FILE, READ = "prompt:built-in", "prompt:history", "prompt:file", "read"
"""Sources of texts: the target's answer to such a prompt, or a text that the target only read."""

REJECTED = "rejected"
"""Source of a text of the user's that the target only read, in which drafts were rejected."""

HELD_OUT_SHARE = 0.05
"""Share of prompts that are never trained on: drafts are evaluated on them."""

TEXTS_PER_SHARD = 64

_FORM, _VERSION = "edgespec-forge-dataset", 1
SHARD_NAME = re.compile(r"(?P<number>\d{5})\.npz(?P<aside>\.set-aside)?")


@dataclass(frozen=True, slots=True)
class DatasetTarget:
    """The model that wrote a dataset."""

    sha256: str
    """64 hex digits, of its file."""
    name: str
    n_embd: int
    n_vocab: int

    @classmethod
    def of(cls, header: GGUFHeader, name: str, sha256: str) -> DatasetTarget:
        """Return the target whose file has this header and hash."""
        return cls(sha256, name, header.n_embd, header.n_vocab)

    @property
    def folder(self) -> Path:
        """The default folder of its dataset."""
        return forge_root() / self.sha256[:16]


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


def forge_root() -> Path:
    """Return the directory of all datasets. Raises UsageError where no home directory is known."""
    return FORGE.path()


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
        EdgespecError where the disk fails.
        """
        for path in self.shards():
            shard = self._open(path)
            for text in _texts(shard) if shard else ():
                if held_out is None or text.held_out == held_out:
                    yield text

    def shards(self) -> list[Path]:
        """Return the files of texts, in the order in which they were written."""
        return [self.folder / name for name, aside in self._names() if not aside]

    def n_answer_tokens(self) -> int:
        """Return the number of tokens after the prompts."""
        return sum(len(text.tokens) - text.n_prompt for text in self.texts())

    def n_bytes(self) -> int:
        """Return the size of all shards, those set aside included."""
        return sum((self.folder / name).stat().st_size for name, _ in self._names())

    def _names(self) -> list[tuple[str, bool]]:
        names = (path.name for path in self.folder.iterdir()) if self.folder.is_dir() else ()
        found = [match for name in names if (match := SHARD_NAME.fullmatch(name))]
        return sorted((match[0], match["aside"] is not None) for match in found)

    def _open(self, path: Path) -> Arrays | None:
        """Return the mapped arrays of a shard; None if it is damaged, or was set aside meanwhile."""
        try:
            arrays = open_shard(path, self.target, checked=path in self._checked)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise EdgespecError(f"cannot read the data: {describe_os_error(error)}") from error
        except DamagedFileError as error:
            aside = path.with_name(f"{path.name}.set-aside")
            path.replace(aside)
            self._on_message(f"{path}: damaged ({error}); set aside as {aside.name}, the rest is used")
            return None
        self._checked.add(path)
        return arrays

    # ---- writing ----

    @contextmanager
    def writer(self, budget: int) -> Iterator[DatasetWriter]:
        """Lock the folder and give a writer for texts up to `budget` bytes in all.

        Raises EdgespecError if another process writes there, if the disk has no room for the budget, and
        where the disk fails.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with locked(self.folder / ".lock", self._refuse):
                self._check_target()
                for leftover in self.folder.iterdir():  # of a process that was killed
                    if re.fullmatch(TEMPORARY, leftover.name) and leftover.is_file():
                        leftover.unlink()
                needed = max(0, budget - self.n_bytes())
                cure = "free some, or choose a smaller budget"
                check_disk(self.folder, needed, f"the data of {self.target.name}", cure)
                document = {"format": _FORM, "version": _VERSION, **asdict(self.target), "budget": budget}
                write_atomically(self.folder / "dataset.json", json.dumps(document, indent=2) + "\n")
                writer = DatasetWriter(self, budget)
                try:
                    yield writer
                finally:
                    writer.flush()
        except OSError as error:
            raise EdgespecError(f"cannot write the data: {describe_os_error(error)}") from error

    def _refuse(self) -> None:
        raise EdgespecError(
            f"another process writes the data of {self.target.name} ({self.folder}); "
            "wait until it has ended, or end it"
        )


class DatasetWriter:
    """Adds texts to a dataset: `Dataset.writer`."""

    def __init__(self, dataset: Dataset, budget: int) -> None:
        self.dataset = dataset
        self.budget = budget
        self._on_disk = dataset.n_bytes()
        self._waiting: list[TrainingText] = []
        self._last = max((int(name[:5]) for name, _ in dataset._names()), default=0)

    @property
    def n_bytes(self) -> int:
        """Bytes of all texts, on disk and waiting."""
        return self._on_disk + sum(map(_bytes_of, self._waiting))

    def has_room(self, n_bytes: int) -> bool:
        """Whether the budget has room for `n_bytes` more."""
        return self.n_bytes + n_bytes <= self.budget

    def append(self, text: TrainingText) -> bool:
        """Add a text and return True, unless the budget has no room for it.

        Texts are written by the shard, or at the next `flush`. Raises OSError.
        """
        if not self.has_room(_bytes_of(text)):
            return False
        self._waiting.append(text)
        if len(self._waiting) >= TEXTS_PER_SHARD:
            self.flush()
        return True

    def make_room(self, n_bytes: int, kinds: Sequence[Callable[[TrainingText], bool]]) -> int:
        """Delete texts until there is room for `n_bytes` more, or none is left; return how many are gone.

        Those of the first of the `kinds` go first, the oldest before others, by the shard. Raises OSError.
        """
        n_gone = 0
        for is_of_kind in kinds:
            for path in self.dataset.shards():
                if self.has_room(n_bytes):
                    return n_gone
                shard = self.dataset._open(path)
                if shard:
                    n_gone += delete_texts(path, np.array([is_of_kind(text) for text in _texts(shard)], bool))
                    self._on_disk = self.dataset.n_bytes()
        return n_gone

    def flush(self) -> None:
        """Write the waiting texts as a shard. Raises OSError; they then go on waiting."""
        if not self._waiting:
            return
        path = self.dataset.folder / f"{self._last + 1:05d}.npz"
        with replacing(path) as file:
            np.savez(file, **_arrays(self._waiting))
        self._last += 1
        self._on_disk += path.stat().st_size
        self._waiting = []

    def full(self) -> str:
        """Return the message for a budget that is used up."""
        return (
            f"the budget of {format_size(self.budget)} for the data of {self.dataset.target.name} "
            "is used up; a larger one lets the target write more"
        )


def delete_texts(shard: Path, chosen: npt.NDArray[np.bool_]) -> int:
    """Delete the `chosen` texts, (n_texts,), from a shard; return how many they are.

    A shard without texts goes. Raises OSError; the shard is then complete, with or without these texts.
    """
    if chosen.all():
        shard.unlink()
    elif chosen.any():
        with np.load(shard) as stored:
            arrays = dict(stored)
        by_token = np.repeat(~chosen, arrays["length"])
        by_row = np.repeat(~chosen, arrays["length"] - 1 - arrays["first"])
        kept = {"tokens": by_token, "weight": by_token, "features": by_row}
        rest: Any = {name: array[kept.get(name, ~chosen)] for name, array in arrays.items()}
        with replacing(shard) as file:
            np.savez(file, **rest)
    return int(chosen.sum())


def _bytes_of(text: TrainingText) -> int:
    weights = 0 if text.weights is None else text.weights.nbytes + 256
    return text.features.nbytes + text.tokens.nbytes + weights + 128


def _arrays(texts: Sequence[TrainingText]) -> dict[str, Any]:
    arrays = {
        "tokens": np.concatenate([text.tokens for text in texts]).astype(np.int32),
        "length": np.array([len(text.tokens) for text in texts], np.int32),
        "features": np.concatenate([text.features for text in texts]).astype(np.float16),
        **{name: np.array([getattr(text, name) for text in texts], kind) for name, kind in _COLUMNS.items()},
    }
    if any(text.weights is not None for text in texts):
        arrays["weight"] = np.concatenate([_weights(text) for text in texts])
    return arrays


def _weights(text: TrainingText) -> npt.NDArray[np.float16]:
    return np.ones(len(text.tokens), np.float16) if text.weights is None else text.weights


def _texts(shard: Arrays) -> Iterator[TrainingText]:
    """Yield the texts of a shard."""
    columns = [shard[name].tolist() for name in ("length", *_COLUMNS)]
    tokens, weights = shard["tokens"].astype(np.int32), shard.get("weight")
    token = row = 0
    for length, n_prompt, first, temperature, source, key in zip(*columns, strict=True):
        here, n = slice(token, token + length), length - 1 - first
        yield TrainingText(
            tokens=tokens[here],
            n_prompt=n_prompt,
            first=first,
            features=shard["features"][row : row + n],
            temperature=temperature,
            source=source,
            key=key,
            weights=None if weights is None else weights[here],
        )
        token, row = token + length, row + n


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

Arrays = Mapping[str, npt.NDArray[Any]]

_COLUMNS: dict[str, Any] = {
    "n_prompt": np.int32,
    "first": np.int32,
    "temperature": np.float32,
    "source": None,
    "key": np.uint64,
}
"""Arrays with a number for each text, in the order in which `_texts` takes them, and their types."""

_NAMES = {"tokens", "length", "features", *_COLUMNS}
_LENGTHS_AT = 26  # in what a zip has before each file: lengths of its name and extra field


def open_shard(path: Path, target: DatasetTarget, *, checked: bool) -> Arrays:
    """Return the arrays of a shard of `target`, the hidden states as a view on the file.

    `checked`: skip the checksum of the hidden states, which was right before; reading checks the others.
    Raises OSError, and DamagedFileError for what is no such shard.
    """
    try:
        with zipfile.ZipFile(path) as file:
            if not checked and (wrong := file.testzip()):
                raise DamagedFileError(f"{wrong}: wrong checksum")
            mapped = _mapped(path, file.getinfo("features.npy"))
        with np.load(path) as shard:
            arrays = {name: mapped if name == "features" else shard[name] for name in shard.files}
        problem = _problem(arrays, target)
    except (zipfile.BadZipFile, ValueError, EOFError, KeyError, struct.error, zlib.error) as error:
        problem = str(error) or "damaged"
    if problem:
        raise DamagedFileError(problem)
    return arrays


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


def _problem(arrays: Arrays, target: DatasetTarget) -> str:
    """Return why the arrays do not fit together, or the target; "" if they do."""
    if missing := sorted(_NAMES - arrays.keys()):
        return f"it has no {missing[0]}"
    length, first, n_prompt, tokens = (
        arrays[name].astype(np.int64) for name in ("length", "first", "n_prompt", "tokens")
    )
    features, weights = arrays["features"], arrays.get("weight")
    columns = [arrays[name].shape for name in _COLUMNS]
    if any(shape != length.shape for shape in columns) or tokens.shape != (length.sum(),):
        return "its arrays do not belong together"
    if features.dtype != np.float16 or features.shape != ((length - 1 - first).sum(), target.n_embd):
        return f"hidden states of shape {features.shape} and type {features.dtype}"
    if weights is not None and (weights.dtype != np.float16 or weights.shape != tokens.shape):
        return f"weights of shape {weights.shape} and type {weights.dtype}"
    if not (np.all(first >= 0) and np.all(first < length) and np.all(n_prompt <= length)):
        return "lengths that are impossible"
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < target.n_vocab:
        return "token ids that the target does not have"
    return ""
