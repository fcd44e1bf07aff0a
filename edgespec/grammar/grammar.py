"""A grammar over a model's vocabulary, run by llama.cpp's grammar engine (docs/structured.md).

A token goes to the engine's `accept` only after `judge` allowed it: a forbidden one would end the process.
"""

from __future__ import annotations

import ctypes
import weakref

import numpy as np

from edgespec.errors import UsageError
from edgespec.grammar.constraint import Bools, Constraint, Ids
from edgespec.grammar.grammar_check import check_grammar
from edgespec.grammar.json_schema import Schema, schema_to_gbnf
from edgespec.grammar.spelling import Spelling
from edgespec.llama import backend
from edgespec.llama.backend import llama
from edgespec.llama.weights import Model
from edgespec.sampling import SamplingParams

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data


class _Candidates(ctypes.Structure):
    """A llama_token_data_array."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("selected", ctypes.c_int64),
        ("sorted", ctypes.c_bool),
    )


_apply = backend.foreign_function("llama_sampler_apply", None, ctypes.c_void_p, ctypes.c_void_p)
_accept = backend.foreign_function("llama_sampler_accept", None, ctypes.c_void_p, ctypes.c_int32)
_clone = backend.foreign_function("llama_sampler_clone", ctypes.c_void_p, ctypes.c_void_p)
_free = backend.foreign_function("llama_sampler_free", None, ctypes.c_void_p)


class LibraryState:
    """A State that llama.cpp holds; freed with this object."""

    def __init__(self, handle: int, model: Model, spelling: Spelling, tail: bytes = b"") -> None:
        """Own `handle`, a grammar's llama_sampler. `tail`: bytes of an unfinished character before it."""
        self._handle, self._model, self._spelling, self._tail = handle, model, spelling, tail
        weakref.finalize(self, _free_state, handle, model)

    def judge(self, ids: Ids) -> Bools:
        """Return for each token whether it may come next: allowed visible text, or an allowed end."""
        candidates = np.zeros(len(ids), _CANDIDATE)
        candidates["id"] = ids
        array = _Candidates(candidates.ctypes.data, len(ids), -1, False)
        _apply(self._handle, ctypes.addressof(array))
        allowed: Bools = candidates["logit"] == 0.0
        return self._spelling.only_text(ids, allowed, self._tail)

    def accept(self, token: int) -> None:
        """Move on by `token`, which must be allowed and no end-of-generation token."""
        _accept(self._handle, token)
        self._tail = self._spelling.tail_after(self._tail, token)

    def copy(self) -> LibraryState:
        """Return an independent copy."""
        return LibraryState(_clone(self._handle), self._model, self._spelling, self._tail)


def _free_state(handle: int, _model: Model) -> None:
    _free(handle)


class Grammar:
    """A grammar over a model's vocabulary. Immutable: any number of generations can use it."""

    def __init__(self, model: Model, text: str, *, name: str = "grammar") -> None:
        """Compile `text`, in llama.cpp's GBNF; the text must match the rule "root".

        Raises UsageError, whose field is `name`, if llama.cpp cannot compile it.
        """
        check_grammar(text, name)
        self.text = text
        self.name = name
        self.ignored: tuple[str, ...] = ()
        """Keywords of the JSON schema that the grammar does not enforce."""
        self.model = model
        self._spelling = Spelling.of(model)
        vocab = llama.llama_model_get_vocab(model.handle)
        made = backend.create(
            lambda _: llama.llama_sampler_init_grammar(vocab, text.encode(), b"root"),
            llama.llama_sampler_free,
        )
        if not made:
            raise UsageError(backend.failure_reason(), field=name)
        handle = ctypes.cast(made, ctypes.c_void_p).value or 0
        self._start = LibraryState(handle, model, self._spelling)

    @classmethod
    def from_json_schema(cls, model: Model, schema: str | Schema, *, name: str = "json_schema") -> Grammar:
        """Return the grammar of the JSON values that `schema` describes; see `ignored`.

        Raises UsageError, whose field is `name`, if it cannot be converted.
        """
        try:
            converted = schema_to_gbnf(schema)
        except UsageError as error:
            raise UsageError(str(error), field=name) from None
        grammar = cls(model, converted.text, name=name)
        grammar.ignored = converted.ignored
        return grammar

    @classmethod
    def any_json(cls, model: Model) -> Grammar:
        """Return the grammar of all JSON objects."""
        return cls.from_json_schema(model, {"type": "object"})

    def begin(self, params: SamplingParams | None = None) -> Constraint:
        """Return the Constraint of one generation, which samples with `params`.

        Raises EdgespecError if the model is closed.
        """
        _ = self.model.handle  # raises if the model is closed
        return Constraint(
            self._start.copy(),
            params or SamplingParams(),
            self.model.n_vocab,
            is_eog=self.model.is_eog,
            spelling=self._spelling,
            name=self.name,
        )
