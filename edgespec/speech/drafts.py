"""Drafts for a Whisper model: a smaller one, and text that was heard before. The text stays the target's.

a smaller model      through the scheduler that all drafts have, in another vocabulary if need be. It has to
encode each window first, which costs as much as many tokens: `DraftPrice` weighs that
of the same encoder  a decoder that hears what the target's encoder heard (distil-whisper): that is free
text heard before    the suffix store: refrains, and while somebody speaks the hypothesis a second ago
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgespec.decoding.drafter import Drafter
from edgespec.drafting.costs import OnlineCurve, PassCurves, guessed_curve
from edgespec.drafting.draft_model import DraftModel
from edgespec.drafting.foreign.translated_model import TranslatedModel
from edgespec.drafting.foreign.vocabulary_map import VocabularyMap, map_vocabularies
from edgespec.drafting.learned_costs import LearnedCosts
from edgespec.drafting.policy import Policy
from edgespec.drafting.predictor import Predictor
from edgespec.drafting.scheduler import Scheduler
from edgespec.drafting.tree_drafter import TreeDrafter
from edgespec.llama.gguf import GGUF, TensorInfo, read_gguf
from edgespec.speech.heard_text import HeardText
from edgespec.speech.loading import SpeechModel
from edgespec.speech.rules import SpeechRules
from edgespec.speech.session import SpeechSession, SpeechVocabulary
from edgespec.speech.tokenizer import WhisperTokenizer
from edgespec.speech.transcript import SpeechStats
from edgespec.speech.whisper_model import DecoderCache, EncodedAudio

_REPEATS = 0.2  # of text's repetitions that are expected of speech; once seen, it counts
_EXPECTED_ACCEPTANCE = 0.85  # of a smaller model's tokens, before any was tried
_EXPECTED_TOKENS = 80.0  # of a window
_MARGIN = 1.05  # a draft has to save this many times what it costs
_LONGEST = 16  # tokens drafted at once that the price reckons with
_FEWEST = 8  # tokens of a decoding whose time says something
_NEWEST = 0.3  # weight of the newest window in the time of a token


class SpeechDraftModel(DraftModel):
    """A draft model that hears a window: reading its prompt is cheap, so it is active from the start."""

    starts_idle = False


class TranslatedSpeechModel(TranslatedModel):
    """The same for a model of another vocabulary."""

    starts_idle = False


class SpeechPredictor(Predictor):
    """The acceptance of drafts in one recording: windows are one text, and speech seldom repeats itself."""

    _begun = False

    def begin(self) -> None:
        """Start on a window: what was learned in those before holds."""
        if not self._begun:
            super().begin()
            self._right = _REPEATS * self._expected
            self._begun = True


def same_tokens(target: WhisperTokenizer, draft: WhisperTokenizer) -> bool:
    """Return whether every token is the same in both, and begins a window in the same way."""
    ours, theirs = ((one.tokens, one.n_vocab, one.is_multilingual) for one in (target, draft))
    return ours == theirs


def map_tokenizers(target: WhisperTokenizer, draft: WhisperTokenizer) -> VocabularyMap:
    """Return which tokens of two Whisper models are the same: text by its bytes, timestamps by their time."""
    found = map_vocabularies(SpeechVocabulary(target), SpeechVocabulary(draft))
    n = min(target.n_vocab - target.timestamp_begin, draft.n_vocab - draft.timestamp_begin)
    ours = np.arange(target.timestamp_begin, target.timestamp_begin + n, dtype=np.int32)
    theirs = np.arange(draft.timestamp_begin, draft.timestamp_begin + n, dtype=np.int32)
    found.target_of[theirs], found.draft_of[ours] = ours, theirs
    shared = np.concatenate([found.shared[0], theirs]), np.concatenate([found.shared[1], ours])
    return VocabularyMap(
        target_of=found.target_of,
        draft_of=found.draft_of,
        shared=shared,
        target_end=found.target_end,
        draft_ends=found.draft_ends,
    )


def decoder_bytes(model: SpeechModel) -> int:
    """Return the size of the decoder's weights, which each of its passes reads."""
    tensors = read_gguf(model.path).tensors
    return sum(tensor.bytes for tensor in tensors if tensor.name.startswith("decoder."))


