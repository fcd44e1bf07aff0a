"""Which tokens a draft keeps, what it is worth, and making it."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from edgespec.drafting.history import History
from edgespec.drafting.model import DraftModel
from edgespec.errors import EdgespecError, UsageError
from edgespec.forge.corpus import Corpus, check_keep, own_corpus, read_corpus, select
from edgespec.forge.cutting import Vocabulary, read_vocabulary
from edgespec.forge.drafts import Request, make, target_for
from edgespec.forge.speedup import LONGEST_DRAFT, Passes, acceptance, answer, levelled, softmax, speed_up
from edgespec.llama.embeddings import read_cut
from edgespec.llama.fingerprints import tokenizer_fingerprint
from edgespec.llama.gguf_header import check_model_file, read_header
from edgespec.llama.session import Session
from edgespec.models.pull import hash_file
from edgespec.models.registry import load_registry, user_models_file
from edgespec.models.store import Store
from edgespec.suites import Prompt
from tiny_gguf import write_tiny_gguf

REQUIRED = np.array([0, 1, 99])


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    """A registry, a store and a history of the test's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("EDGESPEC_MODELS_DIR", str(tmp_path / "store"))


# ---- which tokens ----


class Uniform:
    """A session whose model has no idea."""

    def __init__(self, n_vocab=100):
        self.model = SimpleNamespace(n_vocab=n_vocab)

    def clear(self):
        pass

    def eval(self, tokens, *, n_logits):
        return np.zeros((n_logits, self.model.n_vocab), np.float32)


def a_vocabulary(unused=()):
    return Vocabulary(100, REQUIRED, np.array(unused, np.int64))


def a_corpus(*documents):
    return Corpus("test", tuple(np.array(document, np.int64) for document in documents))


def test_required_then_seen_then_the_lowest():
    found = select(a_corpus([50] * 9 + [70] * 5 + [71]), a_vocabulary([2, 3]), Uniform(), keep=16)
    assert found.token_ids.tolist() == [0, 1, *range(4, 14), 50, 70, 71, 99]
    assert found.n_seen == 3
    assert found.coverage is None, "one block of text says nothing of another"


def test_what_the_model_expects_counts_too():
    class Expects80(Uniform):
        def eval(self, tokens, *, n_logits):
            rows = super().eval(tokens, n_logits=n_logits)
            rows[:, 80] = 30.0
            return rows

    corpus = a_corpus([50] * 9 + [70] * 5)
    assert 80 in select(corpus, a_vocabulary(), Expects80(), keep=16).token_ids
    assert 80 not in select(corpus, a_vocabulary(), Uniform(), keep=16).token_ids


def test_coverage_is_of_text_that_was_not_chosen_from():
    same, other = [50] * 64, [60 + i % 30 for i in range(64)]
    assert select(a_corpus(same, same), a_vocabulary(), Uniform(), keep=16).coverage == 1.0
    assert select(a_corpus(same, other), a_vocabulary(), Uniform(), keep=16).coverage == 0.0


def test_as_few_as_cover_enough():
    big = Vocabulary(40000, REQUIRED, np.empty(0, np.int64))
    few = a_corpus([20, 21, 22, 23] * 64)
    assert len(select(few, big, Uniform(40000)).token_ids) == 8192
    rare = a_corpus(list(range(39000, 39064)), list(range(39100, 39164)))
    found = select(rare, big, Uniform(40000))
    assert len(found.token_ids) == 32768, "none covers enough: the largest"
    assert found.coverage == 0.0
    assert set(range(39000, 39064)) <= set(found.token_ids.tolist())


def test_numbers_that_cannot_be_kept():
    with pytest.raises(UsageError, match="keep 2: at least 3 tokens stay"):
        check_keep(a_vocabulary(), 2)
    with pytest.raises(UsageError, match="keep 97: the model has only 100 tokens"):
        check_keep(a_vocabulary(), 97)  # 112, in whole rows of 16
    with pytest.raises(UsageError, match="keep 60: the model has only 60 tokens"):
        check_keep(a_vocabulary(range(59, 99)), 60)
    with pytest.raises(UsageError, match="only 100 tokens: say how many to keep"):
        check_keep(a_vocabulary(), None)
    check_keep(a_vocabulary(), 3)


def test_a_corpus_from_a_file(tmp_path, tiny_target):
    text = tmp_path / "text.txt"
    text.write_text("the wind in the reeds")
    found = read_corpus(text, tiny_target)
    assert (found.what, len(found.documents)) == ("text.txt", 1)
    assert found.n_tokens == len(
        tiny_target.tokenize(text.read_text(), add_special=False, parse_special=False)
    )
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"question_id": i, "category": "a", "turns": [f"question {i}", "unused"]} for i in (1, 2)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(read_corpus(prompts, tiny_target).documents) == 2


