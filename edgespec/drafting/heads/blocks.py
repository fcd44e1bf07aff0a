"""DFlash heads (arXiv 2602.06036) and their kin, which draft a block of tokens in one pass.

The target's states become keys and values of some blocks, which then draft over the last token and masks.
The logits of a pass for each place of a block, given the token that was drafted before it:

    PlainRows    DFlash: each place by itself
    MarkovRows   DSpark: the token before adds a row of a low-rank matrix to the logits, and a confidence
             estimates how likely the place's token is accepted
    PathRows     DFlash 2, with convolutions: a selector gives some candidates of each place; a pair of
                 neighbours has a score

The library computes a DSpark block as if each place's likeliest token were drafted. If another one was,
MarkovRows corrects the difference:

    logits(i | t) = logits(i | g) + W2 (W1[t] - W1[g])       g: the likeliest token of place i - 1
    confidence    = sigmoid(c . [h(i); W1[t]] + b)           likewise

Of a DFlash 2 block it gives the candidates and the scores of all pairs,

    score(a, b) = logit(b) + <A[a] * H h(i), B[b]>           a: a candidate of place i - 1; b: of place i

which are the logits of b after a. Tokens are drawn from a row and verified by the same row, so rows change
no text.

    BlockDraft   the draft, from its file to its sessions
    BlockHead    its model
    BlockModel   the head of one generation
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from edgespec.decoding.option_table import MAX_GAMMA
from edgespec.decoding.session import Forward, ForwardResult, Inputs, Rows, TargetFeatures, n_common
from edgespec.drafting.draft_model import DraftModel
from edgespec.drafting.heads.head import WindowedModel
from edgespec.drafting.heads.matrices import EightBitMatrix, MappedMatrix
from edgespec.drafting.heads.published import HeadKind, LayersDraft, LayersHead, holds, says
from edgespec.drafting.profile import N_MAX, CostCurve, block_curve
from edgespec.llama.backend import llama
from edgespec.llama.gguf import TensorInfo
from edgespec.llama.gguf_header import GGUFHeader
from edgespec.llama.hidden_states import NEXTN_HEAD
from edgespec.llama.sequence_pool import SequencePool
from edgespec.llama.session import Session
from edgespec.llama.weights import Model

# ---- the kinds ----

_has_markov, _has_selector = holds("markov_w1."), holds("selector_hidden.")
MARKOV, PATHS = HeadKind("a DSpark head", _has_markov), HeadKind("a DFlash 2 head", _has_selector)

# ---- the rows of a block ----

_LARGEST_BLOCK = MAX_GAMMA + 1
_WIDTH = 32  # elements of a row of EightBitMatrix are a multiple of this


class PlainRows:
    """The rows of the last block of one sequence."""

    with_states = False
    """Whether the pass over a block returns hidden states, which hold the outputs of its further parts."""

    def __init__(self, head: BlockHead, n_row: int) -> None:
        """Read blocks of `head`; a row has `n_row` logits."""
        self._first, self._n_row = head.first, n_row
        self._rows: Rows = np.empty((0, n_row), np.float32)

    def __len__(self) -> int:
        return len(self._rows)

    def set(self, block: ForwardResult) -> None:
        """Store the result of a pass over a block."""
        self._rows = block.rows[self._first :, : self._n_row].copy()

    def clear(self) -> None:
        """Forget the block."""
        self._rows = self._rows[:0]

    def logits_at(self, place: int, before: int) -> tuple[Rows, float | None]:
        """Return the logits of a place, shape (1, n_row), after the token `before`, and its confidence."""
        return self._rows[place : place + 1], None


class MarkovHead:
    """The additional parts of a DSpark head, from its file."""

    def __init__(self, head: BlockHead, n_threads: int) -> None:
        """Load the parts. Raises EdgespecError and MemoryError."""
        self._of_token = MappedMatrix(head.header, "markov_w1.weight")
        tensors = {tensor.name: tensor for tensor in head.header.gguf.tensors}
        second = MappedMatrix(head.header, "markov_w2.weight")
        rank = self._of_token.n_embd
        self._shape = len(second), -(-rank // _WIDTH) * _WIDTH
        matrix = np.zeros(self._shape, np.float32)
        matrix[:, :rank] = second(range(len(second)))
        if "markov_w2.scale" in tensors:
            matrix *= MappedMatrix(head.header, "markov_w2.scale")([0])[0, 0]
        self._to_logits = EightBitMatrix(matrix, n_threads, head.plugin)
        self._ids: npt.NDArray[np.int64] | None = None
        if ids := tensors.get("d2t"):
            start = head.header.gguf.data_start + ids.offset
            self._ids = np.fromfile(head.path, np.int64, ids.shape[0], offset=start)
        self._to_confidence: npt.NDArray[np.float32] | None = None
        if "conf_proj.weight" in tensors:
            self._to_confidence = MappedMatrix(head.header, "conf_proj.weight")([0])[0, -rank:]

    @property
    def has_confidence(self) -> bool:
        """Whether it estimates how likely a token is accepted."""
        return self._to_confidence is not None

    def difference(self, token: int, guess: int, n_row: int) -> tuple[Rows, float]:
        """Return what `token` instead of `guess` adds to the logits of the next place, shape (1, n_row).

        Also return what it adds to the log odds of the confidence; 0 without one.
        """
        of_token, of_guess = self._of_token([token, guess])
        step = of_token - of_guess
        vector = np.zeros((1, self._shape[1]), np.float32)
        vector[0, : len(step)] = step
        found = np.empty((1, self._shape[0]), np.float32)
        self._to_logits.multiply(vector, found)
        if self._ids is not None:
            kept = self._ids < n_row
            whole = np.zeros((1, n_row), np.float32)
            whole[0, self._ids[kept]] = found[0, kept]
            found = whole
        odds = 0.0 if self._to_confidence is None else float(self._to_confidence @ step)
        return found[:, :n_row], odds


class MarkovRows(PlainRows):
    """Rows of a DSpark block."""

    def __init__(self, head: BlockHead, n_row: int, markov: MarkovHead) -> None:
        """Read blocks of a head; arguments as for PlainRows."""
        super().__init__(head, n_row)
        self._markov = markov
        self.with_states = markov.has_confidence
        self._likeliest: list[int] = []
        self._confidences: list[float] = []

    def set(self, block: ForwardResult) -> None:
        """Store the result of a pass over a block."""
        super().set(block)
        self._likeliest = block.rows[self._first :].argmax(axis=1).tolist()
        if block.features is not None:
            self._confidences = block.features[self._first :, 0].tolist()

    def logits_at(self, place: int, before: int) -> tuple[Rows, float | None]:
        """Return the logits and the confidence of a place after the token `before`."""
        row = self._rows[place : place + 1]
        chance = self._confidences[place] if self.with_states else None
        guess = self._likeliest[place - 1] if place else before
        if before == guess:
            return row, chance
        more, odds = self._markov.difference(before, guess, self._n_row)
        if chance is not None:
            chance = _moved(chance, odds)
        return row + more, chance


class PathRows(PlainRows):
    """Rows of a DFlash 2 block: only the candidates of a place have logits above -inf."""

    with_states = True

    def __init__(self, head: BlockHead, n_row: int) -> None:
        """Read blocks of a head; arguments as for PlainRows."""
        super().__init__(head, n_row)
        self._k = max(head.header.gguf.integers("dflash.selector_top_k"))
        self._candidates: npt.NDArray[np.int64] = np.empty((0, self._k), np.int64)
        self._scores: npt.NDArray[np.float32] = np.empty((0, self._k, self._k), np.float32)

    def set(self, block: ForwardResult) -> None:
        """Store the result of a pass over a block."""
        super().set(block)
        assert block.features is not None  # noqa: S101 - for the type checker
        k, packed = self._k, block.features[self._first :]
        self._candidates = packed[:, :k].astype(np.int64)
        self._scores = packed[:, k : k + k * k].reshape(-1, k, k).copy()

    def logits_at(self, place: int, before: int) -> tuple[Rows, float | None]:
        """Return the logits of a place after the token `before`.

        If `before` is not a candidate (a grammar chose it), they do not depend on it.
        """
        above = 0
        if place:
            found = np.flatnonzero(self._candidates[place - 1] == before)
            if not len(found):
                return super().logits_at(place, before)
            above = int(found[0])
        row = np.full((1, self._n_row), -np.inf, np.float32)
        known = self._candidates[place] < self._n_row
        row[0, self._candidates[place, known]] = self._scores[place, above, known]
        return row, None


def rows_maker(head: BlockHead, n_threads: int) -> Callable[[int], PlainRows]:
    """Return a function that makes the rows of a sequence, for a number of logits in each.

    Raises EdgespecError and MemoryError if the head's further parts cannot be loaded.
    """
    if head.kind is MARKOV:
        return partial(MarkovRows, head, markov=MarkovHead(head, n_threads))
    return partial(PathRows if head.kind is PATHS else PlainRows, head)


def _moved(chance: float, odds: float) -> float:
    """Return a probability after adding `odds` to its log odds."""
    chance = min(max(chance, 1e-7), 1.0 - 1e-7)
    return float(1.0 / (1.0 + (1.0 / chance - 1.0) * np.exp(-odds)))


# ---- the head ----


class BlockHead(LayersHead):
    """Its passes are over hidden states, or over tokens that may be masks."""

    takes_tokens_alone = True

    def __init__(self, header: GGUFHeader, target: Model, kind: HeadKind, *, kernels: bool) -> None:
        """Load the file, as LayersHead, which is of this `kind`."""
        self.kind = kind
        if NEXTN_HEAD and kind in (MARKOV, PATHS):  # what their further parts give, a row a token
            self.hidden_states = replace(NEXTN_HEAD, stays=True)
        super().__init__(header, target, kernels=kernels)
        self.n_input = target.n_state
        self.n_block = _block_size(header)
        """Tokens of a pass that drafts: the last of the text, then masks."""
        self.mask = _mask(header)
        self.first = int(kind is not MARKOV or not all(header.gguf.integers("dflash.sample_from_anchor")))
        """Row of a pass that says what may follow the text: 1 where that stands at the first mask, not at the
        last token's place."""

    def make_context(self, params: llama.llama_context_params) -> llama.llama_context_p | None:
        """Return a context in which the tokens of a block see one another, unless the file says otherwise."""
        context = super().make_context(params)
        if context is not None and not _is_causal(self.header):
            llama.llama_set_causal_attn(context, False)
        return context


