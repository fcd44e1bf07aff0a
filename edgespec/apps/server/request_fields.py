"""The fields that a request may have, besides those in request_schema.py.

Those of sampling come from the table of options, those without an effect from tables here, which also have
those that would change an answer and are not here. One that nobody knows has no effect: a header and the log
name it (json_routes.py), and a strict server refuses it. null means "not given".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

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

# ---- fields of other servers without an effect here: names, reason, values that change nothing ----

ANY = object()
"""Marks a field that may have any value; else only null and those of its row are accepted."""


class Unused(NamedTuple):
    """A field that has no effect."""

    reason: str
    neutral: tuple[Any, ...]

    @property
    def is_harmless(self) -> bool:
        """Whether it may have any value."""
        return ANY in self.neutral

    def accepts(self, value: object) -> bool:
        """Whether `value` changes nothing. True is 1 in Python; in JSON they differ."""
        if self.is_harmless or value is None:
            return True
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.neutral)


def _table(*rows: tuple[Any, ...]) -> Mapping[str, Unused]:
    return {name: Unused(reason, tuple(values)) for names, reason, *values in rows for name in names.split()}


_CHAT = "on /v1/chat/completions"
_LOGPROBS = f"use logprobs, {_CHAT} and /v1/completions"
_FORMAT = "use response_format, or json_schema on /infill"
_CUTS = "use top_p, min_p or typical_p"

FIELDS = _table(
    ("store metadata", "nothing is stored", ANY),
    ("service_tier", "there is one tier", ANY),
    ("safety_identifier", "nobody is told", ANY),
    ("prompt_cache_key", "a balancer may read it, the cache finds prompts by themselves", ANY),
    ("prompt_cache_retention", "the cache keeps what fits", ANY),
    ("prediction", "a draft of the answer; it drafts for itself", ANY),
    ("cache_prompt", "prompts are always cached", ANY),
    ("id_slot", "any slot has every prompt", ANY),
    ("n_keep", "a context is never shifted", ANY),
    ("n_cache_reuse", "a text is read again from where it differs", ANY),
    ("n_indent", "it only counts", ANY),
    ("response_fields", "all fields are sent", ANY),
    ("t_max_prompt_ms", "the server's limits hold", ANY),
    ("api_key", "the header counts", ANY),
    ("priority", "turns go by client", ANY),
    ("request_id", "the answer has an id of its own", ANY),
    ("cache_salt", "texts of others cannot be seen", ANY),
    ("guided_decoding_backend", "there is one", ANY),
    ("spaces_between_special_tokens", "special tokens are not written", ANY),
    ("keep_alive", "the model stays loaded", ANY),
    ("usage", "the usage is always counted", ANY),
    ("transforms", "prompts are sent as they are", ANY),
    ("provider", "there is one", ANY),
    ("mirostat_tau mirostat_eta", "of mirostat, which is off", ANY),
    ("adaptive_decay", "of adaptive_target, which is off", ANY),
    ("audio", "this server writes text"),
    ("functions", f"use tools, {_CHAT}"),
    ("function_call", f"use tool_choice, {_CHAT}"),
    ("web_search_options", "this server searches nothing"),
    ("verbosity", "say in the prompt how long the answer should be", "medium"),
    ("prompt_logprobs", "use /v1/completions with echo and logprobs", False),
    ("min_tokens", "use ignore_eos with max_tokens for an answer of a fixed length", 0),
    ("length_penalty", "there is no beam search", 1),
    ("use_beam_search early_stopping", "there is no beam search", False),
    ("bad_words", "use logit_bias", []),
    ("allowed_token_ids", "use logit_bias, or a grammar"),
    ("logits_processors", "use logit_bias, or a grammar", []),
    ("include_stop_str_in_output", "stop strings are not part of the answer", False),
    ("skip_special_tokens", "special tokens are not written", True),
    ("truncate_prompt_tokens", "send a shorter prompt"),
    ("return_tokens_as_token_ids return_token_ids return_tokens", "use /tokenize", False),
    ("guided_whitespace_pattern", "JSON is written in one line; a schema's x-guidance spaces it otherwise"),
    ("documents", "put them into a message", []),
    ("chat_template", "start the server with it"),
    ("mirostat", _CUTS, 0),
    ("tfs_z", _CUTS, 1),
    ("adaptive_target", _CUTS, -1),
    ("top_a", "use min_p", 0),
    ("smoothing_factor", "use temperature", 0),
    ("penalize_nl", "use logit_bias", False),
    ("samplers", "their order is llama.cpp's default"),
    ("json_object", _FORMAT, False),
    ("format", _FORMAT, ""),
    ("options", "send its parts as fields of their own", {}),
    ("num_ctx", "the server's --ctx decides"),
    ("n_probs", _LOGPROBS, 0),
    ("post_sampling_probs", _LOGPROBS, False),
    ("return_progress", "a stream says in comments that it waits", False),
    ("timings_per_token", "the usage has the times", False),
    ("t_max_predict_ms", "use max_tokens", 0),
    ("image_data", "this server reads text", []),
    ("lora", "start the server with a model that has the adapter in it", []),
    ("grammar_lazy", f"use tools, {_CHAT}", False),
    ("grammar_triggers", f"use tools, {_CHAT}", []),
    ("preserved_tokens", "use logit_bias", []),
    ("enable_thinking think prompt_mode", f"use reasoning_effort, {_CHAT}"),
    ("reasoning thinking thinking_budget", f"use reasoning_effort or reasoning_budget, {_CHAT}"),
    ("reasoning_format", "thoughts come in reasoning_content", "auto", "deepseek"),
    ("include_reasoning separate_reasoning", "thoughts come in reasoning_content", True),
    ("reasoning_budget_message", "the last words of a thought are edgespec's own", ""),
    ("max_new_tokens max_output_tokens max_tokens_to_sample", "use max_tokens"),
    ("min_new_tokens", "use ignore_eos with max_tokens for an answer of a fixed length", 0),
    ("random_seed", "use seed"),
    ("regex ebnf structural_tag", "use guided_regex or grammar"),
    ("do_sample", "use temperature", True),
    ("num_beams", "there is no beam search", 1),
    ("epsilon_cutoff eta_cutoff", _CUTS, 0),
    ("no_repeat_ngram_size", "use dry_multiplier", 0),
    ("guidance_scale", "there is no guidance", 1),
    ("negative_prompt", "there is no guidance", ""),
    ("custom_logit_processor", "use logit_bias, or a grammar"),
    ("lora_path adapter_id", "start the server with a model that has the adapter in it"),
    ("search_parameters", "this server searches nothing"),
    ("enable_search", "this server searches nothing", False),
    ("safe_prompt", "say it in the prompt", False),
    ("models", "one model answers", []),
)
"""Fields of OpenAI's, llama-server's, vLLM's, LiteLLM's and OpenRouter's requests."""

