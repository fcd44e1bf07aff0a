"""The fields that a request may have, besides those in request_schema.py.

Three kinds of fields: *honoured* ones are declared where they are used; *harmless* ones do not change what is
answered, and may have any value; of those that are *off*, only the value that changes nothing is accepted.
A field that is none of them would be dropped in silence: it is refused by name. null means "not given".
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

HARMLESS = {
    "store": "OpenAI's: nothing is stored",
    "metadata": "OpenAI's: nothing is stored",
    "service_tier": "OpenAI's: there is one tier",
    "safety_identifier": "OpenAI's: nobody is told",
    "prompt_cache_key": "OpenAI's: a balancer may read it, the cache finds prompts by themselves",
    "prompt_cache_retention": "OpenAI's: the cache keeps what fits",
    "prediction": "OpenAI's: a draft of the answer; it drafts for itself",
    "cache_prompt": "llama-server's: prompts are always cached",
    "id_slot": "llama-server's: any slot has every prompt",
    "n_keep": "llama-server's: a context is never shifted",
    "n_indent": "llama-server's: it only counts",
    "n_cache_reuse": "llama-server's: nothing is shifted",
    "response_fields": "llama-server's: all fields are sent",
    "t_max_prompt_ms": "llama-server's: the server's limits hold",
    "api_key": "LiteLLM's: the header counts",
    "priority": "vLLM's: turns go by client",
    "request_id": "vLLM's: the answer has an id of its own",
    "cache_salt": "vLLM's: texts of others cannot be seen",
    "guided_decoding_backend": "vLLM's: there is one",
    "spaces_between_special_tokens": "vLLM's: special tokens are not written",
    "keep_alive": "Ollama's: the model stays loaded",
    "usage": "OpenRouter's: the usage is always counted",
    "transforms": "OpenRouter's: prompts are sent as they are",
    "provider": "OpenRouter's: there is one",
}
"""Fields that do not change an answer, and why."""

_CHAT = "on /v1/chat/completions"
_USE_LOGPROBS = f"use logprobs, {_CHAT} and /v1/completions"
_USE_FORMAT = "use response_format, or json_schema on /infill"
OFF: dict[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), "this server writes text"),
    "functions": ((), f"use tools, {_CHAT}"),
    "function_call": ((), f"use tool_choice, {_CHAT}"),
    "web_search_options": ((), "this server searches nothing"),
    "verbosity": (("medium",), "say in the prompt how long the answer should be"),
    "prompt_logprobs": ((False,), "use /v1/completions with echo and logprobs"),
    "min_tokens": ((0,), "use ignore_eos with max_tokens for an answer of a fixed length"),
    "length_penalty": ((1,), "there is no beam search"),
    "use_beam_search": ((False,), "there is no beam search"),
    "early_stopping": ((False,), "there is no beam search"),
    "bad_words": (([],), "use logit_bias"),
    "allowed_token_ids": ((), "use logit_bias, or a grammar"),
    "include_stop_str_in_output": ((False,), "stop strings are not part of the answer"),
    "skip_special_tokens": ((True,), "special tokens are not written"),
    "truncate_prompt_tokens": ((), "send a shorter prompt"),
    "return_tokens_as_token_ids": ((False,), "use /tokenize"),
    "return_token_ids": ((False,), "use /tokenize"),
    "logits_processors": (([],), "use logit_bias, or a grammar"),
    "guided_whitespace_pattern": (
        (),
        "JSON is written in one line; a schema's x-guidance spaces it otherwise",
    ),
    "documents": (([],), "put them into a message"),
    "chat_template": ((), "start the server with it"),
    "mirostat": ((0,), "use top_p, min_p or typical_p"),
    "tfs_z": ((1,), "use top_p, min_p or typical_p"),
    "top_a": ((0,), "use min_p"),
    "top_n_sigma": ((-1, 0), "use min_p"),
    "dynatemp_range": ((0,), "use temperature"),
    "smoothing_factor": ((0,), "use temperature"),
    "xtc_probability": ((0,), "use top_p, min_p or typical_p"),
    "dry_multiplier": ((0,), "use repeat_penalty"),
    "penalize_nl": ((False,), "use logit_bias"),
    "adaptive_target": ((-1,), "use top_p, min_p or typical_p"),
    "samplers": ((), "their order is llama.cpp's default"),
    "json_object": ((False,), _USE_FORMAT),
    "format": (("",), _USE_FORMAT),
    "options": (({},), "send its parts as fields of their own"),
    "num_ctx": ((), "the server's --ctx decides"),
    "n_probs": ((0,), _USE_LOGPROBS),
    "post_sampling_probs": ((False,), _USE_LOGPROBS),
    "return_tokens": ((False,), "use /tokenize"),
    "return_progress": ((False,), "a stream says in comments that it waits"),
    "timings_per_token": ((False,), "the usage has the times"),
    "t_max_predict_ms": ((0,), "use max_tokens"),
    "image_data": (([],), "this server reads text"),
    "lora": (([],), "start the server with a model that has the adapter in it"),
    "grammar_lazy": ((False,), f"use tools, {_CHAT}"),
    "grammar_triggers": (([],), f"use tools, {_CHAT}"),
    "preserved_tokens": (([],), "use logit_bias"),
    "enable_thinking": ((), f"use chat_template_kwargs, {_CHAT}"),
    "think": ((), f"use chat_template_kwargs, {_CHAT}"),
}
"""Fields of other servers: the values besides null that change nothing, and what to do instead.

