"""Runs passes of a Whisper model on one thread, with a line after each, where pi/count_speech.py counts.

    python whisper_passes.py MODEL kernels|stock

The encoder runs once, over a window of 30 s; each pass of the decoder twice, "warm" and then under its name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from edgespec.apps.speech.whisper_model import EncodedAudio, SequenceBatch, WhisperModel
from edgespec.llama.kernels import load_untested, plugin_path

TOKENS = (1, 4, 8)
CONTEXT = 100
"""Tokens before each pass of the decoder."""
BEAMS = 5

Decode = Callable[[], None]


def decoder_passes(model: WhisperModel, audio: EncodedAudio) -> Iterator[tuple[str, Decode]]:
    """Yield the name of each pass of the decoder and what runs it, and takes it back."""
    text = [(101 + 7 * i) % model.dims.n_vocab for i in range(CONTEXT)]
    one, beams = model.cache(audio), model.cache(audio, BEAMS)
    for cache in (one, beams):
        cache.forward([SequenceBatch(0, text)])
    beams.reorder([0] * BEAMS)

    def decode(n: int) -> None:
        one.forward([SequenceBatch(0, text[:n], n)])
        one.rewind(0, CONTEXT)

    def search() -> None:
        beams.forward([SequenceBatch(i, [text[i]]) for i in range(BEAMS)])
        for i in range(BEAMS):
            beams.rewind(i, CONTEXT)

    for n in TOKENS:
        yield f"T({n})", partial(decode, n)
    yield f"{BEAMS} beams", search


def say(line: str) -> None:
    """Write a line at once, by one call of the system."""
    os.write(1, f"{line}\n".encode())


def main(path: str, kernels: str) -> None:
    """Run all passes. Ends the program where the kernels wanted cannot be used."""
    wanted = kernels == "kernels"
    if wanted and (reason := load_untested(plugin_path(), "")):  # the processor is the same each time
        sys.exit(reason)
    model = WhisperModel.open(Path(path), n_threads=1, kernels=wanted)
    if wanted and model.kernels_reason:
        sys.exit(model.kernels_reason)
    shape = (model.dims.n_mels, 2 * model.dims.n_audio_ctx)
    mel = np.random.default_rng(1).normal(0, 0.5, shape).astype(np.float32)
    say("loaded")
    audio = model.encode(mel)
    say("encoder")
    for name, run in decoder_passes(model, audio):
        for line in ("warm", name):
            run()
            say(line)


if __name__ == "__main__":
    main(*sys.argv[1:])
