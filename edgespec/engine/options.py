"""The options of an engine, declared once: `Engine` takes them as its own arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.decoding.choices import DrafterChoice, Objective
from edgespec.errors import MessageFn, UsageError, check_choice, silent, whole_number
from edgespec.llama.choices import CacheChoice, KernelsChoice, StateRoom

if TYPE_CHECKING:  # not at run time: a command names its options before numpy and llama.cpp are loaded
    from edgespec.drafting.plugin import UserDrafter
    from edgespec.engine.model_choice import ChosenModels
    from edgespec.platform.metering import Meter
    from edgespec.platform.processes import Cancellation

MAX_PARALLEL = 64
"""Most requests at once."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The models of an engine, and how it loads and runs them. Raises UsageError for invalid values."""

    target: str | Path | ChosenModels | None = None
    """A path, a name of the registry, `hf:OWNER/REPO/FILE.gguf` or a URL; or both models, chosen before
    (model_choice.py). None: the default pair's target."""
    draft: str | Path | None = None
    """As `target`, for the draft model; None: the best one known for the target, if any."""
    _: KW_ONLY
    drafter: DrafterChoice | str | Callable[[], UserDrafter] = "auto"
    """What may draft (decoding/choices.py); "suffix" and "none" load no draft model. Or a drafter that a user
    wrote (drafting/plugin.py): its class, MODULE:CLASS, FILE.py:CLASS, or the name of an entry point."""
    n_ctx: int | None = None
    """Context in tokens; None: as much as a generation needs."""
    n_threads: int | None = None
    """None: one per fast physical core, fewer under a CPU quota."""
    kernels: KernelsChoice = "auto"
    """"auto": edgespec's own where possible; "off": llama.cpp's."""
    objective: Objective = "latency"
    """What drafting should save: time or joules."""
    profile: bool = True
    """Start with what is stored about this pair on this machine, and store what was learnt."""
    history: bool = False
    """Draft from earlier prompts and answers on disk, and add those of this engine (docs/start.md)."""
    learn: bool | None = None
    """Keep the texts in which drafts of a head were rejected, for the training of a better one
    (docs/drafts.md); None: with `history`."""
    meter: Meter | None = None
    """Measures the joules of each generation."""
    signals: Cancellation | None = None
    """Lets Ctrl-C, or another thread, end a running pass."""
    prefix_cache: int | None = None
    """Bytes of the prefix cache: what was read before need not be read again. 0 keeps the last sequence only;
    None: each prompt is read from its beginning."""
    parallel: int | None = 1
    """Most requests at once, whose passes are shared; None: as many as pay and fit in memory."""
    n_cells: int | None = None
    """Tokens that the target's cache holds, of all requests together; None: as many as one request needs, or
    as capacity.py says for several."""
    cache_type: CacheChoice = "f16"
    """Type of keys and values in the target's cache: q8_0 takes half the memory and changes the logits a
    little; q4_0 takes a quarter, and some models write nonsense. "auto": the more exact of f16 and q8_0 in
    which `n_cells` tokens fit, or `n_ctx` of each of `parallel` requests. A draft's cache is in F16."""
    chat_template: str | None = None
    """A template instead of the target's own: the name of another in its file or of a form of llama.cpp's
    ("chatml"), a file, or a program in Jinja; None: its own."""
    mmproj: str | Path | None = None
    """The file of the target's image encoder; None: `mmproj*.gguf` beside it, if there is one."""
    rpc: tuple[str, ...] = ()
    """HOST:PORT of each machine that holds layers of the target (docs/many-machines.md)."""
    lora: str | Sequence[str] = ()
    """LoRA adapters of the target, each FILE or FILE:SCALE (docs/models.md)."""
    keep_packed: bool = False
    """Keep packed weights on the disk, which later loads then map (docs/kernels.md)."""
    states: StateRoom | None = None
    """The folder where states of prompts are kept, so that later engines need not read them again, and its
    limit (docs/start.md). With it at least the last sequence stays in memory, too."""
    on_message: MessageFn = silent
    """Takes lines that the user should know."""

    def __post_init__(self) -> None:
        if self.states and self.rpc:
            raise UsageError("cannot be kept of a target on nodes: leave it out", field="states")
        check_choice("objective", self.objective, Objective)
        check_choice("kernels", self.kernels, KernelsChoice)
        check_choice("cache_type", self.cache_type, CacheChoice)
        if self.rpc and self.cache_type == "auto":
            problem = "the cache is on nodes, whose memory is not known yet: name a type"
            raise UsageError(problem, field="cache_type", value="auto")
        for name in ("n_ctx", "n_threads", "n_cells"):
            value = getattr(self, name)
            if value is not None and whole_number(name, value) < 1:
                raise UsageError("must be 1 or more", field=name, value=value)
        if self.parallel is not None and not 1 <= whole_number("parallel", self.parallel) <= MAX_PARALLEL:
            raise UsageError(f"must be 1 to {MAX_PARALLEL}", field="parallel", value=self.parallel)
        if self.prefix_cache is not None and whole_number("prefix_cache", self.prefix_cache) < 0:
            raise UsageError("must be 0 or more", field="prefix_cache", value=self.prefix_cache)
        if self.states and self.prefix_cache is None:
            object.__setattr__(self, "prefix_cache", 0)
