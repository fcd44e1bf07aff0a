"""Greedy texts after images, token for token those of llama-server on the same files.

    LLAMA_SERVER=/path/to/llama-server pytest -n 0 -s tests/apps/images/test_against_llama_server.py

The program is llama.cpp's of the pinned version; where none is named, nothing is tested. Neither has flash
attention, in the encoder too: it rounds keys and values.
"""

from __future__ import annotations

import base64
import io
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from edgespec import Engine
from edgespec.apps.images.encoder import load
from edgespec.decoding.sampling import SamplingParams
from edgespec.llama.control_names import MEDIA_MARKER
from towers import TOWERS, write_tower

PROGRAM = os.environ.get("LLAMA_SERVER", "")
GREEDY = SamplingParams(temperature=0.0)
NEAR = 1e-3
"""Difference of two logarithms of probabilities that counts as a tie."""

pytestmark = pytest.mark.skipif(not PROGRAM, reason="LLAMA_SERVER names no llama-server")


@contextmanager
def serving(target: Path, mmproj: Path) -> Iterator[httpx.Client]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = f"--port {port} -t 2 -c 1024 -np 1 -fa off --no-warmup --offline --cache-ram 0".split()
    command = [PROGRAM, "-m", str(target), "--mmproj", str(mmproj), *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                for _ in range(200):
                    try:
                        if client.get("/health").status_code == 200:
                            break
                    except httpx.TransportError:
                        assert process.poll() is None, "llama-server ended"
                    time.sleep(0.1)
                yield client
        finally:
            process.kill()


def picture(width: int, height: int) -> bytes:
    """A smooth random picture, as PNG: both programs decode the same pixels."""
    pixels = np.random.default_rng(width).integers(0, 255, (4, 5, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = load().mtmd_context_params_default

    def without_flash_attention() -> object:
        params = defaults()
        params.flash_attn_type = 0
        return params

    monkeypatch.setattr(load(), "mtmd_context_params_default", without_flash_attention)


@pytest.mark.parametrize("kind", TOWERS)
@pytest.mark.usefixtures("exact")
def test_greedy_texts_are_those_of_llama_server(kind: str, tmp_path: Path) -> None:
    target, mmproj = write_tower(kind, tmp_path)
    pictures = [picture(100, 70), picture(64, 64), picture(40, 150)]
    prompts = [("What is {}?", 1), ("{} and {}: the same?", 2), ("One {} two {} three {} four", 3)]
    same = n = 0
    with (
        serving(target, mmproj) as client,
        Engine(target, drafter="none", kernels="off", profile=False, n_ctx=1024) as engine,
    ):
        marker = client.get("/props").json()["media_marker"]
        for text, k in prompts:
            images = [base64.b64encode(data).decode() for data in pictures[:k]]
            body = {"prompt": {"prompt_string": text.format(*[marker] * k), "multimodal_data": images}}
            body |= {
                "n_predict": 32,
                "temperature": 0,
                "n_probs": 2,
                "return_tokens": True,
                "cache_prompt": False,
            }
            theirs = client.post("/completion", json=body).raise_for_status().json()
            prompt = engine.tokenize(text.format(*[MEDIA_MARKER] * k), pictures[:k])
            assert len(prompt) == theirs["tokens_evaluated"]
            ours = engine.generate(prompt, n_predict=32, params=GREEDY).token_ids
            n += len(ours)
            at = next(
                (i for i, pair in enumerate(zip(ours, theirs["tokens"], strict=False)) if len({*pair}) > 1),
                None,
            )
            same += len(ours) if at is None else at
            if at is not None:  # the list of probabilities lacks tokens that end no character
                tops = [one["top_logprobs"] for one in theirs["completion_probabilities"]]
                both = {ours[at], theirs["tokens"][at]}
                gaps = [
                    one["logprob"] - other["logprob"]
                    for one, other in tops
                    if {one["id"], other["id"]} == both
                ]
                print(f"{kind}, {text!r}: token {at} differs, a tie but for {gaps}")
                assert gaps and min(gaps) < NEAR
    print(f"{kind}: {same} of {n} tokens the same")
    assert same
