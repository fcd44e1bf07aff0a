"""Measure, once and in a child process, how this machine best prefetches weights (see selftest.py).

The matrix products of a layer, for one token and for eight, are timed in turns with each candidate. The
default stays unless another one is clearly faster. If other programs were busy meanwhile, the default stays
and the measurement is repeated later.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from pathlib import Path
from time import perf_counter

import msgspec

from edgespec.errors import EdgespecError
from edgespec.llama.kernel_timing import MatrixShape, Prefetch, WeightStream, beyond_caches
from edgespec.platform.machine import MOST_OTHER_LOAD, OtherLoad, available_bytes, default_threads
from edgespec.platform.processes import run_in_child

CANDIDATES = (Prefetch(), Prefetch(1, 4096), Prefetch(1, 8192), Prefetch(2, 4096), Prefetch(2, 16384))
"""The default comes first. Past the other caches Intel fetches at half the speed, AMD a little faster."""

LEAST_GAIN = 1.03
"""How many times as fast as the default another candidate must be in three quarters of the rounds."""

TIMEOUT_S = 15.0

_Q4_K, _Q6_K = 12, 14
LAYER = (  # large matrices alone would hide the cost at a matrix's end
    *(MatrixShape(_Q4_K, rows, 1536) for rows in (1536, 256)),
    MatrixShape(_Q6_K, 256, 1536),
    *(MatrixShape(_Q4_K, rows, 1536) for rows in (1536, 8960, 8960)),
    MatrixShape(_Q6_K, 1536, 8960),
)
"""The matrices of a layer of Qwen2.5-1.5B in Q4_K_M."""

_SIZES = (1, 8)
_BUDGET_S = 1.0
_FEWEST_ROUNDS = 5
_RETRY_S = 60 * 60.0


@dataclass(frozen=True, slots=True)
class PrefetchChoice:
    """The chosen way to prefetch weights, and how it was found."""

    prefetch: Prefetch = field(default_factory=Prefetch)
    gain: float = 1.0
    """How many times as fast as with the default the products are."""
    reason: str = "not measured yet"
    """Why nothing was measured; "" if it was."""
    when: float = 0.0
    """Seconds since 1970."""

    @property
    def outdated(self) -> bool:
        """Whether to measure again: the last try failed and is an hour old."""
        return bool(self.reason) and not 0 <= time.time() - self.when < _RETRY_S


def measure(plugin: Path, isa: str) -> PrefetchChoice:
    """Return the best choice for the library `plugin` with instruction set `isa`; takes two seconds."""
    ended = run_in_child("edgespec.llama.prefetch", "main", str(plugin), isa, timeout_s=TIMEOUT_S)
    if ended.code is None:
        return unmeasured(f"it did not end within {TIMEOUT_S:g} s")
    try:
        return msgspec.json.decode(ended.said, type=PrefetchChoice)
    except msgspec.DecodeError:  # the child ended before it wrote its result
        return unmeasured(ended.complaint or f"exit code {ended.code}")


def unmeasured(reason: str) -> PrefetchChoice:
    """Return the default as a choice made now; `reason` says why nothing was measured."""
    return PrefetchChoice(reason=reason, when=time.time())


def choose(rounds: Sequence[Mapping[Prefetch, Sequence[float]]]) -> tuple[Prefetch, float]:
    """Return the best candidate and its gain. `rounds`: seconds for the same products in each round."""
    default, *others = CANDIDATES
    best, best_gain = default, 1.0
    for candidate in others:
        ratios = [
            [log(a / b) for a, b in zip(times[default], times[candidate], strict=True)] for times in rounds
        ]
        gains = [exp(statistics.fmean(of_round)) for of_round in ratios]
        low, gain, _ = statistics.quantiles(gains, n=4)
        worst = min(statistics.median(of_product) for of_product in zip(*ratios, strict=True))
        if low >= LEAST_GAIN and exp(worst) >= 1 / LEAST_GAIN and gain > best_gain:
            best, best_gain = candidate, gain
    return best, best_gain


def main(plugin: str, isa: str) -> None:
    """In the child: measure, and write the Choice to stdout as JSON."""
    try:
        choice = _measured(Path(plugin), isa)
    except EdgespecError as error:  # no memory
        choice = unmeasured(str(error))
    sys.stdout.write(msgspec.json.encode(choice).decode() + "\n")


def _measured(plugin: Path, isa: str) -> PrefetchChoice:
    n_threads = default_threads()
    size = beyond_caches()
    available = available_bytes()
    if available is not None and size > available / 4:
        return unmeasured(f"that takes {size >> 20} MiB of memory")
    with WeightStream(plugin, isa, size) as stream:
        load = OtherLoad()
        rounds = _timed(stream, n_threads)
        busy = load.processors()
    if len(rounds) < _FEWEST_ROUNDS:
        return unmeasured("the machine is too slow for it")
    if busy is not None and busy > MOST_OTHER_LOAD:
        return unmeasured(f"other programs kept {busy:.1f} processors busy")
    prefetch, gain = choose(rounds)
    return PrefetchChoice(prefetch, round(gain, 3), "", time.time())


def _timed(stream: WeightStream, n_threads: int) -> list[dict[Prefetch, list[float]]]:
    """Return the seconds of a layer's products, for each of _SIZES, with each candidate, round by round."""
    rounds: list[dict[Prefetch, list[float]]] = []
    began = perf_counter()
    while len(rounds) <= _FEWEST_ROUNDS or perf_counter() - began < _BUDGET_S:
        times: dict[Prefetch, list[float]] = {candidate: [] for candidate in CANDIDATES}
        for n in _SIZES:
            for i in range(len(CANDIDATES)):
                candidate = CANDIDATES[(i + len(rounds)) % len(CANDIDATES)]
                times[candidate].append(stream.products(LAYER, n, candidate, n_threads))
        if perf_counter() - began > 4 * _BUDGET_S:
            break
        rounds.append(times)
    return rounds[1:]  # the first warms up
