"""Which tokens a cut draft keeps: those that texts like the target's use, and how many are enough.

    a file that the user names    a text, or a suite of prompts (.jsonl), as tokens
    else                          the target's own outputs (history.py), and the shipped suite's texts

A corpus is small beside a vocabulary, so tokens it lacks are ranked too: by the probability that the model
itself gives them all along the corpus, and by their ids, as tokenizers number by frequency, about. Of Qwen's
vocabulary, 64k tokens chosen so by 2,600 tokens of prompts miss 0.8 % of others, and 2.3 % by ids alone.

How much of a text some tokens cover is counted on the half of the corpus that they were not chosen from:
a corpus always covers itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgespec.drafting.history import History
from edgespec.errors import UsageError
from edgespec.forge.cutting import Vocabulary
from edgespec.forge.speedup import softmax
from edgespec.llama.fingerprints import tokenizer_fingerprint
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.suites import Prompt, evenly, load_suite, read_contents

Ids = npt.NDArray[np.int64]

SIZES = (8192, 16384, 32768, 65536)
"""Numbers of tokens that are tried, the smallest first."""

COVERAGE = 0.995
"""Share of a text's tokens to keep: each that is missing ends a draft."""

ROUNDING = 16
"""The number of kept tokens is a multiple of it: kernels take matrices of a whole number of such rows."""

FEW = 20_000
"""A corpus of fewer tokens says little about other texts."""

_BLOCK = 64  # tokens that are in one half of a corpus together, and in one pass
_MOST_READ = 4096  # tokens that the model reads
_BY_ID = 0.5  # weight of the ids, where that of the corpus is 1


@dataclass(frozen=True, slots=True)
class Corpus:
    """Texts as tokens of the full vocabulary."""

    what: str
    """Where they are from, in words."""
    documents: tuple[Ids, ...]

    @property
    def n_tokens(self) -> int:
        """Tokens in all documents."""
        return sum(map(len, self.documents))


@dataclass(frozen=True, slots=True)
class Selection:
    """The tokens that are kept."""

    token_ids: Ids
    """Ascending."""
    n_seen: int
    """How many of them the corpus has."""
    coverage: float | None
    """Share of unseen text that as many tokens cover, chosen in the same way; None: too short a corpus."""


@dataclass(frozen=True, slots=True)
class _Half:
    """Every other block of a corpus."""

    counts: Ids
    """How often it has each token."""
    expected: npt.NDArray[np.float64]
    """How often the model expects each."""

    def __add__(self, other: _Half) -> _Half:
        return _Half(self.counts + other.counts, self.expected + other.expected)


def check_corpus(path: Path) -> None:
    """Raise UsageError unless `path` is a file."""
    if not path.is_file():
        problem = "a directory" if path.is_dir() else "no such file"
        raise UsageError(f"{problem}; give a text", field="corpus", value=path)


def read_corpus(path: Path, model: Model) -> Corpus:
    """Return the texts of a file as the tokens of `model`. Raises UsageError for what is no text."""
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        texts = [prompt.text for prompt in load_suite(str(path)).prompts]
    else:
        check_corpus(path)
        try:
            texts = [read_contents(path)[1].decode()]
        except UnicodeDecodeError as error:
            problem = f"not UTF-8 text (byte {error.start}); give a text"
            raise UsageError(problem, field="corpus", value=path) from None
    documents = _tokenized(texts, model)
    if not documents:
        problem = "an empty text; give one like those the target writes"
        raise UsageError(problem, field="corpus", value=path)
    return Corpus(path.name, documents)


def own_corpus(model: Model, prompts: Sequence[Prompt], held_out: Sequence[Prompt]) -> Corpus:
    """Return what the history has of the target's outputs and the texts of `prompts`.

    Nothing of those `held_out` is in it: they tell how good a choice is.
    """
    kept = History(tokenizer_fingerprint(model)).load(n_vocab=model.n_vocab)
    stored = [part[part >= 0].astype(np.int64) for part in np.split(kept, np.flatnonzero(kept < 0))]
    asked = _tokenized([prompt.text for prompt in held_out], model)
    stored = [ids for ids in stored if len(ids) and not any(_holds(ids, part) for part in asked)]
    texts = _tokenized([prompt.text for prompt in prompts if prompt not in held_out], model)
    what = f"{len(stored)} texts of the history and {len(texts)} of the shipped suite"
    return Corpus(what, (*stored, *texts))


