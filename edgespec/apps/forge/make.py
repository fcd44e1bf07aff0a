"""`edgespec draft make`: from what a target writes, the draft that makes it fastest on this machine.

    stage                        modules                      what it leaves on disk
    the target writes texts      data_stage.py, writing.py    cache_root()/forge/TARGET/
    the kept tokens are chosen   vocabulary_ranking.py        .../training/RUN/
    a head is trained            training/, extra `forge`     .../training/RUN/head/, checkpoints
    drafts are written           training/head.py             a folder in the models directory
    drafts pass the guard        below                        nothing; with --from-history
    drafts are evaluated         evaluation.py                .../judging/
    the best one is stored       draft_store.py               the models directory: file, name, record

A run may be stopped at any moment; the same request resumes it.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from edgespec.apps.bench.quantizations import model_file
from edgespec.apps.forge.data_stage import RejectedTexts, evaluation_prompts, tokens_wanted, write_texts
from edgespec.apps.forge.dataset import BUILT_IN, READ, Dataset, DatasetTarget, TrainingText
from edgespec.apps.forge.draft_store import DraftStore, check_draft_name
from edgespec.apps.forge.evaluation import Candidate, CandidateResult, Evaluator, update_record
from edgespec.apps.forge.request import DraftRequest, StageContext
from edgespec.apps.forge.training.batches import BEST, CHECKPOINT, MOST, N_DRAFTED, BatchSize
from edgespec.apps.forge.training.weights import EMBEDDINGS, OUTPUT_NORM, ModelWeights
from edgespec.apps.forge.vocabulary_ranking import Ids, rank, read_vocabulary, renew
from edgespec.drafting.draft import check_target
from edgespec.drafting.heads.head_file import read_head
from edgespec.engine.model_choice import choose_models
from edgespec.errors import EdgespecError, MessageFn, UsageError
from edgespec.llama.gguf_header import check_model_file
from edgespec.llama.weights import Model
from edgespec.models.draft_records import DraftRecord, drafts_for, read_record
from edgespec.models.footprint import USUAL_CTX, fits_in_memory
from edgespec.models.hub import check_disk, format_size
from edgespec.models.resolve import resolve
from edgespec.models.store import sha256_of
from edgespec.platform.files import replacing, write_atomically
from edgespec.platform.kept import StateFile, parse_struct
from edgespec.platform.machine import available_bytes, read_cpu
from edgespec.platform.metering import Meter, choose_meter

if TYPE_CHECKING:
    from edgespec.apps.forge.training.head import HeadFamily
    from edgespec.apps.forge.training.loop import Acceptance, TrainingResult


TOLERATED = 0.02
"""Share that may be lost on the built-in texts: more than the choice of kept tokens and quantization cost."""

SHARES = (0.75, 0.5, 0.25)
"""Parts of a training that are tried where all of it loses too much, until one passes."""


GuardTexts = tuple[Sequence[TrainingText], Sequence[TrainingText]]
"""The held-out texts that heads are compared on: the user's, the latest first, and built-in ones."""


def guard_texts(dataset: Dataset) -> GuardTexts:
    """Return the texts of a dataset that heads are compared on. Raises EdgespecError if a kind has none."""
    held_out = list(dataset.texts(held_out=True))
    own = _some(text for text in reversed(held_out) if text.source != BUILT_IN)
    built_in = _some(text for text in held_out if text.source == BUILT_IN)
    if not (own and built_in):
        raise EdgespecError(
            "the current head is kept: of the held-out texts for evaluating a new one, "
            f"{'the built-in ones' if own else 'yours'} are missing (deleted, or none was held out yet; "
            "one in 20 is); use the model for a while"
        )
    return own, built_in


def _some(texts: Iterable[TrainingText]) -> tuple[TrainingText, ...]:
    """Return the first texts, up to MOST tokens to draft, without those too short to draft in."""
    chosen: list[TrainingText] = []
    n_most = MOST
    for text in texts:
        n = len(text.tokens) - max(text.n_prompt, text.first + 2)
        if n > N_DRAFTED and n_most > 0:
            chosen.append(text)
            n_most -= n
    return tuple(chosen)


