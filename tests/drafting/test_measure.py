"""Measuring: sessions of known costs on a clock of our own, and tiny models."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.apps.energy.meter import AssumedPower, EnergyMeter, RaplCounters, RaplZone, UnreadableError
from edgespec.drafting import draft as drafts
from edgespec.drafting import measure as measuring
from edgespec.drafting.draft import PlainDraft
from edgespec.drafting.measure import measure
from edgespec.drafting.profile import CONTEXTS, N_MAX, CostCurve
from edgespec.errors import EdgespecError
from edgespec.llama.kv_cache import KVCache
from edgespec.llama.weights import Model
from edgespec.platform.closing import Closing

Cost = Callable[[int, float], float]
"""Seconds of a pass over n tokens at a context."""


def linear(one: float, more: float, longer: float) -> Cost:
    """T(n) that is linear in n and in the context, so that nothing is lost by interpolation."""
    return lambda n, n_past: (one + more * (n - 1)) * (1 + longer * n_past)


class World:
    """A machine with a clock of its own: what takes time moves it. `slowness` may change by the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.slowness: Callable[[float], float] = lambda _now: 1.0
        self.joules = 0.0
        self.open: list[FakeSession] = []
        monkeypatch.setattr(measuring, "perf_counter", lambda: self.now)
        for module in (measuring, drafts):
            monkeypatch.setattr(
                module, "Session", lambda model, **options: FakeSession(self, model, **options)
            )
        monkeypatch.setattr(measuring, "fits_in_memory", lambda needs, **_: None)

    def pass_time(self, seconds: float) -> None:
        spent = seconds * self.slowness(self.now)
        self.now += spent
        self.joules += 20 * spent


def fake_model(cost: Cost, *, read: float = 1e-3, n_ctx: int = 32768, can_rewind: bool = True) -> Any:
    header = SimpleNamespace(
        path=Path("fake"),
        is_head=False,
        gguf=SimpleNamespace(fields={}),
        architecture="fake",
        has_snapshots=False,
    )
    return SimpleNamespace(
        name="fake",
        n_vocab=100,
        n_ctx_train=n_ctx,
        most_batch=512,
        can_rewind=can_rewind,
        header=header,
        cost=cost,
        read=read,
    )


def draft_of(model: Any) -> PlainDraft:
    """The draft that `model` is, once it is loaded."""
    draft = PlainDraft("target", "draft", model.header)
    draft.model, draft.n_threads = model, 1
    return draft


class FakeSession(Closing):
    def __init__(self, world: World, model: Any, *, n_ctx: int, n_logits_max: int, **_: object) -> None:
        assert n_ctx <= model.n_ctx_train
        self.world, self.model, self.n_ctx, self.n_logits_max = world, model, n_ctx, n_logits_max
        self.n_past = 0
        self.kept: list[int] = []
        world.open.append(self)

    def eval(self, tokens: list[int], *, n_logits: int) -> None:
        assert all(0 <= token < self.model.n_vocab for token in tokens)
        assert n_logits in (0, len(tokens)), "all logits, or those of nothing"
        assert n_logits <= self.n_logits_max
        assert self.n_past + len(tokens) <= self.n_ctx
        n = len(tokens)
        self.world.pass_time(self.model.cost(n, self.n_past) if n_logits else n * self.model.read)
        self.n_past += n

    def rewind(self, n_keep: int) -> int:
        assert n_keep in self.kept, "only there can every model go back to"
        self.n_past = n_keep
        return n_keep

    def checkpoint(self) -> None:
        self.kept.append(self.n_past)

    def clear(self) -> None:
        self.n_past = 0

    def close(self) -> None:
        self.world.open.remove(self)


class WorldCounters(RaplCounters):
    """Count what the world spends; go away after `reads`."""

    def __init__(self, world: World, reads: int) -> None:
        super().__init__([RaplZone("package-0", Path("nowhere"), 262_143_328_850)])
        self.world, self.reads = world, reads

    def read(self) -> tuple[float, ...]:
        self.reads -= 1
        if self.reads < 0:
            raise UnreadableError("gone")
        return (int(self.world.joules * 1e6),)


def counting(world: World, reads: int = 1 << 30) -> EnergyMeter:
    return EnergyMeter(WorldCounters(world, reads), clock=lambda: world.now, threaded=False)


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


@pytest.fixture
def no_energy():
    return EnergyMeter(None)


def assert_curve(curve: CostCurve | None, cost: Cost, scale: float = 1.0, rel: float = 1e-6) -> None:
    assert curve is not None
    for context, side in zip(CONTEXTS, curve.passes, strict=True):
        assert side == pytest.approx([scale * cost(n, context) for n in range(1, N_MAX + 1)], rel=rel)


