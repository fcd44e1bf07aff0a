"""`edgespec draft make`: from what a target writes, the draft that makes it fastest on this machine.

    stage                        modules                      what it leaves on disk
    the target writes texts      data_stage.py, writing.py    cache_root()/forge/TARGET/
    the kept tokens are chosen   vocabulary_ranking.py        .../training/RUN/
    a head is trained            builder.py, training/        .../training/RUN/head/, checkpoints
    drafts are written           builder.py                   a folder in the models directory
    drafts pass the guard        guard.py                     nothing; with --from-history
    drafts are evaluated         evaluation.py                .../judging/
    the best one is stored       draft_store.py               the models directory: file, name, record

A run may be stopped at any moment; the same request resumes it (runs.py).
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from edgespec.apps.forge import runs
from edgespec.apps.forge.builder import DraftBuilder, DraftFile, TrainingRequest
from edgespec.apps.forge.data_stage import DataRequest, RejectedTexts, evaluation_prompts, write_texts
from edgespec.apps.forge.dataset import READ, Dataset, DatasetTarget
from edgespec.apps.forge.draft_store import DraftStore, check_draft_name
from edgespec.apps.forge.evaluation import Candidate, CandidateResult, Evaluator, update_record
from edgespec.apps.forge.evaluation_process import EvaluationSettings
from edgespec.apps.forge.guard import Guard, GuardFigures, GuardTexts
from edgespec.apps.forge.progress import StageContext, StageProgress
from edgespec.apps.forge.runs import FIRST_HEAD, RunState, name_training, tidy
from edgespec.apps.forge.training.weights import EMBEDDINGS, ModelWeights
from edgespec.engine.model_choice import choose_models
from edgespec.errors import EdgespecError, UsageError, describe_os_error
from edgespec.llama.gguf_header import check_model_file
from edgespec.llama.head_file import check_target, read_head
from edgespec.llama.weights import Model
from edgespec.models.draft_records import DraftRecord, drafts_for, read_record
from edgespec.models.footprint import USUAL_CTX, fits_in_memory
from edgespec.models.hashes import hash_file, sha256_of
from edgespec.models.quantizations import model_file
from edgespec.models.resolve import resolve
from edgespec.platform.cpu import default_threads, read_cpu
from edgespec.platform.files import replacing
from edgespec.platform.metering import Meter, choose_meter

LEAST_GAIN = 0.02
"""Gain over the present draft that a new one needs to be stored: less is not told from noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeRequest:
    """All that `make_draft` needs: target, data, training, evaluation."""

    target: str
    data: DataRequest
    training: TrainingRequest
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    name: str | None = None
    """None: named after the target, the kind and the quantization."""
    force: bool = False
    """Store the draft even if it is no better, and replace one of that name."""


@dataclass(frozen=True, slots=True)
class MakeResult:
    """What became of a MakeRequest: all candidates, the best, and what it was measured against."""

    target_name: str
    texts: dict[str, int]
    """Source -> tokens of the texts that drafts are made from."""
    before: CandidateResult | None
    """The present draft, or drafting without one; None: it could not run."""
    candidates: tuple[tuple[DraftFile, CandidateResult], ...]
    best: DraftFile
    beaten: str
    """The present draft, or plain decoding where that was faster."""
    gain: float
    """Gain of the best over `beaten`: 0.1 is 10 %."""
    kept: DraftRecord | None
    """Record of the best, if it was stored."""
    path: Path | None
    guard: GuardFigures | None = None
    """What decided, in place of the gain, where a head learnt from the history."""


def make(request: MakeRequest, context: StageContext | None = None) -> MakeResult | None:
    """Make the best draft for `request.target`, which must be on this machine.

    The draft is stored if it is better than the present one, or with `force`. None: a head was to learn from
    its mistakes once more, and there are no new ones. Raises UsageError and EdgespecError; what was written
    and trained by then stays, and the same request resumes.
    """
    return _MakeRun(request, context or StageContext()).run()


