"""Prompts that are sent back with their probabilities, as evaluations want them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from edgespec import Engine
from edgespec.decoding.generate import logprobs_of
from edgespec.decoding.options import Options, WakePolicy
from edgespec.errors import UsageError
from edgespec.llama.session import Session
from server_app import Served, serving
from tiny_gguf import write_tiny_gguf

TEXT = "/v1/completions"
PROMPT = "the quick brown fox jumps over the lazy dog and then goes on to sleep for a while " * 2


@pytest.fixture(scope="module", params=[1, 3], ids=["one", "three"])
def served(request: pytest.FixtureRequest, tiny_path: Path, tiny_draft_path: Path) -> Iterator[Served]:
    options = {"parallel": request.param, "n_ctx": 512}
    with serving(tiny_path, tiny_draft_path, engine_options=options) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with served.client() as client:
        yield client
    assert served.log == []


def text(client: httpx.Client, **fields: Any) -> Any:
    answer = client.post(TEXT, json={"model": "edgespec", "prompt": PROMPT, "temperature": 0} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def expected(path: Path, tokens: list[int], top: int) -> list[tuple[float, dict[int, float]]]:
    """What one pass over all tokens gives."""
    with Engine(path, drafter="none", profile=False) as engine:
        session = Session(engine.target, n_ctx=512, n_threads=1, n_logits_max=len(tokens))
        rows = session.eval(tokens, n_logits=len(tokens))
        said = [logprobs_of(row, token, top) for row, token in zip(rows, tokens[1:], strict=False)]
        found = [(one.logprob, dict(one.top)) for one in said]
        session.close()
    return found


def test_logprobs_of_a_prompt_are_those_of_one_pass(client: httpx.Client, served: Served, tiny_path: Path):
    model = served.engine.target
    tokens = model.tokenize(PROMPT, add_special=True, parse_special=True)
    assert len(tokens) > 70, "several passes"
    text(client, max_tokens=4)  # the prompt is in the cache now
    body = text(client, echo=True, logprobs=2, max_tokens=3)
    (choice,) = body["choices"]
    assert choice["text"].startswith(PROMPT) and len(choice["text"]) > len(PROMPT)
    found = choice["logprobs"]
    assert len(found["tokens"]) == len(tokens) + 3
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    exact = expected(tiny_path, tokens, 2)
    assert found["token_logprobs"][1 : len(tokens)] == pytest.approx([one for one, _ in exact], abs=1e-3)
    for top, (_, best) in zip(found["top_logprobs"][1:], exact, strict=False):
        assert sorted(top.values()) == pytest.approx(sorted(best.values()), abs=1e-3)
    assert "".join(found["tokens"][:-3]) == PROMPT
    assert found["text_offset"] == [len("".join(found["tokens"][:i])) for i in range(len(found["tokens"]))]
    assert body["usage"]["prompt_tokens"] == len(tokens)
    assert body["usage"]["completion_tokens"] == 3
    plain = text(client, logprobs=2, max_tokens=3)["choices"][0]
    assert choice["text"] == PROMPT + plain["text"]
    assert found["token_logprobs"][-3:] == pytest.approx(plain["logprobs"]["token_logprobs"], abs=1e-3)


def test_a_prompt_alone(client: httpx.Client, served: Served):
    body = text(client, echo=True, logprobs=0, max_tokens=0)
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert len(choice["logprobs"]["tokens"]) == body["usage"]["prompt_tokens"]
    assert body["usage"]["completion_tokens"] == 0
    assert text(client, echo=True, max_tokens=0)["choices"][0] == {
        "index": 0,
        "text": PROMPT,
        "logprobs": None,
        "finish_reason": "length",
    }
    one = text(client, prompt=[5], echo=True, logprobs=1, max_tokens=0)["choices"][0]
    assert one["logprobs"]["token_logprobs"] == [None]
    assert one["text"] == served.engine.target.piece(5).decode()


def test_several_prompts_are_sent_back(client: httpx.Client):
    prompts = [PROMPT, "hello", "the cat"]
    body = text(client, prompt=prompts, echo=True, logprobs=1, max_tokens=1)
    for i, (choice, prompt) in enumerate(zip(body["choices"], prompts, strict=True)):
        alone = text(client, prompt=prompt, echo=True, logprobs=1, max_tokens=1)["choices"][0]
        assert (choice["index"], choice["text"]) == (i, alone["text"])
        assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(
            alone["logprobs"]["token_logprobs"][1:], abs=1e-3
        )


def test_the_token_that_ends_a_text_is_scored_too(tmp_path: Path):
    """lm-eval drops the last entry, that of the one token it asks for."""
    with serving(write_tiny_gguf(tmp_path / "ends.gguf", seed=1)) as other, other.client() as client:
        eog = other.engine.target.eog_tokens[0]
        fields = {"echo": True, "logprobs": 1, "logit_bias": {str(eog): 100}, "max_tokens": 1}
        body = text(client, prompt="hello", **fields)
        (choice,) = body["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("hello", "stop")
        assert len(choice["logprobs"]["tokens"]) == body["usage"]["prompt_tokens"] + 1
        assert body["usage"]["completion_tokens"] == 0


def test_a_streamed_text_begins_with_its_prompt(client: httpx.Client):
    whole = text(client, echo=True, max_tokens=6)["choices"][0]["text"]
    body = {"model": "edgespec", "prompt": PROMPT, "temperature": 0, "echo": True, "max_tokens": 6}
    with client.stream("POST", TEXT, json=body | {"stream": True}) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    parts = [httpx.Response(200, text=line.removeprefix("data: ")).json() for line in lines]
    assert "".join(choice["text"] for part in parts for choice in part["choices"]) == whole
    assert parts[0]["choices"][0]["text"] == PROMPT


def test_options_of_the_engine(tiny_path: Path):
    with pytest.raises(UsageError, match="needs n_logprobs"):
        Options(prompt_logprobs=True)
    with pytest.raises(UsageError, match="1 or more"):
        Options(n_predict=0)
    with pytest.raises(UsageError, match="cascade"):
        Options(prompt_logprobs=True, n_logprobs=0, cascade=WakePolicy())
    with Engine(tiny_path, drafter="suffix", profile=False) as engine:
        seeded = {"seed": 3, "n_predict": 12}
        scored = engine.generate("hello", prompt_logprobs=True, n_logprobs=0, **seeded)
        plain = engine.generate("hello", **seeded)
        assert scored.token_ids == plain.token_ids
        assert len(scored.prompt_logprobs) == scored.prompt_tokens - 1
        assert plain.prompt_logprobs == () and scored.note == ""
