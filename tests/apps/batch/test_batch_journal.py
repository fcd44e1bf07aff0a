"""Results on disk: order, going on after the end of the process at any moment, full disks, two at once."""

from __future__ import annotations

import multiprocessing
import random
import resource
import signal
from pathlib import Path

import pytest

from batch_parts import EchoWriter, custom_ids, results, write_lines
from edgespec.apps.batch.commands.batch import run_batch
from edgespec.apps.batch.lines import BatchAnswer, Journal, open_input
from edgespec.errors import EdgespecError, UsageError

ORDERS = pytest.mark.parametrize("in_order", [True, False], ids=["in-order", "as-they-come"])
N = 30


@pytest.fixture
def source(tmp_path):
    """Requests that end in another order than they begin."""
    rounds = random.Random(1)
    lines = [{"custom_id": f"c{i}", "prompt": f"p{i}", "rounds": rounds.randint(1, 9)} for i in range(N)]
    return write_lines(tmp_path / "in.jsonl", lines)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.jsonl"


def opened(source, out, **options):
    found = open_input(source, None)
    belongs_to = {"input_sha256": found.sha256, **options.pop("belongs_to", {})}
    options = {"in_order": True, **options}
    return found, Journal(out, belongs_to, found.n_requests, **options)


def answered(source, out, n=N, **options):
    """Answer the next `n` requests in a run of their own; finish if that was all. Returns the messages."""
    said = []
    found, journal = opened(source, out, on_message=said.append, **options)
    with journal:
        todo = [request for request in found.requests() if not journal.has(request)]
        run_batch(iter(todo[:n]), EchoWriter(), journal)
        if journal.complete:
            journal.finish()
    return said


def expected(in_order=True):
    return [f"c{i}" for i in range(N)] if in_order else {f"c{i}" for i in range(N)}


def check(out, in_order):
    """Check that each request has its own answer, once, and that nothing else is left."""
    found = custom_ids(out)
    assert len(found) == N
    assert (found if in_order else {*found}) == expected(in_order)
    for line in results(out):
        assert line["response"]["body"]["prompt"] == f"p{line['custom_id'][1:]}"
    assert sorted(path.name for path in out.parent.iterdir()) == ["in.jsonl", "out.jsonl"]


@ORDERS
def test_the_order_of_the_results(source, out, in_order):
    answered(source, out, in_order=in_order)
    check(out, in_order)
    assert (custom_ids(out) == expected()) is in_order


@ORDERS
def test_a_run_goes_on_where_the_last_one_ended(source, out, in_order):
    assert answered(source, out, 10, in_order=in_order) == []
    assert not out.exists()
    assert answered(source, out, 7, in_order=in_order) == []
    answered(source, out, in_order=in_order)
    check(out, in_order)


@ORDERS
@pytest.mark.parametrize("damage", ["torn", "zeros", "no newline"])
def test_a_torn_end_is_dropped_and_answered_again(source, out, in_order, damage):
    answered(source, out, 10, in_order=in_order)
    file = Path(f"{out}.partial")
    data = file.read_bytes()
    cut = {"torn": data[:-40], "zeros": data + b"\0" * 300, "no newline": data[:-1]}[damage]
    file.write_bytes(cut)
    (line,) = answered(source, out, in_order=in_order)
    assert line.startswith("dropped ")
    check(out, in_order)


@ORDERS
def test_a_process_that_is_killed_at_any_moment_loses_and_repeats_nothing(source, out, in_order):
    """A real process and a real SIGKILL, at random moments: while it begins, writes, or finishes."""
    moments = random.Random(7)
    fork = multiprocessing.get_context("fork")
    n_killed, n_done = 0, 0
    while n_killed < 500:
        child = fork.Process(target=_run_slowly, args=(source, out, in_order))
        child.start()
        child.join(moments.uniform(0, 0.04 + 0.002 * n_killed))
        child.kill()
        child.join()
        assert child.exitcode in (0, -signal.SIGKILL)
        if out.exists() and not Path(f"{out}.partial").exists():  # the last step
            break
        n_killed += 1
        with opened(source, out, in_order=in_order)[1] as journal:
            assert journal.n_done >= n_done
            n_done = journal.n_done
    assert n_killed > 3
    check(out, in_order)


