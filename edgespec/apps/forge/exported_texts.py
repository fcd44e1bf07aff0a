"""Texts of a dataset as one small file, a compressed .npz, from which another machine makes the dataset.

    tokens         int32    [sum of length]   all texts, one after another
    length         int32    [n_texts]         tokens of each, prompt and answer
    n_prompt       int32    [n_texts]         tokens of its prompt
    temperature    float32  [n_texts]         NaN: the target only read it
    source         str      [n_texts]
    key            uint64   [n_texts]         `key_of` its prompt
    target_sha256  str      []                of the file of the target that wrote them
    target_name    str      []

Hidden states are left out: the target computes them again when it reads the texts, which takes a fraction
of the time of writing them. A file may lack the last three: then the user says which target wrote it, and
keys are found by going through the built-in prompts as the target did.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from edgespec.apps.forge.dataset import (
    BUILT_IN,
    FROM_FILE,
    FROM_HISTORY,
    READ,
    REJECTED,
    Dataset,
    DatasetTarget,
)
from edgespec.apps.forge.progress import StageContext, StageProgress
from edgespec.apps.forge.prompts import TextPrompt, TokenPrompt, WrittenText, built_in
from edgespec.apps.forge.writing import TargetWriter, WritingRun, WritingSettings, prompt_tokens
from edgespec.errors import EdgespecError, UsageError, describe_os_error
from edgespec.llama.weights import Model
from edgespec.platform.files import check_file, replacing

_SOURCES = (BUILT_IN, FROM_HISTORY, FROM_FILE, READ, REJECTED)
_COLUMNS = ("length", "n_prompt", "temperature", "source")
_FAILURES = (ValueError, EOFError, KeyError, OSError, zlib.error, zipfile.BadZipFile, NotImplementedError)
_MISSES = 20_000  # built-in prompts without a text, after which no more are tried

Columns = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class TextCount:
    """How many texts were exported or imported."""

    n_texts: int
    n_tokens: int
    n_left_out: int
    """Export: texts from the user's own. Import: those that were there already."""


def export_texts(dataset: Dataset, path: Path, *, own: bool = False) -> TextCount:
    """Write the texts of `dataset` to `path`; with `own` also those from the user's history and files.

    Raises EdgespecError where there is none, and where the disk fails.
    """
    found = [text for text in dataset.texts() if own or text.source == BUILT_IN]
    n_all = sum(1 for _ in dataset.texts())
    if not found:
        left = (
            f" but {n_all} from your own texts, which are left out unless you ask for them" if n_all else ""
        )
        raise EdgespecError(f"{dataset.folder}: {dataset.target.name} has written no texts here{left}")
    arrays: dict[str, Any] = {
        "tokens": np.concatenate([text.tokens for text in found]).astype(np.int32),
        "length": np.array([len(text.tokens) for text in found], np.int32),
        "n_prompt": np.array([text.n_prompt for text in found], np.int32),
        "temperature": np.array([text.temperature for text in found], np.float32),
        "source": np.array([text.source for text in found]),
        "key": np.array([text.key for text in found], np.uint64),
        "target_sha256": np.array(dataset.target.sha256),
        "target_name": np.array(dataset.target.name),
    }
    try:
        with replacing(path) as file:
            np.savez_compressed(file, **arrays)
    except OSError as error:
        raise EdgespecError(f"cannot write the export: {describe_os_error(error)}") from error
    return TextCount(len(found), len(arrays["tokens"]), n_all - len(found))


def check_export(path: Path) -> None:
    """Raise UsageError unless `path` is a file that `export_texts` may have written."""
    _arrays(path)


