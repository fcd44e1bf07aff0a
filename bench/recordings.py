r"""Measures `edgespec transcribe` on recordings, beside faster-whisper and whisper.cpp, in turns.

    .venv/bin/python bench/recordings.py RECORDINGS --language en --drafts none,whisper-tiny \
        --faster-whisper "env OMP_PROC_BIND=true PYTHON DIR" --whisper-cpp "whisper-cli ggml-base-q8_0.bin"

NAME.txt beside NAME.wav says what is said in it: then word errors are counted (lower case, no punctuation).
Everything is decoded greedily without fallback; loading is not counted. faster-whisper runs in a
Python that has it, with int8 weights.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jiwer

from edgespec.apps.bench.runs import rotated
from edgespec.apps.speech.audio import read_audio
from edgespec.apps.speech.mel import SAMPLE_RATE
from edgespec.errors import UsageError
from script import Measuring, parser, run_program, spread, start

SOUND = (".wav", ".flac", ".mp3", ".m4a", ".ogg", ".opus")

FASTER_WHISPER = """
import json, sys, time
import faster_whisper
model = faster_whisper.WhisperModel(
    sys.argv[1], device="cpu", compute_type="int8", cpu_threads=int(sys.argv[2]), local_files_only=True
)
began = time.perf_counter()
segments, _ = model.transcribe(sys.argv[3], language=sys.argv[4] or None, beam_size=1, temperature=0.0)
text = "".join(segment.text for segment in segments)
print(json.dumps({"seconds": time.perf_counter() - began, "text": text.strip()}))
"""


class Heard(NamedTuple):
    """One recording heard once."""

    file: str
    contender: str
    round: int
    seconds: float
    text: str


Hear = Callable[[Path], tuple[float, str]]
"""Returns the seconds and the text of a recording."""


def edgespec(args: argparse.Namespace, draft: str) -> Hear:
    """Return a function that hears with `edgespec transcribe`, drafted by `draft`."""
    command = [sys.executable, "-m", "edgespec", "transcribe", "--json", "--temp", "0", "--draft", draft]
    command += ["--model", args.model, "--threads", str(args.threads)]
    command += ["--language", args.language] if args.language else []

    def hear(file: Path) -> tuple[float, str]:
        told = json.loads(run_program([*command, str(file.absolute())]).stdout)
        return told["stats"]["seconds"], told["text"]

    return hear


def whisper_cpp(args: argparse.Namespace) -> Hear:
    """Return a function that hears with whisper.cpp's program; its own time for loading is taken off."""
    program, model = shlex.split(args.whisper_cpp)
    command = [program, "-m", str(Path(model).absolute()), "-t", str(args.threads)]
    command += ["-l", args.language or "auto", "-nf", "-bs", "1", "-bo", "1"]

    def hear(file: Path) -> tuple[float, str]:
        done = run_program([*command, str(file.absolute())])
        times = dict(re.findall(r"(load|total) time = +([\d.]+) ms", done.stderr))
        lines = (re.sub(r"^\[[^\]]*\]", "", line).strip() for line in done.stdout.splitlines())
        return (float(times["total"]) - float(times["load"])) / 1e3, " ".join(lines).strip()

    return hear


def faster_whisper(args: argparse.Namespace) -> Hear:
    """Return a function that hears with faster-whisper, in a Python that has it."""
    *python, folder = shlex.split(args.faster_whisper)

    def hear(file: Path) -> tuple[float, str]:
        options = [folder, str(args.threads), str(file.absolute()), args.language or ""]
        told = json.loads(run_program([*python, "-c", FASTER_WHISPER, *options]).stdout)
        return told["seconds"], told["text"]

    return hear


def measure(files: list[Path], contenders: dict[str, Hear], rounds: int) -> list[Heard]:
    """Let each contender hear each recording in turns, after the first recording once, uncounted."""
    for hear in contenders.values():
        hear(files[0])
    found = []
    for round_ in range(rounds):
        for place, file in enumerate(files):
            for name in rotated(list(contenders), round_ + place):
                found.append(Heard(file.name, name, round_, *contenders[name](file)))
    return found


def word_errors(known: str, heard: str) -> int:
    """Count words replaced, missing or added, in lower case without punctuation."""
    own, other = (" ".join(re.findall(r"[\w']+", text.lower())) for text in (known, heard))
    found = jiwer.process_words(own, other)
    return found.substitutions + found.deletions + found.insertions


def report(runs: list[Heard], files: list[Path], audio_s: float) -> None:
    """Print for each contender the seconds of all recordings, word errors, and texts like the first's."""
    known = {
        file.name: file.with_suffix(".txt").read_text() for file in files if file.with_suffix(".txt").exists()
    }
    names = list(dict.fromkeys(run.contender for run in runs))
    rounds = sorted({run.round for run in runs})
    first = {run.file: run.text for run in runs if run.contender == names[0]}
    for name in names:
        sums = [sum(one.seconds for one in runs if (one.contender, one.round) == (name, i)) for i in rounds]
        median, low, high = spread(sums)
        own = {run.file: run.text for run in runs if run.contender == name}
        errors = sum(word_errors(text, own[file]) for file, text in known.items()) if known else "unavailable"
        print(
            f"{name:32} {median:7.2f} s ({low:.2f} - {high:.2f})  {audio_s / median:5.1f} times real time  "
            f"word errors {errors}  texts as the first's "
            f"{sum(own[file] == text for file, text in first.items())}/{len(first)}"
        )


def main() -> None:
    parse = parser(__doc__, pair=False)
    parse.add_argument("recordings", type=Path, nargs="+", help="sound files, or folders of them")
    parse.add_argument("--model", default="whisper-base")
    parse.add_argument("--drafts", default="none", help="of edgespec, with commas: none, auto, NAME")
    parse.add_argument("--language")
    parse.add_argument("--rounds", type=int, default=3)
    parse.add_argument("--faster-whisper", metavar="'PYTHON DIR'")
    parse.add_argument("--whisper-cpp", metavar="'WHISPER-CLI FILE'")
    args = parse.parse_args()
    found = [file for one in args.recordings for file in (sorted(one.rglob("*")) if one.is_dir() else [one])]
    files = [file for file in found if file.suffix.lower() in SOUND]
    if not files:
        raise UsageError("no recording is there")
    audio_s = sum(len(read_audio(str(file))) for file in files) / SAMPLE_RATE
    contenders = {f"edgespec, draft {draft}": edgespec(args, draft) for draft in args.drafts.split(",")}
    if args.whisper_cpp:
        contenders["whisper.cpp"] = whisper_cpp(args)
    if args.faster_whisper:
        contenders["faster-whisper"] = faster_whisper(args)
    measuring = Measuring(args)
    runs = measure(files, contenders, args.rounds)
    measuring.end()
    print(f"{len(files)} recordings, {audio_s:.0f} s; {measuring}")
    report(runs, files, audio_s)
    measuring.store("recordings", {"audio_s": audio_s, "runs": runs})


if __name__ == "__main__":
    start(main)
