"""The official `ollama` client against the server: sync, async, streams, formats, tools, facts, errors."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import ollama
import pytest
from pydantic import BaseModel

from edgespec import Engine, SamplingParams
from edgespec.records import Result, Tally, Token, summarise
from edgespec.server.calls.reader import AnswerForm
from edgespec.server.limits import Gate, Limits
from edgespec.server.metrics import Metrics
from edgespec.server.ollama.options import HARMLESS, HONOURED, ONLY
from edgespec.server.ollama.requests import as_openai
from edgespec.server.ollama.schema import ChatBody, GenerateBody
from edgespec.server.ollama.writing import LineWriting
from edgespec.server.writing import ChatWriting, Head, Written
from server_app import Served, serving
from tiny_gguf import TOOLS_TEMPLATE, write_tiny_gguf

PAGE = Path(__file__).parents[2] / "docs" / "ollama.md"
ADDRESS = "http://127.0.0.1:11434"
HELLO = [{"role": "user", "content": "hello"}]
GREEDY = {"temperature": 0, "num_predict": 24}
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


class Friend(BaseModel):
    """An answer's form."""

    name: str
    grown: bool


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ollama") / "llama-1b.gguf"
    return write_tiny_gguf(
        path, seed=1, n_ctx=4096, chat_template=TOOLS_TEMPLATE, extra={"general.license": "apache-2.0"}
    )


@pytest.fixture(scope="module")
def served(target: Path, tiny_draft_path: Path) -> Iterator[Served]:
    with serving(target, tiny_draft_path) as running:
        yield running


@pytest.fixture(scope="module")
def expected(target: Path) -> str:
    """What the engine says to "hello"."""
    with Engine(target, drafter="none", profile=False) as engine:
        return engine.generate("hello", params=SamplingParams(temperature=0), n_predict=24).text


@pytest.fixture
def client(served: Served) -> Iterator[ollama.Client]:
    with ollama.Client(served.url) as client:
        yield client
    assert served.log == []


def refused(client: ollama.Client, status: int, words: str, **fields: Any) -> None:
    asked = {"model": "edgespec", "messages": HELLO, "options": {"num_predict": 2}} | fields
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat(**asked)
    assert caught.value.status_code == status, caught.value
    assert re.search(words, caught.value.error), caught.value.error


# ---- answers ----


def test_chat_and_generate_are_the_engines_answer(client: ollama.Client, expected: str):
    chat = client.chat("edgespec", HELLO, options=GREEDY)
    assert (chat.message.role, chat.message.content) == ("assistant", expected)
    generated = client.generate("edgespec", "hello", options=GREEDY)
    assert generated.response == expected
    for answer in (chat, generated):
        assert (answer.model, answer.done, answer.done_reason) == ("edgespec", True, "length")
        assert answer.eval_count == 24
        assert all(isinstance(answer[name], int) for name in DURATIONS)
        assert answer.total_duration > answer.eval_duration > 0
        assert answer.total_duration >= answer.load_duration + answer.prompt_eval_duration
    assert generated.context and len(generated.context) == generated.prompt_eval_count + 24


def test_streams_are_lines_of_which_the_last_has_the_figures(
    client: ollama.Client, served: Served, expected: str
):
    parts = list(client.chat("edgespec", HELLO, stream=True, options=GREEDY))
    assert "".join(part.message.content or "" for part in parts) == expected
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts) > 1 and parts[0].eval_count is None and parts[-1].eval_count == 24
    with (
        served.client() as plain,
        plain.stream(
            "POST", "/api/generate", json={"model": "edgespec", "prompt": "hello", "options": GREEDY}
        ) as answer,
    ):
        assert answer.headers["content-type"].startswith("application/x-ndjson")
        lines = [json.loads(line) for line in answer.iter_lines()]
    assert "".join(line["response"] for line in lines) == expected
    assert lines[-1]["edgespec"]["drafted"] > 0, "our own figures come with the last line"


