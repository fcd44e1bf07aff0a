"""The official `ollama` client: sync, async, streams, formats, probabilities."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import ollama
import pytest
from pydantic import BaseModel

from ollama_requests import DURATIONS, GREEDY, HELLO
from server_app import Served, serving
from tiny_gguf import write_tiny_gguf

pytestmark = pytest.mark.proof


class Friend(BaseModel):
    """An answer's form."""

    name: str
    grown: bool


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


def test_a_suffix_is_what_follows_the_gap(tmp_path: Path, client: ollama.Client):
    before, after = "def f(a):\n    return ", "\n\nprint(f(1))"
    kinds = {"pre": 260, "suf": 261, "mid": 262}
    path = write_tiny_gguf(
        tmp_path / "fim.gguf",
        seed=1,
        texts={token: f"<|{kind}|>" for kind, token in kinds.items()},
        kinds=dict.fromkeys(kinds.values(), 3),  # control tokens
        extra={f"tokenizer.ggml.fim_{kind}_token_id": token for kind, token in kinds.items()},
    )
    with serving(path) as served, ollama.Client(served.url) as filling:
        assert filling.show("edgespec").capabilities == ["completion", "insert"]
        filled = filling.generate("edgespec", before, suffix=after, options=GREEDY)
        raw = filling.generate("edgespec", f"<|pre|>{before}<|suf|>{after}<|mid|>", raw=True, options=GREEDY)
        assert (filled.response, filled.prompt_eval_count) == (raw.response, raw.prompt_eval_count)
        with pytest.raises(ollama.ResponseError, match="suffix does not support system"):
            filling.generate("edgespec", before, suffix=after, system="be brief")
    with pytest.raises(ollama.ResponseError, match=r"^suffix: tiny 1 cannot fill in the middle"):
        client.generate("edgespec", before, suffix=after)
