"""Every field of a request is honoured, harmless or refused by its name: none is dropped in silence."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from edgespec import Engine, SamplingParams
from edgespec.apps.server.request_fields import REFUSED
from edgespec.apps.server.request_schema import AssistantMessage, ChatRequest, CompletionRequest
from edgespec.decoding.sampling import TABLE
from server_app import Served, serving
from tiny_gguf import write_tiny_gguf

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK = {"model": "edgespec", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
GO_ON = {"model": "edgespec", "prompt": "hello", "max_tokens": 8}
GREEDY = {"temperature": 0}
BODIES = {CHAT: ASK | GREEDY, TEXT: GO_ON | GREEDY}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
GBNF = 'root ::= "yes" | "no"'
LARK = 'start: "yes" | "no"'


@pytest.fixture(scope="module")
def served(tiny_path: Path) -> Iterator[Served]:
    with serving(tiny_path) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with served.client() as client:
        yield client
    told = [line for line in served.log if "no effect" not in line]
    assert told == [], "nothing failed that is not the client's mistake"


def answered(client: httpx.Client, path: str, **fields: Any) -> Any:
    answer = client.post(path, json=BODIES[path] | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def said(body: Any) -> list[str]:
    return [c["text"] if "text" in c else c["message"]["content"] for c in body["choices"]]


def refused(client: httpx.Client, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    answer = client.post(path, json=BODIES[path] | fields)
    assert answer.status_code == 400, answer.text
    return dict(answer.json()["error"])


# ---- refused, and unknown ----


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_what_would_change_the_answer_is_refused_by_its_name(client: httpx.Client, path: str):
    plain = said(answered(client, path))
    for name in REFUSED:
        error = refused(client, path, {name: {"some": "value"}})
        assert error["param"] == name
        assert name in error["message"]
    for off in (None, False, 0, "", [], {}):
        assert said(answered(client, path, **dict.fromkeys(REFUSED, off))) == plain


ASK_OLLAMA = {
    "model": "edgespec",
    "messages": ASK["messages"],
    "stream": False,
    "options": {"num_predict": 8},
}
NEW: list[tuple[str, dict[str, Any], list[str]]] = [
    (CHAT, {"no_such_field": 0, "temprature": 0}, ["no_such_field", "temprature"]),
    (CHAT, {"response_format": {"type": "text", "schema": {}}}, ["schema"]),
    (
        TEXT,
        {"brand_new": {"a": 1}, "prompt_cache_retention_policy": "x"},
        ["brand_new", "prompt_cache_retention_policy"],
    ),
    (CHAT, {"messages": [{"role": "user", "content": "hello", "weight": 0}]}, ["weight"]),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello", "bold": True}]}]},
        ["bold"],
    ),
    (CHAT, {"stream_options": {"every": 1}}, ["every"]),
    (CHAT, {"response_format": {"type": "text", "lax": 1}}, ["lax"]),
    (CHAT, {"speculative": {"gamma": 0, "fancy": 3}}, ["fancy"]),
    ("/tokenize", {"content": "a", "brand_new": 1}, ["brand_new"]),
    ("/api/chat", ASK_OLLAMA | {"brand_new": 1}, ["brand_new"]),
    ("/api/chat", ASK_OLLAMA | {"options": {"fancy": 1, "num_predict": 8}}, ["options.fancy"]),
    ("/api/show", {"model": "edgespec", "brand_new": 1}, ["brand_new"]),
]


@pytest.mark.parametrize(("path", "fields", "names"), NEW)
def test_a_field_that_nobody_knows_is_named_and_has_no_effect(
    served: Served, path: str, fields: dict[str, Any], names: list[str]
):
    with served.client() as client:
        answer = client.post(path, json=BODIES.get(path, {}) | fields)
        assert answer.status_code == 200, answer.text
        assert answer.headers.get_list("X-Edgespec-Warning") == [f"no effect: {', '.join(names)}"]
        if path in BODIES:
            assert said(answer.json()) == said(answered(client, path))
    served.log.clear()


def test_names_of_new_fields_are_plain_text_and_told_once(served: Served):
    with served.client() as client:
        for _ in range(2):
            answer = client.post(CHAT, json=BODIES[CHAT] | {f"x\x1b[31m\n{i}": 1 for i in range(70)})
            (told,) = answer.headers.get_list("X-Edgespec-Warning")
            assert told.endswith(" and 6 more") and told.isprintable()
        (line,), served.log[:] = [*served.log], []
        assert line.isprintable()


def test_an_unknown_field_that_is_null_asks_for_nothing(client: httpx.Client):
    message = {"role": "user", "content": "hello", "unknown": None}
    body = answered(client, CHAT, unknown=None, messages=[message], speculative={"unknown": None})
    assert said(body) == said(answered(client, CHAT))


def test_an_answer_can_be_sent_back_as_it_came(client: httpx.Client):
    message = answered(client, CHAT)["choices"][0]["message"]
    extra = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    answered(client, CHAT, messages=[*ASK["messages"], message | extra, {"role": "user", "content": "on"}])


# ---- answers that are sent back ----

SAID = {"role": "assistant", "content": "yes"}
CALLED = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
REPLAYED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"reasoning": "hm"}, {"reasoning_content": "hm"}),
    ({"reasoning_content": "hm", "reasoning": "hm"}, {"reasoning_content": "hm"}),
    ({"thinking": "hm"}, {"reasoning_content": "hm"}),
    (
        {"reasoning_details": [{"type": "reasoning.text", "text": "h"}, {"type": "x", "summary": "m"}]},
        {"reasoning_content": "h\nm"},
    ),
    ({"reasoning_details": [{"type": "reasoning.encrypted", "data": "AAAA"}]}, {}),
    (
        {"thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}]},
        {"reasoning_content": "hm"},
    ),
    ({"refusal": "no"}, {}),
    ({"content": None, "refusal": "no"}, {"content": "no"}),
    ({"audio": {"id": "a"}}, {}),
    ({"content": None, "audio": {"id": "a", "transcript": "hello"}}, {"content": "hello"}),
    ({"annotations": [{"type": "url_citation"}], "provider_specific_fields": {"x": 1}, "id": "m"}, {}),
    (
        {"content": ["a", {"type": "text", "text": "b"}, {"type": "refusal", "refusal": "c"}]},
        {"content": "a\nb\nc"},
    ),
    (
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, "a"]},
        {"content": "a", "reasoning_content": "hm"},
    ),
    ({"content": []}, {"content": ""}),
    ({"function_call": {"name": "f", "arguments": '{"a": 1}'}}, {"tool_calls": [CALLED]}),
    (
        {"tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}, "extra_content": {}}]},
        {"tool_calls": [CALLED]},
    ),
    (
        {"tool_calls": [{"id": 7, "type": "custom", "custom": {"name": "f", "input": "x"}}]},
        {"tool_calls": [{"id": "7", "type": "function", "function": {"name": "f", "arguments": "x"}}]},
    ),
]


def test_an_answer_of_any_server_can_be_sent_back(client: httpx.Client):
    for given, wanted in REPLAYED:
        message = AssistantMessage.model_validate(SAID | given)
        assert message.model_dump(exclude_none=True, exclude={"tool_calls": {"__all__": {"id"}}}) == (
            AssistantMessage.model_validate(SAID | wanted).model_dump(
                exclude_none=True, exclude={"tool_calls": {"__all__": {"id"}}}
            )
        ), given
    answers = [ASK["messages"][0] if i % 2 else SAID | given for i, (given, _) in enumerate(REPLAYED)]
    answer = client.post(CHAT, json=BODIES[CHAT] | {"messages": [*answers, *ASK["messages"]]})
    assert answer.status_code == 200, answer.text
    unread = "annotations, provider_specific_fields, id"
    assert answer.headers["X-Edgespec-Warning"] == f"no effect: {unread}"


@pytest.mark.parametrize("path", [CHAT, "/api/chat", "/v1/messages"])
def test_unknown_fields_of_an_answer_are_named(client: httpx.Client, path: str):
    messages = [*ASK["messages"], SAID | {"brand_new": 1, "empty": None}, *ASK["messages"]]
    answer = client.post(path, json=ASKING[path] | {"messages": messages})
    assert answer.headers["X-Edgespec-Warning"] == "no effect: brand_new"


def test_what_is_not_read_of_an_answer_is_told(client: httpx.Client):
    hosted = {"content": [{"type": "image_url"}], "tool_calls": [{"type": "web_search"}]}
    messages = [*ASK["messages"], SAID | hosted, SAID | hosted, *ASK["messages"]]
    answer = client.post(CHAT, json=BODIES[CHAT] | {"messages": messages})
    assert answer.status_code == 200, answer.text
    for name in ("content of type image_url", "tool_calls without a function"):
        assert name in answer.headers["X-Edgespec-Warning"]
    assert refused(client, CHAT, {"messages": [SAID | {"content": 5}]})["param"] == "messages"


def test_results_of_the_older_role(client: httpx.Client):
    older = [
        SAID | {"content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "5"},
    ]
    newer = [
        SAID | {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "name": "f", "content": "5"},
    ]
    assert said(answered(client, CHAT, messages=[*ASK["messages"], *older])) == said(
        answered(client, CHAT, messages=[*ASK["messages"], *newer])
    )


# ---- tools in the form of another API ----

TOOLS: dict[str, Any] = {
    CHAT: {"type": "function", "function": {"name": "f", "parameters": {}}},
    "/v1/responses": {"type": "function", "name": "f", "parameters": {}},
    "/v1/messages": {"name": "f", "input_schema": {}},
    "": {"name": "f", "inputSchema": {}},  # MCP's
}
TOOLS["/api/chat"] = TOOLS[CHAT]
ASKING = dict.fromkeys((CHAT, "/v1/messages"), ASK) | {
    "/v1/responses": {"model": "edgespec", "input": "a"},
    "/api/chat": {"model": "edgespec", "messages": ASK["messages"]},
}


@pytest.mark.parametrize("path", ASKING)
def test_a_tool_in_the_form_of_another_api_is_refused(client: httpx.Client, path: str):
    for other, tool in TOOLS.items():
        answer = client.post(path, json=ASKING[path] | {"tools": [tool]})
        assert answer.status_code == 400, (other, answer.text)
        assert ("tools.0" in answer.text) is (tool != TOOLS[path]), (other, answer.text)


# ---- constraints ----

RATING = {
    "type": "object",
    "properties": {"rating": {"type": "integer", "minimum": 1, "maximum": 5}},
    "required": ["rating"],
}
CONSTRAINTS: list[tuple[dict[str, Any], dict[str, Any] | list[str] | str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, SCHEMA),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, SCHEMA),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, SCHEMA),
    ({"response_format": {"type": "json_schema", "name": "x", "schema": RATING, "strict": True}}, RATING),
    ({"json_schema": SCHEMA}, SCHEMA),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": RATING, "strict": True}}}, RATING),
    ({"structured_outputs": {"json": SCHEMA}}, SCHEMA),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, SCHEMA),
    ({"structured_outputs": {"choice": ["up", "do wn", 'a"b']}}, ["up", "do wn", 'a"b']),
    ({"grammar": GBNF}, ["yes", "no"]),
    ({"structured_outputs": {"grammar": GBNF}}, ["yes", "no"]),
    ({"grammar": LARK}, ["yes", "no"]),
    ({"structured_outputs": {"regex": "(up|down)[.]"}}, "(up|down)[.]"),
]


@pytest.mark.parametrize(("fields", "allowed"), CONSTRAINTS)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_constraint_is_kept_whatever_it_is_called(
    client: httpx.Client, path: str, fields: dict[str, Any], allowed: Any
):
    for seed in range(3):
        (text,) = said(answered(client, path, max_tokens=40, temperature=1, seed=seed, **fields))
        if isinstance(allowed, list):
            assert text in allowed
        elif isinstance(allowed, str):
            assert re.fullmatch(allowed, text)
        else:
            jsonschema.validate(json.loads(text), allowed)


@pytest.mark.parametrize(
    "fields", [{"grammar": ""}, {"response_format": {"type": "text"}}, {"grammar": None}]
)
def test_a_constraint_that_is_none(client: httpx.Client, fields: dict[str, Any]):
    assert said(answered(client, CHAT, **fields)) == said(answered(client, CHAT))


UNENFORCED = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "uniqueItems": True}


def test_what_a_schema_cannot_enforce_is_told_or_refused(client: httpx.Client):
    for strict in (None, False):
        wanted = {"name": "x", "schema": UNENFORCED, "strict": strict}
        fields = {"response_format": {"type": "json_schema", "json_schema": wanted}}
        answer = client.post(CHAT, json=BODIES[CHAT] | fields)
        assert answer.status_code == 200, answer.text
        line = 'response_format: not enforced: "uniqueItems"'
        assert answer.headers["X-Edgespec-Warning"] == line
        assert answer.json()["usage"]["edgespec"]["warnings"] == [line]
        with client.stream("POST", CHAT, json=BODIES[CHAT] | fields | {"stream": True}) as stream:
            assert "uniqueItems" in stream.headers["X-Edgespec-Warning"]
            stream.read()
    strictly = {"type": "json_schema", "json_schema": {"name": "x", "schema": UNENFORCED, "strict": True}}
    error = refused(client, CHAT, {"response_format": strictly})
    assert error["message"] == 'response_format: cannot be enforced: "uniqueItems"'
    plain = client.post(CHAT, json=BODIES[CHAT])
    assert "X-Edgespec-Warning" not in plain.headers
    assert "warnings" not in plain.json()["usage"]["edgespec"]


# ---- sampling of other servers ----


def test_the_end_of_the_text_can_be_forbidden(tmp_path: Path):
    with serving(write_tiny_gguf(tmp_path / "ends.gguf", seed=1)) as other:
        eog = other.engine.target.eog_tokens[0]
        fields = {"logit_bias": {str(eog): 100}, "n_predict": 8, "max_tokens": None}
        with other.client() as client:
            assert answered(client, CHAT, **fields)["choices"][0]["finish_reason"] == "stop"
            kept = answered(client, CHAT, ignore_eos=True, **fields)
        assert kept["choices"][0]["finish_reason"] == "length"
        assert kept["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"repetition_penalty": 1.5}, {"repeat_penalty": 1.5, "repeat_last_n": -1}),
        ({"n_predict": 5, "max_tokens": None}, {"max_tokens": 5}),
        ({"top_k": -1, "temperature": 1, "seed": 1}, {"top_k": 0, "temperature": 1, "seed": 1}),
        ({"typical_p": 1, "temperature": 1, "seed": 1}, {"temperature": 1, "seed": 1}),
    ],
)
def test_two_names_of_one_thing(client: httpx.Client, one: dict[str, Any], other: dict[str, Any]):
    assert said(answered(client, TEXT, **one)) == said(answered(client, TEXT, **other))


@pytest.mark.parametrize(
    "fields",
    [
        {"typical_p": 0.1},
        {"top_n_sigma": 1.5},
        {"xtc_probability": 1, "xtc_threshold": 0.001},
        {"dynatemp_range": 1.9, "dynatemp_exponent": 9},
        {"dry_multiplier": 900, "dry_allowed_length": 0, "dry_base": 1, "dry_sequence_breakers": []},
    ],
    ids=str,
)
def test_a_sampler_of_other_servers_reaches_the_engine(
    client: httpx.Client, served: Served, fields: dict[str, Any]
):
    """A bias on two tokens makes the text repeat itself, for DRY."""
    wide = {"temperature": 2, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 3, "max_tokens": 24}
    wide |= {"logit_bias": {"70": 9, "71": 9}}
    got = said(answered(client, TEXT, **wide, **fields))
    assert got != said(answered(client, TEXT, **wide))
    names = {option.request_name(name): name for name, option in TABLE.items()}
    params = SamplingParams(
        temperature=2, top_k=0, top_p=1, min_p=0, logit_bias={70: 9, 71: 9},
        **{names[name]: value for name, value in fields.items()},
    )  # fmt: skip
    with Engine(served.engine.target.path, drafter="none", profile=False) as alone:
        prompt = alone.target.tokenize("hello", add_special=True, parse_special=True)
        assert got == [alone.generate(prompt, params=params, n_predict=24, seed=3).text]


def test_tokens_that_end_a_text(client: httpx.Client, served: Served):
    model = served.engine.target
    prompt = model.tokenize("hello", add_special=True, parse_special=True)
    sampled = {"params": SamplingParams(temperature=0), "n_predict": 24}
    with Engine(model.path, drafter="none", profile=False) as alone:
        ids = alone.generate(prompt, **sampled).token_ids
        at = next(i for i in range(3, len(ids)) if ids[i] not in ids[:i])
        expected = alone.generate(prompt, **sampled, stop_tokens=[ids[at]])
    assert (expected.token_ids, expected.stop_reason) == (ids[:at], "eog")
    for drafter in ("none", "suffix"):
        fields = {"max_tokens": 24, "stop_token_ids": [ids[at]], "speculative": {"drafter": drafter}}
        body = answered(client, TEXT, **fields)
        (choice,) = body["choices"]
        assert (choice["text"], choice["finish_reason"]) == (expected.text, "stop")
        assert body["usage"]["completion_tokens"] == at


# ---- several answers ----


@pytest.mark.parametrize("parallel", [1, 3])
def test_several_answers_differ_and_come_again(tiny_path: Path, parallel: int):
    options = {"parallel": parallel, "n_ctx": 256}
    with (
        serving(tiny_path, engine_options=options) as other,
        openai.OpenAI(base_url=f"{other.url}/v1", api_key="none", max_retries=0) as client,
    ):
        fields: dict[str, Any] = ASK | {"temperature": 1.5, "seed": 11}
        one = client.chat.completions.create(**fields)
        four = client.chat.completions.create(**fields, n=4)
        texts = [choice.message.content for choice in four.choices]
        assert [choice.index for choice in four.choices] == [0, 1, 2, 3]
        assert texts[0] == one.choices[0].message.content, "the first is the one of n = 1"
        assert len({*texts}) == 4
        again = client.chat.completions.create(**fields, n=4)
        assert [choice.message.content for choice in again.choices] == texts
        assert four.usage and one.usage
        assert four.usage.prompt_tokens == one.usage.prompt_tokens, "the prompt counts once"
        assert four.usage.completion_tokens == 4 * 8
        streamed = [""] * 4
        reasons: dict[int, str] = {}
        usage = None
        chunks = client.chat.completions.create(
            **fields, n=4, stream=True, stream_options={"include_usage": True}
        )
        for chunk in chunks:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
        assert streamed == texts
        assert reasons == dict.fromkeys(range(4), "length")
        assert usage and usage.completion_tokens == 4 * 8
        assert other.log == []


@pytest.mark.parametrize("parallel", [1, 4])
def test_a_prompt_is_read_once_for_all_of_its_answers(tiny_path: Path, parallel: int):
    prompts = [f"{i} " + "the quick brown fox jumps over the lazy dog " * 4 for i in range(2)]
    with serving(tiny_path, engine_options={"parallel": parallel, "n_ctx": 512}) as other:
        with other.client() as client:
            body = answered(client, TEXT, prompt=prompts, n=4, temperature=1, seed=1, max_tokens=40)
            metrics = client.get("/metrics").text
        read, cached = (
            float(re.search(rf'edgespec_prompt_tokens_total{{source="{source}"}} (.*)', metrics)[1])
            for source in ("read", "cache")
        )
        n_prompt = body["usage"]["prompt_tokens"]
        assert n_prompt > 100 and read + cached == 4 * n_prompt
        assert read <= n_prompt + 6, "each other answer reads the last token, for its logits"


def test_several_prompts_are_answered_in_their_order(client: httpx.Client, served: Served):
    prompts = ["hello", "the quick", "brown fox jumps"]
    alone = [answered(client, TEXT, prompt=prompt, seed=5, temperature=1) for prompt in prompts]
    body = answered(client, TEXT, prompt=prompts, seed=5, temperature=1)
    assert said(body) == [said(one)[0] for one in alone]
    assert body["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)
    tokens = [served.engine.target.tokenize(p, add_special=True, parse_special=True) for p in prompts]
    assert said(answered(client, TEXT, prompt=tokens, seed=5, temperature=1)) == said(body)
    each = answered(client, TEXT, prompt=prompts[:2], n=2, seed=5, temperature=1)
    assert [choice["index"] for choice in each["choices"]] == [0, 1, 2, 3]
    assert said(each)[0::2] == said(body)[:2], "the choices of a prompt follow each other"


def test_the_best_of_several_is_the_likeliest_by_token(client: httpx.Client):
    fields = {"seed": 9, "temperature": 2, "top_k": 0, "top_p": 1, "min_p": 0, "logprobs": 0}
    every = answered(client, TEXT, n=5, **fields)["choices"]
    ranked = sorted(every, key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    best = answered(client, TEXT, n=2, best_of=5, **fields)
    assert said(best) == [choice["text"] for choice in ranked[:2]]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert best["usage"]["completion_tokens"] == 5 * 8, "all that was written counts"
    del fields["logprobs"]
    plain = answered(client, TEXT, best_of=5, **fields)
    assert said(plain) == [ranked[0]["text"]]
    assert plain["choices"][0]["logprobs"] is None


def test_many_answers_need_no_more_room_in_the_queue_than_one(tiny_path: Path):
    with serving(tiny_path, worker_options={"max_queue": 0}) as other:
        with other.client() as client:
            assert len(answered(client, TEXT, prompt=["a", "b", "c", "d"], n=2)["choices"]) == 8
        assert other.log == []


# ---- the page of the fields ----


def test_the_documentation_names_every_field():
    page = (Path(__file__).parents[3] / "docs" / "server.md").read_text()
    in_tables = {
        *REFUSED,
        *(option.request_name(name) for name, option in TABLE.items()),
    }  # of docs/options.md
    named = {*ChatRequest.model_fields, *CompletionRequest.model_fields} - in_tables
    missing = sorted(name for name in named if f"`{name}`" not in page and f"`{name}." not in page)
    assert missing == []
