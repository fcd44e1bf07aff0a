"""Calibrations: curves of made-up signals, the choice on them, and the file they are kept in."""

from __future__ import annotations

import math
import random

import pytest
from msgspec.structs import replace

from edgespec import Engine
from edgespec.apps.bench.measure import read_answers
from edgespec.apps.bench.teacher import (
    ALWAYS,
    NEVER,
    TeacherForcing,
    TeacherScores,
    choose,
    curve,
    point,
    ratio_error,
    simulate,
)
from edgespec.decoding.options import WakePolicy
from edgespec.engine.cascade import (
    ThresholdChoice,
    ThresholdPoint,
    calibrated,
    calibration_path,
    check_storable,
    load_calibration,
    signal_of,
    store_calibration,
)
from edgespec.errors import UsageError
from edgespec.llama.gguf_header import check_model_file
from edgespec.llama.session import Session
from tiny_gguf import write_tiny_gguf

# ---- walking along an answer ----


def marks(margins, wrong=(), kl=0.5):
    return TeacherScores(
        margin=list(margins),
        entropy=[1.0 - value for value in margins],
        agrees=[i not in wrong for i in range(len(margins))],
        best=[True] * len(margins),
        kl=[kl] * len(margins),
    )


ANSWER = marks([0.9, 0.2, 0.1, 0.9, 0.3, 0.9], wrong={1, 4})


@pytest.mark.parametrize(
    ("wake_policy", "expected"),
    [
        (WakePolicy("margin", 0.0, span=2), (2, 0, 3.0)),
        (WakePolicy("margin", 1.0, span=2), (0, 6, 0.0)),
        (WakePolicy("margin", 0.2, span=1), (1, 2, 2.0)),
        (WakePolicy("margin", 0.2, span=2), (1, 2, 2.0)),
        (WakePolicy("margin", 0.3, span=2), (0, 4, 1.0)),
        (WakePolicy("margin", 0.2, span="rest"), (0, 5, 0.5)),
        (WakePolicy("entropy", 0.7, span=2), (0, 4, 1.0)),
        (WakePolicy("margin", 0.3, span=100), (0, 5, 0.5)),
    ],
    ids=str,
)
def test_a_cascade_along_an_answer(wake_policy, expected):
    assert simulate(ANSWER, wake_policy) == expected


def test_a_point_is_of_all_tokens_of_all_prompts():
    texts = [ANSWER, marks([0.9] * 4, wrong={0})]
    found = point(texts, WakePolicy("margin", 0.2, span=1))
    assert (found.loss, found.target_share, found.kl) == (0.2, 0.2, 0.4)
    assert found.error == ratio_error([1, 1], [6, 4])


def test_the_error_is_over_prompts():
    assert ratio_error([3], [10]) == 0.0
    assert ratio_error([1, 1, 1], [10, 10, 10]) == 0.0, "all prompts alike"
    # Alike in length it is the standard error of the mean of the prompts' own shares.
    shares = [0.0, 0.2, 0.1, 0.5]
    mean = sum(shares) / 4
    error = math.sqrt(sum((share - mean) ** 2 for share in shares) / 3 / 4)
    assert ratio_error([10 * share for share in shares], [10] * 4) == pytest.approx(error)


# ---- the curve, and the choice ----


def toy_texts(n=30, length=60, seed=1):
    """The small model is wrong as often as its margin says: half of it is missing to 1."""
    coin = random.Random(seed)
    texts = []
    for _ in range(n):
        margins = [coin.random() ** 0.3 for _ in range(length)]
        wrong = {i for i, margin in enumerate(margins) if coin.random() > (1 + margin) / 2}
        texts.append(marks(margins, wrong))
    return texts


@pytest.mark.parametrize("signal", ["margin", "entropy"])
@pytest.mark.parametrize("span", [1, 16, "rest"])
def test_a_curve_goes_from_the_small_model_to_the_target(signal, span):
    texts = toy_texts()
    points = curve(texts, signal, span)
    n = sum(len(one.agrees) for one in texts)
    n_wrong = sum(not agrees for one in texts for agrees in one.agrees)
    assert (points[0].threshold, points[0].target_share, points[0].loss) == (NEVER[signal], 0.0, n_wrong / n)
    assert (points[-1].threshold, points[-1].target_share, points[-1].loss) == (ALWAYS[signal], 1.0, 0.0)
    assert len(points) > 20
    thresholds = [one.threshold for one in points]
    assert thresholds == sorted(thresholds, reverse=signal == "entropy")
    if span in (1, "rest"):  # where a later wake can not come from an earlier one
        shares = [one.target_share for one in points]
        assert shares == sorted(shares)


@pytest.mark.parametrize("signal", ["margin", "entropy"])
def test_what_is_chosen_keeps_the_loss_with_the_fewest_tokens(signal):
    texts = toy_texts()
    points = curve(texts, signal, 4)
    best = choose(points, 0.03)
    assert best.loss + best.error <= 0.03
    assert 0.0 < best.target_share < 1.0
    assert all(one.target_share >= best.target_share for one in points if one.loss + one.error <= 0.03)
    fresh = point(toy_texts(n=200, seed=2), WakePolicy(signal, best.threshold, 4))
    assert fresh.loss <= 0.03, "it holds for other prompts of the kind"
    assert point(texts, WakePolicy(signal, best.threshold, 4)) == best


def test_no_loss_is_nearly_the_target_alone_and_any_loss_the_small_model():
    points = curve(toy_texts(), "margin", 16)
    assert choose(points, 0.0).loss == 0.0
    assert choose(points, 0.0).target_share > 0.9
    assert choose(points, 0.99) == points[0]


