"""Turns requests into the prompt tokens and options for the engine."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from edgespec.apps.server.api_errors import IMAGES, ApiError, PromptTooLong, field_error
from edgespec.apps.server.chat_prompts import ChatPrompt, ChatPrompts
from edgespec.apps.server.names import NamedModel, ServedNames, plain_name
from edgespec.apps.server.request_schema import (
    MAX_IMAGES,
    AllowedToolsChoice,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    InfillRequest,
    JsonFormat,
    NamedTool,
    SchemaFormat,
    Tool,
    time_limit,
)
from edgespec.apps.server.request_worker import Start
from edgespec.apps.server.streaming import Prepared
from edgespec.apps.server.tool_calls.answer_reader import PLAIN, AnswerForm, first_call
from edgespec.apps.server.tool_calls.forced_grammar import CallGrammars
from edgespec.decoding.grammars import Grammar, GrammarSource
from edgespec.decoding.options import Options
from edgespec.decoding.records import Result, Token
from edgespec.decoding.sampling import SAMPLING, SamplingParams
from edgespec.errors import UsageError
from edgespec.llama.chat_template import Thinking
from edgespec.llama.control_names import FimTokens
from edgespec.llama.weights import Model

if TYPE_CHECKING:
    from edgespec.apps.server.worker import Worker
    from edgespec.engine.engine import Engine


DEFAULT_MAX_TOKENS = 16
"""Default max_tokens of /v1/completions, as in OpenAI's API."""


_REQUEST_NAMES = {
    name: option.request_name(name) for name, option in SAMPLING.items() if name != "logit_bias"
}


def read_sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given fields of `SamplingParams`, with values that only other servers know translated."""
    return {
        name: read(value) if (read := SAMPLING[name].read) else value
        for name, value in given.items()
        if value is not None
    }


def engine_options(request: GenerationRequest, model: Model, n_predict: int | None) -> Options:
    """Return the options of a request's first text, which may have `n_predict` tokens. Raises ApiError."""
    scales = {one.id: one.scale for one in request.lora or ()}
    model.adapters.set_of(scales)
    return Options(
        params=SamplingParams(**_sampling(request, model)),
        n_predict=n_predict,
        stop=request.stop or (),
        stop_tokens=request.stop_token_ids or (),
        seed=None if request.seed is None else request.seed % (1 << 64),  # OpenAI's may be negative
        drafter=request.speculative.drafter if request.speculative else None,
        gamma=request.speculative.gamma if request.speculative else None,
        lora=scales or None,  # an empty list is none, as in llama-server
    )


def _sampling(request: GenerationRequest, model: Model) -> dict[str, Any]:
    given = read_sampling({name: getattr(request, named) for name, named in _REQUEST_NAMES.items()})
    if request.repetition_penalty is not None:
        if given.get("repeat_penalty", request.repetition_penalty) != request.repetition_penalty:
            raise _contradiction("repetition_penalty", "repeat_penalty")
        given["repeat_penalty"] = request.repetition_penalty
        given.setdefault("penalty_last_n", -1)
    bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
    if request.ignore_eos:
        bias |= dict.fromkeys(model.eog_tokens, -math.inf)
    if bias:
        given["logit_bias"] = bias
    return given


def requested_tokens(request: GenerationRequest) -> int | None:
    """Return how many tokens a request asks for; None: as many as the context holds. Raises ApiError."""
    given = {"max_tokens": request.max_tokens, "n_predict": request.n_predict}
    if isinstance(request, ChatRequest):
        given["max_completion_tokens"] = request.max_completion_tokens
    name, asked = _one_of(given)
    if asked is None:
        return DEFAULT_MAX_TOKENS if isinstance(request, CompletionRequest) else None
    if (
        asked == 0
        and isinstance(request, ChatRequest | CompletionRequest)
        and not getattr(request, "echo", None)
    ):
        line = "must be at least 1; 0 is for a text completion with echo, its prompt alone"
        raise ApiError(400, line, field=name)
    return None if asked < 0 else asked


