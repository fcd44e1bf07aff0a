"""The public engine: a target, a draft and their sessions, kept between generations."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypedDict, Unpack, get_args

from edgespec.decoding.generate import Generation
from edgespec.decoding.lenience import check_lenience
from edgespec.decoding.logprobs import MAX_LOGPROBS
from edgespec.decoding.verify import Rule
from edgespec.drafting.foreign.overlap import find_overlap, suite_text
from edgespec.drafting.foreign.translated import ROOM_PER_TOKEN, TranslatedDraft
from edgespec.drafting.foreign.vocabulary import compare_vocabularies
from edgespec.drafting.foreign.vocabulary_map import VocabularyMap, map_vocabularies
from edgespec.drafting.knowledge import Knowledge, Objective, Recollection
from edgespec.drafting.model import DraftModel
from edgespec.drafting.scheduler import MAX_GAMMA, Policy
from edgespec.drafting.trees import DraftStep, TreeDrafter
from edgespec.energy import EnergyMeter
from edgespec.errors import EdgespecError, UsageError
from edgespec.grammar.grammar import Constraint, Grammar
from edgespec.grammar.masking import needs_all
from edgespec.llama.embeddings import CutVocabulary, Embeddings, check_target, read_cut
from edgespec.llama.gguf_header import check_model_file
from edgespec.llama.kernels import STOCK, KernelsChoice
from edgespec.llama.kernels import load as load_kernels
from edgespec.llama.prefixes import prefixes_of_pair
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.lossy.calibration import calibrated
from edgespec.lossy.cascade import Cascade, Ongoing, Waking
from edgespec.models.footprint import CTX_STEP, USUAL_CTX, fits_in_memory
from edgespec.models.pull import locate, resolve
from edgespec.models.registry import load_registry
from edgespec.platform.closing import Closing
from edgespec.platform.cpu import physical_cores
from edgespec.platform.signals import Cancellation
from edgespec.records import Result
from edgespec.sampling import Coins, SamplingParams
from edgespec.stream import Stream

DrafterName = Literal["auto", "tree", "chain", "model", "suffix", "staged", "none"]

_POLICIES: dict[DrafterName, Policy] = {
    # Sampled siblings are accepted too rarely for what a node costs: docs/scheduler.md has the figures.
    "auto": Policy(suffix=True, model=True, staged=True, siblings=False),
    "tree": Policy(suffix=True, model=True, staged=True),
    "chain": Policy(suffix=True, model=True, staged=True, branches=False),
    "model": Policy(suffix=False, model=True, staged=False),
    "suffix": Policy(suffix=True, model=False, staged=False),
    "staged": Policy(suffix=False, model=True, staged=True),
}

MAX_DRAFT_CTX = 2048
"""Tokens a draft looks back on at most: with more its prompt takes longer and is accepted little more."""

_LEADING = 32  # tokens of a text


class StreamOptions(TypedDict, total=False):
    """The keyword arguments of `Engine.stream` and `Engine.generate`."""

    params: SamplingParams | None
    seed: int | None
    n_predict: int | None
    drafter: DrafterName | None
    gamma: int | None
    rule: Rule | None
    stop: Sequence[str]
    system: str | None
    chat: bool | None
    on_step: Callable[[DraftStep], None] | None
    cascade: Waking | None
    lenience: float
    grammar: Grammar | None
    n_logprobs: int | None


class Engine(Closing):
    """Text from `target`, helped by `draft`, distributed exactly as `target`'s alone.

    Models are paths, registry names or `hf:OWNER/REPO/FILE.gguf`. What is not given comes from the
    registry's pairs: the default pair, or the draft that goes with the target.
    A context manager; `close` frees everything. Not for use by two threads at once.

        with Engine(target="7b.gguf", draft="tiny.gguf") as engine:
            print(engine.generate("Write a quicksort").text)
    """

    _small: Ongoing | None = None  # the draft model where it writes itself
    _cut: CutVocabulary | None = None  # of a draft that `edgespec draft make` made
    _vocabulary_map: VocabularyMap | None = None  # of a draft that has another one

    def __init__(
        self,
        target: str | Path | None = None,
        draft: str | Path | None = None,
        *,
        drafter: DrafterName = "auto",
        n_ctx: int | None = None,
        n_threads: int | None = None,
        kernels: KernelsChoice = "auto",
        objective: Objective = "latency",
        profile: bool = True,
        history: bool = False,
        meter: EnergyMeter | None = None,
        signals: Cancellation | None = None,
        prefix_cache: int | None = None,
        on_message: Callable[[str], None] = lambda _line: None,
    ) -> None:
        """Load the models; missing ones are pulled.

        `drafter` says what may draft: "auto" chooses online among all there is, "chain" the same
        without branches, "tree" with more of them (several tokens sampled for one position), "model",
        "suffix" (text seen before) and "staged" (the model, with the suffix store's guesses) force one,
        "none" decodes plainly. With "suffix" and "none" no draft model is loaded. `n_ctx`: context in
        tokens, by default as much as a generation needs. `n_threads`: by default one a physical core.
        `kernels`: "auto" uses edgespec's own where they can be used, "off" llama.cpp's. `objective`: what
        drafting is to save, time or joules. `profile`: begin with what is stored of this pair on this
        machine, and store what was learnt when closed. `history`: draft from earlier prompts and answers
        on disk, and add those of this engine (docs/cache.md). `meter`: counts the joules of each
        generation. `signals`: lets Ctrl-C, or another thread, end a pass under way. `prefix_cache`: 0
        keeps the last timeline, and reads of a prompt that goes on like it only what is new; more keeps
        others beside it, in so many bytes at most; None reads every prompt from its beginning.
        `on_message` takes lines that the user should know. Raises UsageError or EdgespecError: a model
        cannot be had, is not usable, or does not fit in memory.
        """
        for option, value, known in (
            ("drafter", drafter, DrafterName),
            ("kernels", kernels, KernelsChoice),
            ("objective", objective, Objective),
        ):
            if value not in get_args(known):
                raise UsageError(f"--{option} {value}: must be one of {', '.join(get_args(known))}")
        if objective == "energy" and not profile:
            raise UsageError("objective energy takes joules from the profile: leave out profile=False")
        if n_ctx is not None and n_ctx < 1:
            raise UsageError(f"--ctx {n_ctx}: must be 1 or more")
        if n_threads is not None and n_threads < 1:
            raise UsageError(f"--threads {n_threads}: must be 1 or more")
        self._n_ctx = n_ctx
        self.n_threads = n_threads or default_threads()
        self._signals = signals
        self.meter = meter
        """Counts the joules of each generation from the next on; None: nothing does."""
        self._stream: Stream | None = None
        self._prompt: str | Sequence[int] = ""  # of that stream
        self._target_session: Session | None = None
        self._prefixes, self._draft_prefixes = prefixes_of_pair(prefix_cache)
        self._drafter_name = drafter
        self._draft_model: DraftModel | None = None
        self._draft_is_stuck = False
        self.target_name, self.draft_name = choose_models(target, draft, drafter)
        names = [name for name in (self.target_name, self.draft_name) if name is not None]
        headers = [check_model_file(resolve(name)) for name in names]
        check_target(headers[0])
        if n_ctx is not None and n_ctx > headers[0].n_ctx_train:
            raise UsageError(
                f"--ctx {n_ctx}: {self.target_name} was trained for {headers[0].n_ctx_train} tokens"
            )
        fits_in_memory([(header, min(header.n_ctx_train, n_ctx or USUAL_CTX)) for header in headers])
        self._models: list[Model] = []
        self._closed = False
        self._on_message = on_message
        self._recollection = Recollection(
            headers[0], kept=history and drafter != "none", on_message=on_message
        )
        try:
            loaded = load_kernels() if kernels == "auto" else None
            if loaded and not loaded.available and not loaded.declined:
                on_message(f"stock kernels: {loaded.reason}")
            for header in headers:
                self._models.append(Model(header.path, kernels=kernels == "auto", header=header))
            packed = any(model.uses_kernels for model in self._models)
            self.kernels = loaded.name if loaded and packed else STOCK
            self.target = self._models[0]
            self.draft = self._models[1] if len(self._models) > 1 else None
            if self.draft is not None:
                self._check_draft(self.draft, on_message)
            self._knowledge = Knowledge(
                self.target,
                self.draft,
                kernels=self.kernels,
                n_threads=self.n_threads,
                objective=objective if drafter != "none" else "latency",
                kept=profile and drafter != "none",
                on_message=on_message,
            )
        except BaseException:
            self._free()
            raise

    def forget(self, *, tables: bool = False) -> None:
        """Forget the text of earlier generations and of the history; with `tables` also what was learnt."""
        self._end_stream(keep=False)
        self._recollection.ready().forget()
        for prefixes in (self._prefixes, self._draft_prefixes):
            if prefixes:
                prefixes.forget()
        if tables:
            self._knowledge.forget()

    def _check_draft(self, draft: Model, on_message: Callable[[str], None]) -> None:
        self._cut = read_cut(draft.header)
        stuck = [model.name for model in (self.target, draft) if not model.can_rewind]
        if stuck:
            what = "decoding plainly" if stuck[0] == self.target.name else "it does not draft"
            on_message(f"{stuck[0]} cannot take tokens back (recurrent or hybrid): {what}")
            draft.close()
            self._models.remove(draft)
            self.draft_name = self.draft = None
            self._draft_is_stuck = True
        elif not (match := compare_vocabularies(self.target, draft)).equal:
            if self._cut:
                raise EdgespecError(
                    f"{self.draft_name} cannot draft for {self.target_name}: {match.reason}; "
                    "choose the model that it was cut from"
                )
            self._vocabulary_map = map_vocabularies(self.target, draft)
            if not self._vocabulary_map.n_shared:
                raise EdgespecError(
                    f"{self.draft_name} cannot draft for {self.target_name}: no token is the same in both; "
                    "choose another draft, or --drafter none"
                )
            overlap = find_overlap(self.target, draft, self._vocabulary_map, suite_text())
            on_message(f"{self.draft_name} drafts in another vocabulary: {overlap.summary}")

    def prompt_tokens(self, prompt: str, *, system: str | None = None, chat: bool | None = None) -> list[int]:
        """Return the tokens of `prompt`, in the model's chat template where it has one.

        `chat` True or False forces or forbids the template; `system` is a system message and needs
        it. Raises UsageError for an impossible combination.
        """
        if chat is None:
            chat = self.target.chat_template is not None
        if not chat:
            if system is not None:
                raise UsageError(
                    "--system needs a chat template: leave out --raw, or use a model that has one"
                )
            return self.target.tokenize(prompt, add_special=True, parse_special=True)
        messages = [{"role": "user", "content": prompt}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        return self.target.tokenize_chat(messages)

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        params: SamplingParams | None = None,
        seed: int | None = None,
        n_predict: int | None = 256,
        drafter: DrafterName | None = None,
        gamma: int | None = None,
        rule: Rule | None = None,
        stop: Sequence[str] = (),
        system: str | None = None,
        chat: bool | None = None,
        on_step: Callable[[DraftStep], None] | None = None,
        cascade: Waking | None = None,
        lenience: float = 1.0,
        grammar: Grammar | None = None,
        n_logprobs: int | None = None,
    ) -> Stream:
        """Continue `prompt` (text, or token ids), a Token at a time.

        `n_predict`: most tokens, None for as many as the context holds. `drafter`: another one than the
        engine's, of the models it loaded. `gamma`: tokens drafted a step, None for the scheduler's
        choice. `rule`: by default "match" when a `seed` is given or nothing is random, which makes the
        text a function of the seed, else "block". `stop`: strings that end the text and are not part of
        it. `on_step` is told of every step of a drafter. An earlier stream of this engine is closed.
        Two modes are lossy: with `cascade` the draft model writes, and wakes the target where it is unsure;
        with `lenience` below 1 the target accepts more than its distribution allows (docs/cascade.md).
        `grammar`: what the text must match (docs/structured.md). `n_logprobs`: tokens come with the
        logarithm of the probability that the target alone gives them, unfiltered, and so many of its
        likeliest ones (0 to 20).
        Raises UsageError for bad values, EdgespecError for a prompt longer than the context.
        """
        called = time.perf_counter()
        if self._closed:
            raise UsageError("the engine is closed")
        stop = [stop] if isinstance(stop, str) else stop
        check_options(
            gamma=gamma,
            n_predict=n_predict,
            stop=stop,
            seed=seed,
            rule=rule,
            cascade=cascade,
            lenience=lenience,
            n_logprobs=n_logprobs,
        )
        params = params or SamplingParams()
        constraint = self._constraint(grammar, params, cascade)
        self._end_stream()
        self._prompt = prompt
        tokens = (
            self.prompt_tokens(prompt, system=system, chat=chat) if isinstance(prompt, str) else [*prompt]
        )
        if not tokens:
            raise UsageError("the prompt is empty")
        n_ctx = self._needed_ctx(len(tokens), n_predict)
        target = self._open_target(n_ctx)
        n_known = 0
        if self._prefixes and self.target.can_rewind and not cascade:
            n_known = self._prefixes.prepare(target, tokens)
        policy = self._policy(drafter or self._drafter_name, gamma)
        small = None
        if cascade:
            cascade = self._resolved(cascade)
            small = self._open_small(n_ctx)
            if policy and cascade.span != "rest":  # a store would take up the text anew for each span
                policy = replace(policy, suffix=False, model=True, staged=False)
        chain = None
        if policy:
            model = small or (self._open_draft(n_ctx, len(tokens), n_predict) if policy.model else None)
            chain = self._chain(
                policy, model, prompt, greedy=params.greedy, on_step=on_step, constraint=constraint
            )
        if lenience < 1.0:
            rule = "match" if params.greedy else "chain"
        elif rule is None:
            random = chain and not cascade and seed is None and not params.greedy
            # By the match rule a grammar judges only the rows of what is emitted.
            rule = "block" if random and not (constraint and needs_all(params)) else "match"
        seed = secrets.randbits(32) if seed is None else seed
        generation: Generation | Cascade
        if cascade and small:
            generation = Cascade(
                target,
                small,
                tokens,
                params=params,
                coins=Coins(seed),
                waking=cascade,
                drafter=chain,
                n_predict=n_predict,
                n_ctx=n_ctx,
            )
        else:
            generation = Generation(
                target,
                chain,
                tokens,
                params=params,
                coins=Coins(seed),
                rule=rule,
                n_predict=n_predict,
                n_ctx=n_ctx,
                lenience=lenience,
                n_known=n_known,
                n_logprobs=n_logprobs,
                constraint=constraint,
            )
        window = None
        if self.meter:
            began = time.perf_counter()
            window = self.meter.begin()
            generation.mark = window.mark
            called += time.perf_counter() - began  # its own time is not the generation's
        if self._signals:
            self._signals.drain()
        self._stream = Stream(
            generation,
            self.target,
            chain,
            stop=stop,
            # With the other rules the text depends on what was drafted, and that on the clock and on what
            # earlier runs learnt.
            seed=seed if (rule == "match" and lenience == 1.0) or not policy else None,
            called=called,
            names=(self.target_name, self.draft_name if cascade or (policy and policy.model) else None),
            kernels=self.kernels,
            window=window,
            mode="cascade" if cascade else "lenient" if lenience < 1.0 else "exact",
        )
        return self._stream

    def _constraint(
        self, grammar: Grammar | None, params: SamplingParams, cascade: Waking | None
    ) -> Constraint | None:
        if grammar is None:
            return None
        if cascade:
            raise UsageError(f"{grammar.name} and --mode cascade contradict each other: choose one")
        if grammar.model is not self.target:
            raise UsageError(f"{grammar.name}: made for another model than {self.target_name}")
        return grammar.begin(params)

    def _policy(self, drafter: DrafterName, gamma: int | None) -> Policy | None:
        """Return what may be drafted; None to decode plainly."""
        if drafter not in get_args(DrafterName):
            raise UsageError(f"--drafter {drafter}: must be one of {', '.join(get_args(DrafterName))}")
        if drafter == "none" or gamma == 0 or not self.target.can_rewind:
            return None
        policy = replace(_POLICIES[drafter], gamma=gamma)
        if policy.model and self.draft is None:
            if self._draft_is_stuck and not policy.suffix:
                return None
            if not policy.suffix:
                raise UsageError(f"--drafter {drafter}: no draft model was loaded")
            policy = replace(policy, model=False, staged=False)
        return policy

    def check_cascade(self) -> Model:
        """Return the draft model if it can write in a cascade. Raises UsageError where it cannot."""
        if self.draft is None:
            raise UsageError("a cascade needs a draft model, which writes: choose one with --draft")
        if self._cut:
            raise UsageError(
                f"{self.draft_name} has only a part of the vocabulary, and could not write the rest of it in "
                "a cascade: choose the model that it was cut from"
            )
        match = compare_vocabularies(self.target, self.draft)
        if not match.equal:
            raise UsageError(
                f"a cascade needs one vocabulary: {self.draft_name} has another than {self.target_name}; "
                "choose a draft of the target's family"
            )
        return self.draft

    def _resolved(self, cascade: Waking) -> Waking:
        """Return `cascade` with a threshold: its own, or the calibrated one of this pair.

        Raises UsageError where this pair cannot run in a cascade, or has not been calibrated.
        """
        draft = self.check_cascade()
        if cascade.threshold is not None:
            return cascade
        return calibrated(self.target.header, draft.header, cascade)

    def _chain(
        self,
        policy: Policy,
        model: DraftModel | None,
        prompt: str | Sequence[int],
        *,
        greedy: bool,
        on_step: Callable[[DraftStep], None] | None,
        constraint: Constraint | None,
    ) -> TreeDrafter:
        scheduler = self._knowledge.scheduler(greedy=greedy, prompt=prompt)
        scheduler.policy = policy
        clocks = self._knowledge.clocks
        return TreeDrafter(
            scheduler,
            suffix=self._recollection.ready(),
            model=model,
            is_eog=self.target.is_eog,
            clocks=(clocks.target, clocks.draft),
            on_step=on_step,
            constraint=constraint,
        )

    def _end_stream(self, *, keep: bool = True) -> None:
        """End the generation under way; keep what it wrote, unless it was kept before."""
        stream, self._stream = self._stream, None
        if stream is None:
            return
        stream.close()
        result = stream.result
        if result.stop_reason in ("eog", "stop", "length"):
            cut = result.stop_reason == "length"
            self._knowledge.answered(self._prompt, len(result.token_ids), cut=cut)
        if keep:
            # Of a conversation that goes on, what came before is kept already: but for what leads to the new.
            self._recollection.keep(stream.timeline[max(0, result.n_cached - _LEADING) :])

    def generate(self, prompt: str | Sequence[int], **options: Unpack[StreamOptions]) -> Result:
        """Continue `prompt` to the end and return the Result; arguments as for `stream`."""
        stream = self.stream(prompt, **options)
        for _ in stream:
            pass
        return stream.result

    def _needed_ctx(self, n_prompt: int, n_predict: int | None) -> int:
        """Return the context of a generation: as asked for, else as much as it needs."""
        n_ctx = self._n_ctx or _fitting_ctx(n_prompt, n_predict, self.target.n_ctx_train)
        if n_prompt >= n_ctx:
            limit = "--ctx" if self._n_ctx else f"what {self.target_name} was trained for"
            raise EdgespecError(
                f"the prompt has {n_prompt} tokens and does not fit in a context of {n_ctx} ({limit}); "
                "shorten it or choose a larger context"
            )
        return n_ctx

    def _open_target(self, n_ctx: int) -> Session:
        if self._target_session is None or self._target_session.n_ctx < n_ctx:
            if self._target_session:
                if self._prefixes:
                    self._prefixes.hold(self._target_session)
                self._target_session.close()
                self._target_session = None
            self._target_session = self._open(self.target, n_ctx)
        return self._target_session

    def _open_draft(self, n_ctx: int, n_prompt: int, n_predict: int | None) -> DraftModel | None:
        """The draft's context holds what this generation needs, and only the recent part of much."""
        if self.draft is None:
            return None
        n_ctx = min(n_ctx, _fitting_ctx(n_prompt, n_predict, self.draft.n_ctx_train), MAX_DRAFT_CTX)
        mapping = self._vocabulary_map
        if mapping:
            n_ctx = min(n_ctx, int(self.draft.n_ctx_train / ROOM_PER_TOKEN))
        if self._draft_model is None or self._draft_model.n_ctx < n_ctx:
            if self._draft_model:
                self._draft_model.hold()
                self._draft_model.close()
                self._draft_model = None
            if mapping:
                session = self._open(self.draft, math.ceil(n_ctx * ROOM_PER_TOKEN))
                self._draft_model = TranslatedDraft(session, self.target, mapping)
            else:
                session = self._open(self.draft, n_ctx)
                self._draft_model = DraftModel(session, n_vocab=self.target.n_vocab, cut=self._cut)
                self._draft_model.prefixes = self._draft_prefixes
        return self._draft_model

    def _open_small(self, n_ctx: int) -> Ongoing:
        """The draft's context holds all of a generation that it writes, and what it drafts for a span."""
        assert self.draft is not None  # noqa: S101 - for the type checker: `_resolved` has looked
        n_ctx = min(n_ctx + CTX_STEP, self.draft.n_ctx_train)
        if self._small is None or self._small.n_ctx < n_ctx:
            if self._small:
                self._small.close()
                self._small = None
            session = self._open(self.draft, n_ctx)
            self._small = Ongoing(session, n_vocab=self.target.n_vocab, cut=self._cut)
        return self._small

    def _open(self, model: Model, n_ctx: int) -> Session:
        fits_in_memory([(model.header, n_ctx)], weights_loaded=True)
        interrupt = self._signals.interrupt if self._signals else None
        return Session(
            model,
            n_ctx=n_ctx,
            n_threads=self.n_threads,
            n_logits_max=MAX_GAMMA + 1,
            embeddings=Embeddings(self._cut) if self._cut and model is self.draft else None,
            abort_callback=interrupt.callback if interrupt else 0,
            abort_data=interrupt.data if interrupt else 0,
        )

    def close(self) -> None:
        """Keep what was learnt and free models and sessions; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._end_stream()
            self._knowledge.store(self._on_message)
            self._free()

    def _free(self) -> None:
        for model in self._models:
            model.close()


def check_options(
    *,
    gamma: int | None,
    n_predict: int | None,
    stop: Sequence[str],
    seed: int | None,
    rule: str | None,
    cascade: Waking | None = None,
    lenience: float = 1.0,
    n_logprobs: int | None = None,
) -> None:
    """Raise UsageError for values that `Engine.stream` refuses, before anything is loaded."""
    if gamma is not None and not 0 <= gamma <= MAX_GAMMA:
        raise UsageError(f"--gamma {gamma}: must be 0 to {MAX_GAMMA}")
    if n_predict is not None and n_predict < 1:
        raise UsageError(f"--n-predict {n_predict}: must be 1 or more, or -1 for no limit")
    if "" in stop:
        raise UsageError("--stop: an empty string would stop at once")
    if seed is not None and not 0 <= seed < 1 << 64:
        raise UsageError(f"--seed {seed}: must be 0 to 2^64 - 1")
    if rule is not None and rule not in get_args(Rule):
        raise UsageError(f"--rule {rule}: must be one of {', '.join(get_args(Rule))}")
    if n_logprobs is not None and not 0 <= n_logprobs <= MAX_LOGPROBS:
        raise UsageError(f"n_logprobs {n_logprobs}: must be 0 to {MAX_LOGPROBS}")
    check_lenience(lenience)
    if lenience < 1.0 and rule not in (None, "chain"):
        raise UsageError(f"--rule {rule}: knows no --lenience; leave it out")
    if cascade:
        cascade.check()
        if lenience < 1.0:
            raise UsageError("--lenience and --mode cascade contradict each other: choose one")
        if rule not in (None, "match"):
            raise UsageError(f"--rule {rule}: a cascade's target writes by the match rule; leave it out")


def choose_models(
    target: str | Path | None, draft: str | Path | None, drafter: DrafterName = "auto"
) -> tuple[str, str | None]:
    """Return the names of target and draft (None: no drafting), as given or from the registry's pairs.

    Raises UsageError when a draft is wanted but no pair names one for this target.
    """
    chosen, partner = load_registry().complete(
        None if target is None else str(target), None if draft is None else str(draft)
    )
    if drafter in ("none", "suffix"):
        return chosen, None
    if partner is None and drafter != "auto":
        locate(chosen)  # a mistyped name is the likelier mistake
        raise UsageError(f"no draft is known for {chosen}: give one with --draft, or --drafter none")
    return chosen, partner


def _fitting_ctx(n_prompt: int, n_predict: int | None, n_ctx_train: int) -> int:
    """Return the smallest context that holds a generation; room for 4,096 tokens if it has no limit."""
    n_tokens = n_prompt + (n_predict or 4096) + 1
    return min(n_ctx_train, -(-n_tokens // CTX_STEP) * CTX_STEP)


def default_threads() -> int:
    """Return the number of threads that decoding gains from: one for each physical core it may use."""
    return physical_cores()
