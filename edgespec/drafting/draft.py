"""Drafts of a target, besides the suffix store: nothing, a model of its vocabulary, or of another one.

    NoDraft           nothing
    PlainDraft        a model of the target's vocabulary
    TranslatedDraft   a model of another vocabulary
    HeadDraft         a head in a file that edgespec made
    EagleDraft        a head that was published in a file of its own (EAGLE-3, EAGLE-3.1)
    BlockDraft        one that drafts a block of tokens in a pass (DFlash, DSpark, DFlash 2)
    GemmaDraft        one that works in the target's own cache (Gemma 4)
    MtpDraft          the head in the target's own file

`find_draft` chooses the kind by the files' headers. Then the models are loaded
(`load_target`, `load`), and `bind` returns the draft that is used: of the same kind, another one, or none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from edgespec.decoding.choices import DrafterChoice, DrafterName, is_draftless
from edgespec.decoding.session import (
    Features,
    Forward,
    ForwardResult,
    Inputs,
    ModelSession,
    TargetFeatures,
    n_common,
)
from edgespec.drafting.draft_model import DraftModel, WindowedModel
from edgespec.drafting.foreign.translated_model import ROOM_PER_TOKEN, TranslatedModel
from edgespec.drafting.foreign.vocabulary_map import VocabularyMap, map_vocabularies
from edgespec.drafting.foreign.vocabulary_match import vocabulary_difference
from edgespec.drafting.head_model import HeadModel
from edgespec.drafting.pace import Policy
from edgespec.drafting.profile import N_MAX, CostCurve, block_curve
from edgespec.errors import EdgespecError, MessageFn, UsageError, describe_os_error
from edgespec.llama.block_rows import PlainRows, rows_maker
from edgespec.llama.gguf_header import GGUFHeader, check_model_file, read_header
from edgespec.llama.head_file import (
    BlockHead,
    EagleHead,
    Fusion,
    GemmaHead,
    HeadFile,
    LayersTarget,
    TargetEmbeddings,
    check_published_head,
    read_head,
)
from edgespec.llama.head_kinds import DFLASH, EAGLE, GEMMA
from edgespec.llama.kv_cache import KVCache
from edgespec.llama.lent_cache import LentCache, LentSession
from edgespec.llama.mtp import MtpHead, MtpTarget, why_no_mtp
from edgespec.llama.rpc import RemoteLayers
from edgespec.llama.sequence_pool import SequencePool
from edgespec.llama.session import EmbeddingsFn, Session
from edgespec.llama.weights import Model
from edgespec.models.draft_records import paired_draft
from edgespec.models.resolve import ModelRef, named_as, resolve
from edgespec.models.store import sha256_of
from edgespec.platform.closing import Closing

if TYPE_CHECKING:
    from edgespec.drafting.draft_search import DraftSearch


class Draft(Closing):
    """A draft of one target, from its file to its sessions. A context manager, which closes its model."""

    name: str | None = None
    """The draft as it was given, or its name in the registry."""
    header: GGUFHeader | None = None
    """The header of its file; None without a file of its own."""
    reads_states = False
    """Whether it is a head, which reads the target's hidden states."""
    is_mtp = False
    """Whether it is the head in the target's own file."""
    in_target_cache = False
    """Whether it works in the target's cache: `open` then takes the target's sequences."""
    model: Model | None = None
    """Its model, once it is loaded."""
    trained_for: str | None = None
    """SHA-256 of the target's file, where a training on rejected places can make a better one of it."""
    target: Model

    def __init__(self, target_name: str) -> None:
        """Draft for the target of that name."""
        self.target_name = target_name

    # ---- loading ----

    def without_layers(self) -> Draft:
        """Return the draft to use where layers of the target lie on nodes. Raises UsageError if none can."""
        return self

    def load_target(self, header: GGUFHeader, *, kernels: bool, remote: RemoteLayers | None) -> Model:
        """Load the target, so that it gives what the draft reads of it."""
        return Model(header.path, kernels=kernels, header=header, remote=remote)

    def load(self, target: Model, *, kernels: bool, n_threads: int) -> Model | None:
        """Load the draft's model and return it; None if nothing but the suffix store drafts."""
        self.target = target
        self.model = self._load(kernels=kernels, n_threads=n_threads)
        return self.model

    def _load(self, *, kernels: bool, n_threads: int) -> Model | None:
        return Model(self.header.path, kernels=kernels, header=self.header) if self.header else None

    def bind(self, on_message: MessageFn) -> Draft:
        """Return the draft to use, once both models are loaded; `on_message` takes lines for the user.

        Raises EdgespecError or UsageError if it cannot draft for this target.
        """
        assert self.model  # noqa: S101 - for the type checker
        stuck = [model.name for model in (self.target, self.model) if not model.can_rewind]
        if not stuck:
            return self._match(self.model, on_message)
        what = "decoding plainly" if stuck[0] == self.target.name else "it does not draft"
        on_message(f"{stuck[0]} cannot take tokens back: {what}")
        self.close()
        return StuckDraft(self.target_name)

    def _match(self, model: Model, on_message: MessageFn) -> Draft:
        return self

    # ---- what it can do ----

    def restrict(self, policy: Policy, drafter: DrafterName) -> Policy | None:
        """Return `policy` without what this draft cannot do; None to decode plainly.

        Raises UsageError if the `drafter` that the user chose is impossible with it.
        """
        if policy.model and self.model and self.model.keeps_state:
            return replace(policy, staged=False)  # a wrong guess would take all of its pass with it
        return policy

    def writer(self) -> Model:
        """Return its model, if that can write alone in a cascade, else raise UsageError."""
        raise UsageError("a cascade needs a draft model, which writes: choose a draft")

    # ---- running ----

    def n_own(self, n_ctx: int) -> int:
        """Return how many of its own tokens `n_ctx` tokens of the target are."""
        return n_ctx

    def open(self, sequences: SequencePool) -> DraftModel:
        """Return the draft model of one generation, which reads and writes in a sequence of `sequences`."""
        raise NotImplementedError

    def enter(self, cache: KVCache) -> None:
        """Take note of the target's new cache, with nothing in it yet."""

    def leave(self) -> None:
        """Take note that the target's cache is going to be closed."""

    @property
    def timed_inputs(self) -> EmbeddingsFn | None:
        """Maker of the rows that a timed pass takes in place of tokens; None: it takes tokens.

        Costs do not depend on their values.
        """
        return None

    def costs(self, curve: CostCurve) -> CostCurve:
        """Return the costs of drafting, for a `curve` of single passes."""
        return curve

    def close(self) -> None:
        """Free the model; a second call does nothing."""
        if self.model:
            self.model.close()


