"""Checks for what users write against edgespec: `check_drafter` proves that a drafter is exact.

    def test_my_drafter():
        check_drafter(MyDrafter)

A toy model gives probabilities after every text over a vocabulary of few tokens. All possible draws of a
drafter and all decisions of the target are tried, so the probability of each text of a few tokens is known
exactly, with the drafter and without: after short prompts, and at the end of a long text. A draft that breaks
the rule of `check_draws` ends drafting for its text here too.
"""

from __future__ import annotations

import itertools
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from edgespec import _core
from edgespec.decoding.choices import NamedDrafter
from edgespec.decoding.records import Step
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.session import ForwardResult
from edgespec.decoding.tree import Position, Tree, lower, paths
from edgespec.drafting.plugin import Draw, KnownDraws, PluginDrafter, UserDrafter, check_draws, find_drafter
from edgespec.errors import UsageError, whole_number
from edgespec.platform.plugins import PluginError

Text = tuple[int, ...]
Row = npt.NDArray[np.float32]

_PROMPTS: tuple[Text, ...] = ((0, 1), (0, 1, 2, 0, 1, 2, 0, 1))
"""Each but its last token, which the target has written, is what a drafter begins with."""
_TOLERANCE = 1e-5  # of a probability: the C core computes in float32
_NO_TOKENS = array("i")
_NO_ROWS = np.empty((0, 0), np.float32)
_ROOM = 4  # most tokens of a draft in a long text
_AFTER_LONG = 3  # most tokens that are compared after it
_MOST_TEXTS = 10_000
_MOST_DRAFTS = 3_000  # after one prompt, in one way of sampling
_TOLD = 12  # tokens of a text in a message


class _TooManyDrafts(Exception):  # noqa: N818 - no error: fewer tokens are compared then
    pass


class InexactDrafterError(AssertionError):
    """A drafter changes what the target writes, or breaks the interface; the message shows where."""


class ToyModel:
    """A language model over `n_vocab` tokens whose logits depend on all of the text so far."""

    def __init__(self, seed: int, sharpness: float = 1.5, n_vocab: int = 3) -> None:
        """Make a model that depends on `seed`; the larger `sharpness`, the surer it is."""
        self.seed, self.sharpness, self.n_vocab = seed, sharpness, n_vocab

    def logits(self, text: Sequence[int]) -> Row:
        """Return the logits after `text`, float32 (n_vocab,)."""
        rng = np.random.default_rng([self.seed, len(text), *text])
        return rng.normal(0, self.sharpness, self.n_vocab).astype(np.float32)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return a token for each character, as a tokenizer would."""
        return [ord(character) % self.n_vocab for character in text]

    def piece(self, token: int) -> bytes:
        """Return the letter that is `token`."""
        return b"%c" % (ord("a") + token % 26)


@dataclass(frozen=True)
class _Case:
    """A way for the target to sample."""

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
    drafter: Callable[[], UserDrafter] | str,
    *,
    length: int = 4,
    n_vocab: int = 3,
    seed: int = 1,
    long: int = 64,
) -> str:
    """Prove that a drafter does not change the distribution of texts; else raise InexactDrafterError.

    `drafter`: the class, or anything else that makes an object for a text; or a name, as of `--drafter`. All
    texts of `length` tokens over `n_vocab` are compared, after several prompts and after a text of `long`
    tokens that was written with it, greedy and sampled, on the toy model of `seed`. The drafter must do the
    same after the same text: state outside its object is not reset. Returns a sentence that says what was
    compared: fewer tokens than `length` if it draws very many. Raises UsageError for numbers that allow no
    comparison.
    """
    for name, value, least in (
        ("length", length, 1),
        ("n_vocab", n_vocab, 2),
        ("seed", seed, 0),
        ("long", long, 0),
    ):
        if whole_number(name, value) < least:
            raise UsageError(f"must be {least} or more", field=name, value=value)
    if n_vocab**length > _MOST_TEXTS:
        problem = f"too many texts of {n_vocab} tokens to compare: {_MOST_TEXTS} at most"
        raise UsageError(problem, field="length", value=length)
    try:
        found = find_drafter(drafter)
    except UsageError as error:
        raise InexactDrafterError(str(error)) from error
    if not isinstance(found, NamedDrafter):
        raise UsageError("no drafter that a user wrote", field="drafter", value=found)
    target = ToyModel(seed, n_vocab=n_vocab)
    compared = [length, min(length, _AFTER_LONG)]
    for case, prompt in itertools.product(_CASES, _PROMPTS):
        tokens = tuple(token % n_vocab for token in prompt)
        compared[0] = _check(compared[0], partial(_Enumeration, found, case, target, tokens))
    for case in _CASES if long else ():
        compared[1] = _check(compared[1], partial(_Enumeration, found, case, target, tokens, n_before=long))
    after = f", and of {compared[1]} after a text of {long}" if long else ""
    texts = f"all texts of {compared[0]} tokens over {n_vocab} after {len(_PROMPTS)} prompts{after}"
    return f"{found} is exact in {texts}, greedy and sampled, by the toy model of seed {seed}"


def _check(length: int, begin: Callable[[int], _Enumeration]) -> int:
    """Compare the texts of `length` tokens, or of fewer if they are too many; return how many tokens."""
    while True:
        try:
            begin(length).check()
        except _TooManyDrafts:
            length -= 1
        else:
            return length


def outcomes(
    sampler: _core.Sampler, rows: Row, tree: Tree, *, block: bool, lenience: float = 1.0
) -> Iterator[tuple[int, float, npt.NDArray[np.float64]]]:
    """Yield the outcomes of verifying `tree`: the last accepted node (-1: none), and its probability.

    With each comes the distribution of the token after it, (n_vocab,). `rows` are the target's logits, (nodes
    + 1, n_vocab); the slots of `sampler` are filled.
    """
    arrays = lower(tree)
    for end in range(-1, len(tree)):
        out = np.empty(rows.shape[1], np.float32)
        chance = sampler.outcome(rows, *arrays, _NO_TOKENS, block, end, out, lenience=lenience)
        yield end, chance, out.astype(np.float64)


@dataclass(frozen=True)
class _Step:
    """A step of one text: the drafter's draws and proposals, and the outcome."""

    draws: Text
    tree: Tree
    path: Text
    """The accepted nodes."""
    text: Text
    """All of the text after it."""


