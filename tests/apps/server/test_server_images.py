"""Images in requests of every API, by the official clients: read, encoded once, refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import msgspec
import ollama
import openai
import pytest

from edgespec.cli.local_run import PATH, RunRequest, read_parts
from pictures import data_url, image_url, in_base64, png
from server_app import Served, serving
from tiny_vocabulary import CHAT_TEMPLATE
from towers import write_tower

WORDS = "What is this?"
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of a tiny model with an encoder."""
    target, _ = write_tower("gemma3", tmp_path_factory.mktemp("tower"))
    with serving(target, engine_options={"chat_template": CHAT_TEMPLATE}) as running:
        yield running


def openai_chat(url: str, images: list[bytes]) -> tuple[str | None, int]:
    parts: Any = [*map(image_url, images)]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x")
    made = client.chat.completions.create(
        model="edgespec",
        messages=[{"role": "user", "content": [*parts, {"type": "text", "text": WORDS}]}],
        max_tokens=8,
        temperature=0,
    )
    return made.choices[0].message.content, made.usage.prompt_tokens if made.usage else 0


def responses(url: str, images: list[bytes]) -> tuple[str | None, int]:
    parts: Any = [{"type": "input_image", "image_url": data_url(one)} for one in images]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x")
    made = client.responses.create(
        model="edgespec",
        input=[{"role": "user", "content": [*parts, {"type": "input_text", "text": WORDS}]}],
        max_output_tokens=16,
        temperature=0,
    )
    return made.output_text, made.usage.input_tokens if made.usage else 0


def messages(url: str, images: list[bytes]) -> tuple[str | None, int]:
    parts: Any = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": in_base64(one)}}
        for one in images
    ]
    asked: Any = [{"role": "user", "content": [*parts, {"type": "text", "text": WORDS}]}]
    client = anthropic.Anthropic(base_url=url, api_key="x")
    made = client.messages.create(model="edgespec", messages=asked, max_tokens=8, extra_body=GREEDY)
    counted = client.messages.count_tokens(model="edgespec", messages=asked).input_tokens
    usage = made.usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    return "".join(block.text for block in made.content if block.type == "text"), counted


def ollama_chat(url: str, images: list[bytes]) -> tuple[str | None, int]:
    asked: Any = [{"role": "user", "content": WORDS, "images": images}]
    made = ollama.Client(url).chat("edgespec", asked, options={"num_predict": 8, "temperature": 0})
    return made.message.content, made.prompt_eval_count or 0


def ollama_generate(url: str, images: list[bytes]) -> tuple[str | None, int]:
    options = {"num_predict": 8, "temperature": 0}
    made = ollama.Client(url).generate("edgespec", WORDS, images=images, options=options)
    return made.response, made.prompt_eval_count or 0


@pytest.mark.proof
def test_official_clients_send_an_image_that_is_encoded_once(seeing: Served) -> None:
    """All of them send the same conversation: its image is encoded for the first, another one for itself."""
    red, blue, encoder = png("red"), png("blue"), seeing.engine._encoder
    asks = (openai_chat, messages, ollama_chat, ollama_generate)
    text, n_tokens = asks[0](seeing.url, [red])
    assert text and [ask(seeing.url, [red]) for ask in asks] == [(text, n_tokens)] * 4
    assert str(responses(seeing.url, [red])[0]).startswith(text)
    assert encoder.n_encoded == 1
    assert openai_chat(seeing.url, [red, blue])[1] > n_tokens + 1
    assert encoder.n_encoded == 2


def ask(seeing: Served, parts: list[Any], **fields: Any) -> httpx.Response:
    body = {"model": "edgespec", "max_tokens": 12, "temperature": 0} | fields
    body.setdefault("messages", [{"role": "user", "content": [*parts, {"type": "text", "text": WORDS}]}])
    return httpx.post(f"{seeing.url}/v1/chat/completions", json=body, timeout=60)


def test_run_is_answered_with_images(seeing: Served) -> None:
    asked = RunRequest(prompt=WORDS, images=(png("red"),), params={"temperature": 0.0}, n_predict=8)
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{seeing.url}{PATH}", content=msgspec.json.encode(asked), headers=headers)
    last = [*read_parts(iter(answer.content.splitlines()))][-1]
    assert json.loads(bytes(last.result))["text"] == openai_chat(seeing.url, [png("red")])[0]
    assert last.prompt and min(last.prompt) >= 0


CITY = {"type": "object", "properties": {"city": {"enum": ["Bath", "York"]}}, "required": ["city"]}


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2, "temperature": 1, "seed": 1},
        {"stream": True},
        {"response_format": {"type": "json_schema", "schema": CITY}, "max_tokens": 60},
        {"logprobs": True, "top_logprobs": 2},
        {"repeat_penalty": 1.3},
    ],
)
def test_images_go_with_other_fields(seeing: Served, fields: dict[str, Any]) -> None:
    answer = ask(seeing, [image_url(png("red"))], **fields)
    assert answer.status_code == 200 and "error" not in answer.text
    if "response_format" in fields:
        assert json.loads(answer.json()["choices"][0]["message"]["content"])["city"] in ("Bath", "York")


def test_an_image_of_a_tool_and_one_before_a_begun_answer_are_read(seeing: Served) -> None:
    def n_read(content: Any) -> int:
        told = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": CALLED}]},
            {"role": "tool", "tool_call_id": "a", "content": content},
            {"role": "assistant", "content": "It is"},
        ]
        answer = ask(seeing, [], messages=told, continue_final_message=True)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens"])

    one = ask(seeing, [image_url(png("red"))]).json()["usage"]["prompt_tokens"]
    n_rows = one - ask(seeing, []).json()["usage"]["prompt_tokens"]
    assert n_rows > 1
    words = {"type": "text", "text": WORDS}
    assert n_read([image_url(png("red")), words]) == n_read([words]) + 2 * n_rows


CALLED = {"name": "look", "arguments": "{}"}


@pytest.mark.parametrize(
    ("images", "named"),
    [([b"hello"], "image 1"), ([png("red"), png("red")[:-30]], "image 2"), ([png("red")] * 65, "65 images")],
)
def test_what_is_no_image_is_named(seeing: Served, images: list[bytes], named: str) -> None:
    answer = ask(seeing, [*map(image_url, images)])
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages") and named in error["message"]
    told = {"model": "edgespec", "prompt": "x", "images": [*map(in_base64, images)]}
    answer = httpx.post(f"{seeing.url}/api/generate", json=told, timeout=60)
    assert answer.status_code == 400 and answer.json()["error"].startswith("images: ")


def test_what_reads_images_says_so(seeing: Served, served: Served) -> None:
    for server, sees in ((seeing, True), (served, False)):
        with server.client() as client:
            assert client.get("/v1/models").json()["data"][0]["edgespec"]["vision"] is sees
            assert client.get("/props").json()["modalities"] == {"vision": sees, "audio": False}
            shown = client.post("/api/show", json={"model": "edgespec"}).json()["capabilities"]
            assert ("vision" in shown) is sees
