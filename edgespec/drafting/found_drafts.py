"""A draft among the models on this disk: one with the target's vocabulary, the best by what it costs.

It is an estimate, that of `edgespec models pair`. What runs have measured of the pair since then wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from edgespec.drafting.costs import CONTEXTS
from edgespec.drafting.foreign.overlap import SAME_FAMILY, WORTH, expected_speedup
from edgespec.drafting.profile import Profile
from edgespec.errors import EdgespecError
from edgespec.llama.gguf_header import read_results
from edgespec.llama.kernel_coverage import kernel_coverage
from edgespec.models.found.facts import FactsReader, ModelFacts
from edgespec.models.found.files import real_path
from edgespec.models.found.model import FoundModel

MOST_OF_TARGET = 0.6
"""Largest draft, in bytes of the target's file."""

_COARSE_BITS, _COARSE = 4.0, 0.85  # bits of a weight below which fewer tokens are accepted; a guess
_STOCK_PRICE = 2.0  # of a pass without edgespec's kernels, where the target's runs on them; a guess

_FEWEST_TESTED = 30.0  # tokens that were judged, for a measured acceptance
_FEWEST_RUNS = 5  # after which a draft that was hardly ever used does not pay
_LONGEST = 8  # tokens of a draft


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """A model on this disk that could draft for a target."""

    model: FoundModel
    speedup: float
    """Estimated speed, in plain decoding's."""


def best_draft(
    target: Path, facts: ModelFacts, size: int, models: Iterable[FoundModel], reader: FactsReader
) -> DraftCandidate | None:
    """Return the best draft among `models` for the file `target` of `size` bytes; None if none is worth it.

    Headers of files that are small enough are read, no others.
    """
    if facts.kind or not facts.vocabulary:
        return None
    found: list[DraftCandidate] = []
    seen = {real_path(target)}
    for model in sorted(models, key=lambda one: one.size):
        file = real_path(model.path)
        if model.problem or not 0 < model.size <= MOST_OF_TARGET * size or file in seen:
            continue
        seen.add(file)
        try:
            draft = reader.read(model)
        except EdgespecError:
            continue  # a damaged file drafts nothing; a scan says what is wrong with it
        if _can_draft(draft, facts):
            speedup = expected_speedup(_acceptance(draft, model.size), _price(draft, facts))
            found.append(DraftCandidate(model, speedup))
    best = max(found, key=lambda one: one.speedup, default=None)
    return best if best and best.speedup >= WORTH else None


def _can_draft(draft: ModelFacts, target: ModelFacts) -> bool:
    checked = read_results().get(draft.architecture)
    same = (draft.vocabulary, draft.ends) == (target.vocabulary, target.ends)
    return not draft.kind and same and checked is not None and checked.takes_back


def _acceptance(draft: ModelFacts, size: int) -> float:
    bits = 8 * size / max(1, draft.parameters)
    return SAME_FAMILY * (1.0 if bits >= _COARSE_BITS else _COARSE)


def _price(draft: ModelFacts, target: ModelFacts) -> float:
    price = draft.pass_bytes / max(1, target.pass_bytes)
    ours, theirs = kernel_coverage(target.matrices), kernel_coverage(draft.matrices)
    if ours and theirs:
        price *= (1.0 + _STOCK_PRICE * (1.0 - theirs.share)) / (1.0 + _STOCK_PRICE * (1.0 - ours.share))
    return price


def measured_speedup(profile: Profile | None) -> float | None:
    """Return the speed, in plain decoding's, that runs of a pair have shown a draft to reach.

    None: too little is known. 0 for a draft that was there in many runs and hardly ever used.
    """
    if profile is None:
        return None
    right, tested = _judged(profile.acceptance)
    if tested < _FEWEST_TESTED:
        return 0.0 if profile.runs >= _FEWEST_RUNS else None
    if profile.draft is None:
        return None
    verify, draft = profile.target.at(CONTEXTS[0]), profile.draft.at(CONTEXTS[0])
    alpha = right / tested
    speeds = (
        sum(alpha**i for i in range(gamma + 1)) * verify[1] / (verify[gamma + 1] + gamma * draft[1])
        for gamma in range(1, _LONGEST + 1)
    )
    return max(speeds)


def _judged(acceptance: Mapping[str, object]) -> tuple[float, float]:
    """Return how many of the draft model's tokens were accepted and how many judged, recent ones mostly."""
    right = tested = 0.0
    for tables in (acceptance.get("greedy"), acceptance.get("sampled")):
        for name in ("argmax", "sampled"):
            counts = tables.get(name) if isinstance(tables, Mapping) else None
            if isinstance(counts, Mapping):
                right += _of_all_depths(counts.get("accepted"))
                tested += _of_all_depths(counts.get("tested"))
    return min(right, tested), tested


def _of_all_depths(rows: object) -> float:
    """Return the sum of the last row of a table; 0 for anything else that a file may hold."""
    row = rows[-1] if isinstance(rows, list) and rows else None
    numbers = [one for one in row if isinstance(one, int | float)] if isinstance(row, list) else []
    return float(sum(numbers))
