"""Drafters that users write: their interface, how one is found by its name, and how it runs.

A drafter is a class with three methods. An object of it drafts for one text:

    class Repeats:
        def begin(self, tokens): ...                # a text begins: `tokens` is its prompt
        def draft(self, tokens, room, sample): ...  # return tokens that may follow `tokens`
        def accept(self, tokens, n_accepted): ...   # the text has grown: `tokens` is all of it

Rules it must follow, for the text to be distributed as the target's own:

1. Any token may be proposed, for any reason found in `tokens` or in the object. It is a guess, which the
   target checks, and a wrong one costs only time.
2. A token to be drawn at random comes from `sample(weights)`. edgespec draws it and remembers the weights, so
   no drafter can misreport them. No other random numbers are used.
3. A token that `sample` drew is proposed, as the very object that it returned, or it is not: that may depend
   on the tokens before it and on its weights, and never on the token itself. Leaving out unlikely tokens
   would make likely ones too likely. So the first one drawn in a draft is proposed in each draft or in none,
   and so is the second (`check_draws`).

`edgespec.testing.check_drafter` proves that a drafter follows them, or shows a text where it does not.

A user's drafter is a source like any other: the time of its drafts and the acceptance of its tokens are
learned, and it pauses if it does not pay (`SourcePace`). Whatever its code raises is one line (`guarded`).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from numbers import Integral
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeVar, cast, get_args

import numpy as np

from edgespec.decoding.choices import DrafterName, NamedDrafter
from edgespec.decoding.option_table import MAX_GAMMA
from edgespec.decoding.passes import order
from edgespec.decoding.records import Step
from edgespec.decoding.session import ForwardResult, TokenView
from edgespec.decoding.tree import Position, Tree, TreeNode
from edgespec.drafting.acceptance import AcceptanceTable
from edgespec.drafting.pace import ANSWER_TOKENS, Pace
from edgespec.drafting.profile import N_MAX, PassCosts
from edgespec.errors import UsageError
from edgespec.platform.plugins import PluginError, guarded, offered, traced

R = TypeVar("R")

Weights = Mapping[int, float] | Sequence[float]
"""How likely each token is: by its id, or of all tokens in their order; 0 or more, with any sum above 0."""

Proposed = Sequence[int | tuple[int, int]]
"""Tokens that follow each other. In a tree, an entry is (token, index of the entry that it follows): an
earlier one, or -1 for the end of the text."""


class Tokenizer(Protocol):
    """The target's tokens as text, for a drafter whose `begin` has a parameter `tokenizer`."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return the tokens of `text`; `add_special`: with BOS, `parse_special`: with control tokens."""

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token, maybe part of a character; b"" for control tokens."""


class UserDrafter(Protocol):
    """The methods of a drafter that a user writes, each called with positional arguments.

    After an error raised in one of them, or an impossible proposal, the text continues without the drafter.
    """

    @property
    def begin(self) -> Callable[..., object]:
        """`begin(tokens)` starts on a text whose prompt is `tokens`.

        If it has a parameter called `tokenizer`, it also gets the target's `Tokenizer`.
        """

    def draft(self, tokens: Sequence[int], room: int, sample: Callable[[Weights], int], /) -> Proposed:
        """Return at most `room` (1 or more) tokens that may follow `tokens`, maybe none.

        `tokens` is all of the text so far, and a slice of it is a tuple; the first time it is the prompt and
        one token of the target. `sample(weights)` draws a token with these weights; if nothing may be random,
        as in a text with a seed, it returns the likeliest one.
        """

    def accept(self, tokens: Sequence[int], n_accepted: int, /) -> object:
        """Learn that the text is now `tokens`, of which `n_accepted` were drafted just before.

        The target's own token follows these. It is called after each pass, drafted or not, but not while the
        drafter is paused; before its next draft it then gets all tokens emitted meanwhile.
        """


_ARGUMENTS = {"begin": ("tokens",), "draft": ("tokens", "room", "sample"), "accept": ("tokens", "n_accepted")}


# ---- by name ----


def find_drafter(given: object) -> DrafterName | NamedDrafter:
    """Return the drafter that the user named: a word of `DrafterName`, or one that a user wrote.

    That is MODULE:CLASS, FILE.py:CLASS, the name of an entry point, or in Python the class itself. Its code
    is run: an object is made as a check. Raises UsageError if that fails.
    """
    if isinstance(given, NamedDrafter):
        return given
    if not isinstance(given, str):
        return _tried(getattr(given, "__name__", type(given).__name__), given, given)
    if given in get_args(DrafterName):
        return cast("DrafterName", given)
    place, colon, name = given.rpartition(":")
    if colon:
        return _tried(name, _attribute(place, name, given), given)
    found = offered("edgespec.drafters")
    if given not in found:
        words = [*get_args(DrafterName), *found]
        problem = f"must be one of {', '.join(words)}, or a class as MODULE:CLASS or FILE.py:CLASS"
        raise UsageError(problem, field="drafter", value=given)
    return _tried(given, _imported(found[given].load, given), given)


def _imported(load: Callable[[], R], given: str) -> R:
    return guarded("cannot be imported", load, field="drafter", value=given)


def _attribute(place: str, name: str, given: str) -> object:
    load = (
        partial(_load_file, Path(place)) if place.endswith(".py") else partial(importlib.import_module, place)
    )
    try:
        module = _imported(load, given)
    except PluginError as error:
        if Path(f"{place}.py").is_file():
            error.problem += f"; ./{place}.py:{name} would be the file here"
        raise
    found = _imported(partial(getattr, module, name, _load_file), given)
    if found is _load_file:  # there is none
        classes = [key for key, value in vars(module).items() if isinstance(value, type) and key[0] != "_"]
        has = f"; it has {', '.join(classes)}" if classes else ""
        raise UsageError(f"{place} has no class {name!r}{has}", field="drafter", value=given)
    return found


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    name = f"edgespec_drafter_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader  # noqa: S101 - it ends in .py
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _tried(name: str, make: object, given: object) -> NamedDrafter:
    """Return the drafter called `name` that `make` makes. Raises UsageError if it lacks a method."""
    value = given if isinstance(given, str) else name
    if not callable(make):
        raise UsageError(f"a {type(make).__name__}, and no class", field="drafter", value=value)
    drafter = NamedDrafter(name, make)
    made = guarded("cannot be made", make, code=lambda: make, field="drafter", value=value)
    for method, arguments in _ARGUMENTS.items():
        what = f"has no method {method}({', '.join(arguments)}), as docs/write-a-drafter.md has it"
        code = partial(inspect.getattr_static, type(made), method)
        guarded(
            what, partial(_check_method, made, method, arguments), code=code, field="drafter", value=value
        )
    return drafter


def _check_method(made: object, method: str, arguments: Sequence[str]) -> None:
    call = getattr(made, method)
    tokenizer = {"tokenizer": None} if method == "begin" and _takes_tokenizer(call) else {}
    with suppress(ValueError):  # compiled code does not say what it takes
        inspect.signature(call).bind(*arguments, **tokenizer)


def _takes_tokenizer(begin: Callable[..., object]) -> bool:
    with suppress(ValueError):
        return "tokenizer" in inspect.signature(begin).parameters
    return False


# ---- at work ----


class Draw(int):
    """A token that `sample` drew, with the slot of its distribution."""

    slot: int
    """The sampler's slot with the distribution that it was drawn from."""


