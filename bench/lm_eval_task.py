"""Scores a small multiple-choice task with lm-eval against `edgespec serve`, and compares with llama-server.

lm-eval is a program of its own: install it into an environment beside this one.

    python3 -m venv /tmp/lm-eval && /tmp/lm-eval/bin/pip install "lm-eval[api]"
    .venv/bin/python bench/lm_eval_task.py --lm-eval /tmp/lm-eval/bin/lm-eval --peer bin/llama-server

The 60 questions are in lm_eval_items.jsonl; each has four answers, whose tokens are scored after it.
llama-server tells no probabilities of a prompt: it is asked for one token after each beginning of an answer,
with the probabilities of all tokens. Both then give the sum of an answer's log-probabilities; these differ as
those of two builds of llama.cpp do: by kernels (`--kernels off`: llama.cpp's own) and sizes of passes.
"""

from __future__ import annotations

import json
import math
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from edgespec.engine.model_choice import choose_models
from edgespec.models.resolve import resolve
from script import parser
from servers import Server

ITEMS = Path(__file__).parent / "lm_eval_items.jsonl"
TASK = """task: edgespec_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {items}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1}}
"""


@dataclass(frozen=True)
class Scores:
    """A server's scores of each item's answers: sums of log-probabilities."""

    name: str
    of_items: list[list[float]]

    def accuracy(self, answers: Sequence[int]) -> float:
        """Return the share of items whose right answer is the likeliest."""
        return statistics.fmean(
            scores.index(max(scores)) == answer for scores, answer in zip(self.of_items, answers, strict=True)
        )


def by_lm_eval(program: Path, address: str, items: Path) -> Scores:
    """Run the task against a server with `/v1/completions`."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "edgespec_choices.yaml").write_text(TASK.format(items=json.dumps(str(items))))
        told = f"model=edgespec,base_url={address}/v1/completions,tokenizer_backend=remote"
        command = [str(program), "run", "--model", "local-completions", "--model_args", told]
        command += ["--tasks", "edgespec_choices", "--include_path", folder, "--log_samples"]
        command += ["--output_path", f"{folder}/out"]
        print(" ".join(shlex.quote(part) for part in command), file=sys.stderr)
        subprocess.run(command, check=True, stdout=sys.stderr)
        (found,) = Path(folder, "out").rglob("samples_*.jsonl")
        samples = [json.loads(line) for line in found.read_text().splitlines()]
    samples.sort(key=lambda sample: sample["doc_id"])
    return Scores("edgespec, lm-eval", [[_logprob(one) for one in s["filtered_resps"]] for s in samples])


def _logprob(response: object) -> float:
    while isinstance(response, list):
        response = response[0]
    return float(str(response))


def by_llama_server(address: str, items: Sequence[dict[str, Any]], n_vocab: int) -> Scores:
    """Score the items one token at a time."""
    scores = []
    with httpx.Client(base_url=address, timeout=300) as client:

        def tokens_of(text: str) -> list[int]:
            found = client.post("/tokenize", json={"content": text, "add_special": False}).json()
            return list(found["tokens"])

        for item in items:
            question = tokens_of(item["question"])
            of_item = []
            for choice in item["choices"]:
                whole = tokens_of(f"{item['question']} {choice}")
                assert whole[: len(question)] == question, (
                    "the question's tokens must not depend on the answer"
                )
                of_item.append(
                    sum(
                        token_logprob(client, whole[:n], whole[n], n_vocab)
                        for n in range(len(question), len(whole))
                    )
                )
            scores.append(of_item)
            print(f"\r{len(scores)} of {len(items)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return Scores("llama-server", scores)


def token_logprob(client: httpx.Client, before: Sequence[int], token: int, n_vocab: int) -> float:
    """Return the log-probability of `token` after the tokens `before`: of 500 likely ones, else of all."""
    for n_probs in (500, n_vocab):
        body = {"prompt": [*before], "n_predict": 1, "n_probs": n_probs, "temperature": 0}
        answer = client.post("/completion", json=body)
        answer.raise_for_status()
        for likely in answer.json()["completion_probabilities"][0]["top_logprobs"]:
            if likely["id"] == token:
                return float(likely["logprob"])
    return -math.inf


def compared(one: Scores, other: Scores, answers: Sequence[int]) -> dict[str, Any]:
    """Return how far two servers' scores are from each other."""
    pairs = list(zip(one.of_items, other.of_items, strict=True))
    apart = [abs(a - b) for first, second in pairs for a, b in zip(first, second, strict=True)]
    n = len(answers)
    accuracy = {scores.name: scores.accuracy(answers) for scores in (one, other)}
    return {
        "items": n,
        "accuracy": accuracy,
        "standard error": {name: math.sqrt(p * (1 - p) / (n - 1)) for name, p in accuracy.items()},
        "same answer": sum(a.index(max(a)) == b.index(max(b)) for a, b in pairs),
        "mean difference": statistics.fmean(apart),
        "largest difference": max(apart),
    }


def main() -> None:
    """Score, compare, print."""
    made = parser(__doc__)
    made.add_argument("--lm-eval", type=Path, required=True, metavar="PROGRAM")
    made.add_argument("--peer", metavar="COMMAND", help="llama-server; without it nothing is compared")
    made.add_argument("--kernels", choices=["auto", "off"], default="auto")
    args = made.parse_args()
    items = [json.loads(line) for line in ITEMS.read_text().splitlines()]
    answers = [item["answer"] for item in items]
    serve = [str(Path(sys.executable).with_name("edgespec")), "serve", "--threads", str(args.threads)]
    for name in ("target", "draft", "kernels"):
        if value := getattr(args, name):
            serve += [f"--{name}", value]
    with Server("edgespec", serve) as server:
        served = httpx.get(f"{server.address}/v1/models").json()["data"][0]
        print(f"{served['id']}, {served['edgespec']['kernels']}")
        ours = by_lm_eval(args.lm_eval, server.address, ITEMS)
    found: dict[str, Any] = {"items": len(items), "accuracy": {ours.name: ours.accuracy(answers)}}
    if args.peer:
        path = resolve(choose_models(args.target, None, "none")[0]).absolute()
        command = [*shlex.split(args.peer), "-m", str(path), "-t", str(args.threads), "-c", "2048"]
        with Server("llama-server", command) as server:
            n_vocab = 1 << 20
            found = compared(ours, by_llama_server(server.address, items, n_vocab), answers)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
