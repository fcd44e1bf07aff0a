"""Drafters that users write: their interface, how one is found by its name, and how it runs.

A drafter is a class with three methods. An object of it drafts for one text:

    class Repeats:
        def begin(self, tokens): ...                # a text begins: `tokens` is its prompt
        def draft(self, tokens, room, sample): ...  # return tokens that may follow `tokens`
        def accept(self, tokens, n_accepted): ...   # the text has grown: `tokens` is all of it

What it must keep, for the text to be distributed as the target's own:

1. Any token may be proposed, for any reason that lies in `tokens` or in the object. It is a guess, which the
   target checks, and a wrong one costs time alone.
2. A token to be drawn at random comes from `sample(weights)`. edgespec draws it and remembers the weights, so
   that no drafter can be wrong about them. No other random numbers are used.
3. Each token that `sample` drew is proposed, as the very object that it returned. Whether one is drawn may
   depend on the tokens before it and on its weights. Whether it is proposed must not depend on what it turned
   out to be: to leave out unlikely ones makes likely ones too likely.

`edgespec.testing.check_drafter` proves that a drafter keeps this, or shows a text that it does not fit.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Integral
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast, get_args

import numpy as np

from edgespec.decoding.choices import DrafterName, NamedDrafter
from edgespec.decoding.drafter import DraftOutcome, Position
from edgespec.decoding.option_table import MAX_GAMMA
from edgespec.decoding.passes import order
from edgespec.decoding.token_sequence import TokenView
from edgespec.decoding.tree import Tree, TreeNode
from edgespec.errors import UsageError
from edgespec.platform.plugins import offered

Weights = Mapping[int, float] | Sequence[float]
"""How likely each token is: by its id, or of all tokens in their order; 0 or more, with any sum above 0."""

Proposed = Sequence[int | tuple[int, int]]
"""Tokens that follow each other. In a tree, an entry is (token, index of the entry that it follows): an
earlier one, or -1 for the end of the text."""


class UserDrafter(Protocol):
    """The methods of a drafter that a user writes, each called with positional arguments.

    After an error raised in `begin` no text is written. After one in `draft` or `accept`, or a proposal that
    cannot be, the text goes on without the drafter.
    """

    def begin(self, tokens: Sequence[int], /) -> object:
        """Start on a text whose prompt is `tokens`."""

    def draft(self, tokens: Sequence[int], room: int, sample: Callable[[Weights], int], /) -> Proposed:
        """Return at most `room` (1 or more) tokens that may follow `tokens`, maybe none.

        `tokens` is all of the text so far, of which a slice is a tuple; the first time it is the prompt and a
        token of the target.
        `sample(weights)` draws a token with these weights; where no coin may decide, as in a text with a
        seed, it returns the likeliest one.
        """

    def accept(self, tokens: Sequence[int], n_accepted: int, /) -> object:
        """Learn that the text is now `tokens`, of which `n_accepted` were drafted just before.

        The target's own token follows these. It is called after each pass, drafted or not.
        """


_ARGUMENTS = {"begin": ("tokens",), "draft": ("tokens", "room", "sample"), "accept": ("tokens", "n_accepted")}


# ---- by name ----


def find_drafter(given: object) -> DrafterName | NamedDrafter:
    """Return the drafter that the user named: a word of `DrafterName`, or one that a user wrote.

    That is MODULE:CLASS, FILE.py:CLASS, the name of an entry point, or in Python the class itself. Its code
    is run: an object is made to see that it can be. Raises UsageError if it cannot.
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
    try:
        return _tried(given, found[given].load(), given)
    except (ImportError, AttributeError) as error:
        raise UsageError(_failure("cannot be imported", error), field="drafter", value=given) from error


def _attribute(place: str, name: str, given: str) -> object:
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:
        cure = f"; ./{place}.py:{name} would be the file here" if Path(f"{place}.py").is_file() else ""
        problem = _failure("cannot be imported", error) + cure
        raise UsageError(problem, field="drafter", value=given) from error
    if not hasattr(module, name):
        classes = [key for key, value in vars(module).items() if isinstance(value, type) and key[0] != "_"]
        has = f"; it has {', '.join(classes)}" if classes else ""
        raise UsageError(f"{place} has no class {name!r}{has}", field="drafter", value=given)
    return getattr(module, name)


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
    """Return the drafter called `name` if `make` makes one, with the methods that it needs."""
    value = given if isinstance(given, str) else name
    if not callable(make):
        raise UsageError(f"a {type(make).__name__}, and no class", field="drafter", value=value)
    drafter = NamedDrafter(name, make)
    made = _made(drafter)
    for method, arguments in _ARGUMENTS.items():
        wanted = f"{method}({', '.join(arguments)})"
        try:
            inspect.signature(getattr(made, method)).bind(*arguments)
        except (AttributeError, TypeError):
            problem = f"has no method {wanted}; docs/write-a-drafter.md has an example"
            raise UsageError(problem, field="drafter", value=value) from None
    return drafter


def _made(drafter: NamedDrafter) -> UserDrafter:
    try:
        made: UserDrafter = drafter.make()
    except Exception as error:
        raise UsageError(_failure("cannot be made", error), field="drafter", value=drafter.name) from error
    return made


def _failure(what: str, error: Exception) -> str:
    said = " ".join(str(error).split())
    return f"{what}: {type(error).__name__}{': ' if said else ''}{said}"


# ---- at work ----


class Draw(int):
    """A token that `sample` drew, with the slot of its distribution."""

    slot: int
    """The sampler's slot with the distribution that it was drawn from."""


