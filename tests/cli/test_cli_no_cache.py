"""No text on the disk that was not to be kept: real commands, and all files of a user's home."""

from __future__ import annotations

import json
import signal
import subprocess
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen

import httpx
import numpy as np
import pytest

from command_line import COMMAND, user_environment
from edgespec.cli.conversation import Conversation
from edgespec.llama.weights import Model
from terminals import Terminal
from tiny_bert import TinyBert
from tiny_whisper import write_tiny_whisper

PROMPT = "the zebra asks the other one what it ate"
OPTIONS = ("--drafter", "suffix", "--threads", "1", "-n", "12", "--temp", "0")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home" / "tmp").mkdir(parents=True)
    return tmp_path / "home"


@pytest.fixture
def environment(home: Path) -> dict[str, str]:
    return {**user_environment(home), "HOME": str(home), "TMPDIR": str(home / "tmp")}


def edgespec(
    environment: dict[str, str], *arguments: object, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    done = subprocess.run(command, env=environment, input=stdin, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


@contextmanager
def server(environment: dict[str, str], *options: object) -> Iterator[str]:
    """Run a server to its end, when it writes what it has to; its address."""
    command = [*COMMAND, "serve", *map(str, options), "--port", "0", "--json"]
    with Popen(command, env=environment, stdout=PIPE, stderr=PIPE) as process:
        assert process.stdout
        yield json.loads(process.stdout.readline())["address"]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
        assert process.returncode == 0


def found(folder: Path, *texts: str, tokens: tuple[list[int], ...] = ()) -> set[str]:
    """Return which texts, and which tokens in four bytes each or as JSON, are in a file below `folder`."""
    wanted = {text: text.encode() for text in texts if text}
    wanted |= {f"tokens {ids}": np.array(ids, "<i4").tobytes() for ids in tokens}
    wanted |= {f"numbers {ids}": ",".join(map(str, ids)).encode() for ids in tokens}
    files = [file.read_bytes() for file in folder.rglob("*") if file.is_file()]
    return {name for name, content in wanted.items() if any(content in file for file in files)}


def traces(home: Path, path: Path, answer: str = "", ids: list[int] | None = None) -> set[str]:
    """Return what is found of the prompt, and of an answer with these tokens."""
    with Model(path) as model:
        prompt = list(model.tokenize(PROMPT, add_special=False, parse_special=False))
    assert len(prompt) > 4
    return found(home, PROMPT, answer, tokens=(prompt[1:-1], *([ids[1:-1]] if ids else [])))


WAYS = ("alone", "server", "server --state-dir")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cache", [True, False])
def test_run(home: Path, environment: dict[str, str], tiny_path: Path, way: str, cache: bool) -> None:
    command = ("run", "--target", tiny_path, *OPTIONS, "--json", *(() if cache else ("--no-cache",)), PROMPT)
    if way == "alone":
        result = json.loads(edgespec(environment, *command).stdout)
    else:
        states = ("--state-dir", home / "states") if "--state-dir" in way else ()
        with server(environment, "--target", tiny_path, *OPTIONS[:4], *states) as address:
            done = edgespec(environment, *command)
            result = json.loads(done.stdout)
            assert (address in done.stderr) == (cache or not states)
    assert bool(traces(home, tiny_path, result["text"], result["token_ids"])) == cache


@pytest.mark.parametrize("cache", [True, False])
def test_chat(home: Path, environment: dict[str, str], tiny_path: Path, tmp_path: Path, cache: bool) -> None:
    """In a terminal, then from a pipe."""
    options = ("chat", "--target", tiny_path, *OPTIONS, *(() if cache else ("--no-cache",)))
    saved = tmp_path / "saved.json"
    with Terminal([*COMMAND, *map(str, options)], environment) as terminal:
        terminal.expect(">")
        terminal.type(f"{PROMPT}\r")
        terminal.expect("cut after")
        terminal.type(f"/save {saved}\r")
        terminal.expect("saved to ")
        terminal.type("/exit\r")
        assert terminal.wait() == 0
    answer = Conversation.load(saved).exchanges[0].answer.text
    assert bool(traces(home, tiny_path, answer)) == cache
    piped = json.loads(edgespec(environment, *options, "--json", stdin=f"{PROMPT}\n").stdout)
    assert bool(traces(home, tiny_path, piped["text"], piped["token_ids"])) == cache


ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12},
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 12},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 16},
    "/v1/messages": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12},
    "/api/chat": {"messages": [{"role": "user", "content": PROMPT}], "options": {"num_predict": 12}},
    "/api/generate": {"prompt": PROMPT, "options": {"num_predict": 12}},
    "/infill": {"input_prefix": PROMPT, "input_suffix": "", "n_predict": 12},
    "/tokenize": {"content": PROMPT},
}


