"""Counts why a draft head's tokens are rejected, on texts that its target wrote and nobody trained on.

    .venv/bin/python bench/draft_losses.py --tokens 20000
    .venv/bin/python bench/draft_losses.py --against HEAD.gguf

`--texts` is an export of `edgespec draft data export`. Its greedy answers to held-out prompts are taken: what
follows in them is the target's likeliest token, so one pass over a text gives the hidden states of all its
places, and each draft is right as far as it goes on as the text does. With `--suite` the target answers the
prompts of a suite instead, which takes longer. `code` are answers with a fenced block, `prose` the others.

At each place of an answer the head drafts as it does at run time, a token a pass, without branches and
without the suffix store. The steps that are counted are those of a generation that always drafts `--gamma`
tokens. Its passes are also judged as if something in it were different:

    text      the tokens of the text so far that it lacks had rows too, from the target's output matrix
    outside   each token that it lacks were right where it is the target's
    rows      the rows of its 16 likeliest tokens were the target's own, not of 4 bits
    top 2..4  each of its two, three, four likeliest were drafted at each place

A perfect length drafts at each place as many tokens as make the text cheapest, and never a wrong one. Times
are counted with `--times` and `--draft-cost`. Counts do not depend on the machine, nor on what else it does.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edgespec.apps.forge.dataset import DatasetTarget, is_held_out
from edgespec.apps.forge.exported_texts import ExportedTexts
from edgespec.apps.forge.prompts import WrittenText
from edgespec.apps.forge.training.weights import EMBEDDINGS, ModelWeights
from edgespec.decoding.features import TargetFeatures
from edgespec.decoding.sampling import SamplingParams
from edgespec.drafting.costs import CONTEXTS, guessed_curve
from edgespec.drafting.draft_model import WINDOW
from edgespec.drafting.head_model import HeadModel
from edgespec.engine.engine import Engine
from edgespec.engine.model_choice import choose_models
from edgespec.errors import EdgespecError
from edgespec.llama.gguf_header import GGUFHeader, check_model_file
from edgespec.llama.head_file import Fusion, HeadFile, TargetEmbeddings, read_head
from edgespec.llama.kv_cache import KVCache, KVCacheSize
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.models.quantizations import model_file
from edgespec.models.resolve import resolve
from edgespec.models.suites import load_suite
from head_window import read
from script import Measuring, numbers, parser, start

LONGEST = 15  # tokens of a draft: a pass over 16
OUTSIDE, LATER = 0, 5  # ranks of a token that the head lacks, and of any after its fourth
_CAUSES = {OUTSIDE: "outside", 2: "second", 3: "third", 4: "fourth", LATER: "later"}
AS_IS, TEXT = "as it is", "text"
WAYS = (AS_IS, TEXT, "outside", "rows", "top 2", "top 3", "top 4")
_STATES = 32  # of the prompt's hidden states, as at run time
_LIKELIEST = 16
_COMPARED = 1024  # rows by which a head's confidence is found
_RARE = 10  # occurrences in the texts that are not held out
_DEPTHS = (0, 64, 128, 256, 512)
_TIMED = (1, 4, 8, 16)

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


# ---- judging ----


class Judged(NamedTuple):
    """A text, and how far the drafts of a head are right in it."""

    tokens: Sequence[int]
    first: int
    """Where the first draft begins: after the first token of the answer."""
    runs: dict[str, Ints]
    """For each way of WAYS and each place of the text, the right tokens of a draft that begins there."""
    ranks: dict[str, Ints]
    """For AS_IS and TEXT: what the token at which such a draft is first wrong is among the head's likeliest:
    2, 3, 4, LATER or OUTSIDE; -1: the draft is right to its end."""


class Judge:
    """A head that drafts for `target`, at each place of a text. A context manager."""

    def __init__(self, target: Model, path: Path, *, gamma: int, longest: int, n_threads: int) -> None:
        """Load the head in `path`, for texts of at most `longest` tokens."""
        header = check_model_file(path)
        head = read_head(header)
        if head is None:
            raise EdgespecError(f"{path}: no draft head that edgespec made")
        self.path, self._gamma, self._n_vocab = path, gamma, target.n_vocab
        self._head = head
        self._output = TargetOutput(target.header, header, head)
        with ExitStack() as stack:
            model = stack.enter_context(Model(path, header=header))
            size = KVCacheSize(n_ctx=min(longest, 2 * WINDOW) + 2 * LONGEST)
            self._cache = stack.enter_context(KVCache(model, size, n_threads=n_threads, takes_inputs=True))
            embeddings = TargetEmbeddings(target.header)
            self._fusion = Fusion(head, embeddings, n_threads=n_threads, plugin=model.plugin)
            self._stack = stack.pop_all()

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def judge(self, tokens: Sequence[int], n_prompt: int, states: Floats) -> Judged:
        """Draft at each place of the answer in `tokens`; `states`: the target's after each token."""
        features = TargetFeatures(states.shape[1])
        at = max(0, n_prompt - _STATES)
        features.put(at, tokens[at:n_prompt], states[at:n_prompt])
        n, first = len(tokens), n_prompt + 1
        runs = {way: np.zeros(n, np.int64) for way in WAYS}
        judged = Judged(tokens, first, runs, {way: np.full(n, -1) for way in (AS_IS, TEXT)})
        vocabulary = TextVocabulary(self._head, self._output)
        vocabulary.add(tokens[:first])
        with Session.within(self._cache) as session:
            model = HeadModel(session, features, n_vocab=self._n_vocab, head=self._head, fusion=self._fusion)
            for begin in range(first, n):
                if begin > first:
                    features.put(begin - 2, [tokens[begin - 2]], states[begin - 2 : begin - 1])
                    vocabulary.add(tokens[begin - 1 : begin])
                model.make_room(begin + LONGEST)
                model.trim(begin)
                self._draft(model, vocabulary, judged, begin)
        return judged

    def _draft(self, model: HeadModel, vocabulary: TextVocabulary, judged: Judged, begin: int) -> None:
        """Draft at one place, as long as any way of judging finds the tokens right."""
        alive = list(WAYS)
        for at in range(begin, min(begin + LONGEST, len(judged.tokens))):
            if at - begin == self._gamma:
                alive = [way for way in alive if way in (AS_IS, TEXT)]
            if not alive:
                return
            found, token = model.evaluate(judged.tokens[:at]), judged.tokens[at]
            assert found.features is not None
            row, state = found.rows[0], found.features[-1]
            ranks = {
                AS_IS: rank_of(token, row, self._head.token_ids),
                TEXT: rank_of(token, vocabulary.extended(row, state), vocabulary.ids),
            }
            for way, rank in ranks.items():
                if way in alive and rank != 1:
                    judged.ranks[way][begin] = min(rank, LATER)
            rank = ranks[AS_IS]
            right = {
                AS_IS: rank == 1,
                TEXT: ranks[TEXT] == 1,
                "outside": rank in (OUTSIDE, 1),
                "rows": self._likeliest(row, state) == token,
                **{f"top {k}": 1 <= rank <= k for k in (2, 3, 4)},
            }
            alive = [way for way in alive if right[way]]
            for way in alive:
                judged.runs[way][begin] += 1

    def _likeliest(self, row: Floats, state: Floats) -> int:
        """Return the likeliest of the first tokens of the head's `row` by the target's own rows."""
        best = self._head.token_ids[np.argpartition(row, -_LIKELIEST)[-_LIKELIEST:]]
        return int(best[int((self._output(best) @ state).argmax())])


