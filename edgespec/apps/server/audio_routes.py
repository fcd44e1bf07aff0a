"""OpenAI's routes /v1/audio/transcriptions and /v1/audio/translations, and the thread that transcribes."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, Unpack

import msgspec
import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Depends, FastAPI, Form, Request, UploadFile
from pydantic import AfterValidator, ConfigDict, Field

from edgespec.apps.server.api_errors import ApiError
from edgespec.apps.server.json_routes import route_class
from edgespec.apps.server.names import ALIAS, NamedModel, RequestedModel, ServedNames
from edgespec.apps.server.request_fields import RequestPart
from edgespec.apps.server.request_worker import (
    Outcome,
    QueuedRequest,
    QueueLimits,
    RequestWorker,
    Start,
    cancelled_as,
)
from edgespec.apps.server.streaming import Answerer, AnswerWriter, Prepared
from edgespec.apps.speech.audio import SoundReader
from edgespec.apps.speech.mel import Floats
from edgespec.apps.speech.options import LANGUAGES, MAX_BEAM, TEMPERATURES, SpeechOptions, SpeechTask
from edgespec.apps.speech.transcriber import Transcriber, Transcription
from edgespec.apps.speech.transcript import (
    Segment,
    Transcript,
    as_object,
    remarks,
    stats_object,
    write_transcript,
)
from edgespec.apps.speech.voice import Span, check_detector, speech_spans
from edgespec.errors import EdgespecError, MessageFn, UsageError
from edgespec.platform.metering import Meter

# ---- the fields of a request ----

AUDIO = "/v1/audio/"
"""What the paths of all routes for recordings begin with."""

AudioFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]

MEDIA_TYPES: dict[str, str] = {
    "text": "text/plain; charset=utf-8",
    "srt": "application/x-subrip; charset=utf-8",
    "vtt": "text/vtt; charset=utf-8",
}
"""Content-Type of the answers that are no JSON."""

_MOST_PROMPT = 1 << 16  # characters; the model reads the last 223 tokens


def _must_be_empty(why: str) -> AfterValidator:
    def check(value: Any) -> Any:  # noqa: ANN401 - whatever was sent
        if value:
            raise ValueError(f"leave it out: {why}")
        return value

    return AfterValidator(check)


class AudioForm(RequestPart):
    """A recording to be written down in English, sent as a form."""

    model_config = ConfigDict(strict=False)

    file: UploadFile = Field(
        description="The recording: WAV; flac, mp3, m4a, ogg, webm with edgespec[audio]."
    )
    model: RequestedModel = Field(ALIAS, description="Name of the Whisper model here, or whisper-1.")
    prompt: str | None = Field(None, max_length=_MOST_PROMPT, description="Text before the first window.")
    response_format: AudioFormat = "json"
    temperature: float = Field(
        0.0, ge=0, le=1, description="0: greedy, and higher where a text repeats itself or is a guess."
    )
    beam: int | None = Field(None, ge=1, le=MAX_BEAM, description="Ours: beams of the search.")
    seed: int | None = Field(None, ge=0, lt=1 << 32, description="Ours: seed above temperature 0.")
    vad_filter: bool = Field(False, description="As faster-whisper's servers: leave out silence first.")
    track: int | None = Field(
        None, ge=1, description="Ours: the track of a film; else the first that is not silent."
    )


class TranscriptionForm(AudioForm):
    """A recording to be written down in its language."""

    language: str | None = Field(
        None, description="en, en-US, English or auto; without it the language is detected."
    )
    timestamp_granularities: list[Literal["word", "segment"]] = Field(
        default=["segment"], alias="timestamp_granularities[]"
    )
    stream: bool = Field(False, description="Send the text as it comes, as server-sent events.")
    include: Annotated[list[str], _must_be_empty("no logprobs are sent")] = Field(
        default=[], alias="include[]"
    )
    chunking_strategy: Annotated[str | None, _must_be_empty("the whole recording is transcribed")] = None


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
    aliases: tuple[str, ...] = ()

    @property
    def named(self) -> NamedModel:
        """The names that requests may use for it."""
        return NamedModel(self.name, self.aliases, frozenset({"speech"}))


@dataclass(frozen=True)
class Recording:
    """A recording to be transcribed, with its options."""

    samples: Floats
    options: SpeechOptions
    speech: list[Span] | None = None
    """The spans to transcribe; None: all."""

    def start(self, worker: SpeechWorker, client: str, **_follows: bool) -> Start[Segment, Transcript]:
        """Return the function that begins it in the turn of `client`."""
        return worker.run(self.samples, self.options, client=client, speech=self.speech)


def add_audio(app: FastAPI, service: SpeechService, log: MessageFn) -> None:
    """Add the routes to `app`; `log` takes a line for each failure that is not the client's fault."""
    router = APIRouter(route_class=route_class(log, form=True), dependencies=[Depends(_refuse_repeated)])
    answerer = Answerer(service.worker, log)

    def read(form: TranscriptionForm) -> Prepared[Recording]:
        granularities, name = form.timestamp_granularities, "timestamp_granularities[]"
        if form.stream and form.response_format not in ("json", "text"):
            raise ApiError(400, "only with the response_format json", field="stream")
        if granularities != ["segment"] and form.response_format != "verbose_json":
            raise ApiError(400, "only with the response_format verbose_json", field=name)
        return read_recording(service, form, form.language, words="word" in granularities)

    def read_foreign(form: AudioForm) -> Prepared[Recording]:
        if not service.worker.transcriber.tokenizer.is_multilingual:
            raise ApiError(400, f"{service.name} knows English only and does not translate", param="model")
        return read_recording(service, form, None, task="translate")

    for path, kind, reading in (
        ("transcriptions", TranscriptionForm, read),
        ("translations", AudioForm, read_foreign),
    ):
        answerer.serve(router, f"{AUDIO}{path}", Annotated[kind, _FORM], reading, AudioWriter)
    app.include_router(router)


