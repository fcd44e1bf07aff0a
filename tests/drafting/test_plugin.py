"""Drafters that users write: how they are found, what they may propose, and the proof that they are exact."""

from __future__ import annotations

import asyncio
import itertools
import math
import re
import signal
import subprocess
import sys
import tomllib
from array import array
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from command_line import COMMAND, user_environment
from edgespec import Engine, SamplingParams, UsageError, testing
from edgespec.decoding.choices import NamedDrafter
from edgespec.decoding.generate import Generation
from edgespec.decoding.records import Step
from edgespec.decoding.session import ForwardResult
from edgespec.decoding.tree import Position
from edgespec.drafting.pace import Policy
from edgespec.drafting.plugin import DrafterCosts, PluginDrafter, SourcePace, find_drafter
from edgespec.drafting.profile import CostCurve, PassCosts
from edgespec.testing import InexactDrafterError, check_drafter
from toy_paces import OURS, STEEPER, STOCK, pace_of
from toy_sessions import ToySession
from toy_tasks import task_of

pytestmark = pytest.mark.proof

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


class Second(Nothing):
    """Draws two tokens and proposes the second, whatever they are: that is exact."""

    def draft(self, tokens, room, sample):
        return [sample(WEIGHTS[sample(WEIGHTS[tokens[-1]])])]


class Other(Nothing):
    """Proposes another token than it drew, which is a guess like any: that is exact, too."""

    def draft(self, tokens, room, sample):
        return [(sample(WEIGHTS[tokens[-1]]) + 1) % 3]


class Rooms(Nothing):
    """Draws more than there is room for."""

    def draft(self, tokens, room, sample):
        return [sample(WEIGHTS[0]), sample(WEIGHTS[1])][:room]


class Stumbles(Nothing):
    """Fails where it draws a token that it does not like."""

    def draft(self, tokens, room, sample):
        drawn = sample({0: 1, 1: 2, 2: 6})
        return [(drawn, -1 if drawn else 7)]


class BreaksLate(Chain):
    """Leaves out what it drew, after 40 tokens."""

    def draft(self, tokens, room, sample):
        return (Picky if len(tokens) > 40 else Chain).draft(self, tokens, room, sample)


class PlacesLate(Nothing):
    """Proposes a drawn token in the place of its own that it has by what it is, after 40 tokens."""

    def draft(self, tokens, room, sample):
        if room < 2:
            return []
        a, b = sample(WEIGHTS[tokens[-1]]), sample({0: 1, 1: 1, 2: 1})
        return [(a, -1), (b, -1 if b == 1 and len(tokens) > 40 else 0)]


class FailsLate(Nothing):
    def accept(self, tokens, n_accepted):
        if len(tokens) > 40:
            raise SystemExit(3)


class Letters(Nothing):
    """Reads and writes text."""

    def begin(self, tokens, tokenizer):
        self.tokenizer = tokenizer

    def draft(self, tokens, room, sample):
        text = self.tokenizer.piece(tokens[-1]).decode(errors="replace")
        return self.tokenizer.tokenize(text, add_special=False, parse_special=False)[:room]


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


EXACT = [Nothing, Chain, TwoDrawn, UntilTwo, SaysTwice, Forges, proposing(1), Second, Other, Rooms, Letters]


@pytest.mark.parametrize("drafter", EXACT)
def test_exact_drafters_are_proved(drafter):
    said = check_drafter(drafter, length=4 if drafter is TwoDrawn else 3, seed=2, long=20)
    assert all(part in said for part in ("exact", "over 3", "text of 20", "seed 2"))


@pytest.mark.parametrize(
    ("drafter", "said"),
    [(BreaksLate, "not exact"), (PlacesLate, "not exact"), (FailsLate, "accept failed: SystemExit: 3")],
)
def test_one_that_breaks_in_a_long_text_is_caught(drafter, said):
    check_drafter(drafter, length=3, long=0)
    with pytest.raises(InexactDrafterError, match=said):
        check_drafter(drafter, length=3)


