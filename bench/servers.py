"""Servers that scripts start as processes of their own, and answers read from them as OpenAI's clients do."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from edgespec.errors import EdgespecError
from edgespec.models.store import Store
from edgespec.platform.files import cache_root

_LINES = 6  # of a server's log, shown when it does not come up


class Server:
    """A server's process, which answers from the constructor on; a context manager that ends it.

    `command` gets `--port` with a free port. `directory`: where it runs, by default an empty one. Raises
    EdgespecError with the last lines of its log if it ends, or does not answer within `timeout_s` seconds.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        directory: Path | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        self.name = name
        self._files = Path(tempfile.mkdtemp(prefix="edgespec-server-"))
        self._log = self._files / "log"
        port = free_port()
        self.address = f"http://127.0.0.1:{port}"
        kept = {"XDG_CACHE_HOME": str(self._own_cache()), "EDGESPEC_MODELS_DIR": str(Store.default().root)}
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [*command, "--port", str(port)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=directory or self._files,  # some write a log where they run
                    env={**os.environ, **kept},
                )
        except OSError as error:
            shutil.rmtree(self._files)
            raise EdgespecError(f"{name} cannot be started: {error.strerror}: {error.filename}") from None
        try:
            self._await(timeout_s)
        except BaseException:
            self.end()
            raise

    def _own_cache(self) -> Path:
        """Return a cache with copies of the user's profiles and of the kernels' self-tests.

        What one server learns of a pair is not the next one's.
        """
        own = self._files / "cache"
        folder = own / "edgespec" / "profiles"
        folder.mkdir(parents=True)
        for stored in (cache_root() / "profiles").glob("*"):
            shutil.copy(stored, folder)
        for stored in cache_root().glob("selftest-*.json"):
            shutil.copy(stored, folder.parent)
        return own

    def _await(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            if (code := self._process.poll()) is not None:
                raise EdgespecError(f"{self.name} ended with code {code} before it served:\n{self.log()}")
            try:
                if httpx.get(f"{self.address}/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass  # it does not listen yet
            if time.monotonic() > deadline:
                raise EdgespecError(f"{self.name} does not serve after {timeout_s:g} s:\n{self.log()}")
            time.sleep(0.05)

    def log(self, n_lines: int | None = _LINES) -> str:
        """Return the last `n_lines` that it wrote; None: all."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-(n_lines or 0) :]) or "  it wrote nothing"

    def first_object(self) -> dict[str, Any]:
        """Return what `edgespec serve --json` wrote when it was ready. Raises EdgespecError after 10 s."""
        for _ in range(200):
            for line in self._log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
                if line.startswith("{") and line.endswith("\n"):
                    return dict(json.loads(line))
            time.sleep(0.05)
        raise EdgespecError(f"{self.name} did not say what it serves:\n{self.log()}")

    def own_bytes(self) -> int:
        """Return the process's own memory: without the models' files, whose pages come and go."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return 1024 * int(status.partition("RssAnon:")[2].split()[0])

    def end(self) -> int:
        """End the server as Ctrl-C does; return its exit code. One that does not end is killed."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            return self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
        finally:
            shutil.rmtree(self._files, ignore_errors=True)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return int(bound.getsockname()[1])


@dataclass(frozen=True)
class Request:
    """The request of a client."""

    messages: Sequence[dict[str, str]]
    n_predict: int
    temperature: float = 0.0
    seed: int = 0
    user: str = ""

    def body(self) -> dict[str, Any]:
        """Return the body of the request."""
        return {
            "model": "edgespec",
            "messages": [*self.messages],
            "max_tokens": self.n_predict,
            "temperature": self.temperature,
            "seed": self.seed,
            "user": self.user,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass
class Answer:
    """One answer as it was read; `whole` if it was read to its end. Times in seconds from the request."""

    text: str = ""
    whole: bool = False
    arrivals_s: list[float] = field(default_factory=list)
    """When each piece of text came."""
    total_s: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def first_s(self) -> float:
        """When the first text came; the end, for an answer without text."""
        return self.arrivals_s[0] if self.arrivals_s else self.total_s


async def ask(client: httpx.AsyncClient, request: Request, *, leave_at: float = math.inf) -> Answer:
    """Read an answer, or go away when it has `leave_at` characters. Raises httpx.HTTPError."""
    answer = Answer()
    began = time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", json=request.body()) as response:
        if response.status_code != 200:
            await response.aread()
            raise httpx.HTTPStatusError(
                f"status {response.status_code}: {response.text[:200]}",
                request=response.request,
                response=response,
            )
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                answer.whole = True
                break
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise httpx.HTTPError(str(event["error"]["message"]))
            answer.usage = event.get("usage") or answer.usage
            for choice in event.get("choices", ()):
                if text := choice["delta"].get("content"):
                    answer.arrivals_s.append(time.perf_counter() - began)
                    answer.text += text
            if len(answer.text) >= leave_at:
                break
    answer.total_s = time.perf_counter() - began
    if answer.whole and "completion_tokens" not in answer.usage:
        raise httpx.HTTPError("the server did not say how many tokens it wrote")
    return answer


def ask_alone(server: Server, request: Request) -> Answer:
    """Read an answer of a server that nobody else asks. Raises EdgespecError with the end of its log."""

    async def asked() -> Answer:
        async with httpx.AsyncClient(base_url=server.address, timeout=None) as client:
            return await ask(client, request)

    try:
        return asyncio.run(asked())
    except httpx.HTTPError as error:
        raise EdgespecError(f"{server.name} does not answer: {error}\n{server.log()}") from None
