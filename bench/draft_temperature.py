"""Counts what drafts are worth where tokens are sampled: how sharply to draft, and by which rule to accept.

    bench/draft_temperature.py --suite default --suite spec_bench/question.jsonl --temp 0.6,0.8,1.0

The target writes an answer to each prompt at each temperature. At every --stride-th token of it the draft
goes on for --gamma tokens, each read after the text's own, so p and q are known at the same places. As the
text was sampled, what a rule accepts needs no coins: with M = L = 1 at first, the n-th drafted token counts
the mean over the texts of the sum over x of min(M p(x), L q(x)). The text's token x then multiplies M by p(x)
and L by q(x), over the probability that it was written with. Chain rule: both become the lesser of the two;
block rule: M does. Counts do not depend on the machine's load.

A ratio is q's temperature over the target's; "before": q's logits are divided by it ahead of the filters.
"point" is the likeliest token, a point mass: what is drafted with --seed. "A or B", and "any", take by the
draft's confidence (the predictor's buckets) what the other half of the texts accepted more of; gains are over
"point or 1". "second": how often at position 1 a second token, without the first, is accepted for the first.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

import prompts as prompt_sets
from edgespec.apps.forge.prompts import TextPrompt
from edgespec.apps.forge.writing import prompt_tokens
from edgespec.decoding.features import TargetFeatures
from edgespec.decoding.sampling import Coins, SamplingParams
from edgespec.decoding.session import ForwardResult, SequenceTokens
from edgespec.drafting.draft_model import DraftModel
from edgespec.drafting.head_model import HeadModel
from edgespec.drafting.predictor import N_BUCKETS, bucket_of
from edgespec.engine.model_choice import choose_models
from edgespec.llama.gguf_header import check_model_file
from edgespec.llama.head_file import Fusion, TargetEmbeddings, read_head
from edgespec.llama.kv_cache import KVCache, KVCacheSize
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.models.resolve import resolve
from edgespec.models.suites import DEFAULT
from script import Measuring, numbers, parser, start

FILTERS = {
    "default": SamplingParams(),
    "top-p 0.95": SamplingParams(top_k=0, top_p=0.95, min_p=0.0),
    "none": SamplingParams(top_k=0, top_p=1.0, min_p=0.0),
}
RATIOS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15)
_KEPT = 128  # likeliest tokens that texts are written with, and that are kept of each row
_SIBLINGS = 40  # of them, may be sampled second
_STATES = 32  # tokens of a prompt whose states a head reads
_AT_ONCE = 16  # texts
_CONTEXT = 4096  # tokens of the draft

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Likeliest:
    """The likeliest tokens at n places, best first."""

    ids: Ints
    """(n, k)"""
    logits: Floats
    """(n, k)"""
    confidence: Floats
    """(n,): the probability of the first one among all tokens, at temperature 1."""

    @classmethod
    def of(cls, rows: npt.NDArray[np.float32], ids: npt.NDArray[np.int32] | None = None) -> Likeliest:
        """Return those of some rows of logits; `ids`: the tokens of a row, None: all."""
        n_left = max(0, rows.shape[1] - _KEPT)
        at = np.argpartition(rows, n_left, axis=1)[:, n_left:]
        logits = np.take_along_axis(rows, at, 1)
        order = np.argsort(-logits, axis=1, kind="stable")
        at, logits = np.take_along_axis(at, order, 1), np.take_along_axis(logits, order, 1)
        total = np.exp(rows - logits[:, :1]).sum(1, dtype=np.float64)
        return cls((at if ids is None else ids[at]).astype(np.int64), logits.astype(np.float64), 1.0 / total)

    @classmethod
    def joined(cls, parts: Sequence[Likeliest]) -> Likeliest:
        """Return those of all `parts`, one after the other."""
        ids, logits, confidence = zip(*((one.ids, one.logits, one.confidence) for one in parts), strict=True)
        return cls(np.concatenate(ids), np.concatenate(logits), np.concatenate(confidence))


def probs(logits: Floats, params: SamplingParams, ratio: float = 1.0, *, before: bool = False) -> Floats:
    """Return the probabilities of `logits`, (n, k) and best first, after the filters of `params`.

    `ratio` multiplies the temperature; `before`: the logits are divided by it ahead of the filters.
    """
    x = logits / ratio if before else logits
    kept = np.broadcast_to(np.arange(x.shape[1]) < (params.top_k or x.shape[1]), x.shape)
    if params.top_p < 1.0:
        share = _softmax(np.where(kept, x, -np.inf))
        kept = kept & (np.cumsum(share, 1) - share < params.top_p)
    if params.min_p > 0.0:
        kept = kept & (x >= x[:, :1] + np.log(params.min_p))
    return _softmax(np.where(kept, x, -np.inf) / (params.temperature * (1.0 if before else ratio)))


def _softmax(x: Floats) -> Floats:
    e = np.exp(x - x[:, :1])
    return np.asarray(e / e.sum(1, keepdims=True))


# ---- the texts, and what both models say along them ----


class Text:
    """A prompt and the target's answer."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.n_prompt, self.tokens = len(prompt), list(prompt)
        self.states: list[npt.NDArray[np.float32]] = []
        """The target's, of the prompt's last tokens and of all of the answer's but the last."""
        self.rows: list[Likeliest] = []
        """The target's, in the place of each token of the answer."""

    def take(self, result: ForwardResult, token: int) -> None:
        """Go on with what a pass gave, and the token sampled from it."""
        assert result.features is not None
        self.states.append(result.features.copy())
        self.rows.append(Likeliest.of(result.rows))
        self.tokens.append(token)


