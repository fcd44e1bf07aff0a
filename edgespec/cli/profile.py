"""`edgespec profile`: measure what passes cost on this machine, and keep it for later runs."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import replace
from rich.table import Table

from edgespec.cli.console import message, out, print_table
from edgespec.cli.groups import grouped, shown
from edgespec.cli.options import ComputeOnNodes, ModelChoice
from edgespec.cli.progress import WorkDisplay
from edgespec.decoding.choices import DrafterName
from edgespec.engine.model_choice import has_own_head
from edgespec.engine.options import EngineOptions
from edgespec.errors import EdgespecError, describe_os_error

if TYPE_CHECKING:
    from edgespec.drafting.measure import Measured
    from edgespec.drafting.profile import CostCurve, Profile, ProfileKey

_SHOWN = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@shown("Measure", "edgespec profile --target my-model.gguf --threads 4")
@grouped
def profile_command(
    *,
    models: ModelChoice,
    compute: ComputeOnNodes,
    json: Annotated[
        bool, typer.Option("--json", help="Print the profile as JSON instead of a table.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Keep it also in place of one that was measured more reliably.")
    ] = False,
) -> int:
    """Measure what passes of the models cost on this machine, in about a minute, and keep it.

    Run it once, on a quiet machine: later runs with these models, threads and kernels begin with what
    was measured instead of a guess. What earlier runs learnt of acceptance is kept. A measurement that is
    not reliable does not replace one that was.
    """
    from edgespec.drafting.measure import measure
    from edgespec.drafting.profile import ProfileKey
    from edgespec.platform.metering import choose_meter
    from edgespec.platform.processes import SignalPipe

    chosen = models.pull("auto", compute)
    drafter: DrafterName = "model" if chosen.draft else "mtp" if has_own_head(chosen.target.found) else "none"
    with (
        SignalPipe() as signals,
        compute.load_engine(EngineOptions(chosen, drafter=drafter, signals=signals)) as engine,
    ):
        key = ProfileKey.of(
            engine.target.header,
            engine.draft.header if engine.draft else None,
            kernels=engine.kernels,
            threads=engine.n_threads,
        )
        with WorkDisplay() as display, choose_meter() as meter:
            measured = measure(
                engine.target,
                engine.draft_in_use,
                n_threads=engine.n_threads,
                on_progress=display.show,
                signals=signals,
                meter=meter,
            )
    return _store(key, measured, json=json, force=force)


def _store(key: ProfileKey, measured: Measured, *, json: bool, force: bool) -> int:
    """Store the profile unless a reliable one is there, print it, and return the exit code."""
    from edgespec.drafting.profile import Profile, profile_path, store

    profile = Profile(
        key=key,
        target=measured.target,
        draft=measured.draft,
        target_watts=measured.target_watts,
        draft_watts=measured.draft_watts,
        measured=datetime.now().astimezone().isoformat(timespec="seconds"),
        spread=measured.spread,
        reliable=measured.reliable,
    )
    kept: Profile | None = None

    def change(stored: Profile | None) -> Profile:
        nonlocal profile, kept
        if stored:
            profile = replace(profile, acceptance=stored.acceptance, runs=stored.runs)
            kept = stored if stored.reliable and not profile.reliable and not force else None
        return kept or profile

    file, reason = None, ""
    try:
        file = store(key, change, on_message=message)
    except OSError as error:
        reason = describe_os_error(error)
    if json:
        out.print(profile.as_text(), end="")
    else:
        _print(profile, measured.sweeps)
        if file and not kept:
            out.print(str(file))
    for line in measured.warnings:
        message(line)
    if kept:
        message(f"{file} is left as it is, since it was reliable ({kept.measured}); --force replaces it")
    if file is None:
        raise EdgespecError(f"{profile_path(key)}: the profile could not be kept there: {reason}")
    return 0


def _print(profile: Profile, sweeps: int) -> None:
    from edgespec.drafting.profile import CONTEXTS

    key = profile.key
    models = f"{key.target_name}, drafted by {key.draft_name}" if key.draft_name else key.target_name
    out.print(models)
    out.print(
        f"{key.kernels}, {key.threads} threads; ms a pass over n tokens, after that many tokens of context"
    )
    columns: list[tuple[str, CostCurve]] = [("target", profile.target)]
    if profile.draft:
        columns.append(("draft", profile.draft))
    table = Table("n", box=None, pad_edge=False)
    table.columns[0].justify = "right"
    for name, _ in columns:
        for context in CONTEXTS:
            table.add_column(f"{name} {context}", justify="right")
    for n in _SHOWN:
        row = [side[n - 1] for _, curve in columns for side in curve.passes]
        table.add_row(str(n), *(f"{1e3 * seconds:.1f}" for seconds in row))
    print_table(table)
    rates = ", ".join(f"{name} {1 / curve.read:.0f}" for name, curve in columns)
    out.print(f"reading, tokens/s: {rates}")
    if profile.target_watts:
        out.print(f"energy: target {profile.target_watts * profile.target.passes[0][0]:.2f} J a token")
    out.print(
        f"{sweeps} repeats, which differ by {profile.spread:.1%}"
        + ("" if profile.reliable else ": not reliable")
    )
