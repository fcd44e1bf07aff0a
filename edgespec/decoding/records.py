"""Records of a generation that packages exchange, and the statistics computed from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from edgespec.platform.metering import Measurement

Origin = Literal["target", "accepted", "resampled", "bonus", "alone"]
"""Where a token comes from: plain decoding, an accepted draft, the target's token after it, or in a cascade
the small model, which the target has not seen."""

Mode = Literal["exact", "cascade", "lenient"]
"""The text's mode: distributed as the target's own, a cascade's, one with lenient acceptance, or exact but
for parts of the prompt that were read after another text."""

FROM = {"suffix": "from earlier text", "model": "from the draft model", "forced": "forced by the grammar"}
"""The sources of drafts, as a line about them names them."""

StopReason = Literal["eog", "stop", "length", "context", "interrupted"]
"""End-of-generation token, stop string, n_predict reached, context full, or ended by the caller."""


class PromptProgress(NamedTuple):
    """How much of a prompt is read."""

    n_read: int
    """Tokens read so far, those that the cache held included."""
    n_tokens: int
    """Tokens of the prompt."""


class Token(msgspec.Struct, frozen=True):
    """One emitted token. `text` is what became certain with it: whole characters, maybe none yet."""

    id: int
    text: str
    origin: Origin
    logprob: float | None = None
    """The logarithm of the probability that the target alone gives it, unfiltered. None: not asked for."""
    top: tuple[tuple[int, float], ...] = ()
    """The target's likeliest tokens in its place, and their logarithms."""

    @property
    def from_draft(self) -> bool:
        """Whether the drafter proposed it and the target accepted it."""
        return self.origin == "accepted"


class Logprobs(msgspec.Struct, frozen=True):
    """The target's own, unfiltered logprobs of a token; the fields are those of Token."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class Step(msgspec.Struct):
    """The outcome of a pass: n_accepted + 1 tokens after a tree of n_drafted, else one token."""

    tokens: tuple[int, ...]
    n_drafted: int = 0
    path: Sequence[int] = ()
    """The accepted nodes of the tree, root to leaf."""
    depth: int = 0
    """Positions drafted: the tree's depth, or n_accepted where the accepted path ended with the draft."""
    judged: Sequence[tuple[int, float, float]] = ()
    """(node, p, q) of those that were tested, if the rule computes them: nodes below the root and below
    accepted ones, up to the accepted one among siblings."""
    n_pending: int = 1
    """Tokens always in the target's next pass: the last one, and those before it that its cache lacks."""
    draft_s: float = 0.0
    verify_s: float = 0.0
    rest_s: float = 0.0
    logprobs: tuple[Logprobs, ...] = ()
    """An entry for each of `tokens`, where asked for."""
    alone: bool = False
    """Whether a cascade's small model wrote them."""

    @property
    def n_accepted(self) -> int:
        """Tokens of the draft that were accepted."""
        return len(self.path)

    @property
    def origins(self) -> tuple[Origin, ...]:
        """The origin of each of `tokens`."""
        if self.n_drafted == 0:
            return ("alone" if self.alone else "target",)
        last: Origin = "bonus" if self.n_accepted == self.depth else "resampled"
        accepted: list[Origin] = ["accepted"] * self.n_accepted
        return (*accepted, last)[: len(self.tokens)]


class Tally(msgspec.Struct):
    """Running totals of a generation. The acceptance histogram is the source of every rate."""

    steps: Counter[tuple[int, int]] = msgspec.field(default_factory=Counter)
    """(depth, n_accepted) -> number of steps."""
    n_drafted: int = 0
    n_emitted: int = 0
    prefill_s: float = 0.0
    embed_s: float = 0.0
    draft_prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    rest_s: float = 0.0

    def add(self, step: Step) -> None:
        """Count a step, its tokens and its seconds."""
        self.steps[step.depth, step.n_accepted] += 1
        self.n_drafted += step.n_drafted
        self.n_emitted += len(step.tokens)
        self.draft_s += step.draft_s
        self.verify_s += step.verify_s
        self.rest_s += step.rest_s


class Stats(msgspec.Struct, frozen=True):
    """Figures of one generation; docs/measuring.md explains them. A rate is None if its divisor is 0."""

    ttft_s: float | None
    """From the call to the first token: the target reads the prompt."""
    prompt_tokens_per_s: float | None
    """Prompt tokens over the time in which the target read them."""
    generation_tokens_per_s: float | None
    """Tokens after the first over the time after the first, the draft's prompt reading included."""
    total_s: float
    steps: int
    """Passes of the target after the prompt's."""
    tau: float | None
    """Tokens emitted a step (Leviathan et al.: the expected tokens a run of the target)."""
    alpha: float | None
    """Accepted over tested, tested counting up to and with the first rejection of each step."""
    draft_acceptance_rate: float | None
    """Accepted over drafted: lower than alpha, since drafts after a rejection are lost untested, and of
    siblings at most one is accepted."""
    n_drafted: int
    n_accepted: int
    n_emitted: int
    """Tokens emitted by the steps, end-of-generation tokens included."""
    histogram: tuple[tuple[int, int, int], ...]
    """(positions drafted, accepted, steps): the source of every rate by position. As Step.depth."""
    acceptance_by_position: tuple[float, ...]
    """Element i: of the steps that drafted more than i positions, the share that accepted more than i."""
    prefill_s: float
    """Time in which the target read the prompt."""
    embed_s: float
    """Time in which the prompt waited for the rows of its images."""
    draft_prefill_s: float
    """Time in which the draft model read the prompt."""
    draft_s: float
    verify_s: float
    rest_s: float
    """Everything outside the two models: sampling, verification, text."""
    peak_rss_bytes: int

    @property
    def time_shares(self) -> dict[str, float]:
        """Shares of draft / verify / rest in the time of all steps."""
        total = self.draft_s + self.verify_s + self.rest_s
        times = {"draft": self.draft_s, "verify": self.verify_s, "rest": self.rest_s}
        return {name: seconds / total for name, seconds in times.items()} if total else {}