_NEW = 3  # drafts

KnownDraws = dict[tuple[int, int], tuple[int, bool]]
"""By (room of a draft, how many were drawn before): a token that was drawn, and whether it was proposed."""


def check_draws(known: KnownDraws, room: int, draws: Sequence[Draw], left_out: Sequence[Draw]) -> bool:
    """Note which of `draws` a draft of `room` proposed; return whether one is left out for the first time.

    Raises ValueError if the draw at the same position of another draft was treated otherwise (proposed or
    left out): the decision may then depend on the token.
    """
    is_new = False
    for i, draw in enumerate(draws):
        is_proposed = not any(draw is one for one in left_out)
        is_new |= not is_proposed and (room, i) not in known
        other, was_proposed = known.setdefault((room, i), (int(draw), is_proposed))
        if was_proposed != is_proposed:
            yes, no = (int(draw), other) if is_proposed else (other, int(draw))
            raise ValueError(
                f"drew token {no} and did not propose it, and proposed {yes}, drawn in the same place of "
                "another draft: that is not exact where it depends on the token"
            )
    return is_new


class DrafterCosts:
    """The statistics of a user's drafter, over all texts of an engine."""

    def __init__(self) -> None:
        self.offered = AcceptanceTable(lambda _depth, _bucket: 0.9)
        """How often a token was proposed, where there was room and those before it were."""
        self.accepted = AcceptanceTable(lambda _depth, _bucket: 0.5)
        self.draft_s: float | None = None
        """Seconds of `draft` and `accept` together."""
        self.begin_s = 0.0
        """Seconds of making an object and its `begin`."""
        self._n_timed = 0

    @property
    def is_new(self) -> bool:
        """Whether there are hardly any statistics yet."""
        return self._n_timed < _NEW

    def begin(self) -> None:
        """Start on another text, which may differ."""
        self.offered.begin()
        self.accepted.begin()

    def observe(self, seconds: float) -> None:
        """Learn that a draft took `seconds`."""
        self._n_timed += 1
        if self.draft_s is None or self._n_timed == 2:  # the first may have loaded something
            self.draft_s = min(seconds, self.draft_s or seconds)
        else:
            self.draft_s += 0.1 * (seconds - self.draft_s)

    def learn(self, room: int, tree: Tree, path: Sequence[int]) -> None:
        """Learn from the `tree` of a draft for `room` tokens, whose nodes on `path` were accepted."""
        depths: list[int] = []
        for node in tree:
            depths.append(1 + (depths[node.parent] if node.parent >= 0 else 0))
        deepest = max(depths, default=0)
        for depth in range(min(room, deepest + 1)):
            self.offered.learn(depth, 0, depth < deepest)
        for depth in range(len(path)):
            self.accepted.learn(depth, 0, 1.0)
        last = path[-1] if path else -1
        if any(node.parent == last for node in tree):
            self.accepted.learn(len(path), 0, 0.0)


