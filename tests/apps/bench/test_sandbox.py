"""The sandbox: programs that really try to get out of it."""

from __future__ import annotations

import os
import platform
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.apps.bench import sandbox as room
from edgespec.apps.bench.sandbox import SandboxResult, run_sandboxed
from edgespec.apps.bench.sandbox_child import MACHINES, filter_program, has_landlock
from edgespec.errors import EdgespecError

PASSED = SandboxResult(True, "")

needs_sandbox = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in MACHINES,
    reason="programs are run on Linux, on x86-64 and aarch64 only",
)
pytestmark = needs_sandbox

DENIED = """
import errno
try:
    {attempt}
except OSError as error:
    assert error.errno in (errno.EPERM, errno.EACCES), error
else:
    raise AssertionError("it was let through")
"""


FLOOD = """
import os
for fd in range(3, 20):
    try:
        while True:
            os.write(fd, bytes(4096))
    except OSError:
        pass
"""


def denied(attempt: str) -> SandboxResult:
    """Passed only if the statement raises PermissionError in the sandbox."""
    return run_sandboxed(DENIED.format(attempt=attempt))


def test_a_correct_program() -> None:
    program = "def add(a, b):\n    return a + b\nassert add(2, 3) == 5\nprint('fine')\n"
    assert run_sandboxed(program) == PASSED
    assert run_sandboxed("") == PASSED
    assert run_sandboxed("# Ä€ \U0001f600\nassert len('Ä€\U0001f600') == 3") == PASSED
    assert run_sandboxed("assert '\ud800' == '?'") == PASSED  # no text at all: as well as can be
    assert run_sandboxed("x = '''" + "x" * 300_000 + "'''\nassert len(x) == 300_000") == PASSED


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("assert 1 == 2", "AssertionError"),
        ("assert 1 == 2, 'one is\\nnot two'", "AssertionError: one is not two"),
        ("raise ValueError('\\x1b[31mred')", "ValueError: [31mred"),
        ("def f(:\n  pass", "SyntaxError: invalid syntax (<program>, line 1)"),
        ("f = lambda n: f(n + 1)\nf(0)", "RecursionError: maximum recursion depth exceeded"),
        ("input()", "EOFError: EOF when reading a line"),
        ("import numpy", "ModuleNotFoundError: No module named 'numpy'"),
        ("import edgespec", "ModuleNotFoundError: No module named 'edgespec'"),
        ("class E(Exception):\n  def __str__(self): raise self\nraise E", "an exception without a text"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ],
)
def test_why_it_failed(program: str, reason: str) -> None:
    assert run_sandboxed(program) == SandboxResult(False, reason)


def test_a_long_reason_is_cut() -> None:
    outcome = run_sandboxed("raise ValueError('x' * 10_000_000)")
    assert outcome.reason.startswith("ValueError: xxx")
    assert len(outcome.reason) == 300


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "raise SystemExit",
        "exit = __import__('sys').exit; exit()",
        "import os; os._exit(0)",
        "import ctypes; ctypes.CDLL(None)._exit(0)",
        "import ctypes; ctypes.CDLL(None).exit(0)",
        "import atexit, sys; atexit.register(print); sys.exit()",
    ],
)
def test_leaving_early_does_not_pass(program: str) -> None:
    tests = "\nassert False, 'never reached'"
    assert run_sandboxed(program + tests) == SandboxResult(False, "it left before its end")


@pytest.mark.parametrize(
    "program",
    [
        "import builtins; builtins.AssertionError = type('A', (), {})",
        "AssertionError = None",
        "import sys; sys.excepthook = lambda *_: None",
        "import builtins; builtins.exec = builtins.compile = builtins.open = print",
        "import os; os.write = os._exit = os.read = lambda *_: 0",
        "import sys; sys.modules.clear()",
        "import sys; sys.stdout = sys.stderr = None",
        "import os; os.close(1); os.close(2)",
        "__debug__ if True else 0",
        "import sys; sys.flags",
    ],
)
def test_tricks_with_the_interpreter(program: str) -> None:
    assert not run_sandboxed(program + "\nassert 1 == 2").passed
    assert run_sandboxed(program + "\nassert 1 == 1") == PASSED