def written(
    target: Model, prompts: Sequence[list[int]], temperature: float, args: argparse.Namespace
) -> Iterator[Text]:
    """Yield the target's answer to each of `prompts`, some of them written at once."""
    params = replace(FILTERS["none"], temperature=temperature, top_k=_KEPT)
    sampler, coins, nothing = params.sampler(target.n_vocab, 0), Coins(1), np.empty(0, np.int32)
    for at in range(0, len(prompts), _AT_ONCE):
        texts = [Text(one) for one in prompts[at : at + _AT_ONCE]]
        n_ctx = sum(one.n_prompt + args.n_predict for one in texts)
        size = KVCacheSize(n_ctx=n_ctx, n_sequences=len(texts))
        with KVCache(target, size, n_threads=args.threads) as cache:
            running = {cache.take(): one for one in texts}
            for sequence, one in running.items():
                if one.n_prompt > _STATES:
                    cache.forward([SequenceTokens(sequence, one.tokens[:-_STATES], 0)])
                part = SequenceTokens(sequence, one.tokens[-_STATES:], 1, with_features=True)
                (result,) = cache.forward([part])
                one.take(result, sampler.sample(result.rows[0], nothing, coins.take(1)[0], -1))
            for _ in range(args.n_predict - 1):
                running = {i: one for i, one in running.items() if not target.is_eog(one.tokens[-1])}
                if not running:
                    break
                parts = [SequenceTokens(i, one.tokens[-1:], with_features=True) for i, one in running.items()]
                for one, result in zip(running.values(), cache.forward(parts), strict=True):
                    one.take(result, sampler.sample(result.rows[0], nothing, coins.take(1)[0], -1))
        yield from texts


def drafted(model: DraftModel, text: Text, gamma: int, stride: int) -> Iterator[tuple[int, Likeliest]]:
    """Yield drafts of `gamma` tokens: the row of `text` that each begins at, and the draft's own rows."""
    tokens, n_prompt = text.tokens, text.n_prompt
    states = np.concatenate(text.states)
    first = n_prompt - len(text.states[0])
    if model.features:
        model.features.begin([])
        model.features.put(first, tokens[first:n_prompt], states[: n_prompt - first])
    model.begin(tokens[: n_prompt + 1])
    for last in range(n_prompt, len(tokens) - gamma, stride):
        if model.features and (end := model.features.end) < last:
            model.features.put(end, tokens[end:last], states[end - first : last - first])
        model.trim(last)
        rows = [model.run(tokens[: last + 1 + depth])[0].copy() for depth in range(gamma)]
        yield last + 1 - n_prompt, Likeliest.of(np.stack(rows), model.ids)


