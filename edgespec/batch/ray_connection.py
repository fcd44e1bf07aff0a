"""Connects to a Ray cluster, within a bounded time and in silence."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys

import ray

from edgespec.errors import EdgespecError, UsageError

CONNECT_S = 20.0
"""Seconds within which a cluster must answer."""


def connect(address: str) -> None:
    """Connect to the cluster at `address`, HOST:PORT, of which this machine must be a node.

    For the main thread. Raises UsageError for what is no address, EdgespecError if no cluster answers there.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise UsageError("must be HOST:PORT, as `ray start --head` prints it", field="ray", value=address)
    _check_answers(address)
    # Ray prints a paragraph on stdout for each process that dies, between the results of `-o -`: no option
    # ends that.
    ray._private.worker._worker_logs_enabled = False
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.CRITICAL)
    except Exception as error:  # noqa: BLE001 - Ray raises RuntimeError, ConnectionError, ValueError and AssertionError
        reason = " ".join(str(error).split())
        raise EdgespecError(
            f"this machine could not join: {reason[:200]}; "
            f"it must be a node of the cluster: ray start --address={address}",
            field="ray",
            value=address,
        ) from None
    signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own prints a stack trace


def disconnect() -> None:
    """Leave the cluster, if connected."""
    ray.shutdown()


def _check_answers(address: str) -> None:
    """Raise EdgespecError if no cluster answers. A child asks, as Ray itself tries for minutes and aborts."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--skip-version-check"]
    try:
        answered = subprocess.run(
            [*command, "--address", address],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=CONNECT_S,
            check=False,
        )
        if answered.returncode == 0:
            return
    except subprocess.TimeoutExpired:
        pass
    problem = "no Ray cluster answers there; start one with `ray start --head`"
    raise EdgespecError(problem, field="ray", value=address)
