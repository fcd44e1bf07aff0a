"""A server of an embedding or reranking model on a loopback port."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from edgespec.apps.embed.embedder import Embedder
from edgespec.apps.server.api import create_embedding_app
from edgespec.apps.server.embedding_routes import EmbeddingService, EmbeddingWorker
from edgespec.apps.server.metrics import Metrics
from edgespec.apps.server.names import NamedModel
from edgespec.apps.server.request_reader import Service
from edgespec.platform.processes import Cancellation
from server_app import on_a_port


@dataclass
class EmbeddingServer:
    """A running one. `embedder` is the worker's: tests ask it for tokens alone."""

    url: str
    embedder: Embedder
    worker: EmbeddingWorker
    log: list[str]

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60)


@contextlib.contextmanager
def serving_embeddings(path: Path, **limits: Any) -> Iterator[EmbeddingServer]:
    """Serve this model while entered; `limits` go to the worker."""
    log: list[str] = []
    metrics = Metrics()
    with Cancellation() as cancellation, Embedder(str(path), interrupt=cancellation.interrupt) as embedder:
        worker = EmbeddingWorker(embedder, cancellation, **limits)
        metrics.watch(worker, "vectors")
        service = EmbeddingService(
            Service(NamedModel.of(embedder.model, ["tiny"]), embedder.n_ctx), worker, log.append
        )
        with on_a_port(create_embedding_app(service, metrics=metrics), worker) as url:
            yield EmbeddingServer(url, embedder, worker, log)
