"""Drafts for a Whisper model: a smaller one, and text that was heard before. The text stays the target's.

a smaller model      through the scheduler that all drafts have, in another vocabulary if need be. It has to
encode each window first, which costs as much as many tokens: `DraftPrice` weighs that
of the same encoder  a decoder that hears what the target's encoder heard (distil-whisper): that is free
text heard before    the suffix store: refrains, and while somebody speaks the hypothesis a second ago
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from edgespec.apps.speech.rules import SpeechRules
from edgespec.apps.speech.session import SpeechSession, SpeechVocabulary
from edgespec.apps.speech.speech_model import check_speech_file
from edgespec.apps.speech.tokenizer import WhisperTokenizer
from edgespec.apps.speech.transcript import SpeechStats
from edgespec.apps.speech.whisper_model import DecoderCache, EncodedAudio, SpeechModel
from edgespec.apps.speech.windows import WINDOW_FRAMES
from edgespec.decoding.drafter import Drafter
from edgespec.decoding.session import n_common
from edgespec.drafting.answer_lengths import lengths_around
from edgespec.drafting.costs import CONTEXTS, guessed_curve
from edgespec.drafting.draft_model import DraftModel
from edgespec.drafting.foreign.translated_model import TranslatedModel
from edgespec.drafting.foreign.vocabulary_map import VocabularyMap, map_vocabularies
from edgespec.drafting.learned_costs import LearnedCosts
from edgespec.drafting.online_curve import OnlineCurve, PassCurves
from edgespec.drafting.policy import Policy
from edgespec.drafting.predictor import Predictor
from edgespec.drafting.scheduler import Scheduler
from edgespec.drafting.suffix import SuffixDrafts
from edgespec.drafting.tree_drafter import TreeDrafter
from edgespec.errors import UsageError
from edgespec.llama.gguf import GGUF, TensorInfo, read_gguf
from edgespec.llama.gguf_header import file_fingerprint
from edgespec.platform.cpu import read_cpu
from edgespec.platform.kept import PROFILES
from edgespec.platform.messages import MessageFn, silent
from edgespec.platform.state_file import DamagedFileError, StateFile, parse_json

_FORMAT, _VERSION = "edgespec speech draft", 1
_WEIGHT = 0.5  # of a run in what is kept
_TRIALS = 0.01  # share of the time of decoding that trials of a draft may take which did not pay before

_Seconds = Annotated[float, msgspec.Meta(gt=0.0, le=1e9)]


@dataclass(frozen=True, slots=True)
class SpeechPair:
    """A target and a draft on this machine: all that their figures depend on."""

    target: str
    """`file_fingerprint` of the target's file."""
    draft: str
    cpu: str
    kernels: str
    """The instruction set of edgespec's kernels, or "stock"."""
    threads: int

    @classmethod
    def of(cls, target: Path, draft: Path, *, kernels: str, threads: int) -> SpeechPair:
        """Return the pair of two files."""
        ours, theirs = (file_fingerprint(check_speech_file(path)) for path in (target, draft))
        return cls(ours, theirs, read_cpu().model, kernels, threads)

    @property
    def path(self) -> Path:
        """The file of its figures. Raises UsageError: no home directory is known."""
        digest = hashlib.sha256("\n".join(map(str, astuple(self))).encode()).hexdigest()
        return PROFILES.path() / f"speech-{digest[:16]}.json"


class SpeechDraftCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Cost and gain of a draft, as runs saw them."""

    encode_s: _Seconds
    """Time of the draft's encoder for a window."""
    plain_s: _Seconds
    """Time of a token without the draft."""
    drafted_s: _Seconds
    """Time of a token with it."""
    n_tokens: _Seconds
    """Tokens of a window that is sound from end to end."""
    n_drafted: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Windows with the draft since the last without it, which shows anew what a token takes then."""
    left_alone: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Runs in a row that did without it."""

    @property
    def gain_s(self) -> float:
        """Seconds saved in such a window, the encoder's taken off."""
        return self.n_tokens * (self.plain_s - self.drafted_s) - self.encode_s

    @property
    def is_due(self) -> bool:
        """Whether a draft that did not pay is to be weighed anew: other recordings may suit it.

        The more it lost, the more runs lie between.
        """
        lost = -self.gain_s / (self.n_tokens * self.plain_s)
        return lost >= 0.0 and self.left_alone >= lost / _TRIALS