def record_of(records: dict[object, Any], drafter: NamedDrafter) -> DrafterCosts:
    """Return the record of a user's drafter, a new one if `records`, an engine's, has none."""
    found: DrafterCosts = records.setdefault((drafter.name, id(drafter.make)), DrafterCosts())
    return found


class SourcePace:
    """Decides in each step how many tokens to ask of a drafter for one text, by the rule of pace.py."""

    def __init__(self, record: DrafterCosts, pace: Pace, clock: PassCosts) -> None:
        """Decide by the statistics in `record` and `pace`; `clock` gets the times of the target's passes."""
        self.record, self.pace, self._clock = record, pace, clock
        self.n_steps = self.n_rested = 0
        self._n_past, self._n_pending = 0, 1

    def begin(self, n_past: int, n_predict: int | None) -> None:
        """Start on a text of at most `n_predict` tokens after `n_past`."""
        self.record.begin()
        self.pace.begin(n_past, n_predict)

    def room(self, room: int, n_past: int, n_pending: int, *, to_come: float | None) -> int:
        """Return how many of at most `room` tokens to ask for after `n_past`; 0: the drafter is paused.

        `to_come`: the expected number of tokens still to come, if the drafter has not begun on the answer;
        else None. A paused drafter is asked again from time to time, for a small share of the time.
        """
        pace, record = self.pace, self.record
        pace.start_step(n_past, n_pending=n_pending)
        self._n_past, self._n_pending = n_past, n_pending
        cost = (record.draft_s or 0.0) + (record.begin_s / max(1.0, to_come) if to_come is not None else 0.0)
        offered, accepted = (
            [table.chance(i, 0) for i in range(room)] for table in (record.offered, record.accepted)
        )
        n = 0 if pace.is_paused else pace.best_length(1.0, 0, accepted, offered=offered, cost=cost)[0]
        if record.is_new and pace.rate * cost < 1.0:
            n = max(n, min(room, 1))  # else nobody would know what it can
        if room and not n and not pace.is_paused:
            n = int(pace.can_try((record.draft_s or 0.0) + (to_come is not None) * record.begin_s))
        self.n_steps += 1
        self.n_rested += not n
        return n

    def learn(self, made: Step, result: ForwardResult, draft_s: float) -> None:
        """Learn the time and the tokens of a step, of which drafting took `draft_s`."""
        n_own = self._n_pending + made.n_drafted
        if result.n_tokens <= n_own <= N_MAX:  # else the batcher, which knows what was in it, does
            self._clock.observe(n_own, self._n_past, result.seconds)
        passes = [(1, 0)] if draft_s else ()
        self.pace.learn(len(made.tokens), draft_s + result.seconds, made.n_drafted, passes)

    def note(self) -> str:
        """Return a sentence about how often the drafter was paused, and why; "" if it never was."""
        if not self.n_rested:
            return ""
        chance, cost = self.record.accepted.chance(0, 0), 1e3 * (self.record.draft_s or 0.0)
        return (
            f"; it rested in {self.n_rested} of {self.n_steps} steps: a draft takes {cost:.3g} ms, and "
            f"{100 * chance:.0f} % of first tokens are accepted"
        )


