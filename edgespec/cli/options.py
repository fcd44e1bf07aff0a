"""Options that several commands have, said once."""

from __future__ import annotations

from typing import Annotated

import typer

from edgespec.kernels import KernelsChoice

PairOption = Annotated[
    str | None, typer.Option("--pair", "-p", help="Both by name: a pair of `edgespec models list`.")
]
ThreadsOption = Annotated[
    int | None, typer.Option(min=1, max=1024, show_default="physical cores", help="Threads.")
]
KernelsOption = Annotated[
    KernelsChoice,
    typer.Option(help="auto: edgespec's own where they can be used; off: llama.cpp's (stock)."),
]