def shares_encoder(target: SpeechModel, draft: SpeechModel) -> bool:
    """Return whether a draft can hear what the target's encoder heard: it has none, or the same one.

    The last layer's weights tell: they differ between any two encoders that were trained.
    """
    if draft.model.dims.n_audio_layer == 0:
        return True
    ours, theirs = read_gguf(target.path), read_gguf(draft.path)
    last = f"encoder.blocks.{target.model.dims.n_audio_layer - 1}."
    sides = [
        {tensor.name: _read(gguf, tensor) for tensor in gguf.tensors if tensor.name.startswith(last)}
        for gguf in (ours, theirs)
    ]
    return bool(sides[0]) and sides[0] == sides[1]


def _read(gguf: GGUF, tensor: TensorInfo) -> bytes:
    with gguf.path.open("rb") as file:
        file.seek(gguf.data_start + tensor.offset)
        return file.read(tensor.bytes)


@dataclass(slots=True)
class DraftPrice:
    """The time that a draft model would take and save in the next window."""

    encode_s: float
    """Time of its encoder for a window."""
    n_tokens: float = _EXPECTED_TOKENS
    """Tokens expected of a window."""

    def saved_s(self, verify: Sequence[float], draft: Sequence[float], acceptance: float) -> float:
        """Return the seconds saved in a window by the best length of drafts.

        `verify` and `draft`: T(n) of the two models. A draft of g tokens emits (1 - a^(g + 1)) / (1 - a).
        """
        plain = verify[1]
        best = plain
        emitted, chance = 1.0, 1.0
        for n in range(1, _LONGEST + 1):
            chance *= acceptance
            emitted += chance
            best = min(best, (n * draft[1] + verify[n + 1]) / emitted)
        return self.n_tokens * (plain - best)


