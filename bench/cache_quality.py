"""Measures what quantized caches of keys and values cost in quality, beside a cache in F16.

Two texts are read with a cache of each type: Python sources and prose, both of the standard library.
Told are the KL divergence of the distribution of each token from that under F16, and perplexity. Then facts
are looked up: a text of each of --lengths tokens has a sentence with a number of five digits at the
beginning of each of its tenths, and at the end the model is asked for them, one by one. Found is a number of
which each digit is the likeliest token.

    bench/cache_quality.py --tokens 4096 --lengths 4096,8192
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics

from edgespec.apps.bench.accuracy import log_softmax
from edgespec.engine.model_choice import choose_models
from edgespec.llama.cache_types import possible_types, with_cache_type
from edgespec.llama.choices import CacheType
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.models.resolve import resolve
from quality import Agreement
from script import Measuring, in_child, numbers, parser, start

N_NEEDLES = 10
_BATCH = 128
_ROOM = 64  # tokens of a question and its answer, at most
_MODULES = ("argparse", "heapq", "json.decoder", "textwrap", "statistics", "difflib", "shlex", "tarfile")
_PLACES = (
    *("Ardmore", "Belcastel", "Corvara", "Dunmoral", "Elstow"),
    *("Fairmile", "Grimsby", "Hollin", "Inverleigh", "Jarrow"),
)

Tokenize = Callable[[str], list[int]]


# ---- texts ----


def sources() -> str:
    """Return Python sources of the standard library."""
    specs = [importlib.util.find_spec(name) for name in _MODULES]
    return "\n\n".join(Path(spec.origin).read_text() for spec in specs if spec and spec.origin)


def prose() -> str:
    """Return the reference manual that Python's `help` shows."""
    return "\n\n".join(topics[name] for name in sorted(topics))


@dataclass(frozen=True)
class Needle:
    """A fact in a text, and the question for it."""

    at: int
    """Number of the first token of its sentence."""
    question: list[int]
    answer: list[int]


def haystack(tokenize: Tokenize, n_tokens: int, seed: int) -> tuple[list[int], list[Needle]]:
    """Return a text of `n_tokens` with a needle at the beginning of each tenth, by a seed.

    Raises ValueError if there is not as much text.
    """
    rng = random.Random(seed)
    parts = [*sources().split("\n\n"), *prose().split("\n\n")]
    rng.shuffle(parts)
    hay = tokenize("\n\n".join(parts)[: 12 * n_tokens])
    places = rng.sample(_PLACES, N_NEEDLES)
    text: list[int] = []
    needles = []
    for i, (place, number) in enumerate(
        zip(places, rng.sample(range(10_000, 100_000), N_NEEDLES), strict=True)
    ):
        fact = f"The secret number of {place} is"
        end = n_tokens * (i + 1) // N_NEEDLES
        needles.append(Needle(len(text), tokenize(f"\n\n{fact}"), tokenize(f" {number}")))
        text += tokenize(f"\n\n{fact} {number}. Remember it.\n\n")
        if end - len(text) > len(hay):
            raise ValueError(f"no text of {n_tokens} tokens can be made")
        n = end - len(text)
        text += hay[:n]
        hay = hay[n:]
    return text, needles


# ---- measuring ----


@dataclass
class TextQuality:
    """The quality of one cache type on one text."""

    agreement: Agreement = field(default_factory=Agreement)
    nll: list[float] = field(default_factory=list)
    """Negative log-likelihood of each token but the first."""


@dataclass
class Found:
    """The needles found with one cache type in a text."""

    found: list[bool]
    """Of each tenth."""
    probability: list[float]
    """Of each answer."""


@dataclass
class CacheQuality:
    """The quality of all cache types on one model file."""

    texts: dict[str, dict[CacheType, TextQuality]]
    needles: dict[int, dict[CacheType, Found]]
    """By the length of the text."""


def session(model: Model, cache_type: CacheType, n_ctx: int, threads: int) -> Session:
    """Open a session with a cache of a type."""
    model.header = with_cache_type(model.header, cache_type)
    return Session(model, n_ctx=n_ctx, n_threads=threads, n_logits_max=_BATCH)


