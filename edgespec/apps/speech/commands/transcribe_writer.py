"""Writes the segments of a transcript to stdout while it is made."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from edgespec.cli.console import out
from edgespec.cli.render import printable

if TYPE_CHECKING:
    from edgespec.apps.speech.commands.transcribe_options import SpeechOutput
    from edgespec.apps.speech.transcript import Segment


class SegmentWriter:
    """Writes segments to stdout as they come, in forms that are written so."""

    def __init__(self, output: SpeechOutput, *, n_files: int) -> None:
        """Write as `output` says, one of `n_files`."""
        from edgespec.apps.speech.formats import opening

        self._output = output
        self._is_on = output.output is None and not output.json and output.format != "json"
        self._n = 1
        if self._is_on and (start := opening(output.format)):
            sys.stdout.write(start)
        self._shows_times = self._is_on and output.format == "txt" and out.is_terminal and n_files == 1

    def write(self, segment: Segment) -> None:
        """Write a segment, flushed: somebody may be reading along."""
        if not self._is_on:
            return
        from edgespec.apps.speech.formats import clock, cues

        for cue in cues([segment], self._output.format, words=self._output.words, first=self._n):
            times = f"[{clock(segment.start_s, 'vtt')}] " if self._shows_times else ""
            sys.stdout.write(times + (printable(cue) if out.is_terminal else cue))
            self._n += 1
        sys.stdout.flush()
