"""Options that several commands share, declared once: single ones, and groups of them (groups.py)."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self, cast

import typer

from edgespec.cli.completion import complete_drafter, complete_model, complete_name, complete_pair
from edgespec.cli.console import err, message
from edgespec.cli.groups import listed, option_group
from edgespec.decoding.choices import DrafterChoice, DrafterName, is_plugin
from edgespec.decoding.sampling import SamplingParams
from edgespec.engine.model_choice import ChosenModels, choose_refs
from edgespec.errors import UsageError
from edgespec.llama.choices import CacheChoice, KernelsChoice, Pooling, StateRoom
from edgespec.models.registry import load_registry
from edgespec.models.resolve import is_missing
from edgespec.platform.files import expand_user

if TYPE_CHECKING:  # not at run time: a shell completes options without loading llama.cpp or numpy
    from edgespec.engine.engine import Engine
    from edgespec.engine.options import EngineOptions

DRAFTING = "Drafting"
ENERGY = "Energy"
NODES = "Nodes (docs/many-machines.md)"
LOSSY = "Lossy: faster, and not the target's text (docs/scheduler.md)"
OUTPUT = "Output"
PROMPT = "Prompt"

Explanation = Literal["steps", "ir"]
"""Values of `--explain`: the steps, or their token trees too."""

# ---- single options ----

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
ThreadsOption = Annotated[
    int | None,
    typer.Option(min=1, max=1024, show_default="fast cores, or as a CPU quota allows", help="Threads."),
]
EnergyOption = Annotated[
    bool,
    typer.Option("--energy", help="Count the joules too (see `edgespec energy`).", rich_help_panel=ENERGY),
]
WattsOption = Annotated[
    float | None,
    typer.Option(
        "--assume-watts",
        metavar="W",
        help="Assume a constant power of W watts instead of measuring; joules are labelled as estimated.",
        rich_help_panel=ENERGY,
    ),
]
PoolingOption = Annotated[
    Pooling | None,
    typer.Option(
        help="Vector of a text: the mean of its tokens' states, the first one's, or the last one's.",
        show_default="as the model's file says",
    ),
]
SystemOption = Annotated[str | None, typer.Option(help="System message.", rich_help_panel=PROMPT)]
ChatTemplateOption = Annotated[
    str | None,
    typer.Option(
        "--chat-template",
        metavar="NAME|FILE",
        help="Chat template: one of llama.cpp's by name (chatml), of the model's file, or in a Jinja file.",
        show_default="the model's own",
        rich_help_panel=PROMPT,
    ),
]
SpecialOption = Annotated[
    bool | None,
    typer.Option(
        "--special/--no-special",
        help="Read names of control tokens in what is asked (<|im_end|>) as these tokens, or as text.",
        show_default="text in a chat template, tokens without",
        rich_help_panel=PROMPT,
    ),
]
ShowDraftOption = Annotated[
    bool,
    typer.Option("--show-draft", help="Colour accepted, resampled and bonus tokens.", rich_help_panel=OUTPUT),
]
TARGET = typer.Option(
    "--target",
    "-t",
    "--model",
    "-m",
    "-hf",
    help="Model that decides: a GGUF file, a name of `edgespec models list`, hf:..., or a URL.",
    show_default="the default pair's",
    autocompletion=complete_model,
)
DraftOption = Annotated[
    str | None,
    typer.Option(
        "--draft",
        "-d",
        help="Small model that drafts; best one of the family.",
        show_default="the best made here for this target, else the registry's, if any",
        autocompletion=complete_model,
    ),
]
PairOption = Annotated[
    str | None,
    typer.Option(
        "--pair",
        "-p",
        help="Both by name: a pair of `edgespec models list`.",
        autocompletion=complete_pair,
    ),
]
ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help="The same as --target, or a pair's name.", autocompletion=complete_name
    ),
]
# ---- groups ----


@option_group()
class ModelChoice:
    """A target and its draft model, each by its name or both as a pair."""

    target: Annotated[str | None, TARGET] = None
    draft: DraftOption = None
    pair: PairOption = None

    def names(self, *, writes: bool = False) -> tuple[str | None, str | None]:
        """Return the names of target and draft, as given or of the pair. Raises UsageError.

        `writes`: as of `choose_refs`.
        """
        if self.pair is None:
            return self.target, self.draft
        if self.target or self.draft:
            other = "--target" if self.target else "--draft"
            raise UsageError(f"--pair and {other} contradict each other: choose one")
        named = load_registry().pair(self.pair)
        return named.target, named.partner(writes=writes)

    def with_model(self, name: str) -> Self:
        """Return the choice of a model, or of a pair, that was named without an option."""
        registry = load_registry()
        is_pair = name in registry.pairs and name not in registry.entries
        return replace(self, pair=name) if is_pair else replace(self, target=name)

    def choose(
        self,
        drafter: DrafterChoice,
        compute: Compute,
        *,
        writes: bool = False,
        chat_template: str | None = None,
    ) -> ChosenModels:
        """Choose target and draft by `choose_refs`; check all that can be checked before they are pulled.

        Raises UsageError for invalid addresses of nodes and an invalid chat template.
        """
        _ = compute.rpc_addresses
        with err.status("looking for its draft"):  # a file may have to be hashed
            chosen = choose_refs(*self.names(writes=writes), drafter, writes=writes)
        target_is_missing, _ = (model and is_missing(model) for model in chosen)
        if chat_template and target_is_missing:  # of a model that is here, the engine checks it
            from edgespec.llama.chat_template import read_chat_template

            read_chat_template(chat_template)
        return chosen

    def pull(
        self,
        drafter: DrafterChoice,
        compute: Compute,
        *,
        writes: bool = False,
        chat_template: str | None = None,
    ) -> ChosenModels:
        """Choose target and draft as `choose` does, and pull missing ones."""
        chosen = self.choose(drafter, compute, writes=writes, chat_template=chat_template)
        if missing := [model for model in chosen if model and is_missing(model)]:
            from edgespec.cli.progress import pull_named

            pull_named(*missing)
        return chosen


@option_group()
class ModelFirst(ModelChoice):
    """The models of a command; the first needs no option, as in `ollama run MODEL`."""

    model: ModelArgument = None

    def chosen(self) -> ModelChoice:
        """Return the choice with the model as an option."""
        return self if self.model is None else replace(self, model=None).with_model(self.model)

    def names(self, *, writes: bool = False) -> tuple[str | None, str | None]:
        """Return the names of target and draft, as of `ModelChoice`."""
        return super().names(writes=writes) if self.model is None else self.chosen().names(writes=writes)


@option_group(DRAFTING)
class DraftingOptions:
    """The drafter, and how much it drafts."""

    drafter: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|MODULE:CLASS",
            help="What drafts: what pays at each step (auto; tree: with more branches, chain: without), the "
            "model, the head in the target's own file (mtp), text seen before (suffix), the model helped by "
            "it (staged), or none. Or a drafter of your own, whose code is run: MODULE:CLASS, FILE.py:CLASS.",
            show_default="auto",
            autocompletion=complete_drafter,
        ),
    ] = None
    gamma: Annotated[int | None, listed("gamma")] = None
    cache: Annotated[
        bool,
        typer.Option(
            "--cache/--no-cache",
            help="Draft from earlier prompts and answers, and store this one (see `edgespec cache`).",
        ),
    ] = True

    def chosen(self, *, cascade: bool = False) -> DrafterChoice:
        """Return the drafter: none for a gamma of 0, but a cascade needs its draft model even then."""
        return "none" if self.gamma == 0 and not cascade else named_drafter(self.drafter or "auto")


@option_group("States of prompts (docs/start.md)")
class StateOptions:
    """The folder where states of prompts are kept, and its limit."""

    state_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep the states of prompts here, so that none is read twice."),
    ] = None
    state_limit: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Most of the disk for them, such as 500MB; those unused for longest go first.",
            show_default="8GB",
        ),
    ] = None

    def room(self, usual: Path | None = None) -> StateRoom | None:
        """Return the folder, by default `usual`, and its limit; None: keep none. Raises UsageError."""
        limit = read_number("state_limit", self.state_limit or "8GB", is_size=True, least=1000)
        path = usual if self.state_dir is None else expand_user(self.state_dir)
        if path is None and self.state_limit is not None:
            raise UsageError("--state-limit needs --state-dir: add it, or leave it out")
        return StateRoom(path, limit) if path else None


@option_group()
class ThreadsAndKernels:
    """Threads and kernels of the models' passes."""

    threads: ThreadsOption = None
    kernels: Annotated[
        KernelsChoice,
        typer.Option(help="auto: edgespec's own where they can be used; off: llama.cpp's (stock)."),
    ] = "auto"


