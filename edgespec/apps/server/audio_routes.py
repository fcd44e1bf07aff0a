"""OpenAI's routes /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, FastAPI, Form, Request, Response
from starlette.concurrency import run_in_threadpool

from edgespec.apps.server.api_errors import ApiError
from edgespec.apps.server.audio_schema import (
    MEDIA_TYPES,
    AudioForm,
    AudioFormat,
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
from edgespec.apps.server.json_routes import route_class
from edgespec.apps.server.request_reader import ALIAS
from edgespec.apps.server.speech_worker import SpeechWorker
from edgespec.apps.server.streaming import AnswerWriter, RequestRun, client_of, with_warnings
from edgespec.apps.speech.audio import Floats, SoundReader
from edgespec.apps.speech.choices import SpeechTask
from edgespec.apps.speech.formats import remarks, stats_object, write_transcript
from edgespec.apps.speech.languages import LANGUAGES
from edgespec.apps.speech.options import TEMPERATURES, SpeechOptions
from edgespec.apps.speech.transcriber import Transcriber
from edgespec.apps.speech.transcript import Segment, Transcript, as_object
from edgespec.apps.speech.voice import Span, check_detector, speech_spans
from edgespec.errors import EdgespecError, UsageError
from edgespec.platform.messages import MessageFn

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
                language=language,
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
        data = await form.file.read()
        samples, speech = await run_in_threadpool(self._samples, data, form, warnings.append)
        worker, client = self._service.worker, client_of(request, None)
        sources = [worker.run(samples, options, client=client, speech=speech)]
        run: RequestRun[Segment, Transcript] = RequestRun(sources, self._log)
        writer = AudioWriter(form.response_format, options.task, granularities, warnings.append)
        return with_warnings(await run.answer(request, writer, streams=streams), warnings)

    def _samples(
        self, data: bytes, form: AudioForm, on_message: MessageFn
    ) -> tuple[Floats, list[Span] | None]:
        """Return the samples of a recording, and where somebody speaks, if that is asked. Raises ApiError."""
        try:
            if form.vad_filter:
                check_detector()
        except EdgespecError as error:
            line = str(error).replace("--vad", "vad_filter")
            raise ApiError(400, line, param="vad_filter") from None
        try:
            reader = SoundReader("file", on_message, most_s=self._service.most_s, track=form.track)
            samples = reader.read(io.BytesIO(data))
            return samples, speech_spans(samples) if form.vad_filter else None
        except UsageError as error:
            raise ApiError(400, str(error), param=error.field or "file") from None
        except EdgespecError as error:
            raise ApiError(400, str(error), param="file") from None


async def _refuse_repeated(request: Request) -> None:
    """Raise ApiError for a field that a form has twice, of which only one would be read."""
    form = await request.form()
    for name in form:
        n = len(form.getlist(name))
        if n > 1 and not name.endswith("[]"):
            raise ApiError(400, f"{name[:80]}: is there {n} times; send one in each request", param=name[:80])


class AudioWriter(AnswerWriter[Segment, Transcript]):
    """Writes what was heard in OpenAI's forms; in a stream, the text of each segment as it comes."""

    def __init__(
        self, form: AudioFormat, task: SpeechTask, granularities: Sequence[str], on_message: MessageFn
    ) -> None:
        """Write an answer of this form, with the times that `granularities` names.

        `on_message` is told what is uncertain, or left out, before the answer is sent as a whole.
        """
        self._form, self._task, self._granularities = form, task, granularities
        self._on_message = on_message
        self.whole_type = MEDIA_TYPES.get(form, AnswerWriter.whole_type)

    def add(self, _index: int, made: Sequence[Segment]) -> str:
        """Return the events of segments."""
        return "".join(_event(TranscriptDelta(delta=segment.text)) for segment in made)

    def finish(self, _index: int, end: Transcript) -> str:
        """Return the event of the whole text."""
        n = end.stats.n_tokens
        usage = TokenUsage(output_tokens=n, total_tokens=n)
        return _event(TranscriptDone(text=end.text, usage=usage, edgespec=stats_object(end)))

    def collect(self, _index: int, made: Sequence[Segment]) -> None:
        """Do nothing: the transcript has them all."""

    def whole(self, ends: Sequence[Transcript]) -> str:
        """Return the answer."""
        (transcript,) = ends
        for line in remarks(transcript):
            self._on_message(f"file: {line}")
        usage = AudioUsage(seconds=round(transcript.stats.audio_s, 2))
        if self._form == "json":
            return TranscriptionText(text=transcript.text, usage=usage).model_dump_json()
        if self._form == "text":
            return f"{transcript.text}\n"
        if self._form != "verbose_json":
            return write_transcript(transcript, self._form)
        words = [
            TimedWord(word=word.text.strip(), start=round(word.start_s, 2), end=round(word.end_s, 2))
            for segment in transcript.segments
            for word in segment.words
        ]
        answer = VerboseTranscription(
            task=self._task,
            language=LANGUAGES.get(transcript.language, transcript.language),
            duration=usage.seconds,
            text=transcript.text,
            segments=[as_object(segment, words=False) for segment in transcript.segments]
            if "segment" in self._granularities
            else None,
            words=words if "word" in self._granularities else None,
            usage=usage,
            edgespec=stats_object(transcript),
        )
        return answer.model_dump_json(exclude_none=True)

    def idle(self, *, is_waiting: bool) -> str:
        """Return a comment, as `queued` does: clients skip it."""
        return ": hearing\n\n"


def _event(item: TranscriptDelta | TranscriptDone) -> str:
    return f"data: {item.model_dump_json()}\n\n"
