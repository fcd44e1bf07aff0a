"""`edgespec batch --ray`: a batch on the nodes of a Ray cluster."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.console import message
from edgespec.cli.options import SharedModels
from edgespec.errors import EdgespecError

if TYPE_CHECKING:
    from edgespec.batch.local import PromptDefaults
    from edgespec.batch.ray_cluster import RayWriter

RayOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Spread the lines over the nodes of this Ray cluster.",
        show_default="this machine alone",
    ),
]


def check_cluster() -> None:
    """Raise EdgespecError without Ray."""
    if importlib.util.find_spec("ray") is None:
        raise EdgespecError("edgespec batch --ray needs ray: pip install 'edgespec[ray]'")


def open_cluster(
    address: str,
    names: tuple[str, str | None],
    loading: SharedModels,
    defaults: PromptDefaults,
) -> RayWriter:
    """Return what answers on the cluster at `address`. Raises EdgespecError."""
    from edgespec.batch.ray_cluster import RayWriter
    from edgespec.batch.ray_node import NodeSettings
    from edgespec.llama.chat_template import template_text

    (target, draft), template = names, loading.chat_template
    settings = NodeSettings(
        target=_for_nodes(target),
        draft=_for_nodes(draft) if draft else None,
        drafter=loading.drafter,
        n_ctx=loading.ctx,
        parallel=loading.parallel,
        n_threads=loading.compute.threads,
        kernels=loading.compute.kernels,
        cache_type=loading.compute.cache_type,
        chat_template=template and template_text(template),
        defaults=defaults,
    )
    return RayWriter(address, settings, on_message=message)


def _for_nodes(name: str) -> str:
    """Return a model's name as nodes understand it: a file by its whole path."""
    return str(Path(name).absolute()) if Path(name).is_file() else name
