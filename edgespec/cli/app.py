"""The `edgespec` command: its sub-commands, and how every failure becomes one line."""

from __future__ import annotations

import os
import re
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

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
from edgespec.platform.cpu import address_limit, is_refusal, why_refused
from edgespec.platform.files import ignored_folders, read_text_file
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

# ---- completion in shells beyond typer's: names with colons in bash, the first Tab in zsh ----


_AT_THE_FIRST_TAB = '\nif [[ $zsh_eval_context[-1] == loadautofunc ]]; then %(complete_func)s "$@"; fi\n'


def mend_completion() -> None:
    """Change typer's classes and scripts; nothing for a typer that has others."""
    # zsh reads the script at the first Tab; as typer writes it, only the second one would complete.
    with suppress(AttributeError, KeyError):  # private names, which another typer may not have
        typer._completion_shared._completion_scripts["zsh"] += _AT_THE_FIRST_TAB
    with suppress(AttributeError):
        bash: Any = typer._completion_classes.BashComplete
        formatted, read = bash.format_completion, bash.get_completion_args

        def format_completion(self: Any, item: Any) -> str:  # noqa: ANN401 - of typer's private click
            return str(formatted(self, item))[getattr(self, "n_typed", 0) :]

        def get_completion_args(self: Any) -> tuple[list[str], str]:  # noqa: ANN401
            _join_words()
            args, incomplete = read(self)
            self.n_typed = incomplete.rfind(":") + 1
            return args, incomplete

        bash.format_completion, bash.get_completion_args = format_completion, get_completion_args


def _join_words() -> None:
    """Put the words that bash broke at colons together in its variables."""
    words, last = os.environ.get("COMP_WORDS", "").split("\n"), os.environ.get("COMP_CWORD", "")
    if not last.isdecimal():
        return
    joined: list[str] = []
    glued = False  # whether the last word ends in a colon that bash broke at
    at = int(last)
    for i, word in enumerate(words[: int(last) + 1]):
        is_colon = bool(word) and not word.strip(":")
        if joined and i > 1 and (is_colon or glued):
            joined[-1] += word
            at -= 1
        else:
            joined.append(word)
        glued = is_colon
    os.environ["COMP_WORDS"], os.environ["COMP_CWORD"] = "\n".join(joined), str(at)


# ---- changes to typer's --help: flags without a type, choices that wrap, paragraphs of whole lines ----


_LONG = 24  # characters of a type's column: longer choices may go on in its next line