def test_an_answer_that_is_forged_by_chance() -> None:
    """Words on the channel of the answer are none without the secret."""
    program = """
import os
for fd in range(3, 20):
    try:
        os.write(fd, b"ended " + bytes(16))
    except OSError:
        pass
"""
    assert run_sandboxed(program + "os._exit(0)") == SandboxResult(False, "it left before its end")
    assert not run_sandboxed(program).passed


def test_what_stands_under_main_is_not_run() -> None:
    assert run_sandboxed("if __name__ == '__main__':\n    raise ValueError") == PASSED
    assert run_sandboxed("import sys; assert sys.modules[__name__].__dict__ is globals()") == PASSED


def test_the_standard_library() -> None:
    names = (
        "math, re, collections, itertools, heapq, hashlib, datetime, typing, string, random, functools, "
        "bisect, copy, operator, statistics, fractions, decimal, dataclasses, enum, abc, json, time, io, os, "
        "sys, calendar, textwrap, unicodedata, secrets, struct, array, cmath, zlib, queue, inspect, unittest"
    )
    uses = """
assert hashlib.md5(b"a").hexdigest() == "0cc175b9c0f1b6a831c399e269772661"
assert datetime.datetime.now().year > 2000
assert 0 <= random.random() < 1
assert secrets.randbelow(1) == 0
time.sleep(0.001)
@dataclasses.dataclass
class Point:
    x: int
assert Point(1) == Point(1)
"""
    assert run_sandboxed(f"import {names}{uses}") == PASSED


@pytest.mark.parametrize(
    "attempt",
    [
        "import socket; socket.socket()",
        "import socket; socket.socket(socket.AF_UNIX)",
        "import socket; socket.socketpair()",
        "import os; os.fork()",
        "import os; os.execv('/bin/true', ['true'])",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import subprocess; subprocess.run(['/bin/true'])",
        "import os; os.pipe()",
        "import os; os.memfd_create('x')",
        "import os; os.nice(1)",
        "import os; os.chdir('/')",
        "import os; os.setsid()",
        "import os; os.setuid(0)",
        "import os; os.sched_setaffinity(0, {0})",
        "import os; os.mkfifo('x')",
        "import os; os.mkdir('x')",
        "import os; os.symlink('/', 'x')",
        "import os; os.truncate('/dev/null', 0)",
        "import os; os.utime('.')",
        "import os; os.chmod('.', 0)",
        "import fcntl, os; fcntl.fcntl(1, fcntl.F_SETOWN, os.getppid())",
        "import fcntl; fcntl.ioctl(0, 0x5412, b'x')",  # TIOCSTI
        "import signal; signal.pidfd_send_signal(1, 0)",
        "import signal, threading; signal.pthread_kill(threading.get_ident(), 0)",
        "import os; os.pidfd_open(os.getppid())",
        "open('/dev/null', 'w')",
        "open('x', 'w')",
        "open('x', 'a')",
        "open('x', 'x')",
        "import os; os.open('.', os.O_TMPFILE | os.O_RDWR)",
        "import os; os.open('/dev/null', os.O_RDONLY | os.O_CREAT)",
        "import os; os.open('/dev/null', os.O_RDONLY | os.O_TRUNC)",
    ],
)
def test_denied(attempt: str) -> None:
    assert denied(attempt) == PASSED


def test_limits_cannot_be_raised() -> None:
    program = """
import resource
for which in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE):
    try:
        resource.setrlimit(which, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except (OSError, ValueError):
        continue
    raise AssertionError(which)
assert resource.getrlimit(resource.RLIMIT_FSIZE) == (0, 0)
"""
    assert run_sandboxed(program) == PASSED


