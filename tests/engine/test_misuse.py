"""Engines in forked children, and engines given what is no prompt: an error of one line, never a wait."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from edgespec import Engine
from edgespec.apps.speech.transcriber import Transcriber
from edgespec.apps.speech.whisper_model import SpeechModel
from edgespec.errors import UsageError
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from tiny_whisper import write_tiny_whisper

LONGEST_S = 120


def in_child(work: Callable[[], object]) -> str:
    """Return what `work` returns in a forked child, or which error it raises there."""
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        try:
            said = f"{work()}"
        except BaseException as error:  # noqa: BLE001 - the child may not go on with the tests
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    ended = time.monotonic() + LONGEST_S
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > ended:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            return "hangs"
        time.sleep(0.01)
    with os.fdopen(reader) as pipe:
        return pipe.read()


@pytest.fixture(params=["llama.cpp's kernels", "our kernels, several texts"])
def engine(request: pytest.FixtureRequest, tiny_path: Path, packable_path: Path) -> Iterator[Engine]:
    stock = request.param == "llama.cpp's kernels"
    path, parallel = (tiny_path, 1) if stock else (packable_path, 2)
    with Engine(path, drafter="suffix", n_threads=2, profile=False, parallel=parallel) as engine:
        engine.generate("abc", n_predict=4)  # now there are threads
        yield engine


def test_everything_that_would_wait_is_an_error(engine: Engine):
    stream = engine.stream("abc", n_predict=30, seed=1)
    first = next(stream)
    for work in (
        lambda: engine.generate("abc"),
        lambda: engine.generate([1, 2]),
        lambda: engine.stream("abc"),
        lambda: next(stream),
        stream.made,
        lambda: stream.result,
        engine.step,
        engine.forget,
        lambda: engine.has_room(1, 1),
        lambda: Session(engine.target, n_ctx=64, n_threads=2),
    ):
        said = in_child(work)
        assert said.startswith("UsageError: the ")
        assert "before this process was forked" in said and "spawn" in said and "\n" not in said
    assert in_child(stream.close) == in_child(engine.close) == "None"
    assert len([first, *stream]) == 30, "the parent goes on"


def test_a_child_may_load_its_own(engine: Engine):
    path = engine.target.path

    def own() -> str:
        with Engine(path, drafter="none", n_threads=2, profile=False) as mine:
            return mine.generate("abc", n_predict=4, seed=1).text

    assert in_child(own) == own()


def test_sessions(tiny_path: Path):
    with Model(tiny_path) as model, Session(model, n_ctx=64, n_threads=2) as session:
        session.eval([1, 2, 3])
        assert "the session was loaded before" in in_child(lambda: session.eval([4]))
        session.eval([4])


def test_speech(tmp_path: Path):
    path = write_tiny_whisper(tmp_path / "tiny.gguf")
    with SpeechModel(path, name="tiny", n_threads=2) as model:
        spoken = Transcriber(model.model, model.tokenizer)
        sound = np.random.default_rng(1).normal(0, 0.1, 16000).astype(np.float32)
        text = spoken.transcribe(sound).text
        said = in_child(lambda: spoken.transcribe(sound))
        assert said.startswith("UsageError: the Whisper model was loaded before this process was forked")
        assert in_child(model.close) == "None"

        def own() -> str:
            with SpeechModel(path, name="tiny", n_threads=2) as mine:
                return Transcriber(mine.model, mine.tokenizer).transcribe(sound).text

        assert in_child(own) == text


SCRIPT = """
import multiprocessing, os, sys
from edgespec import Engine
engine = Engine({path!r}, drafter="none", n_threads=2, profile=False)
stream = engine.stream("abc", n_predict=9)
next(stream)
def work():
    try:
        engine.generate("abc")
    except Exception as error:
        print(type(error).__name__, flush=True)
