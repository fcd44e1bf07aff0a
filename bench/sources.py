"""Counts what it gains to draft from the suffix store and a head together, beside one of them alone.

    .venv/bin/python bench/sources.py --suite spec_bench_dev.jsonl --category copy --category rag
        --category coding --texts texts.npz

Prompts: bench/prompt_sets/copy.jsonl (code edits and other copies), turns of an agent (conversations.py), and
the suites asked for. The target writes each answer once, greedily, and its hidden states are kept (--texts:
in a file, read again if it is there). Then the real loop writes the same answers over a target that says
again what it said: the head is the real one, and time is what --target-ms and --head-ms say of passes. So
what is counted depends on no load of the machine: two versions of edgespec with the same texts differ by what
they decide. Three ways to draft:

- store: the suffix store alone; head: the head alone;
- both: what pays of either, in one tree. This is `auto`.

Times of the same ways: bench/never_slower.py --variants suffix,model,auto.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

import prompts as prompt_sets
from conversations import agent
from edgespec import Engine, SamplingParams
from edgespec.decoding.features import TargetFeatures
from edgespec.decoding.generate import Generation
from edgespec.decoding.loop import Task
from edgespec.decoding.options import Options
from edgespec.decoding.sampling import Coins
from edgespec.decoding.session import ForwardResult, SequenceTokens
from edgespec.drafting.costs import CONTEXTS, N_MAX, CostCurve, interpolated
from edgespec.drafting.head_model import HeadModel
from edgespec.drafting.learned_costs import LearnedCosts
from edgespec.drafting.online_curve import OnlineCurve, PassCurves
from edgespec.drafting.policy import Policy
from edgespec.drafting.predictor import Predictor
from edgespec.drafting.proposal import DraftStep
from edgespec.drafting.scheduler import Scheduler
from edgespec.drafting.suffix import OWN_TOKENS, SuffixDrafts
from edgespec.drafting.tree_drafter import TreeDrafter
from edgespec.llama.gguf_header import check_model_file
from edgespec.llama.head_file import Fusion, HeadFile, TargetEmbeddings, read_head
from edgespec.llama.kv_cache import KVCache, KVCacheSize
from edgespec.llama.session import Session
from edgespec.llama.weights import Model
from edgespec.models.suites import Prompt
from script import Measuring, numbers, parser, require_kernels, start

BOTH = "both"
_AUTO = Policy(staged=False, siblings=False, after_store=False)
WAYS = {"store": replace(_AUTO, model=False), "head": replace(_AUTO, suffix=False), BOTH: _AUTO}
EDITS = {"rename-variable", "type-hints", "add-logging", "docstrings", "fix-the-bug", "sql-migration"}
"""Prompts of copy.jsonl that edit code."""
_AGENT_TOKENS, _AGENT_TURNS = 1200, 4
_GREEDY = SamplingParams(temperature=0.0)
_PASSES = (1, 2, 4, 8, 16, N_MAX)  # tokens of the passes that --target-ms and --head-ms are of


def asked_prompts(args: argparse.Namespace, model: Model) -> list[Prompt]:
    """Return the prompts, each an entire text."""
    suites = prompt_sets.chosen(args, [prompt_sets.OWN[0]])
    found = [
        replace(one, category="code edit") if one.id.removeprefix("copy-") in EDITS else one
        for one in prompt_sets.of_all(suites)
    ]
    for seed in range(args.agents):
        talk = agent(model, _AGENT_TOKENS, _AGENT_TURNS, seed)
        for i, messages in enumerate(talk.prompts()):
            text = "\n\n".join(message["content"] for message in messages)
            found.append(Prompt(f"agent-{seed}-{i}", "agent", text))
    return found


# ---- texts, and a target that says them again ----


@dataclass(frozen=True)
class Text:
    """A prompt and its greedy answer, with the target's hidden states from index `first` on."""

    category: str
    tokens: list[int]
    n_prompt: int
    first: int
    states: npt.NDArray[np.float32]