class Rates(msgspec.Struct, frozen=True):
    """Figures of an acceptance histogram, as in Stats."""

    steps: int
    n_accepted: int
    alpha: float | None
    acceptance_by_position: tuple[float, ...]


def rates(histogram: Mapping[tuple[int, int], int]) -> Rates:
    """Return the rates of a histogram, (depth, n_accepted) -> number of steps."""
    n_accepted = sum(accepted * count for (_, accepted), count in histogram.items())
    n_tested = sum(min(accepted + 1, drafted) * count for (drafted, accepted), count in histogram.items())
    by_position = []
    for i in range(max((drafted for drafted, _ in histogram), default=0)):
        reached = sum(count for (drafted, _), count in histogram.items() if drafted > i)
        kept = sum(count for (_, accepted), count in histogram.items() if accepted > i)
        by_position.append(kept / reached)
    return Rates(
        steps=sum(histogram.values()),
        n_accepted=n_accepted,
        alpha=_per(n_accepted, n_tested),
        acceptance_by_position=tuple(by_position),
    )


def _per(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator > 0 else None


def summarise(
    tally: Tally,
    *,
    n_prompt: int,
    n_tokens: int,
    ttft_s: float | None,
    total_s: float,
    peak_rss_bytes: int,
) -> Stats:
    """Return the statistics of a generation of `n_tokens` tokens; times in seconds."""
    found = rates(tally.steps)
    after_first_s = 0.0 if ttft_s is None else total_s - ttft_s
    return Stats(
        ttft_s=ttft_s,
        prompt_tokens_per_s=_per(n_prompt, tally.prefill_s),
        generation_tokens_per_s=_per(n_tokens - 1, after_first_s) if n_tokens > 1 else None,
        total_s=total_s,
        steps=found.steps,
        tau=_per(tally.n_emitted, found.steps),
        alpha=found.alpha,
        draft_acceptance_rate=_per(found.n_accepted, tally.n_drafted),
        n_drafted=tally.n_drafted,
        n_accepted=found.n_accepted,
        n_emitted=tally.n_emitted,
        histogram=tuple((*outcome, count) for outcome, count in sorted(tally.steps.items())),
        acceptance_by_position=found.acceptance_by_position,
        prefill_s=tally.prefill_s,
        embed_s=tally.embed_s,
        draft_prefill_s=tally.draft_prefill_s,
        draft_s=tally.draft_s,
        verify_s=tally.verify_s,
        rest_s=tally.rest_s,
        peak_rss_bytes=peak_rss_bytes,
    )


class Result(msgspec.Struct, frozen=True):
    """A finished (or interrupted) generation."""

    text: str
    token_ids: tuple[int, ...]
    """The emitted tokens, without an end-of-generation token."""
    prompt_tokens: int
    stop_reason: StopReason
    seed: int | None
    """Given again, it gives this text again. None if timing influenced the text, so that no seed does."""
    target: str
    draft: str | None
    kernels: str
    """The instruction set of edgespec's kernels in use, "stock" when llama.cpp's own did the work."""
    sources: dict[str, tuple[int, int]]
    """Tokens drafted and accepted, for each source of drafts."""
    note: str
    """A sentence on what was drafted, or why nothing was; "" if nothing was to be drafted."""
    stats: Stats
    plain_tokens_per_s: float | None = None
    """Tokens a second expected of plain decoding at the end, after measured passes. None: not known."""
    energy: Measurement | None = None
    """Energy of the whole generation; None if no meter was given."""
    mode: Mode = "exact"
    n_cached: int = 0
    """Tokens of the prompt that were known of an earlier timeline and not read again."""
    prompt_logprobs: tuple[Logprobs, ...] = ()
    """Logprobs of each token of the prompt but the first, where asked for."""
    end_token: Token | None = None
    """The end-of-generation token that ended the text, where logprobs were asked for."""
    target_share: float = 1.0
    """Share of the emitted tokens that the target wrote or verified; 1 if there are none."""

    @property
    def times_plain(self) -> float | None:
        """Its speed over that expected of plain decoding. None: unknown, or nothing was drafted."""
        rate, plain = self.stats.generation_tokens_per_s, self.plain_tokens_per_s
        return rate / plain if rate and plain and self.stats.n_drafted else None

    @property
    def exact(self) -> bool:
        """Whether the text is distributed as the target's own."""
        return self.mode == "exact"
