"""Chat templates: Jinja programs that write a conversation as a prompt, or names of llama.cpp's own forms.

A file may hold several: the default one, and named ones such as "tool_use". Some files hold no program but
the name of a form ("chatml"). A template may have switches for how much a model thinks; if it has
none for an effort, tokens are counted.
"""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import jinja2
import msgspec
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edgespec.errors import EdgespecError, UsageError, describe_os_error
from edgespec.llama.backend import llama
from edgespec.llama.control_names import MEDIA_MARKER, THINKING, ControlNames, RenderedPrompt

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]

_GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")
_HELPERS = ("raise_exception", "strftime_now")
_NAMED = "tokenizer.chat_template."
_MARK = "\ue000\ue001"  # no template has it
_MAX_BYTES = 1 << 20  # of a template's file


class RefusedByTemplateError(EdgespecError):
    """The template itself refused the messages; the line is its own."""


class BrokenTemplateError(EdgespecError):
    """The template is no valid program, or fails on its input."""


class ChatTemplate:
    """One template, compiled when it is first used. Thread-safe."""

    def __init__(self, source: str, *, bos: str = "", eos: str = "") -> None:
        """Hold a program in Jinja, or a form's name; `bos` and `eos` are the texts of these tokens."""
        self.source = source
        self.bos, self.eos = bos, eos
        self.names = ControlNames()
        """Names of the vocabulary's control tokens, which are text where messages have them."""

    @property
    def is_program(self) -> bool:
        """Whether it is a program; else it is a name."""
        return "{{" in self.source or "{%" in self.source

    @cached_property
    def thinking(self) -> tuple[str, str] | None:
        """The texts that begin and end thoughts; None if it knows none."""
        if not self.is_program:
            return None
        return next((pair for pair in THINKING if pair[1] in self.source), None)

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names that the program reads, except those every template gets. Raises BrokenTemplateError."""
        if not self.is_program:
            return frozenset()
        read = meta.find_undeclared_variables(self._parsed())
        return frozenset(read).difference(_GIVEN, _HELPERS, _ENVIRONMENT.globals)

    def render(
        self,
        messages: Messages,
        tools: Tools | None = None,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        parse_special: bool = False,
    ) -> RenderedPrompt:
        """Return the prompt for `messages`; it ends where the answer begins, if `add_generation_prompt`.

        `tools`: functions as in OpenAI's API. `variables`: others that the program may read, such as
        enable_thinking. `parse_special`: names of control tokens in all of these are these tokens, else text.
        Raises RefusedByTemplateError and BrokenTemplateError.
        """

        def write(messages: Messages, tools: Tools, variables: Mapping[str, Any]) -> str:
            return self._write(messages, tools, variables, begins_answer=add_generation_prompt)

        words = messages, tools or (), variables or {}
        return RenderedPrompt(write(*words)) if parse_special else self.names.render(write, *words)

    def _write(
        self, messages: Messages, tools: Tools, variables: Mapping[str, Any], *, begins_answer: bool
    ) -> str:
        if not self.is_program:
            return _write_form(self.source.strip(), messages, begins_answer=begins_answer)
        try:
            return self._program.render(
                **variables,
                messages=[*messages],
                tools=[*tools] or None,
                documents=None,
                add_generation_prompt=begins_answer,
                bos_token=self.bos,
                eos_token=self.eos,
                raise_exception=_refuse,
                strftime_now=_strftime_now,
            )
        except RefusedByTemplateError:
            raise
        except Exception as error:  # a template is a program: it can fail in any way
            line = _line_of(error)
            where = f"line {line}: " if line else ""
            raise BrokenTemplateError(f"{where}{_reason(error)}") from error

    def render_continued(
        self,
        messages: Messages,
        tools: Tools | None = None,
        *,
        variables: Mapping[str, Any] | None = None,
        parse_special: bool = False,
    ) -> str:
        """Return the prompt that ends within the last message, so that the model continues it.

        Takes and raises what `render` does, and raises BrokenTemplateError if the template does not write
        that message's text.
        """
        *others, last = messages
        content = last.get("content") or ""
        if isinstance(content, list):  # of parts
            marked: Any = [*content[:-1], {**content[-1], "text": f"{content[-1]['text']}{_MARK}"}]
        else:
            marked = f"{content}{_MARK}"
        marked = [*others, {**last, "content": marked}]
        prompt = self.render(
            marked, tools, add_generation_prompt=False, variables=variables, parse_special=parse_special
        )
        end = prompt.rfind(_MARK)
        if end < 0:
            raise BrokenTemplateError("it leaves the last message out, so that it cannot be continued")
        return prompt[:end]

    @cached_property
    def _program(self) -> jinja2.Template:
        self._parsed()
        return _ENVIRONMENT.from_string(self.source)

    def _parsed(self) -> nodes.Template:
        try:
            return _ENVIRONMENT.parse(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise BrokenTemplateError(f"line {error.lineno}: {_reason(error)}") from error
        except RecursionError as error:
            raise BrokenTemplateError("it is too deeply nested") from error


def joined_parts(parts: Iterable[str | None]) -> str:
    """Return a message's content of these parts, of which None is a medium and becomes its marker.

    Texts are lines, and a marker has no line of its own, as in llama.cpp's server.
    """
    text, follows_text = "", False
    for part in parts:
        text += MEDIA_MARKER if part is None else f"\n{part}" if follows_text and text else part
        follows_text = part is not None
    return text


class ChatTemplates:
    """The templates of one model: the default one, and others by name."""

    def __init__(self, default: ChatTemplate, named: Mapping[str, ChatTemplate]) -> None:
        """Hold a model's templates."""
        self.default = default
        self.named = named

    def choose(self, *, tools: bool) -> ChatTemplate:
        """Return the template for a conversation with tools, or for one without."""
        return self.named.get("tool_use", self.default) if tools else self.default


