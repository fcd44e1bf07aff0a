"""The markdown that the server reads for its page. What the page makes of it is tested in a browser."""

from __future__ import annotations

import pytest

from edgespec.apps.server.page import DEEPEST, blocks


def words(node):
    """Return the kinds and words of a node."""
    if isinstance(node, str):
        return node
    inner = [words(child) for child in node.get("children", [node.get("text")])]
    return (node["kind"], *inner)


def read(source, **options):
    return [words(block["node"]) for block in blocks(source, **options)]


@pytest.mark.parametrize(
    ("source", "address", "after"),
    [
        ("see https://example.com/a_b_c.", "https://example.com/a_b_c", "."),
        ("see https://example.com/a_(b)) now", "https://example.com/a_(b)", ") now"),
        ("see www.example.com, now", "http://www.example.com", ", now"),
        ("see me@example.com!", "mailto:me@example.com", "!"),
    ],
)
def test_a_bare_address_is_a_link(source, address, after):
    [block] = blocks(source)
    before, link, *rest = block["node"]["children"]
    assert (before, link["kind"], link["href"], "".join(rest)) == ("see ", "link", address, after)


def test_no_link_is_within_a_link_or_code():
    assert read("[https://a.example](https://b.example) `https://c.example`") == [
        ("paragraph", ("link", "https://a.example"), " ", ("codespan", "https://c.example"))
    ]


@pytest.mark.parametrize("source", ["", "\n\n", "a", "a\n\n\nb\n", "\n\n# a\n\n[b]: c\n\nd\n\n"])
def test_the_blocks_hold_the_whole_source(source):
    assert "".join(block["raw"] for block in blocks(source)) in (source, "")


def test_what_is_nested_too_deeply_is_given_as_written():
    [found] = read("> " * (DEEPEST + 2) + "deep")
    for _ in range(DEEPEST):
        kind, found = found
        assert kind == "blockquote"
    assert found == ("source", "> " * (DEEPEST + 2) + "deep")


def test_an_open_text_ends_with_what_it_is_about_to_be():
    assert read("| a | b |", is_open=True) == [("table", ("thead", ("tr", ("th", "a"), ("th", "b"))))]
    assert read("a **b\n---", is_open=True) == [("paragraph", "a ", ("strong", "b"))]
    assert read("a **b\n---") == [("heading", "a **b")]
