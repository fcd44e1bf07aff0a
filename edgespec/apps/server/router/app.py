"""The application in front of several models: it finds the model of a request and passes it on.

What a request must have is checked by the model's own server. Here only the name is read, from the body of
JSON, the form of a recording, the path or the query; without one it is the first model that the path is for.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from edgespec.apps.server.api_errors import ApiError, engine_error, last_event
from edgespec.apps.server.http_server import FORWARDED
from edgespec.apps.server.json_routes import model_in_form, models_in_form
from edgespec.apps.server.names import ModelKind, NamedModel, ServedNames
from edgespec.apps.server.ollama.response_schema import FOREVER, SPOKEN, rfc3339
from edgespec.apps.server.page import add_page
from edgespec.apps.server.responses.store import PATH, KeepingResponses, ResponseStore
from edgespec.apps.server.router.model_facts import UnloadedFacts
from edgespec.apps.server.router.pool import (
    ForwardedRequest,
    ModelAnswer,
    NotReached,
    Pool,
    PooledModel,
    ProcessLost,
)
from edgespec.apps.server.router.preset import duration_s
from edgespec.apps.server.streaming import WholeEvents
from edgespec.errors import EdgespecError
from edgespec.platform.messages import MessageFn

# ---- health and counters of all models of a server, each by its name ----


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


# ---- app ----


_ALIVE_S = 10.0
_AUDIO, _OLLAMA = "/v1/audio/", "/api/"
_BY_QUERY = ("/props", "/tokenizer_info", "/openapi.json")
"""Paths without a body that tell of one model: ?model=NAME, by default the first."""
_NOT_FORWARDED = frozenset(
    {b"host", b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"expect", b"origin"}
)
_NOT_RETURNED = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"date"})


class Asked(msgspec.Struct):
    """The fields of a request that the router reads: which model, and for how long it stays loaded."""

    model: str | None = None
    name: str | None = None
    """Ollama's older name of it."""
    stream: bool | None = None
    keep_alive: float | str | None = None
    prompt: Any = None
    messages: Any = None


def create_router(pool: Pool, log: MessageFn) -> Starlette:
    """Return the application for the models of `pool`; `log` takes a line for each failure."""

    async def refused(request: Request, error: Exception) -> Response:
        return engine_error(error, log).response(request.scope)

    async def stored(request: Request) -> Response:
        streams = request.query_params.get("stream", "false") != "false"
        return store.show(request.path_params["response_id"], streams=streams)

    router, store = Router(pool), ResponseStore()
    app = Starlette(exception_handlers={ApiError: refused, EdgespecError: refused})
    add_page(app)
    reports: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/health": router.health,
        "/v1/health": router.health,
        "/metrics": router.metrics,
        "/v1/models": router.list_models,
        "/v1/models/{name:path}": router.show_model,
        "/api/tags": router.list_tags,
        "/api/ps": router.list_loaded,
        "/api/version": router.show_version,
    }
    app.router.routes.extend(Route(path, answer, methods=["GET"]) for path, answer in reports.items())
    app.router.routes.append(Route(PATH + "/{response_id}", stored, methods=["GET"]))
    app.router.routes.append(Route("/{path:path}", router))
    app.add_middleware(KeepingResponses, store=store)
    return app