@pytest.mark.parametrize("drafter", [Picky, Peeks, Stumbles])
def test_in_a_text_what_was_drawn_is_proposed_and_the_text_stays_exact(drafter, monkeypatch):
    """The enumeration of the check, of what a text does with a drafter that breaks the rule."""
    for name in ("_check_draws", "_fail"):
        monkeypatch.setattr(testing._ScriptedDrafter, name, getattr(PluginDrafter, name))
    check_drafter(drafter, length=3, long=0)


@pytest.mark.parametrize(
    ("drafter", "keeps"), [(one, True) for one in EXACT] + [(Picky, False), (Peeks, False)]
)
def test_a_text_goes_on_without_those_that_the_check_refuses(drafter, keeps):
    said = []
    rng = np.random.default_rng(1)
    made = PluginDrafter(
        NamedDrafter("mine", drafter), [0], n_vocab=3, is_eog=lambda _: False, on_message=said.append,
        tokenizer=testing.ToyModel(1),
    )  # fmt: skip
    made.begin([0, 1], sampled=True, n_predict=None)
    position = Position(
        SamplingParams().sampler(3, 32), lambda _: array("i"), lambda n: rng.random(n).tolist()
    )
    for i in range(1, 60):
        tree = made.draft((), 3, position)
        made.accept(
            [0] * i + [int(rng.integers(3))], Step((0,), len(tree)), ForwardResult(None, 0.0, 1 + len(tree))
        )
    assert bool(said) != keeps
    assert all("did not propose it" in line for line in said)


@pytest.mark.parametrize(
    ("numbers", "field"),
    [
        ({"length": 0}, "length"),
        ({"n_vocab": 1}, "n_vocab"),
        ({"n_vocab": 500}, "length"),
        ({"seed": "x"}, "seed"),
    ],
)
def test_numbers_that_prove_nothing_are_refused(numbers, field):
    with pytest.raises(UsageError) as caught:
        check_drafter(Nothing, **numbers)
    assert caught.value.field == field


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
        drafter.accept([0, 1], Step((1,)), ForwardResult(None, 0.0, 1))
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


# ---- whatever its code does ----

RAISED = [
    SystemExit(3), GeneratorExit(), KeyboardInterrupt(), StopIteration(1), RecursionError(), MemoryError(),
    asyncio.CancelledError(), ValueError("two\nlines"), Exception(b"x" * 9999),
]  # fmt: skip
ODD = [
    None,
    5,
    [None],
    "ab",
    [(1, 2, 3)],
    [(1, 0.5)],
    [1.5],
    [-1],
    [10**30],
    [10**5000],
    [[1]],
    itertools.repeat(1),
]


def raising(place, error):
    """A class whose method `place` raises, for a text: a first object is made to see that it can be."""
    made = []

    def fail(*_):
        raise error

    def make(self):
        made.append(self)
        if len(made) > 1:
            fail()

    return type("Fails", (Nothing,), {"__init__": make} if place == "__init__" else {place: fail})


class Unspeakable(BaseException):
    """An error that cannot be told either."""

    def __str__(self):
        raise SystemExit(4)


@pytest.fixture(scope="module")
def engine(tiny_path):
    with Engine(tiny_path, drafter="none", profile=False, kernels="off") as engine:
        yield engine


@cache
def plain(engine):
    return engine.generate("abc " * 9, seed=3, n_predict=6).token_ids


def failures(engine, drafter):
    """The lines about failures of a text with `drafter`, which is the target's own."""
    said = []
    engine._requests._on_message = said.append
    result = engine.generate("abc " * 9, drafter=find_drafter(drafter), seed=3, n_predict=6)
    assert result.token_ids == plain(engine)
    assert all(line in result.note for line in said)
    return said


