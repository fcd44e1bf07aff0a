"""How much to draft now, and from which source: one rule, at every step anew.

With `rate` the tokens a second (or a joule) that generation makes now, a further token is drafted when

    P(it and all before it are accepted)  >=  rate * (what it adds to the time of draft and verification)

since that time would otherwise bring `rate` tokens each second: Dinkelbach's rule for the best ratio of
tokens to time. P comes from the acceptance predictor, the times from the cost curves. A look ahead finds
the length at which the sum of P - rate * cost is largest, for T(n) has steps and the first token may not
pay alone. Not to draft is a normal answer.

Exactness: what is asked here depends on tokens already drafted and on the distribution at the next
position, never on the token sampled from it (docs/statistics.md).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgespec.drafting.costs import N_MAX, OnlineCurve
from edgespec.drafting.lengths import ANSWER_TOKENS, AnswerLengths
from edgespec.drafting.predictor import Predictor
from edgespec.options import MAX_GAMMA

ASLEEP = 24
"""Unread tokens from which reading them is an investment of its own, decided by `worth_reading`."""

_STEPS = 32.0  # over which a rate is an average
_FIRST_STEPS = 4.0  # steps of new text that a generation seems to have had when it begins
_FOLLOW = 0.1  # weight of an outcome in the mean of what follows a model's tokens
_COPYING = 0.5  # chance of the first token offered, from which text counts as copied
_LOOK_AHEAD = 8  # tokens
_FADE_EVERY = 32  # steps
_EXPLORED = 0.0075  # of the time may go into looking whether an idle draft model has become useful
_WINDOW_SHARE = 0.05  # of the answer's expected time that reading the prompt may take the draft
_SHORTEST_WINDOW = 128
_SHORTEST_TEST, _LONGEST_TEST = 24, 96  # tokens


@dataclass(frozen=True, slots=True)
class Policy:
    """What a user leaves to the scheduler: which sources may propose, and whether the length is fixed."""

    suffix: bool = True
    """The suffix store may propose to the target."""
    model: bool = True
    """The draft model may propose to the target."""
    staged: bool = True
    """The suffix store may propose to the draft model."""
    gamma: int | None = None
    """Tokens drafted a step, in a chain; None: the scheduler's choice."""
    branches: bool = True
    """A step may propose several tokens for one position, where `gamma` does not fix its length."""
    siblings: bool = True
    """Several may also be sampled for one position; these cannot be pruned."""

    @property
    def may_branch(self) -> bool:
        """Whether a step may be more than a chain."""
        return self.branches and self.gamma is None


@dataclass(frozen=True, slots=True)
class TakeSuffix:
    """Take the first `n` tokens that the suffix store offers."""

    n: int


@dataclass(frozen=True, slots=True)
class RunModel:
    """Run the draft model over what it has not read and the first `n_guesses` tokens offered."""

    n_guesses: int


class _Pace:
    """Tokens and time of the last steps of a kind."""

    def __init__(self) -> None:
        self.tokens = self.cost = 1.0

    def begin(self, cost: float, n_steps: float) -> None:
        """Start as after `n_steps` of a token at `cost`."""
        self.tokens, self.cost = n_steps, n_steps * cost

    def fade(self) -> None:
        """Let an older step count less."""
        self.tokens *= 1.0 - 1.0 / _STEPS
        self.cost *= 1.0 - 1.0 / _STEPS

    def learn(self, n_tokens: int, cost: float) -> None:
        """Count a step."""
        self.tokens += n_tokens
        self.cost += cost

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.cost


Choice = TakeSuffix | RunModel | None
"""None: verify now."""


