"""The application in front of several models: it finds the model of a request and passes it on.

The model's own server checks requests. Only the name is read here, from the JSON body, the form of a
recording, the path or the query; without a name the first model that suits the path is meant.

The file of `edgespec serve --models` has a table for each model, whose keys are options of `edgespec serve`:

    keep_alive = "30m"

    [models.coder]
    pair = "qwen2.5-coder-1.5b"
    ctx = 16384
    aliases = ["gpt-4o-mini"]
    keep = true

The key of a table is the model's name.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
import tomllib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import httpx
import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, defstruct
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from edgespec.apps.server.api_errors import ApiError, engine_error, last_event
from edgespec.apps.server.gate import replay
from edgespec.apps.server.http_server import FORWARDED
from edgespec.apps.server.json_routes import model_in_form, models_in_form
from edgespec.apps.server.names import ModelKind, ServedNames
from edgespec.apps.server.ollama_answers import (
    FOREVER,
    SPOKEN,
    duration_s,
    loaded,
    nothing_asked,
    rfc3339,
)
from edgespec.apps.server.page import add_page
from edgespec.apps.server.responses_store import PATH, KeepingResponses, ResponseStore
from edgespec.apps.server.router.pool import Pool, PooledModel
from edgespec.apps.server.streaming import WholeEvents
from edgespec.cli.groups import flat_options
from edgespec.errors import EdgespecError, MessageFn, UsageError
from edgespec.models.registry import NAME, convert_table

KEEP_ALIVE = "5m"
"""The time after which an idle model is unloaded, where nothing else is said; as in Ollama."""


class _WithKeepAlive(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    keep_alive: str | float | None = None
    """Idle time after which it is unloaded, as of `duration_s`."""

    def __post_init__(self) -> None:
        if self.keep_alive is not None:
            try:
                duration_s(self.keep_alive)
            except ValueError:
                raise ValueError('expected a time such as "30m", seconds, or -1 for ever') from None


class PresetModel(_WithKeepAlive, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the file. Without `target`, `pair` and `speech` its key names a model or a pair."""

    target: str | None = None
    draft: str | None = None
    pair: str | None = None
    aliases: tuple[str, ...] = ()
    """Other names of it."""
    keep: bool = False
    """Whether it is loaded at the start and never unloaded."""
    given: dict[str, Any] = {}
    """Its options of `edgespec serve`, by their names in Python."""


_OWN = {field.name for field in msgspec.structs.fields(PresetModel)} - {"given"}
_OF_THE_SERVER = {"max_queue", "max_body", "max_seconds", "max_audio"}
"""Limits of requests before their model is known."""


def _options_struct(groups: Iterable[type]) -> type[Struct]:
    """Return the options of `edgespec serve` that a table may have, with their types and limits."""
    found: list[tuple[str, Any, Any]] = []
    for name, kind, option in (one for group in groups for one in flat_options(group)):
        kinds = [kind]
        if get_origin(kind) in (Union, UnionType):
            kinds = [one for one in get_args(kind) if one is not NoneType]
        if option.min is not None or option.max is not None:
            kinds = [Annotated[kinds[0], Meta(ge=option.min, le=option.max)]]
        if name not in _OF_THE_SERVER:
            found.append((name, Union[*kinds, UnsetType], UNSET))
    return defstruct("PresetOptions", found, forbid_unknown_fields=True, kw_only=True)


class _PresetDocument(_WithKeepAlive, frozen=True, forbid_unknown_fields=True, kw_only=True):
    models: dict[str, Any]


def read_preset(file: Path, groups: Iterable[type]) -> dict[str, PresetModel]:
    """Return the models in a file, by name; `groups`: the options that they may set.

    Raises UsageError, one line with file, table and key.
    """
    options = _options_struct(groups)
    known = [*_OWN, *(field.name for field in msgspec.structs.fields(options)), "models"]
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
        document = convert_table(tables, _PresetDocument, f"{file}: top level", known)
        models = {
            name: _model(table, options, f"{file}: models.{name}", known)
            for name, table in document.models.items()
        }
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: not valid TOML: {error}") from None
    except UsageError:
        raise
    except EdgespecError as error:
        raise UsageError(str(error)) from None
    if not models:
        raise UsageError(f"{file}: models: it names no model; add a table [models.NAME]")
    for name, model in models.items():
        _check(name, model, f"{file}: models.{name}")
    if document.keep_alive is not None:
        models = {
            name: model
            if model.keep_alive is not None
            else msgspec.structs.replace(model, keep_alive=document.keep_alive)
            for name, model in models.items()
        }
    return models


def _model(table: Any, options: type[Struct], where: str, known: Sequence[str]) -> PresetModel:  # noqa: ANN401
    if not isinstance(table, dict):
        return convert_table(table, PresetModel, where, known)
    given = convert_table({key: table[key] for key in table if key not in _OWN}, options, where, known)
    model = convert_table({key: table[key] for key in table if key in _OWN}, PresetModel, where, known)
    values = {name: value for name, value in msgspec.structs.asdict(given).items() if value is not UNSET}
    return msgspec.structs.replace(model, given=values)


