"""The commands in README.md and docs/: each is there and has the options that it is given."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main

from edgespec.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(page: Path) -> list[list[str]]:
    """Return the words of each command line of a page, its continuation lines joined, comments left out."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    fenced = re.findall(r"^```\w*\n(.*?)^```$", text, re.M | re.S)
    indented = re.findall(r"^ {4}(.*)$", text, re.M)
    code = "\n".join([*fenced, *indented])
    lines = re.findall(r"^(?:\$ )?(?:\S+ \| |\S*/bin/)?(edgespec [^|#\n]*)", code, re.M)
    return [words(re.split(r" {3,}| < | > ", line)[0]) for line in lines]


def words(line: str) -> list[str]:
    """Return the words of a command line; one that a comment after it cut off is left out with it."""
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


def unknown(line: list[str]) -> list[str]:
    """Return what of a command line edgespec does not have."""
    command: Any = typer.main.get_command(app)
    rest = line[1:]
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        found = command.get_command(None, rest[0])
        if found is None:
            return [rest[0]]
        command, rest = found, rest[1:]
    options = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    given = [word.partition("=")[0] for word in rest if re.fullmatch(r"--?[a-z][a-z-]*(=.*)?", word)]
    return [word for word in given if word not in options | {"--help", "-h"}]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_exist(page: Path) -> None:
    assert {" ".join(line): found for line in commands(page) if (found := unknown(line))} == {}


def test_what_the_pages_show_is_run_by_tests() -> None:
    """Each command with each option that a page gives it is one that a test calls."""
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "tests").rglob("refusals.txt")]
    texts = [file.read_text(encoding="utf-8") for file in files if "docs" not in file.name]
    shown = set()
    for page in PAGES:
        for line in commands(page):
            name = next((word for word in line[1:] if not word.startswith("-")), "")
            shown |= {
                (name, word.partition("=")[0]) for word in line[1:] if re.fullmatch(r"--[a-z-]+(=.*)?", word)
            }
    missing = {
        (name, option)
        for name, option in shown
        if not any(option in text and re.search(rf"\b{name}\b", text) for text in texts)
    }
    assert missing == set()


EXTRAS = {
    "--vad": "vad",
    "--ray": "ray",
    "draft make": "forge",
    ".mp3": "audio",
}
"""Words of command lines -> the extra that they need; README.md installs `serve`."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_command_comes_after_the_extra_that_it_needs(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for line in re.findall(r"^ {4}(edgespec .*)$", text, re.M):
        for needs in [extra for words, extra in EXTRAS.items() if words in line.partition("   ")[0]]:
            assert f"edgespec[{needs}]" in text.partition(line)[0], line


def test_commands_are_found() -> None:
    assert sum(len(commands(page)) for page in PAGES) > 60


def test_every_extra_of_users_is_in_the_table_of_start() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `pip install 'edgespec\[(\w+)\]'` \|", page, re.MULTILINE)
    assert set(listed) == {*extras} - {"dev", "pi"}
