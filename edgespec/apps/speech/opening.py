"""Opening of a transcriber by names: the model, its draft, and why a draft is left out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from edgespec.apps.speech.draft_choice import choose_draft
from edgespec.apps.speech.draft_costs import SpeechPair, keep_costs, load_costs
from edgespec.apps.speech.drafts import ModelDrafts, shares_encoder
from edgespec.apps.speech.loading import SpeechModel
from edgespec.apps.speech.options import SpeechOptions
from edgespec.apps.speech.speech_model import speech_model, speech_models_here
from edgespec.apps.speech.transcriber import Transcriber
from edgespec.errors import UsageError
from edgespec.platform.cpu import default_threads
from edgespec.platform.messages import MessageFn, silent


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

    `draft`: a smaller Whisper model; "auto" for one that is here and expected to pay, and for text heard
    before; "none". Independent windows are decoded without. Raises UsageError or EdgespecError for files that
    are no Whisper models.
    """
    if options and options.independent:
        draft = "none"
    with ExitStack() as stack:
        target = stack.enter_context(
            SpeechModel(speech_model(model), name=model, n_threads=n_threads, kernels=kernels)
        )
        drafts = None
        if draft != "none":
            drafts = stack.enter_context(_drafts(target, draft, n_threads, on_message))
        yield Transcriber(target.model, target.tokenizer, options, drafts=drafts)


@contextmanager
def _drafts(
    target: SpeechModel, draft: str, n_threads: int | None, on_message: MessageFn
) -> Iterator[ModelDrafts]:
    """Load a draft by its name, or the best one that is here; keep what it was seen to cost."""
    threads = n_threads or default_threads()
    if draft == "auto":
        chosen = choose_draft(target, speech_models_here(), threads=threads, on_message=on_message)
        if chosen is None:
            yield ModelDrafts(target)
            return
        name, path, pair, known = chosen.name, chosen.path, chosen.pair, chosen.known
    else:
        name, path = draft, speech_model(draft)
        pair = SpeechPair.of(target.path, path, kernels=target.model.kernels, threads=threads)
        known = load_costs(pair, on_message=on_message)
        known = known if known and known.gain_s > 0.0 else None  # it was asked for: weigh it anew
    kernels = target.model.kernels != "stock"
    with SpeechModel(path, name=name, n_threads=n_threads, kernels=kernels) as small:
        check_draft(target, small)
        drafts = ModelDrafts(target, small, known=known)
        try:
            yield drafts
        finally:
            if seen := drafts.seen():
                keep_costs(pair, seen, on_message=on_message)


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