def in_paragraphs(text: str) -> str:
    """Return a docstring with each paragraph in one line, which the terminal's width wraps."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def mend_help() -> None:
    """Change how typer shows the types of options and arguments."""
    for kind in (TyperOption, TyperArgument):
        _mend(kind)


def _mend(kind: Any) -> None:  # noqa: ANN401 - typer's own classes
    typer_shows = kind.display_type_rich

    def display_type_rich(self: Any, ctx: Any) -> str | None:  # noqa: ANN401
        """Return the type; None for a flag, which takes no value."""
        if getattr(self, "is_flag", False):
            return None
        shown = typer_shows(self, ctx)
        if shown is None or (kind is TyperOption and self.metavar is not None):
            return shown if shown is None else str(shown)
        shown = re.sub(r"list\[(.*)\]", r"\1", str(shown)).replace(" range>", ">")
        return shown.replace("|", " | ") if len(shown) > _LONG else shown

    kind.display_type_rich = display_type_rich


# ---- -h: what is used most, on one screen; --help has all ----


_SCREEN = 23  # lines, and the shell's next prompt
_LABEL = 26  # columns
_USUAL = (
    *(
        "target",
        "draft",
        "model",
        "pair",
        "file",
        "output",
        "n_predict",
        "temperature",
        "seed",
        "ctx",
        "system",
    ),
    *("host", "port", "api_key", "parallel", "language", "prompts", "suite", "json", "stats", "drafter"),
    *("cache", "continues", "load", "threads", "json_schema", "stop", "top_p", "here", "all_"),
)
"""Options that come first where not all fit."""


def _mend_short_help(command: Any) -> None:  # noqa: ANN401 - of typer's private click
    """Have `command` print a short help unless --help is asked for."""
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
    width = out.width
    about, example = ((text or "").split("\n\n")[0] for text in (command.help, command.epilog))
    head = [*command.get_usage(ctx).split("\n"), *wrapped(about, width).split("\n"), ""]
    foot = ["", *wrapped(example, width).split("\n")]
    if hasattr(command, "commands"):
        rows = _command_rows(command, ctx, width)
        foot = foot if len(head) + len(rows) + len(foot) < _SCREEN else [""]
        foot += [f"{ctx.command_path} COMMAND -h has the options; --help says more"]
    else:
        rows = _option_rows(command, ctx, width, _SCREEN - len(head) - len(foot) - 1)
        foot += [f"{ctx.command_path} --help has all options, and says more"]
    out.print("\n".join([*head, *rows, *foot]))


def _command_rows(command: Any, ctx: Any, width: int) -> list[str]:  # noqa: ANN401
    found = {name: command.get_command(ctx, name) for name in command.list_commands(ctx)}
    shown = {name: one.help for name, one in found.items() if not one.hidden}
    n = max(map(len, shown), default=0) + 4
    return [_help_row(name, text, n, width) for name, text in shown.items()]


def _option_rows(command: Any, ctx: Any, width: int, room: int) -> list[str]:  # noqa: ANN401
    """Return the rows of the arguments, then of as many options as fit into `room` lines, in their order."""
    rows = {
        one: _help_row(_label(one, ctx), one.help or "", _LABEL, width)
        for one in sorted(command.get_params(ctx), key=lambda one: not isinstance(one, TyperArgument))
        if not one.hidden and "--help" not in one.opts
    }
    usual = sorted(rows, key=_usefulness)
    while sum(rows[one].count("\n") + 1 for one in usual) > room:
        usual.pop()
    return [row for one, row in rows.items() if one in usual]


def _usefulness(parameter: Any) -> tuple[bool, int]:  # noqa: ANN401
    is_needed = parameter.required or isinstance(parameter, TyperArgument)
    return not is_needed, _USUAL.index(parameter.name) if parameter.name in _USUAL else len(_USUAL)


def _label(parameter: Any, ctx: Any) -> str:  # noqa: ANN401
    """Return an argument's name, or an option's short and long one with what it takes."""
    if isinstance(parameter, TyperArgument):
        return parameter.metavar or str(parameter.name).upper()
    name = next((name for name in parameter.opts if name.startswith("--")), parameter.opts[0])
    name = "/".join([name, *parameter.secondary_opts])
    short = next((f"{one}, " for one in parameter.opts if one != name and not one.startswith("--")), "")
    kind = "" if parameter.is_flag else parameter.metavar or str(parameter.display_type_rich(ctx))
    takes = re.sub(r"<(\w+)>.*", lambda found: found[1].upper(), kind).strip("<>")
    return f"{short}{name} {takes}" if len(takes) <= len("short|full|none") else f"{short}{name}"


def _help_row(label: str, text: str, n: int, width: int) -> str:
    """Return a row of help: `label` in `n` columns, and of `text` the beginning that fits into the line."""
    line = f"  {label}  ".ljust(n)
    room, text = width - len(line), " ".join(text.split()).removesuffix(".")
    for ends in (r"\. |; |$", r": | \(|$", r", |$"):
        parts = [text[: end.start()] for end in re.finditer(ends, text)]
        if fitting := [part for part in parts if len(part) <= room and part.count("(") == part.count(")")]:
            return line + fitting[-1]
    return wrapped(line + text, width, n)


# ---- the command ----


COMMANDS = "edgespec.commands"
"""The entry points that commands are found by. A function says with `groups.shown` where help shows it."""

_LONGEST_LINE = 1000  # characters
_OTHER_PANEL = "Other packages"

_ALIASES = {"pull": "pull", "list": "list", "ls": "list", "show": "show", "rm": "remove"}
"""Ollama's commands, and those of `models` that they are."""

