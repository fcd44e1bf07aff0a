"""edgespec's suffix store as the `draft_model` of llama-cpp-python: for programs that keep their `Llama`.

    llm = Llama("model.gguf", logits_all=True, draft_model=SuffixDraft())

`Llama` reads what is offered here in one pass with the last token, samples after each token of it in turn,
and keeps what came out the same. So the text is its own, at any temperature; docs/integration.md says what
that costs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.drafting.history import History
from edgespec.drafting.suffix import SuffixDrafts
from edgespec.llama.backend import LlamaDraftModel
from edgespec.llama.fingerprints import tokenizer_fingerprint
from edgespec.llama.weights import Model

Ids = npt.NDArray[np.intc]

STOCK = {1: 1.0, 2: 1.93, 3: 2.5, 4: 3.14, 6: 4.44, 8: 5.09, 12: 6.28, 16: 6.28, 32: 12.56}
"""What a pass over so many tokens costs, in passes over one: llama.cpp's kernels.

Of a 1.5B in Q4_K_M, the dearer of 128 and 2,048 tokens of context (docs/kernels.md has how it was measured);
from 16 tokens on it is taken to grow with them.
"""

PACKED = {1: 1.0, 2: 1.11, 3: 1.17, 4: 1.28, 6: 1.61, 8: 1.92, 12: 2.88, 16: 3.57, 32: 7.14}
"""The same with edgespec's kernels, for a `Llama` that was made inside `edgespec.llama.kernels.packing`."""

MOST = 31
"""Most tokens a step: with one more they are as many as the store compares."""

_CAPACITY = 1 << 16  # tokens remembered: 2.4 MB
_CONTEXT = 32  # tokens in front of a new part that the store needs to find it again
_LEAST = 0.5  # chance of the first token: what one word says (1/3) comes true more rarely than that
_CREDIT, _MOST_CREDIT = 3.0, 12.0  # passes that drafting may lose: at first, and of what it has saved since
_SHARE = 0.03  # of a pass: what it may lose besides, a step


class SuffixDraft(LlamaDraftModel):
    """Offers how the text went on before, where that pays: in the prompt, the answer, earlier answers.

    What pays is decided by the chances that the store gives and by what passes cost. `Llama` shows no clock,
    but it shows what was accepted: an account is kept of the passes that drafting saved and cost, and no more
    is offered than it can bear. So text without repetition loses 3 passes and 3 % at the most, by these
    costs, and at most 12 passes of what was saved before. One such object serves one `Llama`.
    """

    def __init__(
        self,
        most: int = 15,
        *,
        costs: dict[int, float] | None = None,
        history: str | os.PathLike[str] | None = None,
    ) -> None:
        """Offer at most `most` tokens a step; the `n_batch` of `Llama` must be larger, as it usually is.

        `costs`: tokens of a pass -> what it costs in passes over one token, by default `STOCK`; others are
        interpolated. `history`: the file of a model; what `edgespec` stored of texts in its tokens is drafted
        from too, and nothing is added. Raises ValueError for what is no number of tokens or no costs,
        UsageError or EdgespecError where the model's tokenizer cannot be read.
        """
        if not 0 <= most <= MOST:
            raise ValueError(f"most {most}: must be 0 to {MOST}")
        costs = STOCK if costs is None else costs
        if 1 not in costs or min(costs) < 1 or min(costs.values()) <= 0:
            raise ValueError(f"costs {costs}: must be above 0, and say what a pass over 1 token costs")
        sizes = sorted(costs)
        most = min(most, sizes[-1] - 1)  # more than `costs` knows is not offered
        known = np.interp(np.arange(1, most + 2), sizes, [costs[n] / costs[1] for n in sizes])
        self._added = np.maximum.accumulate(known) - 1  # [i]: what i tokens besides the last one cost
        self._credit = _CREDIT
        self._text: Ids = np.empty(0, np.intc)
        self._offered: Ids = np.empty(0, np.intc)
        self._store = SuffixDrafts(_CAPACITY)
        if history is not None:
            with Model(Path(history), vocab_only=True) as model:
                stored = History(tokenizer_fingerprint(model))
                self._store.load(stored.load(_CAPACITY, n_vocab=model.n_vocab))

    def __call__(self, input_ids: Ids, /, **_: Any) -> Ids:  # noqa: ANN401 - as llama_cpp has it
        """Return tokens that may follow `input_ids`, the whole timeline; often none."""
        self._follow(input_ids)
        # Only what the account can bear if none of it comes true: so no more than the credit is ever lost.
        affordable = int(np.searchsorted(self._added, self._credit, "right")) - 1
        tokens, chances = self._store.offer((), affordable)
        if not tokens or chances[0] < _LEAST:
            return self._offer([])
        # Passes that bring 1 + expected tokens where a plain one brings 1, for what they cost.
        gains = (1 + np.cumsum(np.cumprod(chances))) / (1 + self._added[1 : len(tokens) + 1])
        return self._offer(tokens[: int(gains.argmax()) + 1] if gains.max() > 1 else [])

    def _offer(self, tokens: list[int]) -> Ids:
        self._offered = np.array(tokens, np.intc)
        return self._offered

    def _follow(self, text: Ids) -> None:
        """Take in what is new in `text`; it is `Llama`'s own memory."""
        n = min(len(text), len(self._text))
        differs = text[:n] != self._text[:n]
        n_common = int(differs.argmax()) if differs.any() else n
        new = text[n_common:].tolist()
        if n_common == len(self._text) and n_common:
            self._settle(text[n_common:])
            self._store.extend(new)
        else:  # another text from here on: a document of its own, with enough in front to be recognized
            self._store.begin(text[max(0, n_common - _CONTEXT) : n_common].tolist() + new)
        self._text = text.copy()

    def _settle(self, new: Ids) -> None:
        """Book what became of the last offer: tokens that came out as offered, less what they cost."""
        n = min(len(new), len(self._offered))
        n_accepted = int((np.cumprod(new[:n] == self._offered[:n])).sum())
        balance = n_accepted - self._added[len(self._offered)] + _SHARE
        self._credit = min(_MOST_CREDIT, self._credit + balance)
