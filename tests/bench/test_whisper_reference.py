"""The tables beside openai-whisper: word errors against the known text, words unlike the reference's."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from edgespec.models.suites import Prompt
from tiny_whisper import write_tiny_whisper
from whisper_reference import openai_whisper, reference_text, report, totals

# As openai-whisper's package, as far as the script asks it.
WHISPER = """
import json
from types import SimpleNamespace
class _Model:
    def __init__(self, dims): self.dims = dims
    def load_state_dict(self, state, strict): self.state = state
    def eval(self): pass
model = SimpleNamespace(Whisper=_Model, ModelDimensions=lambda **sizes: SimpleNamespace(**sizes))
def transcribe(model, samples, *, language, temperature, fp16, beam_size=None):
    assert (temperature, fp16) == (0.0, False)
    said = [len(samples), str(samples.dtype), beam_size, model.dims.n_text_state, len(model.state)]
    return {"language": language, "text": " " + json.dumps(said)}
"""
TORCH = "def set_num_threads(n): pass\ndef from_numpy(array): return array\n"


def test_words_are_compared_with_the_text_and_with_the_reference():
    prompts = [Prompt("read.wav", "read", "one two, three four"), Prompt("talk.wav", "radio", "")]
    texts = {
        "openai-whisper": {"read.wav": "One two three four.", "talk.wav": "a b c d"},
        "q4_0": {"read.wav": "one two three for", "talk.wav": "a b x y"},
    }
    assert totals([("a b", "a c"), ("", "anything")]) == (1, 2)
    lines = [line.split("  ") for line in report(prompts, texts)]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert cells[1] == ["openai-whisper", "0.0% (0 of 4)", "0.0% (0 of 4)"]
    assert cells[2] == ["q4_0", "25.0% (1 of 4)", "25.0% (1 of 4)"]
    assert cells[5] == ["q4_0", "-", "50.0% (2 of 4)"]
    assert cells[8] == ["q4_0", "25.0% (1 of 4)", "37.5% (3 of 8)"]


@pytest.mark.parametrize(("beam", "told"), [(1, None), (5, 5)])
def test_the_reference_gets_the_weights_and_the_samples(tmp_path, monkeypatch, beam, told):
    Path(tmp_path, "whisper.py").write_text(WHISPER)
    Path(tmp_path, "torch.py").write_text(TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    model = write_tiny_whisper(tmp_path / "tiny.gguf", matrix_type="f16")
    with openai_whisper(sys.executable, model, 1) as child:
        text = reference_text(child, np.zeros(160, np.float32), "en", beam)
    n_samples, kind, beam_size, width, n_tensors = json.loads(text)
    assert (n_samples, kind, beam_size, width) == (160, "float32", told, 64)
    assert n_tensors > 50
