"""Opening of Whisper models: what a file is, and the refusal of those that hear nothing."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.gguf import read_gguf
from edgespec.speech.choices import DEFAULT_MODEL
from edgespec.speech.tokenizer import WhisperTokenizer
from edgespec.speech.whisper_model import WhisperModel

ARCHITECTURE = "whisper"


class SpeechModel:
    """A Whisper model and its tokenizer. A context manager, which frees it."""

    def __init__(
        self, path: Path, *, name: str = "", n_threads: int | None = None, kernels: bool = True
    ) -> None:
        """Load the file at `path`, called `name`. Raises UsageError or EdgespecError if it is none."""
        check_speech_file(path)
        self.path = path
        self.name = name or path.stem
        self.tokenizer = WhisperTokenizer.from_gguf(path)
        self.model = WhisperModel.open(path, n_threads=n_threads or 0, kernels=kernels)

    def close(self) -> None:
        """Free it; a second call does nothing."""
        self.model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_speech_file(path: Path) -> None:
    """Raise UsageError unless the file is a Whisper model, EdgespecError if it cannot be read."""
    architecture = read_gguf(path).text("general.architecture")
    if architecture == ARCHITECTURE:
        return
    if not architecture:
        raise EdgespecError(
            f"{path}: no model that edgespec knows; choose a Whisper model, such as {DEFAULT_MODEL}"
        )
    raise UsageError(
        f"{path}: a model of text ({architecture}), which hears nothing; choose a Whisper model, such as "
        f"{DEFAULT_MODEL}"
    )
