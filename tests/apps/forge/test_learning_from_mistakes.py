"""A head that learns where its drafts were rejected: the texts, their weights, the mixture, and the guard."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from edgespec.apps.forge import dataset as dataset_module
from edgespec.apps.forge import request as request_module
from edgespec.apps.forge.commands.draft import made_document, print_made
from edgespec.apps.forge.data_stage import (
    PLACE_WEIGHT,
    HistoryTexts,
    RejectedTexts,
    rejected_texts,
    tokens_wanted,
    write_texts,
)
from edgespec.apps.forge.dataset import BUILT_IN, READ, REJECTED, Dataset, DatasetTarget, is_held_out
from edgespec.apps.forge.draft_store import delete_user_texts, find_stored
from edgespec.apps.forge.make import (
    FIRST_HEAD,
    Guard,
    GuardFigures,
    earlier_training,
    guard_texts,
    make,
    tidy,
)
from edgespec.apps.forge.prompts import TextPrompt, TokenPrompt
from edgespec.apps.forge.request import DraftRequest, StageContext
from edgespec.apps.forge.training.batches import EpochPosition, TextPacking, batches
from edgespec.apps.forge.training.loop import Training, TrainingSettings
from edgespec.apps.forge.training.weights import ModelWeights
from edgespec.apps.forge.vocabulary_ranking import renew
from edgespec.apps.forge.writing import TargetWriter, WritingSettings
from edgespec.drafting.history import History
from edgespec.drafting.rejections import RejectedPlaces, RejectedText
from edgespec.errors import EdgespecError
from edgespec.llama.gguf_header import read_header, tokenizer_fingerprint
from edgespec.models.draft_records import read_record
from edgespec.models.store import hash_file
from tiny_training import ROWS, TinyTexts, tiny_head, write_target


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    """A registry, a store and a cache of the test's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("EDGESPEC_MODELS_DIR", str(tmp_path / "models"))


def rejected_text(number, n_tokens=60, n_prompt=12, places=(12, 30, 59), sure=0.5):
    """A text that begins with its number, and its rejected places."""
    tokens = np.random.default_rng(number).integers(5, 250, n_tokens).astype(np.int32)
    tokens[0] = number
    probs = np.zeros((len(places), 16), np.float32)
    probs[:, 0] = sure
    likeliest = np.zeros(probs.shape, np.int32)
    return RejectedText(tokens, n_prompt, np.array(places, np.int32), likeliest, probs)


# ---- texts ----


def test_a_place_weighs_more_the_surer_the_target_was():
    texts = [rejected_text(1, sure=1.0), rejected_text(2, sure=0.25)]
    newest, oldest = rejected_texts(texts)
    assert (newest.tokens[0], oldest.tokens[0]) == (2, 1)
    for prompt, extra in ((oldest, PLACE_WEIGHT - 1), (newest, 0.25 * (PLACE_WEIGHT - 1))):
        expected = np.ones(60)
        expected[[12, 30, 59]] += extra
        assert (prompt.source, prompt.n_prompt) == (REJECTED, 12)
        assert prompt.weights == pytest.approx(expected)


def test_a_long_text_is_cut_and_its_weights_with_it():
    text = rejected_text(1, n_tokens=500, places=tuple(range(12, 500, 7)), sure=1.0)
    parts = list(rejected_texts([text], longest=200))
    assert max(len(part.tokens) for part in parts) <= 200
    assert [token for part in parts for token in part.tokens[part.n_prompt :]] == text.tokens[12:].tolist()
    weights = [weight for part in parts for weight in part.weights[part.n_prompt :]]
    assert [i + 12 for i, weight in enumerate(weights) if weight > 1] == text.places.tolist()


