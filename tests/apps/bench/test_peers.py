"""Other servers as peers: edgespec's own in the place of llama-server, and the real one where it is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec import Engine
from edgespec.apps.bench.measure import LLAMA_SERVER, BenchSettings, LlamaServer, rendered, started_server
from edgespec.apps.bench.suites import Prompt
from edgespec.errors import EdgespecError
from fake_llama_cpp import fake, fake_server, option, started
from server_app import on_a_port, serving
from tiny_gguf import write_tiny_gguf

PROMPT = Prompt("own/1", "code", "Write a quicksort.")
SETTINGS = BenchSettings(variants=(), n_predict=8)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_started_server(tiny_path: Path, tiny_draft_path: Path, tmp_path: Path):
    folder = fake_server(tmp_path / "bin")
    with Engine(tiny_path, drafter="none", n_threads=1) as engine:
        n_prompt = len(engine.prompt_tokens(PROMPT.text))
        for draft, variant in ((None, "plain"), (tiny_draft_path, "model-3")):
            with started_server(folder, engine, draft, SETTINGS, [PROMPT]) as peer:
                (run,) = peer.runs(PROMPT, 1)
                call = started(folder, "drafted" if draft else "plain")
                assert alive(call["pid"])
            assert not alive(call["pid"])
            assert (run.variant, run.round, run.prompt_tokens) == (f"llama.cpp {variant}", 1, n_prompt)
            assert [option(call["argv"], name) for name in ("-m", "-t")] == [str(tiny_path), "1"]
            assert int(option(call["argv"], "-c")) >= n_prompt + SETTINGS.n_predict
        assert option(call["argv"], "--spec-draft-n-max") == "3"
        assert peer.name.endswith(f", drafted by {tiny_draft_path.stem}")


@pytest.mark.parametrize(
    ("says", "line"),
    [
        ({"log": "loading\nno such model\n\n", "code": 1}, "ended with code 1: no such model"),
        ({"out": "only here\n", "code": 3}, "ended with code 3: only here"),
        ({}, "ended with code 0: no output"),
    ],
)
def test_a_server_that_ends_early_is_one_line(tiny_path: Path, tmp_path: Path, says: Any, line: str):
    fake(tmp_path / LLAMA_SERVER, **says)
    with (
        Engine(tiny_path, drafter="none", n_threads=1) as engine,
        pytest.raises(EdgespecError, match=f"^llama-server {line}$"),
        started_server(tmp_path, engine, None, SETTINGS, [PROMPT]),
    ):
        pass


@pytest.mark.parametrize("drafts", [True, False])
def test_what_llama_server_tells(tiny_path: Path, drafts: bool):
    """It counts the end-of-generation token, and goes on without a draft that does not fit its target."""
    end: dict[str, Any] = {"choices": [{"text": "", "finish_reason": "stop"}]}
    end |= {"usage": {"prompt_tokens": 30, "completion_tokens": 8}}
    end |= {"timings": {"draft_n": 6} if drafts else {}}
    answers = {
        "/props": json.dumps({"build_info": "b1-0c1e570"}),
        "/v1/models": json.dumps({"data": [{"id": "m"}]}),
        "/v1/completions": f"data: {json.dumps(end)}\n\ndata: [DONE]\n\n",
    }

    async def llama(scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": answers[scope["path"]].encode()})

    with Engine(tiny_path, drafter="none", n_threads=1) as engine, on_a_port(llama) as url:
        peer = LlamaServer(url, engine, SETTINGS, Path("small.gguf"), "model-3")
        assert peer.name == "llama.cpp b1-0c1e570, drafted by small"
        if drafts:
            assert [run.tokens for run in peer.runs(PROMPT, 0)] == [7]
        else:
            with pytest.raises(EdgespecError, match=r"^llama-server drafts nothing with small$"):
                list(peer.runs(PROMPT, 0))


BOS_TEMPLATE = "{{ bos_token }}{% for message in messages %}[{{ message.content }}]{% endfor %}"


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("template", [BOS_TEMPLATE, "{{ messages[0].content }}:", None])
def test_rendered_text_has_the_tokens_of_the_prompt(tmp_path: Path, add_bos: bool, template: str | None):
    path = write_tiny_gguf(tmp_path / "model.gguf", add_bos=add_bos, chat_template=template)
    with Engine(path, drafter="none", n_threads=1) as engine:
        text = rendered(engine, "the rain")
        tokens = engine.target.tokenize(text, add_special=True, parse_special=True)
        assert tokens == engine.prompt_tokens("the rain")


@pytest.mark.parametrize("n_kept", [0, 1 << 24])
def test_a_server_is_asked_from_outside(tiny_path: Path, n_kept: int):
    with serving(tiny_path, engine_options={"prefix_cache": n_kept}) as served:
        peer = LlamaServer(f"{served.url}/", served.engine, SETTINGS)
        assert peer.name == f"llama.cpp at {served.url}/ with {tiny_path.stem}"
        (run,) = peer.runs(PROMPT, 1)
        assert (run.prompt, run.variant, run.round) == ("own/1", "llama.cpp served", 1)
        assert run.prompt_tokens == len(served.engine.prompt_tokens(PROMPT.text))
        assert 0 < run.tokens <= 8
        assert run.ttft_s is not None
        assert 0 < run.ttft_s <= run.total_s
        if n_kept:
            with pytest.raises(EdgespecError, match=r"keeps prompts: start it without"):
                list(peer.runs(PROMPT, 1))


def test_what_is_no_server_of_completions():
    async def other(scope: Any, _receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            status = 200 if scope["path"] == "/v1/models" else 404
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b"<html>\nelsewhere"})

    engine: Any = SimpleNamespace()
    with on_a_port(other) as url:
        with pytest.raises(EdgespecError, match=rf"^{url}/v1/models does not answer as OpenAI's API does$"):
            LlamaServer(url, engine, SETTINGS)
        with pytest.raises(EdgespecError, match=rf"^{url}/sub/v1/models answers 404: <html> elsewhere$"):
            LlamaServer(f"{url}/sub", engine, SETTINGS)
    with pytest.raises(EdgespecError, match=rf"^{url}: .*refused"):
        LlamaServer(url, engine, SETTINGS)


@pytest.mark.parametrize("template", [BOS_TEMPLATE, "{{ messages[0].content }}:"])
def test_the_real_server(tmp_path: Path, template: str):
    found = os.environ.get("LLAMA_CPP_BIN")
    if not found:
        pytest.skip("LLAMA_CPP_BIN does not name a directory with llama-server")
    target = write_tiny_gguf(tmp_path / "target.gguf", seed=1, add_bos=True, chat_template=template)
    small = write_tiny_gguf(tmp_path / "draft.gguf", seed=2, add_bos=True, n_layer=1)
    with Engine(target, drafter="none", n_threads=1) as engine:
        for draft in (None, small):
            with started_server(Path(found), engine, draft, SETTINGS, [PROMPT]) as peer:
                (run,) = peer.runs(PROMPT, 0)
            assert run.prompt_tokens == len(engine.prompt_tokens(PROMPT.text))
            assert 0 < run.tokens <= 8
            assert run.ttft_s
            assert run.total_s > run.ttft_s
