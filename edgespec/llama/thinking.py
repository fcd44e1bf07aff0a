"""How much a model thinks: what its chat template is told, how a prompt ends, how long a thought may be.

A template may have switches of its own. Where it has none for an effort, tokens are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from edgespec.llama.chat_template import BrokenTemplateError, ChatTemplate
from edgespec.llama.control_names import RenderedPrompt

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
"""How much a model thinks, in OpenAI's words."""

SWITCHES = ("enable_thinking", "thinking", "reasoning_effort")
"""Variables by which templates are told whether to think, or how much."""

_EFFORT = "reasoning_effort"
_BUDGETS = {"minimal": 512, "low": 1024, "medium": 4096, "high": 16384}
"""Tokens of an effort, where the template knows no efforts."""
_NEAREST = {"minimal": "low", "xhigh": "high"}
"""The effort that templates know that lack these."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """How much a model is to think: an effort, a number of tokens, or what is usual for it."""

    effort: Effort | None = None
    budget: int | None = None
    """Most tokens, 0 for no thoughts, -1 for any number; None: as the effort says."""

    @property
    def is_off(self) -> bool:
        """Whether the model is not to think."""
        return self.effort == "none" or self.budget == 0

    def variables(self, template: ChatTemplate) -> dict[str, Any]:
        """The switches of `template`, as this sets them."""
        if self.effort is None and not self.is_off:
            return {}
        read = switches_of(template)
        told: dict[str, Any] = dict.fromkeys(read - {_EFFORT}, not self.is_off)
        if _EFFORT in read and (word := self._word(template)):
            told[_EFFORT] = word
        return told

    def limit(self, template: ChatTemplate) -> int:
        """The most tokens of a thought, as `Options.reasoning_budget` has it."""
        if self.is_off:
            return 0
        if self.budget is not None:
            return self.budget
        return -1 if _EFFORT in switches_of(template) else _BUDGETS.get(self.effort or "", -1)

    def closed(
        self, prompt: str, template: ChatTemplate, *, begun: bool | None = None, opens: bool = True
    ) -> str:
        """Return `prompt` with its thought closed, if the model is not to think.

        `begun`: whether it ends within a thought; None: if it ends with a thought's opener. If not, but at
        the beginning of an answer (`opens`), it gets an empty one, unless a switch of the template was set.
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
