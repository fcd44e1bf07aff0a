"""The `edgespec` command: its sub-commands; every failure becomes one line."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from textwrap import shorten
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from edgespec.cli.console import (
    INTERRUPTED,
    UNREAD,
    OpenLine,
    guarded_streams,
    line_of,
    message,
    out,
    print_error,
    wrapped,
)
from edgespec.errors import EdgespecError, OutputUnread, UsageError, describe_os_error
from edgespec.platform.files import ignored_folders
from edgespec.platform.machine import address_limit, is_refusal, why_refused
from edgespec.platform.plugins import (
    DEBUG,
    PluginError,
    called,
    describe,
    guarded,
    is_ours,
    load,
    offered,
    traced,
)

# ---- changes to typer: the first Tab in zsh, flags without a type, whole paragraphs, a short help ----


def mend_completion() -> None:
    """Have zsh complete at the first Tab, when it loads the script; skip other versions of typer."""
    with suppress(AttributeError, KeyError):  # private names, which another typer may not have
        typer._completion_shared._completion_scripts["zsh"] += (
            '\nif [[ $zsh_eval_context[-1] == loadautofunc ]]; then %(complete_func)s "$@"; fi\n'
        )


def _mend_types(kind: Any) -> None:  # noqa: ANN401 - typer's own classes
    """Hide the type of flags, which take no value, and break lists of choices into lines."""
    typer_shows = kind.display_type_rich

    def display_type_rich(self: Any, ctx: Any) -> str | None:  # noqa: ANN401
        if getattr(self, "is_flag", False) or (found := typer_shows(self, ctx)) is None:
            return None
        shown = re.sub(r"list\[(.*)\]", r"\1", str(found)).replace(" range>", ">")
        return shown.replace("|", " | ") if len(shown) > _LABEL else shown

    kind.display_type_rich = display_type_rich


_SCREEN = 23  # lines, and the shell's next prompt
_LABEL = 26  # columns
_USUAL = (
    *("target", "draft", "model", "pair", "file", "output", "n_predict", "temperature", "seed", "ctx"),
    *("system", "host", "port", "api_key", "parallel", "language", "prompts", "suite", "json", "stats"),
    *("drafter", "cache", "continues", "load", "threads", "json_schema", "stop", "top_p", "here", "all_"),
)
"""Options that come first where not all fit on a screen."""


def _mend_help(command: Any) -> None:  # noqa: ANN401 - of typer's private click
    """Have `command` print a short help unless --help is asked for, and each paragraph in one line."""
    command.help = "\n\n".join(" ".join(one.split()) for one in (command.help or "").split("\n\n"))
    print_whole, get_help_option = command.format_help, command.get_help_option

    def format_help(ctx: Any, formatter: Any) -> None:  # noqa: ANN401
        if ctx.find_root().command.wants_all:
            print_whole(ctx, formatter)
        else:
            _print_short_help(command, ctx)

    def show(ctx: Any, _parameter: object, value: bool) -> None:  # noqa: ANN401
        if value and not ctx.resilient_parsing:
            ctx.get_help()  # which prints it
            ctx.exit()

    def help_option(ctx: Any) -> Any:  # noqa: ANN401
        option = get_help_option(ctx)
        if option is not None:
            option.help, option.callback = "Show all options and exit; -h: those used most.", show
        return option

    command.format_help, command.get_help_option = format_help, help_option


def _print_short_help(command: Any, ctx: Any) -> None:  # noqa: ANN401
    """Print usage, the first sentences, and as many commands or options as fit on a screen, a line each."""
    about, example = ((text or "").split("\n\n")[0] for text in (command.help, command.epilog))
    head = [*command.get_usage(ctx).split("\n"), *wrapped(about, out.width).split("\n"), ""]
    foot = ["", *wrapped(example, out.width).split("\n"), f"{ctx.command_path} --help says more"]
    if hasattr(command, "commands"):
        found = [(name, command.get_command(ctx, name)) for name in command.list_commands(ctx)]
        rows = [(0, name, one.help) for name, one in found if not one.hidden]
        foot = ["", f"{ctx.command_path} COMMAND -h has the options; --help says more"]
    else:
        shown = [one for one in command.get_params(ctx) if not one.hidden and "--help" not in one.opts]
        rows = [(_rank(one), _label(one, ctx), one.help or "") for one in shown]
    kept = sorted(rows, key=lambda row: row[0])[: max(0, _SCREEN - len(head) - len(foot))]
    n = max((len(row[1]) for row in kept), default=0)
    for row in sorted(kept, key=lambda row: (row[0] > 0, rows.index(row))):
        head.append(f"  {row[1]:{n}}  {shorten(row[2], max(9, out.width - n - 4), placeholder=' ...')}")
    out.print("\n".join([*head, *foot]))


def _rank(parameter: Any) -> int:  # noqa: ANN401
    """Return 0 for what a command needs; others by their use."""
    if parameter.required or isinstance(parameter, TyperArgument):
        return 0
    return 1 + (_USUAL.index(parameter.name) if parameter.name in _USUAL else len(_USUAL))


def _label(parameter: Any, ctx: Any) -> str:  # noqa: ANN401
    """Return an argument's name, or an option's short and long names with its value."""
    if isinstance(parameter, TyperArgument):
        return parameter.metavar or str(parameter.name).upper()
    name = next((name for name in parameter.opts if name.startswith("--")), parameter.opts[0])
    short = next((f"{one}, " for one in parameter.opts if one != name and not one.startswith("--")), "")
    kind = re.sub(r"<(\w+)>.*", lambda found: found[1].upper(), parameter.display_type_rich(ctx) or "")
    label = f"{short}{'/'.join([name, *parameter.secondary_opts])}"
    return f"{label} {kind.strip('<>')}" if len(label) + len(kind) < _LABEL else label


# ---- the command ----


COMMANDS = "edgespec.commands"
"""The entry points that commands are found by. A function says with `groups.shown` where help shows it."""

_LONGEST_LINE = 1000  # characters
_OTHER_PANEL = "Other packages"

_ALIASES = {"pull": "pull", "list": "list", "ls": "list", "show": "show", "rm": "remove"}
"""Ollama's commands, and those of `models` that they are."""

