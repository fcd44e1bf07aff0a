"""Facts of models that are not loaded, from their files, read in a process of its own: it loads llama.cpp."""

from __future__ import annotations

from msgspec import Struct

from edgespec.errors import EdgespecError
from edgespec.platform.child import ReportingChild, answer, say


class ModelNames(Struct, frozen=True):
    """The names of one model's files, as `resolve` takes them."""

    name: str
    target: str | None
    draft: str | None
    speech: str | None
    n_ctx: int | None


class UnloadedFacts(Struct, frozen=True):
    """The facts of a model's files."""

    n_bytes: int = 0
    """Memory that it takes, estimated."""
    weight_bytes: int = 0
    """The part of it that is weights."""
    created: int = 0
    """Time of the file, in seconds since 1970."""
    size: int = 0
    """Bytes of the target's file, or of the Whisper model's."""
    digest: str = ""
    architecture: str = ""
    parameter_size: str = ""
    quantization: str = ""
    n_ctx: int = 0
    n_embd: int = 0
    chat: bool = False
    """Whether the target has a chat template."""
    title: str = ""
    """What the target's file calls itself."""


def read_facts(models: list[ModelNames]) -> dict[str, UnloadedFacts]:
    """Return the facts of each model whose files can be read. It takes a second."""
    import msgspec

    child = ReportingChild(__name__, "main", models)
    return {name: msgspec.convert(found, UnloadedFacts) for name, found in child}


def main() -> int:
    """In the process: say the facts of each model; those of a damaged file are left out."""
    return answer(list[ModelNames], _say_all)


def _say_all(models: list[ModelNames]) -> None:
    for model in models:
        try:
            say(model.name, _facts(model))
        except (EdgespecError, OSError):  # loading it says why
            continue


def _facts(model: ModelNames) -> UnloadedFacts:
    from edgespec.apps.server.names import human_number
    from edgespec.apps.server.ollama.response_schema import digest
    from edgespec.apps.speech.speech_model import speech_model
    from edgespec.llama.gguf_header import check_complete_file
    from edgespec.models.footprint import PROCESS_BYTES, USUAL_CTX, required_bytes, weight_bytes
    from edgespec.models.found.facts import facts_of
    from edgespec.models.resolve import model_header, ref_of

    headers = [model_header(ref_of(name)) for name in (model.target, model.draft) if name]
    weights = sum(map(weight_bytes, headers))
    needed = sum(
        required_bytes(header, min(header.n_ctx_train, model.n_ctx or USUAL_CTX)) for header in headers
    )
    if model.speech:
        headers.append(check_complete_file(speech_model(model.speech)))
        weights += headers[-1].file_bytes
        needed += headers[-1].file_bytes
    first = headers[0]
    told = facts_of(first)
    return UnloadedFacts(
        n_bytes=PROCESS_BYTES + needed,
        weight_bytes=weights,
        created=int(first.path.stat().st_mtime),
        size=first.file_bytes,
        digest=digest(first),
        architecture=first.architecture,
        parameter_size=human_number(told.parameters),
        quantization=told.quantization,
        n_ctx=min(first.n_ctx_train, model.n_ctx or first.n_ctx_train) if model.target else 0,
        n_embd=first.n_embd if model.target else 0,
        chat=bool(first.gguf.text("tokenizer.chat_template")),
        title=first.name,
    )
