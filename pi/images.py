"""libmtmd, llama.cpp's encoders of images, compiled beside the installed llama.cpp: `python -m pi.images`.

`make run` does not wait for them. The wheels of `make wheels` have them already.
"""

from __future__ import annotations

import shutil
import sys
from importlib.metadata import distribution
from pathlib import Path

from edgespec.cli.console import message
from edgespec.errors import EdgespecError
from edgespec.platform.files import write_atomically
from pi import BUILD, ROOT, needs, recipe
from pi.console import main, run

_LIBRARY = "llama_cpp/lib/libmtmd.so"


def build() -> None:
    """Compile the library of the installed llama-cpp-python and put it where `llama_cpp.mtmd_cpp` looks.

    Its name is added to that package's list of files, so that pip removes both together. Raises EdgespecError
    if there is no compiler, another version than the pinned one is installed, or it fails.
    """
    package = distribution("llama-cpp-python")
    listed = {str(file): file for file in package.files or ()}
    if _LIBRARY in listed and listed[_LIBRARY].hash:
        message("the installed wheel of llama-cpp-python has the encoders of images")
        return
    if package.version != recipe.llama_version():
        raise EdgespecError(
            f"llama-cpp-python {package.version} is installed, to which they cannot be linked: make run, or "
            "make wheels again where it came from"
        )
    needs.program("c++", "g++")
    made, folder = BUILD / "images", Path(str(package.locate_file(_LIBRARY))).parent
    given = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_PROJECT_llama_cpp_INCLUDE": ROOT / "images.cmake",
        "EDGESPEC_LIBRARIES": folder,
    }
    tools = Path(sys.executable).parent
    run(
        "configuring llama.cpp's encoders of images",
        [
            *(tools / "cmake", "-S", recipe.llama_source(), "-B", made, "-G", "Ninja"),
            *(
                f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}",
                *(f"-D{name}={value}" for name, value in given.items()),
            ),
        ],
        BUILD / "images-configured.log",
    )
    run(
        "compiling llama.cpp's encoders of images, once: some minutes",
        [tools / "cmake", "--build", made, "--target", "mtmd"],
        BUILD / "images.log",
    )
    (library,) = made.rglob("libmtmd.so")
    new = folder / "libmtmd.so.new"  # a process may have the old one mapped
    shutil.copyfile(library, new)
    new.replace(folder / "libmtmd.so")
    if _LIBRARY not in listed:
        record = Path(str(package.locate_file(next(name for name in listed if name.endswith("/RECORD")))))
        write_atomically(record, f"{record.read_text().rstrip()}\n{_LIBRARY},,\n")


def _main() -> int:
    build()
    return 0


if __name__ == "__main__":
    sys.exit(main(_main))
