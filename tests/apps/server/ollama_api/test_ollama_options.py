"""Options and fields of Ollama's API: each is honoured, changes nothing, or is refused by its name."""

from __future__ import annotations

from pathlib import Path

import ollama

from edgespec import Engine, SamplingParams
from ollama_requests import GREEDY, HELLO
from server_app import Served

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
    ({"seed": 7, "top_k": -1}, {"temperature": 0.8, "top_k": 0, "top_p": 0.9, "min_p": 0}),
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
