"""Which texts of a target's kept data share words with a suite's prompts: those that drafts are judged by.

The built-in prompts are known beforehand and tested; the target also asks itself, and may know a benchmark by
heart. So this looks through everything that was written or read, prompts and answers, for any eight words in
a row that a prompt of the suite has, and prints them: definitions and phrases that everybody uses, one hopes.

    bench/trained_on.py qwen2.5-coder-1.5b-q4_k_m human-eval spec_bench/question.jsonl
"""

from __future__ import annotations

import argparse
import re
from collections import Counter

from edgespec.apps.forge.dataset import Dataset, DatasetTarget
from edgespec.llama.weights import Model
from edgespec.models.quantizations import model_file
from edgespec.models.suites import load_suite

_WORDS = 8  # as many in a row are no coincidence


def runs(text: str) -> set[tuple[str, ...]]:
    """Return all runs of words, but those of numbers alone: 1, 2, 3 .. is nobody's."""
    words = re.findall(r"\w+", text.lower())
    found = {tuple(words[i : i + _WORDS]) for i in range(len(words) - _WORDS + 1)}
    return {run for run in found if not all(word.isdigit() for word in run)}


def main() -> None:
    """Print what is shared."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("target", help="whose data: a name of `edgespec models`, or a file")
    options.add_argument("suites", nargs="+", help="human-eval, or a .jsonl file of prompts")
    given = options.parse_args()
    judged = {
        run: f"{name} {prompt.id}"
        for name in given.suites
        for prompt in load_suite(name).prompts
        for run in runs(prompt.text)
    }
    file = model_file(given.target)
    texts = 0
    shared: Counter[str] = Counter()
    with Model(file.path, vocab_only=True) as model:
        target = DatasetTarget.of(model.header, file.name, file.facts().sha256)
        for text in Dataset(target, on_message=print).texts(held_out=False):
            texts += 1
            said = b"".join(map(model.piece, text.tokens.tolist())).decode(errors="replace")
            shared.update(f"{judged[run]}: {' '.join(run)}" for run in runs(said) & judged.keys())
    for line, n in shared.most_common():
        print(f"{n:5}  {line}")
    print(f"{len(shared)} runs of {_WORDS} words of {', '.join(given.suites)} in {texts:,} texts")


if __name__ == "__main__":
    main()
