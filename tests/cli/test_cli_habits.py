"""What people bring from other tools and other machines: each works, or one line says how it is done here."""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
from functools import cache

import pytest
import typer.main

from command_line import COMMAND, failed, run_cli, user_environment
from edgespec import Engine
from edgespec.apps.server.commands.ps import running_servers
from edgespec.cli.app import app
from edgespec.engine.model_choice import choose_models
from edgespec.errors import UsageError
from edgespec.models.registry import set_default
from terminals import Terminal
from user_models import write_user_models

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


def test_what_llama_cpp_is_called_with_runs_here(environment, tiny_path):
    options = ("--temp", 0, "--no-stats", "--raw", "--drafter", "none")
    usual = run_cli("run", "abc", "-t", tiny_path, *options, "-n", 9, env=environment)
    found = run_cli("run", "-m", tiny_path, "-p", "abc", *options, "-n9", "-s", 7, "-c", 99, env=environment)
    assert (found.returncode, found.stdout, found.stderr) == (0, usual.stdout, "")


@pytest.mark.parametrize("words", [["own", "abc"], ["mine", "abc"], ["own", "a", "b"], ["FILE", "abc"]])
def test_a_model_before_the_prompt_as_in_ollama(environment, tiny_path, tmp_path, words):
    pair = '[pairs.mine]\ntarget = "own"\ndraft = "own"\n'
    write_user_models(tmp_path / "config", {"own": tiny_path}, pair)
    words = [str(tiny_path) if word == "FILE" else word for word in words]
    options = ("--temp", 0, "-n", 9, "--no-stats", "--drafter", "none")
    usual = run_cli("run", " ".join(words[1:]), "-t", tiny_path, *options, env=environment)
    found = run_cli("run", *words, *options, env=environment)
    assert (found.returncode, found.stdout, found.stderr) == (0, usual.stdout, "")


def test_a_word_that_is_a_model_or_a_prompt(environment, tiny_path, tmp_path):
    write_user_models(tmp_path / "config", {"own": tiny_path})
    options = ("--temp", 0, "-n", 9, "--no-stats", "--drafter", "none")
    usual = run_cli("run", "abc", "-t", tiny_path, *options, env=environment)
    piped = run_cli("run", "own", *options, env=environment, stdin=b"abc")
    assert (piped.stdout, piped.stderr) == (
        usual.stdout,
        "edgespec: own is the model, and the prompt is what is piped in\n",
    )
    as_prompt = run_cli("run", "own", "-t", tiny_path, *options, env=environment)
    assert (as_prompt.returncode, as_prompt.stderr) == (0, "")
    with Terminal([*COMMAND, "run", "own"], environment) as terminal:
        assert terminal.wait() == 2
        assert "own is a model: `edgespec chat own` talks with it" in terminal.rest()


def test_the_length_that_llama_cpp_has_for_a_full_context(environment, tiny_path):
    options = ("-t", tiny_path, "--temp", 0, "--no-stats", "--drafter", "none", "--ctx", 64, "--raw")
    whole, same = (run_cli("run", "abc", *options, "-n", n, env=environment) for n in (-1, -2))
    assert (same.returncode, same.stdout) == (0, whole.stdout)


def test_the_engine_takes_no_empty_name():
    for target, draft in (("", None), ("x.gguf", "")):
        with pytest.raises(UsageError, match=r"empty|no such file"):
            Engine(target, draft)


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


# ---- standard input beside a prompt ----

GREEDY = ("--raw", "--drafter", "none", "--temp", "0", "-n", "12", "--no-stats")


@pytest.fixture(scope="module")
def written(tiny_path, tmp_path_factory):
    """What is written for a prompt, without anything on stdin."""
    home = user_environment(tmp_path_factory.mktemp("written"))
    return cache(lambda prompt: run_cli("run", prompt, "-m", tiny_path, *GREEDY, env=home).stdout)