class TargetOutput:
    """The output matrix of a target, scaled as a head scales its own rows of it."""

    def __init__(self, target: GGUFHeader, draft: GGUFHeader, head: HeadFile) -> None:
        self._weights = ModelWeights(target)
        ids = head.token_ids[:_COMPARED]
        own = ModelWeights(draft).rows(EMBEDDINGS, np.arange(len(ids)))
        wanted = self._weights.rows(self._weights.output, ids)
        self._confidence = np.float32((own * wanted).sum() / (wanted**2).sum())

    def __call__(self, tokens: Ints) -> Floats:
        """Return the rows of `tokens`, shape (len(tokens), n_embd), as the head would have them."""
        return self._weights.rows(self._weights.output, tokens) * self._confidence


class TextVocabulary:
    """What a head could draft in one text: what it keeps, and the tokens of the text that it lacks."""

    def __init__(self, head: HeadFile, output: TargetOutput) -> None:
        self.ids, self._output = head.token_ids, output
        """The tokens of a row that `extended` returns, ascending."""
        self._kept = head.token_ids
        self._tokens = np.empty(0, np.int64)
        self._rows = np.empty((0, head.n_embd), np.float32)

    def add(self, tokens: Sequence[int]) -> None:
        """Add those of `tokens`, which follow in the text, that are not known."""
        if len(new := np.setdiff1d(np.asarray(tokens, np.int64), self.ids)):
            self._tokens = np.concatenate([self._tokens, new])
            self._rows = np.concatenate([self._rows, self._output(new)])
            self.ids = np.sort(np.concatenate([self._kept, self._tokens]))

    def extended(self, row: Floats, state: Floats) -> Floats:
        """Return the head's logits with those of the text's tokens: a row over `ids`."""
        whole = np.empty(len(self.ids), np.float32)
        whole[np.searchsorted(self.ids, self._kept)] = row
        whole[np.searchsorted(self.ids, self._tokens)] = self._rows @ state
        return whole


