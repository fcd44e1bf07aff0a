"""Makes the picture of docs/development.md: the import contract of pyproject.toml, and one request.

    .venv/bin/python bench/architecture.py

Packages and apps are drawn in the order of import-linter's layers: each imports from those below it. A new
one needs a note in NOTES.
Writes docs/images/architecture-light.svg and architecture-dark.svg.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from itertools import pairwise

from chart import IMAGES, ROOT, THEMES, Theme

NOTES = {
    "cli": "commands of the core",
    "engine": "requests in shared passes",
    "drafting": "what drafts, and how much",
    "decoding": "the exact loop",
    "models": "names, files, pulling",
    "llama": "llama.cpp and the kernels",
    "platform": "the machine, plug-ins",
    "errors": "what a user may meet",
    "batch": "files of requests",
    "forge": "makes drafts",
    "server": "OpenAI's, Anthropic's, Ollama's APIs",
    "bench": "measures and compares",
    "speech": "Whisper",
    "embed": "vectors of texts",
    "images": "images in prompts",
    "energy": "joules",
    "nodes": "layers on other machines",
}
"""Contents of each package of the core and each app."""

REQUEST = (
    ("cli", "reads options", "right"),
    ("engine", "opens a pair", "left"),
    ("models", "finds the files", "left"),
    ("llama", "loads weights", "left"),
    ("engine", "queues the request", "left"),
    ("drafting", "proposes tokens", "right"),
    ("decoding", "builds the tree", "right"),
    ("llama", "runs the target once", "right"),
    ("decoding", "verifies, emits", "right"),
    ("drafting", "learns", "right"),
    ("engine", "streams text", "left"),
    ("cli", "prints", "left"),
)
"""`edgespec run`: a package of the core, what it does, and the side of the dot where that is written."""
FIRST_REPEATED = 5
"""Index of the first step that is done again until the text ends."""

_WIDTH, _FIRST_DOT, _STEP = 960, 250, 62
_APP_HEIGHT, _BAND_HEIGHT, _GAP, _TITLE_HEIGHT = 30, 46, 6, 26


@dataclass(frozen=True)
class Layers:
    """The order of imports, top first: each row imports from those below it."""

    core: list[str]
    apps: list[list[str]]
    """Apps of one row do not import each other."""


def read_layers() -> Layers:
    """Return the layers of the import contract."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    rows = {contract["containers"][0]: contract["layers"] for contract in contracts if "layers" in contract}
    apps = [[name.strip() for name in row.split("|")] for row in rows["edgespec.apps"]]
    core = [row.partition(" ")[0] for row in rows["edgespec"]]  # testing, beside engine, is no part of a run
    return Layers([name for name in core if name != "apps"], apps)


def draw(theme: Theme, layers: Layers) -> str:
    """Return the picture as SVG."""
    core_top = _TITLE_HEIGHT + len(layers.apps) * (_APP_HEIGHT + _GAP) + _TITLE_HEIGHT + _GAP
    tops = {name: core_top + i * (_BAND_HEIGHT + _GAP) for i, name in enumerate(layers.core)}
    height = core_top + len(layers.core) * (_BAND_HEIGHT + _GAP)
    said = "; ".join(f"{name} {action}" for name, action, _ in REQUEST)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{theme.text}">',
        f"<title>Packages in the order of imports, and a request through them: {said}</title>",
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{theme.edgespec}"/></marker></defs>',
        _text(0, 16, "Apps: each imports the core and apps of rows below it", bold=True),
        *_apps(theme, layers.apps),
        _text(0, core_top - 10, "Core: each package imports those below it", bold=True),
        *(_band(theme, tops[name], name) for name in layers.core),
        *_request(theme, tops),
    ]
    return "\n".join([*parts, "</svg>", ""])


def _apps(theme: Theme, rows: list[list[str]]) -> list[str]:
    parts = []
    for i, row in enumerate(rows):
        width = (_WIDTH - _GAP * (len(row) - 1)) / len(row)
        for j, name in enumerate(row):
            x, y = j * (width + _GAP), _TITLE_HEIGHT + i * (_APP_HEIGHT + _GAP)
            parts += [
                _box(theme, x, y, width, _APP_HEIGHT),
                _text(x + 12, y + 20, name, bold=True),
                _text(x + 80, y + 20, NOTES[name]),
            ]
    return parts


def _band(theme: Theme, y: int, name: str) -> str:
    return "\n".join(
        [
            _box(theme, 0, y, _WIDTH, _BAND_HEIGHT),
            _text(12, y + 19, name, bold=True),
            _text(12, y + 37, NOTES[name]),
        ]
    )


def _request(theme: Theme, tops: dict[str, int]) -> list[str]:
    """Return the request's way: a numbered dot for each step, arrows between them, and what is repeated."""
    middle = _BAND_HEIGHT // 2
    dots = [(_FIRST_DOT + i * _STEP, tops[name] + middle) for i, (name, *_) in enumerate(REQUEST)]
    left, top = dots[FIRST_REPEATED][0] - _STEP / 2 - 12, min(tops.values()) - 20
    bottom = max(tops[name] for name, *_ in REQUEST) + _BAND_HEIGHT + 4
    parts = [
        f'<rect x="{left:g}" y="{top}" width="{_WIDTH - left - 2:g}" height="{bottom - top}" rx="8" '
        f'fill="none" stroke="{theme.edgespec}" stroke-dasharray="5 4"/>',
        _text(left + 10, top + 14, "repeated for each step, until the text ends"),
    ]
    for (x0, y0), (x1, y1) in pairwise(dots):
        share = 13 / ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5  # an arrow ends at the dots' edges
        dx, dy = (x1 - x0) * share, (y1 - y0) * share
        parts.append(
            f'<path d="M{x0 + dx:.1f} {y0 + dy:.1f}L{x1 - dx:.1f} {y1 - dy:.1f}" '
            f'stroke="{theme.edgespec}" stroke-width="1.5" marker-end="url(#arrow)"/>'
        )
    for number, ((x, y), (_, action, side)) in enumerate(zip(dots, REQUEST, strict=True), 1):
        label_x, anchor = (x + 16, "start") if side == "right" else (x - 16, "end")
        parts += [
            f'<circle cx="{x}" cy="{y}" r="11" fill="{theme.edgespec}"/>',
            f'<text x="{x}" y="{y + 4}" text-anchor="middle" font-size="12" fill="{theme.background}">'
            f"{number}</text>",
            f'<text x="{label_x}" y="{y + 4}" text-anchor="{anchor}" font-size="12">{action}</text>',
        ]
    return parts


def _box(theme: Theme, x: float, y: float, width: float, height: float) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" '
        f'fill="{theme.baseline}" fill-opacity="0.16"/>'
    )


def _text(x: float, y: float, words: str, *, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}"{weight}>{words}</text>'


def main() -> None:
    """Write the pictures."""
    layers = read_layers()
    for theme in THEMES:
        (IMAGES / f"architecture-{theme.name}.svg").write_text(draw(theme, layers))


if __name__ == "__main__":
    main()
