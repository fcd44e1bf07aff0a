"""The library's call that makes a pass: what breaks it off, the nodes that take part, what its codes mean."""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager, nullcontext

from edgespec._core import Interrupt
from edgespec.errors import EdgespecError
from edgespec.llama import backend
from edgespec.llama.backend import llama
from edgespec.llama.batch import Batch
from edgespec.llama.rollback import Rollback
from edgespec.llama.weights import Model

_NO_SLOT, _ABORTED, _BAD_INPUT = 1, 2, -1


class CacheFull(EdgespecError):  # noqa: N818 - what happened, as its reader says it
    """The cache has no cells left for a pass; nothing of it was kept."""


class Decoder:
    """Makes the passes of one context."""

    def __init__(
        self, context: llama.llama_context_p, model: Model, rollback: Rollback, interrupt: Interrupt | None
    ) -> None:
        """Let `interrupt` break passes off, and tell `rollback` of those that were."""
        self._context, self._model, self._rollback = context, model, rollback
        self._interrupt = interrupt  # its data must live as long as the context
        self._plugin = model.plugin
        self._listens = False
        self.listen(True)

    def listen(self, wanted: bool) -> None:
        """Let the interrupt break off the passes that follow, or not."""
        if wanted == self._listens or not self._interrupt:
            return
        self._listens = wanted
        address, data = (self._interrupt.callback, self._interrupt.data) if wanted else (None, None)
        callback = ctypes.cast(ctypes.c_void_p(address), llama.ggml_abort_callback)
        llama.llama_set_abort_callback(self._context, callback, ctypes.c_void_p(data))

    def decode(self, batch: Batch, n_tokens: int, *, n_outputs: int, n_wanted: int) -> None:
        """Make a pass over `batch`, of `n_tokens`.

        Of `n_outputs` of them the library computes logits; where edgespec's kernels can, only the last
        `n_wanted` are: the others are asked for because of hidden states. Raises CacheFull, NodeLost,
        KeyboardInterrupt if the interrupt broke it off, and EdgespecError.
        """
        only_wanted = (
            self._plugin.last_logits(n_wanted) if self._plugin and n_wanted < n_outputs else nullcontext()
        )
        # Where nothing is asked back, the nodes would begin one pass after the other, and the last one wait
        # for all of them. An aborted pass is logged, and Python may raise Ctrl-C in that callback.
        on_nodes = self.on_nodes(n_tokens, waits=not n_outputs)
        with backend.interruptible(), only_wanted, on_nodes:
            code = llama.llama_decode(self._context, batch.struct)
        if code == 0:
            return
        if code not in (_NO_SLOT, _BAD_INPUT):
            self._rollback.break_off()
        if code == _ABORTED:
            raise KeyboardInterrupt
        if code == _NO_SLOT:
            raise CacheFull(
                f"the context is full: no place for {n_tokens} more tokens; choose a larger context"
            )
        raise EdgespecError(
            f"{self._model.path}: llama.cpp failed with code {code}: {backend.failure_reason()}"
        )

    def on_nodes(self, n_tokens: int = 0, *, waits: bool = False) -> AbstractContextManager[None]:
        """Return `Remote.call` with these arguments where layers are on nodes."""
        remote = self._model.remote
        return remote.call(n_tokens, self._interrupt, waits=waits) if remote else nullcontext()
