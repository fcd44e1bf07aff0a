"""The server's routes over real tiny models, as any HTTP client sees them."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from edgespec import Engine, SamplingParams
from edgespec.apps.server import streaming
from server_app import Served, serving
from tiny_gguf import write_tiny_gguf
from worker_jobs import until

ASK = {"model": "edgespec", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 24}
GO_ON = {"model": "edgespec", "prompt": "hello", "max_tokens": 24}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GREEDY = {"temperature": 0}


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with served.client() as client:
        yield client
    assert served.log == [], "nothing failed that is not the client's mistake"


@pytest.fixture(scope="module")
def alone(tiny_path: Path) -> Iterator[Engine]:
    """The same target without a server, decoding plainly."""
    with Engine(tiny_path, drafter="none", profile=False) as engine:
        yield engine


def chat(client: httpx.Client, **fields: Any) -> Any:
    answer = client.post(CHAT, json=ASK | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text(client: httpx.Client, **fields: Any) -> Any:
    answer = client.post(TEXT, json=GO_ON | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    """Return the chunks of a stream, which must end with [DONE]."""
    with client.stream("POST", path, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line and not line.startswith(":")]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def said(chunks: list[Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def refused(client: httpx.Client, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "/" not in re.sub(r"/v1/(chat/)?completions", "", error["message"]), "no path"
    assert "\n" not in error["message"]
    return dict(error)


# ---- what is served ----


def test_health_models_and_metrics(client: httpx.Client):
    assert client.get("/health").json() == {
        "status": "ok",
        "busy": False,
        "running": 0,
        "waiting": 0,
        "parallel": 1,
    }
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["edgespec"]["draft"]) == ("target", "model", "tiny 2")
    assert (model["edgespec"]["chat"], model["edgespec"]["tools"]) == (True, False)
    for name in ("target", "tiny 1", "edgespec"):
        assert client.get(f"/v1/models/{name}").json() == model
        assert chat(client, model=name)["model"] == "target"
    chat(client)
    metrics = client.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert "edgespec_generated_tokens_total" in metrics.text


def test_unknown_paths_and_methods_have_the_same_shape(client: httpx.Client):
    for method, path, status in (("GET", "/v1/nope", 404), ("GET", CHAT, 405), ("GET", "/docs", 404)):
        answer = client.request(method, path)
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert client.get(CHAT).headers["allow"] == "POST"


# ---- exactness ----


def test_greedy_answers_are_the_engines(client: httpx.Client, alone: Engine):
    expected = alone.generate("hello", params=SamplingParams(temperature=0), n_predict=24)
    answer = chat(client, **GREEDY)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    usage = answer["usage"]
    assert usage["prompt_tokens"] == expected.prompt_tokens
    assert usage["completion_tokens"] == len(expected.token_ids) == 24
    assert usage["total_tokens"] == expected.prompt_tokens + 24
    raw = alone.generate("hello", params=SamplingParams(temperature=0), n_predict=24, chat=False)
    assert text(client, **GREEDY)["choices"][0]["text"] == raw.text
    ids = alone.target.tokenize("hello", add_special=True, parse_special=True)
    for prompt in (ids, [ids], ["hello"]):
        assert text(client, prompt=prompt, **GREEDY)["choices"][0]["text"] == raw.text


def test_head_is_answered_wherever_get_is(client: httpx.Client):
    described = client.get("/openapi.json").json()["paths"]
    paths = [path.replace("{name}", "edgespec") for path, route in described.items() if "get" in route]
    paths = [path for path in paths if "{response_id}" not in path]  # nothing was asked yet
    assert {"/health", "/v1/health", "/props", "/v1/models", "/v1/models/edgespec", "/api/tags"} <= {*paths}
    for path in [*paths, "/", "/page.js", "/openapi.json"]:
        got, head = client.get(path), client.head(path)
        assert (head.status_code, head.content) == (200, b""), path
        assert head.headers["content-type"] == got.headers["content-type"]
    assert client.head("/v1/chat/completions").status_code == 405
    assert client.head("/none").status_code == 404


def test_the_properties_are_llama_servers(client: httpx.Client, served: Served):
    props = client.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == served.engine.target.n_ctx_train
    assert props["total_slots"] == client.get("/v1/health").json()["parallel"]
    assert props["model_path"] == served.engine.target.path.name, "and no folder of this machine"
    assert props["chat_template"] == served.engine.target.chat_template
    assert client.post("/props", json={}).json()["error"]["message"] == "POST is not for /props"


def test_minus_one_is_as_many_tokens_as_the_context_holds(client: httpx.Client):
    for fields in ({"max_tokens": -1}, {"max_tokens": -1, "n_predict": -2}):
        assert text(client, prompt=[5] * 504, **fields)["usage"]["total_tokens"] == 512
    full = chat(
        client, messages=[{"role": "user", "content": "x" * 470}], max_completion_tokens=-1, max_tokens=None
    )
    assert full["usage"]["total_tokens"] == 512
    assert chat(client, logprobs=0, top_logprobs=0)["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("seed", [0, 7, -1, (1 << 63) + 5])
def test_seeded_answers_are_the_engines_whatever_is_drafted(client: httpx.Client, alone: Engine, seed: int):
    expected = alone.generate("hello", seed=seed % (1 << 64), n_predict=24).text
    answers = [
        chat(client, seed=seed, speculative=speculative)["choices"][0]["message"]["content"]
        for speculative in (
            None,
            {"drafter": "none"},
            {"drafter": "auto", "gamma": 3},
            {"drafter": "model"},
            {"gamma": 0},
        )
    ]
    assert answers == [expected] * len(answers)


def test_sampling_fields_reach_the_engine(client: httpx.Client, alone: Engine):
    params = SamplingParams(
        temperature=2.0,
        top_k=30,
        top_p=0.99,
        min_p=0.01,
        repeat_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={65: 8.0},
    )
    expected = alone.generate("hello", params=params, seed=3, n_predict=24).text
    fields = {
        name: getattr(params, name) for name in vars(params) if name not in ("typical_p", "penalty_last_n")
    }
    fields["logit_bias"] = {"65": 8}
    assert chat(client, seed=3, **fields)["choices"][0]["message"]["content"] == expected
    assert expected != alone.generate("hello", seed=3, n_predict=24).text
    greedy = chat(client, temperature=1e-8)["choices"]
    assert greedy == chat(client, temperature=0)["choices"] == chat(client, top_p=0)["choices"]


def test_answers_without_a_seed_are_distributed_as_the_targets(client: httpx.Client, alone: Engine):
    n, k = 400, 3
    warm = {"temperature": 1, "top_k": k, "top_p": 1, "min_p": 0, "logprobs": 0, "max_tokens": 2}
    prompt = alone.prompt_tokens("hi", chat=False)

    def likeliest(tokens: list[int]) -> dict[int, float]:
        (token,) = alone.stream(tokens, n_predict=1, n_logprobs=k)
        weights = {i: math.exp(value) for i, value in token.top}
        return {i: weight / sum(weights.values()) for i, weight in weights.items()}

    expected = {
        (first, second): p * q
        for first, p in likeliest(prompt).items()
        for second, q in likeliest([*prompt, first]).items()
    }
    names = {piece_name(alone.target.piece(i)): i for i in range(alone.target.n_vocab - 4)}
    seen: Counter[tuple[int, ...]] = Counter()
    for _ in range(n):
        tokens = text(client, prompt="hi", **warm)["choices"][0]["logprobs"]["tokens"]
        seen[tuple(names[name] for name in tokens)] += 1
    assert set(seen) <= set(expected)
    common = [pair for pair, p in expected.items() if n * p >= 5]
    groups = [(seen[pair], n * expected[pair]) for pair in common]
    groups.append((n - sum(s for s, _ in groups), n - sum(e for _, e in groups)))
    statistic = sum((s - e) ** 2 / e for s, e in groups if e > 0)
    assert statistic < 45, f"chi-square with {len(groups) - 1} degrees of freedom"  # p < 1e-6 for up to 9


def piece_name(piece: bytes) -> str:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


# ---- streams ----


@pytest.mark.parametrize(("path", "body"), [(CHAT, ASK), (TEXT, GO_ON)])
def test_a_stream_says_what_the_whole_answer_says(client: httpx.Client, path: str, body: dict[str, Any]):
    body = body | GREEDY
    whole = client.post(path, json=body).json()
    chunks = events(client, path, body | {"stream_options": {"include_usage": True}})
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert {chunk["system_fingerprint"] for chunk in chunks} == {whole["system_fingerprint"]}
    usage = chunks.pop()
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert all("usage" not in chunk for chunk in chunks)
    if path == CHAT:
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert said(chunks) == whole["choices"][0]["message"]["content"]
    else:
        assert "".join(c["choices"][0]["text"] for c in chunks) == whole["choices"][0]["text"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[-1] == whole["choices"][0]["finish_reason"] == "length"
    assert set(reasons[:-1]) == {None}


def test_chunks_tell_where_their_text_comes_from(client: httpx.Client):
    chunks = events(
        client, CHAT, ASK | GREEDY | {"max_tokens": 60, "speculative": {"drafter": "model", "gamma": 4}}
    )
    told = [chunk for chunk in chunks if "edgespec" in chunk]
    for chunk in told:
        n = sum(n for n, _ in chunk["edgespec"]["origins"])
        assert n == len(chunk["choices"][0]["delta"]["content"])
    origins = [origin for chunk in told for n, origin in chunk["edgespec"]["origins"] for _ in range(n)]
    assert len(origins) == len(said(chunks))
    assert 0 < sum(chunk["edgespec"]["n_tokens"] for chunk in told) <= len(origins)
    assert "accepted" in origins
    plain = events(client, CHAT, ASK | {"speculative": {"drafter": "none"}})
    assert {o for chunk in plain for _, o in chunk.get("edgespec", {}).get("origins", [])} == {"target"}


def test_stop_strings_span_tokens_and_chunks(client: httpx.Client):
    fields = GREEDY | {"max_tokens": 60}
    whole = chat(client, **fields)["choices"][0]["message"]["content"]
    # Characters that are a token each, or a few; what replaces half a character is not to be searched for.
    stop = next(run[2:7] for run in re.findall("[^\ufffd]{8,}", whole))
    expected = whole[: whole.index(stop)]
    for given in (stop, ["never said", stop]):
        for drafter in ("none", "model", "suffix"):
            fields |= {"stop": given, "speculative": {"drafter": drafter}}
            answer = chat(client, **fields)["choices"][0]
            assert (answer["message"]["content"], answer["finish_reason"]) == (expected, "stop")
            chunks = events(client, CHAT, ASK | fields)
            assert said(chunks) == expected
            assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_characters_are_never_cut(client: httpx.Client):
    word = "grüße, 世界 \U0001f600!"
    schema = {"type": "json_schema", "json_schema": {"name": "word", "schema": {"const": word}}}
    body = ASK | {"response_format": schema, "max_tokens": 80, "seed": 1}
    chunks = events(client, CHAT, body)
    assert json.loads(said(chunks)) == word
    assert len(chunks) > 3
    assert "�" not in said(chunks)
    pieces = chunks[1:-1]
    assert all(
        sum(n for n, _ in c["edgespec"]["origins"]) == len(c["choices"][0]["delta"]["content"])
        for c in pieces
    )


def test_a_stream_that_waits_sends_comments(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streaming, "ALIVE_S", 0.01)
    body = ASK | GREEDY | {"max_tokens": 4, "speculative": {"drafter": "none"}, "user": "same"}
    may_step, step = threading.Event(), served.engine.step

    def held() -> None:
        may_step.wait(60)
        step()

    async def all_at_once() -> list[str]:
        comments = []
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
            before = [asyncio.create_task(client.post(CHAT, json=body)) for _ in range(4)]
            await until(lambda: served.worker.n_running + served.worker.n_waiting == len(before))
            async with client.stream("POST", CHAT, json=body | {"stream": True}) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith(":"):
                        comments.append(line)
                    if line == ": waiting":
                        may_step.set()
            assert [done.status_code for done in await asyncio.gather(*before)] == [200] * 4
        return comments

    monkeypatch.setattr(served.engine, "step", held)
    try:
        comments = asyncio.run(all_at_once())
    finally:
        may_step.set()
    places = [int(line.removeprefix(": queue ")) for line in comments if line.startswith(": queue ")]
    assert len(places) > 1
    assert places == sorted(places, reverse=True)
    assert places[-1] == 0


def test_a_client_that_goes_away_ends_its_generation(tmp_path: Path):
    path = write_tiny_gguf(tmp_path / "long.gguf", n_ctx=16384)
    body = ASK | GREEDY | {"max_tokens": 16000, "speculative": {"drafter": "none"}}

    async def leave(served: Served) -> None:
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
            asked = asyncio.create_task(client.post(CHAT, json=body))
            await until(lambda: served.worker.busy)
            asked.cancel()

    for stream in (True, False):
        with serving(path) as served, served.client() as client:
            ended: list[Any] = []
            served.worker.on_end = ended.append
            if stream:
                with client.stream("POST", CHAT, json=body | {"stream": True}) as answer:
                    next(answer.iter_bytes())
            else:
                asyncio.run(leave(served))
            asyncio.run(until(ended.__len__))
        assert ended[0].outcome == "cancelled"
        assert ended[0].result is None or len(ended[0].result.token_ids) < 16000


# ---- conversations ----


def test_messages_of_all_kinds(client: httpx.Client, alone: Engine):
    plain = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "12"},
    ]
    sent = [
        {"role": "developer", "content": [{"type": "text", "text": "be short"}], "name": "x"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "12", "tool_call_id": "c"},
    ]
    expected = alone.generate(
        alone.target.tokenize_chat(plain), params=SamplingParams(temperature=0), n_predict=24
    )
    answer = chat(client, messages=sent, **GREEDY)
    assert answer["choices"][0]["message"]["content"] == expected.text
    assert answer["usage"]["prompt_tokens"] == expected.prompt_tokens


def test_a_conversation_that_goes_on_is_read_from_the_cache(client: httpx.Client):
    messages = [{"role": "user", "content": "the cat and the other cat"}]
    first = chat(client, messages=messages, **GREEDY)
    messages += [first["choices"][0]["message"], {"role": "user", "content": "and then"}]
    usage = chat(client, messages=messages, **GREEDY)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 1
    assert usage["edgespec"]["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]


def test_max_tokens_is_cut_to_the_context(client: httpx.Client):
    for asked in (10_000, 1 << 62, None):
        answer = chat(client, messages=[{"role": "user", "content": "x" * 480}], max_tokens=asked, **GREEDY)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert 500 <= answer["usage"]["total_tokens"] <= 512
    for names in (("max_tokens",), ("max_completion_tokens",), ("n_predict",), ("max_tokens", "n_predict")):
        short = chat(client, **{"max_tokens": None} | dict.fromkeys(names, 3))
        assert short["usage"]["completion_tokens"] == 3
    assert text(client, n_predict=-1, max_tokens=None)["usage"]["total_tokens"] == 512
    assert text(client, max_tokens=None)["usage"]["completion_tokens"] == 16


def test_a_model_without_a_chat_template(tmp_path: Path):
    path = write_tiny_gguf(tmp_path / "base.gguf", chat_template=None)
    with serving(path) as served, served.client() as client:
        error = refused(client, CHAT, ASK)
        assert "/v1/completions" in error["message"]
        assert text(client)["choices"][0]["text"]
        assert client.get("/v1/models").json()["data"][0]["edgespec"]["chat"] is False


def test_a_prompt_limit(tiny_path: Path):
    with serving(tiny_path, service={"max_prompt": 30}) as served, served.client() as client:
        text(client, prompt="x" * 30)
        error = refused(client, TEXT, GO_ON | {"prompt": "x" * 31})
        assert error["code"] == "context_length_exceeded"
        assert "at most 30 tokens" in error["message"]


# ---- mistakes ----


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"model": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": 1e999}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"model": "a", "model": "b"}',
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b'{"model": "\\ud800"}',
        b'{"model": "\xff"}',
        b'\xef\xbb\xbf{"model": "a"}',
        b'{"model": "edgespec", "prompt": "a\x00b\x01"}',
    ],
)
def test_bodies_that_are_no_json(client: httpx.Client, body: bytes):
    for path in (CHAT, TEXT):
        answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_other_content_types_are_415(client: httpx.Client):
    """Also what keeps another web page from sending requests: a form needs no permission, JSON does."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = client.post(CHAT, content=json.dumps(ASK), headers={"Content-Type": kind})
        assert answer.status_code == 415
    answer = client.post(
        CHAT, content=json.dumps(ASK), headers={"Content-Type": "application/json; charset=utf-8"}
    )
    assert answer.status_code == 200


