"""Shows what a head learns of one user's texts: accepted tokens before, and after a training on its mistakes.

    .venv/bin/python bench/learned_head.py --package rich --language Finnish --minutes 15 --save
    .venv/bin/python bench/learned_head.py --package rich --texts 1000 --minutes 480      # a night

The user asks about functions of an installed package, in a language. `--texts` answers are a week: the target
writes them greedily with the head that is installed, and where drafts were rejected is kept, as by
`edgespec run` and `serve --learn`. The head learns from them for `--minutes`, mixed with `--built-in` tokens
of `bench/texts`. Then both heads draft answers to `--judged` other questions about the package: accepted of
a draft of five at each place (the guard's figure, also for built-in texts that are held out), and tokens a
step in the real loop, chains of four. These are counts: the machine may be busy. All that is made lies in
`--folder`; begun again, what is there is used.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edgespec.apps.forge.builder import LEARNING_RATE, TrainingJob, train_head
from edgespec.apps.forge.data_stage import rejected_texts
from edgespec.apps.forge.dataset import BUILT_IN, READ, Dataset, DatasetTarget, is_held_out
from edgespec.apps.forge.exported_texts import ExportedTexts
from edgespec.apps.forge.guard import Guard, GuardTexts
from edgespec.apps.forge.progress import StageContext, StageProgress
from edgespec.apps.forge.prompts import TokenPrompt, WrittenText, functions_of
from edgespec.apps.forge.training.weights import ModelWeights
from edgespec.apps.forge.vocabulary_ranking import read_vocabulary, renew
from edgespec.apps.forge.writing import TargetWriter
from edgespec.decoding.options import Options
from edgespec.decoding.sampling import SamplingParams
from edgespec.drafting.rejections import RejectedPlaces
from edgespec.engine.engine import Engine
from edgespec.engine.model_choice import choose_models
from edgespec.engine.stream import Stream
from edgespec.llama.gguf_header import check_model_file
from edgespec.llama.head_file import read_head
from edgespec.llama.weights import Model
from edgespec.models.hashes import sha256_of
from edgespec.models.resolve import resolve
from edgespec.platform.kept import models_root
from script import Measuring, parser, start

_BUILT_IN = Path(__file__).parent / "texts" / "qwen2.5-coder-1.5b-q4_k_m.npz"
_AT_ONCE = 4  # answers
_CHAIN = 4  # tokens of a draft in the real loop
_BUDGET = 20_000_000_000  # bytes
_QUESTION = "{how}Explain what this function does, step by step:\n\n```python\n{code}\n```"


def questions(package: str, language: str, n: int) -> list[str]:
    """Return `n` questions about functions of a package, in an order that is always the same."""
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"--package {package}: no package of this Python")
    files = sorted(Path(found.submodule_search_locations[0]).rglob("*.py"))
    code = [function.code for path in files for function in functions_of(path)]
    random.Random(0).shuffle(code)
    if len(code) < n:
        raise SystemExit(f"{package} has {len(code)} functions, {n} are needed: choose a larger package")
    how = f"Answer in {language}. " if language else ""
    return [_QUESTION.format(how=how, code=one) for one in code[:n]]


@dataclass(frozen=True, slots=True)
class Written:
    """Answers, and counts of the real loop."""

    texts: tuple[TokenPrompt, ...]
    tokens: int
    steps: int
    tau: float
    """Tokens a step."""
    accepted: float
    """Of drafted ones."""


def write(target: str, head: Path, asked: Sequence[str], args: argparse.Namespace, *, learn: bool) -> Written:
    """Let the target answer, some at once, with drafts of the head; `learn`: keep where they are rejected."""
    waiting, done = list(asked), []
    running: list[Stream] = []
    with Engine(
        target, head, n_threads=args.threads, profile=False, learn=learn, parallel=_AT_ONCE, n_ctx=2048
    ) as engine:
        while waiting or running:
            while waiting and len(running) < _AT_ONCE:
                greedy = SamplingParams(temperature=0.0)
                asking = Options(params=greedy, n_predict=args.n_predict, drafter="model", gamma=_CHAIN)
                running.append(engine.stream(waiting.pop(0), asking))
            engine.step()
            for stream in list(running):
                stream.made()
                if stream.finished:
                    running.remove(stream)
                    done.append((stream.tokens, stream.result))
                    if len(done) % 10 == 0:
                        print(f"  {len(done)} of {len(asked)} answers", flush=True)
    stats = [result.stats for _, result in done]
    steps, drafted = sum(one.steps for one in stats), sum(one.n_drafted for one in stats)
    n_emitted = sum(one.n_emitted for one in stats)
    return Written(
        tuple(TokenPrompt(READ, tuple(tokens), result.prompt_tokens) for tokens, result in done),
        n_emitted,
        steps,
        n_emitted / steps,
        sum(one.n_accepted for one in stats) / drafted,
    )


def read(
    model: Model, dataset: Dataset, prompts: Iterable[TokenPrompt | WrittenText], n_threads: int
) -> None:
    """Let the target read texts for their hidden states; those that are there are skipped."""
    with TargetWriter(model, n_threads=n_threads) as writer, dataset.writer(_BUDGET) as into:
        writer.fill(into, prompts, until=1 << 60)


def built_in_texts(
    target: DatasetTarget, model: Model, n_tokens: int, n_held_out: int
) -> Iterator[WrittenText]:
    """Yield built-in texts of `n_tokens` in all to learn from, and then some that are held out."""
    every = [
        one
        for one in ExportedTexts(_BUILT_IN, target, is_named=True).texts(model)
        if one.source == BUILT_IN and len(one.tokens) > one.n_prompt
    ]
    for part, most in (
        ([one for one in every if not is_held_out(one.key)], n_tokens),
        ([one for one in every if is_held_out(one.key) and one.temperature == 0.0], n_held_out),
    ):
        n = np.cumsum([len(one.tokens) - one.n_prompt for one in part])
        yield from part[: int(np.searchsorted(n, most))]


def show(step: StageProgress) -> None:
    """Print a stage's progress, now and then."""
    now = time.monotonic()
    if now - _shown[0] > 30.0:
        _shown[0] = now
        print(f"  {step.stage} {step.share:.0%} {step.detail}", flush=True)