def _block_size(head: GGUFHeader) -> int:
    return max(head.gguf.integers("dflash.block_size"), default=16)


def _mask(head: GGUFHeader) -> int:
    return max(head.gguf.integers("tokenizer.ggml.mask_token_id"), default=-1)


def _is_causal(head: GGUFHeader) -> bool:
    stated = head.gguf.integers("dflash.attention.causal")
    return bool(stated[0]) if stated else head.gguf.text("dflash.decoder_arch") == "laguna"


_FIRST, _FURTHER = 2, 1  # the n in `block_curve` of the pass of a draft, and of one more of its tokens


class BlockModel(WindowedModel):
    """The head of `session` behind the interface of DraftModel."""

    features: TargetFeatures

    def __init__(
        self,
        session: Session,
        features: TargetFeatures,
        head: BlockHead,
        *,
        n_vocab: int,
        make_rows: Callable[[int], PlainRows],
    ) -> None:
        """Draft with `session`, whose cache takes inputs, from the states in `features`.

        Only the first `n_vocab` tokens are drafted. `make_rows`: what `rows_maker` returned for `head`.
        """
        super().__init__(session, n_vocab=n_vocab)
        self.features = features
        self._masks = [head.mask] * (head.n_block - 1)
        self._began_at = 0  # tokens of the sequence that the last pass was made after
        self._rows = make_rows(self._n_row)

    def begin(self, tokens: Sequence[int] = ()) -> None:
        """Start on the sequence `tokens`; keep the part that it shares with the last one."""
        self._rows.clear()
        n_same = n_common(self._session.tokens, tokens[self._offset :])
        if not self._go_back(n_same):
            self._start_at(self.features.first)

    def rest(self) -> None:
        """Do nothing: the sequence is kept for the next text, which may begin with it."""

    def follows(self, n_tokens: int) -> bool:
        """Whether it can draft after `n_tokens` tokens.

        It needs all states but the last token's, and at least one; or the last tokens are drafted, and a part
        of their block is left.
        """
        if self._is_new(n_tokens):
            return max(self.features.first, self._offset) < n_tokens - 1 == self.features.end
        is_last = self._began_at == self.features.end + 1
        return is_last and 0 < n_tokens - self._began_at < len(self._rows)

    def n_unread(self, n_tokens: int) -> int:
        """Return 2 where a draft begins, which takes a pass, and 1 within one."""
        return _FIRST if self._is_new(n_tokens) else _FURTHER

    def make_room(self, n_tokens: int) -> None:
        """Start again from the recent half if the sequence and the masks do not fit."""
        super().make_room(n_tokens + len(self._masks))

    def read(self, tokens: Sequence[int]) -> None:
        """Read the known states of `tokens` that it has not read."""
        start = self._offset + self.n_past
        if start < self.features.first:
            start = self.features.first
            self._start_at(start)
        if start < self.features.end:
            inputs = self.features.rows(start, self.features.end)
            Forward(self._session, tokens[start : self.features.end], 0, inputs=inputs).run()

    def ask(self, tokens: Sequence[int], guesses: Sequence[int] = ()) -> Forward | ForwardResult:
        """Return the pass of a block, which others may share, or the rest of the last block's result.

        `follows` must say that it can; there are no `guesses`.
        """
        if not self._is_new(len(tokens)):
            row, confidence = self._rows.logits_at(len(tokens) - self._began_at, tokens[-1])
            # Not a pass to learn costs from.
            return ForwardResult(row, 0.0, N_MAX + 1, confidence=confidence)
        started = time.perf_counter()
        self.read(tokens)
        handled_s = time.perf_counter() - started
        block = [tokens[-1], *self._masks]
        asked = Forward(self._session, block, len(block), with_features=self._rows.with_states)
        asked.finish = partial(self._finish_block, tokens[-1], len(tokens), self.n_past, handled_s)
        return asked

    def _finish_block(
        self, last: int, began_at: int, n_read: int, handled_s: float, evaluated: ForwardResult
    ) -> ForwardResult:
        self._session.rewind(n_read)
        self._rows.set(evaluated)
        self._began_at = began_at
        row, confidence = self._rows.logits_at(0, last)
        is_own = evaluated.n_tokens == 1 + len(self._masks)
        return replace(
            evaluated,
            rows=row,
            confidence=confidence,
            n_tokens=_FIRST if is_own else evaluated.n_tokens,
            seconds=handled_s + evaluated.seconds,
        )

    def _is_new(self, n_tokens: int) -> bool:
        return self.features.end >= n_tokens - 1


