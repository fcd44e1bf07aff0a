"""Measures what Whisper's passes cost: encoder, T(n) of the decoder, five beams; our kernels and ggml's own.

Each round runs every pass on both, one after the other, so that what disturbs the machine disturbs both. A
pass of the decoder follows --context tokens and is taken back. --models: files or names of models, or the
shape of a published one with random weights (tiny, base, small, medium, turbo), whose cost is the same:

    python bench/whisper_cost.py --models whisper-base,random:small
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.apps.speech.whisper_model import DecoderCache, SequenceBatch, WhisperModel
from edgespec.models.resolve import resolve
from script import Measuring, in_child, numbers, parser, require_kernels, spread, start

_SHAPES = {
    "tiny": (384, 6, 4, 4, 80),
    "base": (512, 8, 6, 6, 80),
    "small": (768, 12, 12, 12, 80),
    "medium": (1024, 16, 24, 24, 80),
    "turbo": (1280, 20, 32, 4, 128),
}
"""State, heads, layers of the encoder and of the decoder, mels."""

_N_ORDINARY = 50_257  # tokens, of a multilingual vocabulary
_BEAMS = 5
_KINDS = ("kernels", "stock")


def write_random(folder: Path, shape: str, matrix_type: str) -> Path:
    """Write a model of this shape with random weights."""
    sys.path.append(str(Path(__file__).parents[1] / "tests/support"))
    from tiny_whisper import byte_tokens, write_tiny_whisper

    state, n_head, n_audio, n_text, n_mels = _SHAPES[shape]
    words = byte_tokens()
    return write_tiny_whisper(
        folder / f"{shape}-random.gguf",
        n_state=state,
        n_head=n_head,
        n_audio_layer=n_audio,
        n_text_layer=n_text,
        n_mels=n_mels,
        matrix_type=matrix_type,
        tokens=words + [f"{i}" for i in range(_N_ORDINARY - len(words))],
    )


class Passes:
    """The passes of one model on one kind of kernels."""

    def __init__(self, path: Path, args: argparse.Namespace, kind: str) -> None:
        self.model = WhisperModel.open(path, n_threads=args.threads, kernels=kind == "kernels")
        dims = self.model.dims
        rng = np.random.default_rng(1)
        self._mel = rng.normal(0, 0.5, (dims.n_mels, 2 * dims.n_audio_ctx)).astype(np.float32)
        self._n_context = args.context
        audio = self.model.encode(self._mel)
        self._text = [(101 + 7 * i) % dims.n_vocab for i in range(args.context)]
        self._one = self._filled(self.model.cache(audio))
        self._beams = self._filled(self.model.cache(audio, _BEAMS))
        self._beams.reorder([0] * _BEAMS)

    def _filled(self, cache: DecoderCache) -> DecoderCache:
        cache.forward([SequenceBatch(0, self._text, 0)])
        return cache

    def encode(self) -> None:
        """Encode a window."""
        self.model.encode(self._mel).close()

    def decode(self, n: int) -> None:
        """Run n tokens of one sequence, all with their logits."""
        self._one.forward([SequenceBatch(0, self._text[:n], n)])
        self._one.rewind(0, self._n_context)

    def search(self) -> None:
        """Run a token of each beam."""
        self._beams.forward([SequenceBatch(i, [self._text[i]]) for i in range(_BEAMS)])
        for i in range(_BEAMS):
            self._beams.rewind(i, self._n_context)


def measure(path: Path, args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each pass, round by round, of each kind of kernels."""
    kinds = {kind: Passes(path, args, kind) for kind in _KINDS}
    names: list[tuple[str, Callable[[Passes], None], int]] = [
        ("encoder", Passes.encode, args.encoder_rounds),
        *((f"T({n})", lambda passes, n=n: passes.decode(n), args.rounds) for n in args.tokens),
        (f"{_BEAMS} beams", Passes.search, args.rounds),
    ]
    seconds: dict[str, dict[str, list[float]]] = {kind: {} for kind in _KINDS}
    for name, run, rounds in names:
        for turn in range(-1, rounds):  # the first warms up
            for kind, passes in kinds.items():
                began = time.perf_counter()
                run(passes)
                if turn >= 0:
                    seconds[kind].setdefault(name, []).append(time.perf_counter() - began)
    return seconds


def show(name: str, seconds: dict[str, dict[str, list[float]]]) -> None:
    """Print a table of medians with their quartiles, milliseconds."""
    print(f"\n{name}, ms{'':<14}kernels{'':<21}stock{'':<15}ratio")
    for row, kernels in seconds["kernels"].items():
        stock = seconds["stock"][row]
        cells = []
        for values in (kernels, stock):
            median, low, high = (1e3 * x for x in spread(values))
            cells.append(f"{median:8.2f} ({low:.2f} - {high:.2f})")
        ratio = spread([slow / fast for slow, fast in zip(stock, kernels, strict=True)])[0]
        print(f"{row:<10} {cells[0]:>28} {cells[1]:>28} {ratio:8.2f}")


def main() -> None:
    parse = parser(__doc__, pair=False)
    parse.add_argument("--models", type=numbers(str), default=["whisper-base", "random:small"])
    parse.add_argument("--type", default="q8_0", help="of random matrices")
    parse.add_argument("--tokens", type=numbers(int), default=[1, 2, 4, 8, 16])
    parse.add_argument("--context", type=int, default=100, help="tokens before each pass")
    parse.add_argument("--rounds", type=int, default=40)
    parse.add_argument("--encoder-rounds", type=int, default=5)
    args = parse.parse_args()
    if (
        min(args.tokens) < 1
        or not max(args.tokens) <= args.context <= 400
        or min(args.rounds, args.encoder_rounds) < 1
    ):
        parse.error(
            "--tokens must be at least 1 and at most --context, --context at most 400, rounds at least 1"
        )
    require_kernels()
    measured: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = {}
        for name in args.models:
            kind, _, shape = name.partition(":")
            if kind == "random" and shape not in _SHAPES:
                parse.error(f"--models {name}: not one of {', '.join(_SHAPES)}")
            paths[name] = write_random(Path(folder), shape, args.type) if kind == "random" else resolve(name)
        measuring = Measuring(args)
        for name, path in paths.items():
            measured[name] = in_child(measure, path, args)
            show(name, measured[name])
    measuring.end()
    print(f"\n{measuring}")
    names = "-".join(name.replace(":", "-") for name in args.models)
    measuring.keep(f"whisper-cost-{names}", {"context": args.context, "seconds": measured})


if __name__ == "__main__":
    start(main)
