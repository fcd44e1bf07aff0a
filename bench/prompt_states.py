"""Measures the first token after a long prompt: read, and restored from disk, warm and cold.

Each round reads prompts of random tokens with an engine that keeps no states, writes their states with
another, and has a third restore them: once with the files dropped from the page cache, once with them in it.
Loading is in none of the times. `--llama-server PROGRAM` saves and restores the same prompts with
`--slot-save-path` beside it: there a restore is a request of its own, and is counted.

    bench/prompt_states.py --lengths 1000,8000,16000 --rounds 3 --llama-server build/bin/llama-server
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import httpx
import numpy as np

from edgespec import Engine, SamplingParams
from edgespec.engine.model_choice import choose_models
from edgespec.llama.choices import CacheType, StateRoom
from edgespec.models.resolve import resolve
from script import Measuring, numbers, parser, spread, start
from servers import Server

READ, COLD, WARM = "read", "disk, cold", "disk, warm"
ROOM = 64
GREEDY = SamplingParams(temperature=0.0)

Times = dict[tuple[str, int], list[float]]


def drop_pages(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    os.sync()
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def engine_of(args: argparse.Namespace, folder: Path | None) -> Iterator[Engine]:
    """Load the target; its cache is there before anything is timed."""
    with Engine(
        args.target,
        drafter="none",
        n_threads=args.threads,
        n_ctx=max(args.lengths) + ROOM,
        cache_type=args.cache_type,
        prefix_cache=0,
        keep_packed=True,
        states=StateRoom(folder, 1 << 40) if folder else None,
    ) as engine:
        engine.generate([1, 2, 3], n_predict=1)
        yield engine


def first_token(engine: Engine, prompt: list[int], *, is_known: bool) -> float:
    """Return the seconds to the first token, in an engine that has nothing of the prompt in memory."""
    engine.forget()
    result = engine.generate(prompt, params=GREEDY, n_predict=1)
    assert result.n_cached == (len(prompt) - 1 if is_known else 0), result.n_cached
    assert result.stats.ttft_s is not None
    return result.stats.ttft_s


def measure(args: argparse.Namespace, prompts: dict[int, list[int]], times: Times) -> dict[int, float]:
    """Measure a round; return the bytes on disk of a token, for each length."""
    n_bytes = {}
    folder = Path(tempfile.mkdtemp(prefix="edgespec-states-", dir=args.dir))
    try:
        with engine_of(args, None) as engine:
            for n, prompt in prompts.items():
                times["edgespec, " + READ, n].append(first_token(engine, prompt, is_known=False))
        before = 0
        for n, prompt in prompts.items():
            with engine_of(args, folder) as engine:
                first_token(engine, prompt, is_known=False)
            total = sum(file.stat().st_size for file in folder.glob("*.state"))
            n_bytes[n], before = (total - before) / n, total
        with engine_of(args, folder) as engine:
            for n, prompt in prompts.items():
                drop_pages(folder)
                for how in (COLD, WARM):
                    times[f"edgespec, {how}", n].append(first_token(engine, prompt, is_known=True))
    finally:
        shutil.rmtree(folder)
    return n_bytes


def measure_llama_server(args: argparse.Namespace, prompts: dict[int, list[int]], times: Times) -> None:
    """Measure a round of llama-server on the same file, threads and type of cache."""
    folder = Path(tempfile.mkdtemp(prefix="llama-slots-", dir=args.dir))
    path = resolve(choose_models(args.target, None, "none")[0])
    command = [args.llama_server, "-m", path.absolute(), "-c", max(args.lengths) + ROOM, "-np", 1]
    command += ["-t", args.threads, "-ctk", args.cache_type, "-ctv", args.cache_type]
    command += ["--slot-save-path", folder, "--no-webui"]

    def timed(client: httpx.Client, prompt: list[int], action: str = "") -> float:
        began = time.perf_counter()
        if action:
            restored = client.post(f"/slots/0?action={action}", json={"filename": f"{len(prompt)}"})
            restored.raise_for_status()
        asked = {"prompt": prompt, "n_predict": 1, "temperature": 0, "cache_prompt": True, "id_slot": 0}
        client.post("/completion", json=asked).raise_for_status()
        return time.perf_counter() - began

    def serving() -> Server:
        return Server("llama-server", [str(part) for part in command])

    try:
        with serving() as server, httpx.Client(base_url=server.address, timeout=3600) as client:
            timed(client, [1, 2, 3])
            for n, prompt in prompts.items():
                times["llama-server, " + READ, n].append(timed(client, prompt))
                client.post("/slots/0?action=save", json={"filename": f"{n}"}).raise_for_status()
        with serving() as server, httpx.Client(base_url=server.address, timeout=3600) as client:
            for n, prompt in prompts.items():
                timed(client, [1, 2, 3])
                drop_pages(folder)
                for how in (COLD, WARM):
                    times[f"llama-server, {how}", n].append(timed(client, prompt, "restore"))
                    timed(client, [1, 2, 3])
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parse = parser(__doc__, pair=False)
    parse.add_argument("--target", metavar="MODEL", help="path or name; default: the default pair's")
    parse.add_argument("--lengths", type=numbers(int), default=[1000, 8000, 16_000])
    parse.add_argument("--rounds", type=int, default=3)
    parse.add_argument("--cache-type", choices=get_args(CacheType), default="f16")
    parse.add_argument(
        "--dir", metavar="DIR", help="a folder on the disk to measure; default: that of temporary files"
    )
    parse.add_argument("--llama-server", metavar="PROGRAM", help="measure it beside; default: edgespec alone")
    args = parse.parse_args()

    measuring = Measuring(args)
    times: Times = defaultdict(list)
    n_bytes: dict[int, float] = {}
    for round_ in range(args.rounds):
        random = np.random.default_rng(round_)
        prompts = {n: random.integers(100, 30_000, n).tolist() for n in sorted(args.lengths)}
        n_bytes = measure(args, prompts, times)
        if args.llama_server:
            measure_llama_server(args, prompts, times)
    measuring.end()

    name = args.target or "the target of the default pair"
    print(f"{name}, cache in {args.cache_type}: seconds to the first token")
    print(f"{measuring}\nmedians of {args.rounds} and their quartiles\n")
    print(f"{'tokens':<26}" + "".join(f"{n:>22,}" for n in n_bytes))
    for name in dict.fromkeys(name for name, _ in times):
        cells = ["{:.2f} ({:.2f}-{:.2f})".format(*spread(times[name, n])) for n in n_bytes]
        print(f"{name:<26}" + "".join(f"{cell:>22}" for cell in cells))
    print(f"{'bytes of a token':<26}" + "".join(f"{size:>22,.0f}" for size in n_bytes.values()))
    result: dict[str, Any] = {
        "seconds": [{"name": name, "tokens": n, "seconds": found} for (name, n), found in times.items()],
        "bytes_a_token": n_bytes,
    }
    measuring.keep(f"prompt-states-{args.cache_type}", result)


if __name__ == "__main__":
    start(main)
