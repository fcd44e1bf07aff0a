"""Work in processes of their own: what comes through, and how each end is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from edgespec.platform.processes import ChildExit, ReportingChild

MODULE = '''\
"""What the children of these tests do."""

import os, sys, time
from dataclasses import dataclass
from pathlib import Path

from edgespec.platform.processes import answer, send
from edgespec.errors import EdgespecError, UsageError


@dataclass
class Request:
    words: list[str]
    file: str = ""


def echo():
    return answer(Request, lambda request: [send("word", word) for word in request.words])


def refuse():
    def work(request):
        send("begun", len(request.words))
        raise UsageError("--words: these are naïve; choose others")
    return answer(Request, work)


def crash():
    def work(request):
        send("begun", 1)
        os.abort()
    return answer(Request, work)


def crash_in_mid_sentence():
    def work(request):
        send("begun", 1)
        os.write(sys.stdout.fileno(), b'["word", "half of')
        os.abort()
    return answer(Request, work)


def chatter():
    def work(request):
        os.write(1, b"a library says something\\n")
        send("begun", 1)
    return answer(Request, work)


def leave_at_once():
    return 7


def stumble():
    return answer(Request, lambda request: request.no_such_field)


def go_on():
    def work(request):
        Path(request.file).write_text(str(os.getpid()))
        while True:
            send("tick", None)
            time.sleep(0.01)
    return answer(Request, work)
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, child_environment: dict[str, str]) -> str:
    """The name of a module with the functions above, which children can import."""
    (tmp_path / "what_children_do.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", f"{child_environment['PYTHONPATH']}{os.pathsep}{tmp_path}")
    return "what_children_do"


def request(words: list[str], file: Path | None = None) -> dict[str, Any]:
    return {"words": words, "file": str(file or "")}


def wait_until_gone(pid: int) -> bool:
    for _ in range(6000):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def test_pairs_come_through_in_order(module: str) -> None:
    words = ["one", "", "zwölf", "日本語", "🦊\n\t\\ \"'", "\N{ZERO WIDTH JOINER}", "\0"]
    conversation = ReportingChild(module, "echo", request(words))
    assert list(conversation) == [("word", word) for word in words]
    assert conversation.ended == ChildExit(0, "")


@pytest.mark.parametrize("function", ["crash", "crash_in_mid_sentence"])
def test_what_was_said_before_a_crash_is_kept(module: str, function: str) -> None:
    conversation = ReportingChild(module, function, request([]))
    assert list(conversation) == [("begun", 1)]
    assert conversation.ended.code == -signal.SIGABRT


def test_what_a_library_prints_is_not_taken_for_what_was_said(module: str) -> None:
    conversation = ReportingChild(module, "chatter", request([]))
    assert list(conversation) == [("begun", 1)]
    assert conversation.ended == ChildExit(0, "a library says something")


def test_a_bug_is_told_by_its_last_line(module: str) -> None:
    conversation = ReportingChild(module, "stumble", request([]))
    assert list(conversation) == []
    assert conversation.ended.code == 1
    assert conversation.ended.complaint.startswith("AttributeError: 'Request' object has no attribute")


@pytest.mark.parametrize("n_bytes", [10, 1 << 22])
def test_a_child_that_does_not_listen(module: str, n_bytes: int) -> None:
    conversation = ReportingChild(module, "leave_at_once", request(["x" * n_bytes]))
    assert list(conversation) == []
    assert conversation.ended == ChildExit(7, "")


def test_an_exception_of_the_reader_ends_the_child(module: str, tmp_path: Path) -> None:
    file = tmp_path / "pid"

    def interrupted() -> None:
        for _ in ReportingChild(module, "go_on", request([], file)):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert wait_until_gone(int(file.read_text()))


def test_a_child_ends_with_its_parent(module: str, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    program = (
        "from edgespec.platform.processes import ReportingChild\n"
        f"for _ in ReportingChild({module!r}, 'go_on', {{'words': [], 'file': {str(file)!r}}}):\n"
        "    print('heard', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        assert parent.stdout.readline() == b"heard\n"
        pid = int(file.read_text())
        parent.kill()
        assert wait_until_gone(pid)


def test_a_child_whose_parent_ended_before_it_began_ends_too() -> None:
    """As if the parent had been killed while Python started."""
    program = "from edgespec.platform import processes; processes._die_with_parent({}); print('goes on')"
    for parent, code, said in ((os.getpid(), 0, b"goes on\n"), (os.getpid() + 1, -signal.SIGKILL, b"")):
        ended = subprocess.run(
            [sys.executable, "-c", program.format(parent)], stdout=subprocess.PIPE, check=False
        )
        assert (ended.returncode, ended.stdout) == (code, said)
