"""The energy meter: windows and phases over made-up machines, on a clock of our own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.apps.energy.meter import (
    AssumedPower,
    BatteryPower,
    EnergyMeter,
    EnergySource,
    RaplCounters,
    RaplZone,
    find_rapl,
)
from edgespec.platform.metering import Measurement
from energy_trees import INTEL_RANGE, Powercap, answering, battery, laptop, raspberry_pi, write


class Clock:
    """Seconds that go by when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def tree(tmp_path):
    return laptop(tmp_path)


def rapl_meter(tree: Powercap, clock: Clock) -> EnergyMeter:
    return EnergyMeter(find_rapl(tree.root).source, clock=clock, threaded=False)


@pytest.fixture
def meter(tree, clock):
    return rapl_meter(tree, clock)


def assert_unavailable(measured: Measurement, *words: str) -> None:
    assert (measured.joules, measured.domains, measured.phases) == (None, {}, {})
    assert (measured.net_joules, measured.joule_seconds, measured.per_token(10)) == (None, None, None)
    for word in words:
        assert word in measured.reason


def assert_sums(measured: Measurement) -> None:
    assert measured.joules is not None
    assert measured.reason == ""
    assert sum(measured.phases.values()) == pytest.approx(measured.joules, abs=1e-9)


# ---- counters ----


def test_a_window(meter, tree, clock):
    assert (meter.available, meter.counts, meter.source) == (True, True, "RAPL")
    meter.idle_w = 2.0
    window = meter.begin()
    clock.now += 4
    tree.set("intel-rapl:0", 20_001_000)
    tree.set("intel-rapl:0:2", 3_000_200)
    tree.set("intel-rapl:0:0", 999_999_999)
    measured = window.end()
    assert measured == Measurement(
        4.0, 23.0, 2.0, domains={"package-0": 20.0, "dram-0": 3.0}, phases={}, source="RAPL"
    )
    assert (measured.net_joules, measured.joule_seconds, measured.per_token(10)) == (15, 92, 2.3)
    assert window.end() is measured, "it ends once"


def test_a_counter_that_stands_still_is_not_0_joules(meter, tree, clock):
    for seconds, available in ((0.05, True), (0.2, False)):
        window = meter.begin()
        clock.now += seconds
        measured = window.end()
        assert (measured.joules is not None) == available
    assert_unavailable(measured, "RAPL stood still for 0.2 s")


def test_not_read_for_too_long(meter, tree, clock):
    window = meter.begin()
    clock.now += 1000  # suspended
    tree.set("intel-rapl:0", 2_000_000)
    inner = meter.begin()
    tree.set("intel-rapl:0", 3_000_000)
    measured = window.end()
    assert_unavailable(measured, "RAPL was not read for 1e+03 s", "suspended")
    assert (measured.seconds, measured.source) == (1000, "RAPL")
    assert inner.end().joules == 1, "what begins later is not concerned"


def test_a_counter_begins_anew(meter, tree, clock):
    tree.set("intel-rapl:0", 100_000_000_000)
    window = meter.begin()
    clock.now += 1
    tree.set("intel-rapl:0", 5)
    window.mark("draft")
    clock.now += 1
    window.mark("verify")
    assert_unavailable(window.end(), "package-0 went backwards without having wrapped")


def test_a_file_vanishes_and_comes_back(meter, tree, clock):
    counter = tree.folder / "intel-rapl:0/energy_uj"
    window = meter.begin()
    counter.unlink()
    assert not meter.sample()
    assert not meter.available
    assert "No such file" in meter.reason
    clock.now += 1
    tree.set("intel-rapl:0", 2_001_000)
    assert window.end().joules == 2, "a counter goes on counting while nobody can look"
    assert meter.available


def test_windows_side_by_side(meter, tree):
    def spend(joules: int) -> None:
        tree.set(
            "intel-rapl:0", int((tree.folder / "intel-rapl:0/energy_uj").read_text()) + joules * 1_000_000
        )

    outer = meter.begin()
    spend(1)
    first = meter.begin()
    spend(2)
    second = meter.begin()
    spend(4)
    first.mark("draft")
    spend(8)
    second.mark("verify")
    assert first.end().phases == pytest.approx({"draft": 6, "rest": 8})
    spend(16)
    assert second.end().phases == pytest.approx({"verify": 12, "rest": 16})
    measured = outer.end()
    assert (measured.joules, measured.phases) == (pytest.approx(31), {})


