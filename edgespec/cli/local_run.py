"""How `edgespec run` uses a server of the same user: finding it, the request, the answer.

    cache_root()/servers/PID.json    0600    a RunningServer, locked by the server as long as it runs

    POST PATH, with the key of that file     a RunRequest
    -> lines of JSON                         RunPart, the last one with a result or an error

The format is private: both sides belong to one installation.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from edgespec.models.registry import other_files
from edgespec.platform.files import own_file, temporary_path
from edgespec.platform.kept import SERVERS, FileIdentity, identity_of

PATH = "/edgespec/run"


class RunningServer(msgspec.Struct, frozen=True, kw_only=True):
    """A server that answers a `RunRequest`."""

    edgespec: FileIdentity
    """Identity of the installation, which both sides share."""
    address: str
    """URL."""
    key: str
    """Key of a request, in `Authorization: Bearer`."""
    target: FileIdentity
    draft: FileIdentity | None
    drafters: tuple[str, ...]
    """Drafters that a request may name."""
    tokenizer: str
    """Fingerprint of the tokenizer, by which histories are called."""
    n_ctx_train: int
    """The longest context of the target."""
    loading: str
    """Options that a text may depend on, or its speed (`Compute.for_text`)."""
    keeps_texts: bool = False
    """Whether texts of its requests are kept on disk (`--learn`, `--state-dir`)."""


class RunRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A prompt, and the options of `edgespec run` for its generation."""

    prompt: str
    images: tuple[bytes, ...] = ()
    system: str | None = None
    chat: bool | None = None
    special: bool | None = None
    """`parse_special` of `Engine.prompt_tokens`."""
    params: dict[str, object] = {}
    """Fields of SamplingParams, without the biases."""
    logit_bias: dict[int, float | None] = {}
    """None: minus infinity, which JSON lacks."""
    seed: int | None = None
    n_predict: int | None = None
    reasoning_budget: int = -1
    drafter: str | None = None
    gamma: int | None = None
    rule: str | None = None
    stop: tuple[str, ...] = ()
    grammar: tuple[str, str, tuple[str, ...]] | None = None
    """Fields of GrammarSource."""


class RunPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of the answer, of which one field is set."""

    queue: int | None = None
    """The place in the queue; 0: it has begun."""
    read: tuple[int, int] = (0, 0)
    """Tokens of the prompt that were read, and all of it."""
    tokens: tuple[tuple[int, str, str], ...] = ()
    """id, text and origin of each."""
    result: msgspec.Raw = msgspec.Raw()
    """A `Result`; empty for none."""
    prompt: tuple[int, ...] = ()
    """The prompt's tokens, with the result."""
    error: str = ""


def file_identity(path: Path) -> FileIdentity:
    """The identity of a model's files. Raises OSError."""
    return identity_of(path, *other_files(path))


def installation() -> FileIdentity:
    """The identity of this installation, which changes with it."""
    return file_identity(Path(__file__))


@contextmanager
def announced_server(server: RunningServer) -> Iterator[None]:
    """Let `running_servers` find the server inside the block, if a file can be written."""
    from filelock import lock_descriptor

    descriptor, file = None, _folder() / f"{os.getpid()}.json"
    with suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = temporary_path(file)
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        if lock_descriptor(descriptor, blocking=False):
            os.write(descriptor, msgspec.json.encode(server))
            new.replace(file)
    try:
        yield
    finally:
        if descriptor is not None:
            with suppress(OSError):
                file.unlink(missing_ok=True)
            os.close(descriptor)


def running_servers(target: Path) -> Iterator[RunningServer]:
    """Yield the user's servers of this installation whose target is this very file.

    Files of servers that ended are deleted. A file of another user, or that others may read or write, is
    ignored.
    """
    from filelock import lock_descriptor

    for file in sorted(_folder().glob("*.json")):
        with suppress(msgspec.DecodeError, OSError), own_file(file) as descriptor:
            found = os.fstat(descriptor)
            if lock_descriptor(descriptor, blocking=False):
                file.unlink(missing_ok=True)
            elif not found.st_mode & 0o077:
                server = msgspec.json.decode(os.pread(descriptor, found.st_size, 0), type=RunningServer)
                if server.edgespec == installation() and server.target == file_identity(target):
                    yield server


def read_parts(lines: Iterator[bytes]) -> Iterator[RunPart]:
    """Read the lines of an answer; empty ones keep the connection open. Raises msgspec.DecodeError."""
    for line in lines:
        if line.strip():
            yield msgspec.json.decode(line, type=RunPart)


def write_part(part: RunPart) -> str:
    """Return the line of a part."""
    return msgspec.json.encode(part).decode() + "\n"


def _folder() -> Path:
    return SERVERS.path()
