"""How a vocabulary spells text: which tokens are a single byte, and which are text at all."""

from __future__ import annotations

import codecs
import weakref

import numpy as np
import numpy.typing as npt

from edgespec.llama.weights import Model

Ids = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]

_UNKNOWN, _TEXT, _OTHER = 0, 1, 2

_CONTINUATIONS = bytes(range(0x80, 0xC0))

_known: weakref.WeakKeyDictionary[Model, Spelling] = weakref.WeakKeyDictionary()


class Spelling:
    """The spelling of a model's tokens, for grammars."""

    def __init__(self, model: Model) -> None:
        """Find the tokens of a single byte."""
        self._model = weakref.proxy(model)
        self._kinds = np.zeros(model.n_vocab, np.int8)
        self._pieces: dict[int, bytes] = {}
        self.probes = self._find_probes(model)
        """A token for each byte that has one; at the end the usual end-of-generation token, if any."""

    @classmethod
    def of(cls, model: Model) -> Spelling:
        """Return the Spelling of `model`, made once per model."""
        found = _known.get(model)
        if found is None:
            found = _known[model] = cls(model)
        return found

    def piece(self, token: int) -> bytes:
        """Return the bytes of `token`."""
        found = self._pieces.get(token)
        if found is None:
            found = self._pieces[token] = bytes(self._model.piece(token))
        return found

    def only_text(self, ids: Ids, allowed: Bools, tail: bytes) -> Bools:
        """Return `allowed` without tokens that the library's grammar engine misreads after `tail`.

        The engine reads a control token as the text of its name, a text only up to a byte 0, and some bytes
        that are no valid UTF-8 as a character.
        """
        kinds = self._kinds[ids]
        for i in np.flatnonzero(allowed & (kinds == _UNKNOWN)):
            token = int(ids[i])
            piece = self._model.piece(token)
            is_text = bool(piece) and b"\0" not in piece and _tail(piece.lstrip(_CONTINUATIONS)) is not None
            is_text = is_text or self._model.is_eog(token)
            kinds[i] = self._kinds[token] = _TEXT if is_text else _OTHER
        text: Bools = allowed & (kinds == _TEXT)
        if tail:
            for i in np.flatnonzero(text):
                text[i] = _tail(tail + self.piece(int(ids[i]))) is not None
        return text

    def tail_after(self, tail: bytes, token: int) -> bytes:
        """Return the bytes of an unfinished character after `token`; `tail`: those before it."""
        return _tail(tail + self.piece(token)) or b""

    def write(self, text: bytes) -> list[int]:
        """Return the tokens of `text` as the tokenizer cuts it, without an unfinished character at its end.

        [] if they spell another text, as with a tokenizer that puts a space in front.
        """
        whole = text.decode(errors="ignore")
        if not whole:
            return []
        tokens: list[int] = self._model.tokenize(whole, add_special=False, parse_special=False)
        return tokens if b"".join(map(self.piece, tokens)) == whole.encode() else []

    def _find_probes(self, model: Model) -> Ids:
        found: dict[bytes, int] = {}
        for token in range(model.n_vocab):  # single bytes come first, so that the loop ends early
            piece = model.piece(token)
            if len(piece) == 1 and piece not in found:
                found[piece] = token
                if len(found) == 256:
                    break
        ends = [token for token in (model.eot, model.eos) if token is not None and model.is_eog(token)]
        return np.array([*found.values(), *ends[:1]], np.int32)


def _tail(text: bytes) -> bytes | None:
    """Return the bytes of an unfinished character at the end of `text`; None if `text` is no UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        decoder.decode(text)
    except UnicodeDecodeError:
        return None
    tail = decoder.getstate()[0]
    is_surrogate = tail[:1] == b"\xed" and tail[1:2] >= b"\xa0"  # the decoder waits for its third byte
    return None if is_surrogate else tail