@pytest.mark.parametrize(
    ("x86_64", "aarch64", "arguments"),
    [
        (41, 198, "2, 1, 0"),  # socket
        (56, 220, "17, 0, 0, 0, 0"),  # clone
        (57, 220, "17, 0, 0, 0, 0"),  # fork
        (435, 435, "None, 0"),  # clone3
        (62, 129, "os.getppid(), 0"),  # kill
        (234, 131, "os.getpid(), os.getpid(), 0"),  # tgkill
        (129, 138, "os.getppid(), 0, None"),  # rt_sigqueueinfo
        (101, 117, "16, os.getppid(), 0, 0"),  # ptrace
        (310, 270, "os.getppid(), None, 0, None, 0, 0"),  # process_vm_readv
        (437, 437, "-100, b'/dev/null', b'\\0' * 24, 24"),  # openat2
        (425, 425, "1, b'\\0' * 120"),  # io_uring_setup
        (157, 167, "4, 1, 0, 0, 0"),  # prctl
        (321, 280, "0, None, 0"),  # bpf
        (302, 261, "os.getppid(), 7, 0, None"),  # prlimit64, of another process
    ],
)
def test_system_calls_of_its_own(x86_64: int, aarch64: int, arguments: str) -> None:
    number = x86_64 if platform.machine() == "x86_64" else aarch64
    program = f"""
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
result = libc.syscall(ctypes.c_long({number}), {arguments})
assert result == -1 and ctypes.get_errno() == errno.EPERM, (result, ctypes.get_errno())
"""
    assert run_sandboxed(program) == PASSED


def test_calls_of_another_set_of_numbers_kill() -> None:
    if platform.machine() != "x86_64":
        pytest.skip("x32 is of x86-64")
    program = "import ctypes; ctypes.CDLL(None).syscall(ctypes.c_long(0x40000000 | 39))"
    assert run_sandboxed(program) == SandboxResult(False, "signal 31 ended it (Bad system call)")


def test_threads() -> None:
    program = """
import threading
try:
    threading.Thread(target=print).start()
except RuntimeError:
    pass
else:
    raise AssertionError("a thread began")
"""
    assert run_sandboxed(program) == PASSED


def test_files_of_others_stay(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("kept")
    kept.chmod(0o666)
    tmp_path.chmod(0o777)
    for attempt in (
        f"open({str(kept)!r}, 'w').write('x')",
        f"open({str(kept)!r}, 'r+').write('x')",
        f"import os; os.unlink({str(kept)!r})",
        f"import os; os.rename({str(kept)!r}, {str(tmp_path / 'other')!r})",
        f"import os; os.link({str(kept)!r}, {str(tmp_path / 'other')!r})",
        f"import shutil; shutil.copyfile({__file__!r}, {str(tmp_path / 'other')!r})",
        f"import os; os.rmdir({str(tmp_path)!r})",
        f"import os; os.truncate({str(kept)!r}, 0)",
    ):
        assert denied(attempt) == PASSED, attempt
    assert kept.read_text() == "kept"
    assert list(tmp_path.iterdir()) == [kept]


def test_files_of_others_are_not_read(tmp_path: Path) -> None:
    if not has_landlock():
        pytest.skip("this kernel has no Landlock: files can be read")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    for path in (str(secret), "/etc/passwd", f"/proc/{os.getpid()}/environ", "/proc/self/mem"):
        assert denied(f"open({path!r}, 'rb').read(10)") == PASSED, path
    assert denied(f"import os; os.listdir({str(tmp_path)!r})") == PASSED
    assert denied("import os; os.listdir('/')") == PASSED


def test_no_connection_comes_in() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        port = server.getsockname()[1]
        assert denied(f"import socket; socket.create_connection(('127.0.0.1', {port}))") == PASSED
        with pytest.raises(TimeoutError):
            server.accept()


def test_signals_to_this_process() -> None:
    got: list[int] = []
    previous = signal.signal(signal.SIGUSR1, lambda number, _: got.append(number))
    try:
        for attempt in (
            "import os, signal; os.kill(os.getppid(), signal.SIGUSR1)",
            "import os; os.killpg(0, 0)",
            "import os; os.kill(-1, 0)",  # of signal 0 nobody would notice
        ):
            assert denied(attempt) == PASSED
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert not got


def test_its_environment_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "1234")
    # Python itself sets its locale's name.
    assert run_sandboxed("import os; assert set(os.environ) <= {'LC_CTYPE'}, os.environ") == PASSED
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    assert run_sandboxed("import sys; assert '/nowhere' not in sys.path") == PASSED


