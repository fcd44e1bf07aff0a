"""Draft heads that edgespec makes: one block that continues from the target's hidden states (head_file.py).

Its input for token t after a token with the hidden state f is We e(t) + Wf f, with e the target's own input
embedding, which is read in the target's file. Its own hidden state replaces f where the target has not
read yet. (EAGLE, arXiv 2401.15077.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgespec.decoding.session import Features, Inputs
from edgespec.drafting.draft import Draft
from edgespec.drafting.draft_model import DraftModel
from edgespec.drafting.heads.head import HeadDraft, HeadModel
from edgespec.drafting.heads.head_file import HeadFile, read_fusion, read_head
from edgespec.drafting.heads.matrices import EMBEDDINGS, EightBitMatrix, MappedMatrix
from edgespec.errors import EdgespecError, MessageFn, UsageError, describe_os_error
from edgespec.llama.gguf_header import GGUFHeader, check_model_file
from edgespec.llama.kernels import Plugin
from edgespec.llama.sequence_pool import SequencePool
from edgespec.llama.weights import Model
from edgespec.models.store import sha256_of

_REMEMBERED = 1024  # tokens: 6 MB for a target of 1,536 elements


class Fusion:
    """The input of a head instead of tokens: the fusion matrix times embedding and hidden state.

    Products of embeddings are cached: a few hundred tokens make up most of a text.
    """

    def __init__(
        self,
        head: HeadFile,
        embeddings: MappedMatrix,
        *,
        n_threads: int = 1,
        plugin: Plugin | None = None,
    ) -> None:
        """Load the matrix of `head`; `embeddings` are those of its target; `plugin`: kernels to use."""
        n, floats = head.n_embd, read_fusion(head)
        self._n_embd, self._embeddings = n, embeddings
        self._of_embedding, self._of_state = (
            EightBitMatrix(half, n_threads, plugin) for half in (floats[:, :n], floats[:, n:])
        )
        self._of_token: dict[int, npt.NDArray[np.float32]] = {}

    def __call__(self, tokens: Sequence[int], features: Features) -> npt.NDArray[np.float32]:
        """Return the inputs for `tokens`, the first of them after features[0]; both have the same length.

        Shape (len(tokens), n_embd).
        """
        if features.shape != (len(tokens), self._n_embd):
            raise ValueError(f"hidden states of shape {features.shape} for {len(tokens)} tokens")
        inputs = np.empty((len(tokens), self._n_embd), np.float32)
        self._of_state.multiply(np.ascontiguousarray(features), inputs)
        self._remember(tokens)
        for i, token in enumerate(tokens):
            inputs[i] += self._of_token[token]
        return inputs

    def _remember(self, tokens: Sequence[int]) -> None:
        unknown = set(tokens).difference(self._of_token)
        if not unknown:
            return
        if len(self._of_token) + len(unknown) > _REMEMBERED:
            self._of_token.clear()
            unknown = set(tokens)
        found = np.empty((len(unknown), self._n_embd), np.float32)
        self._of_embedding.multiply(self._embeddings(list(unknown)), found)
        self._of_token.update(zip(unknown, found, strict=True))


class MadeDraft(HeadDraft):
    """A head in a file that edgespec made."""

    header: GGUFHeader

    def check(self, target: GGUFHeader) -> None:
        """Read the file; raise UsageError if it was made for another file than that of `target`."""
        self.header = check_model_file(self.header)
        head = read_head(self.header)
        assert head  # noqa: S101 - for the type checker
        _check_made_for(head, target)
        self._head, self.trained_for = head, head.target_sha256

    def match(self, model: Model, on_message: MessageFn) -> Draft:
        """Return itself, with the matrix that joins tokens and states."""
        embeddings = MappedMatrix(self.target.header, EMBEDDINGS)
        self._fusion = Fusion(self._head, embeddings, n_threads=self.n_threads, plugin=model.plugin)
        return self

    def open(self, sequences: SequencePool) -> DraftModel:
        """Return the head of one generation."""
        return HeadModel(
            sequences.begin([0]),
            self.features(),
            n_vocab=self.target.n_vocab,
            token_ids=self._head.token_ids,
            fusion=self._fusion,
        )

    def timed_rows(self, tokens: Sequence[int]) -> Inputs | None:
        """Return the rows of tokens joined with states of zeros."""
        return self._fusion(tokens, np.zeros((len(tokens), self._head.n_embd), np.float32))


def _check_made_for(head: HeadFile, target: GGUFHeader) -> None:
    """Raise UsageError if `head` was made for another file than that of `target`.

    The first time the whole file is read for its hash, which takes a second or two for each GB.
    """
    if (head.n_vocab, head.n_embd) == (target.n_vocab, target.n_embd):
        try:
            if sha256_of(target.path) == head.target_sha256:
                return
        except OSError as error:
            raise EdgespecError(f"cannot read {target.path}: {describe_os_error(error)}") from error
        what = "another quantization of this model, or another model of its size"
    else:
        what = "another model"
    raise UsageError(
        f"{head.path}: a draft head made for {what}, not for {target.path.name}; make one for it with "
        "`edgespec draft make`"
    )
