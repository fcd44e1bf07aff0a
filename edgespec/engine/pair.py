"""A target and its draft: chosen, checked, loaded, and opened as sessions."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import msgspec

from edgespec._core import Interrupt
from edgespec.decoding.choices import DrafterChoice, DrafterName, NamedDrafter, Rule
from edgespec.decoding.constraint import Constraint, ThoughtConstraint, ThoughtLimit
from edgespec.decoding.generate import Task
from edgespec.decoding.option_table import MAX_GAMMA
from edgespec.decoding.options import Options, WakePolicy
from edgespec.decoding.records import Mode
from edgespec.decoding.sampling import Coins
from edgespec.drafting.draft import check_target, find_draft
from edgespec.drafting.draft_model import DraftModel
from edgespec.drafting.draft_search import DraftSearch
from edgespec.drafting.pace import Policy
from edgespec.engine.capacity import (
    DRAFT_CELLS,
    DRAFT_SHARE,
    Capacity,
    check_cache,
    choose_cache_type,
    choose_capacity,
    fitting_ctx,
    kept_cells,
    kept_sequences,
    room_without_limit,
)
from edgespec.engine.cascade import SmallModel, calibrated
from edgespec.engine.model_choice import ChosenModels, adapters_of, choose_refs
from edgespec.engine.options import EngineOptions
from edgespec.errors import EdgespecError, MessageFn, UsageError, describe_os_error
from edgespec.llama.adapters import load_adapters
from edgespec.llama.cache_types import with_cache_type
from edgespec.llama.chat_template import check_chat_template
from edgespec.llama.choices import AdapterSet
from edgespec.llama.gguf_header import GGUFHeader
from edgespec.llama.kernels import STOCK
from edgespec.llama.kernels import load as load_kernels
from edgespec.llama.kv_cache import MAX_SEQUENCES_OPEN, KVCache, KVCacheSize
from edgespec.llama.prompt_states import PromptStates, StateFolder, model_key
from edgespec.llama.rollback import RollbackSize
from edgespec.llama.rpc import USUAL_CELLS, RemoteLayers
from edgespec.llama.sequence_pool import SequencePool
from edgespec.llama.weights import Model
from edgespec.models.footprint import (
    CTX_STEP,
    MAX_DRAFT_CTX,
    USUAL_CTX,
    draft_rollback,
    target_rollback,
)
from edgespec.models.resolve import model_header
from edgespec.models.store import sha256_of
from edgespec.platform.closing import Closing
from edgespec.platform.machine import available_bytes, default_threads
from edgespec.platform.plugins import OWN_HEADS, offered
from edgespec.platform.turns import IdleTime

# ---- the pair ----


_ROWS = 64  # rows of logits in a pass for several texts


class Pair(Closing):
    """A target and perhaps a draft model: chosen and checked when made, loaded by `load`.

    Caches are kept between generations; one that is too small is replaced by a larger one.
    """

    target: Model
    kernels: str = STOCK
    """The name of the kernels that the models run on, and of the cache's type if it is not F16."""

    def __init__(self, options: EngineOptions, drafter: DrafterChoice) -> None:
        """Choose the models with `choose_refs` unless that was done, pull missing ones, check that they fit.

        Raises UsageError or EdgespecError if a model is unavailable, cannot be used or does not fit.
        """
        self.options, self.drafter = options, drafter
        self.n_threads = options.n_threads or default_threads()
        self.capacity = Capacity(1, options.n_cells, 0)
        """The capacity, once `choose_capacity` has decided it."""
        target, n_ctx, tell = options.target, options.n_ctx, options.on_message
        chosen = target if isinstance(target, ChosenModels) else choose_refs(target, options.draft, drafter)
        self.target_name = chosen.target.name
        header = model_header(chosen.target)
        if n_ctx is not None and n_ctx > header.n_ctx_train:
            problem = f"{self.target_name} was trained for {header.n_ctx_train} tokens"
            raise UsageError(problem, field="n_ctx", value=n_ctx)
        check_target(header)
        self.adapters = adapters_of(chosen.target, options.lora)
        """The target's LoRA adapters, with the scales that a text gets if it asks for no others."""
        if self.adapters and options.rpc:
            raise UsageError("layers on nodes have no adapters: choose one", field="lora")
        n_tokens = _asked_tokens(options, header)
        self.target_header = (
            choose_cache_type(header, None, "auto", n_tokens)
            if options.cache_type == "auto"
            else with_cache_type(header, options.cache_type)
        )
        """The header of the target's file."""
        if options.chat_template is not None:
            check_chat_template(options.chat_template, self.target_header.gguf.fields)
        search = DraftSearch(
            self.target_name, self.target_header, options.kernels == "auto", self.n_threads, n_ctx, tell
        )
        self.draft = find_draft(search, chosen.draft, drafter)
        """The draft, besides the suffix store; `load` may replace it."""
        self._remote: RemoteLayers | None = None
        if not options.rpc:  # with them: once it is known what they hold
            own = self.draft.header
            self.target_header = choose_cache_type(header, own, options.cache_type, n_tokens)
        if options.cache_type == "auto":
            self._settle_cache_type(n_tokens)
        self._models: list[Model] = []
        self.idle = IdleTime()
        """Told of the texts under way."""
        self._states: StateFolder | None = None
        self._sequences: SequencePool | None = None
        self._draft_sequences: SequencePool | None = None
        self._idle_drafts: list[DraftModel] = []
        self._small: SmallModel | None = None

    def _settle_cache_type(self, n_tokens: int) -> None:
        """Replace "auto" by the chosen type, for a cache of the tokens that were asked for."""
        cache_type, options = self.target_header.cache_type, self.options
        shared = n_tokens if options.n_ctx and (options.parallel or 1) > 1 else options.n_cells
        self.options = replace(options, cache_type=cache_type, n_cells=shared)
        self.capacity = msgspec.structs.replace(self.capacity, n_cells=shared)
        fits = f"the most exact safe type in which {n_tokens:,} tokens fit in memory"
        options.on_message(f"{self.target_name}: cache in {cache_type}, {fits}")

    @property
    def models(self) -> Sequence[Model]:
        """The models that are loaded, the target first."""
        return self._models

    @property
    def rollback(self) -> RollbackSize:
        """The room that the target's cache reserves for rewinding drafts."""
        return target_rollback(self.target_header, parallel=self.parallel, drafts=self.drafter != "none")

    def load(self) -> None:
        """Load the models."""
        try:
            self._load(self.options.on_message)
        except BaseException:
            self.close()
            raise

    def _load(self, on_message: MessageFn) -> None:
        self._available = available_bytes()
        own_kernels = self.options.kernels == "auto"
        loaded = load_kernels() if own_kernels else None
        if loaded and not loaded.available and not loaded.declined:
            on_message(f"stock kernels: {loaded.reason}")
        self._connect()
        self.target = self.draft.load_target(self.target_header, kernels=own_kernels, remote=self._remote)
        self._models.append(self.target)
        self.target.is_checked_later = True
        header, packed = self.target.header, {one.name for one in self.target.packed}
        self.target.adapters = load_adapters(self.target.handle, header, packed, self.adapters)
        draft = self.draft.load(self.target, kernels=own_kernels, n_threads=self.n_threads)
        if draft:
            self._models.append(draft)
            draft.is_checked_later = True
        if self.options.keep_packed:
            for model in self._models:
                model.keep_packed(self._interrupt, on_message, self.idle)
        if loaded and any(model.uses_kernels for model in self._models):
            self.kernels = loaded.name
        if self.options.chat_template is not None:
            self.target.use_chat_template(self.options.chat_template)
        if self.options.cache_type != "f16":  # a pass costs something else then
            self.kernels += f", {self.options.cache_type} cache"
        if self._remote:
            n_layers = self._remote.n_layers
            self.kernels += f", {n_layers} of {self.target_header.n_layer} layers on nodes"
        if (self.options.parallel or 1) > 1 and not self.target.can_rewind:
            on_message(f"{self.target.name} cannot take tokens back: one text at a time")
        self.draft = self.draft.bind(on_message)
        if self.options.states and not self.target.can_rewind:
            on_message(f"{self.target.name} cannot take tokens back: no states of prompts are kept")
        elif self.options.states:
            self._states = StateFolder(self.options.states, on_message)

    def _connect(self) -> None:
        """Connect to the nodes of `options`, if there are any, and give them layers of the target."""
        if self.options.rpc:
            self._remote = RemoteLayers(self.options.rpc, self.target_header, self._remote_cells)
            self.draft = self.draft.without_layers(self.drafter)

    @property
    def _remote_cells(self) -> int:
        options, most = self.options, self.target_header.n_ctx_train
        return options.n_cells or options.n_ctx or min(most, USUAL_CELLS)

    @property
    def _interrupt(self) -> Interrupt | None:
        return self.options.signals.interrupt if self.options.signals else None

    def _footprint(self, model: Model) -> GGUFHeader:
        return self._remote.home if self._remote and model is self.target else model.header

    @property
    def parallel(self) -> int:
        """Most requests at once."""
        return self.capacity.parallel

    def choose_capacity(self, costs: Sequence[float]) -> None:
        """Decide the capacity, before the first request; `costs`: T(0), T(1) .. of the target."""
        options = self.options
        options = replace(
            options,
            parallel=options.parallel if self.target.can_rewind else 1,
            n_cells=self._remote_cells if self._remote else options.n_cells,
        )
        draft = self.draft.model.header if self.draft.model else None
        target = self._footprint(self.target)
        self.capacity = choose_capacity(costs, target, draft, options, self._available)

    def needed_ctx(self, n_prompt: int, n_predict: int | None) -> int:
        """Return the context for a generation: `options.n_ctx`, else as much as it needs.

        Raises EdgespecError if the prompt does not fit.
        """
        asked = self.options.n_ctx
        n_ctx = self.n_ctx_shared or asked or self._fitting_ctx(n_prompt, n_predict)
        if n_prompt < n_ctx:
            return n_ctx
        problem = f"the prompt has {n_prompt} tokens and does not fit in a context of {n_ctx}"
        if self.n_ctx_shared and n_ctx < self.target.n_ctx_train:
            raise EdgespecError(f"{problem}; shorten it, or give the texts a larger cache")
        if asked:
            raise EdgespecError(f"{problem}; shorten it or choose a larger one", field="n_ctx", value=asked)
        raise EdgespecError(f"{problem}, what {self.target_name} was trained for; shorten it")

    def _fitting_ctx(self, n_prompt: int, n_predict: int | None) -> int:
        if n_predict is None:
            n_predict = room_without_limit(self._footprint(self.target), n_prompt)
        return fitting_ctx(n_prompt, n_predict, self.target.n_ctx_train)

    @property
    def n_ctx_shared(self) -> int | None:
        """The context of each request, if the cache's size was decided beforehand; else None."""
        cells = self.capacity.n_cells
        return None if cells is None else min(cells, self.options.n_ctx or self.target.n_ctx_train)

    def sequences(self, n_ctx: int) -> SequencePool:
        """Return the target's sequences, each with a context of at least `n_ctx` tokens."""
        if self._sequences is None or self._sequences.n_ctx < n_ctx:
            cells = self.capacity.n_cells or n_ctx + self._kept_cells(self.target, 1.0 - DRAFT_SHARE)
            if self.draft.in_target_cache:
                self._idle_drafts.clear()
                self.draft.use_cache(None)
            smaller, self._sequences = self._sequences, None
            self._sequences = self._replaced(smaller, self.target, cells, n_ctx)
        return self._sequences

    def _kept_cells(self, model: Model, share: float) -> int:
        return kept_cells(model.header, share * (self.options.prefix_cache or 0))

    def _replaced(self, smaller: SequencePool | None, model: Model, cells: int, n_ctx: int) -> SequencePool:
        """Open a cache of `cells` tokens; move the last prefix there from a `smaller` one and close that."""
        parallel, prefix_cache = self.parallel, self.options.prefix_cache
        rollback = self.rollback if model is self.target else draft_rollback()
        n_kept = kept_sequences(model.header, parallel, prefix_cache or 0, rollback)
        n_kept = min(n_kept, MAX_SEQUENCES_OPEN - parallel)
        n_sequences = parallel + n_kept
        size = KVCacheSize(
            n_ctx=cells,
            n_batch=model.most_batch,
            n_logits_max=MAX_GAMMA + 1 if parallel == 1 else max(_ROWS, 2 * parallel),
            n_sequences=n_sequences if model.can_rewind else 1,
            rollback=msgspec.structs.replace(rollback, n_kept=n_kept),
        )
        kept = smaller.last() if smaller else None
        if smaller:
            smaller.close()
        cache = self._cache(model, size)
        if model is self.target:
            self.draft.use_cache(cache)
        larger = SequencePool(
            cache,
            n_ctx=n_ctx,
            reserved=parallel * n_ctx if model is self.draft.model else 0,
            keeps=self.options.prefix_cache is not None,
            states=self._states_of(cache) if model is self.target else None,
        )
        if kept:
            larger.adopt(kept)
        return larger

    def _states_of(self, cache: KVCache) -> PromptStates | None:
        """Return the states on disk of the target's sequences, if they are kept.

        A file that was not pulled is read the first time, for its hash.
        """
        if not self._states:
            return None
        try:
            sha256 = sha256_of(self.target.path)
        except OSError as error:
            self._states.warn_once(f"states of prompts are not kept: {describe_os_error(error)}")
            return None
        key = model_key(self.target, sha256, n_ctx=cache.n_ctx, n_threads=self.n_threads)
        if not key:
            self._states.warn_once("states of prompts are not kept: it is not known which kernels wrote them")
            return None
        return PromptStates(self._states, key, cache)

    def adapter_set(self, scales: Mapping[int, float] | None) -> AdapterSet:
        """Return the adapters of a text that asks for these scales (None: for none). Raises UsageError."""
        if scales is None:
            scales = {number: scale for number, (_, scale) in enumerate(self.adapters)}
        return self.target.adapters.set_of(scales)

    def begin_draft(self, n_ctx: int, n_prompt: int, n_predict: int | None) -> DraftModel | None:
        """Return a draft model for a generation, until `end_draft`; or None.

        Its context holds what the generation needs, or only the recent part of a long one.
        """
        draft = self.draft.model
        if draft is None:
            return None
        if self.draft.in_target_cache:
            return self._idle_drafts.pop() if self._idle_drafts else self.draft.open(self.sequences(n_ctx))
        parallel, n_train = self.parallel, draft.n_ctx_train
        if parallel > 1:
            n_ctx = min(DRAFT_CELLS, n_train)
        else:
            needed = n_ctx if n_predict is None else fitting_ctx(n_prompt, n_predict, n_train)
            n_ctx = min(n_ctx, needed, n_train, MAX_DRAFT_CTX)
        n_own = self.draft.n_own(n_ctx)
        if self._draft_sequences is None or self._draft_sequences.n_ctx < n_own:
            self._idle_drafts.clear()
            cells = parallel * n_own + self._kept_cells(draft, DRAFT_SHARE)
            smaller, self._draft_sequences = self._draft_sequences, None
            self._draft_sequences = self._replaced(smaller, draft, cells, n_own)
        return self._idle_drafts.pop() if self._idle_drafts else self.draft.open(self._draft_sequences)

    def end_draft(self, model: DraftModel) -> None:
        """Release a draft model for the next generation."""
        model.rest()
        self._idle_drafts.append(model)

    def small_model(self, n_ctx: int) -> SmallModel:
        """Return the draft model as a cascade's writer.

        Its context holds all that it writes, and its drafts for a span of the target.
        """
        draft = self.draft.writer()
        n_ctx = min(n_ctx + CTX_STEP, draft.n_ctx_train)
        if self._small is None or self._small.n_ctx < n_ctx:
            self._small = None
            size = KVCacheSize(n_ctx=n_ctx, n_logits_max=MAX_GAMMA + 1, rollback=draft_rollback())
            cache = self._cache(draft, size)
            self._small = SmallModel(SequencePool(cache).begin([0]), n_vocab=self.target.n_vocab)
        return self._small

    def _cache(self, model: Model, size: KVCacheSize) -> KVCache:
        is_draft = model is self.draft.model
        keeps = self.options.prefix_cache is not None
        check_cache(self._footprint(model), size, keeps=keeps, is_draft=is_draft)
        return KVCache(
            model,
            size,
            n_threads=self.n_threads,
            takes_inputs=self.draft.reads_states and is_draft,
            interrupt=self._interrupt,
        )

    def forget(self, but: Sequence[int] = ()) -> None:
        """Empty the prefix caches, but keep the prefix `but` in the target's."""
        if self._sequences:
            self._sequences.forget(but)
        if self._draft_sequences:
            self._draft_sequences.forget()

    def close(self) -> None:
        """Free models and sessions; a second call does nothing."""
        states, self._states = self._states, None
        with ExitStack() as stack:  # the last one first, each whatever the others raise
            for model in reversed(self._models):
                stack.callback(model.close)
            stack.callback(self.draft.use_cache, None)
            if states and self._sequences:
                self._sequences.close()


