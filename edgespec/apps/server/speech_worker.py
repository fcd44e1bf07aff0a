"""The thread that transcribes recordings, one after the other, in turns by client.

It shares the processors with the engine's thread: a window of a recording and a pass over texts take turns. A
request that must end does so after the window under way; what was heard before has been sent by then.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from edgespec.apps.server.request_queue import QueuedRequest
from edgespec.apps.server.request_worker import Outcome, RequestWorker, Start, cancelled_as
from edgespec.apps.speech.options import SpeechOptions
from edgespec.apps.speech.transcriber import Hearing, Transcriber
from edgespec.apps.speech.transcript import Segment, Transcript
from edgespec.apps.speech.voice import Span
from edgespec.platform.metering import Meter
from edgespec.platform.turns import Turns


@dataclass(eq=False, slots=True, kw_only=True)
class QueuedRecording(QueuedRequest[Segment, Transcript]):
    """A recording that waits to be transcribed, with its options."""

    samples: npt.NDArray[np.float32]
    options: SpeechOptions
    speech: list[Span] | None = None
    """The spans that are heard; None: all."""


class SpeechWorker(RequestWorker[QueuedRecording, Segment, Transcript]):
    """Transcribes on its own thread, one recording at a time."""

    def __init__(
        self,
        transcriber: Transcriber,
        *,
        turns: Turns | None = None,
        max_queue: int = 64,
        max_seconds: float = 600.0,
        meter: Meter | None = None,
    ) -> None:
        """Let at most `max_queue` recordings wait, each up to `max_seconds`; then it may take as long again.

        From `start` to the end of `stop` only the thread uses the model of `transcriber`. `turns`: shared
        with whatever else computes in this process. `meter`: measures the joules of each recording.
        """
        super().__init__(
            "edgespec speech", parallel=1, max_queue=max_queue, max_seconds=max_seconds, turns=turns
        )
        self.transcriber, self._meter = transcriber, meter

    def run(
        self,
        samples: npt.NDArray[np.float32],
        options: SpeechOptions,
        *,
        client: str,
        speech: list[Span] | None = None,
    ) -> Start[Segment, Transcript]:
        """A function that begins a recording in the turn of `client`: its segments, then all of it.

        Only the spans of `speech` are heard, if given.
        Before them come its places in the queue, if it must wait. To leave ends the work after the window
        under way. Beginning raises QueueFull and ShuttingDown.
        """
        request = partial(QueuedRecording, client, samples=samples, options=options, speech=speech)
        return partial(self._ask, request)

    def _put(self, request: QueuedRecording, *, follows: bool) -> None:
        super()._put(request, follows=follows)
        if self._running:
            self._tell_places()  # now: the window under way takes a while

    def _has_room(self, request: QueuedRecording) -> bool:
        return not self._running

    def _begin(self, request: QueuedRecording) -> None:
        """Do nothing yet: `_step` hears it."""

    def _step(self) -> None:
        """Hear the recording whose turn it is."""
        (request,) = self._running
        hearing: Hearing | None = None
        end: Transcript | BaseException

        def between_windows(_done_s: float, _total_s: float) -> None:
            if request.cancelled:
                raise request.cancelled
            self.turns.hand_over()

        try:
            ours = self.transcriber
            heard = Transcriber(ours.model, ours.tokenizer, request.options, drafts=ours.drafts)
            with self.turns:
                hearing = heard.hear(request.samples, speech=request.speech, on_progress=between_windows)
                self._listen(request, hearing)
            end = hearing.transcript
        except BaseException as error:  # noqa: BLE001 - it ends this request, not the thread
            end = error
        transcript = hearing.transcript if hearing else None
        outcome: Outcome = "finished" if transcript and transcript.complete else "failed"
        if request.cancelled:
            outcome = cancelled_as(request.cancelled)
        self._leave(request, outcome, end, transcript)

    def _listen(self, request: QueuedRecording, hearing: Hearing) -> None:
        window = self._meter.begin() if self._meter else None
        try:
            for segment in hearing.segments():
                request.hand_over([segment])
        finally:
            if window:
                hearing.transcript.energy = window.end()