# typer keeps its own copy of click; these two are the bases of what its parser raises.
_ParserUsageError: type[Exception] = typer.BadParameter.__mro__[1]
_ParserError: type[Exception] = typer.BadParameter.__mro__[2]


class _Carrier(Exception):  # noqa: N818 - a vehicle, not an error
    """Carries Ctrl-C past typer, which would exit without a message."""


class _Root(TyperGroup):
    """Imports a command when it is called: together they take a second, and seconds on a Raspberry Pi."""

    wants_all = False
    """Whether help means all of it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - typer's own
        super().__init__(*arguments, **options)
        _mend_help(self)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401 - typer's own signature
        first = args[0] if args and not ctx.resilient_parsing else ""
        if first == "help":
            args = [*args[1:], "--help"]
        if first.startswith("-") and first not in ("-h", "--") and not first.startswith("--"):
            raise UsageError(f"{first}: a command comes first, as in `edgespec run {first} ...`")
        self.wants_all = "--help" in args
        return super().parse_args(ctx, args)

    _broken: tuple[str, ...] = ()

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401 - typer's own signature, over a private click
        return [name for name in offered(COMMANDS) if name not in self._broken]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ANN401
        if cmd_name in self.commands:
            return super().get_command(ctx, cmd_name)
        if cmd_name in _ALIASES:
            return self.get_command(ctx, "models").get_command(ctx, _ALIASES[cmd_name])
        if cmd_name in offered(COMMANDS):
            self.add_command(_load(cmd_name), cmd_name)
        else:  # typer suggests similar names
            self._load_all()
        return super().get_command(ctx, cmd_name)

    def _load_all(self) -> None:
        """Load each command; print why a command of another package cannot be loaded."""
        for name in offered(COMMANDS):
            if name in self.commands or name in self._broken:
                continue
            try:
                self.add_command(_load(name), name)
            except PluginError as error:
                self._broken += (name,)
                message(traced(line_of(error), error))

    def get_help(self, ctx: Any) -> Any:  # noqa: ANN401
        self._load_all()  # a command that cannot be loaded fails before anything is printed
        return super().get_help(ctx)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:  # noqa: ANN401
        for name in self.list_commands(ctx):  # completing a name does not load its command
            self.commands.setdefault(name, TyperCommand(name))
        return super().shell_complete(ctx, incomplete)

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - typer's own signature, over a private click
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise _Carrier from error


app = typer.Typer(
    name="edgespec",
    cls=_Root,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog='Example: edgespec run "Write a quicksort in Python."\n\n'
    "As in Ollama, pull, list, show and rm are those of `edgespec models`.",
)

mend_completion()
_mend_types(TyperOption)
_mend_types(TyperArgument)


def _load(name: str) -> Any:  # noqa: ANN401 - a command of typer's private click
    point, found = offered(COMMANDS)[name], load(COMMANDS, name)
    if is_ours(point):
        return _command(name, found)
    command = guarded(f"{called(point)} is no command", partial(_command, name, found), code=lambda: found)
    _guard(command, f"{called(point)} failed")
    return command


_OWN_ERRORS = (EdgespecError, typer.Exit, typer.Abort, SystemExit, KeyboardInterrupt, OutputUnread)
"""What another package's command may raise as ours do."""