Parameters of a sampler that is off, such as mirostat_tau, change nothing either."""

_PARAMETERS = {
    "mirostat": ("mirostat_tau", "mirostat_eta"),
    "dynatemp_range": ("dynatemp_exponent",),
    "xtc_probability": ("xtc_threshold",),
    "dry_multiplier": ("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
    "adaptive_target": ("adaptive_decay",),
}
HARMLESS |= {name: f"of {sampler}, which is off" for sampler, names in _PARAMETERS.items() for name in names}


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


def _off(name: str) -> Any:  # noqa: ANN401 - a type for pydantic
    neutral, advice = OFF[name]

    def check(value: Any) -> Any:  # noqa: ANN401 - whatever the client sent
        for same in (None, *neutral):  # True is 1 in Python, not in JSON
            if value == same and isinstance(value, bool) == isinstance(same, bool):
                return value
        raise ValueError(f"{name} is not supported here: {advice}")

    return Annotated[Any, AfterValidator(check), WithJsonSchema({"enum": [*neutral, None]})]


if TYPE_CHECKING:

    class OtherFields(RequestPart):
        """Fields that every request may have, and that nothing is done with."""

else:
    OtherFields = create_model(
        "OtherFields",
        __base__=RequestPart,
        __doc__="Fields that every request may have, and that nothing is done with.",
        **{
            name: (Any, Field(None, description=f"Changes nothing: {why}.")) for name, why in HARMLESS.items()
        },
        **{name: (_off(name), Field(None, description=f"Off: {OFF[name][1]}.")) for name in OFF},
    )


class StructuredOutputs(RequestPart):
    """vLLM's `structured_outputs`: one of its parts."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    choice: list[str] | None = None
    regex: str | None = None
    grammar: str | None = None
    backend: Any = None


class ConstraintFields(RequestPart):
    """The fields besides `response_format` that say what an answer must match; one at most."""

    json_schema: dict[str, Any] | None = Field(None, description="llama-server's: a JSON schema.")
    grammar: str | None = Field(None, description="llama-server's: GBNF, or Lark.")
    guided_json: dict[str, Any] | str | None = Field(None, description="vLLM's: a JSON schema, or its text.")
    guided_choice: list[str] | None = Field(None, description="vLLM's: one of these texts.")
    guided_regex: str | None = Field(None, description="vLLM's: what the whole answer matches.")
    guided_grammar: str | None = Field(None, description="vLLM's: Lark, or GBNF.")
    structured_outputs: StructuredOutputs | None = None
