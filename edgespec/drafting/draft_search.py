"""Finds a draft for a target that has none: a model on this disk, or one worth pulling.

Of the models on this disk with the target's vocabulary the best is chosen by its estimated cost. What runs
have measured of the pair since then overrides the estimate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from edgespec.drafting.profile import CONTEXTS, Profile, ProfileKey, load
from edgespec.errors import EdgespecError, MessageFn
from edgespec.llama.gguf_header import GGUFHeader, check_model_file, read_results
from edgespec.llama.kernels import STOCK, kernel_coverage
from edgespec.llama.kernels import load as load_kernels
from edgespec.models.footprint import (
    USUAL_CTX,
    FactsReader,
    ModelFacts,
    draft_to_pull,
    facts_of,
    fits_in_memory,
)
from edgespec.models.hub import format_size
from edgespec.models.on_disk import FoundModel, list_found, real_path
from edgespec.models.registry import load_registry

MOST_OF_TARGET = 0.6
"""Largest draft, in bytes of the target's file."""

_COARSE_BITS, _COARSE = 4.0, 0.85  # bits of a weight below which fewer tokens are accepted; a guess
_STOCK_PRICE = 2.0  # of a pass without edgespec's kernels, where the target's runs on them; a guess

_SAME_FAMILY = 0.84
"""Share of a target's greedy answers that a draft of its family proposes: Qwen2.5-Coder-1.5B and its 0.5B."""
_WORTH = 1.1
"""Estimated speed, in plain decoding's, from which a draft is worth trying."""
_PER_TOKEN = 0.08  # of a pass of the target: what verifying one token more takes

_FEWEST_TESTED = 30.0  # tokens that were tested, for a measured acceptance
_FEWEST_RUNS = 5  # after which a draft that was hardly ever used does not pay
_LONGEST = 8  # tokens of a draft


class DraftCandidate(msgspec.Struct, frozen=True):
    """A model on this disk that could draft for a target."""

    model: FoundModel
    speedup: float
    """Estimated speed, in plain decoding's."""


def expected_speedup(acceptance: float, price: float) -> float:
    """Return the best speed of a draft of a fixed length, relative to plain decoding.

    `price`: the cost of a drafted token, in passes of the target.
    """
    best = 0.0
    for gamma in range(1, _LONGEST + 1):
        tokens = sum(acceptance**i for i in range(gamma + 1))
        best = max(best, tokens / (1.0 + gamma * (_PER_TOKEN + price)))
    return best


def best_draft(
    target: Path, facts: ModelFacts, size: int, models: Iterable[FoundModel], reader: FactsReader
) -> DraftCandidate | None:
    """Return the best draft among `models` for the file `target` of `size` bytes; None if none is worth it.

    Only headers of files that are small enough are read.
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
    return best if best and best.speedup >= _WORTH else None


def _can_draft(draft: ModelFacts, target: ModelFacts) -> bool:
    checked = read_results().get(draft.architecture)
    same = (draft.vocabulary, draft.ends) == (target.vocabulary, target.ends)
    return not draft.kind and same and checked is not None and checked.takes_back


def _acceptance(draft: ModelFacts, size: int) -> float:
    bits = 8 * size / max(1, draft.parameters)
    return _SAME_FAMILY * (1.0 if bits >= _COARSE_BITS else _COARSE)


def _price(draft: ModelFacts, target: ModelFacts) -> float:
    price = draft.pass_bytes / max(1, target.pass_bytes)
    ours, theirs = kernel_coverage(target.matrices), kernel_coverage(draft.matrices)
    if ours and theirs:
        price *= (1.0 + _STOCK_PRICE * (1.0 - theirs.share)) / (1.0 + _STOCK_PRICE * (1.0 - ours.share))
    return price


def measured_speedup(profile: Profile | None) -> float | None:
    """Return the speed that a draft reached in runs of a pair, relative to plain decoding.

    None: too little is known. 0 for a draft that was available in many runs and hardly ever used.
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


class DraftSearch(msgspec.Struct, frozen=True):
    """The search for a draft of a target that has neither a pair nor a head."""

    target_name: str
    target: GGUFHeader
    own_kernels: bool
    """Whether the run may use edgespec's kernels."""
    n_threads: int
    n_ctx: int | None
    on_message: MessageFn
    """Takes a line on what was found, or would be worth pulling."""

    def find(self) -> str | None:
        """Return the name of the best draft on this disk.

        One that did not pay in earlier runs, or does not fit into memory with the target, is left
        out. `find_drafts = false` in models.toml leaves all out.
        """
        registry = load_registry()
        facts = facts_of(self.target)
        if registry.find_drafts:
            reader = FactsReader()
            models = list_found().models
            best = best_draft(self.target.path, facts, self.target.file_bytes, models, reader)
            reader.save()
            if best:
                reason = self._why_not(best)
                self.on_message(
                    reason
                    or f"{best.model.name} drafts: found on this disk, same vocabulary, estimated "
                    f"{best.speedup:.1f} times plain decoding (--draft names another, --drafter suffix none)"
                )
                return None if reason else best.model.name
        self._suggest_pull(facts)
        return None

    def _why_not(self, candidate: DraftCandidate) -> str:
        """Return why the candidate is left out; "" if it drafts."""
        name = candidate.model.name
        kernels = load_kernels().name if self.own_kernels else STOCK
        try:
            draft = check_model_file(candidate.model.path)
            key = ProfileKey.of(self.target, draft, kernels=kernels, threads=self.n_threads)
        except (EdgespecError, OSError) as error:
            return f"{name} does not draft: {error}"
        speedup = measured_speedup(load(key))
        if speedup is not None and speedup < 1.0:
            how = f"reached {speedup:.2f} times plain decoding" if speedup else "was hardly ever used"
            return f"{name} is not loaded: in earlier runs it {how} as a draft; --draft {name} loads it"
        n_ctx = self.n_ctx or USUAL_CTX
        try:
            fits_in_memory([(one, min(one.n_ctx_train, n_ctx)) for one in (self.target, draft)])
        except EdgespecError:
            return f"{name} is not loaded: as a draft beside the target it would not fit in memory"
        return ""

    def _suggest_pull(self, facts: ModelFacts) -> None:
        """Suggest the draft in models.toml that fits best, if there is one."""
        registry = load_registry()
        names = f"{self.target_name} {self.target.path.name}"
        entry = draft_to_pull(registry, names, facts, self.target.file_bytes)
        if entry:
            size = format_size(registry.bytes_to_pull(entry))
            self.on_message(
                f"nothing on this disk drafts for {self.target_name}; worth pulling ({size}): "
                f"`edgespec models pull {entry.name}`"
            )