def rank_of(token: int, row: Floats, ids: npt.NDArray[np.integer]) -> int:
    """Return the place of `token` among the likeliest of `row`, over `ids`, from 1 on; or OUTSIDE."""
    at = int(np.searchsorted(ids, token))
    return 1 + int((row > row[at]).sum()) if at < len(ids) and ids[at] == token else OUTSIDE


# ---- steps ----


def steps(judged: Judged, way: str, gamma: int) -> Iterator[tuple[int, int]]:
    """Yield where each draft of a generation begins, and how many of its `gamma` tokens are accepted."""
    at = judged.first
    while at < len(judged.tokens):
        accepted = min(int(judged.runs[way][at]), gamma)
        yield at, accepted
        at += accepted + 1


def tokens_a_pass(texts: Sequence[Judged], way: str, gamma: int) -> float:
    """Return tau: tokens emitted for each pass of the target after a text's first token."""
    n_steps = sum(1 for text in texts for _ in steps(text, way, gamma))
    return sum(len(text.tokens) - text.first for text in texts) / n_steps


def fixed_cost(texts: Sequence[Judged], gamma: int, costs: Sequence[float]) -> float:
    """Return what the texts cost with drafts of `gamma` tokens; `costs`: of steps that draft 0, 1 ...."""
    return sum(
        costs[min(gamma, len(text.tokens) - at)] for text in texts for at, _ in steps(text, AS_IS, gamma)
    )


def perfect_cost(texts: Sequence[Judged], costs: Sequence[float]) -> tuple[float, int]:
    """Return what the texts cost with the best choice of each draft's length, and how many passes."""
    total, n_passes = 0.0, 0
    for text in texts:
        n = len(text.tokens)
        best = [(0.0, 0)] * (n + LONGEST + 2)  # cost and passes of what is left, from each place on
        for at in range(n - 1, text.first - 1, -1):
            longest = min(int(text.runs[AS_IS][at]), n - at)
            cost, passes = min(
                (costs[k] + best[at + k + 1][0], best[at + k + 1][1]) for k in range(longest + 1)
            )
            best[at] = cost, passes + 1
        cost, passes = best[text.first] if text.first < n else (0.0, 0)
        total, n_passes = total + cost, n_passes + passes
    return total, n_passes


class Tested(NamedTuple):
    """A drafted token that the target judged."""

    position: int
    """In its draft, from 1 on."""
    depth: int
    """The last of _DEPTHS that its place in the text reaches."""
    kind: str
    cause: str
    """Why it was rejected, of _CAUSES; "": it was not."""
    seen: str
    """Where the target's token stands before the draft: "prompt", "answer" or ""."""


def judged_tokens(text: Judged, way: str, gamma: int, kinds: Sequence[str]) -> Iterator[Tested]:
    """Yield the tokens that the target judges in a text: of each draft up to the first rejected one."""
    for begin, accepted in steps(text, way, gamma):
        for i in range(accepted + 1):
            at = begin + i
            if i == gamma or at == len(text.tokens):
                break
            cause = _CAUSES[int(text.ranks[way][begin])] if i == accepted else ""
            depth = max(depth for depth in _DEPTHS if depth <= at)
            token, n_prompt = text.tokens[at], text.first - 1
            seen = "prompt" if token in text.tokens[:n_prompt] else ""
            seen = seen or ("answer" if token in text.tokens[n_prompt:begin] else "")
            yield Tested(i + 1, depth, kinds[at], cause, seen)