class NoDraft(Draft):
    """No draft model: only the suffix store drafts."""

    def __init__(self, target_name: str, reason: str = "") -> None:
        """`reason`: why the head in the target's file does not draft, if there is one."""
        super().__init__(target_name)
        self._reason = reason

    def bind(self, on_message: MessageFn) -> Draft:
        """Return itself, and tell why no head drafts."""
        if self._reason:
            on_message(f"nothing but text seen before drafts: {self._reason}")
        return self

    def restrict(self, policy: Policy, drafter: DrafterName) -> Policy | None:
        """Return `policy` without a draft model; the suffix store's drafts remain."""
        if policy.model and not policy.suffix:
            raise UsageError("no draft model was loaded", field="drafter", value=drafter)
        return replace(policy, model=False, staged=False) if policy.model else policy


class StuckDraft(NoDraft):
    """A draft that was left out, because it or its target cannot take tokens back."""

    def restrict(self, policy: Policy, drafter: DrafterName) -> Policy | None:
        """Return `policy` without a model; None where that leaves nothing."""
        return None if policy.model and not policy.suffix else super().restrict(policy, drafter)


class PlainDraft(Draft):
    """A model of the target's vocabulary; `bind` finds out whether it has another one."""

    model: Model
    header: GGUFHeader

    def __init__(self, target_name: str, name: str, header: GGUFHeader) -> None:
        """Draft with the file of `header`, which is named `name`."""
        super().__init__(target_name)
        self.name = name
        self.header = header

    def _match(self, model: Model, on_message: MessageFn) -> Draft:
        return TranslatedDraft(self, on_message) if vocabulary_difference(self.target, model) else self

    def writer(self) -> Model:
        """Return the draft model, which can write alone in a cascade."""
        return self.model

    def open(self, sequences: SequencePool) -> DraftModel:
        """Return the draft model of one generation. What it read of earlier sequences is not read again."""
        model = DraftModel(sequences.begin([0]), n_vocab=self.target.n_vocab)
        model.sequences = sequences
        return model