def joined(kept: SpeechDraftCosts | None, seen: SpeechDraftCosts | None) -> SpeechDraftCosts | None:
    """The record `kept` of a draft joined with what a run has `seen`; None: the run did without the draft."""
    if kept and seen:
        values = {
            name: getattr(kept, name) + _WEIGHT * (getattr(seen, name) - getattr(kept, name))
            for name in ("encode_s", "plain_s", "drafted_s", "n_tokens")
        }
        return SpeechDraftCosts(**values, n_drafted=seen.n_drafted)
    return msgspec.structs.replace(kept, left_alone=kept.left_alone + 1) if kept else seen


class _Stored(msgspec.Struct):
    pair: SpeechPair
    costs: SpeechDraftCosts


def load_costs(pair: SpeechPair, *, on_message: MessageFn = silent) -> SpeechDraftCosts | None:
    """The record of `pair`; None if nothing is that can be used."""
    try:
        return _file(pair, on_message).read()
    except (OSError, UsageError):
        return None


def keep_costs(pair: SpeechPair, seen: SpeechDraftCosts | None, *, on_message: MessageFn = silent) -> None:
    """Keep what a run has `seen` of `pair`, `joined` with what was kept before.

    Where nothing can be written, nothing is kept.
    """

    def change(kept: SpeechDraftCosts | None) -> bytes:
        new = joined(kept, seen)
        if new is None:
            raise UsageError("nothing is known of this draft", field="seen")
        document = {"format": _FORMAT, "version": _VERSION, "pair": asdict(pair), "costs": new}
        return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"

    try:
        _file(pair, on_message).update(change)
    except (OSError, UsageError):  # it is learned again
        return


def _file(pair: SpeechPair, on_message: MessageFn) -> StateFile[SpeechDraftCosts]:
    path = pair.path

    def parse(data: bytes) -> SpeechDraftCosts:
        document = parse_json(data, form=_FORMAT, version=_VERSION)
        try:
            stored = msgspec.convert(document, _Stored)
        except msgspec.ValidationError as error:
            raise DamagedFileError(f"damaged: {error}") from None
        if stored.pair != pair:
            raise DamagedFileError("of another machine or other models")
        return stored.costs

    return StateFile(path, parse, on_message=on_message)


# ---- what a draft costs, from the sizes in its file ----
#
# A draft has to encode each window, which takes as long as many tokens. It pays where the passes that it
# saves take longer.

EXPECTED_ACCEPTANCE = 0.85
"""Acceptance of a smaller model's tokens before any was tried."""

EXPECTED_TOKENS = 80.0
"""Tokens of a window before any was heard."""

MARGIN = 1.05
"""A draft has to save this many times what it costs."""

_OTHER_LANGUAGES = 0.95  # of the acceptance, where a draft knows English alone and the target all; a guess
_LONGEST = 16  # tokens drafted at once that the price reckons with
_GUESSED_MACS_PER_S = 310e9  # of an encoder, where 40 GB of weights are read in a second (costs.py)
_HEARD_BYTES = 34 / 32  # of a number of the keys and values that a decoder listens to


def decoder_bytes(path: Path) -> int:
    """Return the size of the decoder's weights, which each of its passes reads."""
    return sum(tensor.bytes for tensor in read_gguf(path).tensors if tensor.name.startswith("decoder."))


@dataclass(frozen=True, slots=True)
class SpeechModelCosts:
    """The costs of a Whisper model as its file tells them."""

    encoder_macs: float
    """Multiplications for a window: products of weights, and attention. 0: it has no encoder."""
    pass_bytes: float
    """Bytes that a pass of the decoder reads."""
    n_mels: int
    multilingual: bool

    @classmethod
    def of(cls, path: Path) -> SpeechModelCosts:
        """Read them from the file at `path`. Raises EdgespecError, or KeyError for one that is damaged."""
        gguf = read_gguf(path)
        n, width, n_layer = (
            float(gguf.number(f"whisper.encoder.{key}"))
            for key in ("context_length", "embedding_length", "block_count")
        )
        layers, state = (
            float(gguf.number(f"whisper.decoder.{key}")) for key in ("block_count", "embedding_length")
        )
        macs = n_layer * (12.0 * width * width * n + 2.0 * n * n * width) + 9.0 * n * width * width
        return cls(
            macs if n_layer else 0.0,
            decoder_bytes(path) + 2.0 * layers * n * state * _HEARD_BYTES,
            int(gguf.number("whisper.n_mels")),
            bool(gguf.number("whisper.multilingual")),
        )


