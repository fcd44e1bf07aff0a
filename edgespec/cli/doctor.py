"""`edgespec doctor`: what this machine has and can hold, which kernels are in use, and for which weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from edgespec.cli.completion import complete_model
from edgespec.cli.console import out, print_line, print_table
from edgespec.cli.groups import shown
from edgespec.cli.options import JsonOption
from edgespec.errors import EdgespecError

if TYPE_CHECKING:
    from edgespec.cli.doctor_report import Report

ROOT = Path("/")
"""Root of the /proc and /sys that are read; tests replace it."""

_MOST_NAMED = 4  # matrices named in the text for one reason; --json names all


@shown("Machine", "edgespec doctor --retest my-model.gguf")
def doctor_command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="Models to look into: files or names of `edgespec models list`.",
            show_default="the default pair, if it is here",
            autocompletion=complete_model,
        ),
    ] = None,
    *,
    retest: Annotated[bool, typer.Option("--retest", help="Test and time the kernels now.")] = False,
    json: JsonOption = False,
) -> int:
    """Report the machine, the kernels in use and why, which pairs of models fit, and the weights packed.

    Nothing is pulled. The exit code is 0 with stock kernels too, and 1 if a MODEL cannot be loaded.
    """
    from edgespec.cli.doctor_report import full_report

    report = full_report(ROOT, models, retest=retest)
    if json:
        out.print_json(data=report)
    else:
        _print(report, asked=bool(models))
    return EdgespecError.exit_code if any(model["error"] for model in report["models"]) else 0


# ---- text ----


def _print(report: Report, *, asked: bool) -> None:
    from edgespec.cli.doctor_report import size

    threads, memory = report["threads"], report["memory"]
    features = report["cpu"]["features"]
    present = [name for name, has in features.items() if has]
    absent = [name for name, has in features.items() if not has]
    print_line("cpu", report["cpu"]["model"])
    print_line("", " ".join(present) + (f"; not {' '.join(absent)}" if absent else ""))
    _print_machine(report["machine"])
    print_line("threads", _threads_line(threads))
    print_line(
        "memory",
        f"{size(memory['total'])}, {size(memory['available'])} of it available"
        + (f" under {memory['limited_by']}" if memory["limited_by"] else "")
        + "; "
        f"{size(memory['peak_rss'])} used here at the peak"
        + (f"; {memory['bytes_per_s'] / 1e9:.1f} GB/s are read" if memory["bytes_per_s"] else ""),
    )
    print_line("energy", report["energy"]["source"] or f"unavailable: {report['energy']['reason']}")
    libraries = report["libraries"]
    variant = f", its CPU backend {libraries['cpu_backend']}" if libraries["cpu_backend"] else ""
    print_line(
        "version",
        f"edgespec {report['edgespec']}, llama.cpp {libraries['llama_cpp']}, ggml {libraries['ggml']}, "
        f"llama-cpp-python {libraries['llama_cpp_python']}{variant}",
    )
    _print_kernels(report["kernels"])
    out.print()
    _print_pairs(report["pairs"])
    if not report["models"] and not asked:
        out.print()
        print_line("models", "the default pair is not here; name a model to see what of it is packed")
    for model in report["models"]:
        _print_model(model)


def _print_machine(report: Report) -> None:
    """Print what is known of the machine; leave out what it does not have."""
    if report["model"]:
        revision = f", revision {report['revision']}" if report["revision"] else ""
        print_line("board", f"{report['model']}{revision}, {report['processors']} processors")
    if speed := report["clock_mhz"]:
        now = f", now {speed['now']:.0f}" if speed["now"] else ""
        governors = f", governor {', '.join(speed['governors'])}" if speed["governors"] else ""
        print_line("clock", f"{speed['least']:.0f} to {speed['most']:.0f} MHz{now}{governors}")
    if report["degrees"]:
        hottest, degrees = [*report["degrees"].items()][-1]
        print_line("heat", f"{degrees:.0f} degrees ({hottest})")
    if slowed := report["firmware"]:
        now, since_start = (", ".join(slowed[when]) or "all is well" for when in ("now", "since_start"))
        print_line("firmware", f"now {now}; since the start {since_start}")


def _print_pairs(report: list[Report]) -> None:
    """Print the pairs as a table."""
    from edgespec.cli.doctor_report import size

    table = Table("pair", "target", "memory", "", box=None, pad_edge=False)
    for row in report:
        fits = {True: "fits", False: "too large", None: "unknown"}[row["fits"]]
        table.add_row(row["pair"], row["target"], size(row["needed"]), fits)
    print_table(table)


def _threads_line(threads: Report) -> str:
    line = f"{threads['physical']} physical cores, {threads['logical']} logical"
    if threads["fast"] < threads["physical"]:
        line += f"; the {threads['fast']} fast ones are used"
    if quota := threads["quota"]:
        line += f"; {threads['default']} used: {quota['set_by']} is {quota['processors']:.2f} processors"
    return line


def _print_kernels(found: Report) -> None:
    print_line("kernels", found["in_use"] + (f": {found['reason']}" if found["reason"] else ""))
    if found["plugin"]:
        print_line("", found["plugin"])
    if test := found["self_test"]:
        outcome = "passed" if test["passed"] else test["reason"]
        print_line("", f"self-test {outcome} ({test['isa']}, {test['when']})")
    if prefetch := found["prefetch"]:
        where = f"weights fetched {prefetch['bytes']} bytes ahead into cache level {prefetch['level']}"
        if not prefetch["measured"]:
            why = f"the default; not measured: {prefetch['reason']}"
        elif prefetch["gain"] > 1:
            why = f"measured: {prefetch['gain']:.2f} times as fast as the default"
        else:
            why = "measured: the default is as fast as any"
        print_line("", f"{where} ({why})")


def _rollback_line(rollback: Report) -> str:
    """Say how tokens are taken back, where that is not as usual."""
    from edgespec.cli.doctor_report import size

    held = f"{size(rollback['states_bytes'])} of states for a text"
    return {
        None: "tokens cannot be taken back: nothing drafts for it",
        "cells": "",
        "snapshots": f"keeps a state: drafts of up to {rollback['tokens']} tokens are taken back; {held}",
        "reading again": f"keeps a state: after a rejected draft its accepted tokens are read again; {held}",
    }[rollback["by"]]


def _print_model(model: Report) -> None:
    from edgespec.cli.doctor_report import size
    from edgespec.engine.capacity import Capacity
    from edgespec.llama.gguf_header import ArchitectureSupport

    out.print()
    print_line("model", model["name"])
    print_line("", model["path"])
    if model["error"]:
        print_line("", f"cannot be loaded: {model['error']}")
        return
    if speech := model["speech"]:
        layers, n = " + ".join(map(str, speech["layers"])), speech["languages"]
        words = "times of words" if speech["word_times"] else "no times of words"
        known = "English" if n == 1 else f"{n} languages"
        print_line("", f"Whisper, for `edgespec transcribe`: {layers} layers, {known}, {words}")
        return
    name, found = model["architecture"]["name"], model["architecture"]["checked"]
    print_line("", f"{name}: {ArchitectureSupport(**found) if found else 'never checked'}")
    held = model["capacity"]
    print_line("", f"serve: {Capacity(held['parallel'], held['cache_tokens'], held['cache_bytes'])}")
    fitting = ", ".join(f"{n:,} with {name}" for name, n in model["contexts"].items())
    print_line("", f"context that fits, tokens by --cache-type: {fitting}")
    if line := _rollback_line(model["rollback"]):
        print_line("", line)
    if head := model["mtp_head"]:
        print_line("", "its MTP head drafts" if head["drafts"] else f"MTP head not used: {head['reason']}")
    table = Table("type", "packed", "", "not packed", "", box=None, pad_edge=False)
    for row in model["types"]:
        table.add_row(
            row["type"],
            str(row["packed"]),
            size(row["packed_bytes"]) if row["packed"] else "",
            str(row["not_packed"]),
            size(row["not_packed_bytes"]) if row["not_packed"] else "",
        )
    print_table(table)
    by_reason: dict[str, list[str]] = {}
    for tensor in model["unpacked"]:
        by_reason.setdefault(tensor["why"], []).append(tensor["name"].removesuffix(".weight"))
    for why, names in by_reason.items():
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        print_line("", f"not packed: {', '.join(names[:_MOST_NAMED])}{more}: {why}")
