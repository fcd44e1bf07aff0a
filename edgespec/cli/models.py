"""`edgespec models`: which models there are, and getting, checking and removing them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import asdict
from rich.cells import cell_len
from rich.table import Table

from edgespec.cli.completion import complete_name
from edgespec.cli.console import err, message, out, print_table
from edgespec.cli.made_drafts import described
from edgespec.cli.options import JsonOption
from edgespec.cli.progress import PullDisplay, pull_shown
from edgespec.engine.model_choice import has_own_head
from edgespec.errors import EdgespecError, UsageError
from edgespec.models.draft_records import draft_records
from edgespec.models.hub import format_size, hub_name, is_hub_name
from edgespec.models.on_disk import FoundModel, is_ollama_name, list_found
from edgespec.models.pull import Puller, VerifiedFile
from edgespec.models.registry import (
    DEFAULT_VARIABLE,
    Entry,
    Registry,
    add_local,
    load_registry,
    remove_local,
    set_default,
    user_models_file,
)
from edgespec.models.resolve import locate, resolve
from edgespec.models.store import Store, file_sha256
from edgespec.platform.files import expand_user

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgespec.models.footprint import FactsReader


# ---- `edgespec models scan`: models on this disk, whoever pulled them ----


_SHOWN_DIGITS = 6  # of a vocabulary's fingerprint


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
    """List the models on this disk: edgespec's, Ollama's, the hub's, in folders of other programs and yours.

    Headers are read, no weights. A draft is one with the same vocabulary that is worth trying.
    """
    from edgespec.models.footprint import FactsReader

    listing = list_found([expand_user(folder).absolute() for folder in folders or ()])
    reader = FactsReader()
    with err.status("reading headers"):
        rows = [_scanned(model, listing.models, reader) for model in listing.models]
        reader.save()
    if json:
        out.print_json(data={"models": rows, "problems": listing.problems})
        return
    if rows:
        table = Table("name", "architecture", "params", "quant", "size", "vocabulary", "kernels", "draft")
        table.box, table.pad_edge = None, False
        for row in rows:
            table.add_row(*_cells(row))
        print_table(table)
    for problem in [
        *(f"{row['name']}: {row['problem']}" for row in rows if row["problem"]),
        *listing.problems,
    ]:
        message(problem)


def _scanned(model: FoundModel, models: list[FoundModel], reader: FactsReader) -> dict[str, Any]:
    """Return a model's JSON object, with the draft that a run would use, and the facts in its header."""
    from edgespec.drafting.draft_search import best_draft
    from edgespec.engine.model_choice import choose_models
    from edgespec.llama.kernels import kernel_coverage
    from edgespec.models.draft_records import is_here
    from edgespec.models.footprint import draft_to_pull

    problem, facts = model.problem, None
    try:
        facts = reader.read(model.checked())
    except EdgespecError as error:
        problem = problem or str(error).removeprefix(f"{model.path}: ")
    covered = kernel_coverage(facts.matrices) if facts else None
    told = ("architecture", "title", "parameters", "quantization", "vocabulary")
    row: dict[str, Any] = {
        **{name: getattr(model, name) for name in ("name", "source", "size", "sha256")},
        "path": str(model.path),
        "problem": problem or None,
        "kind": (facts.kind or "model") if facts else None,
        **{name: getattr(facts, name, None) for name in told},
        "kernels": {"share": covered.share, "declined": [*covered.declined]} if covered else None,
        **dict.fromkeys(("draft", "draft_speedup", "worth_pulling")),
    }
    if facts is None or facts.kind:
        return row
    _, registered = choose_models(model.name, None)
    if registered and is_here(registered):
        row["draft"] = registered
    elif best := best_draft(model.path, facts, model.size, models, reader):
        row["draft"], row["draft_speedup"] = best.model.name, best.speedup
    else:
        entry = draft_to_pull(load_registry(), f"{model.name} {model.path.name}", facts, model.size)
        row["worth_pulling"] = registered or (entry.name if entry else None)
    return row


def _cells(row: dict[str, Any]) -> list[str]:
    size, n, quantization = format_size(row["size"]), row["parameters"] or 0, row["quantization"] or "-"
    if row["kind"] != "model":
        return [row["name"], row["kind"] or "not usable", "-", quantization, size, "-", "-", "-"]
    name, _, digits = (row["vocabulary"] or "").rpartition("-")
    kernels, estimated = row["kernels"], f" (estimated {row['draft_speedup'] or 0:.1f}x)"
    to_pull = f"none; worth pulling: {row['worth_pulling']}" if row["worth_pulling"] else "-"
    return [
        row["name"],
        row["architecture"],
        f"{n / 1e9:.1f}B" if n >= 1e9 else f"{n / 1e6:.0f}M",
        quantization,
        size,
        f"{name}-{digits[:_SHOWN_DIGITS]}" if name else "-",
        f"{kernels['share']:.0%}" if kernels else "-",
        row["draft"] + estimated * bool(row["draft_speedup"]) if row["draft"] else to_pull,
    ]


