"""The page at `/`: chat with the served model. Plain files that load nothing from elsewhere.

The markdown of an answer becomes a tree, from which the page makes elements; no HTML is made on the way. A
node is text shown as in the source, or a dictionary of a `kind` that markdown.js draws.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import PurePath
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline, image, link
from markdown_it.tree import SyntaxTreeNode
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_FILES = sorted(
    file.name for file in resources.files(__package__).iterdir() if PurePath(file.name).suffix in _TYPES
)
_INDEX = "index.html"

_MARKDOWN = "/page/markdown"

PARTS = frozenset({*(f"/{name}" for name in _FILES if name != _INDEX), _MARKDOWN})
"""The paths that the page itself asks for, many times in a conversation."""

PATHS = PARTS - {_MARKDOWN} | {"/"}
"""The paths of the page's files. They hold no user's data, so they need no API key: the page asks for it."""

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"  # no string ever becomes markup
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asked for again each time, which the ETag answers with 304
}


def add_page(app: Starlette) -> None:
    """Add the page's routes to `app`."""
    app.router.routes.extend(_route("/" if name == _INDEX else f"/{name}", name) for name in _FILES)
    app.router.routes.append(Route(_MARKDOWN, _answer_markdown, methods=["POST"], include_in_schema=False))


async def _answer_markdown(request: Request) -> Response:
    """Answer with the blocks of a text; ?open: more is to come."""
    source = (await request.body()).decode(errors="replace")
    return JSONResponse(await run_in_threadpool(_timed_blocks, source, "open" in request.query_params))


def _timed_blocks(source: str, is_open: bool) -> dict[str, Any]:
    began = time.thread_time()
    found = blocks(source, is_open=is_open)
    return {
        "blocks": found,
        "ms": 1000 * (time.thread_time() - began),
    }  # the page asks less often for slow ones


def _route(path: str, name: str) -> Route:
    media_type = f"{_TYPES[PurePath(name).suffix]}; charset=utf-8"
    body = resources.files(__package__).joinpath(name).read_bytes()
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {**_HEADERS, "ETag": etag}

    async def answer(request: Request) -> Response:
        known = (
            tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")
        )
        if etag in known:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=media_type, headers=headers)

    return Route(path, answer, include_in_schema=False)


# ---- markdown ----

Node = dict[str, Any] | str

DEEPEST = 10
"""Lists and quotes within each other that a phone has room for; deeper ones are shown as written."""

_ONLY_MARKS = re.compile(r"[-+*_=#`~|:> \t]*(?:\d+[.)]?)?")
_BEGUN = re.compile(r"(?<![\w*`])(\*\*?|`)(?=[^\s*`])([^*`]*)\*?$")
_BEGUN_KINDS = {"**": "strong", "*": "em", "`": "codespan"}
_ADDRESS = re.compile(
    r"((?:\bhttps?://|\bwww\.)[^\s<]+|(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+)", re.IGNORECASE
)
_LINE_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)
_TASK = re.compile(r"\[([ xX])\]\s")


def blocks(source: str, *, is_open: bool = False) -> list[dict[str, Any]]:
    """Return the blocks of `source`: each a node, with its source up to the next block as `raw`.

    `is_open`: more text is to come, so a half-written block at the end is read as if it were complete.
    """
    source = _settled(source) if is_open else source
    try:
        return [*_MarkdownReader(source, is_open=is_open).blocks()]
    except RecursionError:  # a thousand strong texts within each other
        return [{"raw": source, "node": _as_written(source)}]


def _settled(source: str) -> str:
    """Return `source` without a last line of only marks, which may become a rule, a list or a heading.

    The first line of a table gets its second one.
    """
    above, newline, last = source.rpartition("\n")
    last = "" if _ONLY_MARKS.fullmatch(last) else re.sub(r"(\*\*[^*]+)\*$", r"\1", last)
    settled = above + newline + last
    *before, head = settled.removesuffix("\n").split("\n")
    in_table = bool(before) and before[-1].startswith("|")
    if not head.startswith("|") or in_table or _PARSER.parse(settled)[-1].type != "paragraph_close":
        return settled
    n_cells = len(re.findall(r"(?<!\\)\|", re.sub(r"\|\s*$", "", head)))
    return "\n".join([*before, head, "|" + "-|" * n_cells])


def _noting_source(rule: Callable[[StateInline, bool], bool]) -> Callable[[StateInline, bool], bool]:
    def noting(state: StateInline, silent: bool) -> bool:
        start = state.pos
        found = rule(state, silent)
        if found and not silent:
            state.tokens[-1].meta["raw"] = state.src[start : state.pos]
        return found

    return noting


_PARSER = MarkdownIt("commonmark", {"maxNesting": 3 * DEEPEST})
_PARSER.enable(["table", "strikethrough"]).disable(
    "text_join"
)  # escapes stay apart from the words around them
_PARSER.inline.ruler.at("link", _noting_source(link))
_PARSER.inline.ruler.at("image", _noting_source(image))


