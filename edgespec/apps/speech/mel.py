"""The log-mel spectrogram that Whisper's encoder takes, as OpenAI's `log_mel_spectrogram` computes it.

    samples -> 30 s of silence appended -> windows of 25 ms every 10 ms -> power spectrum -> mel bands
            -> log10, at most 8 below the loudest, scaled to about [-1, 1]

The triangles of the mel bands are Slaney's, as in his Auditory Toolbox: linear below 1 kHz, logarithmic
above, each of area 1. No product goes through BLAS, so the numbers depend neither on its kernels nor on its
threads.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt

SAMPLE_RATE = 16_000
"""Samples a second."""
N_FFT = 400
"""Samples of a window: 25 ms."""
HOP = 160
"""Samples from one frame to the next: 10 ms."""
N_SAMPLES = 30 * SAMPLE_RATE
"""Samples of one window of the encoder."""
N_FRAMES = N_SAMPLES // HOP
"""Frames that the encoder takes at once."""

_N_BINS = N_FFT // 2 + 1
_BLOCK = 4096  # frames computed at once: 50 MB beside the result, however long the recording
_BREAK_HZ, _BREAK_MEL = 1000.0, 15.0  # where the scale becomes logarithmic
_HZ_PER_MEL = _BREAK_HZ / _BREAK_MEL
_LOG_STEP = math.log(6.4) / 27.0  # 27 mels lead from 1 kHz to 6.4 kHz

Floats = npt.NDArray[np.float32]


def log_mel(samples: Floats, n_mels: int, *, padding: int = N_SAMPLES) -> Floats:
    """Return the spectrogram of `samples`, shape (n_mels, frames), with frames = (n + padding) // 160.

    `samples`: mono, 16 kHz, in [-1, 1], shape (n,); `padding` samples of silence are appended, so that every
    window of 30 s that begins within the recording is complete.
    """
    length = len(samples) + padding
    n_frames = length // HOP
    mel = np.zeros((n_mels, n_frames), np.float32)
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(N_FFT) / N_FFT)  # periodic
    bands, window = mel_bands(n_mels), hann.astype(np.float32)
    # A frame that begins after the recording is silent, and so is the mirrored end of much silence.
    n_read = n_frames if padding < N_FFT else min(n_frames, -(-(len(samples) + N_FFT // 2) // HOP))
    for start in range(0, n_read, _BLOCK):
        n = min(_BLOCK, n_read - start)
        first = start * HOP - N_FFT // 2
        block = _mirrored(samples, length, first, first + (n - 1) * HOP + N_FFT)
        frames = np.lib.stride_tricks.sliding_window_view(block, N_FFT)[::HOP] * window
        spectrum = np.fft.rfft(frames, axis=1)
        power = (spectrum.real**2 + spectrum.imag**2).astype(np.float32).T.copy()  # (bins, frames)
        for row, (low, weights) in zip(mel, bands, strict=True):
            row[start : start + n] = np.einsum("k,kt->t", weights, power[low : low + len(weights)])
    np.log10(np.maximum(mel, 1e-10, out=mel), out=mel)
    if n_frames:
        np.maximum(mel, mel.max() - 8.0, out=mel)
    mel += 4.0
    mel /= 4.0
    return mel


def window_of(mel: Floats, start: int) -> Floats:
    """Return the 30 s of a spectrogram from frame `start`, shape (n_mels, 3000), with zeros after its end."""
    part = mel[:, start : start + N_FRAMES]
    return np.pad(part, ((0, 0), (0, N_FRAMES - part.shape[1]))) if part.shape[1] < N_FRAMES else part


def _mirrored(samples: Floats, length: int, start: int, end: int) -> Floats:
    """Return the sound from `start` to `end`: `samples`, silence up to `length`, and both ends mirrored.

    The first frame is centred on the first sample, so half of it lies before.
    """
    if start >= 0 and end <= len(samples):
        return samples[start:end]
    places = np.abs(np.arange(start, end))
    places = np.where(places >= length, 2 * (length - 1) - places, places)
    found = np.zeros(end - start, np.float32)
    inside = (places >= 0) & (places < len(samples))
    found[inside] = samples[places[inside]]
    return found


def _to_hz(mels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    logarithmic = _BREAK_HZ * np.exp(_LOG_STEP * (mels - _BREAK_MEL))
    return np.where(mels < _BREAK_MEL, mels * _HZ_PER_MEL, logarithmic)


@functools.lru_cache(maxsize=4)
def mel_bands(n_mels: int) -> tuple[tuple[int, Floats], ...]:
    """Return for each of the bands its first bin of the spectrum and the weights of the bins from there.

    Bands reach from 0 to 8 kHz; a spectrum has 201 bins.
    """
    top = _BREAK_MEL + math.log(SAMPLE_RATE / 2 / _BREAK_HZ) / _LOG_STEP
    corners = _to_hz(np.linspace(0.0, top, n_mels + 2))
    bins = np.linspace(0.0, SAMPLE_RATE / 2, _N_BINS)
    bands = []
    for low, centre, high in zip(corners, corners[1:], corners[2:], strict=False):
        triangle = np.minimum((bins - low) / (centre - low), (high - bins) / (high - centre))
        weights = np.maximum(triangle, 0.0) * (2.0 / (high - low))
        inside = np.flatnonzero(weights)
        first, end = (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, 0)
        bands.append((first, weights[first:end].astype(np.float32)))
    return tuple(bands)
