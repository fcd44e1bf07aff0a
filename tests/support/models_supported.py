"""`make models-supported`: checks every architecture, and writes what works where docs and doctor read it.

python tests/support/models_supported.py             all of them; writes the page and the package's table
python tests/support/models_supported.py qwen35 lfm2 some of them; only prints
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from architecture_check import EQUAL, UNUSED, Check, check_architectures
from edgespec.llama.gguf_header import RESULTS, ArchitectureSupport, architecture_key
from tiny_models import ARCHITECTURES, MTP

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/models-supported.md"
TABLE = ROOT / "edgespec/llama" / RESULTS

COLUMNS = ("architectures", "kind", "on the kernels", "any batch", "drafts", "cache kept", "tokens back")
MARK = "<!-- Below this line: `make models-supported` -->\n"


def problems(check: Check) -> list[str]:
    """Return what is wrong, and not only missing: each one is a bug."""
    wrong = [check.error] if check.error else []
    wrong += [f"{name}: {text}" for name, text in check.drafts.items() if text not in (EQUAL, UNUSED)]
    if not check.error and not check.keeps_cache:
        wrong.append("a copied cache does not go on as its original")
    if not check.error and not check.stops:
        wrong.append("Ctrl-C does not end a pass, or the text does not go on after it")
    return wrong


def cells(check: Check) -> tuple[str, ...]:
    """Return the row of COLUMNS."""
    if check.error and not check.claimed and not check.declined:
        return (check.name, ", ".join(check.kinds), *("?",) * (len(COLUMNS) - 2))
    n = check.claimed + sum(check.declined.values())
    return (
        check.name,
        ", ".join(check.kinds),
        "all" if check.claimed == n else f"{check.claimed} of {n}",
        "same bits" if check.same_in_any_batch else "rounds",
        ", ".join(check.works) or "none",
        "yes" if check.keeps_cache else "no",
        "yes" if check.takes_back else "no",
    )


def markdown(checks: Sequence[Check]) -> str:
    """Return the page's tables: what works, and which operations the kernels leave to llama.cpp.

    Architectures of which the same was found share a row.
    """
    names: dict[tuple[str, ...], list[str]] = {}
    for check in checks:
        name, *found = cells(check)
        names.setdefault(tuple(found), []).append(name)
    rows = [(", ".join(alike), *found) for found, alike in names.items()]
    left = [
        (check.name, str(check.n_pieces), ", ".join(f"{n} {name}" for name, n in check.declined.items()))
        for check in checks
        if check.declined
    ]
    return f"{_table(COLUMNS, rows)}\n{_table(('architecture', 'pieces', 'left to llama.cpp'), left)}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head, *body = (f"| {' | '.join(line)} |\n" for line in (columns, *rows))
    return head + "|---" * len(columns) + "|\n" + "".join(body)


def supports(checks: Sequence[Check]) -> dict[str, ArchitectureSupport]:
    """Return the package's table."""
    return {
        architecture_key(
            ARCHITECTURES[check.name].gguf_name, own_head=MTP in check.kinds
        ): ArchitectureSupport(
            check.same_in_any_batch, tuple(check.declined), check.works, check.keeps_cache, check.takes_back
        )
        for check in checks
    }


def main(names: Sequence[str]) -> int:
    """Check the architectures `names`, or all and write what was found; return the exit code."""
    if unknown := [name for name in names if name not in ARCHITECTURES]:
        print(f"unknown architecture {unknown[0]!r}; known: {', '.join(ARCHITECTURES)}", file=sys.stderr)
        return 2
    checks, wrong = [], []
    for check in check_architectures(names or list(ARCHITECTURES)):
        print(" | ".join(cells(check)), flush=True)
        checks.append(check)
        wrong += [f"{check.name}: {problem}" for problem in problems(check)]
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    if wrong or names:
        return 1 if wrong else 0
    text = PAGE.read_text()
    PAGE.write_text(f"{text[: text.index(MARK) + len(MARK)]}\n{markdown(checks)}")
    lines = (f'"{name}": {msgspec.json.encode(found).decode()}' for name, found in supports(checks).items())
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
