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
from edgespec.models.hub import format_size

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
    """Report the machine, the kernels in use and why, and the models' packed weights.

    Nothing is pulled. The exit code is 0 even with stock kernels, and 1 if a MODEL cannot be loaded.
    """
    from edgespec.cli.doctor_report import full_report

    report = full_report(ROOT, models, retest=retest)
    if json:
        out.print_json(data=report)
    else:
        _print(report, asked=bool(models))
    return EdgespecError.exit_code if any(model["error"] for model in report["models"]) else 0


# ---- text ----


def _size(n_bytes: int | None) -> str:
    return "unknown" if n_bytes is None else format_size(n_bytes)


def _print(report: Report, *, asked: bool) -> None:
    cpu, libraries, energy = report["cpu"], report["libraries"], report["energy"]
    absent = [name for name, has in cpu["features"].items() if not has]
    print_line("cpu", cpu["model"])
    present = " ".join(name for name, has in cpu["features"].items() if has)
    print_line("", present + (f"; not {' '.join(absent)}" if absent else ""))
    _print_machine(report["machine"])
    print_line("threads", _threads_line(report["threads"]))
    print_line("memory", _memory_line(report["memory"]))
    print_line("energy", energy["source"] or f"unavailable: {energy['reason']}")
    names = {"llama_cpp": "llama.cpp", "ggml": "ggml", "llama_cpp_python": "llama-cpp-python"}
    versions = [f"{name} {libraries[key]}" for key, name in names.items()]
    variant = f", its CPU backend {libraries['cpu_backend']}" if libraries["cpu_backend"] else ""
    print_line("version", f"edgespec {report['edgespec']}, {', '.join(versions)}{variant}")
    _print_kernels(report["kernels"])
    if not report["models"] and not asked:
        out.print()
        print_line("models", "the default pair is not here; name a model to see what of it is packed")
    for model in report["models"]:
        out.print()
        print_line("model", model["name"])
        print_line("", model["path"])
        if model["error"]:
            print_line("", f"cannot be loaded: {model['error']}")
        elif model["speech"]:
            _print_speech(model["speech"])
        else:
            _print_model(model)


def _print_machine(report: Report) -> None:
    """Print the facts of the machine, without those that it lacks."""
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


def _threads_line(threads: Report) -> str:
    line = f"{threads['physical']} physical cores, {threads['logical']} logical"
    if threads["fast"] < threads["physical"]:
        line += f"; the {threads['fast']} fast ones are used"
    if quota := threads["quota"]:
        line += f"; {threads['default']} used: {quota['set_by']} is {quota['processors']:.2f} processors"
    return line


def _memory_line(memory: Report) -> str:
    limit = f" under {memory['limited_by']}" if memory["limited_by"] else ""
    line = f"{_size(memory['total'])}, {_size(memory['available'])} of it available{limit}"
    speed = f"; {memory['bytes_per_s'] / 1e9:.1f} GB/s are read" if memory["bytes_per_s"] else ""
    return f"{line}; {_size(memory['peak_rss'])} used here at the peak{speed}"


def _print_kernels(found: Report) -> None:
    print_line("kernels", found["in_use"] + (f": {found['reason']}" if found["reason"] else ""))
    if found["plugin"]:
        print_line("", found["plugin"])
    if test := found["self_test"]:
        outcome = "passed" if test["passed"] else test["reason"]
        print_line("", f"self-test {outcome} ({test['isa']}, {test['when']})")
    if prefetch := found["prefetch"]:
        gain = f"{prefetch['gain']:.2f} times as fast as the default"
        why = f"measured: {gain}" if prefetch["measured"] else f"the default: {prefetch['reason']}"
        where = f"{prefetch['bytes']} bytes ahead into cache level {prefetch['level']}"
        print_line("", f"weights fetched {where} ({why})")
    if tiles := found["tiles"]:
        n = tiles["from_tokens"]
        used = f"from {n} tokens on" if n else "slower here, as measured"
        print_line("", f"tile registers (AMX): {tiles['why_not'] or used}")


def _print_speech(speech: Report) -> None:
    layers, n = " + ".join(map(str, speech["layers"])), speech["languages"]
    words = "times of words" if speech["word_times"] else "no times of words"
    known = "English" if n == 1 else f"{n} languages"
    print_line("", f"Whisper, for `edgespec transcribe`: {layers} layers, {known}, {words}")


def _print_images(images: Report) -> None:
    if images["bytes"]:
        name, size = Path(images["file"]).name, _size(images["bytes"])
        print_line("", f"images: {name} ({images['projector']}), {size} more once the first comes")
    if images["problem"]:
        print_line("", f"images: {images['problem']}")


def _print_model(model: Report) -> None:
    from edgespec.engine.capacity import Capacity
    from edgespec.llama.gguf_header import ArchitectureSupport

    name, found = model["architecture"]["name"], model["architecture"]["checked"]
    print_line("", f"{name}: {ArchitectureSupport(**found) if found else 'never checked'}")
    held = model["capacity"]
    print_line("", f"serve: {Capacity(held['parallel'], held['cache_tokens'], held['cache_bytes'])}")
    fitting = ", ".join(f"{n:,} with {name}" for name, n in model["contexts"].items())
    print_line("", f"context that fits, tokens by --cache-type: {fitting}")
    rollback = model["rollback"]
    states = f"{_size(rollback['states_bytes'])} of states for a text"
    if rollback["by"] is None:
        print_line("", "tokens cannot be taken back: nothing drafts for it")
    elif rollback["by"] == "snapshots":
        print_line("", f"keeps a state: drafts of up to {rollback['tokens']} tokens are taken back; {states}")
    elif rollback["by"] != "cells":
        print_line("", f"keeps a state: after a rejected draft its accepted tokens are read again; {states}")
    _print_images(model["images"])
    if head := model["mtp_head"]:
        print_line("", "its MTP head drafts" if head["drafts"] else f"MTP head not used: {head['reason']}")
    table = Table("type", "packed", "", "not packed", "", box=None, pad_edge=False)
    for row in model["types"]:
        cells = [(row[name], row[f"{name}_bytes"]) for name in ("packed", "not_packed")]
        table.add_row(
            row["type"], *(cell for n, size in cells for cell in (str(n), _size(size) if n else ""))
        )
    print_table(table)
    for why in dict.fromkeys(tensor["why"] for tensor in model["unpacked"]):
        names = [one["name"].removesuffix(".weight") for one in model["unpacked"] if one["why"] == why]
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        print_line("", f"not packed: {', '.join(names[:_MOST_NAMED])}{more}: {why}")
