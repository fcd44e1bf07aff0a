"""Boards: which one this is, and what its processor has."""

from __future__ import annotations

import pytest

from edgespec.platform.machine import device_model, device_revision, read_cpu
from pi_trees import A72, A76, PI_4_2GB, PI_5_8GB, cpuinfo, plant


def test_which_board(tmp_path):
    for pi in (PI_4_2GB, PI_5_8GB):
        root = plant(tmp_path / pi.revision, pi)
        assert device_model(root) == pi.model, "without the NUL at its end"
        assert device_revision(root) == pi.revision
    nothing = tmp_path / "nothing"
    assert (device_model(nothing), device_revision(nothing)) == ("", "")


@pytest.mark.parametrize(
    ("text", "model", "count"),
    [
        (cpuinfo(A72, *["0xd08"] * 4), "Cortex-A72", 4),
        (cpuinfo(A76, *["0xd0b"] * 4, revision="d04170"), "Cortex-A76", 4),
        (cpuinfo(A76, *["0xd05"] * 4, *["0xd0b"] * 4), "Cortex-A55 and Cortex-A76", 8),
        (cpuinfo(A76, "0xd0b", "0xd05", "0xd05"), "Cortex-A76 and Cortex-A55", 3),
        (cpuinfo(A76, "0xd0c"), "Neoverse-N1", 1),
        (cpuinfo(A76, "0xfff"), "processor 0xfff of implementer 0x41", 1),
        (cpuinfo(A76, "0xd08", implementer="0x61"), "processor 0xd08 of implementer 0x61", 1),
        (
            cpuinfo("neon", "0xd08").replace(
                "BogoMIPS", "model name\t: ARMv7 Processor rev 3 (v7l)\nBogoMIPS"
            ),
            "Cortex-A72",
            1,
        ),
    ],
)
def test_cores_by_name(tmp_path, text, model, count):
    (tmp_path / "cpuinfo").write_text(text)
    cpu = read_cpu(tmp_path / "cpuinfo")
    assert (cpu.model, cpu.count) == (model, count)
    assert cpu.flags
