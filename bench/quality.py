"""Measures how the kernels change a model's answers: perplexity, KL divergence, top-1 agreement with stock.

Each model file (in a process of its own) is loaded twice, with llama.cpp's stock kernels and with
edgespec's. A text runs through four timelines side by side: both kernels, one token a batch and
--batch tokens a batch. Stock's own difference between these two shows how much comes only from the
order of additions. edgespec's logits must be equal to the last bit for every batch.

The text is --text FILE, or HumanEval's problems with their solutions and Spec-Bench's questions
(--humaneval, --spec-bench), in turn, spread over both files.
It is read in windows that each start from an empty context; a window's first token is not scored.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt

import prompts as prompt_sets
from edgespec.apps.bench.compare import log_softmax
from edgespec.apps.bench.suites import evenly
from edgespec.engine.model_choice import choose_models
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.models.resolve import resolve
from script import Measuring, in_child, parser, require_kernels, start

GOAL = 0.005
"""Issue 3: perplexity within this share of stock's."""

Logits = npt.NDArray[np.float32]
LogProbs = npt.NDArray[np.float64]


@dataclass
class Agreement:
    """How two sets of logits of the same tokens agree."""

    kl: list[float] = field(default_factory=list)
    """KL divergence of the second from the first, token by token."""
    same_top: int = 0
    largest_difference: float = 0.0
    rows_not_identical: int = 0

    def add(self, first: tuple[Logits, LogProbs], second: tuple[Logits, LogProbs]) -> None:
        """Count some rows."""
        (logits_p, p), (logits_q, q) = first, second
        self.kl += [float(x) for x in (np.exp(p) * (p - q)).sum(axis=1)]
        self.same_top += int((logits_p.argmax(axis=1) == logits_q.argmax(axis=1)).sum())
        differences = np.abs(logits_p - logits_q).max(axis=1)
        self.largest_difference = max(self.largest_difference, float(differences.max()))
        bits_differ = logits_p.view(np.uint32) != logits_q.view(np.uint32)
        self.rows_not_identical += int(bits_differ.any(axis=1).sum())

    def __str__(self) -> str:
        return (
            f"KL {statistics.fmean(self.kl):.1e} (largest {max(self.kl):.1e}), "
            f"same top-1 {self.same_top / len(self.kl):.2%}, "
            f"largest difference of a logit {self.largest_difference:.2g}"
        )


@dataclass
class Quality:
    """The quality found on one model file."""

    n_tokens: int
    nll: dict[str, list[float]]
    """variant -> negative log-likelihood of each scored token."""
    across: Agreement = field(default_factory=Agreement)
    """stock against edgespec, batch 1."""
    across_batched: Agreement = field(default_factory=Agreement)
    """stock against edgespec, larger batch."""
    stock: Agreement = field(default_factory=Agreement)
    """stock, batch 1 against the larger."""
    ours: Agreement = field(default_factory=Agreement)
    """edgespec, batch 1 against the larger."""

    def perplexity(self, variant: str) -> float:
        """Return the perplexity under one of the four variants."""
        return math.exp(statistics.fmean(self.nll[variant]))

    def difference(self, batch: str) -> tuple[float, float]:
        """Return edgespec's perplexity relative to stock's, less 1; and its standard error."""
        pairs = zip(self.nll[f"edgespec {batch}"], self.nll[f"stock {batch}"], strict=True)
        logs = [ours - stock for ours, stock in pairs]
        error = statistics.stdev(logs) / math.sqrt(len(logs))
        return math.expm1(statistics.fmean(logs)), error


VARIANTS = ("stock 1", "stock N", "edgespec 1", "edgespec N")


def measure(path: Path, text: str, args: argparse.Namespace) -> Quality:
    """Run the text through the four timelines."""
    found = Quality(0, {variant: [] for variant in VARIANTS})
    with ExitStack() as stack:
        sessions: dict[str, Session] = {}
        for kernels in (False, True):
            model = stack.enter_context(Model(path, kernels=kernels))
            for batch in "1N":
                variant = f"{'edgespec' if kernels else 'stock'} {batch}"
                window = min(args.window, model.n_ctx_train)
                sessions[variant] = stack.enter_context(
                    Session(model, n_ctx=window, n_threads=args.threads, n_logits_max=args.batch)
                )
        tokens = model.tokenize(text, add_special=False, parse_special=False)[: args.tokens]
        found.n_tokens = len(tokens)
        for start in range(0, len(tokens), window):
            for session in sessions.values():
                session.clear()
            here = tokens[start : start + window]
            for at in range(0, len(here), args.batch):
                batch_tokens, following = here[at : at + args.batch], here[at + 1 : at + 1 + args.batch]
                add(
                    found,
                    {variant: rows(sessions[variant], variant, batch_tokens) for variant in VARIANTS},
                    following,
                )
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def rows(session: Session, variant: str, tokens: list[int]) -> Logits:
    """Return the logits after each of the tokens."""
    if variant.endswith("N"):
        return session.eval(tokens, n_logits=len(tokens)).copy()
    return np.stack([session.eval([token], n_logits=1)[0].copy() for token in tokens])


