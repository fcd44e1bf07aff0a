"""The house rules: each refuses what breaks it, in a made-up tree, and says what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lint_house

NOTICE = "Copy" + "right"
LICENCE = "SPDX-" + "License-Identifier: MIT"


def findings(root: Path, files: dict[str, str]) -> list[str]:
    """Return what is found in a tree of these files, by their paths."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return [str(finding) for finding in lint_house.check(root, list(files))]


def test_a_tidy_tree(tmp_path: Path) -> None:
    assert not findings(
        tmp_path,
        {
            "edgespec/errors.py": '"""Errors."""\n',
            "edgespec/llama/kv_cache.py": '"""The KV cache."""\n\n\nclass Cache:\n    """A cache."""\n',
            "bench/speed.py": f'"""Speed, and a topic: {NOTICE.lower()}."""\nclass Cache: ...\n',
        },
    )


def test_a_module_outside_the_packages(tmp_path: Path) -> None:
    said = findings(tmp_path, {"edgespec/sampling.py": "", "edgespec/errors.py": "", "pi/wheels.py": ""})
    assert said == ["edgespec/sampling.py:1: loose module: move it into one of edgespec's packages"]


def test_a_class_name_twice(tmp_path: Path) -> None:
    said = findings(
        tmp_path,
        {
            "edgespec/models/pull.py": "class Progress: ...\n",
            "edgespec/apps/forge/loop.py": "x = 1\nclass Progress: ...\n",
            "bench/loop.py": "class Progress: ...\n",
        },
    )
    assert said == [
        "edgespec/models/pull.py:1: class name twice: Progress is also in edgespec/apps/forge/loop.py: "
        "give one of them a name that says which it is"
    ]


@pytest.mark.parametrize(("n_lines", "is_refused"), [(59, False), (60, True)])
def test_a_long_function(tmp_path: Path, n_lines: int, is_refused: bool) -> None:
    text = "@decorated\ndef long():\n" + "    x = 1\n" * (n_lines - 1)
    advice = "long has 60 lines, 59 at the most: take a part out"
    said = findings(tmp_path, {"pi/wheels.py": text, "tests/test_it.py": text})
    assert said == [f"pi/wheels.py:2: long function: {advice}"] * is_refused


@pytest.mark.parametrize("path", ["install.py", "csrc/rows.c", "edgespec/apps/server/page/page.js"])
@pytest.mark.parametrize(("n_lines", "is_refused"), [(800, False), (801, True)])
def test_a_long_module(tmp_path: Path, path: str, n_lines: int, is_refused: bool) -> None:
    text = "x=1\n" * n_lines
    said = findings(tmp_path, {path: text, "tests/test_it.py": text, "csrc/tests/test_rows.c": text})
    assert said == [f"{path}:801: long module: 801 lines, 800 at the most: make two of it"] * is_refused


@pytest.mark.parametrize("word", lint_house.BAD_FIRST_WORDS)
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('"""{} the cache."""\n', 1),
        ('class A:\n    """{} the cache."""\n', 2),
        ('def f():\n    """{}, the cache."""\n', 2),
        ('class A:\n    x: int = 0\n    """\n    {} the cache.\n    """\n', 3),
        ('X = 1\n"""{}: the cache."""\n', 2),
        ('def f():\n    async def g():\n        """`{}` the cache."""\n', 3),
    ],
)
def test_a_docstring_that_begins_late(tmp_path: Path, word: str, text: str, line: int) -> None:
    said = findings(tmp_path, {"edgespec/llama/kv_cache.py": text.format(word)})
    advice = f"begins with '{word}': begin with the noun or the verb"
    assert said == [f"edgespec/llama/kv_cache.py:{line}: docstring: {advice}"]


@pytest.mark.parametrize("start", ["The", "Offset of", "Assume", "Bytes of", "Whatever", "of"])
def test_other_first_words_are_fine(tmp_path: Path, start: str) -> None:
    assert not findings(tmp_path, {"edgespec/llama/kv_cache.py": f'"""{start} the cache."""\n'})


@pytest.mark.parametrize(
    "line",
    [
        f"// {NOTICE} (c) 2018+, Somebody",
        f"# {NOTICE.upper()} 2023 Somebody",
        "© " + "2004, Somebody",
        f"/* {LICENCE} */",
        "Permission is hereby " + "granted, free of charge, to any person",
        "Redistribution and use in " + "source and binary forms",
        "# Licensed under " + "the Apache License, Version 2.0",
    ],
)
def test_a_foreign_copyright(tmp_path: Path, line: str) -> None:
    said = findings(tmp_path, {"edgespec/apps/server/page/vendor/marked.js": f"x\n{line}\n", "LICENSE": line})
    advice = "nothing here is a copy of others' work: depend on it, or write it anew"
    assert said == [f"edgespec/apps/server/page/vendor/marked.js:2: foreign copyright: {advice}"]


def test_our_own_copyright_and_data_are_fine(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"\xff\xfe" + NOTICE.encode() + b" 2024 Somebody")
    assert not findings(tmp_path, {"pi/wheels.py": f"# {NOTICE} 2026 The edgespec authors\n"})
    assert not lint_house.check(tmp_path, ["weights.bin"])


def test_a_repository_is_checked_with_its_new_files(tmp_path: Path) -> None:
    (tmp_path / "lint_house.py").write_text(Path(lint_house.__file__).read_text(encoding="utf-8"))
    (tmp_path / "edgespec").mkdir()
    (tmp_path / "edgespec" / "loose.py").touch()
    (tmp_path / "edgespec" / "ignored.py").touch()
    (tmp_path / ".gitignore").write_text("ignored.py\n")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    command = [sys.executable, tmp_path / "lint_house.py"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert refused.stdout.splitlines() == [
        "edgespec/loose.py:1: loose module: move it into one of edgespec's packages",
        "house: 1 loose module",
    ]
    (tmp_path / "edgespec" / "loose.py").unlink()
    passed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (passed.returncode, passed.stdout) == (0, "house: all rules hold\n")
