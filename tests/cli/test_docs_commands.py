"""The command lines in README.md and docs/: each is run by a test, or is in NOT_RUN with the reason."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from edgespec.cli.app import app

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]

NO_COMMANDS = (
    ('{"', "JSON"), ('"', "JSON"), ("[", "a section of a file"), ("0 1 * * *", "a crontab"),
    ("Engine(", "a signature"), ("options=None", "a signature"), ("1 + alpha", "a formula"),
    ("P(it and", "a formula"), ("└╴", "a tree"), ("tokens   ", "a table"), ("sequence   ", "a table"),
    ("category   ", "a table"), ("step N:", "output"), ("14:03:22", "output"),
    ("InexactDrafterError", "output"),
)  # fmt: skip
"""How blocks begin that hold no commands, and what they hold."""

RUN_BY = {
    "curl -sSN": "tests/apps/server/test_docs_integration.py",
    "curl http://127.0.0.1:8080/v1/models": "tests/apps/server/test_docs_integration.py",
    "curl -sS http://127.0.0.1:11434": "tests/apps/server/ollama_api/test_ollama_limits.py",
    "curl http://127.0.0.1:8080/v1/audio": "tests/apps/server/test_server_audio.py",
    "curl http://127.0.0.1:8080/v1/embeddings": "tests/apps/server/test_server_embeddings.py",
    "curl http://127.0.0.1:8080/v1/rerank": "tests/apps/server/test_server_embeddings.py",
    "haproxy -c": "tests/apps/server/test_haproxy.py",
    "python -c": "tests/engine/test_docs_python.py",
    ".venv/bin/python docs/minimal.py": "tests/engine/test_minimal.py",
    ".ci/run": ".ci/run",
    "make run": ".ci/run",
    "make test": ".ci/run",
}
"""How a command line of another program than edgespec begins -> the file that runs it."""

NOT_RUN = {
    "sudo": "changes the machine",
    "echo": "writes a rule that changes the machine",
    "python3 -m venv": "makes an environment: `make` does, before it can test anything",
    ".": "enters an environment",
    "pip install": "fetches packages: `make` does, before it can test anything",
    "edgespec/bin/pip install": "needs a board",
    "make": "takes minutes, and fetches or compiles: its targets are checked below",
    "podman": "needs an engine of containers",
    "export": "sets variables of the reader's shell",
    "openssl": "makes a key, which has no wrong form",
    "printf": "feeds edgespec",
    "cat": "feeds edgespec",
    "make-prompts": "stands for the reader's own",
    "use-answers": "stands for the reader's own",
    "arecord": "needs a microphone",
    "ssh": "needs a second machine",
    "scp": "needs a second machine",
    "rsync": "needs a second machine",
    "ray start": "needs a second machine; tests/apps/batch/test_batch_ray.py starts workers on this one",
    "systemctl": "needs a user's systemd",
    "journalctl": "needs a user's systemd",
    "loginctl": "needs a user's systemd",
    ".venv/bin/python bench/": "measures for minutes: its options are checked below",
    "claude": "a client that is not installed; bench/run_agent.py runs it",
    "aider": "a client that is not installed; bench/run_agent.py runs it",
    "qwen": "a client that is not installed; bench/run_agent.py runs it",
    "open-webui": "a client that is not installed",
    "lm-eval": "fetches its tasks; tests/apps/server/test_server_echo.py asks as it does",
}
"""How a command line of another program begins -> why no test runs it."""


def blocks(page: Path) -> list[str]:
    """Return the indented blocks of a page, and its fenced ones without a language or of bash."""
    block = re.compile(
        r"^(?P<fence>`{3,})(?P<language>\w*)\n(?P<fenced>.*?)^(?P=fence)$"
        r"|(?<=\n\n)(?P<indented>(?: {4}[^\n]*\n)+)",
        re.M | re.S,
    )
    found = block.finditer(page.read_text(encoding="utf-8"))
    return [one["indented"] or one["fenced"] for one in found if one["language"] in (None, "", "bash")]


def lines(block: str) -> Iterator[str]:
    """Yield the command lines of a block: lines that end within quotes or with a backslash are joined."""
    if block.startswith("$ "):  # an example with its output, which test_docs_texts.py runs
        block = block.partition("\n")[0].removeprefix("$ ")
    rest = ""
    for line in block.replace("\\\n", " ").splitlines():
        rest = f"{rest}\n{line}" if rest else line.strip()
        try:
            shlex.split(rest, comments=True)
        except ValueError:
            continue
        if rest:
            yield rest
        rest = ""
    assert not rest, rest


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command of a page, those of a pipe or a list apart, assignments left out."""
    for block in blocks(page):
        if block.strip().startswith(tuple(start for start, _ in NO_COMMANDS)):
            continue
        for line in lines(block):
            lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
            lexer.whitespace_split = True
            words: list[str] = []
            for word in [*lexer, ";"]:
                if word in ("|", "&&", "&", ";"):
                    if words and not words[0].startswith("#"):
                        yield words
                    words = []
                elif words or not re.match(r"\w+=", word):
                    words.append(word)


