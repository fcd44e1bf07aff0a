"""Drafts for a Whisper model: a smaller one, and earlier text. The text stays the target's.

a smaller model      through the same pace as other drafts, with another vocabulary if need be. It has to
                     encode each window first, which costs as much as many tokens
of the same encoder  a decoder over the target's encoder (distil-whisper): encoding is free
earlier text         the suffix store: refrains, and while somebody speaks the hypothesis a second ago
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgespec._core import SuffixStore
from edgespec.apps.speech.rules import SpeechRules
from edgespec.apps.speech.tokenizer import WhisperTokenizer
from edgespec.apps.speech.transcript import SpeechStats
from edgespec.apps.speech.whisper_model import (
    DecoderCache,
    EncodedAudio,
    SpeechModel,
    SpeechSession,
    SpeechVocabulary,
)
from edgespec.decoding.session import n_common
from edgespec.decoding.tree import Drafter
from edgespec.drafting.acceptance import AcceptanceTables
from edgespec.drafting.draft_model import DraftModel
from edgespec.drafting.foreign.translated_model import TranslatedModel
from edgespec.drafting.foreign.vocabulary_map import VocabularyMap, map_vocabularies
from edgespec.drafting.pace import Pace, Policy
from edgespec.drafting.profile import Clocks, PassCosts, guessed_curve
from edgespec.drafting.suffix import Document
from edgespec.drafting.tree_drafter import TreeDrafter
from edgespec.errors import UsageError
from edgespec.llama.gguf import read_gguf

_REPEATS = 0.2  # of text's repetitions that are expected of speech; once seen, it counts
_FEWEST = 8  # tokens of a decoding whose time says something
_NEWEST = 0.5  # weight of the newest window
_HEARD_BYTES = 34 / 32  # of a number of the keys and values that a decoder listens to


def _pass_bytes(model: SpeechModel) -> int:
    """Return the bytes that a pass of the decoder reads: its weights, and keys and values of the sound."""
    weights = sum(one.bytes for one in read_gguf(model.path).tensors if one.name.startswith("decoder."))
    dims = model.model.dims
    return int(weights + 2 * dims.n_text_layer * dims.n_audio_ctx * dims.n_text_state * _HEARD_BYTES)


def _last_encoder_layer(path: Path) -> dict[str, bytes]:
    """Return the weights of the last encoder layer, which differ between any two trained encoders."""
    gguf = read_gguf(path)
    last = f"encoder.blocks.{int(gguf.number('whisper.encoder.block_count')) - 1}."
    found = {}
    with path.open("rb") as file:
        for tensor in gguf.tensors:
            if tensor.name.startswith(last):
                file.seek(gguf.data_start + tensor.offset)
                found[tensor.name] = file.read(tensor.bytes)
    return found


def shares_encoder(target: SpeechModel, draft: SpeechModel) -> bool:
    """Whether a draft can decode from the target's encoder: it has none, or the same one."""
    if draft.model.dims.n_audio_layer == 0:
        return True
    ours = _last_encoder_layer(target.path)
    return bool(ours) and ours == _last_encoder_layer(draft.path)


def check_draft(target: SpeechModel, draft: SpeechModel) -> None:
    """Raise UsageError if `draft` needs another encoder or spectrogram than `target` has."""
    ours, theirs = target.model.dims, draft.model.dims
    problem = ""
    if theirs.n_audio_layer == 0 and theirs.n_audio_state != ours.n_audio_state:
        problem = (
            f"has no encoder, and was made for one of width {theirs.n_audio_state}; {target.name}'s is "
            f"{ours.n_audio_state}"
        )
    elif theirs.n_mels != ours.n_mels and not shares_encoder(target, draft):
        problem = f"reads {theirs.n_mels} bands of sound, {target.name} {ours.n_mels}: choose another draft"
    if problem:
        raise UsageError(problem, field="draft", value=draft.name)


class SpeechAcceptance(AcceptanceTables):
    """The acceptance of drafts in one recording: windows are one text, and speech seldom repeats itself."""

    _begun = False

    def begin(self) -> None:
        """Start on a window; what was learned in earlier ones still holds."""
        if not self._begun:
            super().begin()
            self._right = _REPEATS * self._expected
            self._begun = True


class SpeechPace(Pace):
    """The pace of a window's text, which is seldom a word or two."""

    _is_brief = False


def map_tokenizers(target: WhisperTokenizer, draft: WhisperTokenizer) -> VocabularyMap:
    """Return which tokens of two Whisper models are the same: text by its bytes, timestamps by their time."""
    found = map_vocabularies(SpeechVocabulary(target), SpeechVocabulary(draft))
    n = min(target.n_vocab - target.timestamp_begin, draft.n_vocab - draft.timestamp_begin)
    ours = np.arange(target.timestamp_begin, target.timestamp_begin + n, dtype=np.int32)
    theirs = np.arange(draft.timestamp_begin, draft.timestamp_begin + n, dtype=np.int32)
    found.target_of[theirs], found.draft_of[ours] = ours, theirs
    shared = np.concatenate([found.shared[0], theirs]), np.concatenate([found.shared[1], ours])
    return replace(found, shared=shared)


