"""Stand-ins for a Whisper model: a decoder that is a function of the prefix, and its special tokens."""

import numpy as np

from edgespec.speech.rules import RuleTokens
from edgespec.speech.session import DecoderTraits, SpeechSession

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
TRAITS = DecoderTraits(N_VOCAB, lambda token: token == END, "toy", "toy")


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
    """Sequences of a model that is a function of the prefix; a DecoderPasses."""

    def __init__(self, logits, n_sequences=1):
        self.sequences = [[] for _ in range(n_sequences)]
        self.passes = []
        self._logits = logits

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
            out.append(np.array(rows, np.float32).reshape(part.n_logits, N_VOCAB))
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