def test_async(served: Served, expected: str):
    async def several() -> list[str | None]:
        client = ollama.AsyncClient(served.url)
        asked = [client.chat("edgespec", HELLO, options=GREEDY) for _ in range(3)]
        stream = await client.generate("edgespec", "hello", stream=True, options=GREEDY)
        text = "".join([part.response async for part in stream])
        return [*[answer.message.content for answer in await asyncio.gather(*asked)], text]

    assert asyncio.run(several()) == [expected] * 4


def test_a_system_text_and_the_roles_are_those_of_the_template(client: ollama.Client):
    messages = [{"role": "System", "content": "be brief"}, {"role": "user", "content": "hello"}]
    chat = client.chat("edgespec", messages, options=GREEDY)
    generated = client.generate("edgespec", "hello", system="be brief", options=GREEDY)
    assert generated.response == chat.message.content
    rendered = (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    raw = client.generate("edgespec", rendered, raw=True, options=GREEDY)
    assert raw.response == chat.message.content
    assert raw.context is None


def test_a_context_goes_on_with_the_conversation(client: ollama.Client, served: Served):
    first = client.generate("edgespec", "hello", options=GREEDY)
    second = client.generate("edgespec", "and you?", context=first.context, options=GREEDY)
    alone = client.generate("edgespec", "and you?", options=GREEDY)
    assert second.prompt_eval_count == len(first.context or ()) + alone.prompt_eval_count
    with pytest.raises(ollama.ResponseError, match="context: token 999999"):
        client.generate("edgespec", "hello", context=[999999])


def test_formats_hold(client: ollama.Client):
    schema = Friend.model_json_schema()
    for seed in range(2):
        options = {"seed": seed, "num_predict": 300}
        asked = client.chat("edgespec", HELLO, format=schema, options=options)
        if asked.done_reason == "stop":
            Friend.model_validate_json(asked.message.content or "")
        assert (asked.message.content or "").startswith('{"name":') or "name" in (asked.message.content or "")
        generated = client.generate("edgespec", "hello", format="json", options=options)
        assert generated.response.startswith("{")
        if generated.done_reason == "stop":
            assert isinstance(json.loads(generated.response), dict)
    raw = client.generate("edgespec", "hello", raw=True, format={"enum": ["one", "two"]})
    assert json.loads(raw.response) in ("one", "two")
    refused(client, 400, "^format: .*no such", format={"type": "no such type"})


def test_a_part_of_a_format_that_cannot_be_held_is_told(served: Served):
    with served.client() as plain:
        schema = {"type": "array", "items": {"type": "boolean"}, "maxItems": 3, "uniqueItems": True}
        body = {"model": "edgespec", "prompt": "hello", "stream": False, "format": schema}
        (warning,) = plain.post("/api/generate", json=body).json()["edgespec"]["warnings"]
    assert "uniqueItems" in warning


def test_logprobs(client: ollama.Client):
    options = {"num_predict": 4, "seed": 1}
    whole = client.chat("edgespec", HELLO, logprobs=True, top_logprobs=2, options=options)
    assert whole.logprobs and len(whole.logprobs) == 4
    assert all(len(one.top_logprobs or ()) == 2 and one.logprob <= 0 for one in whole.logprobs)
    lines = list(client.generate("edgespec", "hello", logprobs=True, stream=True, options=options))
    streamed = [one for line in lines for one in line.logprobs or ()]
    assert [one.logprob for one in streamed] == pytest.approx([o.logprob for o in whole.logprobs], abs=1e-4)
    assert client.chat("edgespec", HELLO, options=options).logprobs is None


def test_requests_without_a_text_load_and_unload(client: ollama.Client):
    assert client.generate("edgespec", "").done_reason == "load"
    assert client.generate("edgespec", keep_alive="10m").done_reason == "load"
    assert client.generate("edgespec", keep_alive=0).done_reason == "unload"
    assert client.chat("edgespec", [], keep_alive="0s").done_reason == "unload"
    assert client.chat("edgespec", []).done_reason == "load"
    assert client.ps().models, "it stays nevertheless"
    refused(client, 400, "keep_alive: a duration is", keep_alive="soon")


# ---- what is served ----


def test_the_model_is_told_truly(client: ollama.Client, served: Served, target: Path):
    (listed,) = client.list().models
    assert (listed.model, listed.size) == ("llama-1b:latest", target.stat().st_size)
    assert re.fullmatch("[0-9a-f]{64}", listed.digest or "")
    assert listed.details and (listed.details.family, listed.details.format) == ("llama", "gguf")
    (loaded,) = client.ps().models
    assert (loaded.name, loaded.digest, loaded.size_vram) == (listed.model, listed.digest, 0)
    assert loaded.expires_at and loaded.expires_at.year > 2300
    shown = client.show("edgespec")
    assert shown.capabilities == ["completion", "tools"]
    assert (shown.template, shown.license) == (TOOLS_TEMPLATE, "apache-2.0")
    info = dict(shown.modelinfo or {})
    assert (info["general.architecture"], info["llama.context_length"]) == ("llama", 4096)
    assert info["general.parameter_count"] == served.engine.target.n_params
    assert info["tokenizer.ggml.tokens"] == []
    assert "tokenizer.chat_template" not in info
    with served.client() as plain:
        verbose = plain.post("/api/show", json={"name": "llama-1b", "verbose": True}).json()
        assert len(verbose["model_info"]["tokenizer.ggml.tokens"]) == served.engine.target.n_vocab
        assert verbose["tensors"][0]["name"] == "token_embd.weight"
        assert re.fullmatch(r"\d+\.\d+\.\d+", plain.get("/api/version").json()["version"])


@pytest.mark.parametrize(
    "name",
    [
        "llama-1b",
        "llama-1b:latest",
        "LLAMA-1B",
        "llama:1b",
        "llama-1b:f32",
        "edgespec",
        "edgespec:latest",
        "tiny 1",
    ],
)
def test_names(client: ollama.Client, name: str):
    answer = client.generate(name, "hello", options={"num_predict": 1})
    assert answer.model == name


def test_the_name_that_is_listed_is_known_to_the_other_api(client: ollama.Client, served: Served):
    """Editors list the models here and chat there."""
    (listed,) = client.list().models
    with served.client() as plain:
        body = {"model": listed.model, "messages": HELLO, "max_tokens": 1}
        assert plain.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    "name", ["llama3.2", "llama-1b:7b", "llama", "edgespec:", ":latest", "llama-1b:latest:latest"]
)
def test_other_names_are_not_found_in_ollamas_words(client: ollama.Client, name: str):
    refused(client, 404, f"^model '{re.escape(name)}' not found", model=name)
    with pytest.raises(ollama.ResponseError, match="not found"):
        client.show(name)


