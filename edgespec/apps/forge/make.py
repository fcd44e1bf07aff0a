"""`edgespec draft make`: from what a target writes, the draft that makes it fastest on this machine.

    stage                        modules                      what it leaves on disk
    the target writes texts      data_stage.py, writing.py    cache_root()/forge/TARGET/
    the kept tokens are chosen   vocabulary_ranking.py        .../training/RUN/
    a head is trained            training/, extra `forge`     .../training/RUN/head/, checkpoints
    drafts are written           training/head.py             a folder in the models directory
    drafts pass the guard        guard.py                     nothing; with --from-history
    drafts are evaluated         evaluation.py                .../judging/
    the best one is stored       draft_store.py               the models directory: file, name, record

A run may be stopped at any moment; the same request resumes it (runs.py).
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgespec.apps.forge import runs
from edgespec.apps.forge.data_stage import RejectedTexts, evaluation_prompts, tokens_wanted, write_texts
from edgespec.apps.forge.dataset import READ, Dataset, DatasetTarget
from edgespec.apps.forge.draft_store import DraftStore, check_draft_name
from edgespec.apps.forge.evaluation import Candidate, CandidateResult, Evaluator, update_record
from edgespec.apps.forge.guard import Guard, GuardFigures, GuardTexts
from edgespec.apps.forge.progress import StageContext, StageProgress
from edgespec.apps.forge.request import DraftRequest
from edgespec.apps.forge.runs import FIRST_HEAD, RunState, draft_of, earlier_training
from edgespec.apps.forge.training.weights import EMBEDDINGS, OUTPUT_NORM, ModelWeights
from edgespec.apps.forge.vocabulary_ranking import Ids, VocabularyRanking, rank, read_vocabulary, renew
from edgespec.engine.model_choice import choose_models
from edgespec.errors import EdgespecError, UsageError, describe_os_error
from edgespec.llama.gguf_header import check_model_file
from edgespec.llama.head_file import check_target, read_head
from edgespec.llama.weights import Model
from edgespec.models.draft_records import DraftRecord, drafts_for, is_here, paired_draft, read_record
from edgespec.models.footprint import USUAL_CTX, fits_in_memory
from edgespec.models.hashes import sha256_of
from edgespec.models.quantizations import model_file
from edgespec.models.resolve import resolve
from edgespec.models.sources import format_size
from edgespec.platform.cpu import default_threads, read_cpu
from edgespec.platform.files import replacing
from edgespec.platform.memory import available_bytes
from edgespec.platform.metering import Meter, choose_meter

if TYPE_CHECKING:
    from edgespec.apps.forge.training.loop import TrainingProgress, TrainingResult

LEAST_GAIN = 0.02
"""Gain over the present draft that a new one needs to be stored: less is not told from noise."""

KEEP = 16384
"""Tokens that a draft can say by default, where the target has more."""

LEARNING_RATE = 0.2
"""Learning rate of a head that learns from its mistakes: a night must not unlearn what weeks taught."""

_HEAD_BYTES = 64 << 20  # of a file, roughly
_BYTES_PER_PARAMETER = 16  # the parameter, its gradient, two moments
_BYTES_OF_BATCH = 1 << 30  # activations, logits


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeResult:
    """What became of a DraftRequest: all candidates, the best, and what it was measured against."""

    target_name: str
    texts: dict[str, int]
    """Source -> tokens of the texts that drafts are made from."""
    trained: TrainingResult
    """Of all candidates; without parameters."""
    before: CandidateResult | None = None
    """The present draft, or drafting without one; None: it could not run."""
    candidates: tuple[CandidateResult, ...] = ()
    best: str
    """A candidate's name, such as "head-q4_0"."""
    share: float = 1.0
    """Part of its training in the best, where the rest of its weights are the head's before (guard.py)."""
    beaten: str
    """The present draft, or plain decoding where that was faster."""
    gain: float = 0.0
    """Gain of the best over `beaten`: 0.1 is 10 %."""
    kept: DraftRecord | None = None
    """Record of the best, if it was stored."""
    path: Path | None = None
    guard: GuardFigures | None
    """What decided, in place of the gain, where a head learnt from the history."""


