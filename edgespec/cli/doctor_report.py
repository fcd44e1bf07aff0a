"""Collects the report of `edgespec doctor`: the machine, the kernels, and the models' weights."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import msgspec

from edgespec.cli.console import err, line_of, message
from edgespec.drafting.draft import Draft, NoDraft, find_draft, own_head
from edgespec.drafting.draft_search import DraftSearch
from edgespec.engine.capacity import expected_capacity
from edgespec.engine.model_choice import choose_models, choose_refs
from edgespec.engine.options import EngineOptions
from edgespec.errors import EdgespecError
from edgespec.llama import kernels
from edgespec.llama.backend import cpu_backend, foreign_function, library_version
from edgespec.llama.choices import SERVED_PREFIXES
from edgespec.llama.gguf import TensorInfo
from edgespec.llama.gguf_header import (
    GGUFHeader,
    architecture_support,
    check_model_file,
    read_header,
    read_tensors,
)
from edgespec.llama.kernels import STOCK, Kernels, memory_bandwidth
from edgespec.llama.packed_file import PackedTensor
from edgespec.llama.weights import Model
from edgespec.models.footprint import (
    fits_in_memory,
    fitting_tokens,
    states_bytes,
    target_rollback,
)
from edgespec.models.on_disk import ARCHITECTURE
from edgespec.models.resolve import resolve
from edgespec.platform.machine import (
    MOST_OTHER_LOAD,
    OtherLoad,
    cpu_quota,
    default_threads,
    device_model,
    device_revision,
    fast_cores,
    memory_left,
    peak_rss_bytes,
    physical_cores,
    processor_clock,
    read_cpu,
    temperatures,
    throttling,
    total_bytes,
)
from edgespec.platform.plugins import part

Report = dict[str, Any]
"""The object that --json prints."""

_X86_FEATURES = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512dq"),
    *("avx512_vnni", "avx512_bf16"),
)
_FACTS = ("name", "type", "columns", "rows", "n_matrices", "bytes")  # of a tensor
_ARM_FEATURES = ("asimd", "asimdhp", "asimddp", "i8mm", "sve", "bf16")


def full_report(root: Path, models: Sequence[str] | None, *, retest: bool) -> Report:
    """The object of --json, for `models`; None: those of the default pair on this machine.

    `root`: where /proc and /sys are. With `retest` the kernels are tested and timed again.
    """
    paths, host = model_paths(models), _host(root)
    with err.status("testing the kernels"):
        loaded = kernels.load(retest=retest)
        host["memory"]["bytes_per_s"] = _bytes_per_s(loaded) if root == Path("/") else None
    available = host["memory"]["available"]
    report: Report = {
        "edgespec": version("edgespec"),
        **host,
        "energy": part("energy.source")(root, on_message=message),
        "kernels": _kernels(loaded),
        "models": [_model(name, path, loaded, root, available) for name, path in paths.items()],
    }
    report["memory"]["peak_rss"] = peak_rss_bytes()
    return report


def model_paths(models: Sequence[str] | None) -> dict[str, Path]:
    """Return the files of `models`; None: those of the default pair on this machine, if its target is."""
    if models:
        return {name: resolve(name, pull_missing=False) for name in models}
    here = {}
    for name in filter(None, choose_models(None, None)):
        try:
            here[name] = resolve(name, pull_missing=False)
        except EdgespecError:
            break  # never pulled here: there is nothing to report of the pair, though its draft may be here
    return here


def _host(root: Path) -> Report:
    """The facts of the machine from system and firmware, and of the libraries; None: unknown."""
    cpu, quota, left = read_cpu(root / "proc/cpuinfo"), cpu_quota(root), memory_left(root)
    features = _ARM_FEATURES if cpu.flags & {"asimd", "neon"} else _X86_FEATURES
    return {
        "cpu": {"model": cpu.model, "features": {name: name in cpu.flags for name in features}},
        "machine": {
            "model": device_model(root) or None,
            "revision": device_revision(root) or None,
            "processors": cpu.count,
            "clock_mhz": processor_clock(root),
            "degrees": temperatures(root),
            "firmware": throttling(root),
        },
        "libraries": {
            "llama_cpp": library_version(),
            "ggml": cast("bytes", foreign_function("ggml_version", ctypes.c_char_p)()).decode(),
            "llama_cpp_python": version("llama-cpp-python"),
            "cpu_backend": cpu_backend() or None,
        },
        "threads": {
            "default": default_threads(root),
            "physical": physical_cores(root),
            "fast": fast_cores(root),
            "logical": len(os.sched_getaffinity(0)),
            "quota": quota and {"processors": quota.most, "set_by": quota.name},
        },
        "memory": {
            "total": total_bytes(root),
            "available": left and left.bytes,
            "limited_by": (left and left.limit) or None,
        },
    }


def _bytes_per_s(loaded: Kernels) -> float | None:
    """Return the memory's read speed in bytes a second; None if other programs disturbed the measurement."""
    load = OtherLoad()
    speed = memory_bandwidth(loaded, default_threads())
    return None if (load.processors() or 0.0) > MOST_OTHER_LOAD else speed