# ---- the plan of a generation: what its options leave open ----


_POLICIES: dict[DrafterName, Policy] = {
    # Sampled siblings are accepted too rarely to be worth their cost: docs/measurements/drafts.md.
    "auto": Policy(suffix=True, model=True, staged=True, siblings=False),
    "tree": Policy(suffix=True, model=True, staged=True),
    "chain": Policy(suffix=True, model=True, staged=True, branches=False),
    "model": Policy(suffix=False, model=True, staged=False),
    "suffix": Policy(suffix=True, model=False, staged=False),
    "staged": Policy(suffix=False, model=True, staged=True),
}

_CONCLUSION = "\n\nI have thought about this for long enough, and answer now.\n"
"""Last words of a thought that is ended at its budget."""


class Plan(Task, frozen=True, kw_only=True):
    """The task of a generation, and the policy of its drafts."""

    adapters: AdapterSet = ()
    """The adapters of the target."""
    policy: Policy | None
    """None to decode plainly."""
    plugin: NamedDrafter | None = None
    """The user's own drafter, which drafts alone; the policy is then that of the suffix store."""

    @property
    def mode(self) -> Mode:
        """Whether the text is the target's own, and if not, why."""
        return "cascade" if self.options.cascade else "lenient" if self.options.lenience < 1.0 else "exact"

    @property
    def uses_model(self) -> bool:
        """Whether the draft model is used."""
        return self.options.cascade is not None or (self.policy is not None and self.policy.model)

    @property
    def is_reproducible(self) -> bool:
        """Whether the seed alone decides the text.

        Without the match rule, or with a lenience below 1, the text depends on the drafts, and so on timing
        and on learned statistics.
        """
        return self.policy is None or (self.rule == "match" and self.options.lenience == 1.0)


