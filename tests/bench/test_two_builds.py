"""Two installations, measured in turns."""

from __future__ import annotations

import argparse
from collections import Counter

import pytest

import two_builds
from two_builds import PREFILL, VARIANTS, Task, measure


class FakeWorker:
    """An installation that takes no time; it remembers what it was asked."""

    asked: list[tuple[str, Task]]

    def __init__(self, name: str, asked: list[tuple[str, Task]]) -> None:
        self.name, self.asked = name, asked

    def time(self, task: Task) -> float:
        self.asked.append((self.name, task))
        return 1.0 if self.name == "a" else 2.0


def args(**given: object) -> argparse.Namespace:
    return argparse.Namespace(**{"context": 128, "sizes": [1, 8], "rounds": 3, "prefill_rounds": 2, **given})


@pytest.mark.parametrize("rounds", [3, 0])
def test_each_pass_is_timed_with_all_four_one_after_the_other(rounds: int) -> None:
    asked: list[tuple[str, Task]] = []
    workers = {name: FakeWorker(name, asked) for name in "ab"}
    cells = measure(workers, args(rounds=rounds))
    expected = [(0, PREFILL, 2), *([(128, 1, 3), (128, 8, 3)] if rounds else [])]
    assert [(cell["context"], cell["n"], len(cell["b stock"])) for cell in cells] == expected
    assert all(set(cell["a edgespec"]) == {1.0} and set(cell["b edgespec"]) == {2.0} for cell in cells)
    timed = [(name, task) for name, task in asked if task.n]
    for first in range(0, len(timed), 4):
        together = timed[first : first + 4]
        assert len({(task.context, task.n, task.turn) for _, task in together}) == 1
        assert Counter((name, task.variant) for name, task in together) == Counter(
            (name, variant) for name in "ab" for variant in VARIANTS
        )
    assert (
        len({timed[first][0] + timed[first][1].variant for first in range(0, len(timed), 4)}) > 1
    )  # it shifts


@pytest.mark.parametrize("given", [["python"], ["a", "b", "c"], ["a", "b", "--rounds", "-1"]])
def test_options_that_are_refused(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["two_builds.py", *given])
    with pytest.raises(SystemExit) as ended:
        two_builds.main()
    assert ended.value.code == 2
    assert "two Pythons, and no negative number of rounds" in capsys.readouterr().err
