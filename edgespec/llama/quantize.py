"""Write a model file in another quantization.

llama.cpp does it in a child process, because it cannot be interrupted there and may crash on a damaged file.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.backend import last_log_error, llama, whole_log
from edgespec.platform.processes import ReportingChild, answer, send

Importance = Mapping[str, npt.NDArray[np.float32]]
"""Name of a matrix -> a number for each column; for matrices of experts those of one expert after another."""

QUANT_TYPES: dict[str, int] = {
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 8,
    "q5_1": 9,
    "q8_0": 7,
    "q2_k": 10,
    "q3_k_s": 11,
    "q3_k_m": 12,
    "q3_k_l": 13,
    "q4_k_s": 14,
    "q4_k_m": 15,
    "q5_k_s": 16,
    "q5_k_m": 17,
    "q6_k": 18,
    "q2_k_s": 21,
    "iq4_nl": 25,
    "iq4_xs": 30,
    "iq3_m": 27,
    "iq3_s": 26,
    "iq3_xs": 22,
    "iq3_xxs": 23,
    "iq2_m": 29,
    "iq2_s": 28,
    "iq2_xs": 20,
    "iq2_xxs": 19,
    "iq1_m": 31,
    "iq1_s": 24,
    "tq2_0": 37,
    "tq1_0": 36,
    "q2_0": 41,
    "q1_0": 40,
    "f16": 1,
    "bf16": 32,
    "f32": 0,
}
"""Quantization types that `quantize` makes: lower-case name -> `enum llama_ftype`."""

ASK_IMPORTANCE = frozenset(name for name in QUANT_TYPES if name.startswith(("iq1", "iq2", "iq3", "q2_k_s")))
"""Types worth little without the importance of each column; most of them llama.cpp refuses to make."""


def quantize(
    src: Path,
    dst: Path,
    type_name: str,
    *,
    pure: bool = False,
    n_threads: int = 0,
    importance: Importance | None = None,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> None:
    """Write `src` converted to `type_name` as `dst`; already quantized tensors are requantized.

    `pure` gives every tensor the same type instead of llama.cpp's mixture. `n_threads` 0 means all
    processors. `importance`: of the columns of each matrix. `on_progress` takes the number of
    the next tensor and the total; an exception from it ends the work. `dst` appears complete or not at all,
    even on Ctrl-C; an older file is replaced.
    Raises UsageError for an unknown type, for `src == dst`, and if a type needs an importance and there is
    none; EdgespecError when the library fails.
    """
    if type_name not in QUANT_TYPES:
        raise UsageError(f"unknown quantization type {type_name!r}; known: {', '.join(QUANT_TYPES)}")
    if importance is None and type_name in ASK_IMPORTANCE and not type_name.startswith("iq3"):
        problem = (
            "asks for the importance of columns; `edgespec quantize` measures it, and writes such a file"
        )
        raise UsageError(f"{type_name} {problem}")
    if dst.exists() and src.samefile(dst):
        raise UsageError(f"{src}: the quantized file needs another name than its source")
    try:
        handle, name = tempfile.mkstemp(dir=dst.parent, prefix=f"{dst.name}.part.")
    except OSError as error:
        raise EdgespecError(f"cannot write to {dst.parent}: {error.strerror}") from error
    os.close(handle)
    part = Path(name)
    columns = part.with_name(f"{part.name}.npz")
    try:
        if importance:
            np.savez(columns, **dict(importance))  # type: ignore[arg-type] # names, not its option
        conversion = _Conversion(
            os.fsencode(src.absolute()),
            os.fsencode(part.absolute()),
            QUANT_TYPES[type_name],
            pure,
            n_threads,
            str(columns.absolute()) if importance else "",
        )
        failure = _quantize_in_child(conversion, part, on_progress)
        if failure is not None:
            raise EdgespecError(f"cannot quantize {src} to {type_name}: {failure}")
        part.chmod(0o644)  # mkstemp's 0600 is for secrets; a model is shared like its source
        part.replace(dst)
    finally:
        part.unlink(missing_ok=True)
        columns.unlink(missing_ok=True)


class _Conversion(msgspec.Struct, frozen=True):
    """The request to the child process of `quantize`."""

    src: bytes
    part: bytes
    ftype: int
    pure: bool
    n_threads: int
    importance: str
    """Path of an .npz file, or ""."""


def _quantize_in_child(
    conversion: _Conversion, part: Path, on_progress: Callable[[int, int], None]
) -> str | None:
    """Run the conversion; None on success, else the reason in one line."""
    child = ReportingChild("edgespec.llama.quantize", "_quantize_here", conversion)
    for _, (done, total) in child:
        on_progress(done, total)
    if child.ended.code == 0:
        return None
    if shutil.disk_usage(part.parent).free < 1 << 20:
        return f"no space left on the disk of {part.parent}"
    return child.ended.complaint or f"the converter ended with code {child.ended.code}"


def _quantize_here() -> int:
    """In the child: convert and return the exit code; the reason of a failure goes to stderr."""
    return answer(_Conversion, _convert)


def _convert(conversion: _Conversion) -> None:
    def tell(piece: str) -> None:
        if tensor := re.match(r"\[ *(\d+)/ *(\d+)\]", piece):
            send("tensor", (int(tensor[1]), int(tensor[2])))

    params = llama.llama_model_quantize_default_params()
    params.ftype = conversion.ftype
    params.pure = conversion.pure
    params.nthread = conversion.n_threads
    params.allow_requantize = True
    matrices = _matrices(conversion.importance)
    columns = (llama.llama_model_imatrix_data * (len(matrices) + 1))()  # ends with an empty one
    for entry, (name, numbers) in zip(columns, matrices.items(), strict=False):
        entry.name, entry.size = name.encode(), numbers.size
        entry.data = numbers.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    if matrices:
        params.imatrix = columns
    with whole_log(tell):
        code = llama.llama_model_quantize(conversion.src, conversion.part, ctypes.byref(params))
    if code:
        raise EdgespecError(last_log_error() or "llama.cpp gives no reason")


def _matrices(path: str) -> dict[str, npt.NDArray[np.float32]]:
    """Return the importance in an .npz file; {} for no file."""
    if not path:
        return {}
    with np.load(path) as stored:
        return {name: np.ascontiguousarray(stored[name], np.float32) for name in stored.files}