def make_plan(pair: Pair, options: Options, prompt: Sequence[int]) -> Plan:
    """Make the decisions that `options` leave open. Raises UsageError if this pair cannot do as asked."""
    if options.cascade:
        options = replace(options, cascade=_resolved(pair, options.cascade))
    options = replace(options, drafter=options.drafter or pair.drafter)
    drafter = _drafter(pair, options)
    plugin = drafter if isinstance(drafter, NamedDrafter) else None
    policy = _policy(pair, options, "suffix" if isinstance(drafter, NamedDrafter) else drafter)
    return Plan(
        options=options,
        adapters=pair.adapter_set(options.lora),
        coins=Coins(secrets.randbits(32) if options.seed is None else options.seed),
        rule=_rule(options, drafts=policy is not None),
        constraint=_constraint(pair, options, prompt),
        policy=policy,
        plugin=plugin,
    )


def _constraint(pair: Pair, options: Options, prompt: Sequence[int]) -> Constraint | None:
    grammar = options.grammar
    if grammar and grammar.model is not pair.target:
        problem = f"made for another model than {pair.target_name}"
        raise UsageError(problem, field=grammar.name)
    limit = _thought_limit(pair.target, options.reasoning_budget, prompt)
    if limit is None:
        return grammar.begin(options.params) if grammar else None
    banned = options.params.banned
    if not set(limit.end).isdisjoint(banned):
        problem = "the logit bias forbids a token that ends a thought: choose one"
        raise UsageError(problem, field="reasoning_budget")
    if grammar is None:
        return ThoughtConstraint(limit, pair.target)
    return ThoughtConstraint(limit, pair.target, grammar.matcher, banned=banned, name=grammar.name)