@option_group()
class Compute(ThreadsAndKernels):
    """Threads, kernels and cache of the models' passes."""

    cache_type: Annotated[
        CacheChoice,
        typer.Option(
            help="Keys and values of the target's cache; q8_0: half the memory, logits change a little; "
            "q4_0: a quarter, and some models write nonsense; auto: f16, or q8_0 where that does not fit."
        ),
    ] = "f16"
    mmproj: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="The target's image encoder.", show_default="mmproj*.gguf beside it"
        ),
    ] = None

    @property
    def rpc_addresses(self) -> tuple[str, ...]:
        """HOST:PORT of the nodes that hold layers of the target. Raises UsageError."""
        return ()

    @property
    def adapters(self) -> tuple[str, ...]:
        """Adapters of the target; there are none where the options lack them."""
        return ()

    def for_text(self, chat_template: str | None) -> str:
        """Return the options that affect a text or its speed, to compare them with a server's."""
        kernels = [os.environ.get(f"EDGESPEC_KERNELS{part}", "").strip().lower() for part in ("", "_ISA")]
        options = (
            self.threads,
            self.kernels,
            self.cache_type,
            chat_template,
            self.rpc_addresses,
            self.mmproj,
        )
        return repr((*options, *kernels))

    def load_engine(self, options: EngineOptions) -> Engine:
        """Return the engine of these options and of those given here; print its messages to stderr."""
        from edgespec import Engine

        with err.status("loading the models"):
            engine = Engine.of(
                replace(
                    options,
                    n_threads=self.threads,
                    kernels=self.kernels,
                    cache_type=self.cache_type,
                    rpc=self.rpc_addresses,
                    mmproj=self.mmproj,
                    lora=self.adapters,
                    keep_packed=True,
                    on_message=message,
                )
            )
        if self.mmproj is not None and (problem := engine.media_problem()):  # not with the first image alone
            engine.close()
            raise UsageError(problem, field="mmproj")
        return engine


