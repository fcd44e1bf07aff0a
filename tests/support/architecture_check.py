"""What of edgespec works with an architecture, found out on tiny random models of it.

No weights are needed: what is checked is whether the same text comes out in every way of computing it. The
checks run in a child process, so that a crash of the library is the result of one of them.

    plain text        finite logits, and edgespec's kernels near llama.cpp's own
    any batch         the logits after each token, bit for bit, in batches of any size on 1 and 2 threads
    each draft        the text with drafts is the text without: by greedy decoding, but for tokens that are
                      all but tied, and for a seed too where no batch changes a bit
    kept cache        a state that was copied goes on as the session it is of
    tokens back       as if the tokens that were taken back had never been read
    Ctrl-C            a pass ends, and the session can go on
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import msgspec
import numpy as np
import numpy.typing as npt

from edgespec.decoding.sampling import SamplingParams
from edgespec.decoding.session import Rows
from edgespec.drafting.heads.mtp import why_no_mtp
from edgespec.engine.engine import Engine
from edgespec.errors import EdgespecError
from edgespec.llama.gguf_header import read_header
from edgespec.llama.rollback import LONG
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.platform.processes import Cancellation, ChildExit, ReportingChild, answer, send
from operations import operations_of
from tiny_models import ARCHITECTURES, make_tiny

TIMEOUT_S = 300
"""A check takes a second, and longer on a busy machine."""

WEIGHTS_TYPE = "q8_0"
"""Of the matrices: edgespec's kernels take it, and the widths of tiny models are multiples of its block."""

SOURCES = ("suffix", "model", "tree", "own", "mtp")
"""What drafts: the suffix store, a tiny Llama in chains and in trees, the model itself, and the head in its
file, if it has one."""

# Another rounding changes a row of logits by about 3 %, and by more where it chooses other experts.
_TOLERANCE = 0.1
# Two tokens whose logits are nearer may change places in another batch, where batches round differently: one
# activation that is rounded to the next of 8 bits changes a logit by up to 0.07.
_NEAR_TIE = 0.2
_PROMPT = "the quick brown fox and the lazy dog, and then the quick brown fox and the "
_N_PREDICT, _GAMMA, _SEED = 32, 4, 3
_N_TOKENS, _N_MORE = 40, 6  # more than the 32 of the tiny models' windows


class Check(msgspec.Struct):
    """The result for one architecture; what comes after an error is empty."""

    name: str
    kinds: tuple[str, ...]
    claimed: int = 0
    """Operations of a pass that edgespec's kernels run."""
    declined: dict[str, int] = {}
    """Operations that llama.cpp runs, by ggml's name."""
    n_pieces: int = 0
    """In how many pieces, on the one or on the other, a pass is run."""
    same_in_any_batch: bool = False
    drafts: dict[str, str] = {}
    """Of each of the SOURCES that it can have: "equal", "not used", or at which token the text differs."""
    keeps_cache: bool = False
    takes_back: bool = False
    stops: bool = False
    error: str = ""
    """Why the check ended early, or what is wrong with plain text."""

    @property
    def works(self) -> tuple[str, ...]:
        """The sources whose drafts change nothing."""
        return tuple(source for source, outcome in self.drafts.items() if outcome == EQUAL)


EQUAL, UNUSED = "equal", "not used"


class _Request(msgspec.Struct, frozen=True):
    """What the child does: these architectures, with files in this directory."""

    names: tuple[str, ...]
    directory: str


def check_architectures(names: Sequence[str]) -> Iterator[Check]:
    """Check some of the ARCHITECTURES, one after the other, in a child process."""
    left = list(names)
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    with (
        tempfile.TemporaryDirectory(prefix="edgespec-") as directory,
        mock.patch.dict(os.environ, PYTHONPATH=path),
    ):
        while left:
            child = ReportingChild("architecture_check", "main", _Request(tuple(left), directory))
            for _, check in child:
                left.pop(0)
                yield msgspec.convert(check, Check)
            if left:  # the child died of the first of them; the others get another
                name = left.pop(0)
                yield Check(name, ARCHITECTURES[name].kinds, error=_reason(child.ended))


