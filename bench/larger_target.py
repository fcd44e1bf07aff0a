"""Writes a model that says exactly what a small one says, and costs what a larger one costs.

    .venv/bin/python bench/larger_target.py qwen2.5-coder-1.5b-q4_k_m 128 /tmp/7b-by-cost.gguf

Layers are copied behind the last one, with zeros as what they add to the residual stream (`attn_output` and
`ffn_down`): the stream passes unchanged, while every byte is read and every product is made. So speculation
on a large target is measured with the real acceptance of a small one. It is a stand-in for cost alone: a
real 7B writes better text, and its draft may be accepted more or less often.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np

from edgespec.models.resolve import resolve

ADDED_TO_STREAM = ("attn_output.weight", "attn_output.bias", "ffn_down.weight", "ffn_down.bias")
"""Tensors of a layer whose product is added to the residual stream."""


def write_larger(source: Path, n_layer: int, path: Path) -> Path:
    """Write `source` with `n_layer` layers in all to `path`, and return `path`.

    Raises ValueError if it has as many already.
    """
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    block_count = f"{architecture}.block_count"
    n_source = int(reader.fields[block_count].contents())
    if n_layer <= n_source:
        raise ValueError(f"{source}: has {n_source} layers; ask for more than these")
    writer = gguf.GGUFWriter(path, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = n_layer if field.name == block_count else field.contents()
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, field.types[0], sub_type=sub_type)
    sources = {tensor.name: tensor for tensor in reader.tensors}
    layer = [name.split(".", 2)[2] for name in sources if name.startswith(f"blk.{n_source - 1}.")]
    copies = {
        f"blk.{i}.{part}": (sources[f"blk.{i % n_source}.{part}"], part in ADDED_TO_STREAM)
        for i in range(n_source, n_layer)
        for part in layer
    }
    tensors = {name: (tensor, False) for name, tensor in sources.items()} | copies
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
    parse.add_argument("n_layer", type=int, help="layers in all: 128 make a 7B of the default target")
    parse.add_argument("path", type=Path, help="the file to write")
    args = parse.parse_args()
    try:
        write_larger(resolve(args.source), args.n_layer, args.path)
    except ValueError as error:
        parse.error(str(error))
    print(f"{args.path}: {args.path.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
