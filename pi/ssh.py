"""One ssh connection to a board, shared by all commands, and explanations of ssh's failures.

Text from a user is never part of a script: scripts take it as arguments, quoted for the shell.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from edgespec.errors import EdgespecError, UsageError

FAILED = 255
"""Exit code of ssh's own failures; all others come from the remote command."""

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_IPV6 = r"[0-9A-Fa-f]*:[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*(?:%\w+)?"
_HOST = re.compile(rf"(?:{_NAME}@)?(?:{_NAME}|{_IPV6})")
_PORTS = range(1, 1 << 16)
_PATIENCE = ("ConnectTimeout=10", "ServerAliveInterval=15", "ServerAliveCountMax=4")
# These override the user's configuration.
_PLAIN = ("BatchMode=yes", "RequestTTY=no", "RemoteCommand=none", "ClearAllForwardings=yes")
_SHARED = ("ControlMaster=auto", "ControlPersist=60")  # seconds: ends by itself if nobody is there to end it

_ADVICE = (
    (
        "IDENTIFICATION HAS CHANGED",
        "this is not the key that was known; if the board was set up anew: ssh-keygen -R {known}",
    ),
    ("Host key verification failed", "connect once by hand to look at its key and accept it: {ssh}"),
    ("Permission denied", "let this machine's key in, as no passwords are asked for: {copy_id}"),
    ("Could not resolve hostname", "check the name, or give the board's address"),
    ("Connection refused", "switch ssh on there: sudo raspi-config, Interface Options"),
    ("timed out|No route to host|unreachable", "check that the board is on and in this network"),
    (
        "closed|reset|[Bb]roken pipe|disconnect",
        "the connection was lost, and leaves nothing half: run it again",
    ),
)


class Connection:
    """A connection to `host`, made by its first command and closed at the end of a `with`.

    `identity` and `options` are ssh's -i and -o; what ~/.ssh/config says holds too. Raises UsageError for
    an invalid host name, port or file.
    """

    def __init__(
        self,
        host: str,
        *,
        port: int | None = None,
        identity: Path | None = None,
        options: Sequence[str] = (),
    ) -> None:
        if not _HOST.fullmatch(host):  # one that begins with "-" would be an option of ssh
            raise UsageError(f"{host!r}: not user@host, such as pi@raspberrypi.local; a port goes to --port")
        if port is not None and port not in _PORTS:
            raise UsageError(f"--port {port}: not a number from 1 to {_PORTS[-1]}")
        if identity is not None and not identity.is_file():
            raise UsageError(f"--identity {identity}: no such file")
        self.host = host
        self._port = [] if port is None else ["-p", str(port)]
        self._options = [f"-o{option}" for option in (*_PLAIN, *options, *_PATIENCE)] + self._port
        self._options += [] if identity is None else ["-i", str(identity)]
        self._known = host.rpartition("@")[2] if port in {None, 22} else f"[{host.rpartition('@')[2]}]:{port}"

    def __enter__(self) -> Self:
        if not shutil.which("ssh"):
            raise EdgespecError("no ssh on this machine; apt install openssh-client")
        self._folder = tempfile.TemporaryDirectory(prefix="edgespec-")
        self._socket = Path(self._folder.name, "socket")
        self._options += [f"-o{option}" for option in (*_SHARED, f"ControlPath={self._socket}")]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._socket.exists():
            command = ["ssh", *self._options, "-O", "exit", "--", self.host]
            subprocess.run(command, capture_output=True, check=False)
        self._folder.cleanup()

    def command(self, script: str, *arguments: str) -> list[str]:
        """Return the command that runs a shell script on the board with these arguments."""
        remote = shlex.join(["sh", "-c", script, "sh", *arguments])
        return ["ssh", *self._options, "--", self.host, remote]

    def ask(self, script: str, *arguments: str) -> str:
        """Return what a script prints on the board; EdgespecError if it cannot be asked."""
        # To a file: the process that keeps the connection may hold stderr open, so a pipe would never end.
        said = Path(self._folder.name, "stderr")
        with said.open("wb") as stream:
            process = subprocess.run(
                self.command(script, *arguments),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stream,
                check=False,
            )
        if process.returncode == FAILED:
            raise EdgespecError(self.explain(said.read_text(errors="replace")))
        return process.stdout.decode(errors="replace")

    def explain(self, said: str) -> str:
        """Return the line for a failure of ssh's own, which it explained on stderr with `said`."""
        lines = [line.strip() for line in said.splitlines() if line.strip()] or ["ssh failed without a word"]
        hints = {
            "ssh": shlex.join(["ssh", *self._port, self.host]),
            "copy_id": shlex.join(["ssh-copy-id", *self._port, self.host]),
            "known": shlex.quote(self._known),
        }
        advice = next((advice for sign, advice in _ADVICE if re.search(sign, said)), "try by hand: {ssh}")
        return f"{self.host}: {lines[-1].removeprefix('ssh: ')}; {advice.format(**hints)}"
