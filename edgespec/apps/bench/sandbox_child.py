"""The process that sandbox.py starts: locks itself in, then runs one program. Only the standard library.

It reads the limits, the program and a secret from stdin, and writes its answer to stdout:

    refused REASON     the protection could not be installed; nothing was run
    started            everything is locked ...
    failed REASON      ... and the program raised,
    ended SECRET       or ran to its end
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
import types
from collections.abc import Callable
from typing import NamedTuple

REQUEST = struct.Struct("<QQQ")
"""Header before the program: its size in bytes, most bytes of memory, most seconds of processor time."""

SECRET_SIZE = 16
"""Bytes of the secret, which follows the program."""

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_MOST_FILES = 64
_MOST_REASON = 300  # characters

# --- The allowed system calls. All others fail with EPERM. ---


class _Test(NamedTuple):
    """Lets a call through only if one half of an argument, masked, is one of `values`."""

    word: int
    """Twice the argument's number, plus 1 for its upper 32 bits."""
    mask: int
    values: tuple[int, ...]


_ALL = 0xFFFFFFFF
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_HARMLESS_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIO(N)CLEX
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC. Not F_SETOWN: it sends signals to others.
_HARMLESS_FCNTLS = (0, 1, 2, 3, 4, 1030)

_TESTS: dict[str, tuple[_Test, ...]] = {
    "open": (_Test(2, _WRITING, (0,)),),
    "openat": (_Test(4, _WRITING, (0,)),),
    "ioctl": (_Test(2, _ALL, _HARMLESS_IOCTLS),),
    "fcntl": (_Test(2, _ALL, _HARMLESS_FCNTLS),),
    # Only this process, and only reading its limits.
    "prlimit64": (_Test(0, _ALL, (0,)), _Test(4, _ALL, (0,)), _Test(5, _ALL, (0,))),
}

# fmt: off
_CALLS: dict[str, tuple[int | None, int | None]] = {  # name -> number on x86-64, on aarch64
    "read": (0, 63), "readv": (19, 65), "pread64": (17, 67), "lseek": (8, 62),
    "write": (1, 64), "writev": (20, 66),  # only to open files: none can be opened for writing
    "open": (2, None), "openat": (257, 56), "close": (3, 57),
    "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24),
    "stat": (4, None), "lstat": (6, None), "fstat": (5, 80), "newfstatat": (262, 79), "statx": (332, 291),
    "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439),
    "readlink": (89, None), "readlinkat": (267, 78), "getdents64": (217, 61), "getcwd": (79, 17),
    "ioctl": (16, 29), "fcntl": (72, 25),
    "mmap": (9, 222), "munmap": (11, 215), "mprotect": (10, 226), "mremap": (25, 216),
    "madvise": (28, 233), "brk": (12, 214),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136), "rt_sigsuspend": (130, 133), "rt_sigtimedwait": (128, 137),
    "sigaltstack": (131, 132), "restart_syscall": (219, 128),
    "futex": (202, 98), "exit": (60, 93), "exit_group": (231, 94),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115),
    "nanosleep": (35, 101), "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153),
    "select": (23, None), "pselect6": (270, 72), "poll": (7, None), "ppoll": (271, 73),
    "getrandom": (318, 278), "prlimit64": (302, 261), "getrlimit": (97, 163), "getrusage": (98, 165),
    "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178),
    "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "uname": (63, 160), "sysinfo": (99, 179), "getcpu": (309, 168),
    "sched_yield": (24, 124), "sched_getaffinity": (204, 123),
}
# fmt: on


class _Machine(NamedTuple):
    arch: int
    """AUDIT_ARCH_..., which the kernel passes with each call."""
    column: int
    """Column in _CALLS."""
    seccomp: int
    """Number of the system call seccomp."""


MACHINES = {"x86_64": _Machine(0xC000003E, 0, 317), "aarch64": _Machine(0xC00000B7, 1, 277)}
"""The supported machines, by their names in uname."""

# --- The filter: classic BPF over struct seccomp_data {int nr; u32 arch; u64 ip; u64 args[6]}. ---

_LOAD, _AND, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets
_X32 = 0x40000000  # set in the numbers of x86-64's second set of calls (x32)
_ALLOW, _DENY, _KILL = 0x7FFF0000, 0x00050000 | 1, 0x80000000  # _DENY: with errno EPERM