def test_a_failure_of_ours_is_a_plain_500(tiny_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streaming, "_SETTLE_S", 20.0)  # a busy machine takes its time to fail
    with serving(tiny_path) as served, served.client() as client:
        served.engine.target.close()
        for path, body in ((CHAT, ASK), (TEXT, GO_ON), (CHAT, ASK | {"stream": True})):
            answer = client.post(path, json=body)
            assert answer.status_code == 500
            message = "the server failed at this request; its log says why"
            assert answer.json()["error"] == {
                "message": message,
                "type": "server_error",
                "param": None,
                "code": None,
            }
    assert len(served.log) == 3
    assert all("the model is closed" in line and "\n" not in line for line in served.log)


def test_a_stream_begins_with_its_first_token(served: Served, client: httpx.Client, monkeypatch):
    """Its headers wait for nothing else, however long a refusal may take to come."""
    monkeypatch.setattr(streaming, "_SETTLE_S", 1000.0)
    has_read, passes, step = threading.Event(), itertools.count(), served.engine.step

    def held() -> None:
        if next(passes):  # the first one's token is on its way
            has_read.wait(60)
        step()

    monkeypatch.setattr(served.engine, "step", held)
    body = ASK | GREEDY | {"stream": True, "max_tokens": 12, "speculative": {"drafter": "none"}}
    try:
        with client.stream("POST", CHAT, json=body) as answer:
            assert answer.status_code == 200 and served.worker.busy
            has_read.set()
            assert [line for line in answer.iter_lines() if line][-1] == "data: [DONE]"
    finally:
        has_read.set()


