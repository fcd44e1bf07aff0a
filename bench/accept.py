"""Measures the cost of a speculative step outside `llama_decode`: the C core against llama.cpp's samplers.

One step at gamma 4: four drafted tokens are sampled, then verified against five target rows with
the block rule. Run in turn (A B, B A, ...) over the same rows of logits:

- edgespec: four `Sampler.sample` and one `Sampler.verify`, called from Python as the engine does;
- llama.cpp: its sampler chain (top-k, top-p, temperature, dist) over the same nine rows, which is
  less than a step needs: no acceptance, no residual. `llama_sampler_sample` fills the array of
  candidates from the context's logits in C, applies the chain and is what a program calls;
  "apply alone" is `llama_sampler_apply` over arrays that were filled outside the clock.

With a pair of models, the rows are the models' on a text, read in place, and the passes of the step
(four draft passes of one token, one target pass of five) are timed in the same run. Without models, the
rows are synthetic: normal logits with the spread of the real target's, and q a noisy copy of p.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgespec import _core
from edgespec.apps.bench.runs import rotated
from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.session import Rows
from edgespec.engine.model_choice import choose_models
from edgespec.llama.backend import llama
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.models.resolve import resolve
from script import Measuring, parser, spread, start

GAMMA = 4
SYNTHETIC_VOCAB = 151_936
N_PROMPT = 64
CASES = {
    "temp 0.8, top-k 40, top-p 0.95": SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.0),
    "temp 0.8, top-p 0.95": SamplingParams(temperature=0.8, top_k=0, top_p=0.95, min_p=0.0),
    "temp 0.8": SamplingParams(temperature=0.8, top_k=0, top_p=1.0, min_p=0.0),
}
OURS, OUR_DRAFTS, FULL, APPLY = (
    "edgespec",
    "  of it: sampling the drafts",
    "llama_sampler_sample",
    "llama.cpp, apply alone",
)
TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
NO_TOKENS = np.zeros(0, np.int32)
SLOTS = np.arange(GAMMA, dtype=np.int32)
PARENTS = SLOTS - 1  # a chain


@dataclass
class Position:
    """The rows of one step; with models, also its time and the contexts that hold the rows."""

    draft_rows: Rows
    target_rows: Rows
    step_s: float | None = None
    contexts: tuple[Any, Any] | None = None


def synthetic(n: int) -> Iterator[Position]:
    rng = np.random.default_rng(2)
    for _ in range(n):
        p = rng.normal(0, 2.0, (GAMMA + 1, SYNTHETIC_VOCAB)).astype(np.float32)
        for row in p:  # a few likely tokens, as a model has
            row[rng.integers(SYNTHETIC_VOCAB, size=8)] += np.linspace(16, 6, 8, dtype=np.float32)
        q = p[:GAMMA] + rng.normal(0, 0.5, (GAMMA, SYNTHETIC_VOCAB)).astype(np.float32)
        yield Position(np.ascontiguousarray(q), p)


def recorded(target: Model, draft: Model, text: str, n_threads: int, n: int) -> Iterator[Position]:
    """Walk through a text, a step at a time, and time the passes that a step makes."""
    tokens = target.tokenize(text, add_special=True, parse_special=False)
    n = min(n, (len(tokens) - N_PROMPT) // (GAMMA + 1))
    if n < 1:
        raise SystemExit("the text is too short")
    with ExitStack() as stack:
        p_session, q_session = (
            stack.enter_context(Session(model, n_ctx=len(tokens) + 1, n_threads=n_threads))
            for model in (target, draft)
        )
        for session in (p_session, q_session):
            session.eval(tokens[:N_PROMPT])
        for start in range(N_PROMPT, N_PROMPT + n * (GAMMA + 1), GAMMA + 1):
            drafted, verified = tokens[start : start + GAMMA], tokens[start : start + GAMMA + 1]
            began = time.perf_counter()
            for token in drafted:
                q_session.eval([token])
            target_rows = p_session.eval(verified, n_logits=GAMMA + 1)
            step_s = time.perf_counter() - began
            q_session.rewind(start)  # read again, to have the four rows side by side
            draft_rows = q_session.eval(drafted, n_logits=GAMMA)
            yield Position(
                draft_rows, target_rows, step_s, (q_session.cache._context, p_session.cache._context)
            )
            q_session.eval(verified[GAMMA:])


class Edgespec:
    """The C core, through the calls the engine makes."""

    def __init__(self, params: SamplingParams, n_vocab: int) -> None:
        self.sampler = params.sampler(n_vocab, GAMMA)
        self.drafts_s = 0.0

    def step(self, position: Position, coins: list[float]) -> None:
        """Sample the drafts, then verify them."""
        began = time.perf_counter()
        draft = np.empty(GAMMA, np.int32)
        for i in range(GAMMA):
            draft[i] = self.sampler.sample(position.draft_rows[i], draft[:i], coins[i], i)
        self.drafts_s = time.perf_counter() - began
        self.sampler.verify(position.target_rows, draft, PARENTS, SLOTS, NO_TOKENS, coins[GAMMA:], True)


class LlamaChain:
    """llama.cpp's own samplers."""

    def __init__(self, params: SamplingParams, n_vocab: int) -> None:
        self.chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        stages = [llama.llama_sampler_init_top_k(params.top_k)] if params.top_k else []
        stages += [llama.llama_sampler_init_top_p(params.top_p, 0)] if params.top_p < 1 else []
        stages += [llama.llama_sampler_init_temp(params.temperature), llama.llama_sampler_init_dist(0)]
        for stage in stages:
            llama.llama_sampler_chain_add(self.chain, stage)
        self.data = np.zeros(n_vocab, TOKEN_DATA)
        self.ids = np.arange(n_vocab, dtype=np.int32)

    def sample(self, position: Position) -> None:
        """Sample every row of the two contexts."""
        assert position.contexts is not None
        for context, n_rows in zip(position.contexts, (GAMMA, GAMMA + 1), strict=True):
            for i in range(n_rows):
                llama.llama_sampler_sample(self.chain, context, i)

    def apply(self, position: Position) -> float:
        """Return the seconds inside `llama_sampler_apply`; filling the array is not counted."""
        spent = 0.0
        for row in (*position.draft_rows, *position.target_rows):
            data = self.data[: len(row)]
            data["id"], data["logit"], data["p"] = self.ids[: len(row)], row, 0.0
            pointer = ctypes.cast(data.ctypes.data, ctypes.POINTER(llama.llama_token_data))
            array = llama.llama_token_data_array(data=pointer, size=len(row), selected=-1, sorted=False)
            reference = ctypes.byref(array)
            began = time.perf_counter()
            llama.llama_sampler_apply(self.chain, reference)
            spent += time.perf_counter() - began
        return spent

    def free(self) -> None:
        """Free the chain and its samplers."""
        llama.llama_sampler_free(self.chain)


