"""The form of a model's calls: as its template writes them, or as its template or its vocabulary hints at."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from edgespec.apps.server.tool_calls.answer_reader import AnswerForm, AnswerReader
from edgespec.apps.server.tool_calls.call_forms import FAMILIES, CallForm, form_of
from edgespec.apps.server.tool_calls.text_source import CallArguments, PlainText
from edgespec.llama.template_traits import KEYS, TOOLS, VALUES, CallSamples, TemplateTraits

_SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


def choose_form(
    traits: TemplateTraits, has_token: Callable[[str], bool] = lambda _marker: False
) -> CallForm | None:
    """Return the form in which the model of a template calls; None if nothing shows it.

    `has_token`: says whether a marker is a token of the model's own.
    """
    if traits.samples and (found := form_of(traits.samples)) and is_read(found, traits.samples):
        return found
    for text in (traits.prompt_with_tools, traits.template.source):
        for family in FAMILIES:
            if re.search(family.sign, text, re.DOTALL):
                return family.form
    return next((family.form for family in FAMILIES if any(map(has_token, family.form.openers))), None)


def is_read(form: CallForm, samples: CallSamples) -> bool:
    """Return whether the reader finds the call in a template's own text of one."""
    reader = AnswerReader(AnswerForm(_SCHEMAS, form))
    events = [*reader.feed(samples.one), *reader.finish()]
    arguments = "".join(event.text for event in events if isinstance(event, CallArguments))
    said = "".join(samples.one[event.start : event.end] for event in events if isinstance(event, PlainText))
    try:
        found = json.loads(arguments)
    except ValueError:
        return False
    return reader.n_calls == 1 and found == dict(zip(KEYS, VALUES, strict=True)) and not said.strip()