def require_jax() -> None:
    """Raise EdgespecError in one line if what training needs is not installed."""
    if not all(map(find_spec, ("jax", "optax"))):
        raise EdgespecError("training needs JAX: pip install 'edgespec[forge]'")


def make(request: DraftRequest, context: StageContext | None = None) -> MakeResult | None:
    """Make the best draft for `request.target`, which must be on this machine.

    The draft is stored if it is better than the present one, or with `force`. None: a head was to learn from
    its mistakes once more, and there are no new ones. Raises UsageError and EdgespecError; what was written
    and trained by then stays, and the same request resumes.
    """
    run = MakeRun(request, context or StageContext())
    with run.store.locked_folder() as drafts_folder, choose_meter() as meter:
        try:
            return run.run(drafts_folder, meter)
        except OSError as error:
            raise EdgespecError(f"cannot make a draft: {describe_os_error(error)}") from error


class MakeRun:
    """Runs one request."""

    def __init__(self, request: DraftRequest, context: StageContext) -> None:
        """Check that a draft can be made. Raises UsageError and EdgespecError, such as without JAX."""
        self._request, self._context = request, context
        self._target = model_file(request.target)
        self._header = check_model_file(self._target.path)
        check_target(self._header)
        fits_in_memory([(self._header, min(self._header.n_ctx_train, USUAL_CTX))])
        n_bytes = self._header.file_bytes
        self._sha256 = sha256_of(self._target.path, lambda n: self._tell("hashing the target", n / n_bytes))
        target = DatasetTarget.of(self._header, self._target.name, self._sha256)
        self._dataset = Dataset(target, on_message=context.on_message)
        self.store = DraftStore(self._target.name, self._sha256)
        name = choose_models(request.target, None)[1]
        self._before = Candidate(name or "no draft", resolve(name) if name else None, was_there=True)
        self._installed: Path | None = None  # the file of the head that learns from where it was wrong
        if request.from_history and self._before.path and self._is_head(self._before.path):
            self._installed = self._before.path
        if request.name:
            learns_on = self._installed is not None and request.name == self._before.name
            check_draft_name(request.name, replace=request.force or learns_on)
        require_jax()
        self._weights = ModelWeights(self._header)
        for tensor in (EMBEDDINGS, self._weights.output, OUTPUT_NORM):
            self._weights.info(tensor)
        self._vocabulary = read_vocabulary(self._header)
        self._cut_of(rank(self._vocabulary, ()))  # refuses a wrong number before anything is written
        self._start = resolve(request.start) if request.start else None
        if self._start and not self._is_head(self._start):
            problem = f"no head for {self._target.name}: name one that `edgespec draft make` made for it"
            raise UsageError(problem, field="start", value=request.start)
        self._state = RunState("")

    def _tell(self, stage: str, share: float = 0.0, detail: str = "", left_s: float | None = None) -> None:
        self._context.on_progress(StageProgress(stage, share, detail, left_s))

    def _is_head(self, path: Path) -> bool:
        head = read_head(check_model_file(path, or_head=True))
        return head is not None and head.target_sha256 == self._sha256

    def run(self, drafts_folder: Path, meter: Meter) -> MakeResult | None:
        """Run all stages; drafts are made in `drafts_folder`. Raises as `make`, and OSError."""
        request, folder = self._request, self._dataset.folder
        self.store.check_space(2 * _HEAD_BYTES * len(request.types))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = request.key(self._sha256)
        self._state = runs.resume(folder, key, self._context.on_message, force=request.force)
        learns = self._installed is not None
        if not self._state.until:
            if learns and self._knows_all():
                return None
            self._state = replace(self._state, until=tokens_wanted(request, self._dataset, learns=learns))
        if not self._state.written:
            with self._part(meter):
                self._write()
                self._state = replace(self._state, written=True)
        self._state = self._state.with_sources(self._tokens_by_source())
        runs.save(folder, self._state)
        texts = self._guard_texts() if learns else None
        with self._part(meter):
            start = self._start or self._usual_start()
            trained, files = self.train(self._token_ids(), start, drafts_folder)
        new = [Candidate(f"head-{type_}", path) for type_, path in files.items()]
        share, figures = 1.0, None
        if texts and self._installed:
            best, share, figures = self._guarded(texts, self._installed, files)
            new = [best]
        made = MakeResult(
            target_name=self._target.name,
            texts=self._state.sources,
            trained=trained,
            best=new[0].name,
            share=share,
            beaten=self._before.name,
            guard=figures,
        )
        if not figures or figures.passes or request.force:
            with self._part(meter):
                measured = self._evaluate(new)
            made = self._store_best(made, measured, start)
        self._end(made)
        return made

    def _knows_all(self) -> bool:
        """Whether nothing was rejected since the last training, which was of the same request."""
        request = self._request
        if request.force or request.names_more or not self._state.repeats:
            return False
        rejected = RejectedTexts(self._dataset, request.budget)
        return bool(rejected.stored) and not rejected.unread

    @property
    def _run_folder(self) -> Path:
        return self._dataset.folder / "training" / f"{self._state.number}"

    @contextmanager
    def _part(self, meter: Meter) -> Iterator[None]:
        window = meter.begin()
        try:
            yield
        finally:
            self._state = self._state.with_joules(window.end())
            runs.save(self._dataset.folder, self._state)

    # ---- texts ----

    def _write(self) -> None:
        self._tell("writing")
        kernels = self._request.evaluation.kernels == "auto"
        with Model(self._target.path, kernels=kernels, header=self._header) as model:
            if not model.can_rewind:
                problem = "cannot take tokens back: no draft can be used with it"
                raise UsageError(problem, field="target", value=self._target.name)
            write_texts(
                model,
                self._dataset,
                self._request,
                self._state.until,
                self._request.evaluation.n_threads or default_threads(),
                self._context,
                learns=self._installed is not None,
            )

    def _tokens_by_source(self) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for text in self._dataset.texts(held_out=False):
            counts[text.source] += len(text.tokens) - (0 if text.source == READ else text.n_prompt)
        return dict(counts)

    # ---- the head ----

    def train(self, ids: Ids, start: Path | None, folder: Path) -> tuple[TrainingResult, dict[str, Path]]:
        """Train a head that can say `ids`, and return its file in `folder` for each type.

        `start`: the folder of an earlier training, or the file of a head. Raises EdgespecError, and
        KeyboardInterrupt when it is stopped: the checkpoints stay.
        """
        from edgespec.apps.forge.training.head import HeadFamily
        from edgespec.apps.forge.training.loop import WARM_START_RATE, TextLessons, TrainingSettings, train

        stage, learns, request = "training head", self._installed is not None, self._request
        self._tell(stage, 0.0, "preparing")
        self._check_memory()
        sample = self._dataset.texts(held_out=False)
        head = HeadFamily(self._weights, self._sha256, ids, sample=sample)

        def show(now: TrainingProgress) -> None:
            self._tell(stage, now.share, now.figures, now.left_s)

        trained = train(
            TextLessons(head, self._dataset, mixes=learns),
            TrainingSettings(
                hours=request.hours,
                tokens=request.tokens,
                seed=self._state.number,
                start_rate=LEARNING_RATE if learns else WARM_START_RATE,
            ),
            self._run_folder / "head",
            start=head.read(start) if start and start.is_file() else start,
            on_progress=show,
            on_message=self._context.on_message,
        )
        files = {}
        for type_ in request.types:
            self._tell(stage, 1.0, f"writing it as {type_}")
            files[type_] = folder / f"head-{type_}.gguf"
            head.export(trained.params, files[type_], type_)
        trained.params = None
        return trained, files

    def _usual_start(self) -> Path | None:
        """Return an earlier training, or the file of the target's best head: made here, or its pair's."""
        installed, target = self._installed, str(self._target.path)
        if earlier := earlier_training(self._run_folder, installed.stem if installed else None):
            return earlier  # rather the weights before they were rounded
        if installed:
            return installed
        if made := drafts_for(target):
            return resolve(made[0].name)
        paired = paired_draft(target)
        path = resolve(paired) if paired and is_here(paired) else None
        return path if path and self._is_head(path) else None

    def _token_ids(self) -> Ids:
        """Return the tokens that the drafts of a run can say, ascending; chosen once a run."""
        file = self._run_folder / runs.TOKEN_IDS
        if file.exists():
            stored: Ids = np.load(file)
            return stored
        stage = "choosing tokens"
        self._tell(stage)
        texts = list(self._dataset.texts(held_out=False))
        head = read_head(check_model_file(self._installed)) if self._installed else None
        if head and self._request.keep is None:
            ids = renew(head.token_ids, self._vocabulary, texts)
        else:
            show = partial(self._tell, stage)
            ids = self._cut_of(rank(self._vocabulary, texts, self._weights, on_progress=show))
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(file) as stream:
            np.save(stream, ids)
        return ids

    def _cut_of(self, ranking: VocabularyRanking) -> Ids:
        """Return the tokens to keep, ascending. Raises UsageError where nothing would be cut, or too much."""
        keep = self._request.keep
        if keep is not None or len(ranking.order) > KEEP:
            return ranking.cut(keep or KEEP)
        return np.sort(ranking.order)

    def _check_memory(self) -> None:
        """Raise EdgespecError if the parameters and their optimizer state do not fit in memory."""
        shape = self._weights.shape()
        n = shape.n_embd
        n_parameters = n * (8 * n + 2 * (shape.n_head + shape.n_head_kv) * shape.head_dim)
        available = available_bytes()
        needed = _BYTES_PER_PARAMETER * n_parameters + _BYTES_OF_BATCH
        if available is not None and needed > available:
            raise EdgespecError(
                f"not enough memory to train: about {format_size(needed)} needed, "
                f"{format_size(available)} available; close other programs"
            )

    # ---- the guard ----

    def _guard_texts(self) -> GuardTexts:
        """Return what heads are compared on. Raises EdgespecError without such texts.

        The next run of this request then takes up what was written by then.
        """
        try:
            return GuardTexts.of(self._dataset)
        except EdgespecError:
            self._state = replace(self._state, written=False, until=0)
            runs.save(self._dataset.folder, self._state)
            raise

    def _guarded(
        self, texts: GuardTexts, installed: Path, files: Mapping[str, Path]
    ) -> tuple[Candidate, float, GuardFigures]:
        """Return the best of the drafts, by type, its part of the training, and the guard's figures of it.

        Those of the installed one's type are compared; all, if none has it.
        """
        self._tell("judging", 0.0, "by accepted tokens")
        first = self._dataset.folder / FIRST_HEAD
        if not (first.exists() and self._state.learnt == sha256_of(installed)):  # learning begins
            with replacing(first) as file:
                file.write(installed.read_bytes())
        guard = Guard(self._weights, texts, installed, first)
        alike = [type_ for type_, path in files.items() if _kind(path) == _kind(installed)]
        judged = []
        for type_ in alike or files:
            path, share, figures = guard.choose(files[type_], type_)
            judged.append((Candidate(f"head-{type_}", path), share, figures))
        best, share, figures = max(judged, key=lambda one: (one[2].passes, one[2].own[1]))
        if share < 1.0:
            self._context.on_message(
                f"{share:.0%} of the training is taken: all of it would lose too much on built-in texts"
            )
        return best, share, figures

    # ---- the outcome ----

    def _evaluate(self, new: list[Candidate]) -> list[CandidateResult]:
        settings = self._request.evaluation
        self._tell("judging")
        evaluator = Evaluator(
            self._target.path,
            evaluation_prompts(self._dataset, settings.n_prompts),
            replace(settings, n_threads=settings.n_threads or default_threads()),
            self._dataset.folder / "judging",
            self._context,
        )
        return evaluator.evaluate([self._before, *new])

    def _store_best(
        self, made: MakeResult, measured: list[CandidateResult], start: Path | None
    ) -> MakeResult:
        """Store the best draft, if it beats the present one and plain decoding, or the guard passed it."""
        before = next((one for one in measured if one.candidate.was_there), None)
        found = [one for one in measured if not one.candidate.was_there]
        if not found:
            raise EdgespecError("none of the candidates could be judged; the lines above say why")
        best = max(found, key=lambda one: one.gains.mean)
        base, beaten = 1.0, "plain decoding"
        if before and before.gains.mean > base:
            base, beaten = before.gains.mean, before.candidate.name
        gain = best.gains.mean / base - 1.0
        if before:  # first: the new draft may get its name
            update_record(before)
        parent = start.stem if start and start.is_file() else draft_of(start)
        made = replace(
            made,
            texts=self._texts_behind(parent),
            before=before,
            candidates=tuple(found),
            best=best.candidate.name,
            beaten=beaten,
            gain=gain,
        )
        if not (made.guard or gain >= LEAST_GAIN or self._request.force) or best.candidate.path is None:
            return made
        kept = self._record(made, best, parent)
        return replace(made, kept=kept, path=self.store.store(best.candidate.path, kept))

    def _texts_behind(self, parent: str | None) -> dict[str, int]:
        if self._start:
            record = read_record(self._start)
        else:
            records = drafts_for(str(self._target.path))
            record = next((one for one in records if one.name == parent), None)
        return self._state.with_sources(record.data).sources if record else self._state.sources

    def _record(self, made: MakeResult, best: CandidateResult, parent: str | None) -> DraftRecord:
        timing = best.timing
        assert timing is not None  # noqa: S101 - for the type checker: a candidate has a draft model
        name = self._request.name
        if name is None and self._installed and read_record(self._installed):
            name = self._before.name  # made here: the better one takes its place
        stem = re.sub(r"[^A-Za-z0-9._+@-]", "_", self._target.name).lstrip("._+@-") or "draft"
        return DraftRecord(
            name=name or self.store.free_name(f"{stem}-{made.best}"),
            target_name=self._target.name,
            target_sha256=self._sha256,
            target_bytes=self._header.path.stat().st_size,
            data=made.texts,
            tokens_seen=made.trained.n_tokens,
            hours=made.trained.hours,
            joules=self._state.joules,
            joules_reason=self._state.joules_reason,
            acceptance=timing.acceptance,
            cost_ratio=timing.cost_ratio,
            gains=best.gains,
            processor=read_cpu().model,
            made=datetime.now().astimezone().isoformat(timespec="seconds"),
            parent=parent,
            edgespec=version("edgespec"),
        )

    def _end(self, made: MakeResult) -> None:
        folder, kept, run = self._dataset.folder, made.kept, self._run_folder
        if made.path and made.guard and made.guard.passes:
            self._state = replace(self._state, learnt=sha256_of(made.path))
        self._state = replace(self._state, ended=True, kept=kept.name if kept else None)
        runs.save(folder, self._state)
        shutil.rmtree(folder / "judging", ignore_errors=True)
        if kept and made.share == 1.0:
            runs.name_training(run / "head", kept.name)
        stays = self._installed.stem if self._installed and kept is None else None
        runs.tidy(run, goes_on=kept is None, installed=stays)
        if kept and made.share < 1.0:  # the next training starts from the file
            shutil.rmtree(run / "head", ignore_errors=True)


def _kind(path: Path) -> int:
    """Return the type of a head's matrices."""
    return ModelWeights(check_model_file(path)).info(EMBEDDINGS).kind
