"""The lossy mode: the small model answers alone, and the target is woken when the small one is unsure.

    small      token, token, ...       each from its own distribution, as long as it is sure
    unsure     its entropy or margin (Signal) is past a threshold
    target     prefills what it has not read and writes a span of tokens, or the rest of the answer

The small model's tokens are never verified, so the text is not distributed as the target's own. A seed
decides the text: each token takes one coin, and the target's spans are `Generation`s of the match rule, whose
text does not depend on drafts. `edgespec calibrate` measures the loss of thresholds, and stores one for a
pair, independent of the machine:

    CACHE/profiles/TARGET+DRAFT-HASH.calibration.json       a choice for each signal and span
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from edgespec.decoding.choices import Signal
from edgespec.decoding.generate import Generation, Loop, Task
from edgespec.decoding.options import Span, WakePolicy
from edgespec.decoding.records import Step
from edgespec.decoding.session import Forward, ForwardResult, Rows, TokenView
from edgespec.decoding.tree import Drafter
from edgespec.drafting.draft_model import DraftModel
from edgespec.errors import MessageFn, UsageError, describe_os_error, silent
from edgespec.llama.gguf_header import GGUFHeader
from edgespec.llama.session import Session
from edgespec.platform.kept import PROFILES, DamagedFileError, StateFile, parse_struct

CALIBRATION_FORMAT = 2

_LONGEST_STEM = 60  # characters of a model's name in a file's


class ThresholdPoint(msgspec.Struct, frozen=True):
    """Loss and savings of one threshold."""

    threshold: float
    loss: float
    """Share of the tokens that the small model writes and that are not the target's likeliest."""
    error: float
    """Its standard error, over prompts."""
    target_share: float
    """Share of the tokens that the target writes."""
    kl: float | None = None
    """Mean divergence from the target of the model that writes, in nats a token; 0 for the target itself."""


class ThresholdChoice(msgspec.Struct, frozen=True):
    """The threshold of one signal and span, and the points it was chosen from."""

    signal: Signal
    span: Span
    asked: float
    """The loss that was allowed."""
    point: ThresholdPoint
    curve: tuple[ThresholdPoint, ...]
    """From the small model alone to the target alone."""
    suite: str
    n_prompts: int
    n_tokens: int
    date: str

    @property
    def wake_policy(self) -> WakePolicy:
        """The options of a cascade with this threshold."""
        return WakePolicy(self.signal, self.point.threshold, self.span)


class Calibration(msgspec.Struct, frozen=True):
    """The thresholds that were found for a pair, by signal and span."""

    target: str
    """`GGUFHeader.fingerprint` of its file."""
    draft: str
    choices: dict[str, ThresholdChoice] = msgspec.field(default_factory=dict)
    """The choice for each signal and span, such as "margin 16"."""
    format: int = CALIBRATION_FORMAT

    def with_choices(self, choices: Sequence[ThresholdChoice]) -> Calibration:
        """Return the calibration with `choices` replacing older ones of the same signal and span."""
        return msgspec.structs.replace(
            self, choices={**self.choices, **{_choice_name(c.signal, c.span): c for c in choices}}
        )


def calibration_path(target: GGUFHeader, draft: GGUFHeader) -> Path:
    """Return where the calibration of a pair is, or would be. Raises UsageError: no home directory."""
    names = "+".join(
        re.sub(r"[^A-Za-z0-9._@-]", "_", one.path.stem)[:_LONGEST_STEM] for one in (target, draft)
    )
    digest = hashlib.sha256(json.dumps([target.fingerprint(), draft.fingerprint()]).encode()).hexdigest()[:16]
    return PROFILES.path() / f"{names}-{digest}.calibration.json"


def load_calibration(target: GGUFHeader, draft: GGUFHeader) -> Calibration:
    """Return the stored calibration of a pair, an empty one where nothing is stored.

    Raises UsageError for a damaged file, having set it aside.
    """
    problems: list[str] = []
    try:
        found = _calibration_file(target, draft, problems.append).read()
    except OSError as error:
        raise UsageError(f"{describe_os_error(error)}; give a threshold") from None
    if problems:
        raise UsageError(f"{problems[0]}; run `edgespec calibrate`, or give a threshold")
    return found or _empty_calibration(target, draft)


def check_storable(target: GGUFHeader, draft: GGUFHeader) -> None:
    """Raise what `store_calibration` would, before the work: UsageError for no home directory."""
    with suppress(DamagedFileError):  # which `store_calibration` sets aside
        _calibration_file(target, draft, silent).peek()