class ModelDrafts:
    """Drafts of one target: of a smaller model, and of earlier text."""

    def __init__(self, target: SpeechModel, draft: SpeechModel | None = None) -> None:
        """Draft with `draft`, and with earlier text."""
        self._draft = draft
        self.transcript_store = TranscriptStore()
        self._vocabulary = SpeechVocabulary(target.tokenizer)
        self._curves = Clocks(self._guess(target), self._guess(draft) if draft else None)
        self._acceptance = {greedy: SpeechAcceptance() for greedy in (True, False)}
        self._shares = draft is not None and shares_encoder(target, draft)
        self._map: VocabularyMap | None = None
        ours, theirs = target.tokenizer, draft.tokenizer if draft else target.tokenizer
        if replace(ours, path=None) != replace(theirs, path=None):
            self._map = map_tokenizers(ours, theirs)
        self._model: DraftModel | None = None
        self._held: list[EncodedAudio | DecoderCache] = []

    @staticmethod
    def _guess(model: SpeechModel) -> PassCosts:
        kernels = model.model.kernels != "stock"
        return PassCosts(guessed_curve(_pass_bytes(model), own_kernels=kernels), guessed=True)

    def begin_window(self, mel: npt.NDArray[np.float32], audio: EncodedAudio, stats: SpeechStats) -> None:
        """Prepare for a window of this spectrogram and the target's encoding."""
        draft = self._draft
        if draft is None:
            return
        started = time.perf_counter()
        encoded = draft.model.cross_from(audio.states()) if self._shares else draft.model.encode(mel)
        stats.draft_encode_s += time.perf_counter() - started
        cache = draft.model.cache(encoded, 1)
        self._held = [cache, encoded]
        n_ctx = draft.model.dims.n_text_ctx
        session = SpeechSession(cache, SpeechVocabulary(draft.tokenizer), n_ctx=n_ctx)
        if self._map:
            self._model = TranslatedModel(session, self._vocabulary, self._map)
        else:
            self._model = DraftModel(session, n_vocab=self._vocabulary.n_vocab)

    def end_window(self) -> None:
        """Free what only that window needed."""
        for held in self._held:
            held.close()
        self._held, self._model = [], None

    def drafter(self, rules: SpeechRules, prompt: Sequence[int], *, greedy: bool) -> Drafter | None:
        """Return the drafter of one decoding after `prompt`; None: decode plainly."""
        has_text, has_model = self.transcript_store.drafts, self._model is not None
        if not (has_text or has_model):
            return None
        staged = has_model and has_text and self._map is None
        policy = Policy(suffix=has_text, model=has_model, staged=staged)
        return TreeDrafter(
            SpeechPace(policy, self._curves, self._acceptance[greedy]),
            suffix=self.transcript_store.store if has_text else None,
            model=self._model,
            is_eog=self._vocabulary.is_eog,
            clocks=self._curves,
            constraint=rules,
        )

    def expect(self, tokens: Sequence[int]) -> None:
        """Draft with the text `tokens`, which is expected again, instead of all earlier text."""
        self.transcript_store.expect(tokens)

    def decoded(self, tokens: Sequence[int], n_prompt: int, drafter: Drafter | None, seconds: float) -> None:
        """Learn the time of a token, and the time of a pass if nothing was drafted.

        `tokens`: the prompt, of `n_prompt` tokens, and what was decoded after it in `seconds`.
        """
        n = len(tokens) - n_prompt
        if n < _FEWEST:
            return
        if drafter is None:
            for _ in range(4):
                self._curves.target.observe(1, len(tokens), seconds / n)
        store, costs = self.transcript_store, self._curves.target.at(0)
        if drafter and store.drafts:
            store.learn(n, *drafter.sources().get("suffix", (0, 0)), costs)
        else:
            store.play(tokens, n_prompt, costs)


# ---- earlier text ----
#
# A step that looks for repetitions and finds none costs some percent of a small model's pass. So a
# recording is decoded without, and afterwards each window's text is played through the suffix store
# (microseconds a token): what that would have saved says whether the next windows look.

_REMEMBERED = 1 << 16  # tokens
_WORTH = 0.06  # of the time of decoding: what has to be saved, looking costs about half of it
_OFFERED = 8  # tokens drafted at once
_LIKELY = 0.5  # chance of a draft that would have been tried


class TranscriptStore:
    """The suffix store over earlier text, and whether it drafts."""

    def __init__(self) -> None:
        self.store = SuffixStore(_REMEMBERED)
        self.saves = 0.0
        """Share of the time of decoding that it saves, or would have saved."""

    @property
    def drafts(self) -> bool:
        """Whether it is worth looking for repetitions."""
        return self.saves > _WORTH

    def expect(self, tokens: Sequence[int]) -> None:
        """Draft with the text `tokens`, which is expected again, instead of all earlier text."""
        self.store.clear()
        self.store.extend(np.array([*tokens, -1], np.int32))
        self.saves = 1.0

    def play(self, tokens: Sequence[int], n_prompt: int, costs: Sequence[float]) -> None:
        """Remember `tokens` after the first `n_prompt`, which were decoded without it, and learn.

        `costs`: T(n) of the target.
        """
        n = n_prompt + 1
        document = Document(self.store, tokens[:n])
        saved_s, plain_s = 0.0, costs[1]
        while n < len(tokens):
            offered, chances = document.offer((), _OFFERED)
            n_drafted, chance = 0, 1.0
            for one in chances:
                chance *= one
                if chance < _LIKELY:
                    break
                n_drafted += 1
            n_right = n_common(offered[:n_drafted], tokens[n:])
            saved_s += n_right * plain_s - (costs[n_drafted + 1] - plain_s)
            document.extend(tokens[n : n + n_right + 1])
            n += n_right + 1
        self._learn(saved_s / (plain_s * (len(tokens) - n_prompt)))

    def learn(self, n_tokens: int, n_drafted: int, n_accepted: int, costs: Sequence[float]) -> None:
        """Learn from a window of `n_tokens` that it drafted in."""
        each_s = (costs[_OFFERED + 1] - costs[1]) / _OFFERED
        self._learn((n_accepted * costs[1] - n_drafted * each_s) / (costs[1] * n_tokens))

    def _learn(self, share: float) -> None:
        self.saves += _NEWEST * (share - self.saves)