@dataclass(slots=True)
class DraftPrice:
    """The time that a draft model would take and save in the next window."""

    encode_s: float
    """Time of its encoder for a window."""
    n_tokens: float = EXPECTED_TOKENS
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


def expected_gain_s(
    target: SpeechModelCosts, draft: SpeechModelCosts, *, shares: bool, kernels: bool
) -> float:
    """Return the seconds that a draft is expected to save in a window, its encoder's taken off.

    `shares`: it hears what the target's encoder heard. Negative: it does not pay.
    """
    verify, drafts = (
        guessed_curve(int(one.pass_bytes), own_kernels=kernels).at(CONTEXTS[0]) for one in (target, draft)
    )
    acceptance = EXPECTED_ACCEPTANCE
    if target.multilingual and not draft.multilingual:
        acceptance *= _OTHER_LANGUAGES
    price = DraftPrice(0.0 if shares else draft.encoder_macs / _GUESSED_MACS_PER_S)
    return price.saved_s(verify, drafts, acceptance) - MARGIN * price.encode_s


def same_encoder(target: Path, draft: Path) -> bool:
    """Whether the encoders of two files are the same.

    The last layer's weights tell: they differ between any two encoders that were trained.
    """
    sides = []
    for gguf in (read_gguf(target), read_gguf(draft)):
        last = f"encoder.blocks.{int(gguf.number('whisper.encoder.block_count')) - 1}."
        sides.append(
            {tensor.name: _read(gguf, tensor) for tensor in gguf.tensors if tensor.name.startswith(last)}
        )
    return bool(sides[0]) and sides[0] == sides[1]


def _read(gguf: GGUF, tensor: TensorInfo) -> bytes:
    with gguf.path.open("rb") as file:
        file.seek(gguf.data_start + tensor.offset)
        return file.read(tensor.bytes)


_REPEATS = 0.2  # of text's repetitions that are expected of speech; once seen, it counts
# ---- a smaller model that drafts ----

_FEWEST = 8  # tokens of a decoding whose time says something
_NEWEST = 0.5  # weight of the newest window in the time of a token
_MOST_DRAFTED = 16  # windows, after which one without the draft shows anew what a token takes


class SpeechDraftModel(DraftModel):
    """A draft model that hears a window. Its prompt is short, so it drafts from the start."""

    starts_idle = False


class TranslatedSpeechModel(TranslatedModel):
    """A SpeechDraftModel of another vocabulary than the target."""

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
    """Whether every token is the same in both, and begins a window in the same way."""
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
    return replace(found, shared=shared)


def shares_encoder(target: SpeechModel, draft: SpeechModel) -> bool:
    """Whether a draft can hear what the target's encoder heard: it has none, or the same one."""
    return draft.model.dims.n_audio_layer == 0 or same_encoder(target.path, draft.path)