def test_serve(home: Path, environment: dict[str, str], tiny_path: Path) -> None:
    """No route keeps anything, refused requests neither; with a folder for states they do."""
    for states in (False, True):
        options = ("--state-dir", home / "states") if states else ()
        with server(environment, "--target", tiny_path, *OPTIONS[:4], *options) as address:
            statuses = {}
            for route, body in ROUTES.items():
                for more in ({}, {"temperature": "hot", PROMPT: PROMPT}):
                    answer = httpx.post(
                        address + route, json={"model": "edgespec", **body, **more}, timeout=60
                    )
                    statuses[route, bool(more)] = answer.status_code
            httpx.get(f"{address}/metrics")
        assert statuses["/v1/chat/completions", False] == 200
        assert statuses["/v1/chat/completions", True] == 400
        assert bool(traces(home, tiny_path)) == states


def test_batch(home: Path, environment: dict[str, str], tiny_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    options = ("-o", out, "--target", tiny_path, *OPTIONS)
    edgespec(environment, "batch", "-", *options, stdin=json.dumps(PROMPT) + "\n")
    text = json.loads(out.read_text())["response"]["body"]["choices"][0]["message"]["content"]
    assert not traces(home, tiny_path, text)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["home", "out.jsonl"]


def test_embed_and_transcribe(home: Path, environment: dict[str, str], tmp_path: Path) -> None:
    vectors = TinyBert().write(tmp_path / "vectors.gguf")
    hears = write_tiny_whisper(tmp_path / "hears.gguf", n_text_ctx=40, peak=4.0)
    with wave.open(str(tmp_path / "talk.wav"), "wb") as sound:
        sound.setparams((1, 2, 16000, 0, "NONE", ""))
        noise = np.random.default_rng(0).uniform(-1e4, 1e4, 32000)
        sound.writeframes(noise.astype("<i2").tobytes())
    edgespec(environment, "embed", "--model", vectors, "-", stdin=PROMPT)
    heard = edgespec(
        environment, "transcribe", tmp_path / "talk.wav", "-m", hears, "--temp", 0, "--language", "en"
    )
    assert heard.stdout.strip()
    assert not found(home, PROMPT, heard.stdout.strip())


def test_a_crash_keeps_nothing(home: Path, environment: dict[str, str], tiny_path: Path) -> None:
    """A process that ends by a signal of its own: what Python or the kernel writes has no text in it."""
    (home / "crash.py").write_text(
        "import os, signal\nclass Crashes:\n    def begin(self, *args, **more): pass\n"
        "    def draft(self, *args, **more): os.kill(os.getpid(), signal.SIGABRT)\n"
        "    def accept(self, *args, **more): pass\n"
    )
    command = [
        "run",
        "--target",
        str(tiny_path),
        "--drafter",
        f"{home}/crash.py:Crashes",
        "--no-cache",
        PROMPT,
    ]
    done = subprocess.run([*COMMAND, *command], env=environment, capture_output=True, cwd=home, check=False)
    assert done.returncode == -signal.SIGABRT, done.stderr
    assert not found(home, PROMPT)
    assert not list((home / "tmp").iterdir())
