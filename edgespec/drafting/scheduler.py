"""How much to draft now, and from which source: one rule, at every step anew.

With `rate` the tokens a second (or a joule) that generation makes now, a further token is drafted when

    P(it and all before it are accepted)  >=  rate * (what it adds to the time of draft and verification)

since that time would otherwise bring `rate` tokens each second: Dinkelbach's rule for the best ratio of
tokens to time. P comes from the acceptance predictor, the times from the cost curves (`LearnedCosts`). T(n)
has steps, so the first token may not pay alone: the length is chosen at which the sum of P - rate * cost is
largest (`ExpectedGain`). Not to draft is a normal answer.

Questions to a scheduler change nothing in it. It changes when it is told something: by `begin`, `start_step`,
`share`, `learn`, `learn_follow_up`, `pay_for_probe` and `pay_for_try`.

Several requests may share the passes (`OtherRequests`). The rule is the same: `rate` is that of all together,
and the price of a token is what it adds to a pass that holds the others' too. shared_decision.py decides for
all at once.

Exactness: a decision depends on tokens already drafted and on the distribution at the next position, never on
the token sampled from it (docs/measuring.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from edgespec.decoding.option_table import MAX_GAMMA
from edgespec.drafting.answer_lengths import ANSWER_TOKENS, AnswerLengths, LengthDistribution
from edgespec.drafting.costs import extrapolated, one_more_each
from edgespec.drafting.expected_gain import MAX_UNREAD, Chain, ExpectedGain, Prefix, gain_if_all_draft
from edgespec.drafting.learned_costs import LearnedCosts
from edgespec.drafting.policy import DraftAction, ModelAction, OtherRequests, Policy, SuffixAction
from edgespec.drafting.profile import N_MAX

_FIRST_STEPS = 4.0  # steps of new text that a generation counts as done when it begins
_COPYING = 0.5  # chance of the first token offered, from which text counts as copied
_WINDOW_SHARE = 0.05  # of the answer's expected time that the draft model's prefill may take
_SHORTEST_WINDOW = 128
_FEW = 4  # tokens of an answer that ends before drafting can gain anything; tokens of a usual draft
_FEW_CHANCE = 0.02  # chance of so short an answer, from which its first steps are careful
_LOSS = 0.02  # of the answer's time so far, that a draft of its first steps may cost
_SHORTEST_PROBE, _LONGEST_PROBE = 24, 96  # tokens


STEPS = 32.0
"""Steps over which the rate is an average."""


class DecayingRate:
    """Tokens over time of the last steps; older ones fade away."""

    def __init__(self) -> None:
        self.tokens = self.cost = 1.0

    def begin(self, cost: float, n_steps: float) -> None:
        """Begin as if `n_steps` steps of one token had cost `cost` each."""
        self.tokens, self.cost = n_steps, n_steps * cost

    def fade(self) -> None:
        """Count all steps so far a little less."""
        self.tokens *= 1.0 - 1.0 / STEPS
        self.cost *= 1.0 - 1.0 / STEPS

    def learn(self, n_tokens: int, cost: float) -> None:
        """Count a step's tokens and its cost; older ones weigh less."""
        self.tokens += n_tokens
        self.cost += cost

    @property
    def rate(self) -> float:
        """Tokens for each unit of cost: a second, or a joule."""
        return self.tokens / self.cost