def named_templates(keys: Iterable[str]) -> list[str]:
    """Return the names of a file's named templates, from the keys of its metadata."""
    return [key.removeprefix(_NAMED) for key in keys if key.startswith(_NAMED)]


def check_chat_template(given: str, keys: Iterable[str]) -> None:
    """Raise UsageError if `given` is neither a named template of a file with these keys nor readable."""
    if given not in named_templates(keys):
        read_chat_template(given)


def template_text(given: str) -> str:
    """Return the text of a user's template if it is a file, else its name. Raises UsageError."""
    return read_chat_template(given) if Path(given).is_file() else given


def read_chat_template(given: str) -> str:
    """Return the template that a user gives: a known form, a Jinja program, or a file that holds one.

    Raises UsageError.
    """
    if given in known_forms() or "{{" in given or "{%" in given:
        return given
    file = Path(given)
    try:
        if not file.is_file():
            problem = f"neither a file nor one of {', '.join(known_forms())}"
            raise UsageError(problem, field="chat_template", value=given)
        if file.stat().st_size > _MAX_BYTES:
            raise UsageError("the file is too large for a template", field="chat_template", value=given)
        text = file.read_text("utf-8-sig")
    except OSError as error:
        raise UsageError(describe_os_error(error), field="chat_template", value=given) from None
    except (UnicodeDecodeError, ValueError) as error:
        raise UsageError(f"no text: {error}", field="chat_template", value=given) from None
    if text.strip() not in known_forms():
        try:
            _ = ChatTemplate(text).variables
        except BrokenTemplateError as error:
            raise UsageError(str(error), field="chat_template", value=given) from None
        if not ChatTemplate(text).is_program:
            raise UsageError("the file holds no Jinja template", field="chat_template", value=given)
    return text


def known_forms() -> list[str]:
    """Return the names of the forms that llama.cpp can write."""
    n = llama.llama_chat_builtin_templates(None, 0)
    names = (ctypes.c_char_p * n)()
    llama.llama_chat_builtin_templates(names, n)
    return sorted(name.decode() for name in names if name)


def _write_form(name: str, messages: Messages, *, begins_answer: bool) -> str:
    if name not in known_forms():
        problem = f"it is {name[:40]!r}, which is neither a Jinja template nor the name of one"
        raise BrokenTemplateError(problem)
    held = [(str(m["role"]).encode(), str(m.get("content") or "").encode()) for m in messages]
    chat = (llama.llama_chat_message * len(held))(*(llama.llama_chat_message(*pair) for pair in held))
    size = 2 * sum(len(content) for _, content in held) + 1024 * (len(held) + 1)
    while True:
        buffer = ctypes.create_string_buffer(size)
        n = llama.llama_chat_apply_template(name.encode(), chat, len(held), begins_answer, buffer, size)
        if n < 0:
            raise BrokenTemplateError(f"llama.cpp cannot write these messages in the form {name!r}")
        if n <= size:
            return buffer.raw[:n].decode(errors="replace")
        size = n


