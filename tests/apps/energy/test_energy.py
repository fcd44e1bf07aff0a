"""The sources of energy figures, each on a made-up machine's tree of files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgespec.apps.energy.meter import (
    GROUP_FIX,
    EnergyMeter,
    RaplCounters,
    UnreadableError,
    find_battery,
    find_pmic,
    find_rapl,
    survey,
)
from energy_trees import (
    AMD,
    INTEL_RANGE,
    PMIC_OUTPUT,
    PMIC_WATTS,
    Powercap,
    answering,
    battery,
    laptop,
    raspberry_pi,
    write,
)


def counters(root: Path) -> RaplCounters:
    source = find_rapl(root).source
    assert isinstance(source, RaplCounters)
    return source


def counted(root: Path) -> list[str]:
    source = counters(root)
    return [domain for domain, counts in zip(source.domains, source.counted, strict=True) if counts]


# ---- RAPL: which zones ----


def test_a_package_and_its_memory(tmp_path):
    laptop(tmp_path)
    source = counters(tmp_path)
    assert (source.name, source.domains, source.counted) == ("RAPL", ("package-0", "dram-0"), (True, True))
    assert source.read() == (1000, 200)


def test_two_sockets(tmp_path):
    tree = Powercap(tmp_path)
    for socket in range(2):
        tree.zone(f"intel-rapl:{socket}", f"package-{socket}")
        tree.zone(f"intel-rapl:{socket}:0", "dram")
    assert counted(tmp_path) == ["package-0", "dram-0", "package-1", "dram-1"]


def test_psys_stands_beside_packages(tmp_path):
    tree = laptop(tmp_path)
    tree.zone("intel-rapl:1", "psys", 7)
    assert counters(tmp_path).domains == ("package-0", "dram-0", "psys")
    assert counted(tmp_path) == ["package-0", "dram-0"]


def test_dies(tmp_path):
    tree = Powercap(tmp_path)
    for die in range(2):
        tree.zone(f"intel-rapl:{die}", f"package-0-die-{die}")
        tree.zone(f"intel-rapl:{die}:0", "dram")
    assert counted(tmp_path) == ["package-0-die-0", "dram-0-die-0", "package-0-die-1", "dram-0-die-1"]


def test_a_package_seen_by_memory_alone_counts(tmp_path):
    Powercap(tmp_path).zone("intel-rapl-mmio:0", "package-0", 7)
    assert counters(tmp_path).read() == (7,)


# ---- RAPL: what is between two readings ----


def spent(source: RaplCounters, before: int, after: int, seconds: float = 1.0) -> float:
    (joules,) = source.joules(seconds, (before,), (after,))
    return joules


@pytest.fixture
def package(tmp_path):
    Powercap(tmp_path).zone("intel-rapl:0", "package-0")
    return counters(tmp_path)


def test_a_counter_wraps(package):
    assert spent(package, 100, 2_000_100) == 2
    assert spent(package, INTEL_RANGE - 10, 30) == pytest.approx(40e-6)


def test_a_counter_that_begins_anew_has_not_wrapped(package):
    with pytest.raises(UnreadableError, match="package-0 went backwards without having wrapped"):
        spent(package, 100_000_000_000, 5)


def test_too_long_to_tell_how_often_it_wrapped(package):
    assert spent(package, 0, 5_000_000, 200) == 5
    with pytest.raises(UnreadableError, match=r"not read for 300 s .* may have wrapped more than once"):
        spent(package, 0, 5_000_000, 300)


@pytest.mark.parametrize("limit", [None, 0, "many"])
def test_a_range_that_is_not_known(tmp_path, limit):
    Powercap(tmp_path).zone("intel-rapl:0", "package-0", limit=limit)
    source = counters(tmp_path)
    assert spent(source, 100, 2_000_100) == 2
    with pytest.raises(UnreadableError, match="where it wraps is not known"):
        spent(source, 100, 99)


# ---- RAPL: what cannot be read ----


@pytest.fixture
def root_only(monkeypatch):
    """Counters as Linux guards them, also for tests that root runs."""
    really_open = os.open

    def refuse(path: Path, *arguments: int) -> int:
        if Path(path).name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(path))
        return really_open(path, *arguments)

    monkeypatch.setattr(os, "open", refuse)


def test_root_only(tmp_path, root_only):
    laptop(tmp_path)
    finding = find_rapl(tmp_path)
    assert (finding.source, finding.fix) == (None, GROUP_FIX)
    assert finding.reason == f"{tmp_path}/sys/class/powercap/intel-rapl:0/energy_uj: readable by root only"
    assert EnergyMeter.choose(tmp_path).reason == f"RAPL: {finding.reason}"


def test_a_file_vanishes(tmp_path):
    tree = laptop(tmp_path)
    source = counters(tmp_path)
    (tree.folder / "intel-rapl:0/energy_uj").unlink()
    with pytest.raises(UnreadableError, match="intel-rapl:0/energy_uj: No such file"):
        source.read()
    assert "No such file" in find_rapl(tmp_path).reason


def test_a_virtual_machine(tmp_path):
    write(tmp_path / "proc/cpuinfo", AMD.replace("avx2", "avx2 hypervisor"))
    meter = EnergyMeter.choose(tmp_path)
    assert not meter.available
    assert "a virtual machine: its host keeps the counters" in meter.reason


# ---- Raspberry Pi 5 ----


def test_pmic(tmp_path):
    raspberry_pi(tmp_path, answering())
    source = find_pmic(tmp_path).source
    assert source is not None
    assert (source.name, source.counts, source.estimated) == ("Raspberry Pi 5 PMIC", False, False)
    assert source.read() == pytest.approx((PMIC_WATTS,))


def test_pmic_elsewhere(tmp_path):
    command = raspberry_pi(tmp_path, answering())
    moved = command.rename(tmp_path / "vcgencmd")
    assert EnergyMeter.choose(tmp_path).reason == "Raspberry Pi 5 PMIC: vcgencmd is not installed"
    usual = tmp_path / "opt/vc/bin/vcgencmd"
    usual.parent.mkdir(parents=True)
    moved.rename(usual)
    assert EnergyMeter.choose(tmp_path).source == "Raspberry Pi 5 PMIC"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ('echo "Can\'t open device file: /dev/vcio" >&2; exit 255', "Can't open device file: /dev/vcio"),
        ("echo 'error=1 error_msg=\"Command not registered\"'", 'error=1 error_msg="Command not registered"'),
        ("exit 0", "said nothing"),
        (answering(PMIC_OUTPUT.replace("_V volt", "_V nothing")), "3V7_WL_SW_A current(0)"),
    ],
)
def test_pmic_fails(tmp_path, script, reason):
    raspberry_pi(tmp_path, script)
    finding = find_pmic(tmp_path)
    assert finding.source is None
    assert "usr/bin/vcgencmd pmic_read_adc: " in finding.reason
    assert reason in finding.reason
    assert "\n" not in finding.reason
    assert any("video" in line for line in finding.fix) == ("vcio" in reason)


def test_a_pi_4_has_no_sensor(tmp_path):
    raspberry_pi(tmp_path, answering(), "Raspberry Pi 4 Model B Rev 1.4")
    assert "only a Pi 5 has" in find_pmic(tmp_path).reason
    assert "a Raspberry Pi 4 Model B Rev 1.4 has no sensor" in EnergyMeter.choose(tmp_path).reason


# ---- batteries ----


def test_a_battery(tmp_path):
    battery(tmp_path, power_now=9_500_000)
    write(tmp_path / "sys/class/power_supply/AC/type", "Mains")
    battery(tmp_path, "hidpp_battery_0", scope="Device", status="Discharging")
    finding = find_battery(tmp_path)
    assert finding.source is not None
    assert (finding.source.name, finding.source.read()) == ("battery BAT0", (9.5,))


def test_a_battery_that_tells_its_current(tmp_path):
    battery(tmp_path, current_now=-800_000, voltage_now=11_500_000)
    source = find_battery(tmp_path).source
    assert source is not None
    assert source.read() == pytest.approx((9.2,))


def test_two_batteries(tmp_path):
    battery(tmp_path, power_now=9_500_000)
    battery(tmp_path, "BAT1", status="Not charging", power_now=0)
    source = find_battery(tmp_path).source
    assert source is not None
    assert (source.name, source.read()) == ("battery BAT0+BAT1", (9.5, 0))


@pytest.mark.parametrize("status", ["Charging", "Full", "Not charging", "Unknown"])
def test_plugged_in(tmp_path, status):
    battery(tmp_path, power_now=9_500_000, status=status)
    finding = find_battery(tmp_path)
    assert finding.source is None
    assert EnergyMeter.choose(tmp_path).reason == f"battery: {finding.reason}"
    assert "what the machine takes from the plug is not seen" in finding.reason
    assert "unplug" in finding.fix[0]


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"power_now": 0}, "battery BAT0 says 0 W"),
        ({"power_now": "?"}, "'?' is no number"),
        ({"current_now": 1}, "voltage_now: No such file"),
        ({}, "current_now: No such file"),
    ],
)
def test_a_battery_that_does_not_tell(tmp_path, files, reason):
    battery(tmp_path, **files)
    finding = find_battery(tmp_path)
    assert finding.source is None
    assert reason in finding.reason


# ---- the choice ----


def test_the_order(tmp_path):
    everything = [
        (lambda: battery(tmp_path, power_now=9_500_000), "battery BAT0"),
        (lambda: raspberry_pi(tmp_path, answering()), "Raspberry Pi 5 PMIC"),
        (lambda: laptop(tmp_path), "RAPL"),
    ]
    for add, name in everything:
        add()
        meter = EnergyMeter.choose(tmp_path)
        assert (meter.source, meter.available, meter.reason) == (name, True, "")
    meter = EnergyMeter.choose(tmp_path, 15)
    assert (meter.source, meter.estimated, meter.idle_w) == ("15 W assumed", True, None)


def test_none(tmp_path):
    meter = EnergyMeter.choose(tmp_path)
    assert (meter.source, meter.available, meter.counts) == ("", False, False)
    assert "\n" not in meter.reason
    for missing in ("powercap", "Raspberry Pi 5", "battery"):
        assert missing in meter.reason
    window = meter.begin()
    window.mark("draft")
    measured = window.end()
    assert (measured.joules, measured.reason, measured.phases) == (None, meter.reason, {})
    assert [finding.source for finding in survey(tmp_path)] == [None] * 3


def test_this_machine():
    with EnergyMeter.choose() as meter:
        assert meter.available == (meter.reason == "") == bool(meter.source)
