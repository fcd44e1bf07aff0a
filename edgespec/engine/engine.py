"""The public engine: generates text with a pair of models, and keeps what later generations can use."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Unpack

from edgespec.decoding.choices import DrafterChoice, NamedDrafter, Objective
from edgespec.decoding.options import OptionKeywords, Options, token_ids
from edgespec.decoding.records import Provenance, Result
from edgespec.drafting.costs import CONTEXTS
from edgespec.drafting.earlier_texts import EarlierTexts
from edgespec.drafting.learned_state import LearnedState
from edgespec.drafting.plugin import UserDrafter, find_drafter
from edgespec.drafting.proposal import DraftStep
from edgespec.engine.batcher import StepSummary
from edgespec.engine.capacity import Capacity
from edgespec.engine.pair import Pair
from edgespec.engine.pair_options import PairOptions
from edgespec.engine.plan import make_plan
from edgespec.engine.requests import RequestRunner
from edgespec.engine.stream import Stream
from edgespec.errors import UsageError, check_choice, check_text
from edgespec.llama.batch import EmbeddingsFn
from edgespec.llama.choices import CacheType, KernelsChoice
from edgespec.llama.node_addresses import NodeAddress
from edgespec.llama.weights import Model
from edgespec.platform.closing import Closing
from edgespec.platform.forks import HomeLock
from edgespec.platform.metering import Meter
from edgespec.platform.signals import Cancellation


class Engine(Closing):
    """Generates text with `target`, sped up by `draft`, distributed exactly as with `target` alone.

    Models are paths, registry names or `hf:OWNER/REPO/FILE.gguf`. Models not given come from the registry's
    pairs: the default pair, or the target's draft. A context manager; `close` frees everything. Threads take
    turns: with `parallel` 1 a `generate` waits for another to end, with more they share passes.

        with Engine(target="7b.gguf", draft="tiny.gguf") as engine:
            print(engine.generate("Write a quicksort").text)

    Args of the constructor, which loads the models and pulls missing ones:
        drafter: What may draft (decoding/choices.py); "suffix" and "none" load no draft model. Or one that
            a user wrote (drafting/plugin.py): its class, MODULE:CLASS, FILE.py:CLASS, an entry point's name.
        n_ctx: Context in tokens; None: as much as a generation needs.
        n_threads: None: one per fast physical core, fewer under a CPU quota.
        kernels: "auto" uses edgespec's own if possible, "off" llama.cpp's.
        objective: What drafting should save: time or joules.
        profile: Start with what is stored about this pair on this machine, and store what was learnt.
        history: Draft from earlier prompts and answers on disk, and add those of this engine (docs/cache.md).
        meter: Measures the joules of each generation.
        signals: Lets Ctrl-C, or another thread, end a running pass.
        prefix_cache: None reads every prompt from its beginning; 0 reads only the part of a prompt that is
            new after the last sequence; more keeps earlier sequences too, in at most that many bytes.
        parallel: Most requests at once, whose passes are shared; None: as many as pay and fit in memory.
        n_cells: Tokens that the KV cache holds, of all requests together; None: as many as one request needs,
            or for several what capacity.py says.
        cache_type: How the target's cache holds keys and values: "f16", or "q8_0", which takes half the
            memory and changes the logits a little.
        chat_template: In place of the target's own: the name of another in its file or of a form of
            llama.cpp's ("chatml"), a file, or a program in Jinja.
        nodes: Machines that hold layers of the target (`read_addresses`).
        keep_packed: Keep the packed weights on the disk for quicker starts (docs/kernels.md).
        on_message: Takes lines that the user should know.

    Raises UsageError or EdgespecError if a model cannot be had or used, or does not fit in memory.
    """

    _closed = False

    def __init__(  # noqa: PLR0913 - the public names of PairOptions, and of what is kept between generations
        self,
        target: str | Path | None = None,
        draft: str | Path | None = None,
        *,
        drafter: DrafterChoice | str | Callable[[], UserDrafter] = "auto",
        n_ctx: int | None = None,
        n_threads: int | None = None,
        kernels: KernelsChoice = "auto",
        objective: Objective = "latency",
        profile: bool = True,
        history: bool = False,
        meter: Meter | None = None,
        signals: Cancellation | None = None,
        prefix_cache: int | None = None,
        parallel: int | None = 1,
        n_cells: int | None = None,
        cache_type: CacheType = "f16",
        chat_template: str | None = None,
        nodes: tuple[NodeAddress, ...] = (),
        keep_packed: bool = False,
        on_message: Callable[[str], None] = lambda _line: None,
    ) -> None:
        """Load the models; missing ones are pulled. The class says what the arguments mean."""
        chosen = _found_drafter(drafter, draft, objective)
        if objective == "energy" and not profile:
            problem = "takes joules from the profile: leave out profile=False"
            raise UsageError(problem, field="objective", value=objective)
        drafts = chosen != "none"
        options = PairOptions(
            chosen,
            n_ctx,
            n_threads,
            kernels=kernels,
            cache_type=cache_type,
            prefix_cache=prefix_cache,
            signals=signals,
            parallel=parallel,
            n_cells=n_cells,
            chat_template=chat_template,
            nodes=nodes,
            keep_packed=keep_packed,
        )
        self.meter = meter
        """Measures the joules of each generation, from the next one on; None for no measurement."""
        self._on_message = on_message
        self._signals = signals
        self._lock = HomeLock("the engine")  # held for a pass, or while a text has the engine for itself
        self._pair = Pair(target, draft, options)
        header = self._pair.target_header
        self._earlier_texts = EarlierTexts(header, kept=history and drafts, on_message=on_message)
        self._pair.load(on_message)
        try:
            self._knowledge = self._learned(objective if drafts else "latency", kept=profile and drafts)
            self._pair.choose_capacity(self._knowledge.clocks.target.at(CONTEXTS[0]))
            self._requests = RequestRunner(self._pair, self._knowledge, self._earlier_texts, on_message)
        except BaseException:
            self._pair.close()
            raise

    def _learned(self, objective: Objective, *, kept: bool) -> LearnedState:
        """Return what is known of the pair on this machine; `kept`: from the disk, and stored at the end."""
        return LearnedState(
            self.target,
            self._pair.draft,
            kernels=self.kernels,
            n_threads=self.n_threads,
            objective=objective,
            kept=kept,
            on_message=self._on_message,
        )

    @property
    def target(self) -> Model:
        """The model whose distribution the text has."""
        return self._pair.target

    @property
    def draft(self) -> Model | None:
        """The draft model, or None."""
        return self._pair.draft.model

    @property
    def target_name(self) -> str:
        """The target as it was given, or its name in the registry."""
        return self._pair.target_name

    @property
    def draft_name(self) -> str | None:
        """The draft as it was given, or its name in the registry; None without a draft model."""
        return self._pair.draft.name

    @property
    def kernels(self) -> str:
        """The name of the kernels that the models run on."""
        return self._pair.kernels

    @property
    def n_threads(self) -> int:
        """Number of threads that compute."""
        return self._pair.n_threads

    @property
    def parallel(self) -> int:
        """Most texts at once."""
        return self._pair.parallel

    @property
    def n_ctx_shared(self) -> int | None:
        """The context of each text, where the cache's size was decided before there were any; else None."""
        return self._pair.n_ctx_shared

    @property
    def capacity(self) -> Capacity:
        """How many texts at once, and how many tokens of them the cache holds."""
        return self._pair.capacity

    @property
    def last_pass(self) -> StepSummary:
        """The last step's pass of the target, of texts that share passes."""
        return self._requests.last_pass

    @property
    def timed_inputs(self) -> EmbeddingsFn | None:
        """Makes the input rows of timed passes of the draft model; None: it takes tokens."""
        return self._pair.draft.timed_inputs

    def forget(self, *, tables: bool = False) -> None:
        """Forget the text of earlier generations and of the history; with `tables` also learnt statistics."""
        with self._lock:
            self._requests.forget()
            self._earlier_texts.ready().forget()
            self._pair.forget()
            if tables:
                self._knowledge.forget()

    def prompt_tokens(
        self,
        prompt: str,
        *,
        system: str | None = None,
        chat: bool | None = None,
        parse_special: bool | None = None,
    ) -> list[int]:
        """Return the tokens of `prompt`, in the model's chat template if it has one.

        `chat` True or False forces or forbids the template; `system` is a system message, which needs the
        template. `parse_special`: names of control tokens in `prompt` and `system` are these tokens (True) or
        text (False); None: text in a template, tokens without. Raises UsageError for an impossible
        combination.
        """
        check_text("prompt", prompt)
        if system is not None:
            check_text("system", system)
        if chat is None:
            chat = self.target.chat_template is not None
        if not chat:
            if system is not None:
                problem = "needs a chat template: ask for one, and use a model that has one"
                raise UsageError(problem, field="system")
            return self.target.tokenize(prompt, add_special=True, parse_special=parse_special is not False)
        messages = [{"role": "user", "content": prompt}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        return self.target.tokenize_chat(messages, parse_special=bool(parse_special))

    def has_room(self, n_prompt: int, n_predict: int | None) -> bool:
        """Say whether a text of `n_prompt` tokens, and so many to come, can begin beside those under way."""
        with self._lock:
            return self._requests.has_room(n_prompt, n_predict)

    def stream(
        self,
        prompt: str | Sequence[int],
        options: Options | None = None,
        *,
        system: str | None = None,
        chat: bool | None = None,
        parse_special: bool | None = None,
        on_step: Callable[[DraftStep], None] | None = None,
        **keywords: Unpack[OptionKeywords],
    ) -> Stream:
        """Continue `prompt` (text, or token ids), a Token at a time.

        `keywords` are fields of `Options` and override those of `options`. `system`, `chat` and
        `parse_special`: as for `prompt_tokens`. `on_step` is called after every step of a drafter. With
        `parallel` 1 an earlier stream of this engine is ended, and raises EdgespecError if it is read on;
        else it runs beside the others, whichever is read. Raises UsageError for bad values or if as many
        texts are under way as there may be, EdgespecError if the prompt is longer than the context.
        """
        with self._lock:
            called = time.perf_counter()
            if self._closed:
                raise UsageError("the engine is closed")
            if not isinstance(options, Options | None):
                raise UsageError("must be Options", field="options", value=options)
            options = (options or Options()).changed(**keywords)
            tokens = self._tokens_of(prompt, system, chat, parse_special)
            given = prompt if isinstance(prompt, str) else tokens
            return self._begin(given, tokens, options, on_step, called)

    def _tokens_of(
        self, prompt: str | Sequence[int], system: str | None, chat: bool | None, parse_special: bool | None
    ) -> list[int]:
        """Return the tokens of a prompt that is text, or these tokens. Raises UsageError."""
        if isinstance(prompt, str):
            tokens = self.prompt_tokens(prompt, system=system, chat=chat, parse_special=parse_special)
        else:
            for name, value in (("system", system), ("chat", chat), ("parse_special", parse_special)):
                if value is not None:
                    raise UsageError("goes with a prompt of text, not with token ids", field=name)
            tokens = token_ids("prompt", prompt, self.target.n_vocab, wanted="text or a list of token ids")
        if not tokens:
            raise UsageError("the prompt is empty")
        return tokens

    def _begin(
        self,
        prompt: str | Sequence[int],
        tokens: list[int],
        options: Options,
        on_step: Callable[[DraftStep], None] | None,
        called: float,
    ) -> Stream:
        plan = make_plan(self._pair, options)
        if self.parallel == 1:
            self._requests.end_all(
                "the engine writes one at a time and began another; read it first, or choose parallel"
            )
        self._requests.keep()
        if self._signals and not self._requests.n_running:
            self._signals.drain()  # before the target is loaded again, which they would end too
        if self._pair.is_lost and not self._requests.n_running:
            self._pair.reopen()
        running = self._requests.begin(prompt, tokens, plan, on_step)
        loop = running.loop
        window = None
        if self.meter:
            began = time.perf_counter()
            window = self.meter.begin()
            if self.parallel == 1:
                loop.mark = window.mark
            called += time.perf_counter() - began  # the meter's time is not the generation's
        stream = Stream(
            loop,
            self.target,
            Provenance(
                target=self.target_name,
                draft=self.draft_name if plan.uses_model else None,
                kernels=self.kernels,
                seed=plan.coins.seed if plan.is_reproducible else None,
                mode=plan.mode,
            ),
            stop=plan.options.stop,
            is_end=plan.options.ends(self.target.is_eog),
            until=plan.options.until,
            called=called,
            window=window,
        )
        stream.lock = self._lock
        self._requests.start(stream, running)
        return stream

    def step(self) -> None:
        """Make one pass of the target for all streams, and what is drafted for it; their tokens wait in them.

        Raises KeyboardInterrupt if `signals` interrupts it; streams that failed raise when they are read.
        """
        with self._lock:
            self._requests.step()

    def check_cascade(self) -> Model:
        """Return the draft model if it can write in a cascade, else raise UsageError."""
        return self._pair.draft.writer()

    def generate(
        self,
        prompt: str | Sequence[int],
        options: Options | None = None,
        *,
        system: str | None = None,
        chat: bool | None = None,
        parse_special: bool | None = None,
        on_step: Callable[[DraftStep], None] | None = None,
        **keywords: Unpack[OptionKeywords],
    ) -> Result:
        """Continue `prompt` to the end and return the Result; arguments as for `stream`.

        Where texts are written one at a time, another thread's call waits until this one is done.
        """
        with self._lock if self.parallel == 1 else nullcontext():
            stream = self.stream(
                prompt,
                options,
                system=system,
                chat=chat,
                parse_special=parse_special,
                on_step=on_step,
                **keywords,
            )
            for _ in stream:
                pass
        return stream.result

    def close(self) -> None:
        """Store what was learnt and free models and sessions; not again, nor in a forked child."""
        if not self._lock.is_here:
            return
        with self._lock:
            if not self._closed:
                self._closed = True
                self._requests.end_all("the engine was closed")
                self._requests.keep()
                self._knowledge.store(self._on_message)
                self._pair.close()


def _found_drafter(
    given: DrafterChoice | str | Callable[[], UserDrafter], draft: str | Path | None, objective: Objective
) -> DrafterChoice:
    """Return the drafter. Raises UsageError, also for what a user's own would leave without effect."""
    check_choice("objective", objective, Objective)
    drafter = find_drafter(given)
    if isinstance(drafter, NamedDrafter):
        if draft is not None:
            raise UsageError(f"{drafter} drafts without a model: leave it out", field="draft", value=draft)
        if objective != "latency":
            problem = f"{drafter} chooses itself what it drafts: leave it out"
            raise UsageError(problem, field="objective", value=objective)
    return drafter
