# ruff: noqa: E501 - templates
"""Chat templates: what programs may use, forms by name, several in a file, and how their faults are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chat_templates import FAMILIES, HERMES, MISTRAL, THINKING_CODER
from edgespec.apps.server.tool_calls.call_forms import TOOLS, CallStyle, TemplateTraits
from edgespec.errors import EdgespecError, UsageError
from edgespec.llama.chat_template import (
    BrokenTemplateError,
    ChatTemplate,
    RefusedByTemplateError,
    known_forms,
    read_chat_template,
)
from edgespec.llama.weights import Model
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf

HELLO = [{"role": "user", "content": "héllo <b>"}]


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source, bos="<s>", eos="</s>").render(HELLO, variables=variables)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages | tojson }}", '[{"role": "user", "content": "héllo <b>"}]'),
        ("{{ messages[0] | tojson(indent=1) }}", '{\n "role": "user",\n "content": "héllo <b>"\n}'),
        ("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}", '{"a":2,"b":1}'),
        ("{{ bos_token }}|{{ eos_token }}|{{ tools is none }}|{{ add_generation_prompt }}", "<s>|</s>|True|True"),
        ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% if i == 3 %}{% break %}{% endif %}{% endfor %}", "023"),
        ("{% generation %}\n  a{{ 1 }}{% endgeneration %}", "  a1"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ strftime_now('%Y') | int > 2000 }}", "True"),
        ("{%- set ns = namespace(n=0) %}{% set ns.n = 2 %}{{ ns.n }}", "2"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(1) }}{{ 'a,b'.split(',')[1] }}", "<1>b"),
        ("{{ enable_thinking is defined }}", "False"),
    ],
)  # fmt: skip
def test_what_programs_may_use(source: str, text: str):
    assert render(source) == text


def test_variables_reach_the_program_and_are_known():
    source = "{% set own = 1 %}{{ own }}{% if enable_thinking %}T{% endif %}{{ level | default(3) }}"
    assert render(source, enable_thinking=True, level=4) == "1T4"
    assert ChatTemplate(source).variables == {"enable_thinking", "level"}


@pytest.mark.parametrize(
    ("source", "kind", "reason"),
    [
        ("x\n{% for m in messages %}", BrokenTemplateError, "line 2: Unexpected end of template"),
        ("\n\n{{ messages | nothing }}", BrokenTemplateError, "line 3: No filter named 'nothing'"),
        ("a\n{{ messages[7].content.x }}", BrokenTemplateError, "line 2: there is no element 7"),
        ("{{ '' + messages[0] }}", BrokenTemplateError, "line 1: a value is of the wrong kind"),
        ("{{ ().__class__.__mro__ }}", BrokenTemplateError, "unsafe"),
        ("{{ messages.append(1) }}", BrokenTemplateError, "unsafe|not callable|cannot"),
        ("{{ raise_exception('roles\n must alternate') }}", RefusedByTemplateError, "^roles must alternate$"),
        ("chatm1", BrokenTemplateError, "'chatm1', which is neither a Jinja template nor the name of one"),
    ],
)
def test_faults_are_the_templates_own(source: str, kind: type[EdgespecError], reason: str):
    with pytest.raises(kind, match=reason) as caught:
        render(source)
    assert "\n" not in str(caught.value)


def test_forms_by_name():
    assert {"chatml", "llama3", "mistral-v7", "gemma"} <= {*known_forms()}
    messages = [
        {"role": "system", "content": "Be brief."},
        *HELLO,
        {"role": "assistant", "content": "é" * 5000},
    ]
    text = ChatTemplate("chatml").render([*messages, *HELLO])
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhéllo <b><|im_end|>\n"
        f"<|im_start|>assistant\n{'é' * 5000}<|im_end|>\n<|im_start|>user\nhéllo <b><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert not ChatTemplate("chatml").render(HELLO, add_generation_prompt=False).endswith("assistant\n")
    assert ChatTemplate("chatml").render_continued(messages[:2]).endswith("user\nhéllo <b>")
    assert not TemplateTraits(ChatTemplate("chatml")).takes_tools


@pytest.mark.parametrize(
    "source", [CHAT_TEMPLATE, HERMES, THINKING_CODER, "{{ messages[-1].content | trim }}</s>"]
)
def test_a_message_is_continued_where_it_ends(source: str):
    messages = [*HELLO, {"role": "assistant", "content": "One, two, "}]
    prompt = ChatTemplate(source).render_continued(messages)
    assert prompt.endswith("One, two, ")
    assert ChatTemplate(source).render(messages, add_generation_prompt=False).startswith(prompt.rstrip())


def test_a_template_that_leaves_the_message_out_cannot_continue_it():
    with pytest.raises(BrokenTemplateError, match="leaves the last message out"):
        ChatTemplate("{{ messages[0].content }}").render_continued(
            [*HELLO, {"role": "assistant", "content": "x"}]
        )


# ---- traits ----


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_that_shows_tools_takes_them(family: str):
    traits = TemplateTraits(ChatTemplate(FAMILIES[family], bos="<s>", eos="</s>"))
    assert traits.takes_tools and traits.works and not traits.typed_content
    assert traits.style == (CallStyle(None, arguments_are_text=True) if family == "deepseek" else CallStyle())
    assert traits.short_ids is (family == "mistral")
    assert traits.thinking == (("<think>", "</think>") if family in ("glm", "deepseek") else None)


@pytest.mark.parametrize(
    "source",
    [
        CHAT_TEMPLATE,
        "{# tools #}" + CHAT_TEMPLATE,
        "{% set tools_note = 'tools are not for you' %}{{ tools_note }}" + CHAT_TEMPLATE,
        "{% if tools %}You may use tools.{% endif %}" + CHAT_TEMPLATE,
        "{% if tools %}{{ raise_exception('no tools here') }}{% endif %}" + CHAT_TEMPLATE,
        "{% for t in tools %}",
        "chatml",
    ],
)
def test_a_template_that_only_mentions_tools_takes_none(source: str):
    assert not TemplateTraits(ChatTemplate(source)).takes_tools


def test_content_in_parts_where_the_template_wants_it():
    source = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    assert TemplateTraits(ChatTemplate(source)).typed_content
    either = (
        "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}{% endfor %}"
    )
    assert not TemplateTraits(ChatTemplate(either)).typed_content


# ---- of a model ----


def test_the_template_for_tools_is_used_with_tools(tmp_path: Path):
    extra = {
        "tokenizer.chat_template.tool_use": HERMES,
        "tokenizer.chat_template.rag": "rag {{ messages | length }}",
    }
    with Model(write_tiny_gguf(tmp_path / "named.gguf", extra=extra), vocab_only=True) as model:
        assert model.render_chat(HELLO) == ChatTemplate(CHAT_TEMPLATE).render(HELLO)
        assert model.render_chat(HELLO, TOOLS) == ChatTemplate(HERMES).render(HELLO, TOOLS)
        model.use_chat_template("rag")
        assert model.render_chat(HELLO) == "rag 1"


def test_control_tokens_by_name(tiny_target: Model):
    assert (
        tiny_target.control_token("<|im_end|>")
        == tiny_target.tokenize("<|im_end|>", add_special=False, parse_special=True)[0]
    )
    assert tiny_target.control_token("<|im_end") is None
    assert tiny_target.control_token("a") is None
    assert tiny_target.control_token("<|im_end|><|im_end|>") is None


def test_a_template_that_a_user_names(tmp_path: Path):
    file = tmp_path / "mistral.jinja"
    file.write_text("\ufeff" + MISTRAL)
    assert read_chat_template(str(file)) == MISTRAL
    assert read_chat_template("chatml") == "chatml"
    assert read_chat_template("{{ messages }}") == "{{ messages }}"
    for content, reason in (
        ("{% for %}", "line 1"),
        ("no program", "no Jinja template"),
        ("\xff", "no text"),
    ):
        file.write_bytes(content.encode("latin-1"))
        with pytest.raises(UsageError, match=reason):
            read_chat_template(str(file))
    with pytest.raises(UsageError, match=r"neither a file nor one of .*chatml"):
        read_chat_template("chatm1")