# ---- kinds of tokens ----


def kinds_of(pieces: Sequence[bytes], is_end: Sequence[bool], is_rare: Sequence[bool]) -> list[str]:
    """Return for each token of a text what it is, by its bytes and those before it."""
    found, before = [], ""
    for piece, ends, rare in zip(pieces, is_end, is_rare, strict=True):
        text = piece.decode(errors="replace")
        found.append("end" if ends else _kind(text, before, rare=rare))
        before = text[-1:]
    return found


def _kind(text: str, before: str, *, rare: bool) -> str:
    if not text.strip():
        return "whitespace"
    if rare:
        return "rare"
    if text.strip()[0].isdigit():
        return "digit"
    if not (text.strip()[0].isalpha() or text.strip()[0] in "_\ufffd"):
        return "punctuation"
    inside = text[0] == text.strip()[0] and (before.isalnum() or before == "_")
    return "inside a word" if inside else "start of a word"


# ---- tables ----


def breakdown(found: Iterable[Tested], key: Callable[[Tested], Hashable]) -> list[dict[str, Any]]:
    """Return for each value of `key` how many tokens were accepted, and why the others were not."""
    counts: Counter[tuple[Any, str]] = Counter((key(one), one.cause) for one in found)
    rows = []
    for value in sorted({value for value, _ in counts}):
        causes = {cause: counts[value, cause] for cause in ("", *_CAUSES.values())}
        rows.append({"value": value, "accepted": causes.pop(""), **causes})
    return rows


def table(rows: Sequence[dict[str, Any]], name: str) -> Iterator[str]:
    """Yield the lines of a breakdown."""
    n_lost = sum(sum(row[cause] for cause in _CAUSES.values()) for row in rows)
    yield f"  {name:<18}{'judged':>8}{'accepted':>10}{'of losses':>11}" + "".join(
        f"{cause:>9}" for cause in _CAUSES.values()
    )
    for row in rows:
        lost = sum(row[cause] for cause in _CAUSES.values())
        judged = row["accepted"] + lost
        shares = "".join(f"{row[cause] / max(lost, 1):>9.1%}" for cause in _CAUSES.values())
        yield (
            f"  {row['value']!s:<18}{judged:>8}{row['accepted'] / judged:>10.1%}"
            f"{lost / max(n_lost, 1):>11.1%}{shares}"
        )


def lengths(texts: Sequence[Judged], costs: Sequence[float]) -> dict[str, Any]:
    """Return what fixed lengths and the perfect choice give: tokens a pass, and over plain decoding."""
    n_tokens = sum(len(text.tokens) - text.first for text in texts)
    plain = n_tokens * costs[0]
    fixed = {
        gamma: {
            "tokens a pass": tokens_a_pass(texts, AS_IS, gamma),
            "over plain": plain / fixed_cost(texts, gamma, costs),
        }
        for gamma in range(1, LONGEST + 1)
    }
    cost, n_passes = perfect_cost(texts, costs)
    perfect = {"tokens a pass": n_tokens / n_passes, "over plain": plain / cost}
    return {"fixed": fixed, "perfect": perfect}


@dataclass(frozen=True)
class Losses:
    """What was counted of one head in one kind of text."""

    n_texts: int
    n_tokens: int
    seen: dict[str, int]
    """Losses to tokens that the head lacks, by where they stand before."""
    tokens_a_pass: dict[str, float]
    tables: dict[str, list[dict[str, Any]]]
    lengths: dict[str, Any]

    def lines(self, gamma: int) -> Iterator[str]:
        """Yield what is printed."""
        found = self.tokens_a_pass
        yield f"{self.n_texts} texts, {self.n_tokens} tokens after the first of each answer"
        yield f"  tokens a pass with drafts of {gamma}: {found[AS_IS]:.3f}"
        gains = {way: tau / found[AS_IS] - 1 for way, tau in found.items() if way != AS_IS}
        yield "  were it different: " + ", ".join(f"{way} {gain:+.1%}" for way, gain in gains.items())
        where = ", ".join(f"{n} in {place or 'neither'}" for place, n in self.seen.items())
        yield f"  losses to tokens that it lacks: {where}"
        for name, rows in self.tables.items():
            yield from table(rows, name)
        best, values = max(self.lengths["fixed"].items(), key=lambda one: one[1]["over plain"])
        yield from (
            f"  {name:<26}{one['tokens a pass']:.2f} tokens a pass, {one['over plain']:.2f} of plain"
            for name, one in (
                (f"best fixed length, {best}", values),
                ("perfect length", self.lengths["perfect"]),
            )
        )


