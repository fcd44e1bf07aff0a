"""Measures what a draft head loses and saves where it attends to the last tokens alone.

    .venv/bin/python bench/head_window.py --tokens 4096 --windows 256,512,1024,2048

The target reads `--texts` texts of the standard library, each of `--tokens`, and its hidden states are kept.
Then the head reads them with each window, and without one (0): a token counts as accepted where the head's
likeliest next token is the target's. All are judged on the same tokens, those after the longest window. Last,
passes of the head over one token are timed at the text's end, the windows in turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from conversations import Sources
from edgespec.decoding.forward import Forward
from edgespec.engine.model_choice import choose_models
from edgespec.llama.gguf_header import check_model_file
from edgespec.llama.head_file import Fusion, HeadFile, TargetEmbeddings, read_head
from edgespec.llama.kv_cache import KVCache, KVCacheSize
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.models.resolve import resolve
from script import Measuring, numbers, parser, spread, start

_AT_ONCE = 32  # tokens of a pass
_TIMED = 40  # passes of each window

Tokens = npt.NDArray[np.int64]


def read(target: Model, tokens: Sequence[int], n_threads: int) -> tuple[Tokens, npt.NDArray[np.float32]]:
    """Return the target's likeliest token after each of `tokens`, and its hidden states."""
    likeliest, states = [], []
    with Session(target, n_ctx=len(tokens), n_threads=n_threads, n_logits_max=_AT_ONCE) as session:
        for at in range(0, len(tokens), _AT_ONCE):
            part = tokens[at : at + _AT_ONCE]
            found = Forward(session, part, len(part), with_features=True).run()
            likeliest.append(found.rows.argmax(axis=1))
            assert found.features is not None
            states.append(found.features.copy())
    return np.concatenate(likeliest), np.concatenate(states)


def follow(
    session: Session, head: HeadFile, tokens: Sequence[int], inputs: npt.NDArray[np.float32], window: int
) -> Tokens:
    """Return the head's likeliest token after each of `tokens`, of which it reads `inputs`."""
    found = []
    for at in range(0, len(tokens), _AT_ONCE):
        part = tokens[at : at + _AT_ONCE]
        rows = Forward(session, part, len(part), inputs=inputs[at : at + len(part)]).run().rows
        found.append(rows.argmax(axis=1))
        if window and session.n_held > window:
            session.drop_first(session.n_past - window)
    likeliest: Tokens = np.asarray(head.token_ids)[np.concatenate(found)]
    return likeliest


def timed(session: Session, token: int, row: npt.NDArray[np.float32]) -> float:
    """Return the seconds of a pass over one token, which is taken back."""
    n_past, began = session.n_past, time.perf_counter()
    Forward(session, [token], inputs=row).run()
    seconds = time.perf_counter() - began
    session.rewind(n_past)
    return seconds


def measure(target: Model, path: Any, args: argparse.Namespace) -> list[dict[str, Any]]:  # noqa: ANN401 - a path
    """Return for each window the tokens accepted, those judged, and the seconds of passes."""
    header = check_model_file(path)
    head = read_head(header)
    if head is None:
        raise SystemExit(f"{path}: no draft head")
    windows = [*args.windows, 0]
    found = [{"window": window, "accepted": 0, "judged": 0, "seconds": []} for window in windows]
    with ExitStack() as stack:
        model = stack.enter_context(Model(path, header=header))
        fusion = Fusion(head, TargetEmbeddings(target.header), n_threads=args.threads, plugin=model.plugin)
        for seed in range(args.texts):
            text = Sources(target, str(seed)).modules(args.tokens + 64)
            tokens = target.tokenize(text, add_special=True, parse_special=False)[: args.tokens]
            likeliest, states = read(target, tokens, args.threads)
            inputs = np.concatenate(
                [
                    fusion(
                        tokens[at : at + _AT_ONCE], states[at - 1 : at - 1 + len(tokens[at : at + _AT_ONCE])]
                    )
                    for at in range(1, len(tokens), _AT_ONCE)
                ]
            )
            with ExitStack() as sessions:
                opened = []
                for one in found:
                    size = KVCacheSize(n_ctx=len(tokens) + _AT_ONCE)
                    cache = sessions.enter_context(
                        KVCache(model, size, n_threads=args.threads, takes_inputs=True)
                    )
                    opened.append(session := Session.within(cache))
                    drafted = follow(session, head, tokens[1:], inputs, one["window"])
                    judged = slice(max(windows), len(tokens) - 1)
                    one["accepted"] += int((drafted == likeliest[1:])[judged].sum())
                    one["judged"] += len(drafted[judged])
                for _ in range(_TIMED):
                    for one, session in zip(found, opened, strict=True):
                        one["seconds"].append(timed(session, tokens[1], inputs[:1]))
    return found


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("--tokens", type=int, default=4096, help="of each text")
    parse.add_argument("--texts", type=int, default=2)
    parse.add_argument("--windows", type=numbers(int), default=[256, 512, 1024, 2048], metavar="N,N")
    args = parse.parse_args()
    if args.texts < 1 or min(args.windows) < _AT_ONCE or args.tokens <= max(args.windows) + _AT_ONCE:
        parse.error(f"--windows must be {_AT_ONCE} or more, and --tokens more than the longest")
    names = choose_models(args.target, args.draft)
    if names[1] is None:
        parse.error("--draft: no head is known for this target")
    measuring = Measuring(args)
    with Model(resolve(names[0])) as target:
        found = measure(target, resolve(names[1]), args)
    measuring.end()
    print(f"{names[0]} drafted by {names[1]}; {measuring}")
    print(f"{args.texts} texts of {args.tokens} tokens, judged after {max(args.windows)}")
    print(f"{'window':>8}{'accepted':>10}{'of':>8}{'share':>8}{'T(1), ms':>10}{'quartiles':>16}")
    for one in found:
        middle, low, high = (1e3 * seconds for seconds in spread(one["seconds"]))
        share = one["accepted"] / one["judged"]
        quartiles = f"{low:.2f} to {high:.2f}"
        print(
            f"{one['window'] or 'none':>8}{one['accepted']:>10}{one['judged']:>8}{share:>8.3f}{middle:>10.2f}"
            f"{quartiles:>16}"
        )
    measuring.keep("head-window", {"target": names[0], "draft": names[1], "windows": found})


if __name__ == "__main__":
    start(main)
