"""edgespec's suffix store as the `draft_model` of llama-cpp-python: for programs that keep their `Llama`.

    llm = Llama("model.gguf", logits_all=True, draft_model=SuffixDraft())

`Llama` reads the offered tokens in one pass with its last token, samples after each of them in turn, and
keeps those that came out the same. So drafts do not change its text's distribution, at any temperature;
docs/integration.md tells the costs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.drafting.history import History
from edgespec.drafting.suffix import Document, SuffixDrafts
from edgespec.llama.backend import LlamaDraftModel
from edgespec.llama.fingerprints import tokenizer_fingerprint
from edgespec.llama.weights import Model

Ids = npt.NDArray[np.intc]

STOCK = {1: 1.0, 2: 1.93, 3: 2.5, 4: 3.14, 6: 4.44, 8: 5.09, 12: 6.28, 16: 6.28, 32: 12.56}
"""Cost of a pass over so many tokens with llama.cpp's kernels; a pass over one token costs 1.

For a 1.5B in Q4_K_M, the larger of the costs at 128 and at 2,048 tokens of context (measured as in
docs/measurements/kernels.md). From 16 tokens on, the cost is assumed to grow in proportion.
"""

PACKED = {1: 1.0, 2: 1.11, 3: 1.17, 4: 1.28, 6: 1.61, 8: 1.92, 12: 2.88, 16: 3.57, 32: 7.14}
"""The same with edgespec's kernels, for a `Llama` that was made inside `edgespec.llama.kernels.packing`."""

MOST = 31
"""Most tokens offered per step: with the last token they are as many as the store compares."""

_CAPACITY = 1 << 16  # tokens remembered: 2.9 MB
_CONTEXT = 32  # tokens before a new part that the store needs to find it again
_LEAST = 0.5  # least chance of the first token: a match of one word only (1/3) comes true too rarely
_CREDIT, _MOST_CREDIT = 3.0, 12.0  # passes that drafting may lose: at first, and after savings
_SHARE = 0.03  # of a pass, that drafting may lose in addition per step


class SuffixDraft(LlamaDraftModel):
    """Offers how the same text went on before, in the prompt, the answer or earlier answers, if that pays.

    The store's chances and the costs of passes decide whether it pays. Times cannot be measured here, but it
    is known which tokens were accepted: an account of the passes that drafting saved and cost limits what is
    offered. By these costs, text without repetition loses at most 3 passes and 3 %, and at most 12 passes of
    earlier savings. Use one object for one `Llama`.
    """

    def __init__(
        self,
        most: int = 15,
        *,
        costs: dict[int, float] | None = None,
        history: str | os.PathLike[str] | None = None,
    ) -> None:
        """Offer at most `most` tokens per step; the `n_batch` of `Llama` must be larger, as it usually is.

        `costs`: number of tokens -> cost of a pass over them, in passes over one token; default `STOCK`;
        numbers between are interpolated. `history`: a model's file; drafts also come from the history that
        `edgespec` stored for its tokenizer, which is not changed. Raises ValueError for an invalid `most` or
        `costs`, UsageError or EdgespecError if the model's tokenizer cannot be read.
        """
        if not 0 <= most <= MOST:
            raise ValueError(f"most {most}: must be 0 to {MOST}")
        costs = STOCK if costs is None else costs
        if 1 not in costs or min(costs) < 1 or min(costs.values()) <= 0:
            raise ValueError(f"costs {costs}: must be above 0, and say what a pass over 1 token costs")
        sizes = sorted(costs)
        most = min(most, sizes[-1] - 1)  # no pass larger than the largest in `costs`
        known = np.interp(np.arange(1, most + 2), sizes, [costs[n] / costs[1] for n in sizes])
        self._added = np.maximum.accumulate(known) - 1  # [i]: cost of i offered tokens
        self._credit = _CREDIT
        self._text: Ids = np.empty(0, np.intc)
        self._offered: Ids = np.empty(0, np.intc)
        self._store = SuffixDrafts(_CAPACITY)
        self._document: Document | None = None
        if history is not None:
            with Model(Path(history), vocab_only=True) as model:
                stored = History(tokenizer_fingerprint(model))
                self._store.load(stored.load(_CAPACITY, n_vocab=model.n_vocab))

    def __call__(self, input_ids: Ids, /, **_: Any) -> Ids:  # noqa: ANN401 - as llama_cpp has it
        """Return tokens that may follow `input_ids`, the whole sequence; often none."""
        document = self._follow(input_ids)
        # Offer only what the credit covers if nothing is accepted, so that no more than it is ever lost.
        affordable = int(np.searchsorted(self._added, self._credit, "right")) - 1
        tokens, chances = document.offer((), affordable)
        if not tokens or chances[0] < _LEAST:
            return self._offer([])
        # Expected tokens of a pass over its cost; a plain pass yields 1 token for 1.
        gains = (1 + np.cumsum(np.cumprod(chances))) / (1 + self._added[1 : len(tokens) + 1])
        return self._offer(tokens[: int(gains.argmax()) + 1] if gains.max() > 1 else [])

    def _offer(self, tokens: list[int]) -> Ids:
        self._offered = np.array(tokens, np.intc)
        return self._offered

    def _follow(self, text: Ids) -> Document:
        """Add the new part of `text` to its document. `text` is `Llama`'s own memory: keep copies only."""
        n = min(len(text), len(self._text))
        differs = text[:n] != self._text[:n]
        n_common = int(differs.argmax()) if differs.any() else n
        new = text[n_common:].tolist()
        document = self._document
        if document and n_common == len(self._text) and n_common:
            self._settle(text[n_common:])
            document.extend(new)
        else:  # another text from here on: store it as a new document, with some context to recognize it
            document = self._store.document(text[max(0, n_common - _CONTEXT) : n_common].tolist() + new)
        self._document = document
        self._text = text.copy()
        return document

    def _settle(self, new: Ids) -> None:
        """Settle the last offer's account: accepted tokens minus their cost."""
        n = min(len(new), len(self._offered))
        n_accepted = int((np.cumprod(new[:n] == self._offered[:n])).sum())
        balance = n_accepted - self._added[len(self._offered)] + _SHARE
        self._credit = min(_MOST_CREDIT, self._credit + balance)
