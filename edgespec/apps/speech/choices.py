"""Options of speech whose value is one of a few words. Light to import: tab completion imports it."""

from __future__ import annotations

from typing import Literal

SpeechTask = Literal["transcribe", "translate"]
"""The text in the language that is spoken, or in English."""

TranscriptFormat = Literal["txt", "srt", "vtt", "json"]
"""A line for each segment, subtitles, or one JSON object."""

DEFAULT_MODEL = "whisper-base"
"""The model that hears where none is named."""