def losses(
    texts: Sequence[Judged], kinds: Sequence[Sequence[str]], gamma: int, costs: Sequence[float]
) -> Losses | None:
    """Return the tables of judged texts, if there are any; `kinds`: of each text's tokens."""
    if not texts:
        return None
    found, with_text = (
        [one for text, own in zip(texts, kinds, strict=True) for one in judged_tokens(text, way, gamma, own)]
        for way in (AS_IS, TEXT)
    )
    lacking = Counter(one.seen for one in found if one.cause == _CAUSES[OUTSIDE])
    return Losses(
        n_texts=len(texts),
        n_tokens=sum(len(text.tokens) - text.first for text in texts),
        seen={where: lacking[where] for where in ("prompt", "answer", "")},
        tokens_a_pass={way: tokens_a_pass(texts, way, gamma) for way in WAYS},
        tables={
            "all": breakdown(found, lambda _: AS_IS),
            "with the text's": breakdown(with_text, lambda _: TEXT),
            "position": breakdown(found, lambda one: one.position),
            "depth, from": breakdown(found, lambda one: one.depth),
            "kind": breakdown(found, lambda one: one.kind),
        },
        lengths=lengths(texts, costs),
    )


# ---- texts ----


def chosen_texts(texts: Sequence[WrittenText], target: Model, n_tokens: int) -> dict[str, list[WrittenText]]:
    """Return greedy answers to held-out prompts: of code and of prose, `n_tokens` each or all there are."""
    found: dict[str, list[WrittenText]] = {"code": [], "prose": []}
    n_found: Counter[str] = Counter()
    for text in texts:
        if not is_held_out(text.key) or text.temperature != 0.0 or len(text.tokens) < text.n_prompt + 2:
            continue
        answer = b"".join(map(target.piece, text.tokens[text.n_prompt :]))
        kind = "code" if b"```" in answer else "prose"
        if n_found[kind] < n_tokens:
            found[kind].append(text)
            n_found[kind] += len(text.tokens) - text.n_prompt
    return found


def written(target: str, draft: str, suite: str, n_predict: int) -> list[WrittenText]:
    """Return the target's greedy answers, of at most `n_predict` tokens, to the prompts of a suite."""
    greedy = SamplingParams(temperature=0.0)
    with Engine(target, draft) as engine:
        return [
            WrittenText(suite, (*tokens, *answer), len(tokens), 0.0, key=0)
            for prompt in load_suite(suite).prompts
            for tokens in [engine.prompt_tokens(prompt.text)]
            for answer in [engine.generate(tokens, params=greedy, n_predict=n_predict).token_ids]
        ]


def counts_of(texts: Iterable[WrittenText], n_vocab: int) -> Ints:
    """Return how often each token is in the texts that are not held out."""
    tokens = [np.asarray(text.tokens, np.int64) for text in texts if not is_held_out(text.key)]
    return np.bincount(np.concatenate([np.empty(0, np.int64), *tokens]), minlength=n_vocab)


def step_costs(target: Model, times: Sequence[float] | None, draft_cost: float) -> list[float]:
    """Return the costs of a step that drafts 0, 1 .. LONGEST tokens, in T(1); `times`: of _TIMED tokens."""
    sizes = range(1, LONGEST + 2)
    curve = guessed_curve(target.path.stat().st_size, own_kernels=True).at(CONTEXTS[0])
    passes = [float(np.interp(n, _TIMED, times)) if times else curve[n] for n in sizes]
    return [cost / passes[0] + draft_cost * n for n, cost in enumerate(accumulate(passes, max))]


