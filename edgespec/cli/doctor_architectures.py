"""`edgespec doctor --architectures`: what works with each of them, and the page that says it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from edgespec.architecture_check import EQUAL, UNUSED, Check, check_architectures
from edgespec.cli.console import err, out, print_line, print_table
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama import kernels
from edgespec.llama.architectures import ARCHITECTURES

COLUMNS = ("architecture", "kind", "on the kernels", "any batch", "drafts", "cache kept", "tokens back")
MARK = "<!-- Below this line: `make models-supported` -->\n"


def report_architectures(names: Sequence[str] | None, *, json: bool) -> int:
    """Check the architectures `names`, None: all, and print what was found; return the exit code.

    Raises UsageError for an unknown name.
    """
    names = list(names or ARCHITECTURES)
    if unknown := [name for name in names if name not in ARCHITECTURES]:
        raise UsageError(f"unknown architecture {unknown[0]!r}; known: {', '.join(ARCHITECTURES)}")
    with err.status("testing the kernels"):
        in_use = kernels.load()
    checks = list(_shown(names))
    if json:
        found = {"kernels": in_use.name, "architectures": msgspec.to_builtins(checks)}
        out.print_json(data=found)
    else:
        table = Table(*COLUMNS, box=None, pad_edge=False)
        for check in checks:
            table.add_row(*cells(check))
        print_table(table)
        out.print()
        print_line("kernels", in_use.name + (f": {in_use.reason}" if in_use.reason else ""))
        for check in filter(problems, checks):
            print_line("wrong", f"{check.name}: {'; '.join(problems(check))}")
    return EdgespecError.exit_code if any(map(problems, checks)) else 0


def _shown(names: Sequence[str]) -> Iterator[Check]:
    with err.status(f"checking {names[0]}") as status:
        for i, check in enumerate(check_architectures(names), 1):
            if i < len(names):
                status.update(f"checking {names[i]} ({i + 1} of {len(names)})")
            yield check


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


# ---- the page ----


def markdown(checks: Sequence[Check]) -> str:
    """Return the page's tables: what works, and which operations the kernels leave to llama.cpp."""
    rows = [cells(check) for check in checks]
    left = [
        (check.name, str(check.n_pieces), ", ".join(f"{n} {name}" for name, n in check.declined.items()))
        for check in checks
        if check.declined
    ]
    return f"{_table(COLUMNS, rows)}\n{_table(('architecture', 'pieces', 'left to llama.cpp'), left)}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write_page(path: Path) -> None:
    """Check all architectures and write what was found below the MARK of the page `path`.

    Raises EdgespecError, and leaves the page as it is, if anything is wrong.
    """
    checks = list(check_architectures(list(ARCHITECTURES)))
    for check in checks:
        if wrong := problems(check):
            raise EdgespecError(f"{check.name}: {'; '.join(wrong)}")
    text = path.read_text()
    prose = text[: text.index(MARK) + len(MARK)]
    path.write_text(f"{prose}\n{markdown(checks)}")
