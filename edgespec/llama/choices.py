"""Options of a model whose value is one of a few words. Light to import: tab completion imports it."""

from __future__ import annotations

from typing import Literal

KernelsChoice = Literal["auto", "off"]
"""edgespec's own kernels if they can be used, or llama.cpp's."""

CacheType = Literal["f16", "q8_0"]
"""How the target's cache holds keys and values: as 16-bit floats, or in 8 bits with one scale per 32."""

Pooling = Literal["mean", "cls", "last"]
"""The vector of a text: the mean of its tokens' states, that of the first token, or of the last."""
