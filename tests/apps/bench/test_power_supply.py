"""Mains or battery, from trees like those that laptops show."""

from __future__ import annotations

import pytest

from edgespec.apps.bench.machine import on_battery
from energy_trees import battery, plug


def test_a_machine_without_a_battery_is_on_mains(tmp_path):
    assert not on_battery(tmp_path)
    plug(tmp_path, online=0)  # some boards show a plug that they do not have
    battery(tmp_path, "hid-mouse", scope="Device")
    assert not on_battery(tmp_path)


@pytest.mark.parametrize(
    ("status", "online", "expected"),
    [
        ("Discharging", 0, True),
        ("Discharging", 1, True),  # the charger is too weak for what the machine does
        ("Charging", 1, False),
        ("Charging", 0, False),  # by another plug than the one shown
        ("Full", 1, False),
        ("Not charging", 1, False),
        ("Unknown", 1, False),
        ("Unknown", 0, True),
    ],
)
def test_a_laptop(tmp_path, status, online, expected):
    battery(tmp_path, status=status)
    plug(tmp_path, online=online)
    assert on_battery(tmp_path) is expected


def test_one_of_several_is_enough(tmp_path):
    battery(tmp_path, "BAT0", status="Unknown")
    plug(tmp_path, "AC", online=0)
    plug(tmp_path, "ucsi-source-psy-USBC000:001", type="USB", online=1)
    assert not on_battery(tmp_path)
    battery(tmp_path, "BAT1", status="Discharging")
    assert on_battery(tmp_path)


def test_a_supply_that_cannot_be_read(tmp_path):
    battery(tmp_path, "BAT0").joinpath("status").unlink()
    (tmp_path / "sys/class/power_supply/BAT1").symlink_to("gone")
    assert not on_battery(tmp_path)