def test_what_ollama_has_and_this_server_has_not_is_one_line(client: ollama.Client):
    for ask in (
        lambda: client.pull("llama3.2"),
        lambda: client.push("llama3.2"),
        lambda: client.create("mine", from_="llama3.2"),
        lambda: client.copy("edgespec", "mine"),
        lambda: client.embed("edgespec", "hello"),
        lambda: client.embeddings("edgespec", "hello"),
        lambda: client.delete("edgespec"),
    ):
        with pytest.raises(ollama.ResponseError, match=r"this server (has one model|writes text)") as caught:
            ask()
        assert caught.value.status_code == 501


# ---- options and fields ----


SAMPLING = [  # of one option alone: the sampling that it means
    ({"temperature": 0}, {"temperature": 0}),
    ({"temperature": 1e-8}, {"temperature": 0}),
    ({"top_k": 1, "seed": 1}, {"temperature": 0}),
    ({"top_p": 0, "seed": 1}, {"temperature": 0}),
    ({"min_p": 1, "seed": 1}, {"temperature": 0}),
    ({"temperature": 0, "repeat_penalty": 1.8}, {"temperature": 0, "repeat_penalty": 1.8}),
    (
        {"temperature": 0, "presence_penalty": 2, "repeat_last_n": -1},
        {"temperature": 0, "presence_penalty": 2, "penalty_last_n": -1},
    ),
    ({"temperature": 0, "repeat_penalty": 1.8, "repeat_last_n": 0}, {"temperature": 0}),
    ({"temperature": 0, "frequency_penalty": 1.5}, {"temperature": 0, "frequency_penalty": 1.5}),
    ({"temperature": 1.5, "seed": 7.0}, {"temperature": 1.5, "top_p": 0.9, "min_p": 0}),
    ({"temperature": 1.5, "typical_p": 0.3, "top_p": 1, "top_k": 0, "seed": 7},
     {"temperature": 1.5, "typical_p": 0.3, "top_p": 1, "top_k": 0, "min_p": 0}),
    ({"seed": 7}, {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0}),
]  # fmt: skip


