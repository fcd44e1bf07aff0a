"""`edgespec batch`: answers to a file of requests."""

from __future__ import annotations

import importlib.util
import json as json_text
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, nullcontext
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from edgespec.apps.batch.lines import BatchRequest, Journal, PipedResults, partial_of, refuse_existing
from edgespec.cli.console import INTERRUPTED, err, message
from edgespec.cli.groups import grouped, option_group, shown
from edgespec.cli.options import (
    OUTPUT,
    ModelChoice,
    SharedModels,
    WattsOption,
    most_tokens,
    named_drafter,
)
from edgespec.cli.progress import WorkDisplay
from edgespec.engine.options import EngineOptions
from edgespec.errors import EdgespecError, UsageError
from edgespec.platform.files import check_writable

if TYPE_CHECKING:
    from edgespec.apps.batch.lines import BatchInput
    from edgespec.apps.batch.local import LocalWriter, PromptDefaults
    from edgespec.apps.batch.ray_cluster import RayWriter
    from edgespec.decoding.choices import DrafterName
    from edgespec.engine.model_choice import ChosenModels
    from edgespec.models.resolve import ModelRef
    from edgespec.platform.metering import Measurement, Meter


class BatchDisplay(WorkDisplay):
    """Requests done and tokens a second: a bar in a terminal, elsewhere a line for each tenth, on stderr."""

    def __init__(self, results: PipedResults, n_requests: int) -> None:
        """Show the progress of `results` towards `n_requests`."""
        super().__init__()
        self._results, self._n_requests = results, n_requests
        self._tenths = results.n_done * 10 // n_requests
        self._began = time.monotonic()

    def update(self, n_tokens: int) -> None:
        """Move the bar, or print a line if one is due; `n_tokens` were written in this run."""
        n_done, n_failed, total = self._results.n_done, self._results.n_failed, self._n_requests
        what = f"{n_done} of {total} requests"
        detail = f", {n_failed} with errors" if n_failed else ""
        if n_tokens:
            detail += f", {n_tokens / max(time.monotonic() - self._began, 1e-3):.1f} tokens/s"
        if err.is_terminal:
            self.show(what, n_done, total, detail)
        elif (tenths := n_done * 10 // total) > self._tenths:
            self._tenths = tenths
            self.show(what + detail, n_done, total)


_PLAIN = "Prompts (for lines without url)"


@option_group()
class BatchFiles:
    """The files that a batch reads and writes."""

    requests: Annotated[
        Path,
        typer.Argument(
            metavar="IN", help="IN.jsonl: requests, a JSON line each; IN.txt: a prompt a line. - reads stdin."
        ),
    ]
    to: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="OUT",
            help="Write results here; - is stdout. Those of IN.txt are text, but in OUT.jsonl.",
            show_default="stdout for IN.txt",
        ),
    ] = None
    as_they_come: Annotated[
        bool, typer.Option("--as-they-come", help="Results in the order in which they came.")
    ] = False
    restart: Annotated[
        bool, typer.Option("--restart", help="Throw away OUT.jsonl and what an earlier run began.")
    ] = False
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end.", rich_help_panel=OUTPUT)
    ] = False

    @property
    def as_text(self) -> bool:
        """Whether the answers are written as text."""
        return str(self.requests).lower().endswith(".txt") and self.out.suffix.lower() != ".jsonl"

    @property
    def out(self) -> Path:
        """The file of the results; "-" is standard output."""
        return Path("-") if self.to is None else self.to

    @property
    def piped(self) -> bool:
        """Whether results cannot be read back: stdout, or a file that is a pipe or a device."""
        return str(self.out) == "-" or (self.out.exists() and not (self.out.is_file() or self.out.is_dir()))

    def check(self) -> None:
        """Raise UsageError for files that cannot be read or written as asked."""
        if self.to is None and not self.as_text:
            raise UsageError("no file for the results: give --out OUT.jsonl, or --out - for stdout")
        if self.as_text and self.as_they_come:
            raise UsageError("--as-they-come: answers as text are in the prompts' order; write -o OUT.jsonl")
        if str(self.out) == "-" and self.json:
            raise UsageError("-o - and --json contradict each other: both write to stdout")
        if self.piped:
            if self.restart:
                raise UsageError(f"--restart: nothing is kept of results that go to {self.out}")
        else:
            check_writable(self.out, "out")
        if self.requests.exists() and self.out.exists() and self.requests.samefile(self.out):
            raise UsageError(f"-o {self.out}: that is the input; choose another file")
        if not (self.piped or self.restart or partial_of(self.out).exists()):
            refuse_existing(self.out)


