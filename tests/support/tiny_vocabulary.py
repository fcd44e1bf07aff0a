"""The vocabulary of tiny random models: byte-level BPE, so that any text becomes tokens and text again.

It is one for all of them, so that each can be the draft of any other.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# fmt: off
MERGES = [
    "Ġ t", "h e", "i n", "r e", "o n", "Ġ a", "Ġt he", "e r", "a t", "Ġ s", "o r", "e n",
    "Ġ w", "o u", "in g", "Ġ c", "i s", "Ġ f", "i t", "a n", "Ġa n", "Ġan d", "e s", "a l",
]
# fmt: on

CONTROL_TOKENS = ("<|endoftext|>", "<|begin|>", "<|im_start|>", "<|im_end|>")

NORMAL, CONTROL, UNUSED = 1, 3, 5  # enum llama_token_type

N_WORDS = 256 + len(MERGES)
"""Tokens that are text; the control tokens follow."""

EOS, BOS, IM_START, IM_END = range(N_WORDS, N_WORDS + 4)


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def vocabulary(n_padding: int = 0) -> tuple[list[str], list[int]]:
    """Return texts and types of all tokens: 256 bytes, the merges, the control tokens, padding."""
    words = _byte_alphabet() + [merge.replace(" ", "") for merge in MERGES]
    texts = [*words, *CONTROL_TOKENS, *(f"[PAD{i}]" for i in range(n_padding))]
    return texts, [NORMAL] * len(words) + [CONTROL] * len(CONTROL_TOKENS) + [UNUSED] * n_padding


def successors() -> npt.NDArray[np.int64]:
    """Return which word each word of text is most likely followed by, the same in all tiny models.

    So two of them agree about as often as a real target and its draft do.
    """
    return np.random.default_rng(1234).permutation(N_WORDS)
