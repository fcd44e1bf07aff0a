"""What engines know before they begin and keep when they end: profile and history, over tiny models."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from edgespec import Engine, SamplingParams
from edgespec.drafting.acceptance import N_BUCKETS, N_DEPTHS, AcceptanceTables
from edgespec.drafting.draft import Draft
from edgespec.drafting.history import History, find_histories
from edgespec.drafting.pace import Learned, Policy
from edgespec.drafting.suffix import EarlierTexts
from edgespec.errors import UsageError

GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
PROMPT = list(range(40, 60))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "edgespec"


@pytest.fixture
def engine(tiny_path, tiny_draft_path):
    """Make an engine on the tiny pair; its lines go to `lines`."""

    def engine(lines=None, **options):
        told = (lambda line: None) if lines is None else lines.append
        return Engine(tiny_path, tiny_draft_path, n_threads=1, kernels="off", on_message=told, **options)

    return engine


def profiles(cache):
    return sorted((cache / "profiles").glob("*.json"))


def stored(cache):
    (file,) = profiles(cache)
    return json.loads(file.read_text())


def documents():
    return [info.documents for info in find_histories()]


def the_history():
    (info,) = find_histories()
    return History(info.fingerprint)


def drafted(engine, *, n_predict=40, params=GREEDY, drafter="model", gamma=3, prompt=PROMPT, **options):
    """A generation that times passes and tests drafts, whatever they cost."""
    return engine.generate(
        prompt, params=params, n_predict=n_predict, drafter=drafter, gamma=gamma, **options
    )


def tables(engine, *, greedy=True):
    return engine._knowledge.pace(Policy(), greedy=greedy).acceptance


# ---- the profile ----


def test_what_was_learnt_is_stored_on_close_and_not_before(engine, cache):
    with engine() as one:
        drafted(one)
        assert profiles(cache) == []
        learned = one._knowledge.clocks.target.curve(), one._knowledge.clocks.draft.curve()
        accepted = {"greedy": tables(one).as_json(), "sampled": tables(one, greedy=False).as_json()}
    document = stored(cache)
    for name, curve in zip(("target", "draft"), learned, strict=True):
        np.testing.assert_allclose(document[name]["passes"], curve.passes, rtol=1e-5)
        assert document[name]["read"] == pytest.approx(curve.read, rel=1e-5)
    assert document["acceptance"] == accepted
    assert document["runs"] == 1
    assert document["measured"] is None
    one.close()
    assert stored(cache)["runs"] == 1, "a second close stores nothing"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("fails", [(EarlierTexts, "add"), (Learned, "store"), (Draft, "use_cache")])
def test_what_fails_at_the_end_leaves_nothing_open(engine, cache, monkeypatch, fails, error):
    """A second Ctrl-C, or a disk's error: the rest is done all the same."""

    def fail(*_arguments):
        raise error

    one = engine()
    drafted(one, n_predict=8)
    model = one.target
    monkeypatch.setattr(*fails, fail)
    with pytest.raises(error):
        one.close()
    assert not model._finalizer.alive
    assert (profiles(cache) == []) == (fails[1] == "store")
    one.close()


def test_the_next_engine_starts_from_it(engine, cache):
    with engine() as one:
        for seed in range(4):
            drafted(one, n_predict=100)
            drafted(one, n_predict=100, params=WARM, rule="block", seed=seed)
    document = stored(cache)
    with engine() as two:
        clocks = two._knowledge.clocks
        np.testing.assert_allclose(clocks.target.curve().passes, document["target"]["passes"])
        np.testing.assert_allclose(clocks.draft.curve().passes, document["draft"]["passes"])
        for greedy, name in ((True, "greedy"), (False, "sampled")):
            expected = AcceptanceTables()
            expected.restore(document["acceptance"][name])
            found = tables(two, greedy=greedy)
            assert found.as_json() == expected.as_json()
            assert found.next.overall == expected.next.overall != AcceptanceTables().next.overall
        drafted(two)
    assert stored(cache)["runs"] == 2


def test_greedy_and_sampled_generations_learn_apart(engine):
    fresh = AcceptanceTables().as_json()
    with engine(profile=False) as one:
        drafted(one)
        assert tables(one).as_json() != fresh
        assert tables(one, greedy=False).as_json() == fresh


