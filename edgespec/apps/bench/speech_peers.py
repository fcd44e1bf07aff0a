"""Runs faster-whisper and whisper.cpp on the same recordings, greedy and with the variants' beams.

    faster-whisper   in a Python that has it, int8 weights, loaded once
    whisper.cpp      whisper-cli, a process for each recording; its own time for loading is taken off

Both decode at temperature 0 without fallback.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgespec.apps.bench.peers import TIMEOUT_S, run_program
from edgespec.apps.bench.runs import Run
from edgespec.apps.bench.speech import SpeechBench, compared_with_known
from edgespec.errors import EdgespecError, UsageError
from edgespec.models.suites import Prompt
from edgespec.platform.closing import Closing
from edgespec.platform.files import why_no_file

WHISPER_CPP_PROGRAM = "whisper-cli"

_FASTER_WHISPER = """
import json, sys, time
import faster_whisper
model = faster_whisper.WhisperModel(
    sys.argv[1], device="cpu", compute_type="int8", cpu_threads=int(sys.argv[2]), local_files_only=True
)
print(json.dumps(faster_whisper.__version__), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    began = time.perf_counter()
    segments, _ = model.transcribe(
        asked["file"], language=asked["language"], beam_size=asked["beam"], temperature=0.0
    )
    text = "".join(segment.text for segment in segments)
    print(json.dumps({"seconds": time.perf_counter() - began, "text": text.strip()}), flush=True)
"""
_TIMES = re.compile(r"(load|total) time = +([\d.]+) ms")
_TIMESTAMPS = re.compile(r"^\[[^\]]*\]")


def _run(
    peer: str, hears: SpeechBench, prompt: Prompt, beam: int, round_: int, told: tuple[float, str]
) -> Run:
    """Return the record of one recording that a peer heard: `told` are its seconds and the text."""
    seconds, text = told
    return Run(
        prompt=prompt.id,
        category=prompt.category,
        variant=peer if beam == 1 else f"{peer} beam-{beam}",
        round=round_,
        prompt_tokens=0,
        tokens=0,
        total_s=seconds,
        ttft_s=None,
        prefill_s=None,
        heard=compared_with_known(prompt, text, hears.seconds(prompt)),
    )


class FasterWhisper(Closing):
    """faster-whisper in its own process, a peer of `measure_rounds`. A context manager, which ends it."""

    def __init__(self, command: str, hears: SpeechBench, n_threads: int) -> None:
        """Start it. `command`: the folder of its model, with a Python that has it before, if not this one.

        Raises UsageError for a folder or a Python that is not there, EdgespecError if it does not start.
        """
        self._hears = hears
        python, folder = faster_whisper(command)
        arguments = [python, "-c", _FASTER_WHISPER, str(folder), str(n_threads)]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `close`
        self._child = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        try:
            self.name = f"faster-whisper {self._answer()} (int8)"
            """Name and version."""
        except BaseException:
            self.close()
            raise

    def runs(self, prompt: Prompt, round_: int) -> Iterator[Run]:
        """Yield a greedy run, and one for each number of beams. Raises EdgespecError."""
        for beam in self._hears.beams:
            asked = {"file": str(self._hears.path(prompt)), "language": self._hears.language, "beam": beam}
            assert self._child.stdin is not None  # noqa: S101 - for the type checker
            try:
                self._child.stdin.write(json.dumps(asked) + "\n")
                self._child.stdin.flush()
            except BrokenPipeError:
                pass  # it has ended: the answer says why
            told = self._answer()
            yield _run("faster-whisper", self._hears, prompt, beam, round_, (told["seconds"], told["text"]))

    def _answer(self) -> Any:  # noqa: ANN401 - its version, or seconds and text
        """The next line that it prints. Raises EdgespecError with its last line if it has ended."""
        assert self._child.stdout is not None  # noqa: S101 - for the type checker
        line = self._child.stdout.readline()
        if not line:
            self._log.seek(0)
            lines = self._log.read().strip().splitlines()
            raise EdgespecError(f"faster-whisper ended: {lines[-1] if lines else 'it said nothing'}")
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        self._child.kill()
        self._child.communicate()
        self._log.close()


class WhisperCpp:
    """whisper.cpp's program as a peer of `bench.measure_rounds`."""

    def __init__(self, command: str, hears: SpeechBench, n_threads: int) -> None:
        """Take its model from `command`, with its program before, if that is not on the PATH.

        Raises UsageError if one of them is not there.
        """
        program, model = whisper_cpp(command)
        self._hears = hears
        self._command = [program, "-m", str(model.absolute()), "-t", str(n_threads)]
        self._command += ["-l", hears.language or "auto", "-nf"]
        self.name = f"whisper.cpp, {model.name}"
        """Name and model."""

    def runs(self, prompt: Prompt, round_: int) -> Iterator[Run]:
        """Yield a greedy run, and one for each number of beams. Raises EdgespecError."""
        for beam in self._hears.beams:
            n = str(beam)
            command = [*self._command, "-bs", n, "-bo", n, str(self._hears.path(prompt))]
            began = time.perf_counter()
            done = run_program(command, TIMEOUT_S)
            whole_s = time.perf_counter() - began
            times = dict(_TIMES.findall(done.stderr))
            seconds = (float(times["total"]) - float(times["load"])) / 1e3 if len(times) == 2 else whole_s
            text = " ".join(_TIMESTAMPS.sub("", line).strip() for line in done.stdout.splitlines())
            yield _run("whisper.cpp", self._hears, prompt, beam, round_, (seconds, text.strip()))


def faster_whisper(command: str) -> tuple[str, Path]:
    """Return the Python that has it, and the folder of its model. Raises UsageError."""
    python, folder = _program_and_model(command, sys.executable, "faster_whisper")
    if not folder.is_dir():
        raise UsageError("no such folder; name a model of CTranslate2", field="faster_whisper", value=folder)
    return python, folder


def whisper_cpp(command: str) -> tuple[str, Path]:
    """Return its program and the file of its model. Raises UsageError."""
    program, model = _program_and_model(command, shutil.which(WHISPER_CPP_PROGRAM), "whisper_cpp")
    if why := why_no_file(model):
        raise UsageError(f"{why}; name a model of whisper.cpp", field="whisper_cpp", value=model)
    return program, model


def _program_and_model(command: str, default: str | None, field: str) -> tuple[str, Path]:
    """Return a peer's program and model, as a user writes them. Raises UsageError."""
    parts = shlex.split(command)
    if len(parts) == 1 and default:
        parts = [default, *parts]
    if len(parts) != 2:
        problem = (
            "must be its program and its model" if default else "is not on the PATH: name it before its model"
        )
        raise UsageError(problem, field=field, value=command)
    program = shutil.which(parts[0])
    if program is None:
        raise UsageError("cannot be run: no such program", field=field, value=parts[0])
    return program, Path(parts[1]).expanduser()