# ---- known costs ----


@given(
    one=st.floats(1e-3, 0.2),
    growth=st.floats(0, 2),
    longer=st.floats(0, 1e-3),
    size=st.floats(0.1, 1),
    n_ctx=st.sampled_from([300, 400, 1000, 2081, 32768]),
)
def test_known_costs_come_back(one, growth, longer, size, n_ctx):
    target = linear(one, growth * one, longer)
    draft = linear(one * size, growth * one * size, longer)
    with pytest.MonkeyPatch.context() as monkeypatch:
        world = World(monkeypatch)
        measured = measure(
            fake_model(target, n_ctx=n_ctx),
            draft_of(fake_model(draft, read=2e-3)),
            n_threads=1,
            meter=EnergyMeter(None),
        )
        assert_curve(measured.target, target)
        assert_curve(measured.draft, draft)
        assert (measured.target.read, measured.draft.read) == pytest.approx((1e-3, 2e-3))
        assert measured.spread == pytest.approx(0, abs=1e-6)
        assert measured.target_watts is measured.draft_watts is None
        assert measured.sweeps >= 1
        assert measured.reliable == (measured.sweeps >= 3)
        assert world.now <= 91 or measured.sweeps == 1
        assert world.open == []


def test_a_target_alone(world, no_energy):
    cost = linear(0.02, 0.002, 1e-4)
    measured = measure(fake_model(cost), None, n_threads=1, meter=no_energy)
    assert_curve(measured.target, cost)
    assert measured.draft is None
    assert measured.n_sizes == N_MAX
    assert (measured.reliable, measured.warnings) == (True, ())


def test_slower_models_are_measured_less_closely(world, no_energy):
    found = [
        measure(fake_model(linear(one, one, 0)), None, n_threads=1, budget_s=60, meter=no_energy)
        for one in (0.002, 0.02, 0.06, 2.0)
    ]
    lengths = [measured.n_sizes for measured in found]
    assert lengths == sorted(lengths, reverse=True)
    assert (lengths[0], lengths[-1]) == (33, 6)
    sweeps = [measured.sweeps for measured in found]
    assert (sweeps[0], sweeps[-1]) == (9, 1)
    assert found[0].reliable
    assert not found[-1].reliable
    assert "too slow" in found[-1].warnings[0]
    assert_curve(found[-1].target, linear(2.0, 2.0, 0))


def test_reading_takes_its_share_of_the_budget_at_most(world, no_energy):
    cost = linear(0.01, 0.001, 1e-4)
    measured = measure(fake_model(cost, read=0.05), None, n_threads=1, meter=no_energy)
    assert world.now <= 91
    assert measured.target.read == pytest.approx(0.05)
    assert_curve(measured.target, cost)


@pytest.mark.parametrize(("n_ctx", "flat"), [(67, True), (200, True), (289, False)])
def test_a_short_context(world, no_energy, n_ctx, flat):
    cost = linear(0.01, 0.001, 1e-3)
    curve = measure(fake_model(cost, n_ctx=n_ctx), None, n_threads=1, meter=no_energy).target
    assert (curve.passes[0] == curve.passes[1]) == flat


def test_what_memory_allows(world, no_energy, monkeypatch):
    cost = linear(0.01, 0.001, 1e-3)

    def at_most(limit):
        def fits_in_memory(needs, *, weights_loaded):
            assert weights_loaded
            if max(n_ctx for _, n_ctx in needs) > limit:
                raise EdgespecError("not enough memory")

        monkeypatch.setattr(measuring, "fits_in_memory", fits_in_memory)
        longest = []
        on_progress = lambda *_: longest.extend(session.n_ctx for session in world.open)  # noqa: E731
        curve = measure(fake_model(cost), None, n_threads=1, meter=no_energy, on_progress=on_progress).target
        return curve, max(longest)

    curve, longest = at_most(700)
    assert_curve(curve, cost)
    assert longest == 512 + N_MAX
    curve, longest = at_most(0)
    assert curve.passes[0] == curve.passes[1]
    assert longest == 128 + N_MAX


# ---- a machine that is not quiet ----


def test_a_machine_that_drifts_does_so_for_all_n_alike(world, no_energy):
    cost = linear(0.01, 0.002, 1e-4)
    world.slowness = lambda now: 1 + now / 90
    measured = measure(fake_model(cost), draft_of(fake_model(cost)), n_threads=1, meter=no_energy)
    for side, context in zip(measured.target.passes, CONTEXTS, strict=True):
        growth = [seconds / side[0] for seconds in side]
        assert growth == pytest.approx([cost(n, context) / cost(1, context) for n in range(1, 34)], rel=0.12)


