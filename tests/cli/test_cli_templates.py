"""`--chat-template` of run, chat, batch and serve: for models whose own is missing or wrong."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from batch_parts import results, write_lines
from chat_templates import HERMES
from command_line import COMMAND, failed, run_cli
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf

LIKE_CHATML = CHAT_TEMPLATE  # the tiny models' own is that form
OPTIONS = ("--drafter", "none", "--threads", 1)
GREEDY = ("--temp", 0, "-n", 9)


@pytest.fixture
def with_template(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "with.gguf", seed=3, peak=0.6, chat_template=LIKE_CHATML)


@pytest.fixture
def without(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "without.gguf", seed=3, peak=0.6, chat_template=None)


def tokens_of(process: subprocess.CompletedProcess[Any]) -> Any:
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])["prompt_tokens"]


@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_template_by_name_or_from_a_file(
    command: str, environment: dict[str, str], tmp_path: Path, with_template: Path, without: Path
):
    file = tmp_path / "of-file.jinja"
    file.write_text("{{ messages[0].content }}{{ messages[0].content }}")

    def ask(model: Path, *options: Any) -> Any:
        prompt = ["abc"] if command == "run" else []
        arguments = [command, "--target", model, *OPTIONS, *GREEDY, "--json", *options, *prompt]
        return tokens_of(run_cli(*arguments, env=environment, stdin=b"" if command == "run" else b"abc\n"))

    own = ask(with_template)
    assert ask(without, "--chat-template", "chatml") == own
    assert ask(with_template, "--chat-template", file) == ask(without, "--chat-template", file) == 6
    assert ask(without, "--chat-template", "{{ messages[0].content }}") == 3


def test_a_named_template_of_the_models_own(environment: dict[str, str], tmp_path: Path):
    extra = {"tokenizer.chat_template.short": "{{ messages[0].content }}"}
    model = write_tiny_gguf(tmp_path / "named.gguf", extra=extra)
    arguments = ["run", "--target", model, *OPTIONS, *GREEDY, "--json", "--chat-template", "short", "abc"]
    assert tokens_of(run_cli(*arguments, env=environment)) == 3


def test_a_batch_with_a_template(
    environment: dict[str, str], tmp_path: Path, with_template: Path, without: Path
):
    source = write_lines(tmp_path / "in.jsonl", ['"abc"'])
    texts = []
    for model, options in ((with_template, ()), (without, ("--chat-template", "chatml"))):
        out = tmp_path / f"{model.stem}.jsonl"
        made = run_cli(
            "batch", source, "-o", out, "--target", model, *OPTIONS, *GREEDY, *options, env=environment
        )
        assert made.returncode == 0, made.stderr
        (line,) = results(out)
        texts.append(line["response"]["body"]["choices"][0]["message"]["content"])
    assert texts[0] == texts[1]


def test_a_server_with_a_template(environment: dict[str, str], tmp_path: Path, without: Path):
    file = tmp_path / "tools.jinja"
    file.write_text(HERMES)
    arguments = ["serve", "--target", without, *OPTIONS, "--port", 0, "--json", "--chat-template", file]
    with subprocess.Popen(
        [*COMMAND, *map(str, arguments)], stdout=subprocess.PIPE, env=environment
    ) as server:
        try:
            assert server.stdout
            address = json.loads(server.stdout.readline())["address"]
            facts = httpx.get(f"{address}/v1/models").json()["data"][0]["edgespec"]
            assert facts["chat"] is True and facts["tools"] is True
            body = {"model": "edgespec", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 3}
            assert httpx.post(f"{address}/v1/chat/completions", json=body).status_code == 200
        finally:
            server.terminate()


def test_a_limit_of_thoughts(environment: dict[str, str], tmp_path: Path):
    body = CHAT_TEMPLATE.removesuffix("{% endif %}")
    thinks = write_tiny_gguf(
        tmp_path / "t.gguf", seed=1, chat_template=body + "<think>\n{% endif %}{# </think> #}"
    )

    def ask(command: str, *options: Any) -> str:
        prompt = ["abc"] if command == "run" else []
        arguments = [command, "--target", thinks, *OPTIONS, "--temp", 0, "-n", 70, "--json", *options]
        process = run_cli(*arguments, *prompt, env=environment, stdin=b"" if prompt else b"abc\n")
        assert process.returncode == 0, process.stderr
        return str(json.loads(process.stdout.splitlines()[-1])["text"])

    for command in ("run", "chat"):
        limited = ask(command, "--reasoning-budget", 5)
        assert "I have thought about this for long enough, and answer now.\n</think>" in limited
        assert "</think>" not in ask(command)
        assert "</think>" not in ask(command, "--reasoning-budget", 0), "the prompt has it"
    wrong = run_cli("run", "--target", thinks, "--reasoning-budget", -2, "abc", env=environment)
    failed(wrong, 2, "--reasoning-budget -2: must be -1 to 2^31 - 1")
