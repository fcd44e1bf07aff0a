"""Opening of a transcriber by names: the model, its draft, and why a draft is left out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from edgespec.errors import UsageError
from edgespec.models.speech_model import speech_model
from edgespec.platform.messages import MessageFn, silent
from edgespec.speech.drafts import ModelDrafts, shares_encoder
from edgespec.speech.loading import SpeechModel
from edgespec.speech.options import SpeechOptions
from edgespec.speech.transcriber import Transcriber


@contextmanager
def open_transcriber(
    model: str,
    options: SpeechOptions | None = None,
    *,
    draft: str = "auto",
    n_threads: int | None = None,
    kernels: bool = True,
    on_message: MessageFn = silent,
) -> Iterator[Transcriber]:
    """Load `model` and what drafts for it; free both at the end of the block.

    `draft`: a smaller Whisper model, "auto" for text heard before, "none". Raises UsageError or EdgespecError
    for files that are no Whisper models.
    """
    with ExitStack() as stack:
        target = stack.enter_context(
            SpeechModel(speech_model(model), name=model, n_threads=n_threads, kernels=kernels)
        )
        drafts = None
        if draft == "auto":
            drafts = ModelDrafts(target)
        elif draft != "none":
            small = stack.enter_context(
                SpeechModel(speech_model(draft), name=draft, n_threads=n_threads, kernels=kernels)
            )
            check_draft(target, small)
            drafts = ModelDrafts(target, small)
        yield Transcriber(target.model, target.tokenizer, options, drafts=drafts)


def check_draft(target: SpeechModel, draft: SpeechModel) -> None:
    """Raise UsageError if `draft` cannot hear what `target` hears."""
    ours, theirs = target.model.dims, draft.model.dims
    if theirs.n_audio_layer == 0 and theirs.n_audio_state != ours.n_audio_state:
        raise UsageError(
            f"has no encoder, and was made for one of width {theirs.n_audio_state}; {target.name}'s is "
            f"{ours.n_audio_state}",
            field="draft",
            value=draft.name,
        )
    if theirs.n_mels != ours.n_mels and not shares_encoder(target, draft):
        raise UsageError(
            f"hears {theirs.n_mels} bands of sound, {target.name} {ours.n_mels}: choose another draft",
            field="draft",
            value=draft.name,
        )
