"""Results of the check of each architecture, on tiny random models of it.

`make models-supported` writes them to architectures.json, and to docs/models-supported.md.
"""

from __future__ import annotations

import functools
from importlib.resources import files

import msgspec

from edgespec.llama.gguf_header import GGUFHeader

RESULTS = "architectures.json"
"""File of this package with the results, by `architecture_key`."""


class ArchitectureSupport(msgspec.Struct, frozen=True):
    """The results of the check of an architecture: what works with it."""

    same_in_any_batch: bool
    """Whether the logits after a token are the same bits in batches of any size."""
    left_to_llama_cpp: tuple[str, ...]
    """Operations of a pass that edgespec's kernels do not run, by ggml's name."""
    drafts: tuple[str, ...]
    """Sources whose drafts change nothing in the text."""
    keeps_cache: bool
    takes_back: bool
    """Whether tokens can be removed from the end of a sequence."""

    def __str__(self) -> str:
        kernels = ", ".join(self.left_to_llama_cpp)
        parts = [
            f"all but {kernels} on the kernels" if kernels else "all on the kernels",
            "same bits in any batch" if self.same_in_any_batch else "rounds by batch",
            f"drafts: {', '.join(self.drafts) or 'none'}",
        ]
        parts += ["cache kept"] * self.keeps_cache + ["tokens back"] * self.takes_back
        return "; ".join(parts)


def architecture_key(gguf_name: str, *, mtp: bool) -> str:
    """Return the name of a result; `mtp`: of models with an MTP head in their file."""
    return f"{gguf_name}-mtp" if mtp else gguf_name


@functools.cache
def read_results() -> dict[str, ArchitectureSupport]:
    """Return all results."""
    data = (files("edgespec.llama") / RESULTS).read_bytes()
    return msgspec.json.decode(data, type=dict[str, ArchitectureSupport])


def architecture_support(header: GGUFHeader) -> ArchitectureSupport | None:
    """Return what works with a model's architecture; None if it was never checked."""
    return read_results().get(architecture_key(header.architecture, mtp=header.n_mtp > 0))