process = multiprocessing.get_context("fork").Process(target=work)
process.start(); process.join()
print(process.exitcode, flush=True)
if not (pid := os.fork()):
    if sys.argv[1] == "drop":
        del stream, engine
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize("what", ["keep", "drop"])
def test_a_child_ends_by_itself_and_in_silence(tiny_path: Path, what: str):
    """Python closes what is left at its end; that must not wait for threads either."""
    command = [sys.executable, "-c", SCRIPT.format(path=str(tiny_path)), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=True)
    assert done.stdout.split() == ["UsageError", "0", "7"]
    assert done.stderr == ""


# ---- what is no prompt, no options and no sound ----


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        (b"abc", "must be text or a list of token ids, not bytes; decode them to text"),
        (bytearray(b"a"), "not bytearray; decode"),
        ([1.5], "number 0 is a float, not a token id"),
        ([1, -1], "no token -1: the model's are 0 to 283"),
        ([284], "no token 284: the model's are 0 to 283"),
        ([True], "number 0 is a bool"),
        ([None], "number 0 is a NoneType"),
        (["a"], "number 0 is a str"),
        ([{"role": "user", "content": "hi"}], "number 0 is a dict"),
        (np.array([[1, 2]]), "number 0 is a ndarray"),
        (None, "not None"),
        (5, "not int"),
        ({1: 2}, "not dict"),
        ({1, 2}, "not set"),
        ([], "the prompt is empty"),
    ],
)
def test_what_is_no_prompt(small: Engine, prompt: object, problem: str):
    stream = small.stream("abc", n_predict=3)
    for method in (small.generate, small.stream):
        with pytest.raises(UsageError) as caught:
            method(prompt)  # type: ignore[arg-type]
        assert problem in str(caught.value) and "\n" not in str(caught.value)
    assert len([*stream]) == 3, "an earlier text goes on"


@pytest.fixture(scope="module")
def small(tiny_path: Path) -> Iterator[Engine]:
    with Engine(tiny_path, drafter="none", profile=False) as engine:
        yield engine


def test_token_ids_of_all_kinds(small: Engine):
    wanted = small.generate([1, 2], n_predict=3, seed=1).token_ids
    for prompt in ((1, 2), np.array([1, 2]), [np.int64(1), np.uint8(2)], (i for i in (1, 2)), range(1, 3)):
        assert small.generate(prompt, n_predict=np.int64(3), seed=np.int32(1)).token_ids == wanted  # type: ignore[arg-type]

    class Text(str):
        """A text of a class of its own."""

    assert (
        small.generate(Text("ab"), n_predict=3, seed=1).token_ids
        == small.generate("ab", n_predict=3, seed=1).token_ids
    )


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"stop": b"x"}, "stop: must be text, not bytes"),
        ({"stop": [1]}, "stop: must be text, not int"),
        ({"stop": None}, "stop: must be text, not None"),
        ({"stop": 5}, "stop: must be text, not int"),
        ({"stop_tokens": "ab"}, "stop_tokens: must be a list of token ids, not str"),
        ({"stop_tokens": [-1]}, "stop_tokens: no token -1"),
        ({"seed": 1.5}, "seed 1.5: must be a whole number, not float"),
        ({"seed": True}, "seed True: must be a whole number"),
        ({"seed": "1"}, "seed 1: must be a whole number, not str"),
        ({"n_predict": 2.0}, "n_predict 2.0: must be a whole number"),
        ({"gamma": "x"}, "gamma x: must be a whole number"),
        ({"n_logprobs": 1.0}, "n_logprobs 1.0: must be a whole number"),
        ({"lenience": "a"}, "lenience a: must be a number"),
        ({"params": {"temperature": 0}}, "must be SamplingParams"),
        ({"system": b"x"}, "system: must be text, not bytes"),
        ({"options": 5}, "must be Options"),
    ],
)
def test_options_of_the_wrong_kind(small: Engine, options: dict[str, object], problem: str):
    with pytest.raises(UsageError) as caught:
        small.generate("abc", **options)  # type: ignore[arg-type]
    assert problem in str(caught.value)
