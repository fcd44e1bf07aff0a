"""`edgespec draft make`: from a small model the draft that is worth most to a target on this machine.

    corpus -> which tokens stay          (corpus.py)
    source -> candidates                 each quantization, with its vocabulary cut (cutting.py)
    target -> answers                    to some prompts that are not in the corpus (worth.py)
    source, candidates -> worth          what is measured of each
    the best one                         to the models directory, with a name, if it is better than the source

A candidate is made and measured in a folder of its own in the models directory, under a lock, and gets its
name when it is complete. A killed run leaves nothing but that folder, which the next one removes.
"""

from __future__ import annotations

import fcntl
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from edgespec.choices import KernelsChoice
from edgespec.drafting.foreign.vocabulary import compare_vocabularies
from edgespec.drafting.model import DraftModel
from edgespec.errors import EdgespecError, UsageError, describe_os_error
from edgespec.forge.corpus import FEW, Corpus, Selection, check_keep, own_corpus, read_corpus, select
from edgespec.forge.cutting import check_source, cut, read_vocabulary
from edgespec.forge.worth import (
    MOST_TOKENS,
    Answer,
    Judged,
    acceptance,
    answer,
    levelled,
    time_passes,
)
from edgespec.llama.backend import quantize
from edgespec.llama.embeddings import CutVocabulary, Embeddings, check_target, read_cut
from edgespec.llama.gguf_header import check_model_file, read_tensors
from edgespec.llama.kernels import load as load_kernels
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.models.footprint import USUAL_CTX, fits_in_memory
from edgespec.models.pull import hash_file, resolve
from edgespec.models.quantizations import expected_bytes, model_file, quantization_in
from edgespec.models.registry import add_local, check_name, load_registry, remove_local
from edgespec.models.sources import check_disk
from edgespec.models.store import Store
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
"""Told what is being done, how much of it is, and how much there is."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be made."""

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

    source: Judged
    candidates: tuple[Judged, ...]
    target_name: str
    corpus: Corpus
    selection: Selection
    best: Judged
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
        self._root = Store.default().root
        self._source = model_file(request.source)
        self._target = model_file(request.target)
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
            with self._workshop() as folder:
                self._check_room(names)
                judged = [self._judge(self._source.name, header.path, target, answers)]
                sha256 = hash_file(header.path)
                for type_, name in names.items():
                    self._begin(f"making {name}")
                    path = self._cut(type_, folder / f"{name}.gguf", selection, sha256)
                    judged.append(self._judge(name, path, target, answers))
                passes = levelled([one.passes for one in judged])
                before, *candidates = (replace(one, passes=p) for one, p in zip(judged, passes, strict=True))
                best = max(candidates, key=lambda one: one.value)
                gain = best.value / before.value - 1.0
                kept = self._keep(best) if gain >= LEAST_GAIN or self._request.force else None
        self._on_progress("done", self._n_steps, self._n_steps)
        return Made(before, tuple(candidates), self._target.name, corpus, selection, best, gain, kept)

    def _begin(self, what: str) -> None:
        self._n_done += 1
        self._on_progress(what, self._n_done, self._n_steps)

    # ---- which tokens ----

    def _select(self, target: Model, source: Model) -> tuple[Corpus, Selection]:
        match = compare_vocabularies(target, source)
        if not match.equal:
            raise EdgespecError(
                f"{self._source.name} and {self._target.name}: {match.reason}; name its target with --target"
            )
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
                "like what the target writes, would choose better: --corpus FILE"
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
        """Return the quantizations to try and what each draft would be called; "": as the source is."""
        size = f"{n_kept // 1024}k" if n_kept % 1024 == 0 else str(n_kept)
        own = quantization_in(self._source.name) or quantization_in(self._source.path.stem)
        stem = (
            re.sub(rf"[-._]*{own}$", "", self._source.name, flags=re.IGNORECASE) if own else self._source.name
        )
        words = {"": own, **{type_: type_ for type_ in self._request.types if type_ != own}}
        names = {type_: "-".join(filter(None, (stem, word, f"cut{size}"))) for type_, word in words.items()}
        for name in (self._request.name,) if self._request.name else names.values():
            check_name(name)
            entry, file = load_registry().entries.get(name), self._root / f"{name}.gguf"
            if entry and entry.path != file:
                raise UsageError(f"a model called {name} exists already; choose another name with --name")
            if (entry or file.exists()) and not self._request.force:
                raise UsageError(f"{name} exists already; replace it with --force, or choose another --name")
        return names

    # ---- candidates ----

    @contextmanager
    def _workshop(self) -> Iterator[Path]:
        """Hold the lock of this source's drafts, and a folder that is gone afterwards."""
        folder = self._root / f".drafts-of-{self._source.name}"
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            with (self._root / f"{folder.name}.lock").open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self._on_message(f"another process makes drafts of {self._source.name}; waiting")
                    fcntl.flock(lock, fcntl.LOCK_EX)
                try:
                    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
                    folder.mkdir()
                    yield folder
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
        except OSError as error:
            raise EdgespecError(f"cannot make a draft: {describe_os_error(error)}") from error

    def _check_room(self, names: dict[str, str]) -> None:
        """A whole model is there beside what is cut from it, and the candidates before it."""
        origin, types = self._origin(), [type_ for type_ in names if type_]
        sizes = [expected_bytes(origin, type_) for type_ in types]
        needed = sum(sizes, self._source.path.stat().st_size) + max(sizes, default=0)
        check_disk(self._root, needed, f"drafts of {self._source.name}")

    def _origin(self) -> Path:
        """Return what other quantizations are made from: what the source itself was, if that is here."""
        try:
            made_from = self._source.made_from
            return resolve(made_from, pull_missing=False) if made_from else self._source.path
        except EdgespecError:
            return self._source.path

    def _cut(self, type_: str, path: Path, selection: Selection, sha256: str) -> Path:
        """Make a candidate; its whole model, if it needs one, goes again."""
        whole = self._source.path
        if type_:
            whole = path.with_name(f"{type_}.gguf")
            quantize(self._origin(), whole, type_, pure=True)
        try:
            cut(check_model_file(whole), path, selection.token_ids, source_sha256=sha256)
        finally:
            if type_:
                whole.unlink(missing_ok=True)
        return path

    def _keep(self, best: Judged) -> Path:
        """Give a candidate its name and its place among the models."""
        name = self._request.name or best.name
        file = self._root / f"{name}.gguf"
        if name in load_registry().entries:
            remove_local(name)
        best.path.replace(file)
        try:
            add_local(name, file, file.stat().st_size, hash_file(file))
        except BaseException:
            file.unlink(missing_ok=True)
            raise
        return file

    # ---- what they are worth ----

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

    def _judge(self, name: str, path: Path, target: Model, answers: Sequence[Answer]) -> Judged:
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
        return Judged(
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
