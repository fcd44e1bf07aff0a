"""`edgespec doctor --nodes`: what nodes are, how far away, how layers are shared out, what limits a pass."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
from rich.table import Table

from edgespec.apps.nodes.connection import ConnectedNode, connect
from edgespec.apps.nodes.description import NodeSpeed, measure_speed, memory_to_give
from edgespec.apps.nodes.splitting import TOKENS, LayerSplit, LocalMachine, place
from edgespec.cli.console import err, line_of, message, out, print_line, print_table
from edgespec.cli.doctor_report import Report, model_paths, size
from edgespec.errors import EdgespecError
from edgespec.llama import kernels
from edgespec.llama.gguf_header import check_model_file
from edgespec.llama.node_addresses import NodeAddress, read_addresses
from edgespec.models.footprint import USUAL_CTX, target_rollback
from edgespec.platform.cpu import default_threads, read_cpu

HERE = "here"
_COLUMNS = ("node", "processor", "kernels", "threads", "memory", "layer", "round trip", "to it")


def report_nodes(text: str, models: Sequence[str] | None, *, unsafe: bool, json: bool) -> int:
    """Ask the nodes that `text` names, and print what was found; return the exit code.

    `models`: whose layers to share out; None: those of the default target, if it is here. Raises UsageError
    for what is no address.
    """
    addresses = read_addresses(text, unsafe=unsafe)
    with err.status("testing the kernels"):
        loaded = kernels.load()
        here = measure_speed(loaded, default_threads())
    with ExitStack() as opened:
        rows, nodes = [_here(here)], list[ConnectedNode]()
        for address in addresses:
            row, found = _ask(address, opened)
            rows.append(row)
            nodes += found
    paths = model_paths(models)
    if not models:
        paths = dict(list(paths.items())[:1])
    splits = [_model(name, path, here, nodes) for name, path in paths.items()] if nodes else []
    if json:
        out.print_json(data={"nodes": rows, "models": splits})
    else:
        _print(rows, splits)
    failed = any(row["error"] for row in (*rows, *splits))
    return EdgespecError.exit_code if failed else 0


def _ask(address: NodeAddress, opened: ExitStack) -> tuple[Report, Sequence[ConnectedNode]]:
    try:
        with err.status(f"asking {address.name}"):
            (node,) = opened.enter_context(connect([address], on_message=message, bandwidth=True)).nodes
    except EdgespecError as error:
        return _row(address.name, "", None, None) | {"error": line_of(error)}, ()
    way = {"round_trip_ms": round(1e3 * node.round_trip_s, 3), "bytes_per_s": node.bytes_per_s}
    return _row(node.name, node.processor, node.speed, node.memory_bytes) | way, (node,)


def _here(speed: NodeSpeed) -> Report:
    return _row(HERE, read_cpu().model, speed, memory_to_give())


def _row(name: str, processor: str, speed: NodeSpeed | None, memory: int | None) -> Report:
    return {
        "name": name,
        "processor": processor,
        "speed": msgspec.to_builtins(speed, str_keys=True) if speed else None,
        "memory_bytes": memory,
        "round_trip_ms": None,
        "bytes_per_s": None,
        "error": None,
    }


def _model(name: str, path: Path, here: NodeSpeed, nodes: Sequence[ConnectedNode]) -> Report:
    """Return how the layers of a model would be shared out, with a context of the usual length."""
    try:
        header = check_model_file(path)
        memory = memory_to_give()
        home = LocalMachine(1 << 46 if memory is None else memory, here, target_rollback(header).n_states(1))
        n_cells = min(USUAL_CTX, header.n_ctx_train or USUAL_CTX)
        split = place(header, n_cells, home, nodes)
    except EdgespecError as error:
        return {"name": name, "error": line_of(error)}
    return {
        "name": name,
        "error": None,
        "context": n_cells,
        "shares": [
            {
                "name": share.node.name if share.node else HERE,
                "layers": share.n_layers,
                "bytes": share.n_bytes,
                "ms": round(share.ms, 3),
                "network_ms": round(share.network_ms, 3),
            }
            for share in (split.home, *split.nodes)
        ],
        "alone_ms": split.alone_ms,
        "limit": limit_of(split),
        "message": split.message,
    }


def limit_of(split: LayerSplit) -> str:
    """The slowest part of a pass of `TOKENS` tokens, and its share."""
    parts = {
        f"the products {_at(share.node.name if share.node else HERE)}": share.ms
        for share in (split.home, *split.nodes)
    }
    parts["the network"] = sum(share.network_ms for share in split.nodes)
    name = max(parts, key=parts.__getitem__)
    return f"{name} ({parts[name] / max(split.ms, 1e-9):.0%})"


# ---- text ----


def _print(rows: Sequence[Report], models: Sequence[Report]) -> None:
    table = Table(*_COLUMNS, box=None, pad_edge=False)
    for row in rows:
        if not row["error"]:
            table.add_row(*_cells(row))
    print_table(table)
    for row in rows:
        if row["error"]:
            print_line("lost", row["error"])
    out.print()
    print_line("layer", f"products of one of Qwen2.5-1.5B in Q4_K_M, with 1 and {TOKENS} tokens")
    for model in models:
        _print_model(model)


def _cells(row: Report) -> tuple[str, ...]:
    speed, rate, round_trip = row["speed"], row["bytes_per_s"], row["round_trip_ms"]
    times = speed and speed["layer_ms"]
    return (
        row["name"],
        row["processor"] or "unknown",
        speed["kernels"] if speed else "unknown",
        str(speed["n_threads"]) if speed else "",
        size(row["memory_bytes"]),
        f"{times['1']:.2f}, {times[str(TOKENS)]:.2f} ms" if times else "unknown",
        "" if round_trip is None else f"{round_trip:.2f} ms",
        "" if rate is None else f"{8e-6 * rate:,.0f} Mbit/s",
    )


def _print_model(model: Report) -> None:
    out.print()
    print_line("model", model["name"])
    if model["error"]:
        print_line("", model["error"])
        return
    shares = [_described(share) for share in model["shares"]]
    print_line("", ", ".join(shares))
    alone = model["alone_ms"]
    beside = "it does not fit here alone" if alone is None else f"{alone:.1f} ms here alone"
    total = sum(share["ms"] + share["network_ms"] for share in model["shares"])
    print_line("", f"a pass of {TOKENS} tokens: about {total:.1f} ms without the output matrix; {beside}")
    print_line("", f"what limits it: {model['limit']}")
    if model["message"]:
        print_line("", model["message"])


def _described(share: Report) -> str:
    layers = "1 layer" if share["layers"] == 1 else f"{share['layers']} layers"
    way = "" if share["name"] == HERE else f" + {share['network_ms']:.1f} ms on the way"
    return f"{layers} {_at(share['name'])} ({size(share['bytes'])}, {share['ms']:.1f} ms{way})"


def _at(name: str) -> str:
    return name if name == HERE else f"on {name}"
