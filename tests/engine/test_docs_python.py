"""The Python examples of README.md and docs/, run as they stand there on tiny models."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp import Llama

from edgespec.decoding.options import Options
from tiny_bert import TinyBert
from tiny_gguf import write_tiny_gguf
from user_models import write_user_models

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": 1, "docs/server.md": 1, "docs/python.md": 5, "docs/structured.md": 1}
"""Pages, and how many examples each has at least."""
TARGET, DRAFT = "7b.gguf", "tiny.gguf"
"""Files that the examples name."""


@pytest.fixture
def examples_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the files that examples name, which are the default pair too."""
    target = write_tiny_gguf(tmp_path / TARGET, seed=1, n_ctx=8192)
    draft = write_tiny_gguf(tmp_path / DRAFT, seed=2, n_ctx=8192, n_layer=1)
    TinyBert().write(tmp_path / "nomic-embed.gguf", pooling="mean")
    config = tmp_path / "config"
    write_user_models(
        config, {"big": target, "small": draft}, '[pairs]\ndefault = { target = "big", draft = "small" }\n'
    )
    monkeypatch.setenv("XDG_CONFIG_HOME", str(config))
    # A tiny model may never end its answer.
    monkeypatch.setitem(Options.__init__.__kwdefaults__, "n_predict", 64)
    monkeypatch.chdir(tmp_path)


def python_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.usefixtures("examples_home")
@pytest.mark.parametrize("page", PAGES)
def test_python_examples_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    ran = 0
    for block in python_blocks(page):
        if re.search(r"(Engine|Llama|Embedder)\(", block):  # not what the README's answer says
            exec(compile(block, page, "exec", dont_inherit=True), {"__name__": "__main__"})
            ran += 1
    assert ran >= PAGES[page]
    assert capsys.readouterr().out.strip()


@pytest.mark.usefixtures("examples_home")
def test_the_first_command_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^ {4}python -c '(.*)'$", page, re.M)
    exec(compile(code, "python.md", "exec", dont_inherit=True), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.usefixtures("examples_home")
@pytest.mark.parametrize("options", [{"temp": 0.0}, {"temp": 1.5, "top_k": 0, "repeat_penalty": 1.1}])
def test_the_draft_model_of_llama_changes_no_text(options: dict[str, float]) -> None:
    (block,) = [block for block in python_blocks("docs/python.md") if "class SuffixDraft" in block]
    names: dict[str, Any] = {}
    exec(compile(block.partition("\nllm = ")[0], "python.md", "exec", dont_inherit=True), names)
    offered: list[int] = []

    class Watched(names["SuffixDraft"]):  # type: ignore[misc] # of the page
        def __call__(self, input_ids: np.ndarray, /, **others: Any) -> np.ndarray:
            found: np.ndarray = super().__call__(input_ids, **others)
            offered.append(len(found))
            return found

    texts = []
    for draft in (None, Watched()):
        llm = Llama(TARGET, n_ctx=512, logits_all=True, verbose=False, draft_model=draft)
        for prompt in (
            b"the cat and the other cat and the other ",
            b"another one",
            b"the cat and the other ",
        ):
            llm.set_seed(3)
            tokens = llm.tokenize(prompt * 3, add_bos=False)
            texts.append(
                [token for token, _ in zip(llm.generate(tokens, **options), range(80), strict=False)]
            )
        llm.close()
    assert texts[:3] == texts[3:]
    assert sum(offered) > 0
    if not options["temp"]:
        assert len(offered) < 3 * 80, "some were accepted"
