"""Answers by an engine of this process: the server's own, several at once, as room allows."""

from __future__ import annotations

import json

import pytest

from batch_parts import write_lines
from edgespec import Engine
from edgespec.apps.batch.commands.batch import run_batch
from edgespec.apps.batch.lines import CHAT, TEXT, BatchRequest, open_input
from edgespec.apps.batch.local import LocalWriter, PromptDefaults
from edgespec.apps.server.request_reader import Service
from server_app import serving
from tiny_gguf import write_tiny_gguf
from worker_jobs import raising

HELLO = [{"role": "user", "content": "the quick brown fox"}]
GREEDY = {"model": "edgespec", "temperature": 0, "max_tokens": 12, "speculative": {"drafter": "none"}}


@pytest.fixture(scope="module")
def engine(tiny_path):
    with Engine(tiny_path, drafter="none", profile=False) as engine:
        yield engine


class Kept:
    """Results as a list and a dictionary."""

    def __init__(self):
        self.order = []
        self.answers = {}

    n_failed = 0

    @property
    def n_done(self):
        return len(self.order)

    def has(self, request):
        return request.custom_id in self.answers

    def add(self, request, answer):
        assert request.custom_id not in self.answers
        self.order.append(request.custom_id)
        self.answers[request.custom_id] = answer.status, json.loads(answer.body)

    def sync(self):
        pass


def run(engine, requests, **options):
    log = []
    service = Service.of(engine, **options.pop("service", {}))
    writer = LocalWriter(engine, service, "fp", log=log.append, **options)
    kept = Kept()
    run_batch(iter(requests), writer, kept)
    assert writer.n_running == 0
    return kept, writer, log


def plain(engine, fields, **options):
    """Answer one line without url; return its status and body."""
    kept, *_ = run(engine, [BatchRequest(0, "a", "", fields)], **options)
    return kept.answers["a"]


