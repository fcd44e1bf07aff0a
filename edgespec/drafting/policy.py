"""The policy of a generation, which its scheduler is given, and the actions that it answers with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """The limits set to a scheduler by the user and the models: which sources may propose, and how."""

    suffix: bool = True
    """The suffix store may propose to the target."""
    model: bool = True
    """The draft model may propose to the target."""
    staged: bool = True
    """The suffix store may propose to the draft model."""
    after_store: bool = True
    """The draft model may run after tokens of the suffix store in one step; a head cannot, for neither the
    target nor the head has been there."""
    branches: bool = True
    """A step may propose several tokens for one position."""
    siblings: bool = True
    """Several may also be sampled for one position; these cannot be pruned."""
    rereads: bool = False
    """The target takes rejected tokens back only together with all others of their pass, which are then read
    again; a recurrent or hybrid target without snapshots does."""
    splits: bool = False
    """A pass over several texts is made of one for each number of tokens that they have in it; that of a
    recurrent or hybrid target is."""


@dataclass(frozen=True, slots=True)
class SuffixAction:
    """Take the first `n` tokens that the suffix store offers."""

    n: int


@dataclass(frozen=True, slots=True)
class ModelAction:
    """Run the draft model over its unread tokens and the first `n_guesses` tokens offered."""

    n_guesses: int


@dataclass(frozen=True, slots=True)
class OtherRequests:
    """The share of other requests in the passes of a step."""

    n_texts: int = 0
    n_target: int = 0
    """Their tokens in the target's pass."""
    n_draft: int = 0
    """Their tokens in the draft model's next pass, whose time all share in proportion."""
    rate: float = 0.0
    """Tokens a second (or a joule) that they make."""
    n_alike: int = 0
    """Requests among them that draft with the model if this one does: all pay the same for their tokens."""
    depth: int = 0
    """Tokens that this request has drafted before that."""


DraftAction = SuffixAction | ModelAction | None
"""None: verify now."""