# ---- models ----


models_app = typer.Typer(
    rich_help_panel="Models and drafts",
    no_args_is_help=True,
    help="List, pull, check and remove models.",
    epilog="Example: edgespec models pull default",
)


def _state(entry: Entry, store: Store, registry: Registry) -> str:
    """Return "present" or "absent", and what else there is to know."""
    facts = ["present" if store.is_present(entry, registry) else "absent"]
    if entry.mtp:
        facts.append("MTP head")
    if entry.speech:
        facts.append("speech")
    if entry.path:
        facts.append("built in" if entry.packed else "yours")
    elif entry.derived:
        facts.append("derived")
    elif not entry.verified:
        facts.append("unverified")
    return ", ".join(facts)


def _describe(entry: Entry, store: Store, registry: Registry) -> dict[str, Any]:
    stamp, is_here = store.stamp(entry), store.is_present(entry, registry)
    has_base = entry.derived is not None and store.is_present(registry.get(entry.derived.base), registry)
    return {
        "name": entry.name,
        "family": entry.family,
        "params": entry.params,
        "quantization": entry.quantization,
        "licence": entry.licence,
        "size": entry.size or (stamp.size if stamp else None),
        "sha256": entry.sha256 or (stamp.sha256 if stamp else None),
        "verified": entry.verified,
        "derived_from": entry.derived.base if entry.derived else None,
        "mtp_head": entry.mtp,
        "speech": entry.speech,
        "present": is_here,
        "bytes_to_pull": 0 if is_here or has_base or entry.path else registry.bytes_to_pull(entry),
        "path": str(store.file(entry)),
    }


@models_app.command("list", epilog="Example: edgespec models list --all")
def list_command(
    *,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also what can be pulled by name.")] = False,
    json: JsonOption = False,
) -> None:
    """List the models that are here, drafts made here and other programs' models too, and the pairs of them.

    --json has those that are not here, too.
    """
    registry, store = load_registry(), Store.default()
    known = {entry.name: _describe(entry, store, registry) for entry in registry.entries.values()}
    made = draft_records(registry, message)
    others = [model for model in list_found().models if model.source != "edgespec"]
    if json:
        pairs = {name: asdict(pair) for name, pair in registry.pairs.items()}
        drafts = [described(draft) for draft in made]
        elsewhere = [_described_found(model) for model in others]
        out.print_json(
            data={"models": list(known.values()), "pairs": pairs, "drafts": drafts, "elsewhere": elsewhere}
        )
        return
    purposes = {draft.name: f"drafts for {draft.target_name}, {draft.gains.mean:.2f}x" for draft in made}
    listed = [one for one in known.values() if one["present"] or everything]
    rows = [("name", "size", "licence", "state")]
    for one in listed:
        state = purposes.get(one["name"]) or _state(registry.get(one["name"]), store, registry)
        size = one["size"] or one["bytes_to_pull"]
        rows.append((one["name"], format_size(size) if size else "-", one["licence"] or "-", state))
    for model in others:
        state = f"{model.source}'s" + ", not usable (see `edgespec models scan`)" * bool(model.problem)
        rows.append((model.name, format_size(model.size) if model.size else "-", "-", state))
    _print_rows(rows)
    names = {one["name"] for one in listed}
    whole = {name: pair for name, pair in registry.pairs.items() if {pair.target, pair.draft} <= names}
    if whole:
        out.print()
        _print_rows([("pair", "target", "draft"), *((n, one.target, one.draft) for n, one in whole.items())])
    if n := len(known) - len(listed):
        out.print(f"\n{n} more can be pulled by name: `edgespec models list --all`")


def _print_rows(rows: Sequence[tuple[str, ...]]) -> None:
    """Print a line for each row, however long: all columns but the last are aligned."""
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)][:-1]
    for row in rows:
        cells = [f"{cell}{' ' * (n - cell_len(cell))}" for cell, n in zip(row, [*widths, 0], strict=True)]
        out.print("  ".join(cells))


def _described_found(model: FoundModel) -> dict[str, Any]:
    facts = {"name": model.name, "source": model.source, "size": model.size, "path": str(model.path)}
    return facts | {"problem": model.problem or None}