def test_a_rejected_text_and_its_document_in_the_history_are_one(tiny_target):
    text = rejected_text(3)
    (prompt,) = rejected_texts([text])
    history = History(tokenizer_fingerprint(tiny_target.header))
    history.append(text.tokens.tolist())
    lengths = {prompt.tokens: text.n_prompt}
    (document,) = HistoryTexts(tiny_target, least=0, n_prompts=lengths).texts()
    assert (document.source, document.tokens, document.n_prompt) == (READ, prompt.tokens, text.n_prompt)
    assert prompt.key == document.key, "it is read once, and held out with it"


@pytest.fixture
def dataset(tmp_path, tiny_target):
    """What the tiny target read of rejected texts, with some texts of its own."""
    target = DatasetTarget("ab" * 32, "tiny", tiny_target.n_embd)
    dataset = Dataset(target, tmp_path / "data")
    texts = list(rejected_texts([rejected_text(i, sure=1.0) for i in range(6)]))
    read = [TokenPrompt(READ, tuple(range(20 + i, 60 + i)), 10) for i in range(20)]
    with TargetWriter(tiny_target, n_threads=1) as writer, dataset.writer(1 << 24) as into:
        writer.fill(into, [*texts, *read], until=1 << 30)
    return dataset


def test_weights_are_stored_with_the_texts_and_reach_the_batches(dataset):
    texts = list(dataset.texts())
    failed = [text for text in texts if text.source == REJECTED]
    assert (len(failed), len(texts)) == (6, 26)
    for text in failed:
        assert np.flatnonzero(text.weights > 1).tolist() == [12, 30, 59]
    packing = TextPacking(failed, ROWS)
    seen = {}
    embed = lambda tokens: np.zeros((*tokens.shape, 4), np.float16)  # noqa: E731
    for batch, place in batches(packing, embed, ROWS.n, 0, EpochPosition()):
        for row, i in zip(*np.nonzero(batch.weights), strict=True):
            column = batch.answers[row, i]
            following = int(batch.tokens[row, column + 1])
            seen.setdefault(float(batch.weights[row, i]), []).append(following)
        if place.epoch:
            break
    wanted = [int(text.tokens[place]) for text in failed for place in (12, 30, 59)]
    assert sorted(seen[PLACE_WEIGHT]) == sorted(wanted)
    assert len(seen[1.0]) == 6 * 48 - len(wanted)


