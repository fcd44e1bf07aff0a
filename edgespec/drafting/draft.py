"""Drafts of a target, besides the suffix store: nothing, a model of its vocabulary, or of another one.

    NoDraft           nothing
    PlainDraft        a model of the target's vocabulary
    TranslatedDraft   a model of another vocabulary
    HeadDraft, EagleDraft, BlockDraft, MtpDraft       heads (draft_heads.py)

`find_draft` (draft_heads.py) chooses the kind by the files' headers. Then the models are loaded
(`load_target`, `load`), and `bind` returns the draft that is used: of the same kind, another one, or none.
"""

from __future__ import annotations

import math
from dataclasses import replace

from edgespec.decoding.choices import DrafterName
from edgespec.drafting.costs import CostCurve
from edgespec.drafting.draft_model import DraftModel
from edgespec.drafting.foreign.overlap import find_overlap, suite_text
from edgespec.drafting.foreign.translated_model import ROOM_PER_TOKEN, TranslatedModel
from edgespec.drafting.foreign.vocabulary_map import VocabularyMap, map_vocabularies
from edgespec.drafting.foreign.vocabulary_match import compare_vocabularies
from edgespec.drafting.policy import Policy
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.batch import EmbeddingsFn
from edgespec.llama.gguf_header import GGUFHeader
from edgespec.llama.placement import Placement
from edgespec.llama.sequence_pool import SequencePool
from edgespec.llama.weights import Model
from edgespec.platform.closing import Closing
from edgespec.platform.messages import MessageFn


class Draft(Closing):
    """A draft of one target, from its file to its sessions. A context manager, which closes its model."""

    name: str | None = None
    """The draft as it was given, or its name in the registry."""
    header: GGUFHeader | None = None
    """The header of its file; None without a file of its own."""
    reads_states = False
    """Whether it is a head, which reads the target's hidden states."""
    is_mtp = False
    """Whether it is the head in the target's own file."""
    model: Model | None = None
    """Its model, once it is loaded."""
    target: Model

    def __init__(self, target_name: str) -> None:
        """Draft for the target of that name."""
        self.target_name = target_name

    # ---- loading ----

    def without_layers(self) -> Draft:
        """Return the draft to use where layers of the target lie on nodes. Raises UsageError if none can."""
        return self

    def load_target(self, header: GGUFHeader, *, kernels: bool, placement: Placement | None) -> Model:
        """Load the target, so that it gives what the draft reads of it."""
        return Model(header.path, kernels=kernels, header=header, placement=placement)

    def load(self, target: Model, *, kernels: bool, n_threads: int) -> Model | None:
        """Load and return its model."""
        self.target = target
        self.model = self._load(kernels=kernels, n_threads=n_threads)
        return self.model

    def _load(self, *, kernels: bool, n_threads: int) -> Model | None:
        return Model(self.header.path, kernels=kernels, header=self.header) if self.header else None

    def bind(self, on_message: MessageFn) -> Draft:
        """Return the draft to use, once both models are loaded; `on_message` takes lines for the user.

        Raises EdgespecError or UsageError if it cannot draft for this target.
        """
        assert self.model  # noqa: S101 - for the type checker
        stuck = [model.name for model in (self.target, self.model) if not model.can_rewind]
        if not stuck:
            return self._match(self.model, on_message)
        what = "decoding plainly" if stuck[0] == self.target.name else "it does not draft"
        on_message(f"{stuck[0]} cannot take tokens back: {what}")
        self.close()
        return StuckDraft(self.target_name)

    def _match(self, model: Model, on_message: MessageFn) -> Draft:
        return self

    # ---- what it can do ----

    def restrict(self, policy: Policy, drafter: DrafterName) -> Policy | None:
        """Return `policy` without what this draft cannot do; None to decode plainly.

        Raises UsageError if the `drafter` that the user chose is impossible with it.
        """
        if policy.model and self.model and self.model.keeps_state:
            return replace(policy, staged=False)  # a wrong guess would take all of its pass with it
        return policy

    def writer(self) -> Model:
        """Return its model, if that can write alone in a cascade, else raise UsageError."""
        raise UsageError("a cascade needs a draft model, which writes: choose a draft")

    # ---- running ----

    def n_own(self, n_ctx: int) -> int:
        """Return how many of its own tokens `n_ctx` of the target's may be."""
        return n_ctx

    def open(self, sequences: SequencePool) -> DraftModel:
        """Return it as the draft model of one generation, in one of `sequences`."""
        raise NotImplementedError

    @property
    def timed_inputs(self) -> EmbeddingsFn | None:
        """Maker of the rows that a timed pass takes in place of tokens; None: it takes tokens.

        Costs do not depend on their values.
        """
        return None

    def costs(self, curve: CostCurve) -> CostCurve:
        """Return the costs of drafting, for a `curve` of single passes."""
        return curve

    def close(self) -> None:
        """Free the model; a second call does nothing."""
        if self.model:
            self.model.close()


