"""Several models at one address: real processes of tiny models, real HTTP, and what may go wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest

from command_line import user_environment
from edgespec.apps.server.api_errors import ApiError
from edgespec.apps.server.commands import serve
from edgespec.apps.server.http_server import bind
from edgespec.apps.server.names import NamedModel
from edgespec.apps.server.ollama_answers import duration_s
from edgespec.apps.server.router.app import create_router, read_preset
from edgespec.apps.server.router.pool import ModelProcess, ModelSpec, NotLoaded, Pool
from edgespec.cli import main
from edgespec.cli.groups import changed, flat_options
from edgespec.cli.options import AnyCompute, StateOptions
from edgespec.errors import EdgespecError
from speech_app import recording
from tiny_bert import TinyBert
from tiny_gguf import write_tiny_gguf
from tiny_whisper import write_tiny_whisper

QUICK = ("--drafter", "none", "--threads", "1", "--kernels", "off", "--parallel", "2")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two quick models, one whose longest answer takes some seconds, and one that is none."""
    folder = tmp_path_factory.mktemp("several")
    for name in ("one", "two"):
        write_tiny_gguf(folder / f"{name}.gguf", seed=len(name), name=name)
    write_tiny_gguf(folder / "slow.gguf", n_layer=4, n_embd=256, n_ctx=8192, name="made")
    write_tiny_whisper(folder / "whisper.gguf")
    TinyBert().write(folder / "vectors.gguf")
    (folder / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return user_environment(tmp_path_factory.mktemp("several-home"))


class Several:
    """A server of several models."""

    def __init__(self, process):
        self.process = process
        self.ready = json.loads(process.stdout.readline())
        self.client = httpx.Client(base_url=self.ready["address"], timeout=120)

    def text(self, model, n=3, **options):
        body = {"model": model, "prompt": "abc", "temperature": 0, "max_tokens": n, **options}
        return self.client.post("/v1/completions", json=body)

    def states(self):
        return {name: one["status"] for name, one in self.client.get("/health").json()["models"].items()}

    def reaches(self, model, status):
        """Wait until a model has a status."""
        for _ in range(3000):
            if self.states()[model] == status:
                return
            time.sleep(0.02)
        raise AssertionError(self.states())

    def kill(self, model):
        """Kill the process of a model, a child of the server's that has its name as an alias."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0") for pid in children}
        (found,) = (pid for pid, line in words.items() if f"--alias={model}" in line)
        os.kill(int(found), signal.SIGKILL)

    def ends(self):
        """Wait for the end; return what it said on stderr."""
        _, said = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, said
        return said.decode()


@contextlib.contextmanager
def several(environment, *options):
    command = [sys.executable, "-m", "edgespec", "serve", "--json", "--port", "0", *QUICK, *map(str, options)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    try:
        yield Several(process)
    finally:
        process.kill()
        process.communicate(timeout=60)


@pytest.fixture(scope="module")
def served(files, environment, tmp_path_factory):
    """The server that most tests ask: it has loaded whatever those before needed."""
    preset = tmp_path_factory.mktemp("preset") / "models.toml"
    preset.write_text(
        f"""
        keep_alive = "10m"
        [models.one]
        target = "{files}/one.gguf"
        aliases = ["gpt-4o", "small:1b"]
        [models.two]
        target = "{files}/two.gguf"
        keep = true
        [models.slow]
        target = "{files}/slow.gguf"
        [models.heard]
        speech = "{files}/whisper.gguf"
        [models.vectors]
        target = "{files}/vectors.gguf"
        embeddings = true
        [models.broken]
        target = "{files}/broken.gguf"
        """
    )
    with several(environment, "--models", preset) as running:
        yield running


# ---- which model answers ----


def test_the_model_of_a_request_answers_it(served):
    assert served.ready["models"] == ["one", "two", "slow", "heard", "vectors", "broken"]
    assert served.client.get("/v1/models/MADE:latest").json()["id"] == "slow", "the name in its file"
    for asked, name in (("one", "one"), ("gpt-4o", "one"), ("two:latest", "two"), ("edgespec", "one")):
        answer = served.text(asked).json()
        assert (answer["model"], answer["usage"]["completion_tokens"]) == (name, 3)
    body = {"prompt": "abc", "options": {"num_predict": 2}, "stream": False}
    assert served.client.post("/api/generate", json={"model": "small:1b", **body}).json()["done"]
    unnamed = served.client.post("/tokenize", json={"content": "abc"})
    assert unnamed.json()["max_model_len"] == 512
    assert served.client.get("/props?model=two").json()["model_alias"] == "two"
    form = {"files": {"file": ("a.wav", recording(1.0))}}
    assert "text" in served.client.post("/v1/audio/transcriptions", **form).json()
    named = served.client.post("/v1/audio/transcriptions", data={"model": "heard"}, **form)
    assert named.status_code == 200
    for model in ({}, {"model": "Vectors:latest"}, {"model": "edgespec"}):
        for path, text in (("/v1/embeddings", "input"), ("/api/embeddings", "prompt")):
            answer = served.client.post(path, json={text: "abc", **model})
            assert answer.status_code == 200, answer.text
    assert served.client.post("/v1/embeddings", json={"input": "abc"}).json()["model"] == "vectors"
    assert served.client.post("/api/show", json={}).json()["capabilities"]


def test_a_stored_response_outlives_its_model_and_another_goes_on_with_it(served):
    asked = {"model": "one", "input": "abc", "max_output_tokens": 3}
    first = served.client.post("/v1/responses", json=asked).json()
    served.client.post("/api/generate", json={"model": "one", "keep_alive": 0})
    served.reaches("one", "unloaded")
    assert served.client.get(f"/v1/responses/{first['id']}").json() == first
    asked = {"model": "two", "input": "abc", "previous_response_id": first["id"], "max_output_tokens": 3}
    second = served.client.post("/v1/responses", json=asked).json()
    assert (second["model"], second["previous_response_id"]) == ("two", first["id"])
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"] + 3
    gone = served.client.post("/v1/responses", json=asked | {"previous_response_id": "resp_0"})
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "previous_response_not_found")
    assert served.client.get("/v1/responses/resp_0").status_code == 404
    assert served.states()["one"] == "unloaded"


def test_an_unknown_model_is_a_404_in_the_form_of_each_api(served):
    error = served.text("none").json()["error"]
    assert error["code"] == "model_not_found"
    assert "'one', 'two'" in error["message"]
    found = served.client.post("/api/chat", json={"model": "none", "messages": []})
    assert (found.status_code, [*found.json()]) == (404, ["error"])
    assert served.client.get("/v1/models/none").status_code == 404
    assert served.client.get("/nothing").status_code == 404
    assert served.text("one", mirostat=2).status_code == 400  # as the model's own server answers


def test_lists_tell_of_all_and_metrics_of_one(served):
    served.text("one")
    listed = {one["id"]: one["edgespec"] for one in served.client.get("/v1/models").json()["data"]}
    assert [*listed] == served.ready["models"]
    assert listed["one"]["status"] == "loaded"
    assert listed["heard"]["speech"] is True
    assert served.client.get("/v1/models/gpt-4o").json()["id"] == "one"
    tags = {one["name"]: one for one in served.client.get("/api/tags").json()["models"]}
    assert [*tags] == ["one:latest", "two:latest", "slow:latest", "vectors:latest"]
    assert tags["slow:latest"]["details"]["family"] == "llama"
    loaded = {one["name"]: one for one in served.client.get("/api/ps").json()["models"]}
    assert loaded["one:latest"]["expires_at"] < "2300"
    assert loaded["two:latest"]["expires_at"] > "2300"
    for path in ("/metrics", "/metrics?model=GPT-4O:latest"):
        assert "\nedgespec_generated_tokens_total " in served.client.get(path).text
    assert served.client.get("/metrics?model=broken").status_code == 404


def test_a_page_elsewhere_and_a_large_body_are_refused_once_for_all(served):
    assert served.client.get("/v1/models", headers={"Host": "evil.example"}).status_code == 403
    assert served.client.post("/v1/completions", content=bytes(33 << 20)).status_code == 413
    assert "<html" in served.client.get("/").text


# ---- what goes wrong ----


def test_a_model_that_cannot_be_loaded_is_refused_by_name_and_the_others_go_on(served):
    error = served.text("broken")
    assert (error.status_code, error.json()["error"]["code"]) == (500, "model_not_loaded")
    assert "broken" in error.json()["error"]["message"]
    assert served.text("one").status_code == 200
    assert served.states()["broken"] == "unloaded"


SAID = [{"role": "user", "content": "abc"}]
LONG = {"max_tokens": 8000, "temperature": 0}


@pytest.mark.parametrize(
    ("path", "body", "end"),
    [
        ("/v1/completions", {"prompt": "abc", **LONG}, 'data: {"error":'),
        ("/v1/chat/completions", {"messages": SAID, **LONG}, 'data: {"error":'),
        ("/v1/messages", {"messages": SAID, **LONG}, 'event: error\ndata: {"type":"error","error":'),
        ("/v1/responses", {"input": "abc", "temperature": 0}, "event: response.failed\ndata: {"),
        ("/api/generate", {"prompt": "abc"}, '{"error":'),
        ("/api/chat", {"messages": SAID}, '{"error":'),
    ],
)
def test_a_process_that_is_killed_in_a_stream_ends_it_in_the_form_of_its_api(served, path, body, end):
    separator = "\n" if path.startswith("/api") else "\n\n"
    with served.client.stream("POST", path, json={"model": "slow", "stream": True, **body}) as answer:
        text, lives = "", True
        for part in answer.iter_text():
            text += part
            if lives and text.count("{") > 8:  # amid the text
                served.kill("slow")
                lives = False
    *events, last = text.removesuffix(separator).split(separator)
    assert last.startswith(end)
    told = json.loads(last[last.index("{") :])
    for event in events:  # whole ones, as their clients read them
        assert event.startswith(":") or json.loads(event[event.index("{") :])
    if "responses" in path:
        before = json.loads(events[-1].partition("data: ")[2])
        assert told["sequence_number"] == before["sequence_number"] + 1
        assert (told["response"]["status"], told["response"]["error"]["code"]) == ("failed", "server_error")
    assert "'slow' died amid the answer" in last
    assert served.text("slow").json()["usage"]["completion_tokens"] == 3


def test_a_process_that_is_killed_in_a_whole_answer_is_a_503(served):
    served.text("slow")
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(served.text, "slow", 8000)
        while served.client.get("/health").json()["models"]["slow"]["running"] == 0:
            time.sleep(0.01)
        served.kill("slow")
        assert answer.result().status_code == 503
    assert answer.result().json()["error"]["code"] == "model_lost"
    assert answer.result().headers["retry-after"] == "1"
    assert served.text("slow").status_code == 200


def test_a_process_that_died_while_nobody_asked_is_not_noticed_by_clients(served):
    served.text("one")
    served.kill("one")
    served.reaches("one", "unloaded")
    assert served.text("one").status_code == 200


def test_sixty_four_clients_of_two_models(served):
    with ThreadPoolExecutor(64) as threads:
        names = ["one", "two"] * 32
        answers = [*threads.map(lambda name: served.text(name, 5), names)]
    assert [answer.status_code for answer in answers] == [200] * 64
    assert [answer.json()["model"] for answer in answers] == names
    texts = {(answer.json()["model"], answer.json()["choices"][0]["text"]) for answer in answers}
    assert len(texts) == 2


def test_a_client_that_leaves_ends_the_work_and_one_that_leaves_while_it_loads_disturbs_nobody(served):
    nothing = {"model": "slow", "keep_alive": 0}
    assert served.client.post("/api/generate", json=nothing).json()["done_reason"] == "unload"
    served.reaches("slow", "unloaded")
    again = served.client.post("/api/generate", json=nothing).json()  # it is not loaded for that
    assert (again["done_reason"], served.states()["slow"]) == ("unload", "unloaded")
    leaving = HTTPConnection(httpx.URL(served.ready["address"]).netloc.decode())
    leaving.request("POST", "/v1/completions", json.dumps({"model": "slow", "prompt": "abc"}))
    served.reaches("slow", "loading")
    leaving.close()
    served.reaches("slow", "loaded")
    with served.client.stream(
        "POST", "/v1/completions", json={"model": "slow", "prompt": "a", "max_tokens": 8000, "stream": True}
    ) as answer:
        next(answer.iter_lines())
    for _ in range(600):
        if "edgespec_running 0.0" in (metrics := served.client.get("/metrics?model=slow").text):
            break
        time.sleep(0.1)
    assert 'edgespec_generations_total{outcome="cancelled"} 1.0' in metrics


def test_several_by_options_and_an_end_with_an_answer_under_way(files, environment):
    with several(environment, "--model", files / "slow.gguf", "-m", files / "one.gguf") as running:
        assert running.ready["models"] == ["slow", "one"]
        with running.client.stream(
            "POST",
            "/v1/completions",
            json={"model": "slow", "prompt": "a", "max_tokens": 400, "stream": True},
        ) as answer:
            lines = (line for line in answer.iter_lines() if line and not line.startswith(":"))
            next(lines)
            running.process.send_signal(signal.SIGINT)
            assert [*lines][-1] == "data: [DONE]"
        said = running.ends()
        assert "slow: " in said
        assert "POST /v1/completions 200, " in said
        assert "Traceback" not in said


# ---- memory ----


@pytest.fixture
def spec(files, environment, tmp_path, monkeypatch):
    """Return the spec of a model whose files are said to have so many bytes."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    def spec(name, n_bytes=100, **options):
        words = (f"--target={files / 'one.gguf'}", f"--alias={name}", f"--turns={tmp_path}", *QUICK)
        return ModelSpec(NamedModel(name), words, n_bytes=n_bytes, **options)

    return spec


async def _use(pool, name):
    (model,) = (model for model in pool.models if model.name == name)
    async with pool.hold(model) as process:
        return process.pid


@pytest.mark.parametrize("limits", [{"room": 350}, {"max_models": 3}])
def test_the_least_recently_used_leaves_for_another_and_a_pinned_one_never(spec, tmp_path, limits):
    log = []

    async def use():
        specs = [spec("pinned", keep=True), spec("a"), spec("b"), spec("last", keep_alive_s=0)]
        pool = Pool([*specs, spec("huge", 400)], tmp_path, log.append, **limits)
        pool.start()
        try:
            first = await _use(pool, "pinned")
            for name in ("a", "b", "a"):
                await _use(pool, name)
            assert [model.status for model in pool.models] == ["loaded"] * 3 + ["unloaded"] * 2
            await _use(pool, "last")
            assert [model.status for model in pool.models[:3]] == ["loaded", "loaded", "unloaded"]
            if "room" in limits:
                with pytest.raises(ApiError, match=r"not enough memory for huge: .* beside pinned"):
                    await _use(pool, "huge")
                assert pool.models[1].status == "loaded"  # nothing left for what can never fit
            assert await _use(pool, "pinned") == first
            while pool.models[3].status != "unloaded":
                await asyncio.sleep(0.01)
        finally:
            await pool.stop(grace_s=0)

    asyncio.run(use())
    assert "edgespec: b is unloaded: its memory is for last" in log


def test_a_model_that_finds_no_memory_when_it_loads_has_others_leave(spec, tmp_path, monkeypatch):
    start, refusals = ModelProcess.start, ["edgespec: error: not enough memory"]

    async def refuse_once(socket, options, log):
        if "--alias=b" in options and refusals:
            raise NotLoaded(refusals.pop())
        return await start(socket, options, log)

    monkeypatch.setattr(ModelProcess, "start", refuse_once)

    async def use():
        pool = Pool([spec("a"), spec("b")], tmp_path, lambda _: None)
        try:
            await _use(pool, "a")
            await _use(pool, "b")
            assert [model.status for model in pool.models] == ["unloaded", "loaded"]
            await pool.models[1].process.end(0)
            refusals[:] = ["edgespec: error: not enough memory"]
            with pytest.raises(ApiError) as refused:
                await _use(pool, "b")
            assert (refused.value.status, refused.value.code) == (503, "out_of_memory")
        finally:
            await pool.stop(grace_s=0)

    asyncio.run(use())


def test_a_busy_model_answers_before_it_leaves_and_is_loaded_again(spec, tmp_path):
    order = []

    async def use():
        pool = Pool([spec("a"), spec("b")], tmp_path, lambda _: None, max_models=1)
        a, b = pool.models
        try:
            async with pool.hold(a):
                other = asyncio.create_task(_use(pool, "b"))
                while a.status != "leaving":
                    await asyncio.sleep(0.01)
                again = asyncio.create_task(_use(pool, "a"))
                await asyncio.sleep(0.1)
                assert not other.done()
                order.append("answered")
            order.append(("b", await other, b.status))
            await again
            order.append((a.status, b.status))
        finally:
            await pool.stop(grace_s=0)

    asyncio.run(use())
    assert [order[0], order[2]] == ["answered", ("loaded", "unloaded")]


def test_a_stream_says_that_its_model_is_loaded_and_why_it_is_not(spec, files, tmp_path, monkeypatch):
    monkeypatch.setattr("edgespec.apps.server.router.app._ALIVE_S", 0.05)
    log = []
    broken = ModelSpec(NamedModel("broken"), (f"--target={files / 'broken.gguf'}",))

    async def ask():
        pool = Pool([spec("a"), broken], tmp_path, log.append)
        pool.start()
        try:
            transport = httpx.ASGITransport(create_router(pool, log.append))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                body = {"prompt": "abc", "max_tokens": 3, "stream": True}
                return [
                    (await client.post("/v1/completions", json={"model": name, **body})).text
                    for name in ("a", "broken", "a")
                ]
        finally:
            await pool.stop(grace_s=0)

    first, failed, again = asyncio.run(ask())
    assert first.startswith(": loading a\n\n")
    assert first.endswith("data: [DONE]\n\n")
    assert failed.startswith(": loading broken\n\n")
    assert '"code":"model_not_loaded"' in failed.splitlines()[-2]
    assert again.startswith("data: {")


def test_a_unix_socket_is_this_users_alone_and_that_of_a_killed_server_is_taken_over(tmp_path):
    file = tmp_path / "x.sock"
    with bind(str(file), 0):
        assert file.stat().st_mode & 0o777 == 0o600
    with bind(str(file), 0) as bound:
        bound.listen()
        with pytest.raises(EdgespecError, match=r"x\.sock: Address already in use"):
            bind(str(file), 0)


# ---- presets ----


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "top level.models: missing"),
        ("[models]", "models: it names no model"),
        ("[models.a", "not valid TOML"),
        ("[models.a]\ncontext = 5", "models.a.context: no such field (nearest: ctx"),
        ("[models.a]\nembeddings = true\nspeech = 'whisper-tiny'", "models.a: --embeddings and"),
        ("[models.a]\nctx = 0", "models.a.ctx: expected int >= 1, got 0"),
        ("[models.a]\nkeep_alive = 'soon'", "models.a"),
        ("[models.a]\ntarget = ''", "models.a.target is empty"),
        ("[models.a]\ntarget = 'x'\npair = 'y'", "models.a.pair: it contradicts target"),
        ("[models.a]\ntarget = '/nowhere.gguf'", "models.a: /nowhere.gguf: no such file"),
        ("[models.a]\ntarget = 'never-heard-of'", "models.a: no model is called 'never-heard-of'"),
        (
            "[models.a]\ntarget = 'T'\n[models.b]\ntarget = 'T'\naliases = ['A']",
            "two models are called 'A': a and b",
        ),
    ],
)
def test_a_mistake_in_a_preset_is_a_line_with_file_and_key(text, told, tmp_path, tiny_path, capfd):
    file = tmp_path / "preset.toml"
    file.write_text(text.replace("'T'", f"'{tiny_path}'"))
    assert main(["serve", "--models", str(file), "--port", "0"]) == 2
    said, line = capfd.readouterr()
    assert (said, line.count("\n")) == ("", 1), line
    assert line.startswith(f"edgespec: error: {file}: ")
    assert told in line


