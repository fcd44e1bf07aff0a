"""One decision over all requests that share a pass: who drafts what next.

A token is drafted where P >= rate * added time (scheduler.py). The added time is that of one pass over the
tokens of all requests. So what the suffix store offers to them is taken in the order of P, as long as it
pays. The draft model's next pass is shared too: each request for which it could pay pays its part, of that
pass and of what the tokens of all add to the target's. Requests for which it does not pay leave, until it
pays for all that are left.

SmartSpec (arXiv 2406.14066) calls it goodput: accepted tokens of all requests over time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.drafting.costs import extrapolated
from edgespec.drafting.expected_gain import MAX_UNREAD, Prefix, best_prefixes
from edgespec.drafting.policy import DraftAction, ModelAction, OtherRequests
from edgespec.drafting.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Bid:
    """The next decision about a request's draft: the arguments of `Scheduler.next`."""

    scheduler: Scheduler
    path: float
    depth: int
    unread: int
    offered: Sequence[float]
    bucket: int

    def choice(self, prefix: Prefix | None = None) -> DraftAction:
        """Decide, where at most `prefix` of the offer may be taken (None: as much as pays)."""
        return self.scheduler.next(self.path, self.depth, self.unread, self.offered, self.bucket, prefix)

    @property
    def may_run_model(self) -> bool:
        """Whether the draft model can run for this request."""
        return self.scheduler.policy.model and 0 < self.unread <= MAX_UNREAD


@dataclass(frozen=True, slots=True)
class PassLoad:
    """The load of the target's next pass so far."""

    n_texts: int
    n_tokens: int
    """Tokens of all requests, drafted ones included."""
    n_past: int
    """Mean context of a request, in tokens."""
    rate: float
    """Tokens a second (or a joule) of all requests."""


def is_worth_timing(bids: Sequence[Bid], load: PassLoad) -> bool:
    """Whether the pass should go without drafts, to learn what it costs so.

    Where many draft in every step, nothing else tells, and the price of all that they draft rests on it.
    """
    learned = bids[0].scheduler.learned
    if learned.in_joules or any(bid.depth or not bid.scheduler.chooses_length for bid in bids):
        return False
    return learned.target.is_doubtful(load.n_tokens)


def decide(bids: Sequence[Bid], load: PassLoad) -> list[DraftAction]:
    """Return the action for each of `bids`, for one pass of the target."""
    prefixes = _prefixes(bids, load)
    choices: list[DraftAction] = [None] * len(bids)
    sharing = [i for i, bid in enumerate(bids) if bid.may_run_model]
    while True:
        for i, bid in enumerate(bids):
            others = [j for j in sharing if j != i]
            bid.scheduler.share(
                OtherRequests(
                    n_texts=load.n_texts - 1,
                    n_target=max(0, load.n_tokens - bid.scheduler.n_pending - bid.depth),
                    n_draft=sum(bids[j].unread for j in others),
                    rate=max(0.0, load.rate - bid.scheduler.own_rate),
                    n_alike=len(others) if i in sharing else 0,
                    depth=bid.depth,
                )
            )
            may_run = i in sharing or not bid.may_run_model
            choices[i] = (bid if may_run else _without_model(bid)).choice(prefixes[i])
        left = [i for i in sharing if not isinstance(choices[i], ModelAction)]
        if not left:
            return choices
        sharing = [i for i in sharing if i not in left]


def _prefixes(bids: Sequence[Bid], load: PassLoad) -> list[Prefix]:
    """Return how much of what is offered pays, for each of `bids`."""
    chains = [bid.scheduler.chain(bid.path, bid.depth, bid.offered) for bid in bids]
    n_more = sum(len(chain.chances) for chain in chains)
    first = bids[0].scheduler
    curve = first.learned.target.at(load.n_past)
    if first.policy.splits and load.n_texts > 1:
        verify = extrapolated(curve, n_more)
    else:
        verify = extrapolated(curve, load.n_tokens + n_more, load.n_tokens)
    return best_prefixes(verify, load.rate, chains)


def _without_model(bid: Bid) -> Bid:
    return Bid(bid.scheduler, bid.path, bid.depth, 0, bid.offered, bid.bucket)


_WINDOW = 16  # steps over which the pace is taken
_LEAST_GAIN = 0.98  # of plain decoding's pace: a little less is noise
_HALF, _LEAST_AT_HALF = 8, 0.85  # of the window: what is that slow by then is not waited for
_SHORTEST, _LONGEST = 64, 256  # steps of rest: twice as many each time that drafts did not pay again
_WEIGHT = 0.1  # of a step in the mean of what it takes beside its pass
_ALIKE = 0.25  # share of the requests that may come or go before drafts are tried again


class SharedPace:
    """Measures whether requests that share passes are quicker with drafts, whatever a scheduler expects.

    It follows the steps of a batch in which nothing is prefilled. Deciding takes time too, which no cost
    curve holds. Where one more token costs what it brings, as beside seven others, that time is lost. Then
    nothing is drafted for a while, and later it is tried again. What was found is kept for when about as
    many requests come again: short ones would be over before it is found anew.
    """

    def __init__(self) -> None:
        """Begin with drafts."""
        self._beside = 0.0  # seconds of a step that drafts nothing beside its pass
        self._rests: dict[int, int] = {}  # by number of requests: the last rest, where drafts did not pay
        self._begin(0)

    def _begin(self, n_requests: int) -> None:
        alike = [n for n in self._rests if not self._differ(n, n_requests)]
        self._n_requests = min(alike, key=lambda n: abs(n - n_requests), default=n_requests)
        self._n_steps, self._spent, self._plain = 0, 0.0, 0.0
        known = self._rests.get(self._n_requests, 0)
        self._rest = max(_SHORTEST, known)
        self._n_left = known  # steps of the rest under way

    @staticmethod
    def _differ(before: int, n_requests: int) -> bool:
        return abs(n_requests - before) > _ALIKE * before

    @property
    def rests(self) -> bool:
        """Whether nothing is to be drafted in the next step."""
        return self._n_left > 0

    def count(self, n_requests: int, n_made: int, seconds: float, plain: float) -> None:
        """Count a step of `seconds` in which `n_requests` wrote `n_made` tokens.

        `plain`: seconds of a pass in which each of them writes one.
        """
        if self._differ(self._n_requests, n_requests):
            self._begin(n_requests)
        if self._n_left:
            self._n_left -= 1
            self._beside += _WEIGHT * (max(0.0, seconds - plain) - self._beside)
            return
        self._n_steps += 1
        self._spent += seconds
        self._plain += (plain + self._beside) * n_made / n_requests
        is_slow = self._n_steps == _HALF and self._plain < _LEAST_AT_HALF * self._spent
        if self._n_steps < _WINDOW and not is_slow:
            return
        if self._plain < _LEAST_GAIN * self._spent:
            self._n_left = self._rests[self._n_requests] = self._rest
            self._rest = min(_LONGEST, 2 * self._rest)
        else:
            self._rest = _SHORTEST
            self._rests.pop(self._n_requests, None)
        self._n_steps, self._spent, self._plain = 0, 0.0, 0.0