class PluginDrafter:
    """A user's drafter as a Drafter of the loop, for one text."""

    n_max = MAX_GAMMA

    def __init__(
        self,
        drafter: NamedDrafter,
        prompt: Sequence[int],
        *,
        n_vocab: int,
        is_eog: Callable[[int], bool],
        branches: bool = True,
        on_message: Callable[[str], None] = lambda _line: None,
    ) -> None:
        """Make an object of `drafter` and let it begin with `prompt`; `branches`: the target can read trees.

        Raises UsageError if the user's code fails.
        """
        self.name = drafter.name
        made = _made(drafter)
        self._drafter: UserDrafter | None = made
        self._n_vocab, self._is_eog, self._branches = n_vocab, is_eog, branches
        self._on_message = on_message
        self._failed = ""
        self._sampled = False
        self._tokens: Sequence[int] = ()
        self._n_pending = 1
        self._draws: list[Draw] = []
        self._n_proposed = self._n_drafted = self._n_accepted = 0
        try:
            made.begin(tuple(prompt))
        except Exception as error:
            raise UsageError(_failure("begin failed", error), field="drafter", value=self.name) from error

    def begin(self, tokens: Sequence[int], *, sampled: bool, n_predict: int | None) -> None:
        """Go on after the first token."""
        self._sampled = sampled
        self._tokens = TokenView(tokens)

    def draft(self, _tokens: Sequence[int], room: int, position: Position) -> Tree:
        """Return the tree of at most `room` tokens that the user's code proposes, none once it failed."""
        room = min(room, self.n_max - self._n_pending + 1)
        self._n_proposed = 0
        if self._drafter is None or room < 1:
            return ()
        self._draws = []
        try:
            sample = partial(self._sample, position)
            tree = self._tree(self._drafter.draft(self._tokens, room, sample), room)
        except Exception as error:  # noqa: BLE001 - a user's code may raise anything
            self._fail("draft", error)
            return ()
        self._n_proposed = len(tree)
        return tree

    def accept(self, tokens: Sequence[int], outcome: DraftOutcome) -> None:
        """Tell the user's code what became of the draft."""
        self._tokens = TokenView(tokens)
        self._n_pending = outcome.n_pending
        self._n_drafted += self._n_proposed
        self._n_accepted += len(outcome.path)
        if self._drafter:
            try:
                self._drafter.accept(self._tokens, len(outcome.path))
            except Exception as error:  # noqa: BLE001 - a user's code may raise anything
                self._fail("accept", error)

    def sources(self) -> dict[str, tuple[int, int]]:
        """Return the tokens drafted and accepted so far, under the drafter's name."""
        return {self.name: (self._n_drafted, self._n_accepted)} if self._n_drafted else {}

    def plain_rate(self) -> float | None:
        """Return None: no pass without drafts was timed."""
        return None

    def note(self) -> str:
        """Say in one sentence what was drafted, and what failed."""
        said = f"{self._n_accepted} of {self._n_drafted} tokens of {self.name} accepted"
        return f"{said}; {self._failed}" if self._failed else said

    def _fail(self, method: str, error: Exception) -> None:
        self._drafter = None
        self._failed = f"{self.name}: {_failure(f'{method} failed', error)}; the text went on without it"
        self._on_message(self._failed)

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

    def _tree(self, proposed: Proposed, room: int) -> Tree:
        """Return the proposal as a tree. Raises ValueError for one that cannot be."""
        nodes: list[TreeNode] = []
        places = {-1: -1}  # of the entries that became nodes
        left = list(self._draws)
        for i, entry in enumerate(proposed):
            if i == room:
                raise ValueError(f"proposed more tokens than the {room} that there was room for")
            token, parent = entry if isinstance(entry, tuple) else (entry, i - 1)
            if not isinstance(token, Integral) or isinstance(token, bool):
                raise ValueError(f"proposed {token!r}, no token id")
            if not 0 <= token < self._n_vocab:
                raise ValueError(f"proposed {token}: the model's tokens are 0..{self._n_vocab - 1}")
            if not -1 <= parent < i:
                raise ValueError(f"entry {i} follows entry {parent}, which does not come before it")
            draw = next((one for one in left if one is token), None)
            if draw is not None:
                left.remove(draw)
            # The loop takes nothing after the end of the text, and no branch where the target keeps a state.
            place = places.get(parent)
            is_dropped = place is None or (place >= 0 and self._is_eog(nodes[place].token))
            if is_dropped or (not self._branches and place != len(nodes) - 1):
                continue
            places[i] = len(nodes)
            slot = -1 if draw is None else draw.slot
            nodes.append(
                TreeNode(cast("int", place), int(token), "argmax" if slot < 0 else "sampled", 1.0, slot)
            )
        if left:
            self._left_out(left)
        return order(tuple(nodes))

    def _left_out(self, draws: Sequence[Draw]) -> None:
        raise ValueError(f"drew token {draws[0]} and did not propose it, which is not exact")


def _probabilities(weights: Weights, n_vocab: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return weights as probabilities by token id, float32 (n_vocab,). Raises ValueError."""
    probs = np.zeros(n_vocab, np.float32)
    if isinstance(weights, Mapping):
        for token, weight in weights.items():
            if not 0 <= token < n_vocab:
                raise ValueError(f"sample was given the token {token}: the model's are 0..{n_vocab - 1}")
            probs[token] = weight
    elif len(weights) > n_vocab:
        raise ValueError(f"sample was given {len(weights)} weights: the model has {n_vocab} tokens")
    else:
        probs[: len(weights)] = weights
    total = float(probs.sum(dtype=np.float64))
    if not (0.0 < total < np.inf and probs.min() >= 0.0):
        raise ValueError("sample was given weights below 0, or no numbers, or all 0")
    return (probs / total).astype(np.float32)
