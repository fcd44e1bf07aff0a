"""Recordings that a draft of a Whisper model learns from: what the target hears and writes of them.

    FOLDER/NAME-HASH.npz    of a recording: the encoder's states of each window (float16), the tokens of all
                            windows one after another, and how many they are, prompt and all

A recording that was heard is not heard again: its hash is that of its samples. Every fifth is held out.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgespec.decoding.drafter import Drafter
from edgespec.errors import EdgespecError, UsageError
from edgespec.forge.progress import StageContext, StageProgress
from edgespec.platform.files import replacing
from edgespec.speech.audio import read_audio
from edgespec.speech.loading import SpeechModel
from edgespec.speech.options import SpeechOptions
from edgespec.speech.rules import SpeechRules
from edgespec.speech.transcriber import Samples, Transcriber
from edgespec.speech.transcript import SpeechStats
from edgespec.speech.whisper_model import EncodedAudio

HELD_OUT = 5
"""One of so many recordings is left for judging."""

_ENDINGS = {".wav", ".flac", ".mp3", ".m4a", ".ogg", ".opus", ".webm", ".mp4", ".mkv"}
_GREEDY = SpeechOptions(temperatures=(0.0,))


@dataclass(frozen=True, slots=True)
class HeardWindow:
    """A window of a recording, and what the target wrote of it."""

    states: npt.NDArray[np.float16]
    """The encoder's, shape (n_audio_ctx, n_audio_state)."""
    tokens: npt.NDArray[np.int32]
    """Prompt, text and end."""
    n_prompt: int


@dataclass(slots=True)
class _Listener:
    """Notes the windows of a transcription; nothing drafts."""

    windows: list[HeardWindow] = field(default_factory=list)
    _states: npt.NDArray[np.float16] | None = None

    def begin_window(
        self, mel: npt.NDArray[np.float32], audio: EncodedAudio, stats: SpeechStats, n_frames: int
    ) -> _Listener:
        self._states = audio.states().astype(np.float16)
        return self

    def end_window(self) -> None:
        self._states = None

    def drafter(self, rules: SpeechRules, prompt: Sequence[int], *, greedy: bool) -> Drafter | None:
        return None

    def expect(self, tokens: Sequence[int]) -> None:
        pass

    def decoded(self, tokens: Sequence[int], n_prompt: int, drafter: Drafter | None, seconds: float) -> None:
        if self._states is not None:
            self.windows.append(HeardWindow(self._states, np.array(tokens, np.int32), n_prompt))


def recordings_in(folder: Path) -> list[Path]:
    """Return the recordings below `folder`, by name. Raises UsageError if there are fewer than two."""
    if not folder.is_dir():
        raise UsageError("no such folder", field="recordings", value=str(folder))
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _ENDINGS and path.is_file())
    if len(found) < 2:
        raise UsageError(
            "needs two recordings or more: some to learn from, some to judge by",
            field="recordings",
            value=str(folder),
        )
    return found


def hear_recordings(
    target: SpeechModel, files: Sequence[Path], folder: Path, context: StageContext
) -> tuple[tuple[list[Path], list[Path]], dict[str, Samples]]:
    """Let the target write down `files`, and store that in `folder`.

    Returns what was stored, to learn from and to judge by, and the sound of the latter by name. A file that
    cannot be read is left out, with a message. Raises EdgespecError if fewer than two are left.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found: list[tuple[Path, Path]] = []
    for place, file in enumerate(files):
        context.on_progress(StageProgress("hearing", place / len(files), file.name))
        try:
            samples = read_audio(str(file), on_message=context.on_message)
        except EdgespecError as error:
            context.on_message(f"{error}: left out")
            continue
        path = folder / _name_of(file, samples)
        if not path.exists():
            _store(path, _heard(target, samples))
        found.append((path, file))
    if len(found) < 2:
        raise EdgespecError("too few recordings can be read: two are needed, to learn from and to judge by")
    judged = found[::-HELD_OUT]
    stored = [one[0] for one in found if one not in judged], [path for path, _ in judged]
    return stored, {str(file): read_audio(str(file)) for _, file in judged}


def _name_of(file: Path, samples: Samples) -> str:
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", file.stem)[:40]
    return f"{stem}-{hashlib.sha256(samples.tobytes()).hexdigest()[:16]}.npz"


def _heard(target: SpeechModel, samples: Samples) -> list[HeardWindow]:
    listener = _Listener()
    transcriber = Transcriber(target.model, target.tokenizer, _GREEDY, drafts=listener)
    transcriber.transcribe(samples)
    return listener.windows


def _store(path: Path, windows: Sequence[HeardWindow]) -> None:
    none = np.empty(0, np.int32)
    with replacing(path) as file:
        np.savez(
            file,
            states=np.array([window.states for window in windows], np.float16),
            tokens=np.concatenate([none, *(window.tokens for window in windows)]),
            length=np.array([len(window.tokens) for window in windows], np.int32),
            n_prompt=np.array([window.n_prompt for window in windows], np.int32),
        )


def read_windows(path: Path) -> list[HeardWindow]:
    """Return the windows of a recording that was heard. Raises EdgespecError for a damaged file."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            states, tokens = arrays["states"], arrays["tokens"]
            length, n_prompt = arrays["length"], arrays["n_prompt"]
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise EdgespecError(f"{path}: damaged ({error}); delete it, and it is written again") from None
    parts = np.split(tokens, np.cumsum(length)[:-1]) if len(length) else []
    return [
        HeardWindow(states[i], part, int(n)) for i, (part, n) in enumerate(zip(parts, n_prompt, strict=True))
    ]