class ExportedTexts:
    """An export, checked to be one of a target."""

    def __init__(self, path: Path, target: DatasetTarget, *, is_named: bool) -> None:
        """Read `path`, which `target` should have written; `is_named`: the user named the target.

        Raises UsageError, with the file's name and the reason, for a file of another target, one that does
        not say whose it is while none is named, a truncated one, and what is no export.
        """
        self.path = path
        arrays = _arrays(path)
        self._check_target(arrays, target, is_named=is_named)
        self._columns = _checked(path, arrays, target.n_vocab)
        self.n_texts = len(self._columns["length"])
        self.n_tokens = len(self._columns["tokens"])
        self.n_answer_tokens = self.n_tokens - int(self._columns["n_prompt"].sum())
        self.longest = int(self._columns["length"].max(initial=1))

    def _check_target(self, arrays: Columns, target: DatasetTarget, *, is_named: bool) -> None:
        sha256, name = (str(arrays[one]) if one in arrays else "" for one in ("target_sha256", "target_name"))
        if not sha256 and not is_named:
            raise UsageError(
                f"{self.path}: it does not say which model wrote it; name the target whose very file did"
            )
        if sha256 and sha256 != target.sha256:
            raise UsageError(
                f"{self.path}: texts of another target, {name or 'without a name'} (SHA-256 {sha256[:16]}), "
                f"not of {target.name} (SHA-256 {target.sha256[:16]})"
            )

    def texts(self, model: Model) -> Iterator[WrittenText]:
        """Yield the texts; `model`, their target, finds the keys of those without."""
        columns = self._columns
        ends = np.cumsum(columns["length"].astype(np.int64))
        parts = [tuple(part.tolist()) for part in np.split(columns["tokens"], ends[:-1])]
        n_prompts, sources = columns["n_prompt"].tolist(), columns["source"].tolist()
        keys = columns["key"].tolist() if "key" in columns else _found_keys(model, parts, n_prompts, sources)
        temperatures = columns["temperature"].tolist()
        for tokens, n_prompt, temperature, source, key in zip(
            parts, n_prompts, temperatures, sources, keys, strict=True
        ):
            yield WrittenText(source, tokens, n_prompt, temperature, key)


def import_texts(
    model: Model,
    dataset: Dataset,
    exported: ExportedTexts,
    budget: int,
    context: StageContext,
    *,
    n_threads: int,
) -> TextCount:
    """Let `model` read exported texts into `dataset`, up to `budget` bytes; those it has are skipped.

    Stopped by Ctrl-C it keeps what was read, and the same call goes on. Raises EdgespecError as
    `TargetWriter.fill`, and where the budget is too small for all.
    """

    def show(run: WritingRun) -> None:
        share = min(1.0, run.n_tokens / max(1, exported.n_answer_tokens))
        left = exported.n_answer_tokens * (1.0 - share) / run.tokens_per_s if run.n_tokens else None
        context.on_progress(StageProgress("reading", share, f"{run.tokens_per_s:.0f} tokens/s", left))

    target_reader = TargetWriter(
        model,
        WritingSettings(n_predict=1, longest_prompt=exported.longest),
        n_threads=n_threads,
        interrupt=context.signals.interrupt if context.signals else None,
        on_message=context.on_message,
    )
    context.on_progress(StageProgress("reading", 0.0))
    with target_reader, dataset.writer(budget) as writer:
        until = dataset.n_answer_tokens() + exported.n_answer_tokens + 1  # more than there can be
        run = target_reader.fill(writer, exported.texts(model), until=until, on_progress=show)
    if run.n_skipped:
        context.on_message(
            f"{exported.path}: {run.n_skipped} texts left out: longer than {model.name} was trained for"
        )
    if run.full:
        raise EdgespecError(
            f"{exported.path}: {run.n_texts} of {exported.n_texts} texts were read, then {writer.full()}"
        )
    return TextCount(run.n_texts, run.n_finished, exported.n_texts - run.n_texts - run.n_skipped)