def filter_program(machine: _Machine) -> bytes:
    """Return the filter's instructions, 8 bytes each."""
    program = _code(_LOAD, _ARCH)
    program += _code(_JUMP_EQUAL, machine.arch, then=1) + _code(_RETURN, _KILL)
    program += _code(_LOAD, _NUMBER)
    program += _code(_JUMP_GREATER_EQUAL, _X32, otherwise=1) + _code(_RETURN, _KILL)
    for name, numbers in _CALLS.items():
        number = numbers[machine.column]
        if number is not None:
            body = b"".join(map(_check, _TESTS.get(name, ()))) + _code(_RETURN, _ALLOW)
            program += _code(_JUMP_EQUAL, number, otherwise=len(body) // 8) + body
    return program + _code(_RETURN, _DENY)


def _check(test: _Test) -> bytes:
    """Return code that denies the call unless the test holds; if it holds, the next instruction follows."""
    code = _code(_LOAD, _ARGUMENTS + 4 * test.word) + _code(_AND, test.mask)
    for left, value in zip(range(len(test.values), 0, -1), test.values, strict=True):
        code += _code(_JUMP_EQUAL, value, then=left)
    return code + _code(_RETURN, _DENY)


def _code(operation: int, value: int, *, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("<HBBI", operation, then, otherwise, value)


def install(machine: _Machine, program: bytes) -> None:
    """Install a filter in this process, for good. Raises OSError if the kernel has no filters."""
    instructions = ctypes.create_string_buffer(program, len(program))
    pointed = struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions))
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS")
    _syscall(machine.seccomp, 1, 0, pointed)  # SECCOMP_SET_MODE_FILTER


_libc = ctypes.CDLL(None, use_errno=True)


def _syscall(number: int, *arguments: int | bytes | None) -> int:
    # c_long fills the whole register: ctypes would pass an int as 32 bits.
    passed = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = int(_libc.syscall(ctypes.c_long(number), *passed))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


# --- Landlock: only Python's library and what it links to can be opened. ---

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on every machine
_EVERY_ACCESS = (1 << 13) - 1  # to files, in Landlock's first version
_READ_FILE, _READ_DIRECTORY = 1 << 2, 1 << 3
_READABLE = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"),
    *("/usr/share/zoneinfo", "/etc/localtime", "/dev/null", "/dev/urandom"),
)


def has_landlock() -> bool:
    """Return whether the kernel can restrict which files are opened (Linux 5.13, if switched on)."""
    try:
        return _syscall(_CREATE_RULESET, None, 0, 1) >= 1  # asks for the version
    except OSError:
        return False


def _restrict_files() -> None:
    rules = _syscall(_CREATE_RULESET, struct.pack("=Q", _EVERY_ACCESS), 8, 0)
    for path in (*sys.path, f"{sys.base_prefix}/lib", *_READABLE, "."):
        try:
            file = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        access = _READ_FILE | (_READ_DIRECTORY if os.path.isdir(path) else 0)  # noqa: PTH112 - no pathlib here
        _syscall(_ADD_RULE, rules, 1, struct.pack("=Qi", access, file), 0)
        os.close(file)
    _syscall(_RESTRICT_SELF, rules, 0)
    os.close(rules)


# --- The process. ---


def _limit(memory_bytes: int, cpu_s: int) -> None:
    for which, wanted in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, _MOST_FILES),
    ):
        most = resource.getrlimit(which)[1]
        limit = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(which, (limit, limit))


def _receive(n: int) -> bytes:
    data = b""
    while len(data) < n:
        part = os.read(0, n - len(data))  # not sys.stdin, whose buffer would hold the secret
        if not part:
            raise EOFError("the request is cut off")
        data += part
    return data


def _run(program: str) -> str:
    """Return in a line why the program failed; "" if it ran to its end."""
    # Not "__main__": as in HumanEval's own runner, code under `if __name__ == "__main__"` is not run.
    module = types.ModuleType("program")
    sys.modules["program"] = module
    try:
        exec(compile(program, "<program>", "exec", dont_inherit=True), module.__dict__)  # noqa: S102
    except SystemExit:
        return "it left before its end"
    except BaseException as error:  # noqa: BLE001 - a program may raise anything
        try:
            return f"{type(error).__name__}: {error}".removesuffix(": ")
        except BaseException:  # noqa: BLE001 - str() of its exception may raise too
            return "an exception without a text"
    return ""


def main() -> None:
    """Lock this process in, run the program and answer; does not return."""
    verdict, secret = os.dup(1), os.dup(0)
    # Bound now, because the program may replace them.
    leave, read, write = os._exit, os.read, os.write
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        size, memory_bytes, cpu_s = REQUEST.unpack(_receive(REQUEST.size))
        program = _receive(size).decode()
        null = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(null, standard)
        os.close(null)
        _limit(memory_bytes, cpu_s)
        machine = MACHINES[os.uname().machine]
        if has_landlock():
            _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            _restrict_files()
        install(machine, filter_program(machine))
    except BaseException as error:  # noqa: BLE001 - any failure is reported, and nothing is run
        write(verdict, f"refused {type(error).__name__}: {error}".encode())
        leave(1)
    write(verdict, b"started\n")
    _answer(_run(program), verdict, secret, read=read, write=write)
    leave(0)


def _answer(
    reason: str,
    verdict: int,
    secret: int,
    *,
    read: Callable[[int, int], bytes],
    write: Callable[[int, bytes], int],
) -> None:
    if reason:
        write(verdict, b"failed " + reason[:_MOST_REASON].encode("utf-8", "replace"))
    else:
        write(verdict, b"ended " + read(secret, SECRET_SIZE))


if __name__ == "__main__":
    main()
