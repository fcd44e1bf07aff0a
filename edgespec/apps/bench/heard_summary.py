"""Computes the figures of recordings from raw runs: speed against real time, word errors, shares, joules."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.apps.bench.runs import Run
from edgespec.platform.metering import Measurement


@dataclass(frozen=True, slots=True)
class HeardSummary:
    """The figures of one variant over recordings. None: unavailable."""

    seconds: float
    """Time for all recordings: the sum of each one's median."""
    audio_s: float
    """Length of all recordings."""
    n_words: int
    """Words of the texts that are known, once each."""
    word_error_rate: float | None
    """Wrong, missing and additional words over those of the known texts."""
    encoder_share: float | None
    """Share of the time that encoders take."""
    decoder_share: float | None
    """Share of the time in which tokens are decoded."""
    joules_per_minute: float | None
    """Gross: all joules over the minutes of sound."""

    @property
    def times_real_time(self) -> float:
        """Seconds of sound for each second of work."""
        return self.audio_s / self.seconds


def summarise_heard(runs: Sequence[Run], energies: Sequence[Measurement]) -> HeardSummary | None:
    """Return the figures of one variant's runs over recordings; None if the runs are of texts.

    `energies`: of every run; empty if one has none.
    """
    pairs = [(run, run.heard) for run in runs if run.heard]
    if not pairs:
        return None
    times: dict[str, list[float]] = {}
    for run, _ in pairs:
        times.setdefault(run.prompt, []).append(run.total_s)
    once = {run.prompt: heard for run, heard in pairs}.values()
    total_s = sum(run.total_s for run, _ in pairs)
    n_words = sum(heard.n_words or 0 for _, heard in pairs)
    joules = [energy.joules for energy in energies if energy.joules is not None]

    def share(seconds: Sequence[float | None]) -> float | None:
        known = [one for one in seconds if one is not None]
        return sum(known) / total_s if len(known) == len(pairs) else None

    return HeardSummary(
        seconds=sum(map(statistics.median, times.values())),
        audio_s=sum(heard.audio_s for heard in once),
        n_words=sum(heard.n_words or 0 for heard in once),
        word_error_rate=sum(heard.n_errors or 0 for _, heard in pairs) / n_words if n_words else None,
        encoder_share=share([heard.encode_s for _, heard in pairs]),
        decoder_share=share([heard.decode_s for _, heard in pairs]),
        joules_per_minute=60 * sum(joules) / sum(heard.audio_s for _, heard in pairs) if joules else None,
    )
