"""The requests and answers of OpenAI's audio API: transcriptions and translations."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import UploadFile
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from edgespec.apps.speech.options import MAX_BEAM

AudioFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]

MEDIA_TYPES: dict[str, str] = {
    "text": "text/plain; charset=utf-8",
    "srt": "application/x-subrip; charset=utf-8",
    "vtt": "text/vtt; charset=utf-8",
}
"""Content-Type of the answers that are no JSON."""

_MOST_PROMPT = 1 << 16  # characters; the model reads the last 223 tokens


def _must_be_empty(why: str) -> AfterValidator:
    """Return a validator that refuses any value but an empty one."""

    def check(value: Any) -> Any:  # noqa: ANN401 - whatever was sent
        if value:
            raise ValueError(f"leave it out: {why}")
        return value

    return AfterValidator(check)


class AudioForm(BaseModel):
    """The fields of a request with a recording, sent as a form."""

    model_config = ConfigDict(extra="forbid")

    file: UploadFile = Field(
        description="The recording: WAV; flac, mp3, m4a, ogg, webm with edgespec[audio]."
    )
    model: str | None = Field(None, description="Name of the Whisper model here, or whisper-1.")
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


class TranslationForm(AudioForm):
    """A recording to be written down in English."""


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
    chunking_strategy: Annotated[str | None, _must_be_empty("the whole recording is heard")] = None


class AudioUsage(BaseModel):
    """Length of a recording, by which a transcription is counted."""

    type: Literal["duration"] = "duration"
    seconds: float


class TranscriptionText(BaseModel):
    """The answer in the form json."""

    text: str
    usage: AudioUsage


class TimedWord(BaseModel):
    """A word of a verbose answer, and when it was spoken, in seconds."""

    word: str
    start: float
    end: float


class VerboseTranscription(BaseModel):
    """The answer in the form verbose_json."""

    task: Literal["transcribe", "translate"]
    language: str = Field(description="English name of the language that was spoken.")
    duration: float
    text: str
    segments: list[dict[str, Any]] | None = None
    words: list[TimedWord] | None = None
    usage: AudioUsage
    edgespec: dict[str, Any] = Field(description="Ours: times, tokens, drafting, energy, doubts.")


class TranscriptDelta(BaseModel):
    """An event of a stream: more text."""

    type: Literal["transcript.text.delta"] = "transcript.text.delta"
    delta: str


class TokenUsage(BaseModel):
    """Tokens of a text, at the end of a stream; sound has none here."""

    type: Literal["tokens"] = "tokens"
    input_tokens: int = 0
    output_tokens: int
    total_tokens: int


class TranscriptDone(BaseModel):
    """The last event of a stream: the whole text."""

    type: Literal["transcript.text.done"] = "transcript.text.done"
    text: str
    usage: TokenUsage
    edgespec: dict[str, Any] = Field(description="Ours: times, tokens, drafting, energy, doubts.")
