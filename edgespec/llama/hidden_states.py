"""The ways in which llama.cpp gives the hidden states of a pass.

    LAST_NORM   those after the last norm, by its public interface: it then computes the logits of all tokens
    NEXTN       those that a head in the model's own file goes on from (mtp.py), of all tokens, and as many
                logits as were asked for; only architectures with such a head have them
    NEXTN_HEAD  those of the head itself; of tokens without logits some architectures have none, so that the
                logits of all are asked for
    of_kernels  those after any layers, side by side, from edgespec's kernels (kernels.py)
    of_layers   what goes into some layers, side by side, for a head in a file of its own (published_heads.py)

The functions of all but LAST_NORM are declared in no public header, but in `llama-ext.h`, and exported under
C++ names.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.llama import backend
from edgespec.llama.backend import llama
from edgespec.llama.kernels import needs_logits

_CONTEXT = "P13llama_context"  # the type of its pointer, as C++ names have it


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """One of these ways."""

    ask: Callable[[Any, bool], object]
    """Takes a context, and whether the passes that follow keep hidden states."""
    addresses: Callable[[Any], Sequence[int | None]]
    """Takes a context; returns where those of its last pass are, rows in the order of the tokens: of each
    layer, whose rows stand side by side."""
    all_logits: bool = False
    """Whether a pass that keeps them computes the logits of all of its tokens."""
    kernel_layers: tuple[int, ...] = ()
    """Layers whose states edgespec's kernels leave instead: then the library is asked for nothing."""
    stays: bool = False
    """Whether they are asked for once and then always kept: each change costs the library as much as a new
    context, and keeping them costs hardly anything."""


def exported(name: str, arguments: str, restype: type | None, *argtypes: type) -> Callable[..., Any] | None:
    """Return a function of the library that is exported under a C++ name; None where it is lacking.

    `arguments` are the types of its arguments as such names have them (Itanium C++ ABI, 5.1.5).
    """
    try:
        return backend.foreign_function(f"_Z{len(name)}{name}{arguments}", restype, *argtypes)
    except AttributeError:
        return None


def _nextn(*, all_logits: bool) -> HiddenStates | None:
    keep = exported(
        "llama_set_embeddings_nextn",
        f"{_CONTEXT}bb",
        None,
        ctypes.c_void_p,
        ctypes.c_bool,
        ctypes.c_bool,
    )
    address = exported("llama_get_embeddings_nextn", _CONTEXT, ctypes.c_void_p, ctypes.c_void_p)
    if keep is None or address is None:
        return None
    of_all = False  # not only of the tokens whose logits are wanted
    return HiddenStates(
        lambda context, wanted: keep(context, wanted, of_all),
        lambda context: (address(context),),
        all_logits=all_logits,
    )


def of_layers(layers: Sequence[int]) -> HiddenStates | None:
    """Return the way that gives what goes into these layers of a model; None where the library lacks it.

    The library ends the process for an architecture that does not give them, or a layer that is not there.
    """
    keep = exported(
        "llama_set_embeddings_layer_inp",
        f"{_CONTEXT}jb",
        None,
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_bool,
    )
    address = exported(
        "llama_get_embeddings_layer_inp",
        f"{_CONTEXT}j",
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint32,
    )
    if keep is None or address is None:
        return None
    return HiddenStates(
        lambda context, wanted: [keep(context, layer, wanted) for layer in layers],
        lambda context: tuple(address(context, layer) for layer in layers),
        stays=True,
    )


def of_kernels(layers: Sequence[int], n_all_layers: int) -> HiddenStates:
    """Return the way of a model on edgespec's kernels; a layer may be LAST_NORM_OUT."""
    return HiddenStates(
        lambda _context, _wanted: None,
        lambda _context: (),
        all_logits=needs_logits(layers, n_all_layers),
        kernel_layers=tuple(layers),
    )


# Our own prototype: llama_cpp's returns a pointer object, whose address costs another conversion.
_last_norm = backend.foreign_function("llama_get_embeddings", ctypes.c_void_p, ctypes.c_void_p)

LAST_NORM = HiddenStates(llama.llama_set_embeddings, lambda context: (_last_norm(context),), all_logits=True)
NEXTN = _nextn(all_logits=False)
NEXTN_HEAD = _nextn(all_logits=True)
"""Both are None where the library does not export what they need."""
