"""How much to draft now, and from which source: one inequality, at every step anew.

With `rate` the tokens a second (or a joule) that generation makes now, a further token is drafted when

    P(it and all before it are accepted)  >=  rate * (what it adds to the time of draft and verification)

since that time would otherwise bring `rate` tokens each second: Dinkelbach's rule for the best ratio of
tokens to time. P is a product of acceptances (acceptance.py), the times come from T(n) (profile.py). T(n) has
steps, so the first token may not pay alone: the length is chosen at which the sum of P - rate * cost is
largest. Not to draft is a normal answer.

Requests that share passes have one pace (`BatchPace`): `rate` is that of all together, and the price of a
token is what it adds to their pass where each of them drafts as much. One text alone is the case of one.

Exactness: a decision depends on tokens already drafted and on the distribution at the next position, never on
the token sampled from it (docs/measuring.md). Questions to a pace change nothing in it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from edgespec.decoding.choices import Objective
from edgespec.decoding.option_table import MAX_GAMMA
from edgespec.drafting.acceptance import AcceptanceTables
from edgespec.drafting.profile import (
    N_MAX,
    Clocks,
    CostCurve,
    PassCosts,
    Profile,
    ProfileKey,
    TimedCurve,
    alike,
    extended,
    guessed_curve,
    load,
    store_learned,
)
from edgespec.errors import UsageError
from edgespec.llama.weights import Model

# ---- the rule ----


@dataclass(frozen=True, slots=True)
class Policy:
    """The limits set to a pace by the user and the models: which sources may propose, and how."""

    suffix: bool = True
    """The suffix store may propose to the target."""
    model: bool = True
    """The draft model may propose to the target."""
    staged: bool = True
    """The suffix store may propose to the draft model."""
    branches: bool = True
    """A step may propose several tokens for one position."""
    siblings: bool = True
    """Several may also be sampled for one position; these cannot be pruned."""
    rereads: bool = False
    """The target takes rejected tokens back only together with all others of their pass, which are then read
    again; a recurrent or hybrid target without snapshots does."""
    splits: bool = False
    """A pass over several texts is made of one for each number of tokens that they have in it; that of a
    recurrent or hybrid target is."""


@dataclass(frozen=True, slots=True)
class SuffixAction:
    """Take the first `n` tokens that the suffix store offers."""

    n: int


@dataclass(frozen=True, slots=True)
class ModelAction:
    """Run the draft model over its unread tokens and the first `n_guesses` tokens offered."""

    n_guesses: int
    n_recent: int | None = None
    """Most of the unread tokens that it reads: those before are left out for good; None: all."""


DraftAction = SuffixAction | ModelAction | None
"""None: verify now."""


class OtherTexts(NamedTuple):
    """The other texts in the passes of a step."""

    n_texts: int = 0
    n_tokens: int = 0
    """Tokens of theirs that are always in the target's pass."""
    rate: float = 0.0
    """Tokens a second (or a joule) that they make, and that those make whose prompts are read."""
    n_reading: int = 0
    """Texts, beside these, whose prompts are read."""
    sharing: float = 1.0
    """The share of them that is in a draft model's pass, where one is made."""


MAX_UNREAD = N_MAX
"""Most tokens that a draft model reads with its next pass; with more it reads in a pass of its own before."""

ANSWER_TOKENS = 128
"""How long an answer is expected to be whose limit is not known."""

_STEPS = 32.0  # over which the rate is an average, and after which outcomes count a little less
_COPYING = 0.5  # chance of the first token offered, from which text counts as copied, with a rate of its own
_FEW, _LOSS = (
    4,
    0.02,
)  # tokens of a brief answer; share of its time so far that a draft may cost: 0.90 -> 1.00
_READ_LATER = 0.25  # of reading what the draft model missed: later steps would have to read it too
_SOON = 8.0  # tokens within which reading a prompt is paid for, if that many were sure to come
_RECENT = 128  # tokens of what the draft model has not read that it reads: more cost more than they bring
_TRIED = 0.0075  # share of the time for trying a source that has stopped paying: texts change
_LIKELY = 0.5  # chance of the store's first token, from which it is taken where gamma is fixed
_LOOK_AHEAD = 8  # tokens


