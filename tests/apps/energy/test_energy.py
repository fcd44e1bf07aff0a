"""The sources of energy figures, each on a made-up machine's tree of files."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgespec.apps.energy.meter import EnergyMeter
from edgespec.apps.energy.sources import (
    GROUP_FIX,
    EnergyReading,
    PmicPower,
    PyRaplCounters,
    RaplCounters,
    UnreadableError,
    _pyrapl,
    find_battery,
    find_ina,
    find_pmic,
    find_rapl,
    is_for_pyrapl,
    survey,
)
from edgespec.errors import UsageError
from energy_trees import (
    AMD,
    AMD_RANGE,
    INTEL_RANGE,
    PMIC_OUTPUT,
    PMIC_WATTS,
    Powercap,
    answering,
    battery,
    hwmon,
    laptop,
    orin_nano,
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


def test_amd_has_no_memory_counter(tmp_path):
    tree = Powercap(tmp_path, AMD)
    tree.zone("intel-rapl:0", "package-0", limit=AMD_RANGE)
    tree.zone("intel-rapl:0:0", "core", limit=AMD_RANGE)
    assert counted(tmp_path) == ["package-0"]
    assert counters(tmp_path).interval_s < counters(tmp_path).zones[0].wraps_after_s / 2


def test_psys_stands_beside_packages(tmp_path):
    tree = laptop(tmp_path)
    tree.zone("intel-rapl:1", "psys", 7)
    assert counters(tmp_path).domains == ("package-0", "dram-0", "psys")
    assert counted(tmp_path) == ["package-0", "dram-0"]


def test_psys_alone_counts(tmp_path):
    Powercap(tmp_path).zone("intel-rapl:0", "psys")
    assert counted(tmp_path) == ["psys"]


def test_dies(tmp_path):
    tree = Powercap(tmp_path)
    for die in range(2):
        tree.zone(f"intel-rapl:{die}", f"package-0-die-{die}")
        tree.zone(f"intel-rapl:{die}:0", "dram")
    assert counted(tmp_path) == ["package-0-die-0", "dram-0-die-0", "package-0-die-1", "dram-0-die-1"]


def test_a_package_that_is_shown_twice_counts_once(tmp_path):
    tree = laptop(tmp_path)
    tree.zone("intel-rapl-mmio:0", "package-0", 7)
    assert counters(tmp_path).read() == (1000, 200)


def test_a_package_seen_by_memory_alone_counts(tmp_path):
    Powercap(tmp_path).zone("intel-rapl-mmio:0", "package-0", 7)
    assert counters(tmp_path).read() == (7,)


# ---- RAPL: what is between two readings ----


def spent(source: RaplCounters, before: int, after: int, seconds: float = 1.0) -> float:
    (joules,) = source.joules(EnergyReading(0.0, (before,)), EnergyReading(seconds, (after,)))
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
    assert (finding.source, finding.present, finding.fix) == (None, True, GROUP_FIX)
    assert finding.reason == f"{tmp_path}/sys/class/powercap/intel-rapl:0/energy_uj: readable by root only"
    assert EnergyMeter.choose(tmp_path).reason == f"RAPL: {finding.reason}"


@pytest.mark.parametrize("text", ["", "many", "1.5"])
def test_no_number(tmp_path, text):
    laptop(tmp_path).set("intel-rapl:0:2", text)
    finding = find_rapl(tmp_path)
    assert finding.source is None
    assert finding.reason.endswith(f"intel-rapl:0:2/energy_uj: {text!r} is no number")


def test_a_file_vanishes(tmp_path):
    tree = laptop(tmp_path)
    source = counters(tmp_path)
    (tree.folder / "intel-rapl:0/energy_uj").unlink()
    with pytest.raises(UnreadableError, match="intel-rapl:0/energy_uj: No such file"):
        source.read()
    assert "No such file" in find_rapl(tmp_path).reason


def test_nothing_there(tmp_path):
    assert find_rapl(tmp_path).reason == f"no {tmp_path}/sys/class/powercap"
    Powercap(tmp_path).zone("dtpm:0", "package")
    assert "no counters of processor packages" in find_rapl(tmp_path).reason


def test_a_virtual_machine(tmp_path):
    write(tmp_path / "proc/cpuinfo", AMD.replace("avx2", "avx2 hypervisor"))
    meter = EnergyMeter.choose(tmp_path)
    assert not meter.available
    assert "a virtual machine: its host keeps the counters" in meter.reason


# ---- RAPL through pyRAPL ----


@pytest.fixture
def pyrapl(tmp_path, monkeypatch):
    """The real pyRAPL, looking at the tree of one Intel package."""
    _pyrapl()
    room = sys.modules["pyRAPL.device_api"]
    tree = laptop(tmp_path)
    write(tmp_path / "sys/devices/system/cpu/present", "0-1")
    for cpu in range(2):
        write(tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id", 0)
    below = lambda path: Path(f"{tmp_path}{path}")  # noqa: E731
    monkeypatch.setattr(room, "open", lambda path, *_mode: below(path).open(), raising=False)
    monkeypatch.setattr(
        room, "os", SimpleNamespace(path=SimpleNamespace(exists=lambda path: below(path).exists()))
    )
    return tree


def test_through_pyrapl(pyrapl):
    source = PyRaplCounters(counters(pyrapl.root).zones)
    assert source.name == "RAPL through pyRAPL"
    assert source.read() == (1000, 200)
    pyrapl.set("intel-rapl:0", 5_001_000)
    assert source.read() == (5_001_000, 200)


def test_pyrapls_counters_wrap(pyrapl):
    pyrapl.set("intel-rapl:0", INTEL_RANGE - 10)
    source = PyRaplCounters(counters(pyrapl.root).zones)
    before = EnergyReading(0, source.read())
    pyrapl.set("intel-rapl:0", 30)
    assert source.joules(before, EnergyReading(1, source.read())) == pytest.approx((40e-6, 0))


def test_pyrapl_without_memory(pyrapl):
    (pyrapl.folder / "intel-rapl:0:2/name").write_text("other\n")
    source = PyRaplCounters(counters(pyrapl.root).zones)
    assert (source.domains, source.read()) == (("package-0",), (1000,))


def test_pyrapl_meets_no_number(pyrapl):
    source = PyRaplCounters(counters(pyrapl.root).zones)
    pyrapl.set("intel-rapl:0", "")
    with pytest.raises(UnreadableError, match="pyRAPL: could not convert"):
        source.read()


def test_pyrapl_has_another_idea_of_the_machine(pyrapl):
    write(pyrapl.root / "sys/devices/system/cpu/cpu1/topology/physical_package_id", 1)
    with pytest.raises(UnreadableError, match="pyRAPL"):
        PyRaplCounters(counters(pyrapl.root).zones)


def test_where_pyrapl_serves(tmp_path):
    tree = laptop(tmp_path / "laptop")
    assert is_for_pyrapl(tree.root, counters(tree.root).zones)
    write(tree.root / "proc/cpuinfo", AMD)
    assert not is_for_pyrapl(tree.root, counters(tree.root).zones)
    for name, label in (("intel-rapl:1", "psys"), ("intel-rapl:1", "package-1")):
        tree = laptop(tmp_path / label)
        tree.zone(name, label)
        assert not is_for_pyrapl(tree.root, counters(tree.root).zones)


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
    finding = find_pmic(tmp_path)
    assert (finding.source, finding.reason) == (None, "vcgencmd is not installed")
    assert find_pmic(tmp_path, moved).source
    assert EnergyMeter.choose(tmp_path, vcgencmd=moved).source == "Raspberry Pi 5 PMIC"


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


def test_pmic_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr("edgespec.apps.energy.sources._HANGS_AFTER_S", 0.2)
    source = PmicPower(raspberry_pi(tmp_path, "exec sleep 60"))
    with pytest.raises(UnreadableError, match=r"no answer in 0\.2 s"):
        source.read()


def test_pmic_cannot_be_started(tmp_path):
    command = raspberry_pi(tmp_path, "")
    command.write_bytes(b"\x7fELF of another machine")
    with pytest.raises(UnreadableError, match="vcgencmd pmic_read_adc: "):
        PmicPower(command).read()


def test_a_pi_4_has_no_sensor(tmp_path):
    raspberry_pi(tmp_path, answering(), "Raspberry Pi 4 Model B Rev 1.4")
    assert "only a Pi 5 has" in find_pmic(tmp_path).reason
    assert "a Raspberry Pi 4 Model B Rev 1.4 has no sensor" in EnergyMeter.choose(tmp_path).reason


# ---- INA sensors ----


def rails(root: Path) -> dict[str, float]:
    source = find_ina(root).source
    assert source is not None
    figures = zip(source.domains, source.counted, source.read(), strict=True)
    return {domain: watts for domain, is_counted, watts in figures if is_counted}


def test_the_rail_that_feeds_the_others(tmp_path):
    hwmon(tmp_path, 0, "coretemp", temp1_input=40000)
    orin_nano(tmp_path)
    finding = find_ina(tmp_path)
    assert finding.source is not None
    assert finding.source.name == "hwmon INA3221"
    assert finding.source.domains == ("VDD_IN", "VDD_CPU_GPU_CV", "VDD_SOC")
    assert rails(tmp_path) == pytest.approx({"VDD_IN": 6.0})


def test_a_jetson_nano(tmp_path):
    labels = {f"in{i}_label": f"POM_5V_{name}" for i, name in enumerate(("IN", "GPU", "CPU"), 1)}
    figures = {f"{kind}{i}_input": 1000 * i for i in (1, 2, 3) for kind in ("in", "curr")}
    hwmon(tmp_path, 0, "ina3221", **labels, **figures)
    assert rails(tmp_path) == {"POM_5V_IN": 1}


def test_rails_side_by_side(tmp_path):
    """A Jetson AGX Orin, whose 5 V rail feeds its memory but neither GPU nor CPU."""
    one = {"in1_label": "VDD_GPU_SOC", "in2_label": "VDD_CPU_CV", "in3_label": "VIN_SYS_5V0"}
    two = {"in1_label": "NC", "in2_label": "VDDQ_VDD2_1V8AO"}
    for number, labels in enumerate((one, two)):
        figures = {f"{kind}{i}_input": 2000 for i in (1, 2, 3)[: len(labels)] for kind in ("in", "curr")}
        hwmon(tmp_path, number, "ina3221", **labels, **figures)
    assert rails(tmp_path) == {"VDD_GPU_SOC": 4, "VDD_CPU_CV": 4, "VIN_SYS_5V0": 4}


def test_an_ina226(tmp_path):
    hwmon(tmp_path, 2, "ina226", in0_input=3, in1_input=12000, curr1_input=500, power1_input=6_025_000)
    hwmon(tmp_path, 10, "ina226", in0_input=3, in1_input=5000, curr1_input=1000)
    assert rails(tmp_path) == {"rail 1": 6.025, "hwmon10 rail 1": 5}


def test_a_channel_that_is_off(tmp_path):
    folder = orin_nano(tmp_path)
    write(folder / "in1_enable", 0)
    assert rails(tmp_path) == pytest.approx({"VDD_CPU_GPU_CV": 4.992 * 0.4, "VDD_SOC": 4.992 * 0.3})


def test_a_sensor_that_fails(tmp_path):
    folder = orin_nano(tmp_path)
    source = find_ina(tmp_path).source
    write(folder / "curr2_input", "")
    finding = find_ina(tmp_path)
    assert (finding.source, finding.present) == (None, True)
    assert "curr2_input: '' is no number" in finding.reason
    (folder / "curr2_input").unlink()
    with pytest.raises(UnreadableError, match="curr2_input: No such file"):
        source.read()


def test_no_sensor(tmp_path):
    hwmon(tmp_path, 0, "nvme", temp1_input=40000)
    assert "no INA3221 or INA2xx sensor" in find_ina(tmp_path).reason


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
    assert (finding.source, finding.present) == (None, True)
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
        (lambda: orin_nano(tmp_path), "hwmon INA3221"),
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
    for missing in ("powercap", "Raspberry Pi 5", "INA3221", "battery"):
        assert missing in meter.reason
    window = meter.begin()
    window.mark("draft")
    measured = meter.end(window)
    assert (measured.joules, measured.reason, measured.phases) == (None, meter.reason, {})
    assert [finding.source for finding in survey(tmp_path)] == [None] * 4


@pytest.mark.parametrize("watts", [0, -3, float("nan"), float("inf")])
def test_no_power_to_assume(tmp_path, watts):
    with pytest.raises(UsageError, match=r"^assume_watts .*: not a number above 0"):
        EnergyMeter.choose(tmp_path, watts)


def test_this_machine():
    with EnergyMeter.choose() as meter:
        assert meter.available == (meter.reason == "") == bool(meter.source)