class Scheduler:
    """Decides from costs and acceptance; one for an engine, told of every generation and step."""

    def __init__(
        self,
        target: OnlineCurve,
        draft: OnlineCurve | None,
        predictor: Predictor,
        *,
        in_joules: bool = False,
    ) -> None:
        """Decide with the curves of the target and of the draft model (None: there is none).

        `in_joules`: the curves are of energy, and the rate is in tokens a joule.
        """
        self._in_joules = in_joules
        self.unit = "tokens/J" if in_joules else "tokens/s"
        self.target = target
        self.draft = draft
        self.predictor = predictor
        self.lengths = AnswerLengths(ANSWER_TOKENS).of("")
        """What is believed of the length of the next answer."""
        self.policy = Policy()
        self._n_predict: int | None = None
        self._n_emitted = 0
        self._spent = 0.0
        self._pace = {True: _Pace(), False: _Pace()}
        self._lately = (_Pace(), _Pace())  # new text, copied text: of the same steps
        self._follow = 0.0
        self._copying = False
        self._savings = 0.0
        self._n_steps = 0
        self._verify: list[float] = []
        self._passes: list[float] = []
        self.rate = 0.0

    def begin(self, n_past: int, n_predict: int | None) -> None:
        """Start on a generation of at most `n_predict` tokens after `n_past`, under `policy`."""
        self._n_predict = n_predict
        self._n_emitted = 1
        self._spent = self.target.read(n_past, 0)
        self._verify = self.target.at(n_past)
        self._passes = self.draft.at(0) if self.draft else []
        for pace in self._pace.values():
            pace.begin(self._verify[1], _STEPS / 4)
        for pace, n_steps in zip(self._lately, (_FIRST_STEPS, 0.01), strict=True):
            pace.begin(self._verify[1], n_steps)
        self.predictor.begin()
        self.rate = 1.0 / self._verify[1]

    def start_step(
        self, n_past: int, offered: Sequence[float] = (), *, n_draft: int = 0, n_pending: int = 1
    ) -> None:
        """Look up the costs at this length of context, and the pace where the suffix store offers this.

        `n_draft` is the context of the draft model, which may be shorter; `n_pending` tokens are in the
        target's pass in any case.

        A token that is drafted saves the time which it would take otherwise, and that differs between
        text that is being copied and text that is new: each has a rate of its own.
        """
        self._copying = bool(offered) and offered[0] >= _COPYING
        self._verify = verify = self.target.at(n_past)
        if n_pending > 1:  # costs of what is drafted; beyond the curve nothing is
            self._verify = [0.0, *verify[n_pending:], *[verify[-1]] * (n_pending - 1)]
        if self.draft:
            self._passes = self.draft.at(n_draft)
        self.rate = max(self._pace[self._copying].rate, 1.0 / self._verify[1])

    def next(
        self,
        path: float,
        depth: int,
        unread: int,
        offered: Sequence[float],
        bucket: int,
        *,
        after_model: bool = False,
    ) -> Choice:
        """Say what follows `depth` drafted tokens, all accepted with probability `path`.

        `unread` tokens are yet to be read by the draft model (more than `ASLEEP`, or no model: it cannot
        run now), `offered` are the estimated acceptances of the suffix store's tokens, each given the one
        before, and `bucket` is that of the table `next`. `after_model`: the last token is the draft
        model's, and what is offered is what follows it.
        """
        policy = self.policy
        awake = policy.model and 0 < unread <= ASLEEP
        if policy.gamma is not None:
            return self._fixed(depth, unread, offered)
        n, gain, after = self._best_prefix(path, depth, offered) if policy.suffix else (0, 0.0, path)
        if after_model and path > 0.0:
            self._follow += _FOLLOW * (gain / path - self._follow)
        if not awake:
            return TakeSuffix(n) if n else None
        n_guesses = self._n_guesses(unread, offered) if policy.staged else 0
        with_model = self._model_gain(path, depth, unread, bucket, offered[:n_guesses])
        if n and gain + max(0.0, self._model_gain(after, depth + n, unread + n, bucket, ())) >= with_model:
            return TakeSuffix(n)
        return RunModel(n_guesses) if with_model > 0.0 else None

    def _fixed(self, depth: int, unread: int, offered: Sequence[float]) -> Choice:
        """A length was asked for: only the source is left to choose."""
        policy = self.policy
        awake = policy.model and 0 < unread <= ASLEEP
        room = (policy.gamma or 0) - depth
        if room <= 0:
            return None
        if policy.suffix and offered and (not awake or offered[0] >= 0.5):
            return TakeSuffix(min(room, len(offered)))
        if not awake:
            return None
        return RunModel(min(room - 1, len(offered), N_MAX - unread) if policy.staged else 0)

    def worth(self, path: float, depth: int, chances: Sequence[float]) -> int:
        """Say how many tokens, accepted with `chances` and at no cost, are to follow `depth` drafted ones."""
        if self.policy.gamma is not None:
            return max(0, min(len(chances), self.policy.gamma - depth))
        return self._best_prefix(path, depth, chances[: MAX_GAMMA - depth])[0]

    def keeps(self, path: float, depth: int, bucket: int) -> bool:
        """Say whether a token of the model, with which the draft is accepted with `path`, is verified.

        `path` and `bucket` come from the distribution at the position. The model has run, so only the
        verification is left to pay, by this token or together with those that may follow.
        """
        if self.policy.gamma is not None:
            return depth < self.policy.gamma
        gain = path - self.rate * (self._verify[depth + 2] - self._verify[depth + 1])
        return gain >= 0.0 or gain + self._model_gain(path, depth + 1, 1, bucket, ()) > 0.0

    @property
    def verify_costs(self) -> Sequence[float]:
        """T(n) of the target's pass at this step: n - 1 drafted tokens and what has to be in it."""
        return self._verify

    @property
    def least_price(self) -> float:
        """The lowest price, in tokens, of one more token in the target's pass at this step."""
        verify = self._verify
        least = min(b - a for a, b in itertools.pairwise(verify[1:_LOOK_AHEAD]))
        return min(1.0, max(0.0, self.rate * least))

    def branches(self, path: float, n_drafted: int) -> bool:
        """Say whether a token beside the trunk, accepted with `path`, pays after `n_drafted` tokens.

        The trunk may grow later, so the price is a mean over the next tokens. What is accepted beside the
        trunk rides again in the next pass, and pays the price again.
        """
        verify = self._verify
        if not self.policy.may_branch or n_drafted + 3 > MAX_GAMMA:
            return False
        price = self.rate * 0.5 * (verify[n_drafted + 3] - verify[n_drafted + 1])
        return path * (1.0 - price) >= price

    def _best_prefix(self, path: float, depth: int, offered: Sequence[float]) -> tuple[int, float, float]:
        """Return how many of the offered tokens to take, what that gains in tokens, and P after them."""
        verify, rate = self._verify, self.rate
        best, best_gain, best_path, gain = 0, 0.0, path, 0.0
        for i, probability in enumerate(offered, depth + 1):
            path *= probability
            gain += path - rate * (verify[i + 1] - verify[i])
            if gain > best_gain:
                best, best_gain, best_path = i - depth, gain, path
        return best, best_gain, best_path

    def _n_guesses(self, unread: int, offered: Sequence[float]) -> int:
        """Return how many guesses the draft model is to check: a right one saves it a pass."""
        passes = self._passes
        chance = 1.0
        for i, probability in enumerate(offered):
            chance *= probability
            if unread + i + 1 > MAX_GAMMA or chance * passes[1] < passes[unread + i + 1] - passes[unread + i]:
                return i
        return len(offered)

    def _model_gain(
        self, path: float, depth: int, unread: int, bucket: int, guesses: Sequence[float]
    ) -> float:
        """Return what running the draft model gains, in tokens, it going on while that pays."""
        verify, rate, passes = self._verify, self.rate, self._passes
        if unread > ASLEEP or depth + 1 > MAX_GAMMA:
            return 0.0
        table = self.predictor.next
        gain = -rate * passes[min(unread + len(guesses), N_MAX)]
        chance = 1.0  # that the pass comes so far
        path *= table.chance(depth, bucket)
        for i in range(len(guesses) + 1):
            gain += chance * (path - rate * (verify[depth + 2] - verify[depth + 1]))
            depth += 1
            if depth >= MAX_GAMMA:
                return gain
            if i < len(guesses):
                path *= table.overall
                chance *= guesses[i]
        gain += chance * path * self._follow
        path *= table.overall
        best, least = gain, rate * passes[1]
        while depth < MAX_GAMMA and path >= least:  # else not even if verification were free
            gain += chance * (path - least - rate * (verify[depth + 2] - verify[depth + 1]))
            best = max(best, gain)
            path *= table.overall
            depth += 1
        return best

    def worth_reading(self, unread: int) -> int:
        """Return how many of the `unread` tokens the draft model is to read now; 0: it stays asleep.

        Reading is an investment into the rest of the answer, whose length is not known (`Lengths.pays`).
        Of a long prompt only the recent part is read, at some cost in acceptance.
        """
        if self.draft is None or not self.policy.model:
            return 0
        if self.policy.gamma is not None or (self._n_emitted <= 1 and not self.policy.suffix):
            return unread  # the model was asked for
        new, copied = self._lately
        n_seen = new.tokens + copied.tokens
        new_s = new.cost / n_seen  # of each token
        plain = max(self._pace[False].rate, 1.0 / self._verify[1])
        # What is copied meanwhile has to be read as well, to be of use after it.
        read_s = self.draft.read(512, 0) / 512
        saved = new_s * (1.0 - plain / max(plain, self._best_model_rate())) - copied.tokens / n_seen * read_s
        n, most = self._n_emitted, math.inf if self._n_predict is None else self._n_predict
        to_come_s = min(self.lengths.to_come(n), most - n) * new_s
        window = min(unread, max(_SHORTEST_WINDOW, int(_WINDOW_SHARE * to_come_s / read_s)))
        pace = (new.cost + copied.cost) / n_seen
        price = self.draft.read(window, 0)
        pays = self.lengths.pays(price, saved, n=n, most=most, spent=self._spent, pace=pace)
        return window if pays else 0

    def may_explore(self, unread: int) -> int:
        """Return how many recent tokens an idle draft model may be tested on, of `unread`; 0: not now.

        One pass over them tells for each whether it would have been accepted. The tests live on a small
        share of the time, saved up for one or two of them: what they can lose is bounded.
        """
        if self.policy.gamma is not None or self.draft is None or unread < _SHORTEST_TEST:
            return 0
        n = min(unread, _LONGEST_TEST)
        cost = self.draft.read(n, 0) + self._passes[1]
        self._savings = min(self._savings, 2.0 * cost)
        if cost > self._savings:
            return 0
        self._savings -= cost
        return n

    def _best_model_rate(self) -> float:
        """Return the rate of the best fixed length with the draft model alone."""
        best, tokens, path = 0.0, 1.0, 1.0
        for depth in range(_LOOK_AHEAD):
            path *= self.predictor.next.overall
            tokens += path
            best = max(best, tokens / ((depth + 1) * self._passes[1] + self._verify[depth + 2]))
        return best

    def learn(
        self, n_emitted: int, seconds: float, n_drafted: int, passes: Sequence[tuple[int, int]]
    ) -> None:
        """Count a step of `seconds` that verified `n_drafted` tokens and emitted `n_emitted`.

        `passes` are those of the draft model, by the tokens each read.
        """
        cost = seconds
        if self._in_joules:
            cost = self._verify[n_drafted + 1] + sum(self._passes[min(n, N_MAX)] for n, _ in passes)
        self._pace[self._copying].fade()
        self._pace[self._copying].learn(n_emitted, cost)
        for pace in self._lately:
            pace.fade()
        self._lately[self._copying].learn(n_emitted, cost)
        self._n_emitted += n_emitted
        self._savings += _EXPLORED * cost
        self._spent += cost
        self._n_steps += 1
        if self._n_steps % _FADE_EVERY == 0:  # what was given up is again what all cells say
            self.predictor.next.fade(0.9)

    def explain(self, sources: Mapping[str, tuple[int, int]], *, asleep: bool) -> str:
        """Say in one sentence why drafting was on or off, given what each source drafted and accepted."""
        unit = self.unit
        plain = f" ({1.0 / self._verify[1]:.1f} {unit} expected without)" if self._verify else ""
        if self.policy.gamma is not None:
            return f"drafting {self.policy.gamma} tokens a step was asked for{plain}"
        model = ""
        if self.policy.model and self.draft and self._passes:
            chance = self.predictor.next.chance(0, 0)
            price = f"{self._passes[1]:.2g} J" if self._in_joules else f"{1e3 * self._passes[1]:.1f} ms"
            model = f"a token of the draft model costs {price} and is accepted with {chance:.0%}"
        if not sources:
            return f"drafting was off: {model or 'nothing said before was worth repeating'}{plain}"
        parts = [f"{accepted} of {drafted} from {name}" for name, (drafted, accepted) in sources.items()]
        sleeping = f"; the draft model was left asleep: {model}" if asleep and model else ""
        return f"drafting was on, {self.rate:.1f} {unit} lately{plain}: {', '.join(parts)} accepted{sleeping}"
