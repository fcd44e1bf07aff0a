"""A target whose layers lie on nodes: plain and drafting, with our kernels there and with llama.cpp's.

Nodes, one thread each, run on this machine behind proxies that make the way to them as slow as a network
(slow_network.py): a round trip, and a rate in each direction. All layers are on the nodes, in equal parts.
Engines are children of this process, and are asked in turns. What is compared:

    alone    the whole model on this machine, one thread
    nodes    nodes with edgespec's kernels
    stock    nodes with llama.cpp's kernels (`edgespec node --kernels off`) and a client without edgespec's:
             llama.cpp's server, ggml_backend_rpc_start_server over its CPU backend, as its rpc-server
             calls it, and llama.cpp's client, but for the connections (csrc/rpc_transport) on both sides

each plain and drafting (`auto`, which goes on learning from prompt to prompt). A ratio is that of two runs on
one prompt in one round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import prompts as prompt_sets
from asking import AUTO, Bench, own_cache
from edgespec import Engine
from edgespec.apps.bench.bench import run_of
from edgespec.apps.bench.runs import PLAIN, Run, rotated
from edgespec.apps.bench.summary import compare
from edgespec.apps.bench.variants import PLAIN_VARIANT, parse_variants
from edgespec.llama.node_addresses import read_addresses
from edgespec.models.suites import DEFAULT, Prompt
from script import Measuring, numbers, parser, require_kernels, spread, start
from slow_network import Link, Proxy, Traffic, proxies

GOAL, LEAST = 1.7, 0.97
"""Drafting over nodes with our kernels beside plain over them: decoding at 1 ms and 1 Gbit/s, on the mean of
the prompts; whole answers over any network, of each prompt."""

VARIANTS = {PLAIN: PLAIN_VARIANT, AUTO: parse_variants(AUTO)[0]}


@dataclass(frozen=True)
class Opened:
    """How an engine's start went."""

    seconds: float
    bytes_to_node: int = 0
    round_trips: int = 0

    def __str__(self) -> str:
        megabytes = self.bytes_to_node / 1e6
        return f"{self.seconds:.1f} s, {megabytes:.1f} MB to nodes, {self.round_trips} round trips"


@dataclass(frozen=True)
class Passed:
    """Traffic of one answer over the network, of all nodes."""

    variant: str
    prompt: str
    round: int
    steps: int
    """Passes of the target after the prompt's."""
    bytes_to_node: int
    bytes_from_node: int
    round_trips: int
    requests: dict[str, tuple[int, int]]


# ---- in a child ----

_bench: Bench
_engine: Engine


def _open(args: argparse.Namespace, nodes: str, kernels: str) -> float:
    """Open the engine of this process; return the seconds that it took."""
    global _bench, _engine  # noqa: PLW0603 - a process has one
    began = time.perf_counter()
    _engine = Engine(
        args.target,
        args.draft,
        n_threads=args.threads,
        kernels="off" if kernels == "off" else "auto",
        nodes=read_addresses(nodes, unsafe=False) if nodes else (),
        profile=False,
    )
    seconds = time.perf_counter() - began
    _bench = Bench(_engine, {}, n_predict=args.n_predict, cold=False, seeded=True)
    return seconds


def _warm_up(asked: Sequence[Prompt], first: Prompt) -> None:
    """Make the contexts large enough, and learn what passes cost over this network from one answer."""
    _bench.warm_up([*asked, first], tuple(VARIANTS.values()))
    _ask(first, AUTO, 0)


def _ask(prompt: Prompt, variant: str, turn: int) -> Run:
    _bench.forget(prompt)
    return run_of(_bench.ask(prompt, VARIANTS[variant], turn, 0.0), prompt, variant, turn)


def _n_layers() -> int:
    return _engine.target.header.n_layer


def _close() -> None:
    _engine.close()


# ---- engines and nodes ----