def _check(name: str, model: PresetModel, where: str) -> None:
    if not re.fullmatch(rf"{NAME}(:{NAME})?", name):
        raise UsageError(f"{where}: {name!r} is not a usable name (letters, digits and . _ + @ -)")
    if model.pair is not None and (model.target or model.draft):
        raise UsageError(f"{where}.pair: it contradicts target and draft: choose one")
    for key, value in {**msgspec.structs.asdict(model), **model.given}.items():
        if value == "":
            raise UsageError(f"{where}.{key} is empty: give it a value, or leave it out")


_ALIVE_S = 10.0
_AUDIO, _OLLAMA, _METRICS = "/v1/audio/", "/api/", "/metrics"
_ADAPTERS = "/lora-adapters"
_BY_QUERY = ("/props", "/openapi.json", _METRICS, _ADAPTERS)
"""Paths whose body names no model: ?model=NAME, by default the first."""
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
        "/v1/models": router.list_models,
        "/v1/models/{name:path}": router.show_model,
        "/api/tags": router.list_tags,
        "/api/ps": router.list_loaded,
        "/api/version": router.show_version,
        PATH + "/{response_id}": stored,
    }
    app.router.routes.extend(Route(path, answer, methods=["GET"]) for path, answer in reports.items())
    app.router.routes.append(Route("/{path:path}", router))
    app.add_middleware(KeepingResponses, store=store)
    return app


class Router:
    """Answers requests about all models, and passes any other on to its model."""

    def __init__(self, pool: Pool) -> None:
        """Choose among the models of `pool`."""
        self._pool, self._models = pool, pool.models
        self._names = ServedNames([model.spec.named for model in pool.models])

    # ---- requests that a model answers ----

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, until its client leaves."""
        scope.setdefault("state", {})
        body = await Request(scope, receive).body()
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
        if path == _METRICS and model.status != "loaded":
            raise ApiError(404, f"{model.name} is not loaded: it counts nothing")
        if path.startswith(_OLLAMA) and asked.keep_alive is not None:
            with suppress(ValueError):  # which the model's own server refuses
                seconds = duration_s(asked.keep_alive)
                if not (seconds or model.loading or asked.prompt or asked.messages):
                    chat = path == "/api/chat"
                    told = nothing_asked(asked.model or "", chat=chat, reason="unload")
                    await JSONResponse(told)(scope, receive, send)
                    return
                model.keep_alive_s = seconds
        reply = _Reply(scope, send, model)
        streams = path.startswith("/v1/") and asked.stream
        waiting = asyncio.create_task(reply.keep_alive()) if streams else None
        try:
            await self._forward(model, _forwarded(scope, body), reply)
        except httpx.TransportError:
            line = f"the process of the model {model.name!r} died amid the answer: ask again"
            await reply.fail(ApiError(503, line, code="model_lost", headers={"Retry-After": "1"}))
        except Exception as error:
            if not reply.has_begun:
                raise
            await reply.fail(engine_error(error, self._pool.log))
        finally:
            if waiting:
                waiting.cancel()

    async def _forward(self, model: PooledModel, request: httpx.Request, reply: _Reply) -> None:
        while True:
            async with self._pool.hold(model) as process:
                try:
                    answer = await process.ask(request)
                    try:
                        await reply.pass_on(answer)
                    finally:  # whoever stops reading ends the work
                        await answer.aclose()
                except httpx.ConnectError:  # it died while nobody asked
                    process.kill()
                    await self._pool.note_end(model, process)
                except httpx.TransportError:
                    await self._pool.note_end(model, process)
                    raise
                else:
                    return

    async def _model_of(self, scope: Scope, body: bytes, asked: Asked) -> PooledModel:
        path, headers = scope["path"], Headers(scope=scope)
        name = asked.model or (asked.name if path.startswith(_OLLAMA) else None)
        if path.startswith(_AUDIO) and headers.get("content-type", "").startswith("multipart/"):
            name = await _named_in_form(scope, body)
        elif not body or path == _ADAPTERS:
            name = Request(scope).query_params.get("model")
        kind: ModelKind = "speech" if path.startswith(_AUDIO) else "text"
        if "embed" in path or "rank" in path:
            kind = "vectors"
        return self._models[self._names.find(name, kind)]

    # ---- what is about all models ----

    async def health(self, _request: Request) -> Response:
        """Whether requests are taken, and the state of each model."""
        pool = self._pool
        models = {
            model.name: {
                "status": model.status,
                "running": model.n_running,
                "waiting": model.n_waiting,
                "pinned": model.spec.keep,
            }
            for model in pool.models
        }
        told = {
            "status": "stopping" if pool.stopping else "ok",
            "busy": pool.n_running > 0,
            "running": pool.n_running,
            "waiting": sum(model.n_waiting for model in pool.models),
            "parallel": pool.parallel,
            "models": models,
        }
        return JSONResponse(told, 503 if pool.stopping else 200)

    async def list_models(self, request: Request) -> Response:
        """Answer GET /v1/models with all models that can be asked for, loaded or not."""
        return models_in_form(request, [one for i in range(len(self._models)) for one in self._entries(i)])

    async def show_model(self, request: Request) -> Response:
        """Answer GET /v1/models/{name} with one model; 404 for a name that is none of them."""
        name = request.path_params["name"]
        entries = self._entries(self._names.find(name))
        return model_in_form(request, next((one for one in entries if one["id"] == name), entries[0]))

    def _entries(self, number: int) -> list[dict[str, Any]]:
        model = self._models[number]
        own = {"speech": True} if model.spec.named.kinds == {"speech"} else {}
        entry = {"id": model.name, "object": "model", "created": model.spec.created, "owned_by": "edgespec"}
        shared = {"aliases": self._names.others(number), "status": model.status}
        told = model.entries or [{**entry, "edgespec": own}]
        return [{**one, "edgespec": {**one["edgespec"], **shared}} for one in told]

    async def list_tags(self, _request: Request) -> Response:
        """The models that Ollama's routes take, loaded or not, as Ollama lists them."""
        return JSONResponse({"models": [one.spec.listed for one in self._models if one.spec.listed]})

    async def list_loaded(self, _request: Request) -> Response:
        """Those of the models that are loaded, and until when."""
        found = []
        for model in self._models:
            if model.process and model.spec.listed:
                left_s = model.expires_s
                until = FOREVER if math.isinf(left_s) else rfc3339(time.time() + max(0.0, left_s))
                found.append(loaded(model.spec.listed, until))
        return JSONResponse({"models": found})

    async def show_version(self, _request: Request) -> Response:
        """The version of Ollama's API, and ours."""
        return JSONResponse({"version": SPOKEN, "edgespec": version("edgespec")})


