"""Whisper models on the command line: converting, naming and listing them."""

import json

import gguf
from test_cli_models import app, error, ok, server  # noqa: F401 - a fixture

from edgespec.apps.speech.speech_model import speech_model, speech_ref
from edgespec.cli.models import models_app
from tiny_whisper import write_tiny_whisper
from whisper_files import sizes, weights, write_ctranslate2, write_whisper_cpp


def types_of(path):
    return {tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


def test_models_of_other_programs_are_converted(server, tmp_path):  # noqa: F811
    of = sizes()
    source = write_whisper_cpp(tmp_path / "ggml-tiny.bin", of, weights(of))
    made = ok(app, str(source), "--type", "f16,q4_0").split()
    assert made == [str(tmp_path / "ggml-tiny-f16.gguf"), str(tmp_path / "ggml-tiny-q4_0.gguf")]
    assert types_of(made[1]) == {"Q4_0", "F16", "F32"}
    folder = write_ctranslate2(tmp_path / "ct2", of, weights(of))
    assert ok(app, str(folder), "--type", "q8_0", "-o", str(tmp_path / "x.gguf")).split() == [
        str(tmp_path / "x.gguf")
    ]
    for gguf_model in (made[0], "whisper-base"):
        said = str(error(app, gguf_model, "--type", "q8_0", "-o", str(tmp_path / "y.gguf")))
        assert said.startswith(f"{gguf_model}: a Whisper model in GGUF; ") and "model.safetensors" in said
    assert "a Whisper model cannot be 'q2_k' (known: q8_0," in str(error(app, str(source), "--type", "q2_k"))
    source.write_bytes(source.read_bytes()[:-9])
    assert "incomplete Whisper model" in str(error(app, str(source), "--type", "q8_0", "--force"))


def test_a_whisper_file_of_ones_own_is_marked(server, tmp_path):  # noqa: F811
    path = write_tiny_whisper(tmp_path / "own.gguf")
    assert ok(models_app, "add", str(path)) == "own\n"
    assert "present, speech, yours" in ok(models_app, "list")
    assert speech_model("own") == path
    known = {one["name"]: one["speech"] for one in json.loads(ok(models_app, "list", "--json"))["models"]}
    assert known["own"] and known["whisper-base"] and not known["m"]
    of = sizes()
    foreign = write_whisper_cpp(tmp_path / "ggml-tiny.bin", of, weights(of))
    assert "convert it: edgespec quantize" in str(error(models_app, "add", str(foreign)))
    folder = write_ctranslate2(tmp_path / "ct2", of, weights(of))
    assert "convert it: edgespec quantize" in str(error(models_app, "path", str(folder)))


def test_short_names(server, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    assert speech_ref("small") == "whisper-small" and speech_ref("tiny.en") == "whisper-tiny.en"
    assert speech_ref("turbo") == "whisper-large-v3-turbo" and speech_ref("large") == "whisper-large-v3"
    assert speech_ref("m") == "m" and speech_ref("whisper-base") == "whisper-base"
    (tmp_path / "small").mkdir()  # a folder of this name is meant
    assert speech_ref("small") == "small"
