"""Shell completion as people meet it: installed, and asked for with Tab in a shell of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from textwrap import indent
from typing import get_type_hints

import pytest

from edgespec.apps.bench.commands import bench_options, calibrate, compare
from edgespec.apps.bench.compare import WINDOW
from edgespec.apps.bench.measure import BenchSettings
from edgespec.apps.bench.runs import parse_variants
from edgespec.apps.forge import request, vocabulary_ranking
from edgespec.apps.forge.commands import draft as draft_options
from edgespec.apps.forge.request import EvaluationSettings
from edgespec.cli import app
from edgespec.cli.app import COMMANDS
from edgespec.cli.options import ThreadsAndKernels, read_number
from edgespec.decoding.options import SPAN
from edgespec.platform.plugins import offered
from terminals import Terminal

ANSWER = "called with"
HEAVY = {"llama_cpp", "numpy"}
REGISTRY = f"""
[models.mine]
path = "/mine.gguf"
sha256 = "{"0" * 64}"

[pairs.ours]
target = "mine"
draft = "smollm2-135m-q4_1"
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    """The user's models.toml, with a model and a pair of theirs."""
    file = tmp_path / "home" / ".config" / "edgespec" / "models.toml"
    file.parent.mkdir(parents=True)
    file.write_text(REGISTRY)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(file.parent.parent))
    return file


def asking(*words):
    """What bash has in the environment when Tab is pressed after the last of `words`."""
    line = ("edgespec", *words)
    return {
        "_EDGESPEC_COMPLETE": "complete_bash",
        "COMP_WORDS": "\n".join(line),
        "COMP_CWORD": str(len(words)),
    }


@pytest.fixture
def complete(config, monkeypatch, capsys):
    """Return what `edgespec` answers bash for these words."""

    def complete(*words):
        for name, value in asking(*words).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            app.main([])
        assert ended.value.code == 0
        return capsys.readouterr().out.split()

    return complete


# ---- in the shells ----


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_tab_in_a_shell(shell, config, child_environment, tmp_path):
    """The line is entered: what `edgespec` is called with is what was completed."""
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not on this machine: apt install {shell}")
    program, home = tmp_path / "bin" / "edgespec", tmp_path / "home"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\n"
        'case "$_EDGESPEC_COMPLETE$1" in complete_*|--install-completion)\n'
        f'    exec {sys.executable} -m edgespec "$@";;\n'
        "esac\n"
        f'printf "{ANSWER} <%s>\\n" "$*"\n'
    )
    program.chmod(0o755)
    (home / "my-model.gguf").touch()
    (home / "notes").mkdir()
    (home / "notes" / "prompt.txt").touch()
    environment = {
        **child_environment,
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(home),
        "ZDOTDIR": str(home),
    }
    # `; true`: a shell may give its process to its only command, and would not be found.
    install = [shell, "-c", "edgespec --install-completion; true"]
    installed = subprocess.run(install, env=environment, capture_output=True, timeout=60, check=True)
    assert installed.stdout.startswith(f"{shell} completion installed in {home}".encode())
    with Terminal([shell], environment, cwd=home) as terminal:
        for typed, called in [
            ("mod\tpu\tour\tmin\t", "models pull ours mine"),
            ("run --te\t0 --drafter suf\t", "run --temp 0 --drafter suffix"),
            ("run -t min\t--draft smollm2-135m\t", "run -t mine --draft smollm2-135m-q4_1"),
            ("compare --targets mine,smollm2-36\t", "compare --targets mine,smollm2-360m-q8_0"),
            ("run -t my\t", "run -t my-model.gguf"),
            ("run -t ./my\t", "run -t ./my-model.gguf"),
            ("run --file not\tpro\t", "run --file notes/prompt.txt"),
        ]:
            terminal.type(f"edgespec {typed}\r")
            terminal.expect(f"{ANSWER} <{called} ?>")


# ---- what is completed ----


def test_commands_and_options(complete):
    assert set(complete("")) > {"run", "models", "draft", "cache"}
    assert complete("mo") == ["models"]
    assert complete("models", "p") == ["pull", "path"]
    assert complete("run", "--te") == ["--temp"]
    assert complete("run", "--drafter", "su") == ["suffix"]
    assert complete("--inst") == ["--install-completion"]


@pytest.mark.parametrize("command", ["run", "chat", "profile", "calibrate", "bench", "serve", "batch"])
def test_models_and_pairs_of_a_command(complete, command):
    for option in ("--target", "-t", "--draft", "-d"):
        assert complete(command, option, "mi") == ["mine"]
    for option in ("--pair", "-p"):
        assert complete(command, option, "o") == ["ours"]


@pytest.mark.parametrize(
    "words",
    [
        ["models", "pull"],
        ["models", "pull", "default"],
        ["models", "path"],
        ["models", "verify"],
        ["models", "remove"],
        ["quantize"],
        ["quantize", "--type", "q4_0"],
        ["doctor"],
        ["doctor", "--retest", "smollm2-135m-q4_1"],
        ["draft", "make", "--target"],
        ["draft", "eval", "any", "--target"],
        ["cache", "import", "notes", "--target"],
        ["compare", "--targets"],
        ["compare", "--drafts"],
    ],
    ids=" ".join,
)
def test_models_elsewhere(complete, words):
    assert complete(*words, "mi") == ["mine"]