class TranslatedDraft(Draft):
    """A draft model of another vocabulary: what it writes is translated into the target's tokens."""

    model: Model

    def __init__(self, plain: PlainDraft, on_message: MessageFn) -> None:
        """Go on from a loaded draft. Raises EdgespecError if no token is the same in both vocabularies."""
        super().__init__(plain.target_name)
        self.name, self.header, self.model, self.target = plain.name, plain.header, plain.model, plain.target
        self._map: VocabularyMap = map_vocabularies(self.target, self.model)
        if not self._map.n_shared:
            raise EdgespecError(
                f"{self.name} cannot draft for {self.target_name}: no token is the same in both; "
                "choose another draft, or drafter none"
            )
        on_message(f"{self.name} drafts in another vocabulary: {self._map.n_shared:,} tokens are the same")

    def writer(self) -> Model:
        """Raise UsageError: its tokens are not the target's."""
        raise UsageError(
            f"a cascade needs one vocabulary: {self.name} has another than {self.target_name}; "
            "choose a draft of the target's family"
        )

    def n_own(self, n_ctx: int) -> int:
        """Return roughly how many of its own tokens `n_ctx` tokens of the target are."""
        return min(math.ceil(n_ctx * ROOM_PER_TOKEN), self.model.n_ctx_train)

    def open(self, sequences: SequencePool) -> DraftModel:
        """Return the draft model of one generation, which speaks the target's tokens."""
        return TranslatedModel(sequences.begin([0]), self.target, self._map)


# ---- heads: blocks that continue from the target's hidden states ----


# ---- a draft head that drafts a block of tokens in one pass, in the place of a draft model ----


_FIRST, _FURTHER = 2, 1  # the n in `block_curve` of the pass of a draft, and of one more of its tokens