class Fed(RaplCounters):
    """Counters in memory, fed with joules."""

    def __init__(self, start: int, limit: int) -> None:
        super().__init__([RaplZone("package-0", Path("nowhere"), limit)])
        self.raw, self.limit = start % limit, limit

    def feed(self, microjoules: int) -> None:
        self.raw = (self.raw + microjoules) % self.limit

    def read(self) -> tuple[float, ...]:
        return (self.raw,)


@given(
    start=st.integers(0, 10**12),
    limit=st.integers(20_000_000, INTEL_RANGE),
    steps=st.lists(
        st.tuples(
            st.integers(0, 10_000_000), st.sampled_from(["", "read", "prefill", "draft", "verify", "rest"])
        ),
        max_size=60,
    ),
)
def test_however_it_is_split_the_sum_is_the_same(start, limit, steps):
    clock, source = Clock(), Fed(start, limit)
    meter = EnergyMeter(source, clock=clock, threaded=False)
    window, unread = meter.begin(), 0
    expected: dict[str, int] = {}
    phase_spent = total = 0
    for microjoules, what in steps:
        source.feed(microjoules)
        unread, phase_spent, total = unread + microjoules, phase_spent + microjoules, total + microjoules
        clock.now += 1e-5  # of 20 ms, in which the smallest range may wrap
        if what in ("", "read"):
            if what or unread + 10_000_000 >= limit:
                meter.sample()
                unread = 0
            continue
        window.mark(what)
        expected[what] = expected.get(what, 0) + phase_spent
        unread = phase_spent = 0
    measured = window.end()
    assert measured.joules == pytest.approx(total / 1e6, abs=1e-6)
    if expected:
        expected["rest"] = expected.get("rest", 0) + phase_spent
        assert_sums(measured)
    assert measured.phases == pytest.approx({p: uj / 1e6 for p, uj in expected.items()}, abs=1e-6)


# ---- samples of power ----


class Laptop:
    """A laptop on its battery, and the meter's clock."""

    def __init__(self, root: Path, watts: float = 10.0) -> None:
        self.folder = battery(root)
        self.clock = Clock()
        self.watts(watts)
        self.meter = EnergyMeter(BatteryPower([self.folder]), clock=self.clock, threaded=False)

    def watts(self, watts: float) -> None:
        write(self.folder / "power_now", round(watts * 1e6))

    def go_on(self, seconds: float, watts: float | None = None) -> None:
        """Let the time go by and take a sample of these watts."""
        self.clock.now += seconds
        if watts is not None:
            self.watts(watts)
        self.meter.sample()


@pytest.fixture
def on_battery(tmp_path):
    return Laptop(tmp_path)


def test_trapezoids(on_battery):
    window = on_battery.meter.begin()
    for watts in (20, 20, 0.001, 10):
        on_battery.go_on(1, watts)
    measured = window.end()
    assert measured.joules == pytest.approx(15 + 20 + 10 + 5, abs=1e-2)
    assert (measured.seconds, measured.source, measured.gap_s) == (4, "battery BAT0", 0)
    assert measured.domains == pytest.approx({"BAT0": measured.joules})


def test_a_source_of_power_tells_no_phases(on_battery):
    """Its samples lie too far apart: what was marked is not split by a guess."""
    window = on_battery.meter.begin()
    on_battery.clock.now += 0.25
    window.mark("prefill")
    on_battery.go_on(0.75, 20)
    window.mark("draft")
    measured = window.end()
    assert (measured.joules, measured.phases) == (pytest.approx(15), {})


def test_samples_take_time_that_is_not_the_windows(on_battery):
    """A slow source: what it measured before the begin and after the end is left out."""
    source, clock = on_battery.meter._source, on_battery.clock

    def slowly() -> tuple[float, ...]:
        clock.now += 0.5
        return (10.0,)

    source.read = slowly
    window = on_battery.meter.begin()
    clock.now += 1
    measured = window.end()
    assert (measured.seconds, measured.joules) == (1, pytest.approx(10))