def test_options_are_honoured(client: ollama.Client, target: Path):
    with Engine(target, drafter="none", profile=False) as engine:
        for options, params in SAMPLING:
            seed = int(options["seed"]) if "seed" in options else None
            wanted = engine.generate("hello", params=SamplingParams(**params), n_predict=16, seed=seed)
            answer = client.generate("edgespec", "hello", options=options | {"num_predict": 16})
            assert answer.response == wanted.text, options


def test_lengths_and_stops(client: ollama.Client, expected: str):
    stopped = client.chat("edgespec", HELLO, options=GREEDY | {"stop": [expected[3:5], "never said"]})
    assert (stopped.message.content, stopped.done_reason) == (
        expected[: expected.index(expected[3:5])],
        "stop",
    )
    n_prompt = stopped.prompt_eval_count or 0
    for options, n in (
        ({"num_predict": 3}, 3),
        ({"num_ctx": n_prompt + 5}, 5),
        ({"num_ctx": n_prompt + 5, "num_predict": -2}, 5),
        ({"num_ctx": 1 << 20, "num_predict": 4}, 4),
    ):
        answer = client.chat("edgespec", HELLO, options=options | {"temperature": 0})
        assert (answer.eval_count, answer.done_reason) == (n, "length"), options
    endless = client.chat("edgespec", HELLO, options={"temperature": 0, "num_predict": -1, "num_ctx": 64})
    assert endless.eval_count == 64 - n_prompt
    refused(client, 400, "messages: .* tokens, and options.num_ctx is 4", options={"num_ctx": 4})
    refused(client, 400, "context length is 4096", messages=[{"role": "user", "content": "x" * 5000}])


def test_draft_num_predict_is_how_much_is_drafted(served: Served):
    with served.client() as plain:
        body = {
            "model": "edgespec",
            "prompt": "hello",
            "stream": False,
            "options": GREEDY | {"draft_num_predict": 0},
        }
        assert plain.post("/api/generate", json=body).json()["edgespec"]["drafted"] == 0


