"""`edgespec draft`: makes drafts for a model on this machine, lists, judges and removes them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.apps.forge.commands.draft_options import (
    DataOptions,
    EvaluationOptions,
    MakeOptions,
    TargetOption,
    TrainingOptions,
    size,
)
from edgespec.apps.forge.commands.stage_display import StageDisplay
from edgespec.cli.completion import complete_draft
from edgespec.cli.console import message, out, print_table
from edgespec.cli.groups import grouped
from edgespec.cli.made_drafts import described, full_table
from edgespec.cli.options import JsonOption, ThreadsAndKernels, ThreadsOption
from edgespec.cli.progress import pull_named
from edgespec.engine.model_choice import choose_models
from edgespec.errors import UsageError
from edgespec.models.draft_records import draft_records
from edgespec.models.sources import format_size
from edgespec.platform.files import check_writable

if TYPE_CHECKING:
    from edgespec.apps.forge.dataset import Dataset
    from edgespec.apps.forge.progress import StageContext
    from edgespec.llama.gguf_header import GGUFHeader


draft_app = typer.Typer(
    rich_help_panel="Models and drafts",
    no_args_is_help=True,
    help="Make drafts: small, fast models that propose for a larger one; list, judge and remove them.",
    epilog="Example: edgespec draft make --hours 2",
)


_Name = Annotated[str, typer.Argument(help="A name of `edgespec draft list`.", autocompletion=complete_draft)]


@draft_app.command(
    "make",
    epilog="Examples: `edgespec draft make --hours 2` · over night: `edgespec draft make -t my-7b.gguf "
    "--hours 8 --from-history`",
)
@grouped
def make_command(
    *,
    making: MakeOptions,
    data: DataOptions,
    training: TrainingOptions,
    evaluation: EvaluationOptions,
    compute: ThreadsAndKernels,
    json: JsonOption = False,
) -> None:
    """Make the draft that makes a model fastest on this machine; keep it if it beats the one that is there.

    The model writes texts; a head is trained on them (a block that goes on from the model's hidden states),
    quantized, and judged by tokens a second. The best one is used from then on wherever none is named. The
    text stays the model's, exactly. Ctrl-C stops it, and the same command goes on.
    """
    from edgespec.apps.forge.builder import require_jax
    from edgespec.apps.forge.commands.draft_report import made_document, print_made
    from edgespec.apps.forge.draft_store import check_draft_name
    from edgespec.apps.forge.evaluation_process import N_PROMPTS
    from edgespec.apps.forge.make import MakeRequest, make
    from edgespec.apps.forge.progress import StageContext
    from edgespec.models.resolve import locate
    from edgespec.platform.signals import SignalPipe

    target = making.target or choose_models(None, None, "none")[0]
    trained = training.request()
    request = MakeRequest(
        target=target,
        data=data.request(trained),
        training=trained,
        evaluation=evaluation.settings(N_PROMPTS, compute.threads, compute.kernels),
        name=making.name,
        force=making.force,
    )
    require_jax()  # before anything is downloaded, as all that can be refused by then
    if making.name:
        check_draft_name(making.name, replace=making.force)
    if trained.start:
        locate(trained.start)
    pull_named(target, choose_models(target, None)[1])
    with SignalPipe() as signals, StageDisplay() as display:
        context = StageContext(on_progress=display.show, on_message=message, signals=signals)
        try:
            made = make(request, context)
        except KeyboardInterrupt:
            message("what was written and trained is kept; the same command goes on")
            raise
    if json:
        out.print_json(data=made_document(made))
    else:
        print_made(made)


@draft_app.command("list", epilog="Example: edgespec draft list --json")
def list_command(json: JsonOption = False) -> None:
    """List the drafts that were made here: for which file, from what, and what was measured of them."""
    drafts = draft_records(on_message=message)
    if json:
        out.print_json(data={"drafts": [described(draft) for draft in drafts]})
    elif drafts:
        print_table(full_table(drafts))
    else:
        out.print("no draft was made here yet; `edgespec draft make` makes one")


@draft_app.command(
    "eval",
    epilog="Examples: `edgespec draft eval my-draft` · `edgespec draft eval my-draft --suite human-eval`",
)
@grouped
def eval_command(
    name: _Name,
    *,
    target: TargetOption = None,
    suite: Annotated[
        str | None,
        typer.Option(
            help="Judge by these prompts: default, human-eval, or a file in Spec-Bench's format (.jsonl).",
            show_default="prompts that it was not trained on",
        ),
    ] = None,
    questions: Annotated[int, typer.Option(min=1, help="How many prompts, spread over the suite.")] = 12,
    evaluation: EvaluationOptions,
    compute: ThreadsAndKernels,
    json: JsonOption = False,
) -> None:
    """Judge a draft again: tokens a second with it, with the target's other draft, and with neither.

    What is measured for the target that it was made for replaces what its record says.
    """
    from edgespec.apps.forge.commands.draft_report import evaluated_document, print_evaluated
    from edgespec.apps.forge.evaluation import evaluate_draft
    from edgespec.apps.forge.evaluation_process import EvaluationPrompt
    from edgespec.apps.forge.progress import StageContext
    from edgespec.models.suites import evenly, load_suite
    from edgespec.platform.signals import SignalPipe

    asked = None
    if suite is not None:
        asked = [EvaluationPrompt.of(prompt) for prompt in evenly(load_suite(suite).interleaved(), questions)]
    settings = evaluation.settings(questions, compute.threads, compute.kernels)
    with SignalPipe() as signals, StageDisplay() as display:
        context = StageContext(on_progress=display.show, on_message=message, signals=signals)
        found = evaluate_draft(name, target, asked, settings, context)
    if json:
        out.print_json(data=evaluated_document(found))
    else:
        print_evaluated(found)


@draft_app.command("remove", epilog="Example: edgespec draft remove my-draft --data")
def remove_command(
    name: _Name,
    data: Annotated[
        bool,
        typer.Option("--data", help="Also the texts that its target wrote, and what is left of training."),
    ] = False,
) -> None:
    """Delete a draft that was made here: its file, its name and its record."""
    from edgespec.apps.forge.dataset_store import delete_dataset
    from edgespec.apps.forge.draft_store import remove_draft

    record, gone = remove_draft(name)
    for path in gone:
        out.print(f"{path}: deleted")
    if data:
        names = (record.target_name, record.target_sha256) if record else None
        folder, n_bytes = delete_dataset(*names) if names else (None, 0)
        _tell_of_data(folder, n_bytes)


def _tell_of_data(folder: Path | None, n_bytes: int) -> None:
    if folder is None:
        out.print("its data is not here")
    else:
        out.print(f"{folder}: deleted, {format_size(n_bytes)}")


# ---- `draft data`: the texts that a target wrote, out of a dataset and into one, as one small file ----


data_app = typer.Typer(
    no_args_is_help=True,
    help="Move the texts that a model wrote for its drafts to another machine, or keep them: tokens only.",
    epilog="Example: edgespec draft data export texts.npz",
)


draft_app.add_typer(data_app, name="data")


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
