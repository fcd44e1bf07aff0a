"""Texts that README.md and docs/ show: written with the instruction sets that the page names, and no others.

Norms and attention round differently with vectors of another width, so a text may differ there; then it
has the form of the text that is shown.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from command_line import run_cli, user_environment
from examples import HIDDEN, examples, run_example

ROOT = Path(__file__).parents[2]
STRUCTURED = (ROOT / "docs" / "structured.md").read_text(encoding="utf-8")

pytestmark = pytest.mark.pair


def answer(home: Path, *arguments: str) -> dict[str, Any]:
    """What a new user's `edgespec run ARGUMENTS` writes with the default pair, and with which kernels."""
    env = user_environment(home, kernels=True) | {"EDGESPEC_MODELS_DIR": os.environ["EDGESPEC_MODELS_DIR"]}
    process = run_cli("run", "--json", *arguments, env=env, cwd=home)
    assert process.returncode == 0, process.stderr
    found: dict[str, Any] = json.loads(process.stdout)
    return found


def instruction_sets(text: str) -> list[str]:
    """Return the instruction sets named in a text that says for which of them something holds."""
    found = re.findall(r"`((?:avx|neon)[\w-]*)`", text)
    assert found
    return found


@pytest.mark.parametrize(("page", "example"), [*examples()], ids=lambda one: getattr(one, "name", "run"))
def test_the_runs_that_pages_show(page, example, pair, tmp_path):
    """`python tests/support/examples.py` writes them anew."""
    found = json.loads(run_example(example["command"], tmp_path, "--json").stdout)
    assert found["seed"] == 1
    assert example["release"] == version("edgespec")
    if found["kernels"] == example["kernels"]:
        assert example["text"] == HIDDEN or example["text"].split() == found["text"].split()
        (n,) = re.findall(r"^text +(\d+) tokens", example["figures"], re.MULTILINE)
        assert int(n) == found["tokens"]
    else:
        assert "quicksort" in found["text"]


def test_the_text_of_a_schema(pair, tmp_path):
    (schema, options, holds_for, text) = re.findall(
        r"^With this `city.json`\n\n(.*?)\n\nthe first command writes, with `(.*?)`(.*?),\n\n {4}(.*?)$",
        STRUCTURED, re.MULTILINE | re.DOTALL,
    )[0]  # fmt: skip
    (tmp_path / "city.json").write_text(schema)
    (command,) = re.findall(r"^ {4}edgespec run (.* --json-schema city\.json)$", STRUCTURED, re.MULTILINE)
    found = answer(tmp_path, *shlex.split(command), *shlex.split(options))
    jsonschema.validate(json.loads(found["text"]), json.loads(schema))
    if found["kernels"] in instruction_sets(holds_for):
        assert found["text"] == text
