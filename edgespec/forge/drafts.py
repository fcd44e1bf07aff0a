"""`edgespec draft make`: from a small model the draft that makes a target fastest on this machine.

corpus -> which tokens stay          (corpus.py)
source -> candidates                 each quantization, with its vocabulary cut (cutting.py)
target -> answers                    to some prompts that are not in the corpus (speedup.py)
source, candidates -> speed-ups      what is measured of each
the best one                         to the models directory, with a name, if it is better than the source
(workshop.py)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edgespec.choices import KernelsChoice
from edgespec.drafting.foreign.vocabulary import compare_vocabularies
from edgespec.drafting.model import DraftModel
from edgespec.errors import EdgespecError
from edgespec.forge.corpus import FEW, Corpus, Selection, check_keep, own_corpus, read_corpus, select
from edgespec.forge.cutting import check_source, read_vocabulary
from edgespec.forge.speedup import (
    MOST_TOKENS,
    Answer,
    MeasuredDraft,
    acceptance,
    answer,
    levelled,
    time_passes,
)
from edgespec.forge.workshop import Workshop
from edgespec.llama.embeddings import CutVocabulary, Embeddings, check_target, read_cut
from edgespec.llama.gguf_header import check_model_file, read_tensors
from edgespec.llama.kernels import load as load_kernels
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.models.footprint import USUAL_CTX, fits_in_memory
from edgespec.models.pull import hash_file
from edgespec.models.quantizations import model_file
from edgespec.models.registry import load_registry
from edgespec.pair import default_threads
from edgespec.platform.signals import Cancellation
from edgespec.suites import DEFAULT, load_suite

TYPES = ("q4_0", "q8_0")
"""Quantizations that are tried beside the source's own, all tensors alike."""

LEAST_GAIN = 0.01
"""What a candidate must be better by than the source: less is not told from noise."""

N_PREDICT = 48
"""Tokens of an answer."""

BUDGET_S = 20.0
"""Seconds of timing for each candidate."""

ProgressFn = Callable[[str, float, float], None]
"""Called with what is being done, the steps that are done, and all steps."""


@dataclass(frozen=True, slots=True)
class Request:
    """Which draft to make, and how."""

    source: str
    target: str
    corpus: Path | None = None
    keep: int | None = None
    types: tuple[str, ...] = TYPES
    name: str | None = None
    force: bool = False
    """Keep it although it is not better, and in the place of one of that name."""
    n_threads: int | None = None
    kernels: KernelsChoice = "auto"
    n_predict: int = N_PREDICT
    budget_s: float = BUDGET_S
    """Seconds of timing for each candidate."""


@dataclass(frozen=True, slots=True)
class Made:
    """What came of a request."""

    source: MeasuredDraft
    candidates: tuple[MeasuredDraft, ...]
    target_name: str
    corpus: Corpus
    selection: Selection
    best: MeasuredDraft
    """Of the candidates."""
    gain: float
    """How much better that is than the source: 0.1 is 10 %."""
    kept: Path | None
    """The file it has now; None: nothing is kept."""


def target_for(source: str) -> str:
    """Return the target of a pair with this draft, or one of the same origin; else the default pair's."""
    registry = load_registry()

    def origin(name: str) -> str:
        entry = registry.entries.get(name)
        return entry.derived.base if entry and entry.derived else name

    same = [pair for pair in registry.pairs.values() if pair.draft == source]
    related = [pair for pair in registry.pairs.values() if origin(pair.draft) == origin(source)]
    return [*same, *related, registry.pairs["default"]][0].target


def make(
    request: Request,
    *,
    on_progress: ProgressFn = lambda _what, _done, _total: None,
    on_message: Callable[[str], None] = lambda _line: None,
    signals: Cancellation | None = None,
) -> Made:
    """Make the best draft of `request.source`, which must be on this machine as the target must be.

    It is kept, under its name, if it is better than the source, or with `force`. Raises UsageError and
    EdgespecError in one line.
    """
    return _Making(request, on_progress, on_message, signals).run()