class PluginDrafter:
    """A user's drafter as a Drafter of the loop, for one text."""

    n_max = MAX_GAMMA

    def __init__(  # noqa: PLR0913 - the text, and what the engine knows of its target
        self,
        drafter: NamedDrafter,
        prompt: Sequence[int],
        *,
        n_vocab: int,
        is_eog: Callable[[int], bool],
        branches: bool = True,
        on_message: Callable[[str], None] = lambda _line: None,
        pace: SourcePace | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Draft after `prompt` with an object of `drafter`, made for the first draft.

        `branches`: the target can read trees. `on_message` takes a line about a failure. `pace`: decides when
        it drafts; None: in each step.
        """
        self.name = drafter.name
        self._make = drafter.make
        self._made: Any = None
        self._prompt = tuple(prompt)
        self._n_vocab, self._is_eog, self._branches = n_vocab, is_eog, branches
        self._on_message, self._pace, self._tokenizer = on_message, pace, tokenizer
        self._failed = ""
        self._sampled = False
        self._tokens: Sequence[int] = ()
        self._n_told = len(prompt) + 1  # of its tokens the object knows
        self._n_predict: int | None = None
        self._n_pending = 1
        self._room = 0  # that the draft under way had; 0: nothing was asked for
        self._tree: Tree = ()
        self._draft_s = 0.0
        self._draws: list[Draw] = []
        self._known: KnownDraws = {}
        self._n_drafted = self._n_accepted = 0

    def begin(self, tokens: Sequence[int], *, sampled: bool, n_predict: int | None) -> None:
        """Go on after the first token."""
        self._sampled, self._n_predict = sampled, n_predict
        self._tokens = TokenView(tokens)
        if self._pace:
            self._pace.begin(len(tokens), n_predict)

    def draft(self, _tokens: Sequence[int], room: int, position: Position) -> Tree:
        """Return the tree of at most `room` tokens that the user's code proposes, none once it failed."""
        room = max(0, min(room, self.n_max - self._n_pending + 1))
        self._tree, self._draws, self._draft_s = (), [], 0.0
        if self._pace:
            room = self._pace.room(
                0 if self._failed else room, len(self._tokens), self._n_pending, to_come=self._to_come()
            )
        self._room = 0 if self._failed else room
        if self._room:
            try:
                self._tree = self._ask_for_tree(self._room, position)
            except PluginError as error:
                self._fail(error)
                self._tree = self._chain_of_draws(self._room)
        return self._tree

    def _to_come(self) -> float | None:
        """Return how many tokens are expected to come, if the object is still to be made."""
        if self._made is not None or not self._pace:
            return None
        n_predict_left = (
            math.inf if self._n_predict is None else self._n_predict + len(self._prompt) - len(self._tokens)
        )
        return min(ANSWER_TOKENS, n_predict_left)

    def _ask_for_tree(self, room: int, position: Position) -> Tree:
        """Ask the object for a draft; make it first if there is none. Raises PluginError."""
        if self._made is None:
            started = time.perf_counter()
            self._made = guarded("cannot be made", self._make, code=lambda: self._make)
            self._ask("begin", self._begin)
            if self._pace:
                self._pace.record.begin_s = time.perf_counter() - started
        started = time.perf_counter()
        tokens = self._tokens
        if len(tokens) > self._n_told:
            self._ask("accept", lambda made: made.accept(tokens, 0))
        self._n_told = len(tokens)
        sample = partial(self._sample, position)
        tree = self._ask("draft", lambda made: self._read(made.draft(tokens, room, sample), room))
        self._draft_s = time.perf_counter() - started
        return tree

    def _begin(self, made: UserDrafter) -> None:
        more = {"tokenizer": self._tokenizer} if _takes_tokenizer(made.begin) else {}
        made.begin(self._prompt, **more)

    def _ask(self, method: str, call: Callable[[Any], R]) -> R:
        """Return the result of `call`, which calls a method of the user's. Raises PluginError."""
        code = partial(inspect.getattr_static, type(self._made), method)
        return guarded(f"{method} failed", partial(call, self._made), code=code)

    def accept(self, tokens: Sequence[int], made: Step, result: ForwardResult) -> None:
        """Report the outcome of the draft to the user's code."""
        now = self._tokens = TokenView(tokens)
        self._n_pending = made.n_pending
        self._n_drafted += len(self._tree)
        self._n_accepted += made.n_accepted
        if self._room and not self._failed:
            started = time.perf_counter()
            self._n_told = len(now)
            try:
                self._ask("accept", lambda drafter: drafter.accept(now, made.n_accepted))
            except PluginError as error:
                self._fail(error)
            self._draft_s += time.perf_counter() - started
            if self._pace:
                self._pace.record.observe(self._draft_s)
                self._pace.record.learn(self._room, self._tree, made.path)
        if self._pace:
            self._pace.learn(made, result, self._draft_s)

    def sources(self) -> dict[str, tuple[int, int]]:
        """Return the tokens drafted and accepted so far, under the drafter's name."""
        return {self.name: (self._n_drafted, self._n_accepted)} if self._n_drafted else {}

    def plain_rate(self) -> float | None:
        """Return the tokens a second that plain decoding is expected to make now; None: not known."""
        return self._pace.pace.plain_rate() if self._pace else None

    def note(self) -> str:
        """Return a sentence about what was drafted, and what failed."""
        said = f"{self._n_accepted} of {self._n_drafted} tokens of {self.name} accepted"
        if self._failed:
            return f"{said}; {self._failed}"
        return said + (self._pace.note() if self._pace else "")

    def _fail(self, error: PluginError) -> None:
        self._made = None
        self._failed = f"{self.name}: {error.problem}; the text went on without it"
        self._on_message(traced(self._failed, error))

    def _sample(self, position: Position, weights: Weights) -> int:
        probs = _probabilities(weights, self._n_vocab)
        if not self._sampled:
            return int(probs.argmax())
        slot = len(self._draws)
        if slot == self.n_max:
            raise ValueError(f"more than {self.n_max} tokens drawn")
        position.sampler.set_probs(slot, probs)
        draw = Draw(self._drawn(position, slot))
        draw.slot = slot
        self._draws.append(draw)
        return draw

    def _drawn(self, position: Position, slot: int) -> int:
        return position.sampler.draw(slot, position.coins(1)[0])

    def _read(self, proposed: Proposed, room: int) -> Tree:
        """Return the proposal as a tree. Raises ValueError for an impossible one."""
        nodes: list[TreeNode] = []
        places = {-1: -1}  # of the entries that became nodes
        left = list(self._draws)
        for i, entry in enumerate(proposed):
            if i == room:
                raise ValueError(f"proposed more tokens than the {room} that there was room for")
            pair = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, i - 1)
            token, parent = pair
            if not all(isinstance(one, Integral) and not isinstance(one, bool) for one in pair):
                raise ValueError(f"proposed {entry!r}, no token id")
            if not 0 <= token < self._n_vocab:
                raise ValueError(f"proposed {token}: the model's tokens are 0..{self._n_vocab - 1}")
            if not -1 <= parent < i:
                raise ValueError(f"entry {i} follows entry {parent}, which does not come before it")
            draw = next((one for one in left if one is token), None)
            left = [one for one in left if one is not token]
            # The loop takes nothing after the end of the text, and no branch where the target keeps a state.
            place = places.get(int(parent))
            is_dropped = place is None or (place >= 0 and self._is_eog(nodes[place].token))
            if is_dropped or (not self._branches and place != len(nodes) - 1):
                continue
            places[i] = len(nodes)
            slot = -1 if draw is None else draw.slot
            nodes.append(
                TreeNode(cast("int", place), int(token), "argmax" if slot < 0 else "sampled", 1.0, slot)
            )
        known = dict(self._known)
        is_new = bool(self._draws) and self._check_draws(known, room, left)
        tree = self._chain_of_draws(room) if is_new else order(tuple(nodes))
        self._known = known
        return tree

    def _check_draws(self, known: KnownDraws, room: int, left_out: Sequence[Draw]) -> bool:
        return check_draws(known, room, self._draws, left_out)

    def _chain_of_draws(self, room: int) -> Tree:
        """Return the drawn tokens, except those never proposed, in place of an impossible draft.

        The code may leave a token out because of its value. If it is proposed nonetheless, the text is exact.
        """
        nodes: list[TreeNode] = []
        for i, draw in enumerate(self._draws):
            is_taken = self._known.get((room, i), (0, True))[1]
            if len(nodes) < room and is_taken and not (nodes and self._is_eog(nodes[-1].token)):
                nodes.append(TreeNode(len(nodes) - 1, int(draw), "sampled", 1.0, draw.slot))
        return tuple(nodes)


def _probabilities(weights: Weights, n_vocab: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return weights as probabilities by token id, float32 (n_vocab,). Raises ValueError."""
    probs = np.zeros(n_vocab, np.float64)
    if isinstance(weights, Mapping):
        for token, weight in weights.items():
            if not 0 <= token < n_vocab:
                raise ValueError(f"sample was given the token {token}: the model's are 0..{n_vocab - 1}")
            probs[token] = weight
    elif len(weights) > n_vocab:
        raise ValueError(f"sample was given {len(weights)} weights: the model has {n_vocab} tokens")
    else:
        probs[: len(weights)] = weights
    top = float(probs.max())
    if not (0.0 < top < np.inf and probs.min() >= 0.0):
        raise ValueError("sample was given weights below 0, or no numbers, or all 0")
    probs /= top  # their sum may be none
    found: np.ndarray[Any, np.dtype[np.float32]] = (probs / probs.sum()).astype(np.float32)
    return found
