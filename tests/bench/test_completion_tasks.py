"""The tasks of scripts that complete code and score answers."""

from __future__ import annotations

import inspect
import json
import textwrap
from importlib import import_module

from infill import tasks
from lm_eval_task import ITEMS, TASK, Scores, compared


def test_a_gap_is_the_middle_of_a_function():
    for task in tasks(("textwrap", "heapq"), 2):
        module, _, function = task.name.partition(".")
        source = inspect.getsource(import_module(module))
        assert source.count(task.gap.before + task.gap.after) == 0, "something is missing"
        assert task.gap.before in source and task.gap.after in source
        assert f"def {function}" in task.gap.before


def test_each_question_has_four_answers_one_of_which_is_right():
    items = [json.loads(line) for line in ITEMS.read_text().splitlines()]
    assert len(items) == 60
    for item in items:
        assert len({*item["choices"]}) == 4 and 0 <= item["answer"] < 4
    assert {item["answer"] for item in items} == {0, 1, 2, 3}
    assert "{{question}}" in TASK.format(items="x")


def test_scores_are_compared_by_item():
    ours = Scores("ours", [[-1.0, -2.0], [-3.0, -1.0]])
    theirs = Scores("theirs", [[-1.5, -2.0], [-1.0, -2.0]])
    found = compared(ours, theirs, [0, 0])
    assert found["accuracy"] == {"ours": 0.5, "theirs": 1.0}
    assert (found["same answer"], found["largest difference"]) == (1, 2.0)
    assert textwrap.dedent(TASK) == TASK
