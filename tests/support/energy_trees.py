"""Made-up machines: what Linux and a Raspberry Pi's firmware show of energy, as trees of files."""

from __future__ import annotations

from pathlib import Path

INTEL_RANGE, AMD_RANGE = 262_143_328_850, 65_532_610_987  # microjoules, as such machines show them

INTEL = "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: An Intel CPU\nflags\t\t: fpu avx2\n\n"
AMD = "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: An AMD CPU\nflags\t\t: fpu avx2\n\n"

PMIC_OUTPUT = """\
 3V7_WL_SW_A current(0)=0.00390372A
   3V3_SYS_A current(1)=0.10832820A
  DDR_VDD2_A current(3)=0.00585558A
    0V8_SW_A current(6)=0.31424950A
  VDD_CORE_A current(7)=1.42880000A
      HDMI_A current(22)=0.02002440A
 3V7_WL_SW_V volt(8)=3.72241800V
   3V3_SYS_V volt(9)=3.30910500V
  DDR_VDD2_V volt(11)=1.10439400V
    0V8_SW_V volt(14)=0.80402850V
  VDD_CORE_V volt(15)=0.90659250V
      HDMI_V volt(23)=5.07860000V
     EXT5V_V volt(24)=5.05716000V
      BATT_V volt(25)=0.00000000V
"""
PMIC_WATTS = 1.1451 * (
    0.00390372 * 3.72241800
    + 0.10832820 * 3.30910500
    + 0.00585558 * 1.10439400
    + 0.31424950 * 0.80402850
    + 1.42880000 * 0.90659250
    + 0.02002440 * 5.07860000
) + 0.5879  # fmt: skip


def write(file: Path, text: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


class Powercap:
    """A powercap tree below `root`: zones lie in their control type's folder, with links beside it."""

    def __init__(self, root: Path, cpuinfo: str = INTEL) -> None:
        self.root = root
        self.folder = root / "sys/class/powercap"
        write(root / "proc/cpuinfo", cpuinfo)

    def zone(self, name: str, label: str, counter: int = 0, limit: int | None = INTEL_RANGE) -> None:
        parts = name.split(":")
        inside = self.folder / parts[0]
        for i in range(1, len(parts)):
            inside /= ":".join(parts[: i + 1])
        write(inside / "name", label)
        write(inside / "energy_uj", counter)
        if limit is not None:
            write(inside / "max_energy_range_uj", limit)
        (self.folder / name).symlink_to(inside)

    def set(self, name: str, counter: object) -> None:
        write(self.folder / name / "energy_uj", counter)


def laptop(root: Path) -> Powercap:
    """One Intel package with its parts and its memory."""
    tree = Powercap(root)
    tree.zone("intel-rapl:0", "package-0", 1000)
    tree.zone("intel-rapl:0:0", "core", 40)
    tree.zone("intel-rapl:0:1", "uncore", 30)
    tree.zone("intel-rapl:0:2", "dram", 200)
    return tree


def raspberry_pi(root: Path, script: str, model: str = "Raspberry Pi 5 Model B Rev 1.0") -> Path:
    """A board with a `vcgencmd` that is this shell script; return its path."""
    write(root / "proc/device-tree/model", model + "\0")
    command = root / "usr/bin/vcgencmd"
    write(command, f"#!/bin/sh\n{script}")
    command.chmod(0o755)
    return command


def answering(output: str = PMIC_OUTPUT) -> str:
    return f"[ \"$1\" = pmic_read_adc ] || exit 2\ncat <<'END'\n{output}END"


def battery(root: Path, name: str = "BAT0", **files: object) -> Path:
    """A battery with these files."""
    folder = root / f"sys/class/power_supply/{name}"
    for file, content in {"type": "Battery", "status": "Discharging", **files}.items():
        write(folder / file, content)
    return folder