class BlockModel(WindowedModel):
    """`session`'s head behind the interface of DraftModel."""

    features: TargetFeatures

    def __init__(
        self,
        session: Session,
        features: TargetFeatures,
        head: BlockHead,
        *,
        n_vocab: int,
        make_rows: Callable[[int], PlainRows],
    ) -> None:
        """Draft with `session`, of a cache that takes inputs, from what `features` will hold.

        Only the first `n_vocab` tokens are drafted. `make_rows`: what `rows_maker` returned for `head`.
        """
        super().__init__(session, n_vocab=n_vocab)
        self.features = features
        self._masks = [head.mask] * (head.n_block - 1)
        self._began_at = 0  # tokens of the sequence that the last pass was made after
        self._rows = make_rows(self._n_row)

    def begin(self, tokens: Sequence[int] = ()) -> None:
        """Start on the sequence `tokens`; what was read of one that begins like it stays."""
        self._rows.clear()
        n_same = n_common(self._session.tokens, tokens[self._offset :])
        if not self._go_back(n_same):
            self._start_at(self.features.first)

    def rest(self) -> None:
        """Do nothing: what was read stays for the next text, which may begin like this one."""

    def follows(self, n_tokens: int) -> bool:
        """Whether it can draft after `n_tokens` tokens.

        It needs all states but the last token's, and at least one; or the last are drafted, and a part of
        its block is left.
        """
        if self._is_new(n_tokens):
            return max(self.features.first, self._offset) < n_tokens - 1 == self.features.end
        is_last = self._began_at == self.features.end + 1
        return is_last and 0 < n_tokens - self._began_at < len(self._rows)

    def n_unread(self, n_tokens: int) -> int:
        """Return 2 where a draft begins, which takes a pass, and 1 within one."""
        return _FIRST if self._is_new(n_tokens) else _FURTHER

    def make_room(self, n_tokens: int) -> None:
        """Start again from the recent half where the sequence and the masks do not fit."""
        super().make_room(n_tokens + len(self._masks))

    def read(self, tokens: Sequence[int]) -> None:
        """Read the states of `tokens` that are known and it has not read."""
        start = self._offset + self.n_past
        if start < self.features.first:
            start = self.features.first
            self._start_at(start)
        if start < self.features.end:
            inputs = self.features.rows(start, self.features.end)
            Forward(self._session, tokens[start : self.features.end], 0, inputs=inputs).run()

    def ask(self, tokens: Sequence[int], guesses: Sequence[int] = ()) -> Forward | ForwardResult:
        """Return the pass of a block, which others may share, or the rest of the last block's result.

        `follows` must say that it can; there are no `guesses`.
        """
        if guesses:
            raise ValueError("a block is drafted without guesses")
        if not self._is_new(len(tokens)):
            row, confidence = self._rows.at(len(tokens) - self._began_at, tokens[-1])
            # Not a pass to learn costs from.
            return ForwardResult(row, 0.0, N_MAX + 1, confidence=confidence)
        started = time.perf_counter()
        self.read(tokens)
        handled_s = time.perf_counter() - started
        block = [tokens[-1], *self._masks]
        asked = Forward(self._session, block, len(block), with_features=self._rows.with_states)
        asked.finish = partial(self._finish_block, tokens[-1], len(tokens), self.n_past, handled_s)
        return asked

    def _finish_block(
        self, last: int, began_at: int, n_read: int, handled_s: float, evaluated: ForwardResult
    ) -> ForwardResult:
        self._session.rewind(n_read)
        self._rows.set(evaluated)
        self._began_at = began_at
        row, confidence = self._rows.at(0, last)
        is_own = evaluated.n_tokens == 1 + len(self._masks)
        return replace(
            evaluated,
            rows=row,
            confidence=confidence,
            n_tokens=_FIRST if is_own else evaluated.n_tokens,
            seconds=handled_s + evaluated.seconds,
        )

    def _is_new(self, n_tokens: int) -> bool:
        return self.features.end >= n_tokens - 1


# ---- heads that draft a token a pass, and the choice ----


LAYERS_ON_NODES = "its layers lie on nodes, where the head cannot read them"
"""Why the head in the target's own file does not draft."""


class _Head(Draft):
    """A draft that reads the target's hidden states."""

    reads_states = True

    def restrict(self, policy: Policy, drafter: DrafterName) -> Policy | None:
        return replace(policy, staged=False)

    def writer(self) -> Model:
        """Raise UsageError: a head writes nothing without its target."""
        small = paired_draft(self.target_name, writes=True)
        such_as = f", such as {small}" if small and small != self.name else ""
        raise UsageError(
            f"{self.name} is a draft head, which cannot write in a cascade by itself: choose a draft model"
            f"{such_as}"
        )

    def _features(self) -> TargetFeatures:
        return TargetFeatures(self.target.n_state)

    def _zeros(self, tokens: Sequence[int], width: int) -> Inputs:
        return np.zeros((len(tokens), width), np.float32)


