"""Measures whether running the draft model on a side branch pays: how often its second choice is right.

The target writes answers, and the draft model then reads them (teacher forcing). For each range of the
probability of the draft's second likeliest token, two shares are counted: how often that token is the
target's (a branch of one token, which costs no extra draft pass), and how often the draft's likeliest token
after it is the target's too (what a pass over the branch would add). Nothing is timed: compare the shares
with the price of a node on your machine (`edgespec run --explain ir`).
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from edgespec import Engine, SamplingParams
from edgespec.engine.model_choice import choose_models
from edgespec.llama.session import Session
from edgespec.models.suites import DEFAULT, load_suite
from script import parser, start

_BUCKETS = 5  # each a tenth wide; a second likeliest token has at most one half


def main() -> None:
    """Print a table for each temperature."""
    parse = parser(__doc__)
    parse.add_argument("--temp", type=float, nargs="+", default=[0.0, 0.8, 1.0])
    parse.add_argument("-n", "--n-predict", type=int, default=100)
    parse.add_argument("--per-category", type=int, default=1)
    arguments = parse.parse_args()
    prompts = load_suite(DEFAULT).select(None, arguments.per_category).interleaved()
    names = choose_models(arguments.target, arguments.draft, writes=True)
    with Engine(*names, n_threads=arguments.threads, profile=False) as engine:
        if engine.draft is None:
            parse.error("there is no draft model")
        with Session(engine.draft, n_ctx=2048, n_threads=engine.n_threads, n_logits_max=512) as draft:
            for temperature in arguments.temp:
                places: Counter[int] = Counter()
                right: Counter[int] = Counter()
                followed: Counter[int] = Counter()
                for prompt in prompts:
                    count(
                        engine,
                        draft,
                        prompt.text,
                        temperature,
                        arguments.n_predict,
                        (places, right, followed),
                    )
                print(f"temperature {temperature:g}, {places.total()} places")
                print("second likeliest has   places   it is right   and the one after it")
                for bucket in sorted(places):
                    share = places[bucket] / places.total()
                    print(
                        f"{bucket / 10:.1f} - {bucket / 10 + 0.1:.1f} {share:18.1%} "
                        f"{right[bucket] / places[bucket]:13.3f} {followed[bucket] / places[bucket]:18.3f}"
                    )


def count(
    engine: Engine,
    draft: Session,
    prompt: str,
    temperature: float,
    n_predict: int,
    counters: tuple[Counter[int], Counter[int], Counter[int]],
) -> None:
    """Add an answer's places to (all, second right, second and next right)."""
    places, right, followed = counters
    tokens = engine.prompt_tokens(prompt)
    params = SamplingParams(temperature=temperature)
    answer = engine.generate(tokens, params=params, seed=1, n_predict=n_predict).token_ids
    draft.clear()
    rows = draft.eval([*tokens, *answer], n_logits=len(answer) + 1)[:, : engine.target.n_vocab]
    for row, following, token, after in zip(rows, rows[1:], answer, answer[1:], strict=False):
        second, first = np.argsort(row)[-2:]
        probability = np.exp(row[second] - row[first]) / np.exp(row - row[first]).sum()
        bucket = min(_BUCKETS - 1, int(probability * 10))
        places[bucket] += 1
        if token == second:
            right[bucket] += 1
            followed[bucket] += int(following.argmax()) == after


if __name__ == "__main__":
    start(main)
