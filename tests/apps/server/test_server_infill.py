"""llama-server's routes that editors use: the middle of a text, and the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from edgespec import Engine, SamplingParams
from edgespec.apps.server.request_reader import FimGap, make_fim_prompt
from edgespec.llama.weights import Model
from server_app import Served, serving
from tiny_gguf import write_tiny_gguf
from tiny_vocabulary import CONTROL_TOKENS

PRE, SUF, MID, REP, SEP = 260, 261, 262, 263, 264
FIM = {"pre": PRE, "suf": SUF, "mid": MID, "rep": REP, "sep": SEP}
BEFORE, AFTER = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"
GREEDY = {"temperature": 0}


def with_fim(path: Path, *kinds: str, n_ctx: int = 512) -> Path:
    """A tiny model with the tokens of these kinds."""
    extra: dict[str, Any] = {f"tokenizer.ggml.fim_{kind}_token_id": FIM[kind] for kind in kinds}
    tokens = [FIM[kind] for kind in kinds]
    texts = {FIM[kind]: f"<|{kind}|>" for kind in kinds}
    return write_tiny_gguf(
        path, seed=1, extra=extra, texts=texts, kinds=dict.fromkeys(tokens, 3), n_ctx=n_ctx
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_fim(tmp_path_factory.mktemp("fim") / "target.gguf", *FIM)


@pytest.fixture(scope="module")
def served(path: Path) -> Iterator[Served]:
    with serving(path) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with served.client() as client:
        yield client
    assert [line for line in served.log if "no effect" not in line] == []


def fill(client: httpx.Client, **fields: Any) -> Any:
    body = {"input_prefix": BEFORE, "input_suffix": AFTER, "n_predict": 12} | GREEDY | fields
    answer = client.post("/infill", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def plain(model: Model, text: str) -> list[int]:
    return model.tokenize(text, add_special=False, parse_special=False)


def test_a_gap_is_filled_as_the_model_was_trained(client: httpx.Client, served: Served, path: Path):
    model = served.engine.target
    prompt = [PRE, *plain(model, BEFORE), SUF, *plain(model, AFTER), MID]
    with Engine(path, drafter="none", profile=False) as alone:
        expected = alone.generate(prompt, params=SamplingParams(temperature=0), n_predict=12)
    body = fill(client)
    assert body["content"] == expected.text
    assert body["stop"] is True and body["truncated"] is False
    assert body["tokens_evaluated"] == len(prompt)
    assert body["tokens_predicted"] == len(expected.token_ids)
    assert body["stop_type"] == ("limit" if expected.stop_reason == "length" else "eos")
    assert body["timings"]["predicted_n"] == body["tokens_predicted"]
    cut = len(BEFORE) - 8  # where the cursor's line begins
    assert fill(client, input_prefix=BEFORE[:cut], prompt=BEFORE[cut:])["tokens_evaluated"] >= len(prompt)
    text = {"model": "edgespec", "prompt": BEFORE, "suffix": AFTER, "max_tokens": 12} | GREEDY
    answer = client.post("/v1/completions", json=text).json()
    assert answer["choices"][0]["text"] == expected.text


def test_a_stream_says_the_same(client: httpx.Client):
    whole = fill(client)
    body = {"input_prefix": BEFORE, "input_suffix": AFTER, "n_predict": 12, "stream": True} | GREEDY
    with client.stream("POST", "/infill", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line and not line.startswith(":")]
    parts = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert parts[-1]["tokens_predicted"] == whole["tokens_predicted"]


def test_other_files_of_the_project_come_before(client: httpx.Client, served: Served):
    model = served.engine.target
    extra = [{"filename": "a.py", "text": "x = 1\n", "time": 3}, {"text": "y = 2"}]
    expected = [
        *(REP, *plain(model, "project\n")),
        *(SEP, *plain(model, "a.py\nx = 1\n")),
        *(SEP, *plain(model, "file\ny = 2\n")),
        *(SEP, *plain(model, "file\n")),
        *(PRE, *plain(model, BEFORE), SUF, *plain(model, AFTER), MID),
    ]
    gap = FimGap(BEFORE, AFTER, [("a.py", "x = 1\n"), (None, "y = 2")])
    assert model.fim is not None
    assert make_fim_prompt(model, model.fim, gap, 400).tokens == expected
    assert fill(client, input_extra=extra)["tokens_evaluated"] == len(expected)


def test_what_does_not_fit_is_left_out_and_told(client: httpx.Client, served: Served):
    model = served.engine.target
    assert model.fim is not None
    before, after = "b" * 300, "a" * 300
    files = [("one", "1" * 200), ("two", "2" * 20)]
    for room in (650, 400, 100, 40, 8, 3):
        filled = make_fim_prompt(model, model.fim, FimGap(before, after, files), room)
        assert len(filled.tokens) <= room
        assert filled.is_cut
    text = model.piece
    kept = make_fim_prompt(model, model.fim, FimGap(before + "!", "?" + after), 100)
    shown = b"".join(text(token, special=True) for token in kept.tokens).decode()
    assert "b!<|suf|>?a" in shown, "what is next to the gap is kept"
    assert not make_fim_prompt(model, model.fim, FimGap("b", "a" * 90), 100).is_cut, (
        "one takes what the other leaves"
    )
    body = fill(client, input_prefix="x " * 600, input_suffix="y " * 600)
    assert body["truncated"] is True and body["tokens_predicted"] > 0


def test_what_editors_send_is_taken(client: httpx.Client):
    """llama.vim's request."""
    body = {
        "id_slot": 0,
        "input_prefix": BEFORE,
        "input_suffix": AFTER,
        "input_extra": [{"text": "x = 1", "time": [1, 2], "filename": "a.py"}],
        "prompt": "    ret",
        "n_predict": 8,
        "stop": ["\n\n\n"],
        "n_indent": 4,
        "top_k": 40,
        "top_p": 0.9,
        "stream": False,
        "samplers": ["top_k", "top_p", "infill"],
        "cache_prompt": True,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 1000,
        "response_fields": ["content", "timings/prompt_n", "timings/predicted_n", "tokens_cached", "none"],
    }
    answer = client.post("/infill", json=body)
    assert answer.status_code == 200, answer.text
    assert set(answer.json()) == {"content", "timings/prompt_n", "timings/predicted_n", "tokens_cached"}
    waiting = body | {"input_prefix": "", "input_suffix": "", "prompt": "", "n_predict": 0, "samplers": []}
    waiting |= {"temperature": 0.0, "t_max_predict_ms": 1, "response_fields": [""]}
    ahead = client.post("/infill", json=waiting)  # reads new files before they are needed
    assert (ahead.status_code, ahead.json()) == (200, {}), ahead.text
    warnings = answer.headers.get_list("X-Edgespec-Warning")
    assert [line.split()[0] for line in warnings] == ["samplers", "no"]


