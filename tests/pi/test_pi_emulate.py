"""What `python -m pi.emulate` says before anything is emulated, and what it makes of reports and logs."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.errors import EdgespecError, UsageError
from edgespec.platform.cpu import BOARDS
from pi import ROOT, console, emulate, emulator
from pi import root as root_room

WHEELS = ("edgespec-0.1.0-cp311-abi3-any.whl", "llama_cpp_python-0.3.36-1{}-py3-none-any.whl")


@pytest.fixture
def dist(tmp_path, monkeypatch):
    """Folders of both boards' wheels, as pi/wheels.py leaves them; no wheel can be installed."""
    dist = tmp_path / "dist"
    for board in BOARDS:
        folder = dist / board.name
        folder.mkdir(parents=True)
        wheels = [folder / name.format(board.name) for name in WHEELS]
        for wheel in wheels:
            wheel.write_text(wheel.name)
        hashes = {wheel.name: hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels}
        manifest = {"board": board.name, "machine": "aarch64", "glibc": "2.34"}
        manifest |= {"compiler": "", "tools": {}, "packages": {}, "wheels": hashes}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    for room in (emulate, emulator):
        monkeypatch.setattr(room, "DIST", dist)
        monkeypatch.setattr(room, "BUILD", tmp_path / "build")
    monkeypatch.setattr(root_room, "BUILD", tmp_path / "build")
    return dist


@pytest.fixture
def no_programs(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))


def test_no_wheels(dist):
    (dist / "pi5" / "manifest.json").unlink()
    with pytest.raises(EdgespecError, match=r"pi5: no wheels for this board; build them with `make pi5`$"):
        emulate.emulate([])


def test_a_wheel_that_changed(dist):
    wheel = dist / "pi4" / WHEELS[0]
    wheel.write_text("other")
    with pytest.raises(EdgespecError, match=rf"{wheel.name}: its SHA-256 is not the manifest's; .*make pi4"):
        emulate.emulate(["pi4"])


def test_no_qemu(dist, no_programs):
    with pytest.raises(EdgespecError, match=r"^no qemu-aarch64-static .*: apt install qemu-user-static$"):
        emulate.emulate(["pi4"])


def test_only_the_boards_asked_for_need_wheels(dist, no_programs):
    (dist / "pi5" / "manifest.json").unlink()
    with pytest.raises(EdgespecError, match="qemu-user-static"):
        emulate.emulate(["pi4"])


def test_unknown_board(dist):
    with pytest.raises(UsageError, match=r"^--board pi3: choose from pi4, pi5$"):
        emulate.emulate(["pi3"])


def test_as_a_program():
    program = [sys.executable, "-m", "pi.emulate", "--board", "pi3"]
    process = subprocess.run(program, capture_output=True, text=True, cwd=ROOT, check=False)
    assert process.returncode == 2
    assert process.stderr == "edgespec: --board pi3: choose from pi4, pi5\n"


def test_all_tests_named_are_there():
    assert [name for name in emulate._TESTS if not (ROOT / "tests" / name).exists()] == []
    assert set(emulate._OF_A_PROCESSOR) <= set(emulate._TESTS)
    everything = "".join((ROOT / "tests" / name).read_text() for name in emulate._TESTS)
    for words in filter(None, emulate._TESTS.values()):
        for word in words.partition(" and ")[0].split(" or "):
            assert word in everything, f"nothing is left out by {word}"


def test_a_venv_is_made_again_for_other_wheels_only(dist, tmp_path):
    wheel = dist / "pi4" / WHEELS[0]
    (tmp_path / "edgespec-root.json").write_text("{}")
    first = emulator._digest([wheel], tmp_path)
    os.utime(wheel, (0, 0))
    assert emulator._digest([wheel], tmp_path) == first
    wheel.write_text(wheel.name[::-1])
    assert emulator._digest([wheel], tmp_path) != first


# ---- reports and logs ----