class HeadDraft(_Head):
    """A head in a file that edgespec made."""

    model: Model

    def __init__(self, target_name: str, name: str, header: GGUFHeader, head: HeadFile) -> None:
        """Draft with the `head` in the file of `header`, which is named `name`."""
        super().__init__(target_name)
        self.name, self.header, self._head = name, header, head
        self.trained_for = head.target_sha256

    def _load(self, *, kernels: bool, n_threads: int) -> Model | None:
        self._n_threads = n_threads
        return super()._load(kernels=kernels, n_threads=n_threads)

    def _match(self, model: Model, on_message: MessageFn) -> Draft:
        embeddings = TargetEmbeddings(self.target.header)
        self._fusion = Fusion(self._head, embeddings, n_threads=self._n_threads, plugin=model.plugin)
        return self

    def open(self, sequences: SequencePool) -> DraftModel:
        """Return the head of one generation, with the matrix that joins tokens and states."""
        return HeadModel(
            sequences.begin([0]),
            self._features(),
            n_vocab=self.target.n_vocab,
            head=self._head,
            fusion=self._fusion,
        )

    @property
    def timed_inputs(self) -> EmbeddingsFn | None:
        """Rows of tokens, joined with states of zeros."""
        return lambda tokens: self._fusion(tokens, self._zeros(tokens, self._head.n_embd))


class _PublishedDraft(_Head):
    """A head that was published in a file of its own; it reads the states of several layers."""

    header: GGUFHeader

    def __init__(self, target_name: str, name: str, header: GGUFHeader) -> None:
        """Draft with the file of `header`, which `check_published_head` has checked."""
        super().__init__(target_name)
        self.name, self.header = name, header

    def without_layers(self) -> Draft:
        """Raise UsageError: it needs the layers' states."""
        problem = "reads what is in the target's layers, which lie on nodes: choose another draft"
        raise UsageError(problem, field="draft", value=self.name)

    def load_target(self, header: GGUFHeader, *, kernels: bool, remote: RemoteLayers | None) -> Model:
        return LayersTarget(header, self.header, kernels=kernels)

    def _match(self, model: Model, on_message: MessageFn) -> Draft:
        if difference := vocabulary_difference(self.target, model):
            raise UsageError(f"{model.path}: a head of another model than {self.target_name}: {difference}")
        return self


class EagleDraft(_PublishedDraft):
    """An EAGLE-3 head beside its target, of which it reads the states of several layers."""

    model: EagleHead

    def _load(self, *, kernels: bool, n_threads: int) -> Model:
        return EagleHead(self.header, self.target, kernels=kernels, n_threads=n_threads)

    def open(self, sequences: SequencePool) -> DraftModel:
        """Return the head of one generation, with the encoder of the target's states."""
        return HeadModel(
            sequences.begin([0]), self._features(), n_vocab=self.target.n_vocab, encode=self.model.encode
        )

    @property
    def timed_inputs(self) -> EmbeddingsFn | None:
        """Encoded states of zeros; a pass over one token is one along a draft, without the encoder."""

        def inputs(tokens: Sequence[int]) -> Inputs:
            if len(tokens) == 1:
                return self._zeros(tokens, self.model.n_embd)
            return self.model.encode(self._zeros(tokens, self.target.n_state))

        return inputs


class BlockDraft(_PublishedDraft):
    """A DFlash head or its kin, which drafts a block of tokens in one pass."""

    model: BlockHead

    def _load(self, *, kernels: bool, n_threads: int) -> Model:
        head = BlockHead(self.header, self.target, kernels=kernels)
        try:
            self._make_rows = rows_maker(head, n_threads)
        except BaseException:
            head.close()
            raise
        return head

    def open(self, sequences: SequencePool) -> DraftModel:
        """Return the head of one generation, which drafts a block of tokens in each pass."""
        return BlockModel(
            sequences.begin([0]),
            self._features(),
            self.model,
            n_vocab=self.target.n_vocab,
            make_rows=self._make_rows,
        )

    @property
    def timed_inputs(self) -> EmbeddingsFn | None:
        """States of zeros where many are read; few tokens are a block of masks."""
        return lambda tokens: self._zeros(tokens, self.target.n_state) if len(tokens) > N_MAX else None

    def costs(self, curve: CostCurve) -> CostCurve:
        """Return the curve of passes over a block."""
        return block_curve(curve, self.model.n_block)


