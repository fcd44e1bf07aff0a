"""The counters of a server that /metrics shows, in Prometheus' text format."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgespec.apps.server.embedding_worker import EmbeddedTexts, EmbeddingWorker
from edgespec.apps.server.page import PATHS
from edgespec.apps.server.request_worker import EndedRequest, Outcome, RequestWorker
from edgespec.apps.server.worker import Worker
from edgespec.apps.speech.transcript import Transcript
from edgespec.decoding.records import Result
from edgespec.engine.batcher import StepSummary

if TYPE_CHECKING:
    from edgespec.apps.server.audio_routes import SpeechWorker

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""The type of what `Metrics.render` returns."""

_OUTCOMES: dict[Outcome, str] = {
    "finished": "finished",
    "cancelled": "cancelled",
    "timed out": "timed_out",
    "failed": "failed",
}
_SECONDS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
_TEXTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_TOKENS_PER_S = (1, 2, 5, 10, 15, 20, 30, 40, 60, 80, 120, 200)


class Metrics:
    """Counts what one server does. Two servers in a process share nothing."""

    def __init__(self, *, energy: bool = False) -> None:
        """Count joules too where `energy` is measured."""
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        self._requests = Counter(
            "edgespec_requests", "Requests answered.", ["method", "route", "status"], registry=registry
        )
        self._generations = self._by_outcome("generations", "Generations, by how they ended.")
        self._prompt = Counter(
            "edgespec_prompt_tokens",
            "Prompt tokens of generations that began, by whether they were read or in the cache.",
            ["source"],
            registry=registry,
        )
        self._prompt.labels("read")
        self._prompt.labels("cache")
        self._generated = Counter("edgespec_generated_tokens", "Tokens emitted.", registry=registry)
        self._drafted = Counter("edgespec_drafted_tokens", "Tokens drafted.", registry=registry)
        self._accepted = Counter("edgespec_accepted_tokens", "Drafted tokens accepted.", registry=registry)
        self._busy_s = Counter(
            "edgespec_generation_seconds", "Time of generations, each by itself.", registry=registry
        )
        self._joules = (
            Counter("edgespec_joules", "Energy of generations.", registry=registry) if energy else None
        )
        self._waited = Histogram(
            "edgespec_queue_seconds", "Time in the queue.", buckets=_SECONDS, registry=registry
        )
        self._first_token = Histogram(
            "edgespec_first_token_seconds",
            "From the request's place in the queue to its first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._rate = Histogram(
            "edgespec_tokens_per_second",
            "Tokens after the first over the time after the first, of each generation.",
            buckets=_TOKENS_PER_S,
            registry=registry,
        )
        self._workers: list[RequestWorker[Any, Any, Any]] = []
        self._add_states(registry)
        self._add_passes(registry)

    def _by_outcome(self, name: str, text: str) -> Counter:
        counter = Counter(f"edgespec_{name}", text, ["outcome"], registry=self._registry)
        for outcome in _OUTCOMES.values():  # present from the start: a rate needs the zero
            counter.labels(outcome)
        return counter

    def _add_states(self, registry: CollectorRegistry) -> None:
        for name, text, state in (
            ("queue_length", "Requests that wait, recordings among them.", "n_waiting"),
            ("running", "Answers being written, recordings being heard.", "n_running"),
            ("parallel", "Most answers and recordings at once.", "parallel"),
        ):
            gauge = Gauge(f"edgespec_{name}", text, registry=registry)
            gauge.set_function(partial(self._total, state))
        busy = Gauge("edgespec_busy", "1 while an answer is written or a recording heard.", registry=registry)
        busy.set_function(lambda: any(worker.busy for worker in self._workers))

    def _total(self, state: str) -> int:
        return sum(getattr(worker, state) for worker in self._workers)

    def _add_passes(self, registry: CollectorRegistry) -> None:
        self._pass_s = Counter("edgespec_pass_seconds", "Time of the target's passes.", registry=registry)
        self._pass_texts = Histogram(
            "edgespec_pass_texts", "Texts that share a pass.", buckets=_TEXTS, registry=registry
        )
        self._pass_tokens = Counter(
            "edgespec_pass_tokens",
            "Tokens in the target's passes: of prompts, or written, drafted and ends of prompts.",
            ["kind"],
            registry=registry,
        )
        for kind in ("prompt", "text"):
            self._pass_tokens.labels(kind)

    def watch(self, worker: Worker) -> None:
        """Count what `worker` does from now on."""
        worker.on_end = self._count
        worker.on_pass = self._count_pass
        self._workers.append(worker)

    def _count(self, ended: EndedRequest[Result]) -> None:
        """Count a request; called on the worker's thread."""
        self._generations.labels(_OUTCOMES[ended.outcome]).inc()
        self._waited.observe(ended.waited_s)
        if ended.result is None:
            return
        result, stats = ended.result, ended.result.stats
        if stats.ttft_s is not None:  # before it the prompt was not read to its end
            self._prompt.labels("read").inc(result.prompt_tokens - result.n_cached)
            self._prompt.labels("cache").inc(result.n_cached)
            self._first_token.observe(ended.waited_s + stats.ttft_s)
        if stats.generation_tokens_per_s is not None:
            self._rate.observe(stats.generation_tokens_per_s)
        self._generated.inc(len(result.token_ids))
        self._drafted.inc(stats.n_drafted)
        self._accepted.inc(stats.n_accepted)
        self._busy_s.inc(stats.total_s)
        if self._joules and result.energy and result.energy.joules is not None:
            self._joules.inc(result.energy.joules)

    def _count_pass(self, passed: StepSummary) -> None:
        """Count a pass; called on the worker's thread."""
        if passed.n_requests:
            self._pass_s.inc(passed.seconds)
            self._pass_texts.observe(passed.n_requests)
            self._pass_tokens.labels("prompt").inc(passed.n_prefilled)
            self._pass_tokens.labels("text").inc(passed.n_tokens - passed.n_prefilled)

    def watch_speech(self, worker: SpeechWorker) -> None:
        """Count what `worker` hears from now on."""
        self._workers.append(worker)
        recordings = self._by_outcome("recordings", "Recordings, by how they ended.")
        audio_s = Counter(
            "edgespec_audio_seconds", "Length of what was heard of recordings.", registry=self._registry
        )
        heard_s = Counter(
            "edgespec_hearing_seconds", "Time in which they were heard.", registry=self._registry
        )
        waiting = Gauge("edgespec_recordings_waiting", "Recordings that wait.", registry=self._registry)
        waiting.set_function(lambda: worker.n_waiting)

        def count(ended: EndedRequest[Transcript]) -> None:
            recordings.labels(_OUTCOMES[ended.outcome]).inc()
            if ended.result:
                audio_s.inc(ended.result.stats.heard_s)
                heard_s.inc(ended.result.stats.total_s)

        worker.on_end = count

    def watch_embeddings(self, worker: EmbeddingWorker) -> None:
        """Count what `worker` embeds from now on."""
        self._workers.append(worker)
        requests = self._by_outcome("embeddings", "Requests for vectors, by how they ended.")
        texts = Counter(
            "edgespec_embedded_texts", "Texts embedded, or pairs scored.", registry=self._registry
        )
        tokens = Counter("edgespec_embedded_tokens", "Their tokens.", registry=self._registry)

        def count(ended: EndedRequest[EmbeddedTexts]) -> None:
            requests.labels(_OUTCOMES[ended.outcome]).inc()
            self._waited.observe(ended.waited_s)
            if ended.result:
                texts.inc(len(ended.result.rows))
                tokens.inc(ended.result.n_tokens)

        worker.on_end = count

    def counting(self, app: ASGIApp) -> ASGIApp:
        """Return `app` with its answers counted by route and status."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            status = 499  # the client went away before there was an answer, as nginx has it

            async def note(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            try:
                await app(scope, receive, note)
            except Exception:
                status = 500
                raise
            finally:
                # The route, not the path, and a known method: a client must not be able to make new labels.
                path = scope["path"] if scope["path"] in PATHS else "other"
                route = getattr(scope.get("route"), "path", path)
                method = scope["method"] if scope["method"] in _METHODS else "other"
                self._requests.labels(method, route, status).inc()

        return counted

    def render(self) -> bytes:
        """Return everything counted, for a Prometheus server to read."""
        return generate_latest(self._registry)


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
