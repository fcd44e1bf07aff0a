"""How alike two vocabularies split the same text, and whether one model should draft for the other.

`find_overlap` looks at the tokenizers only. It estimates how well the models agree from what drafts reached
here, less what the difference of the vocabularies costs. `measure_agreement` runs both models and replaces
the estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from edgespec.drafting.foreign.translated_model import Level, TranslatedModel
from edgespec.drafting.foreign.vocabulary_map import TextTokenizer, VocabularyMap, map_vocabularies
from edgespec.drafting.foreign.vocabulary_match import vocabulary_difference
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.models.suites import DEFAULT, load_suite

SAME_FAMILY, OTHER_FAMILY = 0.84, 0.66
"""Share of the target's greedy answers that drafts proposed, with the target's vocabulary and with another:
for Qwen2.5-Coder-1.5B its own 0.5B 84 %, SmolLM2-135M 65 %, Gemma-3-270M 59 % (`measure_agreement`)."""

_SPLIT_ELSEWHERE = 0.85  # of it, where the draft's tokens end elsewhere than the target's
_LOOKS = 1.4  # passes of the draft for each of its tokens, those that look ahead among them
_PER_TOKEN = 0.08  # of a pass of the target: what verifying one token more takes
_LONGEST_DRAFT = 8
WORTH = 1.1
"""Estimated speed, in plain decoding's, from which a draft is worth trying."""

_NOT_WORTH = 1.0  # times plain decoding's speed


@dataclass(frozen=True, slots=True)
class Overlap:
    """The overlap of two vocabularies, in themselves and over a text."""

    n_target: int
    n_draft: int
    types: tuple[str, str]
    """Types of the target's and the draft's tokenizer."""
    n_shared: int
    """Texts that are one token in both."""
    equal: bool
    """Whether the vocabularies are the same: then nothing has to be translated."""
    n_tokens: int
    """The target's tokens of the text; what follows is over these."""
    coverage: float
    """Share of them that are a token of the draft too."""
    same: float
    """Share of them that the draft's tokenizer splits off in the same place."""
    compression: float
    """The draft's tokens for each of them."""
    cost: float
    """Bytes of the draft for each byte of the target."""
    measured: float | None = None
    """Share of an answer's tokens that the draft proposed, where both models were run."""

    @property
    def acceptance(self) -> float:
        """Expected share of the drafted tokens: as measured, else estimated from the vocabularies."""
        if self.measured is not None:
            return self.measured
        if self.equal:
            return SAME_FAMILY
        return OTHER_FAMILY * (self.same + (1.0 - self.same) * _SPLIT_ELSEWHERE)

    @property
    def speedup(self) -> float:
        """The best speed, in plain decoding's, of a draft of a fixed length with that acceptance.

        A pass is taken to cost as its bytes: a rough guess, the scheduler measures.
        """
        return expected_speedup(
            self.acceptance, self.cost * (1.0 if self.equal else self.compression * _LOOKS)
        )

    @property
    def worth(self) -> bool:
        """Whether drafting can be expected to save time at all."""
        return self.speedup > _NOT_WORTH

    @property
    def advice(self) -> str:
        """One sentence for the user: whether drafts of this model are worth a try."""
        figures = f"about {self.acceptance:.0%} of what it drafts should be accepted"
        if not self.worth:
            if self.cost > 0.5:
                return f"do not try: the draft is too large beside the target ({self.cost:.0%} of its size)"
            return f"do not try: only {figures}, which costs more than it saves"
        if self.speedup < WORTH:
            return f"it may just pay: {figures}"
        return f"worth trying: {figures}"

    @property
    def summary(self) -> str:
        """The overlap and the advice in one line."""
        return (
            f"{self.n_shared:,} tokens are the same, {self.coverage:.0%} of those that text is made of; "
            f"{self.advice}"
        )


def expected_speedup(acceptance: float, price: float) -> float:
    """Return the best speed, in plain decoding's, of a draft of a fixed length.

    `price`: what a drafted token costs, in passes of the target.
    """
    best = 0.0
    for gamma in range(1, _LONGEST_DRAFT + 1):
        tokens = sum(acceptance**i for i in range(gamma + 1))
        best = max(best, tokens / (1.0 + gamma * (_PER_TOKEN + price)))
    return best


def find_overlap(target: Model, draft: Model, mapping: VocabularyMap, text: str) -> Overlap:
    """Return the overlap of two models' vocabularies, related by `mapping`, over `text`."""
    data = text.encode()
    ours, theirs = TextTokenizer(target).tokens(data), TextTokenizer(draft).tokens(data)
    bounds = [0, *accumulate(len(draft.piece(token)) for token in theirs)]
    pieces = set(pairwise(bounds))
    ends = [0, *accumulate(len(target.piece(token)) for token in ours)]
    n = max(1, len(ours))
    return Overlap(
        n_target=target.n_vocab,
        n_draft=draft.n_vocab,
        types=(target.tokenizer_type, draft.tokenizer_type),
        n_shared=mapping.n_shared,
        equal=not vocabulary_difference(target, draft),
        n_tokens=len(ours),
        coverage=float((mapping.draft_of[ours] >= 0).sum()) / n if ours else 0.0,
        same=sum(piece in pieces for piece in pairwise(ends)) / n,
        compression=len(theirs) / n,
        cost=draft.header.file_bytes / max(1, target.header.file_bytes),
    )


def suite_text() -> str:
    """Return the prompts of the suite that ships: code, prose, several languages, figures."""
    return "\n\n".join(prompt.text for prompt in load_suite(DEFAULT).prompts)


def measure_agreement(
    target: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    *,
    n_tokens: int,
    n_threads: int,
    level: Level = "auto",
) -> list[float]:
    """Return for each prompt the share of the target's greedy answer that the draft proposed.

    The answers have up to `n_tokens` tokens. A proposal is the likeliest token of the draft's row after
    what the target wrote, so this is the acceptance of drafts of one token at temperature 0.
    """
    mapping = map_vocabularies(target, draft)
    n_ctx = max(map(len, prompts)) + n_tokens + 1
    shares = []
    with (
        Session(target, n_ctx=n_ctx, n_threads=n_threads, n_logits_max=1) as writer,
        Session(draft, n_ctx=2 * n_ctx, n_threads=n_threads, n_logits_max=2) as reader,
    ):
        model = TranslatedModel(reader, target, mapping, level=level)
        for prompt in prompts:
            writer.clear()
            model.begin()
            tokens = list(prompt)
            token = int(writer.eval(tokens)[0].argmax())
            n_right = 0
            while len(tokens) < len(prompt) + n_tokens:
                n_right += int(model.run(tokens)[0].argmax()) == token
                tokens.append(token)
                if target.is_eog(token):
                    break
                token = int(writer.eval([token])[0].argmax())
            shares.append(n_right / (len(tokens) - len(prompt)))
    return shares


def with_agreement(overlap: Overlap, shares: Sequence[float]) -> Overlap:
    """Return `overlap` with what was measured in place of what was estimated."""
    return replace(overlap, measured=sum(shares) / len(shares))
