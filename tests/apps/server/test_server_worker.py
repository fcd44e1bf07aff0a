"""The thread that owns the engine: turns, limits, cancellation and failures of jobs, without HTTP."""

from __future__ import annotations

import asyncio
import threading

import pytest

from edgespec import EdgespecError, EnergyMeter, Engine, SamplingParams, UsageError
from edgespec.apps.server.metrics import Metrics
from edgespec.apps.server.request_worker import QueueFull, ShuttingDown, TimedOut
from edgespec.apps.server.worker import Worker
from tiny_gguf import write_tiny_gguf
from worker_jobs import (
    N_PREDICT,
    NO_SUCH_TOKEN,
    OPTIONS,
    Gate,
    Pipe,
    WatchedEngine,
    hold,
    items_of,
    raising,
    read,
    until,
    values,
    working,
)

PROMPTS = ["abc", "the quick brown fox", "one two three", "in the on", "an and the", "zzz"]


@pytest.fixture(scope="module")
def pipe():
    with Pipe() as pipe:
        yield pipe


@pytest.fixture(scope="module")
def engine(tiny_path, tiny_draft_path, pipe):
    with WatchedEngine(
        tiny_path, tiny_draft_path, profile=False, signals=pipe, prefix_cache=1 << 24
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def prompts(engine):
    return [engine.prompt_tokens(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def alone(tiny_path, prompts):
    """The ids that each prompt gives in an engine that nobody else uses."""
    with Engine(tiny_path, drafter="none", profile=False) as fresh:
        return [
            fresh.generate(prompt, params=SamplingParams(temperature=0), n_predict=N_PREDICT).token_ids
            for prompt in prompts
        ]


# ---- turns ----


def test_tokens_of_a_step_come_together_and_the_result_last(engine, pipe, prompts, alone):
    async def main():
        async with working(engine, pipe) as worker:
            return [item async for item in items_of(worker.run(prompts[0], OPTIONS, client="one"))]

    *steps, result = asyncio.run(main())
    assert result.token_ids == alone[0]
    assert tuple(token.id for step in steps for token in step) == alone[0]
    # More may come at once where the reader was late; a step that is cut in two would be one more list.
    assert max(map(len, steps)) > 1
    assert len(steps) <= result.stats.steps + 1


# ---- limits ----


def test_a_full_queue_refuses_and_says_how_many_wait(engine, pipe, prompts):
    async def main():
        async with working(engine, pipe, max_queue=2) as worker:
            running, gate = await hold(worker, prompts[0])
            waiting = [asyncio.create_task(read(worker, prompts[1])) for _ in range(2)]
            await until(lambda: worker.n_waiting == 2)
            with pytest.raises(QueueFull, match="2 requests wait already"):
                await read(worker, prompts[2])
            gate.open.set()
            await asyncio.gather(running, *waiting)

    asyncio.run(main())


def test_time_ends_an_answer_and_a_wait(engine, pipe, prompts, alone):
    async def main():
        ends = []
        loop = asyncio.get_running_loop()
        now, later = loop.time, 0.0
        loop.time = lambda: now() + later
        async with working(engine, pipe, max_seconds=600, on_end=ends.append) as worker:
            running, gate = await hold(worker, prompts[0], n_predict=400)
            waiting = asyncio.create_task(read(worker, prompts[1]))
            await until(lambda: worker.n_waiting == 1)
            later += 601
            with pytest.raises(TimedOut, match="its turn did not come within 600 s"):
                await waiting
            gate.open.set()
            with pytest.raises(TimedOut, match="not complete within 600 s"):
                await running
        async with working(engine, pipe) as worker:
            assert (await read(worker, prompts[1])).token_ids == alone[1]
        return [ended.outcome for ended in ends]

    assert asyncio.run(main()) == ["timed out"] * 2


def test_the_time_of_an_answer_begins_with_its_turn(engine, pipe, prompts, alone):
    async def main():
        loop = asyncio.get_running_loop()
        now, later = loop.time, 0.0
        loop.time = lambda: now() + later
        async with working(engine, pipe, max_seconds=600) as worker:
            running, gate = await hold(worker, prompts[0])
            own_gate = Gate()
            waiting = asyncio.create_task(read(worker, prompts[1], on_step=own_gate))
            await until(lambda: worker.n_waiting == 1)
            later += 500
            gate.open.set()
            await until(own_gate.reached.is_set)
            later += 500
            await asyncio.sleep(0)  # the loop sees that a timer is due
            own_gate.open.set()
            return [job.token_ids for job in await asyncio.gather(running, waiting)]

    assert asyncio.run(main()) == alone[:2]


def test_a_reader_who_never_reads_stalls_nobody(engine, pipe, prompts, alone):
    async def main():
        async with working(engine, pipe) as worker:
            slow = items_of(worker.run(prompts[0], OPTIONS, client="slow"))
            first = await anext(slow)
            assert (await read(worker, prompts[1], client="quick")).token_ids == alone[1]
            rest = [item async for item in slow]
            return first, rest

    first, rest = asyncio.run(main())
    *parts, _result = rest
    assert tuple(token.id for part in (first, *parts) for token in part) == alone[0]


# ---- cancellation ----


@pytest.fixture(scope="module")
def long_prompt(tmp_path_factory):
    """A model whose reading of a prompt takes seconds, and that prompt."""
    path = write_tiny_gguf(
        tmp_path_factory.mktemp("long") / "long.gguf", n_layer=8, n_embd=256, n_ff=1024, n_ctx=8192
    )
    return path, [5 + i % 200 for i in range(8000)]


def test_cancelled_in_the_queue(engine, pipe, prompts, alone):
    async def main():
        async with working(engine, pipe) as worker:
            running, gate = await hold(worker, prompts[0])
            waiting = asyncio.create_task(read(worker, prompts[1], client="leaver"))
            await until(lambda: worker.n_waiting == 1)
            waiting.cancel()
            await until(lambda: worker.n_waiting == 0)
            assert not pipe.used.is_set(), "the one that runs is not disturbed"
            gate.open.set()
            return (await running).token_ids

    assert asyncio.run(main()) == alone[0]


def test_cancelled_while_the_prompt_is_read(long_prompt):
    path, prompt = long_prompt

    async def main():
        ends = []
        with Pipe() as pipe, Engine(path, drafter="none", profile=False, signals=pipe) as engine:
            drained = threading.Event()
            pipe.on_drain = lambda when: drained.set() if when == "after" else None
            async with working(engine, pipe, on_end=ends.append) as worker:
                task = asyncio.create_task(read(worker, prompt, drafter="none"))
                await until(drained.is_set)
                await asyncio.sleep(0.05)  # the pass has begun by now; it takes seconds
                task.cancel()
                await until(lambda: ends)
                result = await read(worker, prompt[:20], drafter="none")
        return ends[0], result.token_ids

    ended, after = asyncio.run(main())
    assert ended.outcome == "cancelled"
    assert ended.result.token_ids == ()
    assert ended.result.stats.ttft_s is None
    with Engine(path, drafter="none", profile=False) as fresh:
        options = {"params": SamplingParams(temperature=0), "n_predict": N_PREDICT}
        assert fresh.generate(prompt[:20], **options).token_ids == after


def test_cancelled_in_the_text_and_within_a_step(engine, pipe, prompts, alone):
    async def main():
        ends = []
        async with working(engine, pipe, on_end=ends.append) as worker:
            running, gate = await hold(worker, prompts[0])
            running.cancel()
            await until(pipe.used.is_set)
            gate.open.set()
            await until(lambda: ends)
            return ends[0], (await read(worker, prompts[1])).token_ids

    ended, after = asyncio.run(main())
    assert ended.outcome == "cancelled"
    assert 1 <= len(ended.result.token_ids) <= 5, "the prompt's token and at most the step's that was held"
    assert after == alone[1]


@pytest.mark.parametrize("when", ["before", "after"])
def test_cancelled_at_the_moment_it_begins(engine, pipe, prompts, alone, when):
    """The engine drains the pipe as a generation starts: a cancellation of that moment is not lost."""

    async def main():
        ends = []
        loop = asyncio.get_running_loop()
        async with working(engine, pipe, on_end=ends.append) as worker:
            task = asyncio.create_task(read(worker, prompts[0]))

            def leave(now):
                if now == when and not pipe.used.is_set():
                    loop.call_soon_threadsafe(task.cancel)
                    pipe.used.wait(60)

            pipe.on_drain = leave
            try:
                await until(lambda: ends)
            finally:
                pipe.on_drain = lambda _when: None
            return ends[0], (await read(worker, prompts[1])).token_ids

    ended, after = asyncio.run(main())
    assert ended.outcome == "cancelled"
    assert len(ended.result.token_ids) == 0
    assert after == alone[1]


def test_a_cancellation_that_comes_too_late_does_not_end_the_next(engine, pipe, prompts, alone):
    async def main():
        loop = asyncio.get_running_loop()
        tasks = []

        def leave(_ended):  # on the worker's thread: the generation is over, the job not yet
            if not pipe.used.is_set():
                loop.call_soon_threadsafe(tasks[0].cancel)
                pipe.used.wait(60)

        async with working(engine, pipe, on_end=leave) as worker:
            tasks += [asyncio.create_task(read(worker, prompts[number])) for number in (0, 1)]
            return (await asyncio.gather(*tasks, return_exceptions=True))[1].token_ids

    assert asyncio.run(main()) == alone[1]
    assert pipe.used.is_set()


# ---- failures ----


def test_a_prompt_longer_than_the_context_and_an_observer_that_fails(engine, pipe, prompts, alone):
    async def main():
        async with working(engine, pipe, on_end=raising(RuntimeError("a bug of the observer"))) as worker:
            with pytest.raises(EdgespecError, match="does not fit in a context of 512"):
                await read(worker, prompts[0] * 300)
            return (await read(worker, prompts[1])).token_ids

    assert asyncio.run(main()) == alone[1]


def test_a_loop_that_is_gone_does_not_hold_the_engine(engine, pipe, prompts, alone):
    """As where the process ends: what reads is no more, and the thread still ends in order."""
    worker = Worker(engine, pipe)
    ends = []
    worker.on_end = ends.append
    gate = Gate()
    loop = asyncio.new_event_loop()
    task = loop.create_task(read(worker, prompts[0], on_step=gate, n_predict=400))
    worker.start()
    loop.run_until_complete(until(gate.reached.is_set))
    loop._ready.clear()  # no clean end, in which the task would be cancelled
    loop.close()
    assert not task.done()
    gate.open.set()
    asyncio.run(worker.stop(grace_s=60))
    assert [ended.outcome for ended in ends] == ["cancelled"]
    assert engine.generate(prompts[1], OPTIONS).token_ids == alone[1]


# ---- what is counted ----


def test_metrics_count_what_results_say(engine, pipe, prompts):
    async def main():
        metrics = Metrics()
        async with working(engine, pipe) as worker:
            metrics.watch(worker)
            results = [await read(worker, prompts[number]) for number in (0, 1, 1)]
            running, gate = await hold(worker, prompts[2])
            waiting = asyncio.create_task(read(worker, prompts[3]))
            await until(lambda: worker.n_waiting == 1)
            during = values(metrics)
            waiting.cancel()
            await until(lambda: worker.n_waiting == 0)
            gate.open.set()
            results.append(await running)
            with pytest.raises(UsageError):
                await read(worker, prompts[0], params=NO_SUCH_TOKEN)
        return results, during, values(metrics)

    results, during, after = asyncio.run(main())
    assert (during["edgespec_queue_length"], during["edgespec_busy"]) == (1, 1)
    assert (after["edgespec_queue_length"], after["edgespec_busy"]) == (0, 0)
    ends = {"finished": 4, "cancelled": 1, "timed_out": 0, "failed": 1}
    for outcome, n in ends.items():
        assert after[f'edgespec_generations_total{{outcome="{outcome}"}}'] == n
    n_cached = sum(result.n_cached for result in results)
    assert n_cached > 0, "a prompt that was there before"
    assert after['edgespec_prompt_tokens_total{source="cache"}'] == n_cached
    n_prompt = sum(result.prompt_tokens for result in results)
    assert after['edgespec_prompt_tokens_total{source="read"}'] == n_prompt - n_cached
    assert after["edgespec_generated_tokens_total"] == sum(len(result.token_ids) for result in results)
    assert after["edgespec_drafted_tokens_total"] == sum(result.stats.n_drafted for result in results) > 0
    assert after["edgespec_accepted_tokens_total"] == sum(result.stats.n_accepted for result in results) > 0
    assert after["edgespec_first_token_seconds_count"] == 4
    assert after["edgespec_queue_seconds_count"] == 6
    assert "edgespec_joules_total" not in after, "nothing measures them"


def test_joules_are_counted_of_what_was_cancelled_too(engine, pipe, prompts):
    async def main():
        metrics = Metrics(energy=True)
        async with working(engine, pipe) as worker:
            metrics.watch(worker)
            running, gate = await hold(worker, prompts[0])
            running.cancel()
            await until(pipe.used.is_set)
            gate.open.set()
        return values(metrics)

    with EnergyMeter.choose(assume_watts=15) as engine.meter:
        found = asyncio.run(main())
    engine.meter = None
    assert found['edgespec_generations_total{outcome="cancelled"}'] == 1
    assert found["edgespec_joules_total"] > 0


# ---- the end ----


def test_after_the_grace_it_is_cancelled_and_the_engine_is_the_callers(engine, pipe, prompts, alone):
    async def main():
        async with working(engine, pipe) as worker:
            running, gate = await hold(worker, prompts[0], n_predict=400)
            stopping = asyncio.create_task(worker.stop(grace_s=600))
            await until(lambda: worker.stopping)
            hurrying = asyncio.create_task(worker.stop(grace_s=0))
            await until(pipe.used.is_set)
            gate.open.set()
            with pytest.raises(ShuttingDown):
                await running
            await asyncio.gather(stopping, hurrying)

    asyncio.run(main())
    assert engine.generate(prompts[1], OPTIONS).token_ids == alone[1]
