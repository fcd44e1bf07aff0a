"""The fields that a request may have, besides those in request_schema.py.

Those of sampling come from the table of options, those without an effect from other_fields.py, which also has
those that would change an answer and are not here. One that nobody knows has no effect: a header and the log
name it (json_routes.py), and a strict server refuses it. null means "not given".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    WithJsonSchema,
    create_model,
    model_validator,
)

from edgespec.apps.server.other_fields import FIELDS
from edgespec.decoding.option_table import Option
from edgespec.decoding.sampling import SAMPLING, SamplingParams


class RequestPart(BaseModel):
    """A part of a request. A field that it does not know may be null, and is refused otherwise."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        json_schema_extra={"additionalProperties": {"type": "null"}},
    )

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:  # noqa: ANN401 - whatever the client sent
        if not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {name: value for name, value in data.items() if value is not None or name in known}


def _unused(name: str) -> Any:  # noqa: ANN401 - a type for pydantic
    unused = FIELDS[name]
    if unused.is_harmless:
        return Any, Field(None, description=f"Changes nothing: {unused.reason}.")

    def check(value: Any) -> Any:  # noqa: ANN401 - whatever the client sent
        if unused.accepts(value):
            return value
        raise ValueError(f"{name} is not supported here: {unused.reason}")

    kind = Annotated[Any, AfterValidator(check), WithJsonSchema({"enum": [*unused.neutral, None]})]
    return kind, Field(None, description=f"Off: {unused.reason}.")


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
        """Fields of sampling, and those that nothing is done with."""

else:
    OtherFields = create_model(
        "OtherFields",
        __base__=RequestPart,
        __doc__="Fields of sampling, and those that nothing is done with.",
        **{
            option.request_name(name): _sampling(option, getattr(SamplingParams(), name))
            for name, option in SAMPLING.items()
            if name != "logit_bias"
        },
        **{name: _unused(name) for name in FIELDS},
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
    guided_json: dict[str, Any] | str | None = Field(None, description="vLLM's: a JSON schema, or its text.")
    guided_choice: list[str] | None = Field(None, description="vLLM's: one of these texts.")
    guided_regex: str | None = Field(None, description="vLLM's: what the whole answer matches.")
    guided_grammar: str | None = Field(None, description="vLLM's: Lark, or GBNF.")
    structured_outputs: StructuredOutputs | None = None
