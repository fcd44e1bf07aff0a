"""The Python examples of README.md and docs/, run as they stand there on tiny models."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edgespec.decoding.options import Options
from tiny_gguf import write_tiny_gguf
from user_models import write_user_models

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": 1, "docs/python.md": 5, "docs/structured.md": 1}
"""Pages, and how many examples each has at least."""
TARGET, DRAFT = "7b.gguf", "tiny.gguf"
"""Files that the examples name."""


@pytest.fixture
def examples_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the files that examples name, which are the default pair too."""
    target = write_tiny_gguf(tmp_path / TARGET, seed=1, n_ctx=8192)
    draft = write_tiny_gguf(tmp_path / DRAFT, seed=2, n_ctx=8192, n_layer=1)
    config = tmp_path / "config"
    write_user_models(
        config, {"big": target, "small": draft}, '[pairs]\ndefault = { target = "big", draft = "small" }\n'
    )
    monkeypatch.setenv("XDG_CONFIG_HOME", str(config))
    # A tiny model may never end its answer.
    monkeypatch.setitem(Options.__init__.__kwdefaults__, "n_predict", 64)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("examples_home")
@pytest.mark.parametrize("page", PAGES)
def test_python_examples_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)
    names: dict[str, object] = {"__name__": "__main__"}
    ran = 0
    for block in blocks:
        if "Engine(" in block:  # not what the README's answer says
            exec(compile(block, page, "exec", dont_inherit=True), names)
            ran += 1
    assert ran >= PAGES[page]
    assert capsys.readouterr().out.strip()