# ---- what is accepted ----


def place_of(ids: Ints, wanted: Ints) -> Ints:
    """Return the place of each of `wanted`, (n, m), in `ids`, (n, k); k where it is not there."""
    n, k = ids.shape
    width = int(max(ids.max(), wanted.max())) + 1
    keys = (ids + width * np.arange(n)[:, None]).ravel()
    order = np.argsort(keys)
    keys = keys[order]
    asked = wanted + width * np.arange(n)[:, None]
    at = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
    return np.asarray(np.where(keys[at] == asked, order[at] % k, k))


def at_places(values: Floats, places: Ints) -> Floats:
    """Return values[i, places[i, j]]; 0 for a place after the last."""
    padded = np.concatenate([values, np.zeros((len(values), 1))], 1)
    return np.take_along_axis(padded, places, 1)


class Places:
    """All places of the drafts over some texts: n = starts * gamma, a start's one after the other."""

    def __init__(
        self, texts: Sequence[Text], drafts: Sequence[tuple[int, int, Likeliest]], gamma: int
    ) -> None:
        """`drafts`: of each the text's number, and what `drafted` yields."""
        offsets = np.cumsum([0, *(len(one.rows) for one in texts)])
        rows = np.array(
            [[offsets[i] + row + depth for depth in range(gamma)] for i, row, _ in drafts]
        ).ravel()
        every = Likeliest.joined([row for one in texts for row in one.rows])
        answers = np.concatenate([np.array(one.tokens[one.n_prompt :]) for one in texts])
        self.gamma, self.text = gamma, np.array([i for i, _, _ in drafts])
        self.p = Likeliest(every.ids[rows], every.logits[rows], every.confidence[rows])
        self.q = Likeliest.joined([one for _, _, one in drafts])
        tokens = answers[rows][:, None]
        self.q_in_p = place_of(self.p.ids, self.q.ids)
        self.token_in_p, self.token_in_q = place_of(self.p.ids, tokens), place_of(self.q.ids, tokens)
        self.bucket = np.array([bucket_of(one) for one in self.q.confidence])


class Acceptance:
    """What is accepted of drafts where texts are sampled with `params`."""

    def __init__(self, places: Places, params: SamplingParams) -> None:
        self.places = places
        p = probs(places.p.logits, params)
        as_written = probs(places.p.logits, replace(FILTERS["none"], temperature=params.temperature))
        self._wrote = at_places(as_written, places.token_in_p)
        self._p = at_places(p, places.q_in_p)
        self._p_token = self._by_start(at_places(p, places.token_in_p) / self._wrote)

    def _by_start(self, values: Floats) -> Floats:
        return values.reshape(-1, self.places.gamma)

    def _q_token(self, q: Floats) -> Floats:
        return self._by_start(at_places(q, self.places.token_in_q) / self._wrote)

    def overlap(self, q: Floats) -> Floats:
        """Return the sum of min(p, q), (n,)."""
        return np.asarray(np.minimum(self._p, q).sum(1))

    def reached(self, q: Floats) -> Floats:
        """Return how much each place counts, (n,): the chance that the chain rule comes there."""
        ratios = np.minimum(self._p_token, self._q_token(q))
        before = np.cumprod(np.concatenate([np.ones((len(ratios), 1)), ratios[:, :-1]], 1), 1)
        return before.ravel()

    def accepted(self, q: Floats, *, block: bool) -> Floats:
        """Return the expected tokens accepted at each position, (starts, gamma)."""
        gamma = self.places.gamma
        p, q_token = self._p.reshape(-1, gamma, self._p.shape[1]), self._q_token(q)
        q = q.reshape(-1, gamma, q.shape[1])
        m, length = np.ones(len(p)), np.ones(len(p))
        found = np.empty((len(p), gamma))
        for depth in range(gamma):
            found[:, depth] = np.minimum(m[:, None] * p[:, depth], length[:, None] * q[:, depth]).sum(1)
            length = length * q_token[:, depth]
            m = np.minimum(m * self._p_token[:, depth], length)
            length = length if block else m
        return found

    def second(self, q: Floats) -> float:
        """Return how often at position 1 a token is rejected, and one sampled without it accepted."""
        gamma = self.places.gamma
        left = 1.0 - self.overlap(q)[::gamma, None]
        p, q = self._p[::gamma, :_SIBLINGS], q[::gamma, :_SIBLINGS]
        rest = np.maximum(0.0, p - q) / np.maximum(left, 1e-12)
        others = q[:, None, :] / np.maximum(1.0 - q[:, :, None], 1e-12)
        at = np.arange(q.shape[1])
        others[:, at, at] = 0.0
        lost = np.maximum(0.0, q - p)
        return float((lost * np.minimum(rest[:, None, :], others).sum(2)).sum(1).mean())

    def second_point(self) -> float:
        """Return how often, at position 1, the draft's second likeliest token is the text's."""
        return float(self._p[:: self.places.gamma, 1].mean())

    def best_of(self, several: Sequence[Floats]) -> Floats:
        """Return at each place that of `several` q which overlaps most, by bucket, in the other half."""
        places = self.places
        weights = self.reached(several[0])
        overlaps = np.stack([self.overlap(q) for q in several])
        half = np.repeat(places.text % 2, places.gamma)
        best = several[0].copy()
        for bucket in range(N_BUCKETS):
            for side in (0, 1):
                here = places.bucket == bucket
                judged = here & (half != side)
                chosen = int((overlaps[:, judged] * weights[judged]).sum(1).argmax())
                best[here & (half == side)] = several[chosen][here & (half == side)]
        return best


