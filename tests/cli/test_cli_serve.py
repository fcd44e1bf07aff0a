"""`edgespec serve` as a user runs it: a process of its own, real (tiny) models, real sockets and signals."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import signal
import subprocess
import sys

import httpx
import pytest

from command_line import user_environment
from edgespec.cli import main
from speech_app import recording
from tiny_gguf import write_tiny_gguf
from tiny_whisper import write_tiny_whisper

COMMAND = [sys.executable, "-m", "edgespec", "serve"]
KEY = "EDGESPEC_API_KEY"


@pytest.fixture(scope="module")
def slow_path(tmp_path_factory):
    """A model whose longest answer takes some seconds."""
    return write_tiny_gguf(tmp_path_factory.mktemp("slow") / "slow.gguf", n_layer=4, n_embd=256, n_ctx=8192)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    of_user = user_environment(tmp_path_factory.mktemp("serve"), kernels=True)
    return {name: value for name, value in of_user.items() if name != KEY}


class Running:
    """A server's process; `address` is what it said when it was ready."""

    def __init__(self, process):
        self.process = process
        self.ready = json.loads(process.stdout.readline())
        self.address = self.ready["address"]

    def ask(self, n=10, **options):
        options = {"model": "edgespec", "prompt": "abc", "temperature": 0, "max_tokens": n, **options}
        return httpx.post(f"{self.address}/v1/completions", json=options, timeout=60)

    @contextlib.contextmanager
    def streaming(self, n=8000):
        """An answer of which the first event has come; yields the iterator of its lines."""
        options = {"model": "edgespec", "prompt": "abc", "temperature": 0, "max_tokens": n, "stream": True}
        with httpx.stream("POST", f"{self.address}/v1/completions", json=options, timeout=60) as answer:
            lines = (line for line in answer.iter_lines() if line)
            assert next(lines).startswith("data: ")
            yield lines

    def ends(self, code):
        """Wait for the end; return what it said on stderr."""
        _, said = self.process.communicate(timeout=60)
        assert self.process.returncode == code, said
        return said.decode()