@option_group()
class BatchLoading(SharedModels):
    """Models of a batch, and the cluster that runs them."""

    ray: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Spread the lines over the nodes of this Ray cluster.",
            show_default="this machine alone",
        ),
    ] = None


@option_group(_PLAIN)
class PlainPrompts:
    """Defaults for lines without a url."""

    system: Annotated[str | None, typer.Option(help="System message.")] = None
    n_predict: Annotated[
        int, typer.Option("--n-predict", "-n", help="Most tokens of an answer; -1: to its end.")
    ] = -1
    temp: Annotated[
        float | None, typer.Option(min=0, max=2, help="Temperature; 0 is greedy.", show_default="0.8")
    ] = None
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of every answer.", show_default="random")] = (
        None
    )

    def defaults(self) -> PromptDefaults:
        """Return the defaults of requests that name no option. Raises UsageError."""
        from edgespec.apps.batch.local import PromptDefaults

        n_predict = most_tokens(self.n_predict)
        return PromptDefaults(system=self.system, n_predict=n_predict, temp=self.temp, seed=self.seed)


@shown("Write", "edgespec batch requests.jsonl -o answers.jsonl")
@grouped
def batch_command(
    *,
    files: BatchFiles,
    models: ModelChoice,
    loading: BatchLoading,
    plain: PlainPrompts,
    assume_watts: WattsOption = None,
) -> int:
    """Answer a file of requests, many at once: OpenAI's batch format, or plain prompts, also a line each."""
    drafter = named_drafter(loading.drafter)
    if loading.compute.cache_type == "auto":
        raise UsageError("--cache-type auto: a batch that is resumed later could get another; name a type")
    if importlib.util.find_spec("fastapi") is None:
        raise EdgespecError("edgespec batch needs fastapi: pip install 'edgespec[serve]'")
    from edgespec.apps.batch.lines import open_input
    from edgespec.platform.metering import choose_meter

    files.check()
    if loading.ray is not None and importlib.util.find_spec("ray") is None:
        raise EdgespecError("edgespec batch --ray needs ray: pip install 'edgespec[ray]'")
    defaults = plain.defaults()
    with ExitStack() as stack:
        found = open_input(files.requests, None if files.piped else files.out.absolute().parent)
        stack.enter_context(found.file)
        names = models.pull(drafter, loading.compute, chat_template=loading.chat_template)
        results = _results(stack, files, found, _belongs_to(found, names.target, loading, defaults))
        run = _BatchRun(files, found, results)
        if results.n_done < found.n_requests:
            if loading.ray is not None:
                run.answer_on_cluster(loading.ray, names, loading, defaults)
            else:
                meter = choose_meter(assume_watts=assume_watts, on_message=message)
                run.answer(names, loading, defaults, meter)
        if run.interrupted:
            return INTERRUPTED
        results.finish()
        run.summarise()
    return EdgespecError.exit_code if results.n_failed else 0


