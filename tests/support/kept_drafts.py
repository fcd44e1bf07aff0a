"""Drafts among the user's models with records as `edgespec draft make` writes them; no weights in them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from edgespec.models.draft_records import DraftRecord, DraftSpeedups, write_record
from edgespec.models.registry import add_local

RECORD = DraftRecord(
    name="mine",
    target_name="target",
    target_sha256="ab" * 32,
    target_bytes=7,
    data={"prompt:built-in": 1_234_567, "prompt:history": 30_500},
    tokens_seen=3_000_000,
    hours=1.5,
    acceptance=(0.61, 0.55, 0.5),
    cost_ratio=0.06,
    gains=DraftSpeedups(1.44, 1.21),
    processor="some processor",
    made="2026-01-02T03:04:05+00:00",
    edgespec="0.1.0",
)


def keep_draft(models: Path, name: str, target: Path, **changes: Any) -> DraftRecord:
    """Put a draft of the file `target` into the folder `models` and the user's models.toml."""
    content = target.read_bytes()
    facts = {
        "name": name,
        "target_name": target.stem,
        "target_sha256": hashlib.sha256(content).hexdigest(),
        "target_bytes": len(content),
    }
    record = replace(RECORD, **{**facts, **changes})
    file = models / f"{name}.gguf"
    models.mkdir(exist_ok=True)
    file.write_bytes(b"draft")
    write_record(file, record)
    add_local(name, file, 5, hashlib.sha256(b"draft").hexdigest())
    return record