@pytest.mark.parametrize(("missing_s", "is_known"), [(3, True), (5, True), (20, False)])
def test_gaps(on_battery, missing_s, is_known):
    window = on_battery.meter.begin()
    for _ in range(50):
        on_battery.go_on(1)
    on_battery.go_on(missing_s)
    for _ in range(10):
        on_battery.go_on(1)
    measured = window.end()
    assert measured.gap_s == (missing_s if missing_s > 4 else 0)
    if is_known:
        assert measured.joules == pytest.approx(10 * measured.seconds)
    else:
        assert_unavailable(measured, "battery BAT0 gave no samples for 20.0 s of 80.0 s")


def test_a_gap_counts_where_it_lies(on_battery):
    outer = on_battery.meter.begin()
    on_battery.go_on(1)
    inner = on_battery.meter.begin()
    on_battery.clock.now += 6
    assert_unavailable(inner.end(), "gave no samples for 6.0 s of 6.0 s")
    for _ in range(93):
        on_battery.go_on(1)
    assert outer.end().gap_s == 6


def test_plugged_in_meanwhile(on_battery):
    window = on_battery.meter.begin()
    for i in range(20):
        write(on_battery.folder / "status", "Charging" if i >= 10 else "Discharging")
        on_battery.go_on(1)
    assert not on_battery.meter.available
    assert_unavailable(window.end(), "BAT0 is charging")
    assert_unavailable(on_battery.meter.begin().end(), "BAT0 is charging")
    write(on_battery.folder / "status", "Discharging")
    window = on_battery.meter.begin()
    on_battery.clock.now += 1
    assert window.end().joules == 10, "it is available again"


def test_an_assumption(clock):
    meter = EnergyMeter(AssumedPower(15), clock=clock, threaded=False)
    window = meter.begin()
    clock.now += 2
    window.mark("draft")
    clock.now += 60
    window.mark("verify")
    measured = window.end()
    assert measured.joules == pytest.approx(15 * 62)
    assert measured.phases == pytest.approx({"draft": 30, "verify": 900, "rest": 0})
    assert (measured.estimated, measured.source, measured.gap_s) == (True, "15 W assumed", 0)
    assert (measured.idle_w, measured.net_joules) == (None, None)


# ---- the thread ----


def wait_until(is_so: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.005)
    return is_so()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "edgespec-energy"]


def test_the_thread_reads_while_a_window_is_open(tmp_path):
    raspberry_pi(tmp_path, f"echo >> {tmp_path}/calls\n" + answering())
    calls = tmp_path / "calls"
    with EnergyMeter.choose(tmp_path) as meter:
        assert threads() == []
        outer, inner = meter.begin(), meter.begin()
        assert len(threads()) == 1
        assert threads()[0].daemon
        n_before = calls.stat().st_size
        assert wait_until(lambda: calls.stat().st_size >= n_before + 3)
        inner.end()
        assert threads(), "one window is still open"
        measured = outer.end()
        assert measured.joules or measured.gap_s, "a busy machine may have starved it"
        assert wait_until(lambda: not threads())
        meter.begin()
    assert wait_until(lambda: not threads()), "it stops when the meter is closed"
    assert meter.interval_s == 0.2


def test_a_mark_does_not_wait_for_a_sample():
    is_reading, go_on = threading.Event(), threading.Event()

    class Slow(EnergySource):
        name, domains, counted, interval_s = "slow", ("all",), (True,), 0.001

        def read(self) -> tuple[float, ...]:
            if threading.current_thread().name == "edgespec-energy":
                is_reading.set()
                go_on.wait(30)
            return (10.0,)

    with EnergyMeter(Slow()) as meter:
        window = meter.begin()
        assert is_reading.wait(30)
        marking = threading.Thread(target=window.mark, args=("draft",), daemon=True)
        marking.start()
        marking.join(20)
        assert not marking.is_alive()
        go_on.set()
        measured = window.end()
    assert measured.phases == {}
    assert measured.seconds > 0
