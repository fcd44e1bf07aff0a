"""`edgespec quantize`: other quantizations of a model on this machine."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.completion import complete_model
from edgespec.cli.console import err, out, report_written
from edgespec.cli.groups import shown
from edgespec.cli.progress import PullDisplay, WorkDisplay
from edgespec.errors import UsageError
from edgespec.models.hub import check_disk, is_hub_name
from edgespec.models.on_disk import ARCHITECTURE, file_stem, is_ollama_name, is_whisper_source, whisper_gguf
from edgespec.models.resolve import locate, resolve
from edgespec.models.store import Store
from edgespec.platform.files import check_folder, expand_user
from edgespec.platform.machine import default_threads
from edgespec.platform.plugins import part

if TYPE_CHECKING:
    from edgespec.llama.quantize import Importance


Imatrix = Annotated[
    Path | None,
    typer.Option(
        "--imatrix",
        metavar="FILE",
        help="Which columns matter, from llama.cpp's imatrix tool; default, for iq1 to iq3 and q2_k_s: "
        "measured over texts that the model writes.",
    ),
]

OWN_TOKENS = 24_576
"""Tokens of answers that a model writes to be measured over."""


def own_texts(
    path: Path, n_tokens: int = OWN_TOKENS, *, n_threads: int, on_progress: Callable[[int, int], None]
) -> list[list[int]]:
    """Return built-in prompts with what the model at `path` answers: `n_tokens` of answers or a few more.

    `on_progress` takes the tokens so far, and all. Raises EdgespecError.
    """
    from edgespec.apps.forge.dataset import Dataset, DatasetTarget
    from edgespec.apps.forge.prompts import built_in
    from edgespec.apps.forge.writing import TargetWriter
    from edgespec.llama.weights import Model

    with (
        Model(path) as model,
        TargetWriter(model, n_threads=n_threads) as target,
        TemporaryDirectory() as folder,
    ):
        dataset = Dataset(DatasetTarget("", path.name, model.n_embd), Path(folder))
        with dataset.writer(n_tokens * (4 * model.n_embd + 64)) as writer:
            target.fill(
                writer,
                built_in(),
                until=n_tokens,
                on_progress=lambda run: on_progress(min(run.n_tokens, n_tokens), n_tokens),
            )
        return [text.tokens.tolist() for text in dataset.texts()]


def _measured(src: Path, n_threads: int) -> Importance:
    """Return the importance of the columns of `src` over texts that it writes."""
    from edgespec.apps.forge.importance import measure_importance

    n_threads = n_threads or default_threads()
    with WorkDisplay() as display:
        writing = partial(display.show, f"{src.name} writes texts to quantize by")
        tokens = own_texts(src, n_threads=n_threads, on_progress=writing)
        measuring = partial(display.show, "measuring which columns matter")
        return measure_importance(src, tokens, n_threads=n_threads, on_progress=measuring)


# ---- quantize ----


@shown("Models and drafts", "edgespec quantize qwen2.5-coder-0.5b-q4_k_m --type q4_0,q8_0 --pure -o ~/models")
def quantize_command(  # noqa: PLR0913 - a user's options
    source: Annotated[
        str,
        typer.Argument(
            help="A GGUF file, a registry name, hf:OWNER/REPO/FILE.gguf, or a Whisper model of another form.",
            autocompletion=complete_model,
        ),
    ],
    *,
    type_: Annotated[
        str, typer.Option("--type", help="One or more of q4_0, q8_0, q4_k_m, ..., with commas.")
    ],
    pure: Annotated[bool, typer.Option("--pure", help="All tensors of the same type, no mixture.")] = False,
    imatrix: Imatrix = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Directory, or a FILE.gguf; default: the source's if it is yours, else this.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
    threads: Annotated[int, typer.Option("--threads", min=0, help="0: all processors.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of paths.")] = False,
) -> None:
    """Make other quantizations of a model: SOURCE-TYPE.gguf for each type, or the file named by -o."""
    from edgespec.apps.bench.quantizations import expected_bytes, parse_types
    from edgespec.apps.forge.importance import read_importance

    types = parse_types(type_, "type")
    importance = read_importance(imatrix) if imatrix else None
    file = _single_file(output, len(types))
    src = _place(source)
    usual = Path() if _is_stored(source) else src.parent  # other programs' folders are left as they are
    directory = file.parent if file else output or usual
    stem = file_stem(source) if is_ollama_name(source) else src.stem
    targets = {name: file or directory / f"{stem}-{name}.gguf" for name in types}
    check_folder(directory, "output")
    _refuse_overwriting(src, targets.values(), force=force)
    if not is_whisper_source(src):
        with PullDisplay() as display:
            resolve(source, on_progress=display.on_progress, on_message=display.on_message)
        _refuse_made_draft(source, src)
    n_bytes = sum(expected_bytes(src, name) for name in types)
    check_disk(directory, n_bytes, ", ".join(types), "free some, or choose another -o")
    directory.mkdir(parents=True, exist_ok=True)
    quantize = _quantizer(src, types, importance, pure=pure, threads=threads)
    for name, target in targets.items():
        with err.status(f"quantizing {src.name} to {name}"):
            quantize(target, name)
        if not json:
            out.print(str(target))
        report_written(target)
    if json:
        files = [{"type": name, "path": str(t), "size": t.stat().st_size} for name, t in targets.items()]
        out.print_json(data={"source": str(src), "pure": pure, "files": files})


def _is_stored(source: str) -> bool:
    """Whether a name means a file in another program's store."""
    return (is_ollama_name(source) or is_hub_name(source)) and isinstance(locate(source), Path)


