"""Many texts at once: the runs, the figures made of them, and the curve."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from edgespec import Engine
from edgespec.apps.bench.bench import BenchLimits, BenchProgress, BenchSettings
from edgespec.apps.bench.clients import (
    Measured,
    Passes,
    answer,
    measure_clients,
    parse_clients,
    prompts_for,
)
from edgespec.apps.bench.report import write_png, write_report
from edgespec.apps.bench.rows import document, read_outcome, sentences, write_csv
from edgespec.apps.bench.runs import BenchmarkOutcome, Cell, PassTime, Throughput
from edgespec.apps.bench.summary import curves, summarise_throughput
from edgespec.apps.bench.variants import PLAIN_VARIANT, parse_variants
from edgespec.errors import EdgespecError, UsageError
from edgespec.models.suites import Prompt
from tiny_gguf import write_tiny_gguf

PROMPTS = [Prompt(f"p{i}", "letters", f"the thing {i} and the") for i in range(4)]
SETTINGS = BenchSettings(parse_variants("suffix"), n_predict=6, clients=(1, 2, 4))


class Watched(Engine):
    """An engine that notes how many texts shared a pass."""

    most_at_once = 0

    def step(self) -> None:
        super().step()
        self.most_at_once = max(self.most_at_once, self.last_pass.n_requests)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    path = write_tiny_gguf(tmp_path_factory.mktemp("one") / "tiny.gguf", peak=0.7, chat_template=None)
    with Watched(path, drafter="suffix", parallel=4, n_threads=1, kernels="off", profile=False) as engine:
        yield engine


# ---- what is asked for ----


def test_numbers_of_clients() -> None:
    assert parse_clients(" 8,1, 16,") == (1, 8, 16)


@pytest.mark.parametrize("text", ["", ",", "0", "1,1", "257", "two", "1.5", "-1", "9" * 5000, "٣"])
def test_numbers_of_clients_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match=r"^clients") as found:
        parse_clients(text)
    assert "\n" not in str(found.value)


def test_each_text_needs_a_prompt_of_its_own() -> None:
    assert prompts_for(PROMPTS, (1, 3)) == PROMPTS[:3]
    with pytest.raises(UsageError, match="clients 5: only 4 prompts are there"):
        prompts_for(PROMPTS, (1, 5))


def test_variants_that_are_not_exact_are_refused() -> None:
    with pytest.raises(UsageError, match=r"variants cascade@0.4: is not exact"):
        BenchSettings(parse_variants("cascade@0.4"), clients=(1, 2))


# ---- the runs ----


@pytest.mark.parametrize("at_once", [1, 3, 4])
def test_texts_are_answered_so_many_at_a_time(engine: Watched, at_once: int) -> None:
    engine.most_at_once = 0
    found = answer(engine, PROMPTS, PLAIN_VARIANT, SETTINGS, at_once=at_once)
    assert engine.most_at_once == at_once
    assert (found.variant, found.at_once, found.round) == ("plain", at_once, 0)
    assert found.texts.keys() == {prompt.id for prompt in PROMPTS}
    assert len(found.ttft_s) == len(PROMPTS)
    assert 0 < found.tokens <= 6 * len(PROMPTS)
    assert max(found.ttft_s) <= found.total_s


def test_more_texts_than_there_is_room_for(engine: Watched) -> None:
    more = [*PROMPTS, Prompt("p4", "letters", "one more")]
    with pytest.raises(EdgespecError, match=r"^no room for 5 texts at once \(only 4 of such prompts"):
        answer(engine, more, PLAIN_VARIANT, SETTINGS, at_once=5)
    answer(engine, PROMPTS, PLAIN_VARIANT, SETTINGS, at_once=4)  # none of these was left running


def test_passes_over_several_tokens_are_timed(engine: Watched) -> None:
    with Passes(engine, PROMPTS, SETTINGS) as passes:
        found = passes.time(4, 2)
    assert (found.n, found.round) == (4, 2)
    assert found.seconds > 0


def measured(engine: Watched, limits: BenchLimits) -> tuple[list[Measured], list[BenchProgress], str]:
    found: list[Measured] = []
    shown: list[BenchProgress] = []
    ended = measure_clients(
        engine, PROMPTS, SETTINGS, limits=limits, on_measured=found.append, on_progress=shown.append
    )
    return found, shown, ended


def test_rounds_begin_with_other_numbers_and_variants(engine: Watched) -> None:
    found, shown, ended = measured(engine, BenchLimits(rounds=2))
    assert ended == "2 rounds"
    throughputs = [one for one in found if isinstance(one, Throughput)]
    assert [(one.round, one.at_once, one.variant) for one in throughputs] == [
        *((0, 1, "plain"), (0, 1, "suffix"), (0, 2, "suffix"), (0, 2, "plain")),
        *((0, 4, "plain"), (0, 4, "suffix"), (1, 2, "suffix"), (1, 2, "plain")),
        *((1, 4, "plain"), (1, 4, "suffix"), (1, 1, "suffix"), (1, 1, "plain")),
    ]
    passes = [(one.round, one.n) for one in found if isinstance(one, PassTime)]
    assert passes == [(0, 1), (0, 2), (0, 4), (1, 2), (1, 4), (1, 1)]
    assert [one.done for one in shown] == [1, 2, 3, 4, 5, 6] * 2
    texts = [one.texts for one in throughputs if one.round == 0]
    assert all(one == texts[0] for one in texts)  # greedy: whatever drafts, and however many at once


def test_it_ends_when_the_budget_is_spent(engine: Watched) -> None:
    found, _, ended = measured(engine, BenchLimits(budget_s=1e-9))
    assert ended == "1 of 6 figures of round 1; the budget of 1e-09 s was spent"
    assert len(found) == 2


# ---- the figures ----


def throughput(variant: str, at_once: int, round_: int, tokens_per_s: float, text: str = "a") -> Throughput:
    ttft_s = tuple(0.1 * (i + 1) for i in range(at_once))
    return Throughput(variant, at_once, round_, 100, 100 / tokens_per_s, ttft_s, {"p": text})


CELL = Cell(
    "target",
    "draft",
    "avx2",
    throughput=(
        *(throughput("auto", 1, 0, 40.0), throughput("plain", 1, 0, 20.0)),
        *(throughput("plain", 4, 0, 60.0), throughput("auto", 4, 0, 90.0, "b")),
        *(throughput("plain", 1, 1, 30.0), throughput("auto", 1, 1, 45.0)),
        *(throughput("auto", 4, 1, 90.0), throughput("plain", 4, 1, 60.0)),
    ),
    passes=(PassTime(1, 0, 0.04), PassTime(4, 0, 0.05), PassTime(4, 1, 0.07)),
)


def test_figures_of_a_curve() -> None:
    points = summarise_throughput(CELL)
    assert [(point.at_once, point.variant) for point in points] == [
        *((1, "plain"), (1, "auto"), (4, "plain"), (4, "auto")),
    ]
    plain, auto, _, auto4 = points
    assert (plain.tokens_per_s, plain.low, plain.high) == (25.0, 20.0, 30.0)
    assert plain.gain is None
    assert plain.speedup is None
    assert auto.speedup is not None
    assert auto.speedup.median == 1.75  # of 2.0 and 1.5
    assert auto4.gain is not None
    assert auto4.gain.median == 2.125  # of 90 / 40 and 90 / 45
    assert auto4.limit == pytest.approx(4 / 0.06)
    assert (auto4.n_identical, auto4.n_compared) == (1, 2)
    assert auto4.longest_ttft_s == pytest.approx(0.4)
    assert summarise_throughput(Cell("target", None, "avx2")) == ()


def outcome(*cells: Cell) -> BenchmarkOutcome:
    return BenchmarkOutcome("bench", "2026-01-01T00:00:00", {}, {}, {}, {}, cells)


def test_an_outcome_with_a_curve_is_written_and_read(tmp_path: Path) -> None:
    whole = outcome(CELL)
    assert msgspec.json.decode(msgspec.json.encode(whole), type=BenchmarkOutcome) == whole
    found = json.loads(document(whole))
    assert [point["at_once"] for point in found["curves"][0]] == [1, 1, 4, 4]
    written = io.StringIO()
    write_csv(whole, written)
    rows = [*csv.DictReader(io.StringIO(written.getvalue()))]
    assert [(row["variant"], row["texts_at_once"]) for row in rows][-1] == ("auto", "4")
    assert float(rows[-1]["gain"]) == 2.125
    assert rows[0]["gain"] == ""


def test_sentences_about_a_curve() -> None:
    assert sentences(read_outcome(outcome(CELL))) == [
        "Most tokens a second: 90.0 of 4 texts at once, auto, 2.12 [too few] times one at a time.",
        "Outputs: 7 of 8 identical to plain decoding's with the fewest at once, token by token.",
    ]


def test_the_page_and_the_picture_show_the_curve(tmp_path: Path) -> None:
    other = Cell("other", None, "avx2", throughput=CELL.throughput)  # its passes were not timed
    for cells, n_charts in (((CELL,), 1), ((CELL, other), 2)):
        whole = outcome(*cells)
        assert len(curves(whole)) == n_charts
        write_report(whole, tmp_path / "page.html")
        page = (tmp_path / "page.html").read_text(encoding="utf-8")
        assert page.count("<svg") == n_charts
        assert page.count("n / T(n)") >= 2
        assert "texts at once" in page
        assert "Nothing ran" not in page
        assert "90.0 [90.0 - 90.0]" in page
    write_png(whole, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