def _belongs_to(
    found: BatchInput, target: ModelRef, loading: BatchLoading, defaults: PromptDefaults
) -> dict[str, Any]:
    """The settings that decide the answers: they must be the same for a batch to resume."""
    from edgespec.engine.model_choice import adapters_of
    from edgespec.llama.chat_template import template_text
    from edgespec.llama.gguf import read_gguf
    from edgespec.llama.gguf_header import check_model_file
    from edgespec.models.resolve import resolve
    from edgespec.models.store import sha256_of

    template = loading.chat_template
    adapters = adapters_of(target, loading.compute.adapters)
    return {
        "input_sha256": found.sha256,
        "is_text": found.is_text or None,
        "target_sha256": sha256_of(check_model_file(resolve(target)).path),
        "n_ctx": loading.ctx,
        "kernels": loading.compute.kernels,
        "cache_type": loading.compute.cache_type,
        "system": defaults.system,
        "n_predict": defaults.n_predict,
        "temperature": defaults.temp,
        "seed": defaults.seed,
        "chat_template": None if template is None else template_text(template),
        "lora": [(sha256_of(read_gguf(path).path), scale) for path, scale in adapters] or None,
    }


def _results(
    stack: ExitStack, files: BatchFiles, found: BatchInput, belongs_to: dict[str, Any]
) -> PipedResults:
    """Open the destination of the results, which `stack` closes."""
    in_order = not files.as_they_come
    if not files.piped:
        journal = Journal(
            files.out,
            belongs_to,
            found.n_requests,
            in_order=in_order,
            as_text=files.as_text,
            restart=files.restart,
            on_message=message,
        )
        if journal.n_done:
            message(f"resuming: {journal.n_done} of {found.n_requests} requests are done")
        return stack.enter_context(journal)
    if str(files.out) == "-":
        file, name = sys.stdout.fileno(), "standard output"
    else:
        try:
            file, name = os.open(files.out, os.O_WRONLY | os.O_CLOEXEC), str(files.out)
        except OSError as error:
            raise UsageError(f"-o {files.out}: {error.strerror}") from None
        stack.callback(os.close, file)
    return PipedResults(file, name, found.sha256[:16], in_order=in_order, as_text=files.as_text)


