"""Which Whisper model on this disk drafts for another: what earlier runs saw, else what the files tell."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from edgespec.apps.speech.draft_costs import SpeechDraftCosts, SpeechPair, keep_costs, load_costs
from edgespec.apps.speech.draft_price import SpeechModelCosts, expected_gain_s, same_encoder
from edgespec.apps.speech.loading import SpeechModel
from edgespec.apps.speech.speech_model import check_speech_file
from edgespec.apps.speech.weights.convert import DRAFTS_FOR
from edgespec.errors import EdgespecError
from edgespec.llama.fingerprints import file_fingerprint
from edgespec.llama.gguf import read_gguf
from edgespec.platform.messages import MessageFn, silent

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
    """Return whether a decoder without an encoder was made to hear this very target's."""
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