def test_a_text_ends_with_its_time_once_it_has_a_line(client: httpx.Client, served: Served):
    newline = plain(served.engine.target, "\n")[-1]
    fields: dict[str, Any] = {"n_predict": 200, "t_max_predict_ms": 1, "logit_bias": {str(newline): 100}}
    body = fill(client, **fields)
    assert 1 <= body["tokens_predicted"] < 200 and body["stop_type"] == "limit"
    del fields["logit_bias"]
    without = fill(client, logit_bias={str(newline): -100}, **fields)
    assert "\n" not in without["content"] and without["tokens_predicted"] > body["tokens_predicted"]


def test_a_prompt_is_read_before_it_is_needed(client: httpx.Client):
    body = fill(client, n_predict=0, input_prefix="a prefix of its own " * 3)
    assert (body["content"], body["tokens_predicted"]) == ("", 0)
    again = fill(client, input_prefix="a prefix of its own " * 3)
    assert again["timings"]["cache_n"] >= again["tokens_evaluated"] - 1


def test_a_model_that_cannot_says_so(tiny_path: Path):
    with serving(tiny_path) as other, other.client() as client:
        answer = client.post("/infill", json={"input_prefix": "a", "input_suffix": "b"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input_suffix")
        assert "cannot fill in the middle" in answer.json()["error"]["message"]
        text = {"model": "edgespec", "prompt": "a", "suffix": "b"}
        assert client.post("/v1/completions", json=text).json()["error"]["param"] == "suffix"
        assert client.post("/v1/completions", json=text | {"suffix": ""}).status_code == 200
        assert other.log == []


# ---- the tokenizer ----


def test_text_becomes_tokens_and_text_again(client: httpx.Client, served: Served):
    model = served.engine.target
    for content in ("hello, world", "", "naïve ☕ 日本", f"<|pre|>{CONTROL_TOKENS[0]}"):
        found = client.post("/tokenize", json={"content": content}).json()
        assert found["tokens"] == model.tokenize(content, add_special=False, parse_special=True)
        assert found["count"] == len(found["tokens"]) and found["max_model_len"] == 512
        back = client.post("/detokenize", json={"tokens": found["tokens"]}).json()
        assert back == {"content": content, "prompt": content}
    literal = client.post("/tokenize", json={"content": "<|pre|>", "parse_special": False}).json()
    assert PRE not in literal["tokens"]
    pieces = client.post("/tokenize", json={"content": "h☕", "with_pieces": True}).json()["tokens"]
    data = b"".join(p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces)
    assert data.decode() == "h☕" and any(isinstance(p["piece"], list) for p in pieces)
    theirs = client.post("/tokenize", json={"prompt": "hello", "return_token_strs": True}).json()
    assert "".join(theirs["token_strs"]) == "hello"


def test_a_bos_is_added_where_it_is_asked_for(tmp_path: Path):
    with serving(write_tiny_gguf(tmp_path / "bos.gguf", add_bos=True)) as other, other.client() as client:
        bos = other.engine.target.bos
        for body, adds in (
            ({"content": "a"}, False),
            ({"content": "a", "add_special": True}, True),
            ({"prompt": "a"}, True),
            ({"prompt": "a", "add_special_tokens": False}, False),
        ):
            tokens = client.post("/tokenize", json=body).json()["tokens"]
            assert (tokens[0] == bos) is adds, body
