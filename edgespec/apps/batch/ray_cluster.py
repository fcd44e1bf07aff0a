"""A batch on a Ray cluster: a worker on each node, with its own engine.

No line is lost: requests of a worker that dies are reassigned. A line that three such workers had,
the last of them with no other line, becomes an error. Nodes that join are used once their models are loaded.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from edgespec.apps.batch.lines import BatchAnswer, BatchRequest
from edgespec.apps.batch.local import LocalWriter, PromptDefaults
from edgespec.apps.server.request_reader import Service
from edgespec.decoding.choices import DrafterName
from edgespec.engine.engine import Engine
from edgespec.errors import EdgespecError, MessageFn, UsageError, silent
from edgespec.llama.choices import CacheChoice, KernelsChoice
from edgespec.llama.gguf_header import check_model_file
from edgespec.models.resolve import resolve

# ---- the process that answers requests on a node of a Ray cluster, with an engine of its own ----


Answers = list[tuple[BatchRequest, BatchAnswer]]
WORK_S = 0.5
"""Most seconds of a call of `NodeWorker.work`."""


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """How each node loads its models."""

    target: str
    """Name in the registry, or a path that is the same on every node."""
    draft: str | None = None
    drafter: DrafterName = "auto"
    n_ctx: int | None = None
    parallel: int | None = None
    """Most requests at once; None: chosen by each node."""
    n_threads: int | None = None
    kernels: KernelsChoice = "auto"
    cache_type: CacheChoice = "f16"
    chat_template: str | None = None
    defaults: PromptDefaults = field(default_factory=PromptDefaults)


def model_facts(target: str, draft: str | None) -> dict[str, str]:
    """Return facts that must be the same on all nodes: edgespec's version and the models' fingerprints.

    Raises EdgespecError if a model is not here.
    """
    facts = {"edgespec": version("edgespec")}
    for role, model in (("target", target), ("draft", draft)):
        if model is not None:
            path = resolve(model, pull_missing=False)
            facts[f"the {role} model"] = f"SHA-256 {check_model_file(path).fingerprint()[:16]}"
    return facts


class NodeWorker:
    """A Ray actor: Ray calls one method at a time, in one thread."""

    def __init__(self) -> None:
        """Load nothing yet: this may run in another version of edgespec."""
        self._held: deque[BatchRequest] = deque()
        self._messages: list[str] = []

    def facts(self, target: str, draft: str | None) -> dict[str, str]:
        """Return `model_facts` of this node."""
        return model_facts(target, draft)

    def load(self, settings: NodeSettings) -> tuple[int, int]:
        """Load the models; return the most requests at once, and the process's id. Raises EdgespecError."""
        engine = Engine(
            settings.target,
            settings.draft,
            drafter=settings.drafter,
            n_ctx=settings.n_ctx,
            parallel=settings.parallel,
            n_threads=settings.n_threads,
            kernels=settings.kernels,
            cache_type=settings.cache_type,
            chat_template=settings.chat_template,
            prefix_cache=0,
            on_message=self._messages.append,
        )
        service, log = Service.of(engine, n_ctx=settings.n_ctx), self._messages.append
        fingerprint = service.fingerprint(engine)
        self._writer = LocalWriter(engine, service, fingerprint, defaults=settings.defaults, log=log)
        return engine.parallel, os.getpid()

    def work(self, requests: Sequence[BatchRequest]) -> tuple[Answers, int, list[str]]:
        """Add requests, and work until an answer is complete, or for `WORK_S` seconds.

        Return new answers, the tokens since the worker began (of unfinished answers too), and log lines.
        """
        self._held += requests
        writer, answers = self._writer, Answers()
        end = time.monotonic() + WORK_S
        while not answers and time.monotonic() < end:
            while self._held and writer.n_free > 0:
                writer.begin(self._held.popleft())
            if not writer.n_running:
                break
            answers = writer.finished()
        messages = [*self._messages]
        self._messages.clear()
        return answers, writer.n_tokens, messages


# ---- the cluster ----


MOST_DEATHS = 3  # of workers, after which their line becomes an error
CONNECT_S = 20.0  # within which a cluster must answer
ANSWER_S = 60.0  # that nodes have for their first answer
NO_NODE_S = 60.0  # without a node, after which a batch ends
_LOOK_S = 1.0  # between two searches for nodes
_WAIT_S = 0.5  # most of one `finished`


