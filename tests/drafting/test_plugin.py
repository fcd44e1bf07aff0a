"""Drafters that users write: how they are found, what they may propose, and the proof that they are exact."""

from __future__ import annotations

import re
import sys
from array import array
from pathlib import Path

import numpy as np
import pytest

from edgespec import Engine, SamplingParams, UsageError
from edgespec.decoding.choices import NamedDrafter
from edgespec.decoding.drafter import DraftOutcome, Position
from edgespec.drafting.plugin import PluginDrafter, find_drafter
from edgespec.testing import InexactDrafterError, check_drafter

PAGE = Path(__file__).parents[2] / "docs/write-a-drafter.md"
WEIGHTS = [{0: 1, 1: 2}, {0: 1, 1: 1, 2: 3}, [1.0, 0.0, 4.0]]


class Nothing:
    """Proposes nothing; the others are like it but for what they show."""

    def begin(self, tokens):
        pass

    def draft(self, tokens, room, sample):
        return []

    def accept(self, tokens, n_accepted):
        pass


class Chain(Nothing):
    """Draws each token from a table."""

    def draft(self, tokens, room, sample):
        drafted, last = [], tokens[-1]
        for _ in range(room):
            last = sample(WEIGHTS[last])
            drafted.append(last)
        return drafted


class TwoDrawn(Nothing):
    """Draws two tokens for one place, and guesses what follows the second one."""

    def draft(self, tokens, room, sample):
        weights = WEIGHTS[tokens[-1]]
        return [(sample(weights), -1), (sample(weights), -1), (1, 1)] if room >= 3 else [2][:room]


class UntilTwo(Chain):
    """Draws nothing after a token that it does not like: that is allowed."""

    def draft(self, tokens, room, sample):
        drafted, last = [], tokens[-1]
        while len(drafted) < room and last != 2:
            last = sample(WEIGHTS[last])
            drafted.append(last)
        return drafted


class SaysTwice(Nothing):
    """Proposes the same draw as if it had been drawn again."""

    def draft(self, tokens, room, sample):
        one = sample(WEIGHTS[tokens[-1]])
        return [(one, -1), (one, -1)][:room]


class Forges(Nothing):
    """Claims to have drawn what it chose: an own class cannot make edgespec believe it."""

    def draft(self, tokens, room, sample):
        real = sample({0: 1, 1: 1, 2: 1})
        forged = type(real)(2)
        if hasattr(real, "slot"):
            forged.slot = real.slot
        return [(real, -1), (forged, -1)][:room]


class Picky(Nothing):
    """Leaves out drawn tokens that are unlikely."""

    def draft(self, tokens, room, sample):
        drawn = sample({0: 1, 1: 2, 2: 6})
        return [drawn] if drawn else []


class Peeks(Nothing):
    """Proposes the drawn token where it is the one that came before, and another one where not."""

    def draft(self, tokens, room, sample):
        drawn = sample({0: 1, 1: 2, 2: 6})
        return [drawn] if drawn == tokens[-1] else [0]


class Moody(Nothing):
    """Has random numbers of its own."""

    coins = np.random.default_rng(1)

    def draft(self, tokens, room, sample):
        return [int(self.coins.integers(3))]


class Changes(Nothing):
    def draft(self, tokens, room, sample):
        tokens[0] = 2
        return []


class FailsInBegin(Nothing):
    def begin(self, tokens):
        raise KeyError("table")


class FailsInAccept(Nothing):
    def accept(self, tokens, n_accepted):
        raise ValueError("not\nlearnt")


def proposing(*proposed):
    """A class of drafters that proposes this."""
    return type("Fixed", (Nothing,), {"draft": lambda self, tokens, room, sample: list(proposed)})


def weighing(weights):
    """A class of drafters that samples with these weights."""
    return type("Weighs", (Nothing,), {"draft": lambda self, tokens, room, sample: [sample(weights)]})


# ---- the proof ----


@pytest.mark.parametrize("drafter", [Nothing, Chain, TwoDrawn, UntilTwo, SaysTwice, Forges, proposing(1)])
def test_exact_drafters_are_proved(drafter):
    check_drafter(drafter, length=4 if drafter is TwoDrawn else 3)


