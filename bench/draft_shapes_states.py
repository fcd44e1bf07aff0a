"""Reads texts with the default target for `draft_shapes.py`, and stores the states of several layers.

They are, of each token but a text's last, the residual after each of `LAYERS`, and the state after the
last norm: float16 (tokens, layers + 1, n_embd) in states.f16; index.json has facts of each text. A
stopped run goes on.
"""

from __future__ import annotations

import ctypes
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.forge.dataset import is_held_out, key_of
from edgespec.forge.prompts import built_in
from edgespec.llama.backend import foreign_function, llama
from edgespec.llama.context import create_context
from edgespec.llama.importance import _F32, _array, _CTensor
from edgespec.llama.weights import Model

LAYERS = (20, 25)
STATES, INDEX = "states.f16", "index.json"
_LAST = (
    b"result_embd_pooled"  # llama.cpp's name of the state after the last norm, if embeddings are asked for
)
_CONTEXT = 1024
_N_PROMPTS = 12_000  # the built-in ones whose first turns are known
_USER, _END = "<|im_start|>user\n", "<|im_end|>"
_SAVED_EACH = 20  # texts


class StateReader:
    """A target that reads texts and gives the states of `LAYERS` and the last norm."""

    def __init__(self, model: Model, n_threads: int) -> None:
        self._wanted = (*(b"l_out-%d" % layer for layer in LAYERS), _LAST)
        self._found: dict[bytes, npt.NDArray[np.float16]] = {}
        self._name = foreign_function("ggml_get_name", ctypes.c_char_p, ctypes.c_void_p)
        self._look_from_c = llama.ggml_backend_sched_eval_callback(self._look)
        self._context = create_context(
            model,
            n_ctx=_CONTEXT,
            n_threads=n_threads,
            n_batch=_CONTEXT,
            n_logits_max=_CONTEXT,
            n_sequences=1,
            on_operation=self._look_from_c,
        )
        llama.llama_set_embeddings(self._context, True)

    def _look(self, address: int, asks: bool, _data: int) -> bool:
        name = self._name(address)
        if name not in self._wanted:
            return not asks
        if not asks:
            values = _array(_CTensor.from_address(address), _F32)
            self._found[name] = values.reshape(-1, values.shape[-1]).astype(np.float16)
            return bool(name != _LAST)  # False: the logits that would follow are left out
        return True

    def read(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float16]:
        """Return the states of a text's tokens, (tokens, layers + 1, n_embd)."""
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        n = len(tokens)
        batch: Any = llama.llama_batch_init(n, 0, 1)
        batch.n_tokens = n
        for i, token in enumerate(tokens.tolist()):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
            batch.seq_id[i][0] = 0
        self._found.clear()
        code = llama.llama_decode(self._context, batch)
        llama.llama_batch_free(batch)
        if code or set(self._found) != set(self._wanted):
            raise SystemExit(f"the target gave no states: code {code}, found {sorted(self._found)}")
        return np.stack([self._found[name] for name in self._wanted], 1)

    def close(self) -> None:
        """Free the context."""
        llama.llama_free(self._context)


def extract(target: Path, texts: Path, folder: Path, n_train: int, n_held_out: int) -> None:
    """Write the states of up to `n_held_out` and then `n_train` tokens of `texts`, an .npz.

    Held out are answers to built-in prompts that the forge never trains on.
    """
    stored = np.load(texts)
    n_prompt = stored["n_prompt"].tolist()
    all_tokens = np.split(stored["tokens"], np.cumsum(stored["length"])[:-1])
    folder.mkdir(parents=True, exist_ok=True)
    index = json.loads((folder / INDEX).read_text()) if (folder / INDEX).exists() else []
    done, begun = {one["text"] for one in index}, time.monotonic()
    with Model(target) as model, (folder / STATES).open("ab") as file:
        reader = StateReader(model, n_threads=2)
        row = len(reader.read(all_tokens[0][:1]).tobytes())
        file.truncate(row * sum(one["n"] for one in index))
        firsts = {prompt.turns[0] for prompt, _ in zip(built_in(), range(_N_PROMPTS), strict=False)}
        held = [_is_held_out(model, t[:n], firsts) for t, n in zip(all_tokens, n_prompt, strict=True)]
        order = np.random.default_rng(0).permutation(len(held)).tolist()
        for wanted, most in ((True, n_held_out), (False, n_train)):
            n_done = sum(one["n"] for one in index if one["held"] == wanted)
            for i in (i for i in order if held[i] == wanted and i not in done):
                if n_done >= most:
                    break
                states = reader.read(all_tokens[i][:-1])
                file.write(states.tobytes())
                answer = b"".join(map(model.piece, all_tokens[i][n_prompt[i] :].tolist()))
                index.append({"text": i, "n": len(states), "held": wanted, "code": b"```" in answer})
                n_done += len(states)
                if len(index) % _SAVED_EACH == 0 or n_done >= most:
                    file.flush()
                    (folder / INDEX).write_text(json.dumps(index))
                    print(f"{n_done:,} tokens, {time.monotonic() - begun:.0f} s", flush=True)
        reader.close()


def _is_held_out(model: Model, prompt: npt.NDArray[np.int32], firsts: set[str]) -> bool:
    """Return whether a prompt is built in, its first turn among `firsts`, and held out by the forge."""
    words = b"".join(model.piece(token, special=True) for token in prompt.tolist()).decode(errors="replace")
    first = words.partition(_USER)[2].partition(_END)[0]
    return first in firsts and is_held_out(key_of(first.encode()))
