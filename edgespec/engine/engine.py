"""The public engine: generates text with a pair of models, and keeps caches for later generations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property, partial, update_wrapper
from typing import Concatenate, ParamSpec, Self, Unpack

import msgspec

from edgespec.decoding.choices import DrafterChoice, NamedDrafter
from edgespec.decoding.generate import Generation, Loop
from edgespec.decoding.options import OptionKeywords, Options, token_ids
from edgespec.decoding.records import Result
from edgespec.decoding.session import EmbeddedSpan, MediaEncoder, Medium, PromptTokens, text_of
from edgespec.drafting.draft import Draft, n_states_worth_reading
from edgespec.drafting.draft_model import DraftModel
from edgespec.drafting.pace import Learned, Pace
from edgespec.drafting.plugin import PluginDrafter, SourcePace, find_drafter, record_of
from edgespec.drafting.profile import CONTEXTS
from edgespec.drafting.rejections import PlacesOfText, RejectedPlaces, RejectedText
from edgespec.drafting.step import DraftStep
from edgespec.drafting.suffix import EarlierTexts
from edgespec.drafting.tree_drafter import TreeDrafter
from edgespec.engine.batcher import BatchedRequest, Batcher, StepSummary
from edgespec.engine.capacity import Capacity
from edgespec.engine.cascade import Cascade
from edgespec.engine.options import EngineOptions
from edgespec.engine.pair import Pair, Plan, make_plan
from edgespec.engine.stream import Stream
from edgespec.errors import EdgespecError, UsageError, check_text
from edgespec.llama.chat_template import Thinking, joined_parts
from edgespec.llama.choices import AdapterSet, Lora
from edgespec.llama.control_names import split_at_media
from edgespec.llama.weights import Model
from edgespec.platform.closing import Closing
from edgespec.platform.metering import Meter
from edgespec.platform.plugins import part
from edgespec.platform.processes import HomeLock

# ---- the requests that an engine runs: their sessions and drafters, and what is kept when they end ----


_LEADING = 32  # tokens of a text
_SOON = 256  # tokens that a request is expected to need soon


class RunningRequest(msgspec.Struct, eq=False):
    """A request under way."""

    loop: Generation | Cascade
    held: ExitStack
    """Gives back its sequence, its draft model and what its pace has learnt."""
    batched: BatchedRequest | None = None
    """Its entry in the batcher, where it shares passes."""
    n_steps: int = 0
    shares: float = 0.0
    """The request's share of those steps: the sum of 1 / requests running."""


