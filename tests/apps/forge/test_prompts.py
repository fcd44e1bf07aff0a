"""The built-in prompts: many, mixed, the same for a seed, and none of a benchmark's."""

from __future__ import annotations

import random
import re
import tomllib
from itertools import islice

import pytest

from edgespec.apps.bench.suites import DEFAULT, HUMAN_EVAL, load_suite
from edgespec.apps.forge import prompts as prompts_module
from edgespec.apps.forge.dataset import HELD_OUT_SHARE, is_held_out
from edgespec.apps.forge.prompts import TextPrompt, TokenPrompt, built_in, fill, functions_of, library
from edgespec.errors import UsageError

N = 20_000
N_WORDS = 8  # as many in a row are no coincidence


def runs(text: str) -> set[tuple[str, ...]]:
    """Return all runs of words, but those of numbers alone: 1, 2, 3 .. is nobody's."""
    words = re.findall(r"\w+", text.lower())
    found = {tuple(words[i : i + N_WORDS]) for i in range(len(words) - N_WORDS + 1)}
    return {run for run in found if not all(word.isdigit() for word in run)}


@pytest.fixture(scope="module")
def drawn() -> list[TextPrompt]:
    return list(islice(built_in(0), N))


def test_there_are_enough_and_none_comes_twice(drawn: list[TextPrompt]) -> None:
    assert len(drawn) == N
    assert len({prompt.key for prompt in drawn}) == N
    assert all(len(prompt.turns) == 1 and prompt.turns[0].strip() for prompt in drawn)


def test_the_same_for_a_seed_and_others_for_another(drawn: list[TextPrompt]) -> None:
    assert list(islice(built_in(0), 300)) == drawn[:300]
    others = {prompt.turns for prompt in islice(built_in(1), 300)}
    assert len(others & {prompt.turns for prompt in drawn[:300]}) < 30


def test_every_list_of_words_is_there_and_used() -> None:
    document = tomllib.loads(prompts_module._FILE.read_text(encoding="utf-8"))
    names = ("templates", "follow_ups", "then")
    templates = [text for kind in document["kinds"] for name in names for text in kind.get(name, [])]
    templates += document["python"]["described"] + document["python"]["code"]
    used, left = set(), list(templates)
    while left:
        for name in {slot[1] for slot in prompts_module._SLOT.finditer(left.pop()) if slot[1]} - used:
            used.add(name)
            left += document["words"][name]
    assert used == set(document["words"])
    for text in templates:
        assert not prompts_module._SLOT.search(fill(text, document["words"], random.Random(0)))


def test_labels_bind_words() -> None:
    words = {"name": ["Ada", "Bob"]}
    for seed in range(20):
        a, again, b = fill("{name.a} {name.a} {name.b}", words, random.Random(seed)).split()
        assert a == again != b


def test_held_out_prompts_are_about_the_share_of_all(drawn: list[TextPrompt]) -> None:
    n = sum(is_held_out(prompt.key) for prompt in drawn)
    assert abs(n / N - HELD_OUT_SHARE) < 0.01


def test_a_conversation_is_held_out_with_its_first_prompt(drawn: list[TextPrompt]) -> None:
    followed = [prompt for prompt in drawn if prompt.follow_up]
    assert len(followed) > N / 50
    for prompt in followed[:500]:
        (after,) = prompt.followed("an answer")
        assert after.key != prompt.key
        assert after.key == prompt.followed("another answer")[0].key
        assert is_held_out(after.key) == is_held_out(prompt.key)


def test_questions_that_the_target_wrote_are_asked(drawn: list[TextPrompt]) -> None:
    asking = [prompt for prompt in drawn if "<LINE>" in prompt.then]
    assert len(asking) > N / 20
    answer = "Here are two:\n\n1. Why is the sea salty?\n- **Who sailed it first, and when?**\n3. No\n"
    for prompt in asking[:500]:
        first, second = prompt.followed(answer + "1. Why is the sea salty?")
        assert "Why is the sea salty?" in first.turns[0] and "1." not in first.turns[0]
        assert "Who sailed it first, and when?" in second.turns[0] and "*" not in second.turns[0]
        assert len({prompt.key, first.key, second.key}) == 3
        assert [first.key, second.key] == [one.key for one in prompt.followed("a" * 20 + "\n" + "b" * 20)]
        assert is_held_out(first.key) == is_held_out(second.key) == is_held_out(prompt.key)
        assert not prompt.followed("No.")


def test_texts_that_the_target_wrote_are_worked_on(drawn: list[TextPrompt]) -> None:
    written = [prompt for prompt in drawn if "<ANSWER>" in prompt.then]
    assert len(written) > N / 20
    for prompt in written[:500]:
        (after,) = prompt.followed("A short text.\n\nOf two paragraphs.\n")
        assert len(after.turns) == 1 and "A short text.\n\nOf two paragraphs." in after.turns[0]
        assert "<ANSWER>" not in after.turns[0]
        assert after.key == prompt.followed("Another text, and longer.")[0].key != prompt.key
        assert not prompt.followed(" ")
        assert is_held_out(after.key) == is_held_out(prompt.key)


def test_a_text_is_held_out_with_its_beginning() -> None:
    for i in range(200):
        tokens = (i, i + 1, i + 2, 7, 8)
        whole, beginning = TokenPrompt("read", tokens, 3), TokenPrompt("prompt:file", tokens[:3], 3)
        assert whole.key != beginning.key
        assert is_held_out(whole.key) == is_held_out(beginning.key)


@pytest.mark.parametrize("suite", [DEFAULT, HUMAN_EVAL])
def test_no_prompt_is_a_benchmarks(drawn: list[TextPrompt], suite: str) -> None:
    try:
        prompts = load_suite(suite).prompts
    except UsageError as error:
        pytest.skip(str(error))
    judged = set().union(*(runs(prompt.text) for prompt in prompts))
    for prompt in drawn:
        shared = runs("\n".join((*prompt.turns, prompt.follow_up, prompt.then))) & judged
        assert not shared, (prompt.turns[0], shared)


def test_functions_of_the_library_are_whole() -> None:
    path = next(path for path in library() if path.name == "textwrap.py")
    functions = {function["NAME"]: function for function in functions_of(path)}
    dedent = functions["dedent"] if "dedent" in functions else functions["wrap"]
    assert dedent["CODE"].startswith(dedent["SIGNATURE"])
    assert dedent["SIGNATURE"].startswith("def ") and dedent["SIGNATURE"].endswith(":")
    assert dedent["DOC"] and "\n" not in dedent["DOC"]
    compile(dedent["CODE"], "dedent", "exec")