class Router:
    """Answers what is about all models, and has the model of any other request answer it."""

    def __init__(self, pool: Pool) -> None:
        """Choose among the models of `pool`."""
        self._pool = pool
        self._models = pool.models

    # ---- the model of a request ----

    async def _names(self) -> ServedNames:
        facts = await self._pool.known()
        return ServedNames([_named(model, facts.get(model.name, UnloadedFacts())) for model in self._models])

    async def _model_of(self, scope: Scope, body: bytes, asked: Asked) -> PooledModel:
        path, headers = scope["path"], Headers(scope=scope)
        name = asked.model or (asked.name if path.startswith(_OLLAMA) else None)
        if path.startswith(_AUDIO) and headers.get("content-type", "").startswith("multipart/"):
            name = await _named_in_form(scope, body)
        elif not body:
            name = Request(scope).query_params.get("model")
        kind: ModelKind = "speech" if path.startswith(_AUDIO) else "text"
        if "embed" in path or "rank" in path:
            kind = "vectors"
        return self._models[(await self._names()).find(name, kind)]

    # ---- requests that a model answers ----

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, until its client leaves."""
        scope.setdefault("state", {})
        body = (await receive()).get("body", b"")  # the gate has read all of it
        work = asyncio.ensure_future(self._answer(scope, receive, send, body))
        leaving = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not work.done():
                work.cancel()
        with suppress(asyncio.CancelledError):
            await work

    async def _answer(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
        asked, path = _asked(body), scope["path"]
        if scope["method"] != "POST" and path not in _BY_QUERY:
            raise ApiError(404, f"there is no {path[:80]} here")
        model = await self._model_of(scope, body, asked)
        if path.startswith(_OLLAMA) and asked.keep_alive is not None:
            with suppress(ValueError):  # which the model's own server refuses
                seconds = duration_s(asked.keep_alive)
                if not (seconds or model.loading or asked.prompt or asked.messages):
                    await JSONResponse(_unloaded(path, asked))(scope, receive, send)
                    return
                model.keep_alive_s = seconds
        reply = _Reply(scope, send, model, streams=path.startswith("/v1/") and bool(asked.stream))
        waiting = asyncio.create_task(reply.keep_alive()) if reply.streams else None
        try:
            await self._forward(model, _forwarded(scope, body), reply)
        except ProcessLost:
            line = f"the process of the model {model.name!r} died amid the answer: ask again"
            await reply.fail(ApiError(503, line, code="model_lost", headers={"Retry-After": "1"}))
        except Exception as error:
            if not reply.has_begun:
                raise
            await reply.fail(engine_error(error, self._pool.log))
        finally:
            if waiting:
                waiting.cancel()

    async def _forward(self, model: PooledModel, request: ForwardedRequest, reply: _Reply) -> None:
        while True:
            async with self._pool.hold(model) as process:
                try:
                    await reply.pass_on(await process.ask(request))
                except NotReached:  # it died while nobody asked
                    process.kill()
                    self._pool.forget(model, process)
                    continue
                except ProcessLost:
                    await self._pool.note_end(model, process)
                    raise
                return

    # ---- what is about all models ----

    async def health(self, _request: Request) -> Response:
        """Whether requests are taken, and the state of each model."""
        pool = self._pool
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

    async def metrics(self, _request: Request) -> Response:
        """The counters of all loaded models, with their names."""
        pool = self._pool
        texts = await asyncio.gather(*(_told(model, "/metrics") for model in pool.models))
        named = zip((model.name for model in pool.models), texts, strict=True)
        registry = CollectorRegistry()
        registry.register(_Collected([*_states(pool), *_merged(named)]))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def list_models(self, request: Request) -> Response:
        """Answer GET /v1/models with all models that can be asked for, loaded or not."""
        names = await self._names()
        entries = [one for i in range(len(self._models)) for one in self._entries(i, names)]
        return models_in_form(request, entries)

    async def show_model(self, request: Request) -> Response:
        """Answer GET /v1/models/{name} with one model; 404 for a name that is none of them."""
        name, names = request.path_params["name"], await self._names()
        entries = self._entries(names.find(name), names)
        return model_in_form(request, next((one for one in entries if one["id"] == name), entries[0]))

    def _entries(self, number: int, names: ServedNames) -> list[dict[str, Any]]:
        model = self._models[number]
        told = (model.reports.get("/v1/models") or {}).get("data")
        facts = self._pool.facts.get(model.name)
        if not told:
            own: dict[str, Any] = {}
            if model.spec.files.target is None:
                own["speech"] = True
            elif facts:
                own |= {"n_ctx": facts.n_ctx, "chat": facts.chat}
            created = facts.created if facts else 0
            told = [
                {
                    "id": model.name,
                    "object": "model",
                    "created": created,
                    "owned_by": "edgespec",
                    "edgespec": own,
                }
            ]
        shared = {"aliases": names.others(number), "status": model.status}
        return [{**one, "edgespec": {**one["edgespec"], **shared}} for one in told]

    async def list_tags(self, _request: Request) -> Response:
        """The models that write text, loaded or not, as Ollama lists them."""
        await self._pool.known()
        return JSONResponse({"models": [one for each in self._models for one in self._tags(each)]})

    def _tags(self, model: PooledModel) -> list[dict[str, Any]]:
        facts = self._pool.facts.get(model.name)
        if told := (model.reports.get("/api/tags") or {}).get("models"):
            return list(told)
        if model.spec.files.target is None or facts is None:
            return []
        full = model.name if ":" in model.name else f"{model.name}:latest"
        details = {
            "parent_model": "",
            "format": "gguf",
            "family": facts.architecture,
            "families": [facts.architecture],
            "parameter_size": facts.parameter_size,
            "quantization_level": facts.quantization,
            "context_length": facts.n_ctx,
            "embedding_length": facts.n_embd,
        }
        modified = rfc3339(facts.created)
        told = {
            "name": full,
            "model": full,
            "modified_at": modified,
            "size": facts.size,
            "digest": facts.digest,
        }
        return [{**told, "details": details}]

    async def list_loaded(self, _request: Request) -> Response:
        """The models that are loaded, and until when, as Ollama lists them."""
        found = []
        for model in self._models:
            left_s, until = model.expires_s, FOREVER
            if not math.isinf(left_s):
                until = rfc3339(time.time() + max(0.0, left_s))
            if model.process:
                told = (model.reports.get("/api/ps") or {}).get("models", [])
                found += [{**one, "expires_at": until} for one in told]
        return JSONResponse({"models": found})

    async def show_version(self, _request: Request) -> Response:
        """The version of Ollama's API, and ours."""
        return JSONResponse({"version": SPOKEN, "edgespec": version("edgespec")})


