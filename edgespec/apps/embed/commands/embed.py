"""`edgespec embed`: vectors of texts."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from edgespec.cli.completion import complete_model
from edgespec.cli.console import err, message, out, report_written
from edgespec.cli.groups import grouped, option_group, shown
from edgespec.cli.options import OUTPUT, PoolingOption, ThreadsAndKernels
from edgespec.cli.progress import WorkDisplay, pull_named
from edgespec.errors import EdgespecError, UsageError
from edgespec.platform.files import check_writable, write_file

if TYPE_CHECKING:
    from edgespec.apps.embed.embedder import Embedder, Vectors

STDIN = "-"

VectorFormat = Literal["jsonl", "npy"]


@option_group()
class EmbedInput:
    """Texts, and the model that embeds them."""

    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="Files of text, each one text; - is a pipe.")
    ]
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            "--target",
            "-t",
            help="Embedding model: a GGUF file, hf:..., or any other name that `run` takes.",
            autocompletion=complete_model,
        ),
    ]
    lines: Annotated[bool, typer.Option("--lines", help="Each line is a text.")] = False
    truncate: Annotated[
        bool,
        typer.Option("--truncate", help="Cut a text that is too long for the model; else it is refused."),
    ] = False
    pooling: PoolingOption = None
    dimensions: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Numbers of a vector, which is cut and has length 1 again; for models trained for it "
            "(Matryoshka).",
            show_default="all",
        ),
    ] = None


@option_group(OUTPUT)
class EmbedOutput:
    """Where the vectors go, and in which form."""

    format: Annotated[
        VectorFormat | None,
        typer.Option(
            "--format",
            "-f",
            help="jsonl: a JSON object a line for each text; npy: numpy's file of an array, a row for each.",
            show_default="npy for a file .npy, else jsonl",
        ),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write them there.", show_default="stdout"),
    ] = None
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, with statistics; vectors too without -o.")
    ] = False

    @property
    def kind(self) -> VectorFormat:
        """The form of the vectors."""
        by_name: VectorFormat = "npy" if self.output and self.output.suffix == ".npy" else "jsonl"
        return self.format or by_name

    def check(self) -> None:
        """Raise UsageError for a format that cannot be written to the output."""
        if self.output:
            check_writable(self.output, "output")
        elif self.json and self.format:
            raise UsageError(f"--json and --format {self.format} contradict each other: both write to stdout")
        elif self.kind == "npy" and out.is_terminal:
            raise UsageError(
                "is no text: redirect it to a file, or name one with -o", field="format", value="npy"
            )


@dataclass(frozen=True, slots=True)
class InputText:
    """A text, and where it comes from."""

    file: str
    line: int | None
    """From 1; None: the whole file."""
    text: str

    @property
    def place(self) -> str:
        """Where the text stands, for a message: its file and line."""
        name = "standard input" if self.file == STDIN else self.file
        return name if self.line is None else f"{name}:{self.line}"


@shown("Write", "edgespec embed --model nomic-embed.gguf --lines notes.txt -o vectors.npy")
@grouped
def embed_command(*, given: EmbedInput, compute: ThreadsAndKernels, output: EmbedOutput) -> int:
    """Write the vectors of texts, with an embedding model."""
    output.check()
    if given.files.count(STDIN) > 1:
        raise UsageError("-: standard input can be read only once")
    texts = [text for file in given.files for text in read_texts(file, lines=given.lines)]
    from edgespec.apps.embed.embedder import Embedder, normalised
    from edgespec.platform.processes import SignalPipe

    pull_named(given.model)
    with SignalPipe() as signals:
        with err.status("loading the model"):
            embedder = Embedder(
                given.model,
                pooling=given.pooling,
                n_threads=compute.threads,
                kernels=compute.kernels,
                interrupt=signals.interrupt,
            )
        with embedder:
            _check_model(embedder, given)
            tokens = [_tokens(embedder, text, truncate=given.truncate) for text in texts]
            began = time.perf_counter()
            with WorkDisplay() as display:
                rows = embedder.embed(tokens, lambda done: display.show("embedding", done, len(texts)))
            seconds = time.perf_counter() - began
            if given.dimensions is not None:
                rows = normalised(rows, given.dimensions)
            facts = {
                "model": embedder.model.name,
                "pooling": embedder.model.pooling,
                "dimensions": rows.shape[1],
                "texts": len(texts),
                "tokens": sum(map(len, tokens)),
                "seconds": seconds,
            }
    _write(output, [*zip(texts, map(len, tokens), strict=True)], rows, facts)
    rate = f"{facts['tokens'] / seconds:.0f} tokens/s"
    n = "1 text" if len(texts) == 1 else f"{len(texts)} texts"
    message(f"{n}, {facts['tokens']} tokens in {seconds:.2f} s ({rate})")
    return 0


def read_texts(file: str, *, lines: bool) -> Iterator[InputText]:
    """Yield the text of a file, without its last line end, or each of its `lines`. Raises UsageError."""
    whole = InputText(file, None, "")
    try:
        data = sys.stdin.buffer.read() if file == STDIN else Path(file).read_bytes()
        text = data.decode()
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{whole.place}: not UTF-8 text; convert it first") from None
    text = text.removesuffix("\n").removesuffix("\r")
    found = [InputText(file, i, line.removesuffix("\r")) for i, line in enumerate(text.split("\n"), 1)]
    for one in found if lines else [InputText(file, None, text)]:
        if not one.text.strip():
            raise UsageError(f"{one.place}: is empty, and has no vector; leave it out")
        yield one


def _check_model(embedder: Embedder, given: EmbedInput) -> None:
    model = embedder.model
    if model.ranks:
        raise EdgespecError(
            f"{given.model}: a reranking model, which makes no vectors: `edgespec serve {given.model} "
            "--embeddings` answers /v1/rerank with it"
        )
    if given.dimensions is not None and given.dimensions > model.n_outputs:
        raise UsageError(
            f"{model.name}'s vectors have {model.n_outputs} numbers",
            field="dimensions",
            value=given.dimensions,
        )


def _tokens(embedder: Embedder, text: InputText, *, truncate: bool) -> list[int]:
    try:
        return embedder.tokens(text.text, truncate=truncate)
    except UsageError as error:
        raise UsageError(f"{text.place}: {error}, or --truncate") from None


# ---- output ----


def _write(
    output: EmbedOutput, texts: list[tuple[InputText, int]], rows: Vectors, facts: dict[str, Any]
) -> None:
    """Write the vectors of `texts`, each with its number of tokens."""

    def objects() -> Iterator[dict[str, Any]]:
        for (text, n_tokens), row in zip(texts, rows, strict=True):
            line = {} if text.line is None else {"line": text.line}
            yield {"file": text.file, **line, "tokens": n_tokens, "embedding": row.tolist()}

    if output.json:
        made = {"output": str(output.output)} if output.output else {"data": [*objects()]}
        sys.stdout.write(json.dumps(facts | made, ensure_ascii=False) + "\n")
    if output.output:
        write_file(output.output, _encoded(output.kind, objects(), rows), field="output")
        report_written(output.output)
    elif not output.json:
        sys.stdout.buffer.write(_encoded(output.kind, objects(), rows))
    sys.stdout.flush()


def _encoded(kind: VectorFormat, objects: Iterator[dict[str, Any]], rows: Vectors) -> bytes:
    if kind == "jsonl":
        return "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in objects).encode()
    import numpy as np

    file = io.BytesIO()
    np.save(file, rows)
    return file.getvalue()