def _run_slowly(source, out, in_order):
    found, journal = opened(source, out, in_order=in_order)
    with journal:
        run_batch(found.requests(), EchoWriter(round_s=0.004), journal)
        journal.finish()


@ORDERS
def test_killed_between_the_last_steps(source, out, in_order):
    """OUT is there, and OUT.partial still is: the next run only tidies up."""
    answered(source, out, in_order=in_order)
    whole = out.read_bytes()
    out.unlink()
    found, journal = opened(source, out, in_order=in_order)
    with journal:
        run_batch(found.requests(), EchoWriter(), journal)
        kept = journal.partial.read_bytes()
        journal.finish()
    Path(f"{out}.partial").write_bytes(kept)
    _, journal = opened(source, out, in_order=in_order)
    with journal:
        assert journal.complete
        journal.finish()
    assert custom_ids(out) == [line["custom_id"] for line in results(out)]
    assert sorted(whole.splitlines()) == sorted(out.read_bytes().splitlines())


@ORDERS
def test_a_full_disk_loses_nothing(source, out, in_order):
    """A limit on the file's size stands for the disk: a write fails in the middle of a line."""
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, kept[1]))
    try:
        with pytest.raises(
            EdgespecError, match=r"out\.jsonl: File too large; \d+ of 30 requests are done"
        ) as error:
            answered(source, out, in_order=in_order)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
    assert error.value.exit_code == 1
    assert "run the same command again to resume" in str(error.value)
    assert answered(source, out, in_order=in_order) == []  # nothing torn was left
    check(out, in_order)


def test_a_disk_that_is_full_when_the_output_is_made(source, out):
    found, journal = opened(source, out)
    with journal:
        run_batch(found.requests(), EchoWriter(), journal)
        kept = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, kept[1]))
        try:
            with pytest.raises(EdgespecError, match="30 of 30 requests are done and kept"):
                journal.finish()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, kept)
    assert sorted(path.name for path in out.parent.iterdir()) == ["in.jsonl", "out.jsonl.partial"]
    answered(source, out)
    check(out, True)


def test_a_batch_goes_on_only_with_what_it_was_begun_with(source, out):
    same = {"temperature": 0.5, "target_sha256": "a" * 64, "chat_template": "{{ one }}"}
    answered(source, out, 3, belongs_to=same)
    del same["chat_template"]
    with pytest.raises(UsageError, match="another chat template: continue"):
        opened(source, out, belongs_to=same)
    same["chat_template"] = "{{ one }}"
    for changed, word in (
        ({"temperature": None}, "^temperature: .* was begun with 0.5, not nothing: continue"),
        ({"target_sha256": "b"}, "another target model: continue"),
    ):
        with pytest.raises(UsageError, match=word) as error:
            opened(source, out, belongs_to={**same, **changed})
        assert "--restart" in str(error.value)
    other = write_lines(source.with_name("other.jsonl"), ['"a"'])
    with pytest.raises(UsageError, match="another input: continue with the same"):
        opened(other, out, belongs_to=same)
    other.unlink()
    answered(source, out, belongs_to=same)
    check(out, True)


def test_two_runs_at_once(source, out):
    found, journal = opened(source, out)
    with journal:
        for restart in (False, True):
            with pytest.raises(EdgespecError, match="is being written by another"):
                opened(source, out, restart=restart)
        run_batch(found.requests(), EchoWriter(), journal)
        journal.finish()
    check(out, True)


def test_results_are_in_the_file_as_soon_as_they_come(source, out):
    found, journal = opened(source, out, in_order=False)
    with journal:
        for n, request in enumerate(found.requests(), 1):
            journal.add(request, BatchAnswer(200, b'{"prompt": "p"}'))
            assert len(results(journal.partial)) == n + 1  # after what the batch belongs to
    assert not out.exists()
