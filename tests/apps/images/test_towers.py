"""Rows of pictures of any size and shape, from the encoders of every kind."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edgespec import Engine
from edgespec.errors import UsageError
from edgespec.llama.control_names import MEDIA_MARKER
from towers import TOWERS, write_tower

SIZES = ((1, 1), (1, 200), (200, 1), (320, 240), (30, 700))


def picture(size: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    Image.effect_noise(size, 60).convert("RGB").save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("kind", TOWERS)
def test_rows_are_numbers_and_the_same_beside_either_kernels(kind: str, tmp_path: Path) -> None:
    target, _ = write_tower(kind, tmp_path)
    pictures = [picture(size) for size in SIZES]
    made: list[list[np.ndarray]] = []
    for kernels in ("off", "auto"):
        with Engine(target, kernels=kernels, profile=False, n_ctx=1024) as engine:
            made.append([])
            for data in pictures:
                try:
                    prompt = engine.tokenize(MEDIA_MARKER, [data])
                except UsageError as error:
                    assert (kind, error.field) == ("idefics3", "images")  # its slices would be too many
                    continue
                made[-1] += [span.start().result() for span in prompt.spans]
    assert len(made[0]) >= len(SIZES) - 3
    for stock, ours in zip(*made, strict=True):
        assert np.isfinite(stock).all()
        assert 0.1 < stock.std() < 10
        assert np.abs(stock - ours).max() < 1e-3