def _place(source: str) -> Path:
    """Return the file that is quantized, which may have to be pulled to it. Raises UsageError."""
    if is_whisper_source(expand_user(source)):
        return expand_user(source).resolve()
    found = locate(source)
    if isinstance(found, Path):
        return found
    if found.speech:
        raise UsageError(whisper_gguf(source))
    return Store.default().file(found)


def _quantizer(
    src: Path, types: list[str], importance: Importance | None, *, pure: bool, threads: int
) -> Callable[[Path, str], None]:
    """A function that writes `src` to a path in a type: llama.cpp's quantizer, or ours for Whisper models."""
    from edgespec.llama.gguf_header import read_header
    from edgespec.llama.quantize import ASK_IMPORTANCE, quantize

    if not is_whisper_source(src):
        if read_header(src).architecture == ARCHITECTURE:
            raise UsageError(whisper_gguf(str(src)))
        if not importance and ASK_IMPORTANCE & {*types}:
            importance = _measured(src, threads)
        return lambda target, name: quantize(
            src, target, name, pure=pure, n_threads=threads, importance=importance
        )
    if importance:
        raise UsageError("--imatrix: not for Whisper models")
    whisper = part("speech.weights")
    for name in types:
        whisper.check_whisper_type(name, "type")
    contents = whisper.read_whisper(src)
    return lambda target, name: whisper.convert_whisper(contents, target, name)


def _refuse_made_draft(source: str, file: Path) -> None:
    from edgespec.llama.gguf_header import read_header

    if read_header(file).is_head:
        raise UsageError(
            f"{source}: a draft that edgespec made, and part of it would be lost; `edgespec draft make "
            "--types` makes it in other types"
        )


def _single_file(output: Path | None, n_types: int) -> Path | None:
    """Return the file that -o names; None if it names a directory, or nothing. Raises UsageError."""
    file = output if output and output.suffix.lower() == ".gguf" and not output.is_dir() else None
    if file and n_types > 1:
        raise UsageError(f"-o {file}: one file for {n_types} types; name a directory, or one type")
    return file


def _refuse_overwriting(source: Path, targets: Collection[Path], *, force: bool) -> None:
    existing = [target for target in targets if target.exists()]
    for target in existing:
        if source.exists() and target.samefile(source):
            raise UsageError(f"-o {target}: that is the source; choose another file")
    if existing and not force:
        names = ", ".join(map(str, existing))
        raise UsageError(f"{names}: exists already; replace with --force, or choose another -o")