@pytest.mark.parametrize("place", ["__init__", "begin", "draft", "accept"])
def test_whatever_is_raised_is_one_line_and_the_text_goes_on(engine, place):
    for error in [*RAISED, Unspeakable()]:
        (line,) = failures(engine, raising(place, error))
        assert type(error).__name__ in line
        assert re.search(r"test_plugin\.py:\d+\)", line), line
        assert len(line) < 600
        assert "\n" not in line


@pytest.mark.parametrize("returned", ODD, ids=[str(type(one)) + str(i) for i, one in enumerate(ODD)])
def test_whatever_is_proposed_is_one_line_and_the_text_goes_on(engine, returned):
    odd = type("Odd", (Nothing,), {"draft": lambda self, tokens, room, sample: returned})
    (line,) = failures(engine, odd)
    assert re.search(r"test_plugin\.py:\d+\)", line), line
    assert "\n" not in line


def test_ctrl_c_ends_a_text(engine):
    def interrupted(*_):
        signal.default_int_handler(signal.SIGINT, None)

    with pytest.raises(KeyboardInterrupt):
        failures(engine, type("Waits", (Nothing,), {"draft": interrupted}))


@pytest.mark.parametrize("place", ["__init__", "import", "sample", "signature"])
def test_one_that_fails_before_there_is_a_text_is_refused_in_one_line(tmp_path, place):
    body = {
        "__init__": "class Mine:\n    def __init__(self):\n        raise SystemExit(3)\n",
        "import": "import sys\n\nsys.exit(3)\n",
        "sample": "class Mine:\n\n    def draft(self, tokens):\n        pass\n    begin = accept = draft\n",
        "signature": "class Mine:\n    @property\n    def begin(self): raise GeneratorExit\n",
    }[place]
    (tmp_path / "mine.py").write_text(body)
    with pytest.raises(UsageError, match=r"mine\.py:3\)") as caught:
        find_drafter(f"{tmp_path}/mine.py:Mine")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("options", [(), ("--debug",)])