def test_two_requests_at_once_both_teach(engine):
    def rows(name, learned):
        return np.array(learned.as_json()[name]["tested"]).sum()

    options = {"params": GREEDY, "n_predict": 40, "gamma": 3}
    with engine(profile=False, parallel=2) as one:
        copied = one.generate(PROMPT * 4, drafter="suffix", **options).text
        modelled = one.generate(PROMPT, drafter="model", **options).text
        one.forget(tables=True)
        streams = [one.stream(PROMPT * 4, drafter="suffix", **options)]
        streams.append(one.stream(PROMPT, drafter="model", **options))
        while not all(stream.finished for stream in streams):
            one.step()
            for stream in streams:
                stream.made()
        assert [stream.result.text for stream in streams] == [copied, modelled]
        learned = one._knowledge._acceptance["greedy"]
        assert rows("suffix", learned) > 0 and rows("argmax", learned) > 0


@pytest.mark.parametrize("options", [{"profile": False}, {"drafter": "none"}], ids=str)
def test_no_profile_where_none_is_wanted(engine, cache, options):
    with engine(**options) as one:
        one.generate(PROMPT, params=GREEDY, n_predict=20)
    assert profiles(cache) == []


def test_an_engine_that_generated_nothing_stores_nothing(engine, cache):
    with engine(history=True):
        pass
    assert profiles(cache) == []
    assert documents() == []


def test_energy_needs_measured_joules(engine, cache):
    with pytest.raises(UsageError, match="edgespec profile"):
        engine(objective="energy")
    with engine() as one:
        drafted(one)
    with pytest.raises(UsageError, match="edgespec profile"):
        engine(objective="energy")
    (file,) = profiles(cache)
    document = json.loads(file.read_text())
    for name in ("target", "draft"):
        document[f"{name}_watts"] = 15.0
    file.write_text(json.dumps(document))
    with engine(objective="energy") as two:
        result = two.generate(PROMPT, params=GREEDY, n_predict=20)
    assert " J, and " in result.note


# ---- the history ----


def test_nothing_is_written_without_a_history(engine, cache):
    with engine(history=False) as one:
        drafted(one)
    assert not (cache / "history").exists()


def test_each_generation_is_kept_once(engine, cache):
    with engine(history=True) as one:
        first = drafted(one)
        assert documents() == []  # its reader may want more of it
        drafted(one, prompt=[*PROMPT, 7])
        assert documents() == [1]
        drafted(one)  # the same again
    assert documents() == [2]
    tokens = the_history().load()
    assert tokens[: len(PROMPT) + len(first.token_ids)].tolist() == [*PROMPT, *first.token_ids]


def test_the_history_is_there_for_the_first_draft(engine):
    with engine(history=True) as one:
        want = drafted(one, drafter="suffix", gamma=4)
    steps = []
    with engine(history=True) as two:
        got = drafted(two, drafter="suffix", gamma=4, on_step=steps.append)
    assert got.token_ids == want.token_ids
    assert [token.token for token in steps[0].proposed] == list(want.token_ids[1:5])
    assert steps[0].n_accepted == 4
    assert got.stats.steps < want.stats.steps


def test_a_slow_disk_is_waited_for(engine, monkeypatch):
    """The thread that reads the history may be late: the first draft waits for it."""
    from edgespec.drafting.history import History

    with engine(history=True) as one:
        want = drafted(one, drafter="suffix", gamma=4)
    real, may_read = History.load, threading.Event()

    def late(self, *arguments, **options):
        assert may_read.wait(30)
        return real(self, *arguments, **options)

    monkeypatch.setattr(History, "load", late)
    with engine(history=True) as two:  # loading the models does not wait
        timer = threading.Timer(0.2, may_read.set)
        timer.start()
        got = drafted(two, drafter="suffix", gamma=4)
        timer.join()
    assert got.token_ids == want.token_ids
    assert got.stats.steps < want.stats.steps


def test_another_family_has_a_history_of_its_own(engine, cache, tmp_path):
    from tiny_gguf import write_tiny_gguf

    with engine(history=True) as one:
        drafted(one)
    other = write_tiny_gguf(tmp_path / "other.gguf", seed=1, texts={5: "другой"})
    steps = []
    with Engine(other, drafter="suffix", n_threads=1, kernels="off", history=True) as two:
        two.generate(PROMPT, params=GREEDY, n_predict=20, gamma=4, on_step=steps.append)
    assert steps[0].offered == []
    assert documents() == [1, 1]


# ---- damage ----


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b"\xff\x00" * 50, b'{"format": "edgespec profile"}'])
def test_a_corrupt_profile_is_set_aside_in_one_line(engine, cache, damage):
    with engine() as one:
        want = drafted(one)
    (file,) = profiles(cache)
    file.write_bytes(damage)
    lines = []
    with engine(lines) as two:
        assert drafted(two).token_ids == want.token_ids
    (line,) = lines
    assert str(file) in line
    assert "set aside" in line
    assert "\n" not in line
    assert file.with_name(f"{file.name}.set-aside").read_bytes() == damage
    assert stored(cache)["runs"] == 1, "it begins anew"
    lines.clear()
    with engine(lines) as three:
        drafted(three)
    assert lines == []


