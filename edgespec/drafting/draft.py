"""Drafts of a target, besides the suffix store: from a file to the sessions of a draft model.

    NoDraft      nothing
    PlainDraft   a model of the target's vocabulary

Other kinds, edgespec's own included, are entry points (edgespec/platform/plugins.py): subclasses of `Draft`.
Their name is the prefix of their files' metadata, `OTHER_VOCABULARY` for models whose tokens are not the
target's, and for heads in the target's own file the word of `--drafter` that asks for them.

`find_draft` chooses the kind by the files' headers, and `check`s that it fits. Then the models are loaded
(`load_target`, `load`), and `bind` returns the draft that is used: itself, another one, or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from edgespec._core import Interrupt
from edgespec.decoding.choices import DrafterChoice, DrafterName, is_draftless
from edgespec.decoding.session import KEPT, Inputs
from edgespec.drafting.draft_model import DraftModel, TimedSession
from edgespec.drafting.pace import ANSWER_TOKENS, Pace, Policy
from edgespec.drafting.profile import N_MAX, Clocks, CostCurve
from edgespec.drafting.vocabulary_match import vocabulary_difference
from edgespec.errors import MessageFn, UsageError
from edgespec.llama.gguf_header import DRAFTS, GGUFHeader, check_model_file, read_header
from edgespec.llama.kv_cache import KVCache
from edgespec.llama.rpc import RemoteLayers
from edgespec.llama.sequence_pool import SequencePool
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.models.footprint import draft_rollback
from edgespec.models.resolve import ModelRef, named_as, resolve
from edgespec.platform import plugins
from edgespec.platform.closing import Closing

if TYPE_CHECKING:
    from edgespec.drafting.draft_search import DraftSearch

OTHER_VOCABULARY = "other-vocabulary"
"""The kind of draft for a model whose vocabulary is not the target's."""


def check_target(header: GGUFHeader) -> None:
    """Raise UsageError for a draft head, which cannot be a target."""
    if header.is_head:
        raise UsageError(f"{header.path}: a draft head; it cannot be a target")


class Draft(Closing):
    """A draft of one target, from its file to its sessions. A context manager, which closes its model.

    A kind of draft has its own `open`, and overrides other methods where it differs from a plain draft.
    """

    what = "a draft"
    """What its files hold, with an article."""
    reads_states = False
    """Whether it is a head, which reads the target's hidden states; its passes take `Inputs`."""
    in_target_cache = False
    """Whether it works in the target's cache: `open` then takes the target's sequences."""
    model: Model | None = None
    """Its model, once it is loaded."""
    trained_for: str | None = None
    """SHA-256 of the target's file, where a training on rejected places can make a better one of it."""
    target: Model
    n_threads: int

    def __init__(self, target_name: str, name: str | None = None, header: GGUFHeader | None = None) -> None:
        """Draft for the target of that name with the file of `header`; None: it has no file of its own.

        `name`: the draft as the user gave it, or its name in the registry.
        """
        self.target_name, self.name, self.header = target_name, name, header

    # ---- loading ----

    def check(self, target: GGUFHeader) -> None:
        """Raise UsageError or EdgespecError if its file cannot draft for the file of `target`."""

    def without_layers(self, drafter: DrafterChoice) -> Draft:
        """Return the draft to use where layers of the target lie on nodes; the user chose `drafter`.

        Raises UsageError if none can.
        """
        return self

    def load_target(self, header: GGUFHeader, *, kernels: bool, remote: RemoteLayers | None) -> Model:
        """Load the target such that it provides what the draft reads."""
        return Model(header.path, kernels=kernels, header=header, remote=remote)

    def load(self, target: Model, *, kernels: bool, n_threads: int) -> Model | None:
        """Load the draft's model and return it; None if nothing but the suffix store drafts."""
        self.target, self.n_threads = target, n_threads
        self.model = self.load_model(kernels=kernels)
        return self.model

    def load_model(self, *, kernels: bool) -> Model | None:
        """Load its model, which may need `target`."""
        return Model(self.header.path, kernels=kernels, header=self.header) if self.header else None

    def bind(self, on_message: MessageFn) -> Draft:
        """Return the draft to use, once both models are loaded; `on_message` takes lines for the user.

        Raises EdgespecError or UsageError if it cannot draft for this target.
        """
        assert self.model  # noqa: S101 - for the type checker
        stuck = [model.name for model in (self.target, self.model) if not model.can_rewind]
        if not stuck:
            return self.match(self.model, on_message)
        what = "decoding plainly" if stuck[0] == self.target.name else "it does not draft"
        on_message(f"{stuck[0]} cannot take tokens back: {what}")
        self.close()
        return NoDraft(self.target_name, is_stuck=True)

    def match(self, model: Model, on_message: MessageFn) -> Draft:
        """Return the draft to use, given its loaded `model` and `target`, which can be rewound."""
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
        """Return how many of its own tokens correspond to `n_ctx` tokens of the target."""
        return n_ctx

    def open(self, sequences: SequencePool) -> DraftModel:
        """Return the draft model of one generation, which reads and writes in a sequence of `sequences`."""
        raise NotImplementedError

    def use_cache(self, cache: KVCache | None) -> None:
        """Note the target's new, empty cache; None: the last one will be closed."""

    # ---- timing ----

    def timed_rows(self, tokens: Sequence[int]) -> Inputs | None:
        """Return the input rows of a timed pass that `reads_states`, in place of `tokens`.

        None: the tokens themselves. Costs do not depend on their values.
        """
        return None

    def timed_session(self, target: Session, n_ctx: int, interrupt: Interrupt | None) -> TimedSession:
        """Return a session whose passes are timed together with those of `target`, which was just opened."""
        assert self.model  # noqa: S101 - for the type checker
        return Session(
            self.model,
            n_ctx=n_ctx,
            n_batch=self.model.most_batch,
            n_threads=self.n_threads,
            n_logits_max=N_MAX,
            embeddings=self.timed_rows if self.reads_states else None,
            interrupt=interrupt,
            rollback=draft_rollback(),
        )

    def costs(self, curve: CostCurve) -> CostCurve:
        """Return the costs of drafting, from a `curve` of single passes."""
        return curve

    def close(self) -> None:
        """Free the model; a second call does nothing."""
        if self.model:
            self.model.close()