def _thought_limit(model: Model, budget: int, prompt: Sequence[int]) -> ThoughtLimit | None:
    """Return the limit of a thought after `prompt`; None for no limit, or a model that has no thoughts."""
    markers = model.template().thinking if budget >= 0 and model.chat_template is not None else None
    if markers is None:
        return None
    opener, closer = markers
    end = f"{_CONCLUSION if budget else ''}{closer}"
    return ThoughtLimit(
        budget=budget,
        opener=opener.encode(),
        closer=closer.encode(),
        end=tuple(model.tokenize(end, add_special=False, parse_special=True)),
        begun=_ends_in_thought(model, prompt, opener.encode(), closer.encode()),
    )


def _ends_in_thought(model: Model, prompt: Sequence[int], opener: bytes, closer: bytes) -> bool:
    """Whether a thought is open in the last message, after the last control token that is not a marker."""
    pieces: list[bytes] = []
    for token in reversed(prompt):
        piece = model.piece(token, special=True)
        if model.is_control(token) and piece not in opener and piece not in closer:
            break
        pieces.append(piece)
    text = b"".join(reversed(pieces))
    return text.rfind(opener) > text.rfind(closer)


def _asked_tokens(options: EngineOptions, header: GGUFHeader) -> int:
    """Return how many tokens must fit in memory: those of one request, for "auto" those of all requests."""
    n_tokens = min(header.n_ctx_train, options.n_ctx or USUAL_CTX)
    if options.cache_type != "auto":
        return n_tokens
    return options.n_cells or n_tokens * (options.parallel or 1)


