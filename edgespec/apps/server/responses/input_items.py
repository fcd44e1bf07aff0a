"""The input of a stored response, listed in pages as OpenAI's API does."""

from __future__ import annotations

from typing import Any, Literal

from edgespec.apps.server.api_errors import ApiError
from edgespec.apps.server.responses.request_schema import (
    CallOutputItem,
    CustomCallItem,
    FunctionCallItem,
    ItemContent,
    MessageItem,
    ReasoningItem,
    text_of,
)
from edgespec.apps.server.responses.response_schema import (
    CallOutput,
    InputItemList,
    InputMessage,
    InputTextPart,
    ListedItem,
    OutputCall,
    OutputCustomCall,
    OutputMessage,
    OutputReasoning,
    OutputRefusal,
    OutputText,
    OutputThought,
)
from edgespec.apps.server.responses.store import NamedItem, StoredResponse

Order = Literal["asc", "desc"]


def input_page(found: StoredResponse, order: Order, limit: int, after: str | None) -> InputItemList:
    """Return up to `limit` items of the input in that order, those after the item `after`.

    Raises ApiError.
    """
    items = list(found.items[: found.n_input])
    if order == "desc":
        items.reverse()
    if after is not None:
        place = next((i for i, (name, _) in enumerate(items) if name == after), None)
        if place is None:
            raise ApiError(400, f"after: the input has no item with id {after[:80]!r}", param="after")
        del items[: place + 1]
    data = [_listed(item) for item in items[:limit]]
    first, last = (data[0].id, data[-1].id) if data else ("", "")
    return InputItemList(data=data, first_id=first, last_id=last, has_more=len(items) > limit)


def _listed(named: NamedItem) -> ListedItem:
    name, item = named
    if isinstance(item, MessageItem):
        if item.role == "assistant":
            return OutputMessage(id=name, status="completed", content=_said(item.content))
        return InputMessage(id=name, role=item.role, content=_given(item.content))
    if isinstance(item, ReasoningItem):
        return OutputReasoning(
            id=name,
            status="completed",
            summary=[{"type": "summary_text", "text": part.text} for part in item.summary or ()],
            content=[OutputThought(text=part.text) for part in item.content or ()],
            encrypted_content=item.encrypted_content,
        )
    if isinstance(item, CallOutputItem):
        output = item.output if isinstance(item.output, str) else _given(item.output)
        return CallOutput(id=name, type=item.type, call_id=item.call_id, output=output)
    assert isinstance(item, FunctionCallItem | CustomCallItem)  # references were followed  # noqa: S101
    names: dict[str, Any] = {"id": name, "call_id": item.call_id, "name": item.name}
    names |= {"namespace": item.namespace, "status": "completed"}
    if isinstance(item, CustomCallItem):
        return OutputCustomCall(**names, input=item.input)
    return OutputCall(**names, arguments=item.arguments)


def _given(content: ItemContent) -> list[InputTextPart]:
    parts = [content] if isinstance(content, str) else [text_of([part]) for part in content]
    return [InputTextPart(text=text) for text in parts]


def _said(content: ItemContent) -> list[OutputText | OutputRefusal]:
    if isinstance(content, str):
        return [OutputText(text=content)]
    return [
        OutputRefusal(refusal=part.refusal) if part.type == "refusal" else OutputText(text=part.text)
        for part in content
    ]
