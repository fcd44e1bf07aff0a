"""Writes a model that says exactly what a small one says, and costs what a larger one costs.

    .venv/bin/python bench/larger_target.py qwen2.5-coder-1.5b-q4_k_m 128 /tmp/7b-by-cost.gguf

Layers are copied behind the last one, with zeros as what they add to the residual stream (`attn_output` and
`ffn_down`): the stream passes unchanged, while every byte is read and every product is made. So speculation
on a large target is measured with the real acceptance of a small one. It is a stand-in for cost alone: a
real 7B writes better text, and its draft may be accepted more or less often.

A Whisper model has two stacks of layers; 27 and 31 make a small of whisper-base:

    .venv/bin/python bench/larger_target.py whisper-base 27,31 /tmp/small-by-cost.gguf
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np

from edgespec.models.resolve import resolve

ADDED_TO_STREAM = ("attn_output.weight", "attn_output.bias", "ffn_down.weight", "ffn_down.bias")
"""Tensors of a layer whose product is added to the residual stream."""

WHISPER_ADDED = ("attn.out.weight", "attn.out.bias", "cross_attn.out.weight", "cross_attn.out.bias")
"""The same in Whisper, with those of the layer's last product."""


class Stack(NamedTuple):
    """Layers one behind the other."""

    key: str
    """The key that says how many."""
    prefix: str
    """The beginning of their tensors' names, before the layer's number."""
    added: tuple[str, ...]


def stacks_of(architecture: str) -> list[Stack]:
    """Return the stacks of an architecture: one, but for Whisper's encoder and decoder."""
    if architecture != "whisper":
        return [Stack(f"{architecture}.block_count", "blk.", ADDED_TO_STREAM)]
    added = (*WHISPER_ADDED, "mlp.2.weight", "mlp.2.bias")
    return [Stack(f"whisper.{part}.block_count", f"{part}.blocks.", added) for part in ("encoder", "decoder")]


def write_larger(source: Path, n_layer: int | Sequence[int], path: Path) -> Path:
    """Write `source` with `n_layer` layers in all, or so many in each stack, to `path`, and return `path`.

    Raises ValueError if it has as many already.
    """
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    stacks = stacks_of(architecture)
    wanted = [n_layer] if isinstance(n_layer, int) else list(n_layer)
    if len(wanted) != len(stacks):
        raise ValueError(f"{source}: has {len(stacks)} stacks of layers; ask for so many numbers")
    counts = {stack.key: n for stack, n in zip(stacks, wanted, strict=True)}
    tensors = {tensor.name: (tensor, False) for tensor in reader.tensors}
    for stack in stacks:
        n_source, n = int(reader.fields[stack.key].contents()), counts[stack.key]
        if n <= n_source:
            raise ValueError(f"{source}: has {n_source} layers; ask for more than these")
        start = f"{stack.prefix}{n_source - 1}."
        parts = [
            tensor.name.removeprefix(start) for tensor in reader.tensors if tensor.name.startswith(start)
        ]
        for i in range(n_source, n):
            for part in parts:
                copied = tensors[f"{stack.prefix}{i % n_source}.{part}"][0]
                tensors[f"{stack.prefix}{i}.{part}"] = copied, part in stack.added
    writer = gguf.GGUFWriter(path, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = counts.get(field.name, field.contents())
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, field.types[0], sub_type=sub_type)
    for name, (tensor, _) in tensors.items():
        data = tensor.data
        writer.add_tensor_info(name, data.shape, data.dtype, data.nbytes, tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, is_zero in tensors.values():
        writer.write_tensor_data(np.zeros_like(tensor.data) if is_zero else tensor.data)
    writer.close()
    return path


def main() -> None:
    """Write the model that the command line asks for."""
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("source", help="path or name of the small model")
    parse.add_argument("n_layer", help="layers in all: 128 make a 7B of the default target; two for Whisper")
    parse.add_argument("path", type=Path, help="the file to write")
    args = parse.parse_args()
    try:
        write_larger(resolve(args.source), [int(n) for n in args.n_layer.split(",")], args.path)
    except ValueError as error:
        parse.error(str(error))
    print(f"{args.path}: {args.path.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
