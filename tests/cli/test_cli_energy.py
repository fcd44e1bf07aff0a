"""`edgespec energy` as a user types it, on this machine and on made-up ones."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import run_cli
from edgespec.apps.energy import meter
from edgespec.apps.energy.commands import energy as energy_room
from energy_trees import AMD, battery, laptop, write

DRIVER = """\
import sys
from pathlib import Path
from edgespec.apps.energy.commands import energy
from edgespec.cli import main
from edgespec.apps.energy import meter

energy.ROOT = Path(sys.argv.pop(1))
meter.MOST_OTHER_LOAD = 1e9  # tests run beside other tests
sys.exit(main())
"""


def command(root: Path, *arguments: object) -> list[str]:
    """The same in a process of its own, for terminals and signals."""
    return [sys.executable, "-c", DRIVER, str(root), "energy", *map(str, arguments)]


@pytest.fixture
def energy(environment, tmp_path, monkeypatch):
    """Run the command on the machine in tmp_path/root; with here=True on this one."""

    def energy(*arguments, here=False, busy=False):
        if not here:
            monkeypatch.setattr(energy_room, "ROOT", tmp_path / "root")
            monkeypatch.setattr(meter, "MOST_OTHER_LOAD", -1 if busy else 1e9)  # tests run beside other tests
        return run_cli("energy", *arguments, env=environment)

    return energy


@pytest.fixture
def root(tmp_path):
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


KEYS = {"sources", "chosen", "estimated", "reason", "interval_s", "idle_w", "kept"}


def test_this_machine(energy):
    process = energy("--no-idle", here=True)
    assert (process.returncode, process.stderr) == (0, "")
    assert "\x1b[" not in process.stdout, "piped output is plain"
    report = json.loads(energy("--no-idle", "--json", here=True).stdout)
    assert set(report) == KEYS
    assert len(report["sources"]) == 3
    for source in report["sources"]:
        assert set(source) == {"name", "available", "reason", "fix"}
        assert source["available"] == (source["reason"] == "")
    assert (report["chosen"] is None) == (not any(source["available"] for source in report["sources"]))


def test_nothing_there(energy, root):
    write(root / "proc/cpuinfo", AMD.replace("avx2", "hypervisor"))
    process = energy()
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.count("unavailable") == 4
    assert "a virtual machine" in process.stdout
    assert "--assume-watts" in process.stdout
    assert " 0" not in process.stdout
    report = json.loads(energy("--json").stdout)
    assert [report[name] for name in ("chosen", "interval_s", "idle_w", "kept")] == [None] * 4
    assert "virtual machine" in report["reason"]


def test_counters(energy, root):
    laptop(root)
    process = energy("--seconds", 1)
    assert process.returncode == 0
    assert "RAPL                 available" in process.stdout
    assert "chosen   RAPL\n" in process.stdout
    assert "idle     unavailable" in process.stdout
    assert process.stderr.splitlines()[0] == "measuring the idle machine for 1 s"
    assert "the idle power is unavailable: RAPL stood still" in process.stderr


def test_the_idle_power_is_kept(energy, root, cache):
    battery(root, power_now=9_500_000)
    process = energy("--seconds", 1)
    assert process.returncode == 0
    assert process.stderr == "measuring the idle machine for 1 s\n"
    file = cache / "edgespec/energy.json"
    assert f"idle     9.50 W, kept in {file}" in process.stdout
    assert "a sample every 1 s" in process.stdout
    assert json.loads(file.read_text())["idle"]["battery BAT0"]["watts"] == 9.5
    report = json.loads(energy("--json", "--no-idle").stdout)
    assert (report["chosen"], report["idle_w"], report["kept"]) == ("battery BAT0", 9.5, str(file))
    assert report["interval_s"] == 1.0


def test_a_busy_machine(energy, root, cache):
    battery(root, power_now=9_500_000)
    process = energy("--seconds", 2, "--json", busy=True)
    assert process.returncode == 0
    report = json.loads(process.stdout)
    assert (report["idle_w"], report["kept"]) == (9.5, None)
    assert "the machine was busy" in process.stderr
    assert not cache.exists()


def test_interrupted(environment, root, cache):
    battery(root, power_now=9_500_000)
    with subprocess.Popen(
        command(root, "--seconds", 600),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stderr.readline().startswith("measuring")
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (130, "")
    assert stderr.endswith("edgespec: error: interrupted\n")
    assert "Traceback" not in stderr
    assert not cache.exists()
