"""Makes the README's picture and table of raw runs in bench/results/: tokens a second beside llama.cpp's.

    .venv/bin/python bench/chart.py

One pair of bars, and one row, for each kind of work on the same machine and the same target file. One answer
at a time: the median over HumanEval's runs of tokens over seconds of a whole answer, its prompt included;
llama.cpp decodes plainly. Many clients: the tokens of all answers over the seconds until the last one ended.
The factor is that of the kernels, edgespec's plain decoding over llama.cpp's, times that of the drafts.
Writes docs/images/speed-light.svg and speed-dark.svg, and the table in README.md.
"""

from __future__ import annotations

import json
import re
import statistics
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
IMAGES = ROOT / "docs" / "images"
README = ROOT / "README.md"
ONE_ANSWER = "drafts-made-human-eval-longer-amd-epyc.json"
LARGER_TARGET = "drafts-made-larger-target-amd-epyc.json"
CLIENTS = "clients-amd-epyc.json"
MODELS = ROOT / "edgespec" / "models" / "models.toml"
HEAD = "qwen2.5-coder-1.5b-head-q4_0"
"""The draft that comes with edgespec; a raw run of an earlier one has its name, and another SHA-256."""

_WIDTH, _LEFT, _TOP, _BAR, _GAP = 720, 190, 46, 20, 22
_PIXELS_PER_TOKEN = 3.2


@dataclass(frozen=True)
class Theme:
    """Colours of a picture."""

    name: str
    text: str
    baseline: str
    edgespec: str
    background: str


THEMES = (
    Theme("light", "#1f2328", "#9aa3ad", "#0a7d55", "#ffffff"),
    Theme("dark", "#e6edf3", "#6e7681", "#3fcf8e", "#0d1117"),
)


@dataclass(frozen=True)
class Row:
    """Tokens a second of llama.cpp and of edgespec at the same work."""

    label: str
    """Name in the picture."""
    work: str
    """Name in the table."""
    llama_cpp: float
    plain: float
    """Speed of edgespec when nothing is drafted."""
    edgespec: float

    @property
    def ratio(self) -> float:
        """Speed of edgespec over that of llama.cpp."""
        return self.edgespec / self.llama_cpp

    @property
    def kernels(self) -> float:
        """The part of `ratio` that its kernels have, and how it shares passes."""
        return self.plain / self.llama_cpp

    @property
    def drafts(self) -> float:
        """The part of `ratio` that drafting has."""
        return self.edgespec / self.plain


def rows() -> list[Row]:
    """Return the rows of the picture, computed from the raw runs."""
    return [one_answer(), larger_target(), many_clients(4), many_clients(16)]


def one_answer() -> Row:
    """Return the row of one answer at a time: greedy, HumanEval, the default pair."""
    work = "default pair, one answer at a time"
    result, shipped = _read(ONE_ANSWER), tomllib.loads(MODELS.read_text())["models"][HEAD]["sha256"]
    (name,) = (draft["name"] for draft in result["drafts"] if draft["sha256"] == shipped)
    return _single_answers("one answer", work, result, Path(name).name.removesuffix(".gguf"))


def larger_target() -> Row:
    """Return the row of a target that costs what a 7B costs (bench/larger_target.py), drafted by the 0.5B."""
    result = _read(LARGER_TARGET)
    (draft,) = result["drafts"]
    work = "*synthetic* 7B-sized target, one answer at a time"
    return _single_answers("synthetic 7B, one answer", work, result, draft["name"])


def _single_answers(label: str, work: str, result: dict[str, Any], draft: str) -> Row:
    (runs,) = (group["runs"] for group in result["runs"] if group["temperature"] == 0)

    def speed(variant: str) -> float:
        speeds: list[float] = [run["tokens"] / run["total_s"] for run in runs if run["variant"] == variant]
        return statistics.median(speeds)

    return Row(label, work, speed("stock plain"), speed("plain"), speed(draft))


def many_clients(n_clients: int) -> Row:
    """Return the row of servers with that many clients at once."""
    speeds = {
        load["contender"]: sum(record["tokens"] for record in load["records"]) / load["seconds"]
        for load in _read(CLIENTS)["loads"]
        if load["n_clients"] == n_clients
    }
    label = f"{n_clients} clients at once"
    return Row(label, label, speeds["llama.cpp"], speeds["edgespec plain"], speeds["edgespec auto"])


_HEADING = "| | llama.cpp | edgespec | times | by kernels | by drafts |\n|---|---|---|---|---|---|\n"


def table() -> str:
    """Return the README's table, in Markdown."""
    return _HEADING + "".join(
        f"| {row.work} | {row.llama_cpp:.1f} | {row.edgespec:.1f} | **{row.ratio:.1f}** "
        f"| {row.kernels:.2f} | {row.drafts:.2f} |\n"
        for row in (one_answer(), larger_target(), many_clients(16))
    )


def with_table(readme: str) -> str:
    """Return the README with the table in the place of the one that it has."""
    return re.sub(r"^\| \| llama\.cpp \|.*\n(\|.*\n)+", lambda _: table(), readme, flags=re.MULTILINE)


def draw(theme: Theme, drawn: list[Row]) -> str:
    """Return the picture as SVG."""
    height = _TOP + len(drawn) * (2 * _BAR + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="14" fill="{theme.text}">',
        f"<title>Tokens a second: {'; '.join(_described(row) for row in drawn)}</title>",
        *_legend(theme),
    ]
    for i, row in enumerate(drawn):
        y = _TOP + i * (2 * _BAR + _GAP)
        parts += [
            f'<text x="{_LEFT - 12}" y="{y + _BAR + 5}" text-anchor="end">{row.label}</text>',
            *_bar(y, row.llama_cpp, theme.baseline, f"{row.llama_cpp:.0f}"),
            *_bar(y + _BAR, row.edgespec, theme.edgespec, f"{row.edgespec:.0f} ({row.ratio:.1f}x)"),
        ]
    return "\n".join([*parts, "</svg>", ""])


def _legend(theme: Theme) -> list[str]:
    return [
        f'<rect x="{_LEFT}" y="12" width="12" height="12" fill="{theme.baseline}"/>',
        f'<text x="{_LEFT + 18}" y="23">llama.cpp</text>',
        f'<rect x="{_LEFT + 110}" y="12" width="12" height="12" fill="{theme.edgespec}"/>',
        f'<text x="{_LEFT + 128}" y="23">edgespec, tokens a second (more is better)</text>',
    ]


def _bar(y: int, value: float, colour: str, label: str) -> list[str]:
    width = value * _PIXELS_PER_TOKEN
    return [
        f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR - 2}" fill="{colour}"/>',
        f'<text x="{_LEFT + width + 8:.1f}" y="{y + 14}">{label}</text>',
    ]


def _described(row: Row) -> str:
    return f"{row.label}, llama.cpp {row.llama_cpp:.0f}, edgespec {row.edgespec:.0f}"


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return found


def main() -> None:
    """Write the pictures and the README's table, and print the numbers."""
    drawn = rows()
    IMAGES.mkdir(exist_ok=True)
    for theme in THEMES:
        (IMAGES / f"speed-{theme.name}.svg").write_text(draw(theme, drawn))
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
    for row in drawn:
        numbers = f"{row.llama_cpp:7.1f}{row.plain:7.1f}{row.edgespec:7.1f}{row.ratio:6.2f}"
        print(f"{row.label:<26}{numbers}{row.kernels:6.2f}{row.drafts:6.2f}")


if __name__ == "__main__":
    main()
