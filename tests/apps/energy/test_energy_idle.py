"""The idle machine's power: measured on a clock of our own, and kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgespec.apps.energy.commands.energy import know_idle
from edgespec.apps.energy.meter import (
    AssumedPower,
    EnergyMeter,
    find_rapl,
    load_idle_power,
    measure_idle,
    store_idle_power,
)
from edgespec.platform.kept import IDLE_POWER
from edgespec.platform.machine import OtherLoad
from energy_trees import battery, laptop, write


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/edgespec"


class Load(OtherLoad):
    """Other programs that keep so many processors busy."""

    def __init__(self, processors: float | None) -> None:
        self._processors = processors

    def processors(self) -> float | None:
        return self._processors


class Idling:
    """A laptop that takes 3 W, and its meter."""

    def __init__(self, root: Path) -> None:
        self.tree = laptop(root)
        self.now = 0.0
        self.slept: list[float] = []
        self.meter = EnergyMeter(find_rapl(root).source, clock=lambda: self.now, threaded=False)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)
        self.tree.set("intel-rapl:0", 1000 + int(self.now * 3e6))


def test_measured(tmp_path):
    idling = Idling(tmp_path)
    seen: list[float] = []
    watts, fault = measure_idle(
        idling.meter, 10, on_progress=seen.append, load=Load(0.05), sleep=idling.sleep
    )
    assert watts == pytest.approx(3, rel=1e-3)
    assert fault == ""
    assert sum(idling.slept) == pytest.approx(10)
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0, 10)


def test_a_busy_machine(tmp_path):
    idling = Idling(tmp_path)
    watts, fault = measure_idle(idling.meter, 2, load=Load(0.8), sleep=idling.sleep)
    assert watts == pytest.approx(3, rel=1e-3)
    assert "other programs kept 0.8 processors busy" in fault
    assert measure_idle(idling.meter, 2, load=Load(None), sleep=idling.sleep)[1] == ""


def test_counters_that_stand_still(tmp_path):
    idling = Idling(tmp_path)
    watts, fault = measure_idle(idling.meter, 2, load=Load(0), sleep=lambda seconds: None)
    assert watts is None
    assert "stood still" in fault


def test_what_cannot_be_measured(tmp_path):
    nothing = EnergyMeter(None, reason="no counters")
    assert measure_idle(nothing, 0.1) == (None, "the idle power is unavailable: no counters")
    assert measure_idle(EnergyMeter(AssumedPower(15)), 0.1)[0] is None


def test_interrupted(tmp_path):
    idling = Idling(tmp_path)

    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_idle(idling.meter, 2, sleep=interrupt)
    assert idling.meter._windows == []


# ---- kept ----


def test_kept_for_its_source(tmp_path, cache):
    laptop(tmp_path)
    battery(tmp_path / "other", power_now=9_500_000)
    assert EnergyMeter.choose(tmp_path).idle_w is None
    assert store_idle_power("RAPL", 3.14159265, tmp_path) == IDLE_POWER.path() == cache / "energy.json"
    assert store_idle_power("battery BAT0", 7, tmp_path / "other") == IDLE_POWER.path()
    assert EnergyMeter.choose(tmp_path).idle_w == 3.14159
    assert EnergyMeter.choose(tmp_path / "other").idle_w == 7
    assert EnergyMeter.choose(tmp_path, 15).idle_w is None
    assert load_idle_power("Raspberry Pi 5 PMIC", tmp_path) is None
    assert sorted(file.name for file in cache.iterdir()) == [".lock", "energy.json"]


GOOD = {"format": "edgespec energy", "version": 1, "idle": {"RAPL": {"watts": 3, "cpu": "An Intel CPU"}}}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "[" * 100_000,
        "\udcff",
        json.dumps({**GOOD, "format": "other"}),
        json.dumps({**GOOD, "version": 0}),
        json.dumps({**GOOD, "idle": [3]}),
        json.dumps({**GOOD, "idle": {"RAPL": 3}}),
        json.dumps({**GOOD, "idle": {"RAPL": {"watts": "3", "cpu": "An Intel CPU"}}}),
        json.dumps({**GOOD, "idle": {"RAPL": {"watts": -3, "cpu": "An Intel CPU"}}}),
        json.dumps({**GOOD, "idle": {"RAPL": {"watts": float("nan"), "cpu": "An Intel CPU"}}}),
        json.dumps({**GOOD, "idle": {"RAPL": {"watts": 3}}}),
    ],
)
def test_damaged(tmp_path, cache, text):
    laptop(tmp_path)
    cache.mkdir(parents=True)
    (cache / "energy.json").write_bytes(text.encode(errors="surrogateescape"))
    lines: list[str] = []
    assert EnergyMeter.choose(tmp_path, on_message=lines.append).idle_w is None
    (line,) = lines
    assert "energy.json: " in line
    assert "; set aside as energy.json.set-aside" in line
    assert "\n" not in line
    assert store_idle_power("RAPL", 4, tmp_path)
    assert EnergyMeter.choose(tmp_path).idle_w == 4


def test_it_cannot_be_kept(tmp_path, monkeypatch):
    laptop(tmp_path)
    write(tmp_path / "file", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    lines: list[str] = []
    assert store_idle_power("RAPL", 3, tmp_path, lines.append) is None
    assert len(lines) == 1
    assert "could not be kept" in lines[0]
    assert EnergyMeter.choose(tmp_path, on_message=lines.append).idle_w is None
    assert "the idle power is not known" in lines[1]


# ---- known before a benchmark ----


def test_it_is_measured_where_it_is_not_known(tmp_path, capsys):
    battery(tmp_path, power_now=9_500_000)
    meter = EnergyMeter.choose(tmp_path)
    know_idle(meter, 0.1)
    assert meter.idle_w == pytest.approx(9.5)
    assert IDLE_POWER.path().exists()
    assert "measuring the idle machine" in capsys.readouterr().err
    battery(tmp_path, power_now=1_000_000)
    know_idle(meter, 0.1)
    assert (meter.idle_w, capsys.readouterr().err) == (pytest.approx(9.5), "")