class Asked:
    """An engine in a child, and the network to its nodes."""

    def __init__(
        self, args: argparse.Namespace, kernels: str, variants: Sequence[Proxy], n_layers: int
    ) -> None:
        self._args, self._kernels, self._proxies = args, kernels, variants
        n = max(1, len(variants))
        shares = [n_layers // n + (i < n_layers % n) for i in range(len(variants))]
        self._nodes = ",".join(
            f"127.0.0.1:{proxy.get_port()}={n}" for proxy, n in zip(variants, shares, strict=True)
        )
        self._pool = self._new_pool()

    def _new_pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, mp_context=get_context("spawn"))

    def open(self) -> Opened:
        """Open the engine, in a process of its own; again: after closing the one before."""
        self.close()
        self._pool = self._new_pool()
        before = self._traffic()
        seconds = self._pool.submit(_open, self._args, self._nodes, self._kernels).result()
        now = self._traffic()
        return Opened(seconds, now.bytes_to_node - before.bytes_to_node, now.round_trips - before.round_trips)

    def n_layers(self) -> int:
        """Return the target's number of layers."""
        return self._pool.submit(_n_layers).result()

    def warm_up(self, asked: Sequence[Prompt], first: Prompt) -> None:
        """Ask `first` and learn from it."""
        self._pool.submit(_warm_up, asked, first).result()

    def ask(self, prompt: Prompt, variant: str, turn: int) -> tuple[Run, Passed]:
        """Generate once; return what went over the network too."""
        before = self._traffic()
        run = self._pool.submit(_ask, prompt, variant, turn).result()
        now = self._traffic()
        requests = {
            name: (n - before.requests.get(name, (0, 0))[0], size - before.requests.get(name, (0, 0))[1])
            for name, (n, size) in now.requests.items()
        }
        return run, Passed(
            variant,
            prompt.id,
            turn,
            sum(steps for _, _, steps in run.histogram or ()),
            now.bytes_to_node - before.bytes_to_node,
            now.bytes_from_node - before.bytes_from_node,
            now.round_trips - before.round_trips,
            {name: counted for name, counted in requests.items() if counted[0]},
        )

    def set_link(self, link: Link) -> None:
        """Make the network another one."""
        for proxy in self._proxies:
            proxy.set_link(link)

    def close(self) -> None:
        """End the child."""
        if self._pool._processes:
            with contextlib.suppress(BrokenProcessPool):  # it was ended with this process
                self._pool.submit(_close).result()
        self._pool.shutdown()

    def _traffic(self) -> Traffic:
        total = Traffic()
        for proxy in self._proxies:
            one = proxy.traffic()
            total.bytes_to_node += one.bytes_to_node
            total.bytes_from_node += one.bytes_from_node
            total.round_trips += one.round_trips
            for name, (n, size) in one.requests.items():
                before = total.requests.get(name, (0, 0))
                total.requests[name] = before[0] + n, before[1] + size
        return total


@contextmanager
def running_nodes(n: int, kernels: str, folder: Path) -> Iterator[list[int]]:
    """Run nodes of one thread with empty caches of weights; yield their ports."""
    with ExitStack() as stack:
        ports = []
        for i in range(n):
            command = [sys.executable, "-m", "edgespec", "node", "--port", "0", "--json", "--threads", "1"]
            command += ["--cache", str(folder / f"{kernels}-{n}-{i}"), "--kernels", kernels]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.terminate)
            assert process.stdout
            line = process.stdout.readline()
            if not line:
                raise SystemExit("a node did not start")
            ports.append(json.loads(line)["port"])
        yield ports


# ---- the comparison ----


@dataclass
class Compared:
    """The measurements over one network with that many nodes."""

    nodes: int
    link: Link
    runs: list[Run]
    passed: list[Passed]

    def ratios(self, variant: str, base: str, *, decoding: bool = False) -> dict[str, float]:
        """Return by prompt the speed beside `base`, the median over the rounds.

        Of whole answers, the prompt's reading included, or of `decoding` alone, from the first token on.
        """
        found = {}
        for prompt in dict.fromkeys(run.prompt for run in self.runs):
            both = compare((run for run in self.runs if run.prompt == prompt), variant, base)
            one = both.decode_speedup if decoding else both.speedup
            if one:
                found[prompt] = one.median
        return found

    def report(self) -> None:
        """Print the table of this network."""
        per_s = self.link.bits_per_s or 0.0
        print(f"\n{self.nodes} nodes, round trip {1e3 * self.link.round_trip_s:g} ms, {per_s / 1e6:g} Mbit/s")
        print(f"{'':<14}{'tokens/s (quartiles)':>26}{'x plain (quartiles)':>26}{'tau':>6}", end="")
        print(f"{'KB to, from nodes a step':>27}{'round trips':>13}  texts as alone")
        for variant in dict.fromkeys(run.variant for run in self.runs):
            self._report_variant(variant)
        both = f"nodes {AUTO}", f"nodes {PLAIN}"
        ratios, decoding = self.ratios(*both), self.ratios(*both, decoding=True)
        whole, gain = (statistics.geometric_mean(of.values()) for of in (ratios, decoding))
        worst = min(ratios, key=lambda name: ratios[name])
        found = f"decoding {gain:.2f}, whole answers {whole:.2f}, lowest {ratios[worst]:.2f} ({worst})"
        print(f"drafting beside plain over these nodes: {found}")
        if (self.link.round_trip_s, per_s) == (0.001, 1e9):
            print(f"goal {'met' if gain >= GOAL else 'MISSED'}: at least {GOAL} times plain, decoding")
        print(f"goal {'met' if ratios[worst] >= LEAST else 'MISSED'}: never below {LEAST} of plain")

    def _report_variant(self, variant: str) -> None:
        runs = [run for run in self.runs if run.variant == variant]
        speeds = [run.whole_tokens_per_s or 0.0 for run in runs]
        ratios = list(self.ratios(variant, f"{variant.partition(' ')[0]} {PLAIN}").values())
        steps = [one for one in self.passed if one.variant == variant]
        n_steps = max(1, sum(one.steps for one in steps))
        alone = {
            (run.prompt, run.round): run.text_sha256 for run in self.runs if run.variant == f"alone {PLAIN}"
        }
        same = sum(run.text_sha256 == alone[run.prompt, run.round] for run in runs)
        tau = sum(run.n_emitted or 0 for run in runs) / n_steps
        mean = statistics.geometric_mean(ratios)
        line = f"{variant:<14}{'{:.1f} ({:.1f} - {:.1f})'.format(*spread(speeds)):>26}"
        line += f"{'{:.2f} ({:.2f} - {:.2f})'.format(mean, *spread(ratios)[1:]):>26}{tau:>6.2f}"
        kb_to = sum(one.bytes_to_node for one in steps) / n_steps / 1e3
        kb_from = sum(one.bytes_from_node for one in steps) / n_steps / 1e3
        line += f"{f'{kb_to:.1f}, {kb_from:.1f}':>27}{sum(p.round_trips for p in steps) / n_steps:>13.2f}"
        print(f"{line}  {same} of {len(runs)}")


