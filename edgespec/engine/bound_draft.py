"""A draft model, and what it needs of its target to draft for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgespec.decoding.features import TargetFeatures
from edgespec.drafting.block_head import BlockModel
from edgespec.drafting.foreign.translated import ROOM_PER_TOKEN, TranslatedDraft
from edgespec.drafting.foreign.vocabulary import compare_vocabularies
from edgespec.drafting.foreign.vocabulary_map import VocabularyMap
from edgespec.drafting.head import HeadModel
from edgespec.drafting.model import DraftModel
from edgespec.engine.draft_checks import map_to_draft
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.embeddings import CutVocabulary, read_cut
from edgespec.llama.head_file import Fusion, HeadFile, TargetEmbeddings
from edgespec.llama.published_heads import BlockHead, EagleHead
from edgespec.llama.timelines import Timelines
from edgespec.llama.weights import Model
from edgespec.platform.messages import MessageFn


@dataclass(frozen=True, slots=True)
class BoundDraft:
    """A draft model that is loaded, and its target."""

    target: Model
    draft: Model
    reads_states: bool
    """Whether it is a head, which reads the target's hidden states."""
    head: HeadFile | None = None
    """It, if it is a head in a file that edgespec made."""
    fusion: Fusion | None = None
    """What such a head reads."""
    cut: CutVocabulary | None = None
    """The part of the vocabulary that a draft has which `edgespec draft make` made."""
    vocabulary_map: VocabularyMap | None = None
    """Of a draft with another vocabulary."""

    def n_own(self, n_ctx: int) -> int:
        """Return how many of its own tokens `n_ctx` of the target's may be."""
        if self.vocabulary_map is None:
            return n_ctx
        return min(math.ceil(n_ctx * ROOM_PER_TOKEN), self.draft.n_ctx_train)

    def begin(self, timelines: Timelines) -> DraftModel:
        """Return it as the draft model of a text, in one of `timelines`."""
        session, draft, n_vocab = timelines.begin([0]), self.draft, self.target.n_vocab
        if self.vocabulary_map:
            return TranslatedDraft(session, self.target, self.vocabulary_map)
        if isinstance(draft, BlockHead):
            return BlockModel(session, TargetFeatures(self.target.n_state), draft, n_vocab=n_vocab)
        if self.reads_states:
            return HeadModel(
                session,
                TargetFeatures(self.target.n_state),
                n_vocab=n_vocab,
                head=self.head,
                fusion=self.fusion,
                encode=draft.encode if isinstance(draft, EagleHead) else None,
            )
        model = DraftModel(session, n_vocab=n_vocab, cut=self.cut)
        model.timelines = timelines
        return model


def bind(
    target: Model,
    draft: Model,
    names: tuple[str, str | None],
    *,
    head: HeadFile | None,
    is_published: bool,
    on_message: MessageFn,
) -> BoundDraft:
    """Return a draft from a file of its own, of which `head` was read, or that was published as a head.

    `names`: the target's and the draft's, for errors. Raises EdgespecError and UsageError for a draft of
    another vocabulary that cannot draft for this target.
    """
    cut = read_cut(draft.header)
    if head:
        fusion = Fusion(head, TargetEmbeddings(target.header))
        return BoundDraft(target, draft, reads_states=True, head=head, fusion=fusion, cut=cut)
    match = compare_vocabularies(target, draft)
    if match.equal:
        return BoundDraft(target, draft, reads_states=is_published, cut=cut)
    if cut:
        raise EdgespecError(
            f"{names[1]} cannot draft for {names[0]}: {match.reason}; choose the model that it was cut from"
        )
    if is_published:
        raise UsageError(f"{draft.path}: a head of another model than {names[0]}: {match.reason}")
    found = map_to_draft(target, draft, *names, on_message)
    return BoundDraft(target, draft, reads_states=False, vocabulary_map=found)
