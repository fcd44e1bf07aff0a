"""Measures transcription: times real time, where the time goes, word errors; drafts and peers in turns.

    bench/transcribe.py talk.wav read.wav=read.txt --draft whisper-tiny.en --rounds 5 --save
    bench/transcribe.py read.wav=read.txt --beam 5 --faster-whisper "PYTHON FOLDER"
    bench/transcribe.py talk.wav --whisper-cpp "build/bin/whisper-cli ggml-base-q8_0.bin"

A recording may name its reference, the text that was read. Each round hears all recordings with each variant:
`plain` (nothing drafts), `auto` (text heard before), `draft` (a smaller model where it pays), and the peers
that are named: faster-whisper in its own Python, with int8 weights, and whisper.cpp's command. All at
temperature 0 without fallback, in English; loading is not counted. Word errors are of lower case without
punctuation, numbers as they stand. Texts of plain, auto and draft have to be the same.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgespec.errors import EdgespecError
from edgespec.models.resolve import resolve
from edgespec.speech.audio import read_audio
from edgespec.speech.drafts import ModelDrafts
from edgespec.speech.loading import SpeechModel
from edgespec.speech.options import SpeechOptions
from edgespec.speech.transcriber import Samples, Transcriber
from script import Measuring, parser, spread, start

_FASTER_WHISPER = """
import json, sys, time
from faster_whisper import WhisperModel
model = WhisperModel(sys.argv[1], device="cpu", compute_type="int8", cpu_threads=int(sys.argv[2]))
print("ready", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    began = time.perf_counter()
    segments, _ = model.transcribe(asked["file"], language="en", beam_size=asked["beam"], temperature=0.0)
    text = "".join(segment.text for segment in segments)
    print(json.dumps({"seconds": time.perf_counter() - began, "text": text}), flush=True)
"""


@dataclass(frozen=True)
class Recording:
    """A file, its sound, and what was said in it, if that is known."""

    file: str
    samples: Samples
    reference: str | None

    @property
    def seconds(self) -> float:
        """Its length."""
        return len(self.samples) / 16000


@dataclass(frozen=True)
class Hearing:
    """One recording heard once."""

    variant: str
    file: str
    round: int
    seconds: float
    text: str
    stats: dict[str, Any]


Hear = Callable[[Recording], tuple[float, str, dict[str, Any]]]
"""Returns the seconds, the text, and what else is known."""


def ours(target: SpeechModel, options: SpeechOptions, drafts: Callable[[], ModelDrafts | None]) -> Hear:
    """Return how edgespec hears a recording, with fresh drafts each time."""

    def hear(recording: Recording) -> tuple[float, str, dict[str, Any]]:
        transcriber = Transcriber(target.model, target.tokenizer, options, drafts=drafts())
        transcript = transcriber.transcribe(recording.samples)
        return transcript.stats.total_s, transcript.text, asdict(transcript.stats)

    return hear


def faster_whisper(stack: ExitStack, command: str, threads: int, beam: int) -> Hear:
    """Return how faster-whisper hears a recording: `command` is its Python and the model's folder."""
    python, folder = shlex.split(command)
    child = subprocess.Popen(
        [python, "-c", _FASTER_WHISPER, folder, str(threads)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    stack.callback(child.wait)
    stack.callback(child.kill)
    assert child.stdin is not None
    assert child.stdout is not None
    to_child, from_child = child.stdin, child.stdout
    if from_child.readline() != "ready\n":
        raise EdgespecError(f"--faster-whisper {command}: it does not start")

    def hear(recording: Recording) -> tuple[float, str, dict[str, Any]]:
        to_child.write(json.dumps({"file": recording.file, "beam": beam}) + "\n")
        to_child.flush()
        told = json.loads(from_child.readline())
        return told["seconds"], told["text"].strip(), {}

    return hear


def whisper_cpp(command: str, threads: int, beam: int) -> Hear:
    """Return how whisper.cpp hears a recording: `command` is its program and the model's file."""
    program, model = shlex.split(command)

    def hear(recording: Recording) -> tuple[float, str, dict[str, Any]]:
        words = [program, "-m", model, "-t", str(threads), "-l", "en", "-nf", "-bs", str(beam)]
        began = time.perf_counter()
        done = subprocess.run(
            [*words, "-bo", str(beam), recording.file], capture_output=True, text=True, check=False
        )
        whole_s = time.perf_counter() - began
        if done.returncode:
            raise EdgespecError(f"--whisper-cpp {command}: {done.stderr.strip().splitlines()[-1:]}")
        times = dict(re.findall(r"(\w+) time = +([\d.]+) ms", done.stderr))
        seconds = (float(times["total"]) - float(times["load"])) / 1e3 if "total" in times else whole_s
        lines = [re.sub(r"^\[[^\]]*\]", "", line) for line in done.stdout.splitlines()]
        return seconds, " ".join(" ".join(lines).split()), {"times": times}

    return hear


def plain_words(text: str) -> str:
    """Return a text in lower case, without punctuation."""
    return " ".join(re.findall(r"[\w']+", text.lower()))


def word_errors(hearings: Sequence[Hearing], recordings: Sequence[Recording]) -> float | None:
    """Return the word error rate over the recordings whose text is known; None if none is."""
    references = {one.file: one.reference for one in recordings if one.reference is not None}
    heard = {one.file: one.text for one in hearings if one.file in references}
    if not heard:
        return None
    import jiwer

    files = sorted(heard)
    said = [plain_words(references[file] or "") for file in files]
    return float(jiwer.wer(said, [plain_words(heard[file]) for file in files]))


def report(hearings: Sequence[Hearing], recordings: Sequence[Recording]) -> list[str]:
    """Return a table: a row for each variant."""
    total_s = sum(one.seconds for one in recordings)
    variants = list(dict.fromkeys(one.variant for one in hearings))
    rows: dict[str, list[float]] = {}
    for name in variants:
        rounds = sorted({one.round for one in hearings if one.variant == name})
        rows[name] = [
            sum(one.seconds for one in hearings if (one.variant, one.round) == (name, i)) for i in rounds
        ]
    first = spread(rows[variants[0]])[0]
    lines = [
        f"{'variant':<18}{'seconds':>26}{'times real time':>17}{f'{variants[0]} over it':>18}"
        f"{'encoder':>9}{'accepted':>10}{'word errors':>13}"
    ]
    for name in variants:
        median, low, high = spread(rows[name])
        own = [one for one in hearings if one.variant == name]
        known = [one.stats for one in own if "encode_s" in one.stats]
        encoder = sum(one["encode_s"] + one["draft_encode_s"] for one in known)
        share = f"{encoder / sum(one.seconds for one in own):.0%}" if known else "-"
        drafted = sum(one["n_drafted"] for one in known)
        accepted = f"{sum(one['n_accepted'] for one in known) / drafted:.0%}" if drafted else "-"
        errors = word_errors(own, recordings)
        lines.append(
            f"{name:<18}{f'{median:.2f} [{low:.2f} - {high:.2f}]':>26}{total_s / median:>17.1f}"
            f"{first / median:>18.2f}{share:>9}{accepted:>10}"
            f"{'-' if errors is None else f'{errors:.1%}':>13}"
        )
    return lines


def differing(hearings: Sequence[Hearing]) -> list[str]:
    """Return the files that edgespec's own greedy variants hear differently."""
    texts: dict[str, set[str]] = {}
    for one in hearings:
        if one.variant in ("plain", "auto", "draft"):
            texts.setdefault(one.file, set()).add(one.text)
    return [file for file, found in texts.items() if len(found) > 1]


def read_recordings(given: Sequence[str]) -> list[Recording]:
    """Return the recordings named FILE or FILE=REFERENCE."""
    found = []
    for one in given:
        file, _, reference = one.partition("=")
        text = Path(reference).read_text() if reference else None
        found.append(Recording(file, read_audio(file), text))
    return found


def variants_of(args: argparse.Namespace, stack: ExitStack) -> dict[str, Hear]:
    """Return what is compared."""
    target = stack.enter_context(SpeechModel(resolve(args.model), name=args.model, n_threads=args.threads))
    greedy = SpeechOptions(language="en", temperatures=(0.0,))
    found = {
        "plain": ours(target, greedy, lambda: None),
        "auto": ours(target, greedy, lambda: ModelDrafts(target)),
    }
    if args.draft:
        draft = stack.enter_context(SpeechModel(resolve(args.draft), name=args.draft, n_threads=args.threads))
        found["draft"] = ours(target, greedy, lambda: ModelDrafts(target, draft))
    beams = [1, args.beam] if args.beam else [1]
    if args.beam:
        found[f"beam {args.beam}"] = ours(target, greedy.changed(beam=args.beam), lambda: None)
    for beam in beams:
        suffix = f" {beam}" if beam > 1 else ""
        if args.faster_whisper:
            name = f"faster-whisper{suffix}"
            found[name] = faster_whisper(stack, args.faster_whisper, args.threads, beam)
        if args.whisper_cpp:
            found[f"whisper.cpp{suffix}"] = whisper_cpp(args.whisper_cpp, args.threads, beam)
    return found


def arguments() -> argparse.Namespace:
    parse = parser(__doc__, pair=False)
    parse.add_argument("recordings", nargs="+", metavar="FILE[=REFERENCE]")
    parse.add_argument("--model", default="whisper-base")
    parse.add_argument("--draft", metavar="MODEL")
    parse.add_argument("--beam", type=int)
    parse.add_argument("--rounds", type=int, default=5)
    parse.add_argument("--faster-whisper", metavar='"PYTHON FOLDER"')
    parse.add_argument("--whisper-cpp", metavar='"PROGRAM MODEL"')
    parse.add_argument("--name", default="transcribe", help="name of the file that --save writes")
    args = parse.parse_args()
    if args.rounds < 1:
        parse.error("--rounds must be at least 1")
    return args


def main() -> None:
    args = arguments()
    recordings = read_recordings(args.recordings)
    hearings: list[Hearing] = []
    with ExitStack() as stack:
        variants = variants_of(args, stack)
        for hear in variants.values():  # what only the first pass costs is not measured
            hear(recordings[0])
        measuring = Measuring(args)
        for turn in range(args.rounds):
            for name, hear in variants.items():
                for recording in recordings:
                    seconds, text, stats = hear(recording)
                    hearings.append(Hearing(name, recording.file, turn, seconds, text, stats))
        measuring.end()
    total_s = sum(one.seconds for one in recordings)
    print(f"{len(recordings)} recordings, {total_s:.0f} s; {args.model}; {measuring}")
    print("\n".join(report(hearings, recordings)))
    if files := differing(hearings):
        print(f"TEXTS DIFFER: {', '.join(files)}", file=sys.stderr)
    measuring.keep(args.name, {"seconds": total_s, "hearings": [asdict(one) for one in hearings]})


if __name__ == "__main__":
    start(main)
