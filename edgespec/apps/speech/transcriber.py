"""A recording's text, window by window: `Transcriber(model, tokenizer, options).transcribe(samples)`.

A window is 30 seconds of sound. The first begins where the sound does, each later one where the last complete
segment ended; the prompt of a window is the text before it. openai-whisper's transcribe.py does the same.

For live speech there is a hypothesis every second, and final text whenever a window is full. A
hypothesis is the text of the sound since the last final segment, decoded again from the start each time, so
the one before it drafts most of it. Windows become final as in a file: with the same sound the text is a
file's, except that the spectrogram is scaled by the loudness of the window.
"""

from __future__ import annotations

import math
import queue
import threading
import time
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from edgespec.apps.speech.audio import SILENCE, is_silent
from edgespec.apps.speech.drafts import ModelDrafts, check_draft
from edgespec.apps.speech.mel import HOP, N_FRAMES, SAMPLE_RATE, log_mel, window_of
from edgespec.apps.speech.options import SpeechOptions
from edgespec.apps.speech.rules import SpeechRules, check_language, log_total, rule_tokens
from edgespec.apps.speech.speech_model import speech_model
from edgespec.apps.speech.tokenizer import WhisperTokenizer
from edgespec.apps.speech.transcript import Doubt, Segment, SpeechStats, Transcript
from edgespec.apps.speech.voice import Span, SpokenParts
from edgespec.apps.speech.whisper_model import (
    DecoderCache,
    EncodedAudio,
    SequenceBatch,
    SpeechModel,
    SpeechSession,
    SpeechVocabulary,
    WhisperModel,
)
from edgespec.apps.speech.windows import (
    FRAME_S,
    WINDOW_FRAMES,
    BeamSearch,
    Decoded,
    Split,
    WordTimer,
    split_window,
)
from edgespec.decoding.generate import Generation, Task
from edgespec.decoding.options import Options
from edgespec.decoding.sampling import Coins, SamplingParams
from edgespec.errors import UsageError

Samples = npt.NDArray[np.float32]
"""Sound: mono, 16 kHz, in [-1, 1], shape (n,)."""

ProgressFn = Callable[[float, float], None]
"""Called with the seconds transcribed and the seconds in all."""

_LEAD_S = 0.2  # of silence that a window keeps before its first sound
_TOO_WARM = 0.5  # temperature above which a text is no prompt for the next


