"""How engines are asked when variants to generate are compared: in turns, none seeing another's answers."""

from __future__ import annotations

import copy
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from edgespec import Engine, SamplingParams
from edgespec.apps.bench.measure import run_of
from edgespec.apps.bench.runs import PLAIN, Run, Variant, rotated
from edgespec.apps.bench.suites import Prompt
from edgespec.decoding.records import Result
from edgespec.models.store import Store
from edgespec.platform.files import cache_root
from prompts import Limits

AUTO = "auto"
FEWEST = 8
"""If lengths differ, an answer with fewer tokens says nothing about speed."""


def at_plains_length(runs: Sequence[Run]) -> list[Run]:
    """Return the runs scaled to the length of plain's run on the same prompt in the same round.

    A run whose length differs from plain's is returned with 0 tokens, and so has no speed, if one of the two
    has fewer than FEWEST.
    """
    plain = {(one.prompt, one.round): one for one in runs if one.variant == PLAIN}
    found = []
    for one in runs:
        n = plain[one.prompt, one.round].tokens
        if one.tokens == n:
            found.append(one)
        elif min(one.tokens, n) < FEWEST:
            found.append(replace(one, tokens=0))
        else:
            first_s = one.total_s if one.ttft_s is None else one.ttft_s
            once_s = first_s + (one.draft_prefill_s or 0.0)
            total_s = once_s + (one.total_s - once_s) * (n - 1) / (one.tokens - 1)
            found.append(replace(one, tokens=n, total_s=total_s))
    return found


def in_order(runs: list[Run], names: list[str]) -> list[Run]:
    """Return the runs with the variants in the order of `names`."""
    return sorted(runs, key=lambda one: names.index(one.variant))


class Bench:
    """An engine, and how it is asked."""

    def __init__(
        self, engine: Engine, limits: Mapping[str, Limits], *, n_predict: int, cold: bool, seeded: bool
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._n_predict = n_predict
        self._cold = cold
        self._seeded = seeded
        self._remembered: dict[str, list[int]] = {}
        self.beginning: Sequence[int] = ()
        """Tokens with which all prompts begin: they stay in the engine's prefix cache, if it has one."""
        self.notes: dict[str, str] = {}
        """The engine's last note, by prompt, on why auto drafted or did not."""

    def one_text(self, temperature: float) -> bool:
        """Whether all variants should write the same text."""
        return self._seeded or temperature == 0

    def n_predict(self, prompt: Prompt) -> int:
        """Return the most tokens of an answer."""
        return self._limits.get(prompt.id, Limits()).n_predict or self._n_predict

    def ask(self, prompt: Prompt, variant: Variant, turn: int, temperature: float) -> Result:
        """Generate once."""
        state = self._engine._knowledge
        known = copy.deepcopy(state._acceptance)
        result = self._engine.generate(
            prompt.text,
            params=SamplingParams(temperature=temperature),
            seed=turn if self.one_text(temperature) else None,
            n_predict=self.n_predict(prompt),
            drafter=variant.chosen,
            gamma=variant.gamma,
        )
        if variant.name == AUTO:
            self.notes[prompt.id] = result.note
        else:
            self._engine.forget(but=self.beginning)  # which ends the generation: then its drafts are learned
            state._acceptance = known
        return result

    def remember(self, prompts: Sequence[Prompt]) -> None:
        """Keep plain's answers, which `forget` then leaves in the store but for that to its own prompt."""
        for prompt in prompts:
            stream = self._engine.stream(
                prompt.text,
                n_predict=self.n_predict(prompt),
                drafter="none",
                params=SamplingParams(temperature=0.0),
            )
            for _ in stream:
                pass
            self._remembered[prompt.id] = [*stream.tokens, -1]

    def forget(self, prompt: Prompt) -> None:
        """Make the engine forget the texts it saw, and with `cold` what it learnt since it was opened."""
        self._engine.forget(tables=self._cold, but=self.beginning)
        others = [tokens for other, tokens in self._remembered.items() if other != prompt.id]
        if others:
            self._engine._earlier_texts.ready().extend(np.concatenate(others).astype(np.int32))

    def warm_up(self, prompts: Sequence[Prompt], variants: Sequence[Variant]) -> None:
        """Make the contexts large enough for every prompt, and run each drafter once.

        Then `beginning`, which all `prompts` have, is in the prefix cache.
        """
        sizes = {p: len(self._engine.prompt_tokens(p.text)) + self.n_predict(p) for p in prompts}
        longest = max(sizes, key=lambda prompt: sizes[prompt])
        for variant in {variant.chosen: variant for variant in variants}.values():
            stream = self._engine.stream(
                longest.text, n_predict=self.n_predict(longest), drafter=variant.chosen, gamma=variant.gamma
            )
            for _ in itertools.islice(stream, FEWEST):
                pass
            stream.close()


def compared(
    asked: Mapping[str, tuple[Bench, Variant]], prompts: Sequence[Prompt], rounds: int, temperature: float
) -> list[Run]:
    """Run each variant, by its name, on each prompt: one right after the other, in an order that shifts."""
    runs = []
    for turn in range(rounds):
        for place, prompt in enumerate(prompts):
            for name in rotated(list(asked), turn + place):
                bench, variant = asked[name]
                bench.forget(prompt)
                result = bench.ask(prompt, variant, turn, temperature)
                runs.append(run_of(result, prompt, name, turn))
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return in_order(runs, list(asked))


@contextmanager
def own_cache() -> Iterator[None]:
    """Work on a copy of the user's cache, without history, and delete it at the end."""
    os.environ.setdefault("EDGESPEC_MODELS_DIR", str(Store.default().root))
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as folder:
        if cache_root().is_dir():
            ignored = shutil.ignore_patterns("models", "history")
            shutil.copytree(cache_root(), Path(folder) / cache_root().name, ignore=ignored)
        os.environ["XDG_CACHE_HOME"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["XDG_CACHE_HOME"]
            else:
                os.environ["XDG_CACHE_HOME"] = before