def _guard(command: Any, what: str) -> None:  # noqa: ANN401 - of typer's private click
    """Turn an error of another package's command into one line, except our errors and exit codes."""
    for one in getattr(command, "commands", {}).values():
        _guard(one, what)
    if (call := command.callback) is None:
        return

    def callback(**options: Any) -> Any:  # noqa: ANN401
        try:
            return call(**options)
        except (*_OWN_ERRORS, _ParserError):
            raise
        except BaseException as error:
            raise EdgespecError(f"{what}: {describe(error, lambda: call)}") from error

    command.callback = callback


def _command(name: str, found: Any) -> Any:  # noqa: ANN401 - a command of typer's private click
    loaded = typer.Typer(rich_markup_mode="rich")
    if isinstance(found, typer.Typer):
        panel = getattr(found, "rich_help_panel", None)
        loaded.add_typer(found, name=name, rich_help_panel=panel if isinstance(panel, str) else _OTHER_PANEL)
    else:
        panel, example = getattr(found, "panel", _OTHER_PANEL), getattr(found, "example", None)
        loaded.command(name, epilog=example and f"Example: {example}", rich_help_panel=panel)(found)
    command = typer.main.get_group(loaded).commands[name]
    _adapt(command)
    return command


def _adapt(command: Any) -> None:  # noqa: ANN401 - of typer's private click
    """Adapt a command and its sub-commands: what they refuse and accept, and how their help looks."""
    for one in getattr(command, "commands", {}).values():
        _adapt(one)
    for parameter in command.params:
        _refuse_empty(parameter)
    _mend_help(command)
    if not hasattr(command, "commands"):
        _check_options(command)


def _check_options(command: Any) -> None:  # noqa: ANN401 - of typer's private click
    parse = command.parse_args

    def parse_args(ctx: Any, args: list[str]) -> Any:  # noqa: ANN401
        if not ctx.resilient_parsing:  # as for completion
            options = {
                name: not getattr(option, "is_flag", False)
                for option in command.get_params(ctx)
                for name in (*option.opts, *option.secondary_opts)
            }
            n_options = args.index("--") if "--" in args else len(args)
            words = iter(args[:n_options])
            for word in words:  # -ngl of llama.cpp's would be read as -n gl, -help as -h -e -l -p
                if options.get(word):
                    next(words, None)  # its value
                elif _LONG_WITH_ONE_DASH.fullmatch(word) and word not in options:
                    hint = f"; is -{word} meant?" if f"-{word}" in (*options, "--help") else " (see --help)"
                    raise UsageError(f"{word}: no such option{hint}")
            if "--debug" in args[:n_options] and "--debug" not in options:
                args = [word for i, word in enumerate(args) if word != "--debug" or i > n_options]
                os.environ[DEBUG] = "1"
        return parse(ctx, args)

    command.parse_args = parse_args


