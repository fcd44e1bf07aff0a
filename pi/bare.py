"""The wheels of dist/ where no compiler is: `python -m pi.bare x86_64 aarch64`, which is `make wheels-test`.

`make pi-test` is the same for ARM alone, where qemu's processors are those of the Raspberry Pi 4 and 5.

    this machine's kind   Debian roots by mmdebstrap, entered by chroot without a network
    another kind          the same suites' packages unpacked (root.py); qemu is another processor in each

In each place, one for each Python of Debian's suites, with nothing but Python and what pip installs:

    bare      no compiler, no Python.h, no OpenMP
    install   pip takes edgespec from dist/, offline
    kernels   the self-test passes, the right variant of llama.cpp's CPU backend is there
    run       SmolLM2-135M, greedy: plainly, drafted from its own words, on llama.cpp's kernels; and by
              llama-cpp-python without edgespec
    C tests   under qemu alone: cross-compiled, and the Python tests of kernels and core (emulated_tests.py)

The output of each command is in build/pi/bare-PLACE-STEP.log.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.cli.console import message
from edgespec.errors import EdgespecError, UsageError
from edgespec.models.store import Store
from edgespec.platform.files import write_atomically
from pi import BUILD, emulated_tests, needs, root
from pi.console import Parser, environment, json_of, main, out, run
from pi.dependencies import download, folder_name
from pi.needs import MACHINES, QEMU

_EMULATED = {"bookworm": "cortex-a72", "trixie": "cortex-a76", "forky": "max,pauth-impdef=on"}
"""qemu's -cpu in each suite; the last has all features, its signed pointers as cheap as they can be."""
_VARIANTS = {"cortex-a72": "armv8.0_1", "cortex-a76": "armv8.2_2", "max,pauth-impdef=on": "armv8.6_2"}
"""The variant of the CPU backend that each of them takes."""

_PLAINEST = "bookworm"
"""Where tests run whose code is the same on every processor."""

_COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "cmake", "make", "ld")
_MODEL = "smollm2-135m-q4_1"
_PROMPT = "one two three four five one two three four five one two"
_N_TOKENS = 8

_SELF_TEST = emulated_tests.PATIENT + "from edgespec.llama import kernels; print(kernels.load().reason)"
# A program that knows nothing of edgespec.
_ALONE = (
    "import sys, llama_cpp\nllama_cpp.Llama(sys.argv[1], n_ctx=64, verbose=False)('one two', max_tokens=2)"
)


@dataclass(frozen=True, slots=True)
class Place:
    """A root with the Python of one of Debian's suites."""

    machine: str
    suite: str

    @property
    def python(self) -> str:
        """Version of its Python: "3.13"."""
        return root.SUITES[self.suite]

    @property
    def name(self) -> str:
        """Name in messages and of files."""
        return f"{self.machine}-{self.suite}"

    @property
    def emulated(self) -> bool:
        """Whether its programs run under qemu."""
        return self.machine != platform.machine()

    @property
    def tree(self) -> Path:
        """Its file tree, made on first use."""
        return root.ensure_root(self.suite) if self.emulated else root.debian(self.suite, self.machine)

    @property
    def home(self) -> Path:
        """Folder for what this test makes, as this machine sees it; inside the root it is `/edgespec`."""
        return BUILD / f"bare-{self.name}" if self.emulated else self.tree / "edgespec"

    def inside(self, path: Path) -> Path:
        """Return what a path below `home` is called by its programs."""
        return path if self.emulated else Path("/", path.relative_to(self.tree))

    def log(self, step: str) -> Path:
        """Return where a step's output goes."""
        return BUILD / f"bare-{self.name}-{step}.log"

    def run(self, step: str, *command: str | Path) -> str:
        """Run a program of the venv in `home` and return its output. Raises EdgespecError if it fails."""
        program = [self.inside(self.home / "venv" / "bin" / command[0]), *command[1:]]
        self.run_outside(step, *program)
        return self.log(step).read_text(encoding="utf-8", errors="replace")

    def run_outside(self, step: str, *command: str | Path) -> None:
        """Run a program that `command` names as the place sees it. Raises EdgespecError if it fails."""
        home = self.inside(self.home)
        settings = {
            "EDGESPEC_MODELS_DIR": str(home / "models"),
            "XDG_CACHE_HOME": str(home / "cache"),
            "HOME": str(home),
            "OMP_WAIT_POLICY": "passive",  # waiting threads would take processor time from other programs
        }
        if not self.emulated:
            settings["CHROOT"] = shutil.which("chroot", path=f"{os.defpath}:/usr/sbin:/sbin") or "chroot"
            # Mounts and network are this process's own: nothing is left behind, nothing can be downloaded.
            enter = 'mount -t proc proc "$0/proc" && cd "$0" && PATH=/usr/bin:/bin exec "$CHROOT" "$0" "$@"'
            command = ("unshare", "--mount", "--net", "sh", "-c", enter, self.tree, *command)
        run(f"{self.name}: {step}", command, self.log(step), env=environment(**settings), cwd=self.home)


