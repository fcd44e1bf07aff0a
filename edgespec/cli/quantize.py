"""`edgespec quantize`: other quantizations of a model that is here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from edgespec.backend import QUANT_TYPES, quantize
from edgespec.cli.console import err, out
from edgespec.cli.progress import PullDisplay
from edgespec.errors import UsageError
from edgespec.gguf_header import read_header
from edgespec.models import nearest
from edgespec.pull import resolve
from edgespec.sources import check_disk, format_size

# Bits a weight of the whole file, about: for the disk check only.
_BITS = {
    "q4_0": 4.6, "q4_1": 5.1, "q5_0": 5.6, "q5_1": 6.1, "q8_0": 8.6,
    "q2_k": 3.3, "q3_k_s": 3.7, "q3_k_m": 4.1, "q3_k_l": 4.4,
    "q4_k_s": 4.7, "q4_k_m": 5.0, "q5_k_s": 5.6, "q5_k_m": 5.8, "q6_k": 6.6,
    "iq4_nl": 4.7, "iq4_xs": 4.5, "f16": 16.1, "bf16": 16.1, "f32": 32.1,
}  # fmt: skip
_COMMON_BITS = 4.6  # where the source's name does not say; errs towards asking for more room


def _parse_types(text: str) -> list[str]:
    types = list(dict.fromkeys(part.strip().lower() for part in text.split(",") if part.strip()))
    for name in types:
        if name not in QUANT_TYPES:
            hint = nearest(name, QUANT_TYPES) or f" (known: {', '.join(QUANT_TYPES)})"
            raise UsageError(f"--type: no quantization is called {name!r}{hint}")
    if not types:
        raise UsageError("--type: name at least one quantization, such as q4_0")
    return types


def _estimate(source: Path, type_name: str) -> int:
    """Return about how many bytes `source` will have as `type_name`, from the quantization in its name."""
    known = "|".join(sorted(_BITS, key=len, reverse=True))
    found = re.findall(rf"(?<![a-z0-9])({known})(?![a-z0-9])", source.stem.lower())
    return int(source.stat().st_size * _BITS[type_name] / (_BITS[found[-1]] if found else _COMMON_BITS))


def quantize_command(
    source: Annotated[str, typer.Argument(help="A GGUF file, a registry name, or hf:OWNER/REPO/FILE.gguf.")],
    *,
    type_: Annotated[
        str, typer.Option("--type", help="One or more of q4_0, q8_0, q4_k_m, ..., with commas.")
    ],
    pure: Annotated[bool, typer.Option("--pure", help="All tensors of the same type, no mixture.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Directory for the results; default: beside the source."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
    threads: Annotated[int, typer.Option("--threads", min=0, help="0: all processors.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of paths.")] = False,
) -> None:
    """Make other quantizations of a model: SOURCE-TYPE.gguf for each type, beside SOURCE.

    Example: edgespec quantize qwen2.5-coder-0.5b-q4_k_m --type q4_0,q8_0 --pure -o ~/models
    """
    types = _parse_types(type_)
    if output and output.exists() and not output.is_dir():
        raise UsageError(f"-o {output}: not a directory")
    with PullDisplay() as display:
        src = resolve(source, on_progress=display.on_progress, on_message=display.on_message)

    read_header(src)
    directory = output or src.parent
    targets = {name: directory / f"{src.stem}-{name}.gguf" for name in types}
    existing = [str(target) for target in targets.values() if target.exists()]
    if existing and not force:
        raise UsageError(f"{', '.join(existing)}: exists already; replace with --force, or choose another -o")
    check_disk(
        directory,
        sum(_estimate(src, name) for name in types),
        ", ".join(types),
        "free some, or choose another -o",
    )
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"-o {directory}: cannot be made: {error.strerror}") from error

    for name, target in targets.items():
        with err.status(f"quantizing {src.name} to {name}"):
            quantize(src, target, name, pure=pure, n_threads=threads)
        if not json:
            err.print(f"{name}: {format_size(target.stat().st_size)}")
            out.print(str(target), markup=False)
    if json:
        files = [{"type": name, "path": str(t), "size": t.stat().st_size} for name, t in targets.items()]
        out.print_json(data={"source": str(src), "pure": pure, "files": files})