def test_rows_of_rejected_texts_alternate_with_others(dataset):
    texts = list(dataset.texts())
    for epoch in range(3):
        rows = TextPacking(texts, ROWS, mixes=True).epoch(0, epoch)
        failed = [{texts[piece.text].source == REJECTED for piece in row} for row in rows]
        assert failed == [{True}, {False}] * (len(rows) // 2)
        read = [piece.text for row in rows[::2] for piece in row]
        assert sorted(set(read)) == [i for i, text in enumerate(texts) if text.source == REJECTED]
    apart = [TextPacking(texts, ROWS, mixes=True).epoch(0, epoch)[1::2] for epoch in range(2)]
    assert apart[0] != apart[1], "what is mixed in is drawn anew"


def test_one_rejected_row_fills_half_of_a_batch(dataset):
    texts = list(dataset.texts())
    few = [text for text in texts if text.source != REJECTED] + [
        text for text in texts if text.source == REJECTED
    ][:1]
    rows = TextPacking(few, ROWS, mixes=True).epoch(0, 0)
    assert len(rows) >= ROWS.n - 1
    assert {few[piece.text].source for row in rows[::2] for piece in row} == {REJECTED}
    plain = TextPacking(few, ROWS).epoch(0, 0)
    assert sum(few[piece.text].source == REJECTED for row in plain for piece in row) == 1


def test_the_weights_of_the_installed_head_outlive_a_refused_training(tmp_path):
    for number, name in (("1", "mine"), ("2", "other")):
        training = tmp_path / number / "head"
        training.mkdir(parents=True)
        (training / "best.npz").write_bytes(b"")
        (training / "name").write_text(name)
    run = tmp_path / "3"
    (run / "head").mkdir(parents=True)
    assert earlier_training(run, "mine") == tmp_path / "1/head"
    tidy(run, goes_on=True, installed="mine")
    assert earlier_training(run, "mine") == tmp_path / "1/head"
    assert earlier_training(run, "other") is None
    tidy(run, goes_on=False)
    assert earlier_training(run, "mine") is None


def test_a_shard_without_weights_is_read_and_wrong_ones_are_refused(dataset):
    (path,) = dataset.shards()
    with np.load(path) as shard:
        arrays = {name: shard[name] for name in shard}
    del arrays["weight"]
    np.savez(path, **arrays)
    texts = list(Dataset(dataset.target, dataset.folder).texts())
    assert len(texts) == 26 and all(text.weights is None for text in texts)
    np.savez(path, **arrays, weight=np.ones(3, np.float16))
    lines = []
    assert list(Dataset(dataset.target, dataset.folder, on_message=lines.append).texts()) == []
    assert "its arrays do not fit together" in lines[0]


def test_the_vocabulary_takes_up_what_the_user_writes():
    def text(tokens, source):
        return SimpleNamespace(tokens=np.array(tokens, np.int32), n_prompt=1, source=source)

    vocabulary = SimpleNamespace(n_vocab=100, required=np.array([0, 9]))
    ids = np.array([0, 1, 2, 3, 9])
    texts = [text([50, 7, 7, 7, 8, 8, 60], READ), text([5, 3, 70, 70], BUILT_IN)]
    assert renew(ids, vocabulary, texts).tolist() == [0, 3, 7, 8, 9], "70 is no word of the user's"
    assert renew(ids, vocabulary, texts[1:]).tolist() == ids.tolist()


# ---- night after night ----


@pytest.fixture
def places(dataset):
    """Rejected texts of the dataset's target that are kept: two that it has read, and three new ones."""
    places = RejectedPlaces(dataset.target.sha256)
    for number in (4, 5, 20, 21, 22):
        places.append(rejected_text(number))
    return places


def sources(dataset):
    return Counter(text.source for text in dataset.texts())


def test_a_night_takes_what_was_not_read_yet_and_a_built_in_answer_for_each(
    dataset, places, tiny_target, tmp_path
):
    size = 2 * dataset.target.n_embd * 60 + 1500
    for budget, newest in ((1 << 24, [22, 21, 20]), (5 * size, [22, 21])):  # of which it takes half
        assert [text.tokens[0] for text in RejectedTexts(dataset, budget).unread] == newest
    request = DraftRequest(target="tiny", hours=8.0, answer_tokens=8, budget=1 << 24, from_history=True)
    here = dataset.n_answer_tokens()
    until = tokens_wanted(request, dataset, learns=True)
    assert until == here + 3 * (48 + 8)
    assert tokens_wanted(request, dataset, learns=False) == here + request.default_tokens
    assert tokens_wanted(replace(request, data_tokens=70), dataset, learns=True) == here + 70
    (tmp_path / "book.txt").write_text("It was a dark and stormy night. " * 50)
    with_file = replace(request, prompts=(tmp_path / "book.txt",))
    assert tokens_wanted(with_file, dataset, learns=True) == here + request.default_tokens
    fill_history(tiny_target)
    write_texts(tiny_target, dataset, request, until, StageContext(), learns=True)
    held_out = len([text for text in dataset.texts(held_out=True) if text.source == BUILT_IN])
    assert sources(dataset) == {REJECTED: 9, READ: 20, BUILT_IN: 3 + held_out}
    assert tokens_wanted(request, dataset, learns=True) == dataset.n_answer_tokens(), "nothing is left"


def fill_history(target):
    History(tokenizer_fingerprint(target.header)).extend([[i, *range(20, 90)] for i in range(40)])


def test_where_the_budget_is_full_new_mistakes_take_the_place_of_forgotten_ones(
    dataset, places, tiny_target, monkeypatch
):
    fill_history(tiny_target)
    monkeypatch.setattr(request_module, "_LEAST_BUDGET", 0)
    lines = []
    context = StageContext(on_message=lines.append)
    full = DraftRequest(
        target="tiny", hours=1.0, answer_tokens=8, budget=dataset.n_bytes(), from_history=True
    )
    write_texts(tiny_target, dataset, full, 1 << 30, context, learns=True)
    failed = {int(text.tokens[0]) for text in dataset.texts() if text.source == REJECTED}
    assert failed == {4, 5, 20, 21, 22}, "all that are kept, and no others"
    assert sources(dataset)[READ] == 20, "other texts stay while these make room"
    assert dataset.n_bytes() <= full.budget + 4096, "the names and sums of a shard are not counted"
    assert "4 earlier texts made room for 3 in which drafts were rejected" in lines
    write_texts(tiny_target, dataset, full, 1 << 30, context, learns=True)
    assert len([line for line in lines if "made room" in line]) == 1, "nothing was new"


def test_built_in_texts_make_room_down_to_a_third_of_the_budget_and_not_those_to_judge_by(
    dataset, places, tiny_target, monkeypatch
):
    monkeypatch.setattr(dataset_module, "TEXTS_PER_SHARD", 4)
    prompts = [TextPrompt(BUILT_IN, (f"Why {i}?",)) for i in range(120)]
    settings = WritingSettings(n_predict=30)
    with TargetWriter(tiny_target, settings, n_threads=1) as writer, dataset.writer(1 << 24) as into:
        writer.fill(into, prompts, until=1 << 30)
    for number in range(100, 140):
        places.append(rejected_text(number, n_tokens=120))
    budget = dataset.n_bytes()
    before = list(dataset.texts())
    rejected = RejectedTexts(dataset, budget)
    with dataset.writer(budget) as into:
        taken = list(rejected.prompts(into, [].append))
        assert into.has_room(sum(2 * dataset.target.n_embd * (len(text.tokens) - 1) for text in taken))
    assert taken == rejected.unread, "nothing is written beside them"
    after = list(dataset.texts())

    def built_in(texts, *, held_out):
        return [text for text in texts if (text.source, text.held_out) == (BUILT_IN, held_out)]

    assert len(built_in(after, held_out=True)) == len(built_in(before, held_out=True)) > 0
    assert 0 < len(built_in(after, held_out=False)) < len(built_in(before, held_out=False))
    assert sum(text.features.nbytes for text in after if text.source == BUILT_IN) > 0.3 * budget
    assert not any(text.source == READ and not text.held_out for text in after), "the user's went before them"


# ---- the guard ----


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("guard"))


