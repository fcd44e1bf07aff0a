"""Sources of watts: a board's own sensors, a laptop's battery, or an assumption.

    PmicPower      Raspberry Pi 5: vcgencmd pmic_read_adc, volts and amperes of each rail
    InaPower       INA3221, INA226 and the like, as on Jetson boards: /sys/class/hwmon/hwmonN
    BatteryPower   a laptop that is not plugged in: /sys/class/power_supply/BATn
    AssumedPower   what the user says

The first three measure the whole board or machine, with everything connected to it.
"""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.apps.energy.base import (
    PowerSource,
    SourceFinding,
    UnreadableError,
    finding,
    read_number,
    read_text,
)
from edgespec.platform.boards import device_model

# ---- Raspberry Pi 5 ----

PMIC = "Raspberry Pi 5 PMIC"
_PMIC_SCALE, _PMIC_OFFSET_W = 1.1451, 0.5879  # a published fit of a meter at the plug to the rails' sum
_PMIC_FIGURE = re.compile(r"(\w+)_([AV])\s+(?:current|volt)\(\d+\)=(\d+(?:\.\d+)?)[AV]\b")
_VCGENCMD = ("usr/bin/vcgencmd", "usr/local/bin/vcgencmd", "opt/vc/bin/vcgencmd")
_HANGS_AFTER_S = 2.0
_VIDEO_GROUP = ("sudo usermod --append --groups video $USER", "then log out and in again")


class PmicPower(PowerSource):
    """The rails of a Raspberry Pi 5's power chip, scaled to the whole board."""

    name = PMIC
    domains = ("board",)
    counted = (True,)
    interval_s = 0.2

    def __init__(self, vcgencmd: Path) -> None:
        self._vcgencmd = vcgencmd

    def read(self) -> tuple[float, ...]:
        """Return the board's watts."""
        command = [str(self._vcgencmd), "pmic_read_adc"]
        what = " ".join(command)
        try:
            process = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_HANGS_AFTER_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise UnreadableError(f"{what}: no answer in {_HANGS_AFTER_S:g} s") from None
        except OSError as error:
            raise UnreadableError(f"{what}: {error.strerror or error}") from None
        rails: dict[str, dict[str, float]] = {}
        for rail, unit, figure in _PMIC_FIGURE.findall(process.stdout):
            rails.setdefault(rail, {})[unit] = float(figure)
        watts = [rail["A"] * rail["V"] for rail in rails.values() if len(rail) == 2]
        if process.returncode or not watts:
            said = " ".join((process.stderr or process.stdout).split())[:120]
            fix = _VIDEO_GROUP if re.search("vcio|vchi|permission", said, re.IGNORECASE) else ()
            raise UnreadableError(f"{what}: {said or 'said nothing'}", *fix)
        return (sum(watts) * _PMIC_SCALE + _PMIC_OFFSET_W,)


def find_pmic(root: Path, vcgencmd: Path | None = None) -> SourceFinding:
    """Look for a Raspberry Pi 5; `vcgencmd` is the path of its command, default: the usual places."""
    board = device_model(root)
    if "Raspberry Pi" in board and "Raspberry Pi 5" not in board:
        return SourceFinding(PMIC, None, f"a {board} has no sensor of its current: only a Pi 5 has")
    if vcgencmd is None:
        vcgencmd = next((root / path for path in _VCGENCMD if (root / path).exists()), None)
    if vcgencmd is None:
        if "Raspberry Pi 5" in board:
            fix = ("sudo apt install raspi-utils   # brings vcgencmd",)
            return SourceFinding(PMIC, None, "vcgencmd is not installed", fix, present=True)
        return SourceFinding(PMIC, None, "this is no Raspberry Pi 5")
    source = PmicPower(vcgencmd)
    return finding(PMIC, lambda: source, "")


# ---- INA sensors ----

INA = "hwmon INA"
_INA = re.compile(r"ina(?:2\d\d|2xx|3221)")
_WHOLE = ("VDD_IN", "POM_5V_IN")  # rails that feed all the others
_INSIDE = ("VDDQ_VDD2_1V8AO",)  # of a Jetson AGX Orin: fed by its VIN_SYS_5V0
_CHANNELS = (1, 2, 3)  # an INA3221's in4 and above are voltages of shunts, and its curr4 is a sum


@dataclass(frozen=True, slots=True)
class _Rail:
    label: str
    folder: Path
    channel: int

    def watts(self) -> float:
        power = self.folder / f"power{self.channel}_input"
        if power.exists():
            return read_number(power) / 1e6
        volts = read_number(self.folder / f"in{self.channel}_input") / 1e3
        return volts * read_number(self.folder / f"curr{self.channel}_input") / 1e3


