"""`edgespec quantize`: other quantizations of a model that is here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.completion import complete_model
from edgespec.cli.console import err, out, tell_written
from edgespec.cli.groups import shown
from edgespec.cli.progress import PullDisplay, WorkDisplay
from edgespec.decoding.sampling import SamplingParams
from edgespec.errors import EdgespecError, UsageError
from edgespec.models.found.catalog import stored_model
from edgespec.models.found.files import file_stem
from edgespec.models.found.ollama import is_ollama_name
from edgespec.models.resolve import locate, resolve
from edgespec.models.sources import check_disk
from edgespec.models.store import Store
from edgespec.models.whisper_files import ARCHITECTURE, is_whisper_source, whisper_gguf
from edgespec.platform.cpu import default_threads
from edgespec.platform.files import check_folder, expand_user, read_text_file
from edgespec.platform.plugins import part

if TYPE_CHECKING:
    from edgespec.engine.engine import Engine
    from edgespec.engine.stream import Stream
    from edgespec.llama.importance import Importance


# ---- options of `edgespec quantize` that say by what texts it quantizes ----


Imatrix = Annotated[
    Path | None,
    typer.Option(
        "--imatrix",
        metavar="FILE",
        help="Which columns matter, from llama.cpp's imatrix tool; default, for iq1 to iq3 and q2_k_s: "
        "measured over texts that the model writes.",
    ),
]
CalibrationTexts = Annotated[
    list[Path] | None,
    typer.Option("--calibrate", metavar="FILE", help="A text to measure that over instead; may be repeated."),
]


@dataclass(frozen=True, slots=True)
class ImportanceSource:
    """Where the importance of columns comes from: a file of it, texts, or the model's own texts."""

    imatrix: Path | None
    texts: tuple[Path, ...]

    def __post_init__(self) -> None:
        """Refuse both, and files that cannot be read. Raises UsageError, EdgespecError."""
        if self.imatrix and self.texts:
            raise UsageError("--imatrix and --calibrate: give one of them")
        from edgespec.llama.importance import read_importance

        if self.imatrix:
            read_importance(self.imatrix)
        for file in self.texts:
            read_text_file(file, "calibrate")

    @property
    def is_given(self) -> bool:
        """Whether the user named a source."""
        return bool(self.imatrix or self.texts)

    def importance(self, src: Path, types: list[str], n_threads: int) -> Importance | None:
        """Return the importance, measured if need be; None if neither user nor `types` ask for it."""
        from edgespec.llama.importance import measure_importance, read_importance
        from edgespec.llama.quantize import ASK_IMPORTANCE

        if self.imatrix:
            return read_importance(self.imatrix)
        if not self.texts and not ASK_IMPORTANCE & {*types}:
            return None
        n_threads = n_threads or default_threads()
        with WorkDisplay() as display:
            if self.texts:
                texts = texts_of(self.texts, src)
            else:
                writing = partial(display.show, f"{src.name} writes texts to quantize by")
                texts = own_texts(src, n_threads=n_threads, on_progress=writing)
            measuring = partial(display.show, "measuring which columns matter")
            return measure_importance(src, texts, n_threads=n_threads, on_progress=measuring)


# ---- texts to quantize by: a model's own answers to the built-in prompts, or files of the user ----


OWN_TOKENS = 24_576
"""Tokens of own texts, prompts included: 48 passes of 512."""

_AT_ONCE, _N_CTX, _N_PREDICT, _LONGEST_PROMPT = 16, 1024, 384, 512
_SAMPLING = SamplingParams(temperature=0.8)


