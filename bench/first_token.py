"""Measures `edgespec run` to its first token, and the processor time of the whole run.

Each round starts the command once as it is, once packing the weights (as where none are kept), and once
answered by a server. The first start of each, which keeps and learns, is not counted. Printed are the least
and the median. Other programs change the processor time less than the time that passes.

    bench/first_token.py --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

COMMAND = (sys.executable, "-m", "edgespec")
VARIANTS = {
    "packed weights kept": (("--here",), {}),
    "packed at each start": (("--here",), {"EDGESPEC_PACKED_WEIGHTS": "off"}),
    "answered by a server": ((), {}),
}


def first_token(options: tuple[str, ...], variables: Mapping[str, str]) -> tuple[float, float]:
    """Return the seconds to the first token of a run, and the processor seconds of the whole run."""
    command = [*COMMAND, "run", *options, "--no-cache", "-n", "1", "Say hello."]
    began = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, **variables}
    ) as process:
        assert process.stdout
        process.stdout.read(1)
        seconds = time.perf_counter() - began
        _, _, usage = os.wait4(process.pid, 0)
        process.returncode = 0
    return seconds, usage.ru_utime + usage.ru_stime


@contextmanager
def server() -> Iterator[None]:
    """Keep a server of the default pair while the block runs."""
    with subprocess.Popen([*COMMAND, "serve", "--port", "0", "--json"], stdout=subprocess.PIPE) as process:
        assert process.stdout
        json.loads(process.stdout.readline())
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)


def main() -> None:
    """Run the rounds and print a table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--rounds", type=int, default=5)
    n_rounds = options.parse_args().rounds
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    with server():
        for i in range(n_rounds + 1):
            for name, variant in VARIANTS.items():
                measured = first_token(*variant)
                if i:
                    found[name].append(measured)
    print(f"{'':22} {'s to first token':>20} {'s of a processor':>20}")
    for name, runs in found.items():
        columns = [
            f"{min(values):.2f} {statistics.median(values):8.2f}" for values in zip(*runs, strict=True)
        ]
        print(f"{name:22}", *[f"{column:>20}" for column in columns])


if __name__ == "__main__":
    main()
