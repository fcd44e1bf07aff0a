"""docs/minimal.py, exact speculative decoding in one file: its text is the engine's, its rule is exact."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec import Engine, SamplingParams
from toy_models import chi_square_p_value

pytestmark = pytest.mark.proof

FILE = Path(__file__).parents[2] / "docs" / "minimal.py"
PROMPT = "hello there"


@pytest.fixture(scope="module")
def minimal() -> Any:
    spec = importlib.util.spec_from_file_location("minimal", FILE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_can_be_read_at_once():
    assert len(FILE.read_text().splitlines()) <= 150


def test_its_text_is_the_engines(tiny_path: Path, tiny_draft_path: Path):
    command = [sys.executable, str(FILE), str(tiny_path), str(tiny_draft_path), PROMPT, "-n", "40"]
    written = subprocess.run(command, capture_output=True, check=True, timeout=120).stdout
    with Engine(tiny_path, drafter="none", kernels="off") as engine:
        prompt = engine.target.tokenize(PROMPT, add_special=True, parse_special=True)
        found = engine.generate(prompt, params=SamplingParams(temperature=0.0), n_predict=40)
        assert written == b"".join(engine.target.piece(token) for token in found.token_ids)
    assert len(found.token_ids) >= 30


def test_its_rule_is_exact(minimal: Any):
    rng = np.random.default_rng(1)
    q, p = rng.dirichlet(np.ones(5), 2), rng.dirichlet(np.ones(5), 3)
    n, counts = 20_000, np.zeros((2, 5))
    for _ in range(n):
        drafted = [int(rng.choice(5, p=row)) for row in q]
        for place, token in enumerate(minimal.verify(drafted, q, p, rng)[:2]):
            counts[place, token] += 1
    for place in range(2):  # the second token is there if the first was accepted, whichever that is
        assert chi_square_p_value(counts[place], counts[place].sum() * p[place]) > 1e-4
    # A drafter that tells wrong probabilities is found.
    drawn = [minimal.verify([int(rng.choice(5, p=q[0]))], q[::-1], p, rng)[0] for _ in range(n)]
    assert chi_square_p_value(np.bincount(drawn, minlength=5), n * p[0]) < 1e-9
