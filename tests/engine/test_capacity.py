"""How many texts at once pay, and how many tokens the caches hold: decided from costs and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec import Engine
from edgespec.drafting.profile import N_MAX, guessed_curve
from edgespec.engine.capacity import (
    KEPT,
    USUAL_CELLS,
    choose_capacity,
    expected_capacity,
    kept_sequences,
    room_without_limit,
    texts_that_pay,
)
from edgespec.engine.options import EngineOptions
from edgespec.errors import EdgespecError
from edgespec.llama.gguf_header import check_model_file
from edgespec.models.footprint import (
    DRAFT_MARKS,
    cell_bytes,
    fits_in_memory,
    required_bytes,
    states_bytes,
    target_rollback,
    weight_bytes,
)

GIB = 1 << 30
FREE = EngineOptions(parallel=None)
SHARED = [0.0, *(1.0 + 0.15 * n for n in range(N_MAX))]
"""T(n) where a further token costs 0.15 of the first."""


@pytest.fixture(scope="module")
def target(tiny_path):
    """Figures of the default target, of which no file is needed."""
    header = check_model_file(tiny_path)
    return replace(
        header, n_layer=28, n_head_kv=(2,) * 28, head_dim_k=128, head_dim_v=128, n_ctx_train=32768, n_head=12
    )


@pytest.fixture(scope="module")
def draft(target):
    return replace(target, n_layer=24, n_head_kv=(2,) * 24, head_dim_k=64, head_dim_v=64)


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        (SHARED, 16),
        (guessed_curve(1 << 30, own_kernels=True).at(128), 16),
        ([0.0, *(float(n) for n in range(1, N_MAX + 1))], 1),  # nothing is shared
        ([0.0, *(1.0 + 1.0 * max(0, n - 4) for n in range(1, N_MAX + 1))], 4),  # free up to 4, then as alone
        ([0.0, 1.0, 1.98, *(1.5 + 0.01 * n for n in range(3, N_MAX + 1))], 16),  # a bump is no end
    ],
)
def test_texts_pay_as_long_as_more_of_them_write_more(costs, expected):
    assert texts_that_pay(costs) == expected
    assert texts_that_pay([7.0 * cost for cost in costs]) == expected, "the unit does not matter"


def test_much_memory_holds_one_full_text_or_a_thousand_tokens_of_each(target, draft):
    held = choose_capacity(SHARED, target, draft, FREE, 64 * GIB)
    assert (held.parallel, held.n_cells) == (16, 32768)
    assert held.n_bytes == 32768 * 28672 + 16 * 1024 * 12288
    assert str(held) == "16 texts at once, 32,768 tokens of cache, 1,141 MB"
    short = choose_capacity(SHARED, replace(target, n_ctx_train=2048), draft, FREE, 64 * GIB)
    assert short.n_cells == 16 * USUAL_CELLS
    assert choose_capacity(SHARED, target, draft, FREE, None) == held, "unknown memory is no limit"


@pytest.mark.parametrize("available", [GIB // 4, GIB // 2, GIB, 2 * GIB, 3 * GIB, 4 * GIB, 8 * GIB])
@pytest.mark.parametrize("kept_bytes", [0, 256 << 20])
def test_caches_take_at_most_a_quarter_of_the_memory(target, draft, available, kept_bytes):
    held = choose_capacity(SHARED, target, draft, replace(FREE, prefix_cache=kept_bytes), available)
    if held.parallel > 1:
        assert held.n_cells >= held.parallel * USUAL_CELLS
        assert held.n_bytes <= available // 4
    else:
        assert held.n_cells is None, "one text, whose cache grows with it"


def test_little_memory_holds_fewer_texts(target, draft):
    available = (32768, GIB // 4, GIB, 2 * GIB, 4 * GIB)
    found = [choose_capacity(SHARED, target, draft, FREE, n).parallel for n in available]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (1, 16)


def test_what_is_asked_for_is_given(target, draft):
    little = GIB // 4
    assert choose_capacity(SHARED, target, draft, EngineOptions(parallel=1), 64 * GIB).n_cells is None
    four = choose_capacity(SHARED, target, draft, EngineOptions(parallel=4), little)
    assert (four.parallel, four.n_cells) == (4, 4 * USUAL_CELLS)
    long = choose_capacity(SHARED, target, draft, EngineOptions(parallel=2, n_ctx=9000), little)
    assert (long.parallel, long.n_cells) == (2, 9000)
    assert (
        choose_capacity(SHARED, target, draft, EngineOptions(parallel=2, n_cells=512), little).n_cells == 512
    )


def test_what_is_kept_has_cells_beside_those_of_the_texts(target, draft):
    kept = 256 << 20
    held = choose_capacity(SHARED, target, draft, replace(FREE, prefix_cache=kept), 64 * GIB)
    assert held.n_cells == 32768 + int(0.75 * kept) // cell_bytes(target) // 256 * 256


def test_an_engine_has_the_capacity_that_it_says(tiny_path, tiny_draft_path):
    with Engine(tiny_path, tiny_draft_path, profile=False, parallel=None) as engine:
        held = engine.capacity
        assert (engine.parallel, held.n_cells) == (held.parallel, held.parallel * USUAL_CELLS)
        streams = [engine.stream([1, 2, 3], n_predict=4) for _ in range(held.parallel)]
        assert not engine.has_room(3, 4)
        for stream in streams:
            list(stream)
        assert engine.has_room(3, 4)
        expected = expected_capacity(
            engine.target.header,
            engine.draft.header,
            FREE,
            kernels="stock",
            n_threads=1,
            available=64 * GIB,
        )
        assert (expected.parallel, expected.n_cells) == (held.parallel, held.n_cells)


def test_a_prompt_not_read_yet_takes_its_room(tiny_path):
    with Engine(tiny_path, drafter="none", profile=False, parallel=4, n_cells=512) as engine:
        assert engine.has_room(300, 10)
        engine.stream([5] * 300, n_predict=10)
        assert not engine.has_room(300, 10)
        assert engine.has_room(100, 10)


# ---- models that keep a state ----

MB = 1_000_000


@pytest.fixture(scope="module")
def hybrid(target):
    """Like Qwen3.5-4B: a quarter of the layers attend, and a state of 20 MB."""
    heads = tuple(2 if i % 4 == 3 else 0 for i in range(24))
    return replace(
        target,
        architecture="qwen35",
        n_layer=24,
        n_head_kv=heads,
        head_dim_k=256,
        head_dim_v=256,
        state_bytes=20 * MB,
        file_bytes=2600 * MB,
    )


def test_one_text_has_snapshots_and_several_have_a_mark_and_a_kept_one(hybrid):
    alone = choose_capacity(SHARED, hybrid, None, EngineOptions(), 64 * GIB)
    assert alone.n_bytes == hybrid.n_ctx_train * cell_bytes(hybrid) + 9 * 20 * MB
    held = choose_capacity(SHARED, hybrid, None, FREE, 64 * GIB)
    assert held.parallel == 16
    assert held.n_bytes == held.n_cells * cell_bytes(hybrid) + 16 * 3 * 20 * MB
    little = choose_capacity(SHARED, hybrid, None, FREE, 2 * GIB + weight_bytes(hybrid))
    assert 1 < little.parallel < 8
    assert little.n_bytes <= GIB / 2


def test_a_draft_model_that_keeps_a_state_has_marks(target, hybrid):
    without = choose_capacity(SHARED, target, None, EngineOptions(), 64 * GIB)
    held = choose_capacity(SHARED, target, hybrid, EngineOptions(), 64 * GIB)
    assert held.n_bytes - without.n_bytes == 2 * (1024 * cell_bytes(hybrid) + (1 + DRAFT_MARKS) * 20 * MB)


def test_a_model_without_attention_needs_no_cells(hybrid):
    recurrent = replace(hybrid, n_head_kv=(0,) * 24)
    held = choose_capacity(SHARED, recurrent, None, replace(FREE, prefix_cache=256 * MB), 64 * GIB)
    assert (held.parallel, held.n_bytes - held.n_cells) == (16, 16 * 3 * 20 * MB)


@pytest.mark.parametrize(
    ("file_bytes", "state_bytes", "expected"),
    [(700 * MB, 0.16 * MB, 32), (1300 * MB, 20 * MB, 0), (2600 * MB, 20 * MB, 8), (4000 * MB, 20 * MB, 12)],
)
def test_a_draft_may_be_longer_where_states_are_small_and_large_ones_have_no_snapshots(
    hybrid, file_bytes, state_bytes, expected
):
    one = replace(hybrid, file_bytes=int(file_bytes), state_bytes=int(state_bytes))
    assert target_rollback(one).n_snapshots == expected
    for without in (
        target_rollback(one, parallel=2),
        target_rollback(one, drafts=False),
        target_rollback(replace(one, architecture="mamba2")),
    ):
        assert (without.n_snapshots, without.n_marks) == (0, 1)


def test_kept_timelines_are_few_where_each_has_a_state(target, hybrid):
    size = target_rollback(hybrid)
    assert kept_sequences(target, 1, 0, target_rollback(target)) == 0
    assert kept_sequences(target, 1, 256 * MB, target_rollback(target)) == KEPT
    assert kept_sequences(hybrid, 1, 256 * MB, size) == 1
    assert kept_sequences(hybrid, 4, 0, target_rollback(hybrid, parallel=4)) == 4
    assert kept_sequences(hybrid, 1, 10_000 * MB, size) == KEPT


def test_states_are_in_what_has_to_fit(hybrid, tmp_path):
    states = states_bytes(hybrid, target_rollback(hybrid))
    assert states == 9 * 20 * MB
    assert required_bytes(hybrid, 2048) - required_bytes(replace(hybrid, state_bytes=0), 2048) == states
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 3500000 kB\nMemAvailable: 2800000 kB\n")
    fits_in_memory([(replace(hybrid, state_bytes=0), 512)], tmp_path)
    with pytest.raises(EdgespecError, match=r"for 512 tokens of context and 0\.17 GiB for states"):
        fits_in_memory([(hybrid, 512)], tmp_path)
    with pytest.raises(EdgespecError, match="not enough memory"):
        fits_in_memory([(hybrid, 512)], tmp_path, weights_loaded=True, more_states=3000 * MB)


def test_an_answer_without_a_limit_has_room_that_costs_little(target):
    """4,096 tokens, but no more than half a GiB of them, and no more than fit."""
    assert room_without_limit(target, 10) == 4096
    wide = replace(target, n_layer=80, n_head_kv=(64,) * 80)
    assert cell_bytes(wide) * 4096 > 8 << 30
    assert room_without_limit(wide, 10) == 256
    assert (
        (1 << 28)
        < room_without_limit(replace(wide, n_head_kv=(8,) * 80), 10) * cell_bytes(wide) // 8
        <= 1 << 29
    )