def variants(acceptance: Acceptance, params: SamplingParams) -> Iterator[tuple[str, Floats]]:
    """Yield the q of each way to draft, first that without a ratio."""
    logits = acceptance.places.q.logits
    point = np.zeros_like(logits)
    point[:, 0] = 1.0
    sharp = {f"{ratio:g}": probs(logits, params, ratio) for ratio in RATIOS}
    yield "point or 1", acceptance.best_of([sharp["1"], point])
    yield "point", point
    yield from sharp.items()
    for ratio in RATIOS:
        yield f"{ratio:g} before", probs(logits, params, ratio, before=True)
    for name, q in sharp.items():
        if name != "1":
            yield f"point or {name}", acceptance.best_of([q, point])
    yield "any", acceptance.best_of([*sharp.values(), point])


def judged(places: Places, params: SamplingParams) -> list[dict[str, Any]]:
    """Return what each way to draft is worth, with the gain over today's and its standard error by texts."""
    acceptance = Acceptance(places, params)
    rows: list[dict[str, Any]] = []
    today = np.empty(0)
    for name, q in variants(acceptance, params):
        tokens = {rule: acceptance.accepted(q, block=rule == "block") for rule in ("chain", "block")}
        of_block = tokens["block"].sum(1)
        today = today if rows else of_block
        gains = np.bincount(places.text, of_block - today)
        error = float(np.sqrt(((gains - gains.mean()) ** 2).sum())) / len(today)
        rows.append(
            {
                "q": name,
                "overlap": float(acceptance.overlap(q)[:: places.gamma].mean()),
                "by position": tokens["block"].mean(0).tolist(),
                **{rule: 1.0 + float(one.sum(1).mean()) for rule, one in tokens.items()},
                "gain": float((1.0 + of_block.mean()) / (1.0 + today.mean())) - 1.0,
                "error": error / float(1.0 + today.mean()),
                "second": acceptance.second_point() if name == "point" else acceptance.second(q),
            }
        )
    return rows


