"""`edgespec draft make --recordings`: a decoder that drafts for a Whisper model, made from recordings.

    stage                            modules                      what it leaves on disk
    the target hears the recordings  recordings.py                forge_root()/TARGET/recordings/
    the decoder is trained           training/speech_decoder.py   .../training/speech/, checkpoints
    it is written and judged         here                         a folder in the models directory
    it is stored if it is faster     draft_store.py               the models directory: file, name, record

A run may be stopped at any moment; the same command goes on.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgespec.errors import EdgespecError, describe_os_error
from edgespec.forge.dataset import RECORDINGS, forge_root
from edgespec.forge.draft_store import DraftStore, check_draft_name
from edgespec.forge.make import LEAST_GAIN
from edgespec.forge.progress import StageContext, StageProgress
from edgespec.forge.recordings import HeardWindow, hear_recordings, read_windows, recordings_in
from edgespec.llama.fingerprints import file_fingerprint
from edgespec.models.draft_records import DraftRecord, DraftSpeedups
from edgespec.models.hashes import sha256_of
from edgespec.models.speech_model import speech_model, speech_models_here
from edgespec.models.whisper.convert import convert_whisper
from edgespec.models.whisper.gguf_file import check_speech_file, read_whisper_gguf
from edgespec.platform.cpu import default_threads, read_cpu
from edgespec.speech.draft_choice import choose_draft
from edgespec.speech.draft_costs import SpeechDraftCosts, SpeechPair, keep_costs
from edgespec.speech.drafts import ModelDrafts
from edgespec.speech.loading import SpeechModel
from edgespec.speech.options import SpeechOptions
from edgespec.speech.transcriber import Samples, Transcriber
from edgespec.speech.transcript import SpeechStats
from edgespec.speech.whisper_model import SequenceBatch

if TYPE_CHECKING:
    from edgespec.forge.training.loop import TrainingResult

_TYPE = "q8_0"
_TEMPERATURES = {"greedy": 0.0, "sampled": 0.8}
_TIMED_PASSES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechDraftRequest:
    """A request for a decoder that drafts for a Whisper model."""

    target: str
    recordings: Path
    """The folder with recordings like those that it is to draft for."""
    hours: float = 2.0
    """Hours of training."""
    rounds: int = 3
    """Rounds of judging over the recordings that are held out."""
    threads: int | None = None
    name: str | None = None
    force: bool = False
    """Store it even if it is no faster, and replace a draft of that name."""


@dataclass(frozen=True, slots=True)
class SpeechDraftResult:
    """Outcome of a request."""

    target_name: str
    n_windows: int
    """Windows of the recordings, those for judging among them."""
    accepted: float
    """Share of the held-out tokens that are the decoder's likeliest."""
    gains: DraftSpeedups
    """Times that a recording takes plainly, or with the draft that is there, over that with this one."""
    beaten: str
    """Plain decoding, or the draft that is there."""
    drafted_accepted: float
    """Share of the drafted tokens that were accepted, at temperature 0."""
    cost_ratio: float
    kept: DraftRecord | None
    path: Path | None


def make_speech_draft(request: SpeechDraftRequest, context: StageContext | None = None) -> SpeechDraftResult:
    """Make a draft that shares the target's encoder; store it if it is faster than what is there.

    Raises UsageError and EdgespecError; what was heard and trained by then stays, and the same request
    resumes.
    """
    files = recordings_in(request.recordings)
    path = speech_model(request.target)
    sha256 = sha256_of(path)
    store = DraftStore(path.stem, sha256)
    if request.name:
        check_draft_name(request.name, replace=request.force)
    with (
        store.locked_folder() as folder,
        SpeechModel(path, name=path.stem, n_threads=request.threads) as target,
    ):
        try:
            return _SpeechMake(request, context or StageContext(), target, sha256, store).run(files, folder)
        except OSError as error:
            raise EdgespecError(f"cannot make a draft: {describe_os_error(error)}") from error


