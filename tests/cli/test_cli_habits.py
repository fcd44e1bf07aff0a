"""What people bring from other tools and other machines: each works, or one line says how it is done here."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from command_line import COMMAND, failed, run_cli
from edgespec import Engine
from edgespec.errors import UsageError

# ---- limits of the machine ----


@pytest.mark.parametrize("kilobytes", [60_000, 220_000, 300_000])
def test_memory_that_ulimit_refuses_is_said_to_be_so(tiny_path, child_environment, kilobytes):
    """While modules are loaded, before the model is, and where llama.cpp starts threads for it."""
    command = shlex.join([*COMMAND, "run", "abc", "-t", str(tiny_path), "--drafter", "none"])
    process = subprocess.run(
        ["sh", "-c", f"ulimit -v {kilobytes}; exec {command}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=child_environment,
        check=False,
        timeout=60,
    )
    assert (process.returncode, process.stdout) == (1, "")
    assert all(line.startswith("edgespec: ") for line in process.stderr.splitlines()), process.stderr
    line = process.stderr.splitlines()[-1]
    assert line.startswith("edgespec: error: ")
    assert "`ulimit -v`" in line


# ---- models and options as other tools have them ----


@pytest.mark.parametrize(
    "words", [["-m", "MODEL", "-p", "abc"], ["--model", "MODEL", "abc"], ["-p", "abc", "-m", "MODEL"]]
)
def test_the_model_and_the_prompt_as_llama_cpp_names_them(environment, tiny_path, words):
    words = [str(tiny_path) if word == "MODEL" else word for word in words]
    options = ("--drafter", "none", "--temp", 0, "-n", 9, "--no-stats")
    usual = run_cli("run", "abc", "-t", tiny_path, *options, env=environment)
    found = run_cli("run", *words, *options, env=environment)
    assert (found.returncode, found.stdout, found.stderr) == (0, usual.stdout, "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-p", "hello"], ["'hello'", "-p is --pair here", "a prompt needs no option"]),
        (["-p", "defualt", "hello"], ["no pair is called 'defualt'", "nearest: default"]),
        (["-m", "x.gguf", "-p", "default"], ["--pair and --target"]),
        (["-m", "x.gguf", "-p", "hello", "-t", "8"], ["--target 8", "--threads 8"]),
    ],
)
def test_options_of_llama_cpp_that_mean_another_thing_here(environment, words, said):
    failed(run_cli("run", *words, env=environment), 2, *said)


SHARED = ("run", "chat", "serve", "bench", "profile", "calibrate")
EMPTY = [
    *(([command], option) for command in SHARED for option in ("--target", "--draft", "--pair")),
    (["batch", "in.jsonl", "-o", "out.jsonl"], "--target"),
    (["batch", "in.jsonl", "-o", "out.jsonl"], "--pair"),
    (["compare"], "--targets"),
    (["compare"], "--drafts"),
    (["draft", "make"], "--target"),
    (["draft", "make"], "--source"),
    (["draft", "eval", "x"], "--target"),
    (["cache", "import", "x"], "--target"),
    (["run", "hi"], "--file"),
    (["run", "hi"], "--stop"),
    (["models", "add", "x.gguf"], "--name"),
    (["quantize", "x.gguf", "--type", "q8_0"], "--output"),
]
"""Options of every command that takes a model, and some of the others: commands and option."""


@pytest.mark.parametrize(
    ("command", "option"), EMPTY, ids=lambda value: "-".join(value) if isinstance(value, list) else value
)
@pytest.mark.parametrize("form", ["apart", "equals"])
def test_an_empty_value_is_no_default(environment, command, option, form):
    """A shell's variable that is not set: `--target "$MODEL"`."""
    words = [f"{option}="] if form == "equals" else [option, ""]
    failed(run_cli(*command, *words, env=environment), 2, f"{option} is empty", "leave it out")


@pytest.mark.parametrize(
    "command",
    [
        ["models", "pull"],
        ["models", "path"],
        ["models", "verify"],
        ["models", "remove"],
        ["doctor"],
        ["quantize", "--type", "q8_0"],
        ["models", "pair", "x"],
    ],
    ids=" ".join,
)
def test_an_empty_name_is_no_model(environment, command):
    failed(run_cli(*command, "", env=environment), 2, "is empty")


def test_the_engine_takes_no_empty_name():
    for target, draft in (("", None), ("x.gguf", "")):
        with pytest.raises(UsageError, match=r"empty|no such file"):
            Engine(target, draft)


def test_an_empty_variable_of_nodes_is_none(environment, tiny_path):
    words = ("run", "abc", "-m", tiny_path, "--drafter", "none", "-n", 2)
    assert run_cli(*words, env=environment | {"EDGESPEC_NODES": ""}).returncode == 0


@pytest.mark.parametrize("word", ["OFF", "Off", " off "])
def test_a_switch_of_the_environment_in_any_case(environment, tiny_path, word):
    words = ("run", "abc", "-m", tiny_path, "--drafter", "none", "-n", 2, "--json")
    process = run_cli(*words, env=environment | {"EDGESPEC_KERNELS": word})
    assert '"kernels": "stock"' in process.stdout, process.stderr


def test_a_url_of_the_hub_is_a_model(environment):
    """Without a network: what is asked for is the right file."""
    url = "https://huggingface.co/me/repo/blob/main/x.gguf"
    for command in (["run", "hi", "-m", url, "--drafter", "none"], ["models", "pull", url]):
        process = subprocess.run(  # the hub's library reads HF_HUB_OFFLINE when it is loaded
            [*COMMAND, *command], env=environment, capture_output=True, text=True, check=False, timeout=60
        )
        assert process.returncode == 1
        assert "hub me/repo/x.gguf@main" in process.stderr.splitlines()[-1]
    failed(run_cli("models", "path", url, env=environment), 1, "is not on this machine")
    failed(run_cli("doctor", "https://huggingface.co/me/repo", env=environment), 2, "hf:me/repo/FILE.gguf")


def test_draft_make_without_jax_says_so_before_anything_is_pulled(environment):
    """The default target is not here, and there is no network: that is not what is said."""
    code = (
        "import sys; sys.modules['jax'] = None; from edgespec.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "draft", "make"]
    process = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    failed(process, 1, "training needs JAX: pip install 'edgespec[forge]'")
    failed(run_cli("draft", "make", "--name", "default", env=environment), 2, "a pair of this name")
