"""The draft of a target that has none: one found on this disk, or what would be worth pulling."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.drafting.found_drafts import DraftCandidate, best_draft, measured_speedup
from edgespec.drafting.profile import ProfileKey
from edgespec.drafting.profile_store import load
from edgespec.errors import EdgespecError
from edgespec.llama.gguf_header import GGUFHeader, check_model_file
from edgespec.llama.kernels import STOCK
from edgespec.llama.kernels import load as load_kernels
from edgespec.models.footprint import USUAL_CTX, fits_in_memory
from edgespec.models.found.catalog import list_found
from edgespec.models.found.facts import FactsReader, ModelFacts, facts_of
from edgespec.models.found.suggestions import draft_to_pull, expected_size
from edgespec.models.registry import load_registry
from edgespec.models.sources import format_size
from edgespec.platform.messages import MessageFn


@dataclass(frozen=True, slots=True)
class DraftSearch:
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
                reason = self._why_not(best)
                self.on_message(
                    reason
                    or f"{best.model.name} drafts: found on this disk, same vocabulary, estimated "
                    f"{best.speedup:.1f} times plain decoding (--draft names another, --drafter suffix none)"
                )
                return None if reason else best.model.name
        self._tell_worth_pulling(facts)
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

    def _tell_worth_pulling(self, facts: ModelFacts) -> None:
        """Tell of the draft of models.toml that fits best, if one is known."""
        registry = load_registry()
        names = f"{self.target_name} {self.target.path.name}"
        entry = draft_to_pull(registry, names, facts, self.target.file_bytes)
        if entry:
            size = format_size(expected_size(entry, registry))
            self.on_message(
                f"nothing on this disk drafts for {self.target_name}; worth pulling ({size}): "
                f"`edgespec models pull {entry.name}`"
            )
