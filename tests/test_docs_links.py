"""Links of README.md and docs/: each leads to a file that is there, and to a heading that it has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_readme_names_every_page() -> None:
    index = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"(docs/{page.name})" not in index] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(
        r"`((?:edgespec|tests|bench|csrc|pi|docs)/[\w./-]+\.\w+)`", page.read_text(encoding="utf-8")
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_scripts_that_are_named_exist() -> None:
    folders = (ROOT.glob("*.py"), *((ROOT / name).rglob("*.py") for name in ("bench", "edgespec", "tests")))
    there = {path.name for files in folders for path in files}
    named = {
        (page.name, name)
        for page in PAGES
        for name in re.findall(r"`(?:bench/)?([a-z_]+\.py)\b", page.read_text(encoding="utf-8"))
    }
    assert {(page, name) for page, name in named if name not in there} == set()


def test_pages_that_the_code_names_exist() -> None:
    files = [ROOT / "Makefile", *(ROOT / "edgespec").rglob("*.py"), *(ROOT / "bench").glob("*.py")]
    named = {
        name for file in files for name in re.findall(r"docs/[\w/-]+\.md", file.read_text(encoding="utf-8"))
    }
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
