"""`edgespec node`: this machine holds layers of models that other machines run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from edgespec.cli.console import message, out, print_line
from edgespec.cli.groups import grouped, option_group, shown
from edgespec.cli.options import JsonOption, ThreadsAndKernels
from edgespec.platform.kept import NODE_WEIGHTS

if TYPE_CHECKING:
    from edgespec.apps.nodes.description import NodeDescription, NodeSpeed, RunningNode

_UNSAFE = (
    "whoever reaches this port can run programs as you on this machine: the protocol has no password and was "
    "not made for open networks"
)


@option_group()
class NodeAddressOptions:
    """Address on which the node listens."""

    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port on this machine; 0: a free one."),
    ] = 50052
    unsafe_no_ssh: Annotated[
        bool,
        typer.Option(
            "--unsafe-no-ssh",
            help="Listen to all the network, without ssh: " + _UNSAFE + ".",
        ),
    ] = False


@option_group()
class NodeStorage:
    """The memory and the folder of a node."""

    cache: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder that keeps weights, which then come over the network once.",
            show_default="below the user's cache directory",
        ),
    ] = None
    memory: Annotated[
        int | None,
        typer.Option(
            metavar="MB",
            min=1,
            max=1 << 30,
            help="Memory that layers may take, with edgespec's kernels.",
            show_default="what is free",
        ),
    ] = None


@shown("Machine", "edgespec node --threads 4")
@grouped
def node_command(
    *,
    address: NodeAddressOptions,
    compute: ThreadsAndKernels,
    holding: NodeStorage,
    describe: Annotated[
        bool, typer.Option("--describe", help="Say what this machine is as a node, and end.")
    ] = False,
    json: JsonOption = False,
) -> int:
    """Hold layers of models for other machines, until Ctrl-C: `edgespec run --nodes user@this-machine`.

    Others come through ssh, which knows who they are: without --unsafe-no-ssh the port is open to this
    machine alone. A node has one client at a time.
    """
    from edgespec.apps.nodes.description import describe as describe_node
    from edgespec.apps.nodes.serving import NodeOptions, chosen_kernels, run_node
    from edgespec.platform.cpu import default_threads
    from edgespec.platform.files import expand_user

    n_threads = compute.threads or default_threads()
    if describe:
        _print_description(describe_node(n_threads, chosen_kernels(compute.kernels)), json=json)
        return 0
    if address.unsafe_no_ssh:
        message(f"--unsafe-no-ssh: {_UNSAFE}")
    options = NodeOptions(
        port=address.port,
        n_threads=n_threads,
        folder=expand_user(holding.cache or NODE_WEIGHTS.path()).absolute(),
        kernels=compute.kernels,
        memory_bytes=holding.memory and holding.memory << 20,
        everywhere=address.unsafe_no_ssh,
    )
    try:
        run_node(options, lambda node: _announce(node, json=json), message)
    except KeyboardInterrupt:
        return 0  # the way to end it


def _announce(node: RunningNode, *, json: bool) -> None:
    if json:
        _print_json(node)
    else:
        memory = f"{node.memory_bytes / 1e9:.1f} GB for layers"
        out.print(
            f"node ready on {node.host}:{node.port}: {memory}, {_kernels(node.speed)}, "
            f"{node.speed.n_threads} threads (Ctrl-C ends it)"
        )
        if node.speed.reason:
            message(f"{node.speed.reason}; with llama.cpp's kernels drafting will hardly pay on this node")
    out.file.flush()


def _kernels(speed: NodeSpeed) -> str:
    return f"{speed.kernels} kernels"


def _print_json(value: object) -> None:
    out.file.write(msgspec.json.encode(value).decode() + "\n")


def _print_description(node: NodeDescription, *, json: bool) -> None:
    if json:
        _print_json(node)
        return
    gigabytes = [
        "unknown" if n is None else f"{n / 1e9:.1f} GB" for n in (node.memory_bytes, node.total_bytes)
    ]
    print_line(
        "version", f"edgespec {node.edgespec}, ggml {node.ggml}, RPC {'.'.join(map(str, node.protocol))}"
    )
    print_line("CPU", f"{node.processor}, {node.n_processors} processors, {node.speed.n_threads} threads")
    print_line("memory", f"{gigabytes[0]} for layers, of {gigabytes[1]}")
    print_line("kernels", _kernels(node.speed) + (f": {node.speed.reason}" if node.speed.reason else ""))
    if node.speed.layer_ms:
        times = ", ".join(f"{ms:.2f} ms for {n}" for n, ms in node.speed.layer_ms.items())
        print_line("layer", f"{times} tokens (products of one of Qwen2.5-1.5B, Q4_K_M)")
    for running in node.running:
        print_line("running", f"{running.host}:{running.port}, {running.memory_bytes / 1e9:.1f} GB")
    if not node.running:
        print_line("running", "no node; `edgespec node` starts one")
