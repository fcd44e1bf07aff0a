"""The page over a server that streams what a test says, when it says it, in the chunks of the real one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from browser import Visit
from edgespec.apps.server.page import add_page
from edgespec.apps.server.response_schema import FinishReason
from edgespec.decoding.records import Origin, PromptProgress


class ScriptedChat:
    """Answers each chat completion with what `say` was given, up to the next `end`."""

    url = ""

    def __init__(self) -> None:
        self._said: queue.SimpleQueue[dict[str, Any] | PromptProgress | int] = queue.SimpleQueue()

    def say(self, text: str, origin: Origin = "target") -> None:
        """Send `text` in a chunk of its own."""
        self._chunk({"content": text}, edgespec={"origins": [(len(text), origin)], "n_tokens": 1})

    def think(self, text: str) -> None:
        """Send `text` as a thought."""
        self._chunk({"reasoning_content": text})

    def wait(self, place: int) -> None:
        """Say that the request waits at this place of the queue, or begins: 0."""
        self._said.put(place)

    def read(self, n: int, n_tokens: int) -> None:
        """Say that `n` of the prompt's tokens are read."""
        self._said.put(PromptProgress(n, n_tokens))

    def end(self, reason: FinishReason = "stop") -> None:
        """End the answer."""
        self._chunk({}, finish_reason=reason)

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None, **more: Any) -> None:
        self._said.put({"choices": [{"delta": delta, "finish_reason": finish_reason}], **more})

    def answer(self, text: str, size: int = 7) -> None:
        """Say `text` in chunks of `size` characters, and end."""
        for start in range(0, len(text), size):
            self.say(text[start : start + size], "accepted" if start % 2 else "target")
        self.end()

    def show(self, visit: Visit, text: str, size: int = 7) -> Any:
        """Answer a question of `visit` with `text`; return the element that the answer is shown in."""
        self.answer(text, size)
        visit.ask("question")
        visit.finish()
        return visit.page.locator(".answer .text").last

    def app(self) -> Starlette:
        """The application: the real page, and the two routes that it asks."""
        app = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
            ]
        )
        add_page(app)
        return app

    async def _models(self, request: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "scripted"}]})

    async def _complete(self, request: Request) -> StreamingResponse:
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[str]:
        while True:
            try:
                said = self._said.get_nowait()
            except queue.Empty:
                await asyncio.sleep(0.005)
                continue
            if isinstance(said, int):
                yield f": queue {said}\n\n"
            elif isinstance(said, PromptProgress):
                yield f": reading {said.n_read} of {said.n_tokens} tokens\n\n"
            else:
                yield f"data: {json.dumps(said)}\n\n"
                if said["choices"][0]["finish_reason"]:
                    yield "data: [DONE]\n\n"
                    return


@contextlib.contextmanager
def scripting() -> Iterator[ScriptedChat]:
    """Serve while entered."""
    chat = ScriptedChat()
    server = uvicorn.Server(uvicorn.Config(chat.app(), port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started and thread.is_alive():
        thread.join(0.005)
    try:
        chat.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        yield chat
    finally:
        server.should_exit = True
        server.force_exit = True  # an answer that nobody ended
        thread.join(30)
