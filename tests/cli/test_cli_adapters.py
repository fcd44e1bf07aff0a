"""`--lora`, and `lora` in models.toml: on every command that writes, and where a server answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_line import failed, run_cli, started, user_environment
from edgespec.apps.server.commands.serve import EmbeddingServing, ServeLoading
from edgespec.apps.server.router.app import read_preset
from edgespec.cli.groups import as_words, changed
from edgespec.cli.options import AnyCompute, StateOptions
from random_adapters import write_adapter

ASKED = (
    "--temp",
    "0",
    "-n",
    "12",
    "--no-stats",
    "--no-cache",
    "--raw",
    "--drafter",
    "suffix",
    "--threads",
    "1",
)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return user_environment(tmp_path)


@pytest.fixture
def files(tiny_path: Path, tmp_path: Path) -> list[Path]:
    return [
        write_adapter(tmp_path / name, tiny_path, rank=rank, seed=rank, strength=0.5)
        for name, rank in (("a:b.gguf", 4), ("b.gguf", 16))
    ]


def written(target: object, *lora: object, env: dict[str, str]) -> str:
    options = [word for one in lora for word in ("--lora", one)]
    done = run_cli("run", "-t", target, *ASKED, *options, "the quick brown fox", env=env)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def test_run_applies_adapters_and_those_of_models_toml(tiny_path, files, environment, tmp_path):
    first, second = files
    texts = {
        written(tiny_path, env=environment): "none",
        written(tiny_path, first, env=environment): "first",
        written(tiny_path, first, f"{second}:0.5", env=environment): "both",
    }
    assert len(texts) == 3
    assert texts[written(tiny_path, f"{first}:0", f"{second}:0", env=environment)] == "none"
    own = Path(environment["XDG_CONFIG_HOME"]) / "edgespec" / "models.toml"
    own.parent.mkdir(parents=True)
    (own.parent / "beside.gguf").write_bytes(second.read_bytes())
    own.write_text(
        f"[models.mine]\npath = {json.dumps(str(tiny_path))}\n"
        f"lora = [{json.dumps(str(first))}, 'beside.gguf:0.5']\n"
    )
    assert texts[written("mine", env=environment)] == "both"
    assert texts[written("mine", first, env=environment)] == "first"
    own.write_text(own.read_text().replace("beside", "missing"))
    failed(run_cli("run", "-t", "mine", *ASKED, "x", env=environment), 2, "missing.gguf")


def test_other_commands_apply_them(tiny_path, files, environment, tmp_path):
    expected = written(tiny_path, files[0], env=environment).strip()
    lines = tmp_path / "in.jsonl"
    body = {"prompt": "the quick brown fox", "temperature": 0, "max_tokens": 12}
    lines.write_text(json.dumps({"custom_id": "1", "url": "/v1/completions", "body": body}) + "\n")
    out = tmp_path / "out.jsonl"
    batch = ("batch", lines, "-o", out, "-t", tiny_path, "--drafter", "suffix")
    assert run_cli(*batch, "--lora", files[0], env=environment).returncode == 0
    answer = json.loads(out.read_text())["response"]["body"]
    assert answer["choices"][0]["text"].strip() == expected
    talked = {
        run_cli("chat", tiny_path, "--temp", "0", "-n", "8", *words, env=environment, stdin=b"hello\n").stdout
        for words in ((), ("--lora", files[0]))
    }
    assert len(talked) == 2


def test_no_server_with_other_adapters_answers_run(tiny_path, files, environment):
    plain, first = written(tiny_path, env=environment), written(tiny_path, files[0], env=environment)
    serve = ("serve", "-t", tiny_path, "--drafter", "suffix", "--threads", "1", "--port", "0", "--json")
    with started(*serve, "--lora", files[0], env=environment) as process:
        assert process.stdout and json.loads(process.stdout.readline())["address"]

        def answered(*lora: object) -> tuple[str, bool]:
            options = [word for one in lora for word in ("--lora", one)]
            done = run_cli("run", "-t", tiny_path, *ASKED, *options, "the quick brown fox", env=environment)
            return done.stdout, "answered by the server" in done.stderr

        assert answered(files[0]) == (first, False)
        assert answered() == (plain, False)
        process.terminate()


def test_a_preset_hands_them_on_to_the_models_own_server(tmp_path):
    preset = tmp_path / "preset.toml"
    preset.write_text("[models.m]\ntarget = 'x'\nlora = ['a.gguf', 'b.gguf:0.5']\n")
    table = read_preset(preset, (ServeLoading,))["m"]
    usual = ServeLoading(states=StateOptions(), compute=AnyCompute(), vectors=EmbeddingServing())
    assert [*as_words(changed(usual, table.given))] == ["--lora=a.gguf", "--lora=b.gguf:0.5"]


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (("run", "x", "--lora", "missing.gguf"), 2, "missing.gguf"),
        (("run", "x", "--lora", "a.gguf:nan"), 2, "--lora a.gguf:nan"),
        (("run", "x", "--lora", "TARGET"), 1, "general.type is 'model'"),
        (("run", "x", "--lora", "a.gguf", "--rpc", "127.0.0.1:1"), 2, "--lora"),
        (("batch", "in.jsonl", "-o", "out.jsonl", "--lora", "a.gguf", "--ray", "x:1"), 2, "--lora and --ray"),
        (("profile", "--lora", "a.gguf"), 2, "--lora"),
    ],
    ids=str,
)
def test_what_is_no_adapter_is_refused_in_one_line(tiny_path, environment, words, code, named):
    words = [str(tiny_path) if word == "TARGET" else word for word in words]
    failed(run_cli(*words, "-t", tiny_path, env=environment), code, named)