OLLAMA = _table(
    ("num_thread", "edgespec uses the cores it may use", ANY),
    ("num_batch", "the size of a pass is chosen here", ANY),
    ("num_gpu main_gpu low_vram", "this server computes on the processor", ANY),
    ("numa", "the placement of memory is the machine's", ANY),
    ("use_mmap use_mlock", "the model is loaded already", ANY),
    ("f16_kv", "the cache was made when the server started", ANY),
    ("logits_all", "logprobs asks for probabilities", ANY),
    ("num_keep", "nothing of a conversation is ever dropped", ANY),
    ("mirostat_tau mirostat_eta", "mirostat is off", ANY),
    ("mirostat", "mirostat is not here", 0),
    ("tfs_z", "tail-free sampling is not here", 1),
    ("penalize_newline", "a penalty is for all tokens", True),
    ("vocab_only embedding_only", "this server writes text", False),
)
"""Parts of the `options` of Ollama's requests."""


_CUT = "send a shorter text: nothing is cut here"
_INSTRUCTION = "write the instruction into the text, as the model was trained"

VECTORS = _table(
    ("input_type task prompt_name instruction instruct", _INSTRUCTION),
    ("truncate truncation", _CUT, False, "NONE"),
    ("truncate_prompt_tokens max_tokens_per_doc max_chunks_per_doc overlap_tokens max_length", _CUT),
    ("late_chunking return_embeddings", "a text has one vector", False),
    ("embedding_type embedding_types output_dtype", "numbers are floats", "float", ["float"]),
    ("output_dimension truncate_dim", "use dimensions of /v1/embeddings"),
    ("normalize normalized normalise embd_normalize", "vectors have the length 1", True, 2),
    ("pooling pooling_type", "the server's --pooling decides"),
    ("add_special_tokens", "texts are read as the model was trained", True),
    ("rank_fields", "send the text of each document"),
    ("activation use_activation softmax", "scores are from 0 to 1", True),
    ("raw_scores", "scores are from 0 to 1", False),
    ("return_text", "use return_documents", False),
)
"""Fields of requests for vectors and scores: of Cohere's, Jina's, Voyage's, vLLM's, TEI's."""


# ---- requests ----

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.\-]+$")]
"""The name of a tool, of any length: clients join it of those of a server and its tool."""


def only(line: str) -> WrapValidator:
    """Say "must be `line`" of a value of the wrong kind; what is told of a part of it stays."""

    def check(value: Any, read: ValidatorFunctionWrapHandler) -> Any:  # noqa: ANN401 - whatever was sent
        try:
            return read(value)
        except ValidationError as error:
            if {one["type"] for one in error.errors()} & {"value_error", "missing", "extra_forbidden"}:
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


def _unused(name: str, unused: Unused) -> Any:  # noqa: ANN401 - a type for pydantic
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

    class VectorFields(RequestPart):
        """Fields of other servers that would change vectors or scores."""

else:
    VectorFields = create_model(
        "VectorFields",
        __base__=RequestPart,
        __doc__="Fields of other servers that would change vectors or scores.",
        **{name: _unused(name, unused) for name, unused in VECTORS.items()},
    )
    OtherFields = create_model(
        "OtherFields",
        __base__=RequestPart,
        __doc__="Fields of sampling, and those that nothing is done with.",
        **{
            option.request_name(name): _sampling(option, getattr(SamplingParams(), name))
            for name, option in SAMPLING.items()
            if name != "logit_bias"
        },
        **{name: _unused(name, unused) for name, unused in FIELDS.items()},
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
    guided_json: Annotated[
        dict[str, Any] | str | None, only("a JSON schema, as an object or as its text")
    ] = Field(None, description="vLLM's: a JSON schema, or its text.")
    guided_choice: list[str] | None = Field(None, description="vLLM's: one of these texts.")
    guided_regex: str | None = Field(None, description="vLLM's: what the whole answer matches.")
    guided_grammar: str | None = Field(None, description="vLLM's: Lark, or GBNF.")
    structured_outputs: StructuredOutputs | None = None
