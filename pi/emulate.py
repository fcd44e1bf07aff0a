"""The boards' wheels under qemu's user emulation: `python -m pi.emulate`, which is `make pi-test`.

For each board, with its processor's instructions alone, so that any other ends the program:

    wheels      of dist/BOARD, installed offline by an arm64 Python of Debian's packages (pi/root.py)
    kernels     their self-test
    C tests     cross-compiled
    tests       the exactness, kernels', Whisper's and sampler's part of the Python tests (see _TESTS)
    run         SmolLM2-135M, drafted by itself requantized: greedy and sampled, against plain decoding
    guard       these wheels on a plainer board: refused in one line, and a crash without that line

The output of each command is in build/pi/BOARD-STEP.log.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from edgespec.errors import EdgespecError, UsageError
from edgespec.platform.cpu import BOARDS
from pi import BUILD, DIST, ROOT, needs
from pi.console import Parser, describe_exit, json_of, main, message, out, run, run_for_code
from pi.emulator import Emulator, install
from pi.manifest import check_wheels, read_manifest
from pi.needs import QEMU
from pi.root import ensure_root
from pi.wheels import TRIPLE

_TESTS: dict[str, str] = {
    "platform/test_boards.py": "commands_say_it",  # the guard's step does it with real wheels
    "llama/test_gguf_header.py": "flipped_bits",  # a minute of Python that is the same everywhere
    "llama/test_kernels.py": "",
    # Half a minute to two each: every architecture and every type once. The kernels alone, in
    # test_kernels.py, are compared for all types, all sizes of a batch and all numbers of threads.
    "llama/test_kernels_models.py": (
        "batch_or_the_threads and not (q4_k_m-llama or q4_0-qwen2 or q8_0-gemma3)"
    ),
    "decoding/test_lossless.py": "chi_square_catches or never_accepts_less",  # 10 s each, of tests and theory
    "llama/test_rpc.py": "connections_are_made_for or say_what_is_missing",  # headers are not in the wheels
    "llama/test_session.py": "",
    "drafting/test_suffix.py": "",
    "decoding/test_twins.py": "",
    "apps/speech/test_whisper_model.py": "",
    "llama/test_weights.py": "nothing_is_printed or left_open or failed_assertion",  # 10 s each: processes
}
"""The Python tests that run here, ten times slower than on a processor, and those that -k leaves out."""
_OF_A_PROCESSOR = (
    "platform/test_boards.py",
    "llama/test_kernels.py",
    "llama/test_kernels_models.py",
    "llama/test_session.py",
    "apps/speech/test_whisper_model.py",
)
"""Tests that run on every board. The others test the C core, whose code for ARM is the same for all boards:
it has already run on the plainest board, where any instruction that some board lacks ends the program.
"""

_MODEL = "smollm2-135m-q4_1"
_DRAFT_TYPE = "q4_0"
_PROMPT = "one two three four five one two three four five one two"
_N_TOKENS = 24
_EDGESPEC = (sys.executable, "-m", "edgespec")  # of this machine
_MOST_NAMED = 5  # failed tests in one line; the log has all

# The self-test has 20 s, enough on a board. In the emulator it is given more; its verdict is kept.
_PATIENT = "import sys, edgespec.llama.selftest; edgespec.llama.selftest.TIMEOUT_S = 600.0\n"
_SELF_TEST = _PATIENT + "from edgespec.llama import kernels; print(kernels.load(retest=True).reason)"
_PYTEST = _PATIENT + "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
_UNGUARDED = """\
import sys, edgespec.platform.cpu
edgespec.platform.cpu.wheel_for_another_board = lambda: ""
from edgespec.cli import main
sys.exit(main(sys.argv[1:]))
"""


# ---- the steps: each returns what it found, in one line, or raises EdgespecError ----


def _kernels(emulator: Emulator) -> str:
    _make_models()
    emulator.run("the kernels' self-test", "self-test", "python", "-c", _SELF_TEST)
    report = json_of(emulator.run("edgespec doctor", "doctor", "edgespec", "doctor", "--json", _MODEL))
    if reason := report["nodes"]["reason"]:
        raise EdgespecError(reason)
    found = report["kernels"]
    wanted = "neon-dotprod" if "asimddp" in emulator.board.hwcaps else "neon"
    if found["in_use"] != wanted:
        raise EdgespecError(f"{found['in_use']} kernels are in use, not {wanted}: {found['reason']}")
    return f"{found['in_use']}, self-test passed"


def _c_tests(emulator: Emulator) -> str:
    name, build = emulator.board.name, BUILD / f"tests-{emulator.board.name}"
    report = emulator.log("ctest").with_suffix(".xml")
    programs = Path(sys.executable).parent
    defines = {
        "CMAKE_MAKE_PROGRAM": programs / "ninja",
        "CMAKE_TOOLCHAIN_FILE": ROOT / "pi" / "toolchain.cmake",
        "CMAKE_CROSSCOMPILING_EMULATOR": ";".join(map(str, emulator.qemu())),
        "EDGESPEC_TESTS": "ON",
        "EDGESPEC_GGML_INCLUDE": Path(sysconfig.get_path("purelib"), "include"),
        "PI_TRIPLE": TRIPLE,
    }
    configure: list[str | Path] = [programs / "cmake", "-S", ROOT, "-B", build, "-G", "Ninja"]
    configure += [f"-D{key}={value}" for key, value in defines.items()]
    run(f"{name}: configuring the C tests", configure, emulator.log("cmake"))
    run(f"{name}: compiling the C tests", [programs / "cmake", "--build", build], emulator.log("compile"))
    command: list[str | Path] = [programs / "ctest", "--test-dir", build, "--output-on-failure"]
    command += ["--parallel", str(len(os.sched_getaffinity(0))), "--output-junit", report]
    if emulator.board is not BOARDS[0]:
        command += ["--tests-regex", "^kernels"]  # see _OF_A_PROCESSOR
    return _tested(emulator, "C tests", command, report)


def _python_tests(emulator: Emulator) -> str:
    # A copy, so that `import edgespec` finds what is installed and not the repository's sources.
    suite, report = BUILD / f"suite-{emulator.board.name}", emulator.log("pytest").with_suffix(".xml")
    shutil.rmtree(suite, ignore_errors=True)
    shutil.copytree(ROOT / "tests", suite / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(ROOT / "pyproject.toml", suite)
    plainest = emulator.board is BOARDS[0]
    tests = {name: words for name, words in _TESTS.items() if plainest or name in _OF_A_PROCESSOR}
    left_out = " or ".join(f"({words})" for words in tests.values() if words)
    options = ["-q", "-p", "no:cacheprovider", "--durations=15", f"--junit-xml={report}"]
    options += ["-m", "not pair and not slow", "-k", f"not ({left_out})" if left_out else ""]
    command: list[str | Path] = [emulator.venv / "bin" / "python", "-c", _PYTEST, *options]
    command += [f"tests/{name}" for name in tests]
    return _tested(emulator, "Python tests", command, report, suite)


def _tested(
    emulator: Emulator, what: str, command: Sequence[str | Path], report: Path, cwd: Path | None = None
) -> str:
    """Run tests and return how many passed, as their JUnit report has it; EdgespecError if any failed."""
    log = report.with_suffix(".log")
    report.unlink(missing_ok=True)
    code = run_for_code(f"{emulator.board.name}: {what}", command, log, env=emulator.environment(), cwd=cwd)
    if not report.exists():
        raise EdgespecError(f"{what}: did not run to their end ({describe_exit(code)}); see {log}")
    cases = list(ElementTree.parse(report).iter("testcase"))  # noqa: S314 - written by our own tests
    failed = [case.get("name") for case in cases if {"failure", "error"} & {part.tag for part in case}]
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - len(failed) - skipped
    found = f"{passed} passed, {len(failed)} failed, {skipped} skipped"
    if code or failed or not passed:
        raise EdgespecError(f"{found}: {', '.join(map(str, failed[:_MOST_NAMED]))}; see {log}")
    return found


def _run(emulator: Emulator) -> str:
    options = ["--raw", "--no-cache", "--json", "-n", str(_N_TOKENS), "--target", _MODEL]
    greedy, sampled = ["--temp", "0"], ["--temp", "0.8", "--seed", "1"]

    def generate(step: str, *more: str) -> dict[str, Any]:
        what = f"edgespec run, {step}"
        return json_of(
            emulator.run(what, step.replace(" ", "-"), "edgespec", "run", *options, *more, _PROMPT)
        )

    found = []
    for name, sampling in (("greedy", greedy), ("sampled", sampled)):
        plain = generate(f"{name} plain", *sampling, "--drafter", "none")
        drafted = generate(
            f"{name} drafted", *sampling, "--drafter", "model", "--draft", str(_draft()), "--gamma", "3"
        )
        stats = drafted["stats"]
        if drafted["token_ids"] != plain["token_ids"]:
            raise EdgespecError(f"{name}: {drafted['text']!r} drafted, {plain['text']!r} plain")
        if not stats["n_accepted"]:
            raise EdgespecError(f"{name}: {stats['n_drafted']} tokens drafted, none accepted")
        accepted = f"{stats['n_accepted']} of {stats['n_drafted']} drafted accepted"
        found.append(f"{name} {drafted['tokens']} tokens, {accepted}")
    return f"the same as plain with {drafted['kernels']} kernels: {'; '.join(found)}"


def _draft() -> Path:
    """Return where the target in another quantization is."""
    return BUILD / "models" / f"{_MODEL}-{_DRAFT_TYPE}.gguf"


def _make_models() -> None:
    """Pull the target and requantize it, on this machine."""
    run(f"pulling {_MODEL}", [*_EDGESPEC, "models", "pull", _MODEL], BUILD / "pull.log")
    if not _draft().exists():
        quantize = [*_EDGESPEC, "quantize", _MODEL, "--type", _DRAFT_TYPE, "-o", str(_draft().parent)]
        run(f"requantizing {_MODEL}", quantize, BUILD / "quantize.log")


def _guard(emulator: Emulator) -> str:
    """Run these wheels on boards that lack some of their instructions: refused, and without that a crash."""
    plainer = [board for board in BOARDS if not set(emulator.board.hwcaps) <= set(board.hwcaps)]
    for board in plainer:
        python = emulator.venv / "bin" / "python"
        qemu = [*emulator.qemu(board), "-0", python, emulator.root / "usr" / "bin" / "python3.11"]
        arguments = ["run", "--raw", "--no-cache", "--kernels", "off", "--drafter", "none", "-n", "2"]
        arguments += ["--temp", "0", "--target", _MODEL, _PROMPT]
        codes, logs = [], []
        for step, program in (("guarded", ["-m", "edgespec"]), ("unguarded", ["-c", _UNGUARDED])):
            what = f"{emulator.board.name}: its wheels on a {board.name}, {step}"
            logs.append(emulator.log(step))
            command = [*qemu, *program, *arguments]
            codes.append(run_for_code(what, command, logs[-1], env=emulator.environment(), cwd=emulator.venv))
        lines = logs[0].read_text(encoding="utf-8").splitlines()[1:]  # the first is the command
        if codes[0] != EdgespecError.exit_code or len(lines) != 1 or emulator.board.title not in lines[0]:
            raise EdgespecError(f"on a {board.name} these wheels are not refused in one line; see {logs[0]}")
        if codes[1] != -signal.SIGILL:
            raise EdgespecError(f"on a {board.name} these wheels run to exit code {codes[1]}; see {logs[1]}")
    names = ", ".join(board.title for board in plainer)
    return f"refused on the {names}; without that, SIGILL" if plainer else "runs on all boards"


# ---- all of them ----

_STEPS: dict[str, Callable[[Emulator], str]] = {
    "wheels": install,
    "kernels": _kernels,
    "C tests": _c_tests,
    "tests": _python_tests,
    "run": _run,
    "guard": _guard,
}
_SHARING = (install, _kernels)
"""Steps that download into folders shared by boards."""
_one_at_a_time = threading.Lock()


def emulate(names: Sequence[str]) -> int:
    """Run all steps for each of `names`, print what they found, and return the exit code.

    Raises UsageError for an unknown name and EdgespecError for wheels or programs that are not here.
    """
    for name in names:
        if name not in [board.name for board in BOARDS]:
            raise UsageError(f"--board {name}: choose from {', '.join(board.name for board in BOARDS)}")
    boards = [board for board in BOARDS if board.name in names or not names]
    for board in boards:  # before the first minutes are spent
        check_wheels(DIST / board.name, read_manifest(DIST / board.name))
    needs.program(QEMU, "qemu-user-static")
    root = ensure_root()
    # Tests press Ctrl-C, but a shell makes background programs and their children ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with ThreadPoolExecutor(len(boards)) as threads:
        of_boards = threads.map(_all_steps, [Emulator(board, root) for board in boards])
        results = [result for of_board in of_boards for result in of_board]
    for name, step, passed, found, seconds in results:
        out.print(
            f"{name:5} {step:8} {'ok' if passed else 'FAILED':7} {seconds:4.0f} s  {found}", markup=False
        )
    return 0 if all(passed for _, _, passed, _, _ in results) else EdgespecError.exit_code


def _all_steps(emulator: Emulator) -> list[tuple[str, str, bool, str, float]]:
    # A processor for each board: if boards shared processors, emulated threads would wait for each other.
    # The setting applies to this thread and the programs that it starts.
    usable = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {usable[BOARDS.index(emulator.board) % len(usable)]})
    results = []
    for name, step in _STEPS.items():
        start = time.monotonic()
        try:
            with _one_at_a_time if step in _SHARING else nullcontext():
                passed, found = True, step(emulator)
        except EdgespecError as error:
            passed, found = False, str(error)
            message(found)
        results.append((emulator.board.name, name, passed, found, time.monotonic() - start))
        if name == "wheels" and not passed:
            break  # nothing else can run
    return results


def _main() -> int:
    parser = Parser(
        prog="python -m pi.emulate",
        description="Test the wheels of dist/BOARD under qemu's user emulation.",
        epilog="Example: python -m pi.emulate --board pi4",
    )
    parser.add_argument(
        "--board", action="append", default=[], metavar="BOARD", help="pi4 or pi5; default: both"
    )
    return emulate(parser.parse_args().board)


if __name__ == "__main__":
    sys.exit(main(_main))