@dataclass(frozen=True, slots=True)
class GuardFigures:
    """Mean accepted tokens of a draft of N_DRAFTED: of an older head, and of the new one."""

    own: tuple[float, float]
    """The older one is the current head."""
    built_in: tuple[float, float]
    """The older one is the head that learning began with."""
    n_own: int
    n_built_in: int
    """Drafts that were compared."""

    @property
    def passes(self) -> bool:
        """Whether the new head is better on the user's texts, and hardly worse on the built-in ones."""
        return self.gains and self.built_in[1] >= (1.0 - TOLERATED) * self.built_in[0]

    @property
    def gains(self) -> bool:
        """Whether the new head is better on the user's texts."""
        return self.own[1] > self.own[0]

    def __str__(self) -> str:
        (a, b), (c, d) = self.own, self.built_in
        return (
            f"accepted of a draft of {N_DRAFTED}: {a:.3f} before, {b:.3f} now on your latest texts "
            f"({self.n_own:,} drafts); {c:.3f} at first, {d:.3f} now on built-in ones ({self.n_built_in:,})"
        )


class Guard:
    """Compares heads with the one that is installed."""

    def __init__(
        self, target: ModelWeights, texts: GuardTexts, installed: Path, first: Path | None = None
    ) -> None:
        """Measure the head in the file `installed`, of `target`. Raises UsageError if it is no head.

        `first`: the head that learning began with; None: this one.
        """
        self._target, self._texts, self._installed = target, texts, installed
        own, built_in = accepted(installed, target, texts)
        if first:
            (built_in,) = accepted(first, target, texts[1:])
        self._before = own, built_in

    def choose(self, path: Path, type_: str) -> tuple[Path, float, GuardFigures]:
        """Return the file to keep of the head in `path`, its share of the training, and its figures.

        All of it, or the first of SHARES that passes, its file beside `path`; all of it if none does.
        """
        whole = self.judge(path)
        if whole.passes or not whole.gains:
            return path, 1.0, whole
        family = _family(path, self._target)
        before, after = family.read(self._installed), family.read(path)
        for share in SHARES:
            part = path.with_name(f"{path.stem}-{share:.0%}.gguf")
            mean = {name: (1.0 - share) * before[name] + share * after[name] for name in after}
            family.export(mean, part, type_)
            figures = self.judge(part)
            if figures.passes:
                return part, share, figures
        return path, 1.0, whole

    def judge(self, path: Path) -> GuardFigures:
        """Return the figures of the head in `path`, compared with the installed one."""
        own, built_in = accepted(path, self._target, self._texts)
        own_before, built_in_before = self._before
        return GuardFigures(
            (own_before.mean_accepted, own.mean_accepted),
            (built_in_before.mean_accepted, built_in.mean_accepted),
            own.n_drafts,
            built_in.n_drafts,
        )


def accepted(path: Path, target: ModelWeights, parts: Sequence[Sequence[TrainingText]]) -> list[Acceptance]:
    """Return the acceptance of drafts of the head in `path`, for each of the `parts`.

    Drafts begin at all places of the texts. Raises UsageError for a file without a head of `target`.
    """
    from edgespec.apps.forge.training.loop import AcceptanceEvaluation

    family = _family(path, target)
    params, rows = family.read(path), BatchSize()
    return [AcceptanceEvaluation(family, texts, rows)(params) for texts in parts]


def _family(path: Path, target: ModelWeights) -> HeadFamily:
    from edgespec.apps.forge.training.head import HeadFamily

    header = check_model_file(path)
    head = read_head(header)
    if head is None:
        raise UsageError(f"{path}: no draft head")
    return HeadFamily(target, head.target_sha256, head.token_ids, header.n_ff)


LEAST_GAIN = 0.02
"""Gain over the present draft that a new one needs to be stored: less could be noise."""

_HEAD_BYTES = 64 << 20  # of a file, roughly
_BYTES_PER_PARAMETER = 16  # the parameter, its gradient, two moments
_BYTES_OF_BATCH = 1 << 30  # activations, logits


@dataclass(slots=True, kw_only=True)
class MakeResult:
    """The outcome of a DraftRequest: all candidates, the best, and what it was measured against."""

    target_name: str
    texts: dict[str, int]
    """Source -> tokens of the texts that drafts are made from."""
    trained: TrainingResult
    """Of all candidates; without parameters."""
    before: CandidateResult | None = None
    """The present draft, or drafting without one; None: it could not run."""
    candidates: Sequence[CandidateResult] = ()
    best: str
    """A candidate's name, such as "head-q4_0"."""
    share: float = 1.0
    """Part of its training in the best, where the rest of its weights are the head's before."""
    beaten: str
    """The present draft, or plain decoding where that was faster."""
    gain: float = 0.0
    """Gain of the best over `beaten`: 0.1 is 10 %."""
    kept: DraftRecord | None = None
    """Record of the best, if it was stored."""
    path: Path | None = None
    guard: GuardFigures | None
    """What decided, instead of the gain, if a head learned from the history."""


