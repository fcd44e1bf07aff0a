"""What an engine knows before it begins, and keeps when it ends: the profile and the history.

    profile (profile.py)   what passes cost, what is accepted, how long answers are -> the schedulers
    history (history.py)    earlier prompts and answers as tokens                    -> the suffix store

Either may be missing: then there are guesses instead of a profile, and the suffix store begins empty.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from edgespec.choices import Objective
from edgespec.drafting.costs import Clocks, Curve, OnlineCurve, guessed_curve
from edgespec.drafting.history import MAX_TOKENS, History
from edgespec.drafting.learnt import Learnt
from edgespec.drafting.lengths import ANSWER_TOKENS, AnswerLengths
from edgespec.drafting.predictor import Predictor
from edgespec.drafting.profile import Key, Profile
from edgespec.drafting.profile_store import load, merge_learnt
from edgespec.drafting.scheduler import Policy, Scheduler
from edgespec.drafting.suffix import SuffixDrafts
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.fingerprints import tokenizer_fingerprint
from edgespec.llama.gguf_header import GGUFHeader
from edgespec.llama.weights import Model

OWN_TOKENS = 1 << 16
"""Tokens of an engine's own timelines that drafts are looked for in."""

_NAMES = {True: "greedy", False: "sampled"}
_STARTS = "starts"  # beside them in a profile: lengths of answers by how the prompt began


class Knowledge:
    """What is known of a pair: its curves and tables, these apart for greedy and for sampled generations."""

    def __init__(
        self,
        target: Model,
        draft: Model | None,
        *,
        kernels: str,
        n_threads: int,
        objective: Objective,
        kept: bool,
        on_message: Callable[[str], None],
    ) -> None:
        """Begin with the stored profile if there is one (and `kept`), else with guesses.

        Raises UsageError when energy is the objective and no joules were measured.
        """
        self._models = target, draft
        self._key = (
            Key.of(target.header, draft.header if draft else None, kernels=kernels, threads=n_threads)
            if kept
            else None
        )
        self._profile = load(self._key, on_message=on_message) if self._key else None
        self._objective = objective
        self._begin()

    def _begin(self) -> None:
        profile = self._profile
        self._answers: list[int] = []
        self._lengths = AnswerLengths(profile.answer_tokens if profile else ANSWER_TOKENS)
        self._lengths.restore(profile.acceptance.get(_STARTS) if profile else None)
        target, draft = self._models
        self.clocks = Clocks(
            _clock(target, profile.target if profile else None),
            _clock(draft, profile.draft if profile else None) if draft else None,
        )
        costs = self._costs(profile)
        self._learnt: dict[bool, Learnt] = {}
        for greedy, name in _NAMES.items():
            predictor = Predictor()
            if profile and isinstance(stored := profile.acceptance.get(name), dict):
                predictor.restore(stored)
            self._learnt[greedy] = Learnt(
                costs.target, costs.draft, predictor, in_joules=self._objective == "energy"
            )

    def _costs(self, profile: Profile | None) -> Clocks:
        if self._objective == "latency":
            return self.clocks
        if not profile or not profile.target_joules or (profile.draft and not profile.draft_joules):
            problem = (
                "no joules are known of these models on this machine; run `edgespec profile` where an energy "
                "counter can be read, or leave it at latency"
            )
            raise UsageError(problem, field="objective", value="energy")
        return Clocks(
            OnlineCurve(profile.target_joules),
            OnlineCurve(profile.draft_joules) if profile.draft_joules else None,
        )

    def scheduler(self, policy: Policy, prompt: str | Sequence[int], *, greedy: bool) -> Scheduler:
        """Return a scheduler for one generation, greedy or sampled, of the answer to `prompt`."""
        return Scheduler(self._learnt[greedy], policy, self._lengths.of(prompt))

    def forget(self) -> None:
        """Begin again with what was stored."""
        self._begin()

    def answered(self, prompt: str | Sequence[int], n_tokens: int, *, cut: bool) -> None:
        """Learn the length of the answer to `prompt`; `cut`: by a limit, not by itself."""
        self._lengths.learn(prompt, n_tokens, cut=cut)
        if not cut:
            self._answers.append(n_tokens)

    def store(self, on_message: Callable[[str], None]) -> None:
        """Keep what was learnt, if passes were timed."""
        target, draft = self.clocks.target, self.clocks.draft
        if self._key is None or target.n_observed == 0:
            return
        merge_learnt(
            self._key,
            target=target.curve(),
            target_passes=target.n_observed,
            draft=draft.curve() if draft else None,
            draft_passes=draft.n_observed if draft else 0,
            acceptance={
                **{name: self._learnt[greedy].predictor.as_dict() for greedy, name in _NAMES.items()},
                _STARTS: self._lengths.as_dict(),
            },
            answers=self._answers,
            on_message=on_message,
        )


def _clock(model: Model, stored: Curve | None) -> OnlineCurve:
    if stored:
        return OnlineCurve(stored)
    return OnlineCurve(guessed_curve(model.header.file_bytes, own_kernels=model.uses_kernels), guessed=True)


class Recollection:
    """The suffix store, with earlier documents of the history in it if one is kept.

    They are read and indexed in a thread of their own, while the models are loaded.
    """

    def __init__(self, header: GGUFHeader, *, kept: bool, on_message: Callable[[str], None]) -> None:
        """Begin reading the history of `header`'s tokenizer, if it is `kept`."""
        self.suffix = SuffixDrafts(OWN_TOKENS)
        self._history: History | None = None
        self._on_message = on_message
        self._lines: list[str] = []
        self._thread: threading.Thread | None = None
        self._n_vocab = header.n_vocab
        if not kept:
            return
        try:
            self._history = History(tokenizer_fingerprint(header), on_message=self._lines.append)
        except (EdgespecError, OSError) as error:
            on_message(f"earlier answers are not used: {error}")
            return
        self.suffix = SuffixDrafts(MAX_TOKENS)
        self._thread = threading.Thread(target=self._load, args=(self._history,), daemon=True)
        self._thread.start()

    def _load(self, history: History) -> None:
        self.suffix.load(history.load(MAX_TOKENS - OWN_TOKENS, n_vocab=self._n_vocab))

    def ready(self) -> SuffixDrafts:
        """Return the suffix store, once all is in it."""
        if self._thread:
            self._thread.join()
            self._thread = None
        self._report()
        return self.suffix

    def keep(self, tokens: list[int]) -> None:
        """Add a document to the history, if one is kept."""
        if self._history and tokens:
            self._history.append(np.asarray(tokens, np.int32))
            self._report()

    def _report(self) -> None:
        while self._lines:
            self._on_message(self._lines.pop(0))