@option_group()
class ComputeAdapted(Compute):
    """Threads, kernels, and adapters of the target."""

    lora: Annotated[list[str] | None, listed("lora")] = None

    @property
    def adapters(self) -> tuple[str, ...]:
        """The files of `--lora`, each maybe with a scale."""
        return tuple(self.lora or ())


@option_group(NODES)
class ComputeOnNodes(Compute):
    """Threads, kernels, and machines that hold layers of the target."""

    rpc: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT,...",
            help="Machines that hold layers of the target, where `edgespec node` runs.",
        ),
    ] = None

    @property
    def rpc_addresses(self) -> tuple[str, ...]:
        """HOST:PORT of the nodes that hold layers of the target. Raises UsageError."""
        from edgespec.llama.choices import read_addresses

        return read_addresses(self.rpc) if self.rpc is not None else ()


@option_group()
class AnyCompute(ComputeOnNodes, ComputeAdapted):
    """Threads, kernels, nodes and adapters."""


@option_group()
class SharedModels:
    """Models that answer several requests at once."""

    drafter: Annotated[
        str,
        typer.Option(
            metavar="NAME|MODULE:CLASS",
            help="What drafts, as in `run`; a request may choose another.",
            autocompletion=complete_drafter,
        ),
    ] = "auto"
    ctx: Annotated[
        int | None,
        typer.Option(
            "--ctx",
            "-c",
            min=1,
            help="Most tokens of prompt and answer together.",
            show_default="what the target was trained for, if its cache fits in memory",
        ),
    ] = None
    parallel: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=64,
            help="Most answers written at once, in shared passes.",
            show_default="as many as pay and fit in memory, at most 16",
        ),
    ] = None
    chat_template: ChatTemplateOption = None
    compute: ComputeAdapted


@option_group("Sampling (defaults and meaning as in llama.cpp)")
class Sampling:
    """Sampling parameters, the seed, and the limit of thoughts."""

    params: SamplingParams
    seed: Annotated[int | None, listed("seed", "--seed", "-s")] = None
    reasoning_budget: Annotated[int, listed("reasoning_budget", panel=OUTPUT)] = -1


# ---- what users write ----


def named_drafter(name: str) -> DrafterChoice:
    """Return the drafter of that name; a user's own code is run for it. Raises UsageError."""
    if not is_plugin(name):
        return cast("DrafterName", name)
    from edgespec.drafting.plugin import find_drafter

    return find_drafter(name)


def most_tokens(n_predict: int) -> int | None:
    """Return the most tokens of an answer in the form of `Options`: -1 and -2 become None, up to the context.

    Both values are llama.cpp's. Raises UsageError.
    """
    if n_predict in (-1, -2):
        return None
    if n_predict < 1:
        problem = "must be 1 or more, or -1: to the end of the context"
        raise UsageError(problem, field="n_predict", value=n_predict)
    return n_predict


def read_number(field: str, text: str, *, is_size: bool = False, least: int = 1) -> int:
    """Return a number, such as 200k, or bytes, such as 500MB or 1.5GiB. Raises UsageError below `least`."""
    unit = r"([kMGT]?)(?:(i?)B)?" if is_size else "([kMGT]?)()"
    found = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*{unit}", text.strip(), re.IGNORECASE)
    power = " kmgt".index(found[2].lower() or " ") if found else 0
    value = int(float(found[1]) * (1024 if found[3] else 1000) ** power) if found else 0
    if value < least:
        like = "a size such as 500MB or 8GB" if is_size else "a number such as 5000, 200k or 1M"
        raise UsageError(f"must be {like}", field=field, value=text)
    return value
