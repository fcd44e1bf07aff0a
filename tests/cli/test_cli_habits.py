"""What people bring from other tools and other machines: each works, or one line says how it is done here."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from command_line import COMMAND

# ---- limits of the machine ----


@pytest.mark.parametrize("kilobytes", [60_000, 220_000, 300_000])
def test_memory_that_ulimit_refuses_is_said_to_be_so(tiny_path, child_environment, kilobytes):
    """While modules are loaded, before the model is, and where llama.cpp starts threads for it."""
    command = shlex.join([*COMMAND, "run", "abc", "-t", str(tiny_path), "--drafter", "none"])
    process = subprocess.run(
        ["sh", "-c", f"ulimit -v {kilobytes}; exec {command}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=child_environment,
        check=False,
        timeout=60,
    )
    assert (process.returncode, process.stdout) == (1, "")
    assert all(line.startswith("edgespec: ") for line in process.stderr.splitlines()), process.stderr
    line = process.stderr.splitlines()[-1]
    assert line.startswith("edgespec: error: ")
    assert "`ulimit -v`" in line
