"""Thoughts that a client keeps without reading them, and sends back."""

from __future__ import annotations

import base64

_MARK = "edgespec:"


def sealed(thought: str) -> str:
    """Return the `encrypted_content` of a thought: its text in base64, which hides nothing from anybody.

    Clients that store nothing here send this back, and leave the text out.
    """
    return _MARK + base64.b64encode(thought.encode()).decode()


def opened(content: str | None) -> str:
    """Return the thought that `sealed` made `content` of; "" for another server's."""
    if content is None or not content.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(content.removeprefix(_MARK), validate=True).decode()
    except ValueError:
        return ""
