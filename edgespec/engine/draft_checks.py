"""Whether a draft model can do what it is asked for: draft in its own vocabulary, or write in a cascade."""

from __future__ import annotations

from edgespec.drafting.foreign.overlap import find_overlap, suite_text
from edgespec.drafting.foreign.vocabulary import compare_vocabularies
from edgespec.drafting.foreign.vocabulary_map import VocabularyMap, map_vocabularies
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.weights import Model
from edgespec.models.registry import load_registry
from edgespec.platform.messages import MessageFn


def map_to_draft(
    target: Model, draft: Model, target_name: str, draft_name: str | None, on_message: MessageFn
) -> VocabularyMap:
    """Return which tokens are the same in a draft of another vocabulary, and tell of it.

    Raises EdgespecError if there are none.
    """
    found = map_vocabularies(target, draft)
    if not found.n_shared:
        raise EdgespecError(
            f"{draft_name} cannot draft for {target_name}: no token is the same in both; "
            "choose another draft, or drafter none"
        )
    overlap = find_overlap(target, draft, found, suite_text())
    on_message(f"{draft_name} drafts in another vocabulary: {overlap.summary}")
    return found


def check_writer(
    target: Model,
    draft: Model | None,
    target_name: str,
    draft_name: str | None,
    *,
    is_head: bool,
    is_cut: bool,
) -> Model:
    """Return the draft model if it can write in a cascade, else raise UsageError.

    `is_head`: it reads the target's hidden states. `is_cut`: it has only a part of the vocabulary.
    """
    if draft is None:
        raise UsageError("a cascade needs a draft model, which writes: choose a draft")
    if is_head:
        small = load_registry().complete(target_name, None, writes=True)[1]
        such_as = f", such as {small}" if small and small != draft_name else ""
        raise UsageError(
            f"{draft_name} is a draft head, which cannot write in a cascade by itself: choose a draft model"
            f"{such_as}"
        )
    if is_cut:
        raise UsageError(
            f"{draft_name} has only a part of the vocabulary, and could not write the rest of it in "
            "a cascade: choose the model that it was cut from"
        )
    if not compare_vocabularies(target, draft).equal:
        raise UsageError(
            f"a cascade needs one vocabulary: {draft_name} has another than {target_name}; "
            "choose a draft of the target's family"
        )
    return draft