class _SpeechMake:
    """Runs one request."""

    def __init__(
        self,
        request: SpeechDraftRequest,
        context: StageContext,
        target: SpeechModel,
        sha256: str,
        store: DraftStore,
    ) -> None:
        self._request, self._context, self._target = request, context, target
        self._sha256, self._store = sha256, store
        self._folder = forge_root() / sha256[:16]

    def run(self, files: Sequence[Path], folder: Path) -> SpeechDraftResult:
        context, heard_folder = self._context, self._folder / RECORDINGS
        heard, held_out = hear_recordings(self._target, files, heard_folder, context)
        learnt, checked = ([w for path in paths for w in read_windows(path)] for paths in heard)
        trained, draft = self._train(learnt, checked, folder)
        with SpeechModel(draft, name="new", n_threads=self._request.threads) as model:
            measured = self._judge(model, held_out)
            cost_ratio = _pass_s(model) / _pass_s(self._target)
        gain = measured.gains.mean - 1.0
        kept = path = None
        if gain >= LEAST_GAIN or self._request.force:
            kept = self._record(trained, measured, cost_ratio)
            path = self._store.store(draft, kept, mark="speech")
            keep_costs(self._pair(path), measured.costs)
        return SpeechDraftResult(
            self._target.name,
            len(learnt) + len(checked),
            trained.acceptance.by_position[0],
            measured.gains,
            measured.beaten,
            measured.accepted,
            cost_ratio,
            kept,
            path,
        )

    def _train(
        self, learnt: Sequence[HeardWindow], judged: Sequence[HeardWindow], folder: Path
    ) -> tuple[TrainingResult, Path]:
        """Train, and write the decoder into `folder`; return the training and the file."""
        from edgespec.forge.training.loop import TrainingSettings, train
        from edgespec.forge.training.speech_decoder import SpeechDecoder, SpeechLessons, layers_for

        contents = read_whisper_gguf(self._target.path)
        decoder = SpeechDecoder(contents, layers_for(contents.sizes.n_text_layer))
        trained = train(
            SpeechLessons(decoder, learnt, judged),
            TrainingSettings(hours=self._request.hours),
            self._folder / "training" / "speech",
            on_progress=lambda now: self._tell("training", now.share, now.figures),
            on_message=self._context.on_message,
        )
        path = folder / "draft.gguf"
        fingerprint = file_fingerprint(check_speech_file(self._target.path))
        convert_whisper(decoder.contents(trained.params), path, _TYPE, name="draft", drafts_for=fingerprint)
        return trained, path

    def _tell(self, stage: str, share: float, detail: str = "") -> None:
        self._context.on_progress(StageProgress(stage, share, detail))

    # ---- judging ----

    def _judge(self, draft: SpeechModel, sounds: Mapping[str, Samples]) -> _Judgement:
        """Hear what is held out with and without the draft, in turns."""
        seconds: dict[tuple[str, str], list[float]] = {}
        seen: dict[str, SpeechStats] = {}
        with self._present() as (there, others):
            n = self._request.rounds * len(_TEMPERATURES)
            for i, (how, temperature) in enumerate(list(_TEMPERATURES.items()) * self._request.rounds):
                self._tell("judging", i / n)
                ours = ModelDrafts(self._target, draft, repeats=False, always=True)
                variants = {"plain": None, **({there: others} if others else {}), "new": ours}
                for name, drafts in variants.items():
                    stats = self._hear(sounds, temperature, drafts)
                    seconds.setdefault((how, name), []).append(stats.total_s)
                    if how == "greedy":
                        seen[name] = stats
        return _judgement(seconds, seen, there)

    @contextmanager
    def _present(self) -> Iterator[tuple[str, ModelDrafts | None]]:
        """Give the draft that `auto` would choose now, and its name."""
        threads = self._request.threads or default_threads()
        chosen = choose_draft(self._target, speech_models_here(), threads=threads)
        if chosen is None:
            yield "", None
            return
        with SpeechModel(chosen.path, name=chosen.name, n_threads=self._request.threads) as model:
            yield chosen.name, ModelDrafts(self._target, model, repeats=False, known=chosen.known)

    def _hear(
        self, sounds: Mapping[str, Samples], temperature: float, drafts: ModelDrafts | None
    ) -> SpeechStats:
        """Return the sums over all recordings."""
        options = SpeechOptions(temperatures=(temperature,), seed=0)
        total = SpeechStats()
        for samples in sounds.values():
            transcriber = Transcriber(self._target.model, self._target.tokenizer, options, drafts=drafts)
            stats = transcriber.transcribe(samples).stats
            total.steps += stats.steps
            for name in ("total_s", "decode_s", "draft_encode_s", "n_tokens", "n_windows", "n_steps"):
                setattr(total, name, getattr(total, name) + getattr(stats, name))
        return total

    # ---- the outcome ----

    def _pair(self, draft: Path) -> SpeechPair:
        threads = self._request.threads or default_threads()
        return SpeechPair.of(self._target.path, draft, kernels=self._target.model.kernels, threads=threads)

    def _record(self, trained: TrainingResult, measured: _Judgement, cost_ratio: float) -> DraftRecord:
        stem = re.sub(r"[^A-Za-z0-9._+@-]", "_", self._target.name).lstrip("._+@-") or "draft"
        return DraftRecord(
            name=self._request.name or self._store.free_name(f"{stem}-shallow-{_TYPE}"),
            family="shallow",
            target_name=self._target.name,
            target_sha256=self._sha256,
            target_bytes=self._target.path.stat().st_size,
            data={"recordings": trained.n_tokens},
            tokens_seen=trained.n_tokens,
            hours=trained.elapsed_s / 3600,
            joules_reason="not measured",
            acceptance=(measured.accepted,),
            cost_ratio=cost_ratio,
            gains=measured.gains,
            processor=read_cpu().model,
            made=datetime.now().astimezone().isoformat(timespec="seconds"),
            parent=self._target.name,
            edgespec=version("edgespec"),
        )