def measure(
    target_name: str, drafts: Sequence[str], prompts: Sequence[str], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return for each temperature, draft and filter what each way to draft is worth."""
    results = []
    with ExitStack() as stack:
        target = stack.enter_context(Model(resolve(target_name)))
        models = {name: opened(name, target, args, stack) for name in drafts}
        asked = [prompt_tokens(target, TextPrompt("", (one,))) for one in prompts]
        for temperature in args.temp:
            texts = list(written(target, asked, temperature, args))
            for draft, model in models.items():
                found = [
                    (i, row, rows)
                    for i, text in enumerate(texts)
                    for row, rows in drafted(model, text, args.gamma, args.stride)
                ]
                places = Places(texts, found, args.gamma)
                first = slice(None, None, args.gamma)
                same = float((places.p.ids[first, 0] == places.q.ids[first, 0]).mean())
                facts = {"temperature": temperature, "draft": draft, "drafts": len(found)}
                for name, params in FILTERS.items():
                    rows = judged(places, replace(params, temperature=temperature))
                    results.append({**facts, "filters": name, "same likeliest": same, "rows": rows})
    return results


def opened(name: str, target: Model, args: argparse.Namespace, stack: ExitStack) -> DraftModel:
    """Return the draft: a head that edgespec made, or a model of the target's vocabulary."""
    header = check_model_file(resolve(name))
    head = read_head(header)
    model = stack.enter_context(Model(header.path, header=header))
    size = KVCacheSize(n_ctx=_CONTEXT)
    cache = stack.enter_context(KVCache(model, size, n_threads=args.threads, takes_inputs=head is not None))
    session = Session.within(cache)
    if head is None:
        return DraftModel(session, n_vocab=target.n_vocab)
    fusion = Fusion(head, TargetEmbeddings(target.header), n_threads=args.threads, plugin=model.plugin)
    features = TargetFeatures(target.n_state)
    return HeadModel(session, features, n_vocab=target.n_vocab, head=head, fusion=fusion)


def report(result: Mapping[str, Any], *, every: bool) -> None:
    """Print the table of one temperature and filter; without `every` only rows that are beside the best."""
    print(
        f"\n{result['draft']}, temperature {result['temperature']:g}, filters: {result['filters']}; "
        f"{result['drafts']} drafts, the same likeliest token in {result['same likeliest']:.3f}"
    )
    print(f"{'q':<18}{'overlap':>9}{'chain':>8}{'block':>8}{'gain':>9}{'+-':>7}{'second':>9}  by position")
    for row in result["rows"]:
        if not every and row["gain"] < -0.02 and row["q"] not in ("point", "1"):
            continue
        print(
            f"{row['q']:<18}{row['overlap']:>9.3f}{row['chain']:>8.3f}{row['block']:>8.3f}{row['gain']:>9.1%}"
            f"{row['error']:>7.1%}{row['second']:>9.3f}  "
            + " ".join(f"{one:.3f}" for one in row["by position"])
        )


def main() -> None:
    parse = parser(__doc__, pair=False)
    parse.add_argument("drafts", nargs="*", metavar="DRAFT", help="names or paths; default: the pair's")
    parse.add_argument("--target", metavar="MODEL", help="path or name; default: the default pair's")
    prompt_sets.add_options(parse, per_category=3)
    parse.add_argument("--temp", type=numbers(float), default=[0.6, 0.8, 1.0], metavar="T,T")
    parse.add_argument("-n", "--n-predict", type=int, default=128)
    parse.add_argument("--gamma", type=int, default=5, help="tokens of a draft")
    parse.add_argument("--stride", type=int, default=2, help="tokens between two drafts")
    parse.add_argument("--every", action="store_true", help="print the rows of what loses too")
    args = parse.parse_args()
    if min(args.gamma, args.stride) < 1 or args.n_predict < 2 * args.gamma or min(args.temp) <= 0.0:
        parse.error("--gamma and --stride must be at least 1, --n-predict twice --gamma, --temp above 0")
    args.suite = args.suite or [DEFAULT]
    target, draft = choose_models(args.target, None)
    drafts = args.drafts or [draft]
    if drafts[0] is None:
        parse.error("DRAFT: none is known for this target")
    prompts = [one.text for one in prompt_sets.of_all(prompt_sets.chosen(args))]
    measuring = Measuring(args)
    results = measure(target, drafts, prompts, args)
    measuring.end()
    print(f"{target}, {len(prompts)} prompts, drafts of {args.gamma}; {measuring}")
    for result in results:
        report(result, every=args.every)
    measuring.keep("draft-temperature", {"target": target, "results": results})


if __name__ == "__main__":
    start(main)
