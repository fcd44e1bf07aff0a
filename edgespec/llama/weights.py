"""A loaded model: its weights, its tokenizer and its chat template. session.py evaluates it."""

from __future__ import annotations

import ctypes
import os
import re
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np

from edgespec._core import Interrupt
from edgespec.errors import EdgespecError, MessageFn, UsageError
from edgespec.llama import backend
from edgespec.llama.adapters import Adapters
from edgespec.llama.backend import llama
from edgespec.llama.chat_template import (
    AS_USUAL,
    ChatTemplate,
    ChatTemplates,
    Thinking,
    named_templates,
    read_chat_template,
)
from edgespec.llama.control_names import ControlNames, FimTokens, RenderedPrompt, fim_tokens
from edgespec.llama.gguf import TOKEN_TYPES, TOKENS
from edgespec.llama.gguf_header import GGUFHeader, check_model_file
from edgespec.llama.hidden_states import LAST_NORM, HiddenStates
from edgespec.llama.kernels import Plugin, WeightPacking, packing
from edgespec.llama.kernels import load as load_kernels
from edgespec.llama.packed_file import Condition, PackedFile, PackedTensor, WeightCheck, packed_file
from edgespec.llama.rpc import MOST_TOKENS, RemoteLayers
from edgespec.platform.closing import Closing
from edgespec.platform.machine import MappedPages
from edgespec.platform.processes import HomeProcess, finalize
from edgespec.platform.turns import IdleTime

_NO_TOKEN = -1
_LONGEST_TAIL = 20  # tokens of a sequence breaker after its first, as in llama.cpp
_MOST_BREAKERS = 8  # kept
_NEVER_BACK = {"deepseek4"}  # a cache of its own kind, whose parts of sequences the library does not copy
_LOAD_MODE_MMAP = 1
_DROP_EVERY = 64 << 20  # bytes loaded: little beside a model, but /proc/self/maps is read rarely

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # enum llama_token_type
_STRIPS_AFTER = 1 << 8  # enum llama_token_attr: white space after such a token is left out
_IN_BARS = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)
_LIKE_AN_END = re.compile(rb"<[!-;=?-~]{1,40}>")
_OTHER_ENDS = ("_<EOT>", "[EOT]", "[EOS]")

_TOKENIZERS = {1: "SPM", 2: "BPE", 3: "WPM", 4: "UGM", 5: "RWKV", 6: "PLaMo-2"}  # enum llama_vocab_type


