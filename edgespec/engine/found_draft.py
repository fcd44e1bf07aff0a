"""The draft of a target that has none: one found on this disk, or what would be worth pulling."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.drafting.found_drafts import DraftCandidate, best_draft, measured_speedup
from edgespec.drafting.profile import ProfileKey
from edgespec.drafting.profile_store import load
from edgespec.errors import EdgespecError
from edgespec.llama.gguf_header import GGUFHeader, check_model_file
from edgespec.models.footprint import USUAL_CTX, fits_in_memory
from edgespec.models.found.catalog import list_found
from edgespec.models.found.facts import FactsReader, ModelFacts, facts_of
from edgespec.models.found.suggestions import draft_to_pull, expected_size
from edgespec.models.registry import load_registry
from edgespec.models.sources import format_size


@dataclass(frozen=True, slots=True)
class FoundDraft:
    """The draft to use, if any, and the line that tells of it."""

    name: str | None
    line: str = ""


@dataclass(frozen=True, slots=True)
class DraftSearch:
    """The search for a draft of a target that has neither a pair nor a head."""

    target_name: str
    target: GGUFHeader
    kernels: str
    """Kernels of the run, as Engine.kernels names them."""
    n_threads: int
    n_ctx: int | None

    def find(self) -> FoundDraft:
        """Return the best draft on this disk.

        One that runs have measured not to pay, or that does not fit into memory beside the target, is left
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
                return self._checked(best)
        return FoundDraft(None, self._worth_pulling(facts))

    def _checked(self, candidate: DraftCandidate) -> FoundDraft:
        """Return the candidate, or why it is left out."""
        name = candidate.model.name
        try:
            draft = check_model_file(candidate.model.path)
            key = ProfileKey.of(self.target, draft, kernels=self.kernels, threads=self.n_threads)
        except (EdgespecError, OSError) as error:
            return FoundDraft(None, f"{name} does not draft: {error}")
        speedup = measured_speedup(load(key))
        if speedup is not None and speedup < 1.0:
            how = f"reached {speedup:.2f} times plain decoding" if speedup else "was hardly ever used"
            line = f"{name} is not loaded: in earlier runs it {how} as a draft; --draft {name} loads it"
            return FoundDraft(None, line)
        n_ctx = self.n_ctx or USUAL_CTX
        try:
            fits_in_memory([(one, min(one.n_ctx_train, n_ctx)) for one in (self.target, draft)])
        except EdgespecError:
            return FoundDraft(
                None, f"{name} is not loaded: as a draft beside the target it would not fit in memory"
            )
        return FoundDraft(
            name,
            f"{name} drafts: found on this disk, same vocabulary, estimated {candidate.speedup:.1f} times "
            "plain decoding (--draft names another, --drafter suffix none)",
        )

    def _worth_pulling(self, facts: ModelFacts) -> str:
        """Return a line with the draft of models.toml that fits best; "" if none is known."""
        registry = load_registry()
        names = f"{self.target_name} {self.target.path.name}"
        entry = draft_to_pull(registry, names, facts, self.target.file_bytes)
        if entry is None:
            return ""
        size = format_size(expected_size(entry, registry))
        return (
            f"nothing on this disk drafts for {self.target_name}; worth pulling ({size}): "
            f"`edgespec models pull {entry.name}`"
        )
