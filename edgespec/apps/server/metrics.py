"""The counters of a server that /metrics shows, in Prometheus' text format."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.types import Scope

from edgespec.apps.server.names import ModelKind
from edgespec.apps.server.page import PATHS
from edgespec.apps.server.request_worker import EndedRequest, RequestWorker
from edgespec.decoding.records import Result

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""The type of what `Metrics.render` returns."""

_OUTCOMES = ("finished", "cancelled", "timed_out", "failed")
_SECONDS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Metrics:
    """Counts what one server does. Two servers in a process share nothing."""

    def __init__(self, *, energy: bool = False) -> None:
        """Count joules too where `energy` is measured."""
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._workers: list[RequestWorker[Any, Any, Any]] = []
        self._requests = self._counter("requests", "Requests answered.", "method", "route", "status")
        self._generations = self._by_outcome("generations", "Generations, by how they ended.")
        told = "Prompt tokens of generations that began, by whether they were read or in the cache."
        self._prompt = self._counter("prompt_tokens", told, "source")
        for source in ("read", "cache"):  # present from the start: a rate needs the zero
            self._prompt.labels(source)
        self._generated = self._counter("generated_tokens", "Tokens emitted.")
        self._drafted = self._counter("drafted_tokens", "Tokens drafted.")
        self._accepted = self._counter("accepted_tokens", "Drafted tokens accepted.")
        self._joules = self._counter("joules", "Energy of generations.") if energy else None
        self._waited = self._seconds("queue_seconds", "Time in the queue.")
        told = "From the request's place in the queue to its first token."
        self._first_token = self._seconds("first_token_seconds", told)
        self._state("queue_length", "Requests that wait, recordings among them.", "n_waiting")
        self._state("running", "Answers being written, recordings being transcribed.", "n_running")
        self._state("parallel", "Most answers and recordings at once.", "parallel")
        busy = Gauge(
            "edgespec_busy",
            "1 while an answer or a transcript is written.",
            registry=self._registry,
        )
        busy.set_function(lambda: any(worker.busy for worker in self._workers))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"edgespec_{name}", text, labels, registry=self._registry)

    def _seconds(self, name: str, text: str) -> Histogram:
        return Histogram(f"edgespec_{name}", text, buckets=_SECONDS, registry=self._registry)

    def _state(self, name: str, text: str, field: str) -> None:
        gauge = Gauge(f"edgespec_{name}", text, registry=self._registry)
        gauge.set_function(lambda: sum(getattr(worker, field) for worker in self._workers))

    def _by_outcome(self, name: str, text: str) -> Counter:
        counter = self._counter(name, text, "outcome")
        for outcome in _OUTCOMES:
            counter.labels(outcome)
        return counter

    def watch(self, worker: RequestWorker[Any, Any, Any], kind: ModelKind = "text") -> None:
        """Count how the requests of `worker` end, on its thread or the event loop, and what it makes."""
        outcomes, amount = self._generations, None
        if kind == "speech":
            outcomes = self._by_outcome("recordings", "Recordings, by how they ended.")
            amount = self._counter("audio_seconds", "Length of the sound transcribed.")
        elif kind == "vectors":
            outcomes = self._by_outcome("embeddings", "Requests for vectors, by how they ended.")
            amount = self._counter("embedded_tokens", "Tokens of texts embedded, or of pairs scored.")

        def on_end(ended: EndedRequest[Any]) -> None:
            outcomes.labels(ended.outcome.replace(" ", "_")).inc()
            self._waited.observe(ended.waited_s)
            if ended.result is None:
                return
            if amount:
                amount.inc(ended.result.n_tokens if kind == "vectors" else ended.result.stats.transcribed_s)
            else:
                self._count(ended.result, ended.waited_s)

        worker.on_end = on_end
        self._workers.append(worker)

    def _count(self, result: Result, waited_s: float) -> None:
        stats = result.stats
        if stats.ttft_s is not None:  # before it the prompt was not read to its end
            self._prompt.labels("read").inc(result.prompt_tokens - result.n_cached)
            self._prompt.labels("cache").inc(result.n_cached)
            self._first_token.observe(waited_s + stats.ttft_s)
        self._generated.inc(len(result.token_ids))
        self._drafted.inc(stats.n_drafted)
        self._accepted.inc(stats.n_accepted)
        if self._joules and result.energy and result.energy.joules is not None:
            self._joules.inc(result.energy.joules)

    def count_request(self, scope: Scope, status: int) -> None:
        """Count an answer by its route and status."""
        # The route, not the path, and a known method: a client must not be able to make new labels.
        path = scope["path"] if scope["path"] in PATHS else "other"
        route = getattr(scope.get("route"), "path", path)
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._requests.labels(method, route, status).inc()

    def render(self) -> bytes:
        """Return everything counted, for a Prometheus server to read."""
        return generate_latest(self._registry)
