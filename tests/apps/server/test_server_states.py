"""The server over models that keep a state, and states of prompts that outlive a server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edgespec import Engine, SamplingParams
from edgespec.llama.choices import StateRoom
from server_app import serving
from tiny_states import SOME, tiny

GREEDY = {"temperature": 0, "max_tokens": 30}
SYSTEM = "the quick brown fox jumps over the lazy dog " * 8
"""With more tokens than a stop to copy a state is worth (llama/sequence_pool.py)."""


@pytest.mark.parametrize("parallel", [1, 3])
@pytest.mark.parametrize("name", SOME)
def test_several_clients_get_what_each_gets_alone(name: str, parallel: int) -> None:
    questions = [f"{SYSTEM} and {word} then {word}" for word in ("one", "two", "three")]
    with Engine(tiny(name), drafter="none", profile=False) as engine:
        expected = [
            engine.generate(
                engine.prompt_tokens(text, chat=False), params=SamplingParams(temperature=0.0), n_predict=30
            ).text
            for text in questions
        ]
    with serving(tiny(name), tiny("mamba2", 2), engine_options={"parallel": parallel}) as served:
        with served.client() as client, ThreadPoolExecutor(3) as pool:

            def ask(text: str) -> dict:  # type: ignore[type-arg]
                answer = client.post("/v1/completions", json={"model": "edgespec", "prompt": text, **GREEDY})
                answer.raise_for_status()
                found: dict = answer.json()  # type: ignore[type-arg]
                return found

            for _ in range(2):
                answers = list(pool.map(ask, questions))
                assert [answer["choices"][0]["text"] for answer in answers] == expected
            known = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
            assert min(known) > 0, "what all prompts begin with is not read again"
        assert served.log == []


@pytest.mark.parametrize("parallel", [1, 3])
def test_a_server_that_starts_again_goes_on(tmp_path: Path, tiny_path: Path, parallel: int) -> None:
    states = StateRoom(tmp_path, 1 << 30)
    found = []
    for options in ({}, {"states": states}, {"states": states}):
        with serving(tiny_path, engine_options={"parallel": parallel, **options}) as served:
            with served.client() as client:
                asked = {"model": "edgespec", "prompt": SYSTEM, **GREEDY}
                answer = client.post("/v1/completions", json=asked).raise_for_status().json()
            found.append(answer["choices"][0]["text"])
    assert len({*found}) == 1
    usage = answer["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1 > 256
