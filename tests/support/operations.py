"""Which operations of a model edgespec's kernels run, and which are left to llama.cpp."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from edgespec.errors import EdgespecError
from edgespec.llama.backend import whole_log
from edgespec.llama.session import Session
from edgespec.llama.weights import Model

_DEBUG = "GGML_SCHED_DEBUG"  # 2: ggml logs which backend it gives each operation of a pass to
_NODE = re.compile(r"^node #\s*\d+ \(\s*(\S+)\):.*? \[\s*(\S+).*", re.MULTILINE)
_TABLE = "token_embd"  # in the line of what reads a table of embeddings; some models have two
_SPLIT = re.compile(r"^## SPLIT #", re.MULTILINE)
_TOKENS = (1, 2, 3)
_KERNELS = "edges"  # its log shows five characters of a backend's name


@dataclass(frozen=True, slots=True)
class Operations:
    """The operations of a pass over a few tokens.

    What computes nothing does not count: views of tensors, and the look-up of embeddings. Names are ggml's,
    cut off after 10 characters as its log shows them.
    """

    claimed: dict[str, int]
    """How many of each name run on edgespec's kernels."""
    declined: dict[str, int]
    """How many of each name run on llama.cpp's."""
    n_pieces: int
    """In how many pieces, on the one or on the other, they are run."""

    @property
    def n(self) -> int:
        """Operations in all."""
        return sum(self.claimed.values()) + sum(self.declined.values())


def operations_of(model: Model) -> Operations:
    """Return the operations of a pass of `model`, as ggml gives them to the kernels."""
    log: list[str] = []
    with _assignments_logged(), whole_log(log.append), Session(model, n_ctx=64, n_threads=1) as session:
        log.clear()
        session.eval(_TOKENS, n_logits=len(_TOKENS))
    text = "".join(log)
    claimed, declined = Counter[str](), Counter[str]()
    for node in _NODE.finditer(text):
        operation, backend = node.groups()
        if operation != "GET_ROWS" or _TABLE not in node[0]:
            (claimed if backend == _KERNELS else declined)[operation] += 1
    if not claimed and not declined:
        raise EdgespecError("ggml's log says nothing of the operations of a pass")
    return Operations(dict(claimed), dict(declined), len(_SPLIT.findall(text)))


@contextmanager
def _assignments_logged() -> Iterator[None]:
    """Contexts made inside the block log their passes; the library asks for it when it makes one."""
    before = os.environ.get(_DEBUG)
    os.environ[_DEBUG] = "2"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_DEBUG]
        else:
            os.environ[_DEBUG] = before