class NoDraft(Draft):
    """Nothing but the suffix store drafts."""

    def __init__(self, target_name: str, reason: str = "") -> None:
        """`reason`: why the head in the target's file does not draft, if there is one."""
        super().__init__(target_name)
        self._reason = reason

    def bind(self, on_message: MessageFn) -> Draft:
        """Return itself, and tell why no head drafts."""
        if self._reason:
            on_message(f"nothing but text seen before drafts: {self._reason}")
        return self

    def restrict(self, policy: Policy, drafter: DrafterName) -> Policy | None:
        """Return `policy` without a model."""
        if policy.model and not policy.suffix:
            raise UsageError("no draft model was loaded", field="drafter", value=drafter)
        return replace(policy, model=False, staged=False) if policy.model else policy


class StuckDraft(NoDraft):
    """A draft that was left out, because it or its target cannot take tokens back."""

    def restrict(self, policy: Policy, drafter: DrafterName) -> Policy | None:
        """Return `policy` without a model; None where that leaves nothing."""
        return None if policy.model and not policy.suffix else super().restrict(policy, drafter)


class PlainDraft(Draft):
    """A model of the target's vocabulary; `bind` finds out whether it has another one."""

    model: Model
    header: GGUFHeader

    def __init__(self, target_name: str, name: str, header: GGUFHeader) -> None:
        """Draft with the file of `header`, which is named `name`."""
        super().__init__(target_name)
        self.name = name
        self.header = header

    def _match(self, model: Model, on_message: MessageFn) -> Draft:
        match = compare_vocabularies(self.target, model)
        return self if match.equal else TranslatedDraft(self, on_message)

    def writer(self) -> Model:
        """Return its model."""
        return self.model

    def open(self, sequences: SequencePool) -> DraftModel:
        """Return it as a DraftModel, which finds what it read of earlier sequences."""
        model = DraftModel(sequences.begin([0]), n_vocab=self.target.n_vocab)
        model.sequences = sequences
        return model


class TranslatedDraft(Draft):
    """A model of another vocabulary."""

    model: Model

    def __init__(self, plain: PlainDraft, on_message: MessageFn) -> None:
        """Go on from a loaded draft. Raises EdgespecError if no token is the same in both vocabularies."""
        super().__init__(plain.target_name)
        self.name, self.header, self.model, self.target = plain.name, plain.header, plain.model, plain.target
        self._map: VocabularyMap = map_vocabularies(self.target, self.model)
        if not self._map.n_shared:
            raise EdgespecError(
                f"{self.name} cannot draft for {self.target_name}: no token is the same in both; "
                "choose another draft, or drafter none"
            )
        overlap = find_overlap(self.target, self.model, self._map, suite_text())
        on_message(f"{self.name} drafts in another vocabulary: {overlap.summary}")

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
        """Return it as a TranslatedModel."""
        return TranslatedModel(sequences.begin([0]), self.target, self._map)