class NoDraft(Draft):
    """No draft model: only the suffix store drafts."""

    def __init__(self, target_name: str, reason: str = "", *, is_stuck: bool = False) -> None:
        """`reason`: why the head in the target's file does not draft, if there is one.

        `is_stuck`: a draft was left out because it or its target cannot be rewound.
        """
        super().__init__(target_name)
        self._reason, self._is_stuck = reason, is_stuck

    def bind(self, on_message: MessageFn) -> Draft:
        """Return itself, and report why no head drafts."""
        if self._reason:
            on_message(f"nothing but text seen before drafts: {self._reason}")
        return self

    def restrict(self, policy: Policy, drafter: DrafterName) -> Policy | None:
        """Return `policy` without a draft model; the suffix store's drafts remain."""
        if not policy.model:
            return policy
        if policy.suffix:
            return replace(policy, model=False, staged=False)
        if self._is_stuck:
            return None
        raise UsageError("no draft model was loaded", field="drafter", value=drafter)


class PlainDraft(Draft):
    """A model of the target's vocabulary; `match` checks that it is."""

    model: Model
    header: GGUFHeader

    def check(self, target: GGUFHeader) -> None:
        """Raise UsageError or EdgespecError if the file holds no model that writes text."""
        self.header = check_model_file(self.header)

    def match(self, model: Model, on_message: MessageFn) -> Draft:
        """Return itself, or the draft for models of another vocabulary."""
        if not vocabulary_difference(self.target, model):
            return self
        other: Draft = plugins.load(DRAFTS, OTHER_VOCABULARY)(self.target_name, self.name, self.header)
        other.target, other.model, other.n_threads = self.target, model, self.n_threads
        return other.match(model, on_message)

    def writer(self) -> Model:
        """Return the draft model, which can write alone in a cascade."""
        return self.model

    def open(self, sequences: SequencePool) -> DraftModel:
        """Return the draft model of one generation. What it read of earlier sequences is not read again."""
        model = DraftModel(sequences.begin([0]), n_vocab=self.target.n_vocab)
        model.sequences = sequences
        return model


# ---- the choice ----


class OwnHead(Protocol):
    """A kind of head in a target's own file."""

    def why_not(self, target: GGUFHeader, /) -> str:
        """Return in a few words why the file has no usable head of this kind; "" if it has one."""

    def __call__(self, target_name: str, name: str) -> Draft:
        """Return the draft; `name` is the word of `--drafter` that asks for it."""


