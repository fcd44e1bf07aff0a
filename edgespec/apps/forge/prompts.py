"""Prompts that make the target write texts to train drafts on; the built-in ones are drawn from templates.

prompts.toml has kinds of prompts, each with a share and templates, and lists of words that fill them. More
prompts ask about functions of this machine's Python library, or put questions to the
target that it wrote itself (`TextPrompt.then`; Self-Instruct, arXiv 2212.10560). No prompt may come from a
benchmark, since benchmarks evaluate drafts.
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.apps.forge.dataset import BUILT_IN, key_of

Words = Mapping[str, list[str]]

# ---- functions of this machine's Python library ----

_LEFT_OUT = {"test", "tests", "site-packages", "dist-packages"}
_LEFT_OUT |= {"idlelib", "lib2to3", "turtledemo", "__pycache__"}
_LEAST_LINES, _MOST_LINES = 4, 40
_MOST_CODE = 1200  # characters
_MOST_DOC = 400
_PART = re.compile("<(NAME|SIGNATURE|DOC|CODE|HALF)>")
_PER_FILE = 12  # functions: some modules have hundreds that look alike


@cache
def library() -> tuple[Path, ...]:
    """Return the files of the Python library, except tests and the like."""
    root = Path(sysconfig.get_path("stdlib"))
    found = (path for path in root.rglob("*.py") if not _LEFT_OUT & set(path.relative_to(root).parts))
    return tuple(sorted(found))


def functions_of(path: Path) -> Iterator[dict[str, str]]:
    """Yield the functions of a file that are neither tiny nor long; none if it cannot be parsed.

    Of each: NAME, SIGNATURE, CODE, HALF of the code, and DOC, the docstring's first paragraph on one line.
    """
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (OSError, ValueError, SyntaxError, RecursionError):
        return
    all_lines = source.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("__") or node.end_lineno is None:
            continue
        if not _LEAST_LINES <= node.end_lineno - node.lineno <= _MOST_LINES:
            continue
        code = textwrap.dedent("\n".join(all_lines[node.lineno - 1 : node.end_lineno]))
        if len(code) > _MOST_CODE or not code.startswith("def "):
            continue
        lines = code.splitlines()
        signature = "\n".join(lines[: node.body[0].lineno - node.lineno]) or lines[0]
        doc = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        yield {
            "NAME": node.name,
            "SIGNATURE": signature.rstrip(),
            "DOC": doc[:_MOST_DOC],
            "CODE": code.rstrip(),
            "HALF": "\n".join(lines[: len(lines) // 2 + 1]),
        }


def _function_prompts(
    described: Sequence[str], code: Sequence[str], words: Words, rng: random.Random
) -> Callable[[random.Random], TextPrompt]:
    """Return a function that draws prompts on library functions; their text is "" when there are none.

    The templates `described` are for functions with a docstring, `code` for any. A function's parts fill
    slots such as <NAME>, `words` the others.
    """
    files, functions = list(library()), list[dict[str, str]]()
    rng.shuffle(files)

    def draw(rng: random.Random) -> TextPrompt:
        # Files are parsed as they are needed: all take some seconds.
        n_before = len(functions)
        while files and len(functions) <= n_before:
            found = list(functions_of(files.pop()))
            functions.extend(rng.sample(found, min(_PER_FILE, len(found))))
        if not functions:
            return TextPrompt(BUILT_IN, ("",))
        function = rng.choice(functions)
        template = rng.choice(described if function["DOC"] and rng.random() < 0.5 else code)
        return TextPrompt(BUILT_IN, (_PART.sub(lambda part: function[part[1]], fill(template, words, rng)),))

    return draw


_FILE = Path(__file__).with_name("prompts.toml")
_SLOT = re.compile(r"\{(?:([a-z][a-z_]*)|(\d+)\.\.(\d+))(?:\.([a-z]))?\}")
_TRIES = 200  # repeated draws of a kind after which it counts as used up
_REDRAWS = 8  # of a word that another label has
_FOLLOWED = 0.25  # share of prompts with follow-ups that get one
_ANSWER, _LINE = "<ANSWER>", "<LINE>"  # slots in `then`: the whole answer, or each of its lines
_LIST_MARK = re.compile(r"^\s*(?:\d+\s*[.):]|[-*•])\s*")
_SHORTEST = 15  # characters of an answer or a line that is worth a prompt


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt in words, with the turns before it."""

    source: str
    turns: tuple[str, ...]
    """Turns of the user and the target; the first and the last are the user's."""
    follow_up: str = ""
    """The user's reply to the target's answer; "": none."""
    then: str = ""
    """A prompt for a new conversation, about the answer (<ANSWER>) or each line of it (<LINE>); "": none."""
    made_from: tuple[str, ...] = ()
    """Source of the key of a prompt about an answer: the first turn before it, and more."""

    @property
    def key(self) -> int:
        """The `key_of` the prompt, whatever the target answered."""
        first, *others = self.made_from or self.turns[::2]
        return key_of(first.encode(), "\0".join(others).encode())

    def followed(self, answer: str) -> list[TextPrompt]:
        """Return the prompts that follow the target's answer."""
        found = [TextPrompt(self.source, (*self.turns, answer, self.follow_up))] if self.follow_up else []
        slot = _LINE if _LINE in self.then else _ANSWER
        for i, text in enumerate(lines_of(answer) if slot == _LINE else [answer.strip()]):
            if self.then and len(text) >= _SHORTEST:
                asked, origin = self.then.replace(slot, text), (self.turns[0], self.then, str(i))
                found.append(TextPrompt(self.source, (asked,), made_from=origin))
        return found


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt in tokens: a beginning that the target continues, or a whole text that it reads."""

    source: str
    tokens: tuple[int, ...]
    n_prompt: int
    """Tokens of the beginning; a text with more tokens is only read."""
    weights: tuple[float, ...] = ()
    """Weight of each token in training; (): 1."""

    @property
    def key(self) -> int:
        """The `key_of` its beginning and its rest."""
        ids = np.array(self.tokens, "<i4")
        return key_of(ids[: self.n_prompt].tobytes(), ids[self.n_prompt :].tobytes())


def lines_of(answer: str) -> list[str]:
    """Return the distinct lines of a list, without numbers and bullets."""
    lines = (_LIST_MARK.sub("", line).strip().strip('*"').strip() for line in answer.splitlines())
    return list(dict.fromkeys(one for one in lines if one and one[-1] != ":"))


def fill(
    template: str,
    words: Words,
    rng: random.Random,
    bound: dict[str, str] | None = None,
) -> str:
    """Fill the slots of a template by `rng`, from lists of words. Raises KeyError for an unknown list.

    {topic}     a word of the list, which may have slots itself
    {topic.a}   the same word wherever .a stands in a prompt, another one than .b
    {2..60}     a number; {2..60.a} as above

    `bound`: the words that slots have already.
    """
    known = {} if bound is None else bound

    def chosen(slot: re.Match[str]) -> str:
        name, low, high, label = slot.groups()
        key = slot[0]
        if label and key in known:
            return known[key]
        if name is None:
            word = str(rng.randint(int(low), int(high)))
        else:
            # The same list under another label gives another word.
            taken = {known[one] for one in known if one.startswith(f"{{{name}.")} if label else set()
            for _ in range(_REDRAWS):
                word = fill(rng.choice(words[name]), words, rng, known)
                if word not in taken:
                    break
        if label:
            known[key] = word
        return word

    return _SLOT.sub(chosen, template)


@dataclass(slots=True)
class _PromptKind:
    """A kind of prompts."""

    share: float
    draw: Callable[[random.Random], TextPrompt]
    credit: float = 0.0
    seen: set[str] = field(default_factory=set)

    def next(self, rng: random.Random) -> TextPrompt | None:
        """Return a prompt not returned before; None if there are no more."""
        for _ in range(_TRIES):
            prompt = self.draw(rng)
            (text,) = prompt.turns
            if text and text not in self.seen:
                self.seen.add(text)
                return prompt
        return None


def built_in(seed: int = 0) -> Iterator[TextPrompt]:
    """Yield the built-in prompts, each once; any beginning is a fair mixture of the kinds.

    The order depends on the seed, and on the version of Python, whose library some prompts ask about.
    """
    rng = random.Random(seed)  # noqa: S311 - for a mixture, not for secrets
    kinds = _kinds(rng)
    while kinds:
        # Each kind earns its share with every prompt, and pays for its own.
        for kind in kinds:
            kind.credit += kind.share
        kind = max(kinds, key=lambda one: one.credit)
        kind.credit -= sum(one.share for one in kinds)
        found = kind.next(rng)
        if found is None:
            kinds.remove(kind)
            continue
        yield found


def _kinds(rng: random.Random) -> list[_PromptKind]:
    document = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    words, python = document["words"], document["python"]
    functions = _function_prompts(python["described"], python["code"], words, rng)
    kinds = [_PromptKind(kind["share"], _drawer(words, kind)) for kind in document["kinds"]]
    return [*kinds, _PromptKind(python["share"], functions)]


def _drawer(words: Words, kind: Mapping[str, Any]) -> Callable[[random.Random], TextPrompt]:
    follow_ups, then = kind.get("follow_ups"), kind.get("then")

    def draw(rng: random.Random) -> TextPrompt:
        text = fill(rng.choice(kind["templates"]), words, rng).strip()
        follow_up = ""
        if follow_ups and rng.random() < _FOLLOWED:
            follow_up = fill(rng.choice(follow_ups), words, rng)
        return TextPrompt(BUILT_IN, (text,), follow_up, fill(rng.choice(then), words, rng) if then else "")

    return draw