_LONG_WITH_ONE_DASH = re.compile(r"-[A-Za-z][A-Za-z-]+")

_MAY_BE_EMPTY = ("words", "system")
"""An empty prompt has its own error; an empty system message replaces a template's default one."""


def _refuse_empty(parameter: Any) -> None:  # noqa: ANN401 - an option of typer's private click
    """Have a parameter refuse "", which an unset shell variable gives."""
    process = parameter.process_value

    def checked(ctx: Any, value: Any) -> Any:  # noqa: ANN401
        if parameter.name not in _MAY_BE_EMPTY and "" in (
            value if isinstance(value, list | tuple) else [value]
        ):
            name = max(parameter.opts, key=len) if parameter.opts[0].startswith("-") else parameter.metavar
            raise UsageError(f"{name or parameter.name.upper()} is empty: give it a value, or leave it out")
        return process(ctx, value)

    parameter.process_value = checked


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        out.print(f"edgespec {version('edgespec')}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of what fails; any command takes it.")
    ] = False,
) -> None:
    """Local language models, faster without a GPU, without changing what they say."""
    if debug:
        os.environ[DEBUG] = "1"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 failure, 2 usage, 130 interrupted."""
    with guarded_streams():
        return _main(arguments)


def _main(arguments: Sequence[str] | None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 gets ? instead of a crash
    if address_limit():  # else numpy's library alone takes all of it on a machine of many processors
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _print_ignored
    try:
        if sys.stdout is None:
            raise UsageError("standard output is closed")
        for name, value in ignored_folders().items():
            message(f"{name}={value} is ignored, as the XDG standard says of a path that is not absolute")
        # A fixed name, however we were started: shells' completion variable is named after it.
        code = app(arguments, prog_name=app.info.name, standalone_mode=False)
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - _explain raises our own bugs again
        told = error.__cause__ or error if isinstance(error, _Carrier) else error
        line, code = _explain(told)
        OpenLine.cut()
        if line:
            print_error(traced(line, told))
    return code if isinstance(code, int) else 0


def _print_ignored(ignored: sys.UnraisableHookArgs) -> None:
    """Print one line about an error that Python ignores, such as one in a plug-in's `__del__`."""
    if error := ignored.exc_value:
        what = getattr(ignored.object, "__qualname__", "") or ignored.err_msg or "code that nobody waits for"
        message(traced(f"{what} failed: {describe(error, lambda: ignored.object)}", error))


def _explain(error: BaseException) -> tuple[str, int]:
    """Return the line and the exit code for a failure; raise it again if it is a bug in edgespec.

    The line is empty if a command that needs arguments got none: its help was printed.
    """
    match error:
        case EdgespecError():
            return line_of(error), error.exit_code
        case _ParserUsageError():
            context = getattr(error, "ctx", None)
            command = context.command_path if context else "edgespec"
            line = _message(error)
            return line and f"{line} (see `{command} --help`)", UsageError.exit_code
        case _ParserError():
            return _message(error), EdgespecError.exit_code
        case KeyboardInterrupt() | typer.Abort():
            return "interrupted", INTERRUPTED
        case OutputUnread():
            return "", UNREAD
        case MemoryError() | OSError() | RuntimeError() | ImportError() if _is_refusal(error):
            reasons = why_refused() or "choose a smaller model or --ctx, or close other programs"
            return f"not enough memory: {reasons}", EdgespecError.exit_code
        case ImportError(path=str(path)) if "/_core." in path:
            line = f"edgespec's library cannot be loaded: {error}; install edgespec again, built for "
            return _one_line(line + os.uname().machine), EdgespecError.exit_code
        case OSError():
            return _one_line(describe_os_error(error)), EdgespecError.exit_code
    raise error


def _is_refusal(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or is_refusal(str(error))


def _message(error: Exception) -> str:
    format_message = getattr(error, "format_message", None)
    text = format_message() if format_message else str(error)
    return _one_line(text.replace(": Value error, ", ": "))  # pydantic's word for it


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_LINE else line[: _LONGEST_LINE - 3] + "..."
