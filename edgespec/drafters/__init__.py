"""Everything that proposes tokens: sources, and the drafter that makes trees of them (`trees.py`)."""

from edgespec.drafters.base import Drafter, Outcome
from edgespec.drafters.model import DraftModel
from edgespec.drafters.suffix import SuffixDrafts
from edgespec.drafters.trees import DraftStep, TreeDrafter

__all__ = ["DraftModel", "DraftStep", "Drafter", "Outcome", "SuffixDrafts", "TreeDrafter"]
