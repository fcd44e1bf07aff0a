"""Trains drafts of several shapes alike and compares what of them is accepted.

Shapes (draft_shapes_model.py): `head`, as `edgespec draft make` trains it; `head-fused`, which reads the
states of three layers instead of one; `block-1` and `block-2`, heads of one and two layers that give
seven tokens in one pass. All see the same texts in the same order and have the same processor time (not
wall time, which depends on other programs).

    bench/draft_shapes.py states --texts target_texts.npz --folder states     the target reads texts
    bench/draft_shapes.py train --texts target_texts.npz --folder states --minutes 20 --out curves.json

Accepted by position: greedy drafts of 7 that begin everywhere in the target's greedy answers to prompts
that the forge holds out, each position given those before it; answers with code and without apart.
`draft_shapes_cost.py` takes the curves and says what they are worth.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from draft_shapes_data import TargetTexts
from draft_shapes_model import N_PLACES, SHAPES, Draft, Params, ShapeBatch
from draft_shapes_optimizer import shape_optimizer
from draft_shapes_states import extract
from edgespec.forge.training.acceptance import starts
from edgespec.forge.training.batches import BatchSize, EpochPosition, TextPacking, batches
from edgespec.forge.training.family import TrainingBatch
from edgespec.models.resolve import resolve
from script import start

_WARM_UP = 10  # steps
_ROWS_JUDGED = 2  # of a batch: the logits of all kept tokens take much memory
_FROM_HEAD = 0.5  # learning rate with a head's weights, relative to that without


def evaluation(texts: TargetTexts, draft: Draft) -> Any:  # noqa: ANN401 - a function
    """Return a function of parameters: accepted by position, of each kind of held-out texts."""
    walk, n = jax.jit(draft.right), _ROWS_JUDGED
    nothing = np.zeros((n, 1), np.int32), np.zeros(1, np.int32), np.zeros(1, np.float32)
    packed: dict[str, list[ShapeBatch]] = {}
    for kind, some in texts.held_out.items():
        packed[kind] = []
        for batch, place in batches(
            TextPacking(some, BatchSize(n)), texts.target.embed, n, 0, EpochPosition()
        ):
            packed[kind].append(ShapeBatch(*batch, *nothing))
            if place.epoch:
                break

    def evaluate(params: Params) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for kind, some in packed.items():
            tested = np.zeros(N_PLACES + 1, np.int64)
            for batch in some:
                right = np.asarray(walk(params, texts.frozen, batch))[
                    starts(TrainingBatch(*batch[:6]), N_PLACES)
                ]
                tested[0] += len(right)
                tested[1:] += np.cumprod(right, -1).sum(0)
            by_position = (tested[1:] / np.maximum(tested[:-1], 1)).round(4).tolist()
            found[kind] = {"accepted": tested.tolist(), "by_position": by_position}
        return found

    return evaluate


@dataclass(slots=True)
class ShapeTraining:
    """The training of a shape: its state, and its curve."""

    texts: TargetTexts
    name: str
    args: argparse.Namespace
    curve: list[dict[str, Any]] = field(default_factory=list)
    n_tokens: int = 0
    n_steps: int = 0
    spent_s: float = 0.0
    loss: float = float("nan")

    def run(self) -> dict[str, Any]:
        """Train for the processor time; return the curve."""
        texts, args, shape = self.texts, self.args, SHAPES[self.name]
        draft = Draft(shape, texts.shape, texts.norm, texts.scales)
        fitted, head = (None, texts.head) if args.start == "head" else (texts.fitted(shape.n_states), None)
        params = draft.init(jax.random.key(args.seed), fitted, head)
        evaluate = evaluation(texts, draft)
        optimizer = shape_optimizer(args.rate, args.parts)
        moments = optimizer.init(params)

        def traced(
            params: Params, moments: Params, frozen: Params, batch: ShapeBatch, length: Params
        ) -> Params:
            loss, gradient = jax.value_and_grad(draft.loss)(params, frozen, batch, args.eta)
            updates, moments = optimizer.update(gradient, moments, params)
            return jax.tree.map(lambda x, u: x + length * u, params, updates), moments, loss

        step = jax.jit(traced, donate_argnums=(0, 1))
        budget, seen = 60 * args.minutes, 0.0
        if self.name == "head" or args.looks > 1:
            self._look(evaluate(params))
        for batch in texts.feed(args.rows, shape.n_anchors, args.seed):
            length = jnp.float32(self._length(self.spent_s / budget))
            began = time.process_time()
            params, moments, value = step(params, moments, texts.frozen, batch, length)
            self.loss = float(value)
            self.n_steps += 1
            if self.n_steps == 1:
                continue  # it compiled
            self.spent_s += time.process_time() - began
            self.n_tokens += int(batch.weights.sum())
            if self.spent_s >= budget:
                break
            if self.spent_s - seen >= budget / args.looks:
                seen = self.spent_s
                self._look(evaluate(params))
        self._look(evaluate(params))
        if args.save:
            leaves = jax.tree_util.tree_leaves_with_path(params)
            stored: dict[str, Any] = {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}
            np.savez(args.save / f"{self.name}.npz", **stored)
        rate = self.n_tokens / max(self.spent_s, 1e-9)
        return {"shape": asdict(shape), "curve": self.curve, "tokens_per_cpu_s": round(rate, 1)}

    def _length(self, share: float) -> float:
        longest = _FROM_HEAD if self.args.start == "head" else 1.0
        cosine = 0.05 + 0.95 * 0.5 * (1 + np.cos(np.pi * min(1.0, share)))
        return longest * min(1.0, (self.n_steps + 1) / _WARM_UP) * float(cosine)

    def _look(self, accepted: dict[str, Any]) -> None:
        at = {"cpu_s": round(self.spent_s), "tokens": self.n_tokens, "steps": self.n_steps, "loss": self.loss}
        self.curve.append({**at, "held_out": accepted})
        shown = "; ".join(f"{kind} {one['by_position']}" for kind, one in accepted.items())
        print(f"{self.name} {at['cpu_s']} s, {self.n_tokens:,} tokens: {shown}", flush=True)


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("step", choices=("states", "train"))
    parse.add_argument(
        "--texts", type=Path, required=True, help="an .npz: tokens, length, n_prompt, temperature"
    )
    parse.add_argument("--folder", type=Path, required=True, help="for the states: 9 KB a token")
    parse.add_argument("--target", default="qwen2.5-coder-1.5b-q4_k_m")
    parse.add_argument(
        "--head", default="qwen2.5-coder-1.5b-head-q4_0", help="whose tokens the drafts can say"
    )
    parse.add_argument("--n-train", type=int, default=200_000, help="tokens to read for training")
    parse.add_argument("--n-held-out", type=int, default=13_000, help="tokens to read for judging")
    parse.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parse.add_argument("--start", choices=("nothing", "head"), default="nothing", help="first weights")
    parse.add_argument("--minutes", type=float, default=20, help="processor time of each training")
    parse.add_argument("--rows", type=int, default=6, help="of a batch; 448 answers each")
    parse.add_argument("--rate", type=float, default=7e-3)
    parse.add_argument(
        "--eta", type=float, default=0.9, help="part of total variation; the rest is cross-entropy"
    )
    parse.add_argument("--parts", type=int, default=512, help="Muon's parts of a matrix; 0: whole")
    parse.add_argument("--looks", type=int, default=4, help="evaluations while training")
    parse.add_argument("--seed", type=int, default=0)
    parse.add_argument("--save", type=Path, metavar="FOLDER", help="for the weights")
    parse.add_argument("--out", type=Path, metavar="FILE", help="for the curves")
    args = parse.parse_args()
    if args.step == "states":
        extract(resolve(args.target), args.texts, args.folder, args.n_train, args.n_held_out)
        return
    texts = TargetTexts(args.texts, args.folder, resolve(args.target), resolve(args.head))
    print(texts.summary, flush=True)
    found: dict[str, Any] = {}
    for name in args.shapes:
        found[name] = ShapeTraining(texts, name, args).run()
        if args.out:
            document = {"options": vars(args), "texts": texts.summary, "found": found}
            args.out.write_text(json.dumps(document, indent=1, default=str) + "\n")


if __name__ == "__main__":
    start(main)