@pytest.mark.parametrize("drafter", [Picky, Peeks])
def test_leaving_out_what_was_drawn_is_shown_with_a_text(drafter):
    with pytest.raises(InexactDrafterError) as caught:
        check_drafter(drafter, length=3)
    found = re.search(r"probability (0\.\d+), and with the drafter (0\.\d+)", str(caught.value))
    assert found, caught.value
    assert abs(float(found[1]) - float(found[2])) > 1e-3
    assert "did not propose it" in str(caught.value)


@pytest.mark.parametrize(
    ("drafter", "said"),
    [
        (Moody, "cannot be checked: after the tokens 0 1"),
        (Changes, "object does not support item assignment"),
        (FailsInBegin, "begin failed: KeyError: 'table'"),
        (FailsInAccept, "accept failed: ValueError: not learnt"),
        (proposing(0, 1, 2, 0), "more tokens than the 2 that there was room for"),
        (proposing(3), "proposed 3: the model's tokens are 0..2"),
        (proposing(-1), "proposed -1: the model's tokens are 0..2"),
        (proposing(1.5), "proposed 1.5, no token id"),
        (proposing(True), "proposed True, no token id"),
        (proposing((1, 0)), "entry 0 follows entry 0, which does not come before it"),
        (weighing({0: -1, 1: 2}), "weights below 0"),
        (weighing({0: float("nan")}), "no numbers"),
        (weighing([0, 0, 0]), "all 0"),
        (weighing({7: 1}), "sample was given the token 7"),
        (weighing([1] * 4), "sample was given 4 weights"),
        (object, "has no method begin(tokens)"),
        (lambda: 1 / 0, "cannot be made: ZeroDivisionError"),
    ],
)
def test_a_drafter_that_breaks_the_interface_is_named(drafter, said):
    with pytest.raises(InexactDrafterError, match=re.escape(said)):
        check_drafter(drafter, length=3)


# ---- how one is found ----


def write_package(folder, name="my_package", *, entry_point=None):
    """A module with a drafter, and a distribution that declares it."""
    (folder / f"{name}.py").write_text(
        "from test_plugin import Nothing\nclass Mine(Nothing): pass\nnumber = 3\n", encoding="utf-8"
    )
    if entry_point:
        info = folder / f"{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[edgespec.drafters]\nmine = {entry_point}\n")


@pytest.fixture
def package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.delitem(sys.modules, "my_package", raising=False)
    return tmp_path


@pytest.mark.parametrize("given", ["my_package:Mine", "./my_package.py:Mine", "mine"])
def test_found_by_module_by_file_and_by_entry_point(package, given):
    write_package(package, entry_point="my_package:Mine")
    found = find_drafter(given)
    assert isinstance(found, NamedDrafter)
    assert type(found.make()).__name__ == "Mine"
    assert found.name == given.rpartition(":")[2]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nowhere:Mine", "cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
        ("./nowhere.py:Mine", "cannot be imported: FileNotFoundError"),
        ("./broken.py:Mine", "cannot be imported: SyntaxError"),
        ("my_package:Nine", "my_package has no class 'Nine'; it has Nothing, Mine"),
        ("my_package:number", "a int, and no class"),
        ("mine", "cannot be imported: AttributeError"),
        ("theirs", "must be one of auto, tree, chain, model, mtp, suffix, staged, none"),
    ],
)
def test_what_cannot_be_had_is_one_line(package, given, said):
    write_package(package, entry_point="my_package:Ten")
    (package / "broken.py").write_text("class")
    with pytest.raises(UsageError, match=re.escape(said)) as caught:
        find_drafter(given)
    assert caught.value.field == "drafter"
    assert "\n" not in str(caught.value)


# ---- at work ----


