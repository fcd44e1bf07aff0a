"""LoRA adapters as llama-server has them: in requests, and the scales where a request has none."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from edgespec import Engine, SamplingParams
from random_adapters import write_adapter
from server_app import Served, serving

TEXT = {"prompt": "the quick brown fox", "temperature": 0, "max_tokens": 16}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 16}
ROUTES = {"/v1/completions": TEXT, "/v1/chat/completions": CHAT}
BOTH, FIRST, NONE = [{"id": 0, "scale": 1}, {"id": 1, "scale": 0.5}], [{"id": 0, "scale": 1.0}], []


@pytest.fixture(scope="module")
def files(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("adapters")
    return [
        write_adapter(directory / f"{rank}.gguf", tiny_path, rank=rank, seed=rank, strength=0.5)
        for rank in (4, 16)
    ]


@pytest.fixture(scope="module")
def served(tiny_path: Path, files: list[Path]) -> Iterator[Served]:
    lora = [f"{files[0]}:0.5", str(files[1])]
    with serving(tiny_path, engine_options={"parallel": 4, "n_ctx": 256, "lora": lora}) as one:
        yield one


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with served.client() as one:
        yield one
        assert one.post("/lora-adapters", json=[{"id": 0, "scale": 0.5}, {"id": 1, "scale": 1}]).is_success


def said(client: httpx.Client, lora: Any = None, path: str = "/v1/completions") -> str:
    answer = client.post(path, json={**ROUTES[path], "lora": lora})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize("path", ROUTES)
def test_a_request_scales_the_adapters_and_those_left_out_are_off(
    client: httpx.Client, tiny_path: Path, files: list[Path], path: str
):
    with Engine(tiny_path, drafter="none", profile=False, lora=list(map(str, files))) as alone:

        def text(scales: dict[int, float]) -> str:
            model = alone.target
            if path == "/v1/completions":
                prompt = model.tokenize("the quick brown fox", add_special=True, parse_special=True)
            else:
                prompt = model.tokenize_chat(CHAT["messages"])  # type: ignore[arg-type]
            params = SamplingParams(temperature=0)
            return alone.generate(prompt, params=params, n_predict=16, lora=scales).text

        asked = {0: None, 1: NONE, 2: BOTH, 3: FIRST, 4: [{"id": 0, "scale": 0}]}
        with ThreadPoolExecutor(5) as pool:
            texts = dict(
                zip(asked, pool.map(lambda lora: said(client, lora, path), asked.values()), strict=True)
            )
        usual, both, first, off = text({0: 0.5, 1: 1}), text({0: 1, 1: 0.5}), text({0: 1}), text({})
    assert texts == {0: usual, 1: usual, 2: both, 3: first, 4: off}
    assert len({usual, both, first, off}) == 4


def test_the_list_of_adapters_and_their_scales(client: httpx.Client, files: list[Path]):
    listed = [{"id": number, "path": str(path)} for number, path in enumerate(files)]
    assert client.get("/lora-adapters").json() == [
        {**one, "scale": scale} for one, scale in zip(listed, (0.5, 1.0), strict=True)
    ]
    first = said(client, FIRST)
    assert said(client) != first
    assert client.post("/lora-adapters", json=FIRST).json() == {"success": True}
    assert [one["scale"] for one in client.get("/lora-adapters").json()] == [1.0, 0.0]
    assert said(client) == first
    assert client.post("/lora-adapters", json=NONE).is_success
    assert said(client) == said(client, [{"id": 1, "scale": 0}])


@pytest.mark.parametrize(
    "lora",
    [
        [{"id": 2, "scale": 1}],
        [{"id": -1, "scale": 1}],
        [{"id": "0", "scale": 1}],
        [{"id": 0, "scale": "1"}],
        [{"id": 0, "scale": True}],
        [{"id": 0}],
        [{"scale": 1}],
        [5],
        {"id": 0, "scale": 1},
        "style",
    ],
    ids=str,
)
def test_wrong_scales_are_a_400_and_change_nothing(client: httpx.Client, lora: Any):
    before = client.get("/lora-adapters").json()
    for path, body in (*ROUTES.items(), ("/lora-adapters", lora)):
        sent = lora if path == "/lora-adapters" else {**body, "lora": lora}
        answer = client.post(path, json=sent)
        assert answer.status_code == 400, answer.text
        message = answer.json()["error"]["message"]
        assert "\n" not in message
        assert path == "/lora-adapters" or "lora" in message
    assert client.get("/lora-adapters").json() == before


def test_without_adapters_the_list_is_empty_and_none_can_be_scaled(tiny_path: Path):
    with serving(tiny_path) as other, other.client() as client:
        assert client.get("/lora-adapters").json() == []
        assert said(client, NONE)
        answer = client.post("/v1/completions", json={**TEXT, "lora": FIRST})
        assert answer.status_code == 400 and "no adapter 0" in answer.json()["error"]["message"]