def read_recording(
    service: SpeechService,
    form: AudioForm,
    language: str | None,
    *,
    task: SpeechTask = "transcribe",
    words: bool = False,
) -> Prepared[Recording]:
    """Return the recording of a request for the worker. May run on any thread. Raises ApiError."""
    ServedNames([service.named]).find(form.model)
    ours, warnings = service.worker.transcriber, list[str]()
    try:
        options = SpeechOptions(
            language=language,
            task=task,
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
        raise ApiError(400, line.replace(str(ours.model.path), service.name), param=name) from None
    try:
        if form.vad_filter:
            check_detector()
    except EdgespecError as error:
        line = str(error).replace("--vad", "vad_filter")
        raise ApiError(400, line, param="vad_filter") from None
    try:
        reader = SoundReader("file", warnings.append, most_s=service.most_s, track=form.track)
        samples = reader.read(io.BytesIO(form.file.file.read()))
        speech = speech_spans(samples) if form.vad_filter else None
    except EdgespecError as error:
        raise ApiError(400, str(error), param=error.field or "file") from None
    streams = isinstance(form, TranscriptionForm) and form.stream
    recording = Recording(samples, options, speech)
    return Prepared((recording,), streams=streams, warnings=tuple(warnings))


async def _refuse_repeated(request: Request) -> None:
    form = await request.form()
    for name in form:
        n = len(form.getlist(name))
        if n > 1 and not name.endswith("[]"):
            raise ApiError(400, f"is there {n} times; send one in each request", field=name[:80])


class AudioWriter(AnswerWriter[Segment, Transcript]):
    """Writes a transcript in OpenAI's forms; in a stream, the text of each segment as it comes."""

    def __init__(self, form: AudioForm, request: Prepared[Recording]) -> None:
        """Begin the answer to `form`."""
        self._form, self._task = form.response_format, request.texts[0].options.task
        self._granularities = getattr(form, "timestamp_granularities", ["segment"])
        self.whole_type = MEDIA_TYPES.get(self._form, AnswerWriter.whole_type)

    def parts(self, _index: int, made: Sequence[Segment], /) -> Iterator[dict[str, Any]]:
        """Yield the text of each segment."""
        for segment in made:
            yield {"type": "transcript.text.delta", "delta": segment.text}

    def last_parts(self, _index: int, end: Transcript, /) -> Iterator[dict[str, Any]]:
        """Yield the whole text."""
        n = end.stats.n_tokens
        usage = {"type": "tokens", "input_tokens": 0, "output_tokens": n, "total_tokens": n}
        told = {"type": "transcript.text.done", "text": end.text, "usage": usage}
        yield {**told, "edgespec": stats_object(end)}

    def whole(self, ends: Sequence[Transcript]) -> str:
        """Return the whole answer to a request that does not stream, in the format it asked for."""
        (transcript,) = ends
        self.remarks = [f"file: {line}" for line in remarks(transcript)]
        if self._form == "text":
            return f"{transcript.text}\n"
        duration = round(transcript.stats.audio_s, 2)
        answer: dict[str, Any] = {"text": transcript.text, "usage": {"type": "duration", "seconds": duration}}
        if self._form == "verbose_json":
            answer |= self._verbose(transcript) | {"duration": duration}
        elif self._form != "json":
            return write_transcript(transcript, self._form)
        return msgspec.json.encode(answer).decode()

    def _verbose(self, transcript: Transcript) -> dict[str, Any]:
        """Return the fields that only the form verbose_json has."""
        told: dict[str, Any] = {
            "task": self._task,
            "language": LANGUAGES.get(transcript.language, transcript.language),
        }
        told |= {"edgespec": stats_object(transcript)}
        if "segment" in self._granularities:
            told["segments"] = [as_object(segment, words=False) for segment in transcript.segments]
        if "word" in self._granularities:
            told["words"] = [
                {"word": word.text.strip(), "start": round(word.start_s, 2), "end": round(word.end_s, 2)}
                for segment in transcript.segments
                for word in segment.words
            ]
        return told

    def idle(self, *, is_waiting: bool) -> str:
        """Return a comment, which clients skip."""
        return ": transcribing\n\n"


# ---- the thread that transcribes recordings, one after the other, in turns by client ----
# It shares the processors with the engine's thread: a window of a recording and a pass over texts take turns.
# A request that must end does so after the window under way; the text before it has been sent by then.


@dataclass(eq=False, slots=True, kw_only=True)
class QueuedRecording(QueuedRequest[Segment, Transcript]):
    """A recording that waits to be transcribed, with its options."""

    samples: npt.NDArray[np.float32]
    options: SpeechOptions
    speech: list[Span] | None = None
    """The spans to transcribe; None: all."""


class SpeechWorker(RequestWorker[QueuedRecording, Segment, Transcript]):
    """Transcribes on its own thread, one recording at a time."""

    def __init__(
        self, transcriber: Transcriber, *, meter: Meter | None = None, **limits: Unpack[QueueLimits]
    ) -> None:
        """Transcribe with `transcriber`, whose model only the thread uses from `start` to the end of `stop`.

        `meter`: measures the joules of each recording.
        """
        super().__init__("edgespec speech", parallel=1, **limits)
        self.transcriber, self._meter = transcriber, meter

    def run(
        self,
        samples: npt.NDArray[np.float32],
        options: SpeechOptions,
        *,
        client: str,
        speech: list[Span] | None = None,
    ) -> Start[Segment, Transcript]:
        """Return a function that begins a recording in `client`'s turn: its segments, then the transcript.

        Only the spans of `speech` are transcribed, if given.
        Its places in the queue come first, if it must wait. Leaving ends the work after the current window.
        Beginning raises QueueFull and ShuttingDown.
        """
        request = partial(QueuedRecording, client, samples=samples, options=options, speech=speech)
        return partial(self._ask, request)

    def _enqueue(self, request: QueuedRecording, *, follows: bool) -> None:
        super()._enqueue(request, follows=follows)
        if self._running:
            self._notify_places()  # now: the window under way takes a while

    def _has_room(self, request: QueuedRecording) -> bool:
        return not self._running

    def _begin(self, request: QueuedRecording) -> None:
        """Do nothing yet: `_step` transcribes it."""

    def _step(self) -> None:
        """Transcribe the recording whose turn it is."""
        (request,) = self._running
        transcription: Transcription | None = None
        end: Transcript | BaseException

        def between_windows(_done_s: float, _total_s: float) -> None:
            if request.cancelled:
                raise request.cancelled
            self.turns.hand_over()

        try:
            ours = self.transcriber
            transcriber = Transcriber(ours.model, ours.tokenizer, request.options, drafts=ours.drafts)
            with self.turns:
                transcription = transcriber.stream(
                    request.samples, speech=request.speech, on_progress=between_windows
                )
                self._listen(request, transcription)
            end = transcription.transcript
        except BaseException as error:  # noqa: BLE001 - it ends this request, not the thread
            end = error
        transcript = transcription.transcript if transcription else None
        outcome: Outcome = "finished" if transcript and transcript.complete else "failed"
        if request.cancelled:
            outcome = cancelled_as(request.cancelled)
        self._leave(request, outcome, end, transcript)

    def _listen(self, request: QueuedRecording, transcription: Transcription) -> None:
        window = self._meter.begin() if self._meter else None
        try:
            for segment in transcription.segments():
                request.hand_over([segment])
        finally:
            if window:
                transcription.transcript.energy = window.end()
