"""A toy target with hidden states and a toy head that reads them: functions, as in toy_sessions.py."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from edgespec.decoding.session import ForwardResult, TargetFeatures
from edgespec.drafting.heads.head import HeadModel
from toy_sessions import ToySession

_STATES = 1 << 12  # different hidden states


def state_of(prefix: Sequence[int]) -> float:
    """The target's hidden state after `prefix`, one number."""
    return float(hash(tuple(prefix)) % _STATES)


class ToyTargetSession(ToySession):
    """Its hidden states are known too; those of tokens with logits for nothing, if it `leaves` them."""

    n_features_max = 40

    def __init__(self, *arguments, leaves: bool = False, **options) -> None:
        super().__init__(*arguments, **options)
        self.model.leaves_last_states = leaves

    def forward(self, parts):
        (part,) = parts
        started, features = time.perf_counter(), None
        if part.with_features or part.with_last_states:
            features = self.states(part.tokens, part.parents, part.inputs)
        if part.with_features:
            assert len(part.tokens) <= self.n_features_max
        elif features is not None:
            features = features[-part.n_logits :]
        rows = self.evaluated(part.tokens, part.n_logits, part.parents, part.inputs)
        return [ForwardResult(rows, time.perf_counter() - started, len(part.tokens), features)]

    def evaluated(self, tokens, n_logits, parents, _inputs):
        return self.eval(tokens, n_logits=n_logits, parents=parents)

    def states(self, tokens, parents, _inputs):
        n_before = len(tokens) - len(parents or ())
        texts = [(*self.tokens, *tokens[: i + 1]) for i in range(n_before)]
        for token, parent in zip(tokens[n_before:], parents or (), strict=True):
            texts.append((*texts[n_before + parent], token))
        return np.array([[state_of(text)] for text in texts], np.float32)


class ToyHeadSession(ToySession):
    """A head whose logits, over the kept tokens, and hidden states follow from the last token and state."""

    n_features_max = 8
    all_logits = False

    def __init__(self, n_kept: int, *, beside: bool = False, **options) -> None:
        super().__init__(lambda prefix: np.zeros(n_kept), n_kept, **options)
        self._beside = beside  # inputs are states that come beside the tokens
        self.inputs: list[tuple[int, float]] = []
        """(token, state) of all that was read: what follows the first `n_past` was taken back."""

    forward = ToyTargetSession.forward

    def eval(self, tokens, **_options):
        raise AssertionError("a head takes inputs")

    def _read(self, tokens, inputs):
        return np.column_stack([tokens, inputs]) if self._beside else inputs

    def states(self, tokens, _parents, inputs):
        read = self._read(tokens, inputs)
        return np.array([[float(hash((int(t), float(f), 1)) % _STATES)] for t, f in read], np.float32)

    def evaluated(self, tokens, n_logits, _parents, inputs):
        inputs = self._read(tokens, inputs)
        assert [int(t) for t, _ in inputs] == list(tokens)
        self.passes.append(len(tokens))
        self.pay(len(tokens))
        self.inputs[len(self.tokens) :] = [(int(t), float(f)) for t, f in inputs]
        self.tokens += tokens
        seeds = [[int(t), int(f)] for t, f in inputs[len(inputs) - n_logits :]]
        rows = [np.random.default_rng(seed).normal(0, 1.5, self.model.n_vocab) for seed in seeds]
        return np.array(rows, np.float32).reshape(n_logits, self.model.n_vocab)


def toy_head(n_vocab: int, token_ids: Sequence[int], **options) -> HeadModel:
    """A head that predicts `token_ids` of `n_vocab` tokens; `options` are those of its session."""

    def fusion(tokens, states):
        return np.column_stack([tokens, states])

    session = ToyHeadSession(len(token_ids), **options)
    ids = np.asarray(token_ids)
    return HeadModel(session, TargetFeatures(1), n_vocab=n_vocab, token_ids=ids, fusion=fusion)


def toy_mtp_head(n_vocab: int, **options) -> HeadModel:
    """A head in the target's own file: it knows all tokens, and takes states beside tokens."""
    session = ToyHeadSession(n_vocab, beside=True, **options)
    return HeadModel(session, TargetFeatures(1), n_vocab=n_vocab)