def test_options_that_contradict_several_models(tmp_path, tiny_path, capfd):
    copy, pinned = shutil.copy(tiny_path, tmp_path / "copy.gguf"), tmp_path / "pinned.toml"
    pinned.write_text(f"[models.a]\ntarget = '{tiny_path}'\nkeep = true\n[models.b]\ntarget = '{copy}'")
    for options, told in (
        (["--models", tmp_path / "no.toml"], "no.toml: No such file"),
        (["--models", "x.toml", "--model", tiny_path], "contradict"),
        (["-m", tiny_path, "-m", copy, "--draft", tiny_path], "contradict"),
        (["-m", tiny_path, "-m", tiny_path], "two models are called 'target'"),
        (["-m", tiny_path, "--max-models", 2], "--max-models"),
        (["--models", pinned, "--max-models", 1], "--max-models 1"),
    ):
        assert main(["serve", "--port", "0", *map(str, options)]) == 2
        line = capfd.readouterr().err
        assert told in line
        assert line.count("\n") == 1, line


GROUPS = (serve.ServeLoading, serve.RequestLimits, serve.SpeechServing)


def options_of(**given):
    """Return the options of a server on whose command line these were given."""
    loading = serve.ServeLoading(
        states=StateOptions(), compute=AnyCompute(), vectors=serve.EmbeddingServing()
    )
    groups = [changed(group, given) for group in (loading, serve.RequestLimits(), serve.SpeechServing())]
    output, watts = serve.ServeOutput(), given.get("assume_watts")
    return serve.ServerOptions(groups[0], serve.ListenOptions(), *groups[1:], output, watts)