def requested_thoughts(request: ChatRequest) -> int | None:
    """Return the most tokens of a thought that a request asks for; None: not given. Raises ApiError."""
    names = ("reasoning_budget", "reasoning_budget_tokens", "thinking_budget_tokens")
    return _one_of({name: getattr(request, name) for name in names})[1]


def _one_of(given: Mapping[str, int | None]) -> tuple[str, int | None]:
    """Return the name and the value that was given; all below 0 are alike. Raises ApiError for several."""
    named = {name: value for name, value in given.items() if value is not None}
    if len({max(-1, value) for value in named.values()}) > 1:
        raise _contradiction(*[*named][1::-1])
    return next(iter(named.items()), ("", None))


def _contradiction(name: str, other: str) -> ApiError:
    return ApiError(400, f"is another name of {other}, which has another value: leave one out", field=name)


def seed_of_choice(seed: int | None, index: int) -> int | None:
    """Return the seed of a request's choice number `index`: the first has the request's own."""
    if seed is None or index == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:8], "big")


_LEAST_GAP = 256  # tokens that there is room for where a request says nothing else


@dataclass(frozen=True)
class Service:
    """The model that a server serves: its names and the limits of its requests."""

    named: NamedModel
    n_ctx: int
    """Most tokens of prompt and answer together."""
    max_prompt: int | None = None
    """Most tokens of a prompt; None: as many as the context holds."""
    reasoning_budget: int = -1
    """Most tokens of a thought where a request says nothing; -1: no limit."""

    @classmethod
    def of(
        cls,
        engine: Engine,
        *,
        n_ctx: int | None = None,
        max_prompt: int | None = None,
        names: Sequence[str] = (),
        reasoning_budget: int = -1,
    ) -> Service:
        """The service of `engine`; its model's name is the registry's, or the file's without its path.

        `names` replace its own: answers use the first, requests may use any.
        """
        named = NamedModel.of(engine.target, [*names, plain_name(engine.target_name)])
        n_ctx = min(n_ctx or engine.target.n_ctx_train, engine.n_ctx_shared or engine.target.n_ctx_train)
        return cls(named, n_ctx, max_prompt, reasoning_budget)

    @property
    def name(self) -> str:
        """Name of the model in every answer."""
        return self.named.name

    @property
    def names(self) -> ServedNames:
        """The names that requests may use for it."""
        return ServedNames([self.named])

    def fingerprint(self, engine: Engine) -> str:
        """Return the system_fingerprint of its answers: version, model and kernels."""
        what = f"{version('edgespec')} {self.name} {engine.target.size_bytes} {engine.kernels}"
        return "fp_" + hashlib.sha256(what.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class PreparedText:
    """One text of a request as the worker writes it: the prompt's tokens, options, and the answer's form."""

    tokens: list[int]
    options: Options
    answer: AnswerForm = PLAIN
    """The parts that the text may have."""
    is_cut: bool = False
    """Whether a part of the text around a gap was left out of the prompt."""
    echo: str | None = None
    """The prompt's text, with which the answer begins; None: it is not sent back."""

    def start(self, worker: Worker, client: str, *, follows: bool) -> Start[Token, Result]:
        """Return the function that begins the text in the turn of `client`."""
        return worker.run(self.tokens, self.options, client=client, follows=follows)


PreparedRequest = Prepared[PreparedText]
"""A request that is answered by several texts."""


class RequestReader:
    """Reads requests to one model. Its methods may run on any thread, and raise ApiError."""

    def __init__(self, engine: Engine, service: Service) -> None:
        """Read requests to the target of `engine`. Grammars are kept: conversations send theirs again."""
        self._engine, self.service = engine, service
        self.model = model = engine.target
        self._kept = lru_cache(maxsize=_KEPT_GRAMMARS)(self._compile)
        self.prompts = ChatPrompts(model, service.name)
        """The model's chat templates."""
        self._call_grammars = CallGrammars(model)

    def prompt_tokens(self, request: ChatRequest) -> list[int]:
        """Return the tokens of a conversation's prompt, however many they are."""
        request = self._asked(request)
        return self._tokens(self.prompts.write(request, self._tools(request), self._thinking(request)))

    def choices(self, request: ChatRequest | CompletionRequest) -> PreparedRequest:
        """Prepare all texts that a request asks for."""
        return self._chat(request) if isinstance(request, ChatRequest) else self._completion(request)

    def _chat(self, request: ChatRequest) -> PreparedRequest:
        request = self._asked(request)
        if request.top_logprobs and not request.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        tools = self._tools(request)
        wanted = self._grammar(request)
        prompt = self.prompts.write(request, tools, self._thinking(request))
        grammar = self._call_grammars.of(request, prompt.answer, wanted)
        tokens = self._tokens(prompt)
        n_predict = _n_predict(requested_tokens(request), len(tokens), self.service, "messages")
        options = engine_options(request, self.model, n_predict)
        options = replace(options, reasoning_budget=prompt.reasoning_budget)
        if grammar:
            options = _constrained(options, grammar, request)
        elif tools and request.parallel_tool_calls is False:
            options = replace(options, until=first_call(prompt.answer, self.model))
        if request.logprobs:
            options = replace(options, n_logprobs=request.top_logprobs or 0)
        forced = bool(tools) and request.tool_choice not in (None, "auto")
        answer = replace(prompt.answer, forced=forced)
        texts = _choices(PreparedText(tokens, options, answer), request.n or 1)
        return PreparedRequest(texts, **_sent(request, grammar))

    def _tokens(self, prompt: ChatPrompt) -> list[int]:
        """Return the tokens of a prompt, without encoding its images."""
        if len(prompt.images) > MAX_IMAGES:
            line = f"{len(prompt.images)} images are more than the {MAX_IMAGES} that a request may have"
            raise ApiError(400, line, field=IMAGES)
        if prompt.images and (problem := self._engine.media_problem()):
            raise ApiError(400, problem, field=IMAGES)
        try:
            return self._engine.tokenize(prompt.text, prompt.images)
        except UsageError as error:
            raise field_error(error, IMAGES) from None

    def _thinking(self, request: ChatRequest) -> Thinking:
        budget = requested_thoughts(request)
        if budget is None and request.reasoning_effort is None:
            budget = self.service.reasoning_budget
        return Thinking(request.reasoning_effort, budget)

    def _completion(self, request: CompletionRequest) -> PreparedRequest:
        self.service.names.find(request.model)
        n, best_of = request.n or 1, request.best_of or request.n or 1
        if best_of < n:
            raise ApiError(400, f"must be at least n, {n}", field="best_of")
        if best_of > n and request.stream:
            raise ApiError(400, "cannot be streamed: the best is known at the end", field="best_of")
        grammar = self._grammar(request)
        prompt = request.prompt
        prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
        texts: list[PreparedText] = []
        for one in prompts:
            text = self._one_text(request, one, grammar)
            if best_of > n and text.options.n_logprobs is None:
                text = replace(text, options=replace(text.options, n_logprobs=0))
            texts += _choices(text, best_of)
        best = n if best_of > n else None
        return PreparedRequest(tuple(texts), len(prompts), best, **_sent(request, grammar))

    def _one_text(self, request: CompletionRequest, prompt: object, grammar: Grammar | None) -> PreparedText:
        """Prepare a text that continues one prompt."""
        asked = requested_tokens(request)
        tokens = (
            self._around(request, prompt, asked) if request.suffix else self._prompt_tokens(request, prompt)
        )
        n_predict = _n_predict(asked, len(tokens), self.service, "prompt")
        options = engine_options(request, self.model, n_predict or None)
        if grammar:
            options = _constrained(options, grammar, request)
        if request.logprobs is not None:
            options = replace(options, n_logprobs=request.logprobs)
        echo = None
        if request.echo:
            pieces = b"".join(self.model.piece(token, special=True) for token in tokens)
            echo = prompt if isinstance(prompt, str) else pieces.decode(errors="replace")
            if request.logprobs is not None or n_predict == 0:
                if request.stream and request.logprobs is not None:
                    raise ApiError(400, "cannot be streamed with logprobs: leave one out", field="echo")
                options = replace(options, n_logprobs=request.logprobs or 0, prompt_logprobs=True)
        options = replace(options, n_predict=n_predict)
        return PreparedText(tokens, options, echo=echo)

    def _around(self, request: CompletionRequest, prompt: object, asked: int | None) -> list[int]:
        """Return the prompt for a text between `prompt` and the suffix of `request`."""
        fim = fim_of(self.model, "suffix")
        if request.echo:
            raise ApiError(400, "contradicts suffix: leave one out", field="echo")
        if request.parse_special:
            raise ApiError(400, "a prompt with a suffix is text: leave it out", field="parse_special")
        if not isinstance(prompt, str):
            raise ApiError(400, "must be text where there is a suffix", field="prompt")
        room = self.service.n_ctx - (asked or 0) - 1
        filled = make_fim_prompt(self.model, fim, FimGap(prompt, request.suffix or ""), max(room, 0))
        if filled.is_cut:
            line = "prompt and suffix do not fit in the context: shorten them"
            raise ApiError(400, line, param="prompt", code="context_length_exceeded")
        return filled.tokens

    def infill(self, request: InfillRequest) -> PreparedRequest:
        """Prepare the text for a gap between two others."""
        self.service.names.find(request.model)
        fim = fim_of(self.model, "input_suffix")
        grammar = self._grammar(request)
        asked = requested_tokens(request)
        gap = FimGap(
            request.input_prefix + (request.prompt or ""),
            request.input_suffix,
            [(file.filename, file.text) for file in request.input_extra or ()],
        )
        n_ctx = min(self.service.n_ctx, (self.service.max_prompt or self.service.n_ctx) + 1)
        n_written = min(asked or _LEAST_GAP, n_ctx // 2)
        filled = make_fim_prompt(self.model, fim, gap, n_ctx - n_written)
        n_predict = _n_predict(asked, len(filled.tokens), self.service, "input_prefix")
        options = engine_options(request, self.model, 1 if n_predict == 0 else n_predict)
        if grammar:
            options = _constrained(options, grammar, request)
        if request.t_max_predict_ms:
            options = replace(options, until=time_limit(request.t_max_predict_ms))
        text = PreparedText(filled.tokens, options, is_cut=filled.is_cut)
        sent = _sent(request, None)
        if request.samplers:
            sent["warnings"] = ("samplers are applied in llama.cpp's default order",)
        return PreparedRequest((text,), **sent)

    def _prompt_tokens(self, request: CompletionRequest, prompt: object) -> list[int]:
        if isinstance(prompt, str):
            special = request.parse_special is not False
            return self.model.tokenize(prompt, add_special=True, parse_special=special)
        tokens = [token for token in prompt if isinstance(token, int)] if isinstance(prompt, list) else []
        check_tokens(tokens, self.model, "prompt")
        return tokens

    # ---- tools and grammars ----

    def _grammar(self, request: GenerationRequest) -> Grammar | None:
        """Return the grammar that an answer must match, if the request has one."""
        constraint = _constraint(request)
        return self._kept(*constraint) if constraint else None

    def _compile(self, field: str, text: str, strict: bool) -> Grammar:
        try:
            read = partial(GrammarSource.json_schema, strict=True) if strict else _READ[field]
            source = read(text, field)
        except UsageError as error:
            raise field_error(error, field) from None
        return Grammar(self.model, source)

    def _asked(self, request: ChatRequest) -> ChatRequest:
        """Return `request` with the tools that it allows. Raises ApiError if no answer can be asked for."""
        self.service.names.find(request.model)
        if self.model.chat_template is None:
            line = f"{self.service.name} has no chat template: use /v1/completions, or an instruct model"
            raise ApiError(400, line, param="model")
        return _with_allowed_tools(request)

    def _tools(self, request: ChatRequest) -> list[Tool]:
        """Return the tools that the model is offered."""
        choice = request.tool_choice
        tools = request.tools or []
        if isinstance(choice, NamedTool) and choice.function.name not in _names(tools):
            line = f"no function {choice.function.name[:80]!r} in tools"
            raise ApiError(400, line, field="tool_choice")
        if choice == "required" and not tools:
            raise ApiError(400, "required, but there are no tools", field="tool_choice")
        for i, tool in enumerate(tools):
            schema = tool.function.parameters or {}
            if schema.get("type", "object") != "object" or not isinstance(schema.get("properties", {}), dict):
                name = f"tools.{i}.function.parameters"
                raise ApiError(400, "must be the JSON schema of an object", field=name)
        if choice == "none":
            return []
        if tools and not self.prompts.takes_tools:
            line = f"the chat template of {self.service.name} knows no tools: leave them out"
            raise ApiError(400, line, param="tools")
        return tools


def check_tokens(tokens: Sequence[int], model: Model, param: str) -> None:
    """Raise an ApiError for a token that `model` lacks."""
    for token in tokens:
        if not 0 <= token < model.n_vocab:
            last = model.n_vocab - 1
            raise ApiError(400, f"token {token}: the model's are 0 to {last}", field=param)


def _names(tools: Sequence[Tool]) -> frozenset[str]:
    return frozenset(tool.function.name for tool in tools)


def _with_allowed_tools(request: ChatRequest) -> ChatRequest:
    """Return `request` with only the functions that its `tool_choice` allows. Raises ApiError."""
    choice = request.tool_choice
    if not isinstance(choice, AllowedToolsChoice):
        return request
    allowed = {tool.function.name for tool in choice.allowed_tools.tools}
    if unknown := sorted(allowed - _names(request.tools or ())):
        raise ApiError(400, f"no function {unknown[0][:80]!r} in tools", field="tool_choice")
    tools = [tool for tool in request.tools or () if tool.function.name in allowed]
    return request.model_copy(update={"tools": tools, "tool_choice": choice.allowed_tools.mode})


def _n_predict(asked: int | None, n_prompt: int, service: Service, param: str) -> int | None:
    """Return how many tokens may be written: as many as were asked for and fit in the context."""
    limit = min(service.n_ctx - 1, service.max_prompt or service.n_ctx)
    if not n_prompt:
        raise ApiError(400, "the prompt is empty", field=param)
    if n_prompt > limit:
        raise PromptTooLong(param, n_prompt, limit, service.n_ctx)
    return None if asked is None else min(asked, service.n_ctx - n_prompt)


def _constrained(options: Options, grammar: Grammar, request: GenerationRequest) -> Options:
    if request.ignore_eos:
        line = f"contradicts {grammar.name}: a text that matches must end"
        raise ApiError(400, line, field="ignore_eos")
    return replace(options, grammar=grammar)


def _sent(request: GenerationRequest, grammar: Grammar | None) -> dict[str, Any]:
    lines = (f"{grammar.name}: not enforced: {line}" for line in grammar.warnings) if grammar else ()
    return {"streams": bool(request.stream), "user": request.user, "warnings": tuple(lines)}


def _choices(text: PreparedText, n: int) -> tuple[PreparedText, ...]:
    seed = text.options.seed
    return tuple(replace(text, options=replace(text.options, seed=seed_of_choice(seed, i))) for i in range(n))


# ---- what an answer must match ----

_STRUCTURED = "structured_outputs"
_READ: dict[str, Callable[[str, str], GrammarSource]] = {
    "response_format": GrammarSource.json_schema,
    "json_schema": GrammarSource.json_schema,
    "grammar": GrammarSource.any,
    f"{_STRUCTURED}.json": GrammarSource.json_schema,
    f"{_STRUCTURED}.json_object": GrammarSource.json_schema,
    f"{_STRUCTURED}.choice": lambda texts, name: GrammarSource.choice(json.loads(texts), name),
    f"{_STRUCTURED}.regex": GrammarSource.regex,
    f"{_STRUCTURED}.grammar": GrammarSource.any,
}
"""What reads the text of each field that an answer must match."""
_KEPT_GRAMMARS = 16


def _constraint(request: GenerationRequest) -> tuple[str, str, bool] | None:
    """Return the field that says what an answer must match, its text, and whether all of it must be enforced.

    Raises ApiError for two: one would be dropped.
    """
    given = request.model_dump(include={name.partition(".")[0] for name in _READ}, by_alias=True)
    given |= {f"{_STRUCTURED}.{name}": value for name, value in (given[_STRUCTURED] or {}).items()}
    form, strict = getattr(request, "response_format", None), False
    given["response_format"] = form.whole if isinstance(form, JsonFormat | SchemaFormat) else None
    if isinstance(form, SchemaFormat):
        strict = form.is_strict
    given["grammar"] = given["grammar"] or None  # llama-server's clients send "", too
    found = [name for name in _READ if given.get(name) not in (None, False)]
    if len(found) > 1:
        line = f"contradicts {found[0]}: an answer matches one of them; leave one out"
        raise ApiError(400, line, field=found[1])
    if not found:
        return None
    value = {"type": "object"} if given[found[0]] is True else given[found[0]]
    return found[0], value if isinstance(value, str) else json.dumps(value), strict


# ---- prompts in the middle of a text ----

_REPOSITORY = "project"  # its name, and that of a file without one: they are part of the form
_FILE = "file"
_SUFFIX_SHARE = 4  # of a text that is too long, a quarter of what is kept comes after the middle


@dataclass(frozen=True)
class FimGap:
    """Where a text is to be filled in."""

    before: str
    after: str
    beside: Sequence[tuple[str | None, str]] = ()
    """Other files of the project, name and text, the most important last."""


@dataclass(frozen=True)
class FimPrompt:
    """A prompt whose continuation fills a gap."""

    tokens: list[int]
    is_cut: bool
    """Whether a part of the text was left out."""


def fim_of(model: Model, param: str) -> FimTokens:
    """Return the tokens with which `model` fills gaps. Raises ApiError if it has none."""
    if model.fim is None:
        line = f"{model.name} cannot fill in the middle: its file names no tokens for it"
        raise ApiError(400, line, field=param)
    return model.fim


def make_fim_prompt(model: Model, fim: FimTokens, gap: FimGap, room: int) -> FimPrompt:
    """Return the prompt for `gap`, in at most `room` tokens.

    What does not fit is left out: the beginning of the text before the gap, the end of that after it, and
    the first of the other files.
    """
    before, after = (_plain(model, text) for text in (gap.before, gap.after))
    room_of_text = max(0, room - 3)
    n_after = min(len(after), max(room_of_text // _SUFFIX_SHARE, room_of_text - len(before)))
    n_before = min(len(before), room_of_text - n_after)
    is_cut = n_before < len(before) or n_after < len(after)
    kept = before[len(before) - n_before :]
    prompt = [fim.prefix, *kept, fim.suffix, *after[:n_after], fim.middle]
    if gap.beside:
        beside, left_out = _beside(model, fim, gap.beside, room - len(prompt))
        prompt, is_cut = beside + prompt, is_cut or left_out
    return FimPrompt(prompt, is_cut)


def _beside(
    model: Model, fim: FimTokens, files: Sequence[tuple[str | None, str]], room: int
) -> tuple[list[int], bool]:
    """Return the tokens of the last files that fit, and whether any file was left out."""
    head: list[int] = []
    if fim.repository is not None and fim.file is not None:
        head = [fim.repository, *_plain(model, f"{_REPOSITORY}\n")]
    own = _named(model, fim, None, "")
    room -= len(head) + len(own)
    kept: list[list[int]] = []
    for name, text in reversed(files):
        part = _named(model, fim, name, text)
        if len(part) > room:
            break
        kept.insert(0, part)
        room -= len(part)
    if not kept:
        return [], True
    return [*head, *(token for part in kept for token in part), *own], len(kept) < len(files)


def _named(model: Model, fim: FimTokens, name: str | None, text: str) -> list[int]:
    if fim.file is not None:
        ended = text if not text or text.endswith("\n") else f"{text}\n"
        return [fim.file, *_plain(model, f"{name or _FILE}\n{ended}")]
    return _plain(model, f"{name}\n{text}\n\n" if name else f"{text}\n\n") if text else []


def _plain(model: Model, text: str) -> list[int]:
    return model.tokenize(text, add_special=False, parse_special=False) if text else []