# ---- the steps: each returns what it found, in one line, or raises EdgespecError ----


def _bare(place: Place) -> str:
    names = {f"bin/{name}" for name in _COMPILERS} | {"include/Python.h"}
    found = [str(path) for path in place.tree.glob("usr/*/*") if f"{path.parent.name}/{path.name}" in names]
    found += map(str, place.tree.glob(f"usr/include/python{place.python}/Python.h"))
    found += map(str, place.tree.glob("usr/lib/*/libgomp.so.1"))
    if found:
        raise EdgespecError(f"not bare: {', '.join(found)}")
    return "no compiler, no Python.h, no libgomp"


def _install(place: Place) -> str:
    own = needs.wheels_of(place.machine)
    kept = BUILD / folder_name(place.machine, place.python)
    tools = emulated_tests.tools() if place.emulated else []
    # pip takes requirements in the place of files.
    others = download([*own, *map(Path, tools)], place.machine, place.python, kept)
    shutil.rmtree(place.home, ignore_errors=True)
    for folder, files in (("dist", own), ("wheels", others), ("models", _model())):
        (place.home / folder).mkdir(parents=True)
        for file in files:
            _link(file, place.home / folder / file.name)
    without = ["--without-pip"] if place.emulated else []
    place.run_outside("venv", _python(place), "-m", "venv", *without, place.inside(place.home / "venv"))
    links = [f"--find-links={place.inside(place.home / folder)}" for folder in ("dist", "wheels")]
    options = ["--isolated", "--disable-pip-version-check", "install", "--no-index", "--no-compile"]
    start = time.monotonic()
    place.run("install", "python", *_pip(place), *options, *links, "edgespec", *tools)
    return f"{len(own)} wheels of dist, {len(others)} others in {time.monotonic() - start:.0f} s"


def _kernels(place: Place) -> str:
    place.run("self-test", "python", "-c", _SELF_TEST)
    report = json_of(place.run("doctor", "edgespec", "doctor", "--json", _MODEL))
    found, variant = report["kernels"], report["libraries"]["cpu_backend"]
    reason = found["reason"]
    if reason and "AVX2" not in reason:
        raise EdgespecError(reason)
    wanted = _VARIANTS[_EMULATED[place.suite]] if place.emulated else variant
    if not variant or variant != wanted:
        raise EdgespecError(f"llama.cpp's CPU backend {variant} is in use, not {wanted}")
    return f"{found['in_use']} kernels, llama.cpp's {variant}"


def _run(place: Place) -> str:
    options = ["--raw", "--no-cache", "--json", "-n", str(_N_TOKENS), "--temp", "0", "--target", _MODEL]
    ways = {
        "plain": ["--drafter", "none"],
        "drafted": ["--drafter", "suffix"],
        "stock": ["--drafter", "none", "--kernels", "off"],
    }
    start = time.monotonic()
    texts = {
        name: json_of(place.run(name, "edgespec", "run", *options, *way, _PROMPT))["token_ids"]
        for name, way in ways.items()
    }
    if len(texts["stock"]) != _N_TOKENS or texts["drafted"] != texts["plain"]:
        raise EdgespecError(f"{texts}: not the same {_N_TOKENS} tokens")
    alone = place.inside(place.home / "models" / f"{_MODEL}.gguf")
    place.run("llama-cpp-python alone", "python", "-c", _ALONE, alone)
    same = "the same" if texts["stock"] == texts["plain"] else "another text"
    return f"three texts in {time.monotonic() - start:.0f} s; drafted as plain, on llama.cpp's kernels {same}"