def write(engine: Engine, prompts: Sequence[Prompt], n_predict: int) -> Iterator[Text]:
    """Let the target write the answers."""
    for prompt in prompts:
        engine.forget()
        tokens = engine.prompt_tokens(prompt.text)
        stream = engine.stream(tokens, params=_GREEDY, n_predict=n_predict, drafter="model")
        for _ in stream:
            pass
        features = engine._pair._idle_drafts[-1].features
        assert features is not None
        states = features.rows(features.first, features.end).copy()
        yield Text(prompt.category, list(stream.tokens), len(tokens), features.first, states)


def load_texts(path: Path) -> list[Text]:
    """Return what `save_texts` wrote."""
    with np.load(path) as stored:
        facts = zip(stored["category"], stored["n_prompt"], stored["first"], strict=True)
        return [
            Text(str(category), stored[f"tokens{i}"].tolist(), int(n), int(first), stored[f"states{i}"])
            for i, (category, n, first) in enumerate(facts)
        ]


def save_texts(path: Path, texts: Sequence[Text]) -> None:
    """Write `texts` to a .npz file."""
    arrays: dict[str, Any] = {
        name: [getattr(one, name) for one in texts] for name in ("category", "n_prompt", "first")
    }
    for i, one in enumerate(texts):
        arrays |= {f"tokens{i}": one.tokens, f"states{i}": one.states}
    np.savez(path, **arrays)


class Clock:
    """Time as passes spend it."""

    now = 0.0

    def __call__(self) -> float:
        """Return it, in seconds."""
        return self.now


class Repeated:
    """A session of a target that says again what it said; after other tokens it says nothing of use."""

    sequence, n_ctx, n_logits_max, n_features_max, most_drafted = 0, 1 << 20, 64, 512, N_MAX - 1
    all_logits = False

    def __init__(self, text: Text, model: Model, curve: OnlineCurve, clock: Clock) -> None:
        self.model: Any = SimpleNamespace(
            n_vocab=model.n_vocab,
            is_eog=model.is_eog,
            path="repeated",
            name="repeated",
            keeps_state=False,
            leaves_last_states=True,
        )
        self.cache = self
        self.n_past = 0
        self._text, self._curve, self._clock = text, curve, clock
        self._rows = np.zeros((N_MAX + 1, model.n_vocab), np.float32)
        self._said: list[int] = []

    def rewind(self, n_keep: int) -> int:
        """Cut the sequence back."""
        self.n_past = n_keep
        return n_keep

    def forward(self, parts: Sequence[SequenceTokens]) -> list[ForwardResult]:
        """Return what the text goes on with after the last tokens of a pass, and their hidden states."""
        (part,) = parts
        text, parents = self._text, part.parents or ()
        n = len(part.tokens)
        seconds = self._curve.read(n, self.n_past) if not part.n_logits else self._curve.of(n, self.n_past)
        self._clock.now += seconds
        n_chain = n - len(parents)
        places = [self.n_past + i for i in range(n_chain)]  # of the tokens in the text; -1: not there
        for token, parent in zip(part.tokens[n_chain:], parents, strict=True):
            above = places[n_chain + parent]
            at = above + 1 if above >= 0 else -1
            places.append(at if 0 <= at < len(text.tokens) and text.tokens[at] == token else -1)
        n_trunk = next((i for i, parent in enumerate(parents) if parent != i - 1), len(parents))
        self.n_past += n_chain + n_trunk
        wanted = places if part.with_features else places[n - part.n_logits :]
        for row, token in enumerate(self._said):
            self._rows[row, token] = 0.0
        last = places[n - part.n_logits :]
        self._said = [text.tokens[at + 1] if 0 <= at < len(text.tokens) - 1 else 0 for at in last]
        for row, token in enumerate(self._said):
            self._rows[row, token] = 30.0
        states = np.zeros((len(wanted), text.states.shape[1]), np.float32)
        for row, at in enumerate(wanted):
            if 0 <= at - text.first < len(text.states):
                states[row] = text.states[at - text.first]
        return [ForwardResult(self._rows[: part.n_logits], seconds, n, states)]


