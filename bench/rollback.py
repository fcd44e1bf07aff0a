"""Measures what it costs to take tokens back on recurrent and hybrid models: memory, T(n), and steps.

No weights of such a model are at hand, so the models are made here, in shapes of published ones, from random
weights (Q4_0): a pass costs what it costs with real ones, as long as nobody asks what it says. What
llama.cpp's sources do not tell of a shape is as its authors publish it. For each model, in a process of its
own, the variants of taking tokens back are opened side by side:

- none: nothing set aside, plain decoding's variant;
- marks: an earlier state beside the current one; accepted tokens are read again if not all were;
- snapshots N: the states after the last N + 1 tokens of a pass, where the architecture has them.

Every round times each pass once in each variant, one right after the other, in an order that shifts from
round to round. T(n) is a pass over n tokens with all their logits. A step drafts 4 tokens, of which 0, 2 or 4
are accepted, and is made to its end: with marks a pass more where accepted tokens have to be read again,
which gives a token too. So steps are compared by their time for each token, with plain decoding beside them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.apps.bench.runs import rotated
from edgespec.llama.gguf_header import read_header
from edgespec.llama.kv_cache import KVCache, KVCacheSize
from edgespec.llama.rollback import RollbackSize
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.models.footprint import states_bytes
from script import Measuring, in_child, numbers, parser, spread, start

if TYPE_CHECKING:
    from architecture_table import Value

N_DRAFTED = 4
ACCEPTED = (0, 2, 4)
FEWEST_LAYERS = 4  # with fewer, one of the shapes has no layer that attends

SHAPES: dict[str, tuple[str, Mapping[str, Value]]] = {
    "lfm2-1.2b": (
        "lfm2",
        {
            "block_count": 16,
            "embedding_length": 2048,
            "feed_forward_length": 8192,
            "attention.head_count": 32,
            "attention.head_count_kv": tuple(8 if i in (2, 5, 8, 10, 12, 14) else 0 for i in range(16)),
            "shortconv.l_cache": 3,
            "vocab_size": 65_536,
        },
    ),
    "qwen3.5-0.8b": (
        "qwen35",
        {
            "block_count": 24,
            "embedding_length": 1024,
            "feed_forward_length": 3584,
            "attention.head_count": 8,
            "attention.head_count_kv": 2,
            "attention.key_length": 256,
            "attention.value_length": 256,
            "rope.dimension_count": 64,
            "rope.dimension_sections": (11, 11, 10, 0),
            "full_attention_interval": 4,
            "ssm.conv_kernel": 4,
            "ssm.state_size": 128,
            "ssm.group_count": 16,
            "ssm.time_step_rank": 16,
            "ssm.inner_size": 2048,
            "vocab_size": 248_320,
        },
    ),
    "falcon-h1-0.5b": (
        "falcon-h1",
        {
            "block_count": 36,
            "embedding_length": 1024,
            "feed_forward_length": 2048,
            "attention.head_count": 8,
            "attention.head_count_kv": 2,
            "attention.key_length": 64,
            "attention.value_length": 64,
            "ssm.conv_kernel": 4,
            "ssm.state_size": 128,
            "ssm.group_count": 1,
            "ssm.time_step_rank": 24,
            "ssm.inner_size": 1536,
            "vocab_size": 32_784,
        },
    ),
}
"""Name -> architecture, metadata: of models whose input and output embeddings are the same matrix."""

COMMON: dict[str, Value] = {"context_length": 32_768, "attention.layer_norm_rms_epsilon": 1e-5}

Seconds = dict[str, list[float]]
"""Variant -> seconds, round by round."""


def make_model(name: str, directory: Path, layers: int | None) -> Path:
    """Write a random model of one of SHAPES, perhaps with fewer layers; one that is there already is used."""
    architecture, shape = SHAPES[name]
    if layers:
        shape = {
            key: value[:layers] if isinstance(value, tuple) and len(value) == shape["block_count"] else value
            for key, value in shape.items()
        } | {"block_count": layers}
    path = directory / f"{name}{f'-{layers}-layers' if layers else ''}.gguf"
    if not path.exists():
        sys.path.append(str(Path(__file__).parents[1] / "tests/support"))
        from tiny_models import make_random

        make_random(architecture, {**COMMON, **shape}, path, lacks=r"^output\.weight")
    return path


class Variant:
    """A session that takes tokens back in one variant."""

    def __init__(self, session: Session, context: int) -> None:
        """Read `context` tokens."""
        self.session, self._context = session, context
        self._n_vocab = session.model.n_vocab
        session.eval(self._tokens(context), n_logits=0)
        session.keep()

    def _tokens(self, n: int) -> list[int]:
        return [(11 + 13 * i) % self._n_vocab for i in range(n)]

    def reset(self) -> None:
        """Go back to the context, where no time is taken."""
        if self.session.rewind(self._context) < self._context:
            raise SystemExit("the library could not restore the state")

    def timed_pass(self, n: int) -> float:
        """Return the seconds of a pass over `n` tokens."""
        began = time.perf_counter()
        self.session.eval(self._tokens(n), n_logits=n)
        return time.perf_counter() - began

    def timed_step(self, n_accepted: int) -> float:
        """Return the seconds for each token of a step of N_DRAFTED tokens, of which so many are accepted."""
        session, began = self.session, time.perf_counter()
        session.eval(self._tokens(1 + N_DRAFTED), n_logits=1 + N_DRAFTED)
        wanted, n_tokens = self._context + 1 + n_accepted, n_accepted + 1
        kept = session.rewind(wanted)
        if kept < wanted:
            session.eval(self._tokens(wanted - kept + 1))
            n_tokens += 1
        return (time.perf_counter() - began) / n_tokens

    def timed_plain(self) -> float:
        """Return the seconds for each token of as many plain passes as a step has tokens."""
        n, began = N_DRAFTED + 1, time.perf_counter()
        for token in self._tokens(n):
            self.session.eval([token])
        return (time.perf_counter() - began) / n


def measure(path: Path, args: argparse.Namespace) -> dict[str, object]:
    """Time all variants on one model file."""
    header = read_header(path)
    sizes = {"none": RollbackSize(n_marks=0), "marks": RollbackSize()}
    if header.has_snapshots:
        sizes |= {f"snapshots {n}": RollbackSize(n_snapshots=n) for n in args.snapshots}
    passes: dict[int, Seconds] = {n: {variant: [] for variant in sizes} for n in args.sizes}
    steps: dict[int, Seconds] = {n: {variant: [] for variant in sizes if variant != "none"} for n in ACCEPTED}
    plain: list[float] = []
    with ExitStack() as stack:
        model = stack.enter_context(Model(path, kernels=not args.stock, header=header))

        def opened(size: RollbackSize) -> Variant:
            longest = max(*args.sizes, N_DRAFTED + 1)
            room = KVCacheSize(n_ctx=args.context + 64, n_logits_max=longest, rollback=size)
            cache = stack.enter_context(KVCache(model, room, n_threads=args.threads))
            return Variant(Session.within(cache), args.context)

        variants = {name: opened(size) for name, size in sizes.items()}

        def timed(one: Callable[[], float], variant: Variant, into: list[float], turn: int) -> None:
            spent = one()
            variant.reset()
            if turn >= 0:
                into.append(spent)

        for turn in range(-1, args.rounds):  # the first round warms up
            for n in rotated(args.sizes, turn):
                for name in rotated(list(variants), turn):
                    variant = variants[name]
                    timed(lambda variant=variant, n=n: variant.timed_pass(n), variant, passes[n][name], turn)  # type: ignore[misc]
            for n in rotated(ACCEPTED, turn):
                for name in rotated(list(steps[n]), turn):
                    variant = variants[name]
                    timed(lambda variant=variant, n=n: variant.timed_step(n), variant, steps[n][name], turn)  # type: ignore[misc]
                timed(variants["none"].timed_plain, variants["none"], plain, turn)
    return {
        "weights": "random",
        "kernels": model.uses_kernels,
        "state_bytes": header.state_bytes,
        "bytes": {name: states_bytes(header, size) for name, size in sizes.items()},
        "passes": passes,
        "steps": steps,
        "plain": plain,
    }


def cell(seconds: Sequence[float], base: Sequence[float] | None = None) -> str:
    """Return a median with its quartiles in milliseconds, and its ratio to `base` within the rounds."""
    middle, low, high = (1e3 * x for x in spread(seconds))
    text = f"{middle:.2f} ({low:.2f} - {high:.2f})"
    if base is None:
        return text
    ratio = spread([a / b for a, b in zip(seconds, base, strict=False)])[0]
    return f"{text} {ratio:5.2f}x"


def report(name: str, found: dict, args: argparse.Namespace) -> None:  # type: ignore[type-arg]
    """Print what was measured of one model."""
    variants = list(found["bytes"])
    kernels = "edgespec's kernels where they take a weight" if found["kernels"] else "stock kernels"
    print(f"\n{name} (random weights), context {args.context}, {args.threads} threads, {kernels}")
    print(f"a state: {found['state_bytes'] / 1e6:.2f} MB; states of a text: ", end="")
    print(", ".join(f"{variant} {n / 1e6:.2f} MB" for variant, n in found["bytes"].items()))
    print(f"\n{'T(n) ms (quartiles), x none':<30}" + "".join(f"{variant:>34}" for variant in variants))
    for n, seconds in found["passes"].items():
        cells = (cell(seconds[variant], seconds["none"]) for variant in variants)
        print(f"{n:<30}" + "".join(f"{text:>34}" for text in cells))
    print(f"\n{'ms for each token, x plain':<30}" + "".join(f"{variant:>34}" for variant in variants[1:]))
    for n, seconds in found["steps"].items():
        cells = (cell(seconds[variant], found["plain"]) for variant in variants[1:])
        print(f"{f'{n} of {N_DRAFTED} accepted':<30}" + "".join(f"{text:>34}" for text in cells))
    print(f"{'plain':<30}{cell(found['plain']):>34}")


def main() -> None:
    parse = parser(__doc__, pair=False)
    parse.add_argument("shapes", nargs="*", help=f"of {', '.join(SHAPES)}; default: all")
    parse.add_argument("--sizes", type=numbers(int), default=[1, 2, 3, 5, 9], help="tokens of a pass")
    parse.add_argument("--snapshots", type=numbers(int), default=[4, 8])
    parse.add_argument("--context", type=int, default=128, help="tokens before the pass")
    parse.add_argument("--rounds", type=int, default=15)
    parse.add_argument("--layers", type=int, help=f"only so many, {FEWEST_LAYERS} or more: to try the script")
    parse.add_argument("--stock", action="store_true", help="without edgespec's kernels")
    parse.add_argument("--directory", type=Path, help="keep the models there, and use those that are there")
    args = parse.parse_args()
    if unknown := set(args.shapes) - set(SHAPES):
        parse.error(f"no shape {', '.join(unknown)}: choose of {', '.join(SHAPES)}")
    if min(args.sizes) < 1 or min(args.snapshots) < N_DRAFTED or args.context < 1 or args.rounds < 1:
        parse.error(f"--sizes, --context and --rounds must be at least 1, --snapshots {N_DRAFTED}")
    if args.layers is not None and args.layers < FEWEST_LAYERS:
        parse.error(f"--layers must be at least {FEWEST_LAYERS}")
    with tempfile.TemporaryDirectory() as folder:
        directory = args.directory or Path(folder)
        paths = {name: make_model(name, directory, args.layers) for name in args.shapes or SHAPES}
        measuring = Measuring(args)
        measured = {name: in_child(measure, path, args) for name, path in paths.items()}
    for name, found in measured.items():
        report(name, found, args)
    measuring.end()
    print(f"\n{measuring}")
    for name, found in measured.items():
        measuring.keep(f"rollback-{name}", {"model": name, "threads": args.threads, **found})


if __name__ == "__main__":
    start(main)