def _reason(ended: ChildExit) -> str:
    if ended.code == -signal.SIGALRM:
        return f"took longer than {TIMEOUT_S} s"
    if ended.complaint:
        return ended.complaint.removeprefix("edgespec: error: ")
    return f"crashed (signal {-ended.code})" if ended.code and ended.code < 0 else f"exit code {ended.code}"


def main() -> int:
    """In the child: send the Check of each architecture; return the exit code."""
    return answer(_Request, _check_all)


def _check_all(request: _Request) -> None:
    for name in request.names:
        signal.alarm(TIMEOUT_S)  # ends the process
        send("check", _check(name, Path(request.directory)))


def _check(name: str, directory: Path) -> Check:
    check = Check(name, ARCHITECTURES[name].kinds)
    try:
        _fill(check, directory)
    except EdgespecError as error:
        check.error = str(error)
    return check


def _fill(check: Check, directory: Path) -> None:
    path = make_tiny(check.name, directory / "target.gguf", weights_type=WEIGHTS_TYPE)
    with Model(path) as model:
        found = operations_of(model)
        check.claimed, check.declined = sum(found.claimed.values()), found.declined
        check.n_pieces = found.n_pieces
        expected = _logits(model, n_batch=1)
        check.error = _problem(model, expected)
        check.same_in_any_batch = _same_in_any_batch(model, expected)
        check.keeps_cache = _keeps_cache(model)
        check.takes_back = _takes_back(model)
        check.stops = _stops(model)
    draft = make_tiny("llama", directory / "draft.gguf", seed=2)
    check.drafts = _drafts(path, draft, exactly=check.same_in_any_batch)


# ---- one session ----


def _tokens(n: int = _N_TOKENS) -> list[int]:
    return [int(token) for token in np.random.default_rng(_SEED).integers(0, 256, n)]


def _session(model: Model, *, n_threads: int = 1, n_ctx: int = 256) -> Session:
    return Session(model, n_ctx=n_ctx, n_threads=n_threads)


def _read(session: Session, tokens: Sequence[int], n_batch: int | None = None) -> Rows:
    """Return the logits after each of `tokens`, which are read `n_batch` at a time; None: together."""
    step = n_batch or len(tokens)
    parts = [tokens[i : i + step] for i in range(0, len(tokens), step)]
    return np.concatenate([session.eval(part, n_logits=len(part)).copy() for part in parts])


def _logits(model: Model, *, n_batch: int, n_threads: int = 1) -> Rows:
    with _session(model, n_threads=n_threads) as session:
        return _read(session, _tokens(), n_batch)


def _problem(model: Model, rows: Rows) -> str:
    """Return what is wrong with the logits of plain text, or ""."""
    if not np.isfinite(rows).all():
        return "logits are not finite"
    if not model.uses_kernels:
        return ""
    with Model(model.path, kernels=False, header=model.header) as stock:
        reference = _logits(stock, n_batch=1)
    distance = np.median(_distances(rows, reference))
    return f"logits are {distance:.0%} off llama.cpp's" if distance > _TOLERANCE else ""


def _distances(rows: Rows, reference: Rows) -> npt.NDArray[np.float64]:
    """Return for each row |row - reference| / |reference|."""
    norms = np.linalg.norm(reference, axis=1)
    return np.asarray(np.linalg.norm(rows - reference, axis=1) / norms, np.float64)


def _same_in_any_batch(model: Model, expected: Rows) -> bool:
    return all(
        np.array_equal(_logits(model, n_batch=n_batch, n_threads=n_threads), expected)
        for n_batch, n_threads in ((3, 1), (8, 1), (8, 2), (_N_TOKENS, 1))
    )


def _keeps_cache(model: Model) -> bool:
    tokens, more = _tokens(), _tokens(_N_TOKENS + _N_MORE)[-_N_MORE:]
    with _session(model) as session, _session(model, n_ctx=512) as other:
        session.eval(tokens)
        state = session.state()
        expected = _read(session, more)
        other.eval(more)  # which `restore` has to remove
        other.restore(state, tokens)
        return np.array_equal(_read(other, more), expected)


