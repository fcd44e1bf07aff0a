"""Options of `edgespec quantize` that say by what texts it quantizes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.progress import WorkDisplay
from edgespec.errors import UsageError
from edgespec.platform.cpu import default_threads

if TYPE_CHECKING:
    from edgespec.llama.importance import Importance

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
        from edgespec.apps.forge.calibration_texts import read_text
        from edgespec.llama.importance_file import read_importance

        if self.imatrix:
            read_importance(self.imatrix)
        for file in self.texts:
            read_text(file)

    @property
    def is_given(self) -> bool:
        """Whether the user named a source."""
        return bool(self.imatrix or self.texts)

    def importance(self, src: Path, types: list[str], n_threads: int) -> Importance | None:
        """Return the importance, measured if need be; None if neither user nor `types` ask for it."""
        from edgespec.apps.forge.calibration_texts import own_texts, texts_of
        from edgespec.llama.importance import measure_importance
        from edgespec.llama.importance_file import read_importance
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
