"""`edgespec draft make --when-idle` in a terminal: it waits, says why, and Ctrl-C ends it."""

from __future__ import annotations

from command_line import COMMAND
from terminals import Terminal
from tiny_gguf import write_tiny_gguf


def test_it_waits_and_ctrl_c_ends_it(tmp_path, tiny_path, environment):
    """It has just begun to watch the machine, so it has to wait, busy or not."""
    source = write_tiny_gguf(tmp_path / "small.gguf", seed=5, n_layer=1, n_embd=64, n_ff=64)
    words = (
        *("draft", "make", "--target", tiny_path, "--source", source, "--families", "whole", "--hours", 0),
        *("--keep", 272, "--data-tokens", 500, "--when-idle"),
    )
    with Terminal([*COMMAND, *map(str, words)], environment, timeout_s=120) as terminal:
        terminal.expect("waiting until the machine is idle and on mains: ")
        terminal.type("\x03")
        assert terminal.wait() == 130
        assert "Traceback" not in terminal.rest()
    (folder,) = (tmp_path / "cache/edgespec/forge").iterdir()
    assert (folder / "make.json").exists(), "the same command goes on"
