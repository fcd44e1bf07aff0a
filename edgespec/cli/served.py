"""`edgespec run` answered by a running `edgespec serve` of the same user and model."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, islice
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

import msgspec

from edgespec.cli.console import message
from edgespec.cli.local_run import (
    PATH,
    RunningServer,
    RunPart,
    RunRequest,
    file_identity,
    read_parts,
    running_servers,
)
from edgespec.cli.render import StreamDisplay
from edgespec.decoding.records import Origin, PromptProgress, Result, Tally, Token, summarise
from edgespec.errors import EdgespecError, ServerLost
from edgespec.models.resolve import resolve
from edgespec.platform.machine import peak_rss_bytes

if TYPE_CHECKING:
    from edgespec.decoding.choices import DrafterChoice

_SILENT_S = 60.0  # a server that lives says something every ten seconds


class ServedStream:
    """An answer of a server, read like a Stream of an engine in this process."""

    def __init__(
        self, server: RunningServer, seed: int | None, connection: http.client.HTTPConnection
    ) -> None:
        """Read the answer to a request that was sent. Raises EdgespecError if it is refused."""
        self.server = server
        self._seed = seed
        self._connection = connection
        self._began = time.perf_counter()
        self._first: float | None = None
        self._tokens: list[Token] = []
        self._end: Result | None = None
        self.prompt_progress = PromptProgress(0, 0)
        """How far the server has read the prompt; any thread may ask."""
        self.prompt: tuple[int, ...] = ()
        """The prompt's tokens, once the text has ended."""
        try:
            self._answer = connection.getresponse()
            if self._answer.status != 200:
                raise EdgespecError(_why_refused(self._answer.read()))
            message(f"answered by the server at {server.address} (--here: without it)")
            parts = self._read()
            with StreamDisplay(self):  # until the first comes, or the end without any
                self._parts = chain([*islice(parts, 1)], parts)
        except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
            raise EdgespecError(str(error) or type(error).__name__) from None

    def _read(self) -> Iterator[RunPart]:
        """Yield the parts that are tokens or the result. Raises EdgespecError for one that is an error."""
        for part in read_parts(iter(self._answer.readline, b"")):
            if part.error:
                raise EdgespecError(part.error)
            if part.read[1]:
                self.prompt_progress = PromptProgress(*part.read)
            elif part.queue is None:
                yield part
            elif part.queue:
                message(f"waiting for the server's other answers: {part.queue} before this one")

    def __iter__(self) -> Iterator[Token]:
        """Yield the tokens as they come. Raises ServerLost if the server ends before the text does."""
        try:
            for part in self._parts:
                for token_id, text, origin in part.tokens:
                    self._first = self._first or time.perf_counter()
                    self._tokens.append(Token(token_id, text, cast("Origin", origin)))
                    yield self._tokens[-1]
                if bytes(part.result):
                    self._end, self.prompt = msgspec.json.decode(part.result, type=Result), part.prompt
                    return
        except EdgespecError as error:
            raise self._lost(str(error)) from None
        except (OSError, http.client.HTTPException, msgspec.DecodeError):
            pass
        raise self._lost("the server ended")

    def _lost(self, why: str) -> ServerLost:
        return ServerLost(
            f"{self.server.address}: {why} after {len(self._tokens)} tokens; --here writes without it"
        )

    @property
    def result(self) -> Result:
        """The result, or for a text that did not end, what was written of it."""
        if self._end:
            return self._end
        now = time.perf_counter()
        return Result(
            text="".join(token.text for token in self._tokens),
            token_ids=tuple(token.id for token in self._tokens),
            prompt_tokens=self.prompt_progress.n_tokens,
            stop_reason="interrupted",
            seed=self._seed,
            target=self.server.address,
            draft=None,
            kernels="",
            sources={},
            note="the text was interrupted before the server counted",
            stats=summarise(
                Tally(),
                n_prompt=self.prompt_progress.n_tokens,
                n_tokens=len(self._tokens),
                ttft_s=None if self._first is None else self._first - self._began,
                total_s=now - self._began,
                peak_rss_bytes=peak_rss_bytes(),
            ),
        )

    def close(self) -> None:
        """End the generation: the server notices the closed connection."""
        self._answer.close()
        self._connection.close()

    def store(self) -> None:
        """Add prompt and text to the history, as an engine of this process does."""
        tokens = [*self.prompt, *self.result.token_ids]
        if not self.prompt:  # it was interrupted
            return
        import numpy as np

        from edgespec.drafting.history import History

        history = History(self.server.tokenizer, on_message=message)
        history.append(np.asarray(tokens, np.int32))


def ask_server(server: RunningServer, request: RunRequest) -> ServedStream | None:
    """Ask for a text; return None and print why if the server does not begin it."""
    where = urlsplit(server.address)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=_SILENT_S)
    headers = {"Authorization": f"Bearer {server.key}", "Content-Type": "application/json"}
    try:
        connection.request("POST", PATH, msgspec.json.encode(request), headers)
        return ServedStream(server, request.seed, connection)
    except (OSError, EdgespecError) as error:
        connection.close()
        message(f"the server at {server.address} does not answer this: {error}; the models are loaded here")
        return None


def find_server(
    target: str, draft: str | None, drafter: DrafterChoice, loading: str, *, kept: bool
) -> RunningServer | None:
    """Return a server that has the models, loaded with the same options; None: there is none.

    `draft`: the one that the user asked for; None: any. `kept`: whether texts may be kept on disk.
    """
    with suppress(EdgespecError, OSError):
        wanted = file_identity(resolve(draft, pull_missing=False)) if draft else None
        for server in running_servers(resolve(target, pull_missing=False)):
            drafts = drafter in server.drafters and wanted in (None, server.draft)
            if server.loading == loading and drafts and (kept or not server.keeps_texts):
                return server
    return None


def _why_refused(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, LookupError, TypeError):
        return "an answer that is none of edgespec's"
