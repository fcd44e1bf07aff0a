"""ssh to a machine with nodes: a question about it, and a tunnel to a node's port.

    here                                                   there
    127.0.0.1:LOCAL  ->  ssh -L  ~~ network ~~  sshd  ->  127.0.0.1:PORT
         stdin (a pipe)  ->  ssh  ~~~~~~~~~~~~  sshd  ->  a shell, which reads a byte every 5 s

The pipe keeps the tunnel open: when this process ends, by `kill -9` too, the system closes the pipe, and the
shell there ends its sshd, and so the tunnel. (A signal at the parent's death would come when the thread that
started ssh ends.) It does so too when no byte has come for 20 s, because the network is gone or this machine
sleeps: sshd itself would keep the tunnel for hours, and the node its client. A word that the shell prints
says that the tunnel is open.
"""

from __future__ import annotations

import os
import selectors
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from contextlib import suppress

from edgespec.errors import EdgespecError
from edgespec.platform.closing import Closing
from edgespec.platform.ssh import FAILED, explain, remote_command

LOOPBACK = "127.0.0.1"

# What the user's configuration says otherwise holds no more. ServerAlive: a network that is gone ends ssh
# within 15 s.
_OPTIONS = (
    *("BatchMode=yes", "RequestTTY=no", "RemoteCommand=none", "PermitLocalCommand=no"),
    *("ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3"),
)
# A connection that is shared with other programs would live on without this one.
_OWN = ("ControlMaster=no", "ControlPath=none", "ExitOnForwardFailure=yes", "GatewayPorts=no")

_ASK = r"""
for program in edgespec ~/.local/bin/edgespec ~/edgespec/venv/bin/edgespec; do
    command -v "$program" >/dev/null 2>&1 && exec "$program" node --describe --json
done
exit 127
"""
_MISSING, _USAGE = 127, 2
_OPEN = b"open\n"
# The sshd of this session is the next above; between them may be the user's shell. An old busybox knows no
# such `timeout`.
_HOLD = r"""
echo open
timeout 9 true 2>/dev/null || exec cat >/dev/null
above=$PPID
while [ "$(timeout "$1" head -c 1 2>/dev/null)" ]; do :; done
while [ "$above" -gt 1 ] && read -r name <"/proc/$above/comm"; do
    case $name in sshd*|dropbear*) kill "$above"; exit ;; esac
    above=$(sed -n 's/^PPid:[^0-9]*//p' "/proc/$above/status")
done
"""
_BEAT_S, _SILENT_S = 5.0, 20

ASK_S = 120.0
"""Seconds that an answer may take: a first look at a slow board tests the kernels."""
_OPEN_S = 30.0
_END_S = 2.0


class NodeQuery(Closing):
    """`edgespec node --describe --json` on the machine `host`, under way from the start."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._process = _start(
            *("-o", "ClearAllForwardings=yes", "--", host, remote_command(_ASK)),
            stdin=subprocess.DEVNULL,
            stdout=self._said.fileno(),
            stderr=self._complaints.fileno(),
        )

    def answer(self, within_s: float) -> bytes:
        """Return the JSON. Raises EdgespecError if ssh fails or edgespec is not there."""
        try:
            code = self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise EdgespecError(
                f"{self._host}: no answer within {within_s:g} s; try by hand: "
                f"ssh {self._host} edgespec node --describe"
            ) from None
        self._complaints.seek(0)
        complaint = self._complaints.read().decode(errors="replace")
        if code == FAILED:
            raise EdgespecError(explain(self._host, complaint))
        if code == _MISSING:
            raise EdgespecError(
                f"{self._host}: no edgespec there, neither on its PATH nor in ~/.local/bin nor in "
                "~/edgespec/venv/bin; install it there, on a board by `make deploy`"
            )
        if code == _USAGE:
            raise EdgespecError(
                f"{self._host}: the edgespec there knows no nodes; install this version there"
            )
        if code:
            reason = (complaint.strip().splitlines() or [f"exit code {code}"])[-1]
            raise EdgespecError(f"{self._host}: {reason.removeprefix('edgespec: error: ')}")
        self._said.seek(0)
        return self._said.read()

    def close(self) -> None:
        """End ssh, if it still runs."""
        _end(self._process)
        self._said.close()
        self._complaints.close()


class Tunnel(Closing):
    """A way from `local_port` of this machine to 127.0.0.1:`port` of the machine `host`.

    It is being opened from the start; `wait` until it is open. ssh ends when this process does.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.local_port = _unused_port()
        self._closed = threading.Event()
        self._beats = threading.Thread(target=self._beat, daemon=True)
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        forward = f"{LOOPBACK}:{self.local_port}:{LOOPBACK}:{port}"
        self._process = _start(
            *(part for option in _OWN for part in ("-o", option)),
            *("-L", forward, "--", host, remote_command(_HOLD, str(_SILENT_S))),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints.fileno(),
        )

    def wait(self) -> None:
        """Return when the tunnel is open. Raises EdgespecError if it cannot be opened."""
        assert self._process.stdout is not None  # noqa: S101 - for the type checker: it is a pipe
        deadline, said = time.monotonic() + _OPEN_S, b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            # A shell there may print something of its own before.
            while not said.endswith(_OPEN):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise EdgespecError(f"{self.host}: ssh has opened no tunnel within {_OPEN_S:g} s")
                part = self._process.stdout.read1(1 << 12)  # type: ignore[attr-defined]  # a BufferedReader
                if not part:
                    self._process.wait()
                    raise EdgespecError(self._reason())
                said = (said + part)[-len(_OPEN) :]
        self._beats.start()

    def _beat(self) -> None:
        """Tell the shell there that this machine is awake, until the tunnel is closed or ssh has ended."""
        assert self._process.stdin is not None  # noqa: S101 - for the type checker: it is a pipe
        with suppress(OSError):
            while not self._closed.wait(_BEAT_S):
                os.write(self._process.stdin.fileno(), b".")

    @property
    def ended(self) -> str:
        """Why ssh has ended by itself, as a line; "" while the tunnel is open, and after `close`."""
        return self._reason() if not self._closed.is_set() and self._process.poll() is not None else ""

    def _reason(self) -> str:
        code = self._process.returncode
        if code < 0:
            return f"{self.host}: ssh was ended by signal {-code}; begin again"
        self._complaints.seek(0)
        return explain(self.host, self._complaints.read().decode(errors="replace"))

    def close(self) -> None:
        """Close the tunnel and end ssh."""
        self._closed.set()
        if self._beats.is_alive():
            self._beats.join()
        _end(self._process)
        self._complaints.close()


def _start(*arguments: str, stdin: int, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
    if not (ssh := shutil.which("ssh")):
        raise EdgespecError("no ssh on this machine; apt install openssh-client")
    options = [part for option in _OPTIONS for part in ("-o", option)]
    return subprocess.Popen(
        [ssh, *options, *arguments],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        # Ctrl-C goes to the terminal's whole process group: ssh would end before its user does.
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.stdin:
        process.stdin.close()
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout:
        process.stdout.close()


def _unused_port() -> int:
    """Return a port that nobody listens on; if another program takes it meanwhile, ssh says so and ends."""
    with socket.create_server((LOOPBACK, 0)) as taken:
        port: int = taken.getsockname()[1]
        return port
