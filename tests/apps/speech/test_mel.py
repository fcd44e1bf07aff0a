"""The log-mel spectrogram against its definition, computed slowly in double precision."""

from __future__ import annotations

import numpy as np
import pytest

from edgespec.apps.speech.mel import N_SAMPLES, log_mel, window_of


def slow_log_mel(samples: np.ndarray, n_mels: int, padding: int) -> np.ndarray:
    sound = np.pad(np.concatenate([samples, np.zeros(padding)]).astype(float), 200, mode="reflect")
    window = np.hanning(401)[:-1]
    angles = np.exp(-2j * np.pi * np.outer(np.arange(400), np.arange(201)) / 400)
    n = (len(samples) + padding) // 160
    power = np.abs(np.stack([sound[i * 160 : i * 160 + 400] * window for i in range(n)]) @ angles) ** 2

    def to_mel(hz: float) -> float:
        return hz * 3 / 200 if hz < 1000 else 15 + np.log(hz / 1000) * 27 / np.log(6.4)

    bands = np.zeros((n_mels, 201))
    step = to_mel(8000) / (n_mels + 1)
    frequencies = np.arange(201) * 40.0
    grid = np.arange(0, 8001, 0.25)  # corners are found on a fine grid of frequencies
    mels = np.array([to_mel(hz) for hz in grid])
    for i in range(n_mels):
        low, centre, high = (np.interp(step * (i + j), mels, grid) for j in range(3))
        rising, falling = (frequencies - low) / (centre - low), (high - frequencies) / (high - centre)
        bands[i] = np.clip(np.minimum(rising, falling), 0, None) * 2 / (high - low)
    logs = np.log10(np.maximum(bands @ power.T, 1e-10))
    return (np.maximum(logs, logs.max() - 8) + 4) / 4


@pytest.mark.parametrize("n_mels", [80, 128])
def test_definition(n_mels):
    rng = np.random.default_rng(n_mels)
    samples = (rng.normal(0, 0.1, 8_000) * np.linspace(0, 1, 8_000)).astype(np.float32)
    np.testing.assert_allclose(
        log_mel(samples, n_mels, padding=1600), slow_log_mel(samples, n_mels, 1600), atol=2e-4
    )


def test_padding_and_windows():
    samples = np.random.default_rng(1).normal(0, 0.1, 16_000).astype(np.float32)
    mel = log_mel(samples, 80)
    assert mel.shape == (80, (16_000 + N_SAMPLES) // 160) and mel.dtype == np.float32
    assert window_of(mel, 0).shape == (80, 3000)
    last = window_of(mel, 2000)
    assert last.shape == (80, 3000)
    np.testing.assert_array_equal(last[:, :1100], mel[:, 2000:])
    assert not last[:, 1100:].any()


def test_long_recordings_are_computed_in_blocks_that_leave_no_trace(monkeypatch):
    samples = np.random.default_rng(2).normal(0, 0.1, 48_000).astype(np.float32)
    whole = log_mel(samples, 80, padding=0)
    monkeypatch.setattr("edgespec.apps.speech.mel._BLOCK", 7)
    np.testing.assert_array_equal(log_mel(samples, 80, padding=0), whole)


@pytest.mark.parametrize("n", [0, 1, 159, 160, 200, 201])
def test_short_recordings(n):
    assert log_mel(np.ones(n, np.float32), 80, padding=0).shape == (80, n // 160)
    assert np.isfinite(log_mel(np.ones(n, np.float32), 80)).all()