_ELSEWHERE = {
    "cp": "`edgespec models add FILE --name NAME` gives a file another name",
    "create": "`models add` names a file, `quantize` makes other types; a system message is --system",
    "stop": "a server ends with Ctrl-C, or `kill PID` of `edgespec ps`; `run` and `chat` keep nothing loaded",
    "push": "nothing is uploaded from here",
    "signin": "`hf auth login` is for models of the hub that need it",
}
"""Ollama's other commands, and what to do instead."""

# typer keeps its own copy of click; these two are the bases of what its parser raises.
_ParserUsageError: type[Exception] = typer.BadParameter.__mro__[1]
_ParserError: type[Exception] = typer.BadParameter.__mro__[2]


class _Carrier(Exception):  # noqa: N818 - a vehicle, not an error
    """Takes Ctrl-C past typer, which would exit without a word."""


class _Root(TyperGroup):
    """Imports a command when it is called: together they take a second, and seconds on a Raspberry Pi."""

    wants_all = False
    """Whether help means all of it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - typer's own
        super().__init__(*arguments, **options)
        _mend_short_help(self)

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
        elif cmd_name in _ELSEWHERE:
            raise UsageError(f"{cmd_name} is a command of Ollama's; here, {_ELSEWHERE[cmd_name]}")
        else:  # typer suggests similar names
            self._load_all()
        return super().get_command(ctx, cmd_name)

    def _load_all(self) -> None:
        """Load each command; say of another package's that cannot be loaded why not."""
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
mend_help()


def _load(name: str) -> Any:  # noqa: ANN401 - a command of typer's private click
    point, found = offered(COMMANDS)[name], load(COMMANDS, name)
    if is_ours(point):
        return _command(name, found)
    command = guarded(f"{called(point)} is no command", partial(_command, name, found), code=lambda: found)
    _guard(command, f"{called(point)} failed")
    return command


_OWN_ERRORS = (EdgespecError, typer.Exit, typer.Abort, SystemExit, KeyboardInterrupt, OutputUnread)
"""What a command of others may raise as ours do."""


def _guard(command: Any, what: str) -> None:  # noqa: ANN401 - of typer's private click
    """Let what a command of another package raises be one line, but for errors of ours and exit codes."""
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
    """Change a command and those below it: what they refuse, what they understand, how their help looks."""
    for one in getattr(command, "commands", {}).values():
        _adapt(one)
    for parameter in command.params:
        _refuse_empty(parameter)
    command.help = in_paragraphs(command.help or "")
    _mend_short_help(command)
    if not hasattr(command, "commands"):
        _understand_llama_cpp(command)


def _understand_llama_cpp(command: Any) -> None:  # noqa: ANN401 - of typer's private click
    parse = command.parse_args

    def parse_args(ctx: Any, args: list[str]) -> Any:  # noqa: ANN401
        if not ctx.resilient_parsing:  # as for completion
            options = {
                name: not getattr(option, "is_flag", False)
                for option in command.get_params(ctx)
                for name in (*option.opts, *option.secondary_opts)
                if name.startswith("-")
            }
            n_options = args.index("--") if "--" in args else len(args)
            if "--debug" in args[:n_options] and "--debug" not in options:
                args = [word for i, word in enumerate(args) if word != "--debug" or i > n_options]
                os.environ[DEBUG] = "1"
            args = as_options_here(command.name, options, args)
        return parse(ctx, args)

    command.parse_args = parse_args


_MAY_BE_EMPTY = ("words", "system")
"""An empty prompt has its own error; an empty system message replaces a template's default one."""


def _refuse_empty(parameter: Any) -> None:  # noqa: ANN401 - an option of typer's private click
    """Have a parameter refuse "", which comes of a shell variable that was not set."""
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
        sys.unraisablehook = _tell_ignored
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


