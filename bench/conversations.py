"""Conversations of long texts, made of the standard library by a seed: an agent's, about a document, a chat.

The same seed, tokenizer and Python give the same texts. Lengths in tokens are about what is asked for, and
without what a chat template adds. The answers that later turns read are the conversation's, whatever a server
wrote: so all servers read the same.
"""

from __future__ import annotations

import ast
import inspect
import random
import re
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

from edgespec.errors import UsageError
from edgespec.llama.weights import Model

Messages = list[dict[str, str]]

_GROWTH = 27  # of an agent's first prompt, a 27th comes with each turn: 12,000 tokens are 16,000 after nine
_SHORTEST = 16  # tokens of a piece that is worth showing
_LONGEST = 16  # characters of a token, on average: of what follows none is read
_AGENT = "You are a coding agent that edits the repository below. Print code and nothing else."
_CHAT = "You explain Python's standard library, in a few sentences."


@dataclass(frozen=True)
class Turn:
    """A question, and what later turns read as its answer."""

    question: str
    answer: str = ""


@dataclass(frozen=True)
class Conversation:
    """What a client sends turn by turn."""

    system: str
    turns: tuple[Turn, ...]
    n_predict: int
    """Most tokens that a server is to write in a turn."""

    def prompts(self) -> Iterator[Messages]:
        """Yield the messages of each turn, which begin with those of the turn before."""
        messages = [{"role": "system", "content": self.system}]
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.question})
            yield [*messages]
            messages.append({"role": "assistant", "content": turn.answer})


@dataclass(frozen=True)
class Excerpt:
    """A part of a module, from its shortest function on, as an agent reads it."""

    file: str
    text: str
    functions: dict[str, str]
    """The functions and methods that it has whole, by name."""


def _functions(source: str) -> dict[str, str]:
    lines = source.splitlines(keepends=True)
    return {
        node.name: "".join(lines[node.lineno - 1 : node.end_lineno])
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("__")
    }


def _read(file: Path) -> str:
    with tokenize.open(file) as opened:
        return opened.read()


class TextModel(Protocol):
    """A model's vocabulary."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return the tokens of `text`."""

    def piece(self, token: int, /) -> bytes:
        """Return the text of `token`."""


