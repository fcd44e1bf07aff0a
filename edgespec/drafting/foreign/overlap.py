"""Whether one model should draft for another: what their vocabularies share, and how often they agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.drafting.foreign.translated_model import Level, TranslatedModel
from edgespec.drafting.foreign.vocabulary_map import VocabularyMap, map_vocabularies
from edgespec.drafting.foreign.vocabulary_match import vocabulary_difference
from edgespec.llama.session import Session
from edgespec.llama.weights import Model

SAME_FAMILY = 0.84
"""Share of a target's greedy answers that a draft of its family proposes: Qwen2.5-Coder-1.5B and its 0.5B."""

WORTH = 1.1
"""Estimated speed, in plain decoding's, from which a draft is worth trying."""

_LOOKS = 1.4  # passes of a draft of another vocabulary for each of its tokens
_PER_TOKEN = 0.08  # of a pass of the target: what verifying one token more takes
_LONGEST_DRAFT = 8


@dataclass(frozen=True, slots=True)
class Overlap:
    """What two models share. A pass is taken to cost as its bytes: a rough guess, the scheduler measures."""

    n_target: int
    n_draft: int
    types: tuple[str, str]
    """Types of the target's and the draft's tokenizer."""
    n_shared: int
    """Texts that are one token in both."""
    equal: bool
    """Whether the vocabularies are the same: then nothing has to be translated."""
    cost: float
    """Bytes of the draft for each byte of the target."""
    acceptance: float
    """Share of the target's greedy answers that the draft proposed."""

    @property
    def speedup(self) -> float:
        """The best speed, in plain decoding's, of a draft of a fixed length with that acceptance."""
        return expected_speedup(self.acceptance, self.cost * (1.0 if self.equal else _LOOKS))

    @property
    def worth(self) -> bool:
        """Whether drafting can be expected to save time at all."""
        return self.speedup > 1.0

    @property
    def advice(self) -> str:
        """One sentence for the user: whether drafts of this model are worth a try."""
        figures = f"about {self.acceptance:.0%} of what it drafts is accepted"
        if not self.worth:
            return f"do not try: {figures}, which costs more than it saves ({self.cost:.0%} of the size)"
        return f"{'it may just pay' if self.speedup < WORTH else 'worth trying'}: {figures}"


def expected_speedup(acceptance: float, price: float) -> float:
    """Return the best speed, in plain decoding's, of a draft of a fixed length.

    `price`: what a drafted token costs, in passes of the target.
    """
    best = 0.0
    for gamma in range(1, _LONGEST_DRAFT + 1):
        tokens = sum(acceptance**i for i in range(gamma + 1))
        best = max(best, tokens / (1.0 + gamma * (_PER_TOKEN + price)))
    return best


def measure_overlap(
    target: Model, draft: Model, prompts: Sequence[Sequence[int]], *, n_tokens: int, n_threads: int
) -> Overlap:
    """Return what two models share, and how often they agree in answers of `n_tokens` to `prompts`."""
    mapping = map_vocabularies(target, draft)
    shares = measure_agreement(target, draft, mapping, prompts, n_tokens=n_tokens, n_threads=n_threads)
    return Overlap(
        n_target=target.n_vocab,
        n_draft=draft.n_vocab,
        types=(target.tokenizer_type, draft.tokenizer_type),
        n_shared=mapping.n_shared,
        equal=not vocabulary_difference(target, draft),
        cost=draft.header.file_bytes / max(1, target.header.file_bytes),
        acceptance=sum(shares) / len(shares),
    )


def measure_agreement(
    target: Model,
    draft: Model,
    mapping: VocabularyMap,
    prompts: Sequence[Sequence[int]],
    *,
    n_tokens: int,
    n_threads: int,
    level: Level = "auto",
) -> list[float]:
    """Return for each prompt the share of the target's greedy answer that the draft proposed.

    The answers have up to `n_tokens` tokens. A proposal is the likeliest token of the draft's row after
    what the target wrote, so this is the acceptance of drafts of one token at temperature 0. `mapping`: of
    the two vocabularies.
    """
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
