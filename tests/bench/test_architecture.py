"""The picture of docs/development.md: what bench/architecture.py draws of the import contract."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

import architecture
from chart import IMAGES, ROOT, THEMES, Theme

PAGE = (ROOT / "docs" / "development.md").read_text(encoding="utf-8")
LAYERS = architecture.read_layers()
APPS = [name for row in LAYERS.apps for name in row]


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
def test_the_committed_picture_is_that_of_the_contract(theme: Theme) -> None:
    name = f"architecture-{theme.name}.svg"
    committed = (IMAGES / name).read_text(encoding="utf-8")
    ElementTree.fromstring(committed)
    assert committed == architecture.draw(theme, LAYERS), "run bench/architecture.py"
    assert f"images/{name}" in PAGE


def test_the_page_lists_the_core_and_the_apps() -> None:
    assert [name for name in LAYERS.core if f"\n- `{name}`: " not in PAGE] == []
    assert [name for name in APPS if f"\n| `{name}` | " not in PAGE] == []


def test_an_app_of_a_new_row_is_drawn_above_those_that_it_may_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(architecture.NOTES, "new", "above all")
    layers = architecture.Layers(LAYERS.core, [["new"], *LAYERS.apps])
    drawn = ElementTree.fromstring(architecture.draw(THEMES[0], layers))
    heights = {text.text: float(text.attrib["y"]) for text in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert heights["new"] < min(heights[name] for name in APPS)
    assert max(heights[name] for name in APPS) < min(heights[name] for name in LAYERS.core)
