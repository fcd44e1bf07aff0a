"""Everything that proposes tokens: one file a drafter, one protocol for all (`base.py`)."""

from edgespec.drafters.base import Draft, Drafter
from edgespec.drafters.model import ModelDrafter

__all__ = ["Draft", "Drafter", "ModelDrafter"]