class ModelDrafts:
    """Drafts of one target: of a smaller model where it pays, and of text heard before."""

    def __init__(
        self,
        target: SpeechModel,
        draft: SpeechModel | None = None,
        *,
        repeats: bool = True,
        always: bool = False,
        known: SpeechDraftCosts | None = None,
    ) -> None:
        """Draft with `draft`, and where `repeats` with text heard before.

        `always`: whether or not it pays, for measurements. `known`: what earlier runs saw of it.
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
        self._n_drafted = known.n_drafted if known else 0  # windows in a row
        self._n_tokens = known.n_tokens if known else EXPECTED_TOKENS  # of 30 s of sound
        self._full = 1.0  # how much of the window under way is sound
        if known:
            self._price = DraftPrice(known.encode_s)
            self._token_s = {False: known.plain_s, True: known.drafted_s}

    @staticmethod
    def _guess(model: SpeechModel) -> OnlineCurve:
        kernels = model.model.kernels != "stock"
        size = int(SpeechModelCosts.of(model.path).pass_bytes)
        return OnlineCurve(guessed_curve(size, own_kernels=kernels), guessed=True)

    # ---- a window ----

    def begin_window(
        self, mel: npt.NDArray[np.float32], audio: EncodedAudio, stats: SpeechStats, n_frames: int
    ) -> ModelDrafts:
        """Prepare for a window of this spectrogram and the target's encoding; return itself.

        `n_frames`: how many of the window's are the recording's, the rest is silence.
        """
        self._stats, self._model, self._full = stats, None, n_frames / WINDOW_FRAMES
        draft = self._draft
        if draft is None or not self._runs(draft):
            return self
        started = time.perf_counter()
        heard = draft.model.cross_from(audio.states()) if self._shares else draft.model.encode(mel)
        encode_s = time.perf_counter() - started
        stats.draft_encode_s += encode_s
        if self._price is None:
            self._price = DraftPrice(encode_s)
        self._price.encode_s += 0.5 * (encode_s - self._price.encode_s)
        cache = draft.model.cache(heard, 1)
        self._held = [cache, heard]
        n_ctx = draft.model.dims.n_text_ctx
        session = SpeechSession(cache, SpeechVocabulary(draft.tokenizer), n_ctx=n_ctx)
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
        """Whether the draft model runs in this window.

        Of a pair that no run has seen, not in the first window, which shows the costs.
        """
        if self._always:
            return True
        price, draft_curve = self._price, self._curves.draft
        if price is None:
            if False not in self._token_s:
                return False
            price = self._price = DraftPrice(self._expected_encode_s(draft))
        price.n_tokens = self._n_expected
        assert draft_curve is not None  # noqa: S101 - for the type checker
        if len(self._token_s) == 2:  # both were tried: no need to reckon
            saved_s = price.n_tokens * (self._token_s[False] - self._token_s[True])
        else:
            acceptance = self._stats.draft_acceptance_rate or EXPECTED_ACCEPTANCE
            saved_s = price.saved_s(self._curves.target.at(0), draft_curve.at(0), acceptance)
        pays = saved_s > MARGIN * price.encode_s
        self._note(draft, price, saved_s, pays=pays)
        return pays and self._n_drafted < _MOST_DRAFTED

    def _expected_encode_s(self, draft: SpeechModel) -> float:
        if self._shares:
            return 0.0
        ours, theirs = (SpeechModelCosts.of(one.path).encoder_macs for one in (self._target, draft))
        return theirs / ours * self._stats.encode_s / self._stats.n_windows

    @property
    def _n_expected(self) -> float:
        """Tokens expected of the window under way: a short recording says little."""
        return max(1.0, self._full * self._n_tokens)

    def seen(self) -> SpeechDraftCosts | None:
        """The draft model's costs and savings; None if it was never tried."""
        if not (self._price and len(self._token_s) == 2):
            return None
        return SpeechDraftCosts(
            encode_s=self._price.encode_s,
            plain_s=self._token_s[False],
            drafted_s=self._token_s[True],
            n_tokens=self._n_tokens,
            n_drafted=self._n_drafted,
        )

    def _note(self, draft: SpeechModel, price: DraftPrice, saved_s: float, *, pays: bool) -> None:
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
            Scheduler(self._learned[greedy], policy, lengths_around(self._n_expected)),
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
        """Learn what a token took, and a pass where nothing was drafted.

        A decoding made `tokens`, of which `n_prompt` are the prompt, in so many seconds.
        """
        n = len(tokens) - n_prompt
        if n < _FEWEST:
            return
        before = self._token_s.get(self._model is not None, seconds / n)
        self._token_s[self._model is not None] = before + _NEWEST * (seconds / n - before)
        self._n_drafted = self._n_drafted + 1 if self._model else 0
        self._n_tokens += _NEWEST * (n - self._n_expected)
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


# ---- text heard before ----
#
# A step that looks for repetitions and finds none costs some percent of a small model's pass. So a
# recording is decoded without, and afterwards each window's text is played through the suffix store
# (microseconds a token): what that would have saved says whether the next windows look.

_REMEMBERED = 1 << 16  # tokens
_WORTH = 0.06  # of the time of decoding: what has to be saved, looking costs about half of it
_OFFERED = 8  # tokens drafted at once
_LIKELY = 0.5  # chance of a draft that would have been tried


class HeardText:
    """The suffix store over what was heard, and whether it drafts."""

    def __init__(self) -> None:
        self.store = SuffixDrafts(_REMEMBERED)
        self.saves = 0.0
        """Share of the time of decoding that it saves, or would have saved."""

    @property
    def drafts(self) -> bool:
        """Whether it is worth looking for repetitions."""
        return self.saves > _WORTH

    def expect(self, tokens: Sequence[int]) -> None:
        """Draft with the text `tokens`, which is expected again, in place of all that was heard before."""
        self.store.forget()
        self.store.load(np.array([*tokens, -1], np.int32))
        self.saves = 1.0

    def play(self, tokens: Sequence[int], n_prompt: int, costs: Sequence[float]) -> None:
        """Remember `tokens` after the first `n_prompt`, which were decoded without it, and learn.

        `costs`: T(n) of the target.
        """
        n = n_prompt + 1
        document = self.store.document(tokens[:n])
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
