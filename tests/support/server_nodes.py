"""Processes of `edgespec serve` on one machine, as several machines would run them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

KEY = "the-key-of-all-nodes"
AUTHORIZATION = {"Authorization": f"Bearer {KEY}"}


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


class Node:
    """A server's process on a port that it keeps when it is started again."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._model = model
        self._environment = {
            **os.environ,
            "EDGESPEC_API_KEY": KEY,
            "XDG_CACHE_HOME": str(directory / "cache"),
            "XDG_CONFIG_HOME": str(directory / "config"),
            "HF_HUB_OFFLINE": "1",
        }

    def start(self) -> None:
        """Start it; `wait` returns when it serves."""
        command = [sys.executable, "-m", "edgespec", "serve", "--target", str(self._model), "--json"]
        options = ["--drafter", "none", "--threads", "1", "--kernels", "off", "--port", str(self.port)]
        self.process = subprocess.Popen(
            [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=self._environment
        )

    def wait(self) -> None:
        assert self.process.stdout is not None
        assert json.loads(self.process.stdout.readline())["address"] == f"http://{self.address}"

    def kill(self) -> None:
        """End it as a power cut would."""
        self.process.kill()
        self.process.communicate(timeout=60)

    def get(self, path: str) -> httpx.Response:
        """Ask it directly."""
        return httpx.get(f"http://{self.address}{path}", headers=AUTHORIZATION, timeout=60)

    def health(self) -> dict[str, Any]:
        return dict(self.get("/health").json())

    def metric(self, name: str) -> float:
        """The value of the line of /metrics that begins with this."""
        lines = self.get("/metrics").text.splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(name)), 0.0)
