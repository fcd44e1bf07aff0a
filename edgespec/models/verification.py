"""The results of hashing model files again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import EdgespecError


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of hashing a present file again."""

    name: str
    path: Path
    sha256: str
    expected: str | None
    """None if no hash is known yet: any will do."""
    problem: str = ""
    """Why the file cannot be right, whatever its hash."""
    parts: tuple[Verification, ...] = ()
    """The other files of a split model; their names say which."""

    @property
    def ok(self) -> bool:
        """Whether this file and all other parts are what they should be."""
        return not self.bad

    @property
    def bad(self) -> list[Verification]:
        """The files that are not what they should be, this one and its parts."""
        own = [self] if self.problem or self.expected not in (None, self.sha256) else []
        return own + [part for part in self.parts if part.bad]

    @property
    def why(self) -> str:
        """The problem of this file, in words."""
        return self.problem or f"{self.sha256}, expected {self.expected}"


def why_incomplete(path: Path) -> str:
    """Return why a file whose hash nobody knows is no complete GGUF; "" if it is one."""
    from edgespec.llama.gguf_header import check_complete_part

    try:
        check_complete_part(path)
    except EdgespecError as error:
        return str(error)
    return ""