def test_a_failure_is_said_once_and_ends_the_drafts():
    said = []
    drafter = PluginDrafter(
        NamedDrafter("mine", proposing(9)), [0], n_vocab=3, is_eog=lambda token: False, on_message=said.append
    )
    drafter.begin([0], sampled=True, n_predict=None)
    sampler = SamplingParams().sampler(3, 4)
    position = Position(sampler, lambda drafted: array("i"), lambda n: [0.5] * n)
    for _ in range(2):
        assert drafter.draft((), 3, position) == ()
        drafter.accept([0, 1], DraftOutcome((), (1,), 1, 1, 0.0))
    (line,) = said
    assert line.startswith("mine: draft failed: ValueError: proposed 9")
    assert line in drafter.note()


def test_nothing_follows_the_end_of_the_text_and_a_state_takes_no_branches():
    def tree(drafter, **options):
        made = PluginDrafter(
            NamedDrafter("mine", drafter), [], n_vocab=9, is_eog=lambda token: token == 7, **options
        )
        made.begin([0], sampled=False, n_predict=None)
        position = Position(None, None, None)
        return [(node.token, node.parent) for node in made.draft((), 8, position)]

    assert tree(proposing(5, 7, 6, (4, -1), 3)) == [(5, -1), (7, 0), (4, -1), (3, 2)]
    branchy = proposing(5, (6, -1), 1, (2, 0), 3)
    assert tree(branchy) == [(5, -1), (2, 0), (3, 1), (6, -1), (1, 3)]
    assert tree(branchy, branches=False) == [(5, -1), (2, 0), (3, 1)]


@pytest.mark.parametrize("parallel", [1, 3])
def test_a_text_is_the_targets_own_and_its_source_is_named(tiny_path, parallel):
    class Ends(Nothing):
        """Proposes the last tokens again, some of which a tiny model repeats."""

        def draft(self, tokens, room, sample):
            half = list(tokens[-8 : len(tokens) : 2])
            return [*tokens[-8:][:room]] if len(tokens) % 2 else [(half[0], -1), (half[1], -1)][:room]

    options = {"params": SamplingParams(temperature=0.7), "seed": 3, "n_predict": 60}
    with Engine(tiny_path, drafter="none", profile=False, kernels="off") as engine:
        wanted = engine.generate("abc " * 9, **options)
    with Engine(tiny_path, drafter=Ends, profile=False, kernels="off", parallel=parallel) as engine:
        streams = [engine.stream("abc " * 9, **options) for _ in range(parallel)]
        for stream in streams:
            list(stream)
    for stream in streams:
        result = stream.result
        assert result.token_ids == wanted.token_ids
        assert result.seed == 3
        assert result.sources["Ends"][0] == result.stats.n_drafted > 0
        assert result.sources["Ends"][1] == result.stats.n_accepted


def test_what_makes_no_sense_is_refused_by_name(tiny_path, tiny_draft_path):
    with pytest.raises(UsageError, match="Nothing drafts without a model"):
        Engine(tiny_path, tiny_draft_path, drafter=Nothing)
    with pytest.raises(UsageError, match="objective"):
        Engine(tiny_path, drafter=Nothing, objective="energy")
    with Engine(tiny_path, drafter=Nothing, profile=False, kernels="off") as engine:
        with pytest.raises(UsageError, match="gamma 3: Nothing chooses itself"):
            engine.generate("abc", gamma=3)
        with pytest.raises(UsageError, match="on_step"):
            engine.generate("abc", on_step=print)
        assert engine.generate("abc", gamma=0, n_predict=3).sources == {}
    with (
        Engine(tiny_path, drafter=FailsInBegin, profile=False, kernels="off") as engine,
        pytest.raises(UsageError, match="drafter FailsInBegin: begin failed: KeyError"),
    ):
        engine.generate("abc")


def test_the_page_has_a_complete_one(tiny_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    names = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec", dont_inherit=True), names)
    assert blocks[0].count("\n") <= 30
    with Engine(tiny_path, drafter=names["Bigrams"], profile=False, kernels="off") as engine:
        result = engine.generate("abc " * 9, n_predict=40, seed=1)
    assert result.sources["Bigrams"][0] > 0
    check_drafter("edgespec.drafting.suffix:NgramDrafter", length=3)
