"""The prompts of bench/: our own sets, and those chosen of other suites."""

import argparse

import pytest

import prompts as prompt_sets
from edgespec.apps.bench.suites import Prompt, load_suite
from edgespec.errors import UsageError


def own_prompts():
    return [prompt for file in prompt_sets.OWN for prompt in load_suite(str(file)).prompts]


def test_no_prompt_twice():
    prompts = own_prompts()
    texts = [prompt.text for prompt in prompts]
    texts += [text for pair in prompt_sets.pairs(prompt_sets.AGAIN).values() for text in pair]
    assert len(set(texts)) == len(texts)
    assert len({prompt.id for prompt in prompts}) == len(prompts)


@pytest.fixture
def choose(tmp_path):
    """Return the suites that options choose; FILE stands for one of two categories of six prompts."""
    file = tmp_path / "some.jsonl"
    rows = [f'{{"question_id": {i}, "category": "{"ab"[i % 2]}", "turns": ["t{i}", "x"]}}' for i in range(12)]
    file.write_text("\n".join(rows) + "\n")

    def choose(*options, own=()):
        parser = argparse.ArgumentParser()
        prompt_sets.add_options(parser, per_category=2)
        args = parser.parse_args([str(file) if option == "FILE" else option for option in options])
        return prompt_sets.chosen(args, own)

    return choose


def test_chosen_prompts_are_spread_over_their_category(choose):
    assert [prompt.text for prompt in prompt_sets.of_all(choose("--suite", "FILE"))] == [
        "t0",
        "t1",
        "t6",
        "t7",
    ]
    assert len(prompt_sets.of_all(choose("--suite", "FILE", "--per-category", "6"))) == 12


def test_ids_in_common(choose, tmp_path):
    """Summaries know a prompt by its id: two prompts of one id would be taken for one."""
    other = tmp_path / "other.jsonl"
    other.write_text('{"question_id": 0, "category": "c", "turns": ["another"]}\n')
    with pytest.raises(UsageError, match="ids in common"):
        prompt_sets.of_all(choose("--suite", "FILE", "--suite", str(other)))
    twice = prompt_sets.of_all(choose("--suite", "FILE", "--suite", "FILE"))
    assert len(twice) == 4  # the same prompts are asked once


class Letters:
    """A vocabulary of single bytes."""

    def tokenize(self, text, *, add_special, parse_special):
        return list(text.encode())

    def piece(self, token):
        return bytes([token])


def test_prompts_at_a_depth_begin_with_the_same_sources():
    prompts = [Prompt("1", "a", "Write a poem."), Prompt("2", "b", "Print a list.")]
    assert prompt_sets.at_depth(Letters(), prompts, 0) == prompts
    deep = prompt_sets.at_depth(Letters(), prompts, 5000)
    assert [one.id for one in deep] == ["1", "2"]
    assert all(one.text.endswith(f"\n\n{prompt.text}") for one, prompt in zip(deep, prompts, strict=True))
    assert all(5000 <= len(one.text.encode()) < 5200 for one in deep)
    n = prompt_sets.n_alike([one.text.encode() for one in deep])
    assert 5000 <= n < len(deep[0].text) - len("Write a poem.") + 1
    longer = prompt_sets.at_depth(Letters(), prompts, 9000)
    assert longer[0].text[:4900] == deep[0].text[:4900], "so that what was read is of use at the next depth"
