"""Exact speculative decoding on a pair of GGUF files: what edgespec does, without what makes it fast.

    python docs/minimal.py TARGET.gguf DRAFT.gguf "Once upon a time" --temp 0.8

A step: the draft model proposes GAMMA tokens, one after another. The target reads them all in one pass, which
costs little more than a pass over one. `verify` keeps those that the target might have written as well, and
adds one of the target's own. The text is distributed as the target's alone: Leviathan et al. 2023,
arXiv 2211.17192, theorem 3.5. At temperature 0 it is the target's own text. Both models have one vocabulary.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import chain, islice

import llama_cpp as llama
import numpy as np
import numpy.typing as npt

GAMMA = 4  # tokens that the draft proposes in a step
Probs = npt.NDArray[np.float64]  # probabilities of the next token, for each of the vocabulary


class Reader:
    """A model with its KV cache, which holds `tokens`."""

    def __init__(self, path: str, n_ctx: int = 2048) -> None:
        """Load the model. Raises ValueError if it cannot be loaded."""
        self.model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
        if not self.model:
            raise ValueError(f"{path}: no model that llama.cpp loads")
        params = llama.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = n_ctx
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        self.context = llama.llama_init_from_model(self.model, params)
        self.vocabulary = llama.llama_model_get_vocab(self.model)
        self.n_vocab = llama.llama_vocab_n_tokens(self.vocabulary)
        self.tokens: list[int] = []

    def read(self, tokens: Sequence[int], temperature: float, n: int = 1) -> Probs:
        """Read `tokens`; return the probabilities after each of the last `n`, shape (n, n_vocab).

        What the cache holds of them is not read again; what it holds beyond them is taken back.
        """
        same = min(len(self.tokens), len(tokens) - n)
        while self.tokens[:same] != list(tokens[:same]):
            same -= 1
        llama.llama_memory_seq_rm(llama.llama_get_memory(self.context), 0, same, -1)
        unread = tokens[same:]
        batch = llama.llama_batch_init(len(unread), 0, 1)
        batch.n_tokens = len(unread)
        for i, token in enumerate(unread):
            batch.token[i], batch.pos[i], batch.logits[i] = token, same + i, i >= len(unread) - n
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        if status := llama.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode: {status}")
        llama.llama_batch_free(batch)
        self.tokens = list(tokens)
        logits = np.ctypeslib.as_array(llama.llama_get_logits(self.context), (n, self.n_vocab))
        return np.array([probabilities(row, temperature) for row in logits.astype(np.float64)])


def probabilities(logits: Probs, temperature: float) -> Probs:
    """Return the softmax of logits over the temperature; at temperature 0 the likeliest token has it all."""
    if temperature == 0:
        return np.eye(1, len(logits), int(logits.argmax()))[0]
    weights = np.exp((logits - logits.max()) / temperature)
    return weights / weights.sum()


def verify(drafted: Sequence[int], q: Probs, p: Probs, rng: np.random.Generator) -> list[int]:
    """Return the tokens that a step emits: the accepted ones of `drafted`, and one of the target's own.

    `q`: the draft's probabilities that each was drawn from, shape (n, n_vocab); `p`: the target's at the same
    places and at the one after them, shape (n + 1, n_vocab).
    """
    for i, token in enumerate(drafted):
        # Accept with probability min(1, p / q): where the draft says a token more often than the target
        # would, so much of it is rejected. A rejected one is replaced from what the draft says too seldom,
        # max(0, p - q). Both together: min(p, q) + max(0, p - q) = p.
        if rng.random() * q[i, token] >= p[i, token]:
            left = np.maximum(p[i] - q[i], 0.0)
            return [*drafted[:i], int(rng.choice(len(left), p=left / left.sum()))]
    return [*drafted, int(rng.choice(p.shape[1], p=p[-1]))]


def generate(
    target: Reader, draft: Reader, prompt: Sequence[int], temperature: float, rng: np.random.Generator
) -> Iterator[list[int]]:
    """Yield the tokens of each step, without end; `prompt` has at least one token."""
    text = list(prompt)
    while True:
        drafted: list[int] = []
        q = np.empty((GAMMA, target.n_vocab))
        for i in range(GAMMA):
            q[i] = draft.read([*text, *drafted], temperature)[0]
            drafted.append(int(rng.choice(target.n_vocab, p=q[i])))
        p = target.read([*text, *drafted], temperature, GAMMA + 1)
        emitted = verify(drafted, q, p, rng)
        text += emitted
        yield emitted


def tokenize(reader: Reader, text: str) -> list[int]:
    """Return the tokens of `text`, with BOS where the model wants it."""
    data = text.encode()
    found = (llama.llama_token * (len(data) + 2))()
    n = llama.llama_tokenize(reader.vocabulary, data, len(data), found, len(found), True, True)
    return list(found[:n])


def piece(reader: Reader, token: int) -> bytes:
    """Return what a token adds to the text."""
    text = (llama.ctypes.c_char * 256)()
    n = llama.llama_token_to_piece(reader.vocabulary, token, text, len(text), 0, False)
    return text.raw[:n]


@llama.llama_log_callback
def silent(level: int, text: bytes, user_data: object) -> None:
    """Pass over what llama.cpp says of loading."""


def main() -> None:
    """Write a text to stdout, until its end."""
    llama.llama_log_set(silent, None)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name in ("target", "draft", "prompt"):
        parser.add_argument(name)
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-n", type=int, default=128, help="most tokens")
    args = parser.parse_args()
    target, draft = Reader(args.target), Reader(args.draft)
    prompt, rng = tokenize(target, args.prompt), np.random.default_rng(args.seed)
    steps = generate(target, draft, prompt, args.temp, rng)
    for token in islice(chain.from_iterable(steps), args.n):
        if llama.llama_vocab_is_eog(target.vocabulary, token):
            return
        sys.stdout.buffer.write(piece(target, token))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
