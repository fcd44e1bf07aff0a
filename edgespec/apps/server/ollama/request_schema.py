"""Requests in the form of Ollama's API. A field that it lacks is refused by its name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from edgespec.apps.server.names import RequestedModel
from edgespec.apps.server.ollama.options import OPTIONS_SCHEMA
from edgespec.apps.server.ollama.response_schema import duration_s
from edgespec.apps.server.request_fields import RequestPart
from edgespec.decoding.option_table import MAX_LOGPROBS


def _absent(line: str) -> BeforeValidator:
    """Refuse any value but an empty one with `line`."""

    def check(value: Any) -> Any:  # noqa: ANN401 - whatever the client sent
        if value:
            raise ValueError(line)
        return value

    return BeforeValidator(check)


Images = Annotated[list[Any] | None, _absent("images are not supported: this model reads text only")]


class OllamaRequest(RequestPart):
    """The body of a request, none of whose fields is dropped in silence."""

    model: RequestedModel = ""


class OllamaRequestPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class OllamaCalledFunction(OllamaRequestPart):
    """A call's function; its arguments are an object, or the text of one as in OpenAI's API."""

    name: str
    arguments: dict[str, Any] | str | None = None


class OllamaToolCall(OllamaRequestPart):
    """A call of an earlier answer."""

    id: str | None = None
    function: OllamaCalledFunction


class OllamaRequestMessage(OllamaRequestPart):
    """A message of any role; one of the assistant may have fields of other servers."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | None = None
    thinking: str | None = None
    images: Images = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaGenerationRequest(OllamaRequest):
    """The fields of /api/chat and /api/generate."""

    stream: bool | None = Field(None, description="Lines as they are written, unless it is false.")
    format: Literal["", "json"] | dict[str, Any] | None = Field(
        None, description='"json", or a JSON schema that the answer matches.'
    )
    options: Annotated[dict[str, Any] | None, OPTIONS_SCHEMA] = None
    keep_alive: float | str | None = Field(None, description="The model stays as long as the server.")
    think: bool | Literal["", "low", "medium", "high", "max"] | None = None
    truncate: bool | None = Field(None, description="Accepted: what does not fit is refused, never cut.")
    shift: bool | None = Field(None, description="Accepted: an answer ends where the context is full.")
    logprobs: bool | Literal[0] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @field_validator("keep_alive")
    @classmethod
    def _is_duration(cls, value: float | str | None) -> float | str | None:
        if value is not None:
            duration_s(value)
        return value

    @property
    def unloads(self) -> bool:
        """Whether `keep_alive` asks to free the model at once."""
        return self.keep_alive is not None and duration_s(self.keep_alive) == 0


class OllamaChatRequest(OllamaGenerationRequest):
    """The body of POST /api/chat."""

    messages: list[OllamaRequestMessage] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(OllamaGenerationRequest):
    """The body of POST /api/generate."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: Images = None
    template: Annotated[
        str | None, _absent("the model's own template is used: write the prompt as it shall be, with raw")
    ] = None
    context: Annotated[list[int] | None, _absent("is not supported: send the conversation to /api/chat")] = (
        None
    )


class OllamaNameRequest(OllamaRequest):
    """The body of POST /api/pull and /api/show."""

    name: str = Field("", description="The older name of `model`.")
    stream: bool | None = Field(None, description="Of /api/pull: lines, unless it is false.")
