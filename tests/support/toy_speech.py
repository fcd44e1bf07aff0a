"""Stand-ins for a Whisper model: a decoder that is a function of the prefix, and its special tokens."""

from types import SimpleNamespace

import numpy as np

from edgespec.apps.speech.rules import RuleTokens
from edgespec.apps.speech.whisper_model import SpeechSession

N_TEXT, N_SPECIAL, N_TIMES = 40, 8, 60
END = N_TEXT
FIRST_TIME = N_TEXT + N_SPECIAL
N_VOCAB = FIRST_TIME + N_TIMES
NO_TIMES = FIRST_TIME - 1
START, NO_SPEECH = END + 1, NO_TIMES - 1

RULES = RuleTokens(
    n_vocab=N_VOCAB,
    end=END,
    first_timestamp=FIRST_TIME,
    no_timestamps=NO_TIMES,
    suppressed=(3, START, NO_SPEECH),
    blank=(5,),
    last_initial=7,
)
TRAITS = SimpleNamespace(n_vocab=N_VOCAB, is_eog=lambda token: token == END, path="toy", name="toy")


def random_decoder(seed=0, *, sharpness=2.0, salt=0):
    """Logits as a function of the last tokens: `salt` changes some of them, for a draft that errs."""

    def logits(prefix):
        rng = np.random.default_rng([seed, *prefix[-3:]])
        row = (sharpness * rng.standard_normal(N_VOCAB)).astype(np.float32)
        if salt:
            changed = np.random.default_rng([seed, salt, *prefix[-2:]])
            row += changed.standard_normal(N_VOCAB).astype(np.float32)
        row[FIRST_TIME:] -= 1.5
        row[END] += 0.05 * len(prefix)
        return row

    return logits


class ToyDecoderCache:
    """Sequences of a model that is a function of the prefix; as a DecoderCache."""

    def __init__(self, logits, n_sequences=1):
        self.sequences = [[] for _ in range(n_sequences)]
        self.passes = []
        self._logits = logits
        self._n_vocab = N_VOCAB

    def forward(self, batch):
        self.passes.append(sum(len(part.tokens) for part in batch))
        out = []
        for part in batch:
            tokens = self.sequences[part.sequence]
            n_tree = len(part.parents or ())
            n_chain = len(part.tokens) - n_tree
            tokens += part.tokens[:n_chain]
            before = tuple(tokens)
            n_rows = part.n_logits - n_tree
            rows = [self._logits(before[: len(before) - i]) for i in reversed(range(n_rows))]
            texts = []
            for i, (token, parent) in enumerate(zip(part.tokens[n_chain:], part.parents or (), strict=True)):
                texts.append((*(texts[parent] if parent >= 0 else before), token))
                rows.append(self._logits(texts[-1]))
                if len(texts[-1]) == len(before) + i + 1:
                    tokens.append(token)
            out.append(np.array(rows, np.float32).reshape(part.n_logits, self._n_vocab))
        return out

    def n_past(self, sequence):
        return len(self.sequences[sequence])

    def rewind(self, sequence, n_keep):
        assert 0 <= n_keep <= len(self.sequences[sequence])
        del self.sequences[sequence][n_keep:]

    def reorder(self, sources):
        self.sequences = [list(self.sequences[i]) for i in sources]


def toy_session(logits, **options):
    return SpeechSession(ToyDecoderCache(logits), TRAITS, n_ctx=options.pop("n_ctx", 200), **options)


def toy_tokenizer(*, multilingual=False):
    """A tokenizer of the 256 bytes."""
    from edgespec.apps.speech.tokenizer import WhisperTokenizer

    tokens = [bytes([i]) for i in range(256)]
    tokens += [b" -", b" '", b" \xe2"]  # else a space alone would be the first token of what nobody says
    return WhisperTokenizer(tuple(tokens), len(tokens) + 1608, multilingual)


class ScriptedWhisper:
    """A model that says one script after the other, a window each; `heard` are the prompts before them."""

    def __init__(self, tokenizer, scripts, *, no_speech=0.0, peak=20.0, language="en"):
        self.tokenizer, self.scripts, self.peak = tokenizer, scripts, peak
        self.no_speech, self.language = no_speech, language
        self.dims = SimpleNamespace(n_mels=80, n_text_ctx=448, alignment_heads=(), n_vocab=tokenizer.n_vocab)
        self.path = "scripted.gguf"
        self.mels, self.heard = [], []

    def encode(self, mel):
        self.mels.append(mel)
        return SimpleNamespace(close=lambda: None, window=len(self.mels) - 1)

    def cache(self, audio, n_sequences=1):
        window = ScriptedCache(self, audio.window, n_sequences)
        window.close = lambda: None
        return window

    def row(self, window, prefix):
        tokens = self.tokenizer
        row = np.zeros(tokens.n_vocab, np.float32)
        start = len(prefix) - prefix[::-1].index(tokens.sot)
        after = prefix[start:]
        n_start = (2 if tokens.is_multilingual else 0) + (tokens.no_timestamps in after)
        if not after:
            row[tokens.no_speech] = -self.peak if not self.no_speech else 20.0 * self.no_speech
        if len(after) < n_start:
            row[tokens.language_token(self.language)] = 5.0
            return row
        written = after[n_start:]
        script = [*self.scripts[window], tokens.eot]
        if not written:
            self.heard.append(tuple(prefix))
        row[script[min(len(written), len(script) - 1)]] = self.peak
        return row


class ScriptedCache(ToyDecoderCache):
    """The cache of one window of a ScriptedWhisper."""

    def __init__(self, model, window, n_sequences):
        super().__init__(lambda prefix: model.row(window, prefix), n_sequences)
        self._n_vocab = model.tokenizer.n_vocab
