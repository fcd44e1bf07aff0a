"""Measures what a draft head's pass costs beside the target's, and where its time goes.

Each round is what a step of generation does: the target's pass over one token, then --gamma tokens of the
head, one after another, the first in a pass over --unread tokens, for what was accepted is read again. So the
head's first pass finds the caches of the processor as the target leaves them. Parts of a drafted token:

- pass: llama.cpp's llama_decode, of which `call` is what it takes for a head of 64 elements, timed in the
  same round: what a call costs whatever it computes;
- python: the rest of KVCache.forward (the batch, the buffers);
- fusion: what the head reads, from the target's embedding and the hidden state;
- handling: the rest of HeadModel.ask;
- sampling: the likeliest tokens and a sampled one, of the head's own vocabulary.

c is the sum of them over T(1). Without --head, a random one of --width and --keep is made: times do not
depend on what a head has learnt.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from edgespec.apps.forge.training.head import HeadMetadata, write_head
from edgespec.apps.forge.training.weights import BlockShape
from edgespec.decoding.features import TargetFeatures
from edgespec.decoding.sampling import SamplingParams
from edgespec.drafting.head_model import HeadModel
from edgespec.engine.model_choice import choose_models
from edgespec.llama.gguf_header import check_model_file
from edgespec.llama.head_file import Fusion, TargetEmbeddings, read_head
from edgespec.llama.kv_cache import KVCache, KVCacheSize
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.models.resolve import resolve
from script import Measuring, in_child, parser, require_kernels, spread, start

_PARTS = ("pass", "call", "python", "fusion", "handling", "sampling")
_T = TypeVar("_T")


class Watch:
    """Adds up the seconds of parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def around(self, name: str, function: Callable[..., _T]) -> Callable[..., _T]:
        """Return `function`, whose time counts as that of `name`."""

        def timed(*arguments: Any, **options: Any) -> _T:  # noqa: ANN401 - whatever it takes
            began = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

        return timed

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call."""
        taken, self.seconds = self.seconds, {}
        return taken


def write_random(path: Path, width: int, keep: int, n_vocab: int, n_ff: int, type_: str) -> None:
    """Write a head of random weights for a target whose hidden state has `width` elements."""
    rng = np.random.default_rng(1)
    head_dim = 64 if width < 128 else 128
    shape = BlockShape(width, n_ff, width // head_dim, max(1, width // head_dim // 6), head_dim, 1e4, 1e-6)
    n_kv = shape.n_head_kv * head_dim

    def matrix(n_in: int, n_out: int) -> np.ndarray:
        return rng.normal(0, 0.5 / np.sqrt(n_in), (n_in, n_out)).astype(np.float32)

    sizes = {"q": (width, width), "k": (width, n_kv), "v": (width, n_kv), "o": (width, width)}
    sizes |= {"gate": (width, n_ff), "up": (width, n_ff), "down": (n_ff, width)}
    params: dict[str, Any] = {name: matrix(*size) for name, size in sizes.items()}
    params |= {name: matrix(width, width) for name in ("embedding", "feature")}
    params |= {name: np.ones(width, np.float32) for name in ("attention_norm", "ff_norm", "output_norm")}
    ids = np.sort(rng.permutation(n_vocab)[:keep])
    write_head(path, HeadMetadata(shape, "0" * 64, n_vocab, ids), params, matrix(width, keep).T, type_)


class Timed:
    """A head and what it takes to draft with it, its parts timed by `watch`."""

    def __init__(self, path: Path, target: Model, args: argparse.Namespace, stack: ExitStack) -> None:
        header = check_model_file(path)
        head = read_head(header)
        if head is None:
            raise SystemExit(f"{path}: no draft head")
        self.watch = watch = Watch()
        self._model = stack.enter_context(Model(path, header=header))
        cache = stack.enter_context(
            KVCache(
                self._model,
                KVCacheSize(n_ctx=1024, n_sequences=2),
                n_threads=args.threads,
                takes_inputs=True,
            )
        )
        cache._decode = watch.around("pass", cache._decode)  # type: ignore[method-assign]
        cache.forward = watch.around("eval", cache.forward)  # type: ignore[method-assign]
        embeddings = TargetEmbeddings(target.header)
        fusion: Any = (
            Fusion(head, embeddings, n_threads=args.threads, plugin=self._model.plugin)
            if head.n_embd == embeddings.n_embd
            else _no_fusion(head.n_embd)
        )
        features = TargetFeatures(head.n_embd)
        self._text = [(101 + 7 * i) % 20_000 for i in range(args.context)]
        states = np.random.default_rng(2).normal(0, 1, (args.context, head.n_embd)).astype(np.float32)
        for at in range(0, args.context, 64):
            features.put(at, self._text[at : at + 64], states[at : at + 64])
        timed_fusion: Any = watch.around("fusion", fusion)
        self._head = HeadModel(
            Session.within(cache), features, n_vocab=head.n_vocab, head=head, fusion=timed_fusion
        )
        self._head.begin(self._text)
        self._sampler = SamplingParams(temperature=args.temperature).sampler(head.n_vocab, args.gamma)
        self._nothing = np.empty(0, np.int32)
        self._n_unread = args.unread

    def draft(self, gamma: int) -> list[dict[str, float]]:
        """Draft `gamma` tokens; return the seconds of each one's parts."""
        found, text = [], [*self._text, 7]
        for depth in range(gamma):
            self.watch.take()
            began = time.perf_counter()
            row = self._head.evaluate(text).rows[0]
            asked = time.perf_counter()
            self._sampler.likeliest(row, 4, self._head.ids)
            text.append(self._sampler.sample(row, self._nothing, 0.5, depth, self._head.ids))
            sampled = time.perf_counter()
            parts = self.watch.take()
            found.append(
                {
                    "pass": parts["pass"],
                    "python": parts["eval"] - parts["pass"],
                    "fusion": parts["fusion"],
                    "handling": asked - began - parts["eval"] - parts["fusion"],
                    "sampling": sampled - asked,
                }
            )
        self._head.trim(len(self._text) + 1 - self._n_unread)
        return found


