# ruff: noqa: E501, RUF001 - templates
"""Small chat templates in the shapes of real families': what they do with tools, calls and thoughts."""

from __future__ import annotations

from typing import Any

_CHATML_END = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

HERMES = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\\n' if m.content or not loop.first }}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}" + _CHATML_END
)

CODER = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}<name>{{ t.function.name }}</name>\n{% endfor %}"
    "<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\\n' if not loop.first }}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v if v is string else v | tojson }}"
    "{{ '\\n</parameter>\\n' }}{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    + _CHATML_END
)

THINKING_CODER = CODER.replace(
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n"
    "{% endif %}{% endif %}",
)

LLAMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{% set c = m.tool_calls[0].function %}<|im_start|>assistant\n\n"
    '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}<|im_end|>'
    "{% else %}<|im_start|>{{ 'ipython' if m.role == 'tool' else m.role }}\n\n"
    "{% if tools and loop.first %}{% for t in tools %}{{ t | tojson(indent=4) }}\n\n{% endfor %}{% endif %}"
    "{{ m.content | trim }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)

MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    "{% if not c.id is defined or c.id | length != 9 %}{{ raise_exception('ids of calls have nine characters') }}"
    '{% endif %}{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
    '"id": "{{ c.id }}"}{{ ", " if not loop.last }}{% endfor %}]{{ eos_token }}'
    '{% elif m.role == \'tool\' %}[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}'
    "[/TOOL_RESULTS]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)

MISTRAL_ARGS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}"
    "[ARGS]{{ c.function.arguments | tojson }}{% endfor %}{{ eos_token }}"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)

LFM = (
    "{{ bos_token }}{% if tools %}<|im_start|>system\nList of tools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}<|tool_call_start|>["
    "{% for c in m.tool_calls %}{{ c.function.name }}({% for k, v in c.function.arguments | items %}"
    "{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]"
    "<|tool_call_end|>{% endif %}<|im_end|>\n{% endfor %}" + _CHATML_END
)

GLM = (
    "[gMASK]{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>\n"
    "{{ '<think></think>\\n' if m.role == 'assistant' }}{{ m.content }}{% for c in m.tool_calls or [] %}\n"
    "<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments | items %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

DEEPSEEK = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% endif %}"
    "{% if m.role == 'assistant' and m.content is none %}<｜Assistant｜><｜tool▁calls▁begin｜>"
    "{% for c in m.tool_calls %}<｜tool▁call▁begin｜>{{ c.type }}<｜tool▁sep｜>{{ c.function.name }}\n```json\n"
    "{{ c.function.arguments + '\\n```' }}<｜tool▁call▁end｜>{{ '\\n' if not loop.last }}{% endfor %}"
    "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
    "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)

COMMAND = (
    "{{ bos_token }}{% for t in tools or [] %}def {{ t.function.name }}: {{ t.function.description }}\n{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.tool_calls %}Action: ```json\n["
    '{% for c in m.tool_calls %}\n    {"tool_name": "{{ c.function.name }}", '
    '"parameters": {{ c.function.arguments | tojson }}}{{ "," if not loop.last }}{% endfor %}\n]```{% endif %}'
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

FUNCTOOLS = (
    "{% if tools %}<|tool|>{{ tools | tojson }}<|/tool|>{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content }}{% if m.tool_calls %}functools[{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "{{ ', ' if not loop.last }}{% endfor %}]{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

APRIEL = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
    "{% if m.tool_calls %}<tool_calls>[{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{{ ', ' if not loop.last }}{% endfor %}]</tool_calls>{% endif %}"
    "{% if m.role == 'tool' %}<tool_result id={{ m.tool_call_id }}>{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

GEMMA = (
    "{{ bos_token }}{% macro value(v) %}{{ '<|\"|>' + v + '<|\"|>' if v is string else v | tojson }}{% endmacro %}"
    "{% if tools %}<|turn>system\n{% for t in tools %}<|tool>declaration:{{ t.function.name }}<tool|>{% endfor %}<turn|>\n{% endif %}"
    "{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<|tool_call>call:{{ c.function.name }}{{ '{' }}{% for k, v in c.function.arguments | items %}{{ k }}:{{ value(v) }}"
    "{{ ',' if not loop.last }}{% endfor %}{{ '}' }}<tool_call|>{% endfor %}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>assistant\n{% endif %}"
)

SILENT = (
    "{% if tools %}<|im_start|>system\nList of tools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + _CHATML_END
)
"""Offers tools, and leaves earlier calls out, as LFM2's does."""

FAMILIES: dict[str, str] = {
    "hermes": HERMES,
    "coder": CODER,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mistral-args": MISTRAL_ARGS,
    "lfm": LFM,
    "glm": GLM,
    "deepseek": DEEPSEEK,
    "command": COMMAND,
    "functools": FUNCTOOLS,
    "apriel": APRIEL,
    "gemma": GEMMA,
}
"""Templates whose models can call functions, by the family they are like."""


def function(name: str, properties: dict[str, Any] | None = None, required: list[str] | None = None) -> Any:
    """Return a tool, as requests have it."""
    made: dict[str, Any] = {"name": name, "description": f"Does {name}."}
    if properties is not None:
        made["parameters"] = {"type": "object", "properties": properties, "required": required or []}
    return {"type": "function", "function": made}
