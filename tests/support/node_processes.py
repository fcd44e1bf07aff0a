"""Real nodes in processes of their own, on this machine's loopback."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

from command_line import started, user_environment
from edgespec.llama.placement import Placement, RemoteLayers


@contextmanager
def node(
    home: Path, *options: object, kernels: bool = False, port: int = 0
) -> Iterator[tuple[dict[str, Any], Popen[bytes]]]:
    """A running node: what it said when it was ready, and its process."""
    env = user_environment(home, kernels=kernels)
    if kernels:  # the tests' own cache: the self-test has passed there
        env["XDG_CACHE_HOME"] = os.environ["XDG_CACHE_HOME"]
    arguments = ("node", "--port", port, "--json", "--threads", 1, "--cache", home / "kept", *options)
    with started(*arguments, env=env) as process:
        line = process.stdout.readline()
        assert line, process.stderr.read().decode()
        yield json.loads(line), process


def child_of(pid: int) -> int:
    """The server's process: the only child of the node's."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def placement(n_home: int, *layers: tuple[dict[str, Any], int]) -> Placement:
    """The first layers here, and as many as each pair says on its node."""
    return Placement(
        n_home,
        tuple(
            RemoteLayers(f"127.0.0.1:{ready['port']}", f"127.0.0.1:{ready['port']}", n) for ready, n in layers
        ),
    )