class Transcriber:
    """Writes down what is said in recordings, with one model and one set of options."""

    def __init__(
        self,
        model: WhisperModel,
        tokenizer: WhisperTokenizer,
        options: SpeechOptions | None = None,
        *,
        drafts: ModelDrafts | None = None,
    ) -> None:
        """Use `model`, and `drafts` to decode faster: the text is the same.

        Raises UsageError if the model cannot do what the options ask for.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.options = options or SpeechOptions()
        self.drafts = drafts
        check_language(tokenizer, self.options)
        if self.options.words and not model.dims.alignment_heads:
            problem = f"{model.path}: the file does not say which heads follow the sound; pull it again"
            raise UsageError(problem, field="words")

    def transcribe(
        self, samples: Samples, *, speech: Sequence[Span] | None = None, on_progress: ProgressFn | None = None
    ) -> Transcript:
        """Return the text of `samples`; only of the spans of `speech`, if given."""
        transcription = self.stream(samples, speech=speech, on_progress=on_progress)
        for _ in transcription.segments():
            pass
        return transcription.transcript

    def stream(
        self, samples: Samples, *, speech: Sequence[Span] | None = None, on_progress: ProgressFn | None = None
    ) -> Transcription:
        """Return a transcription to be read segment by segment; arguments as of `transcribe`."""
        return Transcription(self, samples, speech, on_progress)


class Transcription:
    """One transcription under way. `transcript` has the text so far, whatever ends it."""

    def __init__(
        self,
        transcriber: Transcriber,
        samples: Samples,
        speech: Sequence[Span] | None = None,
        on_progress: ProgressFn | None = None,
    ) -> None:
        """Prepare to transcribe `samples`; nothing is computed yet."""
        self._model, self._tokenizer = transcriber.model, transcriber.tokenizer
        self._options = transcriber.options
        self._drafts = transcriber.drafts
        self._samples = samples = _checked(samples)
        self._spoken = None if speech is None else SpokenParts(samples, speech)
        self._on_progress = on_progress
        self.transcript = Transcript(
            self._options.language or ("" if self._tokenizer.is_multilingual else "en")
        )
        self._stats = self.transcript.stats
        self._decoder = WindowDecoder(
            self._tokenizer, self._options, n_ctx=self._model.dims.n_text_ctx, stats=self._stats
        )
        self._timer = WordTimer(self._tokenizer) if self._options.words else None
        prompt = self._options.prompt
        self._before = self._tokenizer.encode(f" {prompt.strip()}") if prompt and prompt.strip() else []
        """The text before the window, as far as it is a prompt."""

    def segments(self) -> Generator[Segment]:
        """Transcribe all windows, and yield the segments as they come."""
        started = time.perf_counter()
        stats = self._stats
        stats.audio_s = len(self._samples) / SAMPLE_RATE
        self.transcript.silent = is_silent(self._samples)
        try:
            samples = self._spoken.samples if self._spoken else self._samples
            mel = log_mel(samples, self._model.dims.n_mels)
            stats.mel_s = time.perf_counter() - started
            n_frames = mel.shape[1] - WINDOW_FRAMES
            seek = 0
            while seek < n_frames:
                n, segments = min(WINDOW_FRAMES, n_frames - seek), list[Segment]()
                n_read = self.silent_frames(samples[seek * HOP : (seek + n) * HOP])
                if not n_read:
                    segments, n_read = self.window(window_of(mel[:, : seek + n], seek), seek, n)
                seek += n_read
                transcribed_s = min(seek, n_frames) * FRAME_S
                stats.transcribed_s = self._spoken.end_s(transcribed_s) if self._spoken else transcribed_s
                yield from segments
                stats.total_s = time.perf_counter() - started
                if self._on_progress:
                    self._on_progress(transcribed_s, n_frames * FRAME_S)
            stats.transcribed_s = stats.audio_s
            self.transcript.complete = True
        finally:
            stats.total_s = time.perf_counter() - started

    def silent_frames(self, sound: Samples) -> int:
        """Return how many frames at the beginning of a window's `sound` are skipped, of 10 ms each.

        All, if it is silent; else only a silence longer than the latest first timestamp, because the text
        after it would get too early a time.
        """
        latest_s = self._options.max_initial_timestamp
        if is_silent(sound):
            return -(-len(sound) // HOP)
        lead_s = float(np.argmax(np.abs(sound) >= SILENCE)) / SAMPLE_RATE
        return 0 if latest_s is None or lead_s <= latest_s else round((lead_s - _LEAD_S) / FRAME_S)

    def window(self, sound: Samples, seek: int, n_frames: int) -> tuple[list[Segment], int]:
        """Return the final segments of one window, and how many of its frames they cover.

        `sound`: the spectrogram of 30 s, of which `n_frames` are the recording's, from its frame `seek` on.
        """
        options = self._options
        with self._encoded(sound, n_frames) as (audio, cache, start, drafts):
            text = self._decoder.decode(
                cache,
                start,
                self._before,
                place=self._stats.n_windows - 1,
                seconds=n_frames * FRAME_S,
                drafts=drafts,
            )
            if text.is_silence(options):
                self._doubt(seek, seek + n_frames, "probably nobody speaks", text.text, kept=False)
                return [], n_frames
            first = self._tokenizer.timestamp_begin
            split = split_window(text.tokens, first_timestamp=first, n_frames=n_frames)
            segments = self._segments_of(text, split, seek)
            n_read = max(1, split.n_read)
            if fault := text.fault(options):
                self._doubt(seek, seek + n_read, fault, text.text, kept=True)
            if self._timer:
                started = time.perf_counter()
                with closing(self._model.cache(audio)) as words_cache:
                    segments = self._timer.time(
                        segments, words_cache, start, n_frames, self.transcript.language
                    )
                self._stats.words_s += time.perf_counter() - started
                words = [word for segment in segments for word in segment.words]
                if split.ends_with_speech and words:
                    by_words = round(words[-1].end_s / FRAME_S) - seek
                    n_read = by_words if by_words > 0 else n_read
            return self._append(segments, text), n_read

    def guess(self, sound: Samples, n_frames: int) -> str:
        """Return the text of an incomplete window, and draft with it when more sound has come."""
        with self._encoded(sound, n_frames) as (_, cache, start, drafts):
            text = self._decoder.guess(cache, start, self._before, drafts)
        if drafts:
            drafts.expect(text.tokens)
        return "" if text.is_silence(self._options) else text.text

    @contextmanager
    def _encoded(
        self, sound: Samples, n_frames: int
    ) -> Iterator[tuple[EncodedAudio, DecoderCache, list[int], ModelDrafts | None]]:
        """Encode a window; yield the encoding, the decoder's cache, the text's first tokens, the drafts."""
        options, transcript, drafts = self._options, self.transcript, self._drafts
        with ExitStack() as stack:
            started = time.perf_counter()
            audio = stack.enter_context(closing(self._model.encode(np.ascontiguousarray(sound))))
            self._stats.encode_s += time.perf_counter() - started
            self._stats.n_windows += 1
            cache = stack.enter_context(closing(self._model.cache(audio, self._decoder.n_sequences)))
            if not transcript.language:
                row = cache.forward([SequenceBatch(0, [self._tokenizer.sot])])[0][0]
                transcript.language, transcript.language_probability = language_of(row, self._tokenizer)
                cache.rewind(0, 0)
            start = self._tokenizer.start(
                transcript.language, translate=options.task == "translate", timestamps=options.timestamps
            )
            if drafts:
                stack.callback(drafts.end_window)
                drafts.begin_window(sound, audio, self._stats)
            yield audio, cache, start, drafts

    def _segments_of(self, text: WindowText, split: Split, seek: int) -> list[Segment]:
        """Return the window's pieces as segments, those without text left out."""
        found: list[Segment] = []
        for piece in split.pieces:
            written = self._tokenizer.decode([t for t in piece.tokens if t < self._tokenizer.eot])
            if piece.start == piece.end or not written.strip():
                continue
            found.append(
                Segment(
                    id=len(self.transcript.segments) + len(found),
                    start_s=(seek + piece.start) * FRAME_S,
                    end_s=(seek + piece.end) * FRAME_S,
                    text=written,
                    tokens=piece.tokens,
                    temperature=text.temperature,
                    avg_logprob=text.avg_logprob,
                    compression_ratio=text.compression_ratio,
                    no_speech_prob=text.no_speech_prob,
                    seek_s=seek * FRAME_S,
                )
            )
        return found

    def _doubt(self, start: int, end: int, reason: str, text: str, *, kept: bool) -> None:
        """Note that the text of some frames is uncertain, or left out; silence is neither."""
        if not text.strip():
            return
        start_s, end_s = start * FRAME_S, end * FRAME_S
        if self._spoken:
            start_s, end_s = self._spoken.start_s(start_s), self._spoken.end_s(end_s)
        self.transcript.doubts.append(Doubt(start_s, end_s, reason, kept, text.strip()))

    def _append(self, segments: list[Segment], text: WindowText) -> list[Segment]:
        if spoken := self._spoken:  # the times of the recording
            segments = [
                replace(
                    one,
                    start_s=spoken.start_s(one.start_s),
                    end_s=spoken.end_s(one.end_s),
                    words=tuple(
                        replace(word, start_s=spoken.start_s(word.start_s), end_s=spoken.end_s(word.end_s))
                        for word in one.words
                    ),
                )
                for one in segments
            ]
        self.transcript.segments += segments
        written = [token for segment in segments for token in segment.tokens]
        self._before = [*self._before, *written][-self._model.dims.n_text_ctx :]
        failed = len(self._options.temperatures) > 1 and text.fault(self._options)
        if not self._options.condition or text.temperature > _TOO_WARM or failed:
            self._before = []
        return segments