def test_corpora_that_are_none(tmp_path, tiny_target):
    empty, binary, lines = tmp_path / "empty.txt", tmp_path / "b.txt", tmp_path / "p.jsonl"
    empty.write_text(" \n")
    binary.write_bytes(b"ab\xff")
    lines.write_text("{}\n")
    for path, problem in (
        (tmp_path / "none.txt", "no such file"),
        (tmp_path, "a directory"),
        (empty, "an empty text"),
        (binary, r"not UTF-8 text \(byte 2\)"),
        (lines, "line 1"),
    ):
        with pytest.raises(UsageError, match=problem):
            read_corpus(path, tiny_target)


def test_the_targets_own_outputs_but_for_what_is_held_out(tiny_target):
    def tokens(text):
        return tiny_target.tokenize(text, add_special=False, parse_special=False)

    asked, kept = "what is held out, and kept out", "what is kept"
    history = History(tokenizer_fingerprint(tiny_target))
    for text in (f"<|im_start|>{asked}<|im_end|> an answer to it", "an answer to something else"):
        assert history.append(tiny_target.tokenize(text, add_special=False, parse_special=True))
    prompts = [Prompt("1", "a", asked), Prompt("2", "a", kept)]
    found = own_corpus(tiny_target, prompts, prompts[:1])
    assert [ids.tolist() for ids in found.documents] == [tokens("an answer to something else"), tokens(kept)]
    assert found.what == "1 texts of the history and 1 of the shipped suite"


# ---- what it is worth ----


def passes(target, draft):
    return Passes(tuple(target), tuple(draft), 0.0, ())


def test_speed_up_is_the_formula_at_its_best_length():
    free = passes([1.0] * 33, [0.1] * 33)
    found = speed_up(0.8, free)
    want = [(1 - 0.8 ** (g + 1)) / 0.2 / (1 + 0.1 * g) for g in range(LONGEST_DRAFT + 1)]
    assert found.gamma == int(np.argmax(want))
    assert found.factor == pytest.approx(max(want))
    assert speed_up(0.8, passes(range(1, 34), [0.5] * 33)) == (0, 1.0), "where it costs more, plain decoding"
    assert speed_up(1.0, free).gamma == LONGEST_DRAFT


def test_a_machine_that_was_slower_once_decides_nothing():
    quick = passes([1.0, 1.1, 1.2], [0.2, 0.3, 0.4])
    slow = passes([2.0, 2.2, 2.4], [0.4, 0.6, 0.8])
    found = levelled([quick, slow, quick])
    assert all(one.target == quick.target for one in found)
    assert found[1].draft == pytest.approx(quick.draft)


def test_the_target_agrees_with_itself(tiny_target):
    prompt = tiny_target.tokenize("hello", add_special=True, parse_special=False)
    with Session(tiny_target, n_ctx=128, n_threads=1) as session:
        one = answer(session, prompt, 20)
        assert 1 <= len(one.tokens) <= 20
        found = acceptance(DraftModel(session, n_vocab=tiny_target.n_vocab), [one, one])
    assert found.agreement == 1.0
    assert found.overlap == pytest.approx(1.0, abs=1e-4)


def test_agreement_with_another_model(tiny_target, tiny_draft):
    """Counted anew, a token at a time."""
    prompt = tiny_target.tokenize("the wind", add_special=True, parse_special=False)
    with (
        Session(tiny_target, n_ctx=128, n_threads=1) as ours,
        Session(tiny_draft, n_ctx=128, n_threads=1) as theirs,
    ):
        one = answer(ours, prompt, 24)
        found = acceptance(DraftModel(theirs, n_vocab=tiny_target.n_vocab), [one])
        ours.clear()
        theirs.clear()
        p, q = ours.eval(prompt)[0], theirs.eval(prompt)[0]
        agreed, overlap = 0, 0.0
        for token in one.tokens:
            assert token == p.argmax()
            agreed += int(q.argmax() == token)
            overlap += float(np.minimum(softmax(p), softmax(q)).sum())
            p, q = ours.eval([token])[0], theirs.eval([token])[0]
    n = len(one.tokens)
    assert found.agreement == agreed / n
    assert found.overlap == pytest.approx(overlap / n, rel=1e-3)
    assert 0 < found.overlap < 1


def test_softmax_of_what_was_cut():
    p = softmax(np.array([0.0, -np.inf, math.log(3)], np.float32))
    assert p.tolist() == pytest.approx([0.25, 0.0, 0.75])


def test_the_target_of_a_draft():
    assert target_for("qwen2.5-coder-0.5b-q4_0") == "qwen2.5-coder-1.5b-q4_k_m"
    assert target_for("qwen2.5-coder-0.5b-q4_k_m") == "qwen2.5-coder-1.5b-q4_k_m", "of the same origin"
    assert target_for("/somewhere/own.gguf") == load_registry().pair("default").target


# ---- making ----


