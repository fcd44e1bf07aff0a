"""The tools whose input Anthropic describes and the client carries out: bash, a text editor, a memory.

Anthropic's models know them. Another model is told what they do, and the schemas of their input.
"""

from __future__ import annotations

import re
from typing import Any

from edgespec.apps.server.api_errors import ApiError
from edgespec.apps.server.messages.request_schema import ClientTool

_TEXT = {"type": "string"}
_FILES = {
    "path": _TEXT,
    "file_text": {"type": "string", "description": "Of create: the text of the file."},
    "old_str": {"type": "string", "description": "Of str_replace: the text to replace, which occurs once."},
    "new_str": {"type": "string", "description": "Of str_replace: what takes its place."},
    "insert_line": {"type": "integer", "description": "Of insert: the line after which text is inserted."},
    "insert_text": {"type": "string", "description": "Of insert: the text."},
    "view_range": {
        "type": "array",
        "items": {"type": "integer"},
        "description": "Of view: the first and the last line.",
    },
}
_CHANGES = ["view", "create", "str_replace", "insert"]


def _schema(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required]}


_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "bash": (
        "Run a command in a shell that stays open.",
        _schema({"command": _TEXT, "restart": {"type": "boolean", "description": "Start the shell anew."}}),
    ),
    "text_editor": (
        "View, create and change text files.",
        _schema({"command": {"type": "string", "enum": _CHANGES}, **_FILES}, "command", "path"),
    ),
    "memory": (
        "View and change the files in /memories, which outlast this conversation.",
        _schema(
            {
                "command": {"type": "string", "enum": [*_CHANGES, "delete", "rename"]},
                **_FILES,
                "old_path": {"type": "string", "description": "Of rename."},
                "new_path": {"type": "string", "description": "Of rename."},
            },
            "command",
        ),
    ),
}
_KIND = re.compile(r"(\w+)_\d{8}")


def function_of(tool: ClientTool, place: str) -> dict[str, Any]:
    """Return the function that a tool is in OpenAI's API. `place`: of the tool in the request.

    Raises ApiError for a tool that only Anthropic's servers carry out.
    """
    kind = tool.type or "custom"
    description, schema = tool.description, tool.input_schema
    if kind != "custom":
        found = _KIND.fullmatch(kind)
        if not found or found[1] not in _TOOLS:
            line = f"{place}.type: {kind[:40]!r} is no tool that the client carries out: leave it out"
            raise ApiError(400, line, param="tools")
        description, schema = _TOOLS[found[1]]
    elif schema is None:
        raise ApiError(400, f"{place}.input_schema: is missing", param="tools")
    if tool.input_examples:
        schema = {**(schema or {}), "examples": tool.input_examples}
    function = {"name": tool.name, "description": description, "parameters": schema, "strict": tool.strict}
    return {name: value for name, value in function.items() if value is not None}