def test_the_command_shows_a_traceback_where_it_is_asked_for(tiny_path, tmp_path, options):
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    def begin(self, tokens): raise SystemExit(3)\n    def draft(self, a, b, c): pass\n"
        "    def accept(self, a, b): pass\n    def __del__(self): raise SystemExit(4)\n"
    )
    words = [
        "run",
        *options,
        "-t",
        tiny_path,
        "--drafter",
        f"{tmp_path}/mine.py:Mine",
        "-n6",
        "--seed=1",
        "abc",
    ]
    env, command = user_environment(tmp_path), [*COMMAND, *map(str, words)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "mine.py:2" in done.stderr
    assert "mine.py:5" in done.stderr
    assert ("Traceback" in done.stderr) == bool(options)


# ---- a source like any other: on a clock that passes and drafts move ----


class Guesses(Nothing):
    """Proposes the tokens of a fixed text, right with a probability, at a cost."""

    def __init__(self, world):
        self.world = world
        self.slept = 0.0

    def draft(self, tokens, room, sample):
        world, n = self.world, len(tokens)
        world.clock.now += world.draft_s
        world.drafts.append(n)
        right = world.rng.random(room) < world.acceptance(n)
        return [
            int(world.truth[n + i]) if right[i] else int(world.truth[n + i] + 1) % 64 for i in range(room)
        ]


def source_pace(known, costs):
    """The pace of a drafter of which this is known, for a text whose passes cost this."""
    curve = PassCosts(CostCurve((tuple(costs[1:]), tuple(costs[1:])), 0.0005))
    return SourcePace(known, pace_of(Policy(model=False, staged=False), (curve, None)), curve)


class World:
    """A text written with such a drafter; `rate` is that of plain decoding at the same clock."""

    def __init__(self, clock, acceptance, *, draft_s=1e-5, n=2000, costs=STEEPER):
        self.clock, self.acceptance, self.draft_s, self.drafts = clock, acceptance, draft_s, []
        self.rng = np.random.default_rng(3)
        self.truth = self.rng.integers(0, 64, n + 100)
        pace = source_pace(DrafterCosts(), costs)
        drafter = PluginDrafter(
            NamedDrafter("mine", lambda: Guesses(self)), [1], n_vocab=64, is_eog=lambda _: False, pace=pace
        )
        session = ToySession(self.logits, 64, clock=clock, cost=costs.__getitem__)
        run = Generation(
            session, drafter, [1], task_of(SamplingParams(temperature=0.0), rule="match", n_predict=n)
        )
        began = clock.now
        for _ in run.events():
            pass
        assert run.tokens[1:] == [int(token) for token in self.truth[1 : n + 1]]
        self.note = drafter.note()
        self.speedup = n * costs[1] / (clock.now - began)

    def logits(self, prefix):
        return np.where(np.arange(64) == self.truth[len(prefix)], 20.0, 0.0)


@pytest.mark.parametrize(
    ("costs", "acceptance", "draft_s", "least", "drafts"),
    [
        (STEEPER, 0.0, 1e-5, 0.98, 300),
        (STEEPER, 0.02, 1e-5, 0.98, 300),
        (STOCK, 0.02, 1e-5, 0.98, 100),
        (OURS, 0.02, 1e-5, 0.98, math.inf),  # a token more costs next to nothing
        (OURS, 0.02, 0.005, 0.98, 100),
        (STEEPER, 0.9, 0.5, 0.97, 4),  # the first draft is what shows the cost
        (STEEPER, 0.9, 0.1, 0.98, 12),
        (STEEPER, 0.9, 1e-5, 2.5, math.inf),
    ],
)
def test_a_drafter_that_does_not_pay_rests(clock, costs, acceptance, draft_s, least, drafts):
    world = World(clock, lambda _n: acceptance, draft_s=draft_s, costs=costs)
    assert world.speedup >= least
    assert len(world.drafts) <= drafts
    assert ("rested" in world.note) == (acceptance < 0.5 or draft_s > 0.01)


def test_one_that_rests_is_tried_again_and_drafts_where_it_has_become_good(clock):
    world = World(clock, lambda n: 0.9 if n > 1000 else 0.0)
    assert len([n for n in world.drafts if n > 1500]) > 50
    assert world.speedup > 1.3
    assert [n for n in world.drafts if n < 1000], "it is asked from time to time"


def test_a_begin_that_takes_long_is_not_called_while_the_drafter_rests():
    costs = DrafterCosts()
    costs.begin_s, costs.draft_s = 60.0, 1e-5
    mine = NamedDrafter("mine", raising("begin", SystemExit()))
    drafter = PluginDrafter(mine, [1], n_vocab=9, is_eog=lambda _: False, pace=source_pace(costs, OURS))
    drafter.begin([1, 2], sampled=False, n_predict=50)
    assert drafter.draft([1, 2], 8, None) == ()
    assert "begin" not in drafter.note()


def test_the_page_has_a_complete_one(tiny_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    names = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec", dont_inherit=True), names)
    assert blocks[0].count("\n") <= 30
    with Engine(tiny_path, drafter=names["Bigrams"], profile=False, kernels="off") as engine:
        result = engine.generate("abc " * 9, n_predict=40, seed=1)
        plain = engine.generate("abc " * 9, n_predict=40, seed=1, drafter="none")
    assert result.token_ids == plain.token_ids
    names["test_my_drafters_are_exact"]()
    check_drafter(names["Echo"], length=3, long=20)
    projects = re.findall(r"^```toml\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    groups = [*tomllib.loads("".join(projects))["project"]["entry-points"]]
    assert groups == ["edgespec.drafters", "edgespec.drafts"]
    check_drafter("edgespec.drafting.suffix:NgramDrafter", length=3)
