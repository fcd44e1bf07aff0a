"""The public engine: generates text with a pair of models, and keeps what later generations can use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Unpack

from edgespec.decoding.choices import DrafterChoice, NamedDrafter, Objective
from edgespec.decoding.generate import Generation, Loop
from edgespec.decoding.options import OptionKeywords, Options, token_ids
from edgespec.decoding.records import Provenance, Result
from edgespec.drafting.draft_model import DraftModel
from edgespec.drafting.head_model import states_worth
from edgespec.drafting.pace import Learned, Pace
from edgespec.drafting.plugin import PluginDrafter, SourcePace, UserDrafter, find_drafter, record_of
from edgespec.drafting.profile import CONTEXTS
from edgespec.drafting.proposal import DraftStep
from edgespec.drafting.rejections import PlacesOfText, RejectedPlaces, RejectedText
from edgespec.drafting.suffix import EarlierTexts
from edgespec.drafting.tree_drafter import TreeDrafter
from edgespec.engine.batcher import BatchedRequest, Batcher, StepSummary
from edgespec.engine.capacity import Capacity
from edgespec.engine.cascade import Cascade
from edgespec.engine.model_choice import ChosenModels
from edgespec.engine.pair import Pair, PairOptions, Plan, make_plan
from edgespec.engine.stream import Stream
from edgespec.errors import EdgespecError, MessageFn, UsageError, check_choice, check_text
from edgespec.llama.batch import EmbeddingsFn
from edgespec.llama.chat_template import Thinking
from edgespec.llama.choices import CacheChoice, KernelsChoice, StateRoom
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.platform.closing import Closing
from edgespec.platform.metering import Meter
from edgespec.platform.processes import Cancellation, HomeLock

# ---- the requests that an engine runs: their sessions and drafters, and what is kept when they end ----


_LEADING = 32  # tokens of a text
_SOON = 256  # tokens that a request is expected to need soon


@dataclass(eq=False, slots=True)
class RunningRequest:
    """A request under way, and the sessions and drafter that it has."""

    prompt: str | Sequence[int]
    plan: Plan
    loop: Generation | Cascade = field(init=False)
    session: Session | None = None
    draft: DraftModel | None = None
    drafter: TreeDrafter | None = None
    pace: Pace | None = None
    rejected: PlacesOfText | None = None
    """Where drafts of it were rejected, if that is kept."""
    batched: BatchedRequest | None = None
    """Its entry in the batcher, where it shares passes."""
    n_steps: int = 0
    shares: float = 0.0
    """The request's share of those steps: the sum of 1 / requests running."""

    @property
    def n_soon(self) -> int:
        """Tokens that it is expected to need in addition to those it has."""
        n_left = self.loop.n_left
        return _SOON if n_left is None else min(_SOON, n_left)