def _checked(samples: object) -> Samples:
    """Return `samples` as float32, shape (n,). Raises UsageError for anything but mono sound."""
    if not isinstance(samples, np.ndarray) or samples.ndim != 1 or samples.dtype.kind != "f":
        form = f" of {samples.dtype}, shape {samples.shape}" if isinstance(samples, np.ndarray) else ""
        problem = f"must be a numpy array of floats, mono, not {type(samples).__name__}{form}"
        raise UsageError(problem, field="samples")
    return samples.astype(np.float32, copy=False)


# ---- one window's text ----

_SEED_STEP = 1 << 32  # between the seeds of windows
_FASTEST = 40.0  # letters a second: twice as fast as fast speech

REPEATS, GUESS = "the text repeats itself", "the text is a guess"
"""Faults of a window's text."""


@dataclass(frozen=True, slots=True)
class WindowText:
    """A window's text, and how sure the model is of it."""

    tokens: tuple[int, ...]
    """Text and timestamps, without the end."""
    text: str
    temperature: float
    avg_logprob: float
    no_speech_prob: float
    """NaN if it was not computed."""
    ended: bool = True
    """Whether the model ended it; else the limit of its tokens did."""

    @property
    def compression_ratio(self) -> float:
        """Bytes of the text over its bytes compressed by zlib: high for text that repeats itself."""
        data = self.text.encode()
        return len(data) / len(zlib.compress(data))

    def is_silence(self, options: SpeechOptions) -> bool:
        """Whether the window is to be left out: probably nobody speaks, and the text is a guess."""
        if options.max_no_speech is None or not self.no_speech_prob > options.max_no_speech:
            return False
        return options.min_logprob is None or self.avg_logprob <= options.min_logprob

    def fault(self, options: SpeechOptions) -> str:
        """Return why another temperature should be tried: it repeats itself, or is a guess. "" if good."""
        is_guess = options.min_logprob is not None and self.avg_logprob < options.min_logprob
        likely_silent = options.max_no_speech is not None and self.no_speech_prob > options.max_no_speech
        if is_guess and likely_silent:
            return ""
        if options.max_compression is not None and self.compression_ratio > options.max_compression:
            return REPEATS
        return GUESS if is_guess else ""


