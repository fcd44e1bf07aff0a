"""The process that answers requests on a node of a Ray cluster, with an engine of its own."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import NamedTuple

from edgespec.apps.batch.local import LocalWriter, PromptDefaults
from edgespec.apps.batch.records import BatchAnswer, BatchRequest
from edgespec.apps.server.request_reader import Service
from edgespec.decoding.choices import DrafterName
from edgespec.engine.engine import Engine
from edgespec.llama.choices import CacheType, KernelsChoice
from edgespec.llama.gguf_header import check_model_file, file_fingerprint
from edgespec.models.resolve import resolve

WORK_S = 0.5
"""Most seconds of a call of `NodeWorker.work`."""


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """How each node loads its models."""

    target: str
    """Name in the registry, or a path that is the same on every node."""
    draft: str | None = None
    drafter: DrafterName = "auto"
    n_ctx: int | None = None
    parallel: int | None = None
    """Most requests at once; None: chosen by each node."""
    n_threads: int | None = None
    kernels: KernelsChoice = "auto"
    cache_type: CacheType = "f16"
    chat_template: str | None = None
    defaults: PromptDefaults = field(default_factory=PromptDefaults)


class NodeCapacity(NamedTuple):
    """Result of `NodeWorker.load`."""

    parallel: int
    """Most requests at once."""
    pid: int


class WorkerReport(NamedTuple):
    """Result of `NodeWorker.work`."""

    answers: list[tuple[BatchRequest, BatchAnswer]]
    n_tokens: int
    """Tokens since the worker began, unfinished answers included."""
    messages: list[str]


def model_facts(target: str, draft: str | None) -> dict[str, str]:
    """Return facts that must be the same on all nodes: edgespec's version and the models' fingerprints.

    Raises EdgespecError where a model is not here.
    """
    facts = {"edgespec": version("edgespec")}
    for role, model in (("target", target), ("draft", draft)):
        if model is not None:
            path = resolve(model, pull_missing=False)
            facts[f"the {role} model"] = f"SHA-256 {file_fingerprint(check_model_file(path))[:16]}"
    return facts


class NodeWorker:
    """A Ray actor: Ray calls one method at a time, in one thread."""

    def __init__(self) -> None:
        """Load nothing yet: this may run in another version of edgespec."""
        self._held: deque[BatchRequest] = deque()
        self._messages: list[str] = []

    def facts(self, target: str, draft: str | None) -> dict[str, str]:
        """Return `model_facts` of this node."""
        return model_facts(target, draft)

    def load(self, settings: NodeSettings) -> NodeCapacity:
        """Load the models. Raises EdgespecError."""
        engine = Engine(
            settings.target,
            settings.draft,
            drafter=settings.drafter,
            n_ctx=settings.n_ctx,
            parallel=settings.parallel,
            n_threads=settings.n_threads,
            kernels=settings.kernels,
            cache_type=settings.cache_type,
            chat_template=settings.chat_template,
            prefix_cache=0,
            on_message=self._messages.append,
        )
        service = Service.of(engine, n_ctx=settings.n_ctx)
        self._writer = LocalWriter(
            engine,
            service,
            service.fingerprint(engine),
            defaults=settings.defaults,
            log=self._messages.append,
        )
        return NodeCapacity(engine.parallel, os.getpid())

    def work(self, requests: Sequence[BatchRequest]) -> WorkerReport:
        """Add requests, and work until an answer is complete, or for `WORK_S` seconds."""
        self._held += requests
        writer, answers = self._writer, list[tuple[BatchRequest, BatchAnswer]]()
        end = time.monotonic() + WORK_S
        while not answers and time.monotonic() < end:
            while self._held and writer.n_free > 0:
                writer.begin(self._held.popleft())
            if not writer.n_running:
                break
            answers = writer.finished()
        messages, self._messages = self._messages, []
        return WorkerReport(answers, writer.n_tokens, messages)