def require_jax() -> None:
    """Raise EdgespecError in one line if what training needs is not installed."""
    if not all(map(find_spec, ("jax", "optax"))):
        raise EdgespecError("training needs JAX: pip install 'edgespec[forge]'")


def make(request: DraftRequest, context: StageContext | None = None) -> MakeResult | None:
    """Make the best draft for `request.target`, which must be on this machine.

    The draft is stored if it is better than the present one, or with `force`. None: a head was to learn from
    its mistakes again, and there are no new ones. Raises UsageError and EdgespecError; what was written
    and trained by then stays, and the same request resumes.
    """
    run = MakeRun(request, context or StageContext())
    with run.store.locked_folder() as drafts_folder, choose_meter() as meter:
        return run.run(drafts_folder, meter)


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
        self._sha256 = sha256_of(self._target.path, lambda n: self._report("hashing the target", n / n_bytes))
        target = DatasetTarget(self._sha256, self._target.name, self._header.n_embd)
        self._dataset = Dataset(target, on_message=context.on_message)
        self.store = DraftStore(self._target.name, self._sha256)
        name = choose_models(request.target, None)[1]
        self._before = Candidate(name or "no draft", resolve(name) if name else None)
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
        rank(self._vocabulary, ()).cut(request.keep)  # refuses a wrong number before anything is written
        self._start = resolve(request.start) if request.start else None
        if self._start and not self._is_head(self._start):
            problem = f"no head for {self._target.name}: name one that `edgespec draft make` made for it"
            raise UsageError(problem, field="start", value=request.start)
        self._state = RunState("")

    def _report(self, stage: str, share: float = 0.0, detail: str = "") -> None:
        self._context.on_progress(stage, share, detail)

    def _is_head(self, path: Path) -> bool:
        head = read_head(check_model_file(path, or_head=True))
        return head is not None and head.target_sha256 == self._sha256

    def run(self, drafts_folder: Path, meter: Meter) -> MakeResult | None:
        """Run all stages; drafts are made in `drafts_folder`. Raises as `make`, and OSError."""
        request, folder = self._request, self._dataset.folder
        check_disk(drafts_folder, 2 * _HEAD_BYTES * len(request.types), f"drafts for {self._target.name}")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._state = resume(folder, request.key(self._sha256), self._context.on_message, force=request.force)
        learns = self._installed is not None
        if not self._state.until:
            if learns and self._knows_all():
                return None
            self._state.until = tokens_wanted(request, self._dataset, learns=learns)
        if not self._state.written:
            self._save()
            with self._metered(meter):
                self._write()
            self._state.written = True
        self._count_sources()
        texts = self._guard_texts() if learns else None
        start = self._start or self._usual_start()
        with self._metered(meter):
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
            self._store_best(made, new, start)
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

    def _save(self) -> None:
        write_atomically(self._dataset.folder / _STATE, msgspec.json.encode(self._state))

    @contextmanager
    def _metered(self, meter: Meter) -> Iterator[None]:
        """Count the joules of a stage, even if it is stopped, and save the run after it."""
        window, state = meter.begin(), self._state
        try:
            yield
        finally:
            spent = window.end()
            if spent.joules is None or state.joules is None:
                state.joules, state.joules_reason = None, state.joules_reason or spent.reason
            else:
                state.joules += spent.joules
            self._save()

    # ---- texts ----

    def _write(self) -> None:
        self._report("writing")
        kernels = self._request.evaluation.kernels == "auto"
        with Model(self._target.path, kernels=kernels, header=self._header) as model:
            if not model.can_rewind:
                problem = "cannot take tokens back: no draft can be used with it"
                raise UsageError(problem, field="target", value=self._target.name)
            learns, until = self._installed is not None, self._state.until
            write_texts(model, self._dataset, self._request, until, self._context, learns=learns)

    def _count_sources(self) -> None:
        counts: Counter[str] = Counter()
        for text in self._dataset.texts(held_out=False):
            counts[text.source] += len(text.tokens) - (0 if text.source == READ else text.n_prompt)
        self._state.add_sources(counts)
        self._save()

    # ---- the head ----

    def train(
        self, ids: Ids, start: Path | None, drafts_folder: Path
    ) -> tuple[TrainingResult, dict[str, Path]]:
        """Train a head that drafts the tokens `ids`, and return its file in `drafts_folder` for each type.

        `start`: the folder of an earlier training, or the file of a head. Raises EdgespecError, and
        KeyboardInterrupt when it is stopped: the checkpoints stay.
        """
        from edgespec.apps.forge.training.head import HeadFamily
        from edgespec.apps.forge.training.loop import Training, TrainingSettings

        stage, request = "training head", self._request
        self._report(stage, 0.0, "preparing")
        self._check_memory()
        sample = self._dataset.texts(held_out=False)
        head = HeadFamily(self._weights, self._sha256, ids, sample=sample)
        settings = TrainingSettings(
            hours=request.hours,
            tokens=request.tokens,
            seed=self._state.number,
            learns=self._installed is not None,
        )
        weights = head.read(start) if start and start.is_file() else start
        folder = self._run_folder / "head"
        trained = Training(head, self._dataset, settings, folder, self._context).run(weights)
        files = {}
        for type_ in request.types:
            self._report(stage, 1.0, f"writing it as {type_}")
            files[type_] = drafts_folder / f"head-{type_}.gguf"
            head.export(trained.params, files[type_], type_)
        trained.params = None
        return trained, files

    def _usual_start(self) -> Path | None:
        """Return an earlier training, or the file of the target's best head: made here, or its pair's."""
        installed, present = self._installed, self._before.path
        if earlier := earlier_training(self._run_folder, installed.stem if installed else None):
            return earlier  # rather the weights before they were rounded
        return present if present and self._is_head(present) else None

    def _token_ids(self) -> Ids:
        """Return the tokens that the drafts of a run can propose, ascending; the same for the same texts."""
        self._report("choosing tokens")
        texts = list(self._dataset.texts(held_out=False))
        head = read_head(check_model_file(self._installed)) if self._installed else None
        if head and self._request.keep is None:
            return renew(head.token_ids, self._vocabulary, texts)
        return rank(self._vocabulary, texts, self._weights).cut(self._request.keep)

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
        """Return the texts that heads are compared on. Raises EdgespecError if there are none.

        The next run of this request resumes with what was written by then.
        """
        try:
            return guard_texts(self._dataset)
        except EdgespecError:
            self._state.written, self._state.until = False, 0
            self._save()
            raise

    def _guarded(
        self, texts: GuardTexts, installed: Path, files: Mapping[str, Path]
    ) -> tuple[Candidate, float, GuardFigures]:
        """Return the best of the drafts, by type, its share of the training, and the guard's figures for it.

        Only drafts of the installed one's type are compared, or all if none has it.
        """
        self._report("evaluating", 0.0, "by accepted tokens")
        first = self._dataset.folder / FIRST_HEAD
        if not (first.exists() and self._state.learnt == sha256_of(installed)):  # learning begins
            with replacing(first) as file:
                file.write(installed.read_bytes())
        guard = Guard(self._weights, texts, installed, first)
        heads = {path: ModelWeights(check_model_file(path)) for path in (installed, *files.values())}
        kinds = {path: weights.info(EMBEDDINGS).kind for path, weights in heads.items()}
        alike = [type_ for type_, path in files.items() if kinds[path] == kinds[installed]]
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

    def _store_best(self, made: MakeResult, new: list[Candidate], start: Path | None) -> None:
        """Store the best draft, if it beats the present one and plain decoding, or the guard passed it."""
        self._report("evaluating")
        settings, folder = self._request.evaluation, self._dataset.folder / "judging"
        prompts = evaluation_prompts(self._dataset, settings.n_prompts)
        evaluator = Evaluator(self._target.path, prompts, settings, folder, self._context)
        measured = evaluator.evaluate([self._before, *new])
        before = next((one for one in measured if one.candidate == self._before), None)
        found = [one for one in measured if one.candidate != self._before]
        if not found:
            raise EdgespecError("none of the candidates could be evaluated; the lines above say why")
        best = max(found, key=lambda one: one.gains.mean)
        base, made.beaten = 1.0, "plain decoding"
        if before and before.gains.mean > base:
            base, made.beaten = before.gains.mean, before.candidate.name
        made.before, made.candidates, made.best = before, found, best.candidate.name
        made.gain = best.gains.mean / base - 1.0
        if before:  # first: the new draft may get its name
            update_record(before)
        parent = start.stem if start and start.is_file() else draft_of(start)
        records = [read_record(self._start)] if self._start else drafts_for(str(self._target.path))
        for record in records:
            if record and (self._start or record.name == parent):
                self._state.add_sources(record.data)  # its weights know of these texts
        if best.candidate.path and (made.guard or made.gain >= LEAST_GAIN or self._request.force):
            made.kept = self._record(made, best, parent)
            made.path = self.store.store(best.candidate.path, made.kept)

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
            hours=made.trained.elapsed_s / 3600,
            joules=self._state.joules,
            joules_reason=self._state.joules_reason,
            gains=best.gains,
            **asdict(timing),
            processor=read_cpu().model,
            made=datetime.now().astimezone().isoformat(timespec="seconds"),
            parent=parent,
            edgespec=version("edgespec"),
        )

    def _end(self, made: MakeResult) -> None:
        folder, kept, run = self._dataset.folder, made.kept, self._run_folder
        if made.path and made.guard and made.guard.passes:
            self._state.learnt = sha256_of(made.path)
        self._state.ended, self._state.kept = True, kept.name if kept else None
        self._save()
        shutil.rmtree(folder / "judging", ignore_errors=True)
        stays = self._installed.stem if self._installed and kept is None else None
        tidy(run, goes_on=kept is None, installed=stays)
        if kept and made.share == 1.0:
            write_atomically(run / "head" / _NAME, kept.name)
        elif kept:  # the next training starts from the file
            shutil.rmtree(run / "head", ignore_errors=True)