def best_of(attempts: Sequence[WindowText], options: SpeechOptions, seconds: float) -> WindowText:
    """Return the text of the highest mean logprob, even if it repeats itself: speech may do so.

    Left out are loops of the model: a text that repeats itself and is too long for the `seconds` of sound, or
    that reached the limit of tokens, if a later one is good.
    """
    most = _FASTEST * (seconds + 1.0)
    fitting = [one for one in attempts if len(one.text) <= most or one.fault(options) != REPEATS] or attempts
    if not attempts[-1].fault(options):
        fitting = [one for one in fitting if one.ended] or fitting
    return max(fitting, key=lambda one: one.avg_logprob)


class WindowDecoder:
    """Decodes windows of one model under one set of options."""

    def __init__(
        self, tokenizer: WhisperTokenizer, options: SpeechOptions, *, n_ctx: int, stats: SpeechStats
    ) -> None:
        """Decode with at most `n_ctx` tokens of prompt and text; add counts to `stats`."""
        self._tokenizer = tokenizer
        self._options = options
        self._n_ctx = n_ctx
        self._stats = stats
        self._traits = SpeechVocabulary(tokenizer)
        self._rules = SpeechRules(rule_tokens(tokenizer, options))

    @property
    def n_sequences(self) -> int:
        """Sequences that a window's cache needs."""
        return (self._options.beam or 1) if 0.0 in self._options.temperatures else 1

    def decode(
        self,
        cache: DecoderCache,
        start: Sequence[int],
        before: Sequence[int],
        *,
        place: int,
        seconds: float,
        drafts: ModelDrafts | None = None,
    ) -> WindowText:
        """Return the text of the window in `cache`: it begins with tokens `start`, after the text `before`.

        `place`: the window's number, which its random numbers depend on. `seconds`: of sound in the window.
        """
        options, prompt = self._options, self._prompt(start, before)
        session = SpeechSession(cache, self._traits, n_ctx=self._n_ctx, noted=len(prompt) - len(start))
        attempts: list[WindowText] = []
        for i, temperature in enumerate(options.temperatures):
            started = time.perf_counter()
            if temperature == 0 and options.beam is not None:
                decoded = self._search(session, cache, prompt)
            else:
                coins = Coins((options.seed or 0) + _SEED_STEP * (place * len(options.temperatures) + i))
                decoded = self._sample(session, prompt, temperature, coins, drafts)
            attempts.append(self._text(session, decoded, temperature, started))
            if not attempts[-1].fault(options):
                break
        return best_of(attempts, options, seconds)

    def guess(
        self, cache: DecoderCache, start: Sequence[int], before: Sequence[int], drafts: ModelDrafts | None
    ) -> WindowText:
        """Return the greedy text, however good it is; arguments as of `decode`."""
        started, prompt = time.perf_counter(), self._prompt(start, before)
        session = SpeechSession(cache, self._traits, n_ctx=self._n_ctx, noted=len(prompt) - len(start))
        return self._text(session, self._sample(session, prompt, 0.0, Coins(0), drafts), 0.0, started)

    def _prompt(self, start: Sequence[int], before: Sequence[int]) -> list[int]:
        """Return the tokens before a window's text: the end of the text `before`, then `start`."""
        if not before:
            return list(start)
        return [self._tokenizer.sot_prev, *before[-(self._n_ctx // 2 - 1) :], *start]

    def _text(
        self, session: SpeechSession, decoded: Decoded, temperature: float, started: float
    ) -> WindowText:
        self._stats.n_decodings += 1
        self._stats.decode_s += time.perf_counter() - started
        self._stats.n_tokens += decoded.n_tokens
        self._stats.n_steps += decoded.n_passes
        tokens, mean, ended, *_ = decoded
        text, row, no_speech = self._tokenizer.decode(tokens).strip(), session.noted_row, math.nan
        if row is not None:
            no_speech = math.exp(float(row[self._tokenizer.no_speech]) - log_total(row))
        return WindowText(tuple(tokens), text, temperature, mean, no_speech, ended)

    def _search(self, session: SpeechSession, cache: DecoderCache, prompt: Sequence[int]) -> Decoded:
        search = BeamSearch(cache, self._rules, self._options, n_ctx=self._n_ctx)
        session.rewind(0)
        return search.run(session.eval(prompt)[0], len(prompt))

    def _sample(
        self,
        session: SpeechSession,
        prompt: Sequence[int],
        temperature: float,
        coins: Coins,
        drafts: ModelDrafts | None,
    ) -> Decoded:
        """Decode once through the exact loop."""
        rules = self._rules.again()
        params = SamplingParams(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)
        options = Options(params=params, n_predict=self._n_ctx // 2, seed=coins.seed)
        task = Task(options=options, rule=self._options.rule(temperature), coins=coins, constraint=rules)
        drafter = drafts.drafter(rules, prompt, greedy=temperature == 0) if drafts else None
        generation = Generation(
            session,
            drafter,
            prompt,
            task,
            n_ctx=self._n_ctx + 1,  # the last token need not be read
            n_known=min(session.n_past, len(prompt) - 1),
        )
        started, n_passes = time.perf_counter(), 0
        for n_passes, event in enumerate(generation.events(), 1):
            if n_passes > 1:  # the first one is of the prompt's end
                self._stats.steps[event.n_drafted, event.n_accepted] += 1
        seconds = time.perf_counter() - started
        if drafts:
            drafts.decoded(generation.tokens, len(prompt), drafter, seconds)
        tokens = generation.tokens[len(prompt) :]
        n_tokens = len(tokens)
        ended = bool(tokens) and tokens[-1] == self._tokenizer.eot
        if ended:
            tokens.pop()
        return Decoded(tokens, sum(rules.logprobs) / (len(tokens) + 1), ended, n_tokens, n_passes)


def language_of(row: np.ndarray, tokenizer: WhisperTokenizer) -> tuple[str, float]:
    """Return the likeliest language by the logits after the start token, and its probability."""
    tokens = list(tokenizer.language_tokens)
    logits = row[tokens]
    best = int(logits.argmax())
    return tokenizer.languages[best], float(np.exp(logits[best] - log_total(logits)))


@contextmanager
def open_transcriber(
    model: str,
    options: SpeechOptions | None = None,
    *,
    draft: str = "auto",
    n_threads: int | None = None,
    kernels: bool = True,
) -> Iterator[Transcriber]:
    """Load `model` and its draft; free both at the end of the block.

    `draft`: a smaller Whisper model, which drafts along with earlier text; "auto": only that text; or "none".
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


_EVERY_S = 1.0
_LEAST_S = 0.4  # of sound for a hypothesis


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """The text that is not final yet, and the time in the sound up to which it goes."""

    text: str
    end_s: float


class SoundQueue:
    """Blocks of sound, read on a separate thread, so that none is lost while the model works."""

    def __init__(self, blocks: Iterator[Samples]) -> None:
        """Begin to read `blocks`."""
        self._queue: queue.SimpleQueue[Samples | BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, args=(blocks,), daemon=True)
        self._thread.start()
        self.ended = False
        """Whether all was read that there is."""

    def _read(self, blocks: Iterator[Samples]) -> None:
        try:
            for block in blocks:
                self._queue.put(block)
        except BaseException as error:  # noqa: BLE001 - told to the thread that waits
            self._queue.put(error)
        self._queue.put(None)

    def get(self, n: int) -> list[Samples]:
        """Wait for at least `n` samples; return all blocks so far. Fewer come only at the end.

        Raises what the reading thread raised.
        """
        found, n_found = list[Samples](), 0
        while not self.ended and (n_found < n or not self._queue.empty()):
            block = self._queue.get()
            if isinstance(block, np.ndarray):
                found.append(block)
                n_found += len(block)
            else:
                self.ended = True
                if block is not None:
                    raise block
        return found


class LiveTranscription:
    """One transcription of sound that is still coming."""

    def __init__(
        self, transcriber: Transcriber, blocks: Iterator[Samples], *, every_s: float = _EVERY_S
    ) -> None:
        """Transcribe `blocks` of samples (16 kHz); a hypothesis follows every `every_s` seconds of sound."""
        self._transcription = Transcription(transcriber, np.empty(0, np.float32))
        self._n_mels = transcriber.model.dims.n_mels
        self._sound = SoundQueue(blocks)
        self._every = max(1, round(every_s * SAMPLE_RATE))
        self._buffer = np.empty(0, np.float32)  # since the last window's end
        self._seek = 0  # frames before it
        self.transcript.silent = True
        self.stopped = False
        """Whether nothing more is to be transcribed."""

    @property
    def transcript(self) -> Transcript:
        """The final text so far, which later sound does not change."""
        return self._transcription.transcript

    def stop(self) -> None:
        """Stop listening: the sound so far becomes final."""
        self.stopped = True

    def events(self) -> Generator[Segment | Hypothesis]:
        """Yield hypotheses and final segments as the sound comes."""
        stats = self.transcript.stats
        n_window = N_FRAMES * HOP
        while not (self.stopped or self._sound.ended):
            blocks = self._sound.get(self._every)
            self._buffer = np.concatenate([self._buffer, *blocks])
            stats.audio_s += sum(map(len, blocks)) / SAMPLE_RATE
            self.transcript.silent &= all(map(is_silent, blocks))
            started = time.perf_counter()
            while len(self._buffer) >= n_window:
                yield from self._final(N_FRAMES)
            if not self._sound.ended and len(self._buffer) >= _LEAST_S * SAMPLE_RATE:
                yield self._guess()
            stats.total_s += time.perf_counter() - started
        started = time.perf_counter()
        while len(self._buffer) >= HOP:
            yield from self._final(min(N_FRAMES, len(self._buffer) // HOP))
        stats.total_s += time.perf_counter() - started
        stats.transcribed_s = stats.audio_s
        self.transcript.complete = True

    def _window(self, n_frames: int) -> Samples:
        mel = log_mel(self._buffer[: n_frames * HOP], self._n_mels)
        return window_of(mel[:, :n_frames], 0)

    def _final(self, n_frames: int) -> list[Segment]:
        segments: list[Segment] = []
        n_read = self._transcription.silent_frames(self._buffer[: n_frames * HOP])
        if not n_read:
            segments, n_read = self._transcription.window(self._window(n_frames), self._seek, n_frames)
        self._buffer = self._buffer[n_read * HOP :]
        self._seek += n_read
        self.transcript.stats.transcribed_s = self._seek * HOP / SAMPLE_RATE
        return segments

    def _guess(self) -> Hypothesis:
        n_frames = min(N_FRAMES, len(self._buffer) // HOP)
        text = "" if is_silent(self._buffer) else self._transcription.guess(self._window(n_frames), n_frames)
        return Hypothesis(text, (self._seek + n_frames) / 100)