def select(
    corpus: Corpus,
    vocabulary: Vocabulary,
    session: Session,
    keep: int | None = None,
    *,
    on_progress: Callable[[float], None] = lambda _share: None,
) -> Selection:
    """Return the tokens to keep: `keep` of them, or as few of SIZES as cover COVERAGE of unseen text.

    Those that are required, then those that are likeliest. `session` runs the model that they belong
    to, and returns the logits of 64 tokens at once; `on_progress` is told which share is done. Raises
    UsageError for a `keep` that is too few or all.
    """
    sizes = _sizes(vocabulary, keep)
    halves = _halves(corpus.documents, session, on_progress)
    covered: float | None = None
    for size in sizes:
        covered = _coverage(halves, vocabulary, size)
        if covered is None or covered >= COVERAGE:
            break
    both = halves[0] + halves[1]
    ids = _chosen(both, vocabulary, size)
    return Selection(ids, int(np.count_nonzero(both.counts[ids])), covered)


def check_keep(vocabulary: Vocabulary, keep: int | None) -> None:
    """Raise UsageError for a number of tokens that cannot be kept, before anything is read."""
    _sizes(vocabulary, keep)


def _sizes(vocabulary: Vocabulary, keep: int | None) -> list[int]:
    """Return the numbers of tokens to try."""
    n_words = vocabulary.n_vocab - len(vocabulary.unused)
    fewest = len(vocabulary.required)
    if keep is not None and keep < fewest:
        problem = f"at least {fewest} tokens stay: control tokens, single bytes and such"
        raise UsageError(problem, field="keep", value=keep)
    sizes = [_rounded(keep)] if keep else [size for size in SIZES if size >= fewest]
    sizes = [size for size in sizes if size < n_words]
    if not sizes and keep:
        problem = f"the model has only {n_words:,} tokens, so nothing would be cut"
        raise UsageError(problem, field="keep", value=keep)
    if not sizes:
        raise UsageError(f"the model has only {n_words:,} tokens: say how many to keep", field="keep")
    return sizes


def _tokenized(texts: Iterable[str], model: Model) -> tuple[Ids, ...]:
    found = (model.tokenize(text, add_special=False, parse_special=False) for text in texts if text.strip())
    return tuple(np.array(tokens, np.int64) for tokens in found if tokens)


def _holds(ids: Ids, part: Ids) -> bool:
    """Whether `part` stands in `ids`, but for its ends, which depend on what is around them."""
    inner = part[1:-1].tobytes()
    at = ids.tobytes().find(inner) if inner else -1
    while at > 0 and at % ids.itemsize:
        at = ids.tobytes().find(inner, at + 1)
    return at >= 0


def _rounded(n: int) -> int:
    return -(-n // ROUNDING) * ROUNDING


def _halves(
    documents: Sequence[Ids], session: Session, on_progress: Callable[[float], None]
) -> tuple[_Half, _Half]:
    """Return what every other block has, and what the blocks between have."""
    blocks = [ids[at : at + _BLOCK] for ids in documents for at in range(0, len(ids), _BLOCK)]
    n_vocab = session.model.n_vocab
    halves = [_Half(_counts(blocks[i::2], n_vocab), np.zeros(n_vocab)) for i in (0, 1)]
    read = evenly(range(len(blocks)), _MOST_READ // _BLOCK)
    for n_done, i in enumerate(read):
        on_progress(n_done / len(read))
        session.clear()  # each block begins anew: its predictions are vague, and so of many tokens
        for row in session.eval(blocks[i].tolist(), n_logits=len(blocks[i])):
            halves[i % 2].expected[:] += softmax(row) * (len(blocks) / len(read))
    return halves[0], halves[1]


def _counts(blocks: Sequence[Ids], n_vocab: int) -> Ids:
    return np.bincount(np.concatenate([np.empty(0, np.int64), *blocks]), minlength=n_vocab)


def _coverage(halves: tuple[_Half, _Half], vocabulary: Vocabulary, size: int) -> float | None:
    """Return the share of each half that the tokens chosen from the other cover."""
    n = sum(int(half.counts.sum()) for half in halves)
    if not all(half.counts.any() for half in halves):
        return None
    hit = sum(int(b.counts[_chosen(a, vocabulary, size)].sum()) for a, b in (halves, halves[::-1]))
    return hit / n


def _chosen(half: _Half, vocabulary: Vocabulary, size: int) -> Ids:
    """Return `size` ids, ascending."""
    by_id = 1.0 / np.arange(1, vocabulary.n_vocab + 1)  # Zipf's law
    by_id *= _BY_ID * half.counts.sum() / by_id.sum()
    score = half.counts + half.expected + by_id
    score[vocabulary.unused] = -1.0
    score[vocabulary.required] = np.inf
    return np.sort(np.argsort(-score, kind="stable")[:size])