def _no_fusion(n_embd: int) -> Callable[..., np.ndarray]:
    inputs = np.ones((1024, n_embd), np.float32)
    return lambda tokens, _states: inputs[: len(tokens)]


def measure(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of T(1), and of each part of each drafted token, round by round."""
    with ExitStack() as stack:
        target = stack.enter_context(Model(path))
        session = stack.enter_context(Session(target, n_ctx=1024, n_threads=args.threads))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if not args.head:
            args.head = folder / "random.gguf"
            write_random(args.head, target.n_embd, args.keep, target.n_vocab, args.width, args.type)
        write_random(folder / "small.gguf", 64, 64, target.n_vocab, 64, "q8_0")
        head = Timed(args.head, target, args, stack)
        small = Timed(folder / "small.gguf", target, args, stack)
        session.eval([(101 + 7 * i) % target.n_vocab for i in range(args.context)], n_logits=0)
        target_s, tokens = [], []
        for turn in range(-2, args.rounds):  # the first two warm up
            began = time.perf_counter()
            session.eval([(11 + turn) % target.n_vocab])
            spent = time.perf_counter() - began
            session.rewind(args.context)
            drafted = head.draft(args.gamma)
            for token, least in zip(drafted, small.draft(args.gamma), strict=True):
                token["call"] = least["pass"]
            if turn >= 0:
                target_s.append(spent)
                tokens.append(drafted)
        return {"target": target_s, "tokens": tokens, "head": args.head.name}


def main() -> None:
    parse = parser(__doc__, pair=False)
    parse.add_argument("--target", metavar="MODEL", help="path or name; default: the default pair's")
    parse.add_argument("--head", type=Path, help="the head's file; default: a random one")
    parse.add_argument("--width", type=int, default=4096, help="of the random head's feed-forward layer")
    parse.add_argument("--keep", type=int, default=16384, help="tokens of the random head's vocabulary")
    parse.add_argument("--type", default="q4_0", help="of the random head's matrices")
    parse.add_argument("--context", type=int, default=200, help="tokens before the drafts")
    parse.add_argument("--gamma", type=int, default=4, help="tokens drafted a round")
    parse.add_argument("--unread", type=int, default=3, help="tokens that the first pass reads")
    parse.add_argument("--temperature", type=float, default=0.8)
    parse.add_argument("--rounds", type=int, default=60)
    args = parse.parse_args()
    if min(args.gamma, args.rounds, args.unread) < 1 or not 32 <= args.context <= 900 or args.unread > 16:
        parse.error("--gamma and --rounds must be at least 1, --unread 1 to 16, --context 32 to 900")
    require_kernels()
    target = resolve(args.target or choose_models(None, None)[0])
    measuring = Measuring(args)
    result = in_child(measure, target, args)
    one, low, high = (1e3 * x for x in spread(result["target"]))
    print(f"{target.name}: T(1) {one:.2f} ms ({low:.2f} - {high:.2f}); {result['head']}, milliseconds:\n")
    print("token " + "".join(f"{part:>10}" for part in _PARTS) + f"{'all':>10}{'c':>8}")
    for i in range(args.gamma):
        rounds = [drafted[i] for drafted in result["tokens"]]
        sums = [sum(s for part, s in token.items() if part != "call") for token in rounds]
        c = spread([s / t for s, t in zip(sums, result["target"], strict=True)])[0]
        parts = "".join(f"{1e3 * spread([token[part] for token in rounds])[0]:>10.3f}" for part in _PARTS)
        print(f"{i + 1:>5} {parts}{1e3 * spread(sums)[0]:>10.3f}{c:>8.3f}")
    measuring.end()
    print(f"\n{measuring}")
    measuring.keep(f"head-cost-{target.stem}", {"target": target.name, **result})


if __name__ == "__main__":
    start(main)
