"""The real application over an engine of tiny models, on a loopback port, with uvicorn in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from edgespec import Engine
from edgespec.apps.server.api import create_app
from edgespec.apps.server.audio_routes import SpeechService
from edgespec.apps.server.gate import Gate, GateLimits
from edgespec.apps.server.metrics import Metrics
from edgespec.apps.server.request_reader import Service
from edgespec.apps.server.request_worker import RequestWorker
from edgespec.apps.server.worker import Worker
from edgespec.platform.processes import Cancellation


@dataclass
class Served:
    """A running server. `engine` is the worker's: tests ask it only about its models."""

    url: str
    app: FastAPI
    engine: Engine
    worker: Worker
    log: list[str]
    """Log lines of failures that were not the client's fault."""

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)


@contextlib.contextmanager
def serving(
    target: Path,
    draft: Path | None = None,
    *,
    engine_options: dict[str, Any] | None = None,
    worker_options: dict[str, Any] | None = None,
    service: dict[str, Any] | None = None,
    speech: SpeechService | None = None,
    gate: GateLimits | None = None,
) -> Iterator[Served]:
    """Serve these models while entered. `service` goes to `Service.of`; None for `gate`: there is none."""
    log: list[str] = []
    metrics = Metrics()
    with (
        Cancellation() as cancellation,
        Engine(
            target,
            draft,
            drafter="auto" if draft else "suffix",
            signals=cancellation,
            profile=False,
            **{"prefix_cache": 1 << 24, **(engine_options or {})},
        ) as engine,
    ):
        worker = Worker(engine, cancellation, **(worker_options or {}))
        metrics.watch(worker)
        if speech:
            metrics.watch(speech.worker, "speech")
        served = Service.of(engine, **(service or {}))
        app = create_app(engine, worker, metrics=metrics, service=served, speech=speech, log=log.append)
        gated = Gate(app, gate) if gate else app
        with on_a_port(gated, worker, *([speech.worker] if speech else [])) as url:
            yield Served(url, app, engine, worker, log)


@contextlib.contextmanager
def on_a_port(app: ASGIApp, *workers: RequestWorker[Any, Any, Any]) -> Iterator[str]:
    """Serve `app`, for which these work, on a free port while entered; its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    started = threading.Event()

    async def run() -> None:
        for worker in workers:
            worker.start()
        serve = asyncio.create_task(server.serve())
        while not server.started and not serve.done():
            await asyncio.sleep(0.005)
        started.set()
        await serve
        for worker in workers:
            await worker.stop(grace_s=0)

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    started.wait(60)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
