"""Kinds of drafts are beside the core: it finds ours as anybody's, and names none of them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import edgespec
from edgespec import Engine, SamplingParams
from edgespec.drafting.draft import PlainDraft
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.gguf_header import DRAFTS, check_complete_file
from other_package import offer
from tiny_gguf import write_tiny_gguf

PACKAGE = Path(edgespec.__file__).parent
CORE = [
    path
    for room in ("decoding", "drafting", "engine", "llama")
    for path in sorted((PACKAGE / room).rglob("*.py"))
    if not {"heads", "foreign"} & set(path.parts)
]
KIND = re.compile(r"eagle|dflash|dspark|gemma|mtp|translat|\.heads|\.foreign", re.IGNORECASE)
OTHERS = {
    "mtp",  # the word of `--drafter`, and the key of models.toml
    "@mtp",  # in the names of profiles
    "-mtp",  # in the table of architectures
    "load_mtp",  # llama.cpp's
}


def names_in(path: Path) -> set[str]:
    """The names that code uses and defines, the modules it imports, and the strings that are one word."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        for field in ("id", "attr", "arg", "name", "module"):
            found.add(getattr(node, field, None))
        if isinstance(node, ast.Constant):
            found.add(node.value)
    return {name for name in found if isinstance(name, str) and re.fullmatch(r"[\w.@-]+", name)}


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_core_names_no_kind_of_draft(path):
    assert not {name for name in names_in(path) if KIND.search(name)} - OTHERS


class Mine(PlainDraft):
    """A kind of draft that a user wrote: an ordinary model, in a file that says for how many layers."""

    what = "a draft of mine"

    def check(self, target):
        self.header = check_complete_file(self.header)
        if self.header.gguf.number("mine.n_layer") != target.n_layer:
            raise UsageError(f"{self.header.path}: made for another model than {target.path.name}")

    def costs(self, curve):
        USED.append(self.name)
        return curve


USED: list[str] = []
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a draft of that kind, which a package offers."""
    offer(monkeypatch, "mine", f"{__name__}:Mine", DRAFTS)
    return lambda n_layer: write_tiny_gguf(tmp_path / "mine.gguf", extra={"mine.n_layer": n_layer}, n_layer=1)


def test_a_kind_of_draft_that_a_package_offers_drafts(written, tiny_path):
    USED.clear()
    with Engine(tiny_path, written(2), n_threads=1, profile=False) as engine:
        found = engine.generate("some text", n_predict=30, params=GREEDY, drafter="model", gamma=3)
        alone = engine.generate("some text", n_predict=30, params=GREEDY, drafter="none")
    assert USED
    assert found.sources["model"][0]
    assert found.token_ids == alone.token_ids


def test_it_says_itself_what_it_does_not_fit(written, tiny_path):
    with pytest.raises(UsageError, match="made for another model"):
        Engine(tiny_path, written(3), profile=False)


def test_its_file_is_no_target(written):
    with pytest.raises(EdgespecError, match="a draft of mine, which drafts beside its own target only"):
        Engine(written(2), profile=False)
