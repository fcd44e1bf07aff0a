"""Several jobs at once share the engine's passes: each answer is the one that its prompt gets alone."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass
from typing import Any

import pytest

from edgespec import Engine, SamplingParams
from edgespec.apps.server.request_worker import QueuedRequest, RequestQueue, ShuttingDown, TimedOut
from edgespec.apps.server.worker import Worker
from edgespec.decoding.grammars import Grammar
from edgespec.decoding.options import Options
from edgespec.decoding.records import Result, Token
from worker_jobs import FAILURES, OPTIONS, Gate, Pipe, WatchedEngine, hold, items_of, read, until, working

PARALLEL = 4
GREEDY = SamplingParams(temperature=0)
LONG = "the quick brown fox jumps over the lazy dog and then once more "
PROMPTS = [LONG + "abc", LONG + "one two three", "zzz", "in the on", LONG * 4 + "an and the", LONG]


@pytest.fixture(scope="module")
def pipe():
    with Pipe() as pipe:
        yield pipe


@pytest.fixture(scope="module")
def engine(kernels, packable_path, tiny_draft_path, pipe):
    with WatchedEngine(
        packable_path, tiny_draft_path, profile=False, signals=pipe, prefix_cache=1 << 20, parallel=PARALLEL
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def fresh(kernels, packable_path, tiny_draft_path):
    """An engine that writes one text at a time, and reads each prompt from its beginning."""
    with Engine(packable_path, tiny_draft_path, profile=False) as fresh:
        yield fresh


@pytest.fixture(scope="module")
def prompts(engine):
    return [engine.prompt_tokens(prompt, chat=False) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def alone(fresh, prompts):
    return [fresh.generate(prompt, OPTIONS).token_ids for prompt in prompts]


def ids(results: list[Result]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in results]


# ---- answers are those that prompts get alone ----


def test_passes_are_shared_and_answers_are_the_same(engine, pipe, prompts, alone, monkeypatch):
    passes, step = [], engine.step

    def noted():
        step()
        passes.append(engine.last_pass)

    monkeypatch.setattr(engine, "step", noted)

    async def main():
        async with working(engine, pipe) as worker:
            return await asyncio.gather(*(read(worker, prompt) for prompt in prompts))

    results = asyncio.run(main())
    assert ids(results) == alone
    assert max(one.n_requests for one in passes) == PARALLEL, "some passes are of four texts, none of more"
    n_read = sum(result.prompt_tokens - result.n_cached for result in results)
    assert sum(one.n_tokens for one in passes) >= n_read + sum(result.stats.steps for result in results)
    assert 0 < sum(one.n_prefilled for one in passes) <= n_read


def test_no_pass_is_interrupted_while_another_job_needs_it(engine, pipe, prompts, alone):
    async def main():
        async with working(engine, pipe) as worker:
            stays = asyncio.create_task(read(worker, prompts[1]))
            leaves, gate = await hold(worker, prompts[0], n_predict=400)
            await until(lambda: worker.n_running == 2)
            leaves.cancel()
            await asyncio.sleep(0)
            assert not pipe.used.is_set()
            gate.open.set()
            return (await stays).token_ids

    assert asyncio.run(main()) == alone[1]


@dataclass(frozen=True)
class Request:
    """What a client of the random test asks for, and what it does."""

    number: int
    options: Options
    client: str
    delay_s: float
    leaves_after: int | None
    """Items after which the client goes away; None: it reads to the end."""


def random_request(rng: random.Random, grammars: list[Grammar | None]) -> Request:
    params = rng.choice([GREEDY, SamplingParams(temperature=0.9), SamplingParams(repeat_penalty=1.3)])
    options = Options(
        params=params,
        seed=rng.randrange(1000),
        n_predict=rng.choice([1, 5, 20, 60]),
        drafter=rng.choice([None, "none", "suffix", "model"]),
        gamma=rng.choice([None, None, 0, 3, 8]),
        stop=rng.choice([(), ("the",)]),
        grammar=rng.choice([None, None, *grammars]),
        n_logprobs=rng.choice([None, None, 0, 3]),
    )
    leaves_after = rng.choice([None, None, 0, 1, 3])
    return Request(rng.randrange(6), options, rng.choice("abc"), rng.random() * 0.3, leaves_after)


async def ask(worker: Worker, request: Request, prompt: list[int]) -> list[Token] | None:
    """Return what the client read; None if it left."""
    await asyncio.sleep(request.delay_s)
    tokens: list[Token] = []
    n_items = 0
    job = items_of(worker.run(prompt, request.options, client=request.client))
    if request.leaves_after == 0:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(anext(job), 0.001)
        await job.aclose()
        return None
    async for item in job:
        n_items += 1
        if isinstance(item, list):
            tokens += item
        if n_items == request.leaves_after and not isinstance(item, Result):
            await job.aclose()
            return None
    return tokens


@pytest.mark.parametrize("seed", range(4))
def test_random_clients_get_what_they_get_alone(engine, fresh, pipe, prompts, seed):
    rng = random.Random(seed)
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    grammars = [Grammar(engine.target, "root ::= [a-z ]*"), Grammar.from_json_schema(engine.target, schema)]
    requests = [random_request(rng, grammars) for _ in range(24)]

    async def main():
        async with working(engine, pipe) as worker:
            return await asyncio.gather(*(ask(worker, one, prompts[one.number]) for one in requests))

    found = asyncio.run(main())
    n_compared = 0
    for request, tokens in zip(requests, found, strict=True):
        if tokens is None:
            continue
        grammar = request.options.grammar
        own = grammar and Grammar(fresh.target, grammar.source)
        wanted = [*fresh.stream(prompts[request.number], request.options.changed(grammar=own))]
        assert [said(token) for token in tokens] == [said(token) for token in wanted], request
        n_compared += 1
    assert n_compared > 6


def said(token: Token) -> tuple[Any, ...]:
    return token.id, token.text, token.logprob, token.top


# ---- one job's end is its own ----


@pytest.mark.parametrize(("options", "expected"), FAILURES)
def test_a_failure_is_one_jobs_alone(engine, pipe, prompts, alone, options, expected):
    async def main():
        async with working(engine, pipe) as worker:
            good = [asyncio.create_task(read(worker, prompts[n])) for n in (1, 2)]
            await until(lambda: worker.n_running == 2)
            with pytest.raises(expected):
                await read(worker, prompts[0], **options)
            return ids(await asyncio.gather(*good))

    assert asyncio.run(main()) == alone[1:3]


def test_a_step_that_fails_for_all_ends_those_under_way_and_no_later_one(
    engine, pipe, prompts, alone, monkeypatch
):
    def fails():
        monkeypatch.undo()
        raise RuntimeError("a bug of the engine")

    async def main():
        async with working(engine, pipe) as worker:
            running, gate = await hold(worker, prompts[0])
            monkeypatch.setattr(engine, "step", fails)
            gate.open.set()
            with pytest.raises(RuntimeError, match="a bug of the engine"):
                await running
            return (await read(worker, prompts[1])).token_ids

    assert asyncio.run(main()) == alone[1]


def test_time_ends_one_answer_of_several(engine, pipe, prompts, alone):
    async def main():
        loop = asyncio.get_running_loop()
        now, later = loop.time, 0.0
        loop.time = lambda: now() + later
        async with working(engine, pipe, max_seconds=600) as worker:
            first, gate = await hold(worker, prompts[0], n_predict=400)
            later += 500
            second = asyncio.create_task(read(worker, prompts[1]))
            await asyncio.sleep(0)
            later += 150
            await asyncio.sleep(0.01)  # the loop sees that a timer is due
            gate.open.set()
            with pytest.raises(TimedOut, match="not complete within 600 s"):
                await first
            return (await second).token_ids

    assert asyncio.run(main()) == alone[1]


# ---- the queue ----


def job_of(client: str, loop: asyncio.AbstractEventLoop) -> QueuedRequest[Token, Result]:
    return QueuedRequest(client, loop)


def test_turns_go_to_the_client_with_the_fewest_jobs_under_way():
    loop = asyncio.new_event_loop()
    turns, running, begun = RequestQueue(), [], []
    for client in "aaaabbc":
        turns.add(job_of(client, loop))
    expected = [job.client for job in turns.in_order(running)]
    while turns:
        job = turns.in_order(running)[0]
        turns.begin(job)
        running.append(job)
        begun.append(job.client)
    assert begun == expected == ["a", "b", "c", "a", "b", "a", "a"]
    turns.add(job_of("a", loop))
    turns.add(job_of("d", loop))
    assert [job.client for job in turns.in_order(running)] == ["d", "a"], "a has four under way"
    loop.close()


# ---- the end ----


async def held_at_first_step(worker, prompts, **options):
    """Start `worker` with a job for each of `prompts`; return them, and what holds the first pass of all."""
    gate = Gate()
    first = asyncio.create_task(read(worker, prompts[0], on_step=gate, **options))
    tasks = [first, *(asyncio.create_task(read(worker, prompt, **options)) for prompt in prompts[1:])]
    await until(lambda: worker.n_waiting == len(prompts))
    worker.start()
    await until(gate.reached.is_set)
    return tasks, gate


def test_answers_under_way_are_completed_and_all_others_are_refused(engine, pipe, prompts, alone):
    async def main():
        async with working(engine, pipe, start=False) as worker:
            (*running, late), gate = await held_at_first_step(worker, prompts[: PARALLEL + 1])
            assert (worker.n_running, worker.n_waiting) == (PARALLEL, 1)
            stopping = asyncio.create_task(worker.stop(grace_s=60))
            with pytest.raises(ShuttingDown):
                await late
            gate.open.set()
            await stopping
            return ids(await asyncio.gather(*running))

    assert asyncio.run(main()) == alone[:PARALLEL]
