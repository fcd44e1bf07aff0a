"""The `edgespec` command: its sub-commands, and how every failure becomes one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from edgespec.cli.bench import bench_command
from edgespec.cli.cache import cache_app
from edgespec.cli.calibrate import calibrate_command
from edgespec.cli.chat import chat_command
from edgespec.cli.compare import compare_command
from edgespec.cli.console import INTERRUPTED, out, print_error
from edgespec.cli.doctor import doctor_command
from edgespec.cli.draft import draft_app
from edgespec.cli.energy import energy_command
from edgespec.cli.models import models_app
from edgespec.cli.profile import profile_command
from edgespec.cli.quantize import quantize_command
from edgespec.cli.run import run_command
from edgespec.cli.serve import serve_command
from edgespec.errors import EdgespecError, UsageError, describe_os_error

_LONGEST_LINE = 1000  # characters

# typer keeps its own copy of click; these two are the bases of what its parser raises.
_ParserUsageError: type[Exception] = typer.BadParameter.__mro__[1]
_ParserError: type[Exception] = typer.BadParameter.__mro__[2]


class _Carried(Exception):  # noqa: N818 - a vehicle, not an error
    """Takes Ctrl-C and a closed pipe past typer, which would exit without a word."""


class _Root(TyperGroup):
    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - typer's own signature, over a private click
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, BrokenPipeError) as error:
            raise _Carried from error


app = typer.Typer(
    name="edgespec",
    cls=_Root,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog='Example: edgespec run "Write a quicksort in Python."',
)


def _print_version(wanted: bool) -> None:
    if wanted:
        out.print(f"edgespec {version('edgespec')}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Local language models, faster on machines without a GPU, without changing what they say."""


app.command("run", epilog='Example: edgespec run --gamma 3 --temp 0 "Write a quicksort in Python."')(
    run_command
)
app.command("chat", epilog='Example: edgespec chat --system "Answer in one sentence."')(chat_command)
app.command("quantize")(quantize_command)
app.command("doctor", epilog="Example: edgespec doctor --retest my-model.gguf")(doctor_command)
app.command("profile", epilog="Example: edgespec profile --target my-model.gguf --threads 4")(profile_command)
app.command("calibrate", epilog="Example: edgespec calibrate --loss 0.05 --per-category 2")(calibrate_command)
app.command("energy", epilog="Example: edgespec energy --json")(energy_command)
app.command("bench", epilog="Example: edgespec bench --category code --report bench.html")(bench_command)
app.command(
    "compare",
    epilog="Example: edgespec compare --targets qwen2.5-coder-1.5b-q4_k_m --quants q4_0,q8_0 "
    "--drafts qwen2.5-coder-0.5b-q4_0,none",
)(compare_command)
app.command("serve", epilog="Example: edgespec serve --port 8080 --pair default")(serve_command)
app.add_typer(models_app, name="models")
app.add_typer(draft_app, name="draft")
app.add_typer(cache_app, name="cache")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 failure, 2 usage, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 gets ? instead of a crash
    try:
        if sys.stdout is None:
            raise UsageError("standard output is closed")
        code = app(arguments, standalone_mode=False)
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - _explain raises what is no user's mistake
        line, code = _explain(error.__cause__ or error if isinstance(error, _Carried) else error)
        print_error(line)
    return code if isinstance(code, int) else 0


def _explain(error: BaseException) -> tuple[str, int]:
    """Return the line and the exit code for a failure; raises it again when it is a bug of ours."""
    match error:
        case EdgespecError():
            return str(error), error.exit_code
        case _ParserUsageError():
            context = getattr(error, "ctx", None)
            command = context.command_path if context else "edgespec"
            return f"{_message(error)} (see `{command} --help`)", UsageError.exit_code
        case _ParserError():
            return _message(error), EdgespecError.exit_code
        case KeyboardInterrupt() | typer.Abort():
            return "interrupted", INTERRUPTED
        case BrokenPipeError():
            # Flushing stdout at exit would fail once more.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return "the reader of the output went away before it was complete", EdgespecError.exit_code
        case MemoryError():
            line = "not enough memory; choose a smaller model or --ctx, or close other programs"
            return line, EdgespecError.exit_code
        case OSError():
            return _one_line(describe_os_error(error)), EdgespecError.exit_code
    raise error


def _message(error: Exception) -> str:
    format_message = getattr(error, "format_message", None)
    return _one_line(format_message() if format_message else str(error))


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_LINE else line[: _LONGEST_LINE - 3] + "..."