class _ScriptedDrafter(PluginDrafter):
    """Draws the tokens of a script, and then those that `pick` chooses; the user's errors end the check.

    Draws that the user's code leaves out are noted.
    """

    script: Text = ()
    drawn: list[int]
    probs: list[Row]
    pick: Callable[[Row], int] = staticmethod(lambda probs: int(np.flatnonzero(probs)[0]))
    all_known: KnownDraws
    left_out = broken = ""

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
        token = self.script[slot] if slot < len(self.script) else self.pick(probs)
        self.drawn.append(token)
        self.probs.append(probs)
        return token

    def _check_draws(self, known: KnownDraws, room: int, left_out: Sequence[Draw]) -> bool:
        if left_out:
            self.left_out = f"; it drew {left_out[0]} with `sample` and did not propose it"
        try:
            check_draws(self.all_known, room, self._draws, left_out)
        except ValueError as error:
            self.broken = str(error)
        return False

    def _fail(self, error: PluginError) -> None:
        raise InexactDrafterError(f"{self.name}: {error.problem}") from error


class _Enumeration:
    """All texts after one prompt, and their probabilities."""

    def __init__(
        self,
        drafter: NamedDrafter,
        case: _Case,
        target: ToyModel,
        prompt: Text,
        length: int,
        n_before: int = 0,
    ) -> None:
        """Compare texts of `length` tokens, after `prompt` and `n_before` tokens written with the drafter."""
        self._drafter, self._case, self._target, self._prompt = drafter, case, target, prompt
        self._n_before, self._length = len(prompt) + n_before, len(prompt) + n_before + length
        self._sampler = case.params.sampler(target.n_vocab, PluginDrafter.n_max)
        self._position = Position(self._sampler, lambda _drafted: _NO_TOKENS, lambda n: [0.0] * n)
        self._written: dict[Text, float] = defaultdict(float)
        self._known: KnownDraws = {}
        self._left_out = self._broken = ""
        self._n_drafts = 0

    def check(self) -> None:
        """Compare the probabilities of all texts. Raises InexactDrafterError."""
        steps = self._walk()
        text = steps[-1].text if steps else self._prompt
        self._spread(steps, 1.0)
        wanted = dict(self._alone(text, 1.0))
        worst = max(wanted, key=lambda text: abs(self._written[text] - wanted[text]))
        if abs(self._written[worst] - wanted[worst]) > _TOLERANCE:
            written = _words(worst[len(text) :])
            raise InexactDrafterError(
                f"{self._drafter} is not exact, {self._case.name}: after the tokens {_words(text)} "
                f"the target writes {written} with probability {wanted[worst]:.4f}, and with the drafter "
                f"{self._written[worst]:.4f}{self._left_out}"
            )
        if self._broken:
            raise InexactDrafterError(f"{self._drafter}, {self._case.name}: {self._broken}")

    def _alone(self, text: Text, chance: float) -> Iterator[tuple[Text, float]]:
        if len(text) == self._length:
            yield text, chance
            return
        rows = self._target.logits(text)[None]
        ((_, _, following),) = outcomes(self._sampler, rows, (), block=False)
        for token, p in enumerate(following):
            yield from self._alone((*text, token), chance * float(p))

    def _walk(self) -> tuple[_Step, ...]:
        """Write the random tokens before the compared ones."""
        rng = np.random.default_rng(self._target.seed)
        steps: list[_Step] = []
        drafter, text = self._after(()), self._prompt
        drafter.pick = lambda probs: int(rng.choice(len(probs), p=probs / probs.sum(dtype=np.float64)))
        while len(text) < self._n_before:
            tree = drafter.propose_by((), self._room(text), self._position)
            found = self._outcomes(drafter, text, tree)
            weights = np.array([p for _, p, _ in found])
            path, _, following = found[rng.choice(len(found), p=weights / weights.sum())]
            token = int(rng.choice(len(following), p=following / following.sum()))
            steps.append(self._step(drafter, text, tree, path, token))
            self._accept(drafter, text, steps[-1])
            text = steps[-1].text
        self._note(drafter)
        return tuple(steps)

    def _spread(self, steps: tuple[_Step, ...], chance: float) -> None:
        """Add the probabilities of all texts that continue after these steps."""
        text = steps[-1].text if steps else self._prompt
        if len(text) == self._length:
            self._written[text] += chance
            return
        scripts: list[Text] = [()]
        while scripts:
            self._n_drafts += 1
            if self._n_drafts > _MOST_DRAFTS and self._length > self._n_before + 1:
                raise _TooManyDrafts
            drafter = self._after(steps)
            tree = drafter.propose_by(scripts.pop(), self._room(text), self._position)
            scripts += drafter.other_scripts()
            self._note(drafter)
            # All before the next draft, which has the slots.
            for path, p, following in self._outcomes(drafter, text, tree):
                for token in np.flatnonzero(following * p):
                    step = self._step(drafter, text, tree, path, int(token))
                    self._spread((*steps, step), chance * drafter.chance * p * float(following[token]))

    def _note(self, drafter: _ScriptedDrafter) -> None:
        self._left_out = self._left_out or drafter.left_out
        self._broken = self._broken or drafter.broken

    def _outcomes(
        self, drafter: _ScriptedDrafter, text: Text, tree: Tree
    ) -> list[tuple[Text, float, npt.NDArray[np.float64]]]:
        """Return the possible outcomes of a draft: accepted nodes, probability, the next distribution."""
        rows = np.stack([self._target.logits((*text, *path)) for path in paths(tree)])
        found = outcomes(self._sampler, rows, tree, block=self._case.block)
        return [(_path_to(end, tree), p, following) for end, p, following in found]

    def _step(self, drafter: _ScriptedDrafter, text: Text, tree: Tree, path: Text, token: int) -> _Step:
        kept = (tree[i].token for i in path)
        return _Step(tuple(drafter.drawn), tree, path, (*text, *kept, token))

    def _accept(self, drafter: _ScriptedDrafter, text: Text, step: _Step) -> None:
        made = Step(step.text[len(text) :], len(step.tree), step.path)
        drafter.accept(step.text, made, ForwardResult(_NO_ROWS, 0.0, len(step.tree) + 1))

    def _room(self, text: Text) -> int:
        return min(_ROOM, self._length - len(text) - 1)

    def _after(self, steps: tuple[_Step, ...]) -> _ScriptedDrafter:
        """Return a new drafter after replaying `steps`."""
        text, target = self._prompt, self._target
        made = _ScriptedDrafter(
            self._drafter, text[:-1], n_vocab=target.n_vocab, is_eog=lambda _token: False, tokenizer=target
        )
        made.all_known = self._known
        made.begin(text, sampled=self._case.sampled, n_predict=None)
        for step in steps:
            tree = made.propose_by(step.draws, self._room(text), self._position)
            if tree != step.tree:
                first, second = (_words([node.token for node in one]) for one in (step.tree, tree))
                raise InexactDrafterError(
                    f"{self._drafter} cannot be checked: after the tokens {_words(text)} it proposed "
                    f"{first}, and then {second}; let it keep all in the object, and draw with `sample` alone"
                )
            self._accept(made, text, step)
            text = step.text
        return made


def _path_to(node: int, tree: Tree) -> Text:
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = tree[node].parent
    return tuple(reversed(path))


def _words(tokens: Sequence[int]) -> str:
    last = " ".join(map(str, tokens[-_TOLD:])) or "(none)"
    return f"(of {len(tokens)}) ... {last}" if len(tokens) > _TOLD else last
