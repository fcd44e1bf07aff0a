"""Health and counters of all models of a server, each by its name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import suppress

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.responses import JSONResponse, Response

from edgespec.apps.server.router.model_process import ForwardedRequest, NotReached, ProcessLost
from edgespec.apps.server.router.pool import Pool, PooledModel

_TELL_S = 2.0
"""Seconds that a model's process may take to tell how it is."""


async def _told(model: PooledModel, path: str) -> bytes:
    """Return what a loaded model's process answers; b"" for none."""
    with suppress(NotReached, ProcessLost, TimeoutError):
        if model.process:
            async with asyncio.timeout(_TELL_S):
                answer = await model.process.ask(ForwardedRequest("GET", path.encode(), (), b""))
                return b"".join([part async for part in answer.parts()])
    return b""


async def show_health(pool: Pool) -> Response:
    """Return the answer of /health: that of a server of one model, and a line for each."""
    models = {
        model.name: {
            "status": model.status,
            "running": model.n_running,
            "waiting": model.n_waiting + model.n_later,
            "pinned": model.spec.keep,
            "loads": model.n_loads,
            "failures": model.n_failures,
        }
        for model in pool.models
    }
    told = {
        "status": "stopping" if pool.stopping else "ok",
        "busy": pool.n_running > 0,
        "running": pool.n_running,
        "waiting": sum(model.n_waiting + model.n_later for model in pool.models),
        "parallel": pool.parallel,
        "models": models,
    }
    return JSONResponse(told, 503 if pool.stopping else 200)


async def show_metrics(pool: Pool) -> Response:
    """Return the answer of /metrics: the counters of each loaded model, labelled with its name, and ours."""
    texts = await asyncio.gather(*(_told(model, "/metrics") for model in pool.models))
    named = zip((model.name for model in pool.models), texts, strict=True)
    registry = CollectorRegistry()
    registry.register(_Collected([*_states(pool), *_merged(named)]))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


class _Collected(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _merged(texts: Iterable[tuple[str, bytes]]) -> Iterator[Metric]:
    families: dict[str, Metric] = {}
    for name, text in texts:
        for told in text_string_to_metric_families(text.decode()):
            family = families.setdefault(told.name, Metric(told.name, told.documentation, told.type))
            for sample in told.samples:
                family.add_sample(sample.name, {"model": name, **sample.labels}, sample.value)
    yield from families.values()


def _states(pool: Pool) -> Iterator[Metric]:
    loaded = GaugeMetricFamily("edgespec_model_loaded", "1 while a model is loaded.", labels=["model"])
    waiting = GaugeMetricFamily(
        "edgespec_model_waiting", "Requests that wait until a model is loaded.", labels=["model"]
    )
    loads = CounterMetricFamily("edgespec_model_loads", "Times that a model was loaded.", labels=["model"])
    failures = CounterMetricFamily(
        "edgespec_model_failures", "Times that it could not be, or its process died.", labels=["model"]
    )
    for model in pool.models:
        loaded.add_metric([model.name], float(model.status == "loaded"))
        waiting.add_metric([model.name], model.n_waiting + model.n_later)
        loads.add_metric([model.name], model.n_loads)
        failures.add_metric([model.name], model.n_failures)
    yield from (loaded, waiting, loads, failures)