def own_words(text, tmp_path, **given):
    """Return the options of the processes of a preset's models, by name."""
    file = tmp_path / "preset.toml"
    file.write_text(text)
    tables, options = read_preset(file, GROUPS), options_of(**given)
    return {name: [*serve._words(serve._own_options(table, options, name))] for name, table in tables.items()}


def test_a_table_stands_before_the_command_line(tmp_path):
    text = "[models.a]\nctx = 9\nprefix_cache = 0\nlearn = true\nstate_dir = '/s'\n[models.b]\n"
    found = own_words(text, tmp_path, ctx=7, cache_type="q8_0", reasoning_budget=3)
    shared = ["--cache-type=q8_0", "--max-body=1024", "--reasoning-budget=3"]
    assert {*found["a"]} == {"--ctx=9", "--prefix-cache=0", "--learn", "--state-dir=/s", *shared}
    assert {*found["b"]} == {"--ctx=7", *shared}
    own_words("keep_alive = 60\n[models.a]\n[models.b]\nkeep_alive = -1", tmp_path)
    tables = read_preset(tmp_path / "preset.toml", GROUPS)
    assert [table.keep_alive for table in tables.values()] == [60, -1]


OF_THE_SERVER = ("max_queue", "max_body", "max_seconds", "max_audio")
VALUES = {
    "state_limit": "5MB",
    "state_dir": "/s",
    "chat_template": "chatml",
    "rpc": "here:1",
    "mmproj": "/m.gguf",
    "lora": ["/a.gguf"],
    "pooling": "cls",
    "kernels": "off",
    "cache_type": "q4_0",
    "drafter": "suffix",
    "speech": "whisper-tiny",
    "speech_draft": "none",
}
NEEDED = {"pooling": "embeddings = true\n", "state_limit": "state_dir = '/s'\n"}