@pytest.fixture
def notes(tmp_path):
    """The folder of the files that are piped in."""
    for name, text in {"notes": "the notes\n", "question": "asked\n", "empty": ""}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("shell", "prompt"),
    [
        ("cat notes.txt | {run} question", "question\n\nthe notes\n"),
        ("cat notes.txt | {run} -f question.txt last", "asked\n\n\nlast\n\nthe notes\n"),
        ("cat notes.txt | {run} -", "the notes\n"),
        ("cat notes.txt | {run}", "the notes\n"),
        ("(sleep 1.5; cat notes.txt) | {run} question", "question\n\nthe notes\n"),
        ("printf '' | {run} question", "question"),
        ("printf ' \\n' | {run} question", "question"),
        ("{run} question < /dev/null", "question"),
        ("{run} question <&-", "question"),
    ],
)
def test_what_is_piped_in_follows_the_prompt(environment, tiny_path, notes, written, shell, prompt):
    command = shell.format(run=shlex.join([*COMMAND, "run", "-m", str(tiny_path), *GREEDY]))
    process = subprocess.run(
        ["sh", "-c", command],
        cwd=notes,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout == written(prompt)
    assert written("question") != written("question\n\nthe notes\n"), "they can be told apart"


@pytest.mark.parametrize("kind", ["pipe", "socket", "pipe of a grandparent"])
def test_an_open_stdin_that_nobody_writes_to_is_not_waited_for(environment, tiny_path, written, kind):
    """As programs start others: with a pipe (Python) or a socket (Node) that they keep open."""
    command = [*COMMAND, "run", "question", "-m", str(tiny_path), *GREEDY]
    if kind == "pipe of a grandparent":
        command = ["sh", "-c", f"{shlex.join(command)}; true"]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            command,
            stdin=theirs if kind == "socket" else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert process.wait(timeout=60) == 0
        assert process.stdout.read() == written("question")
        assert process.stderr.read() == (
            "edgespec: nothing came through standard input, which is open: the prompt is used alone\n"
        )
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe:
                pipe.close()


def test_in_a_terminal_nothing_is_waited_for(environment, tiny_path):
    with Terminal([*COMMAND, "run", "question", "-m", str(tiny_path), *GREEDY], environment) as terminal:
        assert terminal.wait() == 0
        assert "edgespec: " not in terminal.rest()


def test_stdin_that_an_option_reads_is_no_part_of_the_prompt(environment, tiny_path):
    words = ("run", "question", "-m", tiny_path, *GREEDY)
    found = run_cli(*words, "--json-schema", "-", env=environment, stdin=b'{"const": 1}')
    assert (found.returncode, found.stdout.strip()) == (0, "1"), found.stderr


# ---- commands as in Ollama, and a default model ----


@pytest.mark.parametrize("word", ["pull", "list", "show", "rm"])
def test_commands_of_ollama_are_those_of_models(environment, word):
    there = {"rm": "remove"}.get(word, word)
    ours, theirs = (
        run_cli(*words, "--help", env=environment).stdout for words in ([word], ["models", there])
    )
    assert ours.splitlines()[2:] == theirs.splitlines()[2:]
    assert f"Usage: edgespec {word} " in ours
    assert run_cli("help", word, env=environment).stdout == ours


def test_servers_that_run(tmp_path):
    """From a /proc of ours: grep is another program, `run` no server; 44 does not listen yet; 46 is of 42.

    47 has just ended, 48 is a model of it, 49 is gone but for its command line; a link of 50 is closed.
    """
    lines = {
        42: "python -m edgespec serve --port 8081",
        43: "/usr/bin/python /bin/edgespec run hi",
        44: "/usr/bin/python /bin/edgespec node",
        45: "grep edgespec serve",
        46: "/usr/bin/python -P -c import\u00a0serve_model --alias=small",
        47: "python -m edgespec serve",
        48: "/usr/bin/python -P -c import\u00a0serve_model --alias=small",
        49: "python -m edgespec serve",
        50: "python -m edgespec serve --host a\u00a0b.sock",
        51: "/usr/bin/python -P -c",
    }
    for pid, line in lines.items():
        (tmp_path / f"proc/{pid}/fd").mkdir(parents=True)
        state = {46: "S 42", 47: "Z 1", 48: "X 47", 49: ""}.get(pid, "S 1")
        (tmp_path / f"proc/{pid}/stat").write_text(state and f"{pid} (a (b) c) {state} 1 1")
        (tmp_path / f"proc/{pid}/cmdline").write_bytes(
            line.replace(" ", "\0").replace("\u00a0", " ").encode() + b"\0"
        )
    (tmp_path / "proc/42/fd/3").symlink_to("socket:[777]")
    (tmp_path / "proc/50/fd/3").symlink_to("socket:[778]")
    (tmp_path / "proc/50/fd/4").write_text("")  # readlink fails
    (tmp_path / "proc/net").mkdir()
    socket_line = (
        "   0: 0100007F:1F91 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000 0 777 1 0\n"
    )
    (tmp_path / "proc/net/tcp").write_text("  sl  local_address\n" + socket_line)
    (tmp_path / "proc/net/unix").write_text(
        "Num       RefCount Protocol Flags    Type St Inode Path\n"
        "0: 00000002 00000000 00010000 0001 01 778 /tmp/a b.sock\n"
        "0: 00000003 00000000 00000000 0001 03  779\n"
    )
    found = [(one.pid, one.command, one.addresses, one.models) for one in running_servers(tmp_path)]
    assert found == [
        (42, "serve --port 8081", ("127.0.0.1:8081",), ("small",)),
        (44, "node", (), ()),
        (50, "serve --host 'a b.sock'", ("unix:/tmp/a b.sock",), ()),
    ]


def test_a_default_model(environment, tiny_path, tmp_path):
    options = ("--temp", 0, "-n", 9, "--no-stats", "--drafter", "none")
    usual = run_cli("run", "abc", "-t", tiny_path, *options, env=environment)
    assert run_cli("models", "default", env=environment).stdout == "default\n"
    run_cli("models", "add", tiny_path, "--name", "own", env=environment)
    assert run_cli("models", "default", "own", env=environment).stdout == "own\n"
    assert run_cli("run", "abc", *options, env=environment).stdout == usual.stdout
    shown = json.loads(run_cli("show", "own", "--json", env=environment).stdout)["models"]
    assert [(one["name"], one["default"], one["path"]) for one in shown] == [("own", True, str(tiny_path))]
    gone = run_cli("rm", "own", env=environment)
    assert "own was the default model: `edgespec models default NAME`" in gone.stderr
    failed(run_cli("run", "abc", *options, env=environment), 2, "models.toml")
    by_variable = run_cli("run", "abc", *options, env=environment | {"EDGESPEC_MODEL": str(tiny_path)})
    assert (by_variable.returncode, by_variable.stdout) == (0, usual.stdout)
    assert run_cli("models", "default", "default", env=environment).stdout == "default\n"
    assert "default" not in (tmp_path / "config/edgespec/models.toml").read_text()


def test_a_default_pair_has_its_own_draft(environment, tiny_path, tmp_path, monkeypatch):
    pairs = "".join(f'[pairs.{name}]\ntarget = "own"\ndraft = "{draft}"\n' for name, draft in PAIRS.items())
    write_user_models(tmp_path / "config", {"own": tiny_path, "small": tiny_path}, pairs)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    for name, draft in PAIRS.items():
        set_default(name)
        assert choose_models(None, None) == ("own", draft)
    assert choose_models("own", None) == ("own", "own"), "the first pair's"


PAIRS = {"first": "own", "second": "small"}


# ---- what does not take what is written ----

FULL_OR_CLOSED = [
    ("{command} 2>/dev/full", 0, "TEXT", ""),
    ("{command} 2>&-", 0, "TEXT", ""),
    ("{command} >/dev/full", 1, "", "edgespec: error: standard output: No space left on device"),
    ("{command} >/dev/full 2>/dev/full", 1, "", ""),
    ("{command} >&-", 2, "", "edgespec: error: standard output is closed"),
]


@pytest.mark.parametrize(
    ("kind", "shell", "code", "stdout", "stderr"),
    [
        *(("run", *case) for case in FULL_OR_CLOSED),
        *((kind, *FULL_OR_CLOSED[at]) for kind in ("list", "help") for at in (2, 4)),  # stderr has nothing
    ],
)
def test_standard_streams_that_are_full_or_closed(environment, tiny_path, kind, shell, code, stdout, stderr):
    """With a message too, so that there is something to be lost."""
    words = [
        "run",
        "abc",
        "-m",
        str(tiny_path),
        "--show-draft",
        "-n",
        "4",
        "--temp",
        "0",
        "--drafter",
        "none",
    ]
    command = {"run": words, "list": ["models", "list"], "help": ["--help"]}[kind]
    usual = run_cli(*command, env=environment)
    process = subprocess.run(
        ["sh", "-c", shell.format(command=shlex.join([*COMMAND, *command]))],
        env=environment | {"COLUMNS": "80"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=100,
    )
    assert process.returncode == code
    assert process.stdout.decode(errors="replace") == (usual.stdout if stdout else "")
    assert stderr in process.stderr.decode()
    assert bool(stderr) == bool(process.stderr)


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "XDG_CONFIG_HOME"])
def test_a_relative_folder_of_the_xdg_standard_is_ignored(environment, tmp_path, variable):
    home = {"HOME": str(tmp_path / "home"), variable: "here"}
    process = run_cli("models", "default", "qwen3-4b", env=environment | home, cwd=tmp_path)
    assert process.stdout == "qwen3-4b\n"
    assert process.stderr == (
        f"edgespec: {variable}=here is ignored, as the XDG standard says of a path that is not absolute\n"
    )
    assert not (tmp_path / "here").exists()
    assert (tmp_path / "home/.config/edgespec/models.toml").exists() == (variable == "XDG_CONFIG_HOME")