class GemmaDraft(_PublishedDraft):
    """A Gemma 4 head, which works in the target's own cache."""

    model: GemmaHead
    in_target_cache = True
    _cache: LentCache | None = None

    def load_target(self, header: GGUFHeader, *, kernels: bool, remote: RemoteLayers | None) -> Model:
        """Load the target as it is: the head reads its last hidden states."""
        return Model(header.path, kernels=kernels, header=header)

    def _load(self, *, kernels: bool, n_threads: int) -> Model:
        self._n_threads = n_threads
        return GemmaHead(self.header, self.target, kernels=kernels)

    def open(self, sequences: SequencePool) -> DraftModel:
        """Return it as a LentModel, in the cache of `sequences`, the target's."""
        assert self._cache  # noqa: S101 - for the type checker
        session = LentSession(self._cache)
        return LentModel(session, self._features(), sequences, n_vocab=self.target.n_vocab)

    def enter(self, cache: KVCache) -> None:
        """Make its context in the target's cache."""
        self._cache = LentCache(self.model, cache, n_threads=self._n_threads, interrupt=cache.interrupt)

    def leave(self) -> None:
        """Close its context in the target's cache."""
        cache, self._cache = self._cache, None
        if cache:
            cache.close()


class MtpDraft(_Head):
    """The head in the target's own file."""

    name = "mtp"
    is_mtp = True
    model: MtpHead

    def __init__(self, target_name: str, drafter: DrafterChoice) -> None:
        """Draft with the target's own head; the user chose `drafter`."""
        super().__init__(target_name)
        self._drafter = drafter

    def without_layers(self) -> Draft:
        """Return NoDraft. Raises UsageError if the user chose the head."""
        if self._drafter == "mtp":
            raise UsageError(f"{self.target_name}: {LAYERS_ON_NODES}", field="drafter", value="mtp")
        return NoDraft(self.target_name, LAYERS_ON_NODES)

    def load_target(self, header: GGUFHeader, *, kernels: bool, remote: RemoteLayers | None) -> Model:
        """Load the target with its head."""
        return MtpTarget(header, kernels=kernels)

    def _load(self, *, kernels: bool, n_threads: int) -> Model:
        assert isinstance(self.target, MtpTarget)  # noqa: S101 - for the type checker
        return MtpHead(self.target)

    def bind(self, on_message: MessageFn) -> Draft:
        """Return itself: it is made for its target, whatever kind of model that is."""
        return self

    def open(self, sequences: SequencePool) -> DraftModel:
        """Return the head of one generation, which reads the target's states beside its tokens."""
        return HeadModel(sequences.begin([0]), self._features(), n_vocab=self.target.n_vocab)

    @property
    def timed_inputs(self) -> EmbeddingsFn | None:
        """Rows of zeros in place of the states, for passes that are timed."""
        return lambda tokens: self._zeros(tokens, self.model.n_embd)


_PUBLISHED: dict[str, type[_PublishedDraft]] = {EAGLE: EagleDraft, DFLASH: BlockDraft, GEMMA: GemmaDraft}


def find_draft(search: DraftSearch, draft: ModelRef | None, drafter: DrafterChoice) -> Draft:
    """Return the draft, of the kind that `draft` and the files' headers determine; pull missing files.

    If no draft is named and the target has none, `search` looks for one on this disk. `drafter`: what the
    user chose. Raises UsageError or EdgespecError if the draft is unavailable, or is made for another target.
    """
    target_name, target = search.target_name, search.target
    if draft is None:
        if is_draftless(drafter):
            return NoDraft(target_name)
        reason = why_no_mtp(target)
        if not reason:
            return MtpDraft(target_name, drafter)
        if drafter == "mtp":
            raise UsageError(f"{target_name}: {reason}", field="drafter", value=drafter)
        found = search.find() if drafter == "auto" else None
        if found is None:
            return NoDraft(target_name, reason if target.n_mtp else "")
        draft = ModelRef(found)
    name, path = draft.name, resolve(draft)
    with named_as(name, path):
        header = read_header(path)
        if published := check_published_head(header, target):
            return _PUBLISHED[published.architecture](target_name, name, published)
        header = check_model_file(header)
    if head := read_head(header):
        _check_made_for(head, target)
        return HeadDraft(target_name, name, header, head)
    return PlainDraft(target_name, name, header)


