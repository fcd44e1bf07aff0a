"""Compares words with openai-whisper's: what a Whisper model writes here, in each type of its matrices.

    edgespec quantize FOLDER --type f16,q8_0,q5_0 -o types/
    bench/whisper_reference.py --models types/*.gguf --suite FOLDER --openai PYTHON --beam 5 --save

PYTHON has openai-whisper installed. It gets the weights of the first of the models, so name the one in F16
first, computes in float32, and hears the same samples. All decode alike: with timestamps, each window after
the text before it, at temperature 0 without fallback, greedy, and with --beam that many beams. Without
--openai the first model is what the others are compared with. The suite is as that of `edgespec bench`: word
errors are counted where the text is known, words unlike the reference's in all recordings. No time is
measured, so other programs may run. openai-whisper is slow: --texts FILE takes its texts from the JSON of an
earlier run, and leaves recordings out that it lacks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgespec.apps.bench.speech import WordErrors, plain_words, word_errors
from edgespec.apps.speech.audio import read_audio
from edgespec.apps.speech.options import SpeechOptions
from edgespec.apps.speech.transcriber import Samples, Transcriber
from edgespec.apps.speech.weights.convert import SIZE_KEYS
from edgespec.apps.speech.weights.reading import WhisperSizes, expected_tensors
from edgespec.apps.speech.whisper_model import SpeechModel
from edgespec.errors import EdgespecError
from edgespec.llama.gguf import read_gguf, row_bytes, to_floats
from edgespec.models.suites import OVERALL, Prompt, load_recordings
from script import Measuring, parser, start

OPENAI = "openai-whisper"

_OPENAI = """
import json, sys
import numpy, torch, whisper
folder, threads = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(threads)
with open(folder + "/dims.json") as file:
    model = whisper.model.Whisper(whisper.model.ModelDimensions(**json.load(file)))