class _Making:
    """One request on its way."""

    def __init__(
        self,
        request: Request,
        on_progress: ProgressFn,
        on_message: Callable[[str], None],
        signals: Cancellation | None,
    ) -> None:
        self._request = request
        self._on_progress = on_progress
        self._on_message = on_message
        self._signals = signals
        self._n_threads = request.n_threads or default_threads()
        self._source = model_file(request.source)
        self._target = model_file(request.target)
        self._workshop = Workshop(self._source, on_message)
        self._n_steps, self._n_done = 5 + 3 * (1 + len(request.types)), -1

    def run(self) -> Made:
        kernels = self._request.kernels == "auto"
        target_header, header = (check_model_file(one.path) for one in (self._target, self._source))
        check_source(header)
        check_target(target_header)
        fits_in_memory([(one, min(one.n_ctx_train, USUAL_CTX)) for one in (target_header, header)])
        if kernels:
            load_kernels()
        self._begin("loading the models")
        with Model(target_header.path, kernels=kernels, header=target_header) as target:
            with Model(header.path, kernels=kernels, header=header) as source:
                corpus, selection = self._select(target, source)
            names = self._names(len(selection.token_ids))
            self._n_steps = 5 + 3 * len(names)
            answers = self._answers(target)
            with self._workshop.opened() as folder:
                self._workshop.check_space(list(names))
                judged = [self._judge(self._source.name, header.path, target, answers)]
                sha256 = hash_file(header.path)
                for type_, name in names.items():
                    self._begin(f"making {name}")
                    path = folder / f"{name}.gguf"
                    self._workshop.make(type_, path, selection.token_ids, sha256)
                    judged.append(self._judge(name, path, target, answers))
                passes = levelled([one.passes for one in judged])
                before, *candidates = (replace(one, passes=p) for one, p in zip(judged, passes, strict=True))
                best = max(candidates, key=lambda one: one.value)
                gain = best.value / before.value - 1.0
                kept = None
                if gain >= LEAST_GAIN or self._request.force:
                    kept = self._workshop.keep(best.path, self._request.name or best.name)
        self._on_progress("done", self._n_steps, self._n_steps)
        return Made(before, tuple(candidates), self._target.name, corpus, selection, best, gain, kept)

    def _begin(self, what: str) -> None:
        self._n_done += 1
        self._on_progress(what, self._n_done, self._n_steps)

    # ---- which tokens ----

    def _select(self, target: Model, source: Model) -> tuple[Corpus, Selection]:
        match = compare_vocabularies(target, source)
        if not match.equal:
            names = f"{self._source.name} and {self._target.name}"
            raise EdgespecError(f"{names}: {match.reason}; choose the target that it should draft for")
        vocabulary = read_vocabulary(source.header)
        check_keep(vocabulary, self._request.keep)
        if self._request.corpus:
            corpus = read_corpus(self._request.corpus, source)
        else:
            suite = load_suite(DEFAULT)
            corpus = own_corpus(source, suite.prompts, suite.select(per_category=1).prompts)
        if corpus.n_tokens < FEW:
            self._on_message(
                f"the corpus has only {corpus.n_tokens:,} tokens ({corpus.what}); a larger one, "
                "like what the target writes, would choose better"
            )
        self._begin("choosing tokens")
        with self._open(source, min(source.n_ctx_train, USUAL_CTX)) as session:
            return corpus, select(
                corpus,
                vocabulary,
                session,
                self._request.keep,
                on_progress=lambda share: self._on_progress(
                    "choosing tokens", self._n_done + share, self._n_steps
                ),
            )

    def _names(self, n_kept: int) -> dict[str, str]:
        """Return the quantizations to try, and what each draft would be called."""
        request = self._request
        names = self._workshop.names(n_kept, request.types)
        for name in [request.name] if request.name else names.values():
            self._workshop.check_name(name, replace=request.force)
        return names

    # ---- what is measured of each ----

    def _answers(self, target: Model) -> list[Answer]:
        """Return what the target writes when asked what the corpus does not have."""
        self._begin("asking the target")
        prompts = load_suite(DEFAULT).select(per_category=1).prompts
        n_predict = min(self._request.n_predict, target.n_ctx_train // 2)
        n_ctx = min(target.n_ctx_train, USUAL_CTX)
        answers = []
        with self._open(target, n_ctx) as session:
            for i, prompt in enumerate(prompts):
                self._on_progress("asking the target", self._n_done + i / len(prompts), self._n_steps)
                tokens = (
                    target.tokenize(prompt.text, add_special=True, parse_special=False)
                    if target.chat_template is None
                    else target.tokenize_chat([{"role": "user", "content": prompt.text}])
                )
                answers.append(answer(session, tokens[-(n_ctx - n_predict) :], n_predict))
        return answers

    def _judge(self, name: str, path: Path, target: Model, answers: Sequence[Answer]) -> MeasuredDraft:
        header = check_model_file(path)
        vocabulary = read_cut(header)
        tensors = {tensor.name: tensor.bytes for tensor in read_tensors(header)}
        unread = tensors["token_embd.weight"] if "output.weight" in tensors else 0
        with Model(path, kernels=self._request.kernels == "auto", header=header) as model:
            self._begin(f"comparing {name} with the target")
            with self._open(model, min(model.n_ctx_train, USUAL_CTX), vocabulary) as session:
                accepted = acceptance(DraftModel(session, n_vocab=target.n_vocab, cut=vocabulary), answers)
            self._begin(f"timing {name}")
            passes = time_passes(
                target,
                model,
                vocabulary,
                n_threads=self._n_threads,
                budget_s=self._request.budget_s,
                on_progress=lambda now: self._on_progress(
                    f"timing {name}", self._n_done + now.done_s / now.total_s, self._n_steps
                ),
                signals=self._signals,
            )
        return MeasuredDraft(
            name=name,
            n_kept=len(vocabulary.token_ids) if vocabulary else None,
            path=path,
            size=header.file_bytes,
            pass_bytes=sum(tensors.values()) - unread,
            passes=passes,
            acceptance=accepted,
        )

    def _open(self, model: Model, n_ctx: int, vocabulary: CutVocabulary | None = None) -> Session:
        interrupt = self._signals.interrupt if self._signals else None
        return Session(
            model,
            n_ctx=n_ctx,
            n_threads=self._n_threads,
            n_logits_max=MOST_TOKENS,
            embeddings=Embeddings(vocabulary) if vocabulary else None,
            interrupt=interrupt,
        )
