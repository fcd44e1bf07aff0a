"""The fields that requests share: sampling, constraints, and those of other servers that are refused.

An unknown field has no effect: its name is collected (`ignoring`), for a header of the answer
and the log (json_routes.py). null means "not given".
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    create_model,
    model_validator,
)

from edgespec.decoding.option_table import Option
from edgespec.decoding.sampling import SAMPLING, SamplingParams

# ---- fields of other servers ----


REFUSED = (
    *("functions", "function_call", "regex", "ebnf", "structural_tag", "format", "json_object"),
    *("guided_json", "guided_choice", "guided_regex", "guided_grammar", "min_tokens", "min_new_tokens"),
    *("max_new_tokens", "max_output_tokens", "max_tokens_to_sample", "truncate_prompt_tokens"),
    *("include_stop_str_in_output", "allowed_token_ids", "bad_words", "mirostat", "samplers"),
    *("use_beam_search", "random_seed", "options", "enable_thinking", "reasoning", "think", "thinking"),
    *("chat_template", "documents", "image_data"),
)
"""Fields of other servers that would change the text."""

REFUSED_VECTORS = (
    *("input_type", "instruction", "prompt_name", "task", "output_dimension", "truncate_dim", "pooling"),
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


def without_nulls(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that have a value: null means left out."""
    return {name: value for name, value in given.items() if value is not None}


def check_needed(given: Mapping[str, Any], needed: Mapping[str, Iterable[str]], what: str) -> None:
    """Raise ValueError if a part of a request lacks a field that its type needs; `what` names it."""
    for name in needed.get(str(given.get("type")), ()):
        if name not in given:
            raise ValueError(f"{what} of type {given['type']} needs {name}")


class RequestPart(BaseModel):
    """A part of a request. An unknown field has no effect, and is collected (`ignoring`)."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @model_validator(mode="after")
    def _without_others(self) -> Self:
        if others := self.__pydantic_extra__:
            ignore(name for name, value in others.items() if value is not None)
            self.__pydantic_fields_set__.difference_update(others)
            others.clear()
        return self


# ---- images, which are in the request itself ----

_DATA_URL = re.compile(r"data:[^,]{0,200};base64,", re.IGNORECASE)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def _image(given: Any, form: str) -> Any:  # noqa: ANN401 - whatever the client sent
    """Return the bytes that `given` encodes; what is no text is left for validation to refuse."""
    if not isinstance(given, str):
        return given
    url = _DATA_URL.match(given)
    if not url and (form != "in base64" or _SCHEME.match(given)):
        raise ValueError(f"must be the image itself, {form}: this server fetches nothing")
    try:
        data = base64.b64decode("".join(given[url.end() if url else 0 :].split()), validate=True)
    except ValueError:
        raise ValueError("is not valid base64") from None
    if not data:
        raise ValueError("is empty")
    return data


_TEXT = WithJsonSchema({"type": "string"})
ImageBase64 = Annotated[bytes, BeforeValidator(partial(_image, form="in base64")), _TEXT]
"""The file of an image, in base64."""
ImageUrl = Annotated[bytes, BeforeValidator(partial(_image, form="as data:image/png;base64,...")), _TEXT]
"""The file of an image, as a data: URL."""


def image_part(data: bytes) -> dict[str, Any]:
    """Return an image as a part of a message's content in OpenAI's form."""
    return {"type": "image_url", "image_url": {"url": data}}


def _check_off(value: Any) -> Any:  # noqa: ANN401 - whatever the client sent
    if value:
        raise ValueError("is not supported here: leave it out")
    return value


_OFF: Any = (
    Annotated[Any, AfterValidator(_check_off), WithJsonSchema({"enum": [None, False, 0, "", [], {}]})],
    None,
)
"""A field that may only be off, for pydantic."""


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
        **dict.fromkeys(REFUSED_VECTORS, _OFF),
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
        **dict.fromkeys(REFUSED, _OFF),
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
