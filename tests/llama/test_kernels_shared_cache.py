"""Many sequences in one cache, with edgespec's kernels: each has the bits that it has alone in a new one."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from edgespec.llama import kernels as kernels_room
from edgespec.llama.quantize import quantize
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from shared_cache import Entry, SharedCache
from tiny_architectures import ARCHITECTURES, write_architecture
from tree_shapes import paths, random_shape

pytestmark = pytest.mark.proof

N_CELLS = 1024
N_TEXTS = 5
N_BRANCHES = 6
N_SEQUENCES = N_TEXTS * (1 + N_BRANCHES)
N_BATCH = 128
LONGEST = 330
N_VOCAB = 256
WINDOW = 64
"""Tokens that Gemma's attention looks back on."""

ISAS = ("avx512-bf16", "avx512-vnni", "avx-vnni", "avx2", "neon-i8mm", "neon-dotprod", "neon")


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """Return the path of an architecture's model in Q4_0, made on first use."""
    directory = tmp_path_factory.mktemp("quantized")

    def path(name: str) -> Path:
        target = directory / f"{name}-q4_0.gguf"
        if not target.exists():
            quantize(write_architecture(directory, name, N_CELLS), target, "q4_0")
        return target

    return path


@pytest.fixture(params=ISAS)
def isa(request, kernels):
    """Models loaded in the test are run with these instructions."""
    library = ctypes.CDLL(str(kernels_room.plugin_path()))
    library.es_kernels_isa.restype = ctypes.c_char_p
    before = library.es_kernels_isa()
    if library.es_kernels_set_isa(request.param.encode()) != 0:
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    library.es_kernels_set_isa(before)


class Alone:
    """The logits of texts, each computed alone in a new cache."""

    def __init__(self, session):
        self._session = session

    def rows(self, tokens, n):
        """Those after each of the last n of the tokens."""
        self._session.clear()
        return self._session.eval(list(map(int, tokens)), n_logits=n).copy()


def alone(model):
    return Session(model, n_ctx=N_CELLS, n_threads=2, n_batch=512, n_logits_max=LONGEST)


class Text:
    """A text that a sequence of a shared cache reads, and what it is to get."""

    def __init__(self, sequence, tokens, reference):
        self.sequence = sequence
        self.tokens = tokens
        self.n_past = 0
        self.expected = reference.rows(tokens, len(tokens))

    def piece(self, n):
        """Its next n tokens, at the most, as entries of a batch; and the rows that they must get."""
        begin, end = self.n_past, min(self.n_past + n, len(self.tokens))
        self.n_past = end
        entries = [Entry(int(self.tokens[i]), i, (self.sequence,)) for i in range(begin, end)]
        return entries, self.expected[begin:end]

    def tree(self, rng, reference):
        """Its next token and a tree of others after it; and the rows that they must get."""
        parents = random_shape(rng, int(rng.integers(1, 9)))
        nodes = rng.integers(0, N_VOCAB, len(parents))
        leaves = [node for node in range(len(parents)) if node not in parents]
        if len(leaves) > N_BRANCHES:
            return self.piece(1)
        branch = {leaf: N_TEXTS + self.sequence * N_BRANCHES + i for i, leaf in enumerate(leaves)}
        ways = paths(parents)
        below = [tuple(branch[leaf] for leaf in leaves if node in ways[leaf]) for node in range(len(parents))]
        entries = [Entry(int(self.tokens[self.n_past]), self.n_past, (self.sequence, *branch.values()))]
        expected = [self.expected[self.n_past]]
        before = self.tokens[: self.n_past + 1]
        for node, way in enumerate(ways):
            entries.append(Entry(int(nodes[node]), self.n_past + len(way), below[node]))
            expected.append(reference.rows([*before, *nodes[way]], 1)[0])
        return entries, np.array(expected)