def test_its_directory_is_empty_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(Path(__file__).parent)
    assert run_sandboxed("import os; assert os.listdir() == [], os.listdir()") == PASSED
    assert run_sandboxed(f"import os; assert os.getcwd().startswith({str(tmp_path)!r})") == PASSED
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "while True:\n  try:\n    while True: pass\n  except BaseException: pass",
        "import time; time.sleep(1000)",
        "import signal\nfor n in (2, 10, 14, 15, 24): signal.signal(n, lambda *_: None)\nwhile True: pass",
        FLOOD,
        "10 ** 10 ** 10",
    ],
)
def test_what_does_not_end_is_ended(program: str) -> None:
    outcome = run_sandboxed(program, timeout_s=1.0)
    assert outcome == SandboxResult(False, "it took longer than 1 s")


def test_the_limit_of_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where this process is too late to end the program."""
    monkeypatch.setattr(room.math, "ceil", lambda _: 0)
    assert run_sandboxed("while True: pass", timeout_s=60) == SandboxResult(
        False, "signal 9 ended it (Killed)"
    )


def test_memory() -> None:
    assert run_sandboxed("x = bytearray(1 << 40)") == SandboxResult(False, "MemoryError")
    hoard = "x = []\nwhile True: x.append(bytearray(1 << 20))"
    assert run_sandboxed(hoard, memory_bytes=200 << 20) == SandboxResult(False, "MemoryError")
    assert run_sandboxed("x = bytearray(100 << 20)", memory_bytes=80 << 20) == SandboxResult(
        False, "MemoryError"
    )
    assert run_sandboxed("x = bytearray(100 << 20)", memory_bytes=400 << 20) == PASSED


def test_a_flood_of_output_goes_nowhere() -> None:
    assert run_sandboxed("import sys\nfor _ in range(300): print('x' * 100_000)") == PASSED
    assert run_sandboxed("import os\nfor _ in range(300): os.write(2, b'x' * 100_000)") == PASSED


def test_a_crash() -> None:
    outcome = run_sandboxed("import ctypes; ctypes.string_at(0)")
    assert outcome == SandboxResult(False, "signal 11 ended it (Segmentation fault)")


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def sandboxes(parent: int) -> set[int]:
    """The sandboxed programs that a process runs now."""
    children = {
        int(child)
        for path in Path(f"/proc/{parent}/task").glob("*/children")
        for child in path.read_text().split()
    }
    return {child for child in children if b"sandbox_child.py" in Path(f"/proc/{child}/cmdline").read_bytes()}


def until(condition: Callable[[], object], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_ctrl_c_ends_the_program() -> None:
    def press() -> None:
        until(lambda: sandboxes(os.getpid()))
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        run_sandboxed("while True: pass", timeout_s=60)
    presser.join()
    until(lambda: not sandboxes(os.getpid()))  # one that was never told a program ends by itself


def test_it_ends_with_its_parent(child_environment: dict[str, str]) -> None:
    code = (
        "from edgespec.apps.bench.sandbox import run_sandboxed\n"
        "run_sandboxed('while True: pass', timeout_s=60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], env=child_environment)
    try:
        until(lambda: sandboxes(parent.pid))
        started = sandboxes(parent.pid)
    finally:
        parent.kill()
        parent.wait()
    until(lambda: not any(map(alive, started)))


def test_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.uname()
    fields = (*real[:4], "riscv64")
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(fields))
    with pytest.raises(EdgespecError, match=r"cannot be run safely on linux riscv64: .*nothing was run$"):
        run_sandboxed("")


def test_a_kernel_without_filters_is_refused(child_environment: dict[str, str]) -> None:
    """Under a filter that says of seccomp that there is no such call."""
    code = """
import errno, os, struct
from edgespec.errors import EdgespecError
from edgespec.apps.bench.sandbox import run_sandboxed
from edgespec.apps.bench.sandbox_child import MACHINES, install
machine = MACHINES[os.uname().machine]
load, compare = (0x20, 0, 0, 0), (0x15, 0, 1, machine.seccomp)
none, allow = (6, 0, 0, 0x50000 | errno.ENOSYS), (6, 0, 0, 0x7FFF0000)
install(machine, b"".join(struct.pack("<HBBI", *code) for code in (load, compare, none, allow)))
try:
    print(run_sandboxed("raise SystemExit('ran')"))