@pytest.mark.parametrize(("times", "busy"), [(1.02, False), (1.5, True)])
def test_busy(world, no_energy, times, busy):
    world.slowness = lambda now: times if int(now * 3) % 2 else 1.0
    measured = measure(fake_model(linear(0.01, 0.001, 0)), None, n_threads=1, meter=no_energy)
    assert measured.reliable == (not busy)
    if busy:
        (line,) = measured.warnings
        assert "stop other programs and run edgespec profile again" in line
        assert f"{measured.spread:.0%}" in line


def test_it_stops_at_the_budget_when_the_machine_becomes_slow(world, no_energy):
    world.slowness = lambda now: 1.0 if now < 20 else 4.0
    measured = measure(fake_model(linear(0.05, 0.003, 0)), None, n_threads=1, meter=no_energy)
    assert 1 <= measured.sweeps < 9
    assert world.now < 90 * 1.5


def test_other_load_makes_it_unreliable(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(4)))

    def warnings(other_load, n_threads):
        return measuring._warnings(0.01, 9, other_load, n_threads, 90.0)

    assert warnings(None, 4) == warnings(0.1, 4) == warnings(1.0, 2) == ()
    assert "other programs kept 0.5 processors busy" in warnings(0.5, 4)[0]
    assert warnings(1.5, 2)


# ---- energy ----


def test_energy(world):
    target, draft = linear(0.02, 0.002, 1e-4), linear(0.01, 0.001, 1e-4)
    measured = measure(fake_model(target), draft_of(fake_model(draft)), n_threads=1, meter=counting(world))
    assert (measured.target_watts, measured.draft_watts) == pytest.approx((20, 20), rel=1e-3)
    assert world.now <= 91


@pytest.mark.parametrize("reads", [0, 3])
def test_counters_that_go_away(world, reads):
    cost = linear(0.02, 0.002, 1e-4)
    measured = measure(
        fake_model(cost), draft_of(fake_model(cost)), n_threads=1, meter=counting(world, reads)
    )
    assert_curve(measured.target, cost)
    assert measured.draft_watts is None


def test_counters_that_stand_still(world):
    meter = counting(world)
    world.pass_time = lambda seconds: setattr(world, "now", world.now + seconds)
    assert measure(fake_model(linear(0.02, 0, 0)), None, n_threads=1, meter=meter).target_watts is None


def test_sensors_of_power_are_too_slow(world):
    meter = EnergyMeter(AssumedPower(20), clock=lambda: world.now, threaded=False)
    cost = linear(0.02, 0.002, 1e-4)
    measured = measure(fake_model(cost), None, n_threads=1, meter=meter)
    assert_curve(measured.target, cost)
    assert measured.target_watts is None


# ---- what cannot be measured ----


def test_progress_goes_up_and_ends(world, no_energy):
    seen: list[tuple[str, float, float]] = []
    report = lambda *now: seen.append(now)  # noqa: E731
    measure(fake_model(linear(0.01, 0.001, 0)), None, n_threads=1, meter=no_energy, on_progress=report)
    done = [done_s for _, done_s, _ in seen]
    assert done == sorted(done)
    assert all(done_s <= total_s for _, done_s, total_s in seen)
    assert seen[-1][1] == seen[-1][2]
    assert {"reading 128 tokens", "reading 2048 tokens", "timing passes"} <= {what for what, _, _ in seen}


# ---- tiny models ----


def test_tiny_models(tiny_target: Model, tiny_draft: Model):
    before = len(tiny_target.sessions)
    measured = measure(tiny_target, draft_of(tiny_draft), n_threads=1, budget_s=5.0)
    for curve in (measured.target, measured.draft):
        assert curve is not None
        assert all(len(side) == N_MAX and min(side) > 0 for side in curve.passes)
        assert curve.read > 0
    assert measured.sweeps >= 1
    assert len(tiny_target.sessions) == before, "its sessions are closed"


def test_interrupted(tiny_target: Model):
    opened: list[KVCache] = []

    def interrupt(what: str, _done_s: float, _total_s: float) -> None:
        opened.extend(one for one in tiny_target.sessions if isinstance(one, KVCache))
        if what == "timing passes":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(tiny_target, None, n_threads=1, on_progress=interrupt)
    assert opened
    for cache in opened:
        with pytest.raises(EdgespecError, match="closed"):
            cache.require_open()