class RequestRunner:
    """Runs the requests under way, and tells their streams."""

    def __init__(
        self, pair: Pair, knowledge: Learned, earlier_texts: EarlierTexts, on_message: MessageFn
    ) -> None:
        """Run with `pair`, learn into `knowledge`, draft from `earlier_texts` and add to them.

        `on_message` takes lines that the user should know.
        """
        self._pair = pair
        self._knowledge = knowledge
        self._earlier_texts = earlier_texts
        self._on_message = on_message
        self._running: dict[Stream, RunningRequest] = {}
        self._unkept: list[tuple[list[int], RejectedText | None]] = []
        self.batcher: Batcher | None = None
        """The batcher that runs them; None before the first."""
        self._is_advancing = False

    @property
    def n_running(self) -> int:
        """Requests under way."""
        return len(self._running)

    @property
    def last_pass(self) -> StepSummary:
        """The last step's pass of the target."""
        return self.batcher.last if self.batcher else StepSummary()

    def has_room(self, prompt: Sequence[int] | int, n_predict: int | None) -> bool:
        """Whether a request of these tokens (or that many), and `n_predict` to come, can begin now."""
        running = [one for stream, one in self._running.items() if not stream.finished]
        if len(running) >= self._pair.parallel:
            return False
        if not running or self.batcher is None:
            return True
        if any(one.batched is None or one.batched.is_preempted for one in running):
            return False
        sequences = self.batcher.sequences
        to_come = min(_SOON, n_predict or _SOON)
        for one in running:  # prompts not yet prefilled included
            to_come += len(one.loop.tokens) - (one.session.n_past if one.session else 0) + one.n_soon
        free = sequences.cache.n_ctx - sequences.n_used - to_come
        if isinstance(prompt, int):
            return prompt <= free
        return len(prompt) <= free or (free > 0 and sequences.n_new(prompt) <= free)

    def begin(
        self,
        prompt: str | Sequence[int],
        tokens: list[int],
        plan: Plan,
        on_step: Callable[[DraftStep], None] | None,
    ) -> RunningRequest:
        """Prepare a request over sessions that are large enough for it; `tokens` are those of its prompt.

        Raises UsageError if too many are under way, EdgespecError if it does not fit.
        """
        self._refuse_inside_step()
        if self.n_running >= self._pair.parallel:
            problem = "as many texts are being written: end one, or allow more"
            raise UsageError(problem, field="parallel", value=self._pair.parallel)
        if plan.options.cascade and self._pair.parallel > 1:
            raise UsageError("a cascade writes one text at a time: use an engine for one", field="cascade")
        running = RunningRequest(prompt, plan)
        try:
            running.loop = self._loop(running, tokens, on_step)
        except BaseException:
            self._release(running)
            raise
        return running

    def start(self, stream: Stream, running: RunningRequest) -> None:
        """Let `stream` be told what its loop does."""
        loop = running.loop
        self._running[stream] = running
        self._pair.idle.note(self.n_running)
        stream.on_closed = self._ended
        stream.confirm = partial(self.end_damaged, wait=True)
        if isinstance(loop, Generation) and running.session and self.batcher:
            running.batched = BatchedRequest(loop, stream.take, stream.end, running.pace)
            self.batcher.add(running.batched)
            stream.advance = self.step
        else:
            stream.advance = partial(self._advance, stream, loop)

    def _advance(self, stream: Stream, loop: Loop) -> None:
        """Make the next pass of a loop that shares none."""
        self.end_damaged()
        with self._advancing():
            part = loop.ask()
            if part is None:
                stream.end()
            elif made := loop.take(part.run()):
                stream.take(made)

    @contextmanager
    def _advancing(self) -> Iterator[None]:
        self._is_advancing = True
        try:
            yield
        finally:
            self._is_advancing = False

    def step(self) -> None:
        """Make one pass of the target for all requests: `Engine.step`."""
        self.end_damaged()
        if self.batcher:
            with self._advancing():
                self.batcher.step()
            n_running = max(1, len(self._running))
            for running in self._running.values():
                running.n_steps += 1
                running.shares += 1.0 / n_running

    def _loop(
        self, running: RunningRequest, tokens: list[int], on_step: Callable[[DraftStep], None] | None
    ) -> Generation | Cascade:
        """Return the loop of a request, over sessions that are large enough for it."""
        plan = running.plan
        n_predict = plan.options.n_predict
        n_ctx = self._pair.needed_ctx(len(tokens), n_predict)
        sequences = self._pair.sequences(n_ctx)
        if self.batcher is None or self.batcher.sequences is not sequences:
            self.batcher = Batcher(sequences, self._knowledge.clocks)
        drafter: TreeDrafter | PluginDrafter | None = None
        features = None
        if plan.options.cascade:
            small = self._pair.small_model(n_ctx)
            target = running.session = sequences.begin([0])
            if plan.policy:
                drafter = self._drafter(running, small, on_step)
            return Cascade(target, small, tokens, plan, drafter=drafter, n_ctx=n_ctx)
        # A prompt's logits are not kept: where they are asked for, all of it is prefilled.
        known = tokens[:1] if plan.options.prompt_logprobs else tokens
        target = running.session = sequences.begin(known)
        n_known = target.n_past
        if plan.plugin:
            drafter = self._plugin_drafter(running, plan.plugin, tokens, on_step)
        elif plan.policy:
            if plan.uses_model:
                running.draft = self._begin_draft(n_ctx, len(tokens), n_predict)
                if running.draft:
                    running.draft.join(target)
                running.rejected = PlacesOfText() if self._earlier_texts.rejected else None
            drafter = self._drafter(running, running.draft, on_step)
            features = running.draft.features if running.draft else None
            if features and running.drafter:
                # Asked when it is read: others may have begun by then, which are to share its passes.
                n_unread = len(tokens) - n_known
                features.n_prompt = partial(
                    self._n_states, running.drafter.pace, target.model, n_unread, n_predict
                )
        if running.pace:
            running.pace.n_known = n_known
        return Generation(target, drafter, tokens, plan, n_ctx=n_ctx, n_known=n_known, features=features)

    def _plugin_drafter(
        self,
        running: RunningRequest,
        plugin: NamedDrafter,
        tokens: Sequence[int],
        on_step: Callable[[DraftStep], None] | None,
    ) -> PluginDrafter:
        if on_step:
            problem = f"is told of the steps of edgespec's own drafters, and {plugin} is none"
            raise UsageError(problem, field="on_step")
        target, plan = self._pair.target, running.plan
        return PluginDrafter(
            plugin,
            tokens,
            n_vocab=target.n_vocab,
            is_eog=plan.options.ends(target.is_eog),
            branches=not target.keeps_state,
            on_message=self._on_message,
            pace=SourcePace(
                record_of(self._knowledge.records, plugin), self._pace(running), self._knowledge.clocks.target
            ),
            tokenizer=target,
        )

    def _pace(self, running: RunningRequest) -> Pace:
        plan = running.plan
        assert plan.policy  # noqa: S101 - for the type checker: a text without drafts has no pace
        running.pace = self._knowledge.pace(
            plan.policy, greedy=plan.options.params.greedy, gamma=plan.options.gamma
        )
        return running.pace

    def _n_states(self, pace: Pace, target: Model, n_unread: int, n_predict: int | None) -> int:
        return states_worth(pace, target, n_unread, n_predict, n_requests=max(1, self.n_running))

    def _drafter(
        self,
        running: RunningRequest,
        model: DraftModel | None,
        on_step: Callable[[DraftStep], None] | None,
    ) -> TreeDrafter:
        plan = running.plan
        running.drafter = TreeDrafter(
            self._pace(running),
            suffix=self._earlier_texts.ready(),
            model=model,
            is_eog=plan.options.ends(self._pair.target.is_eog),
            clocks=self._knowledge.clocks,
            on_step=on_step,
            constraint=plan.constraint,
        )
        running.drafter.rejected = running.rejected
        running.drafter.on_message = self._on_message
        return running.drafter

    def _begin_draft(self, n_ctx: int, n_prompt: int, n_predict: int | None) -> DraftModel | None:
        """Return a draft model for a text; None where there is none, or no room for its cache."""
        try:
            return self._pair.begin_draft(n_ctx, n_prompt, n_predict)
        except (EdgespecError, MemoryError, OSError) as error:
            self._on_message(
                f"the draft cannot be used: {error or 'out of memory'}; the text goes on without it"
            )
            return None

    def end_all(self, why: str) -> None:
        """End the requests under way; those who read on get `why`, so that the text does not seem complete.

        Raises UsageError inside a step, whose requests cannot be ended.
        """
        self._refuse_inside_step()
        for stream in list(self._running):
            stream.cut(EdgespecError(f"this text was ended before it was complete: {why}"))

    def end_damaged(self, *, wait: bool = False) -> None:
        """End and forget what was computed with damaged weights; `wait` until their condition is known.

        Raises EdgespecError if they could not be packed anew.
        """
        for model in self._pair.models:
            is_target = model is self._pair.target  # no draft is trusted anyway
            if model.condition(wait=wait and is_target) != "damaged":
                continue
            if is_target:
                self.end_all("its weights on the disk were damaged, so it may be wrong: ask again")
                self._unkept.clear()
                self._pair.forget()
            self._on_message(model.accept_weights())

    def _refuse_inside_step(self) -> None:
        if self._is_advancing:
            raise UsageError("on_step was called in the middle of a text: begin and end others after it")

    def keep(self) -> None:
        """Store the texts that ended for drafting; until then they can be forgotten."""
        while self._unkept:
            self._earlier_texts.keep(*self._unkept.pop(0))

    def forget(self) -> None:
        """End the requests under way, and forget the texts that were not stored yet."""
        self.end_all("the engine was told to forget")
        self._unkept.clear()

    def _ended(self, stream: Stream) -> None:
        """Keep what later requests can use of a stream that has ended, and free the rest."""
        running = self._running.pop(stream)
        self._pair.idle.note(self.n_running)
        if running.batched and self.batcher:
            self.batcher.close(running.batched)
        else:
            running.loop.close()
        if running.n_steps:
            stream.energy_share = running.shares / running.n_steps
        self._release(running)
        result = stream.result
        # Earlier turns of a conversation are kept already: keep the new part and a few tokens before it.
        start, tokens = max(0, running.loop.n_known - _LEADING), stream.tokens
        rejected = None
        if running.rejected and result.mode == "exact":
            rejected = running.rejected.of(tokens, result.prompt_tokens, start)
        self._unkept.append((tokens[start:], rejected))

    def _release(self, running: RunningRequest) -> None:
        if running.session and self.batcher:
            self.batcher.sequences.end(running.session)
        if running.draft:
            self._pair.end_draft(running.draft)
        if running.pace:
            self._knowledge.ended(running.pace)