def read_text(
    model: Model, tokens: list[int], types: list[CacheType], threads: int
) -> dict[CacheType, TextQuality]:
    """Read a text with caches of all types side by side."""
    quality = {one: TextQuality() for one in types}
    with ExitStack() as stack:
        opened = {one: stack.enter_context(session(model, one, len(tokens), threads)) for one in types}
        for at in range(0, len(tokens), _BATCH):
            here, following = tokens[at : at + _BATCH], tokens[at + 1 : at + 1 + _BATCH]
            rows = {one: each.eval(here, n_logits=len(here)).copy() for one, each in opened.items()}
            both = {one: (logits, log_softmax(logits)) for one, logits in rows.items()}
            for one, (_, own) in both.items():
                quality[one].agreement.add(both["f16"], both[one])
                quality[one].nll += [-float(own[i, token]) for i, token in enumerate(following)]
            print(".", end="", file=sys.stderr, flush=True)
    return quality


def look_up(opened: Session, tokens: list[int], needles: list[Needle]) -> Found:
    """Read a text and ask for its needles."""
    for at in range(0, len(tokens), 512):
        opened.eval(tokens[at : at + 512])
    result = Found([], [])
    for needle in needles:
        asked, n = needle.question + needle.answer[:-1], len(needle.answer)
        rows = log_softmax(opened.eval(asked, n_logits=n))
        result.found.append(rows.argmax(axis=1).tolist() == needle.answer)
        result.probability.append(math.exp(sum(rows[i, token] for i, token in enumerate(needle.answer))))
        opened.rewind(len(tokens))
    print(".", end="", file=sys.stderr, flush=True)
    return result


def measure(path: Path, args: argparse.Namespace) -> CacheQuality:
    """Measure a model."""
    with Model(path) as model:

        def tokenize(text: str) -> list[int]:
            return model.tokenize(text, add_special=False, parse_special=False)

        types = possible_types(model.header)
        texts = {
            name: read_text(model, tokenize(text[: 12 * args.tokens])[: args.tokens], types, args.threads)
            for name, text in (("sources", sources()), ("prose", prose()))
            if args.tokens
        }
        needles: dict[int, dict[CacheType, Found]] = {}
        for length in args.lengths:
            tokens, facts = haystack(tokenize, length, args.seed)
            needles[length] = {}
            for one in types:
                with session(model, one, length + _ROOM, args.threads) as opened:
                    needles[length][one] = look_up(opened, tokens, facts)
    print(file=sys.stderr)
    return CacheQuality(texts, needles)


def lines(quality: CacheQuality) -> Iterator[str]:
    """Return what was found, in words."""
    for name, by_type in quality.texts.items():
        for one, text in by_type.items():
            compared = "" if one == "f16" else f", {text.agreement}"
            yield f"  {name}, {one}: perplexity {math.exp(statistics.fmean(text.nll)):.4f}{compared}"
    for length, found in quality.needles.items():
        for one, each in found.items():
            tenths = "".join("x" if hit else "-" for hit in each.found)
            sure = statistics.fmean(each.probability)
            hits = f"{sum(each.found)} of {N_NEEDLES} ({tenths})"
            yield f"  needles in {length}, {one}: {hits}, probability {sure:.3f}"


def main() -> None:
    parse = parser(__doc__, pair=False)
    parse.add_argument("model", nargs="?", help="path or name; default: the default target")
    parse.add_argument("--tokens", type=int, default=4096, help="tokens of each text; 0: none")
    parse.add_argument("--lengths", type=numbers(int), default=[4096, 8192], help="of texts with needles")
    parse.add_argument("--seed", type=int, default=1, help="of the texts with needles")
    args = parse.parse_args()
    if args.tokens < 0 or any(length < 1000 for length in args.lengths):
        parse.error("--tokens must be 0 or more, --lengths 1000 or more")
    path = resolve(args.model or choose_models(None, None, writes=True)[0])
    measuring = Measuring(args)
    quality = in_child(measure, path, args)
    measuring.end()
    print(f"{path.name}\n" + "\n".join(lines(quality)) + f"\n\n{measuring}")
    measuring.keep(f"cache-quality-{path.stem}", {"seed": args.seed, "quality": quality})


if __name__ == "__main__":
    start(main)