arrays = numpy.load(folder + "/weights.npz")
model.load_state_dict({name: torch.from_numpy(arrays[name]) for name in arrays.files}, strict=True)
model.eval()
print("ready", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    options = {"beam_size": asked["beam"]} if asked["beam"] > 1 else {}
    heard = whisper.transcribe(
        model, numpy.load(asked["file"]), language=asked["language"], temperature=0.0, fp16=False, **options
    )
    print(json.dumps({"language": heard["language"], "text": heard["text"].strip()}), flush=True)
"""

Texts = dict[str, dict[str, str]]
"""A source's name -> a recording's id -> the text that was heard."""


def read_weights(path: Path) -> tuple[WhisperSizes, dict[str, npt.NDArray[np.float32]]]:
    """Read a model's sizes and its tensors in F32, with OpenAI's names and shapes."""
    gguf, data = read_gguf(path), np.memmap(path, np.uint8, "r")
    sizes = WhisperSizes(**{name: int(gguf.number(f"whisper.{key}")) for name, key in SIZE_KEYS.items()})
    shapes, arrays = expected_tensors(sizes), {}
    for info in gguf.tensors:
        start = gguf.data_start + info.offset
        rows = data[start : start + info.bytes].reshape(-1, row_bytes(info.kind, info.columns))
        floats = to_floats(rows, info.kind, info.columns)
        arrays[info.name] = floats.astype(np.float32).reshape(shapes[info.name])
    return sizes, arrays


@contextmanager
def openai_whisper(python: str, weights: Path, threads: int) -> Iterator[subprocess.Popen[str]]:
    """Start openai-whisper in another Python, on the weights of a GGUF file."""
    sizes, arrays = read_weights(weights)
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder, "weights.npz"), allow_pickle=False, **arrays)
        Path(folder, "dims.json").write_text(json.dumps(asdict(sizes)))
        child = subprocess.Popen(
            [python, "-c", _OPENAI, folder, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert child.stdout is not None
            if child.stdout.readline() != "ready\n":
                raise EdgespecError(f"--openai {python}: it does not start")
            yield child
        finally:
            child.kill()
            child.communicate()


def reference_text(child: subprocess.Popen[str], samples: Samples, language: str | None, beam: int) -> str:
    """Return what openai-whisper hears."""
    assert child.stdin is not None
    assert child.stdout is not None
    with tempfile.NamedTemporaryFile(suffix=".npy") as file:
        np.save(file, samples)
        file.flush()
        child.stdin.write(json.dumps({"file": file.name, "language": language, "beam": beam}) + "\n")
        child.stdin.flush()
        line = child.stdout.readline()
    if not line:
        raise EdgespecError(f"{OPENAI} ended")
    return str(json.loads(line)["text"])


def our_text(model: SpeechModel, samples: Samples, language: str | None, beam: int) -> str:
    """Return what edgespec hears."""
    beams = beam if beam > 1 else None
    options = SpeechOptions(language=language, temperatures=(0.0,), beam=beams)
    return Transcriber(model.model, model.tokenizer, options).transcribe(samples).text


def totals(pairs: Sequence[tuple[str, str]]) -> WordErrors:
    """Return the errors of the second texts against the first, which are known."""
    found = [word_errors(known, heard) for known, heard in pairs if plain_words(known)]
    return WordErrors(sum(one.n_errors for one in found), sum(one.n_words for one in found))


def percent(errors: WordErrors) -> str:
    """Return a rate with its count."""
    if not errors.n_words:
        return "-"
    return f"{errors.n_errors / errors.n_words:.1%} ({errors.n_errors} of {errors.n_words})"


def report(prompts: Sequence[Prompt], texts: Texts) -> list[str]:
    """Return a table for each category: a row for each source."""
    reference = next(iter(texts.values()))
    lines = []
    for category in (*dict.fromkeys(prompt.category for prompt in prompts), OVERALL):
        own = [prompt for prompt in prompts if category in (prompt.category, OVERALL)]
        lines.append(f"{category:<34}{'word errors':>22}{'unlike the reference':>26}")
        for name, heard in texts.items():
            errors = totals([(one.text, heard[one.id]) for one in own if one.text])
            unlike = totals([(reference[one.id], heard[one.id]) for one in own])
            lines.append(f"  {name:<32}{percent(errors):>22}{percent(unlike):>26}")
    return lines


def arguments() -> argparse.Namespace:
    parse = parser(__doc__, pair=False)
    parse.add_argument("--models", nargs="+", required=True, type=Path, metavar="FILE.gguf")
    parse.add_argument("--suite", required=True, metavar="FOLDER")
    parse.add_argument("--openai", metavar="PYTHON", help="a Python with openai-whisper")
    parse.add_argument("--texts", type=Path, metavar="FILE", help="JSON of an earlier run with --openai")
    parse.add_argument("--beam", type=int, default=1)
    parse.add_argument("--language", metavar="CODE", help="default: detected in each recording")
    parse.add_argument("--name", default="whisper-reference", help="name of the file that --save writes")
    args = parse.parse_args()
    if args.openai and args.texts:
        parse.error("--openai and --texts contradict each other: choose one")
    return args


def main() -> None:
    args = arguments()
    suite = load_recordings(args.suite)
    prompts = suite.prompts
    beams = tuple(dict.fromkeys((1, args.beam)))
    by_beam: dict[int, Texts] = {beam: {} for beam in beams}
    if args.texts:
        earlier = json.loads(args.texts.read_text())["texts"]
        by_beam = {beam: {OPENAI: earlier[str(beam)][OPENAI]} for beam in beams}
        prompts = tuple(one for one in prompts if all(one.id in texts[OPENAI] for texts in by_beam.values()))
    sounds = {prompt.id: read_audio(str(Path(args.suite, prompt.id))) for prompt in prompts}
    with ExitStack() as stack:
        child = None
        if args.openai:
            child = stack.enter_context(openai_whisper(args.openai, args.models[0], args.threads))
        models = [stack.enter_context(SpeechModel(path, n_threads=args.threads)) for path in args.models]
        for beam, texts in by_beam.items():
            for place, samples in sounds.items():
                if child:
                    text = reference_text(child, samples, args.language, beam)
                    texts.setdefault(OPENAI, {})[place] = text
                for model in models:
                    text = our_text(model, samples, args.language, beam)
                    texts.setdefault(model.path.stem, {})[place] = text
    measuring = Measuring(args)  # only now: nothing that others' load could change was measured
    measuring.end()
    total_s = sum(map(len, sounds.values())) / 16000
    print(f"{len(sounds)} recordings, {total_s:.0f} s; {measuring}")
    for beam, texts in by_beam.items():
        print(f"\n{f'{beam} beams' if beam > 1 else 'greedy'}\n" + "\n".join(report(prompts, texts)))
    known = {prompt.id: prompt.text for prompt in prompts if prompt.text}
    sizes = {path.stem: path.stat().st_size for path in args.models}
    measuring.keep(args.name, {"sizes": sizes, "known": known, "texts": by_beam})


if __name__ == "__main__":
    start(main)