@pytest.mark.parametrize(
    "option", [one for group in GROUPS for one in flat_options(group)], ids=lambda one: one[0]
)
def test_every_option_of_a_model_is_one_of_a_table(option, tmp_path):
    name, kind, _ = option
    value = VALUES.get(name, True if kind is bool else 5)
    text = f"[models.a]\n{NEEDED.get(name, '')}{name} = {json.dumps(value)}\n"
    if name in OF_THE_SERVER:
        with pytest.raises(EdgespecError, match=f"models.a.{name}: no such field"):
            own_words(text, tmp_path)
        return
    (word,) = [one for one in own_words(text, tmp_path)["a"] if one.startswith(f"--{name.replace('_', '-')}")]
    assert word.endswith(f"={value[0] if isinstance(value, list) else value}") or value is True
    wrong = "'x'" if value is True or value == 5 else "5.5"
    with pytest.raises(EdgespecError, match=f"models.a.{name}: expected "):
        own_words(f"[models.a]\n{name} = {wrong}\n", tmp_path)


BESIDE = {"drafter": "suffix", "parallel": 3, "cache_type": "q8_0", "chat_template": "chatml", "rpc": "h:1"}
BESIDE |= {"learn": True, "state_dir": Path("/s"), "prefix_cache": 1, "assume_watts": 5.0}


def test_vectors_leave_out_what_does_nothing_for_them_and_name_it(tmp_path, capfd):
    text = "[models.text]\n[models.vectors]\nembeddings = true\npooling = 'cls'\n"
    found = own_words(text, tmp_path, **BESIDE, ctx=7, threads=2)
    assert {*found["vectors"]} == {
        *("--embeddings", "--pooling=cls", "--ctx=7", "--threads=2", "--max-body=1024")
    }
    line = capfd.readouterr().err
    for name in BESIDE:
        word = f"--{name.replace('_', '-')}"
        assert word in " ".join(found["text"])
        assert word in line


def test_times_are_ollamas():
    times = {
        "5m": 300.0,
        "1h30m": 5400.0,
        300: 300.0,
        "0": 0.0,
        "100ms": 0.1,
        -1: float("inf"),
        "-1m": float("inf"),
    }
    assert {time: duration_s(time) for time in times} == times
    for wrong in ("soon", "", "5 m", "nan", "1h x"):
        with pytest.raises(ValueError):
            duration_s(wrong)