@models_app.command("pull", epilog="Example: edgespec models pull default smollm2-135m-q4_1")
def pull_command(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME",
            help="Models, pairs, or hf:OWNER/REPO[:QUANTIZATION].",
            autocompletion=complete_name,
        ),
    ],
    json: JsonOption = False,
) -> None:
    """Download models, or make those derived from others. A stopped pull is resumed."""
    registry, store = load_registry(), Store.default()
    wanted = {entry.name: entry for name in names for entry in Puller(registry, store).expand(name)}
    files = pull_shown(list(wanted.values()))
    if json:
        out.print_json(data={"models": [_describe(entry, store, registry) for entry in wanted.values()]})
        return
    for file in files:
        out.print(str(file))


def _shown(entry: Entry, store: Store, registry: Registry) -> dict[str, Any]:
    """The facts of a model: its record, state and pairs, and those in its file's header."""
    from edgespec.llama.gguf_header import read_header

    facts = _describe(entry, store, registry) | {"state": _state(entry, store, registry)}
    facts["pairs"] = [name for name, pair in registry.pairs.items() if entry.name in asdict(pair).values()]
    facts["default"] = entry.name == registry.default
    header = read_header(store.file(entry)) if store.file(entry).is_file() else None
    facts["architecture"] = header.architecture if header else None
    facts["context"] = (header.n_ctx_train or None) if header else None
    facts["size"] = facts["size"] or registry.bytes_to_pull(entry) or None
    return facts


@models_app.command("show", epilog="Example: edgespec models show qwen2.5-coder-1.5b-q4_k_m")
def show_command(
    name: Annotated[str, typer.Argument(help="A model, or both of a pair.", autocompletion=complete_name)],
    json: JsonOption = False,
) -> None:
    """Print what is known of a model: size, licence, hash, place, pairs. Pulls nothing."""
    registry, store = load_registry(), Store.default()
    path = expand_user(name)
    entries = [Entry(name=name, path=path)] if path.is_file() else Puller(registry, store).expand(name)
    shown = [_shown(entry, store, registry) for entry in entries]
    if json:
        out.print_json(data={"models": shown})
        return
    for number, facts in enumerate(shown):
        if number:
            out.print()
        for field, value in facts.items():
            text = ", ".join(value) if isinstance(value, list) else value
            if field in ("size", "bytes_to_pull") and value:
                text = f"{format_size(value)} ({value:,} bytes)"
            if text and not isinstance(text, bool):
                out.print(f"{field.replace('_', ' '):13} {text}")