class _MarkdownReader:
    """Reads one text."""

    def __init__(self, source: str, *, is_open: bool) -> None:
        self._lines = [f"{line}\n" for line in source.split("\n")]
        self._lines[-1] = self._lines[-1][:-1]
        self._tree = SyntaxTreeNode(_PARSER.parse(source))
        self._growing = _last_text(self._tree) if is_open else None

    def blocks(self) -> Iterator[dict[str, Any]]:
        found = self._tree.children
        starts = [node.map[0] if node.map and i else 0 for i, node in enumerate(found)]
        for node, start, end in zip(found, starts, [*starts[1:], len(self._lines)], strict=False):
            yield {"raw": "".join(self._lines[start:end]), "node": self._block(node, 0)}

    def _block(self, node: SyntaxTreeNode, depth: int) -> Node:
        match node.type:
            case "bullet_list" | "ordered_list" | "blockquote" if depth == DEEPEST and node.map:
                return _as_written("".join(self._lines[slice(*node.map)]))
            case "html_block":
                return _as_written(node.content)
            case "fence" | "code_block":
                code = node.content.removesuffix("\n")
                return {"kind": "code", "text": code, "mark": node.markup, "info": node.info}
            case "bullet_list" | "ordered_list" | "blockquote":
                depth += 1
        made: dict[str, Any] = {"kind": node.type, "children": self._children(node, depth)}
        match node.type:
            case "heading":
                made["level"] = int(node.tag[1:])
            case "ordered_list":
                made["start"] = node.attrs.get("start", 1)
            case "th" | "td":
                made["align"] = str(node.attrs.get("style", "")).removeprefix("text-align:")
            case "list_item":
                made["box"] = _task_box(made["children"])
        return made

    def _children(self, node: SyntaxTreeNode, depth: int) -> list[Node]:
        made: list[Node] = []
        for child in node.children:
            if child.type == "inline":
                made += self._words(child)
            elif child.type == "paragraph" and child.hidden:  # in a list without blank lines
                made += self._children(child, depth)
            else:
                made.append(self._block(child, depth))
        return made

    def _words(self, parent: SyntaxTreeNode) -> Iterator[Node]:
        """Yield the nodes within a line of text: words, code, links, marks."""
        for node in parent.children:
            match node.type:
                case "text":
                    yield from self._text(node)
                case "text_special":  # an escape or a character reference
                    yield {"kind": "character", "text": node.content, "raw": node.markup}
                case "softbreak" | "hardbreak":
                    yield {"kind": "break"}
                case "html_inline":  # <br> is the only line break in a cell of a table
                    yield {"kind": "break"} if _LINE_BREAK.fullmatch(node.content) else node.content
                case "code_inline":
                    yield {"kind": "codespan", "children": [node.content]}
                case "link" | "image":
                    yield self._link(node)
                case _:
                    yield {"kind": node.type, "children": [*self._words(node)]}

    def _link(self, node: SyntaxTreeNode) -> Node:
        href = str(node.attrs["href" if node.type == "link" else "src"])
        last = node.nester_tokens.closing if node.nester_tokens else node
        words = [*self._words(node)] or [href]
        return {"kind": node.type, "href": href, "raw": last.meta.get("raw"), "children": words}

    def _text(self, node: SyntaxTreeNode) -> Iterator[Node]:
        words, begun = node.content, None
        if node is self._growing:
            begun = _BEGUN.search(words)
            words = words[: begun.start()] if begun else words.rstrip("*`")
        if node.parent and node.parent.type == "link":
            yield words
        else:
            yield from _with_links(words)
        if begun:
            yield {"kind": _BEGUN_KINDS[begun[1]], "children": [begun[2]]}


def _as_written(source: str) -> dict[str, Any]:
    return {"kind": "source", "text": source.removesuffix("\n")}


def _last_text(tree: SyntaxTreeNode) -> SyntaxTreeNode | None:
    """Return the words that a text ends with; None if it ends with code, a link or the like."""
    leaves = [node for node in tree.walk() if not node.children and node.type not in ("root", "inline")]
    last = leaves[-1] if leaves else None
    return last if last and last.type == "text" and last.parent and last.parent.type == "inline" else None


def _task_box(children: list[Node]) -> str | None:
    """Remove a task's mark from the words at the beginning of a list item; return it as a box."""
    first = children[0] if children else ""
    words = first["children"] if isinstance(first, dict) and first["kind"] == "paragraph" else children
    found = _TASK.match(words[0]) if words and isinstance(words[0], str) else None
    if not found:
        return None
    words[0] = found.string[found.end() :]
    return "\u2610 " if found[1] == " " else "\u2611 "


def _with_links(words: str) -> Iterator[Node]:
    """Yield `words`, with a link for each address of the web or of mail."""
    for i, part in enumerate(_ADDRESS.split(words)):
        if not i % 2:
            yield part
            continue
        address = part.rstrip("?!.,:;*_~'\"")
        while address.endswith(")") and address.count(")") > address.count("("):
            address = address[:-1].rstrip("?!.,:;*_~'\"")
        scheme = "" if "://" in address else "http://" if address.lower().startswith("www.") else "mailto:"
        yield {"kind": "link", "href": f"{scheme}{address}", "children": [address]}
        yield part[len(address) :]
