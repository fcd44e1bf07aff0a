"""What a step costs does not grow with the text: what it copies is counted, in a short one and a long one."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from edgespec._core import SuffixStore
from edgespec.decoding.choices import NamedDrafter
from edgespec.decoding.generate import Generation
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.session import TokenView, n_common
from edgespec.decoding.tree import Drafter
from edgespec.drafting.draft_model import DraftModel
from edgespec.drafting.pace import Policy
from edgespec.drafting.plugin import PluginDrafter
from edgespec.drafting.suffix import NgramDrafter
from edgespec.drafting.tree_drafter import TreeDrafter
from edgespec.engine.batcher import PREFILL_CHUNK
from toy_models import V
from toy_paces import FixedPolicy, curves, soon_drafting
from toy_sessions import ToySession
from toy_tasks import task_of

SHORT, LONG = 1_000, 10_000


class CountedTokens(list[int]):
    """A list that counts what is copied of it."""

    copied = 0

    def __iter__(self) -> Iterator[int]:
        self.copied += len(self)
        return super().__iter__()

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.copied += len(found) if isinstance(place, slice) else 1
        return found


class LastTokens:
    """A model whose next token depends on the last two; its own copies are not counted."""

    def __init__(self, seed: int) -> None:
        self._rows = np.random.default_rng(seed).normal(size=(V, V, V)).astype(np.float32)

    def session(self) -> ToySession:
        session = ToySession(lambda _prefix: self._rows[0, 0], V)

        def evaluate(tokens: Any, *, n_logits: int = 1, parents: Any = None) -> np.ndarray:
            n_tree = len(parents or ())
            session.tokens += tokens[: len(tokens) - n_tree]
            trunk = [token for i, token in enumerate(tokens[len(tokens) - n_tree :]) if parents[i] == i - 1]
            session.tokens += trunk
            return np.array([self._rows[token % V, 1] for token in tokens[-n_logits:]], np.float32)

        session.eval = evaluate  # type: ignore[method-assign]
        session.model.sequence_breakers = lambda _texts: array("i")
        return session


FILTERS = {
    "none": {},
    "xtc": {"xtc_probability": 0.5},
    "penalties": {"repeat_penalty": 1.1, "penalty_last_n": -1},
    "dry": {"dry_multiplier": 0.8},
}


def drafter_of(policy: Policy | None, prompt: Sequence[int]) -> Drafter:
    """Ours with a policy, or one that a user wrote."""
    if policy is None:
        return PluginDrafter(
            NamedDrafter("ngram", NgramDrafter), prompt, n_vocab=V, is_eog=lambda _token: False
        )
    clocks = curves()
    return TreeDrafter(
        soon_drafting(policy, clocks),
        suffix=SuffixStore(1 << 16),
        model=DraftModel(LastTokens(2).session(), n_vocab=V),
        is_eog=lambda _token: False,
        clocks=clocks,
    )


def copied(n_prompt: int, policy: Policy | None, params: SamplingParams, rule: str, n_steps: int = 12) -> int:
    """Tokens of the text that `n_steps` steps copy after the first, in which it is taken over."""
    prompt = [int(token) for token in np.random.default_rng(1).integers(0, V, n_prompt)]
    drafter = drafter_of(policy, prompt)
    run = Generation(LastTokens(1).session(), drafter, prompt, task_of(params, rule=rule))
    counted = run.tokens = CountedTokens(prompt)
    for i, _ in enumerate(run.events()):
        if i == 2:  # the prompt is read, by both, and a step made
            counted.copied = 0
        if i == 2 + n_steps:
            break
    assert drafter.sources(), "nothing was drafted"
    return counted.copied


@pytest.mark.parametrize("rule", ["block", "match"])
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize(
    "policy",
    [FixedPolicy(gamma=4, suffix=False, staged=False), FixedPolicy(gamma=4), None],
    ids=["model", "auto", "plug-in"],
)
def test_a_step_copies_as_much_of_a_long_text(policy: Policy | None, filters: Any, rule: str) -> None:
    params = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, **filters)
    short, long = (copied(n, policy, params, rule) for n in (SHORT, LONG))
    assert long <= 2 * short < SHORT


def test_reading_a_prompt_copies_it_once() -> None:
    """In parts, as a prompt is read beside others."""
    for n in (SHORT, LONG):
        session = LastTokens(1).session()
        run = Generation(
            session, None, [token % V for token in range(n)], task_of(SamplingParams(temperature=0))
        )
        tokens = run.tokens = CountedTokens(run.tokens)
        while not run.is_writing:
            part = run.ask(PREFILL_CHUNK)
            run.process(part.run())
        assert session.tokens == [token % V for token in range(n)]
        assert tokens.copied <= 2 * n


@pytest.mark.parametrize("kind", [list, tuple, lambda tokens: array("i", tokens)])
@pytest.mark.parametrize("n", [0, 1, 511, 512, 513, 2000])
def test_what_two_texts_have_in_common(kind: Any, n: int) -> None:
    for other in (kind, list):
        assert n_common(kind([*range(n), -1, 5]), other([*range(n), -2, 5])) == n
        assert (
            n_common(kind(range(n)), other(range(n + 3)))
            == n
            == n_common(other(range(n + 3)), kind(range(n)))
        )


def test_texts_that_differ_are_compared_no_further() -> None:
    first, second = CountedTokens(range(LONG)), CountedTokens([-1, *range(1, LONG)])
    assert n_common(first, second) == 0
    assert first.copied < SHORT > second.copied


def test_a_view_is_the_tokens() -> None:
    tokens, more = [*range(7)], [7, 8, 9]
    for view, whole in (
        (TokenView(tokens, more), [*tokens, *more]),
        (TokenView(tokens, more, 5), [*tokens[:5], *more]),
        (TokenView(tokens), [*tokens]),
    ):
        assert [*view] == whole
        for start in (None, *range(-12, 12)):
            for stop in (None, *range(-12, 12)):
                assert view[start:stop] == tuple(whole[start:stop])
                assert view[start:stop:2] == tuple(whole[start:stop:2])
        assert [view[i] for i in range(-len(whole), len(whole))] == [*whole, *whole]
        with pytest.raises(IndexError):
            view[len(whole)]
    view = TokenView(tokens)
    tokens.append(7)
    assert [*view] == [*range(7)]
