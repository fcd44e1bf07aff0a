"""Whether requests that share passes are quicker with drafts: measured, whatever a scheduler expects.

Deciding takes time too, which no cost curve holds. Where one more token costs what it brings, as beside seven
others, that time is lost. Then nothing is drafted for a while, and later it is tried again. What was found is
kept for when about as many requests come again: short ones would be over before it is found anew.
"""

from __future__ import annotations

_WINDOW = 16  # steps over which the pace is taken
_LEAST_GAIN = 0.98  # of plain decoding's pace: a little less is noise
_HALF, _LEAST_AT_HALF = 8, 0.85  # of the window: what is that slow by then is not waited for
_SHORTEST, _LONGEST = 64, 256  # steps of rest: twice as many each time that drafts did not pay again
_WEIGHT = 0.1  # of a step in the mean of what it takes beside its pass
_ALIKE = 0.25  # share of the requests that may come or go before drafts are tried again


class SharedPace:
    """Follows the steps of a batch in which nothing is prefilled."""

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