def _kernels(loaded: Kernels) -> Report:
    path, test = kernels.plugin_path(), loaded.self_test
    choice = test.choice if test and loaded.available else None
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
        "prefetch": choice
        and {
            "level": choice.prefetch.level,
            "bytes": choice.prefetch.bytes,
            "measured": not choice.reason,
            "reason": choice.reason,
            "gain": choice.gain,
        },
        "tiles": loaded.plugin
        and {"why_not": loaded.plugin.why_no_tiles, "from_tokens": choice.wide_from if choice else 0},
    }


# ---- models ----


def _model(name: str, path: Path, loaded: Kernels, root: Path, available: int | None) -> Report:
    unknown = ("error", "architecture", "capacity", "rollback", "mtp_head", "speech", "images")
    report: Report = {"name": name, "path": str(path), **dict.fromkeys(unknown)}
    report |= {"contexts": {}, "types": [], "unpacked": []}
    try:
        header = read_header(path)
        if header.architecture == ARCHITECTURE:
            return report | {"speech": part("speech.facts")(path)}
        header = check_model_file(header)
        fits_in_memory([(header, 1)])
        own, draft = own_head(name, header), _draft(name, header)
        reason, loader = ("", own) if isinstance(own, Draft) else (own, NoDraft(name))
        with (
            err.status(f"loading {name}"),
            loader.load_target(header, kernels=True, remote=None) as model,
        ):
            packed = {tensor.name: tensor for tensor in model.packed}
            held = expected_capacity(
                header,
                draft,
                EngineOptions(parallel=None if model.can_rewind else 1, prefix_cache=SERVED_PREFIXES),
                kernels=loaded.name if model.uses_kernels else STOCK,
                n_threads=default_threads(root),
                available=available,
            )
            rollback = _rollback(model)
        matrices = [tensor for tensor in _loaded(header, with_head=not reason) if tensor.is_matrix]
    except EdgespecError as error:
        return report | {"error": line_of(error)}
    support = architecture_support(header)
    return report | {
        "architecture": {"name": header.architecture, "checked": support and msgspec.to_builtins(support)},
        "capacity": {"parallel": held.parallel, "cache_tokens": held.n_cells, "cache_bytes": held.n_bytes},
        "contexts": fitting_tokens(header, draft, root=root),
        "rollback": rollback,
        "images": part("images.facts")(path),
        "mtp_head": {"drafts": not reason, "reason": reason} if header.n_nextn else None,
        "types": [*_types(matrices, packed)],
        "unpacked": [
            {name: getattr(tensor, name) for name in _FACTS}
            | {"why": _why(tensor, matrices, packed) if loaded.available else "stock kernels"}
            for tensor in matrices
            if tensor.name not in packed
        ],
    }


def _loaded(header: GGUFHeader, *, with_head: bool) -> list[TensorInfo]:
    """Return the tensors of a file that are loaded: those of a head in it only `with_head`."""
    tensors = read_tensors(header)
    if with_head or not header.n_nextn:
        return tensors
    left_out = tuple(f"blk.{header.n_layer - 1 - i}." for i in range(header.n_nextn))
    return [tensor for tensor in tensors if not tensor.name.startswith(left_out)]


def _draft(name: str, target: GGUFHeader) -> GGUFHeader | None:
    """Return the header of the draft that a target would use; None if it is not on this machine."""
    try:
        partner = choose_refs(name, None).draft
        if partner:
            resolve(partner, pull_missing=False)
        search = DraftSearch(name, target, True, default_threads(), None, lambda _line: None)
        return find_draft(search, partner, "auto").header
    except EdgespecError:  # whoever loads the pair says what is wrong with it
        return None


def _rollback(model: Model) -> Report:
    """Return how the model as a target takes tokens back, and the bytes of one text's states."""
    if not model.can_rewind:
        return {"by": None, "tokens": 0, "states_bytes": 0}
    size = target_rollback(model.header)
    by = "cells" if not model.keeps_state else "snapshots" if size.n_snapshots else "reading again"
    return {
        "by": by,
        "tokens": size.n_snapshots or None,
        "states_bytes": states_bytes(model.header, size),
    }


def _types(matrices: Sequence[TensorInfo], packed: dict[str, PackedTensor]) -> Iterator[Report]:
    """Yield the counts and bytes of each type's matrices."""
    for type_ in dict.fromkeys(tensor.type for tensor in matrices):
        of_type = [tensor for tensor in matrices if tensor.type == type_]
        names = [tensor.name for tensor in of_type if tensor.name in packed]
        yield {
            "type": type_,
            "packed": len(names),
            "packed_bytes": sum(packed[name].bytes for name in names),
            "not_packed": len(of_type) - len(names),
            "not_packed_bytes": sum(tensor.bytes for tensor in of_type if tensor.name not in packed),
        }


def _why(tensor: TensorInfo, matrices: Iterable[TensorInfo], packed: dict[str, PackedTensor]) -> str:
    if tensor.name == "token_embd.weight":
        return "rows are looked up, not multiplied"
    if any(other.type == tensor.type and other.name in packed for other in matrices):
        return f"shape {tensor.rows} x {tensor.columns}"
    return f"type {tensor.type}"