class BlockDraft(LayersDraft):
    """A DFlash head or its kin."""

    what = "a DFlash head"
    kinds = (
        HeadKind(
            "a DSpark head of DeepSeek V4's blocks",
            says("hyper_connection.count"),
            "llama.cpp cannot take tokens of that model back, so nothing drafts for it",
        ),
        HeadKind(
            "a relative of DFlash with the parts of DSpark and of DFlash 2",
            lambda head: _has_markov(head) and _has_selector(head),
            "no such head is described",
        ),
        MARKOV,
        PATHS,
        HeadKind(
            "a relative of DFlash with parts of its own",
            holds("markov_", "dspark_", "selector_", "conf_"),
            "no such head is described",
        ),
    )
    model: BlockHead
    ties_output = True

    def own_damage(self, tensors: Mapping[str, TensorInfo], n_known: int) -> str:
        """Return what is wrong with its blocks, its mask or its convolutions; "" if nothing."""
        head, size = self.header, _block_size(self.header)
        if not 2 <= size <= _LARGEST_BLOCK:
            return f"its blocks are of {size} tokens, and should be of 2 to {_LARGEST_BLOCK}"
        if not 0 <= _mask(head) < min(n_known, head.n_vocab):
            return "it does not say which token is the mask"
        if self.kind is MARKOV and "dflash.block_size" not in head.gguf.fields:
            return "it does not say how large its blocks are"
        if any("_conv_base" in name and tensor.type != "f32" for name, tensor in tensors.items()):
            return "its convolutions are not of 32-bit floats"
        return ""

    def load_model(self, *, kernels: bool) -> Model:
        """Load the head and its further parts."""
        head = BlockHead(self.header, self.target, self.kind, kernels=kernels)
        try:
            self._make_rows = rows_maker(head, self.n_threads)
        except BaseException:
            head.close()
            raise
        return head

    def open(self, sequences: SequencePool) -> DraftModel:
        """Return the head of one generation, which drafts a block of tokens in each pass."""
        return BlockModel(
            sequences.begin([0]),
            self.features(),
            self.model,
            n_vocab=self.target.n_vocab,
            make_rows=self._make_rows,
        )

    def timed_rows(self, tokens: Sequence[int]) -> Inputs | None:
        """Return states of zeros for many tokens; few tokens are a block of masks."""
        return super().timed_rows(tokens) if len(tokens) > N_MAX else None

    def costs(self, curve: CostCurve) -> CostCurve:
        """Return the curve of passes over a block."""
        return block_curve(curve, self.model.n_block)