def text_of(answer):
    status, body = answer
    assert status == 200, body
    choice = body["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def comparable(body):
    """Return an answer without what differs each time: names, times, what the cache knew."""
    body = json.loads(json.dumps(body))
    for name in ("id", "created", "system_fingerprint"):
        body.pop(name, None)
    if "usage" in body:
        del body["usage"]["edgespec"], body["usage"]["prompt_tokens_details"]
    return body


def test_a_line_gets_what_the_server_answers(tiny_path, engine):
    asked = [
        (CHAT, {**GREEDY, "messages": HELLO}),
        (CHAT, {**GREEDY, "messages": HELLO, "logprobs": True, "top_logprobs": 3}),
        (CHAT, {**GREEDY, "messages": HELLO, "stop": ["a", "e"]}),
        (CHAT, {**GREEDY, "messages": HELLO, "response_format": {"type": "json_object"}, "max_tokens": 40}),
        (CHAT, {**GREEDY, "messages": HELLO, "temperature": 0.9, "seed": 7}),
        (TEXT, {**GREEDY, "prompt": "abc"}),
        (TEXT, {**GREEDY, "prompt": [5, 6, 7], "logprobs": 2}),
        (TEXT, {"model": "edgespec", "prompt": "abc", "seed": -1}),
        (CHAT, {"messages": HELLO, "temperature": 0, "max_tokens": 12}),
        (CHAT, {**GREEDY, "messages": HELLO, "model": "gpt-4o"}),
        (CHAT, {**GREEDY, "messages": HELLO, "temperature": "hot"}),
        (CHAT, {**GREEDY, "messages": HELLO, "n": 2}),
        (CHAT, {**GREEDY, "messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]}),
        (CHAT, {**GREEDY, "messages": []}),
        (CHAT, {**GREEDY, "messages": [{"role": "user", "content": "x " * 600}]}),
        (TEXT, {**GREEDY, "prompt": [1 << 20]}),
        (TEXT, {**GREEDY, "prompt": "abc", "logit_bias": {"999999": 1}}),
    ]
    requests = [BatchRequest(i, str(i), url, body) for i, (url, body) in enumerate(asked)]
    kept, writer, log = run(engine, requests)
    # The last digits of llama.cpp's logarithms depend on how a text was cut into passes: here alike in both.
    with serving(tiny_path, engine_options={"prefix_cache": None}) as served, served.client() as client:
        for i, (url, body) in enumerate(asked):
            answer = client.post(url, json=body)
            status, found = kept.answers[str(i)]
            assert status == answer.status_code, (body, found)
            assert comparable(found) == comparable(answer.json()), body
    assert [kept.answers[str(i)][0] for i in range(9)] == [200] * 9
    assert log == []
    assert writer.n_tokens == sum(
        body["usage"]["completion_tokens"] for status, body in kept.answers.values() if status == 200
    )


def test_a_field_that_nobody_knows_is_told_once(engine):
    bodies = [{**GREEDY, "messages": HELLO} | more for more in ({}, {"brand_new": 1}, {"brand_new": 2})]
    requests = [BatchRequest(i, str(i), CHAT, body) for i, body in enumerate(bodies)]
    requests.append(BatchRequest(3, "3", CHAT, {**bodies[0], "min_tokens": 3}))
    kept, _, log = run(engine, requests)
    assert [text_of(kept.answers[str(i)]) for i in range(3)] == [text_of(kept.answers["0"])] * 3
    assert kept.answers["3"][0] == 400
    assert log == [f"{CHAT}: no effect: brand_new"]


def test_a_plain_prompt_is_a_chat_where_the_model_has_a_template(tmp_path, engine):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "abc"}]
    kept, *_ = run(engine, [BatchRequest(0, "a", CHAT, {**GREEDY, "messages": chat})])
    wanted = text_of(kept.answers["a"])
    greedy = PromptDefaults(system="Be brief.", n_predict=12, temp=0)
    assert text_of(plain(engine, {"prompt": "abc"}, defaults=greedy)) == wanted
    fields = {"prompt": "abc", "system": "Be brief.", "max_tokens": 12, "temperature": 0}
    assert text_of(plain(engine, fields)) == wanted
    assert text_of(plain(engine, fields, defaults=PromptDefaults(system="x", n_predict=1, temp=2))) == wanted
    assert text_of(plain(engine, {"messages": chat}, defaults=greedy)) == wanted
    no_template = write_tiny_gguf(tmp_path / "base.gguf", seed=1, chat_template=None)
    with Engine(no_template, drafter="none", profile=False) as base:
        status, body = plain(base, {"prompt": "abc", "temperature": 0, "max_tokens": 5})
        assert (status, body["object"], body["usage"]["completion_tokens"]) == (200, "text_completion", 5)
        status, body = plain(base, {"prompt": "abc", "system": "x"})
        assert status == 400
        assert "no chat template" in body["error"]["message"]


def test_a_default_seed_makes_the_answer_reproducible(engine):
    texts = {
        text_of(plain(engine, {"prompt": "abc"}, defaults=PromptDefaults(n_predict=30, seed=5))) for _ in "ab"
    }
    assert len(texts) == 1


def test_what_never_fits_into_the_cache_is_an_error_of_its_line(tiny_path):
    requests = [
        BatchRequest(i, name, TEXT, {**GREEDY, "prompt": [5] * n})
        for i, (name, n) in enumerate((("short", 3), ("long", 400), ("after", 3)))
    ]
    with Engine(tiny_path, drafter="none", parallel=3, n_cells=256, profile=False) as engine:
        kept, *_ = run(engine, requests)
    status, body = kept.answers["long"]
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 256 tokens" in body["error"]["message"]
    assert kept.answers["short"][0] == kept.answers["after"][0] == 200


class Failing(Engine):
    """An engine in which texts of prompts of these lengths fail."""

    def stream(self, prompt, options=None, **keywords):
        if len(prompt) in (1, 4):
            keywords["on_step"] = raising(RuntimeError("the text /secret/path failed"))
        return super().stream(prompt, options, **keywords)


def test_a_text_that_fails_is_an_error_of_its_line_and_its_place_is_taken(tiny_path):
    asked = {**GREEDY, "speculative": {"drafter": "suffix"}}
    requests = [BatchRequest(i, f"c{i}", TEXT, {**asked, "prompt": [5] * (i + 1)}) for i in range(6)]
    with Failing(tiny_path, drafter="suffix", parallel=2, profile=False) as engine:
        kept, _, log = run(engine, requests)
    assert [kept.answers[f"c{i}"][0] for i in range(6)] == [500, 200, 200, 500, 200, 200]
    assert "secret" not in json.dumps(kept.answers["c0"])  # the log has it
    assert log == ["RuntimeError: the text /secret/path failed"] * 2


def test_the_context_asked_for_limits_a_line(engine):
    kept, *_ = run(
        engine, [BatchRequest(0, "a", TEXT, {**GREEDY, "prompt": [5] * 50})], service={"n_ctx": 40}
    )
    assert kept.answers["a"][1]["error"]["code"] == "context_length_exceeded"


def test_texts_share_the_passes_of_a_real_engine(tmp_path, tiny_path, tiny_draft_path, engine):
    """Each gets what it gets alone, with a cache for all of them and with one in which some have to wait."""
    lines = [{"prompt": "the fox and " * (1 + i % 4), "custom_id": f"c{i}"} for i in range(14)]
    lines.insert(3, {"prompt": "x " * 600, "custom_id": "long"})
    found = open_input(write_lines(tmp_path / "in.jsonl", lines), None)
    defaults = PromptDefaults(n_predict=12, temp=0)
    wanted, *_ = run(engine, found.requests(), defaults=defaults)
    for options in ({"drafter": "none"}, {"draft": tiny_draft_path}, {"drafter": "none", "n_cells": 256}):
        with Engine(tiny_path, **options, parallel=5, profile=False, prefix_cache=0) as shared:
            kept, _, log = run(shared, found.requests(), defaults=defaults)
        assert log == []
        for name, answer in wanted.answers.items():
            assert kept.answers[name][0] == answer[0] == (400 if name == "long" else 200)
            if name != "long":
                assert text_of(kept.answers[name]) == text_of(answer)