@dataclass(eq=False)
class _RayWorker:
    """A worker on a node, as the batch sees it."""

    node: str
    name: str
    """The node's address, for the user."""
    actor: Any
    call: Any
    """Call under way; None: idle."""
    stage: str = "facts"
    """Method of the calls: "facts", "load", then "work"."""
    parallel: int = 0
    pid: int = 0
    given: dict[int, BatchRequest] = field(default_factory=dict)
    unsent: list[BatchRequest] = field(default_factory=list)
    n_tokens: int = 0
    alone: bool = False
    """Whether it must have its one request only."""

    @property
    def n_free(self) -> int:
        return 0 if self.alone else self.parallel - len(self.given)


class RayWriter:
    """Answers as `LocalWriter` does, over the nodes of a Ray cluster; `close` frees the nodes."""

    def __init__(self, address: str, settings: NodeSettings, *, on_message: MessageFn = silent) -> None:
        """Connect to the cluster at `address`, HOST:PORT, and have its nodes load their models.

        Raises EdgespecError if there is no such cluster, or if a node lacks edgespec, or has another version
        or other models.
        """
        self._settings = settings
        self._on_message = on_message
        self._workers: list[_RayWorker] = []
        self._unusable: set[str] = set()  # nodes
        self._again: deque[BatchRequest] = deque()
        self._given_up: Answers = []
        self._n_deaths: Counter[int] = Counter()
        self._looked = self._seen = time.monotonic()  # for nodes; a node
        self.n_tokens = 0
        self._facts = model_facts(settings.target, settings.draft)
        connect(address)
        try:
            self._look_for_nodes()
            end = time.monotonic() + ANSWER_S
            for worker in [*self._workers]:
                self._check_first(worker, max(0.0, end - time.monotonic()))
            if not self._workers:
                problem = "no node of this cluster has a processor to use"
                raise EdgespecError(problem, field="ray", value=address)
        except BaseException:
            self.close()
            raise

    @property
    def n_free(self) -> int:
        """Requests that may begin now: none while some must be reassigned."""
        if self._again:
            return 0
        return sum(worker.n_free for worker in self._ready()) if any(self._ready()) else 1

    @property
    def n_running(self) -> int:
        """Requests that `finished` has yet to return."""
        return len(self._again) + len(self._given_up) + sum(len(worker.given) for worker in self._workers)

    def begin(self, request: BatchRequest) -> None:
        """Give a request to a node, or queue it until there is one."""
        if not self._give(request):
            self._again.append(request)

    def finished(self) -> Answers:
        """Wait a moment, and return the answers that came. Raises EdgespecError without nodes."""
        if time.monotonic() > self._looked + _LOOK_S:
            self._look_for_nodes()
        self._again = deque(request for request in self._again if not self._give(request))
        answers, self._given_up = self._given_up, []
        for worker in self._ready():
            if worker.call is None and worker.given:
                worker.call, worker.unsent = worker.actor.work.remote(worker.unsent), []
        calls = {worker.call: worker for worker in self._workers if worker.call is not None}
        if not calls:
            if time.monotonic() > self._seen + NO_NODE_S:
                problem = f"the Ray cluster has had no usable node for {NO_NODE_S:.0f} s"
                raise EdgespecError(f"{problem}; start one with `ray start`")
            time.sleep(_WAIT_S)
            return answers
        self._seen = time.monotonic()
        for call in ray.wait([*calls], timeout=_WAIT_S)[0]:
            answers += self._receive(calls[call])
        return answers

    def close(self) -> None:
        """End all workers, and disconnect."""
        for worker in self._workers:
            ray.kill(worker.actor)
        self._workers = []
        ray.shutdown()

    # ---- nodes ----

    def _ready(self) -> Iterator[_RayWorker]:
        return (worker for worker in self._workers if worker.stage == "work")

    def _look_for_nodes(self) -> None:
        self._looked = time.monotonic()
        used = {worker.node for worker in self._workers} | self._unusable
        for node in _nodes():
            if node["NodeID"] not in used and node["Resources"].get("CPU", 0) >= 1:
                self._workers.append(self._begin_worker(node["NodeID"], node["NodeManagerAddress"]))

    def _begin_worker(self, node: str, name: str) -> _RayWorker:
        """Start a worker there. Its class is sent by name: a node runs its own edgespec."""
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        actor = ray.remote(NodeWorker).options(num_cpus=1, scheduling_strategy=there).remote()
        call = actor.facts.remote(self._settings.target, self._settings.draft)
        return _RayWorker(node, name, actor, call)

    def _check_first(self, worker: _RayWorker, most_s: float) -> None:
        """Wait for the facts of a node at the beginning. Raises EdgespecError if they differ."""
        if ray.wait([worker.call], timeout=most_s)[0]:
            self._receive(worker, first=True)
        else:
            self._on_message(f"node {worker.name} does not answer yet; it is used when it does")

    def _check_facts(self, facts: dict[str, str]) -> None:
        for name, here in self._facts.items():
            if facts.get(name) != here:
                raise EdgespecError(f"{name} differs: {facts.get(name, 'none')} there, {here} here")

    # ---- work ----

    def _give(self, request: BatchRequest) -> bool:
        """Give a request to the ready node with most room; return whether there was one."""
        alone = self._n_deaths[request.place] == MOST_DEATHS - 1
        free = [w for w in self._ready() if w.n_free > 0 and not (alone and w.given)]
        if not free:
            return False
        worker = max(free, key=lambda worker: worker.n_free)
        worker.alone = alone
        worker.given[request.place] = request
        worker.unsent.append(request)
        return True

    def _receive(self, worker: _RayWorker, *, first: bool = False) -> Answers:
        """Read the result of a call, start the worker's next one, and return new answers.

        At the beginning (`first`) a node that cannot be used raises EdgespecError, unless it is gone.
        """
        try:
            came = ray.get(worker.call)
            if worker.stage == "facts":
                self._check_facts(came)
                worker.stage, worker.call = "load", worker.actor.load.remote(self._settings)
                return []
        except (RayError, EdgespecError) as error:
            died = isinstance(error, RayActorError)
            if first and not (died and all(node["NodeID"] != worker.node for node in _nodes())):
                raise EdgespecError(f"node {worker.name} cannot be used: {_line(error)}") from None
            self._lose(worker, "" if died else _line(error))
            return []
        if worker.stage == "load":
            worker.stage, worker.call = "work", None
            worker.parallel, worker.pid = came
            self._on_message(f"node {worker.name} is ready: {worker.parallel} at once, process {worker.pid}")
            return []
        answers, n_tokens, messages = came
        for line in messages:
            self._on_message(f"node {worker.name}: {line}")
        self.n_tokens += n_tokens - worker.n_tokens
        worker.n_tokens, worker.call = n_tokens, None
        for request, _ in answers:
            del worker.given[request.place]
        worker.alone = worker.alone and bool(worker.given)
        return Answers(answers)

    def _lose(self, worker: _RayWorker, why: str) -> None:
        """Reassign a dead worker's requests."""
        self._workers.remove(worker)
        ray.kill(worker.actor)
        if worker.stage == "work":
            lost = f"lost its worker{': ' * bool(why)}{why}"
            self._on_message(f"node {worker.name} {lost}; requests reassigned: {len(worker.given)}")
        else:
            self._unusable.add(worker.node)  # until it is started again, under another id
            ended = "the process ended before its models were loaded"
            self._on_message(f"node {worker.name} cannot be used: {why or ended}")
        for place, request in worker.given.items():
            if request in worker.unsent:  # the worker never had it
                self._again.append(request)
                continue
            self._n_deaths[place] += 1
            if self._n_deaths[place] < MOST_DEATHS:
                self._again.append(request)
                continue
            why = f"{MOST_DEATHS} processes died while they answered this request"
            error = {"message": why, "type": "server_error", "param": None, "code": "worker_died"}
            self._given_up.append((request, BatchAnswer.error(500, {"error": error})))


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _line(error: Exception) -> str:
    if isinstance(error, RayTaskError):
        if isinstance(error.cause, EdgespecError):
            return str(error.cause)
    elif isinstance(error, EdgespecError):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = (line for line in reversed(lines) if "Error" in line)
    return next(named, lines[-1] if lines else type(error).__name__)