def _resolved(pair: Pair, cascade: WakePolicy) -> WakePolicy:
    """Return `cascade` with a threshold: its own, or the one calibrated for this pair."""
    draft = pair.draft.writer()
    return cascade if cascade.threshold is not None else calibrated(pair.target.header, draft.header, cascade)


def _drafter(pair: Pair, options: Options) -> DrafterChoice:
    """Return the drafter of this text, "none" to decode plainly. Raises UsageError."""
    drafter = options.drafter or pair.drafter
    if options.gamma == 0 or options.prompt_logprobs or not pair.target.can_rewind:
        return "none"
    if isinstance(drafter, NamedDrafter):
        if options.gamma is not None:
            problem = f"{drafter} chooses itself how much it drafts"
            raise UsageError(problem, field="gamma", value=options.gamma)
        if options.cascade:
            raise UsageError("contradicts a cascade: choose one", field="drafter", value=drafter)
    return drafter


def _policy(pair: Pair, options: Options, name: DrafterName) -> Policy | None:
    """Return the policy of drafts; None to decode plainly."""
    if name == "none":
        return None
    if name in offered(OWN_HEADS) and pair.draft.name != name:
        problem = "no head in the target's own file was loaded: its file has none, or another draft was given"
        raise UsageError(problem, field="drafter", value=name)
    policy = pair.draft.restrict(_POLICIES.get(name, _POLICIES["model"]), name)
    if policy is None:
        return None
    if pair.target.keeps_state:
        rereads = pair.rollback.n_snapshots == 0
        policy = replace(policy, branches=False, siblings=False, rereads=rereads, splits=True)
    if options.cascade and options.cascade.span != "rest":
        # No suffix store: it would have to read the text again for each span.
        policy = replace(policy, suffix=False, model=True, staged=False)
    return policy


def _rule(options: Options, *, drafts: bool) -> Rule:
    if options.lenience < 1.0:
        return "match" if options.params.greedy else "chain"
    if options.rule:
        return options.rule
    if options.cascade or options.seed is not None or options.params.greedy or not drafts:
        return "match"
    return "block"
