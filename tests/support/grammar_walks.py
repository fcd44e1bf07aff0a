"""Texts that a grammar allows: whether one is, and random ones."""

from __future__ import annotations

import random

import numpy as np

from edgespec.grammar.grammar import Grammar


def allowed_text(grammar: Grammar, text: str) -> bool:
    """Return whether `text` is one that the grammar allows as a whole."""
    model, constraint = grammar.model, grammar.begin()
    with constraint:
        for token in model.tokenize(text, add_special=False, parse_special=False):
            if not constraint.allows((), token):
                return False
            constraint.advance([token])
        return constraint.allows((), model.eos)


def walk(grammar: Grammar, seed: int, *, longest: int = 120, end: float = 0.4) -> str | None:
    """Return a text of allowed tokens, chosen at random; None if it became too long.

    The text ends where it may with probability `end`, and tokens that close something come often.
    """
    model, rng, text = grammar.model, random.Random(seed), b""
    row = np.zeros(model.n_vocab, np.float32)
    with grammar.begin() as constraint:
        for _ in range(longest):
            masked = constraint.mask(row, ())
            assert masked is not None
            ids = [int(token) for token in np.flatnonzero(np.isfinite(masked))]
            ends = [token for token in ids if model.is_eog(token)]
            if ends and (len(ends) == len(ids) or rng.random() < end):
                return text.decode()
            ids = [token for token in ids if token not in ends]
            closing = [token for token in ids if model.piece(token)[:1] in b'"}]' and model.piece(token)]
            chosen = rng.choice(closing if closing and rng.random() < 0.3 else ids)
            text += model.piece(chosen)
            constraint.advance([chosen])
    return None
