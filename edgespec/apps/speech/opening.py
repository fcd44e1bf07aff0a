"""Opening of a transcriber by names: the model, its draft, and why a draft is left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from edgespec.apps.speech.drafts import (
    ModelDrafts,
    SpeechDraftCosts,
    SpeechModelCosts,
    SpeechPair,
    expected_gain_s,
    keep_costs,
    load_costs,
    same_encoder,
    shares_encoder,
)
from edgespec.apps.speech.options import SpeechOptions
from edgespec.apps.speech.speech_model import check_speech_file, speech_model, speech_models_here
from edgespec.apps.speech.transcriber import Transcriber
from edgespec.apps.speech.weights.convert import DRAFTS_FOR
from edgespec.apps.speech.whisper_model import SpeechModel
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.gguf import read_gguf
from edgespec.llama.gguf_header import file_fingerprint
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


# ---- the choice of a draft ----

_MOST_OF_TARGET = 0.7  # largest draft, in bytes that a pass of its decoder reads


@dataclass(frozen=True, slots=True)
class SpeechDraftChoice:
    """A model that is to draft."""

    name: str
    path: Path
    pair: SpeechPair
    known: SpeechDraftCosts | None
    """Figures of earlier runs; None: it was never tried, or is to be weighed anew."""
    gain_s: float
    """Seconds that it is expected to save in a window."""


def choose_draft(
    target: SpeechModel,
    models: Iterable[tuple[str, Path]],
    *,
    threads: int,
    on_message: MessageFn = silent,
) -> SpeechDraftChoice | None:
    """Return the one of `models` (name and file) that saves most; None if none is expected to pay.

    One that earlier runs saw not to pay is left alone for some runs. Files that cannot be read draft nothing.
    """
    best: SpeechDraftChoice | None = None
    for name, path in models:
        try:
            found = _candidate(target, name, path, threads, on_message)
        except (EdgespecError, OSError, KeyError):
            continue
        if found and found.gain_s > (best.gain_s if best else 0.0):
            best = found
    return best


def was_made_for(target: Path, draft: Path) -> bool:
    """Whether a decoder without an encoder was made to hear this very target's."""
    return read_gguf(draft).text(DRAFTS_FOR) == file_fingerprint(check_speech_file(target))


def _candidate(
    target: SpeechModel, name: str, path: Path, threads: int, on_message: MessageFn
) -> SpeechDraftChoice | None:
    if path == target.path:
        return None
    ours, theirs = SpeechModelCosts.of(target.path), SpeechModelCosts.of(path)
    if theirs.encoder_macs:
        shares = theirs.encoder_macs == ours.encoder_macs and same_encoder(target.path, path)
        hears = shares or theirs.n_mels == ours.n_mels
    else:
        shares = hears = was_made_for(target.path, path)
    if not hears or theirs.pass_bytes > _MOST_OF_TARGET * ours.pass_bytes:
        return None
    kernels = target.model.kernels
    gain_s = expected_gain_s(ours, theirs, shares=shares, kernels=kernels != "stock")
    pair = SpeechPair.of(target.path, path, kernels=kernels, threads=threads)
    known = load_costs(pair, on_message=on_message)
    if known and known.is_due:
        known = None
    if known and known.gain_s <= 0.0:
        keep_costs(pair, None)
    return SpeechDraftChoice(name, path, pair, known, known.gain_s if known else gain_s)
