"""`edgespec doctor`: what this machine has and can hold, which kernels are in use, and for which weights."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.table import Table

from edgespec.cli.completion import complete_model
from edgespec.cli.console import err, line_of, out, print_line, print_table
from edgespec.cli.machine import (
    Report,
    energy_report,
    machine_report,
    pairs_report,
    print_energy,
    print_machine,
    print_pairs,
    size,
)
from edgespec.errors import EdgespecError
from edgespec.llama import kernels
from edgespec.llama.backend import foreign_function, library_version
from edgespec.llama.gguf import TensorInfo
from edgespec.llama.gguf_header import check_model_file, read_tensors
from edgespec.llama.kernels import Kernels, PackedTensor
from edgespec.llama.prefetch import Choice
from edgespec.llama.weights import Model
from edgespec.models.footprint import fits_in_memory
from edgespec.models.resolve import resolve
from edgespec.pair import choose_models, default_threads
from edgespec.platform.boards import hwcaps, wheel_board
from edgespec.platform.cpu import read_cpu
from edgespec.platform.memory import available_bytes, peak_rss_bytes, total_bytes

ROOT = Path("/")
"""Below which the machine is looked at; tests bring trees of their own."""

_X86_FEATURES = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512dq"),
    *("avx512_vnni", "avx512_bf16"),
)
_ARM_FEATURES = ("asimd", "asimdhp", "asimddp", "i8mm", "sve", "bf16")
_MOST_NAMED = 4  # matrices named in the text for one reason; --json names all


def doctor_command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="Models to look into: files or names of `edgespec models list`.",
            show_default="the default pair, if it is here",
            autocompletion=complete_model,
        ),
    ] = None,
    *,
    retest: Annotated[bool, typer.Option("--retest", help="Test and time the kernels now.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> int:
    """Report the machine, the kernels in use and why, which pairs of models fit, and the weights packed.

    Nothing is pulled. The exit code is 0 with stock kernels too, and 1 if a MODEL cannot be loaded.
    """
    paths = _paths(models)
    with err.status("testing the kernels"):
        loaded = kernels.load(retest=retest)
    report: Report = {
        "edgespec": version("edgespec"),
        "cpu": _cpu(),
        "machine": machine_report(ROOT),
        "libraries": _libraries(),
        "threads": {"physical": default_threads(), "logical": len(os.sched_getaffinity(0))},
        "memory": {"total": total_bytes(ROOT), "available": available_bytes(ROOT)},
        "energy": energy_report(ROOT),
        "pairs": pairs_report(ROOT),
        "kernels": _kernels(loaded),
        "models": [_model(name, path, loaded) for name, path in paths.items()],
    }
    report["memory"]["peak_rss"] = peak_rss_bytes()
    if json:
        out.print_json(data=report)
    else:
        _print(report, asked=bool(models))
    return EdgespecError.exit_code if any(model["error"] for model in report["models"]) else 0


def _paths(models: Sequence[str] | None) -> dict[str, Path]:
    """Return the files of the models asked for, or of what is here of the default pair."""
    if models:
        return {name: resolve(name, pull_missing=False) for name in models}
    here = {}
    for name in filter(None, choose_models(None, None)):
        try:
            here[name] = resolve(name, pull_missing=False)
        except EdgespecError:
            continue  # never pulled here: there is nothing to report of it
    return here


def _cpu() -> Report:
    cpu = read_cpu(ROOT / "proc/cpuinfo")
    flags = hwcaps() or cpu.flags
    features = _ARM_FEATURES if flags & {"asimd", "neon"} else _X86_FEATURES
    return {"model": cpu.model, "features": {name: name in flags for name in features}}


def _libraries() -> Report:
    board = wheel_board()
    return {
        "llama_cpp": library_version(),
        "ggml": cast("bytes", foreign_function("ggml_version", ctypes.c_char_p)()).decode(),
        "llama_cpp_python": version("llama-cpp-python"),
        "built_for": board and board.name,
    }


def _kernels(loaded: Kernels) -> Report:
    path, test = kernels.plugin_path(), loaded.self_test
    return {
        "in_use": loaded.name,
        "reason": loaded.reason,
        "plugin": str(path) if path.exists() else None,
        "self_test": test
        and {
            "passed": test.passed,
            "reason": test.reason,
            "isa": test.isa,
            "when": datetime.fromtimestamp(test.when).astimezone().isoformat(timespec="seconds"),
        },
        "prefetch": _prefetch(test.choice) if test and loaded.available else None,
    }


def _prefetch(choice: Choice) -> Report:
    return {
        "level": choice.prefetch.level,
        "bytes": choice.prefetch.bytes,
        "measured": not choice.reason,
        "reason": choice.reason,
        "gain": choice.gain,
    }


# ---- models ----


def _model(name: str, path: Path, loaded: Kernels) -> Report:
    report: Report = {"name": name, "path": str(path), "error": None, "types": [], "unpacked": []}
    try:
        header = check_model_file(path)
        fits_in_memory([(header, 1)])
        with err.status(f"loading {name}"), Model(path, header=header) as model:
            packed = {tensor.name: tensor for tensor in model.packed}
        matrices = [tensor for tensor in read_tensors(header) if tensor.is_matrix]
    except EdgespecError as error:
        return report | {"error": line_of(error)}
    return report | {
        "types": [
            _type(type_, matrices, packed) for type_ in dict.fromkeys(tensor.type for tensor in matrices)
        ],
        "unpacked": [
            _facts(tensor) | {"why": _why(tensor, matrices, packed) if loaded.available else "stock kernels"}
            for tensor in matrices
            if tensor.name not in packed
        ],
    }


def _facts(tensor: TensorInfo) -> Report:
    names = ("name", "type", "columns", "rows", "n_matrices", "bytes")
    return {name: getattr(tensor, name) for name in names}


def _type(type_: str, matrices: Iterable[TensorInfo], packed: dict[str, PackedTensor]) -> Report:
    """Return the counts and bytes of one type's matrices."""
    of_type = [tensor for tensor in matrices if tensor.type == type_]
    names = [tensor.name for tensor in of_type if tensor.name in packed]
    return {
        "type": type_,
        "packed": len(names),
        "packed_bytes": sum(packed[name].bytes for name in names),
        "not_packed": len(of_type) - len(names),
        "not_packed_bytes": sum(tensor.bytes for tensor in of_type if tensor.name not in packed),
    }


