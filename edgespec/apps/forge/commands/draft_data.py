"""`edgespec draft data`: the texts that a target wrote, out of a dataset and into one, as one small file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.apps.forge.commands.draft_options import TargetOption, size
from edgespec.apps.forge.commands.stage_display import StageDisplay
from edgespec.cli.console import message, out
from edgespec.cli.options import ThreadsOption
from edgespec.cli.progress import pull_named
from edgespec.engine.model_choice import choose_models
from edgespec.errors import UsageError
from edgespec.models.sources import format_size
from edgespec.platform.files import check_writable

if TYPE_CHECKING:
    from edgespec.apps.forge.dataset import Dataset
    from edgespec.apps.forge.progress import StageContext
    from edgespec.llama.gguf_header import GGUFHeader

data_app = typer.Typer(
    no_args_is_help=True,
    help="Move the texts that a model wrote for its drafts to another machine, or keep them: tokens only.",
    epilog="Example: edgespec draft data export texts.npz",
)


@data_app.command("export", epilog="Example: edgespec draft data export texts.npz -t my-7b.gguf")
def export_command(
    file: Annotated[Path, typer.Argument(help="The file to write, an .npz.", show_default=False)],
    *,
    target: TargetOption = None,
    own_texts: Annotated[
        bool,
        typer.Option("--own-texts", help="Also the texts made from your history and your files."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file of that name.")] = False,
) -> None:
    """Write the texts of a model to a file: about a byte a token, without hidden states.

    `edgespec draft data import` takes them in on another machine that has the very file of the model.
    """
    from edgespec.apps.forge.exported_texts import export_texts
    from edgespec.apps.forge.progress import StageContext

    if file.exists() and not force:
        raise UsageError(f"{file}: exists already; choose another name, or replace it with --force")
    check_writable(file, "")
    with StageDisplay() as display:
        context = StageContext(on_progress=display.show, on_message=message)
        dataset, _ = _dataset(target or choose_models(None, None, "none")[0], context)
        count = export_texts(dataset, file, own=own_texts)
    out.print(
        f"{file}: {count.n_texts:,} texts, {count.n_tokens:,} tokens, {format_size(file.stat().st_size)}"
    )
    if count.n_left_out:
        message(f"{count.n_left_out:,} texts made from your own were left out; --own-texts takes them along")


@data_app.command(
    "import",
    epilog="Examples: `edgespec draft data import texts.npz` · then: `edgespec draft make --hours 2`",
)
def import_command(
    file: Annotated[Path, typer.Argument(help="A file of `draft data export`.", show_default=False)],
    *,
    target: TargetOption = None,
    budget: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Most disk space for all texts and the hidden states along them."),
    ] = "2GB",
    threads: ThreadsOption = None,
) -> None:
    """Let a model read the texts that it wrote elsewhere: `draft make` then need not write as many.

    They must be of the very file of the model. A file that does not say whose it is needs --target. Ctrl-C
    stops it, and the same command goes on.
    """
    from edgespec.apps.forge.exported_texts import ExportedTexts, check_export, import_texts
    from edgespec.apps.forge.progress import StageContext
    from edgespec.llama.weights import Model
    from edgespec.platform.cpu import default_threads
    from edgespec.platform.signals import SignalPipe

    n_bytes = size(budget, "budget")
    check_export(file)
    name = target or choose_models(None, None, "none")[0]
    pull_named(name)
    with SignalPipe() as signals, StageDisplay() as display:
        context = StageContext(on_progress=display.show, on_message=message, signals=signals)
        dataset, header = _dataset(name, context)
        exported = ExportedTexts(file, dataset.target, is_named=target is not None)
        try:
            with Model(header.path, header=header) as model:
                count = import_texts(
                    model, dataset, exported, n_bytes, context, n_threads=threads or default_threads()
                )
        except KeyboardInterrupt:
            message("what was read is kept; the same command goes on")
            raise
    there = f"; {count.n_left_out:,} were there already" if count.n_left_out else ""
    out.print(f"{dataset.folder}: {count.n_texts:,} texts more, {count.n_tokens:,} tokens of answers{there}")


def _dataset(name: str, context: StageContext) -> tuple[Dataset, GGUFHeader]:
    """Return the dataset of a target, and the header of the target's file."""
    from edgespec.apps.forge.dataset import Dataset, DatasetTarget
    from edgespec.apps.forge.progress import StageProgress
    from edgespec.llama.gguf_header import check_model_file
    from edgespec.llama.head_file import check_target
    from edgespec.models.hashes import sha256_of
    from edgespec.models.quantizations import model_file

    def hashing(n_bytes: int) -> None:
        context.on_progress(StageProgress("hashing the target", n_bytes / header.file_bytes))

    found = model_file(name)
    header = check_model_file(found.path)
    check_target(header)
    target = DatasetTarget.of(header, found.name, sha256_of(found.path, hashing))
    return Dataset(target, on_message=context.on_message), header