# ---- engine ----


class Engine(Closing):
    """Generates text with `target`, sped up by `draft`, distributed exactly as with `target` alone.

    Models are paths, registry names or `hf:OWNER/REPO/FILE.gguf`, or both as `target`, chosen before
    (model_choice.py). Models not given come from the registry's
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
        history: Draft from earlier prompts and answers on disk, and add those of this engine (docs/start.md).
        learn: Keep the texts in which drafts of a head were rejected, for the training of a better one
            (docs/drafts.md); None: with `history`.
        meter: Measures the joules of each generation.
        signals: Lets Ctrl-C, or another thread, end a running pass.
        prefix_cache: None reads every prompt from its beginning; 0 reads only the part of a prompt that is
            new after the last sequence; more keeps earlier sequences too, in at most that many bytes.
        parallel: Most requests at once, whose passes are shared; None: as many as pay and fit in memory.
        n_cells: Tokens that the KV cache holds, of all requests together; None: as many as one request needs,
            or for several what capacity.py says.
        cache_type: How the target's cache holds keys and values: "f16"; "q8_0", which takes half the memory
            and changes the logits a little; "q4_0", a quarter, in which some models write nonsense; "auto",
            the first of the first two in which `n_ctx` tokens of `parallel` requests, or `n_cells`, fit.
        chat_template: In place of the target's own: the name of another in its file or of a form of
            llama.cpp's ("chatml"), a file, or a program in Jinja.
        rpc: HOST:PORT of each machine that holds layers of the target (docs/many-machines.md).
        keep_packed: Keep the packed weights on the disk for quicker starts (docs/kernels.md).
        states: The folder where the states of prompts are kept, so that later engines need not read them
            again, and its limit (docs/start.md). Keeps at least the last sequence in memory, too.
        on_message: Takes lines that the user should know.

    Raises UsageError or EdgespecError if a model is unavailable, cannot be used, or does not fit in memory.
    """

    _closed = False

    def __init__(  # noqa: PLR0913 - the public names of PairOptions, and of what is kept between generations
        self,
        target: str | Path | ChosenModels | None = None,
        draft: str | Path | None = None,
        *,
        drafter: DrafterChoice | str | Callable[[], UserDrafter] = "auto",
        n_ctx: int | None = None,
        n_threads: int | None = None,
        kernels: KernelsChoice = "auto",
        objective: Objective = "latency",
        profile: bool = True,
        history: bool = False,
        learn: bool | None = None,
        meter: Meter | None = None,
        signals: Cancellation | None = None,
        prefix_cache: int | None = None,
        parallel: int | None = 1,
        n_cells: int | None = None,
        cache_type: CacheChoice = "f16",
        chat_template: str | None = None,
        rpc: tuple[str, ...] = (),
        keep_packed: bool = False,
        states: StateRoom | None = None,
        on_message: Callable[[str], None] = lambda _line: None,
    ) -> None:
        """Load the models; missing ones are pulled. The class says what the arguments mean."""
        chosen = _found_drafter(drafter, draft, objective, profile=profile)
        drafts = chosen != "none"
        options = PairOptions(
            chosen,
            n_ctx,
            n_threads,
            kernels=kernels,
            cache_type=cache_type,
            prefix_cache=0 if states and prefix_cache is None else prefix_cache,
            signals=signals,
            parallel=parallel,
            n_cells=n_cells,
            chat_template=chat_template,
            rpc=rpc,
            keep_packed=keep_packed,
            states=states,
        )
        self.meter = meter
        """Measures the joules of each generation, from the next one on; None for no measurement."""
        self._on_message, self._signals = on_message, signals
        self._lock = HomeLock("the engine")  # held for a pass, or while a text has the engine for itself
        self._pair = Pair(target, draft, options)
        self._earlier_texts = self._texts(learn, kept=history and drafts)
        self._pair.load(on_message)
        try:
            self._knowledge = self._learned(objective if drafts else "latency", kept=profile and drafts)
            self._pair.choose_capacity(self._knowledge.clocks.target.at(CONTEXTS[0]))
            self._requests = RequestRunner(self._pair, self._knowledge, self._earlier_texts, on_message)
        except BaseException:
            self._pair.close()
            raise

    def _learned(self, objective: Objective, *, kept: bool) -> Learned:
        """The knowledge of the pair on this machine; `kept`: from the disk, and stored at the end."""
        draft = self._pair.draft
        return Learned(
            self.target,
            draft.model,
            draft_costs=draft.costs,
            kernels=(self.kernels, self.n_threads),
            objective=objective,
            kept=kept,
            on_message=self._on_message,
        )

    def _texts(self, learn: bool | None, *, kept: bool) -> EarlierTexts:
        """Begin reading the history, if it is `kept`; `learn` as for the constructor."""
        texts = EarlierTexts(self._pair.target_header, kept=kept, on_message=self._on_message)
        sha256 = self._pair.draft.trained_for
        if learn and not sha256:
            self._on_message(f"nothing is learned: {self.target_name} has no head here that can be trained")
        if sha256 and (kept if learn is None else learn):
            texts.rejected = RejectedPlaces(sha256, on_message=self._on_message)
        return texts

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

    def forget(self, *, tables: bool = False, but: Sequence[int] = ()) -> None:
        """Forget the text of earlier generations and of the history; with `tables` also learnt statistics.

        What is on disk stays, states of prompts too. `but`: the first tokens of a prompt, which are not read
        again where they are in the prefix cache.
        """
        with self._lock:
            self._requests.forget()
            self._earlier_texts.ready().forget()
            self._pair.forget(but)
            if tables:
                self._knowledge.forget()

    def prompt_tokens(
        self,
        prompt: str,
        *,
        system: str | None = None,
        chat: bool | None = None,
        parse_special: bool | None = None,
        reasoning_budget: int = -1,
    ) -> list[int]:
        """Return the tokens of `prompt`, in the model's chat template if it has one.

        `chat` True or False forces or forbids the template; `system` is a system message, which needs the
        template. `parse_special`: names of control tokens in `prompt` and `system` are these tokens (True) or
        text (False); None: text in a template, tokens without. `reasoning_budget` 0: the template is told
        that the model is not to think. Raises UsageError for an impossible combination.
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
        thinking = Thinking(budget=reasoning_budget)
        return self.target.tokenize_chat(messages, thinking=thinking, parse_special=bool(parse_special))

    def has_room(self, prompt: Sequence[int] | int, n_predict: int | None) -> bool:
        """Whether a text of these tokens (or that many), and `n_predict` to come, can begin now.

        Tokens that it shares with other texts take no second place, which a number cannot tell.
        """
        with self._lock:
            return self._requests.has_room(prompt, n_predict)

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
            tokens = self._tokens_of(prompt, system, chat, parse_special, options.reasoning_budget)
            given = prompt if isinstance(prompt, str) else tokens
            return self._begin(given, tokens, options, on_step, called)

    def _tokens_of(
        self,
        prompt: str | Sequence[int],
        system: str | None,
        chat: bool | None,
        parse_special: bool | None,
        reasoning_budget: int,
    ) -> list[int]:
        """Return the tokens of a prompt that is text, or these tokens. Raises UsageError."""
        if isinstance(prompt, str):
            tokens = self.prompt_tokens(
                prompt,
                system=system,
                chat=chat,
                parse_special=parse_special,
                reasoning_budget=reasoning_budget,
            )
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
        plan = make_plan(self._pair, options, tokens)
        if self.parallel == 1:
            self._requests.end_all(
                "the engine writes one at a time and began another; read it first, or choose parallel"
            )
        self._requests.keep()
        self._requests.end_damaged()
        if self._signals and not self._requests.n_running:
            self._signals.drain()
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
                with ExitStack() as stack:  # the last one first, each whatever the others raise
                    stack.callback(self._pair.close)
                    stack.callback(self._knowledge.store, self._on_message)
                    stack.callback(self._requests.keep)
                    self._requests.end_all("the engine was closed")


def _found_drafter(
    given: DrafterChoice | str | Callable[[], UserDrafter],
    draft: str | Path | None,
    objective: Objective,
    *,
    profile: bool,
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
    if objective == "energy" and not profile:
        problem = "takes joules from the profile: leave out profile=False"
        raise UsageError(problem, field="objective", value=objective)
    return drafter