class Model(Closing):
    """The weights and the tokenizer of one GGUF file, on the CPU. A context manager.

    `close` (or the garbage collector) frees first its open sessions, then the model.
    Token ids are ints in [0, n_vocab). Using a closed model raises EdgespecError.
    """

    remote: RemoteLayers | None = None
    """Its layers on nodes, or None."""
    takes_states = False
    """Whether its passes take hidden states as well as tokens."""
    takes_tokens_alone = False
    """Whether a pass is over the one or the other."""
    most_batch = 512
    """Most tokens that a pass should have."""
    hidden_states: HiddenStates = LAST_NORM
    """How its passes give hidden states."""
    is_mapped = False
    """Whether its packed weights are those of a file, in the page cache."""
    _with_nextn = False  # whether the head in its file is loaded too
    is_checked_later = False
    """Whether passes may be made before the check of mapped weights has ended: see `condition`."""
    _file: PackedFile | None = None
    _check: WeightCheck | None = None
    _keeping: Thread | None = None
    _idle: IdleTime

    def __init__(
        self,
        path: str | Path,
        *,
        repack: bool = True,
        check_tensors: bool = True,
        kernels: bool = True,
        vocab_only: bool = False,
        header: GGUFHeader | None = None,
        remote: RemoteLayers | None = None,
    ) -> None:
        """Load `path`; Ctrl-C stops the loading. Models are loaded one at a time.

        `repack` lets the library rearrange some quantized weights for its faster kernels: more memory and a
        longer load for faster decoding.
        `check_tensors` refuses blocks with impossible numbers (0.07 s for a cached 1.1 GB). `kernels`
        packs the weights for edgespec's kernels if they can be used (kernels.py); otherwise the model runs
        exactly as in llama.cpp. `vocab_only` loads the tokenizer but no weights. `header`: what
        `check_model_file` returned for this path, to save a second check. `remote`: layers that lie on
        nodes. Raises what `check_model_file` raises, and EdgespecError if the library cannot load the file.
        """
        self.path = Path(path)
        self.header = header or check_model_file(path)
        self.sessions: weakref.WeakSet[Closing] = weakref.WeakSet()
        self.adapters = Adapters()
        """Its LoRA adapters."""
        self._breakers: dict[tuple[str, ...], array[int]] = {}
        self._home = HomeProcess("the model")
        params = llama.llama_model_default_params()
        params.n_gpu_layers = 0
        params.load_mode = _LOAD_MODE_MMAP
        params.use_extra_bufts = repack
        params.check_tensors = check_tensors
        params.vocab_only = vocab_only
        params.load_mtp = self._with_nextn
        self._params = params
        self._packs = kernels and not vocab_only
        if remote:
            self.remote, self.most_batch = remote, MOST_TOKENS
            remote.place(params)
        self._open()
        self._read_facts(self._model)
        self._templates = self._read_templates(self._model)

    def _read_facts(self, model: llama.llama_model_p) -> None:
        """Ask the library for the facts of `model`."""
        self._vocab = llama.llama_model_get_vocab(model)

        self.n_vocab: int = llama.llama_vocab_n_tokens(self._vocab)
        self.n_embd: int = llama.llama_model_n_embd_out(model)
        """Elements of a hidden state after the last norm."""
        self.n_input: int = llama.llama_model_n_embd_inp(model)
        """Elements of a row that its passes take instead of a token, or with it."""
        self.n_state: int = self.n_embd
        """Elements of a hidden state as its passes give it."""
        self.n_ctx_train: int = llama.llama_model_n_ctx_train(model)
        self.n_params: int = llama.llama_model_n_params(model)
        self.size_bytes: int = llama.llama_model_size(model)
        self.description = _description(model)
        ftype = llama.llama_ftype_name(llama.llama_model_ftype(model))
        self.ftype = ftype.decode() if ftype else "unknown"
        self.tokenizer_type = _TOKENIZERS.get(llama.llama_vocab_type(self._vocab), "unknown")
        self.bos: int | None = _token_or_none(llama.llama_vocab_bos(self._vocab))
        self.eos: int | None = _token_or_none(llama.llama_vocab_eos(self._vocab))
        self.eot: int | None = _token_or_none(llama.llama_vocab_eot(self._vocab))
        self.add_bos: bool = llama.llama_vocab_get_add_bos(self._vocab)
        self.can_rewind = not (
            llama.llama_model_is_diffusion(model) or self.header.architecture in _NEVER_BACK
        )
        """Whether sequences can be rewound. If not, nothing drafts and each text has its own cache."""
        self.keeps_state = self.can_rewind and bool(
            llama.llama_model_is_recurrent(model) or llama.llama_model_is_hybrid(model)
        )
        """Whether it has a recurrent state, which every token changes (rollback.py)."""

    def _open(self) -> None:
        with packing(self._packs) as packed:
            self._file = None if self.remote else self._packed_file(packed)
            model = self._load_mapped(self._file, packed) if self._file else None
            self.is_mapped = model is not None
            if model is None:
                drop_pages = _page_dropper(self.path, self.header, packed)
                model = _load(self.path, self._params, drop_pages)
            self._finalizer = finalize(self, _free, model, self.remote)
            self.packed: tuple[PackedTensor, ...] = packed.tensors()
            """The weight matrices that edgespec's kernels multiply here."""
        self._model = model

    def _packed_file(self, packed: WeightPacking) -> PackedFile | None:
        kernels = load_kernels() if packed.on else None
        if not kernels or not kernels.self_test:
            return None
        part = "with the head" if self._with_nextn else ""
        return packed_file(self.header, kernels.name, kernels.self_test.build, part)

    def _load_mapped(self, file: PackedFile, packed: WeightPacking) -> llama.llama_model_p | None:
        """Load the model with packed weights from disk; None if they are missing or another model's."""
        with file.opened() as found:
            if found is None:
                return None
            with packed.mapping(found.file, found.offset, found.size):
                drop_pages = _page_dropper(self.path, self.header, packed)
                checks, self._params.check_tensors = self._params.check_tensors, False  # they were checked
                try:
                    model = _load(self.path, self._params, drop_pages)
                finally:
                    self._params.check_tensors = checks
            if packed.tensors() == found.tensors:
                self._check = WeightCheck(file, found, self._pack_anew)
                return model
        llama.llama_model_free(model)
        file.discard()
        packed.restart()
        return None

    def _pack_anew(self) -> None:
        """Overwrite the mapped weights with those of the model's file. Raises EdgespecError."""
        with packing(self._packs) as packed:
            fresh = _load(self.path, self._params, _page_dropper(self.path, self.header, packed))
            try:
                tensors = packed.tensors()
                if tensors != self.packed:
                    raise EdgespecError(
                        f"{self.path}: the weights changed while it was loaded; load it again"
                    )
                for old, new in zip(self.packed, tensors, strict=True):
                    ctypes.memmove(old.address, new.address, old.bytes)
            finally:
                llama.llama_model_free(fresh)

    def condition(self, *, wait: bool) -> Condition:
        """Return the known condition of mapped weights, or `wait` for it; other weights are "sound".

        "damaged": results computed with them are wrong. They have been packed again, and count as damaged
        until `accept_weights`.
        """
        return self._check.condition(wait=wait) if self._check else "sound"

    def accept_weights(self) -> str:
        """Accept weights that were damaged and packed again; return a line for the user.

        Raises EdgespecError if they could not be packed again.
        """
        return self._check.accept() if self._check else ""

    def keep_packed(
        self, interrupt: Interrupt | None, on_message: MessageFn, idle: IdleTime | None = None
    ) -> None:
        """Begin to store packed weights on disk for later starts, if there are none (packed_file.py).

        They are written in `idle` time. `close` ends the idle limit and waits for the writing, which
        `interrupt` can stop; `on_message` takes a line about it.
        """
        if self._file and not self.is_mapped:
            self._idle = idle or IdleTime()
            self._keeping = self._file.start_writing(self.packed, self, interrupt, on_message, self._idle)

    @property
    def name(self) -> str:
        """The model's name in the file, else the file's name."""
        return self.header.name or self.path.stem

    @property
    def uses_kernels(self) -> bool:
        """Whether edgespec's kernels multiply any of the weights."""
        return bool(self.packed)

    @property
    def plugin(self) -> Plugin | None:
        """The kernels of edgespec, if they multiply any of the weights."""
        return load_kernels().plugin if self.uses_kernels else None

    @property
    def leaves_last_states(self) -> bool:
        """Whether a pass returns the hidden states of tokens with logits at no extra cost (kernels.py)."""
        return self.uses_kernels and self.remote is None and self.hidden_states is LAST_NORM

    @property
    def handle(self) -> llama.llama_model_p:
        """llama.cpp's pointer to the model; valid until `close`."""
        self._require(self._finalizer)
        self._home.require()
        return self._model

    @property
    def uses_flash(self) -> bool:
        """Whether its caches are read by flash attention.

        Only this way do edgespec's kernels compute attention; llama.cpp's own is slower than without, but the
        only one that reads a quantized cache.
        """
        return self.uses_kernels or self.header.cache_type != "f16"

    def make_context(self, params: llama.llama_context_params) -> llama.llama_context_p | None:
        """Return the library's context with these parameters, which heads may change; None if it fails."""
        context: llama.llama_context_p | None = llama.llama_init_from_model(self.handle, params)
        return context

    @property
    def vocabulary(self) -> int:
        """The address of the library's vocabulary, for another library that tokenizes with it."""
        self._require(self._finalizer)
        return int(ctypes.cast(self._vocab, ctypes.c_void_p).value or 0)

    def _require(self, freed: weakref.finalize[..., Any]) -> None:
        if not freed.alive:
            raise EdgespecError(f"{self.path}: the model is closed")

    @property
    def tokenize_address(self) -> int:
        """The address of llama.cpp's function that tokenizes, for another library that calls it."""
        return backend.address_of("llama_tokenize")

    def is_eog(self, token: int) -> bool:
        """Whether `token` ends a generation (EOS, end of turn, ...)."""
        self._require(self._finalizer)
        return bool(llama.llama_vocab_is_eog(self._vocab, token))

    @cached_property
    def fim(self) -> FimTokens | None:
        """The tokens for filling in the middle of a text; None if the model was not trained for it."""
        self._require(self._finalizer)
        return fim_tokens(self._vocab)

    @cached_property
    def eog_tokens(self) -> tuple[int, ...]:
        """The tokens that end a generation."""
        return tuple(token for token in range(self.n_vocab) if self.is_eog(token))

    def is_control(self, token: int) -> bool:
        """Whether `token` is a control token, which has no text."""
        self._require(self._finalizer)
        return bool(llama.llama_vocab_is_control(self._vocab, token))

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return the token ids of `text`.

        `add_special` adds BOS/EOS if the model wants them; `parse_special` turns the names of control tokens
        in the text into these tokens. Raises UsageError if the text is not valid Unicode (a lone surrogate).
        """
        self._require(self._finalizer)
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"the text is not valid Unicode at character {error.start}") from error
        capacity = len(data) + 8  # a byte or more per token, except BOS, EOS and a prefix space
        while True:
            tokens = (ctypes.c_int32 * capacity)()
            n = llama.llama_tokenize(
                self._vocab, data, len(data), tokens, capacity, add_special, parse_special
            )
            if n >= 0:
                return tokens[:n]
            if -n <= capacity:
                raise EdgespecError(f"{self.path}: the tokenizer failed on a text of {len(data):,} bytes")
            capacity = -n

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Return the bytes of `token`, maybe part of a character; b"" for control tokens unless `special`."""
        self._require(self._finalizer)
        if not 0 <= token < self.n_vocab:
            raise ValueError(f"token {token} is not in [0, {self.n_vocab})")
        size = 256
        while True:
            buffer = ctypes.create_string_buffer(size)  # per call: several threads may call this
            n = llama.llama_token_to_piece(self._vocab, token, buffer, size, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def sequence_breakers(self, texts: tuple[str, ...]) -> array[int]:
        """Return the token sequences that contain one of `texts`, or begin it and are followed by its rest.

        int32, for `_core.Sampler`: each ends with -1, and those with a common prefix are adjacent.
        """
        if (known := self._breakers.get(texts)) is not None:
            return known
        found: set[tuple[int, ...]] = set()
        whole = [text.encode() for text in texts]
        for token in range(self.n_vocab):
            piece = self.piece(token, special=True)
            for text in whole:
                if text in piece:
                    found.add((token,))
                    continue
                for i in range(1, len(text)):
                    if piece.endswith(text[:i]):
                        rest = text[i:].decode(errors="ignore")
                        tail = self.tokenize(rest, add_special=False, parse_special=False)
                        found.add((token, *tail[:_LONGEST_TAIL]))
        if len(self._breakers) >= _MOST_BREAKERS:
            self._breakers.clear()
        flat = self._breakers[texts] = array("i")
        for sequence in sorted(found):
            flat.extend((*sequence, -1))
        return flat

    def _read_templates(self, model: llama.llama_model_p) -> ChatTemplates | None:
        texts = {"": llama.llama_model_chat_template(model, None)}
        for name in named_templates(self.header.gguf.fields):
            texts[name] = llama.llama_model_chat_template(model, name.encode())
        found = {name: text.decode(errors="replace") for name, text in texts.items() if text}
        return self._templates_of(found) if found else None

    def _templates_of(self, texts: Mapping[str, str]) -> ChatTemplates:
        """Return the templates of these texts; the default one's name is "", or it is the first."""
        bos, eos = self._text(self.bos), self._text(self.eos)
        made = {name: ChatTemplate(text, bos=bos, eos=eos) for name, text in texts.items()}
        return ChatTemplates(made.get("") or next(iter(made.values())), made)

    @property
    def chat_template(self) -> str | None:
        """The text of the default chat template; None if the model has none."""
        return self._templates.default.source if self._templates else None

    def use_chat_template(self, given: str) -> None:
        """Use another template instead of the model's own from now on.

        `given`: the name of one of the model's, or as for `read_chat_template`. Raises UsageError.
        """
        named = self._templates.named if self._templates else {}
        text = named[given].source if given and given in named else read_chat_template(given)
        self._templates = self._templates_of({"": text})

    def template(self, *, tools: bool = False) -> ChatTemplate:
        """Return the chat template for conversations with tools, or without. Raises EdgespecError."""
        if self._templates is None:
            raise EdgespecError(f"{self.name} has no chat template; a raw prompt needs none")
        chosen = self._templates.choose(tools=tools)
        chosen.names = self.control_names  # found now: loading a model does not need them
        return chosen

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        thinking: Thinking = AS_USUAL,
        parse_special: bool = False,
    ) -> str:
        """Return the prompt that the model's chat template writes for `messages`.

        Each message has "role" and "content"; the prompt ends where the answer begins. `tools` are functions
        that the model may call, as in OpenAI's API; templates without tools ignore them. `parse_special`:
        names of control tokens in the messages and tools are these tokens, else text. Raises EdgespecError if
        the model has no template or the template fails.
        """
        template = self.template(tools=bool(tools))
        try:
            prompt = template.render(
                messages,
                tools or None,
                variables=thinking.variables(template),
                parse_special=parse_special,
            )
        except EdgespecError as error:
            raise EdgespecError(
                f"the chat template of {self.name} failed: {error}; a raw prompt needs none"
            ) from error
        return thinking.closed(prompt, template)

    def tokenize_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        thinking: Thinking = AS_USUAL,
        parse_special: bool = False,
    ) -> list[int]:
        """Return the tokens of `render_chat`, with one BOS even if the template also writes it."""
        prompt = self.render_chat(messages, tools, thinking=thinking, parse_special=parse_special)
        return self.tokenize_rendered(prompt)

    @cached_property
    def control_names(self) -> ControlNames:
        """The names of tokens that a message's text must not become: control tokens, and the unknown one.

        Other tokens that a file defines by name, such as <think>, are words of a text for llama.cpp too, and
        templates look for them in messages; but those in bars, <|...|>, count as control tokens, as they do
        when llama.cpp converts a model. Some end tokens that a file calls words are control tokens too.
        """
        gguf = self.header.gguf
        kinds = gguf.numbers(TOKEN_TYPES)[: self.n_vocab]
        names = {self._text(int(token)) for token in np.flatnonzero(np.isin(kinds, (_UNKNOWN, _CONTROL)))}
        defined = map(self._text, map(int, np.flatnonzero(kinds == _USER_DEFINED)))
        names.update(filter(_IN_BARS.fullmatch, defined))
        ends = (end.decode() for end in _LIKE_AN_END.findall(gguf.raw_texts(TOKENS)))
        names.update(end for end in (*ends, *_OTHER_ENDS) if self.control_token(end) is not None)
        return ControlNames(names)

    def control_token(self, text: str) -> int | None:
        """Return the control token whose name is `text`; None if there is none."""
        tokens = self.tokenize(text, add_special=False, parse_special=True)
        found = tokens[0] if len(tokens) == 1 else None
        return found if found is not None and self.is_control(found) and self._text(found) == text else None

    def tokenize_rendered(self, prompt: str, *, begins: bool = True) -> list[int]:
        """Return the tokens of a prompt from `render_chat`, with one BOS as in `tokenize_chat`.

        `begins`: whether it is the whole prompt; else a part after a control token, without a BOS.
        """
        adds = begins and not (self.bos is not None and prompt.startswith(self._text(self.bos)))
        if not isinstance(prompt, RenderedPrompt) or not prompt.breaks:
            return self.tokenize(prompt, add_special=adds, parse_special=True)
        tokens = [self.bos] if adds and self.add_bos and self.bos is not None else []
        for part, is_plain in self.control_names.pieces(prompt):
            if not is_plain:
                tokens += self.tokenize(part, add_special=False, parse_special=True)
                continue
            strips = tokens and llama.llama_vocab_get_attr(self._vocab, tokens[-1]) & _STRIPS_AFTER
            tokens += self._plain_tokens(part[len(part) - len(part.lstrip()) :] if strips else part)
        if adds and self.eos is not None and llama.llama_vocab_get_add_eos(self._vocab):
            tokens.append(self.eos)
        return tokens

    def _plain_tokens(self, part: str) -> list[int]:
        """Return the tokens of a text in which names of control tokens are text."""
        tokens = self.tokenize(part, add_special=False, parse_special=False)
        if not isinstance(part, RenderedPrompt) or not any(
            self._text(token) in self.control_names for token in tokens
        ):
            return tokens
        # The tokenizer takes a name for a word, but not its parts.
        cuts = pairwise((0, *part.breaks, len(part)))
        texts = (str(part)[start:end] for start, end in cuts)
        return [
            token for text in texts for token in self.tokenize(text, add_special=False, parse_special=False)
        ]

    def _text(self, token: int | None) -> str:
        return "" if token is None else self.piece(token, special=True).decode(errors="replace")

    def close(self) -> None:
        """Free the model's open sessions, then the model; a second call does nothing."""
        self._close_sessions()
        if self._keeping:
            self._idle.finish()
            self._keeping.join()
        if self._check:
            self._check.stop()
        self._finalizer()

    def _close_sessions(self) -> None:
        for session in tuple(self.sessions):
            session.close()