def test_acceptance_tables_that_make_no_sense_are_left_alone(engine, cache):
    with engine() as one:
        want = drafted(one)
    (file,) = profiles(cache)
    document = json.loads(file.read_text())
    counts = [[10**400] * N_BUCKETS] * (N_DEPTHS + 1)  # json has no bound
    sampled = {"next": {"accepted": [[1]], "tested": "?"}, "suffix": {"accepted": counts, "tested": counts}}
    document["acceptance"] = {"greedy": 5, "sampled": sampled, "x": {}}
    file.write_text(json.dumps(document))
    lines = []
    with engine(lines) as two:
        assert tables(two).as_json() == tables(two, greedy=False).as_json() == AcceptanceTables().as_json()
        assert drafted(two).token_ids == want.token_ids
    assert lines == []


def test_a_history_of_ids_the_model_does_not_have(engine, cache):
    with engine(history=True) as one:
        want = drafted(one, drafter="suffix", gamma=4)
        n_vocab = one.target.n_vocab
    the_history().append([*PROMPT, n_vocab, n_vocab + 5, (1 << 31) - 1])
    with engine(history=True) as two:
        assert drafted(two, drafter="suffix", gamma=4).token_ids == want.token_ids


# ---- forgetting ----


def test_forget_empties_the_suffix_store(engine, cache):
    steps = []
    with engine(history=True) as one:
        want = drafted(one, drafter="suffix", gamma=4)
        learned = tables(one).as_json()
        one.forget()
        assert tables(one).as_json() == learned
        got = drafted(one, drafter="suffix", gamma=4, on_step=steps.append)
    assert got.token_ids == want.token_ids
    assert steps[0].proposed == ()
    assert got.stats.steps == want.stats.steps


def test_forget_also_what_came_from_the_disk(engine):
    with engine(history=True) as one:
        drafted(one)
    steps = []
    with engine(history=True) as two:
        two.forget()
        drafted(two, drafter="suffix", gamma=4, on_step=steps.append)
    assert steps[0].proposed == ()


def test_a_forgotten_generation_is_not_kept(engine, cache):
    with engine(history=True) as one:
        drafted(one)
        one.forget()
    assert documents() == []


def test_forgetting_the_tables_goes_back_to_what_was_stored(engine, cache):
    with engine() as one:
        drafted(one)
    document = stored(cache)
    with engine() as two:
        before = tables(two).as_json(), tables(two, greedy=False).as_json()
        curve = two._knowledge.clocks.target.curve()
        drafted(two)
        drafted(two, params=WARM)
        assert tables(two).as_json() != before[0]
        two.forget(tables=True)
        assert (tables(two).as_json(), tables(two, greedy=False).as_json()) == before
        assert two._knowledge.clocks.target.curve() == curve
    assert stored(cache) == document, "what was forgotten is not stored"


def test_forgetting_the_tables_without_a_profile(engine):
    with engine(profile=False) as one:
        drafted(one)
        one.forget(tables=True)
        assert tables(one).as_json() == AcceptanceTables().as_json()
        assert drafted(one).stats.n_drafted > 0


# ---- places that cannot be written ----


def test_an_unwritable_cache_costs_a_line_at_most(engine, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/edgespec-tests")  # also root can write nothing there
    lines = []
    with engine(lines, history=True) as one:
        first = drafted(one)
        second = drafted(one)
    assert first.token_ids == second.token_ids
    assert len(lines) <= 1
    assert not Path("/proc/edgespec-tests").exists()


def test_no_home_directory_costs_a_line_at_most(engine, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-of-this-name/x")  # a home that cannot be found
    lines = []
    with engine(lines, history=True) as one:
        assert drafted(one).token_ids
    assert len(lines) == 1
    assert "earlier answers are not used" in lines[0]


# ---- several engines ----


def test_two_engines_at_once(engine, cache):
    """In two threads; both profiles are merged, both histories kept, and neither text is another's."""
    with engine(profile=False) as alone:
        want = [[drafted(alone, prompt=[*PROMPT, i, j]).token_ids for j in range(4)] for i in range(2)]
    got = [[], []]
    lines = []
    errors = []

    def work(i):
        try:
            with engine(lines, history=True) as mine:
                for j in range(4):
                    got[i].append(drafted(mine, prompt=[*PROMPT, i, j]).token_ids)
        except BaseException as error:  # noqa: BLE001 - shown below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert got == want
    assert lines == []
    assert stored(cache)["runs"] == 2
    assert documents() == [8]
