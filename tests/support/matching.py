"""Whether a grammar takes a text."""

from __future__ import annotations

import numpy as np

from edgespec.grammar.grammar import Grammar


def accepts(grammar: Grammar, text: str) -> bool:
    """Say whether `grammar` takes a text as a whole, in the longest tokens that may follow."""
    model, constraint, rest, path = grammar.model, grammar.begin(), text.encode(), []
    pieces = [model.piece(token) for token in range(model.n_vocab)]
    row = np.zeros(model.n_vocab, np.float32)
    while rest:
        allowed = np.flatnonzero(np.isfinite(constraint.mask(row, path)))
        fitting = [token for token in allowed if pieces[token] and rest.startswith(pieces[token])]
        if not fitting:
            return False
        path.append(int(max(fitting, key=lambda token: len(pieces[token]))))
        rest = rest[len(pieces[path[-1]]) :]
    return constraint.fitting(path, [model.eos]) == 1
