"""Models that have a drafting head in their own file (llama/mtp.py)."""

from __future__ import annotations

from pathlib import Path

from edgespec.errors import EdgespecError
from edgespec.models.entries import Entry
from edgespec.models.store import Store


def has_mtp_head(model: Path | Entry) -> bool:
    """Whether a model has a head that can be used: its file says so, or before it is here models.toml."""
    file = model if isinstance(model, Path) else Store.default().file(model)
    if not file.is_file():
        return isinstance(model, Entry) and model.mtp
    # Not at the top: these load the library, and the command line imports this module for completion.
    from edgespec.llama.gguf_header import check_model_file
    from edgespec.llama.mtp import why_no_mtp

    try:
        return not why_no_mtp(check_model_file(file))
    except EdgespecError:
        return False  # whoever loads it says what is wrong with it