class OwnTexts(TinyTexts):
    """A dataset in memory of which each second held-out text, and many others, are the user's."""

    def __init__(self, target, n, **options):
        super().__init__(target, n, **options)
        self.all = [
            replace(text, source=REJECTED if i % 2 else BUILT_IN, weights=None)
            for i, text in enumerate(self.all)
        ]


def test_the_guard_lets_a_better_head_pass_and_no_worse_one(target, tmp_path):
    texts = OwnTexts(target, 60)
    family = tiny_head(target)
    untrained, trained = tmp_path / "untrained.gguf", tmp_path / "trained.gguf"
    family.export(family.init(jax.random.key(0)), untrained, "q8_0")
    settings = TrainingSettings(tokens=3_000, evaluate_s=1e9, rows=ROWS)
    result = Training(family, texts, settings, tmp_path / "training", StageContext()).run()
    family.export(result.params, trained, "q8_0")
    weights, judged = ModelWeights(read_header(target)), guard_texts(texts)
    assert {text.source for text in judged[0]} == {REJECTED}
    assert {text.source for text in judged[1]} == {BUILT_IN}
    assert all(text.held_out for text in (*judged[0], *judged[1]))
    better = Guard(weights, judged, untrained).judge(trained)
    assert better.passes
    worse = Guard(weights, judged, trained).judge(untrained)
    assert not worse.passes
    other = Guard(weights, judged, trained, untrained).judge(trained)
    assert other.own[0] == other.own[1], "the user's texts are judged beside the installed head"
    assert other.built_in == better.built_in, "the others beside the first one"
    assert (worse.own, worse.built_in) == (better.own[::-1], better.built_in[::-1])