def connect(address: str) -> None:
    """Connect to the cluster at `address`, HOST:PORT, of which this machine must be a node.

    Only in the main thread. Raises UsageError for a malformed address, EdgespecError if no cluster answers.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise UsageError("must be HOST:PORT, as `ray start --head` prints it", field="ray", value=address)
    _check_answers(address)
    # Ray prints a paragraph on stdout for each process that dies; no option ends that.
    ray._private.worker._worker_logs_enabled = False
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.CRITICAL)
    except Exception as error:  # noqa: BLE001 - Ray raises RuntimeError, ConnectionError, ValueError and AssertionError
        reason = " ".join(str(error).split())
        raise EdgespecError(
            f"this machine could not join: {reason[:200]}; "
            f"it must be a node of the cluster: ray start --address={address}",
            field="ray",
            value=address,
        ) from None
    signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own prints a stack trace


def _check_answers(address: str) -> None:
    """Raise EdgespecError if no cluster answers, asked by a child: Ray tries for minutes and aborts."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--skip-version-check"]
    try:
        answered = subprocess.run(
            [*command, "--address", address],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=CONNECT_S,
            check=False,
        )
        if answered.returncode == 0:
            return
    except subprocess.TimeoutExpired:
        pass
    problem = "no Ray cluster answers there; start one with `ray start --head`"
    raise EdgespecError(problem, field="ray", value=address)