def own_head(target_name: str, target: GGUFHeader) -> Draft | str:
    """Return the head in the target's own file as a draft, or in a few words why there is none."""
    reasons = []
    heads: dict[str, OwnHead] = plugins.load_all(plugins.OWN_HEADS)
    for word, head in heads.items():
        if not (reason := head.why_not(target)):
            return head(target_name, word)
        reasons.append(reason)
    return next(iter(reasons), "no kind of head is installed")


def find_draft(search: DraftSearch, draft: ModelRef | None, drafter: DrafterChoice) -> Draft:
    """Return the draft, of the kind that `draft` and the files' headers determine; pull missing files.

    If no draft is named and the target has none, `search` looks for one on the disk. `drafter`: what the
    user chose. Raises UsageError or EdgespecError if the draft is unavailable, or is made for another target.
    """
    target_name, target = search.target_name, search.target
    if draft is None:
        if is_draftless(drafter):
            return NoDraft(target_name)
        own = own_head(target_name, target)
        if isinstance(own, Draft):
            return own
        if drafter in plugins.offered(plugins.OWN_HEADS):
            raise UsageError(f"{target_name}: {own}", field="drafter", value=drafter)
        found = search.find() if drafter == "auto" else None
        if found is None:
            return NoDraft(target_name, own if target.n_nextn else "")
        draft = ModelRef(found)
    name, path = draft.name, resolve(draft)
    with named_as(name, path):
        header = read_header(path)
        kind = plugins.load(DRAFTS, offered) if (offered := header.draft_kind) else PlainDraft
        made: Draft = kind(target_name, name, header)
        made.check(target)
    return made


# ---- the target's hidden states that a head reads ----


_STATES = (32,)
"""Tokens of a prompt whose hidden states a head reads: with more, no more of its drafts are accepted."""
_STATES_OWN = (KEPT, 64)
"""The same of a head in the target's file, which was trained on whole texts: all that are kept, or few."""
# Of what drafting saves, the share that a head without these states loses: without any of the prompt's, or
# with that of its last token, which edgespec's kernels leave for nothing (docs/measurements/drafts.md).
_STATES_SHARE, _STATES_SHARE_AFTER_LAST = 0.12, 0.05
_PASS_SHARE = 0.5  # of T(1), what dividing the prompt into one more pass costs
_SMALL = 0.03  # share of reading the prompt, below which only the price and the gain are compared
_CAUTION = 3.0  # weight of their price over what they save: never slower comes before faster


def n_states_worth_reading(
    pace: Pace, target: Model, n_unread: int, n_predict: int | None, *, n_requests: int = 1
) -> int:
    """Return for how many of a prompt's last tokens the target's hidden states are worth their cost.

    `n_unread` tokens of the prompt are still to be read, and at most `n_predict` follow. The cost is paid
    before the answer begins. So the states are left out if a usual answer would not clearly gain more and the
    cost is no small part of reading the prompt, or if `n_requests` share the passes and drafting for all of
    them would not pay. The head then begins with the answer.
    """
    sizes = _STATES if target.hidden_states.all_logits else _STATES_OWN
    if pace.needs_model:
        return min(sizes[0], n_unread)
    if pace.costs.draft is None:
        return 0
    plain, speedup = pace.speedup(pace.n_known + n_unread, n_requests)
    share = _STATES_SHARE_AFTER_LAST if target.leaves_last_states else _STATES_SHARE
    saved = share * plain * max(0.0, 1.0 - 1.0 / speedup)
    if not saved:
        return 0
    small = _SMALL * pace.costs.target.read(n_unread, pace.n_known)
    n_tokens = min(n_predict or ANSWER_TOKENS, 2 * ANSWER_TOKENS)
    for n in sizes:
        n_wanted = min(n, n_unread)
        price = _price_of_states(pace.costs, target, n_wanted, plain if n_wanted < n_unread else 0.0)
        if saved * n_tokens > (price if price < small else _CAUTION * price):
            return n_wanted
    return 0


def _price_of_states(costs: Clocks, target: Model, n: int, one: float) -> float:
    """Return the cost of the hidden states of `n` tokens of a prompt.

    They mostly need a separate pass (`one`: the cost of one over a single token, or 0), and the library
    computes the logits of each: a sixth of the default target's prefill, which edgespec's kernels avoid.
    A head in the target's file reads as many tokens.
    """
    if not target.hidden_states.all_logits:
        return costs.draft.read(n, 0) if costs.draft else 0.0
    price = _PASS_SHARE * one
    if not target.uses_kernels:
        n_output = target.n_vocab * target.n_embd
        price += n * costs.target.read(512, 0) / 512 * n_output / (target.n_params - n_output)
    return price