@pytest.fixture
def request_(tmp_path, tiny_path):
    """The least that can be asked for, with models of our own."""
    source = write_tiny_gguf(tmp_path / "small-f32.gguf", seed=5, n_layer=1, n_embd=64, n_ff=64)
    text = tmp_path / "text.txt"
    text.write_text("the wind in the reeds, and the other words " * 20)
    return Request(
        source=str(source),
        target=str(tiny_path),
        corpus=text,
        keep=272,
        types=("q8_0",),
        force=True,
        n_threads=1,
        kernels="off",
        n_predict=8,
        budget_s=1.0,
    )


def left(tmp_path):
    return sorted(path.name for path in (tmp_path / "store").iterdir())


def test_the_best_is_kept_under_its_name(request_, tmp_path):
    seen, said = [], []
    made = make(request_, on_progress=lambda *now: seen.append(now), on_message=said.append)
    assert [one.name for one in made.candidates] == ["small-f32-cut272", "small-q8_0-cut272"]
    assert made.best.value == max(one.value for one in made.candidates)
    assert made.gain == pytest.approx(made.best.value / made.source.value - 1)
    assert left(tmp_path) == [".drafts-of-small-f32.lock", f"{made.best.name}.gguf"]
    assert made.kept == tmp_path / "store" / f"{made.best.name}.gguf"
    entry = load_registry().get(made.best.name)
    assert entry.path == made.kept
    assert (entry.size, entry.sha256) == (made.kept.stat().st_size, hash_file(made.kept))
    assert Store.default().is_present(entry, load_registry())

    cut = read_cut(read_header(made.kept))
    assert cut.source_sha256 == hash_file(tmp_path / "small-f32.gguf")
    assert len(cut.token_ids) == 272
    assert set(read_vocabulary(check_model_file(tmp_path / "small-f32.gguf")).required) <= set(cut.token_ids)
    assert made.source.n_kept is None
    assert [one.n_kept for one in made.candidates] == [272, 272]
    assert [one.pass_bytes < made.source.pass_bytes for one in made.candidates] == [True, True]
    for one in (made.source, *made.candidates):
        assert 0 <= one.acceptance.agreement <= 1
        assert all(seconds > 0 for seconds in one.seconds().values())
    done = [int(steps) for _, steps, _ in seen]
    assert all(after >= before - 1 for before, after in pairwise(done)), "the timing alone foresees anew"
    assert seen[-1] == ("done", 11, 11)
    assert max(share / total for _, share, total in seen) == 1.0
    assert any("corpus has only" in line for line in said)


def test_the_name_is_free_or_replaced(request_, tmp_path):
    request = replace(request_, name="mine", types=())
    made = make(request)
    first = made.kept.stat().st_ino
    with pytest.raises(UsageError, match="name mine: exists already; choose another name"):
        make(replace(request, force=False))
    made = make(request)
    assert made.kept.stat().st_ino != first
    assert user_models_file().read_text().count("[models.") == 1
    with pytest.raises(
        UsageError, match=r"name qwen2\.5-coder-0\.5b-q4_0: a model of that name exists already"
    ):
        make(replace(request, name="qwen2.5-coder-0.5b-q4_0"))
    with pytest.raises(UsageError, match="not a usable name"):
        make(replace(request, name="../mine"))


def test_nothing_is_kept_that_is_not_better(request_, tmp_path):
    made = make(replace(request_, force=False, types=()))
    assert (made.kept is not None) == (made.gain >= 0.01)
    names = {path.name for path in (tmp_path / "store").iterdir() if not path.name.startswith(".")}
    assert names == ({made.kept.name} if made.kept else set())
    assert user_models_file().exists() == bool(made.kept)


def test_what_cannot_be_made(request_, tmp_path, monkeypatch):
    stranger = write_tiny_gguf(tmp_path / "stranger.gguf", texts={5: "strange"})
    for changed, problem in (
        ({"target": str(stranger)}, "first difference at id 5.*choose the target that it should draft for"),
        ({"source": str(tmp_path / "text.txt")}, "not a GGUF model but a text file"),
        ({"source": str(tmp_path / "none.gguf")}, "no such file"),
        ({"keep": 100}, "keep 100: at least 260 tokens stay"),
        ({"keep": None}, "only 284 tokens: say how many to keep"),
        ({"target": "no-such-model"}, "no model is called"),
    ):
        with pytest.raises(EdgespecError, match=problem):
            make(replace(request_, **changed))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1 << 20))
    with pytest.raises(EdgespecError, match="no disk space for drafts of small-f32"):
        make(request_)
    assert left(tmp_path) == [".drafts-of-small-f32.lock"]


def test_what_a_killed_run_left_is_removed(request_, tmp_path):
    folder = tmp_path / "store" / ".drafts-of-small-f32"
    folder.mkdir(parents=True)
    (folder / "half.gguf").write_text("half")
    make(replace(request_, types=()))
    assert not folder.exists()


def test_a_source_with_a_cut_vocabulary(request_):
    made = make(replace(request_, name="cut", types=()))
    with pytest.raises(UsageError, match="its vocabulary is cut already"):
        make(replace(request_, source="cut"))
    with pytest.raises(UsageError, match="it cannot be a target"):
        make(replace(request_, target="cut"))
    assert made.kept.exists()
