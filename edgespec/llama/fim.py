"""The tokens of models that fill in the middle of a text, where a file names them."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.llama.backend import llama


@dataclass(frozen=True, slots=True)
class FimTokens:
    """Tokens before the prefix, the suffix and the middle, and before a repository and each file."""

    prefix: int
    suffix: int
    middle: int
    repository: int | None
    file: int | None


def fim_tokens(vocab: llama.llama_vocab_p) -> FimTokens | None:
    """Return the tokens of a vocabulary; None if it has not all of the first three."""
    found = [
        None if (token := of(vocab)) < 0 else token
        for of in (
            llama.llama_vocab_fim_pre,
            llama.llama_vocab_fim_suf,
            llama.llama_vocab_fim_mid,
            llama.llama_vocab_fim_rep,
            llama.llama_vocab_fim_sep,
        )
    ]
    prefix, suffix, middle, repository, file = found
    if prefix is None or suffix is None or middle is None:
        return None
    return FimTokens(prefix, suffix, middle, repository, file)
