"""Thoughts that end at their budget, over the wire: answers, streams, usage; any drafter writes the same."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from ollama_requests import HELLO
from server_app import Served, serving
from tiny_gguf import write_tiny_gguf

BODY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
)
THINKS = BODY + "<think>\n{% endif %}{# </think> #}"
NEVER = BODY + "{% endif %}"
LAST_WORDS = "\n\nI have thought about this for long enough, and answer now."


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Served]]:
    folder = tmp_path_factory.mktemp("thinking")
    with contextlib.ExitStack() as stack:
        found = {}
        for name, template in (("thinks", THINKS), ("never", NEVER)):
            target = write_tiny_gguf(folder / f"{name}.gguf", seed=1, chat_template=template)
            draft = write_tiny_gguf(folder / f"{name}-draft.gguf", seed=2, n_layer=1)
            found[name] = stack.enter_context(serving(target, draft))
        yield found


def chat(served: Served, messages: Any = HELLO, **fields: Any) -> dict[str, Any]:
    body = {"model": "edgespec", "messages": messages, "temperature": 0, "max_tokens": 90} | fields
    with served.client() as client:
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def said(answer: dict[str, Any], index: int = 0) -> tuple[str, str]:
    message = answer["choices"][index]["message"]
    return message.get("reasoning_content", ""), message["content"]


def test_a_thought_is_the_usual_one_up_to_its_budget(models: dict[str, Served]):
    served = models["thinks"]
    usual = chat(served, max_tokens=20)
    assert said(usual)[1] == "", "the thoughts of this model do not end"
    assert usual["usage"]["completion_tokens_details"]["reasoning_tokens"] in (19, 20)  # space is left out
    n_last = len(served.engine.target.tokenize(LAST_WORDS, add_special=False, parse_special=True))
    for n in (1, 5, 18):
        answer = chat(served, reasoning_budget=n)
        thought, text = said(answer)
        assert thought.endswith(LAST_WORDS)
        assert said(usual)[0].startswith(thought.removesuffix(LAST_WORDS).rstrip())
        assert text
        assert abs(answer["usage"]["completion_tokens_details"]["reasoning_tokens"] - n - n_last) <= 2
        assert answer["usage"]["edgespec"]["sources"]["forced"]["accepted"] > 0
    assert chat(served, reasoning_budget=-1, max_tokens=20)["choices"] == usual["choices"]


def test_no_drafter_changes_the_text(models: dict[str, Served]):
    for seed in range(3):
        fields = {"reasoning_budget": 6, "seed": seed, "n": 2, "temperature": 2, "top_k": 0, "min_p": 0}
        plain = chat(models["thinks"], speculative={"drafter": "none"}, **fields)
        for drafter in ("auto", "model", "suffix", "chain"):
            drafted = chat(models["thinks"], speculative={"drafter": drafter}, **fields)
            assert drafted["choices"] == plain["choices"]
        assert said(plain, 0) != said(plain, 1)
        assert all(said(plain, i)[0].endswith(LAST_WORDS) for i in (0, 1))


def test_a_schema_holds_after_a_thought_that_is_ended(models: dict[str, Served]):
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    thought, text = said(chat(models["thinks"], response_format=form, reasoning_budget=4))
    assert thought.endswith(LAST_WORDS)
    assert json.loads(text)["a"] in ("x", "y")
    thought, text = said(chat(models["thinks"], response_format=form, reasoning_effort="none"))
    assert (thought, json.loads(text)["a"] in ("x", "y")) == ("", True)


def test_a_thought_that_is_gone_on_with_is_limited(models: dict[str, Served]):
    messages = [*HELLO, {"role": "assistant", "content": "<think>Hm, so"}]
    fields = {"continue_final_message": True, "reasoning_budget": 3}
    assert said(chat(models["thinks"], messages, **fields))[0].endswith(LAST_WORDS)
    messages[-1] = {"role": "assistant", "content": "<think>Hm</think>So"}
    assert LAST_WORDS not in "".join(said(chat(models["thinks"], messages, **fields)))


def test_a_stream_of_a_thought_that_is_ended(models: dict[str, Served]):
    body = {
        "model": "edgespec", "messages": HELLO, "temperature": 0, "max_tokens": 90, "reasoning_budget": 5,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    with models["thinks"].client() as client:
        lines = client.post("/v1/chat/completions", json=body).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    whole = chat(models["thinks"], reasoning_budget=5)
    found = tuple(
        "".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning_content", "content")
    )
    assert found == said(whole)
    details = "completion_tokens_details"
    assert chunks[-1]["usage"][details] == whole["usage"][details]


def test_no_thought(models: dict[str, Served]):
    for fields in ({"reasoning_effort": "none"}, {"reasoning_budget": 0}):
        answer = chat(models["thinks"], max_tokens=20, **fields)
        assert said(answer)[0] == ""
        assert said(answer)[1]
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_a_model_that_does_not_think_has_nothing_to_limit(models: dict[str, Served]):
    usual = chat(models["never"], max_tokens=20)
    assert "completion_tokens_details" not in usual["usage"]
    for effort in ("none", "minimal", "low", "medium", "high", "xhigh"):
        assert chat(models["never"], max_tokens=20, reasoning_effort=effort)["choices"] == usual["choices"]
    assert chat(models["never"], max_tokens=20, reasoning_budget=1)["choices"] == usual["choices"]


def test_ollamas_capabilities_say_whether_it_thinks(models: dict[str, Served]):
    for name, served in models.items():
        with served.client() as client:
            shown = client.post("/api/show", json={"model": "edgespec"}).json()
        assert ("thinking" in shown["capabilities"]) is (name == "thinks")


def test_a_bias_leaves_a_budget_as_it_is(models: dict[str, Served]):
    with models["thinks"].client() as client:
        body = {"model": "edgespec", "messages": HELLO, "reasoning_budget": 4, "logit_bias": {}}
        token = models["thinks"].engine.target.tokenize(">", add_special=False, parse_special=False)[0]
        body["logit_bias"] = {str(token): -100}
        assert client.post("/v1/chat/completions", json=body | {"max_tokens": 60}).status_code == 200