@dataclass(frozen=True, slots=True)
class _Judgement:
    gains: DraftSpeedups
    beaten: str
    accepted: float
    costs: SpeechDraftCosts


def _judgement(
    seconds: Mapping[tuple[str, str], Sequence[float]], seen: Mapping[str, SpeechStats], there: str
) -> _Judgement:
    """Compare the new draft with the faster of plain decoding and the draft that is there."""

    def gain(how: str, other: str) -> float:
        pairs = zip(seconds[how, other], seconds[how, "new"], strict=True)
        return statistics.median(before / now for before, now in pairs)

    beaten = "plain"
    if there and statistics.median(seconds["greedy", there]) < statistics.median(seconds["greedy", "plain"]):
        beaten = there
    plain, new = seen["plain"], seen["new"]
    return _Judgement(
        DraftSpeedups(gain("greedy", beaten), gain("sampled", beaten)),
        "plain decoding" if beaten == "plain" else beaten,
        new.draft_acceptance_rate or 0.0,
        SpeechDraftCosts(
            encode_s=max(1e-9, new.draft_encode_s / max(1, new.n_windows)),
            plain_s=max(1e-9, plain.decode_s / max(1, plain.n_tokens)),
            drafted_s=max(1e-9, new.decode_s / max(1, new.n_tokens)),
            n_tokens=max(1.0, new.n_tokens / max(1, new.n_windows)),
        ),
    )


def _pass_s(model: SpeechModel) -> float:
    """Return the time of a pass over one token, the median of some."""
    dims = model.model.dims
    silence = np.zeros((dims.n_audio_ctx, dims.n_audio_state), np.float32)
    times = []
    audio = model.model.cross_from(silence)
    cache = model.model.cache(audio)
    for i in range(_TIMED_PASSES):
        began = time.perf_counter()
        cache.forward([SequenceBatch(0, [i])])
        times.append(time.perf_counter() - began)
    cache.close()
    audio.close()
    return statistics.median(times)