def _check_made_for(head: HeadFile, target: GGUFHeader) -> None:
    """Raise UsageError if `head` was made for another file than that of `target`.

    The first time the whole file is read for its hash, which takes a second or two for each GB.
    """
    if (head.n_vocab, head.n_embd) == (target.n_vocab, target.n_embd):
        try:
            if sha256_of(target.path) == head.target_sha256:
                return
        except OSError as error:
            raise EdgespecError(f"cannot read {target.path}: {describe_os_error(error)}") from error
        what = "another quantization of this model, or another model of its size"
    else:
        what = "another model"
    raise UsageError(
        f"{head.path}: a draft head made for {what}, not for {target.path.name}; make one for it with "
        "`edgespec draft make`"
    )


# ---- a draft head that works in the target's own cache (Gemma 4's), in the place of a draft model ----
#
# It reads the last token together with the target's hidden state before it, and along a draft each token with
# its own last state. It has read nothing and takes nothing back: what it attends to are the target's tokens.


class LentModel(DraftModel):
    """`session`'s head behind the interface of DraftModel."""

    features: TargetFeatures
    _session: LentSession

    def __init__(
        self, session: LentSession, features: TargetFeatures, pool: SequencePool, *, n_vocab: int
    ) -> None:
        """Draft with `session`, from what `features` will hold, in the cache of `pool`, the target's.

        Only the first `n_vocab` tokens are drafted.
        """
        super().__init__(session, n_vocab=n_vocab)
        self.features, self._pool = features, pool
        self._own_at = -1
        self._own: Features = features.rows(0, 0)  # its own hidden state of token `_own_at`

    def join(self, target: ModelSession) -> None:
        """Draft for this session of the target from now on."""
        self._session.target = target

    def begin(self, tokens: Sequence[int] = ()) -> None:
        """Start on the sequence `tokens`."""
        self._own_at = -1

    def rest(self) -> None:
        """Leave the target's session, which ends."""
        self._session.target = None

    def follows(self, n_tokens: int) -> bool:
        """Whether it can draft after `n_tokens`: it needs the state of the last but one, and free cells."""
        known = self.features.first <= n_tokens - 2 < self.features.end or self._own_at == n_tokens - 2 >= 0
        return known and self.n_past > 0 and self._pool.make_room(self._pool.n_running)

    def n_unread(self, n_tokens: int) -> int:
        """Return 1: the last token."""
        return 1

    def skip(self, n_tokens: int, n_recent: int) -> None:
        """Do nothing."""

    def read(self, tokens: Sequence[int]) -> None:
        """Do nothing."""

    def make_room(self, n_tokens: int) -> None:
        """Do nothing: the target's sequence has what room it needs."""

    def ask(self, tokens: Sequence[int], guesses: Sequence[int] = ()) -> Forward | ForwardResult:
        """Return the pass over the last token; `follows` must say that it can, and there are no `guesses`."""
        if guesses:
            raise ValueError("it drafts without guesses")
        before = len(tokens) - 2
        is_known = self.features.first <= before < self.features.end
        state = self.features.rows(before, before + 1) if is_known else self._own
        asked = Forward(self._session, self._known(tokens[-1:]), inputs=state, with_features=True)
        asked.finish = partial(self._finish_read, len(tokens) - 1)
        return asked

    def _finish_read(self, at: int, evaluated: ForwardResult) -> ForwardResult:
        if evaluated.features is not None:
            self._own_at, self._own = at, evaluated.features[-1:].copy()
        return self._finish(evaluated)

    def trim(self, n_tokens: int) -> None:
        """Forget its own state of what comes after the sequence's first `n_tokens` tokens."""
        if self._own_at >= n_tokens:
            self._own_at = -1