def add(found: Quality, logits: dict[str, Logits], following: list[int]) -> None:
    """Count the rows of one batch; `following` are the tokens that come after each, where known."""
    both = {}
    for variant, values in logits.items():
        both[variant] = values, log_softmax(values)
        found.nll[variant] += [-float(both[variant][1][i, token]) for i, token in enumerate(following)]
    found.across.add(both["stock 1"], both["edgespec 1"])
    found.across_batched.add(both["stock N"], both["edgespec N"])
    found.stock.add(both["stock 1"], both["stock N"])
    found.ours.add(both["edgespec 1"], both["edgespec N"])


def report(name: str, found: Quality, batch: int) -> None:
    """Print what was found on one file."""
    print(f"\n{name}, {found.n_tokens} tokens")
    for label, key in (("1", "1"), (str(batch), "N")):
        share, error = found.difference(key)
        print(
            f"  perplexity, batch {label:<3} stock {found.perplexity(f'stock {key}'):.4f}, "
            f"edgespec {found.perplexity(f'edgespec {key}'):.4f}: {share:+.3%} (standard error {error:.3%})"
            f"   {'met' if abs(share) <= GOAL else 'MISSED'}: within {GOAL:.1%}"
        )
    print(f"  stock to edgespec, batch 1     {found.across}")
    print(f"  stock to edgespec, batch {batch:<5} {found.across_batched}")
    print(f"  stock, batch 1 to {batch:<12} {found.stock}")
    print(f"  edgespec, batch 1 to {batch:<9} {found.ours}")
    n = found.ours.rows_not_identical
    print(f"  {'MISSED' if n else 'met'}: edgespec's logits identical in both batches ({n} rows are not)")


def default_text(args: argparse.Namespace) -> str:
    """Return code and questions in turn, more characters than --tokens can need."""
    code = [p["prompt"] + p["canonical_solution"] for p in prompt_sets.records(args.humaneval)]
    questions = [question["turns"][0] for question in prompt_sets.records(args.spec_bench)]
    placed: list[tuple[float, str]] = []
    for texts in (code, questions):
        n = math.ceil(3 * args.tokens / sum(map(len, texts)) * len(texts))  # half of 6 characters a token
        chosen = evenly(texts, n)
        placed += [(i / len(chosen), text) for i, text in enumerate(chosen)]
    return "\n\n".join(text for _, text in sorted(placed, key=lambda item: item[0]))


def main() -> None:
    parse = parser(__doc__, pair=False)
    parse.add_argument("models", nargs="*", help="paths or names; default: the default pair")
    parse.add_argument("--text", type=Path, metavar="FILE", help="any text")
    parse.add_argument("--humaneval", type=Path, metavar="FILE", help="HumanEval.jsonl.gz")
    parse.add_argument("--spec-bench", type=Path, metavar="FILE", help="a file in Spec-Bench's format")
    parse.add_argument("--tokens", type=int, default=2560, help="most tokens of the text")
    parse.add_argument("--window", type=int, default=2048, help="tokens a window")
    parse.add_argument("--batch", type=int, default=8, help="tokens a batch, beside 1")
    args = parse.parse_args()
    if args.text is None and not (args.humaneval and args.spec_bench):
        parse.error("give --text, or --humaneval and --spec-bench")
    if min(args.batch, args.tokens, args.window) < 2:
        parse.error("--batch, --tokens and --window must be at least 2")
    require_kernels()

    text = args.text.read_text(encoding="utf-8") if args.text else default_text(args)
    files = [args.text] if args.text else [args.humaneval, args.spec_bench]
    names = args.models or [name for name in choose_models(None, None, writes=True) if name]
    measuring = Measuring(args)
    measured: dict[str, Quality] = {}
    for path in map(resolve, names):
        measured[path.name] = in_child(measure, path, text, args)
        report(path.name, measured[path.name], args.batch)
    measuring.end()
    print(f"\n{measuring}")
    result = {
        "text": [{"file": file.name, "sha256": sha256(file.read_bytes()).hexdigest()} for file in files],
        "batch": args.batch,
        "window": args.window,
        "models": measured,
    }
    measuring.store("-".join(["quality", *(Path(name).stem for name in measured)]), result)


if __name__ == "__main__":
    start(main)