def test_options_that_change_no_text_may_have_any_value(client: ollama.Client, expected: str):
    options = {
        "num_thread": 3, "num_gpu": 99, "num_batch": 64, "main_gpu": 0, "use_mmap": False, "num_keep": 24,
        "low_vram": True, "numa": True, "mirostat": 0, "mirostat_tau": 5.0, "tfs_z": 1.0,
        "penalize_newline": True, "seed": None,
    }  # fmt: skip
    assert client.generate("edgespec", "hello", options=GREEDY | options).response == expected


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"options": {"mirostat": 2}}, "^options.mirostat: mirostat is not here: leave it out, or send 0"),
        ({"options": {"tfs_z": 0.5}}, "^options.tfs_z: "),
        ({"options": {"penalize_newline": False}}, "^options.penalize_newline: .*send true"),
        ({"options": {"num_prediction": 5}}, "^options.num_prediction: there is no such option"),
        ({"options": {"num_predict": 0}}, "^options.num_predict: "),
        ({"options": {"num_predict": "5"}}, "^options.num_predict: must be an integer"),
        ({"options": {"seed": 1.5}}, "^options.seed: must be an integer"),
        ({"options": {"top_k": True}}, "^options.top_k: must be an integer"),
        ({"options": {"temperature": "hot"}}, "^options.temperature: must be a number"),
        ({"options": {"temperature": -1}}, "^options.temperature -1: must be"),
        ({"options": {"repeat_last_n": -2}}, "^options.repeat_last_n -2: must be"),
        ({"options": {"stop": [1]}}, "^options.stop: must be a list of strings"),
        ({"options": {"stop": [""]}}, "^options.stop: an empty"),
        ({"options": {"draft_num_predict": 99}}, "^options.draft_num_predict 99: must be 0 to 32"),
        ({"think": True}, "does not support thinking"),
        ({"think": "enormous"}, "^think"),
        ({"format": "yaml"}, "^format"),
        ({"top_logprobs": 21, "logprobs": True}, "^top_logprobs"),
        ({"messages": [{"role": "user", "images": ["aGVsbG8="]}]}, "images are not supported"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "^messages.0"),
        ({"tools": [{"function": {"name": "two words"}}]}, "^tools.0.function.name"),
        ({"model": ""}, "^model is required$"),
        ({"colour": "red"}, "^colour"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(served: Served, fields: dict[str, Any], words: str):
    with served.client() as plain:
        body = {"model": "edgespec", "messages": HELLO, "options": {"num_predict": 2}} | fields
        answer = plain.post("/api/chat", json=body)
    assert (answer.status_code, set(answer.json())) == (400, {"error"}), answer.text
    assert re.search(words, answer.json()["error"]), answer.text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"template": "{{ .Prompt }}"}, "^template: the model's own template"),
        ({"images": ["aGVsbG8="]}, "^images: images are not supported"),
        ({"raw": True, "system": "be brief"}, "^raw mode does not support system"),
        ({"raw": True, "context": [1]}, "^raw mode does not support context"),
        ({"context": [-1]}, "^context: token -1"),
        ({"width": 512}, "^width"),
        ({"prompt": "x" * 5000}, "your prompt resulted in"),
    ],
)
def test_what_generate_cannot_honour(served: Served, fields: dict[str, Any], words: str):
    with served.client() as plain:
        body = {"model": "edgespec", "prompt": "hello", "options": {"num_predict": 2}} | fields
        answer = plain.post("/api/generate", json=body)
    assert (answer.status_code, set(answer.json())) == (400, {"error"}), answer.text
    assert re.search(words, answer.json()["error"]), answer.text


# ---- tools ----


def called(*names: str, **ids: str) -> dict[str, Any]:
    calls = [{"id": ids.get(name), "function": {"name": name, "arguments": {"n": 1}}} for name in names]
    return {"role": "assistant", "tool_calls": calls}


@pytest.mark.parametrize(
    ("messages", "ids"),  # of the calls, and of the results that belong to them
    [
        ([called("f"), {"role": "tool", "content": "1"}], ["call00100", "call00100"]),
        ([called("f"), {"role": "tool", "tool_name": "f"}], ["call00100", "call00100"]),
        (
            [called("f", "g"), {"role": "tool", "tool_name": "g"}, {"role": "tool", "tool_name": "f"}],
            ["call00100", "call00101", "call00101", "call00100"],
        ),
        ([called("f", "f"), {"role": "tool", "tool_name": "f"}, {"role": "tool", "tool_name": "f"}],
         ["call00100", "call00101", "call00100", "call00101"]),
        ([called("f", f="mine"), {"role": "tool", "tool_call_id": "mine"}], ["mine", "mine"]),
        ([called("f"), {"role": "tool"}, called("f"), {"role": "tool"}],
         ["call00100", "call00100", "call00300", "call00300"]),
        ([{"role": "tool", "tool_call_id": "lost"}], ["lost"]),
    ],
)  # fmt: skip
def test_results_belong_to_their_calls(messages: list[dict[str, Any]], ids: list[str]):
    """Ollama's clients send no ids; templates may need them."""
    read = ChatBody.model_validate({"messages": [*HELLO, *messages]}).messages or []
    found: list[str] = []
    for message in as_openai(read):
        for call in message.get("tool_calls", ()):
            assert json.loads(call["function"]["arguments"]) == {"n": 1}
            found.append(call["id"])
        if message["role"] == "tool":
            found.append(message["tool_call_id"])
    assert found == ids


