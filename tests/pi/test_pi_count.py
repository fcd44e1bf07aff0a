"""Counting instructions: the plugin against loops of a known length, and the program of Whisper's passes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.kernels import Plugin, plugin_path
from pi import count, count_speech
from pi.wheels import TRIPLE
from tiny_whisper import write_tiny_whisper

LOOPS = """\
#include <unistd.h>

static void run(long turns) {
    __asm__ volatile("1: subs %0, %0, #1\\n b.ne 1b" : "+r"(turns) : : "cc");
}

int main(int argc, char **argv) {
    (void)argv;
    run(1000);
    if (write(1, "few\\n", 4) != 4) { return 1; }
    run(500000);
    if (write(2, "not counted\\n", 12) != 12 || write(1, "many\\n", 5) != 5) { return 1; }
    return argc > 1;
}
"""


def test_the_plugin_counts_what_runs_between_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for program in (f"{TRIPLE}-gcc", count.QEMU):
        if not shutil.which(program):
            pytest.skip(f"no {program}")
    monkeypatch.setattr(count, "BUILD", tmp_path)
    source, program = tmp_path / "loops.c", tmp_path / "loops"
    source.write_text(LOOPS)
    subprocess.run([f"{TRIPLE}-gcc", "-O2", "-static", source, "-o", program], check=True)
    command = [count.QEMU, "-cpu", "cortex-a72", "-plugin", count.plugin(), program]
    (few, of_few), (many, of_many) = count.instructions(command)
    assert (few, many) == ("few", "many")
    assert of_few >= 2_000
    assert 1_000_000 <= of_many < 1_001_000  # two each turn, and what calls the system
    with pytest.raises(EdgespecError, match="not counted"):
        count.instructions([*command, "fail"])


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ("echo a; echo no such model >&2; exit 1", "no such model"),
        ("echo a; echo instructions 7 >&2; exit 3", "exit code 3"),
        ("echo a; echo b; echo instructions 7 >&2", "1 of 2 lines counted"),
        ("true", "0 of 0 lines counted"),
    ],
)
def test_a_program_that_fails_is_not_counted(script: str, complaint: str) -> None:
    with pytest.raises(EdgespecError, match=complaint):
        count.instructions(["sh", "-c", script])


def test_instructions_are_those_since_the_line_before() -> None:
    script = "echo a; echo instructions 100 >&2; echo b; echo a warning >&2; echo instructions 142 >&2"
    assert count.instructions(["sh", "-c", script]) == [("a", 100), ("b", 42)]


@pytest.mark.parametrize("kind", count_speech.KINDS)
def test_all_passes_of_whisper_run(kind: str, tmp_path: Path) -> None:
    if kind == "kernels" and not (plugin_path().exists() and Plugin(plugin_path()).isa):
        pytest.skip("no kernels for this processor")
    model = write_tiny_whisper(tmp_path / "tiny.gguf", n_audio_ctx=150)
    command = [sys.executable, "-P", count_speech.PASSES, model, kind]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.split("\n") == [
        *("loaded", "encoder", "warm", "T(1)", "warm", "T(4)", "warm", "T(8)", "warm", "5 beams", "")
    ]


def test_counting_whisper_on_an_unknown_board(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["count_speech", "--board", "pi9"])
    with pytest.raises(UsageError, match="--board: invalid choice: 'pi9'"):
        count_speech._main()


def test_counting_whisper_wants_an_emulator_with_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(count_speech, "QEMU", "no-such-qemu")
    monkeypatch.setattr(sys, "argv", ["count_speech"])
    with pytest.raises(EdgespecError, match="no-such-qemu on this machine: apt install qemu-user"):
        count_speech._main()
