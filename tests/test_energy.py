"""The energy counters, on a powercap tree of our own."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.energy import Powercap

RANGE = 1_000_000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two packages as Linux shows them, with what must not be counted beside them."""
    root = tmp_path / "powercap"
    (root / "intel-rapl").mkdir(parents=True)  # the control type itself: no zone
    zone(root, "intel-rapl:0", "package-0", 100)
    zone(root, "intel-rapl:0:0", "core", 40)
    zone(root, "intel-rapl:1", "package-1", 200)
    zone(root, "intel-rapl:2", "psys", 900)
    zone(root, "intel-rapl-mmio:0", "package-0", 7)
    return root


def zone(root: Path, name: str, label: str, counter: int) -> None:
    (root / name).mkdir()
    (root / name / "name").write_text(f"{label}\n")
    (root / name / "max_energy_range_uj").write_text(f"{RANGE}\n")
    set_counter(root, name, counter)


def set_counter(root: Path, name: str, counter: int) -> None:
    (root / name / "energy_uj").write_text(f"{counter}\n")


def test_packages_are_summed_once_each(root):
    meter = Powercap(root)
    assert (meter.available, meter.reason) == (True, "")
    began = meter.read()
    assert began is not None
    assert began.microjoules == (100, 200)
    for name in ("intel-rapl:0:0", "intel-rapl:2", "intel-rapl-mmio:0"):
        set_counter(root, name, 999_999)
    set_counter(root, "intel-rapl:0", 600)
    set_counter(root, "intel-rapl:1", 1200)
    assert meter.joules_since(began) == pytest.approx(1500e-6)
    assert meter.joules_since(meter.read()) == 0


def test_a_counter_wraps(root):
    meter = Powercap(root)
    set_counter(root, "intel-rapl:0", RANGE - 10)
    began = meter.read()
    set_counter(root, "intel-rapl:0", 30)
    assert meter.joules_since(began) == pytest.approx(40e-6)


def test_a_package_seen_by_memory_alone_counts(tmp_path):
    zone(tmp_path, "intel-rapl-mmio:0", "package-0", 7)
    reading = Powercap(tmp_path).read()
    assert reading is not None
    assert reading.microjoules == (7,)


def test_none(tmp_path):
    for root in (tmp_path / "none", tmp_path):
        meter = Powercap(root)
        assert not meter.available
        assert "no energy counters" in meter.reason
        assert meter.read() is None
        assert meter.joules_since(None) is None


def test_readable_by_root_only(root, monkeypatch):
    read_text = Path.read_text

    def refuse(path: Path, *arguments: object, **options: object) -> str:
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(path))
        return read_text(path)

    monkeypatch.setattr(Path, "read_text", refuse)
    meter = Powercap(root)
    assert not meter.available
    assert meter.reason == f"{root}/intel-rapl:0/energy_uj: readable by root only"


@pytest.mark.parametrize("text", ["", "many\n"])
def test_no_number(root, text):
    (root / "intel-rapl:1/energy_uj").write_text(text)
    meter = Powercap(root)
    assert not meter.available
    assert "\n" not in meter.reason
    (root / "intel-rapl:1/energy_uj").write_text("1")
    (root / "intel-rapl:1/max_energy_range_uj").write_text(text)
    assert not Powercap(root).available


def test_a_file_vanishes(root):
    meter = Powercap(root)
    began = meter.read()
    (root / "intel-rapl:1/energy_uj").unlink()
    assert meter.joules_since(began) is None
    assert not meter.available
    assert "intel-rapl:1/energy_uj: No such file" in meter.reason
    set_counter(root, "intel-rapl:1", 5)
    assert meter.read() is None, "what went away is not counted on again"


def test_this_machine():
    meter = Powercap()
    assert meter.available == (meter.reason == "")
    assert (meter.read() is None) == (not meter.available)