# ---- logprobs ----


def test_logprobs_of_a_chat(client: httpx.Client, alone: Engine):
    tokens = list(alone.stream("hello", params=SamplingParams(temperature=0), n_predict=12, n_logprobs=3))
    fields = GREEDY | {"max_tokens": 12, "logprobs": True, "top_logprobs": 3}
    choice = chat(client, **fields)["choices"][0]
    found = choice["logprobs"]["content"]
    pieces = [alone.target.piece(token.id) for token in tokens]
    assert [bytes(entry["bytes"]) for entry in found] == pieces
    assert b"".join(pieces).decode(errors="replace") == choice["message"]["content"]
    for entry, token in zip(found, tokens, strict=True):
        assert entry["logprob"] == pytest.approx(token.logprob, abs=1e-3)
        assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx(
            [v for _, v in token.top], abs=1e-3
        )
        assert entry["top_logprobs"][0]["token"] == entry["token"], "greedy"
    chunks = events(client, CHAT, ASK | fields)
    streamed = [e for c in chunks for e in (c["choices"][0].get("logprobs") or {"content": []})["content"]]
    assert [entry["bytes"] for entry in streamed] == [entry["bytes"] for entry in found]
    assert chat(client)["choices"][0]["logprobs"] is None


def test_logprobs_of_a_text_leave_out_the_stop_string(client: httpx.Client):
    fields = GREEDY | {"max_tokens": 40, "logprobs": 2}
    whole = text(client, prompt="the", **fields)["choices"][0]
    assert len(whole["logprobs"]["tokens"]) == len(whole["logprobs"]["top_logprobs"]) == 40
    assert all(len(top) == 2 for top in whole["logprobs"]["top_logprobs"])
    offsets = whole["logprobs"]["text_offset"]
    assert offsets[0] == 0 and offsets == sorted(offsets)
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "abcdef"}}}
    body = {"response_format": schema, "logprobs": True, "stop": "cd", "max_tokens": 40}
    choice = chat(client, **body)["choices"][0]
    assert choice["message"]["content"].strip() == '"ab'
    assert "".join(e["token"] for e in choice["logprobs"]["content"]) == choice["message"]["content"]
