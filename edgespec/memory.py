"""Will the models fit? Answered from their headers before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgespec.errors import EdgespecError
from edgespec.gguf_header import GGUFHeader

# Measured over Qwen2.5-Coder 1.5B and 0.5B, SmolLM2 and Gemma 3 270M: what a loaded model holds beside
# weights, cache and compute buffers (tokenizer tables, graph) for each token of its vocabulary, and the
# process itself.
_BYTES_PER_VOCAB = 400
_PROCESS_BYTES = 64 << 20


def required_bytes(header: GGUFHeader, n_ctx: int, n_batch: int = 512, n_logits_max: int = 64) -> int:
    """Return an estimate of the memory a loaded model with one session of `n_ctx` tokens holds.

    Weights, the F16 cache, and an allowance for the compute buffers, in which the attention scores
    (heads x batch x context) and the logits rows dominate.
    """
    n_batch = min(n_batch, n_ctx)
    floats = n_batch * ((header.n_head + 1) * n_ctx + header.n_ff + 2 * header.n_embd)
    floats += n_logits_max * header.n_vocab
    return header.file_bytes + header.kv_bytes(n_ctx) + 4 * floats + _BYTES_PER_VOCAB * header.n_vocab


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the memory a new process can still take, or None where the kernel does not say.

    The lower of MemAvailable and what each cgroup (v2) above this process leaves; `root` holds
    `proc` and `sys`, so that tests can bring their own.
    """
    limits = [limit for limit in (_mem_available(root), *_cgroup_limits(root)) if limit is not None]
    return min(limits, default=None)


def _mem_available(root: Path) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _cgroup_limits(root: Path) -> list[int]:
    """Return what is left under each memory limit from this process's cgroup up to the root."""
    mount = root / "sys/fs/cgroup"
    own = [line[3:] for line in _lines(root / "proc/self/cgroup") if line.startswith("0::")]
    group = mount / (own[0].strip("/") if own else "")
    limits = []
    for directory in (group, *group.parents):
        if not directory.is_relative_to(mount):
            break
        limit, used = _lines(directory / "memory.max"), _lines(directory / "memory.current")
        if limit and used and limit[0] != "max":
            # Cached file pages count as used, but are dropped when memory is asked for.
            stat = dict(line.split() for line in _lines(directory / "memory.stat"))
            cached = int(stat.get("active_file", 0)) + int(stat.get("inactive_file", 0))
            limits.append(max(0, int(limit[0]) - int(used[0]) + cached))
    return limits


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def fits_in_memory(
    models: Sequence[tuple[GGUFHeader, int]], root: Path = Path("/"), *, weights_loaded: bool = False
) -> None:
    """Raise EdgespecError, with the figures, when `models` (header, n_ctx) cannot fit together.

    With `weights_loaded`, only what their contexts will take is counted.
    """
    available = available_bytes(root)
    needs = [
        required_bytes(header, n_ctx) - (header.file_bytes if weights_loaded else 0)
        for header, n_ctx in models
    ]
    required = _PROCESS_BYTES + sum(needs)
    if available is None or required <= available:
        return
    shares = ", ".join(
        f"{header.path.name} {_gib(need)}, of it {_gib(header.kv_bytes(n_ctx))} for {n_ctx} tokens of context"
        for (header, n_ctx), need in zip(models, needs, strict=True)
    )
    raise EdgespecError(
        f"not enough memory: about {_gib(required)} needed ({shares}), {_gib(available)} available; "
        "choose a smaller quantization or --ctx, or close other programs"
    )


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / (1 << 30):.2f} GiB"