def own_texts(
    path: Path,
    n_tokens: int = OWN_TOKENS,
    *,
    n_threads: int | None = None,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[list[int]]:
    """Return texts of `n_tokens` tokens or a few more: prompts, and what the model at `path` answers.

    `on_progress` takes the tokens so far, and all. Raises what Engine raises, and EdgespecError for a
    model that reads too few tokens at once.
    """
    from edgespec.engine.engine import Engine
    from edgespec.llama.gguf_header import read_header

    if (n_ctx := read_header(path).n_ctx_train) < _N_CTX:
        raise EdgespecError(
            f"{path}: reads {n_ctx} tokens at once, and its own texts would take {_N_CTX}; "
            "give texts with --calibrate FILE, or --imatrix FILE"
        )
    texts: list[list[int]] = []
    with Engine(
        path, drafter="none", parallel=_AT_ONCE, n_ctx=_N_CTX, n_threads=n_threads, profile=False
    ) as engine:
        prompts = _short_prompts(engine)
        running: list[Stream] = []
        while (done := sum(map(len, texts)) + sum(len(one.tokens) for one in running)) < n_tokens:
            on_progress(done, n_tokens)
            while len(running) < _AT_ONCE and engine.has_room(_LONGEST_PROMPT, _N_PREDICT):
                seed = len(texts) + len(running)
                running.append(
                    engine.stream(next(prompts), n_predict=_N_PREDICT, params=_SAMPLING, seed=seed)
                )
            engine.step()
            for stream in [*running]:
                stream.made()
                if stream.finished:
                    running.remove(stream)
                    texts.append(list(stream.tokens))
        texts += [list(stream.tokens) for stream in running]
        for stream in running:
            stream.close()
    return texts


def _short_prompts(engine: Engine) -> Iterator[list[int]]:
    from edgespec.apps.forge.prompts import built_in

    while True:
        for prompt in built_in():
            tokens = engine.prompt_tokens(prompt.turns[-1])
            if len(prompt.turns) == 1 and len(tokens) <= _LONGEST_PROMPT:
                yield tokens


def texts_of(files: Sequence[Path], path: Path) -> list[list[int]]:
    """Return the tokens of text files, in the vocabulary of the model at `path`. Raises UsageError."""
    from edgespec.llama.weights import Model

    texts = [read_text_file(file, "calibrate") for file in files]
    with Model(path, vocab_only=True) as model:
        return [model.tokenize(text, add_special=True, parse_special=False) for text in texts]


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
    calibrate: CalibrationTexts = None,
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
    from edgespec.models.quantizations import expected_bytes, parse_types

    types = parse_types(type_, "type")
    weights = ImportanceSource(imatrix, tuple(calibrate or ()))
    file = _single_file(output, len(types))
    src = _place(source)
    directory = file.parent if file else output or _default_folder(source, src)
    stem = file_stem(source) if is_ollama_name(source) else src.stem
    targets = {name: file or directory / f"{stem}-{name}.gguf" for name in types}
    check_folder(directory, "output")
    _refuse_overwriting(src, targets.values(), force=force)
    if not is_whisper_source(src):
        with PullDisplay() as display:
            resolve(source, on_progress=display.on_progress, on_message=display.on_message)
        _refuse_made_draft(source, src)
    _make_room(directory, sum(expected_bytes(src, name) for name in types), types)

    quantize = _quantizer(src, types, weights, pure=pure, n_threads=threads)
    for name, target in targets.items():
        with err.status(f"quantizing {src.name} to {name}"):
            quantize(target, name)
        if not json:
            out.print(str(target))
        tell_written(target)
    if json:
        files = [{"type": name, "path": str(t), "size": t.stat().st_size} for name, t in targets.items()]
        out.print_json(data={"source": str(src), "pure": pure, "files": files})


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
    src: Path, types: list[str], weights: ImportanceSource, *, pure: bool, n_threads: int
) -> Callable[[Path, str], None]:
    """A function that writes `src` to a path in a type: llama.cpp's quantizer, or ours for Whisper models."""
    from edgespec.llama.gguf_header import read_header
    from edgespec.llama.quantize import quantize

    if not is_whisper_source(src):
        if read_header(src).architecture == ARCHITECTURE:
            raise UsageError(whisper_gguf(str(src)))
        importance = weights.importance(src, types, n_threads)
        return lambda target, name: quantize(
            src, target, name, pure=pure, n_threads=n_threads, importance=importance
        )
    if weights.is_given:
        raise UsageError("--imatrix and --calibrate: not for Whisper models")
    whisper = part("speech.weights")
    for name in types:
        whisper.check_whisper_type(name, "type")
    contents = whisper.read_whisper(src)
    return lambda target, name: whisper.convert_whisper(contents, target, name)


def _refuse_made_draft(source: str, file: Path) -> None:
    from edgespec.llama.gguf_header import read_header

    if read_header(file).is_head:
        raise UsageError(
            f"{source}: a draft that edgespec made, of which a part would be lost; `edgespec draft make "
            "--types` makes it in other types"
        )


def _default_folder(source: str, file: Path) -> Path:
    """Return the folder of results that no option names: other programs' folders are left as they are."""
    return Path() if stored_model(source) else file.parent


def _make_room(directory: Path, n_bytes: int, types: list[str]) -> None:
    """Make the folder of the results. Raises UsageError if it cannot be, or its disk has no room."""
    check_disk(directory, n_bytes, ", ".join(types), "free some, or choose another -o")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"-o {directory}: cannot be made: {error.strerror}") from error


def _single_file(output: Path | None, n_types: int) -> Path | None:
    """Return the file that -o names; None if it names a directory, or nothing. Raises UsageError."""
    file = output if output and output.suffix.lower() == ".gguf" and not output.is_dir() else None
    if file and n_types > 1:
        raise UsageError(f"-o {file}: one file for {n_types} types; name a directory, or one type")
    if output and not file and output.exists() and not output.is_dir():
        raise UsageError(f"-o {output}: not a directory, and a file's name ends in .gguf")
    return file


def _refuse_overwriting(source: Path, targets: Collection[Path], *, force: bool) -> None:
    existing = [target for target in targets if target.exists()]
    for target in existing:
        if source.exists() and target.samefile(source):
            raise UsageError(f"-o {target}: that is the source; choose another file")
    if existing and not force:
        names = ", ".join(map(str, existing))
        raise UsageError(f"{names}: exists already; replace with --force, or choose another -o")