class _MakeRun:
    """Runs one request."""

    def __init__(self, request: MakeRequest, context: StageContext) -> None:
        self._request, self._context = request, context
        self._target = model_file(request.target)
        self._header = check_model_file(self._target.path)
        check_target(self._header)
        self._kernels = request.evaluation.kernels == "auto"
        self._threads = request.evaluation.n_threads or default_threads()
        fits_in_memory([(self._header, min(self._header.n_ctx_train, USUAL_CTX))])
        self._sha256 = sha256_of(self._target.path, self._hashing)
        target = DatasetTarget.of(self._header, self._target.name, self._sha256)
        self._dataset = Dataset(target, on_message=context.on_message)
        self._store = DraftStore(self._target.name, self._sha256)
        self._before = self._present_draft()
        self._installed = self._installed_head() if request.data.from_history else None
        if request.name:
            learns_on = self._installed is not None and request.name == self._before.name
            check_draft_name(request.name, replace=request.force or learns_on)
        self._builder = DraftBuilder(self._target, self._header, request.training, self._installed)
        self._state = RunState("")

    def _hashing(self, n_bytes: int) -> None:
        self._context.on_progress(StageProgress("hashing the target", n_bytes / self._header.file_bytes))

    def _present_draft(self) -> Candidate:
        name = choose_models(self._request.target, None)[1]
        path = None if name is None else resolve(name)
        return Candidate(name or "no draft", path, was_there=True)

    def _installed_head(self) -> Path | None:
        """Return the present draft's file, if it is a head that can learn."""
        path = self._before.path
        head = read_head(check_model_file(path, or_head=True)) if path else None
        return path if head and head.target_sha256 == self._sha256 else None

    def run(self) -> MakeResult | None:
        with self._store.locked_folder() as drafts_folder, choose_meter() as meter:
            try:
                return self._run(drafts_folder, meter)
            except OSError as error:
                raise EdgespecError(f"cannot make a draft: {describe_os_error(error)}") from error

    def _run(self, drafts_folder: Path, meter: Meter) -> MakeResult | None:
        context, folder = self._context, self._dataset.folder
        self._store.check_space(self._builder.expected_bytes())
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        request = self._request
        self._state = runs.resume(folder, self._key(), context.on_message, force=request.force)
        if not self._state.until:
            if self._knows_all():
                return None
            until = request.data.until(self._dataset, request.training, learns=self._installed is not None)
            self._state = replace(self._state, until=until)
        if not self._state.written:
            with self._part(meter, written=True):
                self._write()
        self._state = self._state.with_sources(self._tokens_by_source())
        runs.save(folder, self._state)
        texts = first = None
        if self._installed:
            texts, first = self._guard_texts(), self._first_head(self._installed)
        with self._part(meter):
            drafts = self._builder.build(self._dataset, drafts_folder, self._run_folder, context)
        figures = None
        if texts and first and self._installed:
            drafts, figures = self._guarded(drafts, texts, self._installed, first)
        if figures and not (figures.passes or request.force):
            made = self._refused(drafts[0], figures)
        else:
            with self._part(meter):
                measured = self._evaluate(drafts)
            made = self._store_best(drafts, measured, figures)
        self._end(made)
        return made

    def _key(self) -> str:
        """Return the hash of what the run is made from: of the user's files, what they hold now."""
        data = self._request.data
        held = {**asdict(data), "prompts": list(map(hash_file, data.prompts))}
        return runs.request_key((self._sha256, held, self._request.training))

    def _knows_all(self) -> bool:
        """Whether nothing was rejected since the last training, which was of the same request."""
        request = self._request
        asks = request.force or request.data.names_more
        if asks or not (self._installed and self._state.repeats):
            return False
        rejected = RejectedTexts(self._dataset, request.data.budget)
        return bool(rejected.stored) and not rejected.unread

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

    @property
    def _run_folder(self) -> Path:
        return self._dataset.folder / "training" / f"{self._state.number}"

    @contextmanager
    def _part(self, meter: Meter, *, written: bool = False) -> Iterator[None]:
        window = meter.begin()
        try:
            yield
            self._state = replace(self._state, written=self._state.written or written)
        finally:
            self._state = self._state.with_joules(window.end())
            runs.save(self._dataset.folder, self._state)

    # ---- stages ----

    def _write(self) -> None:
        self._context.on_progress(StageProgress("writing", 0.0))
        with Model(self._target.path, kernels=self._kernels, header=self._header) as model:
            if not model.can_rewind:
                problem = "cannot take tokens back: no draft can be used with it"
                raise UsageError(problem, field="target", value=self._target.name)
            write_texts(
                model,
                self._dataset,
                self._request.data,
                self._state.until,
                self._threads,
                self._context,
                learns=self._installed is not None,
            )

    def _guarded(
        self, drafts: Sequence[DraftFile], texts: GuardTexts, installed: Path, first: Path
    ) -> tuple[list[DraftFile], GuardFigures]:
        """Return the best of the drafts by the guard's figures, alone, and its figures."""
        self._context.on_progress(StageProgress("judging", 0.0, "by accepted tokens"))
        guard = Guard(ModelWeights(self._header), texts, installed, first)
        judged = []
        for draft in _of_type(installed, drafts):
            path, share, figures = guard.choose(draft.path, draft.type_)
            judged.append((replace(draft, path=path, share=share), figures))
        best, figures = max(judged, key=lambda pair: (pair[1].passes, pair[1].own[1]))
        if best.share < 1.0:
            self._context.on_message(
                f"{best.share:.0%} of the training is taken: all of it would lose too much on built-in texts"
            )
        return [best], figures

    def _first_head(self, installed: Path) -> Path:
        """Return a copy of the head that learning began with: the installed one, unless it has learnt."""
        path = self._dataset.folder / FIRST_HEAD
        if not (path.exists() and self._state.learnt == sha256_of(installed)):
            with replacing(path) as file:
                file.write(installed.read_bytes())
        return path

    def _refused(self, best: DraftFile, figures: GuardFigures) -> MakeResult:
        name, before = self._target.name, self._before.name
        return MakeResult(name, self._state.sources, None, (), best, before, 0.0, None, None, figures)

    def _evaluate(self, drafts: Sequence[DraftFile]) -> dict[str, CandidateResult]:
        """Return the measurements by name: a new draft's label, or the present draft's name."""
        settings = self._request.evaluation
        self._context.on_progress(StageProgress("judging", 0.0))
        evaluator = Evaluator(
            self._target.path,
            evaluation_prompts(self._dataset, settings.n_prompts),
            replace(settings, n_threads=self._threads),
            self._dataset.folder / "judging",
            self._context,
        )
        new = [Candidate(one.label, one.path) for one in drafts]
        return {one.candidate.name: one for one in evaluator.evaluate([self._before, *new])}

    # ---- the outcome ----

    def _store_best(
        self,
        drafts: Sequence[DraftFile],
        measured: dict[str, CandidateResult],
        figures: GuardFigures | None,
    ) -> MakeResult:
        """Store the best draft, if it is better than the present one and than plain decoding.

        `figures`: the guard's, which passed it already.
        """
        before = measured.get(self._before.name)
        found = [(one, measured[one.label]) for one in drafts if one.label in measured]
        if not found:
            raise EdgespecError("none of the candidates could be judged; the lines above say why")
        best, its = max(found, key=lambda pair: pair[1].gains.mean)
        base, beaten = 1.0, "plain decoding"
        if before and before.gains.mean > base:
            base, beaten = before.gains.mean, before.candidate.name
        gain = its.gains.mean / base - 1.0
        if before:  # first: the new draft may get its name
            update_record(before)
        texts = self._texts_behind(best)
        kept = path = None
        if figures or gain >= LEAST_GAIN or self._request.force:
            kept = self._record(best, its, texts)
            path = self._store.store(best.path, kept)
        return MakeResult(
            self._target.name, texts, before, tuple(found), best, beaten, gain, kept, path, figures
        )

    def _texts_behind(self, best: DraftFile) -> dict[str, int]:
        start = self._request.training.start
        if start:
            record = read_record(resolve(start))
        else:
            records = drafts_for(str(self._target.path))
            record = next((one for one in records if one.name == best.parent), None)
        return self._state.with_sources(record.data).sources if record else self._state.sources

    def _tokens_by_source(self) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for text in self._dataset.texts(held_out=False):
            counts[text.source] += len(text.tokens) - (0 if text.source == READ else text.n_prompt)
        return dict(counts)

    def _record(self, best: DraftFile, result: CandidateResult, texts: dict[str, int]) -> DraftRecord:
        timing = result.timing
        assert timing is not None  # noqa: S101 - for the type checker: a candidate has a draft model
        name = self._request.name
        if name is None and self._installed and read_record(self._installed):
            name = self._before.name  # made here: the better one takes its place
        stem = re.sub(r"[^A-Za-z0-9._+@-]", "_", self._target.name).lstrip("._+@-") or "draft"
        return DraftRecord(
            name=name or self._store.free_name(f"{stem}-{best.label}"),
            target_name=self._target.name,
            target_sha256=self._sha256,
            target_bytes=self._header.path.stat().st_size,
            data=texts,
            tokens_seen=best.trained.n_tokens,
            hours=best.trained.hours,
            joules=self._state.joules,
            joules_reason=self._state.joules_reason,
            acceptance=timing.acceptance,
            cost_ratio=timing.cost_ratio,
            gains=result.gains,
            processor=read_cpu().model,
            made=datetime.now().astimezone().isoformat(timespec="seconds"),
            parent=best.parent,
            edgespec=version("edgespec"),
        )

    def _end(self, made: MakeResult) -> None:
        folder = self._dataset.folder
        kept = made.kept.name if made.kept else None
        learnt = (
            sha256_of(made.path) if made.path and made.guard and made.guard.passes else self._state.learnt
        )
        self._state = replace(self._state, ended=True, kept=kept, learnt=learnt)
        runs.save(folder, self._state)
        shutil.rmtree(folder / "judging", ignore_errors=True)
        if made.kept and made.best.share == 1.0:
            name_training(self._run_folder / "head", made.kept.name)
        installed = self._installed.stem if self._installed and made.kept is None else None
        tidy(self._run_folder, goes_on=made.kept is None, installed=installed)
        if made.kept and made.best.share < 1.0:  # the next training starts from the file
            shutil.rmtree(self._run_folder / "head", ignore_errors=True)


def _of_type(installed: Path, drafts: Sequence[DraftFile]) -> Sequence[DraftFile]:
    """Return the drafts whose matrices have the type of the installed one's; all, if none has."""

    def kind(path: Path) -> int:
        return ModelWeights(check_model_file(path)).info(EMBEDDINGS).kind

    wanted = kind(installed)
    return [one for one in drafts if kind(one.path) == wanted] or drafts