def store_calibration(target: GGUFHeader, draft: GGUFHeader, choices: Sequence[ThresholdChoice]) -> Path:
    """Store `choices` with those of other signals and spans, and return the file.

    Raises OSError if it cannot be written.
    """
    file = _calibration_file(target, draft, silent)

    def with_choices(kept: Calibration | None) -> bytes:
        calibration = (kept or _empty_calibration(target, draft)).with_choices(choices)
        return msgspec.json.format(msgspec.json.encode(calibration), indent=1) + b"\n"

    file.update(with_choices)
    return file.path


def _empty_calibration(target: GGUFHeader, draft: GGUFHeader) -> Calibration:
    return Calibration(target.fingerprint(), draft.fingerprint())


def _calibration_file(target: GGUFHeader, draft: GGUFHeader, on_message: MessageFn) -> StateFile[Calibration]:
    path, empty = calibration_path(target, draft), _empty_calibration(target, draft)

    def parse(data: bytes) -> Calibration:
        found = parse_struct(data, Calibration)
        if (found.format, found.target, found.draft) != (CALIBRATION_FORMAT, empty.target, empty.draft):
            raise DamagedFileError("of other models, or of another version")
        try:
            _ = [choice.wake_policy for choice in found.choices.values()]  # refuses what no threshold can be
        except UsageError as error:
            raise DamagedFileError(f"damaged: {error}") from None
        return found

    return StateFile(path, parse, on_message=on_message)


def calibrated(target: GGUFHeader, draft: GGUFHeader, wake_policy: WakePolicy) -> WakePolicy:
    """Return `wake_policy` with the threshold that was chosen for its signal and span.

    Raises UsageError, which says what to run, if none was.
    """
    found = load_calibration(target, draft).choices.get(_choice_name(wake_policy.signal, wake_policy.span))
    if found is None:
        raise UsageError(
            f"no threshold is known of these models for the signal {wake_policy.signal} and the span "
            f"{wake_policy.span}; run `edgespec calibrate` with them and this span, or give a threshold"
        )
    return found.wake_policy


def _choice_name(signal: Signal, span: Span) -> str:
    return f"{signal} {span}"


_READ = 128  # tokens of the prompt that the small model reads between two looks at how far it is

_FARTHEST = np.float32(-1e4)
"""Least difference of a logit from the best one: its exp is 0, like that of -inf, but 0 * -inf is NaN."""


def signal_of(row: Rows, signal: Signal) -> float:
    """Return the margin or the entropy (nats) of raw logits, shape (n_vocab,); a token at -inf has none."""
    top = int(row.argmax())
    with np.errstate(invalid="ignore"):  # NaN among the logits: the sampler will report it
        shifted = np.maximum(row - row[top], _FARTHEST)
        weights = np.exp(shifted)
    total = float(weights.sum())
    if signal == "entropy":
        return math.log(total) - float((weights * shifted).sum()) / total
    weights[top] = 0.0
    return (1.0 - float(weights.max())) / total


class SmallModel(DraftModel):
    """The small model of a cascade: it writes, and drafts for the target's spans.

    It has read the sequence before a span begins.
    """

    def start(self) -> None:
        """Forget everything: nothing of the sequence is read yet."""
        super().begin()

    def begin(self, tokens: Sequence[int] = ()) -> None:
        """Start the drafter on the tokens that the model has read."""