@pytest.mark.parametrize(
    ("own", "built_in", "passes"),
    [((1.0, 1.1), (2.0, 1.97), True), ((1.0, 1.0), (2.0, 2.1), False), ((1.0, 1.5), (2.0, 1.95), False)],
)
def test_more_on_the_users_texts_and_hardly_less_on_the_others(own, built_in, passes):
    figures = GuardFigures(own, built_in, 1000, 2000)
    assert figures.passes == passes
    for figure in (*own, *built_in):
        assert f"{figure:.3f}" in str(figures)


# ---- draft make --from-history ----


@pytest.fixture
def learning(request_, speeds, jobs, tiny_path):
    """A request to learn from the history, with an installed head and texts in which it was rejected."""
    make(replace(request_, force=True))
    places = RejectedPlaces(hash_file(tiny_path))
    numbers = [n for n in range(5, 250) if is_held_out(next(rejected_texts([rejected_text(n)])).key)][:2]
    for number in (*numbers, *range(5, 55)):
        places.append(rejected_text(number))
    return replace(request_, from_history=True, data_tokens=4_000)


def test_a_head_that_is_no_better_replaces_nothing_and_the_figures_are_said(learning, jobs, tmp_path, capsys):
    installed = tmp_path / "models" / "target-head-q8_0.gguf"
    before = installed.read_bytes(), read_record(installed)
    made = make(learning)
    assert made.kept is None and made.candidates == ()
    assert made.guard.own[0] == made.guard.own[1], "the made-up training gives the same head again"
    assert (installed.read_bytes(), read_record(installed)) == before
    print_made(made)
    said = " ".join(capsys.readouterr().out.split())
    assert str(made.guard) in said
    assert "nothing is replaced: target-head-q8_0 stays" in said
    assert json.loads(json.dumps(made_document(made)))["guard"]["own"] == list(made.guard.own)
    assert jobs[-1].start == installed, "it starts from the installed head"


def test_a_better_head_takes_the_place_of_the_one_that_was_made_here(learning, monkeypatch, tmp_path):
    monkeypatch.setattr(GuardFigures, "passes", True)
    made = make(replace(learning, name="target-head-q8_0"))
    assert made.kept.name == "target-head-q8_0"
    assert [path.name for path in (tmp_path / "models").glob("*.gguf")] == ["target-head-q8_0.gguf"]
    assert made.kept.data[REJECTED] > 0 and made.kept.uses_own_texts


def test_a_part_of_the_training_is_the_mean_of_old_and_new_weights(target, tmp_path, monkeypatch):
    family = tiny_head(target)
    old, new = tmp_path / "old.gguf", tmp_path / "new.gguf"
    for path, seed in ((old, 0), (new, 1)):
        family.export(family.init(jax.random.key(seed)), path, "f32")
    parts = {"new": 1.5, "new-75%": 1.9, "new-50%": 1.97, "new-25%": 1.99}  # on built-in texts, of 2
    judged = []

    def judge(self, path):
        judged.append(path.stem)
        return GuardFigures((1.0, gain), (2.0, parts[path.stem]), 1, 1)

    gain = 1.2
    monkeypatch.setattr(Guard, "judge", judge)
    guard = Guard(ModelWeights(read_header(target)), guard_texts(OwnTexts(target, 60)), old)
    path, share, figures = guard.choose(new, "f32")
    assert (path, share, figures.passes) == (tmp_path / "new-50%.gguf", 0.5, True)
    before, after, mean = map(family.read, (old, new, path))
    for name, weights in mean.items():
        assert weights == pytest.approx((before[name] + after[name]) / 2, abs=1e-6), name
    parts["new-50%"] = parts["new-25%"] = 1.9
    assert guard.choose(new, "f32")[:2] == (new, 1.0), "none passes"
    gain = 1.0
    judged.clear()
    assert guard.choose(new, "f32")[:2] == (new, 1.0)
    assert judged == ["new"], "nothing is gained: no part is tried"


