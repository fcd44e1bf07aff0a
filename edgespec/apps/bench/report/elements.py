"""Builds the HTML elements of the report's page. Use `escaped` for text from users, model files or suites."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from edgespec.apps.bench.report.rows import NOT_APPLICABLE, UNAVAILABLE

Columns = Sequence[tuple[str, bool]]
"""Headings, and whether the column holds figures, which are aligned right."""


def escaped(value: object) -> str:
    """Return a value as escaped text; a figure and its percent sign stay on one line."""
    return html.escape(str(value)).replace(" %", "&nbsp;%")


def section(heading: str, body: str) -> str:
    """Return a section, or "" if it would be empty."""
    return f"<section><h2>{escaped(heading)}</h2>\n{body}</section>" if body else ""


def table(columns: Columns, rows: Iterable[Sequence[str]], label: str) -> str:
    """Return a table of texts; if it is wider than the page, the table scrolls, not the page."""
    head = "".join(f"<th scope=col{_right(figures)}>{escaped(name)}</th>" for name, figures in columns)
    lines = []
    for first, *others in rows:
        cells = [f"<th scope=row{_right(columns[0][1])}>{escaped(first)}</th>"]
        for text, (_, figures) in zip(others, columns[1:], strict=True):
            cells.append(f"<td{_right(figures)}{_muted(text)}>{escaped(text)}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    body = "\n".join(lines)
    return (
        f'<div class=scroll tabindex=0 role=region aria-label="{escaped(label)}"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>\n"
    )


def _right(figures: bool) -> str:
    return " class=n" if figures else ""


def _muted(text: str) -> str:
    return " data-muted" if text in (UNAVAILABLE, NOT_APPLICABLE) else ""


def details(summary: str, body: str, *, opened: bool) -> str:
    """Return a part of the page that a reader can fold and unfold."""
    return f"<details{' open' if opened else ''}><summary>{escaped(summary)}</summary>\n{body}</details>\n"


def card(heading: str, facts: Mapping[str, Any]) -> str:
    """Return a card with names and values, or "" if there are none."""
    if not facts:
        return ""
    lines = "".join(
        f"<div><dt>{escaped(str(name).replace('_', ' '))}</dt><dd>{escaped(_value(value))}</dd></div>"
        for name, value in facts.items()
    )
    return f"<div class=card><h3>{escaped(heading)}</h3><dl>{lines}</dl></div>\n"


def _value(value: object) -> str:
    """Return a fact as text, which says if the value is unavailable."""
    if value is None or value == "":
        return UNAVAILABLE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_value(one)}" for name, one in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(_value(one) for one in value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