class _BatchRun:
    """One run of a batch, and its figures."""

    def __init__(self, files: BatchFiles, found: BatchInput, results: PipedResults) -> None:
        self._files, self._input, self._results = files, found, results
        self._n_before = results.n_done
        self._n_tokens, self._seconds = 0, 0.0
        self._energy: Measurement | None = None
        self.interrupted = False

    def answer(
        self, names: ChosenModels, loading: BatchLoading, defaults: PromptDefaults, meter: Meter
    ) -> None:
        """Load the models and answer the requests without a result, until the last or Ctrl-C."""
        from edgespec.apps.batch.local import LocalWriter
        from edgespec.apps.server.request_reader import Service
        from edgespec.platform.processes import SignalPipe

        with (
            meter if meter.available else nullcontext(),
            SignalPipe() as signals,
            loading.compute.load_engine(
                EngineOptions(
                    names,
                    drafter=loading.drafter,
                    n_ctx=loading.ctx,
                    signals=signals,
                    prefix_cache=0,
                    parallel=loading.parallel,
                    chat_template=loading.chat_template,
                )
            ) as engine,
        ):
            service = Service.of(engine, n_ctx=loading.ctx)
            fingerprint = service.fingerprint(engine)
            writer = LocalWriter(engine, service, fingerprint, defaults=defaults, log=message)
            window = meter.begin() if meter.available else None
            try:
                self._write(writer)
            finally:
                writer.close()
                self._energy = window.end() if window else None

    def answer_on_cluster(
        self, address: str, names: ChosenModels, loading: BatchLoading, defaults: PromptDefaults
    ) -> None:
        """Have the cluster at `address` answer the requests without a result. Raises EdgespecError."""
        from edgespec.apps.batch.ray_cluster import NodeSettings, RayWriter
        from edgespec.llama.chat_template import template_text

        (target, draft), template = names, loading.chat_template
        settings = NodeSettings(
            target=_for_nodes(target.name),
            draft=_for_nodes(draft.name) if draft else None,
            drafter=cast("DrafterName", loading.drafter),
            n_ctx=loading.ctx,
            parallel=loading.parallel,
            n_threads=loading.compute.threads,
            kernels=loading.compute.kernels,
            cache_type=loading.compute.cache_type,
            chat_template=template and template_text(template),
            defaults=defaults,
        )
        with closing(RayWriter(address, settings, on_message=message)) as writer:
            self._write(writer)

    def _write(self, writer: LocalWriter | RayWriter) -> None:
        """Have `writer` answer the requests without a result, until the last or Ctrl-C."""
        began = time.monotonic()
        try:
            with BatchDisplay(self._results, self._input.n_requests) as display:
                run_batch(self._input.requests(), writer, self._results, display.update)
        except KeyboardInterrupt:
            self.interrupted = True
            done = f"{self._results.n_done} of {self._input.n_requests} requests are done"
            go_on = "nothing is kept" if self._files.piped else "run the same command again to resume"
            message(f"interrupted: {done}; {go_on}")
            self._print_failed()
        finally:
            self._n_tokens, self._seconds = writer.n_tokens, time.monotonic() - began

    def _print_failed(self) -> None:
        failed = self._results.failed
        numbers = [*islice(self._input.line_numbers(), failed[-1].place + 1)] if failed else []
        for place, custom_id, reason in failed:
            message(f"line {numbers[place]} failed ({custom_id[:80]}): {' '.join(reason.split())[:300]}")
        if more := self._results.n_failed - len(failed):
            message(f"{more} more failed: their results say why")

    def summarise(self) -> None:
        """Print the outcome, on stderr or as an object on stdout, after the first lines that failed."""
        rate = self._n_tokens / self._seconds if self._seconds else None
        joules = self._energy.joules if self._energy else None
        failed, total = self._results.n_failed, self._input.n_requests
        self._print_failed()
        if self._files.json:
            facts = {
                "out": str(self._files.out),
                "lines": total,
                "errors": failed,
                "lines_before": self._n_before,
                "cut": self._results.n_cut,
                "tokens": self._n_tokens,
                "tokens_per_s": rate,
                "seconds": self._seconds,
                "joules": joules,
            }
            sys.stdout.write(json_text.dumps(facts) + "\n")
            return
        where = "" if self._files.piped else f" in {self._files.out}"
        parts = [f"{total} results{where}", f"{failed} of them failed" if failed else "no errors"]
        if self._results.n_cut:
            parts.append(
                f"{self._results.n_cut} cut by -n, max_tokens or -c: a larger one lets them continue"
            )
        if rate is not None:
            parts.append(
                f"{self._n_tokens} tokens in {timedelta(seconds=round(self._seconds))}, {rate:.1f} tokens/s"
            )
        if joules is not None:
            about = "about " if self._energy and self._energy.estimated else ""
            parts.append(f"{about}{joules:.0f} J")
        message("; ".join(parts))


def _for_nodes(name: str) -> str:
    """Return a model's name as nodes understand it: a file by its whole path."""
    return str(Path(name).absolute()) if Path(name).is_file() else name


# ---- the loop of a batch: as many requests at once as fit, in order, each result written as it comes ----


def run_batch(
    requests: Iterator[BatchRequest],
    writer: LocalWriter | RayWriter,
    results: PipedResults,
    on_progress: Callable[[int], None] = lambda _n_tokens: None,
) -> None:
    """Answer all requests without a result, reading each only when it can begin.

    `on_progress` takes the tokens so far after each pass. Raises what `requests`, `writer`
    and `results` raise; results until then stay.
    """
    more = True
    while more or writer.n_running:
        while more and writer.n_free > 0:
            request = next(requests, None)
            if request is None:
                more = False
            elif results.has(request):
                continue
            elif request.refused:
                results.add(request, request.refused)
            else:
                writer.begin(request)
        if writer.n_running:
            for request, answer in writer.finished():
                results.add(request, answer)
        results.sync()
        on_progress(writer.n_tokens)
