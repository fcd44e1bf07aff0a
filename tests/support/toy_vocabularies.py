"""Vocabularies of a few tokens: what the translation of drafts needs of a Model's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from toy_sessions import ToySession


class ToyVocabulary:
    """Tokens of bytes; the last ones are control tokens. Tokenizes by the longest match from the left."""

    name = path = "toy"

    def __init__(
        self,
        texts: Sequence[bytes],
        controls: Sequence[bytes] = (b"<end>",),
        *,
        bos: int | None = None,
        eos: int | None = None,
        eot: int | None = None,
        adds_space: bool = False,
    ) -> None:
        """`eos` is the first control token unless it is given; `adds_space`: before each text, as some do."""
        self.texts = [*texts]
        self.controls = [*controls]
        self.n_vocab = len(texts) + len(controls)
        self.bos, self.eot = bos, eot
        self.eos = len(texts) if eos is None else eos
        self.add_bos = bos is not None
        self._adds_space = adds_space

    def is_control(self, token: int) -> bool:
        return token >= len(self.texts)

    def is_eog(self, token: int) -> bool:
        return token in (self.eos, self.eot)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if token < len(self.texts):
            return self.texts[token]
        return self.controls[token - len(self.texts)] if special else b""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        data = (" " if self._adds_space else "").encode() + text.encode()
        found = []
        while data:
            fitting = [i for i, piece in enumerate(self.texts) if piece and data.startswith(piece)]
            if not fitting:
                data = data[1:]
                continue
            best = max(fitting, key=lambda i: (len(self.texts[i]), -i))
            found.append(best)
            data = data[len(self.texts[best]) :]
        return found

    def said(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self.piece(token, special=True) for token in tokens)


def session_of(
    vocabulary: ToyVocabulary, logits, *, n_ctx: int = 1 << 20, n_logits_max: int = 33
) -> ToySession:
    """A session over the model `logits(prefix)` with this vocabulary."""
    session = ToySession(logits, vocabulary.n_vocab, n_ctx=n_ctx, is_eog=vocabulary.is_eog)
    session.model = vocabulary
    session.n_logits_max = n_logits_max
    return session


def random_logits(seed: int, n_vocab: int, sharpness: float = 1.5):
    """A model: logits as a function of the whole prefix."""

    def logits(prefix: Sequence[int]) -> np.ndarray:
        rng = np.random.default_rng([seed, len(prefix), *prefix])
        return rng.normal(0, sharpness, n_vocab).astype(np.float32)

    return logits
