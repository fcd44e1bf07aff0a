"""Options in groups: a command takes a dataclass of options instead of typer's one parameter each.

    @option_group("Machine")
    class Compute:
        threads: Annotated[int | None, typer.Option(help="Threads.")] = None

    @grouped
    def profile_command(models: ModelChoice, compute: Compute) -> int:

A group may have groups as fields. In `--help`, its options stand in its place, in the order of its fields.
A dataclass whose fields are rows of the table of options (`SamplingParams`) is a group too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import partial
from typing import Annotated, Any, TypeVar, dataclass_transform, get_args, get_type_hints

import typer
from typer.models import OptionInfo

from edgespec.decoding.choices import is_draftless, is_plugin
from edgespec.decoding.option_table import Option
from edgespec.decoding.sampling import TABLE
from edgespec.errors import UsageError
from edgespec.platform.plugins import offered

EXCLUSIVE = (
    *(("MODEL", "--target"), ("MODEL", "--pair")),
    *(("--chat", "--raw"), ("--system", "--raw"), ("--chat-template", "--raw")),
    *(("--system", "--load"), ("--continue", "--load"), ("--continue", "--system")),
    *(("--continue", "--no-cache"), ("--no-cache", "--state-dir")),
    *(("--grammar", "--json-schema"), ("--grammar", "--regex"), ("--json-schema", "--regex")),
    *((name, "--mode cascade") for name in ("--grammar", "--json-schema", "--regex", "--drafter draftless")),
    ("--lora", "--ray"),
    *(("--draft", "--drafter draftless"), ("--draft", "--drafter mtp")),
    *(("--drafter own", name) for name in ("--gamma", "--objective energy", "--explain", "--ray")),
    *(("--problems", "--no-accuracy"), ("--text", "--no-accuracy")),
    *(("--no-stats", "--stats full"), ("--json", "--show-draft")),
)
"""Options that contradict each other, in every command; one with a value: where it has this value or kind."""

_FIELDS = {"--continue": "continues", "MODEL": "model"}
_NEGATED = {"--no-cache": "cache", "--no-accuracy": "accuracy"}

_hints: Callable[[Any], dict[str, Any]] = functools.cache(partial(get_type_hints, include_extras=True))
"""Returns the types of a group's options, or of a command's parameters."""

R = TypeVar("R")
G = TypeVar("G")
C = TypeVar("C", bound=Callable[..., object])


def listed(name: str, *names: str, panel: str | None = None) -> Any:  # noqa: ANN401 - as of typer.Option
    """Return typer's description of an option in the table; `names` replace the row's."""
    row = TABLE[name]
    return typer.Option(
        *(names or (row.command_name(name),)),
        help=row.help,
        metavar=row.metavar,
        show_default=row.default or True,
        rich_help_panel=panel,
    )


@dataclass_transform(frozen_default=True, kw_only_default=True)
def option_group(panel: str = "") -> Callable[[type[G]], type[G]]:
    """Return a decorator that makes a group of a class: a frozen dataclass.

    Its own options are shown in `panel` of `--help`, unless they name another.
    """

    def group(cls: type[G]) -> type[G]:
        made = dataclass(frozen=True, kw_only=True)(cls)
        made.__panel__ = panel or None  # type: ignore[attr-defined]
        return made

    return group


def shown(panel: str, example: str) -> Callable[[C], C]:
    """Return a decorator for a command: its panel in `edgespec --help`, and its own example."""

    def mark(command: C) -> C:
        vars(command).update(panel=panel, example=example)
        return command

    return mark


def grouped(command: Callable[..., R]) -> Callable[..., R]:
    """Return `command` with a parameter for each option of its groups, as typer needs it."""
    hints = _hints(command)
    wanted = {name: hints[name] for name in inspect.signature(command).parameters}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        parameters += _expanded(name, wanted[name], parameter.default)

    @functools.wraps(command)
    def call(**values: Any) -> R:  # noqa: ANN401 - whatever the options are
        refuse_exclusive(values)
        return command(**{name: _made(name, hint, values) for name, hint in wanted.items()})

    del call.__wrapped__  # typer would inspect the wrapped command
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def as_words(group: Any) -> Iterator[str]:  # noqa: ANN401 - an option group
    """Yield the options of a group that differ from their defaults, as command-line arguments."""
    hints = _hints(type(group))
    for field in fields(group):
        value = getattr(group, field.name)
        if is_dataclass(hints[field.name]):
            yield from as_words(value)
        elif value != field.default:
            option = next(one for one in get_args(hints[field.name]) if isinstance(one, OptionInfo))
            names = [name for name in option.param_decls or () if name.startswith("--")]
            name = names[0] if names else f"--{field.name.replace('_', '-')}"
            for one in value if isinstance(value, list) else (value,):
                yield name if one is True else f"{name}={one}"


def flat_options(group: type) -> Iterator[tuple[str, Any, OptionInfo]]:
    """Yield name, type and description of each option of a group and of the groups in it."""
    hints = _hints(group)
    for field in fields(group):
        if is_dataclass(hints[field.name]):
            yield from flat_options(hints[field.name])
        else:
            kind, *extras = get_args(hints[field.name])
            yield field.name, kind, next(one for one in extras if isinstance(one, OptionInfo))


def changed(group: G, values: Mapping[str, object]) -> G:
    """Return a group with these values, by name, of its options and those of the groups in it."""
    made: dict[str, Any] = {}
    for field in fields(group):  # type: ignore[arg-type]
        value = getattr(group, field.name)
        made[field.name] = changed(value, values) if is_dataclass(value) else values.get(field.name, value)
    return type(group)(**made)


def refuse_contradictions(found: Mapping[str, bool]) -> None:
    """Raise UsageError for the first options of `found` that were both given."""
    for options, both in found.items():
        if both:
            raise UsageError(f"{options} contradict each other: choose one")


def refuse_exclusive(values: Mapping[str, Any]) -> None:
    """Raise UsageError for the first two options of EXCLUSIVE that were both given."""
    drafter = f"--drafter {values.get('drafter')}"
    for pair in EXCLUSIVE:
        shown = " and ".join(drafter if one.startswith("--drafter") else one for one in pair)
        refuse_contradictions({shown: all(_is_given(one, values) for one in pair)})


def _is_given(option: str, values: Mapping[str, Any]) -> bool:
    name, _, wanted = option.partition(" ")
    if name in _NEGATED:
        return values.get(_NEGATED[name]) is False
    found = values.get(_FIELDS.get(name, name.removeprefix("--").replace("-", "_")))
    if not wanted or found is None:
        return found is not None and found is not False and found not in ([], 0)
    if wanted not in ("draftless", "own"):
        return bool(found == wanted)
    if is_plugin(found) and ":" not in found and found not in offered("edgespec.drafters"):
        return False  # refused by its name, where it is looked for
    return is_draftless(found) if wanted == "draftless" else is_plugin(found)


def _expanded(
    name: str,
    hint: Any,  # noqa: ANN401 - a type
    default: object,
    panel: str | None = None,
) -> Iterator[inspect.Parameter]:
    if not is_dataclass(hint):
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
        return
    panel = getattr(hint, "__panel__", panel)
    hints = _hints(hint)
    for field in fields(hint):
        given = inspect.Parameter.empty if field.default is MISSING else field.default
        kind = hints[field.name]
        if (row := _row(field)) is not None:
            kind, given = (list[str] | None, None) if row.parse else (kind, given)
            kind = Annotated[kind, listed(field.name, panel=panel)]
        else:
            kind = _in_panel(hint, field.name, kind)
        yield from _expanded(field.name, kind, given, panel)


def _in_panel(group: Any, name: str, kind: Any) -> Any:  # noqa: ANN401 - types
    """Return the type of an option, with the panel of the class that declares it unless it names another."""
    option = next((one for one in get_args(kind) if isinstance(one, OptionInfo)), None)
    owner = next(one for one in group.__mro__ if name in vars(one).get("__annotations__", ()))
    panel = vars(owner).get("__panel__")
    if option is None or panel is None or option.rich_help_panel is not None:
        return kind
    option = copy(option)  # which other groups may have, too
    option.rich_help_panel = panel
    return Annotated[get_args(kind)[0], option]


def _row(field: Field[Any]) -> Option | None:
    return field.metadata.get("option")


def _made(name: str, hint: Any, values: Mapping[str, Any]) -> Any:  # noqa: ANN401 - a type, and one of it
    if not is_dataclass(hint):
        return values[name]
    hints = _hints(hint)
    made: dict[str, Any] = {}
    for field in fields(hint):
        value, row = _made(field.name, hints[field.name], values), _row(field)
        if row is None or row.parse is None:
            made[field.name] = value
        elif value:
            made[field.name] = row.parse(value)
    return hint(**made)  # type: ignore[operator]
