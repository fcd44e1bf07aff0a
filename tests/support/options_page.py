"""Writes docs/options.md from the tables of options: `python tests/support/options_page.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from edgespec.apps.server.request_fields import REFUSED, REFUSED_VECTORS
from edgespec.decoding.option_table import Option
from edgespec.decoding.options import Options
from edgespec.decoding.sampling import TABLE, SamplingParams

PAGE = Path(__file__).parents[2] / "docs" / "options.md"
INTRODUCTION = """\
# Options of a generation

The options of one text, and their names in Python (fields of `SamplingParams` and `Options`), on the command
line (`run`, `chat`), in requests to [the server](server.md#the-servers-api) and in
[Ollama's](server.md#ollamas-api) `options`.

    edgespec run --temp 0.7 --top-p 0.9 --seed 1 "Why is the sky blue?"

Samplers come in llama.cpp's order: penalties, DRY, top-n-sigma, top-k, typical, top-p, min-p, XTC,
temperature. All are exact with any drafter.

"""
FIELDS_HEADING = """
## Fields that are refused

Fields of other servers' requests that would change the answer: a 400, unless they are `null`, false, 0 or
empty. The last are those of requests for vectors and scores. Any other unknown field has no effect.

"""


def page() -> str:
    """Return the page."""
    options: Mapping[str, Any] = vars(SamplingParams()) | {"seed": None, "lenience": Options().lenience}
    rows = [
        [
            code(name),
            code("" if option.command == "-" else option.command_name(name)),
            code("" if option.request == "-" else option.request_name(name)),
            code(option.ollama),
            option.default or shown(options.get(name)),
            values(option),
            option.help,
        ]
        for name, option in TABLE.items()
    ]
    heads = ["Python", "Command line", "Request", "Ollama", "Default", "Values", ""]
    return (
        INTRODUCTION
        + table(heads, rows)
        + FIELDS_HEADING
        + f"{', '.join(map(code, (*REFUSED, *REFUSED_VECTORS)))}.\n"
    )


def values(option: Option) -> str:
    """Return the values that are allowed, in words."""
    if not option.request_bounds:
        return option.bounds
    asked = replace(option, limits=option.request_bounds, above=False, gap=0.0)
    return f"{option.bounds}; requests: {asked.bounds}"


def table(heads: list[str], rows: Iterable[list[str]]) -> str:
    """Return a Markdown table."""

    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"

    return line(heads) + "|---" * len(heads) + "|\n" + "".join(map(line, rows))


def code(text: str) -> str:
    """Return text as code; nothing for none."""
    return f"`{text}`" if text else ""


def shown(value: object) -> str:
    """Return a default in words."""
    return "" if value is None or value == {} else f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