@pytest.fixture
def serve(environment, slow_path):
    """Start `edgespec serve` on a free port; what still runs at the end is killed."""
    started = []

    def serve(*options, port=0, quiet=True, **variables):
        models = ["--target", str(slow_path), "--drafter", "none", "--threads", "1", "--kernels", "off"]
        output = ["--json", "--quiet"] if quiet else ["--json"]
        process = subprocess.Popen(
            [*COMMAND, *models, "--port", str(port), *output, *map(str, options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**environment, **variables},
        )
        started.append(process)
        return Running(process)

    yield serve
    for process in started:
        process.kill()
        process.communicate(timeout=60)


@pytest.fixture
def refused(capfd, monkeypatch, tiny_path):
    """Return the one line of a server that does not start; in this process, which loads nothing for it."""

    def refused(code, *options, models=("--target", tiny_path, "--drafter", "none"), key=None):
        monkeypatch.delenv(KEY, raising=False)
        if key is not None:
            monkeypatch.setenv(KEY, key)
        assert main(["serve", *map(str, models), *map(str, options)]) == code
        said, line = capfd.readouterr()
        assert (said, line.count("\n")) == ("", 1), line
        assert line.startswith("edgespec: error: ")
        return line

    return refused


# ---- what is refused before anything is loaded ----


def test_without_the_extra_one_line_says_what_to_install(refused, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    assert "needs uvicorn: pip install 'edgespec[serve]'" in refused(1)


# ---- serving ----


def test_parallel_says_how_many_answers_are_written_at_once(serve):
    ready = serve("--parallel", 3, "--prefix-cache", 0).ready
    assert (ready["parallel"], ready["cache_tokens"]) == (3, 8192)
    assert ready["cache_bytes"] == 8192 * 4 * 2 * 64 * 2 * 2
    one = serve("--parallel", 1)
    assert (one.ready["parallel"], one.ready["cache_tokens"]) == (1, None)
    assert one.ask(5).json()["usage"]["completion_tokens"] == 5


def test_it_says_where_it_serves_and_answers(environment, tiny_path, tiny_draft_path):
    process = subprocess.Popen(
        [*COMMAND, "--target", tiny_path, "--draft", tiny_draft_path, "--port=0", "--threads=1", "--quiet"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    try:
        line = process.stdout.readline().decode()
        assert line.startswith(f"serving {tiny_path}, drafted by {tiny_draft_path} at http://127.0.0.1:")
        address = line.split(" at ")[1].split()[0]
        assert process.stdout.readline().decode() == "16 texts at once, 24,576 tokens of cache, 8 MB\n"
        assert httpx.get(f"{address}/health").json()["parallel"] == 16
        body = {"model": "edgespec", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 5}
        answer = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 5
        assert "<html" in httpx.get(address).text
        metrics = httpx.get(f"{address}/metrics").text
        assert 'edgespec_generations_total{outcome="finished"} 1.0' in metrics
        assert "edgespec_generated_tokens_total 5.0" in metrics
        assert 'route="/v1/chat/completions",status="200"} 1.0' in metrics
        assert "edgespec_joules" not in metrics or "edgespec_joules_total 0.0" not in metrics
        other_host = httpx.get(f"{address}/health", headers={"Host": "evil.example"})
        assert other_host.status_code == 403
    finally:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, b"")


def test_limits_and_a_key_of_a_file_that_others_can_read(serve, tmp_path):
    key = tmp_path / "key"
    key.write_text("a-secret-key\n")
    key.chmod(0o644)
    running = serve("--api-key-file", key, "--host", "0.0.0.0", "--max-prompt", 50, "--max-body", 1)
    running.address = running.address.replace("0.0.0.0", "127.0.0.1")
    assert running.ask().status_code == 401
    headers = {"Authorization": "Bearer a-secret-key"}
    client = httpx.Client(base_url=f"{running.address}/v1", headers=headers, timeout=60)
    with client:
        body = {"model": "edgespec", "max_tokens": 3}
        assert client.post("/completions", json={**body, "prompt": "abc"}).status_code == 200
        assert client.post("/completions", json={**body, "prompt": "x " * 60}).status_code == 400
        assert client.post("/completions", json={**body, "prompt": "x" * 1_100_000}).status_code == 413
    running.process.send_signal(signal.SIGTERM)
    assert running.ends(0) == f"edgespec: {key} can be read by other users: chmod 600 {key}\n"


def test_each_request_is_a_line_without_its_text(serve):
    running = serve("--max-prompt", 50, quiet=False)
    secret = "swordfish"
    chat = {"model": "edgespec", "messages": [{"role": "user", "content": secret}], "stream": True}
    asked = httpx.Client(base_url=running.address, timeout=60)
    with asked:
        assert running.ask(5, prompt=secret).status_code == 200
        assert asked.post("/v1/chat/completions", json=chat | {"max_tokens": 3}).status_code == 200
        assert asked.post(
            "/api/generate", json={"model": "edgespec", "prompt": "a", "options": {"num_predict": 2}}
        )
        assert running.ask(prompt=f"{secret} " * 60).status_code == 400
        assert asked.post("/v1/completions", json={secret: secret, f"{secret} \n": 1}).status_code == 400
        assert asked.get(f"/none/%1b[31m?{secret}").status_code == 404
        assert asked.get("/v1/models", headers={"Host": "evil.example"}).status_code == 403
        assert (asked.get("/").status_code, asked.get("/page.js").status_code) == (200, 200)
    with running.streaming():
        pass
    running.ask(1)
    running.process.send_signal(signal.SIGTERM)
    lines = running.ends(0).splitlines()
    took = r"\d+\.\d\d s"
    wanted = [
        rf"POST /v1/completions 200, \d+ tokens in, 5 out, {took}, \d+\.\d tokens/s",
        rf"POST /v1/chat/completions 200, \d+ tokens in, 3 out, {took}, \d+\.\d tokens/s",
        rf"POST /api/generate 200, \d+ tokens in, 2 out, {took}, \d+\.\d tokens/s",
        rf"POST /v1/completions 400 \(prompt\), {took}",
        rf"POST /v1/completions 400 \(prompt\), {took}",
        rf"GET /none/\?\[31m 404, {took}",
        rf"GET /v1/models 403 \(host\), {took}",
        rf"GET / 200, {took}",
        rf"POST /v1/completions 200, the client left, {took}",
        rf"POST /v1/completions 200, \d+ tokens in, 1 out, {took}",
    ]
    assert len(lines) == len(wanted), "\n".join(lines)
    for line, pattern in zip(lines, wanted, strict=True):
        assert re.fullmatch(rf"\d\d:\d\d:\d\d {pattern}", line), line
    assert secret not in "".join(lines)


def test_a_log_that_nobody_reads_ends_nothing(serve):
    running = serve(quiet=False)
    running.process.stderr.close()
    assert [running.ask(2).status_code for _ in range(3)] == [200] * 3
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(timeout=60) == 0


# ---- the end ----


def test_sigterm_completes_the_answer_and_refuses_others(serve):
    running = serve()
    with running.streaming(500) as lines:  # well under the 20 s that the server grants it
        running.process.send_signal(signal.SIGTERM)
        assert running.process.stderr.readline().startswith(b"edgespec: ending: the answer under way has ")
        assert running.ask().status_code == 503
        assert httpx.get(f"{running.address}/health").status_code == 503
        *_, last, done = lines
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert done == "data: [DONE]"
    assert running.ends(0) == ""


def test_a_second_signal_ends_the_answer(serve):
    running = serve()
    with running.streaming() as lines:
        running.process.send_signal(signal.SIGINT)
        running.process.stderr.readline()
        running.process.send_signal(signal.SIGINT)
        told = list(lines)
    assert "error" in json.loads(told[-1].removeprefix("data: "))
    assert len(told) < 8000
    assert running.ends(130) == ""


def test_killed_and_started_again_on_the_same_port(serve):
    running = serve()
    text = running.ask().json()["choices"][0]["text"]
    with contextlib.suppress(httpx.HTTPError), running.streaming() as lines:
        running.process.kill()
        list(lines)
    running.process.wait(timeout=60)
    again = serve(port=running.address.rpartition(":")[2])
    assert again.address == running.address
    assert again.ask().json()["choices"][0]["text"] == text


def test_speech_alone(environment, tmp_path, refused):
    model = write_tiny_whisper(tmp_path / "tiny.gguf", n_text_ctx=64)
    line = refused(2, models=("--target", "none"))
    assert "--target: nothing to serve; name a Whisper model with --speech" in line
    process = subprocess.Popen(
        [*COMMAND, "--target", "none", "--speech", model, "--port", "0", "--json", "--threads", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    running = Running(process)
    try:
        assert running.ready["speech"] == "tiny" and running.ready["target"] is None
        fields = {"temperature": "0.5", "seed": "1", "response_format": "verbose_json"}
        url = f"{running.address}/v1/audio/transcriptions"
        answer = httpx.post(url, files={"file": ("a.wav", recording(0.5))}, data=fields, timeout=60)
        assert answer.json()["duration"] == 0.5
        assert running.ask(4).status_code == 404
        assert httpx.get(f"{running.address}/health").json()["status"] == "ok"
        assert 'finished"} 1.0' in httpx.get(f"{running.address}/metrics").text
        process.send_signal(signal.SIGTERM)
        running.ends(0)
    finally:
        process.kill()