class _Reply:
    """The answer to a client: a model's, as it comes. A failure after its head is a stream's last event."""

    def __init__(self, scope: Scope, send: Send, model: PooledModel) -> None:
        self.has_begun = False
        self._scope, self._send, self._model = scope, send, model

    async def keep_alive(self) -> None:
        """Begin the stream if loading takes some seconds, and send comments until it is done."""
        while True:
            await asyncio.sleep(_ALIVE_S)
            if self._model.process:
                return
            if not self.has_begun:
                kind = (b"content-type", b"text/event-stream; charset=utf-8")
                await self._begin(200, [kind, (b"cache-control", b"no-cache")])
            await self._part(f": loading {self._model.name}\n\n".encode())

    async def pass_on(self, answer: httpx.Response) -> None:
        """Send a model's answer. Raises httpx.TransportError."""
        self._scope["state"][FORWARDED] = True
        status, kind = answer.status_code, answer.headers.get("content-type", "")
        headers = [(name, value) for name, value in answer.headers.raw if name.lower() not in _NOT_RETURNED]
        if "content-length" in answer.headers or (self.has_begun and status != 200):
            await self._whole(status, headers, await answer.aread())  # one that breaks off has no head
            return
        events = WholeEvents(b"\n" if "ndjson" in kind else b"\n\n")
        if not self.has_begun:
            await self._begin(status, headers)
        async for part in answer.aiter_raw():
            if whole := b"".join(events.feed(part)):
                await self._part(whole)
        await self._part(events.rest, more=False)

    async def fail(self, error: ApiError) -> None:
        """Send the reason why the answer is missing or broken off."""
        response = error.response(self._scope)
        self._scope["state"][FORWARDED] = False
        await self._whole(response.status_code, response.raw_headers, bytes(response.body))

    async def _whole(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        if self.has_begun:
            body = last_event(self._scope["path"], body)
        else:
            await self._begin(status, headers)
        await self._part(body, more=False)

    async def _begin(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.has_begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers]})

    async def _part(self, part: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": part, "more_body": more})


def _asked(body: bytes) -> Asked:
    try:
        return msgspec.json.decode(body, type=Asked)
    except msgspec.DecodeError:  # the model's own server says what is wrong
        return Asked()


def _forwarded(scope: Scope, body: bytes) -> httpx.Request:
    headers = [header for header in scope["headers"] if header[0].lower() not in _NOT_FORWARDED]
    if not any(name == b"authorization" for name, _ in headers) and scope.get("client"):
        # By this header clients take turns in its queue; it needs no key.
        headers.append((b"authorization", f"Address {scope['client'][0]}".encode()))
    target = scope["raw_path"] + (b"?" + query if (query := scope.get("query_string")) else b"")
    url = httpx.URL(scheme="http", host="localhost", raw_path=target)
    return httpx.Request(scope["method"], url, headers=headers, content=body)


async def _named_in_form(scope: Scope, body: bytes) -> str | None:
    try:
        async with Request(scope, replay(body, _until_ended)).form() as form:
            name = form.get("model")
    except Exception:  # noqa: BLE001 - the model's own server says what is wrong
        return None
    return name if isinstance(name, str) else None


async def _until_ended() -> dict[str, Any]:
    return {"type": "http.disconnect"}


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