def measure(
    target: Model,
    texts: dict[str, list[WrittenText]],
    often: Ints,
    heads: dict[str, Path],
    costs: Sequence[float],
    args: argparse.Namespace,
) -> dict[str, dict[str, Losses | None]]:
    """Return the losses of each head in each kind of `texts`; `often`: how often a token is elsewhere."""
    longest = max((len(text.tokens) for some in texts.values() for text in some), default=1)
    judged: dict[tuple[str, str], list[Judged]] = {(head, kind): [] for head in heads for kind in texts}
    kinds: dict[str, list[list[str]]] = {kind: [] for kind in texts}
    with ExitStack() as stack:
        judges = {}
        for name, path in heads.items():
            judge = Judge(target, path, gamma=args.gamma, longest=longest, n_threads=args.threads)
            judges[name] = stack.enter_context(judge)
        for kind, some in texts.items():
            for text in some:
                tokens = list(text.tokens)
                pieces = [target.piece(token) for token in tokens]
                ends = [target.is_eog(token) for token in tokens]
                kinds[kind].append(kinds_of(pieces, ends, (often[tokens] < _RARE).tolist()))
                _, states = read(target, tokens, args.threads)
                for name, judge in judges.items():
                    judged[name, kind].append(judge.judge(tokens, text.n_prompt, states))
    return {
        name: {kind: losses(judged[name, kind], kinds[kind], args.gamma, costs) for kind in texts}
        for name in heads
    }


def options() -> argparse.ArgumentParser:
    """Return the parser of this script."""
    parse = parser(__doc__)
    parse.add_argument("--tokens", type=int, default=20_000, help="of code, and of prose")
    parse.add_argument("--gamma", type=int, default=5, help="tokens of a draft")
    parse.add_argument("--texts", type=Path, help="default: bench/texts/TARGET.npz")
    parse.add_argument("--suite", help="human-eval, or a .jsonl file of prompts that the target answers")
    parse.add_argument("-n", "--n-predict", type=int, default=128, help="tokens of an answer to --suite")
    parse.add_argument("--against", metavar="HEAD", help="another head: newer, or of finer weights")
    parse.add_argument(
        "--times",
        type=numbers(float),
        metavar="MS,MS,MS,MS",
        help="of a pass over 1, 4, 8 and 16 tokens (bench/verify_cost.py); default: what edgespec guesses",
    )
    parse.add_argument("--draft-cost", type=float, default=0.05, help="of a drafted token, over T(1)")
    return parse


def checked(parse: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the options, or end the script with what is wrong with them."""
    args = parse.parse_args()
    if min(args.tokens, args.n_predict) < 1 or not 1 <= args.gamma <= LONGEST:
        parse.error(f"--tokens and -n must be 1 or more, and --gamma 1 to {LONGEST}")
    if args.times and (len(args.times) != len(_TIMED) or min(args.times) <= 0):
        parse.error("--times are four times, of passes over 1, 4, 8 and 16 tokens")
    if args.draft_cost < 0:
        parse.error("--draft-cost must not be negative")
    return args


def main() -> None:
    parse = options()
    args = checked(parse)
    name, draft = choose_models(args.target, args.draft)
    if draft is None:
        parse.error("--draft: no head is known for this target")
    heads = {one: Path(resolve(one)) for one in (draft, args.against) if one}
    file = model_file(name)
    sha256 = file.facts().sha256
    for path in heads.values():
        head = read_head(check_model_file(path))
        if head is None or head.target_sha256 != sha256:
            raise EdgespecError(f"{path}: no draft head that edgespec made for {file.path.name}")
    texts_file = args.texts or Path(__file__).parent / "texts" / f"{file.name}.npz"
    measuring = Measuring(args)
    answers = written(name, draft, args.suite, args.n_predict) if args.suite else None
    with Model(file.path) as target:
        made_for = DatasetTarget.of(target.header, file.name, sha256)
        exported = ExportedTexts(texts_file, made_for, is_named=args.target is not None)
        texts = list(exported.texts(target))
        often = counts_of(texts, target.n_vocab)
        costs = step_costs(target, args.times, args.draft_cost)
        chosen = chosen_texts(texts if answers is None else answers, target, args.tokens)
        found = measure(target, chosen, often, heads, costs, args)
    measuring.end()
    print(f"{name}, texts of {args.suite or texts_file.name}; {measuring}")
    print("a step that drafts 0, 1 .. tokens, in T(1): " + " ".join(f"{cost:.2f}" for cost in costs))
    for head_name, by_kind in found.items():
        for kind, one in by_kind.items():
            print(f"\n{head_name}, {kind}: ", end="")
            print(*(one.lines(args.gamma) if one else ["no texts"]), sep="\n")
    measuring.keep(
        "draft-losses", {"target": name, "gamma": args.gamma, "step costs": costs, "losses": found}
    )


if __name__ == "__main__":
    start(main)