class ModelDrafts:
    """Drafts of one target: of a smaller model where it pays, and of text heard before. A SpeechDrafts.

    It is also the WindowDrafter of the window under way.
    """

    def __init__(
        self,
        target: SpeechModel,
        draft: SpeechModel | None = None,
        *,
        repeats: bool = True,
        always: bool = False,
    ) -> None:
        """Draft with `draft`, and where `repeats` with text heard before.

        `always`: whether or not it pays, for measurements.
        """
        self._target, self._draft, self._always = target, draft, always
        self.heard_text = HeardText() if repeats else None
        """Text heard before; None: it does not draft."""
        self._vocabulary = SpeechVocabulary(target.tokenizer)
        self._curves = PassCurves(self._guess(target), self._guess(draft) if draft else None)
        self._learned = {
            greedy: LearnedCosts(self._curves.target, self._curves.draft, SpeechPredictor())
            for greedy in (True, False)
        }
        self._shares = draft is not None and shares_encoder(target, draft)
        self._map: VocabularyMap | None = None
        if draft and not same_tokens(target.tokenizer, draft.tokenizer):
            self._map = map_tokenizers(target.tokenizer, draft.tokenizer)
        self._price: DraftPrice | None = None
        self._model: DraftModel | None = None
        self._held: list[EncodedAudio | DecoderCache] = []
        self._stats = SpeechStats()
        self._token_s: dict[bool, float] = {}  # a token's time without and with the draft model

    @staticmethod
    def _guess(model: SpeechModel) -> OnlineCurve:
        kernels = model.model.kernels != "stock"
        return OnlineCurve(guessed_curve(decoder_bytes(model), own_kernels=kernels), guessed=True)

    # ---- a window ----

    def begin_window(
        self, mel: npt.NDArray[np.float32], audio: EncodedAudio, stats: SpeechStats
    ) -> ModelDrafts:
        """Prepare for a window of this spectrogram and the target's encoding; return itself."""
        self._stats, self._model = stats, None
        draft = self._draft
        if draft is None or not self._runs(draft):
            return self
        started = time.perf_counter()
        heard = draft.model.cross_from(audio.states()) if self._shares else draft.model.encode(mel)
        encode_s = time.perf_counter() - started
        stats.draft_encode_s += encode_s
        if self._price:
            self._price.encode_s += 0.5 * (encode_s - self._price.encode_s)
        cache = draft.model.cache(heard, 1)
        self._held = [cache, heard]
        n_ctx = draft.model.dims.n_text_ctx
        session = SpeechSession(cache, SpeechVocabulary(draft.tokenizer), n_ctx=n_ctx).session()
        if self._map:
            self._model = TranslatedSpeechModel(session, self._vocabulary, self._map)
        else:
            self._model = SpeechDraftModel(session, n_vocab=self._vocabulary.n_vocab)
        return self

    def end_window(self) -> None:
        """Free what only that window needed."""
        for held in self._held:
            held.close()
        self._held, self._model = [], None

    def _runs(self, draft: SpeechModel) -> bool:
        """Return whether the draft model runs in this window: not in the first, which shows the costs."""
        if self._always:
            return True
        stats = self._stats
        n_before = stats.n_windows - 1
        if not n_before:
            return False
        if self._price is None:
            share = 0.0 if self._shares else encoder_cost(draft) / encoder_cost(self._target)
            self._price = DraftPrice(share * stats.encode_s / stats.n_windows)
        price, draft_curve = self._price, self._curves.draft
        assert draft_curve is not None  # noqa: S101 - for the type checker
        price.n_tokens = stats.n_tokens / n_before
        acceptance = stats.draft_acceptance_rate if stats.n_drafted > _EXPECTED_TOKENS else None
        if acceptance is None:
            acceptance = _EXPECTED_ACCEPTANCE
        saved_s = price.saved_s(self._curves.target.at(0), draft_curve.at(0), acceptance)
        if len(self._token_s) == 2:  # both were tried: no need to reckon
            saved_s = price.n_tokens * (self._token_s[False] - self._token_s[True])
        pays = saved_s > _MARGIN * price.encode_s
        self._note(draft, price, saved_s, pays=pays)
        return pays

    def _note(self, draft: SpeechModel, price: DraftPrice, saved_s: float, *, pays: bool) -> None:
        """Note the reason of a decision, once each."""
        verb = "drafts" if pays else "does not draft"
        if any(note.startswith(f"{draft.name} {verb}") for note in self._stats.draft_notes):
            return
        self._stats.draft_notes.append(
            f"{draft.name} {verb}: {1e3 * saved_s:.0f} ms of decoding to be saved in a window, "
            f"{1e3 * price.encode_s:.0f} ms for its encoder"
        )

    # ---- a decoding ----

    def drafter(self, rules: SpeechRules, prompt: Sequence[int], *, greedy: bool) -> Drafter | None:
        """Return the drafter of one decoding after `prompt`; None: decode plainly."""
        heard = self.heard_text if self.heard_text and self.heard_text.drafts else None
        if self._model is None and heard is None:
            return None
        policy = Policy(
            suffix=heard is not None,
            model=self._model is not None,
            staged=self._model is not None and heard is not None,
        )
        return TreeDrafter(
            Scheduler(self._learned[greedy], policy),
            suffix=heard.store if heard else None,
            model=self._model,
            is_eog=self._vocabulary.is_eog,
            clocks=self._curves,
            constraint=rules,
        )

    def expect(self, tokens: Sequence[int]) -> None:
        """Draft with the text `tokens`, which is expected again, in place of all that was heard before."""
        if self.heard_text:
            self.heard_text.expect(tokens)

    def decoded(self, tokens: Sequence[int], n_prompt: int, drafter: Drafter | None, seconds: float) -> None:
        """Learn what a token took, and a pass where nothing was drafted."""
        n = len(tokens) - n_prompt
        if n < _FEWEST:
            return
        before = self._token_s.get(self._model is not None, seconds / n)
        self._token_s[self._model is not None] = before + _NEWEST * (seconds / n - before)
        if drafter is None:
            for _ in range(4):
                self._curves.target.observe(1, len(tokens), seconds / n)
        heard, costs = self.heard_text, self._curves.target.at(0)
        if heard is None:
            return
        found = drafter.sources().get("suffix") if drafter and heard.drafts else None
        if drafter and heard.drafts:
            n_drafted, n_accepted = found or (0, 0)
            heard.learn(n, n_drafted, n_accepted, costs)
        else:
            heard.play(tokens, n_prompt, costs)


def encoder_cost(model: SpeechModel) -> float:
    """Return what encoding a window costs, in multiplications: products of weights, and attention."""
    dims = model.model.dims
    width, n = dims.n_audio_state, dims.n_audio_ctx
    return dims.n_audio_layer * (12.0 * width * width * n + 2.0 * n * n * width) + 9.0 * n * width * width
