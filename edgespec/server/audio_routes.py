"""OpenAI's routes /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, FastAPI, Form, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from edgespec.errors import EdgespecError, UsageError
from edgespec.platform.messages import MessageFn
from edgespec.server.api_errors import ApiError, engine_error
from edgespec.server.audio_schema import (
    MEDIA_TYPES,
    AudioForm,
    AudioUsage,
    TimedWord,
    TokenUsage,
    TranscriptDelta,
    TranscriptDone,
    TranscriptionForm,
    TranscriptionText,
    TranslationForm,
    VerboseTranscription,
)
from edgespec.server.json_routes import route_class
from edgespec.server.request_queue import QueuePlace
from edgespec.server.request_reader import ALIAS
from edgespec.server.speech_worker import SpeechItem, SpeechWorker
from edgespec.server.streaming import ALIVE_S, CLIENT_GONE, WARNING, client_of
from edgespec.speech.audio import Floats, SoundReader
from edgespec.speech.formats import stats_object, write_transcript
from edgespec.speech.languages import LANGUAGES, language_code
from edgespec.speech.options import TEMPERATURES, SpeechOptions
from edgespec.speech.transcriber import Transcriber
from edgespec.speech.transcript import Segment, Transcript, as_object

OPENAI_NAME = "whisper-1"
"""OpenAI's name of its Whisper model."""

_FIELDS = {
    "language": "language",
    "temperatures": "temperature",
    "beam": "beam",
    "words": "timestamp_granularities[]",
}
"""The request's names of the options' fields."""
_FORM = Form(media_type="multipart/form-data")


@dataclass(frozen=True)
class SpeechService:
    """The Whisper model that a server serves, and the limits of its requests."""

    name: str
    worker: SpeechWorker
    most_s: float = 4 * 3600.0
    """Longest recording, in seconds."""

    def check_name(self, model: str | None) -> None:
        """Raise a 404 for a model that is not served."""
        if model not in (None, self.name, OPENAI_NAME, ALIAS):
            raise ApiError(
                404,
                f"no speech model {model[:80]!r} here: this server has {self.name!r}, also called "
                f"{OPENAI_NAME!r}",
                param="model",
                code="model_not_found",
            )


def add_audio(app: FastAPI, service: SpeechService, log: MessageFn) -> None:
    """Add the routes to `app`; `log` takes a line for each failure that is not the client's fault."""
    router = APIRouter(route_class=route_class(log, form=True))
    audio = _AudioAnswerer(service, log)

    @router.post("/v1/audio/transcriptions", response_model=TranscriptionText | VerboseTranscription)
    async def transcribe(request: Request, form: Annotated[TranscriptionForm, _FORM]) -> Response:
        """Write down what is said in a recording."""
        if form.stream and form.response_format not in ("json", "text"):
            raise ApiError(400, "stream: only with the response_format json", param="stream")
        granularities = form.timestamp_granularities
        if granularities != ["segment"] and form.response_format != "verbose_json":
            name = "timestamp_granularities[]"
            raise ApiError(400, f"{name}: only with the response_format verbose_json", param=name)
        options = audio.options(form, form.language, words="word" in granularities)
        return await audio.answer(request, form, options, streams=form.stream, granularities=granularities)

    @router.post("/v1/audio/translations", response_model=TranscriptionText | VerboseTranscription)
    async def translate(request: Request, form: Annotated[TranslationForm, _FORM]) -> Response:
        """Write down in English what is said in a recording."""
        if not service.worker.transcriber.tokenizer.is_multilingual:
            raise ApiError(400, f"{service.name} knows English alone and does not translate", param="model")
        options = audio.options(form, None, translates=True)
        return await audio.answer(request, form, options)

    app.include_router(router)