def test_the_standard_error_counts_as_lost():
    points = [
        ThresholdPoint(0.0, 0.10, 0.0, 0.0),
        ThresholdPoint(0.4, 0.015, 0.01, 0.2),
        ThresholdPoint(0.5, 0.012, 0.005, 0.3),
        ThresholdPoint(1.0, 0.0, 0.0, 1.0),
    ]
    assert choose(points, 0.02).threshold == 0.5


# ---- the file ----


@pytest.fixture
def headers(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = [
        write_tiny_gguf(tmp_path / f"{name}.gguf", seed=seed) for seed, name in enumerate(("big", "small"))
    ]
    return tuple(check_model_file(file) for file in files)


CHOICE = ThresholdChoice(
    "margin",
    16,
    0.02,
    ThresholdPoint(0.4, 0.01, 0.002, 0.3, 0.05),
    (),
    "default",
    3,
    90,
    "2026-11-22",
)


def test_what_is_kept_is_what_a_cascade_is_told(headers):
    assert load_calibration(*headers).choices == {}
    file = store_calibration(*headers, [CHOICE])
    assert file == calibration_path(*headers)
    assert file.name.startswith("big+small-")
    assert calibrated(*headers, WakePolicy()) == WakePolicy("margin", 0.4, 16)
    rest = replace(CHOICE, span="rest", point=replace(CHOICE.point, threshold=0.1))
    store_calibration(*headers, [rest])
    assert calibrated(*headers, WakePolicy(span="rest")) == WakePolicy("margin", 0.1, "rest")
    assert calibrated(*headers, WakePolicy()).threshold == 0.4, "the other one is still there"
    assert sorted(path.name for path in file.parent.iterdir()) == [".lock", file.name]


@pytest.mark.parametrize(
    ("wake_policy", "words"),
    [
        (WakePolicy(), "signal margin and the span 16"),
        (WakePolicy("entropy"), "signal entropy and the span 16"),
        (WakePolicy(span=9), "signal margin and the span 9"),
        (WakePolicy(span="rest"), "signal margin and the span rest"),
    ],
    ids=str,
)
def test_without_a_calibration_it_says_what_to_run(headers, wake_policy, words):
    store_calibration(*headers, [replace(CHOICE, span=5)])
    with pytest.raises(UsageError, match=rf"{words}; run `edgespec calibrate`") as found:
        calibrated(*headers, wake_policy)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-20],
        lambda _text: "",
        lambda _text: "[]",
        lambda text: text.replace('"margin"', '"surprise"', 1),
        lambda text: text.replace('"threshold": 0.4', '"threshold": 4'),
        lambda text: text.replace('"format": 2', '"format": 1'),
        lambda text: text.replace('"target": "', '"target": "00'),
    ],
    ids=range(7),
)
def test_a_damaged_file_is_one_line_and_is_replaced(headers, damage):
    file = store_calibration(*headers, [CHOICE])
    file.write_text(damage(file.read_text()))
    with pytest.raises(UsageError, match="run `edgespec calibrate`") as found:
        calibrated(*headers, WakePolicy())
    assert "\n" not in str(found.value)
    assert file.with_name(f"{file.name}.set-aside").exists()
    assert load_calibration(*headers).choices == {}
    store_calibration(*headers, [CHOICE])
    assert calibrated(*headers, WakePolicy()).threshold == 0.4


def test_a_damaged_file_is_looked_at_only(headers):
    file = store_calibration(*headers, [CHOICE])
    file.write_text("damaged")
    check_storable(*headers)  # it would be set aside
    assert file.read_text() == "damaged"


# ---- with models ----


def test_marks_are_what_the_models_say_token_by_token(tiny_target, tiny_draft):
    prompt, answer = list(range(40, 52)), list(range(60, 95))
    with TeacherForcing(tiny_target, tiny_draft, n_ctx=100, n_threads=1) as teacher:
        found = teacher.scores(prompt, answer)
        assert teacher.scores(prompt, answer) == found, "it begins anew each time"
    rows = []
    for model in (tiny_target, tiny_draft):
        with Session(model, n_ctx=128, n_threads=1) as session:
            row = session.eval(prompt)[0].copy()
            own = [row]
            for token in answer[:-1]:
                own.append(session.eval([token])[0].copy())
            rows.append(own)
    assert found.best == [int(row.argmax()) == token for row, token in zip(rows[0], answer, strict=True)]
    assert found.agrees == [int(a.argmax()) == int(b.argmax()) for a, b in zip(*rows, strict=True)]
    for name in ("margin", "entropy"):
        assert getattr(found, name) == pytest.approx([signal_of(row, name) for row in rows[1]], abs=1e-4)
    assert all(value >= 0.0 for value in found.kl)
    with TeacherForcing(tiny_target, tiny_target, n_ctx=100, n_threads=1) as teacher:
        assert teacher.scores(prompt, answer).kl == [0.0] * len(answer)
    with TeacherForcing(tiny_target, None, n_ctx=100, n_threads=1) as teacher:
        assert teacher.scores(prompt, answer).best == found.best


def test_the_targets_own_answers_are_what_it_likes_best(tiny_path, tiny_draft_path):
    seen = []
    with Engine(tiny_path, tiny_draft_path, n_threads=1, kernels="off", profile=False) as engine:
        texts = read_answers(
            engine, ["abc", "the thing"], n_predict=24, on_progress=lambda *now: seen.append(now)
        )
    assert len(texts) == 2
    assert {len(one.kl) for one in texts} == {24}
    assert all(best for one in texts for best in one.best)
    assert seen[-1][1:] == (2, 2)