class _Reply:
    """The answer to a client: a model's, as it comes. A failure after its head is a stream's last event."""

    def __init__(self, scope: Scope, send: Send, model: PooledModel, *, streams: bool) -> None:
        self.has_begun = False
        self.streams = streams
        self._scope, self._send, self._model = scope, send, model
        self._passing = False

    async def keep_alive(self) -> None:
        """Begin the stream if the model is not loaded after some seconds, and say so until it is."""
        while True:
            await asyncio.sleep(_ALIVE_S)
            if self._passing:
                return
            if self._model.status == "loaded":
                continue
            if not self.has_begun:
                await self._begin(
                    200,
                    [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")],
                )
            await self._part(f": loading {self._model.name}\n\n".encode())

    async def pass_on(self, answer: ModelAnswer) -> None:
        """Send a model's answer. Raises ProcessLost."""
        try:
            await self._pass_on(answer)
        finally:
            answer.close()

    async def _pass_on(self, answer: ModelAnswer) -> None:
        self._passing = True
        self._scope["state"][FORWARDED] = True
        headers = [(name, value) for name, value in answer.headers if name.lower() not in _NOT_RETURNED]
        kinds = {name.lower(): value for name, value in headers}
        if b"content-length" in kinds or (self.has_begun and answer.status != 200):
            body = b"".join([part async for part in answer.parts()])  # an answer that breaks off has no head
            if self.has_begun:
                await self._part(last_event(self._scope["path"], body))
            else:
                await self._begin(answer.status, headers)
                await self._part(body)
        else:
            events = WholeEvents(b"\n" if b"ndjson" in kinds.get(b"content-type", b"") else b"\n\n")
            if not self.has_begun:
                await self._begin(answer.status, headers)
            async for part in answer.parts():
                if whole := b"".join(events.feed(part)):
                    await self._part(whole)
            await self._part(events.rest)
        await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, error: ApiError) -> None:
        """Say why there is no answer, or no more of it."""
        response = error.response(self._scope)
        self._scope["state"][FORWARDED] = False
        if not self.has_begun:
            await self._begin(response.status_code, response.raw_headers)
            await self._part(bytes(response.body))
        else:
            await self._part(last_event(self._scope["path"], bytes(response.body)))
        await self._send({"type": "http.response.body", "body": b""})

    async def _begin(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.has_begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers]})

    async def _part(self, part: bytes) -> None:
        await self._send({"type": "http.response.body", "body": part, "more_body": True})


def _named(model: PooledModel, facts: UnloadedFacts) -> NamedModel:
    spec, files = model.spec, model.spec.files
    kinds: set[ModelKind] = {"speech"} if files.speech else set()
    if files.target:
        kinds.add("vectors" if spec.embeddings else "text")
    return NamedModel(
        spec.name, spec.aliases, frozenset(kinds), facts.title, facts.quantization, facts.parameter_size
    )


def _asked(body: bytes) -> Asked:
    try:
        return msgspec.json.decode(body, type=Asked)
    except msgspec.DecodeError:  # the model's own server says what is wrong
        return Asked()


def _forwarded(scope: Scope, body: bytes) -> ForwardedRequest:
    headers = [header for header in scope["headers"] if header[0].lower() not in _NOT_FORWARDED]
    if not any(name == b"authorization" for name, _ in headers) and scope.get("client"):
        # By this header clients take turns in its queue; it needs no key.
        headers.append((b"authorization", f"Address {scope['client'][0]}".encode()))
    query = scope.get("query_string", b"")
    return ForwardedRequest(
        scope["method"], scope["raw_path"] + (b"?" + query if query else b""), headers, body
    )


async def _named_in_form(scope: Scope, body: bytes) -> str | None:
    async def replay() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    try:
        async with Request(scope, replay).form() as form:
            name = form.get("model")
    except Exception:  # noqa: BLE001 - the model's own server says what is wrong
        return None
    return name if isinstance(name, str) else None


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _unloaded(path: str, asked: Asked) -> dict[str, Any]:
    said = {"message": {"role": "assistant", "content": ""}} if path == "/api/chat" else {"response": ""}
    created = rfc3339(time.time())
    return {"model": asked.model, "created_at": created, **said, "done": True, "done_reason": "unload"}
