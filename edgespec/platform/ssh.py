"""ssh: which names it takes for a machine, and what its failures mean for a user.

Text from a user is never part of a remote script: scripts take it as arguments, quoted for the shell.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

FAILED = 255
"""Exit code of ssh's own failures; all others come from the remote command."""

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_IPV6 = r"[0-9A-Fa-f]*:[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*(?:%\w+)?"
_HOST = re.compile(rf"(?:{_NAME}@)?(?:{_NAME}|{_IPV6})")

_ADVICE = (
    (
        "cannot listen|Address already in use",
        "a LocalForward of your ~/.ssh/config wants a port that is taken: end what has it, or give the "
        "machine a name there without that line",
    ),
    (
        "IDENTIFICATION HAS CHANGED",
        "this is not the key that was known; if the machine was set up anew: ssh-keygen -R {known}",
    ),
    ("Host key verification failed", "connect once by hand to look at its key and accept it: {ssh}"),
    ("Permission denied", "let this machine's key in, as no passwords are asked for: {copy_id}"),
    ("Could not resolve hostname", "check the name, or give the machine's address"),
    ("Connection refused", "switch ssh on there (Raspberry Pi: sudo raspi-config, Interface Options)"),
    ("timed out|No route to host|unreachable", "check that the machine is on and in this network"),
    (
        "closed|reset|[Bb]roken pipe|disconnect",
        "the connection was lost, and leaves nothing half: run it again",
    ),
)


def is_host(text: str) -> bool:
    """Whether `text` is [user@]host. A name that begins with "-" would be an option of ssh."""
    return _HOST.fullmatch(text) is not None


def remote_command(script: str, *arguments: str) -> str:
    """The command for ssh: a shell script with these arguments."""
    return shlex.join(["sh", "-c", script, "sh", *arguments])


def explain(host: str, said: str, port: Sequence[str] = ()) -> str:
    """Return the line for a failure of ssh's own, which it explained on stderr with `said`.

    `port`: ssh's options for another port than its usual one, ("-p", "2222").
    """
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["ssh failed without a word"]
    name = host.rpartition("@")[2]
    hints = {
        "ssh": shlex.join(["ssh", *port, host]),
        "copy_id": shlex.join(["ssh-copy-id", *port, host]),
        "known": shlex.quote(f"[{name}]:{port[-1]}" if port and port[-1] != "22" else name),
    }
    advice = next((advice for sign, advice in _ADVICE if re.search(sign, said)), "try by hand: {ssh}")
    return f"{host}: {lines[-1].removeprefix('ssh: ')}; {advice.format(**hints)}"