def measured(
    args: argparse.Namespace, engines: dict[str, Asked], asked: Sequence[Prompt], link: Link, n_nodes: int
) -> Compared:
    """Ask every engine every prompt in each variant, in turns."""
    found = Compared(n_nodes, link, [], [])
    variants = [f"{name} {variant}" for name in engines for variant in VARIANTS]
    for turn in range(args.rounds):
        for place, prompt in enumerate(asked):
            for name in rotated(variants, turn + place):
                engine, variant = name.split()
                run, passed = engines[engine].ask(prompt, variant, turn)
                found.runs.append(replace(run, variant=name))
                found.passed.append(replace(passed, variant=name))
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    found.runs.sort(key=lambda run: variants.index(run.variant))
    return found


def compared_over(
    args: argparse.Namespace, n_nodes: int, asked: Sequence[Prompt], first: Prompt, folder: Path
) -> tuple[list[Compared], dict[str, list[Opened]]]:
    """Measure over `n_nodes` nodes, with every link."""
    found: list[Compared] = []
    starts: dict[str, list[Opened]] = {}
    with ExitStack() as stack:
        engines = {"alone": Asked(args, "auto", (), 0)}
        starts["alone"] = [engines["alone"].open()]
        n_layers = engines["alone"].n_layers()
        for name, kernels in (("nodes", "auto"), ("stock", "off")):
            if name == "nodes" or not args.no_stock:
                ports = stack.enter_context(running_nodes(n_nodes, kernels, folder))
                made = stack.enter_context(proxies(ports, args.link[0]))
                engines[name] = Asked(args, kernels, made, n_layers)
        for name, engine in engines.items():
            stack.callback(engine.close)
            if name != "alone":
                starts[name] = [engine.open(), engine.open()]  # the nodes keep nothing yet at first
        print(f"\nstart-up over {n_nodes} nodes:")
        for name, opened in starts.items():
            times = "; with kept weights ".join(map(str, opened))
            print(f"{name:<14}{times}")
        for link in args.link:
            for engine in engines.values():
                engine.set_link(link)
                engine.warm_up(asked, first)
            found.append(measured(args, engines, asked, link, n_nodes))
            found[-1].report()
    return found, starts


def link(text: str) -> Link:
    """Read "1/1000": the round trip in milliseconds, the rate in Mbit/s."""
    round_trip_ms, _, mbits = text.partition("/")
    return Link(float(round_trip_ms) / 1e3, float(mbits) * 1e6)


def arguments() -> argparse.Namespace:
    parse = parser(__doc__)
    parse.set_defaults(threads=1)
    prompt_sets.add_options(parse, per_category=None)
    parse.add_argument("--nodes", type=numbers(int), default=[2], help="how many; several numbers: in turn")
    parse.add_argument(
        "--link", type=numbers(link), default=[link("1/1000")], metavar="MS/MBIT", help="default: 1/1000"
    )
    parse.add_argument("--prompts", type=int, default=8)
    parse.add_argument("-n", "--n-predict", type=int, default=64)
    parse.add_argument("--rounds", type=int, default=2)
    parse.add_argument("--no-stock", action="store_true", help="leave out llama.cpp's kernels")
    args = parse.parse_args()
    args.suite = args.suite or [DEFAULT]
    return args


def main() -> None:
    args = arguments()
    require_kernels()
    measuring = Measuring(args)
    suites = prompt_sets.chosen(args)
    chosen = [prompt for suite in suites for prompt in suite.interleaved()]
    if len(chosen) <= args.prompts:
        raise SystemExit("one prompt more than --prompts is needed, to learn from first")
    *asked, first = chosen[: args.prompts + 1]
    print(f"{len(asked)} prompts, {args.n_predict} tokens, {args.rounds} rounds, in turns, temperature 0")
    found: list[Compared] = []
    starts: dict[str, Any] = {}
    with own_cache(), tempfile.TemporaryDirectory(prefix="edgespec-nodes-") as folder:
        for n_nodes in args.nodes:
            compared, starts[str(n_nodes)] = compared_over(args, n_nodes, asked, first, Path(folder))
            found += compared
    measuring.end()
    print(f"\n{measuring}; {os.cpu_count()} processors")
    result = {"suites": prompt_sets.sources(suites), "starts": starts, "compared": found}
    measuring.keep("nodes", result)


if __name__ == "__main__":
    start(main)
