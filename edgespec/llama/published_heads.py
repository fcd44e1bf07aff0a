"""Draft heads published as files of their own: EAGLE-3, DFlash and others that llama.cpp loads.

They read the hidden states of several layers of one target, and have no tokens or output matrix without it.
edgespec does not run them: it says so, and whether the file fits the target at all.
"""

from __future__ import annotations

from edgespec.errors import UsageError
from edgespec.llama.gguf_header import HELPERS, GGUFHeader

# Architectures of which llama.cpp hands out what goes into single layers; with others it ends the process.
_GIVE_LAYERS = frozenset(
    {
        *("llama", "qwen3", "qwen3moe", "qwen3next", "qwen35", "qwen35moe", "qwen4exp", "gemma4", "gpt-oss"),
        *("lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "deepseek4", "bailingmoe3", "hunyuan_vl"),
        *("minimax-01", "minimax-m2", "mimo2", "nanbeige", "muse-glimmer"),
    }
)


def refuse_published_head(draft: GGUFHeader, target: GGUFHeader) -> None:
    """Raise UsageError, with the reason, if `draft` is a head published as a file of its own."""
    if draft.architecture not in HELPERS:
        return
    what = HELPERS[draft.architecture]
    if reason := _misfit(draft, target):
        raise UsageError(f"{draft.path}: {what} that does not fit {target.path.name}: {reason}")
    raise UsageError(
        f"{draft.path}: {what}, which edgespec does not run; leave it out, or choose a draft model"
    )


def _misfit(head: GGUFHeader, target: GGUFHeader) -> str:
    """Say why llama.cpp could not run `head` beside `target`; "" if it could, as far as the files say."""

    def number(key: str) -> int:
        return max(head.gguf.integers(f"{head.architecture}.{key}"), default=0)

    layers = head.gguf.integers(f"{head.architecture}.target_layers")
    if head.architecture == "gemma4-assistant":
        is_kin = target.architecture == "gemma4"
        return "" if is_kin else f"it is for Gemma 4, not for architecture {target.architecture}"
    if not layers or (head.architecture == "eagle3" and len(layers) != 3):
        return "damaged: it does not say which layers it reads"
    width = number("target_hidden_size") if head.architecture == "eagle3" else head.n_embd
    if width != target.n_embd:
        return f"it reads hidden states of {width} numbers, and this model has {target.n_embd}"
    n_trunk = target.n_layer - target.n_mtp
    if not 0 <= min(layers) <= max(layers) <= n_trunk:
        return f"it reads layer {max(layers)}, and this model has {n_trunk}"
    if head.n_vocab < target.n_vocab:
        return f"it knows {head.n_vocab} tokens, and this model has {target.n_vocab}"
    if target.architecture not in _GIVE_LAYERS:
        return f"llama.cpp gives no hidden states of single layers of architecture {target.architecture}"
    return ""