REPORT = """\
<testsuites><testsuite name="pytest">
<testcase name="test_a"/><testcase name="test_b[1]">{of_b}</testcase>
<testcase name="test_c"><skipped/></testcase>
</testsuite></testsuites>
"""


def run_tests(tmp_path, report, code):
    """What comes of tests that write this report and end with this exit code."""
    file = tmp_path / "pi4-some.xml"
    write = f"pathlib.Path({str(file)!r}).write_text({report!r})" if report else "0"
    command = [sys.executable, "-c", f"import pathlib, sys; {write}; sys.exit({code})"]
    return emulate._tested(emulator.Emulator(BOARDS[0], tmp_path), "tests", command, file)


def test_counts(tmp_path):
    assert run_tests(tmp_path, REPORT.format(of_b=""), 0) == "2 passed, 0 failed, 1 skipped"


@pytest.mark.parametrize("how", ["<failure/>", "<error/>"])
def test_counts_of_failures(tmp_path, how):
    with pytest.raises(
        EdgespecError, match=r"^1 passed, 1 failed, 1 skipped: test_b\[1\]; see .*pi4-some.log"
    ):
        run_tests(tmp_path, REPORT.format(of_b=how), 1)


def test_nothing_but_skipped_is_no_success(tmp_path):
    report = '<testsuites><testsuite><testcase name="test_a"><skipped/></testcase></testsuite></testsuites>'
    with pytest.raises(EdgespecError, match="0 passed, 0 failed, 1 skipped"):
        run_tests(tmp_path, report, 0)


def test_a_report_of_an_earlier_time_does_not_count(tmp_path):
    run_tests(tmp_path, REPORT.format(of_b=""), 0)
    with pytest.raises(EdgespecError, match="did not run to their end"):
        run_tests(tmp_path, "", -1)


def test_the_json_in_a_log():
    log = 'edgespec doctor\nedgespec: a message with {braces}\n{\n  "kernels": {"in_use": "neon"}\n}\nmore\n'
    assert console.json_of(log) == {"kernels": {"in_use": "neon"}}


# ---- commands ----


def test_a_command_that_fails_shows_the_end_of_its_log(tmp_path, capfd):
    script = "print(*range(100), sep='\\n'); raise SystemExit(3)"
    with pytest.raises(EdgespecError, match=r"^counting: failed \(exit code 3\); .*/log$"):
        console.run("counting", [sys.executable, "-c", script], tmp_path / "log")
    shown = capfd.readouterr().err.splitlines()
    assert shown[0] == "edgespec: counting"
    assert shown[1:] == [str(number) for number in range(80, 100)]
    assert (tmp_path / "log").read_text().splitlines()[-1] == "99"


def test_a_signal_and_a_missing_program(tmp_path):
    kill = f"import os; os.kill(os.getpid(), {signal.SIGKILL.value})"
    assert console.run_for_code("x", [sys.executable, "-c", kill], tmp_path / "log") == -signal.SIGKILL
    with pytest.raises(EdgespecError, match=r"^no-such-program: there is no such program$"):
        console.run("x", ["no-such-program"], tmp_path / "log")


def test_the_emulated_python_is_called_by_the_name_that_it_was_called_by(tmp_path, monkeypatch):
    """With a shell in the place of qemu, which shows what it was given."""
    root = tmp_path / "a root"
    (root / "usr" / "bin").mkdir(parents=True)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / emulator.QEMU).write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (programs / emulator.QEMU).chmod(0o755)
    python = emulator.wrapper(emulator.Emulator(BOARDS[0], root))
    link = tmp_path / "venv-python"
    link.symlink_to(python)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}"}
    said = subprocess.run([link, "-c", "a b"], capture_output=True, text=True, env=environment, check=True)
    program = Path(root, "usr", "bin", "python3.11")
    assert said.stdout.splitlines() == [
        *("-cpu", "cortex-a72", "-L", str(root), "-0", str(link), str(program), "-c", "a b")
    ]