def _arrays(path: Path) -> Columns:
    """Return the arrays of an .npz. Raises UsageError for anything else."""
    check_file(path)
    try:
        file = path.open("rb")
    except OSError as error:
        raise UsageError(f"cannot read the export: {describe_os_error(error)}") from None
    with file:
        if file.read(4) != b"PK\3\4":
            raise UsageError(f"{path}: no export of `edgespec draft data export`, which is an .npz file")
        file.seek(0)
        try:
            with _opened(file) as members:
                return {name: members[name] for name in members}
        except _FAILURES as error:
            reason = " ".join(str(error).split())
            raise UsageError(f"{path}: truncated or damaged ({reason}); copy it again") from None


def _opened(file: BinaryIO) -> AbstractContextManager[Columns]:
    found: AbstractContextManager[Columns] = np.load(file, allow_pickle=False)
    return found


def _checked(path: Path, arrays: Columns, n_vocab: int) -> Columns:
    """Return the arrays if they are those of an export for a vocabulary of `n_vocab` tokens."""

    def damaged(reason: str) -> UsageError:
        return UsageError(f"{path}: damaged, or no export of texts: {reason}")

    for name in ("tokens", *_COLUMNS):
        if name not in arrays:
            raise damaged(f"it has no {name}")
    columns = {name: arrays[name] for name in (*_COLUMNS, "key") if name in arrays}
    tokens, length, n_prompt = arrays["tokens"], columns["length"], columns["n_prompt"]
    kinds = {"tokens": "i", "length": "i", "n_prompt": "i", "temperature": "f", "source": "U", "key": "u"}
    for name, array in {"tokens": tokens, **columns}.items():
        if array.dtype.kind != kinds[name] or array.ndim != 1:
            raise damaged(f"{name} of type {array.dtype} and {array.ndim} dimensions")
    total = int(length.sum(dtype=np.int64))
    if any(len(array) != len(length) for array in columns.values()) or len(tokens) != total:
        raise damaged("its arrays do not belong together")
    if not (np.all(n_prompt >= 1) and np.all(n_prompt < length)):
        raise damaged("lengths that cannot be")
    temperature = columns["temperature"]
    if np.any(temperature < 0) or np.any(np.isinf(temperature)):
        raise damaged("temperatures that cannot be")
    if unknown := sorted(set(columns["source"].tolist()) - set(_SOURCES)):
        raise damaged(f"texts from {unknown[0]!r}")
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < n_vocab:
        worst = int(tokens.min()) if tokens.min() < 0 else int(tokens.max())
        raise UsageError(f"{path}: token {worst}, and the target's vocabulary has {n_vocab}")
    return {"tokens": tokens.astype(np.int32), **columns}


def _found_keys(
    model: Model, texts: Sequence[tuple[int, ...]], n_prompts: Sequence[int], sources: Sequence[str]
) -> list[int]:
    """Return the key of each text's prompt, which says whether it is held out.

    Those of built-in prompts, and of what followed from their answers, are found by going through them in the
    order in which the target answered. Any other text gets the key that a text in tokens has.
    """
    open_texts: dict[tuple[int, ...], int] = {
        text[:n]: i
        for i, (text, n, source) in enumerate(zip(texts, n_prompts, sources, strict=True))
        if source == BUILT_IN
    }
    keys = [
        TokenPrompt(source, text, n).key for text, n, source in zip(texts, n_prompts, sources, strict=True)
    ]
    prompts, waiting, n_missed = built_in(), list[TextPrompt](), 0
    while open_texts and n_missed < _MISSES:
        prompt = waiting.pop() if waiting else next(prompts, None)
        if prompt is None:
            break
        i = open_texts.pop(tuple(prompt_tokens(model, prompt)), None)
        if i is None:
            n_missed += 1
            continue
        n_missed, keys[i] = 0, prompt.key
        answer = texts[i][n_prompts[i] :]
        if answer and model.is_eog(answer[-1]):
            waiting += prompt.followed(b"".join(map(model.piece, answer)).decode(errors="replace"))
    return keys
