"""The fields that requests share: sampling, constraints, and those of other servers that are refused.

A field that nobody knows here has no effect: its name is collected (`ignoring`), for a header of the answer
and the log (json_routes.py). null means "not given".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    create_model,
    model_validator,
)

from edgespec.decoding.option_table import Option
from edgespec.decoding.sampling import SAMPLING, SamplingParams

# ---- fields of other servers ----


def _table(*rows: tuple[str, str]) -> dict[str, str]:
    return {name: advice for names, advice in rows for name in names.split()}


REFUSED = _table(
    ("functions", "use tools of /v1/chat/completions"),
    ("function_call", "use tool_choice of /v1/chat/completions"),
    ("guided_json guided_choice guided_regex guided_grammar", "use structured_outputs"),
    ("regex ebnf structural_tag", "use structured_outputs"),
    ("format json_object", "use response_format, or json_schema"),
    ("min_tokens min_new_tokens", "use ignore_eos with max_tokens for an answer of a fixed length"),
    ("max_new_tokens max_output_tokens max_tokens_to_sample", "use max_tokens"),
    ("truncate_prompt_tokens", "send a shorter prompt"),
    ("include_stop_str_in_output", "stop strings are not part of the answer"),
    ("allowed_token_ids bad_words", "use logit_bias"),
    ("mirostat", "use top_p, min_p or typical_p"),
    ("samplers", "their order is llama.cpp's default"),
    ("use_beam_search", "there is no beam search"),
    ("random_seed", "use seed"),
    ("options", "send its parts as fields of their own"),
    ("enable_thinking reasoning think thinking", "use reasoning_effort of /v1/chat/completions"),
    ("chat_template", "start the server with it"),
    ("documents", "put them into a message"),
    ("image_data", "this server reads text"),
    ("lora", "start the server with a model that has the adapter in it"),
)
"""Fields of other servers that would change the text, each with what to do instead."""

REFUSED_VECTORS = _table(
    (
        "input_type instruction prompt_name task",
        "write it into the text, as the model was trained",
    ),
    ("output_dimension truncate_dim", "use dimensions of /v1/embeddings"),
    ("pooling", "the server's --pooling decides"),
)
"""Fields of other servers that would change vectors or scores."""

_MOST_NAMES = 64
_UNKNOWN: ContextVar[dict[str, None] | None] = ContextVar("unknown", default=None)


@contextmanager
def ignoring() -> Iterator[Mapping[str, None]]:
    """Collect the names of the fields that have no effect, of the requests that are read meanwhile."""
    found: dict[str, None] = {}
    token = _UNKNOWN.set(found)
    try:
        yield found
    finally:
        _UNKNOWN.reset(token)


def ignore(names: Iterable[str]) -> None:
    """Note that fields, or options, of the request that is read have no effect."""
    if (found := _UNKNOWN.get()) is not None:
        found |= dict.fromkeys(ascii(name[:40])[1:-1] for name in names)  # for a header, and for terminals


def listed(names: Iterable[str]) -> str:
    """Return a line that names fields without effect."""
    known = [*names]
    more = f" and {len(known) - _MOST_NAMES} more" if len(known) > _MOST_NAMES else ""
    return f"no effect: {', '.join(known[:_MOST_NAMES])}{more}"


# ---- requests ----

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.\-]+$")]
"""The name of a tool, of any length: clients join it of those of a server and its tool."""


def only(line: str) -> WrapValidator:
    """Say "must be `line`" of a value of the wrong kind; what is told of a part of it stays."""

    def check(value: Any, read: ValidatorFunctionWrapHandler) -> Any:  # noqa: ANN401 - whatever was sent
        try:
            return read(value)
        except ValidationError as error:
            if {one["type"] for one in error.errors()} & {"value_error", "missing"}:
                raise
            raise ValueError(f"must be {line}") from None

    return WrapValidator(check)


def in_form(form: str, needed: str, *foreign: str) -> BeforeValidator:
    """Say which `form` an object has here if it lacks a field, or has one of another API's form."""

    def check(value: Any) -> Any:  # noqa: ANN401 - whatever the client sent
        if isinstance(value, dict):
            given = {name for name, part in value.items() if part is not None}
            if needed not in given or given & {*foreign}:
                raise ValueError(f"must have the form {form} here")
        return value

    return BeforeValidator(check)


def check_needed(given: Mapping[str, Any], needed: Mapping[str, Iterable[str]], what: str) -> None:
    """Raise ValueError if a part of a request lacks a field that its type needs; `what` it is called."""
    for name in needed.get(str(given.get("type")), ()):
        if name not in given:
            raise ValueError(f"{what} of type {given['type']} needs {name}")


class RequestPart(BaseModel):
    """A part of a request. A field that it does not know has no effect, and is told (`ignoring`)."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @model_validator(mode="after")
    def _without_others(self) -> Self:
        if others := self.__pydantic_extra__:
            ignore(name for name, value in others.items() if value is not None)
            self.__pydantic_fields_set__.difference_update(others)
            others.clear()
        return self


def _refused(advice: str) -> Any:  # noqa: ANN401 - a type for pydantic
    def check(value: Any) -> Any:  # noqa: ANN401 - whatever the client sent
        if value:
            raise ValueError(f"is not supported here: {advice}")
        return value

    kind = Annotated[Any, AfterValidator(check), WithJsonSchema({"enum": [None, False, 0, "", [], {}]})]
    return kind, Field(None, description=f"Off: {advice}.")


def _sampling(option: Option, default: object) -> Any:  # noqa: ANN401 - a type for pydantic
    kind: Any = int if option.whole else float
    bounds: dict[str, Any] = {}
    if limits := option.request_bounds or option.limits:
        is_above = option.above and not option.request_bounds
        bounds = {"gt" if is_above else "ge": limits[0], "le": limits[1]}
    else:
        kind = list[Annotated[str, Field(min_length=1)]]
    return kind | None, Field(None, **bounds, description=f"{option.help} Default {default}.")


if TYPE_CHECKING:

    class OtherFields(RequestPart):
        """Fields of sampling, and those that are refused."""

    class VectorFields(RequestPart):
        """Fields of other servers that would change vectors or scores."""

else:
    VectorFields = create_model(
        "VectorFields",
        __base__=RequestPart,
        __doc__="Fields of other servers that would change vectors or scores.",
        **{name: _refused(advice) for name, advice in REFUSED_VECTORS.items()},
    )
    OtherFields = create_model(
        "OtherFields",
        __base__=RequestPart,
        __doc__="Fields of sampling, and those that are refused.",
        **{
            option.request_name(name): _sampling(option, getattr(SamplingParams(), name))
            for name, option in SAMPLING.items()
            if name != "logit_bias"
        },
        **{name: _refused(advice) for name, advice in REFUSED.items()},
    )


class StructuredOutputs(RequestPart):
    """vLLM's `structured_outputs`: one of its parts."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    choice: list[str] | None = None
    regex: str | None = None
    grammar: str | None = None
    backend: Any = None
    structural_tag: None = Field(None, description="vLLM's; is not here.")


class ConstraintFields(RequestPart):
    """The fields besides `response_format` that say what an answer must match; one at most."""

    json_schema: dict[str, Any] | None = Field(None, description="llama-server's: a JSON schema.")
    grammar: str | None = Field(None, description="llama-server's: GBNF, or Lark.")
    structured_outputs: StructuredOutputs | None = None