# ---- what is remembered of runs: FOLDER is the target's dataset ----
#
#     FOLDER/make.json                   state of the last run; stages keep their own
#     FOLDER/training/2/head/            training of run 2: a checkpoint under way, then its best weights
#                            name        the draft that was stored of it
#     FOLDER/first-head.gguf             the head that learning from mistakes began with
#
# A finished run is remembered too: the next one may start from its weights.


FIRST_HEAD = "first-head.gguf"
_STATE = "make.json"
_NAME = "name"


@dataclass(slots=True)
class RunState:
    """State of a run: under way, stopped or finished."""

    key: str
    """`DraftRequest.key`; another request does not resume this run."""
    number: int = 1
    until: int = 0
    """Tokens that the dataset is to have; 0: not decided yet."""
    written: bool = False
    ended: bool = False
    repeats: bool = False
    """Whether the run before was of the same request."""
    kept: str | None = None
    """The draft that was stored; None: none yet, or none was better."""
    sources: dict[str, int] = field(default_factory=dict)
    """Source -> tokens that this run, and those before it, learnt from."""
    joules: float | None = 0.0
    """Spent on it; None: not measured."""
    joules_reason: str = ""
    learnt: str = ""
    """SHA-256 of the last head that passed the guard: FIRST_HEAD is what its learning began with."""

    def add_sources(self, tokens: Mapping[str, int]) -> None:
        """Count sources of texts; one that was deleted since stays counted."""
        self.sources |= {name: max(n, self.sources.get(name, 0)) for name, n in tokens.items()}


