"""Checks for what users write against edgespec: `check_drafter` proves that a drafter is exact.

    def test_my_drafter():
        check_drafter(MyDrafter)

A toy model gives probabilities after every text over a vocabulary of few tokens. All that a drafter may draw
and all that the target may accept is tried, so the probability of each text of a few tokens is known to the
last digit, with the drafter and without.
"""

from __future__ import annotations

import itertools
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgespec import _core
from edgespec.decoding.choices import NamedDrafter
from edgespec.decoding.drafter import DraftOutcome, Position
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.tree import Lowered, Tree, lower
from edgespec.drafting.plugin import PluginDrafter, UserDrafter, find_drafter
from edgespec.errors import UsageError

Text = tuple[int, ...]
Row = npt.NDArray[np.float32]

_PROMPTS: tuple[Text, ...] = ((0, 1), (0, 1, 2, 0, 1, 2, 0, 1))
"""Each but its last token, which the target has written, is what a drafter begins with."""
_TOLERANCE = 1e-5  # of a probability: the C core computes in float32
_NO_TOKENS = array("i")


class InexactDrafterError(AssertionError):
    """A drafter changes what the target writes, or breaks the interface; the message shows where."""


class ToyModel:
    """A language model over `n_vocab` tokens whose logits depend on the whole text before."""

    def __init__(self, seed: int, sharpness: float = 1.5, n_vocab: int = 3) -> None:
        """Make another model of each `seed`; the larger `sharpness`, the surer it is."""
        self.seed, self.sharpness, self.n_vocab = seed, sharpness, n_vocab

    def logits(self, text: Sequence[int]) -> Row:
        """Return the logits after `text`, float32 (n_vocab,)."""
        rng = np.random.default_rng([self.seed, len(text), *text])
        return rng.normal(0, self.sharpness, self.n_vocab).astype(np.float32)


@dataclass(frozen=True)
class _Case:
    """A way in which the target samples."""

    name: str
    params: SamplingParams
    block: bool = False
    sampled: bool = True
    """Whether p is weighed against q; else the drafted tokens are point masses (the match rule)."""


def _plain(temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)


_CASES = (
    _Case("greedy", _plain(0.0), sampled=False),
    _Case("sampled with a seed (match rule)", _plain(1.0), sampled=False),
    _Case("sampled (chain rule)", _plain(1.0)),
    _Case("sampled (block rule)", _plain(1.0), block=True),
)


def check_drafter(
    drafter: Callable[[], UserDrafter] | str, *, length: int = 4, n_vocab: int = 3, seed: int = 1
) -> None:
    """Prove that a drafter leaves the distribution of texts as it is; else raise InexactDrafterError.

    `drafter`: the class, or anything else that makes an object for a text; or a name, as of `--drafter`. All
    texts of `length` tokens over `n_vocab` are compared, after several prompts, greedy and sampled, on the
    toy model of `seed`. The drafter has to do the same after the same text: what it keeps outside its
    object is not taken back.
    """
    try:
        found = find_drafter(drafter)
    except UsageError as error:
        raise InexactDrafterError(str(error)) from error
    if not isinstance(found, NamedDrafter):
        raise UsageError("no drafter that a user wrote", field="drafter", value=found)
    for case, prompt in itertools.product(_CASES, _PROMPTS):
        _Enumeration(found, case, ToyModel(seed, n_vocab=n_vocab), prompt, length).check()


def outcomes(
    sampler: _core.Sampler, rows: Row, tree: Lowered, *, block: bool, lenience: float = 1.0
) -> Iterator[tuple[int, float, npt.NDArray[np.float64]]]:
    """Yield what verifying `tree` may come to: the last accepted node (-1: none), and its probability.

    With each comes the distribution of the token after it, (n_vocab,). `rows` are the target's logits, (nodes
    + 1, n_vocab); the slots of `sampler` are filled.
    """
    for end in range(-1, tree.n_nodes):
        out = np.empty(rows.shape[1], np.float32)
        chance = sampler.outcome(rows, *tree, _NO_TOKENS, block, end, out, lenience=lenience)
        yield end, chance, out.astype(np.float64)


@dataclass(frozen=True)
class _Step:
    """A step of one text: what the drafter drew and proposed, and what came of it."""

    draws: Text
    tree: Tree
    path: Text
    """The accepted nodes."""
    text: Text
    """All of the text after it."""


