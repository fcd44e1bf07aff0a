"""The drafts that a target has: those made on this machine, by their records, and those of registered pairs.

    models/NAME.gguf         the draft, an ordinary entry of the user's models.toml
    models/NAME.draft.json   its record: for which file it was made, from what, and what was measured of it

A draft belongs to one file of a target: the hash decides, not the name or the place, so that neither another
model nor another quantization of the same one gets it. Only a file of the right size is hashed, and once
(store.py). A draft whose name was removed is not used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from edgespec.errors import EdgespecError, MessageFn, describe_os_error, silent
from edgespec.models.registry import Entry, Registry, load_registry
from edgespec.models.resolve import ModelRef, ref_of
from edgespec.models.store import SHA256, Store, combined, sha256_of
from edgespec.platform.files import write_atomically

_SUFFIX = ".draft.json"

_Amount = Annotated[int, msgspec.Meta(ge=0)]
_Number = Annotated[float, msgspec.Meta(ge=0)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Factor = Annotated[float, msgspec.Meta(gt=0)]


class DraftSpeedups(msgspec.Struct, frozen=True):
    """Tokens a second divided by those of plain decoding, measured on held-out prompts."""

    greedy: _Factor
    """At temperature 0."""
    sampled: _Factor
    """At temperature 0.8."""

    @property
    def mean(self) -> float:
        """The geometric mean of both, by which drafts are compared."""
        return math.sqrt(self.greedy * self.sampled)


class DraftRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a draft that was made on this machine."""

    name: str
    """Its name in models.toml."""
    family: Literal["head"] = "head"
    """Kind of draft."""
    target_name: str
    """Name of its target; `target_sha256` decides."""
    target_sha256: SHA256
    target_bytes: _Amount
    """Size of the target's file: one of another size need not be hashed."""
    data: dict[str, _Amount] = msgspec.field(default_factory=dict)
    """Source ("prompt:built-in", "prompt:history", "prompt:file", "read") -> tokens that it was made from."""
    tokens_seen: _Amount = 0
    """Tokens of training, repetitions counted."""
    hours: _Number = 0.0
    """Hours of training."""
    joules: _Number | None = None
    """Energy spent making it; None: not measured."""
    joules_reason: str = ""
    """Why there are no joules, in one line."""
    acceptance: tuple[_Share, ...] = ()
    """Share of held-out places where its likeliest token is the target's: at position 1, at position 2 given
    that the first was, and so on."""
    cost_ratio: _Factor
    """c: seconds of its pass over one token, divided by the target's."""
    gains: DraftSpeedups
    """Speed-ups when it was last evaluated."""
    processor: str = ""
    """Processor of that evaluation."""
    made: str
    """Date and time, ISO 8601."""
    parent: str | None = None
    """The draft whose weights it started from."""
    edgespec: str = ""
    """Version that made it."""
    format: Literal[1] = 1
    """Version of the record; those of other versions are not used."""

    @property
    def uses_own_texts(self) -> bool:
        """Whether it was made from the user's own texts: the history, or files."""
        return any(n > 0 for source, n in self.data.items() if source != "prompt:built-in")


def record_file(draft: Path) -> Path:
    """Return where the record of the draft's file `draft` is, or would be."""
    return draft.with_name(draft.name.removesuffix(".gguf") + _SUFFIX)


def record_text(record: DraftRecord) -> bytes:
    """Return the content of a record's file."""
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"


def write_record(draft: Path, record: DraftRecord) -> None:
    """Write the record of the file `draft`, whole or not at all. Raises EdgespecError."""
    try:
        write_atomically(record_file(draft), record_text(record))
    except OSError as error:
        raise EdgespecError(f"cannot write the draft's record: {describe_os_error(error)}") from error


def read_record(draft: Path) -> DraftRecord | None:
    """Return the record of the file `draft`; None if it has none. Raises EdgespecError for a damaged one."""
    file = record_file(draft)
    try:
        return msgspec.json.decode(file.read_bytes(), type=DraftRecord)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise EdgespecError(f"a draft's record cannot be read: {describe_os_error(error)}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EdgespecError(
            f"{file}: no record of a draft that this edgespec reads ({error}); its draft is not used "
            f"unless you name it; remove it with `edgespec draft remove {draft.stem}`"
        ) from None


def draft_records(registry: Registry | None = None, on_message: MessageFn = silent) -> list[DraftRecord]:
    """Return the records of all drafts that have a name and a file here, oldest first.

    `on_message` takes a line for each unusable record.
    """
    found = []
    for entry in (registry or load_registry()).entries.values():
        if entry.path is None or not entry.path.is_file():
            continue
        try:
            record = read_record(entry.path)
        except EdgespecError as error:
            on_message(str(error))
            continue
        if record and record.name == entry.name:
            found.append(record)
    return sorted(found, key=lambda record: record.made)


def drafts_for(target: str | ModelRef, on_message: MessageFn = silent) -> list[DraftRecord]:
    """Return the drafts that were made for the exact file of `target` (a path or a name), the best first.

    Nothing is pulled: a target that is not on this machine has none. Raises UsageError for an unknown target.
    """
    return best_first(_fitting(target, on_message))


def best_first(records: Iterable[DraftRecord]) -> list[DraftRecord]:
    """Return the drafts in the order in which they are chosen if none is named."""
    return sorted(records, key=lambda one: (one.gains.mean, one.made), reverse=True)


def _fitting(target: str | ModelRef, on_message: MessageFn) -> Iterator[DraftRecord]:
    records = draft_records(on_message=on_message)
    path = _file_of(target) if records else None
    for record in records:
        if path and path.stat().st_size == record.target_bytes and record.target_sha256 == sha256_of(path):
            yield record


def paired_draft(target: str | ModelRef, *, writes: bool = False) -> str | None:
    """Return the draft of the registry's first pair with `target` (a path or a name); None if no pair has it.

    A pair also applies to every other file with the hash of its target, if the draft is on this machine.
    `writes`: as of `PairNames.partner`. Raises UsageError for an unknown target.
    """
    registry, target = load_registry(), ref_of(target)
    if partner := registry.complete(target.name, None, writes=writes)[1]:
        return partner
    path = _file_of(target)
    for pair in registry.pairs.values() if path else ():
        draft = pair.partner(writes=writes)
        if path and is_here(draft) and _is_file_of(registry.get(pair.target), path):
            return draft
    return None


def is_here(name: str) -> bool:
    """Whether a model of the registry is on this machine."""
    registry = load_registry()
    return Store.default().is_present(registry.get(name), registry)


def _file_of(target: str | ModelRef) -> Path | None:
    """Return the file that `target` means; None if it is not here. Raises UsageError for an unknown one."""
    found = ref_of(target).found
    path = Store.default().file(found) if isinstance(found, Entry) else found
    return path if path.is_file() else None


def _is_file_of(entry: Entry, path: Path) -> bool:
    known = entry if entry.sha256 else Store.default().stamp(entry)
    if known is None or known.sha256 is None or known.size != path.stat().st_size:
        return False
    return sha256_of(path) == combined([known.sha256, *filter(None, entry.parts)])