class RequestRunner:
    """Runs the requests under way, and feeds their streams."""

    def __init__(self, pair: Pair, knowledge: Learned, earlier_texts: EarlierTexts, lock: HomeLock) -> None:
        """Run with `pair`, learn into `knowledge`, draft from `earlier_texts` and add to them.

        `lock`: the engine's, held while a request advances.
        """
        self._pair = pair
        self._knowledge = knowledge
        self._earlier_texts = earlier_texts
        self._lock, self._on_message = lock, pair.options.on_message
        self._key = pair.target.adapters.key
        self._running: dict[Stream, RunningRequest] = {}
        self._unkept: list[tuple[list[int], RejectedText | None, str]] = []
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

    def has_room(self, prompt: Sequence[int] | int, n_predict: int | None, adapters: AdapterSet = ()) -> bool:
        """Whether a request of these tokens (or that many), and `n_predict` to come, can begin now."""
        batched = [one.batched for stream, one in self._running.items() if not stream.finished]
        if len(batched) >= self._pair.parallel:
            return False
        if not batched or self.batcher is None:
            return True
        sequences = self.batcher.sequences
        to_come = min(_SOON, n_predict or _SOON)
        for one in batched:
            if one is None or one.is_preempted:
                return False
            loop = one.generation  # of which the prompt may not be prefilled yet
            n_soon = _SOON if loop.n_predict_left is None else min(_SOON, loop.n_predict_left)
            to_come += len(loop.tokens) - loop.session.n_past + n_soon
        free = sequences.cache.n_ctx - sequences.n_used - to_come
        if isinstance(prompt, int):
            return prompt <= free
        return len(prompt) <= free or (free > 0 and sequences.n_new(prompt, adapters) <= free)

    def begin(
        self,
        tokens: list[int],
        plan: Plan,
        on_step: Callable[[DraftStep], None] | None,
        *,
        called: float,
        meter: Meter | None,
    ) -> Stream:
        """Begin a request over sessions that are large enough for it; `tokens` are those of its prompt.

        `called`: the time of the request. `meter`: counts its joules. Raises UsageError if too many are under
        way, EdgespecError if it does not fit.
        """
        self._refuse_inside_step()
        parallel = self._pair.parallel
        if self.n_running >= parallel:
            problem = "as many texts are being written: end one, or allow more"
            raise UsageError(problem, field="parallel", value=parallel)
        if plan.options.cascade and parallel > 1:
            raise UsageError("a cascade writes one text at a time: use an engine for one", field="cascade")
        with ExitStack() as held:
            loop, pace = self._loop(held, tokens, plan, on_step)
            window = None
            if meter:
                began = time.perf_counter()
                window = meter.begin()
                if parallel == 1:
                    loop.mark = window.mark
                called += time.perf_counter() - began  # the meter's time is not the generation's
            stream = Stream(loop, self._pair, plan, called=called, window=window)
            running = self._running[stream] = RunningRequest(loop, held.pop_all())
        self._pair.idle.note(self.n_running)
        stream.lock, stream.on_closed = self._lock, self._ended
        stream.confirm = partial(self.end_damaged, wait=True)
        if isinstance(loop, Generation) and self.batcher:
            running.batched = BatchedRequest(loop, stream, plan.adapters, pace)
            self.batcher.add(running.batched)
            stream.advance = self.step
        else:
            stream.advance = partial(self._advance, stream, loop)
        return stream

    def _advance(self, stream: Stream, loop: Loop) -> None:
        """Run the next pass of a loop that shares none."""
        self.end_damaged()
        with self._advancing():
            part = loop.ask()
            if part is None:
                stream.end()
            elif made := loop.process(part.run()):
                stream.append(made)

    @contextmanager
    def _advancing(self) -> Iterator[None]:
        self._is_advancing = True
        try:
            yield
        finally:
            self._is_advancing = False

    def step(self) -> None:
        """Run one pass of the target for all requests: `Engine.step`."""
        self.end_damaged()
        if self.batcher:
            with self._advancing():
                self.batcher.step()
            n_running = max(1, len(self._running))
            for running in self._running.values():
                running.n_steps += 1
                running.shares += 1.0 / n_running

    def _loop(
        self,
        held: ExitStack,
        tokens: list[int],
        plan: Plan,
        on_step: Callable[[DraftStep], None] | None,
    ) -> tuple[Generation | Cascade, Pace | None]:
        """Return the loop of a request, over sessions that are large enough for it, and its pace.

        Resources that it holds until its end go to `held`.
        """
        n_predict = plan.options.n_predict
        n_ctx = self._pair.needed_ctx(len(tokens), n_predict)
        sequences = self._pair.sequences(n_ctx)
        if self.batcher is None or self.batcher.sequences is not sequences:
            self.batcher = Batcher(sequences, self._knowledge.clocks)
        # A prompt's logits are not kept: where they are asked for, all of it is prefilled.
        known = tokens[:1] if plan.options.prompt_logprobs or plan.options.cascade else tokens
        target = sequences.begin(known, plan.adapters)
        held.callback(sequences.end, target)
        n_known = target.n_past
        pace = self._pace(held, plan, n_known) if plan.policy else None
        if plan.options.cascade:
            small = self._pair.small_model(n_ctx)
            drafter = self._drafter(plan, pace, small, on_step) if pace else None
            return Cascade(target, small, tokens, plan, drafter=drafter, n_ctx=n_ctx), pace
        if pace is None:
            return Generation(target, None, tokens, plan, n_ctx=n_ctx, n_known=n_known), None
        if plan.plugin:
            plugin = self._plugin_drafter(plan, pace, plan.plugin, text_of(tokens), on_step)
            return Generation(target, plugin, tokens, plan, n_ctx=n_ctx, n_known=n_known), pace
        draft = self._begin_draft(n_ctx, len(tokens), n_predict) if plan.uses_model else None
        features = None
        if draft:
            held.callback(self._pair.end_draft, draft)
            draft.join(target)
            draft.adapt(plan.adapters)
            features = draft.features
        if features:
            # Asked when it is read: others may have begun by then, which are to share its passes.
            features.n_prompt = partial(self._n_states, pace, target.model, len(tokens) - n_known, n_predict)
        drafter = self._drafter(plan, pace, draft, on_step)
        loop = Generation(target, drafter, tokens, plan, n_ctx=n_ctx, n_known=n_known, features=features)
        return loop, pace

    def _plugin_drafter(
        self,
        plan: Plan,
        pace: Pace,
        plugin: NamedDrafter,
        tokens: Sequence[int],
        on_step: Callable[[DraftStep], None] | None,
    ) -> PluginDrafter:
        if on_step:
            problem = f"is told of the steps of edgespec's own drafters, and {plugin} is none"
            raise UsageError(problem, field="on_step")
        target, records = self._pair.target, self._knowledge.records.setdefault(self._key(plan.adapters), {})
        return PluginDrafter(
            plugin,
            tokens,
            n_vocab=target.n_vocab,
            is_eog=plan.options.ends(target.is_eog),
            branches=not target.keeps_state,
            on_message=self._on_message,
            pace=SourcePace(record_of(records, plugin), pace, self._knowledge.clocks.target),
            tokenizer=target,
        )

    def _pace(self, held: ExitStack, plan: Plan, n_known: int) -> Pace:
        assert plan.policy  # noqa: S101 - for the type checker: a text without drafts has no pace
        options = plan.options
        pace = self._knowledge.pace(
            plan.policy, greedy=options.params.greedy, gamma=options.gamma, adapters=self._key(plan.adapters)
        )
        held.callback(self._knowledge.ended, pace)
        pace.n_known = n_known
        return pace

    def _n_states(self, pace: Pace, target: Model, n_unread: int, n_predict: int | None) -> int:
        return n_states_worth_reading(pace, target, n_unread, n_predict, n_requests=max(1, self.n_running))

    def _drafter(
        self,
        plan: Plan,
        pace: Pace,
        model: DraftModel | None,
        on_step: Callable[[DraftStep], None] | None,
    ) -> TreeDrafter:
        drafter = TreeDrafter(
            pace,
            suffix=self._earlier_texts.ready(),
            model=model,
            is_eog=plan.options.ends(self._pair.target.is_eog),
            clocks=self._knowledge.clocks,
            on_step=on_step,
            constraint=plan.constraint,
        )
        if self._earlier_texts.rejected and plan.uses_model and plan.mode == "exact":
            drafter.rejected = PlacesOfText()
        drafter.on_message = self._on_message
        return drafter

    def _begin_draft(self, n_ctx: int, n_prompt: int, n_predict: int | None) -> DraftModel | None:
        """Return a draft model for a text; None if there is none, or no room for its cache."""
        try:
            return self._pair.begin_draft(n_ctx, n_prompt, n_predict)
        except (EdgespecError, MemoryError, OSError) as error:
            self._on_message(
                f"the draft cannot be used: {error or 'out of memory'}; the text continues without it"
            )
            return None

    def end_all(self, why: str) -> None:
        """End the requests under way; readers get `why`, so that the text does not seem complete.

        Raises UsageError inside a step, whose requests cannot be ended.
        """
        self._refuse_inside_step()
        for stream in list(self._running):
            stream.cut(EdgespecError(f"this text was ended before it was complete: {why}"))

    def end_damaged(self, *, wait: bool = False) -> None:
        """End and forget all that was computed with damaged weights; `wait` until their condition is known.

        Raises EdgespecError if they could not be packed again.
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

    def store_texts(self) -> None:
        """Store finished texts for drafting; until then they can be forgotten."""
        while self._unkept:
            self._earlier_texts.add(*self._unkept.pop(0))

    def forget(self) -> None:
        """End the requests under way, and forget the texts that were not stored yet."""
        self.end_all("the engine was told to forget")
        self._unkept.clear()

    def _ended(self, stream: Stream) -> None:
        """Keep the reusable parts of a finished stream, and free the rest."""
        running = self._running.pop(stream)
        self._pair.idle.note(self.n_running)
        if running.batched and self.batcher:
            self.batcher.close(running.batched)
        else:
            running.loop.close()
        if running.n_steps:
            stream.energy_share = running.shares / running.n_steps
        running.held.close()
        # Earlier turns of a conversation are kept already: keep the new part and a few tokens before it.
        loop, drafter = running.loop, running.loop.drafter
        start, tokens = max(0, loop.n_text(loop.n_known) - _LEADING), loop.text
        rejected = None
        if isinstance(drafter, TreeDrafter) and drafter.rejected:
            rejected = drafter.rejected.of(tokens, loop.n_text(loop.n_prompt), start)
        adapters = running.batched.adapters if running.batched else ()
        self._unkept.append((tokens[start:], rejected, self._key(adapters)))


# ---- engine ----


Fields = ParamSpec("Fields")


def _with_fields(
    options: Callable[Fields, EngineOptions],
) -> Callable[[Callable[[Engine, EngineOptions], None]], Callable[Concatenate[Engine, Fields], None]]:
    """Let a constructor that takes options accept their fields as arguments."""

    def decorate(
        init: Callable[[Engine, EngineOptions], None],
    ) -> Callable[Concatenate[Engine, Fields], None]:
        def declared(self: Engine, /, *args: Fields.args, **keywords: Fields.kwargs) -> None:
            init(self, options(*args, **keywords))

        return update_wrapper(declared, EngineOptions.__init__)

    return decorate


class Engine(Closing):
    """Generates text with `target`, sped up by `draft`, distributed exactly as with `target` alone.

    Its arguments are the fields of `EngineOptions`: it loads the models, and pulls missing ones. A context
    manager; `close` frees everything. Threads take turns: with `parallel` 1 a `generate` waits for another to
    end, with more they share passes.

        with Engine(target="7b.gguf", draft="tiny.gguf") as engine:
            print(engine.generate("Write a quicksort").text)

    Raises UsageError or EdgespecError if a model is unavailable, cannot be used, or does not fit in memory.
    """

    _closed = False

    @_with_fields(EngineOptions)
    def __init__(self, options: EngineOptions) -> None:
        """Load the models; missing ones are pulled. `EngineOptions` says what the arguments mean."""
        self._open(options)

    @classmethod
    def of(cls, options: EngineOptions) -> Self:
        """Return an engine with these options."""
        engine = cls.__new__(cls)
        engine._open(options)
        return engine

    def _open(self, options: EngineOptions) -> None:
        self._options = options
        drafter = _found_drafter(options)
        drafts = drafter != "none"
        self.meter = options.meter
        """Measures the joules of each generation, from the next one on; None for no measurement."""
        self._lock = HomeLock("the engine")  # held for a pass, or while a text has the engine for itself
        self._pair = Pair(options, drafter)
        self._earlier_texts = self._texts(kept=options.history and drafts)
        self._pair.load()
        try:
            self._knowledge = self._learned(drafts=drafts)
            self._pair.choose_capacity(self._knowledge.clocks.target.at(CONTEXTS[0]))
            self._requests = RequestRunner(self._pair, self._knowledge, self._earlier_texts, self._lock)
        except BaseException:
            self._pair.close()
            raise

    def _learned(self, *, drafts: bool) -> Learned:
        """Return the learned profile of the pair on this machine; nothing is kept if it never `drafts`."""
        draft = self._pair.draft
        return Learned(
            self.target,
            draft.model,
            draft_costs=draft.costs,
            kernels=(self.kernels, self.n_threads),
            objective=self._options.objective if drafts else "latency",
            kept=self._options.profile and drafts,
            on_message=self._options.on_message,
        )

    def _texts(self, *, kept: bool) -> EarlierTexts:
        """Begin reading the history, if it is `kept`."""
        learn, on_message = self._options.learn, self._options.on_message
        texts = EarlierTexts(self._pair.target_header, kept=kept, on_message=on_message)
        sha256 = self._pair.draft.trained_for
        if learn and not sha256:
            on_message(f"nothing is learned: {self.target_name} has no head here that can be trained")
        if sha256 and (kept if learn is None else learn):
            texts.rejected = RejectedPlaces(sha256, on_message=on_message)
        return texts

    @property
    def target(self) -> Model:
        """The model whose distribution the text follows."""
        return self._pair.target

    @property
    def draft(self) -> Model | None:
        """The draft model, or None."""
        return self._pair.draft.model

    @property
    def target_name(self) -> str:
        """The target's name, as the user gave it or in the registry."""
        return self._pair.target_name

    @property
    def draft_name(self) -> str | None:
        """The draft's name, as the user gave it or in the registry; None without a draft model."""
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
        """The context of each text, if the cache's size was decided before there were any; else None."""
        return self._pair.n_ctx_shared

    @property
    def capacity(self) -> Capacity:
        """The number of texts at once, and of their tokens that the cache holds."""
        return self._pair.capacity

    @property
    def last_pass(self) -> StepSummary:
        """The last step's pass of the target, of texts that share passes."""
        return self._requests.last_pass

    @property
    def draft_in_use(self) -> Draft:
        """The draft used besides the suffix store, from its file to its sessions."""
        return self._pair.draft

    def forget(self, *, tables: bool = False, but: Sequence[int] = ()) -> None:
        """Forget the text of earlier generations and of the history; with `tables` also learned statistics.

        Files on disk stay, prompt states too. `but`: the first tokens of a prompt, which stay in the prefix
        cache.
        """
        with self._lock:
            self._requests.forget()
            self._earlier_texts.ready().clear()
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
        images: Sequence[Medium] = (),
    ) -> list[int]:
        """Return the tokens of `prompt`, in the model's chat template if it has one.

        `chat` True or False forces or forbids the template; `system` is a system message, which needs the
        template. `parse_special`: names of control tokens in `prompt` and `system` are these tokens (True) or
        text (False); None: text in a template, tokens without. `reasoning_budget` 0: the template is
        asked for no thoughts. `images` come before the prompt's text. Raises UsageError for an impossible
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
            special = parse_special is not False
            return self._tokenized(
                joined_parts([*[None] * len(images), prompt]),
                images,
                lambda text, begins: self.target.tokenize(text, add_special=begins, parse_special=special),
            )
        messages = [{"role": "user", "content": joined_parts([*[None] * len(images), prompt])}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        thinking = Thinking(budget=reasoning_budget)
        special = bool(parse_special)
        return self.tokenize(
            self.target.render_chat(messages, thinking=thinking, parse_special=special), images
        )

    def tokenize(self, text: str, media: Sequence[Medium] = (), *, begins: bool = True) -> list[int]:
        """Return the tokens of a prompt from `Model.render_chat`, or of a part of one that does not begin it.

        `MEDIA_MARKER` (llama/control_names.py) stands for each of `media`. Raises UsageError if one cannot be
        read, or the template left a marker out.
        """
        return self._tokenized(
            text, media, lambda part, first: self.target.tokenize_rendered(part, begins=begins and first)
        )

    def _tokenized(
        self, text: str, media: Sequence[Medium], tokenize: Callable[[str, bool], list[int]]
    ) -> list[int]:
        """Return the tokens of a prompt; `tokenize` takes its parts, and whether each is the first."""
        if not media:
            return tokenize(text, True)
        parts = split_at_media(text)
        if len(parts) != len(media) + 1:
            problem = f"the chat template writes {len(parts) - 1} of {len(media)}"
            raise UsageError(problem, field="images")
        prompt, spans = PromptTokens(tokenize(parts[0], True)), list[EmbeddedSpan]()
        for i, (medium, following) in enumerate(zip(media, parts[1:], strict=True), 1):
            for read in self._encoder.read(medium, f"image {i}"):
                spans += [read] if isinstance(read, EmbeddedSpan) else []
                prompt += read.ids if isinstance(read, EmbeddedSpan) else read
            prompt += tokenize(following, False) if following else []
        prompt.spans = tuple(spans)
        return prompt

    @cached_property
    def _encoder(self) -> MediaEncoder:
        options = self._options
        encoder: MediaEncoder = part("images.encoder")(
            self.target,
            options.mmproj,
            n_threads=self.n_threads,
            states=options.states,
            on_message=options.on_message,
        )
        return encoder

    def media_problem(self, *, ask_hub: bool = True) -> str:
        """Return why the target reads no images here, in one line; "" if it does. Nothing is pulled.

        Without `ask_hub` an encoder counts only where it is on the disk.
        """
        return self._encoder.problem(ask_hub=ask_hub)

    def has_room(
        self, prompt: Sequence[int] | int, n_predict: int | None, lora: Mapping[int, float] | None = None
    ) -> bool:
        """Whether a text of these tokens (or that many), and `n_predict` to come, can begin now.

        Tokens that it shares with other texts need no second place; for that, pass tokens, not a number.
        `lora`: as of `Options`.
        """
        with self._lock:
            return self._requests.has_room(prompt, n_predict, self._pair.adapter_set(lora))

    @property
    def adapters(self) -> tuple[Lora, ...]:
        """The target's adapters by number, each with its scale where a text asks for none."""
        return self._pair.adapters

    def scale_adapters(self, scales: Mapping[int, float]) -> None:
        """Set the scales of texts that ask for none, from the next text on; those left out are 0."""
        self._pair.adapter_set(scales)
        given = enumerate(self._pair.adapters)
        self._pair.adapters = tuple(Lora(one.path, float(scales.get(number, 0))) for number, one in given)

    def stream(
        self,
        prompt: str | Sequence[int],
        options: Options | None = None,
        *,
        system: str | None = None,
        chat: bool | None = None,
        parse_special: bool | None = None,
        images: Sequence[Medium] = (),
        on_step: Callable[[DraftStep], None] | None = None,
        **keywords: Unpack[OptionKeywords],
    ) -> Stream:
        """Continue `prompt` (text, or token ids), a Token at a time.

        `keywords` are fields of `Options` and override those of `options`. `system`, `chat`, `parse_special`
        and `images`: as for `prompt_tokens`. `on_step` is called after every step of a drafter. With
        `parallel` 1 an earlier stream of this engine is ended, and raises EdgespecError if it is read on;
        otherwise all streams advance together, whichever is read. Raises UsageError for bad values or if too
        many texts are under way, EdgespecError if the prompt is longer than the context.
        """
        with self._lock:
            called = time.perf_counter()
            if self._closed:
                raise UsageError("the engine is closed")
            if not isinstance(options, Options | None):
                raise UsageError("must be Options", field="options", value=options)
            options = (options or Options()).changed(**keywords)
            tokens = self._tokens_of(prompt, system, chat, parse_special, options.reasoning_budget, images)
            if isinstance(tokens, PromptTokens) and tokens.spans:
                _check_spans(options)
            plan = make_plan(self._pair, options, text_of(tokens))
            if self.parallel == 1:
                self._requests.end_all(
                    "the engine writes one at a time and began another; read it first, or choose parallel"
                )
            self._requests.store_texts()
            self._requests.end_damaged()
            if self._options.signals and not self._requests.n_running:
                self._options.signals.drain()
            return self._requests.begin(tokens, plan, on_step, called=called, meter=self.meter)

    def _tokens_of(
        self,
        prompt: str | Sequence[int],
        system: str | None,
        chat: bool | None,
        parse_special: bool | None,
        reasoning_budget: int,
        images: Sequence[Medium],
    ) -> list[int]:
        """Return the tokens of a prompt that is text, or these tokens. Raises UsageError."""
        if isinstance(prompt, str):
            tokens = self.prompt_tokens(
                prompt,
                system=system,
                chat=chat,
                parse_special=parse_special,
                reasoning_budget=reasoning_budget,
                images=images,
            )
        else:
            given = {"system": system, "chat": chat, "parse_special": parse_special, "images": images or None}
            for name, value in given.items():
                if value is not None:
                    raise UsageError("goes with a prompt of text, not with token ids", field=name)
            text = text_of(prompt) if isinstance(prompt, PromptTokens) else prompt
            tokens = token_ids("prompt", text, self.target.n_vocab, wanted="text or a list of token ids")
            tokens = prompt if isinstance(prompt, PromptTokens) else tokens
        if not tokens:
            raise UsageError("the prompt is empty")
        return tokens

    def step(self) -> None:
        """Run one pass of the target for all streams, after their drafts; the tokens wait in the streams.

        Raises KeyboardInterrupt if `signals` interrupts it; streams that failed raise when they are read.
        """
        with self._lock:
            self._requests.step()

    def generate(
        self,
        prompt: str | Sequence[int],
        options: Options | None = None,
        *,
        system: str | None = None,
        chat: bool | None = None,
        parse_special: bool | None = None,
        images: Sequence[Medium] = (),
        on_step: Callable[[DraftStep], None] | None = None,
        **keywords: Unpack[OptionKeywords],
    ) -> Result:
        """Continue `prompt` to the end and return the Result; arguments as for `stream`.

        If texts are written one at a time, another thread's call waits until this one is done.
        """
        with self._lock if self.parallel == 1 else nullcontext():
            stream = self.stream(
                prompt,
                options,
                system=system,
                chat=chat,
                parse_special=parse_special,
                images=images,
                on_step=on_step,
                **keywords,
            )
            for _ in stream:
                pass
        return stream.result

    def close(self) -> None:
        """Store what was learned and free the models; a second call, or a forked child's, does nothing."""
        if not self._lock.is_here:
            return
        with self._lock:
            if not self._closed:
                self._closed = True
                with ExitStack() as stack:  # the last one first, each whatever the others raise
                    stack.callback(self._pair.close)
                    if "_encoder" in self.__dict__:
                        stack.callback(self._encoder.close)
                    stack.callback(self._knowledge.store, self._options.on_message)
                    stack.callback(self._requests.store_texts)
                    self._requests.end_all("the engine was closed")


def _check_spans(options: Options) -> None:
    """Raise UsageError for options that a prompt with more than text rules out."""
    for name, value in (("cascade", options.cascade), ("prompt_logprobs", options.prompt_logprobs)):
        if value:
            raise UsageError("goes with prompts of text only: leave it out, or the images", field=name)


def _found_drafter(options: EngineOptions) -> DrafterChoice:
    """Return the drafter. Raises UsageError, also for options without effect on a user's own."""
    drafter, objective = find_drafter(options.drafter), options.objective
    if isinstance(drafter, NamedDrafter):
        if options.draft is not None:
            problem = f"{drafter} drafts without a model: leave it out"
            raise UsageError(problem, field="draft", value=options.draft)
        if objective != "latency":
            problem = f"{drafter} chooses itself what it drafts: leave it out"
            raise UsageError(problem, field="objective", value=objective)
    if objective == "energy" and not options.profile:
        problem = "takes joules from the profile: leave out profile=False"
        raise UsageError(problem, field="objective", value=objective)
    return drafter
