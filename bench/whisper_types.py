"""Compares types of a Whisper model's matrices: size, word errors, words unlike the first type's.

    edgespec quantize FOLDER --type f16,q8_0,q5_0 -o types/
    bench/whisper_types.py --models types/*.gguf --recordings talk.wav read.wav=read.txt --save

Recordings and word errors are those of transcribe.py: greedy, in English, nothing drafts. Words are compared
with the first model's too, of recordings without a reference as well. No time is measured, so that other
programs may run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import jiwer

from edgespec.speech.loading import SpeechModel
from edgespec.speech.options import SpeechOptions
from script import Measuring, parser, start
from transcribe import Hear, Hearing, Recording, ours, plain_words, read_recordings, word_errors


def unlike(hearings: Sequence[Hearing], first: Sequence[Hearing]) -> float:
    """Return the share of words that differ from those of the first model."""
    texts = [{one.file: plain_words(one.text) for one in found} for found in (first, hearings)]
    said = [(texts[0][file], texts[1][file]) for file in texts[0] if texts[0][file]]
    return float(jiwer.wer([one for one, _ in said], [one for _, one in said]))


def report(hearings: Sequence[Hearing], recordings: Sequence[Recording], sizes: dict[str, int]) -> list[str]:
    """Return a table: a row for each model."""
    by_model = {name: [one for one in hearings if one.variant == name] for name in sizes}
    first = next(iter(by_model.values()))
    lines = [f"{'model':<24}{'MB':>8}{'word errors':>13}{'unlike the first':>18}"]
    for name, own in by_model.items():
        errors = word_errors(own, recordings)
        lines.append(
            f"{name:<24}{sizes[name] / 1e6:>8.1f}{'-' if errors is None else f'{errors:.1%}':>13}"
            f"{unlike(own, first):>18.1%}"
        )
    return lines


def arguments() -> argparse.Namespace:
    parse = parser(__doc__, pair=False)
    parse.add_argument("--models", nargs="+", required=True, type=Path, metavar="FILE.gguf")
    parse.add_argument("--recordings", nargs="+", required=True, metavar="FILE[=REFERENCE]")
    return parse.parse_args()


def main() -> None:
    args = arguments()
    recordings = read_recordings(args.recordings)
    greedy = SpeechOptions(language="en", temperatures=(0.0,))
    hearings: list[Hearing] = []
    with ExitStack() as stack:
        models: dict[str, Hear] = {}
        for path in args.models:
            model = stack.enter_context(SpeechModel(path, n_threads=args.threads))
            models[path.stem] = ours(model, greedy, lambda: None)
        for recording in recordings:
            for name, hear in models.items():
                seconds, text, stats = hear(recording)
                hearings.append(Hearing(name, recording.file, 0, seconds, text, stats))
    measuring = Measuring(args)  # only now: nothing that others' load could change was measured
    measuring.end()
    sizes = {path.stem: path.stat().st_size for path in args.models}
    n_words = sum(len(plain_words(one.reference).split()) for one in recordings if one.reference)
    print(f"{len(recordings)} recordings, {sum(one.seconds for one in recordings):.0f} s; ", end="")
    print(f"{n_words} words of known text; {measuring}")
    print("\n".join(report(hearings, recordings, sizes)))
    texts = [{"model": one.variant, "file": one.file, "text": one.text} for one in hearings]
    measuring.keep("whisper-types", {"sizes": sizes, "texts": texts})


if __name__ == "__main__":
    start(main)
