"""A Whisper model in memory, with its tokenizer."""

from __future__ import annotations

from pathlib import Path

from edgespec.apps.speech.speech_model import check_speech_file
from edgespec.apps.speech.tokenizer import WhisperTokenizer
from edgespec.apps.speech.whisper_model import WhisperModel
from edgespec.platform.closing import Closing


class SpeechModel(Closing):
    """A Whisper model and its tokenizer. A context manager, which frees it."""

    def __init__(
        self, path: Path, *, name: str = "", n_threads: int | None = None, kernels: bool = True
    ) -> None:
        """Load the file at `path`, called `name`. Raises EdgespecError if it is none."""
        check_speech_file(path, name or str(path))
        self.path = path
        self.name = name or path.stem
        self.tokenizer = WhisperTokenizer.from_gguf(path)
        self.model = WhisperModel.open(path, n_threads=n_threads or 0, kernels=kernels)

    def close(self) -> None:
        """Free it; a second call does nothing."""
        self.model.close()
