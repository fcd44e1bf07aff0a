"""Texts to quantize by: a model's own answers to the built-in prompts, or files of the user."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from edgespec.apps.forge.prompts import built_in
from edgespec.decoding.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.engine.stream import Stream
from edgespec.errors import EdgespecError
from edgespec.llama.gguf_header import read_header
from edgespec.llama.weights import Model
from edgespec.platform.files import read_text_file

OWN_TOKENS = 24_576
"""Tokens of own texts, prompts included: 48 passes of 512."""

_AT_ONCE, _N_CTX, _N_PREDICT, _LONGEST_PROMPT = 16, 1024, 384, 512
_SAMPLING = SamplingParams(temperature=0.8)


def own_texts(
    path: Path,
    n_tokens: int = OWN_TOKENS,
    *,
    n_threads: int | None = None,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[list[int]]:
    """Return texts of `n_tokens` tokens or a few more: prompts, and what the model at `path` answers.

    `on_progress` takes the tokens so far, and all. Raises what Engine raises, and EdgespecError for a
    model that reads too few tokens at once.
    """
    if (n_ctx := read_header(path).n_ctx_train) < _N_CTX:
        raise EdgespecError(
            f"{path}: reads {n_ctx} tokens at once, and its own texts would take {_N_CTX}; "
            "give texts with --calibrate FILE, or --imatrix FILE"
        )
    texts: list[list[int]] = []
    with Engine(
        path, drafter="none", parallel=_AT_ONCE, n_ctx=_N_CTX, n_threads=n_threads, profile=False
    ) as engine:
        prompts = _short_prompts(engine)
        running: list[Stream] = []
        while (done := sum(map(len, texts)) + sum(len(one.tokens) for one in running)) < n_tokens:
            on_progress(done, n_tokens)
            while len(running) < _AT_ONCE and engine.has_room(_LONGEST_PROMPT, _N_PREDICT):
                seed = len(texts) + len(running)
                running.append(
                    engine.stream(next(prompts), n_predict=_N_PREDICT, params=_SAMPLING, seed=seed)
                )
            engine.step()
            for stream in [*running]:
                stream.made()
                if stream.finished:
                    running.remove(stream)
                    texts.append(list(stream.tokens))
        texts += [list(stream.tokens) for stream in running]
        for stream in running:
            stream.close()
    return texts


def _short_prompts(engine: Engine) -> Iterator[list[int]]:
    while True:
        for prompt in built_in():
            tokens = engine.prompt_tokens(prompt.turns[-1])
            if len(prompt.turns) == 1 and len(tokens) <= _LONGEST_PROMPT:
                yield tokens


def texts_of(files: Sequence[Path], path: Path) -> list[list[int]]:
    """Return the tokens of text files, in the vocabulary of the model at `path`. Raises UsageError."""
    texts = [read_text_file(file, "calibrate") for file in files]
    with Model(path, vocab_only=True) as model:
        return [model.tokenize(text, add_special=True, parse_special=False) for text in texts]
