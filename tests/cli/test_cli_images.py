"""Images in `run`, `chat` and `batch`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command_line import run_cli, user_environment
from edgespec import Engine
from edgespec.decoding.sampling import SamplingParams
from pictures import image_url, in_base64, png
from tiny_vocabulary import CHAT_TEMPLATE
from towers import write_tower

WORDS = "What is this?"
LOADED = ("--drafter", "none", "--kernels", "off", "--chat-template", CHAT_TEMPLATE, "--temp", 0, "-n", 8)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tower("gemma3", tmp_path_factory.mktemp("tower"))[0]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "red.png").write_bytes(png("red"))
    return user_environment(tmp_path)


@pytest.fixture(scope="module")
def engine(target: Path) -> Iterator[Engine]:
    with Engine(target, drafter="none", kernels="off", chat_template=CHAT_TEMPLATE, profile=False) as made:
        yield made


def written(engine: Engine, prompt: Any, **options: Any) -> str:
    return engine.generate(prompt, params=SamplingParams(temperature=0), n_predict=8, **options).text


def test_run_reads_images_in_order_also_from_a_pipe(target, environment, engine, tmp_path):
    given = ("--image", "red.png", "--image", "-", "--json", WORDS)
    done = run_cli("run", "-t", target, *LOADED, *given, env=environment, stdin=png("blue"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    expected = written(engine, WORDS, images=[png("red"), png("blue")])
    assert json.loads(done.stdout)["text"] == expected != written(engine, WORDS)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--image", "none.png", WORDS), "none.png"),
        (("--image", "https://a.example/b.png", WORDS), "https://a.example/b.png"),
        (("--image", "-"), "a prompt from stdin and --image -"),
        (("--image", "-", "--grammar", "-", WORDS), "--image - and --grammar -"),
    ],
)
def test_images_that_cannot_be_read(target, environment, tmp_path, arguments, named):
    done = run_cli("run", "-t", target, *arguments, env=environment, cwd=tmp_path)
    assert done.returncode == 2 and named in done.stderr and done.stderr.count("\n") == 1


def test_a_conversation_keeps_its_images(target, environment, engine, tmp_path):
    def chat(*lines: str, code: int = 0) -> list[dict[str, Any]]:
        typed = "\n".join(lines).encode()
        command = ("chat", "-t", target, *LOADED, "--json", "--continue")
        done = run_cli(*command, env=environment, stdin=typed, cwd=tmp_path)
        assert done.returncode == code, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    first, second, retried = chat("/image red.png", WORDS, "And now?", "/image none.png", "/retry", code=1)
    assert first["text"] == written(engine, WORDS, images=[png("red")])
    assert second["cached_tokens"] > 16 and retried["text"] == second["text"]
    (third,) = chat("Again?", "/save all.json")
    assert third["cached_tokens"] > second["cached_tokens"]
    kept = json.loads((tmp_path / "all.json").read_text())["messages"]
    assert [message.get("images", []) for message in kept] == [[in_base64(png("red"))], [], [], [], [], []]
    anew = ("chat", "-t", target, *LOADED, "--json", "--load", "all.json")
    done = run_cli(*anew, env=environment, stdin=b"/retry", cwd=tmp_path)
    assert json.loads(done.stdout)["prompt_tokens"] > 16 + len(WORDS), done.stderr


def test_a_batch_reads_images(target, environment, engine, tmp_path):
    content = [image_url(png("red")), {"type": "text", "text": WORDS}]
    line = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8}
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    options = ("--kernels", "off", "--chat-template", CHAT_TEMPLATE, "-o", "out.jsonl")
    done = run_cli("batch", "in.jsonl", "-t", target, *options, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads((tmp_path / "out.jsonl").read_text())["response"]["body"]["choices"][0]
    assert answer["message"]["content"] == written(engine, WORDS, images=[png("red")])
