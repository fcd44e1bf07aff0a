"""Mains or battery, from trees like those that laptops show."""

from __future__ import annotations

import pytest

from edgespec.apps.bench.machine import on_battery
from energy_trees import battery


def test_a_machine_without_a_battery_is_on_mains(tmp_path):
    assert not on_battery(tmp_path)
    battery(tmp_path, "hid-mouse", scope="Device")
    assert not on_battery(tmp_path)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("Discharging", True),
        ("Charging", False),
        ("Full", False),
        ("Not charging", False),
        ("Unknown", False),
    ],
)
def test_a_laptop(tmp_path, status, expected):
    battery(tmp_path, status=status)
    assert on_battery(tmp_path) is expected


def test_one_of_several_is_enough(tmp_path):
    battery(tmp_path, "BAT0", status="Unknown")
    assert not on_battery(tmp_path)
    battery(tmp_path, "BAT1", status="Discharging")
    assert on_battery(tmp_path)


def test_a_supply_that_cannot_be_read(tmp_path):
    battery(tmp_path, "BAT0").joinpath("status").unlink()
    (tmp_path / "sys/class/power_supply/BAT1").symlink_to("gone")
    assert not on_battery(tmp_path)