def is_ours(words: list[str]) -> bool:
    return words[0].rpartition("/")[2] == "edgespec"


EVERY = [
    pytest.param(page, words, id=f"{page.stem}: {' '.join(words)[:60]}")
    for page in PAGES
    for words in commands(page)
]
OURS = [case for case in EVERY if is_ours(case.values[1])]
OTHERS = [case for case in EVERY if not is_ours(case.values[1])]


@pytest.mark.parametrize(("page", "words"), OURS)
def test_a_command_takes_what_it_is_given(
    page: Path, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parses a command line and its values as `edgespec` does, and goes no further."""
    monkeypatch.chdir(tmp_path)
    command: Any = typer.main.get_command(app)
    rest = words[1 : next((i for i, word in enumerate(words) if word in "<>" or word[0] == "#"), None)]
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        name, *rest = rest
        command = command.get_command(None, name)
        assert command, f"{name} is no command"
    if rest and not hasattr(command, "commands"):
        command.make_context(words[1], rest)
    else:
        assert not {*rest} - {name for option in command.params for name in option.opts}


def test_what_the_pages_show_is_run_by_tests() -> None:
    """Each command with each option that a page gives it is one that a test calls."""
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "tests").rglob("refusals.txt")]
    texts = [file.read_text(encoding="utf-8") for file in files if "docs" not in file.name]
    shown = set()
    for case in OURS:
        _, words = case.values
        name = next((word for word in words[1:] if not word.startswith("-")), "")
        shown |= {(name, word.partition("=")[0]) for word in words if re.fullmatch(r"--[a-z-]+(=.*)?", word)}
    missing = {
        (name, option)
        for name, option in shown
        if not any(option in text and re.search(rf"\b{name}\b", text) for text in texts)
    }
    assert missing == set()


def start_of(words: list[str], starts: Iterable[str]) -> str:
    """Return the longest of `starts` with which a command begins, "" for none."""
    line = " ".join(words)
    return max((start for start in starts if f"{line} ".startswith(start)), key=len, default="")


@pytest.mark.parametrize(("page", "words"), OTHERS)
def test_a_command_of_another_program_is_run_by_a_test_or_has_a_reason(page: Path, words: list[str]) -> None:
    start = start_of(words, {*RUN_BY, *NOT_RUN})
    assert start, f"{page.name}: `{' '.join(words)}` needs a line in RUN_BY or NOT_RUN"
    assert start not in RUN_BY or (ROOT / RUN_BY[start]).exists()
    if words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert [
            name for name in targets if not re.search(rf"^(?:[\w. -]+ )?{name}\b.*:", makefile, re.M)
        ] == []
    if words[1:] and words[1].startswith("bench/"):
        scripts = [ROOT / words[1], *(ROOT / "bench" / name for name in ("script.py", "prompts.py"))]
        known = "".join(script.read_text(encoding="utf-8") for script in scripts)
        given = [word for word in words if word.startswith("-")]
        assert [option for option in given if f'"{option}"' not in known] == []


def test_every_reason_is_needed() -> None:
    used = {start_of(case.values[1], {*RUN_BY, *NOT_RUN}) for case in OTHERS}
    assert {*RUN_BY, *NOT_RUN} - used == set()
    text = "".join(block for page in PAGES for block in blocks(page))
    assert [start for start, _ in NO_COMMANDS if start not in text] == []


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_begins_with_what_it_is_for_and_a_command(page: Path) -> None:
    title, purpose, command = page.read_text(encoding="utf-8").split("\n\n")[:3]
    assert re.match(r"# \w", title)
    assert re.match(r"[A-Za-z`]", purpose)
    assert command.startswith(("    ", "```\n"))
    assert next(commands(page))[0] in command


EXTRAS = {"--vad": "vad", "--ray": "ray", "draft make": "forge", ".mp3": "audio"}
"""Words of command lines -> the extra that they need; README.md installs `serve`."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_command_comes_after_the_extra_that_it_needs(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for line in re.findall(r"^ {4}(edgespec .*)$", text, re.M):
        for needs in [extra for words, extra in EXTRAS.items() if words in line.partition(" # ")[0]]:
            assert f"edgespec[{needs}]" in text.partition(line)[0], line


def test_commands_are_found() -> None:
    assert len(OURS) > 110
    assert len(OTHERS) > 60


def test_every_extra_of_users_is_in_the_table_of_start() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `pip install 'edgespec\[(\w+)\]'` \|", page, re.MULTILINE)
    assert set(listed) == {*extras} - {"dev", "pi"}
