"""Everything that proposes tokens: sources, and the drafter that chains them (`chain.py`)."""

from edgespec.drafters.base import Draft, Drafter, Outcome
from edgespec.drafters.chain import Chain, ChainStep
from edgespec.drafters.model import DraftModel
from edgespec.drafters.suffix import SuffixDrafts

__all__ = ["Chain", "ChainStep", "Draft", "DraftModel", "Drafter", "Outcome", "SuffixDrafts"]