def resume(folder: Path, key: str, on_message: MessageFn, *, force: bool = False) -> RunState:
    """Return the unfinished run in `folder`, or a new one; `on_message` takes a line. Raises OSError.

    `force`: a finished run that stored no draft is resumed too, to store one.
    """
    found = StateFile(
        folder / _STATE, lambda data: parse_struct(data, RunState), lock=".make.lock", on_message=on_message
    ).read()
    if found is None:
        return RunState(key)
    if found.key == key and not found.ended:
        on_message("resuming the run that was stopped")
        return found
    if found.key == key and force and not found.kept:
        on_message("resuming the last run, which kept nothing: its drafts are evaluated again")
        found.ended = False
        return found
    if not found.ended:
        on_message("the run that was stopped had other options: a new one begins, with the texts it wrote")
    return RunState(
        key, found.number + 1, repeats=found.key == key, sources=found.sources, learnt=found.learnt
    )


# ---- folders of trainings; `run` is FOLDER/training/NUMBER ----


def earlier_training(run: Path, name: str | None = None) -> Path | None:
    """Return the folder of the last training whose weights another one can start from.

    `name`: of the draft that has these weights; None: of any, or of none.
    """
    for other in _earlier_runs(run):
        training = other / "head"
        if (training / BEST).exists() and name in (None, draft_of(training)):
            return training
    return None


def draft_of(training: Path | None) -> str | None:
    """Return the draft that has the weights of a training; None if none was stored."""
    file = training / _NAME if training else None
    return file.read_text(encoding="utf-8") if file and file.exists() else None


def tidy(run: Path, *, goes_on: bool, installed: str | None = None) -> None:
    """Delete from a finished run, and those before it, what later trainings do not start from.

    `goes_on`: the run may be resumed, so its checkpoints stay. The weights of the draft `installed` stay too.
    """
    if not goes_on:
        (run / "head" / CHECKPOINT).unlink(missing_ok=True)
    for other in _earlier_runs(run):
        if installed is None or draft_of(other / "head") != installed:
            shutil.rmtree(other, ignore_errors=True)


def _earlier_runs(run: Path) -> list[Path]:
    others = [path for path in run.parent.glob("*") if path.name.isdecimal() and path != run]
    return sorted(others, key=lambda path: int(path.name), reverse=True)