# ---- what a program may use ----


class _Generation(Extension):
    """The tag {% generation %}, which marks answers for training; here only its content counts."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's form

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: object = "") -> str:
    raise RefusedByTemplateError(" ".join(str(message).split()) or "no reason given")


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _tojson(
    value: Any,  # noqa: ANN401 - JSON
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    made.filters["tojson"] = _tojson  # jinja2's own escapes for HTML
    return made


_ENVIRONMENT = _environment()


def _line_of(error: BaseException) -> int | None:
    found = getattr(error, "lineno", None)
    step = error.__traceback__
    while step:
        if step.tb_frame.f_code.co_filename == "<template>":
            found = step.tb_lineno
        step = step.tb_next
    return found


def _reason(error: BaseException) -> str:
    """Return why a template failed, without Python's names of its values."""
    if isinstance(error, TypeError):
        return "a value is of the wrong kind"
    reason = " ".join(str(error).split()) or "it fails"
    return re.sub(r"^.* has no (?=attribute|element)", "there is no ", reason)


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
"""How much a model thinks, in OpenAI's words."""

SWITCHES = ("enable_thinking", "thinking", "reasoning_effort")
"""Variables by which templates are told whether to think, or how much."""

_EFFORT = "reasoning_effort"
_BUDGETS = {"minimal": 512, "low": 1024, "medium": 4096, "high": 16384}
"""Tokens of an effort, where the template knows no efforts."""
_NEAREST = {"minimal": "low", "xhigh": "high"}
"""The effort that templates know that lack these."""


class Thinking(msgspec.Struct, frozen=True):
    """How much a model is to think: an effort, a number of tokens, or the model's default."""

    effort: Effort | None = None
    budget: int | None = None
    """Most tokens, 0 for no thoughts, -1 for any number; None: as the effort says."""

    @property
    def is_off(self) -> bool:
        """Whether the model is not to think."""
        return self.effort == "none" or self.budget == 0

    def variables(self, template: ChatTemplate) -> dict[str, Any]:
        """Return the switches of `template` with the values for this."""
        if self.effort is None and not self.is_off:
            return {}
        read = switches_of(template)
        told: dict[str, Any] = dict.fromkeys(read - {_EFFORT}, not self.is_off)
        if _EFFORT in read and (word := self._word(template)):
            told[_EFFORT] = word
        return told

    def limit(self, template: ChatTemplate) -> int:
        """The most tokens of a thought, in the form of `Options.reasoning_budget`."""
        if self.is_off:
            return 0
        if self.budget is not None:
            return self.budget
        return -1 if _EFFORT in switches_of(template) else _BUDGETS.get(self.effort or "", -1)

    def closed(
        self, prompt: str, template: ChatTemplate, *, begun: bool | None = None, opens: bool = True
    ) -> str:
        """Return `prompt` with its thought closed, if the model is not to think.

        `begun`: whether it ends within a thought; None: if it ends with a thought's opener. If it does
        not, but is at the beginning of an answer (`opens`), it gets an empty thought, unless a switch of the
        template was set.
        """
        if not self.is_off or template.thinking is None:
            return prompt
        opener, closer = template.thinking
        begun = prompt.rstrip().endswith(opener) if begun is None else begun
        if not begun:
            if not opens or self.variables(template):
                return prompt
            prompt = _added(prompt, opener)
        n_lines = len(prompt) - len(prompt.rstrip("\n"))
        return _added(prompt, "\n" * max(0, 2 - n_lines) + closer + "\n\n")

    def _word(self, template: ChatTemplate) -> str | None:
        effort = "none" if self.is_off else self.effort or ""
        if effort in ("low", "medium", "high") or any(f"{q}{effort}{q}" in template.source for q in "'\""):
            return effort
        return _NEAREST.get(effort)


AS_USUAL = Thinking()


def switches_of(template: ChatTemplate) -> frozenset[str]:
    """The variables among SWITCHES that `template` reads."""
    try:
        return template.variables & {*SWITCHES}
    except BrokenTemplateError:
        return frozenset()  # rendering tells


def _added(prompt: str, text: str) -> RenderedPrompt:
    return RenderedPrompt(prompt + text, getattr(prompt, "breaks", ()))
