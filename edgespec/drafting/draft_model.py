"""The draft model: what it has read of the sequence, and its passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from edgespec.decoding.session import Forward, ForwardResult, ModelSession, Rows, TargetFeatures, n_common
from edgespec.errors import LogitsOf
from edgespec.llama.choices import AdapterSet


class DraftSession(ModelSession, Protocol):
    """A session of a draft model."""

    @property
    def tokens(self) -> list[int]:
        """The tokens in the sequence."""

    def eval(self, tokens: Sequence[int], /, *, n_logits: int = 1) -> Rows:
        """Append `tokens`; return the logits after each of the last `n_logits`."""

    def clear(self) -> None:
        """Empty the sequence."""

    def close(self) -> None:
        """Free the session's cache."""


class TimedSession(DraftSession, Protocol):
    """A session whose passes are timed and undone."""

    def checkpoint(self) -> None:
        """Note that the sequence will be cut back to here."""


class DraftSessions(Protocol):
    """A pool of such sessions, which keeps finished ones (llama/sequence_pool.py)."""

    def begin(self, timeline: Sequence[int], /) -> DraftSession:
        """Return the session that holds the longest prefix of `timeline`."""

    def end(self, session: Any, /) -> None:  # noqa: ANN401 - one of its own
        """Return a session to the pool, for the next text."""


class DraftModel:
    """The model of `session`, which follows the target's sequence at its own pace.

    Its cache is trimmed to what was accepted and nothing is evaluated twice: tokens it has not read
    (the last drafted one, the one that followed, those of another source) are read with its next pass. When
    its context is full it reads the most recent part again and continues from there: that costs acceptance,
    never exactness.
    """

    temperature_ratio = 1.0
    """Its temperature over the target's, where tokens are sampled."""
    features: TargetFeatures | None = None
    """The target's hidden states, where it is a head that reads them."""
    _adapters: AdapterSet = ()  # with which the target has made its states
    sequences: DraftSessions | None = None
    """The pool of its session; a sequence that begins like an earlier one need not be read again."""

    def __init__(self, session: DraftSession, *, n_vocab: int) -> None:
        """Draft with `session`; only the first `n_vocab` tokens of its vocabulary are those of the target."""
        self._session = session
        self._n_inputs = session.model.n_vocab
        self.n_vocab = min(n_vocab, self._n_inputs)
        """Tokens of the target that it can know."""
        self._set_tokens(None)
        self._offset = 0  # the sequence's index of the first token in the cache
        self.blamed = LogitsOf(session.model.path)
        """Enter it around what is computed from its logits: an error then names this model."""

    def _set_tokens(self, token_ids: npt.NDArray[np.int64] | None) -> None:
        """Set which tokens have logits; None: all."""
        known = None if token_ids is None else token_ids[: int(np.searchsorted(token_ids, self.n_vocab))]
        self.ids: npt.NDArray[np.int32] | None = None if known is None else known.astype(np.int32)
        """The tokens of a row of logits, ascending, as `_core.Sampler` takes them; None: all."""
        self._n_row = self.n_vocab if known is None else len(known)

    @property
    def n_ctx(self) -> int:
        """Tokens the model's context holds."""
        return self._session.n_ctx

    @property
    def n_past(self) -> int:
        """Tokens that it has read."""
        return self._session.n_past

    @property
    def n_held(self) -> int:
        """Tokens in its cache, to which its next pass attends."""
        return self._session.n_past

    def begin(self, tokens: Sequence[int] = ()) -> None:
        """Start on the sequence `tokens`; forget what was read of another one."""
        if self._offset and tokens and self.sequences:
            n_known = n_common(self._session.tokens, tokens[self._offset : -1])
            if n_known > self._session.n_past // 2:  # not by chance: it is the same text
                self._session.rewind(n_known)
                return
            self._session.clear()
        self._offset = 0
        if self.sequences and tokens:
            self.sequences.end(self._session)
            self._session = self.sequences.begin(tokens)
        else:
            self._session.rewind(0)

    def join(self, target: ModelSession) -> None:
        """Draft for this session of the target from now on."""

    def adapt(self, adapters: AdapterSet) -> None:
        """Forget what came from hidden states of the target, unless it made them with these adapters."""
        if self.features and adapters != self._adapters:
            self.begin()
            self.features.begin(())
        self._adapters = adapters

    def rest(self) -> None:
        """Keep a finished sequence, for others with the same prefix."""
        if self.sequences and not self._offset:
            self.sequences.end(self._session)

    def follows(self, n_tokens: int) -> bool:
        """Whether it can draft after a sequence of `n_tokens`."""
        return self.n_unread(n_tokens) > 0

    def n_unread(self, n_tokens: int) -> int:
        """Return how many of a sequence of `n_tokens` it has not read."""
        return n_tokens - self._offset - self._session.n_past

    def skip(self, n_tokens: int, n_recent: int) -> None:
        """If more than `n_recent` of a sequence of `n_tokens` are unread, leave the others out for good."""
        n_recent = min(n_recent, self.n_ctx // 2)
        if self.n_unread(n_tokens) > n_recent:
            self._start_at(n_tokens - n_recent)

    def read(self, tokens: Sequence[int]) -> None:
        """Prefill the unread part of `tokens` except the last, which is read with the next pass."""
        self._session.eval(self._known(tokens[self._offset + self._session.n_past : -1]), n_logits=0)

    def make_room(self, n_tokens: int) -> None:
        """Start again from the recent half of the context when a sequence of `n_tokens` does not fit."""
        if n_tokens - self._offset > self.n_ctx:
            self._start_at(n_tokens - self.n_ctx // 2)

    def ask(self, tokens: Sequence[int], guesses: Sequence[int] = ()) -> Forward | ForwardResult:
        """Return the pass over the rest of `tokens`, then `guesses`, which others may share.

        Its `finish` returns the logits after `tokens` and after each guess, shape (1 + len(guesses), n):
        those of `ids`, or of the first n tokens. The guesses stay in the cache until `trim`. Return a result
        instead if no pass is needed or none can be shared.
        """
        pending = [*tokens[self._offset + self._session.n_past :], *guesses]
        asked = Forward(self._session, self._known(pending), 1 + len(guesses))
        asked.finish = self._finish
        return asked

    def _finish(self, evaluated: ForwardResult) -> ForwardResult:
        return replace(evaluated, rows=evaluated.rows[:, : self._n_row])

    def whole(self, row: Rows) -> Rows:
        """Return a row of logits extended to all tokens, with -inf for those that it lacks."""
        if self.ids is None:
            return row
        whole = np.full(self.n_vocab, -np.inf, np.float32)
        whole[self.ids] = row
        return whole

    def trim(self, n_tokens: int) -> None:
        """Remove from the cache all but the sequence's first `n_tokens` tokens."""
        n_keep = n_tokens - self._offset
        if n_keep < self._session.n_past:
            self._session.rewind(max(0, n_keep))

    def close(self) -> None:
        """Free the session of the draft model."""
        self._session.close()

    def _start_at(self, offset: int) -> None:
        self._session.clear()
        self._offset = offset

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Return `tokens` with 0 for those that the model does not have, which costs acceptance."""
        n_inputs = self._n_inputs
        return [t if t < n_inputs else 0 for t in tokens]