class Scheduler:
    """Decides for one generation, from what was learned; it is told of every step."""

    n_max = MAX_GAMMA
    """Most tokens of a step."""
    chooses_length = True
    """Whether it drafts only where that pays."""
    rests = False
    """Whether nothing is drafted in the steps to come (`SharedPace`)."""

    def __init__(
        self, learned: LearnedCosts, policy: Policy, lengths: LengthDistribution | None = None
    ) -> None:
        """Decide under `policy`. `lengths`: the answer's expected length; None: that of any answer."""
        self.learned = learned
        self.policy = policy
        self.unit = "tokens/J" if learned.in_joules else "tokens/s"
        self.lengths = lengths or AnswerLengths(ANSWER_TOKENS).of("")
        self._n_predict: int | None = None
        self._n_emitted = 0
        self._spent = 0.0
        self._pace = {True: DecayingRate(), False: DecayingRate()}  # of copied text, of new text
        self._lately = {True: DecayingRate(), False: DecayingRate()}  # the same, of the same last steps
        self._copying = False
        self.n_known = 0
        """Tokens of the prompt that nobody had to read, since they were in the cache."""
        self._n_past, self._n_draft = 0, 0
        self.n_pending = 1
        """Tokens of this request that are always in the target's pass."""
        self._others = OtherRequests()
        self._gains: ExpectedGain | None = None  # of this step, once it was asked for

    # ---- what it is told ----

    def begin(self, n_past: int, n_predict: int | None) -> None:
        """Start on a text of at most `n_predict` tokens after `n_past`."""
        learned = self.learned
        verify = learned.target.at(n_past)
        self._n_past, self._n_draft, self.n_pending = n_past, 0, 1
        self._n_predict = n_predict
        self._n_emitted = 1
        self._spent = learned.target.read(n_past - self.n_known, self.n_known)
        for pace in self._pace.values():
            pace.begin(verify[1], STEPS / 4)
        self._lately[False].begin(verify[1], _FIRST_STEPS)
        self._lately[True].begin(verify[1], 0.01)
        learned.predictor.begin()
        self._copying = False
        self._gains = None

    def start_step(
        self, n_past: int, offered: Sequence[float] = (), *, n_draft: int = 0, n_pending: int = 1
    ) -> None:
        """Look up the costs at this length of context, and the rate where the suffix store offers this.

        `n_draft`: the context of the draft model, which may be shorter. `n_pending`: tokens always in the
        target's pass.

        A drafted token saves the time that it would take otherwise. That time differs between text that is
        being copied and text that is new, so each has its own rate.
        """
        self._copying = bool(offered) and offered[0] >= _COPYING
        self._n_past, self._n_draft, self.n_pending = n_past, n_draft, n_pending
        self._gains = None

    def share(self, others: OtherRequests) -> None:
        """Take into account what `others` have in the passes, from now on."""
        if others != self._others:
            self._others = others
            self._gains = None

    def chain(self, path: float, depth: int, chances: Sequence[float]) -> Chain:
        """Return the tokens of the suffix store that compete for room in the next pass.

        They follow `depth` drafted ones, accepted with probability `path`.
        """
        return self._now.chain(path, depth, chances if self.policy.suffix else ())

    def learn_follow_up(self, path: float, depth: int, offered: Sequence[float]) -> None:
        """Learn what the suffix store offers after a token of the draft model; arguments as for `next`."""
        if path > 0.0:
            gain = self._now.best_prefix(path, depth, offered).gain if self.policy.suffix else 0.0
            self.learned.learn_follow_up(gain / path)

    def pay_for_probe(self, n_tokens: int) -> None:
        """Count the cost of probing the draft model on `n_tokens`, as `n_to_probe` allowed it."""
        self.learned.pay_for_probe(self._probe_cost(n_tokens))

    def pay_for_try(self, cost: float) -> bool:
        """Pay for asking a source that rests for a token, at `cost`; return whether enough was saved."""
        price = cost + self._now.verify[2] - self._now.verify[1]
        if not self.learned.affords_probe(price):
            return False
        self.learned.pay_for_probe(price)
        return True

    def learn(
        self, n_emitted: int, seconds: float, n_drafted: int, passes: Sequence[tuple[int, int]]
    ) -> None:
        """Count a step of `seconds` that verified `n_drafted` tokens and emitted `n_emitted`.

        `passes`: the draft model's, as (tokens read, guesses among them).
        """
        cost = seconds
        if self.learned.in_joules:
            now = self._now
            cost = now.verify[n_drafted + 1] + sum(now.passes[min(n, N_MAX)] for n, _ in passes)
        self._pace[self._copying].fade()
        self._pace[self._copying].learn(n_emitted, cost)
        for pace in self._lately.values():
            pace.fade()
        self._lately[self._copying].learn(n_emitted, cost)
        self._n_emitted += n_emitted
        self._spent += cost
        self.learned.count_step(cost / (1 + self._others.n_texts), idle=not passes)

    # ---- what it is asked ----

    @property
    def _now(self) -> ExpectedGain:
        assert self._n_emitted, "begin comes first"  # noqa: S101
        if self._gains is None:
            self._gains = self._price()
        return self._gains

    def _price(self) -> ExpectedGain:
        """Look up what passes of this step cost, and the rate."""
        learned, others = self.learned, self._others
        n_before = self._n_certain - 1
        verify: Sequence[float] = learned.target.at(self._n_past)
        if n_before and self.policy.splits and others.n_target:
            together = extrapolated(verify, n_before + 1, n_before + 1)[0]
            verify = [0.0, *(together + cost for cost in verify[: N_MAX + 1])]
        elif n_before:
            costs, now = verify, others.depth + 1  # T(now) is the pass as it is so far
            verify = [0.0, *extrapolated(costs, n_before + N_MAX, n_before + 1)]
            if others.n_alike:
                verify[now:] = one_more_each(costs, n_before + now, 1 + others.n_alike, N_MAX + 1 - now)
        passes: Sequence[float] = learned.draft.at(self._n_draft) if learned.draft else []
        if others.n_draft and passes:
            n_all, passes = others.n_draft, extrapolated(passes, others.n_draft + N_MAX, others.n_draft)
            passes = [cost * n / (n_all + n) for n, cost in enumerate(passes)]
        rate = self.own_rate + others.rate
        again: Sequence[float] = ()
        if self.policy.rereads:
            n = self.n_pending
            costs = extrapolated(learned.target.at(self._n_past), n + N_MAX)
            again = [rate * max(0.0, cost - costs[1]) for cost in costs[n + 1 :]]
        return ExpectedGain(learned, verify, passes, rate, again)

    @property
    def _n_certain(self) -> int:
        return self.n_pending + self._others.n_target

    @property
    def own_rate(self) -> float:
        """This request's share of `rate`."""
        plain = 1.0 / self.learned.target.of(self._n_certain, self._n_past)
        return max(self._pace[self._copying].rate, plain)

    @property
    def rate(self) -> float:
        """Tokens a second (or a joule) that all requests make now that share the passes."""
        return self._now.rate

    @property
    def needs_model(self) -> bool:
        """Whether the draft model has to draft from the first step on, whatever it costs to prefill it."""
        return not self.policy.suffix

    @property
    def verify_costs(self) -> Sequence[float]:
        """T(n) of the target's pass at this step: n - 1 drafted tokens and what is always in it."""
        return self._now.verify

    @property
    def least_price(self) -> float:
        """The lowest price, in tokens, of one more token in the target's pass at this step."""
        return self._now.least_price

    def next(
        self,
        path: float,
        depth: int,
        unread: int,
        offered: Sequence[float],
        bucket: int,
        prefix: Prefix | None = None,
    ) -> DraftAction:
        """Choose what follows `depth` drafted tokens, all accepted with probability `path`.

        `unread`: tokens that the draft model has yet to read; 0 without a model, and above `MAX_UNREAD` it is
        idle. `offered`: the estimated acceptances of the suffix store's tokens, each given the one before.
        `bucket`: that of the table `next`. `prefix`: how much of `offered` may be taken, where that was
        decided for several requests together.
        """
        policy, now = self.policy, self._now
        if self._is_careful(self._n_emitted):
            return None
        can_run = policy.model and 0 < unread <= MAX_UNREAD
        if prefix is None:
            prefix = now.best_prefix(path, depth, offered) if policy.suffix else Prefix(0, 0.0, path)
        n, gain, after = prefix
        if not can_run:
            return SuffixAction(n) if n else None
        n_guesses = now.n_guesses(unread, offered) if policy.staged else 0
        with_model = now.of_model(path, depth, unread, bucket, offered[:n_guesses])
        later = now.of_model(after, depth + n, unread + n, bucket) if n and policy.after_store else 0.0
        if n and gain + max(0.0, later) >= with_model:
            return SuffixAction(n)
        return ModelAction(n_guesses) if with_model > 0.0 else None

    def _is_careful(self, n_emitted: int) -> bool:
        """Whether a step after `n_emitted` tokens drafts nothing, since the answer may be over with it.

        What a draft costs would then be lost. So the first steps of an answer of unknown length have none,
        unless that is little beside what the prompt took: an answer of a word takes no longer than without.
        """
        now, policy = self._now, self.policy
        is_chosen = not (policy.suffix and policy.model)  # by the user
        may_end = (self._n_predict or _FEW + 1) <= _FEW or 1.0 - self.lengths.longer(_FEW) >= _FEW_CHANCE
        if is_chosen or n_emitted >= _FEW or not may_end:
            return False
        costs = now.verify
        draft = costs[_FEW + 1] - costs[1] + (_FEW * now.passes[1] if now.passes else 0.0)
        # From one table, lest a busy moment of the prompt's pass count as a long prompt.
        n_known, n_past = self.n_known, self._n_past
        each = self.learned.target.at((n_known + n_past) // 2)[N_MAX] / N_MAX
        spent = (n_past - n_known) * each + n_emitted * costs[1]
        return draft > _LOSS * spent

    def n_worthwhile(self, path: float, depth: int, chances: Sequence[float]) -> int:
        """Return how many tokens to add that need no pass of the draft model.

        They follow `depth` drafted tokens, and are accepted with `chances`, each given the one before.
        """
        return self._now.best_prefix(path, depth, chances[: MAX_GAMMA - depth]).n

    def n_to_ask(self, chances: Sequence[tuple[float, float]], cost: float) -> int:
        """Return how many tokens to ask of a source whose draft takes `cost`; 0: none would pay.

        `chances` of each token: that it is proposed, and that it is then accepted, each given those before.
        """
        now = self._now
        reach = path = 1.0
        gain, best, n = -now.rate * cost, 0.0, 0
        for depth, (offered, accepted) in enumerate(chances):
            before, reach, path = path, reach * offered, path * accepted
            gain += reach * now.of_token(path, depth, before)
            if gain > best:
                best, n = gain, depth + 1
        return n

    def keeps(self, path: float, depth: int, bucket: int, *, chance: float = 1.0) -> bool:
        """Whether to verify a token of the draft model, which has run: only verification has a price.

        `path`: the probability that the token and all before it are accepted, of which `chance` is its own.
        They and `bucket` come from the distribution at the position. The token pays alone, or together with
        those that may follow.
        """
        now = self._now
        gain = now.of_token(path, depth, path / chance if chance > 0.0 else path)
        return gain >= 0.0 or gain + now.of_model(path, depth + 1, 1, bucket) > 0.0

    def branches(self, path: float, n_drafted: int) -> bool:
        """Whether a token off the trunk, accepted with `path`, pays after `n_drafted` tokens.

        The trunk may grow later, so the price is a mean over the next tokens. A token accepted off the trunk
        is in the next pass again, and pays the price again.
        """
        verify = self._now.verify
        if not self.policy.branches or n_drafted + 3 > MAX_GAMMA:
            return False
        price = self.rate * 0.5 * (verify[n_drafted + 3] - verify[n_drafted + 1])
        return path * (1.0 - price) >= price

    def n_to_prefill(self, unread: int) -> int:
        """Return how many of the `unread` tokens the draft model should prefill now; 0: it stays idle.

        Prefill is an investment into the rest of the answer, whose length is not known
        (`LengthDistribution.pays`). Only the recent part of a long prompt is read: that costs acceptance.
        """
        now, draft = self._now, self.learned.draft
        if draft is None or not self.policy.model:
            return 0
        if self._n_emitted <= 1 and self.needs_model:
            return unread
        new, copied = self._lately[False], self._lately[True]
        n_seen = new.tokens + copied.tokens
        new_s = new.cost / n_seen  # of each token
        # What is copied meanwhile has to be read as well, to be of use after it.
        read_s = draft.read(512, 0) / 512
        n, n_max = self._n_emitted, math.inf if self._n_predict is None else self._n_predict
        to_come_s = min(self.lengths.to_come(n), n_max - n) * new_s
        window = min(unread, max(_SHORTEST_WINDOW, int(_WINDOW_SHARE * to_come_s / read_s)))
        n_before = self._n_draft if window == unread else 0  # else what it read before is left out
        speedup = self._model_speedup(n_before + window)
        saved = new_s * (1.0 - 1.0 / max(1.0, speedup)) - copied.tokens / n_seen * read_s
        pace = (new.cost + copied.cost) / n_seen
        price = draft.read(window, n_before) * now.rate / self.own_rate  # the others wait as well
        pays = self.lengths.pays(price, saved, n=n, n_max=n_max, spent=self._spent, pace=pace)
        return window if pays else 0

    def _model_speedup(self, n_draft: int) -> float:
        """What drafting with the model is expected to gain once `n_draft` tokens are in its cache."""
        n_texts, learned, gain = 1 + self._others.n_texts, self.learned, self._now
        if n_texts > 1:
            gain = gain_if_all_draft(learned, self._n_past, n_texts, n_draft=n_draft)
        elif learned.draft and n_draft != self._n_draft:
            gain = replace(gain, passes=learned.draft.at(n_draft))
        return gain.best_model_rate() / max(n_texts * self._pace[False].rate, 1.0 / gain.verify[1])

    def n_to_probe(self, unread: int) -> int:
        """Return how many recent tokens an idle draft model may be probed on, of `unread`; 0: not now.

        One pass over them tells for each whether it would have been accepted. Probes have a budget, a small
        share of the time (`LearnedCosts.probe_budget`), so what they can lose is bounded.
        """
        if self.learned.draft is None or unread < _SHORTEST_PROBE:
            return 0
        n = min(unread, _LONGEST_PROBE)
        return n if self.learned.affords_probe(self._probe_cost(n)) else 0

    def _probe_cost(self, n_tokens: int) -> float:
        draft = self.learned.draft
        return draft.read(n_tokens, 0) + self._now.passes[1] if draft else 0.0

    def plain_rate(self) -> float | None:
        """Return the tokens a second that plain decoding is expected to make now.

        None where that would be a guess, or hold for several requests together.
        """
        if not self._n_emitted or self.learned.in_joules or self._others.n_target:
            return None
        return 1.0 / self._now.verify[1] if self.learned.target.is_known(1) else None

    def explain(
        self, sources: Mapping[str, tuple[int, int]], *, n_unread: int = 0, has_run: bool = False
    ) -> str:
        """Say in one sentence how fast the text came with drafts, or why nothing was drafted.

        `sources`: the tokens that each drafted, and those accepted. `n_unread`: tokens that the draft model
        has yet to read. `has_run`: whether it ran at all.
        """
        if not sources:
            return f"nothing was drafted: {self._why_nothing(n_unread, has_run=has_run)}"
        unused = "" if has_run or not self._has_model else f"; {self._why_no_model(n_unread)}"
        return f"{self.rate:.1f} {self.unit} lately{unused}"

    @property
    def _has_model(self) -> bool:
        return self.policy.model and self.learned.draft is not None

    def _why_nothing(self, n_unread: int, *, has_run: bool) -> str:
        if not self._n_emitted:
            return "the answer was over with its first token"
        if self.rests:
            return "the answers that share the passes are written faster without"
        if self._is_careful(self._n_emitted - 1):
            return "so short an answer is over before a draft pays"
        if has_run:
            return "the draft model was too unsure of its tokens for their check to pay"
        return self._why_no_model(n_unread) if self._has_model else "no earlier text was worth repeating"

    def _why_no_model(self, n_unread: int) -> str:
        """Say why the draft model did not run, by the numbers that decided it."""
        chance = f"{self.learned.predictor.next.chance(0, 0):.0%}".replace("%", " %")
        cost = self._now.passes[1]
        price = f"{cost:.2g} J" if self.learned.in_joules else f"{1e3 * cost:.1f} ms"
        token = f"a token of it takes {price}, and {chance} are accepted"
        if (speedup := self._model_speedup(self._n_draft)) < 1.0:
            return f"{speedup:.2f} times the speed was expected with the draft model, since {token}"
        if n_unread > MAX_UNREAD:
            return "the answer was expected to be too short for the draft model to read what came before"
        return f"the draft model was not expected to pay in any step, since {token}"


_LIKELY = 0.5  # chance of the suffix store's first token, from which it is taken rather than the model's


class FixedLength(Scheduler):
    """The scheduler of a user who sets gamma: each step drafts a chain of that many tokens.

    Only their source is left to choose.
    """

    needs_model = True
    chooses_length = False

    def __init__(
        self,
        gamma: int,
        learned: LearnedCosts,
        policy: Policy,
        lengths: LengthDistribution | None = None,
    ) -> None:
        """Draft `gamma` tokens a step from the sources that `policy` allows."""
        super().__init__(learned, replace(policy, branches=False), lengths)
        self.n_max = gamma

    def chain(self, path: float, depth: int, chances: Sequence[float]) -> Chain:
        """Return an empty chain: what it drafts does not compete with others' tokens."""
        return Chain(path, ())

    def learn_follow_up(self, path: float, depth: int, offered: Sequence[float]) -> None:
        """Do nothing: the gain of an offer decides nothing here."""

    def next(
        self,
        path: float,
        depth: int,
        unread: int,
        offered: Sequence[float],
        bucket: int,
        prefix: Prefix | None = None,
    ) -> DraftAction:
        """Say where the next token comes from, until `gamma` are drafted."""
        policy = self.policy
        can_run = policy.model and 0 < unread <= MAX_UNREAD
        n_left = self.n_max - depth
        if n_left <= 0:
            return None
        if policy.suffix and offered and (not can_run or offered[0] >= _LIKELY):
            return SuffixAction(min(n_left, len(offered)))
        if not can_run:
            return None
        return ModelAction(min(n_left - 1, len(offered), N_MAX - unread) if policy.staged else 0)

    def n_worthwhile(self, path: float, depth: int, chances: Sequence[float]) -> int:
        """Return how many of the tokens that need no pass still fit into the length."""
        return max(0, min(len(chances), self.n_max - depth))

    def keeps(self, path: float, depth: int, bucket: int, *, chance: float = 1.0) -> bool:
        """Keep every token of the draft model up to the length."""
        return depth < self.n_max

    def n_to_prefill(self, unread: int) -> int:
        """Return `unread`: the draft model prefills all at once."""
        return unread if self.learned.draft and self.policy.model else 0

    def n_to_probe(self, unread: int) -> int:
        """Return 0: the draft model is never idle."""
        return 0

    def explain(
        self, sources: Mapping[str, tuple[int, int]], *, n_unread: int = 0, has_run: bool = False
    ) -> str:
        """Say that the length was the user's choice."""
        tokens = "1 token" if self.n_max == 1 else f"{self.n_max} tokens"
        asked = f"drafts of {tokens} a step were asked for"
        why = "no earlier text was there to repeat" if not self.policy.model else "the answer was over before"
        return asked if sources else f"nothing was drafted, though {asked}: {why}"
