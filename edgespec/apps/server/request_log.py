"""A line on each request, for the terminal in which the server runs; no text of a request is in it."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgespec.apps.server.api_errors import ApiError
from edgespec.apps.server.page import PARTS
from edgespec.apps.server.response_schema import Usage
from edgespec.apps.server.streaming import CLIENT_GONE, RequestRun
from edgespec.apps.speech.transcript import Transcript
from edgespec.decoding.records import Result
from edgespec.platform.messages import MessageFn

_MOST_PATH = 60
_FIELD = re.compile(r"[a-z][a-z0-9_.\[\]]{,39}")


def logging_requests(app: ASGIApp, write: MessageFn) -> ASGIApp:
    """Return `app`, of whose answers `write` gets a line each, but for the page's own parts.

    What fails without an answer becomes a 500 in the form of the other errors.
    """

    async def logged(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        began, status = time.perf_counter(), CLIENT_GONE
        scope.setdefault("state", {})

        def tell(line: str) -> None:
            with contextlib.suppress(OSError):  # whoever reads the log may be gone; the server goes on
                write(line)

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await app(scope, receive, note)
        except Exception as error:
            tell(f"{type(error).__name__}: {' '.join(str(error).split())}")
            if status != CLIENT_GONE:
                raise  # amid an answer, which the HTTP server cuts off
            refusal = ApiError(500, "the server failed at this request; its log says why")
            await refusal.response(scope)(scope, receive, note)
        finally:
            if scope["path"] not in PARTS:
                tell(_line(scope, status, time.perf_counter() - began))

    return logged


def _line(scope: Scope, status: int, seconds: float) -> str:
    refused, run = scope["state"].get("refused"), scope["state"].get("run")
    path = re.sub(r"[^!-~]", "?", scope["path"])[:_MOST_PATH]
    method = scope["method"][:20]
    facts = [f"{time.strftime('%H:%M:%S')} {method} {path} {status}{_reason(refused)}"]
    speed = ""
    if isinstance(run, RequestRun):
        ends = [run.ends[i] for i in sorted(run.ends)]
        told, speed = _answered(ends, run.n_prompts) if ends else ("", "")
        facts.append(told)
        if not run.is_complete and not refused:
            facts.append(f"failed{_reason(run.failure)}" if run.failure else "the client left")
    return ", ".join(filter(None, [*facts, f"{seconds:.2f} s", speed]))


def _reason(error: ApiError | None) -> str:
    """Return the field at fault, or the error's name for programs."""
    if error is None:
        return ""
    field = error.param if error.param and _FIELD.fullmatch(error.param) else None
    found = field or error.code
    return f" ({found})" if found else ""


def _answered(ends: Sequence[object], n_prompts: int) -> tuple[str, str]:
    """Return what was read and written, and how fast."""
    results = [end for end in ends if isinstance(end, Result)]
    if results:
        usage = Usage.of(*results, n_prompts=min(n_prompts, len(results)))
        rate = usage.edgespec.tokens_per_second
        told = f"{usage.prompt_tokens} tokens in, {usage.completion_tokens} out"
        return told, "" if rate is None else f"{rate:.1f} tokens/s"
    heard = [end.stats for end in ends if isinstance(end, Transcript)]
    sound_s, total_s = sum(stats.audio_s for stats in heard), sum(stats.total_s for stats in heard)
    return f"{sound_s:.1f} s of sound", f"{sound_s / total_s:.1f} times as fast" if total_s else ""
