"""A target with layers on nodes: placed, loaded, and loaded again after a node was lost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from edgespec._core import Interrupt
from edgespec.apps.nodes.connection import Nodes, connect
from edgespec.apps.nodes.description import measure_speed
from edgespec.apps.nodes.splitting import LayerSplit, LocalMachine, place
from edgespec.engine.pair import PairOptions
from edgespec.errors import EdgespecError, NodeLost
from edgespec.llama.gguf_header import GGUFHeader, read_tensors
from edgespec.llama.kernels import Kernels
from edgespec.llama.placement import Placement, RemoteLayers, wait_s
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.models.footprint import CTX_STEP, PROCESS_BYTES, required_bytes, target_rollback
from edgespec.platform.closing import Closing
from edgespec.platform.cpu import default_threads
from edgespec.platform.memory import available_bytes
from edgespec.platform.messages import MessageFn

TRY_AGAIN_S = 3.0
"""Seconds between two tries to get lost nodes back."""

USUAL_CELLS = 4096
"""Tokens of cache that nodes must have room for, if the user says nothing."""

PACKED_BYTES_PER_S = 50e6
"""Bytes of weights that a node packs in a second at least, in its first pass."""

_WARM_UP = 8  # tokens: as many as a pass that checks drafted ones
_ASK_AGAIN_S = 15.0  # a machine that was asked before has tested its kernels
_TUNNEL_END_S = 0.5  # ssh ends a moment after its connections
_UNLIMITED = 1 << 40  # bytes, where the system does not say how much memory is free


class RemoteTarget(Closing):
    """The nodes of a target. A context manager; it closes the connections alone."""

    def __init__(
        self, options: PairOptions, target: GGUFHeader, home: LocalMachine, on_message: MessageFn
    ) -> None:
        """Connect to the nodes of `options` and share the layers of `target` out.

        `home`: this machine. Raises EdgespecError if a node cannot be used or the target does not fit,
        UsageError if layers are wanted where they do not fit.
        """
        wait_s()  # a bad value is known before anything else is done
        self._addresses, self._n_threads = options.nodes, options.n_threads or default_threads()
        self._nodes: Nodes | None = connect(options.nodes, on_message=on_message)
        self._tried, self._why = 0.0, NodeLost("", "")
        try:
            split = place(target, _cells(options, target), home, self._nodes.nodes)
            if split.message:
                on_message(split.message)
        except BaseException:
            self.close()
            raise
        self.placement = _placement(split)
        """Where the layers go; None if all of them are here."""
        self.home = target if self.placement is None else home_part(target, self.placement)
        """The target's header as if the file held only what is here, for estimates of memory."""
        self.n_cells = options.n_cells if self.placement is None else _cells(options, target)
        """Tokens of cache that there is room for; None: as many as are needed."""
        if self.placement is None:
            self.close()

    def is_lost(self, model: Model) -> bool:
        """Whether `model` must be loaded again before its next pass."""
        return self.placement is not None and (model.remote is None or model.remote.is_lost)

    def warm_up(self, model: Model, interrupt: Interrupt | None) -> None:
        """Make a first pass, which takes longer, since the nodes pack their weights in it."""
        remote = model.remote
        if remote:
            remote.explain = self._why_lost
            remote.more_s = (model.header.file_bytes - self.home.file_bytes) / PACKED_BYTES_PER_S
            try:
                with Session(
                    model, n_ctx=CTX_STEP, n_threads=self._n_threads, interrupt=interrupt
                ) as session:
                    session.eval([0] * _WARM_UP)
            finally:
                remote.more_s = 0.0

    def reopen(self, model: Model, interrupt: Interrupt | None) -> None:
        """Connect again, load `model` again and warm it up.

        Raises NodeLost where that is not possible yet, without a new try if the last one was a moment ago;
        KeyboardInterrupt if `interrupt` ends it.
        """
        assert self.placement  # noqa: S101 - for the type checker: else nothing can be lost
        if time.monotonic() - self._tried < TRY_AGAIN_S:
            raise self._why
        try:
            model.unload()  # a node has one client at a time: those that are not lost must let go of us
            self.close()
            self._nodes = connect(self._addresses, ask_s=_ASK_AGAIN_S)
            endpoints = {node.name: node.endpoint for node in self._nodes.nodes}
            layers = (replace(node, endpoint=endpoints[node.name]) for node in self.placement.nodes)
            self.placement = replace(self.placement, nodes=tuple(layers))
            model.reopen(self.placement, interrupt)
            self.warm_up(model, interrupt)
        except EdgespecError as error:
            self._tried = time.monotonic()
            self._why = error if isinstance(error, NodeLost) else NodeLost.because(error)
            raise self._why from error

    def _why_lost(self, name: str) -> str:
        """Return why the tunnel to a node has ended; "" if it has not."""
        is_direct = {address.name: address.direct for address in self._addresses}
        until = time.monotonic() + _TUNNEL_END_S
        while self._nodes and not is_direct.get(name, True) and time.monotonic() < until:
            if reason := self._nodes.lost.get(name):
                return reason
            time.sleep(0.05)
        return ""

    def close(self) -> None:
        """Close the connections; the nodes go on."""
        if self._nodes:
            self._nodes.close()
            self._nodes = None


def open_nodes(
    options: PairOptions, headers: Sequence[GGUFHeader], kernels: Kernels | None, on_message: MessageFn
) -> RemoteTarget:
    """Return the nodes of a target, the first of `headers`.

    The second one, if any, is that of its draft, which is here whole. `kernels`: those of this machine; None:
    the user wants none.
    """
    target = headers[0]
    available = available_bytes()
    beside = PROCESS_BYTES + sum(required_bytes(draft, _cells(options, draft)) for draft in headers[1:])
    home = LocalMachine(
        _UNLIMITED if available is None else max(0, available - beside),
        measure_speed(kernels or Kernels("", declined=True), options.n_threads or default_threads()),
        target_rollback(target, parallel=options.parallel or 2).n_states(1),
    )
    return RemoteTarget(options, target, home, on_message)


def _cells(options: PairOptions, header: GGUFHeader) -> int:
    return options.n_cells or options.n_ctx or min(header.n_ctx_train, USUAL_CELLS)


def _placement(split: LayerSplit) -> Placement | None:
    nodes = [
        RemoteLayers(share.node.name, share.node.endpoint, share.n_layers)
        for share in split.nodes
        if share.node
    ]
    return Placement(split.home.n_layers, tuple(nodes)) if nodes else None


def home_part(header: GGUFHeader, placement: Placement) -> GGUFHeader:
    """Return the header of a file as if it held only what `placement` leaves here."""
    n_home, n_layer = placement.n_home, max(1, header.n_layer)
    prefixes = tuple(f"blk.{i}." for i in range(n_home, n_layer))
    away = sum(tensor.bytes for tensor in read_tensors(header) if tensor.name.startswith(prefixes))
    heads = header.n_head_kv
    return replace(
        header,
        file_bytes=max(0, header.file_bytes - away),
        n_head_kv=heads[:n_home] if len(heads) == n_layer else heads,
        state_bytes=header.state_bytes * n_home // n_layer,
    )
