"""What a request has wrong, in the words of the one who sent it: the first mistake, in one line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from edgespec.server.schema import ChatRequest, CompletionRequest

Place = tuple[str | int, ...]

_ALLOWED = {
    "stop": "a string or a list of up to 16 strings, none of them empty",
    "prompt": "text, a list of token ids, or a list of such prompts, none of them empty",
    "tool_choice": '"none", "auto", "required", or {"type": "function", "function": {"name": ...}}',
    "content": 'text, or a list of parts {"type": "text", "text": ...} that is not empty',
    "logit_bias": "an object of token ids as strings, each with a number from -100 to 100",
    "guided_json": "a JSON schema, as an object or as its text",
}
"""What may stand in fields that take values of several kinds, or of an uncommon one."""

_WORDS = {
    "string_type": "must be a string",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "none_required": "is not supported here: leave it out",
    "missing": "is missing",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
    "union_tag_not_found": 'must have a "{discriminator}"',
}
_NUMBER = re.compile(r"(less|greater) than( or equal to)? (\S+)$")
_FORMS = {
    "less than": "below",
    "less than or equal to": "at most",
    "greater than": "above",
    "greater than or equal to": "at least",
}


class Mistake(NamedTuple):
    """A mistake in a request."""

    field: str | None
    """The request's own field that it is in."""
    message: str


def first_mistake(errors: Sequence[Mapping[str, Any]], body: object) -> Mistake:
    """Return what `errors`, pydantic's about `body`, say first."""
    ours = [error for error in errors if error["type"] == "value_error"]
    placed = [(_place(error, body), error) for error in ours or errors]
    # Of a field that takes several kinds of values, the kind that fits best is meant.
    top = placed[0][0][:1]
    placed = [(place, error) for place, error in placed if place[:1] == top]
    place, error = max(placed, key=lambda found: len(found[0]))
    field = str(place[0]) if place else None
    if ours:
        message = str(error["msg"]).removeprefix("Value error, ")
        is_whole = message.startswith(f"{field} is not supported here")
        return Mistake(field, message if is_whole else f"{_dotted(place)}: {message}")
    if error["type"] == "extra_forbidden":
        return Mistake(field, f"{_dotted(place)}: {_unknown(place)}")
    for at in range(len(place), 0, -1) if error["type"] != "missing" else ():
        if allowed := _ALLOWED.get(str(place[at - 1])):
            return Mistake(field, f"{_dotted(place[:at])}: must be {allowed}")
    if error["type"] == "union_tag_invalid":
        place = (*place, error["ctx"]["discriminator"].strip("'"))
    return Mistake(field, f"{_dotted(place)}: {_in_words(error)}")


def _place(error: Mapping[str, Any], body: object) -> Place:
    """Return where in `body` an error is, without pydantic's names of the kinds of values it tried."""
    place: list[str | int] = []
    value = body
    steps = [step for step in error["loc"] if step != "body"]
    if body is None:
        return tuple(steps)
    for i, step in enumerate(steps):
        is_last = i == len(steps) - 1
        if (isinstance(value, dict) and step in value) or (
            isinstance(value, list) and isinstance(step, int) and step < len(value)
        ):
            value = value[step]
        elif not (is_last and isinstance(value, dict) and error["type"] == "missing"):
            continue
        place.append(step)
    return tuple(place)


def _dotted(place: Place) -> str:
    return ".".join(str(step)[:80] for step in place) or "the body"


def _in_words(error: Mapping[str, Any]) -> str:
    kind, context = str(error["type"]), error.get("ctx", {})
    if kind in _WORDS:
        return _WORDS[kind].format(**{name: str(value).strip("'") for name, value in context.items()})
    if kind in ("literal_error", "union_tag_invalid"):
        return f"must be {context.get('expected', context.get('expected_tags'))}"
    if kind in ("too_long", "string_too_long"):
        return f"has at most {context['max_length']} parts"
    if kind == "string_pattern_mismatch":
        return f"must match {context['pattern']}"
    message = str(error["msg"])
    if number := _NUMBER.search(message):
        form = _FORMS[f"{number[1]} than{number[2] or ''}"]
        return f"must be {form} {number[3]}"
    return message.replace("Input should be", "must be")


def _unknown(place: Place) -> str:
    """Say of an unknown field what is to be done."""
    advice = "leave it out; the OpenAPI description lists the fields"
    if len(place) == 1:
        names = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
        if similar := difflib.get_close_matches(str(place[0]), names, 1, 0.8):
            advice = f"is {similar[0]} meant?"
    return f"there is no such field here: {advice}"