# ---- counts ----


@dataclass
class Counts:
    """Sums over some texts."""

    n_texts: int = 0
    passes: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    head_passes: int = 0
    seconds: float = 0.0
    steps: list[DraftStep] = field(default_factory=list)

    def add(self, other: Counts) -> None:
        """Add the sums of others."""
        for name in ("n_texts", "passes", "emitted", "drafted", "accepted", "head_passes", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def rate(self) -> float:
        """Tokens a second, by the costs of the passes."""
        return self.emitted / self.seconds


class Replay:
    """A head, and the costs of passes."""

    def __init__(self, target: Model, path: Path, args: argparse.Namespace, stack: ExitStack) -> None:
        header = check_model_file(path)
        head = read_head(header)
        if head is None:
            raise SystemExit(f"{path}: no draft head")
        self._target, self._file = target, head
        model = stack.enter_context(Model(path, header=header))
        size = KVCacheSize(n_ctx=args.n_ctx)
        cache = stack.enter_context(KVCache(model, size, n_threads=args.threads, takes_inputs=True))
        self._session = Session.within(cache)
        embeddings = TargetEmbeddings(target.header)
        self._fusion = Fusion(head, embeddings, n_threads=args.threads, plugin=model.plugin)
        self._clock = Clock()
        self._curves = PassCurves(_curve(args.target_ms), _curve(args.head_ms))
        self._forward = cache.forward
        cache.forward = self._timed  # type: ignore[method-assign]
        self._learned = {
            name: LearnedCosts(self._curves.target, self._curves.draft, Predictor()) for name in WAYS
        }

    def _timed(self, parts: Sequence[SequenceTokens]) -> list[ForwardResult]:
        n, n_past = sum(len(part.tokens) for part in parts), self._session.n_held
        assert self._curves.draft
        seconds = self._curves.draft.of(n, n_past)
        self._clock.now += seconds
        return [replace(one, seconds=seconds) for one in self._forward(parts)]

    def count(self, text: Text, way: str) -> Counts:
        """Write a text again, drafted one `way`."""
        file: HeadFile = self._file
        self._session.clear()
        features = TargetFeatures(file.n_embd)
        features.n_prompt = lambda: text.n_prompt - text.first
        head = HeadModel(
            self._session, features, n_vocab=self._target.n_vocab, head=file, fusion=self._fusion
        )
        counts = Counts(n_texts=1)
        drafter = TreeDrafter(
            Scheduler(self._learned[way], WAYS[way]),
            suffix=SuffixDrafts(OWN_TOKENS),
            model=head,
            is_eog=self._target.is_eog,
            clocks=self._curves,
            on_step=counts.steps.append,
        )
        n_predict = len(text.tokens) - text.n_prompt
        options = Options(params=_GREEDY, n_predict=n_predict)
        task = Task(options=options, rule="match", coins=Coins(1))
        target: Any = Repeated(text, self._target, self._curves.target, self._clock)
        prompt = text.tokens[: text.n_prompt]
        with mock.patch("time.perf_counter", self._clock):
            run = Generation(target, drafter, prompt, task, features=features)
            events = run.events()
            next(events)
            began = self._clock.now
            for _ in events:
                pass
        if run.tokens != text.tokens:
            raise SystemExit(f"{way}: the text is not what the target said")
        counts.seconds = self._clock.now - began
        for step in counts.steps:
            counts.passes += 1
            counts.emitted += step.n_emitted
            counts.drafted += len(step.proposed)
            counts.accepted += step.n_accepted
            counts.head_passes += len(step.passes)
        return counts


def _curve(milliseconds: Sequence[float]) -> OnlineCurve:
    passes = tuple(ms / 1e3 for ms in interpolated(dict(zip(_PASSES, milliseconds, strict=True))))
    # What attention adds at the longer context: a little to one token, as much again to every eighth more.
    far = tuple(s + 0.03 * passes[0] * (1 + n / 8) for n, s in enumerate(passes))
    assert len(CONTEXTS) == len((passes, far))
    return OnlineCurve(CostCurve((passes, far), passes[-1] / N_MAX))


def table(found: dict[str, dict[str, Counts]]) -> None:
    """Print the counts of each category."""
    names = "".join(f"{name:>8}" for name in WAYS)
    print(f"{'':<16}{'texts':>6}{'tokens':>8}{names}   tokens a pass{names}   passes a text")
    ratios = []
    for category, ways in found.items():
        both = ways[BOTH]
        ratios.append(both.rate / max(way.rate for name, way in ways.items() if name != BOTH))
        line = f"{category:<16}{both.n_texts:>6}{both.emitted:>8}"
        line += "".join(f"{way.emitted / way.passes:>8.2f}" for way in ways.values()) + " " * 16
        line += "".join(f"{way.passes / way.n_texts:>8.1f}" for way in ways.values())
        print(f"{line}   both over the better one by cost: {ratios[-1]:.3f}")
        for name, way in ways.items():
            print(
                f"    {name:<12}drafted {way.drafted / way.passes:.2f}, accepted "
                f"{way.accepted / way.passes:.2f}, head passes {way.head_passes / way.passes:.2f} a pass; "
                f"{way.rate:.1f} tokens/s by cost"
            )
    print(f"geometric mean over the categories, by cost: {statistics.geometric_mean(ratios):.3f}")


def counted(args: argparse.Namespace) -> dict[str, Any]:
    """Count all ways over all texts, print and return it."""
    engine = Engine(args.target, args.draft, n_threads=args.threads)
    with ExitStack() as stack:
        stack.enter_context(engine)
        if args.texts and args.texts.exists():
            texts = load_texts(args.texts)
        else:
            texts = list(write(engine, asked_prompts(args, engine.target), args.n_predict))
            if args.texts:
                save_texts(args.texts, texts)
        assert engine.draft
        args.n_ctx = max(len(text.tokens) for text in texts) + 64
        replay = Replay(engine.target, engine.draft.path, args, stack)
        found: dict[str, dict[str, Counts]] = {}
        for text in texts:
            ways = found.setdefault(text.category, {name: Counts() for name in WAYS})
            for name in WAYS:
                ways[name].add(replay.count(text, name))
        names = {"target": engine.target_name, "draft": engine.draft_name}
    table(found)
    return {**names, "counts": {c: {n: vars(one) for n, one in ways.items()} for c, ways in found.items()}}


def main() -> None:
    parse = parser(__doc__)
    prompt_sets.add_options(parse, per_category=4)
    parse.add_argument("--agents", type=int, default=2, help="agents, of four turns each")
    parse.add_argument("-n", "--n-predict", type=int, default=160)
    parse.add_argument("--texts", type=Path, metavar="FILE", help="of the target's answers, to be kept")
    defaults = {"--target-ms": [35, 34, 34, 46, 83, 165], "--head-ms": [0.8, 0.85, 0.9, 1.0, 1.2, 1.6]}
    for name, costs in defaults.items():
        at = ", ".join(map(str, _PASSES))
        parse.add_argument(name, type=numbers(float), default=costs, help=f"T(n) at {at}; {costs}")
    args = parse.parse_args()
    if any(len(costs) != len(_PASSES) for costs in (args.target_ms, args.head_ms)):
        parse.error(f"--target-ms and --head-ms: {len(_PASSES)} numbers")
    require_kernels()
    measuring = Measuring(args)
    result = counted(args)
    measuring.end()
    print(measuring)
    measuring.keep("sources", result)


if __name__ == "__main__":
    start(main)
