"""The kinds of published draft heads, told apart by what their files hold.

Files are as llama.cpp's converter writes them: `general.architecture` names a family, and keys and tensors
say which of its parts are there.

    eagle3             one block, a token a pass: EAGLE-3, and EAGLE-3.1 with norms (arXiv 2605.09992)
    dflash             some blocks, several tokens a pass: DFlash, DSpark with a Markov head, DFlash 2 with
                       convolutions and a selector
    gemma4-assistant   some layers on the target's own keys and values
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from edgespec.llama.gguf_header import HELPERS, GGUFHeader

EAGLE, DFLASH, GEMMA = "eagle3", "dflash", "gemma4-assistant"


class HeadKind(NamedTuple):
    """A kind of head: a row of the table."""

    name: str
    """With its article, as a user reads it."""
    architecture: str
    has_mark: Callable[[GGUFHeader], bool]
    """Whether a file of the architecture is of this kind, if it is of none before in the table."""
    refused: str = ""
    """Why edgespec does not run it; "" if it does."""


def _says(*keys: str) -> Callable[[GGUFHeader], bool]:
    """Return a test for a file that has one of these metadata, with a number other than 0."""
    return lambda head: any(any(head.gguf.integers(f"{head.architecture}.{key}")) for key in keys)


def _holds(*tensors: str) -> Callable[[GGUFHeader], bool]:
    """Return a test for a file that has a tensor whose name begins with one of these."""
    return lambda head: any(tensor.name.startswith(tensors) for tensor in head.gguf.tensors)


_LAYER_NORMS = "llama.cpp has no form for norms of single layers, or for states that are read after the norm"
_has_markov, _has_selector = _holds("markov_w1."), _holds("selector_hidden.")

DSPARK_V4 = HeadKind(
    "a DSpark head of DeepSeek V4's blocks",
    DFLASH,
    _says("hyper_connection.count"),
    "llama.cpp cannot take tokens of that model back, so nothing drafts for it",
)
DSPARK = HeadKind("a DSpark head", DFLASH, _has_markov)
DFLASH_2 = HeadKind("a DFlash 2 head", DFLASH, _has_selector)

KINDS = (
    HeadKind(
        "an EAGLE-3.1 head with norms of another form",
        EAGLE,
        lambda head: _says("norm_output", "fc_norm")(head) or _holds("fc_norm.")(head),
        _LAYER_NORMS,
    ),
    HeadKind("an EAGLE-3.1 head", EAGLE, _says("norm_before_fc")),
    HeadKind(HELPERS[EAGLE], EAGLE, lambda _head: True),
    DSPARK_V4,
    HeadKind(
        "a relative of DFlash with the parts of DSpark and of DFlash 2",
        DFLASH,
        lambda head: _has_markov(head) and _has_selector(head),
        "no such head is described",
    ),
    DSPARK,
    DFLASH_2,
    HeadKind(
        "a relative of DFlash with parts of its own",
        DFLASH,
        _holds("markov_", "dspark_", "selector_", "conf_"),
        "no such head is described",
    ),
    HeadKind(HELPERS[DFLASH], DFLASH, lambda _head: True),
    HeadKind(HELPERS[GEMMA], GEMMA, lambda _head: True),
)
"""All kinds; a file is of the first that it fits."""


def kind_of(head: GGUFHeader) -> HeadKind:
    """Return the kind of a file whose architecture is one of HELPERS."""
    return next(kind for kind in KINDS if kind.architecture == head.architecture and kind.has_mark(head))