_shown = [0.0]


def learn(
    args: argparse.Namespace, dataset: Dataset, head: Path, target: ModelWeights
) -> tuple[Path, dict[str, Any]]:
    """Train the head for some minutes on the dataset; return the new file, and facts of the training."""
    old = read_head(check_model_file(head))
    if old is None:
        raise SystemExit(f"{head}: no head that edgespec made")
    token_ids = renew(old.token_ids, read_vocabulary(target.header), list(dataset.texts(held_out=False)))
    job = TrainingJob(
        dataset=dataset,
        target=target,
        token_ids=token_ids,
        hours=args.minutes / 60,
        tokens=None,
        folder=args.folder / "training",
        start=head,
        start_rate=args.rate,
    )
    trained, files = train_head(job, args.folder, ("q4_0",), StageContext(on_progress=show, on_message=print))
    n_new = int(np.isin(token_ids, old.token_ids, invert=True).sum())
    return files["q4_0"], {"new_tokens_of_vocabulary": n_new, **msgspec.to_builtins(trained)}


def options() -> argparse.Namespace:
    """Return the options of the command line."""
    parse = parser(__doc__)
    parse.add_argument("--package", default="rich", help="whose functions the user asks about")
    parse.add_argument("--language", default="", help="in which the user wants the answers")
    parse.add_argument("--texts", type=int, default=110, help="answers of the week")
    parse.add_argument("--judged", type=int, default=24, help="answers to judge by")
    parse.add_argument("-n", "--n-predict", type=int, default=128, help="tokens of an answer")
    parse.add_argument("--built-in", type=int, default=30_000, help="tokens of built-in answers to mix in")
    parse.add_argument("--held-out", type=int, default=8_000, help="of these, tokens to judge by")
    parse.add_argument("--minutes", type=float, default=15.0)
    parse.add_argument("--rate", type=float, default=LEARNING_RATE, help="learning rate, of the usual one")
    parse.add_argument("--folder", type=Path, default=Path("learned-head"))
    return parse.parse_args()


def main() -> None:
    """Make the week, learn, judge, print."""
    args = options()
    measuring = Measuring(args)
    target, name = choose_models(args.target, args.draft)
    file, head = Path(resolve(target)), Path(resolve(name or ""))
    os.environ["EDGESPEC_MODELS_DIR"] = str(models_root())
    os.environ["XDG_CACHE_HOME"] = str(args.folder.absolute())  # the week is not this machine's user's
    asked = questions(args.package, args.language, args.texts + args.judged)
    header = check_model_file(file)
    learnt = Dataset(DatasetTarget.of(header, target, sha256_of(file)), args.folder / "learnt")
    judged = Dataset(learnt.target, args.folder / "judged")
    places = RejectedPlaces(learnt.target.sha256)
    if not places.path.exists():
        print("the week is written", flush=True)
        print(write(target, head, asked[: args.texts], args, learn=True).tau)
    week = places.texts()
    print("others are written", flush=True)
    before = write(target, head, asked[args.texts :], args, learn=False)
    print("texts are read", flush=True)
    with Model(file) as model:
        mixed = built_in_texts(learnt.target, model, args.built_in, args.held_out)
        read(model, learnt, chain(rejected_texts(week), mixed), args.threads)
        read(model, judged, iter(before.texts), args.threads)
    weights = ModelWeights(header)
    print("the head learns", flush=True)
    new, training = learn(args, learnt, head, weights)
    built_in = tuple(text for text in learnt.texts(held_out=True) if text.source == BUILT_IN)
    texts = GuardTexts(tuple(judged.texts()), built_in)
    new, share, figures = Guard(weights, texts, head).choose(new, "q4_0")
    after = write(target, new, asked[args.texts :], args, learn=False)
    n_places = sum(len(text.places) for text in week)
    print(
        f"{len(week)} answers of the week, {n_places:,} rejected places; {training['n_tokens']:,} tokens of"
    )
    print(
        f"training in {60 * training['hours']:.0f} minutes, {training['new_tokens_of_vocabulary']} new tokens"
    )
    print(f"{share:.0%} of the training: {figures}")
    print(f"tokens a step of chains of {_CHAIN}: {before.tau:.2f} before, {after.tau:.2f} now")
    measuring.end()
    print(measuring)
    result = {
        "places": n_places,
        "training": training,
        "guard": msgspec.to_builtins(figures),
        "passes": figures.passes,
        "share": share,
        **{
            key: msgspec.to_builtins(replace(one, texts=()))
            for key, one in (("before", before), ("after", after))
        },
    }
    (args.folder / "result.json").write_bytes(msgspec.json.encode({"machine": measuring.machine, **result}))
    measuring.keep(f"learned-head-{args.package}-{args.language.lower() or 'english'}", result)


if __name__ == "__main__":
    start(main)