class InaPower(PowerSource):
    """The rails of a board that have INA sensors."""

    interval_s = 0.1

    def __init__(self, rails: Sequence[_Rail], chip: str) -> None:
        self._rails = tuple(rails)
        self.name = f"hwmon {chip.upper()}"
        self.domains = tuple(rail.label for rail in rails)
        whole = next((label for label in _WHOLE if label in self.domains), None)
        self.counted = tuple(label == whole if whole else label not in _INSIDE for label in self.domains)

    def read(self) -> tuple[float, ...]:
        """Return the watts of each rail."""
        return tuple(rail.watts() for rail in self._rails)


def find_ina(root: Path) -> SourceFinding:
    """Look for INA power sensors among the hwmon devices."""
    hwmon = root / "sys/class/hwmon"

    def find() -> InaPower | None:
        chips, rails = _rails(hwmon)
        return InaPower(rails, chips[0]) if rails else None

    return finding(INA, find, f"no INA3221 or INA2xx sensor in {hwmon}")


def _rails(hwmon: Path) -> tuple[list[str], list[_Rail]]:
    """Return the names of the chips, and their rails with unique labels."""
    chips: list[str] = []
    rails: list[_Rail] = []
    for folder in sorted(hwmon.glob("hwmon*"), key=lambda path: (len(path.name), path.name)):
        if not (folder / "name").exists():
            continue
        chip = read_text(folder / "name")
        if not _INA.fullmatch(chip):
            continue
        for channel in _CHANNELS:
            if label := _label(folder, channel):
                taken = any(rail.label == label for rail in rails)
                rails.append(_Rail(f"{folder.name} {label}" if taken else label, folder, channel))
                chips.append(chip)
    return chips, rails


def _label(folder: Path, channel: int) -> str:
    """Return a channel's label; "" if it is off, not connected or does not give watts."""
    files = [folder / f"{kind}{channel}_input" for kind in ("power", "in", "curr")]
    if not (files[0].exists() or (files[1].exists() and files[2].exists())):
        return ""
    enable = folder / f"in{channel}_enable"
    if enable.exists() and read_text(enable) == "0":
        return ""
    label = folder / f"in{channel}_label"
    text = read_text(label) if label.exists() else f"rail {channel}"
    return "" if text == "NC" else text  # not connected


# ---- batteries ----

BATTERY = "battery"


class BatteryPower(PowerSource):
    """A laptop's batteries while they discharge: the power of the whole machine, display included."""

    interval_s = 1.0  # gauges update every second or more slowly

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = tuple(folders)
        self.domains = tuple(folder.name for folder in folders)
        self.counted = (True,) * len(self.domains)
        self.name = f"{BATTERY} {'+'.join(self.domains)}"

    def read(self) -> tuple[float, ...]:
        """Return the watts of each battery."""
        states = [read_text(folder / "status") for folder in self._folders]
        for folder, state in zip(self._folders, states, strict=True):
            if state == "Charging" or (state != "Discharging" and "Discharging" not in states):
                raise UnreadableError(
                    f"{folder.name} is {'not discharging' if state == 'Unknown' else state.lower()}: "
                    "what the machine takes from the plug is not seen",
                    "unplug the charger and wait a minute",
                )
        watts = [
            _battery_watts(folder) if state == "Discharging" else 0.0
            for folder, state in zip(self._folders, states, strict=True)
        ]
        if not sum(watts):
            raise UnreadableError(f"{self.name} says 0 W", "wait a minute: a gauge is slow after unplugging")
        return tuple(watts)


def _battery_watts(folder: Path) -> float:
    power = folder / "power_now"
    if power.exists():
        return abs(read_number(power)) / 1e6  # some drivers show discharging as negative
    return abs(read_number(folder / "current_now")) * read_number(folder / "voltage_now") / 1e12


def find_battery(root: Path) -> SourceFinding:
    """Look for discharging batteries that power the machine."""
    supplies = root / "sys/class/power_supply"

    def find() -> BatteryPower | None:
        folders = list(_batteries(supplies))
        return BatteryPower(folders) if folders else None

    return finding(BATTERY, find, f"no battery in {supplies}")


def _batteries(supplies: Path) -> Iterator[Path]:
    for folder in sorted(supplies.glob("*")):
        if not (folder / "type").exists() or read_text(folder / "type") != "Battery":
            continue
        scope = folder / "scope"
        if not (scope.exists() and read_text(scope) == "Device"):  # a mouse's or a headset's
            yield folder


# ---- an assumption ----


class AssumedPower(PowerSource):
    """Constant watts that the user gave."""

    estimated = True
    domains = ("assumed",)
    counted = (True,)
    interval_s = math.inf

    def __init__(self, watts: float) -> None:
        """`watts`: above 0."""
        self._watts = watts
        self.name = f"{watts:g} W assumed"

    def read(self) -> tuple[float, ...]:
        """Return the assumed watts."""
        return (self._watts,)