def lines_of(text: str, *, stream: bool, stop_reason: Any = "eog") -> list[dict[str, Any]]:
    """Return the lines of an answer whose tokens are characters."""
    head = Head.new("ollama", "m", "fp")
    plain: Any = SimpleNamespace(is_control=lambda _token: False)  # a model of which no more is asked
    written = Written(plain, keeps_tokens=False)
    writing = LineWriting("chat", "m", ChatWriting(head, written, AnswerForm({"f": {}, "g": {}})), began=0)
    tokens = [Token(0, character, "target") for character in text]
    stats = summarise(Tally(), n_prompt=1, n_tokens=len(text), ttft_s=0.1, total_s=0.2, peak_rss_bytes=0)
    result = Result(
        text, (0,) * len(text), 1, stop_reason, None, "m", None, "stock", {}, "", stats,
    )  # fmt: skip
    made: list[str] = []
    for token in tokens:
        if stream:
            made += writing.add([token])
        else:
            writing.collect([token])
    made += writing.finish(result) if stream else [writing.whole(result)]
    return [json.loads(line) for line in made]


CALL = '<tool_call>\n{"name": "%s", "arguments": {"a": [1, "ü"]}}\n</tool_call>'


@pytest.mark.parametrize("stream", [True, False])
def test_calls_are_objects_in_one_line(stream: bool):
    lines = lines_of(f"I look.\n{CALL % 'f'}\n{CALL % 'g'}", stream=stream)
    calls = [call for line in lines for call in line["message"].get("tool_calls", ())]
    assert [call["function"] for call in calls] == [
        {"index": i, "name": name, "arguments": {"a": [1, "ü"]}} for i, name in enumerate("fg")
    ]
    assert all(call["id"].startswith("call_") for call in calls)
    assert "".join(line["message"]["content"] for line in lines) == "I look."
    assert (lines[-1]["done"], lines[-1]["done_reason"]) == (True, "stop")
    if stream:
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]


# ---- errors and limits ----


def test_limits_are_those_of_the_other_api(target: Path, monkeypatch: pytest.MonkeyPatch):
    options = {"temperature": 0, "num_predict": 4000}
    with (
        serving(target, worker_options={"max_queue": 0}) as busy,
        ollama.Client(busy.url) as client,
    ):
        endless = client.generate("edgespec", "hello", stream=True, options=options)
        next(endless)
        for stream in (True, False):
            with pytest.raises(ollama.ResponseError, match="wait already") as full:
                list(client.chat("edgespec", HELLO, stream=stream))
            assert full.value.status_code == 503
        endless.close()
    with serving(target, worker_options={"max_seconds": 0.2}) as short, ollama.Client(short.url) as client:
        with pytest.raises(ollama.ResponseError, match="not complete within") as late:
            client.generate("edgespec", "hello", options=options)
        assert late.value.status_code == 504
        with pytest.raises(ollama.ResponseError, match="not complete within"):
            list(client.generate("edgespec", "hello", stream=True, options=options))


def test_a_stream_that_waits_sends_lines_that_add_nothing(served: Served, monkeypatch: pytest.MonkeyPatch):
    from edgespec.server.ollama import routes

    monkeypatch.setattr(routes, "ALIVE_S", 0.01)

    async def all_at_once() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
            long = {"model": "edgespec", "prompt": "hello", "stream": False}
            options = {"temperature": 0, "num_predict": 400}
            before = [
                asyncio.create_task(client.post("/api/generate", json=long | {"options": options}))
                for _ in range(4)
            ]
            while served.worker.n_waiting < 2:
                await asyncio.sleep(0.001)
            answer = await client.post(
                "/api/chat", json={"model": "edgespec", "messages": HELLO, "options": GREEDY}
            )
            assert [done.status_code for done in await asyncio.gather(*before)] == [200] * 4
            return [json.loads(line) for line in answer.text.splitlines()]

    lines = asyncio.run(all_at_once())
    assert lines[0]["message"] == {"role": "assistant", "content": ""}
    assert lines[-1]["done"] and lines[-1]["load_duration"] > 0