def test_after_a_part_the_next_training_goes_on_from_the_file_and_is_judged_by_the_first_head(
    learning, request_, jobs, tmp_path, monkeypatch
):
    installed = tmp_path / "models" / "target-head-q8_0.gguf"
    first = installed.read_bytes()
    lines = []

    def judge(self, path):
        of_first = 2.0 if "%" in path.stem else 1.5
        return GuardFigures((1.0, 1.2), (2.0, of_first), 1, 1)

    monkeypatch.setattr(Guard, "judge", judge)
    made = make(learning, StageContext(on_message=lines.append))
    assert made.share == 0.75 and made.kept.name == "target-head-q8_0"
    assert "75% of the training is taken: all of it would lose too much on built-in texts" in lines
    assert installed.read_bytes() != first
    (stored,) = find_stored()
    assert (stored.path / FIRST_HEAD).read_bytes() == first
    make(learning)
    assert jobs[-1].start == installed, "its weights are no training's"
    assert (stored.path / FIRST_HEAD).read_bytes() == first, "losses of many nights do not add up"
    monkeypatch.setattr(Guard, "judge", lambda *_: GuardFigures((1.0, 1.2), (2.0, 1.0), 1, 1))
    for asked in (learning, request_):  # kept against the guard, and made without it
        make(replace(asked, force=True, name=installed.stem))
        present = installed.read_bytes()
        make(learning)
        assert (stored.path / FIRST_HEAD).read_bytes() == present, "learning begins anew"


def test_the_guards_texts_deleted_is_one_line_and_nothing_is_replaced(learning, jobs, tmp_path):
    make(learning)
    n_jobs = len(jobs)
    (stored,) = find_stored()
    assert delete_user_texts(stored) > 0
    RejectedPlaces(stored.target_sha256).path.unlink()
    places = RejectedPlaces(stored.target_sha256)
    kept_out = [n for n in range(60, 250) if not is_held_out(next(rejected_texts([rejected_text(n)])).key)]
    for number in kept_out[:45]:
        places.append(rejected_text(number))
    before = (tmp_path / "models" / "target-head-q8_0.gguf").read_bytes()
    with pytest.raises(EdgespecError, match=r"the current head is kept: .* yours are missing") as raised:
        make(replace(learning, data_tokens=2_000))
    assert "\n" not in str(raised.value)
    assert len(jobs) == n_jobs, "nor is anything trained"
    assert (tmp_path / "models" / "target-head-q8_0.gguf").read_bytes() == before


def test_what_the_user_writes_after_a_night_without_texts_to_judge_by_is_learnt(
    request_, speeds, jobs, tiny_path
):
    make(replace(request_, force=True))
    places = RejectedPlaces(hash_file(tiny_path))
    keys = {number: next(rejected_texts([rejected_text(number)])).key for number in range(5, 250)}
    for number in [number for number in keys if not is_held_out(keys[number])][:45]:
        places.append(rejected_text(number))
    learning = replace(request_, from_history=True, data_tokens=None)
    for _night in range(2):
        with pytest.raises(EdgespecError, match="yours are missing"):
            make(learning)
    for number in [number for number in keys if is_held_out(keys[number])][:2]:
        places.append(rejected_text(number))
    n_jobs = len(jobs)
    assert make(learning).guard is not None
    assert len(jobs) == n_jobs + 1
    assert make(learning) is None, "no mistake is new"
    assert make(replace(learning, hours=2.0)), "but as often as is asked"
    places.append(rejected_text(250))
    assert make(replace(learning, hours=2.0))
    assert len(jobs) == n_jobs + 3
