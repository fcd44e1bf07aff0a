"""The kind of draft with another vocabulary than the target's; the entry point `other-vocabulary`."""

from __future__ import annotations

import math
from dataclasses import replace

from edgespec.decoding.choices import DrafterName
from edgespec.drafting.draft import Draft
from edgespec.drafting.draft_model import DraftModel
from edgespec.drafting.foreign.translated_model import ROOM_PER_TOKEN, TranslatedModel
from edgespec.drafting.foreign.vocabulary_map import map_vocabularies
from edgespec.drafting.pace import Policy
from edgespec.errors import EdgespecError, MessageFn, UsageError
from edgespec.llama.sequence_pool import SequencePool
from edgespec.llama.weights import Model


class TranslatedDraft(Draft):
    """A draft model of another vocabulary, whose text is translated into the target's tokens."""

    model: Model

    def match(self, model: Model, on_message: MessageFn) -> Draft:
        """Return itself. Raises EdgespecError if no token is the same in both vocabularies."""
        self._map = map_vocabularies(self.target, model)
        if not self._map.n_shared:
            raise EdgespecError(
                f"{self.name} cannot draft for {self.target_name}: no token is the same in both; "
                "choose another draft, or drafter none"
            )
        on_message(f"{self.name} drafts in another vocabulary: {self._map.n_shared:,} tokens are the same")
        return self

    def restrict(self, policy: Policy, drafter: DrafterName) -> Policy | None:
        """Return `policy` without guesses of the suffix store, which it does not check."""
        return replace(policy, staged=False)

    def writer(self) -> Model:
        """Raise UsageError: its tokens are not the target's."""
        raise UsageError(
            f"a cascade needs one vocabulary: {self.name} has another than {self.target_name}; "
            "choose a draft of the target's family"
        )

    def n_own(self, n_ctx: int) -> int:
        """Return how many of its own tokens `n_ctx` of the target's may be, roughly."""
        return min(math.ceil(n_ctx * ROOM_PER_TOKEN), self.model.n_ctx_train)

    def open(self, sequences: SequencePool) -> DraftModel:
        """Return the draft model of one generation, which takes and returns the target's tokens."""
        return TranslatedModel(sequences.begin([0]), self.target, self._map)