class Cascade(Loop):
    """One run of the lossy loop."""

    def __init__(
        self,
        target: Session,
        small: SmallModel,
        prompt: Sequence[int],
        task: Task,
        *,
        drafter: Drafter | None = None,
        n_ctx: int | None = None,
    ) -> None:
        """Prepare to continue `prompt` with `small`, and with `target` where the task's `cascade` says so.

        `drafter` drafts for the target's spans (None: plain decoding), and may use `small`.
        `n_ctx` is where the context counts as full, by default the end of `target`'s.
        """
        wake_policy = task.options.cascade
        assert wake_policy is not None  # noqa: S101 - for the type checker
        super().__init__(prompt, task, n_ctx=n_ctx or target.n_ctx, is_eog=target.model.is_eog)
        self.n_woken = 0
        """Times that the target was woken."""
        self._n_read = 0
        self._target, self._small, self.drafter = target, small, drafter
        self._span: Generation | None = None
        """The target's generation under way; None: the small model writes."""
        self._wake_policy = wake_policy
        self._to_the_end = False
        self._sampler = task.options.params.sampler(
            target.model.n_vocab, 0, seed=task.coins.seed, vocabulary=target.model
        )
        # Drafted tokens in the small model's context, after the sequence.
        self._reserve = 1 + (drafter.n_max if drafter else 0)
        self._part: Forward | None = None  # of the small model
        self._has_begun = False
        self._began = 0.0  # when its pass was asked for

    @property
    def n_read(self) -> int:
        """Tokens that the target read when it was woken; none of them twice."""
        return self._n_read

    def close(self) -> None:
        """End here: the caches then hold a beginning of `tokens`."""
        if self._span:
            self._span.close()
        n_known = len(self.tokens) - 1
        self._target.rewind(min(self._target.n_past, n_known))
        self._small.trim(n_known)

    def ask(self) -> Forward | None:
        """Return the pass of the small model, or of the target once it was woken; None at the end."""
        with self._small.blamed:
            if not self._has_begun:
                self._begin()
            if self.is_complete:
                return None
            if not self._span and (self._to_the_end or not self._small_can_hold()):
                self._to_the_end = True  # it would have to forget the prompt
                self._wake()
            if self._span:
                return self._span.ask()
            self.mark("rest")
            self._began = time.perf_counter()
            asked = self._small.ask(self.tokens)
            assert isinstance(asked, Forward)  # noqa: S101 - a draft model of the target's vocabulary
            self._part = asked
            return asked

    def process(self, result: ForwardResult) -> Step | None:
        """Process the result of the pass; None if the small model was unsure: the target is woken."""
        with self._small.blamed:
            if not self._span:
                return self._write_alone(result)
            made = self._span.process(result)
            if self._span.is_complete:
                self._span.close()
                self._span = None
            self._emit(())
            return made

    def _begin(self) -> None:
        """Let the small model read the prompt."""
        self.mark("rest")
        started = time.perf_counter()
        self._target.clear()
        self._small.start()
        if self._small_can_hold():
            tokens = self.tokens
            for n in range(_READ, len(tokens) + _READ, _READ):
                self._small.read(TokenView(tokens, n=min(n + 1, len(tokens))))
                self.n_prompt_read = min(n, len(tokens))
        self.mark("draft")
        self.tally.draft_prefill_s += time.perf_counter() - started
        self._has_begun = True
        self._emit(())

    def _small_can_hold(self) -> bool:
        return len(self.tokens) + self._reserve <= self._small.n_ctx

    def _write_alone(self, result: ForwardResult) -> Step | None:
        """Emit a token of the small model, which the target has not seen, or wake the target."""
        assert self._part, "ask comes first"  # noqa: S101
        row = self._part.finish(result).rows[0]
        made = None
        if self._wake_policy.wakes(signal_of(row, self._wake_policy.signal)):
            self._wake()
        else:
            (coin,) = self._task.coins.draw(1)
            token = self._sampler.sample(row, self._recent(), coin, -1)
            self._emit([token])
            made = Step((token,), alone=True)
        self.mark("draft")
        self.tally.draft_s += time.perf_counter() - self._began
        return made

    def _wake(self) -> None:
        n = self.n_predict_left
        if self._wake_policy.span == "rest":
            self._to_the_end = True
        elif not self._to_the_end:
            n = self._wake_policy.span if n is None else min(n, self._wake_policy.span)
        options = replace(self._task.options, n_predict=n, cascade=None, n_logprobs=None)
        span = self._span = Generation(
            self._target,
            self.drafter,
            self.tokens,
            Task(options=options, rule="match", coins=self._task.coins),
            n_ctx=self.n_ctx,
            n_known=self._target.n_past,
        )
        self.n_woken += 1
        self._n_read += span.n_read
        span.mark, span.tally, self.tokens = self.mark, self.tally, span.tokens

    def plain_rate(self) -> None:
        """Return None: the target's own speed is unknown while the small model writes."""

    def note(self) -> str:
        """Return a sentence about how often the target was woken, why, and what it read."""
        if not self.n_woken:
            return f"the small model wrote alone: the target was never woken ({self._wake_policy})"
        times = "once" if self.n_woken == 1 else f"{self.n_woken} times"
        return f"the target was woken {times} ({self._wake_policy}) and read {self._n_read} tokens then"