def test_the_gate_holds_for_these_routes_and_answers_in_their_form(served: Served):
    async def ask(limits: Limits, **headers: str) -> httpx.Response:
        transport = httpx.ASGITransport(Gate(served.app, limits))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8080") as client:
            return await client.post("/api/show", content=b'{"model": "edgespec"}', headers=headers)

    for headers, status, words in (
        ({}, 200, ""),
        ({"content-type": "application/x-www-form-urlencoded"}, 200, ""),
        ({"origin": "http://localhost:8080", "content-type": "text/plain"}, 200, ""),
        ({"origin": "http://evil.example", "content-type": "text/plain"}, 403, "no other web page"),
        ({"origin": "null", "content-type": "application/x-www-form-urlencoded"}, 403, "no other web page"),
        ({"sec-fetch-site": "cross-site", "content-type": "text/plain"}, 403, "no other web page"),
        ({"sec-fetch-site": "same-site"}, 403, "no other web page"),
        ({"host": "evil.example"}, 403, "localhost"),
    ):
        answer = asyncio.run(ask(Limits(), **headers))
        assert answer.status_code == status, headers
        if status != 200:
            assert set(answer.json()) == {"error"} and words in answer.json()["error"]
    keyed = Limits(api_key="right-key", loopback=False)
    answer = asyncio.run(ask(keyed))
    assert (answer.status_code, "API key" in answer.json()["error"]) == (401, True)
    assert asyncio.run(ask(keyed, authorization="Bearer right-key")).status_code == 200
    assert asyncio.run(ask(Limits(max_body=5))).json() == {"error": "the body is larger than 5 bytes"}


def test_these_routes_are_counted_as_the_others(served: Served):
    metrics = Metrics()

    async def ask() -> None:
        transport = httpx.ASGITransport(metrics.counting(served.app))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await client.get("/api/version")
            await client.post("/api/show", content=b'{"model": "edgespec"}')

    asyncio.run(ask())
    counted = metrics.render().decode()
    for route in ('method="GET",route="/api/version"', 'method="POST",route="/api/show"'):
        assert f'edgespec_requests_total{{{route},status="200"}} 1.0' in counted


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_curl_as_in_ollamas_documentation(served: Served):
    """No Content-Type is given there: curl says that it is a form."""

    def curl(*arguments: str) -> str:
        done = subprocess.run(
            ["curl", "-sS", *arguments], capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout

    body = '{"model": "edgespec", "prompt": "Why is the sky blue?", "options": {"num_predict": 3}}'
    lines = [json.loads(line) for line in curl(f"{served.url}/api/generate", "-d", body).splitlines()]
    assert lines[-1]["done"] and lines[-1]["eval_count"] == 3
    head = curl("-I", served.url)
    assert head.startswith("HTTP/1.1 200"), "clients look whether the server lives"
    for path in ("/api/tags", "/api/version", "/api/ps"):
        assert curl("-I", f"{served.url}{path}").startswith("HTTP/1.1 200")
    assert "error" in json.loads(
        curl("-X", "DELETE", f"{served.url}/api/delete", "-d", '{"model": "edgespec"}')
    )
    assert "error" in json.loads(curl(f"{served.url}/api/nothing"))
    assert "not valid JSON" in json.loads(curl(f"{served.url}/api/chat", "-d", "model=edgespec"))["error"]


# ---- docs/ollama.md ----


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)


def test_the_examples_of_the_page(served: Served, capsys: pytest.CaptureFixture[str]):
    (python,) = blocks("python")
    exec(compile(python.replace(ADDRESS, served.url), PAGE.name, "exec", dont_inherit=True), {})
    assert capsys.readouterr().out.strip()
    (bash,) = blocks("bash")
    start, _, ask = bash.partition("\n")
    assert start == "edgespec serve --port 11434" and ask.startswith(f"curl -sS {ADDRESS}/api/chat -d ")


def test_the_page_names_every_field_and_option():
    text = PAGE.read_text(encoding="utf-8")
    fields = {*ChatBody.model_fields, *GenerateBody.model_fields} - {"model", "stream", "debug_render_only"}
    named = fields - {"width", "height", "steps"} | {*HONOURED, *HARMLESS, *ONLY}
    assert [name for name in sorted(named) if f"`{name}`" not in text] == []
    links = re.findall(r"\]\(([^)#]+\.md)\)", text)
    assert links and [link for link in links if not (PAGE.parent / link).exists()] == []