class _ScriptedDrafter(PluginDrafter):
    """Draws the tokens of a script and then the first possible ones; the user's errors end the check."""

    script: Text = ()
    drawn: list[int]
    probs: list[Row]
    left_out = ""

    def propose_by(self, script: Text, room: int, position: Position) -> Tree:
        self.script, self.drawn, self.probs = script, [], []
        return self.draft((), room, position)

    @property
    def chance(self) -> float:
        return float(np.prod([probs[token] for token, probs in zip(self.drawn, self.probs, strict=True)]))

    def other_scripts(self) -> Iterator[Text]:
        for i in range(len(self.script), len(self.drawn)):
            for token in np.flatnonzero(self.probs[i]):
                if token != self.drawn[i]:
                    yield (*self.drawn[:i], int(token))

    def _drawn(self, position: Position, slot: int) -> int:
        probs = np.empty(self._n_vocab, np.float32)
        position.sampler.probs(slot, probs)
        token = self.script[slot] if slot < len(self.script) else int(np.flatnonzero(probs)[0])
        self.drawn.append(token)
        self.probs.append(probs)
        return token

    def _left_out(self, draws: Sequence[int]) -> None:
        self.left_out = f"; it drew {draws[0]} with `sample` and did not propose it"

    def _fail(self, method: str, error: Exception) -> None:
        super()._fail(method, error)
        raise InexactDrafterError(self._failed.removesuffix("; the text went on without it")) from error


class _Enumeration:
    """All texts after one prompt, and their probabilities."""

    def __init__(
        self, drafter: NamedDrafter, case: _Case, target: ToyModel, prompt: Text, length: int
    ) -> None:
        self._drafter, self._case, self._target, self._prompt = drafter, case, target, prompt
        self._length = len(prompt) + length
        self._sampler = case.params.sampler(target.n_vocab, PluginDrafter.n_max)
        self._position = Position(self._sampler, lambda _drafted: _NO_TOKENS, lambda n: [0.0] * n)
        self._written: dict[Text, float] = defaultdict(float)
        self._left_out = ""

    def check(self) -> None:
        """Compare the probabilities of all texts. Raises InexactDrafterError."""
        self._spread((), 1.0)
        wanted = dict(self._alone(self._prompt, 1.0))
        worst = max(wanted, key=lambda text: abs(self._written[text] - wanted[text]))
        if abs(self._written[worst] - wanted[worst]) > _TOLERANCE:
            written = _words(worst[len(self._prompt) :])
            raise InexactDrafterError(
                f"{self._drafter} is not exact, {self._case.name}: after the tokens {_words(self._prompt)} "
                f"the target writes {written} with probability {wanted[worst]:.4f}, and with the drafter "
                f"{self._written[worst]:.4f}{self._left_out}"
            )

    def _alone(self, text: Text, chance: float) -> Iterator[tuple[Text, float]]:
        if len(text) == self._length:
            yield text, chance
            return
        rows = self._target.logits(text)[None]
        ((_, _, following),) = outcomes(self._sampler, rows, lower(()), block=False)
        for token, p in enumerate(following):
            yield from self._alone((*text, token), chance * float(p))

    def _spread(self, steps: tuple[_Step, ...], chance: float) -> None:
        """Add the probabilities of all texts that go on after these steps."""
        text = steps[-1].text if steps else self._prompt
        if len(text) == self._length:
            self._written[text] += chance
            return
        scripts: list[Text] = [()]
        while scripts:
            drafter = self._after(steps)
            tree = drafter.propose_by(scripts.pop(), self._room(text), self._position)
            scripts += drafter.other_scripts()
            self._left_out = self._left_out or drafter.left_out
            lowered = lower(tree)
            rows = np.stack([self._target.logits((*text, *path)) for path in lowered.paths()])
            # All before the next draft, which has the slots.
            found = list(outcomes(self._sampler, rows, lowered, block=self._case.block))
            for end, p, following in found:
                path = _path_to(end, lowered)
                kept = tuple(lowered.tokens[i] for i in path)
                for token in np.flatnonzero(following * p):
                    step = _Step(tuple(drafter.drawn), tree, path, (*text, *kept, int(token)))
                    self._spread((*steps, step), chance * drafter.chance * p * float(following[token]))

    def _room(self, text: Text) -> int:
        return self._length - len(text) - 1

    def _after(self, steps: tuple[_Step, ...]) -> _ScriptedDrafter:
        """Return a new drafter that has gone through `steps`."""
        text, n_vocab = self._prompt, self._target.n_vocab
        try:
            made = _ScriptedDrafter(self._drafter, text[:-1], n_vocab=n_vocab, is_eog=lambda _token: False)
        except UsageError as error:
            raise InexactDrafterError(str(error)) from error
        made.begin(text, sampled=self._case.sampled, n_predict=None)
        for step in steps:
            tree = made.propose_by(step.draws, self._room(text), self._position)
            if tree != step.tree:
                first, second = (_words(lower(one).tokens) for one in (step.tree, tree))
                raise InexactDrafterError(
                    f"{self._drafter} cannot be checked: after the tokens {_words(text)} it proposed "
                    f"{first}, and then {second}; let it keep all in the object, and draw with `sample` alone"
                )
            emitted, text = step.text[len(text) :], step.text
            made.accept(text, DraftOutcome(step.path, emitted, 1, len(tree) + 1, 0.0))
        return made


def _path_to(node: int, tree: Lowered) -> Text:
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = tree.parents[node]
    return tuple(reversed(path))


def _words(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens)) or "(none)"