def test_pairs_are_pulled_by_name_too(complete):
    for command in ("pull", "verify", "remove"):
        assert complete("models", command, "our") == ["ours"]


def test_files(complete, tmp_path, monkeypatch):
    """Models of this directory are named beside the registry's; anything else the shell completes itself."""
    monkeypatch.chdir(tmp_path)
    for name in ("mine.gguf", "mi casa.gguf", "mine.txt"):
        (tmp_path / name).touch()
    assert complete("run", "--target", "mi") == ["mine", "mine.gguf"]
    assert complete("run", "--target", "./mi") == []
    assert complete("run", "--file", "mi") == []


# ---- what it must not do ----


def test_what_a_shell_shows_is_never_an_error(config, child_environment, tmp_path):
    """Neither where models.toml is damaged nor where edgespec cannot be loaded."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "typer.py").write_text("raise RuntimeError('broken')")

    def asked(environment):
        return subprocess.run(
            [sys.executable, "-m", "edgespec"],
            env={**child_environment, **asking("run", "--target", ""), **environment},
            capture_output=True,
            timeout=60,
            check=False,
        )

    assert b"\nmine\n" in asked({}).stdout
    path = os.pathsep.join([str(broken), child_environment["PYTHONPATH"]])
    unloadable = asked({"PYTHONPATH": path})
    assert (unloadable.stdout, unloadable.stderr, unloadable.returncode) == (b"", b"", 1)
    config.write_text("[models")
    damaged = asked({})
    assert (damaged.stdout.strip(), damaged.stderr, damaged.returncode) == (b"", b"", 0)


def modules_after(code, environment):
    """Return the names of the modules that a process of its own has loaded after `code`."""
    process = subprocess.run(
        [sys.executable, "-c", f"import sys\ntry:\n{indent(code, ' ')}\nfinally:\n print(*sys.modules)"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(process.stdout.split())


@pytest.mark.parametrize(
    ("words", "loaded"), [(["mo"], set()), (["models"], set()), (["energy", "--js"], {"energy"})]
)
def test_only_what_is_completed_is_loaded(child_environment, words, loaded):
    environment = {**child_environment, **asking(*words)}
    modules = modules_after("from edgespec.cli import main\nmain([])", environment)
    assert {point.name for point in offered(COMMANDS).values() if point.module in modules} == loaded
    assert not modules & HEAVY


@pytest.mark.parametrize(
    "words",
    [["run", "--target", ""], ["bench", "--"], ["compare", "--targets", "a,"], ["cache", "import", ""]],
)
def test_nothing_heavy_is_loaded_to_complete(child_environment, config, words):
    environment = {**child_environment, **asking(*words)}
    assert not modules_after("from edgespec.cli import main\nmain([])", environment) & HEAVY


def test_no_command_loads_anything_heavy_before_it_is_called(child_environment):
    code = (
        "import typer\n"
        "from edgespec.cli.app import app\n"
        "root = typer.main.get_command(app)\n"
        "for name in root.list_commands(None): assert root.get_command(None, name).params is not None\n"
    )
    modules = modules_after(code, child_environment)
    assert {point.module for point in offered(COMMANDS).values()} <= modules
    assert not modules & HEAVY


def test_defaults_that_are_written_down_here_are_those_of_the_package():
    """What they are is not imported where options are declared: it would load numpy."""
    (span,) = get_type_hints(calibrate.CalibrationGoal, include_extras=True)["span"].__metadata__
    assert span.show_default == str(SPAN)
    prompts = bench_options.SuitePrompts(suite=bench_options.SuiteChoice())
    variants = bench_options.VariantChoice()
    assert variants.settings(prompts) == BenchSettings(parse_variants("auto"))
    training, judging = draft_options.TrainingOptions(), draft_options.EvaluationOptions()
    asked = request.DraftRequest(target="", hours=1.0)
    assert training.types == ",".join(asked.types)
    assert draft_options.DataOptions().answer_tokens == asked.answer_tokens
    assert read_number("", draft_options.DataOptions().budget, is_size=True) == asked.budget
    assert judging.settings(ThreadsAndKernels()) == EvaluationSettings()

    def option(group, name):
        return get_type_hints(group, include_extras=True)[name].__metadata__[0]

    assert f"{vocabulary_ranking.KEPT}, " in option(draft_options.TrainingOptions, "keep").show_default
    shown = option(draft_options.DataOptions, "data_tokens").show_default
    assert f"{request.TOKENS_PER_HOUR // 1000}k for each hour" in shown
    assert f"at least {request.LEAST_TOKENS // 1000}k" in shown
    assert option(compare.AccuracyOptions, "text_tokens").min == WINDOW
