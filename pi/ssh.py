"""One ssh connection to a board, shared by all commands."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from edgespec.errors import EdgespecError, UsageError
from edgespec.platform.ssh import FAILED, explain, is_host, remote_command
from pi.needs import program

_PORTS = range(1, 1 << 16)
_PATIENCE = ("ConnectTimeout=10", "ServerAliveInterval=15", "ServerAliveCountMax=4")
# These override the user's configuration.
_PLAIN = ("BatchMode=yes", "RequestTTY=no", "RemoteCommand=none", "ClearAllForwardings=yes")
_SHARED = ("ControlMaster=auto", "ControlPersist=60")  # seconds: ends by itself if nobody is there to end it


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
        if not is_host(host):
            raise UsageError(f"{host!r}: not user@host, such as pi@raspberrypi.local; a port goes to --port")
        if port is not None and port not in _PORTS:
            raise UsageError(f"--port {port}: not a number from 1 to {_PORTS[-1]}")
        if identity is not None and not identity.is_file():
            raise UsageError(f"--identity {identity}: no such file")
        self.host = host
        self._port = [] if port is None else ["-p", str(port)]
        self._options = [f"-o{option}" for option in (*_PLAIN, *options, *_PATIENCE)] + self._port
        self._options += [] if identity is None else ["-i", str(identity)]

    def __enter__(self) -> Self:
        program("ssh", "openssh-client")
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
        return ["ssh", *self._options, "--", self.host, remote_command(script, *arguments)]

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
        return explain(self.host, said, self._port)