except EdgespecError as error:
    print("refused:", error)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], env=child_environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout.startswith("refused: programs cannot be run safely here: OSError: "), ran
    assert "Function not implemented; nothing was run" in ran.stdout


@pytest.mark.parametrize(
    ("python", "message"),
    [("/bin/false", "Python ended with code 1; nothing"), ("/bin/true", "Python ended with code 0; nothing")],
)
def test_a_python_that_does_not_start(monkeypatch: pytest.MonkeyPatch, python: str, message: str) -> None:
    monkeypatch.setattr(sys, "executable", python)
    with pytest.raises(EdgespecError, match=message):
        run_sandboxed("")
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(EdgespecError, match="Python does not know its own file"):
        run_sandboxed("")


# --- The filter itself, for every machine: on a BPF machine of our own. ---

ALLOW, DENY, KILL = 0x7FFF0000, 0x00050001, 0x80000000


def decide(machine: str, number: int, *arguments: int, arch: int | None = None) -> int:
    """What the machine's filter answers to a system call."""
    data = struct.pack(
        "<iIQ6Q",
        number,
        MACHINES[machine].arch if arch is None else arch,
        0,
        *(argument & (1 << 64) - 1 for argument in (*arguments, *[0] * (6 - len(arguments)))),
    )
    code = list(struct.iter_unpack("<HBBI", filter_program(MACHINES[machine])))
    at = word = 0
    while True:
        operation, then, otherwise, value = code[at]
        at += 1
        match operation:
            case 0x20:
                word = struct.unpack_from("<I", data, value)[0]
            case 0x54:
                word &= value
            case 0x15:
                at += then if word == value else otherwise
            case 0x35:
                at += then if word >= value else otherwise
            case 0x06:
                return int(value)
            case _:
                raise AssertionError(operation)


@pytest.mark.parametrize(
    ("machine", "read", "openat", "fcntl", "ioctl", "prlimit64"),
    [("x86_64", 0, 257, 72, 16, 302), ("aarch64", 63, 56, 25, 29, 261)],
)
def test_the_filter(machine: str, read: int, openat: int, fcntl: int, ioctl: int, prlimit64: int) -> None:
    assert decide(machine, read, 0, 0, 10) == ALLOW
    assert decide(machine, read, arch=0x40000003) == KILL  # i386
    assert decide(machine, read, arch=0x40000028) == KILL  # 32-bit Arm
    assert decide(machine, 0x40000000 | read) == KILL
    assert decide(machine, -1) == KILL
    cwd = -100
    assert decide(machine, openat, cwd, 1234, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY) == ALLOW
    writing = (os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC, os.O_APPEND, os.O_TMPFILE | os.O_RDWR)
    for flags in writing:
        assert decide(machine, openat, cwd, 1234, flags | os.O_CLOEXEC) == DENY
    assert decide(machine, fcntl, 1, 1030) == ALLOW
    assert decide(machine, fcntl, 1, 8) == DENY
    assert decide(machine, ioctl, 1, 0x5401) == ALLOW
    assert decide(machine, ioctl, 1, 0x5412) == DENY
    assert decide(machine, prlimit64, 0, 7, 0, 1234) == ALLOW
    for pid, new in ((77, 0), (0, 1), (0, 1 << 32)):
        assert decide(machine, prlimit64, pid, 7, new, 1234) == DENY


def test_the_filters_allow_the_same_on_every_machine() -> None:
    allowed = {
        machine: [number for number in range(600) if decide(machine, number) != DENY] for machine in MACHINES
    }
    # Those that aarch64 never had: open, stat, lstat, access, readlink, dup2, time, select, poll.
    assert len(allowed["x86_64"]) - len(allowed["aarch64"]) == 9
    for machine, denied_calls in (
        ("x86_64", (41, 42, 49, 56, 57, 58, 59, 62, 82, 83, 87, 101, 200, 234, 322, 424, 435, 437)),
        ("aarch64", (33, 34, 35, 36, 38, 117, 129, 130, 131, 198, 203, 220, 221, 276, 281, 424, 435, 437)),
    ):
        assert not set(denied_calls) & set(allowed[machine])
