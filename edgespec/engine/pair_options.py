"""How a target and its draft model are loaded and run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgespec.decoding.choices import DrafterChoice, DrafterName, NamedDrafter
from edgespec.errors import UsageError, check_choice, whole_number
from edgespec.llama.choices import CacheType, KernelsChoice, StateRoom
from edgespec.platform.signals import Cancellation

if TYPE_CHECKING:  # it would load llama.cpp
    from edgespec.llama.node_addresses import NodeAddress
MAX_PARALLEL = 64
"""Most requests at once."""


@dataclass(frozen=True, slots=True)
class PairOptions:
    """How a pair is loaded and run. Raises UsageError for invalid values."""

    drafter: DrafterChoice = "auto"
    """The sources of drafts (choices.py). A draft model is loaded unless `is_draftless` says so."""
    n_ctx: int | None = None
    """Context in tokens; None: as much as a generation needs."""
    n_threads: int | None = None
    """None: one per fast physical core, fewer under a CPU quota."""
    kernels: KernelsChoice = "auto"
    """"auto": edgespec's own where possible; "off": llama.cpp's."""
    cache_type: CacheType = "f16"
    """Type of keys and values in the target's cache: q8_0 takes half the memory and changes the logits a
    little. A draft's cache, which is small, is in F16."""
    prefix_cache: int | None = None
    """Bytes of the prefix cache: what was read before need not be read again. 0 keeps the last sequence only;
    None: each prompt is read from its beginning."""
    signals: Cancellation | None = None
    """Lets Ctrl-C, or another thread, end a running pass."""
    parallel: int | None = 1
    """Most requests at once, whose passes are shared; None: as many as pay and fit in memory."""
    n_cells: int | None = None
    """Tokens that the target's cache holds, of all requests together; None: as many as one request needs, or
    as capacity.py says for several."""
    chat_template: str | None = None
    """A template in place of the target's own: the name of another in its file or of a form of llama.cpp's
    ("chatml"), a file, or a program in Jinja; None: its own."""
    nodes: tuple[NodeAddress, ...] = ()
    """Machines that hold layers of the target (`read_addresses`)."""
    keep_packed: bool = False
    """Keep packed weights on the disk, which later loads then map (packed_file.py)."""
    states: StateRoom | None = None
    """The folder that states of prompts are kept in (prompt_states.py)."""

    def __post_init__(self) -> None:
        if self.states and self.nodes:
            raise UsageError("cannot be kept of a target on nodes: leave it out", field="state_dir")
        if not isinstance(self.drafter, NamedDrafter):
            check_choice("drafter", self.drafter, DrafterName)
        check_choice("kernels", self.kernels, KernelsChoice)
        check_choice("cache_type", self.cache_type, CacheType)
        for name in ("n_ctx", "n_threads", "n_cells"):
            value = getattr(self, name)
            if value is not None and whole_number(name, value) < 1:
                raise UsageError("must be 1 or more", field=name, value=value)
        if self.parallel is not None and not 1 <= whole_number("parallel", self.parallel) <= MAX_PARALLEL:
            raise UsageError(f"must be 1 to {MAX_PARALLEL}", field="parallel", value=self.parallel)
        if self.prefix_cache is not None and whole_number("prefix_cache", self.prefix_cache) < 0:
            raise UsageError("must be 0 or more", field="prefix_cache", value=self.prefix_cache)