# ---- help ----


def all_commands():
    """Yield the words and the command of all that can be called, groups too."""
    waiting = [([], typer.main.get_command(app))]
    while waiting:
        words, command = waiting.pop()
        yield words, command
        if hasattr(command, "commands"):
            waiting += [
                ([*words, name], command.get_command(None, name)) for name in command.list_commands(None)
            ]


def test_the_help_of_every_command(environment):
    for words, command in all_commands():
        text = run_cli(*words, "--help", env=environment | {"COLUMNS": "80"}).stdout
        assert "<bool>" not in text, words
        assert "list[" not in text, words
        assert "\u2026" not in text, "nothing is cut"
        assert "Example" in text, words
        assert ("--install-completion" in text) == (not words), "of edgespec itself only"
        for paragraph in (command.help or "").split("\n\n"):
            assert all(len(line) > 40 for line in lines_of(text, paragraph)[:-1]), (words, paragraph)


def test_the_short_help_of_every_command_fits_a_screen(environment):
    """-h: what is needed and used most; where options are left out, --help has them."""
    for words, command in all_commands():
        text = run_cli(*words, "-h", env=environment | {"COLUMNS": "80"}).stdout
        lines = text.splitlines()
        assert len(lines) <= 24 and max(map(len, lines)) <= 80, (words, text)
        assert "--help" in lines[-1]
        assert command.help.split()[0] in text
        for one in command.params:
            assert not one.required or (one.metavar or one.opts[-1]) in text, (words, one.name)
    run = run_cli("run", "-h", env=environment).stdout
    assert all(word in run for word in ("PROMPT", "--target", "--n-predict", "--temp", "--seed", "Example"))


def lines_of(text, paragraph):
    """Return the lines of a help text that a paragraph stands in."""
    begin, end = paragraph.split()[0], paragraph.split()[-1]
    found = re.search(rf"^ ({re.escape(begin)}.*?{re.escape(end)})\s*$", text, re.M | re.S)
    return found[1].splitlines() if found else []