class Household:
    """Texts that come, go, are cut back and share beginnings, in one cache."""

    def __init__(self, model, reference, rng, n_threads):
        self.reference, self.rng = reference, rng
        self.cache = SharedCache(
            model, n_cells=N_CELLS, n_sequences=N_SEQUENCES, n_threads=n_threads, n_batch=N_BATCH
        )
        self.texts = {}

    def arrive(self):
        """A new text, which may begin as another does."""
        free = [sequence for sequence in range(N_TEXTS) if sequence not in self.texts]
        room = N_CELLS - 2 * N_BATCH - sum(len(text.tokens) for text in self.texts.values())
        length = int(self.rng.choice([int(self.rng.integers(1, LONGEST)), 64, 65, 256, 257]))
        if not free or length > room:
            return
        tokens = self.rng.integers(0, N_VOCAB, length)
        begins_as = self.rng.choice([None, *self.texts.values()])
        n_shared = 0
        if begins_as and begins_as.n_past > 1 and length > 1:
            n_shared = int(self.rng.integers(1, min(begins_as.n_past + 1, length)))
            tokens[:n_shared] = begins_as.tokens[:n_shared]
        text = Text(int(self.rng.choice(free)), tokens, self.reference)
        if n_shared and self.cache.can_end(begins_as.sequence, n_shared, WINDOW):
            self.cache.share(begins_as.sequence, text.sequence, n_shared)
            text.n_past = n_shared
        self.texts[text.sequence] = text

    def change(self):
        """Some leave, some are cut back: others' tokens will get their cells."""
        for text in list(self.texts.values()):
            if text.n_past == len(text.tokens) or self.rng.random() < 0.08:
                self.cache.cut(text.sequence)
                del self.texts[text.sequence]
            elif text.n_past > 1 and self.rng.random() < 0.15:
                n_keep = int(self.rng.integers(1, text.n_past))
                if self.cache.can_end(text.sequence, n_keep, WINDOW):
                    text.n_past = n_keep
                    self.cache.cut(text.sequence, n_keep)

    def step(self):
        """A pass over the next token, a piece or a tree of each text; what it gave, and was to give."""
        entries, expected, branched = [], [], []
        for text in self.rng.permutation(list(self.texts.values())):
            kind = self.rng.choice(["one", "piece", "tree", "nothing"], p=[0.4, 0.3, 0.2, 0.1])
            left = N_BATCH - len(entries)
            if kind == "nothing" or left < 10:
                continue
            if kind == "tree":
                for i in range(N_BRANCHES):
                    branch = N_TEXTS + text.sequence * N_BRANCHES + i
                    self.cache.share(text.sequence, branch, text.n_past)
                    branched.append(branch)
                n_past = text.n_past
                more, rows = text.tree(self.rng, self.reference)
                text.n_past = n_past + 1
            else:
                more, rows = text.piece(1 if kind == "one" else min(left, int(self.rng.integers(2, 60))))
            entries += more
            expected.append(rows)
        if not entries:
            return np.zeros(0), np.zeros(0)
        rows = self.cache.decode(entries)
        for branch in branched:
            self.cache.cut(branch)
        return rows, np.concatenate(expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("n_threads", [1, 2])
def test_texts_that_come_and_go(isa, quantized, architecture, n_threads):
    """Prompts in pieces, single tokens and trees beside each other, shared beginnings, cells used again."""
    rng = np.random.default_rng(12 + n_threads)
    n_rows = n_beside = 0
    with Model(quantized(architecture)) as model, alone(model) as session:
        assert model.uses_kernels
        house = Household(model, Alone(session), rng, n_threads)
        with house.cache:
            for step in range(40):
                house.change()
                for _ in range(2):
                    house.arrive()
                rows, expected = house.step()
                np.testing.assert_array_equal(rows, expected, f"{step=}")
                n_rows += len(rows)
                n_beside += len(house.texts) > 1
    assert n_rows > 500
    assert n_beside > 20


@pytest.mark.parametrize("n_past", [1, 63, 64, 65, 255, 256, 257])
def test_single_tokens_of_texts_whose_cells_alternate(kernels, quantized, n_past):
    """One of each text in turn: no two neighbours of a text are neighbours in the cache."""
    rng = np.random.default_rng(n_past)
    for architecture in ARCHITECTURES:
        with Model(quantized(architecture)) as model, alone(model) as session:
            texts = [Text(i, rng.integers(0, N_VOCAB, n_past + 3), Alone(session)) for i in range(3)]
            with SharedCache(model, n_cells=N_CELLS, n_sequences=3, n_threads=2, n_batch=8) as cache:
                for _ in range(n_past + 3):
                    entries, expected = zip(*(text.piece(1) for text in texts), strict=True)
                    rows = cache.decode([entry for part in entries for entry in part])
                    np.testing.assert_array_equal(rows, np.concatenate(expected))


def test_later_tokens_in_lower_cells(kernels, quantized):
    """What another text has freed is below: the order of cells is not that of positions."""
    rng = np.random.default_rng(2)
    with Model(quantized("qwen2")) as model, alone(model) as session:
        for n_first in (30, 64, 100):
            first = Text(0, rng.integers(0, N_VOCAB, n_first), Alone(session))
            second = Text(1, rng.integers(0, N_VOCAB, 300), Alone(session))
            with SharedCache(model, n_cells=512, n_sequences=2, n_threads=2, n_batch=256) as cache:
                cache.decode(first.piece(n_first)[0])
                cache.decode(second.piece(70)[0])
                cache.cut(0)
                for n in (1, 90, 1, 138):
                    entries, expected = second.piece(n)
                    np.testing.assert_array_equal(cache.decode(entries), expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_restored_state_has_the_bits_of_a_read_one(kernels, quantized, architecture):
    """Also where the kernels knew other positions in its cells, and where it lies among others."""
    rng = np.random.default_rng(3)
    with Model(quantized(architecture)) as model, alone(model) as session:
        other = Text(0, rng.integers(0, N_VOCAB, 300), Alone(session))
        text = Text(1, rng.integers(0, N_VOCAB, 200), Alone(session))
        options = {"n_cells": 512, "n_sequences": 2, "n_threads": 2, "n_batch": 256}
        with SharedCache(model, **options) as cache, SharedCache(model, **options) as source:
            source.decode(text.piece(100)[0])
            state = source.state(1)
            # The same positions in the same 100 cells, in another order.
            text.n_past = 0
            cache.decode(other.piece(40)[0])
            cache.decode(text.piece(60)[0])
            cache.cut(0)
            cache.decode(text.piece(40)[0])
            cache.cut(1)
            other.n_past = 0
            for n_other in (1, 99):
                cache.restore(1, state)
                text.n_past = 100
                for n in (1, 30, 69):
                    more, beside = text.piece(n), other.piece(n_other)
                    rows = cache.decode([*more[0], *beside[0]])
                    np.testing.assert_array_equal(rows, np.concatenate([more[1], beside[1]]))
                cache.cut(1)
