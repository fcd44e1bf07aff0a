"""Opening of a transcriber by names: the model, and what drafts for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from edgespec.apps.speech.drafts import ModelDrafts, check_draft
from edgespec.apps.speech.options import SpeechOptions
from edgespec.apps.speech.speech_model import speech_model
from edgespec.apps.speech.transcriber import Transcriber
from edgespec.apps.speech.whisper_model import SpeechModel


@contextmanager
def open_transcriber(
    model: str,
    options: SpeechOptions | None = None,
    *,
    draft: str = "auto",
    n_threads: int | None = None,
    kernels: bool = True,
) -> Iterator[Transcriber]:
    """Load `model` and what drafts for it; free both at the end of the block.

    `draft`: a smaller Whisper model, which drafts with text heard before; "auto" for that text alone; "none".
    Raises UsageError or EdgespecError for files that are no Whisper models.
    """
    with ExitStack() as stack:

        def load(name: str, kernels: bool) -> SpeechModel:
            loaded = SpeechModel(speech_model(name), name=name, n_threads=n_threads, kernels=kernels)
            return stack.enter_context(loaded)

        target, small = load(model, kernels), None
        if draft not in ("auto", "none"):
            small = load(draft, target.model.kernels != "stock")
            check_draft(target, small)
        drafts = None if draft == "none" else ModelDrafts(target, small)
        yield Transcriber(target.model, target.tokenizer, options, drafts=drafts)