def _page_dropper(path: Path, header: GGUFHeader, packed: WeightPacking) -> Callable[[float], None]:
    """Return a progress callback that drops the file's mapped pages while weights are packed.

    Without it the whole file, which the library makes resident, and the packed copy would be in memory at
    once. Pages of weights that were not packed are dropped too; they come back from the page cache.
    """
    pages = MappedPages((path, *header.other_parts))
    step = _DROP_EVERY / max(1, header.file_bytes)
    next_drop = 0.0

    def drop(progress: float) -> None:
        nonlocal next_drop
        if progress >= min(next_drop, 1.0) and (packed.begun() or (packed.on and progress == 0.0)):
            pages.drop()
            next_drop = progress + step

    return drop


def _load(
    path: Path,
    params: llama.llama_model_params,
    on_progress: Callable[[float], None],
) -> llama.llama_model_p:
    def load(interruption: backend.Interruption) -> llama.llama_model_p | None:
        def progressed(progress: float, _data: object) -> bool:
            on_progress(progress)
            return not interruption.requested  # False stops, one call after Ctrl-C came

        callback = llama.llama_progress_callback(progressed)
        params.progress_callback = callback
        loaded: llama.llama_model_p | None = llama.llama_model_load_from_file(os.fsencode(path), params)
        return loaded

    model: llama.llama_model_p | None = backend.create(load, llama.llama_model_free)
    if model is None:
        raise EdgespecError(f"{path}: llama.cpp cannot load it: {backend.failure_reason()}")
    return model


def _free(model: llama.llama_model_p, _remote: RemoteLayers | None) -> None:
    llama.llama_model_free(model)  # the library may read what RemoteLayers holds until then


def _description(model: llama.llama_model_p) -> str:
    buffer = ctypes.create_string_buffer(128)
    llama.llama_model_desc(model, buffer, len(buffer))
    return buffer.value.decode(errors="replace")


def _token_or_none(token: int) -> int | None:
    return None if token == _NO_TOKEN else token
