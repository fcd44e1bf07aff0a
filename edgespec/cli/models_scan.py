"""`edgespec models scan`: the models on this disk, whoever pulled them, and what could draft for each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from edgespec.cli.console import err, message, out, print_table
from edgespec.cli.options import JsonOption
from edgespec.errors import EdgespecError
from edgespec.models.found.catalog import list_found
from edgespec.models.found.model import FoundModel
from edgespec.models.registry import load_registry
from edgespec.models.sources import format_size
from edgespec.platform.files import expand_user

if TYPE_CHECKING:
    from edgespec.models.found.facts import FactsReader, ModelFacts

_SHOWN_DIGITS = 6  # of a vocabulary's fingerprint


@dataclass(frozen=True, slots=True)
class ScannedModel:
    """A model, what its header tells, and its draft."""

    model: FoundModel
    facts: ModelFacts | None
    """None for one that cannot be used."""
    problem: str = ""
    """Why it cannot, in one line."""
    draft: str | None = None
    """The draft on this disk that a run would take."""
    speedup: float | None = None
    """Its estimated speed, in plain decoding's; None for the draft of a pair, or one made here."""
    to_pull: str | None = None
    """A draft that would be worth pulling, where there is none."""


def scan_command(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FOLDER", help="More folders to look into; for always: `folders` in models.toml."
        ),
    ] = None,
    *,
    json: JsonOption = False,
) -> None:
    """List the models on this disk: edgespec's, Ollama's, LM Studio's, llama.cpp's, the hub's cache.

    Headers are read, no weights. A draft is one with the same vocabulary that is worth trying.
    """
    from edgespec.models.found.facts import FactsReader

    listing = list_found([expand_user(folder).absolute() for folder in folders or ()])
    reader = FactsReader()
    with err.status("reading headers"):
        scanned = _scanned(listing.models, reader)
        reader.save()
    if json:
        out.print_json(data={"models": [*map(_described, scanned)], "problems": listing.problems})
        return
    if scanned:
        print_table(_table(scanned))
    for one in scanned:
        if one.problem:
            message(f"{one.model.name}: {one.problem}")
    for problem in listing.problems:
        message(problem)


def _scanned(models: list[FoundModel], reader: FactsReader) -> list[ScannedModel]:
    found = []
    for model in models:
        try:
            facts = reader.read(model.checked())
        except EdgespecError as error:
            problem = model.problem or str(error).removeprefix(f"{model.path}: ")
            found.append(ScannedModel(model, None, problem))
            continue
        found.append(ScannedModel(model, facts) if facts.kind else _with_draft(model, facts, models, reader))
    return found


def _with_draft(
    model: FoundModel, facts: ModelFacts, models: list[FoundModel], reader: FactsReader
) -> ScannedModel:
    """Return a text-generating model with the draft that a run would take."""
    from edgespec.drafting.found_drafts import best_draft
    from edgespec.engine.model_choice import choose_models
    from edgespec.models.draft_records import is_here
    from edgespec.models.found.suggestions import draft_to_pull

    _, registered = choose_models(model.name, None)
    if registered and is_here(registered):
        return ScannedModel(model, facts, draft=registered)
    if best := best_draft(model.path, facts, model.size, models, reader):
        return ScannedModel(model, facts, draft=best.model.name, speedup=best.speedup)
    names = f"{model.name} {model.path.name}"
    entry = draft_to_pull(load_registry(), names, facts, model.size)
    return ScannedModel(model, facts, to_pull=registered or (entry.name if entry else None))


def _described(one: ScannedModel) -> dict[str, Any]:
    """Return the JSON object of a model."""
    from edgespec.llama.kernel_coverage import kernel_coverage

    model, facts = one.model, one.facts
    covered = kernel_coverage(facts.matrices) if facts else None
    return {
        "name": model.name,
        "source": model.source,
        "path": str(model.path),
        "size": model.size,
        "sha256": model.sha256,
        "problem": one.problem or None,
        "not_used": [*model.notes],
        "kind": (facts.kind or "model") if facts else None,
        "architecture": facts.architecture if facts else None,
        "title": facts.title if facts else None,
        "parameters": facts.parameters if facts else None,
        "quantization": facts.quantization if facts else None,
        "vocabulary": (facts.vocabulary or None) if facts else None,
        "kernels": {"share": covered.share, "declined": [*covered.declined]} if covered else None,
        "draft": one.draft,
        "draft_speedup": one.speedup,
        "worth_pulling": one.to_pull,
    }


def _table(scanned: list[ScannedModel]) -> Table:
    from edgespec.llama.kernel_coverage import kernel_coverage

    table = Table("name", "architecture", "params", "quant", "size", "vocabulary", "kernels", "draft")
    table.box, table.pad_edge = None, False
    for one in scanned:
        facts, size = one.facts, format_size(one.model.size)
        if facts is None:
            table.add_row(one.model.name, "not usable", "-", "-", size, "-", "-", "-")
        elif facts.kind:
            table.add_row(one.model.name, facts.kind, "-", facts.quantization or "-", size, "-", "-", "-")
        else:
            table.add_row(
                one.model.name,
                facts.architecture,
                facts.size_label or _parameters(facts.parameters),
                facts.quantization,
                size,
                _short(facts.vocabulary),
                str(kernel_coverage(facts.matrices) or "-"),
                _draft(one),
            )
    return table


def _draft(one: ScannedModel) -> str:
    if one.draft:
        return one.draft + (f" (estimated {one.speedup:.1f}x)" if one.speedup else "")
    return f"none; worth pulling: {one.to_pull}" if one.to_pull else "-"


def _parameters(n: int) -> str:
    """Return a number of parameters as models are called: "1.5B", "494M"."""
    return f"{n / 1e9:.1f}B" if n >= 1e9 else f"{n / 1e6:.0f}M" if n >= 1e6 else f"{n / 1e3:.0f}k"


def _short(vocabulary: str) -> str:
    name, _, digits = vocabulary.rpartition("-")
    return f"{name}-{digits[:_SHOWN_DIGITS]}" if name else "-"