class Sources:
    """The standard library's modules in an order by `seed`, each read once, in a model's tokens."""

    def __init__(self, model: TextModel, seed: str) -> None:
        self._model = model
        self.random = random.Random(seed)
        files = sorted(Path(inspect.__file__).parent.glob("*.py"))
        self.random.shuffle(files)
        self._files = iter(files)

    def _tokens(self, text: str) -> list[int]:
        return self._model.tokenize(text, add_special=False, parse_special=False)

    def count(self, text: str) -> int:
        """Return the tokens of a text."""
        return len(self._tokens(text))

    def cut(self, text: str, n_tokens: int) -> str:
        """Return the beginning of a text with `n_tokens` tokens, or all of it."""
        n_tokens = max(n_tokens, 0)
        tokens = self._tokens(text[: _LONGEST * n_tokens])[:n_tokens]
        return b"".join(map(self._model.piece, tokens)).decode(errors="ignore")

    def excerpts(self, n_tokens: int, n_modules: int = 4) -> list[Excerpt]:
        """Return `n_tokens` tokens of at least `n_modules` modules. Raises UsageError if there are fewer."""
        found: list[Excerpt] = []
        left, most = n_tokens, -(-n_tokens // n_modules)
        while left > 0:
            file = next(self._files, None)
            if file is None:
                raise UsageError("the standard library here is too short", field="tokens", value=n_tokens)
            source = _read(file)
            functions = _functions(source)
            begin = source.find(min(functions.values(), key=len, default=""))
            text = self.cut(f"\n# {file.name}\n{source[begin:]}", min(left, most))
            left -= self.count(text)
            whole = {name: code for name, code in functions.items() if code in text}
            found.append(Excerpt(file.name, text, whole))
        return found

    def code(self, n_tokens: int) -> str:
        """Return `n_tokens` tokens of code. Raises UsageError if there are too few."""
        return "".join(excerpt.text for excerpt in self.excerpts(n_tokens))

    def modules(self, n_tokens: int) -> str:
        """Return modules, the last one cut: more tokens begin alike. Raises UsageError for too few."""
        text, left = "", n_tokens
        for file in self._files:
            part = self.cut(f"\n# {file.name}\n{_read(file)}", left)
            text += part
            left -= self.count(part)
            if left <= 0:
                return text
        raise UsageError("the standard library here is too short", field="depth", value=n_tokens)

    def described(self) -> Iterator[tuple[str, str]]:
        """Yield functions and classes, and what their docstrings say."""
        for file in self._files:
            for node in ast.parse(_read(file)).body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and (said := ast.get_docstring(node)):
                    yield f"{file.stem}.{node.name}", said


def agent(model: Model, n_tokens: int, n_turns: int, seed: int) -> Conversation:
    """Return an agent's session on a repository of `n_tokens` tokens; each later turn adds a 27th.

    Each turn asks for a function of it with another name: code that is copied but for a few words. Raises
    UsageError if no function fits.
    """
    sources = Sources(model, f"agent {seed}")
    step = n_tokens // _GROWTH
    repository = sources.excerpts(n_tokens - sources.count(_AGENT + _edit("module.py", "name", "new_name")))
    known = [(one.file, name, code) for one in repository for name, code in one.functions.items()]
    if not known:
        raise UsageError("no function fits; ask for more", field="tokens", value=n_tokens)
    sizes = {code: abs(sources.count(code) - step // 2) for _, _, code in known}
    known = sorted(known, key=lambda one: sizes[one[2]])[:n_turns]
    sources.random.shuffle(known)
    turns: list[Turn] = []
    shown = ""
    for i in range(n_turns):
        module, name, code = known[i % len(known)]
        question = shown + _edit(module, name, f"{name}_{i + 1}")
        edited = re.sub(rf"\b{name}\b", f"{name}_{i + 1}", code)
        turns.append(Turn(question, sources.cut(edited, max(step // 2, _SHORTEST))))
        room = step - sources.count(turns[-1].answer) - sources.count(_edit(module, name, name))
        read = sources.excerpts(room, 1) if room >= _SHORTEST else []
        shown = "".join(f"You asked for this file:\n{one.text}\n\n" for one in read)
    system = f"{_AGENT}\n" + "".join(one.text for one in repository)
    return Conversation(system, tuple(turns), n_predict=128)


def _edit(module: str, name: str, new_name: str) -> str:
    return f"In {module}, rename `{name}` to `{new_name}` and print the whole function."


def document(model: Model, n_tokens: int, _n_turns: int, seed: int) -> Conversation:
    """Return one question on a document of `n_tokens` tokens. Raises UsageError if there are too few."""
    sources = Sources(model, f"document {seed}")
    text, names, n = "", list[str](), 0
    for name, said in sources.described():
        text += (part := f"# {name}\n\n{said}\n\n")
        names.append(name)
        if (n := n + sources.count(part)) >= n_tokens:
            break
    else:
        raise UsageError(f"the document has only {n} tokens", field="tokens", value=n_tokens)
    question = (
        f"\n\nWhat does the document say about {sources.random.choice(names[: max(1, len(names) // 2)])}?"
    )
    room = n_tokens - sources.count(_CHAT + question)
    return Conversation(_CHAT, (Turn(sources.cut(text, room) + question),), n_predict=128)


def chat(model: Model, n_tokens: int, n_turns: int, seed: int) -> Conversation:
    """Return a chat of `6 * n_turns` turns, with answers of `n_tokens / 200` tokens.

    Raises UsageError if there are too few docstrings for it.
    """
    sources = Sources(model, f"chat {seed}")
    n_answer = max(n_tokens // 200, _SHORTEST)
    long_enough = (
        Turn(f"What is {name} for?", sources.cut(said, n_answer))
        for name, said in sources.described()
        if sources.count(said) >= n_answer
    )
    turns = tuple(islice(long_enough, 6 * n_turns))
    if len(turns) < 6 * n_turns:
        raise UsageError(f"at most {len(turns) // 6} can be made", field="turns", value=n_turns)
    return Conversation(_CHAT, turns, n_predict=64)


MAKERS: dict[str, Callable[[Model, int, int, int], Conversation]] = {
    "agent": agent,
    "document": document,
    "chat": chat,
}
"""Each takes a model, which counts the tokens, the tokens of the first prompt, turns, and a seed."""
