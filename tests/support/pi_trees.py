"""Raspberry Pis: what Raspberry Pi OS (64-bit, bookworm) shows of them, as trees of files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from energy_trees import PMIC_OUTPUT, raspberry_pi, write


@dataclass(frozen=True)
class Pi:
    """A board, and the numbers that its kernel shows."""

    model: str
    revision: str
    part: str
    features: str
    hwcap: int
    memory_kb: int
    available_kb: int
    least_mhz: int
    most_mhz: int
    pmic: str = "echo vc_gencmd_read_response returned -1; exit 1"


A72 = "fp asimd evtstrm crc32 cpuid"
A76 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"
A72_HWCAP, A76_HWCAP = 0x887, 0x119FFF

PI_4_2GB = Pi(
    *("Raspberry Pi 4 Model B Rev 1.4", "b03114", "0xd08", A72, A72_HWCAP), *(1_893_496, 1_585_432, 600, 1800)
)
PI_4_4GB = Pi(
    *("Raspberry Pi 4 Model B Rev 1.4", "c03114", "0xd08", A72, A72_HWCAP), *(3_885_396, 3_472_112, 600, 1800)
)
PI_5_8GB = Pi(
    *("Raspberry Pi 5 Model B Rev 1.0", "d04170", "0xd0b", A76, A76_HWCAP),
    *(8_245_280, 7_634_544, 1500, 2400),
    f"cat <<'END'\n{PMIC_OUTPUT}END",
)


def cpuinfo(features: str, *parts: str, revision: str = "", implementer: str = "0x41") -> str:
    """Return /proc/cpuinfo of an ARM machine with these cores."""
    processors = (
        f"processor\t: {i}\nBogoMIPS\t: 108.00\nFeatures\t: {features}\nCPU implementer\t: {implementer}\n"
        f"CPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: {part}\nCPU revision\t: 3\n\n"
        for i, part in enumerate(parts)
    )
    return "".join(processors) + (f"Revision\t: {revision}\nSerial\t\t: 10000000a1b2c3d4\n" * bool(revision))


def plant(root: Path, pi: Pi, *, throttled: int = 0) -> Path:
    """Write the board's files below `root`, with a `vcgencmd` that says these bits; return `root`."""
    raspberry_pi(
        root,
        f'case "$*" in\nget_throttled) echo throttled={throttled:#x};;\npmic_read_adc) {pi.pmic}\n;;\nesac',
        pi.model,
    )
    (root / "proc/device-tree/model").write_bytes(pi.model.encode() + b"\0")
    write(root / "proc/cpuinfo", cpuinfo(pi.features, *[pi.part] * 4, revision=pi.revision))
    write(root / "proc/meminfo", f"MemTotal: {pi.memory_kb} kB\nMemAvailable: {pi.available_kb} kB")
    for cpu in range(4):
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/cpufreq"
        write(folder / "scaling_governor", "ondemand")
        write(folder / "cpuinfo_min_freq", 1000 * pi.least_mhz)
        write(folder / "cpuinfo_max_freq", 1000 * pi.most_mhz)
        write(folder / "scaling_cur_freq", 1000 * pi.least_mhz)
    write(root / "sys/class/thermal/thermal_zone0/type", "cpu-thermal")
    write(root / "sys/class/thermal/thermal_zone0/temp", 58426)
    return root