def _c_tests(place: Place) -> str:
    if not place.emulated:
        return "left to make test"
    plainest = place.suite == _PLAINEST
    # The tree has no OpenMP, as a board has none; the cross compiler's libraries have.
    qemu = [*_qemu(place)[:-1], f"/usr/{needs.triple(place.machine)}"]
    return emulated_tests.c_tests(place.name, place.machine, qemu, plainest=plainest)


def _python_tests(place: Place) -> str:
    if not place.emulated:
        return "left to make test"
    command = emulated_tests.pytest_command(place.home / "suite", plainest=place.suite == _PLAINEST)
    return place.run("tests", "python", *command).splitlines()[-1]


# ---- what they need ----


def _model() -> list[Path]:
    """Return the files of the model, pulled on first use."""
    command = (sys.executable, "-m", "edgespec", "models", "pull", _MODEL)
    run(f"pulling {_MODEL}", command, BUILD / "pull.log")
    return [Store.default().root / f"{_MODEL}{ending}" for ending in (".gguf", ".json")]


def _link(file: Path, to: Path) -> None:
    try:
        os.link(file, to)
    except OSError:  # on another disk
        shutil.copy2(file, to)


def _python(place: Place) -> Path:
    """Return the place's Python, as its programs call it; under qemu a script.

    It is beside Python itself, so that it finds its library; a venv's `python` is a link to it.
    """
    name = f"python{place.python}"
    if not place.emulated:
        return Path("/usr/bin", name)
    script = place.tree / "usr" / "bin" / "python-bare"
    qemu = shlex.join(_qemu(place))
    program = shlex.quote(f"{place.tree}/usr/bin/{name}")
    write_atomically(script, f'#!/bin/sh\nexec {qemu} -0 "$0" {program} "$@"\n')
    script.chmod(0o755)
    return script


def _qemu(place: Place) -> list[str]:
    return [QEMU, "-cpu", _EMULATED[place.suite], "-L", str(place.tree)]


def _pip(place: Place) -> list[str | Path]:
    """Return how pip is called. Under qemu it is run from its wheel, which ensurepip cannot copy there."""
    if not place.emulated:
        return ["-m", "pip"]
    (wheel,) = place.tree.glob("usr/share/python-wheels/pip-*.whl")
    return [wheel / "pip"]


# ---- all of them ----

_STEPS: dict[str, Callable[[Place], str]] = {
    "bare": _bare,
    "install": _install,
    "kernels": _kernels,
    "run": _run,
    "C tests": _c_tests,
    "tests": _python_tests,
}


def try_wheels(machines: Sequence[str], suites: Sequence[str] = ()) -> int:
    """Run all steps in each place, print what they found, and return the exit code.

    Raises UsageError for an unknown name and EdgespecError for wheels or programs that are not here.
    """
    for name in suites:
        if name not in root.SUITES:
            raise UsageError(f"{name}: choose from {', '.join(root.SUITES)}")
    needs.wheels_test(machines)
    places = [Place(machine, suite) for machine in machines for suite in suites or root.SUITES]
    passed = [_all_steps(place) for place in places]  # the others too where one fails
    return 0 if all(passed) else EdgespecError.exit_code


def _all_steps(place: Place) -> bool:
    for name, step in _STEPS.items():
        start = time.monotonic()
        try:
            passed, found = True, step(place)
        except EdgespecError as error:
            passed, found = False, str(error)
            message(found)
        took = time.monotonic() - start
        verdict = "ok" if passed else "FAILED"
        out.print(f"{place.name:16} {place.python} {name:8} {verdict:7} {took:4.0f} s  {found}", markup=False)
        if not passed:
            return False
    return True


def _main() -> int:
    parser = Parser(
        prog="python -m pi.bare",
        description="Install the wheels of dist/ where no compiler is, and write texts there.",
        epilog="Example: python -m pi.bare x86_64 --suite bookworm",
    )
    parser.add_argument("machines", nargs="+", metavar="MACHINE", help=", ".join(MACHINES))
    parser.add_argument(
        "--suite", action="append", default=[], help=f"one of {', '.join(root.SUITES)}; default: all"
    )
    args = parser.parse_args()
    return try_wheels(args.machines, args.suite)


if __name__ == "__main__":
    sys.exit(main(_main))
