"""Loads libmtmd, llama.cpp's encoders of images, which `make images` builds."""

from __future__ import annotations

from functools import cache
from types import ModuleType

from edgespec.errors import EdgespecError
from edgespec.llama.backend import bindings, library_folder, take_log

_FILE = "libmtmd.so"


def is_built() -> bool:
    """Whether the library lies beside llama.cpp's own."""
    return (library_folder() / _FILE).exists()


@cache
def load() -> ModuleType:
    """Return `llama_cpp.mtmd_cpp`, whose log is llama.cpp's (backend.py).

    Raises EdgespecError if its library is not built, or cannot be loaded.
    """
    if not is_built():
        raise EdgespecError(f"llama.cpp's encoders of images ({_FILE}) are not built; run `make images`")
    try:
        module = bindings("llama_cpp.mtmd_cpp")
    except (OSError, RuntimeError, AttributeError) as error:
        problem = f"{library_folder() / _FILE}: cannot be loaded: {error}; run `make images` again"
        raise EdgespecError(problem) from error
    take_log(module.mtmd_log_set)
    take_log(module.mtmd_helper_log_set)
    return module