def timed(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def measure(
    positions: Iterator[Position], rounds: int
) -> tuple[dict[str, dict[str, list[float]]], list[float]]:
    """Return seconds by case and variant, all of them; and the seconds of every step's passes."""
    seconds: dict[str, dict[str, list[float]]] = {case: {} for case in CASES}
    steps: list[float] = []
    variants: dict[str, tuple[Edgespec, LlamaChain]] = {}
    for number, position in enumerate(positions):
        if position.step_s is not None:
            steps.append(position.step_s)
        for case, params in CASES.items():
            n_vocab = position.target_rows.shape[1]
            if case not in variants:
                variants[case] = Edgespec(params, n_vocab), LlamaChain(params, n_vocab)
            ours, chain = variants[case]

            def note(name: str, spent: float, case: str = case) -> None:
                seconds[case].setdefault(name, []).append(spent)

            for round_ in range(rounds):
                coins = _core.coins(1, (number * rounds + round_) * (2 * GAMMA + 1), 2 * GAMMA + 1)
                turns: list[tuple[str, Callable[[], float]]] = [
                    (OURS, lambda: timed(lambda: ours.step(position, coins))),  # noqa: B023
                    (APPLY, lambda: chain.apply(position)),  # noqa: B023
                ]
                if position.contexts is not None:
                    turns.insert(1, (FULL, lambda: timed(lambda: chain.sample(position))))  # noqa: B023
                for name, turn in rotated(turns, round_):
                    spent = turn()
                    note(name, spent)
                    if name == OURS:
                        note(OUR_DRAFTS, ours.drafts_s)
    for _, chain in variants.values():
        chain.free()
    return seconds, steps


def report(result: dict[str, Any]) -> None:
    print(f"{'rows':<16}{result['rows']}")
    step_ms = None
    if result["step_s"]:
        step_ms, low, high = (1e3 * x for x in spread(result["step_s"]))
        print(f"{'a step decodes':<16}{step_ms:.1f} ms (quartiles {low:.1f} .. {high:.1f})")
    for case, variants in result["seconds"].items():
        print(f"\n{case}\n{'':<30}{'median ms':>10}{'quartiles':>18}{'edgespec is':>14}{'of a step':>11}")
        ours = spread(variants[OURS])[0]
        for name in (OURS, OUR_DRAFTS, FULL, APPLY):
            if name not in variants:
                continue
            median, low, high = (1e3 * x for x in spread(variants[name]))
            ratio = f"{median / 1e3 / ours:.1f}x faster" if name not in (OURS, OUR_DRAFTS) else ""
            share = f"{median / (median + step_ms):.2%}" if step_ms else ""
            print(f"{name:<30}{median:>10.3f}{f'{low:.3f} .. {high:.3f}':>18}{ratio:>14}{share:>11}")


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("--synthetic", action="store_true", help="use no model")
    parse.add_argument(
        "--text", type=Path, default=Path(__file__), help="the text that the rows are taken from"
    )
    parse.add_argument("--positions", type=int, default=12, help="steps along the text")
    parse.add_argument("--rounds", type=int, default=4, help="turns of every variant at each position")
    args = parse.parse_args()
    names = (None, None) if args.synthetic else choose_models(args.target, args.draft, writes=True)

    measuring = Measuring(args)
    if names[0] and names[1]:
        text = args.text.read_text()[: 16 * (N_PROMPT + args.positions * (GAMMA + 1))]
        files = resolve(names[0]), resolve(names[1])
        with Model(files[0]) as target, Model(files[1]) as draft:
            seconds, steps = measure(recorded(target, draft, text, args.threads, args.positions), args.rounds)
        rows = f"{files[0].name} and {files[1].name} on {args.text.name}"
    else:
        seconds, steps = measure(synthetic(args.positions), args.rounds)
        rows = f"synthetic, {SYNTHETIC_VOCAB} tokens"
    measuring.end()
    print(measuring)
    result = {"rows": rows, "gamma": GAMMA, "step_s": steps, "seconds": seconds}
    report(result)
    measuring.keep("accept", result)


if __name__ == "__main__":
    start(main)
