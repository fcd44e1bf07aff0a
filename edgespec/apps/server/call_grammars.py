"""Grammars of answers that may or must be calls, and of answers that follow a thought."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from edgespec.apps.server.api_errors import ApiError
from edgespec.apps.server.request_schema import ChatRequest, NamedTool
from edgespec.apps.server.tool_calls.answer_reader import AnswerForm
from edgespec.apps.server.tool_calls.call_forms import HERMES, CallForm
from edgespec.apps.server.tool_calls.forced_grammar import (
    ForcedCalls,
    after_thought,
    forced_calls,
    of_function,
    unenforced_parts,
)
from edgespec.decoding.grammar.grammar import Grammar
from edgespec.decoding.grammar.source import GrammarSource
from edgespec.errors import UsageError
from edgespec.llama.weights import Model

_KEPT = 16


class CallGrammars:
    """Makes grammars for one model. They are kept, since conversations send their tools again."""

    def __init__(self, model: Model) -> None:
        """Make grammars for `model`."""
        self._model = model
        self._kept = lru_cache(maxsize=_KEPT)(self._made)

    def of(self, request: ChatRequest, expected: AnswerForm, answer: Grammar | None) -> Grammar | None:
        """Return the grammar that the answer to `request` is held to; None if it is free. Raises ApiError.

        `expected`: what the answer may consist of; `answer`: what it must match where it is no call.
        """
        thought_end = expected.thinking[1] if expected.thinking and expected.thinks_at_once else None
        choice, functions = request.tool_choice, expected.functions
        many = request.parallel_tool_calls is not False
        if not functions and not (answer and thought_end):
            return answer
        if functions and choice not in (None, "auto"):
            if isinstance(choice, NamedTool):
                name = choice.function.name
                functions, many = {name: functions[name]}, False
            answer = None
        elif answer is None:
            return None
        form = expected.form or HERMES
        wanted = json.dumps(functions) if functions else ""
        source = answer.source if answer else None
        try:
            grammar = self._kept(form, wanted, many, thought_end, source)
        except UsageError as error:
            name = "tools" if functions else str(error.field)
            raise ApiError(400, str(error), param=name) from None
        strict = tuple(
            of_function(tool.function.name) for tool in request.tools or () if tool.function.strict
        )
        refused = [line for line in grammar.warnings if line.endswith(strict)] if functions else []
        if refused:
            raise ApiError(400, f"tools: cannot be enforced: {', '.join(refused)}", param="tools")
        return grammar

    def _made(
        self, form: CallForm, wanted: str, many: bool, thought_end: str | None, answer: GrammarSource | None
    ) -> Grammar:
        find = self._model.control_token
        warnings = answer.warnings if answer else ()
        if wanted:
            functions: Mapping[str, Mapping[str, Any]] = json.loads(wanted)
            forced = ForcedCalls(form, functions, many, otherwise=answer is not None, thought_end=thought_end)
            lark, warnings = forced_calls(forced, find), (*warnings, *unenforced_parts(forced))
        else:
            lark = after_thought(thought_end or "", find)
        source = answer.inside(lark) if answer else GrammarSource.lark(lark, "tools")
        return Grammar(self._model, replace(source, warnings=warnings))