def _why(tensor: TensorInfo, matrices: Iterable[TensorInfo], packed: dict[str, PackedTensor]) -> str:
    """Return why a matrix was not packed, as far as it can be told from outside."""
    if tensor.name == "token_embd.weight":
        return "rows are looked up, not multiplied"
    if tensor.n_matrices > 1:
        return f"{tensor.n_matrices} matrices in one (experts)"
    if any(other.type == tensor.type and other.name in packed for other in matrices):
        return f"shape {tensor.rows} x {tensor.columns}"
    return f"type {tensor.type}"


# ---- text ----


def _print(report: Report, *, asked: bool) -> None:
    threads, memory = report["threads"], report["memory"]
    features = report["cpu"]["features"]
    present = [name for name, has in features.items() if has]
    absent = [name for name, has in features.items() if not has]
    print_line("cpu", report["cpu"]["model"])
    print_line("", " ".join(present) + (f"; not {' '.join(absent)}" if absent else ""))
    print_machine(report["machine"])
    print_line("threads", f"{threads['physical']} physical cores, {threads['logical']} logical")
    print_line(
        "memory",
        f"{size(memory['total'])}, {size(memory['available'])} of it available; "
        f"{size(memory['peak_rss'])} used here at the peak",
    )
    print_energy(report["energy"])
    libraries = report["libraries"]
    built_for = f" for {libraries['built_for']}" if libraries["built_for"] else ""
    print_line(
        "version",
        f"edgespec {report['edgespec']}, llama.cpp {libraries['llama_cpp']}, ggml {libraries['ggml']}, "
        f"llama-cpp-python {libraries['llama_cpp_python']}{built_for}",
    )
    _print_kernels(report["kernels"])
    out.print()
    print_pairs(report["pairs"])
    if not report["models"] and not asked:
        out.print()
        print_line("models", "the default pair is not here; name a model to see what of it is packed")
    for model in report["models"]:
        _print_model(model)


def _print_kernels(found: Report) -> None:
    print_line("kernels", found["in_use"] + (f": {found['reason']}" if found["reason"] else ""))
    if found["plugin"]:
        print_line("", found["plugin"])
    if test := found["self_test"]:
        outcome = "passed" if test["passed"] else test["reason"]
        print_line("", f"self-test {outcome} ({test['isa']}, {test['when']})")
    if prefetch := found["prefetch"]:
        where = f"weights fetched {prefetch['bytes']} bytes ahead into cache level {prefetch['level']}"
        if not prefetch["measured"]:
            why = f"the default; not measured: {prefetch['reason']}"
        elif prefetch["gain"] > 1:
            why = f"measured: {prefetch['gain']:.2f} times as fast as the default"
        else:
            why = "measured: the default is as fast as any"
        print_line("", f"{where} ({why})")


def _print_model(model: Report) -> None:
    out.print()
    print_line("model", model["name"])
    print_line("", model["path"])
    if model["error"]:
        print_line("", f"cannot be loaded: {model['error']}")
        return
    table = Table("type", "packed", "", "not packed", "", box=None, pad_edge=False)
    for row in model["types"]:
        table.add_row(
            row["type"],
            str(row["packed"]),
            size(row["packed_bytes"]) if row["packed"] else "",
            str(row["not_packed"]),
            size(row["not_packed_bytes"]) if row["not_packed"] else "",
        )
    print_table(table)
    by_reason: dict[str, list[str]] = {}
    for tensor in model["unpacked"]:
        by_reason.setdefault(tensor["why"], []).append(tensor["name"].removesuffix(".weight"))
    for why, names in by_reason.items():
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        print_line("", f"not packed: {', '.join(names[:_MOST_NAMED])}{more}: {why}")