def _tell_ignored(ignored: sys.UnraisableHookArgs) -> None:
    """Say in one line what Python ignores, such as an error in a plug-in's `__del__`."""
    if error := ignored.exc_value:
        what = getattr(ignored.object, "__qualname__", "") or ignored.err_msg or "code that nobody waits for"
        message(traced(f"{what} failed: {describe(error, lambda: ignored.object)}", error))


def _explain(error: BaseException) -> tuple[str, int]:
    """Return the line and the exit code for a failure; raise it again if it is a bug of ours.

    The line is empty if a command that needs arguments was called without any: it printed its help.
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


# ---- options of llama.cpp's programs, as people bring them ----
#
# They mean the same, or a line says what they do.
#
#     -ngl 0, -b 512     left out, with a line that says why this changes nothing here
#     -s 7               the option here that means the same: --seed 7
#     -cnv               refused, with what to do instead
#
# A parser of short options would read most of them as others: -hf as -h, -fa as -f a, -ngl 0 as -n gl.


_Does = Literal["same", "left out", "nothing", "refused"]


@dataclass(frozen=True, slots=True)
class _Option:
    """One option of llama.cpp."""

    does: _Does
    text: str = ""
    """The option here; or why it is left out; or what to do instead."""
    takes_value: bool = True


_ONE_SIZE = "how prompts are read is chosen here"
_NO_GPU = "all layers run on the processor here"
_THREADS = "--threads is for prompts, answers and drafts alike"
_DRAFTED = "as many tokens are drafted as pay; --gamma N sets their number"
_MEMORY = "how a file is read is chosen here"
_TALK = "a conversation is `edgespec chat`"
_ONE_ANSWER = "a single answer is `edgespec run`"

_OPTIONS: Mapping[str, _Option] = {
    name: option
    for names, option in {
        # the same here
        "-c --ctx-size": _Option("same", "--ctx"),
        "-n --predict": _Option("same", "--n-predict"),
        "-s": _Option("same", "--seed"),
        "--top-n-sigma": _Option("same", "--top-nsigma"),
        "-sys --system-prompt": _Option("same", "--system"),
        "-mu --model-url": _Option("same", "--target"),
        "-md --model-draft": _Option("same", "--draft"),
        "-r --reverse-prompt": _Option("same", "--stop"),
        "-j": _Option("same", "--json-schema"),
        "-jf --json-schema-file": _Option("same", "--json-schema"),
        "--grammar-file": _Option("same", "--grammar"),
        "--chat-template-file": _Option("same", "--chat-template"),
        "-np": _Option("same", "--parallel"),
        # so here without being asked for
        "--jinja -cb --cont-batching --no-context-shift --no-escape --no-display-prompt": _Option(
            "nothing", takes_value=False
        ),
        # without effect on the text
        "-ngl --gpu-layers --n-gpu-layers -ngld --gpu-layers-draft --n-gpu-layers-draft": _Option(
            "left out", _NO_GPU
        ),
        "-sm --split-mode -ts --tensor-split -mg --main-gpu -dev --device -devd --device-draft -ot "
        "--override-tensor -ncmoe --n-cpu-moe": _Option("left out", _NO_GPU),
        "-cmoe --cpu-moe -nkvo --no-kv-offload -kvo --kv-offload": _Option("left out", _NO_GPU, False),
        "-b --batch-size -ub --ubatch-size": _Option("left out", _ONE_SIZE),
        "-tb --threads-batch -td --threads-draft -tbd --threads-batch-draft": _Option("left out", _THREADS),
        "--draft-max --draft-n --draft-min --draft-n-min --draft-p-min --draft-p-split": _Option(
            "left out", _DRAFTED
        ),
        "--mlock --mmap --no-mmap -nr --no-repack": _Option("left out", _MEMORY, False),
        "--numa --prio --poll -lv --verbosity": _Option("left out", "it changes no text"),
        "--cache-reuse": _Option("left out", "only `serve` and `chat` have earlier prompts"),
        "--no-warmup --log-disable --no-perf --simple-io -co --color -mli": _Option(
            "left out", "it changes no text", False
        ),
        "-v --verbose": _Option("left out", "--stats full and --explain say what is done", False),
        # to be done otherwise
        "-e --escape": _Option(
            "refused", "a prompt is taken as it is; a shell's $'a\\nb' has line breaks", False
        ),
        "-i --interactive -if --interactive-first": _Option("refused", _TALK, False),
        "-hft --hf-token": _Option("refused", "set HF_TOKEN, or log in with `hf auth login`"),
        "-bf --binary-file": _Option("refused", "prompts are text, from -f FILE"),
        "-cd --ctx-size-draft": _Option(
            "refused", "a draft model's context is as long as it needs; leave it out"
        ),
        "-ctkd --cache-type-k-draft -ctvd --cache-type-v-draft": _Option(
            "refused", "the draft model's cache is always f16; leave it out"
        ),
        "-dr --docker-repo": _Option("refused", "name a file, or hf:OWNER/REPO"),
        "-mm --mmproj -mmu --mmproj-url": _Option("refused", "images are not read here; leave it out"),
        "-sp --special -ptc": _Option("refused", "there is no such output here; leave it out", False),
        "-gan -gaw -C -Cr -Cb -Crb -dt": _Option("refused", "there is no such setting here; leave it out"),
    }.items()
    for name in names.split()
}

_REPOSITORY = ("-hf", "-hfr", "--hf-repo")
_REPOSITORY_FILE = ("-hff", "--hf-file")
_DRAFT_REPOSITORY = ("-hfd", "-hfrd", "--hf-repo-draft")
_CACHE_TYPES = ("-ctk", "--cache-type-k", "-ctv", "--cache-type-v")
_ATTENTION = ("-fa", "--flash-attn")
_ATTENTION_VALUES = ("on", "off", "auto", "1", "0", "true", "false", "enabled", "disabled")
_CONVERSATION = ("-cnv", "--conversation")
_NO_CONVERSATION = ("-no-cnv", "--no-conversation")
_SINGLE_TURN = ("-st", "--single-turn")
_BIAS = ("-l",)
_SYSTEM_FILE = ("-sysf", "--system-prompt-file")
_VALUED = (*_REPOSITORY, *_REPOSITORY_FILE, *_DRAFT_REPOSITORY, *_CACHE_TYPES, *_BIAS, *_SYSTEM_FILE)


def as_options_here(command: str, options: Mapping[str, bool], words: Sequence[str]) -> list[str]:
    """Return a command's `words` with llama.cpp's options as edgespec has them; tell of those left out.

    `command`: its name. `options`: its options, and whether each takes a value. Raises UsageError for what
    cannot be meant here.
    """
    return _Translation(command, options, deque(words)).run()


@dataclass(slots=True)
class _Translation:
    command: str
    options: Mapping[str, bool]
    rest: deque[str]
    written: list[str] = field(default_factory=list)
    repository: tuple[str, str] | None = None
    """Option and value of -hf."""
    file: tuple[str, str] | None = None
    cache_types: dict[str, str] = field(default_factory=dict)
    """Type and the option that named it, of keys ("k") and values ("v")."""
    talks: str = ""
    """-cnv as it was written."""
    single: str = ""

    def run(self) -> list[str]:
        while self.rest:
            word = self.rest.popleft()
            if word == "--":
                self._end()
                return [*self.written, word, *self.rest]
            if word.startswith("-"):
                self._option(word)
            else:
                self.written.append(word)
        self._end()
        return self.written

    def _option(self, word: str) -> None:
        name, equals, value = word.partition("=")
        if name in self.options:
            self.written.append(word)
            if self.options[name] and not equals and self.rest:
                self.written.append(self.rest.popleft())
            return
        if name in _OPTIONS:
            self._known(name, _OPTIONS[name], value if equals else None)
        elif not self._special(name, value if equals else None):
            self._check_spelling(word, name)
            self.written.append(word)

    def _known(self, name: str, option: _Option, value: str | None) -> None:
        if option.takes_value and value is None:
            value = self._value(name)
        if option.does == "same":
            self._write(name, option.text, value or "")
        elif option.does == "left out":
            message(f"{name} is left out: {option.text}")
        elif option.does == "refused":
            raise UsageError(f"{name} is llama.cpp's: {option.text}")

    def _special(self, name: str, value: str | None) -> bool:
        if name in _ATTENTION:
            if self.rest and self.rest[0].lower() in _ATTENTION_VALUES:
                self.rest.popleft()
            message(f"{name} is left out: how attention is computed is chosen here")
        elif name in _CONVERSATION:
            self.talks = name
        elif name in _NO_CONVERSATION:
            self._write(name, "--raw")
        elif name in _SINGLE_TURN:
            self.single = name
        elif name in _VALUED:
            self._valued(name, self._value(name) if value is None else value)
        else:
            return False
        return True

    def _valued(self, name: str, value: str) -> None:
        if name in _REPOSITORY:
            self.repository = name, value
        elif name in _REPOSITORY_FILE:
            self.file = name, value
        elif name in _DRAFT_REPOSITORY:
            self._write(name, "--draft", f"hf:{value}")
        elif name in _SYSTEM_FILE:
            self._write(name, "--system", read_text_file(Path(value), name).removesuffix("\n"))
        elif name in _BIAS:
            match = re.fullmatch(r"(\d+)([+-].+)", value)
            if not match:
                raise UsageError(
                    f"{name} {value}: expected TOKEN+BIAS or TOKEN-BIAS, or --logit-bias TOKEN=BIAS"
                )
            self._write(name, "--logit-bias", f"{match[1]}={match[2]}")
        else:
            self.cache_types["k" if "k" in name[-1:] else "v"] = value
            self._require(name, "--cache-type")

    def _end(self) -> None:
        if self.file and not self.repository:
            raise UsageError(f"{self.file[0]} {self.file[1]}: needs -hf OWNER/REPO beside it")
        if self.repository:
            name, repo = self.repository
            target = f"{repo.partition(':')[0]}/{self.file[1]}" if self.file else repo
            self._write(name, "--target", f"hf:{target}")
        keys, values = (self.cache_types.get(which, "f16") for which in "kv")
        if keys != values:
            raise UsageError("-ctk and -ctv: keys and values have the same type here; name one --cache-type")
        if self.cache_types:
            self.written += ["--cache-type", keys]
        if self.talks and self.command != "chat" and not (self.command == "run" and self.single):
            raise UsageError(f"{self.talks} is llama.cpp's: {_TALK}")
        if self.single and self.command != "run":
            raise UsageError(f"{self.single} is llama.cpp's: {_ONE_ANSWER}")

    def _write(self, name: str, option: str, value: str | None = None) -> None:
        self._require(name, option, value or "")
        self.written.append(option)
        if value is not None:
            self.written.append(value)

    def _require(self, name: str, option: str, value: str = "") -> None:
        if option in self.options:
            return
        instead = f"name the model alone: {value}" if option == "--target" else f"it has no {option}"
        raise UsageError(f"{name}: no option of `edgespec {self.command}`; {instead}")

    def _value(self, name: str) -> str:
        if not self.rest:
            raise UsageError(f"{name} needs a value")
        return self.rest.popleft()

    def _check_spelling(self, word: str, name: str) -> None:
        """Raise UsageError for a word that is read as other options than were meant: -help as -h -e -l -p."""
        if re.match(r"-[A-Za-z]{2}", word) is None:
            return
        if f"-{name}" in (*self.options, "--help", "--version"):
            raise UsageError(f"{name}: no such option; is -{name} meant?")
        if word.startswith("-h"):
            raise UsageError(f"{name}: no such option; -h alone prints the help")
