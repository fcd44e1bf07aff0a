"""Standard input heard live: the final text on stdout, in a terminal the hypothesis below it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.live import Live
from rich.text import Text

from edgespec.apps.speech.audio import stream_audio
from edgespec.apps.speech.commands.transcribe_writer import SegmentWriter
from edgespec.apps.speech.live import Hypothesis, LiveHearing
from edgespec.cli.console import err, message
from edgespec.cli.render import printable

if TYPE_CHECKING:
    from edgespec.apps.energy import EnergyMeter
    from edgespec.apps.speech.commands.transcribe_options import SpeechOutput
    from edgespec.apps.speech.transcriber import Transcriber
    from edgespec.apps.speech.transcript import Transcript


def hear_live(transcriber: Transcriber, output: SpeechOutput, meter: EnergyMeter | None) -> Transcript:
    """Hear standard input to its end or Ctrl-C, and return its text."""
    hearing = LiveHearing(transcriber, stream_audio(sys.stdin.buffer, on_message=message))
    writer = SegmentWriter(output, n_files=1)
    window = meter.begin() if meter else None
    try:
        with Live(console=err, transient=True, auto_refresh=False) as live:
            while True:
                try:
                    for event in hearing.events():
                        if isinstance(event, Hypothesis):
                            if err.is_terminal:
                                live.update(Text(printable(event.text), style="dim"), refresh=True)
                        else:
                            writer.write(event)
                    break
                except KeyboardInterrupt:  # the end of what a microphone hears; a second one ends the work
                    if hearing.stopped:
                        raise
                    hearing.stop()
    except KeyboardInterrupt:
        pass  # what was heard so far is kept
    finally:
        if window:
            hearing.transcript.energy = window.end()
    return hearing.transcript