class Pace:
    """Decides for one text how much it drafts, and learns from every step."""

    is_paused = False
    """Whether nothing is drafted in the steps to come (`BatchPace`)."""
    used_model = False
    """Whether the draft model ran in its last step."""
    n_known = 0
    """Tokens of the prompt that nobody had to read, since they were in the cache."""

    def __init__(
        self,
        policy: Policy,
        clocks: Clocks,
        acceptance: AcceptanceTables,
        *,
        gamma: int | None = None,
        in_joules: bool = False,
    ) -> None:
        """Decide under `policy`. `gamma`: tokens of each step, where the user set them.

        `in_joules`: the costs of `clocks` are joules.
        """
        self.policy = policy if gamma is None else replace(policy, branches=False)
        self.costs, self.acceptance = clocks, acceptance
        self.gamma, self.in_joules = gamma, in_joules
        self.n_max = MAX_GAMMA if gamma is None else gamma
        self.unit = "tokens/J" if in_joules else "tokens/s"
        self.others = OtherTexts()
        self._n_predict: float = math.inf
        self._n_emitted = self._n_past = self._n_read = 0
        self._n_pending = 1
        self._copying = False
        self._made = {True: [1.0, 1.0], False: [1.0, 1.0]}  # copied text, new text: tokens and their cost
        self._saved = 0.0  # for trying a source, since it drafted last
        self._n_steps = 0
        self.start_step(0)

    @property
    def needs_model(self) -> bool:
        """Whether the draft model has to draft from the first step on, whatever reading the prompt costs."""
        return not self.policy.suffix or self.gamma is not None

    # ---- what it is told ----

    def begin(self, n_past: int, n_predict: int | None) -> None:
        """Start on a text of at most `n_predict` tokens after `n_past`."""
        self._n_predict = math.inf if n_predict is None else n_predict
        self._n_emitted = 1
        self._n_read = n_past - self.n_known
        self._saved = 0.0
        self.acceptance.begin()
        self.start_step(n_past)
        for made in self._made.values():
            made[:] = _STEPS / 4, _STEPS / 4 * self._plain
        self.rate = self.others.rate + self.own_rate

    def start_step(
        self, n_past: int, offered: Sequence[float] = (), *, n_draft: int = 0, n_pending: int = 1
    ) -> None:
        """Price the tokens of a step at this length of context; the suffix store offers this.

        `n_draft`: the context of the draft model, which may be shorter. `n_pending`: tokens always in the
        target's pass. What is copied is written faster than what is new, so each has its own rate: a drafted
        token saves the time that it would take otherwise.
        """
        self._copying = bool(offered) and offered[0] >= _COPYING
        self._n_past, self._n_pending = n_past, n_pending
        costs, draft = self.costs.target.at(n_past), self.costs.draft
        self.verify_costs = self._shared(costs, n_pending + self.others.n_tokens)
        n_drafting = 1 + round(self.others.sharing * self.others.n_texts)
        self._passes = alike(draft.at(n_draft), n_drafting) if draft else [0.0] * (N_MAX + 1)
        (self._plain,) = extended(costs, [1 + self.others.n_texts + self.others.n_reading])
        self.rate = max(self.own_rate, 1.0 / self._plain) + self.others.rate
        self._again: list[float] = []  # tokens that are lost if one is rejected after that many drafted ones
        if self.policy.rereads:
            read = extended(costs, range(n_pending + 1, n_pending + N_MAX + 1))
            self._again = [self.rate * max(0.0, cost - costs[1]) for cost in read]

    def _shared(self, costs: Sequence[float], base: int) -> list[float]:
        """The costs of the target's pass with 0, 1 .. tokens drafted for this text, from index 1 on.

        Each text pays an equal part of what all add where all draft as much. The price of one token alone
        would not do: T has steps, so that it may be nothing, and then every text seems free.
        """
        m = 1 + self.others.n_texts
        (now,) = extended(costs, [base])
        if self.policy.splits and m > 1:
            return [0.0, now, *(now + cost for cost in costs[1:])]
        return [0.0, *(now + (cost - now) / m for cost in extended(costs, range(base, base + m * N_MAX, m)))]

    def learn(
        self, n_emitted: int, seconds: float, n_drafted: int, passes: Sequence[tuple[int, int]]
    ) -> None:
        """Count a step of `seconds` that verified `n_drafted` tokens and emitted `n_emitted`.

        `passes`: the draft model's, as (tokens read, guesses among them).
        """
        cost = seconds
        if self.in_joules:
            cost = self.verify_costs[n_drafted + 1] + sum(self._passes[min(n, N_MAX)] for n, _ in passes)
        made = self._made[self._copying]
        made[:] = [
            (1.0 - 1.0 / _STEPS) * so_far + more for so_far, more in zip(made, (n_emitted, cost), strict=True)
        ]
        self.used_model = bool(passes)
        self._n_emitted += n_emitted
        self._n_steps += 1
        if self._n_steps % _STEPS == 0:
            self.acceptance.next.fade()
        self._saved = (
            (n_emitted - 1) / self.rate if passes else self._saved + _TRIED * cost / (1 + self.others.n_texts)
        )

    # ---- what it is asked ----

    @property
    def own_rate(self) -> float:
        """Tokens a second (or a joule) that this text made lately."""
        tokens, cost = self._made[self._copying]
        return tokens / cost

    @property
    def least_price(self) -> float:
        """The lowest price, in tokens, of one more token in the target's pass at this step."""
        least = min(b - a for a, b in itertools.pairwise(self.verify_costs[1:_LOOK_AHEAD]))
        return min(1.0, max(0.0, self.rate * least))

    def _gain(self, path: float, depth: int, before: float) -> float:
        """The gain of verifying one token after `depth`: P of it, less the tokens that its time is worth."""
        added = self.verify_costs[depth + 2] - self.verify_costs[depth + 1]
        lost = self._again[depth] * (before - path) if self._again else 0.0
        return path - self.rate * added - lost

    def best_length(
        self,
        path: float,
        depth: int,
        chances: Sequence[float],
        *,
        offered: Sequence[float] = (),
        cost: float = 0.0,
    ) -> tuple[int, float]:
        """Return how many tokens to draft for `cost`, which need no pass of the draft model, and their gain.

        They follow `depth` drafted tokens, all accepted with probability `path`. `chances`: that each is
        accepted, given the one before. `offered`: that it is there at all; empty: it is.
        """
        gain, best, n, reach = -self.rate * cost, 0.0, 0, 1.0
        for i, chance in enumerate(chances[: MAX_GAMMA - depth]):
            before, path = path, path * chance
            reach *= offered[i] if offered else 1.0
            gain += reach * self._gain(path, depth + i, before)
            if gain > best:
                best, n = gain, i + 1
        return n, best

    def next(
        self, path: float, depth: int, unread: int, offered: Sequence[float], bucket: int
    ) -> DraftAction:
        """Choose what follows `depth` drafted tokens, all accepted with probability `path`.

        `unread`: tokens that the draft model has yet to read; 0 without a model. `offered`: the estimated
        acceptances of the suffix store's tokens, each given the one before. `bucket`: of the last token.
        """
        policy = self.policy
        can_run = policy.model and unread > 0
        if self.gamma is not None:
            return self._next_of_gamma(self.gamma - depth, unread if can_run else 0, offered)
        if self._is_brief:
            return None
        n, gain = self.best_length(path, depth, offered) if policy.suffix else (0, 0.0)
        if can_run:
            n_guesses = self._n_guesses(unread, offered) if policy.staged else 0
            with_model = self._gain_of_model(path, depth, unread, bucket, offered[:n_guesses])
            if with_model > gain:
                return ModelAction(n_guesses, _RECENT if unread > MAX_UNREAD else None)
            if not (depth or n) and self.can_try(self._passes[min(unread, MAX_UNREAD)]):
                return ModelAction(0, MAX_UNREAD)
        return SuffixAction(n) if n else None

    def can_try(self, cost: float) -> bool:
        """Whether enough was saved since a source drafted last to ask it for a token, which takes `cost`."""
        return self._saved > cost + self.verify_costs[2] - self.verify_costs[1]

    def _next_of_gamma(self, n_left: int, unread: int, offered: Sequence[float]) -> DraftAction:
        """Return the next action if the length is fixed: only the source is left to choose."""
        if n_left <= 0:
            return None
        if self.policy.suffix and offered and (not unread or offered[0] >= _LIKELY):
            return SuffixAction(min(n_left, len(offered)))
        n_guesses = min(n_left - 1, len(offered), N_MAX - unread) if self.policy.staged else 0
        return ModelAction(max(0, n_guesses)) if unread else None

    @property
    def _is_brief(self) -> bool:
        """Whether the answer may be over before a draft pays, and the draft is no small part of its time."""
        if self._n_emitted >= _FEW or not (self.policy.suffix and self.policy.model):
            return False
        costs, each = self.verify_costs, self.costs.target.at(self._n_past // 2)[N_MAX] / N_MAX
        draft = costs[_FEW + 1] - costs[1] + _FEW * self._passes[1]
        return draft > _LOSS * (self._n_read * each + self._n_emitted * costs[1])

    def _n_guesses(self, unread: int, chances: Sequence[float]) -> int:
        """Return how many guesses the draft model should check: a right one saves it a pass.

        `chances` are those of the guesses, each given the one before; `unread` tokens are read with them.
        """
        passes, path = self._passes, 1.0
        for i, chance in enumerate(chances):
            path *= chance
            n = unread + i + 1
            if n > MAX_GAMMA or path * passes[1] < passes[n] - passes[n - 1]:
                return i
        return len(chances)

    def _gain_of_model(
        self, path: float, depth: int, unread: int, bucket: int, guesses: Sequence[float] = ()
    ) -> float:
        """Return the gain of running the draft model, for as long as that pays.

        `guesses` are the chances of the guesses that it checks.
        """
        if depth >= MAX_GAMMA:
            return 0.0
        passes, table = self._passes, self.acceptance.next
        gain = -self.rate * self._cost_of_run(unread, len(guesses))
        chance = 1.0  # that the pass comes so far
        before, path = path, path * table.chance(depth, bucket)
        best, least = -math.inf, self.rate * passes[1]
        for i in range(MAX_GAMMA - depth):
            if i > len(guesses):
                if path < least:
                    break  # not even if verification were free
                gain -= chance * least
            gain += chance * self._gain(path, depth + i, before)
            if i >= len(guesses):
                best = max(best, gain)
            else:
                chance *= guesses[i]
            before, path = path, path * table.overall
        return best if best > -math.inf else gain

    def _cost_of_run(self, unread: int, n_guesses: int) -> float:
        """Return what the draft model's pass costs this step, and its share of what it reads for later ones.

        A text that has written n tokens is expected to write n more. So a prompt is read when what that
        costs is small beside what drafting should gain in them.
        """
        passes, draft, n = self._passes, self.costs.draft, unread + n_guesses
        usual = passes[min(n, 2 + n_guesses, N_MAX)]  # the last drafted token and the one after it
        if n <= N_MAX:
            return usual + _READ_LATER * (passes[n] - usual)
        if draft is None:
            return usual
        to_come = min(self._n_emitted, self._n_predict - self._n_emitted)
        return usual + min(1.0, _SOON / max(1.0, to_come)) * draft.read(min(n, _RECENT), 0)

    def n_worthwhile(self, path: float, depth: int, chances: Sequence[float]) -> int:
        """Return how many tokens to add that need no pass of the draft model; arguments as `best_length`."""
        if self.gamma is not None:
            return max(0, min(len(chances), self.gamma - depth))
        return self.best_length(path, depth, chances)[0]

    def verifies(self, path: float, depth: int, bucket: int, *, chance: float = 1.0) -> bool:
        """Whether to verify a token of the draft model, which has run: only verification has a price.

        `path`: the probability that the token and all before it are accepted, of which `chance` is its own.
        They and `bucket` come from the distribution at the position. The token pays alone, or together with
        those that may follow.
        """
        if self.gamma is not None:
            return depth < self.gamma
        gain = self._gain(path, depth, path / chance if chance > 0.0 else path)
        return gain >= 0.0 or gain + self._gain_of_model(path, depth + 1, 1, bucket) > 0.0

    def branches(self, path: float, n_drafted: int) -> bool:
        """Whether a token off the trunk, accepted with `path`, pays after `n_drafted` tokens.

        The trunk may grow later, so the price is a mean over the next tokens. A token accepted off the trunk
        is in the next pass again, and pays the price again.
        """
        verify = self.verify_costs
        if not self.policy.branches or self.gamma is not None or n_drafted + 3 > MAX_GAMMA:
            return False
        price = self.rate * 0.5 * (verify[n_drafted + 3] - verify[n_drafted + 1])
        return path * (1.0 - price) >= price

    def speedup(self, n_past: int, n_texts: int) -> tuple[float, float]:
        """Return each text's cost in a plain pass of `n_texts`, and the speed-up of the best fixed length.

        The speed-up is over plain decoding, for drafts of only the draft model, if all texts draft alike.
        """
        verify, draft = alike(self.costs.target.at(n_past), n_texts), self.costs.draft
        if draft is None:
            return verify[1], 0.0
        passes = alike(draft.at(0), n_texts)
        best, tokens, path = 0.0, 1.0, 1.0
        for depth in range(_LOOK_AHEAD):
            path *= self.acceptance.next.overall
            tokens += path
            best = max(best, tokens / ((depth + 1) * passes[1] + verify[depth + 2]))
        return verify[1], best * verify[1]

    def plain_rate(self) -> float | None:
        """Return the tokens a second that plain decoding is expected to make now.

        None where that would be a guess, or hold for several requests together.
        """
        if not self._n_emitted or self.in_joules or self.others.n_tokens or not self.costs.target.knows_plain:
            return None
        return 1.0 / self.verify_costs[1]

    def explain(self, sources: Mapping[str, tuple[int, int]], *, has_run: bool = False) -> str:
        """Return a sentence about how fast the text came with drafts, or why nothing was drafted.

        `sources`: the tokens that each drafted, and those accepted. `has_run`: whether the draft model did.
        """
        if self.gamma is not None:
            asked = f"drafts of {self.gamma} {'token' if self.gamma == 1 else 'tokens'} a step were asked for"
            why = "the answer was over before" if self.policy.model else "no earlier text was there to repeat"
            return asked if sources else f"nothing was drafted, though {asked}: {why}"
        unused = self._why_no_model() if self.policy.model and self.costs.draft and not has_run else ""
        if sources:
            return f"{self.rate:.1f} {self.unit} lately" + (f"; {unused}" if unused else "")
        why = unused or "no earlier text was worth repeating"
        if not self._n_emitted:
            why = "the answer was over with its first token"
        elif self.is_paused:
            why = "the answers that share the passes are written faster without"
        elif self._n_emitted <= _FEW:
            why = "so short an answer is over before a draft pays"
        elif has_run:
            why = "the draft model was too unsure of its tokens for their check to pay"
        return f"nothing was drafted: {why}"

    def _why_no_model(self) -> str:
        price = f"{self._passes[1]:.2g} J" if self.in_joules else f"{1e3 * self._passes[1]:.1f} ms"
        chance = 100 * self.acceptance.next.chance(0, 0)
        return (
            f"the draft model was not expected to pay: a token takes {price}, and {chance:.0f} % are accepted"
        )


# ---- what texts share ----

_WINDOW = 16  # steps over which the pace of a batch is taken
_LEAST_GAIN = 0.98  # of plain decoding's pace: a little less is noise
_HALF, _LEAST_AT_HALF = 8, 0.85  # of the window: what is that slow by then is not waited for
_SHORTEST, _LONGEST = 64, 256  # steps of a pause: twice as many each time that drafts did not pay again
_WEIGHT = 0.1  # of a step in the mean of what it takes beside its pass
_CHANGED = 0.25  # share of the texts that may come or go before drafts are tried again


class Writer(NamedTuple):
    """A text in a batch's next step."""

    pace: Pace | None
    """None: it is decoded plainly."""
    n_pending: int
    """Tokens always in the target's pass."""
    n_past: int


class BatchPace:
    """The pace of texts that share passes: tells each of the others, and decides whether drafts pay at all.

    The latter is measured, whatever a pace expects: deciding takes time too, which no T(n) holds. Where one
    more token costs what it brings, as beside seven others, that time is lost. Then nothing is drafted for a
    while, and later it is tried again; what was found for about as many texts is remembered.
    """

    def __init__(self, clocks: Clocks) -> None:
        """Begin with drafts; `clocks` say what a pass without them takes."""
        self._clocks = clocks
        self._beside = 0.0  # seconds of a step that drafts nothing beside its pass
        self._sharing = 1.0  # of the texts, how many others a text drafts with: few do where few are sure
        self._found: dict[int, int] = {}  # by number of texts: the last pause, where drafts did not pay
        self._begin(0)

    def _begin(self, n_texts: int) -> None:
        known = [n for n in self._found if not self._changed(n, n_texts)]
        self._n_texts = min(known, key=lambda n: abs(n - n_texts), default=n_texts)
        self._n_steps, self._spent, self._plain = 0, 0.0, 0.0
        self._n_pause_left = self._found.get(self._n_texts, 0)  # steps of the pause under way
        self._pause = max(_SHORTEST, self._n_pause_left)

    @staticmethod
    def _changed(before: int, n_texts: int) -> bool:
        return abs(n_texts - before) > _CHANGED * before

    @property
    def is_paused(self) -> bool:
        """Whether nothing is to be drafted in the next step."""
        return self._n_pause_left > 0

    def share(self, writers: Sequence[Writer], n_reading: int = 0, n_prefilled: int = 0) -> None:
        """Tell each pace before a step what the others have in it.

        `n_reading`: texts whose prompts are read, with `n_prefilled` tokens. To hold them up costs as much as
        to hold up those that are written.
        """
        n_texts, n_all = len(writers) + n_reading, sum(writer.n_pending for writer in writers) + n_prefilled
        if n_ran := sum(1 for pace, _, _ in writers if pace and pace.used_model):
            self._sharing += _WEIGHT * ((n_ran - 1) / max(1, len(writers) - 1) - self._sharing)
        rates = []
        for pace, _, n_past in writers:
            plain = 1.0 / self._clocks.target.seconds(n_texts, n_past)
            rates.append(max(pace.own_rate, plain) if pace else plain)
        all_rates = sum(rates) * n_texts / max(1, len(writers))
        for (pace, n_pending, _), rate in zip(writers, rates, strict=True):
            if pace:
                pace.is_paused = n_texts > 1 and self.is_paused and pace.gamma is None and not pace.in_joules
                others = len(writers) - 1, n_all - n_pending, all_rates - rate
                pace.others = OtherTexts(*others, n_reading, self._sharing)

    def learn(self, n_texts: int, n_made: int, seconds: float, n_past: int) -> None:
        """Count a step of `seconds` in which `n_texts` wrote `n_made` tokens after `n_past` each."""
        plain = self._clocks.target.seconds(n_texts, n_past)
        if self._changed(self._n_texts, n_texts):
            self._begin(n_texts)
        if self._n_pause_left:
            self._n_pause_left -= 1
            self._beside += _WEIGHT * (max(0.0, seconds - plain) - self._beside)
            return
        self._n_steps += 1
        self._spent += seconds
        self._plain += (plain + self._beside) * n_made / n_texts
        is_slow = self._n_steps == _HALF and self._plain < _LEAST_AT_HALF * self._spent
        if self._n_steps < _WINDOW and not is_slow:
            return
        if self._plain < _LEAST_GAIN * self._spent:
            self._n_pause_left = self._found[self._n_texts] = self._pause
            self._pause = min(_LONGEST, 2 * self._pause)
        else:
            self._pause = _SHORTEST
            self._found.pop(self._n_texts, None)
        self._n_steps, self._spent, self._plain = 0, 0.0, 0.0


# ---- what an engine has learned ----

_NAMES = {True: "greedy", False: "sampled"}
_MOST_TABLES = 32  # those of other sets of adapters make room


class Learned:
    """Costs and acceptance of a pair of models; greedy and sampled texts have their own tables."""

    def __init__(
        self,
        target: Model,
        draft: Model | None,
        *,
        draft_costs: Callable[[CostCurve], CostCurve],
        kernels: tuple[str, int],
        objective: Objective,
        kept: bool,
        on_message: Callable[[str], None],
    ) -> None:
        """Begin with the stored profile if there is one (and `kept` is true), else with guesses.

        `draft_costs`: returns what drafting costs for a curve of single passes. `kernels`: their name, and
        the threads. Raises UsageError when energy is the objective and no joules were measured.
        """
        self._target, self._draft, self._draft_costs = target, draft, draft_costs
        header = draft.header if draft else None
        name, threads = kernels
        self._key = ProfileKey.of(target.header, header, kernels=name, threads=threads) if kept else None
        self._profile = load(self._key, on_message=on_message) if self._key else None
        self._in_joules = objective == "energy"
        self.forget()

    def forget(self) -> None:
        """Begin again with the stored profile."""
        profile, draft = self._profile, self._draft
        self.clocks = Clocks(
            self._clock(self._target, profile.target if profile else None),
            self._clock(draft, profile.draft if profile else None) if draft else None,
        )
        self._costs = self._joules(profile) if self._in_joules else self.clocks
        self.records: dict[object, Any] = {}
        """By a user's drafter, what is known of it (plugin.py)."""
        self._running: dict[Pace, AcceptanceTables] = {}
        stored = profile.acceptance if profile else {}
        self._acceptance = {name: AcceptanceTables() for name in (*_NAMES.values(), *stored)}
        for name, tables in self._acceptance.items():
            if isinstance(known := stored.get(name), dict):
                tables.restore(known)

    def _clock(self, model: Model, stored: CostCurve | None) -> PassCosts:
        curve = stored or guessed_curve(model.header.file_bytes, own_kernels=model.uses_kernels)
        if model is self._draft:
            curve = self._draft_costs(curve)
        is_sure = self._profile is not None and self._profile.reliable
        return PassCosts(curve, guessed=stored is None, unsure=not is_sure)

    def _joules(self, profile: Profile | None) -> Clocks:
        target = profile.target_watts if profile else None
        draft = profile.draft_watts if profile and profile.draft else None
        if not profile or not target or (self._draft and not draft):
            problem = (
                "no joules are known of these models on this machine; run `edgespec profile` where an energy "
                "counter can be read, or leave it at latency"
            )
            raise UsageError(problem, field="objective", value="energy")
        of_draft = self._draft_costs(profile.draft).times(draft) if draft and profile.draft else None
        return Clocks(PassCosts(profile.target.times(target)), PassCosts(of_draft) if of_draft else None)

    def pace(self, policy: Policy, *, greedy: bool, gamma: int | None = None, adapters: str = "") -> Pace:
        """Return the pace of one text, until `ended`; it learns in tables of its own.

        `gamma`: tokens drafted in every step; None: as many as pay. `adapters`: the key of its set.
        """
        name = f"{_NAMES[greedy]} {adapters}".strip()
        tables = self._acceptance.setdefault(name, AcceptanceTables())
        if len(self._acceptance) > _MOST_TABLES:
            del self._acceptance[next(name for name in self._acceptance if name not in _NAMES.values())]
        pace = Pace(policy, self._costs, deepcopy(tables), gamma=gamma, in_joules=self._in_joules)
        self._running[pace] = tables
        return pace

    def ended(self, pace: Pace) -> None:
        """Keep what a text has learned: the next one begins with the newest of each table."""
        if tables := self._running.pop(pace, None):
            tables.merge(pace.acceptance)

    def store(self, on_message: Callable[[str], None]) -> None:
        """Store what was learned, if passes were timed."""
        target, draft = self.clocks
        if self._key is None or target.n_observed == 0:
            return
        store_learned(
            self._key,
            TimedCurve(target.curve(), target.n_observed),
            TimedCurve(draft.curve(), draft.n_observed) if draft else None,
            {name: tables.as_json() for name, tables in self._acceptance.items()},
            on_message=on_message,
        )