def _takes_back(model: Model) -> bool:
    tokens, more = _tokens(), _tokens(_N_TOKENS + _N_MORE)[-_N_MORE:]
    with _session(model) as session, _session(model) as other:
        for one in (session, other):
            one.eval(tokens)
        expected = _read(session, more)
        _read(other, more[::-1])
        try:
            other.rewind(len(tokens))
        except EdgespecError:
            return False
        if left := tokens[other.n_past :]:  # it may have gone back further than asked
            other.eval(left)
        return bool(np.median(_distances(_read(other, more), expected)) < _TOLERANCE)


def _stops(model: Model) -> bool:
    """Whether a long pass can be ended, and the session goes on with what it then holds."""
    tokens = _tokens(_N_TOKENS + LONG)
    with _session(model) as session:
        expected = session.eval(tokens).copy()
    with (
        Cancellation() as cancellation,
        Session(model, n_ctx=256, n_threads=1, interrupt=cancellation.interrupt) as session,
    ):
        session.eval(tokens[:_N_TOKENS])
        cancellation.cancel()
        try:
            session.eval(tokens[_N_TOKENS:])
        except KeyboardInterrupt:
            cancellation.drain()
            row = session.eval(tokens[session.n_past :])
            return bool(_distances(row, expected)[0] < _TOLERANCE)
    return False


# ---- drafts ----


def _drafts(path: Path, draft: Path, *, exactly: bool) -> dict[str, str]:
    """Return for each of the SOURCES what becomes of the text; `exactly`: no token may be tied."""
    outcomes = {}
    pairs: list[tuple[Path | None, Sequence[str]]] = [(draft, SOURCES[:3]), (path, ("own",))]
    if not why_no_mtp(read_header(path)):
        pairs.append((None, ("mtp",)))
    for other, sources in pairs:
        with Engine(path, other, n_threads=1, profile=False) as engine:
            greedy, sampled = (_write(engine, "none", temperature)[0] for temperature in (0.0, 1.0))
            for source in sources:
                drafter = "model" if source == "own" else source
                engine.forget()
                _write(engine, "none", 0.0)  # the suffix store has seen the text
                text, n_drafted = _write(engine, drafter, 0.0)
                if not n_drafted:
                    outcomes[source] = UNUSED
                    continue
                outcomes[source] = _difference(engine, greedy, text, 0.0 if exactly else _NEAR_TIE)
                text, _ = _write(engine, drafter, 1.0)
                if exactly and outcomes[source] == EQUAL and text != sampled:
                    outcomes[source] = "the text for a seed differs"
    return outcomes


def _write(engine: Engine, drafter: str, temperature: float) -> tuple[tuple[int, ...], int]:
    """Return the tokens of a text and how many were drafted for it."""
    result = engine.generate(
        _PROMPT,
        chat=False,
        drafter=drafter,  # type: ignore[arg-type] # one of SOURCES, or "none"
        gamma=_GAMMA if drafter != "none" else None,
        n_predict=_N_PREDICT,
        seed=_SEED,
        params=SamplingParams(temperature=temperature),
    )
    return result.token_ids, result.stats.n_drafted


def _difference(engine: Engine, plain: Sequence[int], text: Sequence[int], tie: float) -> str:
    """Return EQUAL, also where two tokens are tied up to `tie`, or where the greedy text `text` differs."""
    pairs = enumerate(zip(plain, text, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(plain), len(text)))
    if at == len(plain) == len(text):
        return EQUAL
    if at < min(len(plain), len(text)):
        with _session(engine.target) as session:
            row = session.eval([*engine.prompt_tokens(_PROMPT, chat=False), *plain[:at]])[0]
            if abs(float(row[plain[at]] - row[text[at]])) <= tie:
                return EQUAL
    return f"differs at token {at + 1}"