@models_app.command("default", epilog="Example: edgespec models default qwen3-4b")
def default_command(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A model, or a pair; `default`: the one that comes with edgespec.",
            autocompletion=complete_name,
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Print the model or pair that commands take where none is named, or set it, in your models.toml.

    The variable EDGESPEC_MODEL goes before it.
    """
    if name is not None:
        set_default(_default_name(name))
        if os.environ.get(DEFAULT_VARIABLE):
            message(f"{DEFAULT_VARIABLE} is set, and goes before it")
    current = load_registry().default or "default"
    if json:
        out.print_json(data={"default": current})
    else:
        out.print(current)


def _default_name(name: str) -> str:
    """Return the name to store in models.toml as the default; "" for the shipped pair. Raises UsageError."""
    registry = load_registry()
    if name == "default":
        return ""
    if name in registry.pairs:
        return name
    found = locate(name)
    if isinstance(found, Path):
        return name if not expand_user(name).is_file() else str(found.absolute())
    if found.speech:
        raise UsageError(f"{name}: a Whisper model writes no answers; `transcribe --model` takes it")
    return name


@models_app.command("path", epilog="Example: edgespec models path smollm2-135m-q4_1")
def path_command(
    name: Annotated[
        str, typer.Argument(help="A model, a pair, or hf:OWNER/REPO/FILE.gguf.", autocompletion=complete_name)
    ],
    json: JsonOption = False,
) -> None:
    """Print where a model's file is, or both of a pair. Fails if one is not here; pulls nothing."""
    registry = load_registry()
    pair = None if name in registry.entries else registry.pairs.get(name)
    names = {"target": pair.target, "draft": pair.draft} if pair else {"path": name}
    files = {role: str(resolve(one, pull_missing=False).absolute()) for role, one in names.items()}
    if json:
        out.print_json(data={"name": name, **files})
        return
    for file in files.values():
        out.print(file)


def _verified(name: str, files: Sequence[VerifiedFile]) -> dict[str, Any]:
    first, *others = files
    facts = {"name": name, "path": str(first.path), "ok": all(file.ok for file in files)}
    facts |= {"sha256": first.sha256 or None, "expected": first.expected, "problem": first.problem or None}
    return facts | {"parts": [_verified(name, [other]) for other in others]}


def _print_verified(name: str, files: Sequence[VerifiedFile]) -> None:
    for file in files:
        if not file.ok:
            out.print(
                f"{name}: DIFFERS: {file.path}: {file.problem or f'{file.sha256}, expected {file.expected}'}"
            )
        elif file.expected is None:
            out.print(f"{name}: {file.path}: complete; no hash of it is recorded (SHA-256 {file.sha256})")
    if all(file.ok and file.expected for file in files):
        out.print(f"{name}: ok")


@models_app.command("verify", epilog="Example: edgespec models verify smollm2-135m-q4_1")
def verify_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Default: all that are here.", autocompletion=complete_name),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Hash model files again and compare. Exits with 1 if one differs from what it should be."""
    registry, store = load_registry(), Store.default()
    entries: list[Entry] = []
    if names:
        entries = [entry for name in names for entry in Puller(registry, store).expand(name)]
        for entry in entries:
            if not store.file(entry).exists():
                name = hub_name(entry)
                raise EdgespecError(f"{name} is not on this machine; `edgespec models pull {name}`")
    else:
        entries = [entry for entry in registry.entries.values() if store.file(entry).exists()]
    with PullDisplay() as display:
        puller = Puller(registry, store, display.on_progress, display.on_message)
        results = {entry.name: puller.verify(entry) for entry in entries}
    if json:
        out.print_json(data={"models": [_verified(*result) for result in results.items()]})
    else:
        for result in results.items():
            _print_verified(*result)
    bad = {name for name, files in results.items() if not all(file.ok for file in files)}
    if others := sorted(entry.name for entry in entries if entry.name in bad and _is_elsewhere(entry)):
        raise EdgespecError(f"damaged: {' '.join(others)}; pull again with the program that stores it")
    named = [hub_name(entry) for entry in entries if entry.name in bad and not entry.packed]
    if again := " ".join(sorted(named)):
        raise EdgespecError(f"damaged: {again}; `edgespec models remove {again}`, then pull or add again")
    if bad:
        raise EdgespecError(f"damaged: {' '.join(sorted(bad))}; install edgespec again")


def _is_elsewhere(entry: Entry) -> bool:
    return is_ollama_name(entry.name) or (entry.path is not None and is_hub_name(entry.name))


@models_app.command("add", epilog="Example: edgespec models add ~/models/mine.Q4_K_M.gguf --name mine")
def add_command(
    file: Annotated[Path, typer.Argument(help="A GGUF file; it stays where it is.")],
    name: Annotated[
        str | None, typer.Option("--name", help="Its name; default: the file's, without .gguf.")
    ] = None,
) -> None:
    """Give your own GGUF file a name, in your models.toml."""
    from edgespec.llama.gguf_header import check_complete_file, check_model_file
    from edgespec.models.on_disk import ARCHITECTURE, foreign_whisper, is_whisper_source

    path = expand_user(file).absolute()
    if is_whisper_source(path):
        raise UsageError(foreign_whisper(str(file)))
    header = check_complete_file(path)
    is_speech = header.architecture == ARCHITECTURE
    if not is_speech:
        header = check_model_file(path, or_head=True)
    size = path.stat().st_size
    name = name or path.name.removesuffix(".gguf")
    with err.status(f"hashing {path.name}"):
        # They are remembered, for the drafts that belong to it.
        sha256, *parts = (file_sha256(one) for one in (path, *header.other_parts))
    mark = "speech" if is_speech else "mtp" if has_own_head(path) else ""
    add_local(name, path, size, sha256, mark=mark, parts=parts)
    err.print(f"added to {user_models_file()}")
    out.print(name)


@models_app.command("remove", epilog="Example: edgespec models remove smollm2-135m-q4_1")
def remove_command(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME", help="Models, or hf:OWNER/REPO/FILE.gguf.", autocompletion=complete_name
        ),
    ],
) -> None:
    """Delete models' files, and what stopped pulls left. Of a model you added, only its name is removed."""
    registry, store = load_registry(), Store.default()
    for entry in [entry for name in names for entry in Puller(registry, store).expand(name)]:
        if _is_elsewhere(entry):
            raise UsageError(
                f"{entry.name}: another program's file, {entry.path}; remove it with that program"
            )
        if entry.packed:
            raise UsageError(f"{entry.name}: comes with edgespec and is no file of the models folder")
        if entry.path:
            remove_local(entry.name)
            out.print(f"{entry.name}: name removed; {entry.path} is untouched")
            if entry.name == registry.default:
                message(f"{entry.name} was the default model: `edgespec models default NAME` sets another")
            continue
        gone = store.remove(entry)
        if not gone:
            raise UsageError(f"{entry.name}: nothing to remove, it is not on this machine")
        out.print(f"{entry.name}: removed from {store.root}")


models_app.command("scan", epilog="Example: edgespec models scan /mnt/models")(scan_command)
