"""What real clients, schemas and machines sent that came back wrong: each report, and the tests that hold it.

A row names a file of tests and the tests in it; their own tables have the inputs of the report, and its kind.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent

SCHEMAS = "decoding/grammar/test_reported_schemas.py::test_a_reported_schema_holds"
FIELDS = "server/test_server_fields.py"
CALLS = "server/test_server_calls.py"
FORCED = "server/test_server_forced_calls.py"
PROMPTS = "server/test_server_prompts.py"
TEMPLATES = "cli/test_cli_templates.py"
HABITS = "cli/test_cli_habits.py"
MODELS = "cli/test_cli_models.py"
CHAT = "cli/test_cli_chat.py"
LIMITS = "platform/test_limits.py"
GRAMMARS = "decoding/grammar/test_grammar.py"

REPORTS: dict[str, tuple[str, ...]] = {
    "1 a pattern of alternatives": (SCHEMAS,),
    "2 a $ref at the top": (SCHEMAS,),
    "3 anyOf or oneOf beside properties": (SCHEMAS,),
    "4 a forced tool without parameters": (f"{FORCED}::test_a_function_without_parameters_takes_none",),
    "5 a property without a name": (SCHEMAS,),
    "6 lazy quantifiers, anchors in groups": (SCHEMAS,),
    "7 patterns and keywords that were refused": (
        SCHEMAS,
        "decoding/grammar/test_schemas.py::test_values_that_match_are_allowed_and_no_others",
    ),
    "8 bounds over the API": (SCHEMAS, f"{FIELDS}::test_what_a_schema_cannot_enforce_is_told_or_refused"),
    "9 constraints under other names": (f"{FIELDS}::test_a_constraint_is_kept_whatever_it_is_called",),
    "10 ids of calls": (
        f"{PROMPTS}::test_ids_and_names_reach_the_template",
        f"{PROMPTS}::test_the_second_tool_turn_of_a_template_that_checks_ids",
    ),
    "11 calls in each model's own form": (
        f"{CALLS}::test_calls_in_the_familys_own_form",
        f"{CALLS}::test_what_the_template_itself_writes_is_read",
        f"{PROMPTS}::test_models_tell_truly_whether_functions_can_be_called",
    ),
    "11b a call in a thought": (f"{PROMPTS}::test_a_call_in_a_thought_is_a_thought",),
    "12 named templates": (
        f"{PROMPTS}::test_the_template_for_tools",
        "llama/test_chat_template.py::test_forms_by_name",
        f"{TEMPLATES}::test_a_template_by_name_or_from_a_file",
    ),
    "16 a message to be continued, variables of the template": (
        f"{PROMPTS}::test_the_last_message_is_continued",
        f"{PROMPTS}::test_variables_for_the_template",
    ),
    "16b tools with response_format": (f"{FORCED}::test_a_call_or_an_answer_in_a_format",),
    "a forced call that is cut": (f"{PROMPTS}::test_a_forced_call_that_is_cut",),
    "13 a damaged part of a split model": (f"{MODELS}::test_verify_names_the_damaged_part_of_a_split_model",),
    "14 a quota of processors": (f"{LIMITS}::test_threads_by_the_quota_of_processors",),
    "15 a limit of memory": (f"{LIMITS}::test_too_little_is_said_before_loading_with_the_limit",),
    "18 draft make without JAX": (
        f"{HABITS}::test_draft_make_without_jax_says_so_before_anything_is_pulled",
    ),
    "20 an engine in several threads": (
        "engine/test_engine_threads.py::test_threads_take_turns",
        "engine/test_engine_threads.py::test_a_replaced_stream_says_so",
    ),
    "a pipe beside a prompt": (f"{HABITS}::test_what_is_piped_in_follows_the_prompt",),
    "-m and -p as in llama.cpp": (f"{HABITS}::test_the_model_and_the_prompt_as_llama_cpp_names_them",),
    "a schema inline, from stdin, with a byte order mark": (
        f"{GRAMMARS}::test_what_the_text_must_match_comes_as_users_give_it",
    ),
    "an address of the hub as a model": (f"{HABITS}::test_a_url_of_the_hub_is_a_model",),
    "an empty model": (f"{HABITS}::test_an_empty_name_is_no_model",),
    "quantize -o FILE": (f"{MODELS}::test_quantize_into_a_file",),
    "exit and quit in a chat": (f"{CHAT}::test_words_that_leave_are_no_questions",),
    "TERM=dumb": (f"{CHAT}::test_a_dumb_terminal_gets_no_escape_sequences",),
    "statistics in two lines": ("cli/test_cli_run.py::test_two_lines_of_statistics",),
    "models add --name default": ("models/test_registry.py::test_add_refuses_a_taken_or_unusable_name",),
    "EDGESPEC_KERNELS=OFF": (f"{HABITS}::test_a_switch_of_the_environment_in_any_case",),
    "a batch with failures": ("cli/test_cli_batch.py::test_a_file_of_requests",),
    "17 stop strings, lists of prompts, empty content": (
        f"{FIELDS}::test_a_mistake_says_what_is_allowed",
        f"{FIELDS}::test_several_prompts_are_answered_in_their_order",
    ),
    "a gzip body": ("server/test_server_limits.py::test_a_packed_body_is_unpacked_as_far_as_is_allowed",),
    "a broken template": (f"{PROMPTS}::test_a_templates_fault_is_told",),
    "ulimit -v": (f"{HABITS}::test_memory_that_ulimit_refuses_is_said_to_be_so",),
}


@pytest.mark.parametrize("report", REPORTS)
def test_a_report_has_its_tests(report: str):
    for name in REPORTS[report]:
        file, _, function = name.partition("::")
        nodes = ast.walk(ast.parse((ROOT / file).read_text()))
        assert function in {node.name for node in nodes if isinstance(node, ast.FunctionDef)}, name
