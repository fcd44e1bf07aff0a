"""The plan of a generation: decisions, before it begins, about all that its options leave open."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from edgespec.decoding.choices import DrafterChoice, DrafterName, NamedDrafter, Rule
from edgespec.decoding.grammar.constraint import Constraint
from edgespec.decoding.loop import Task
from edgespec.decoding.options import Options, Waking
from edgespec.decoding.records import Mode
from edgespec.decoding.sampling import Coins
from edgespec.decoding.thoughts import ThoughtConstraint, ThoughtLimit
from edgespec.drafting.policy import Policy
from edgespec.engine.lossy.calibration import calibrated
from edgespec.engine.pair import Pair
from edgespec.errors import UsageError
from edgespec.llama.weights import Model

_POLICIES: dict[DrafterName, Policy] = {
    # Sampled siblings are accepted too rarely to be worth their cost: docs/measurements/scheduler.md.
    "auto": Policy(suffix=True, model=True, staged=True, siblings=False),
    "tree": Policy(suffix=True, model=True, staged=True),
    "chain": Policy(suffix=True, model=True, staged=True, branches=False),
    "model": Policy(suffix=False, model=True, staged=False),
    "mtp": Policy(suffix=False, model=True, staged=False),
    "suffix": Policy(suffix=True, model=False, staged=False),
    "staged": Policy(suffix=False, model=True, staged=True),
}

_CONCLUSION = "\n\nI have thought about this for long enough, and answer now.\n"
"""Last words of a thought that is ended at its budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Task):
    """The task of a generation, and the policy of its drafts."""

    policy: Policy | None
    """None to decode plainly, or with `plugin`."""
    plugin: NamedDrafter | None = None
    """The user's own drafter, in place of a policy."""

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

        Without the match rule, or with a lenience below 1, the text depends on what was drafted, and so on
        timing and on what was learnt before.
        """
        drafts = self.policy is not None or self.plugin is not None
        return not drafts or (self.rule == "match" and self.options.lenience == 1.0)


def make_plan(pair: Pair, options: Options, prompt: Sequence[int]) -> Plan:
    """Decide what `options` leave open. Raises UsageError if this pair cannot do what they ask."""
    if options.cascade:
        options = replace(options, cascade=_resolved(pair, options.cascade))
    drafter = _drafter(pair, options)
    plugin = drafter if isinstance(drafter, NamedDrafter) else None
    policy = None if isinstance(drafter, NamedDrafter) else _policy(pair, options, drafter)
    return Plan(
        options=options,
        coins=Coins(secrets.randbits(32) if options.seed is None else options.seed),
        rule=_rule(options, drafts=policy is not None or plugin is not None),
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
    """Whether a thought is open in the last message: after the last control token that is no marker."""
    pieces: list[bytes] = []
    for token in reversed(prompt):
        piece = model.piece(token, special=True)
        if model.is_control(token) and piece not in opener and piece not in closer:
            break
        pieces.append(piece)
    text = b"".join(reversed(pieces))
    return text.rfind(opener) > text.rfind(closer)


def _resolved(pair: Pair, cascade: Waking) -> Waking:
    """Return `cascade` with a threshold: its own, or the one calibrated for this pair."""
    draft = pair.draft.writer()
    return cascade if cascade.threshold is not None else calibrated(pair.target.header, draft.header, cascade)


def _drafter(pair: Pair, options: Options) -> DrafterChoice:
    """Return the drafter of this text, "none" to decode plainly. Raises UsageError."""
    drafter = options.drafter or pair.options.drafter
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
    if name == "mtp" and not pair.draft.is_mtp:
        problem = "no head in the target's own file was loaded: its file has none, or another draft was given"
        raise UsageError(problem, field="drafter", value=name)
    policy = pair.draft.restrict(_POLICIES[name], name)
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