class _AudioAnswerer:
    """Reads requests with recordings, and answers with what the worker hears."""

    def __init__(self, service: SpeechService, log: MessageFn) -> None:
        self._service, self._log = service, log

    def options(
        self, form: AudioForm, language: str | None, *, words: bool = False, translates: bool = False
    ) -> SpeechOptions:
        """Return what a request asks for. Raises ApiError."""
        self._service.check_name(form.model)
        ours = self._service.worker.transcriber
        try:
            options = SpeechOptions(
                language=language_code(language) if language else None,
                task="translate" if translates else "transcribe",
                prompt=form.prompt,
                temperatures=(form.temperature,) if form.temperature else TEMPERATURES,
                beam=form.beam,
                seed=form.seed,
                words=words,
            )
            Transcriber(ours.model, ours.tokenizer, options)  # which checks them against the model
        except UsageError as error:
            name = _FIELDS.get(error.field, error.field)
            line = " ".join(error.spelled(name).split())
            raise ApiError(400, line.replace(str(ours.model.path), self._service.name), param=name) from None
        return options

    async def answer(
        self,
        request: Request,
        form: AudioForm,
        options: SpeechOptions,
        *,
        streams: bool = False,
        granularities: Sequence[str] = ("segment",),
    ) -> Response:
        """Hear the recording of a request and answer it."""
        await _refuse_repeated(request)
        warnings: list[str] = []
        samples = await run_in_threadpool(self._samples, await form.file.read(), warnings.append)
        items = self._service.worker.run(samples, options, client=client_of(request, None))
        if streams:
            found: Response = AudioStream(await _Ahead.of(items, self._log), self._log)
        else:
            transcript = await self._collect(items, request.receive)
            if transcript is None:
                return Response(status_code=CLIENT_GONE)
            found = _whole(form, options, transcript, granularities)
        for warning in warnings:
            found.headers.append(WARNING, warning.encode("ascii", "replace").decode())
        return found

    def _samples(self, data: bytes, on_message: MessageFn) -> Floats:
        """Return the samples of a recording. Raises ApiError."""
        try:
            reader = SoundReader("file", on_message, most_s=self._service.most_s)
            return reader.read(io.BytesIO(data))
        except EdgespecError as error:
            raise ApiError(400, str(error), param="file") from None

    async def _collect(self, items: AsyncGenerator[SpeechItem], receive: Receive) -> Transcript | None:
        """Return the transcript; None if the client goes away meanwhile. Raises ApiError."""

        async def wait() -> Transcript:
            async with aclosing(items):
                async for item in items:
                    if isinstance(item, Transcript):
                        return item
            raise AssertionError("a transcription ends with its transcript")

        async def gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        hearing, leaving = asyncio.create_task(wait()), asyncio.create_task(gone())
        try:
            await asyncio.wait({hearing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return hearing.result() if hearing.done() else None
        except Exception as error:  # noqa: BLE001 - all of them become an answer
            raise engine_error(error, self._log) from None
        finally:
            hearing.cancel()
            leaving.cancel()


async def _refuse_repeated(request: Request) -> None:
    """Raise ApiError for a field that a form has twice, of which only one would be read."""
    form = await request.form()
    for name in form:
        n = len(form.getlist(name))
        if n > 1 and not name.endswith("[]"):
            raise ApiError(400, f"{name[:80]}: is there {n} times; send one in each request", param=name[:80])


def _whole(
    form: AudioForm, options: SpeechOptions, transcript: Transcript, granularities: Sequence[str]
) -> Response:
    """Return the answer of a request that does not stream."""
    kind, usage = form.response_format, AudioUsage(seconds=round(transcript.stats.audio_s, 2))
    if kind == "json":
        return _json(TranscriptionText(text=transcript.text, usage=usage).model_dump_json())
    if kind == "text":
        return Response(f"{transcript.text}\n", media_type=MEDIA_TYPES[kind])
    if kind != "verbose_json":
        return Response(write_transcript(transcript, kind), media_type=MEDIA_TYPES[kind])
    words = [
        TimedWord(word=word.text.strip(), start=round(word.start_s, 2), end=round(word.end_s, 2))
        for segment in transcript.segments
        for word in segment.words
    ]
    answer = VerboseTranscription(
        task=options.task,
        language=LANGUAGES.get(transcript.language, transcript.language),
        duration=usage.seconds,
        text=transcript.text,
        segments=[as_object(segment, words=False) for segment in transcript.segments]
        if "segment" in granularities
        else None,
        words=words if "word" in granularities else None,
        usage=usage,
        edgespec=stats_object(transcript),
    )
    return _json(answer.model_dump_json(exclude_none=True))


def _json(text: str) -> Response:
    return Response(text, media_type="application/json")


class _Ahead:
    """The items of a recording, whose first one has been waited for: a refusal still gets its own status."""

    def __init__(self, items: AsyncGenerator[SpeechItem], first: SpeechItem) -> None:
        self.items, self.first = items, first

    @classmethod
    async def of(cls, items: AsyncGenerator[SpeechItem], log: MessageFn) -> _Ahead:
        """Wait for the first item: a place in the queue, which comes at once. Raises ApiError."""
        try:
            return cls(items, await anext(items))
        except Exception as error:  # noqa: BLE001 - all of them become an answer
            raise engine_error(error, log) from None


class AudioStream(Response):
    """The text of a recording as it comes, as server-sent events; ends with the client."""

    def __init__(self, ahead: _Ahead, log: MessageFn) -> None:
        """Send the items of `ahead`."""
        super().__init__(
            media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]
        self._ahead, self._log = ahead, log

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        sending = asyncio.create_task(self._send(send))

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            sending.cancel()

        watching = asyncio.create_task(watch())
        try:
            await asyncio.wait({sending})
        finally:
            sending.cancel()
            watching.cancel()
        if not sending.cancelled() and (error := sending.exception()):
            raise error

    async def _send(self, send: Send) -> None:
        async with aclosing(self._parts()) as parts:
            async for part in parts:
                await send({"type": "http.response.body", "body": part.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _parts(self) -> AsyncGenerator[str]:
        """Yield the events, and comments where nothing comes for a while."""
        items = self._ahead.items
        async with aclosing(items):
            yield _event(self._ahead.first)
            try:
                pending = asyncio.ensure_future(anext(items))
                while True:
                    done, _ = await asyncio.wait({pending}, timeout=ALIVE_S)
                    if not done:
                        yield ": hearing\n\n"
                        continue
                    item = pending.result()
                    yield _event(item)
                    if isinstance(item, Transcript):
                        return
                    pending = asyncio.ensure_future(anext(items))
            except Exception as error:  # noqa: BLE001 - the status is sent: all of them become an event
                yield f"data: {json.dumps(engine_error(error, self._log).body())}\n\n"
            finally:
                pending.cancel()


def _event(item: SpeechItem) -> str:
    """Return the event of an item; a comment for a place in the queue."""
    if isinstance(item, QueuePlace):
        return f": queue {item.place}\n\n"
    if isinstance(item, Segment):
        return f"data: {TranscriptDelta(delta=item.text).model_dump_json()}\n\n"
    n = item.stats.n_tokens
    done = TranscriptDone(text=item.text, usage=TokenUsage(output_tokens=n, total_tokens=n))
    return f"data: {done.model_dump_json()}\n\n"
