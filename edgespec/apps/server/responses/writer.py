"""Writes an answer as a response of OpenAI's API: whole, or as the events of a stream."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from edgespec.apps.server.api_errors import ApiError
from edgespec.apps.server.choice_writers import ChatChoiceWriter
from edgespec.apps.server.response_schema import ChatChunk, FinishReason, TokenLogprob, ToolCallDelta, Usage
from edgespec.apps.server.responses.response_schema import (
    ErrorCode,
    IncompleteDetails,
    OutputCall,
    OutputCustomCall,
    OutputMessage,
    OutputReasoning,
    OutputText,
    OutputThought,
    ResponseAnswer,
    ResponseError,
    ResponseUsage,
    new_id,
)
from edgespec.apps.server.responses.thoughts import sealed
from edgespec.apps.server.responses.tools import CustomInput, ResponseTool
from edgespec.apps.server.streaming import ALIVE_S, AnswerWriter
from edgespec.decoding.records import PromptProgress, Result, Token

Event = tuple[str, dict[str, Any]]
"""The name of an event, and its fields."""

Written = TypeVar("Written", OutputMessage, OutputReasoning, OutputCall, OutputCustomCall)


def dumped(part: BaseModel) -> dict[str, Any]:
    """Return a part of an answer as JSON."""
    return part.model_dump(mode="json", exclude_none=True)


def dumped_answer(answer: ResponseAnswer) -> dict[str, Any]:
    """Return a response as the object of JSON that is sent and stored."""
    made = answer.model_dump(mode="json", exclude={"output", "usage"})
    usage = answer.usage and answer.usage.model_dump(mode="json", exclude_unset=True)
    return made | {"output": [dumped(item) for item in answer.output], "usage": usage}


# ---- items ----


class ItemWriter(ABC, Generic[Written]):
    """Writes an item of the output; its methods yield events."""

    def __init__(self, item: Written, index: int) -> None:
        """Write `item`, the output's number `index`."""
        self.item: Written = item
        self._index = index

    def begin(self) -> Iterator[Event]:
        """Yield the events that begin the item."""
        yield self._whole("output_item.added")

    @abstractmethod
    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[Event]:
        """Add `text`, in whose place the likeliest tokens were those of `logprobs`."""

    def end(self, *, cut: bool) -> Iterator[Event]:
        """End the item; `cut`: the limit of tokens ended it."""
        yield from self._last()
        self.item.status = "incomplete" if cut else "completed"
        yield self._whole("output_item.done")

    @abstractmethod
    def _last(self) -> Iterator[Event]:
        """Yield the events before the item's end."""

    def _whole(self, name: str) -> Event:
        return f"response.{name}", {"output_index": self._index, "item": dumped(self.item)}

    def _event(self, name: str, /, **fields: Any) -> Event:  # noqa: ANN401 - JSON
        return f"response.{name}", {"item_id": self.item.id, "output_index": self._index, **fields}


class OutputTextWriter(ItemWriter[OutputMessage]):
    """Writes the events of a message item: text for the user as it comes."""

    def begin(self) -> Iterator[Event]:
        """Begin the item and its only part."""
        yield from super().begin()
        self._part = OutputText()
        yield self._event("content_part.added", content_index=0, part=dumped(self._part))
        self.item.content = [self._part]

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[Event]:
        """Yield the events of more text, with the probabilities of its tokens if they were asked for."""
        self._part.text += text
        self._part.logprobs = [*self._part.logprobs, *logprobs]
        told = [dumped(one) for one in logprobs]
        yield self._event("output_text.delta", content_index=0, delta=text, logprobs=told)

    def _last(self) -> Iterator[Event]:
        part = dumped(self._part)
        told = {"text": part["text"], "logprobs": part["logprobs"]}
        yield self._event("output_text.done", content_index=0, **told)
        yield self._event("content_part.done", content_index=0, part=part)


class ThoughtWriter(ItemWriter[OutputReasoning]):
    """Writes the events of a reasoning item: thoughts as they come."""

    def __init__(self, item: OutputReasoning, index: int, *, seals: bool) -> None:
        """Write `item`; `seals`: its text comes as `encrypted_content`, too."""
        super().__init__(item, index)
        self._seals = seals

    def begin(self) -> Iterator[Event]:
        """Begin the item and its only part."""
        yield from super().begin()
        self._part = OutputThought()
        yield self._event("content_part.added", content_index=0, part=dumped(self._part))
        self.item.content = [self._part]

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[Event]:
        """Yield the events of more thoughts."""
        self._part.text += text
        yield self._event("reasoning_text.delta", content_index=0, delta=text)

    def _last(self) -> Iterator[Event]:
        if self._seals:
            self.item.encrypted_content = sealed(self._part.text)
        yield self._event("reasoning_text.done", content_index=0, text=self._part.text)
        yield self._event("content_part.done", content_index=0, part=dumped(self._part))


class FunctionWriter(ItemWriter[OutputCall]):
    """Writes a call of a function."""

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[Event]:
        """Add a part of the arguments."""
        self.item.arguments += text
        if text:
            yield self._event("function_call_arguments.delta", delta=text)

    def _last(self) -> Iterator[Event]:
        told = {"name": self.item.name, "arguments": self.item.arguments}
        yield self._event("function_call_arguments.done", **told)


class CustomWriter(ItemWriter[OutputCustomCall]):
    """Writes a call of a custom tool."""

    def __init__(self, item: OutputCustomCall, index: int) -> None:
        """Write `item`."""
        super().__init__(item, index)
        self._input = CustomInput()

    def add(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[Event]:
        """Add a part of the arguments of its function."""
        if added := self._input.feed(text):
            yield from self._add(added)

    def _add(self, text: str) -> Iterator[Event]:
        self.item.input += text
        yield self._event("custom_tool_call_input.delta", delta=text)

    def _last(self) -> Iterator[Event]:
        if rest := self._input.finish().removeprefix(self.item.input):
            yield from self._add(rest)
        yield self._event("custom_tool_call_input.done", input=self.item.input)


AnyItemWriter = OutputTextWriter | ThoughtWriter | FunctionWriter | CustomWriter


# ---- the response ----


class ResponseWriter(AnswerWriter[Token, Result]):
    """Turns the chunks of an answer into a response."""

    def __init__(
        self,
        answer: ResponseAnswer,
        writing: ChatChoiceWriter,
        tools: Mapping[str, ResponseTool],
        on_end: Callable[[ResponseAnswer], None],
        *,
        seals: bool = False,
        warnings: Sequence[str] = (),
    ) -> None:
        """Begin `answer`; `tools`: those offered, by the names of their functions.

        `on_end` gets the answer when it is there. `seals`: thoughts come as `encrypted_content`, too.
        `warnings`: lines on what is done only in part.
        """
        self._answer = answer
        self._writing = writing
        self._tools = tools
        self._on_end = on_end
        self._seals = seals
        self._warnings = warnings
        self._item: AnyItemWriter | None = None
        self._reason: FinishReason | None = None
        self._ending: list[Event] = []  # of an answer that was cancelled
        self._n_thought = 0
        self._n_events = 0
        self._spoke = time.monotonic()

    def begin(self) -> str:
        """Return the events that begin a stream, before any item."""
        return self._sent(map(self._about, ("created", "in_progress")))

    def add(self, index: int, tokens: Sequence[Token]) -> str:
        """Return the events of a stream that `tokens` complete."""
        return self._sent(self._write(self._writing.add(tokens)))

    def finish(self, index: int, result: Result) -> str:
        """Return the events that end the last item and the stream."""
        return self._sent(self._finish(result))

    def collect(self, index: int, tokens: Sequence[Token]) -> None:
        """Add `tokens` to the response that `whole` returns."""
        for _ in self._write(self._writing.add(tokens)):
            pass

    def whole(self, results: Sequence[Result]) -> str:
        """Return the whole response of a request that does not stream, as JSON text."""
        for _ in self._finish(results[0]):
            pass
        return self.answer

    @property
    def answer(self) -> str:
        """The answer as it is now, as JSON."""
        return json.dumps(dumped_answer(self._answer), ensure_ascii=False)

    def cancel(self) -> bool:
        """End the stream where it is, and the answer with it. Return whether it was under way."""
        if not self.stop():
            return False
        self._ending += self._end_item(cut=True)
        self._answer.status = "cancelled"
        self._on_end(self._answer)
        self._ending.append(("response.incomplete", {"response": dumped_answer(self._answer)}))
        return True

    def stopped(self) -> str:
        """Return the last events of an answer that was cancelled."""
        return self._sent(self._ending)

    def idle(self, *, is_waiting: bool) -> str:
        """Return an event that says nothing new: for comments Codex would not wait longer than 5 minutes."""
        return self._sent([self._about("in_progress")])

    def reading(self, progress: PromptProgress) -> str:
        """Return a comment, and such an event where none has come for a while."""
        silent = time.monotonic() > self._spoke + ALIVE_S
        return super().reading(progress) + (self.idle(is_waiting=True) if silent else "")

    def failed(self, error: ApiError) -> str:
        """Return the last event of a stream that failed."""
        self._answer.status = "failed"
        code: ErrorCode = "server_error" if error.status >= 500 else "invalid_prompt"
        if error.code == "queue_full":
            code = "rate_limit_exceeded"
        self._answer.error = ResponseError(code=code, message=str(error))
        return self._sent([self._about("failed")])

    # ---- from chunks ----

    def _write(self, chunks: Iterable[ChatChunk]) -> Iterator[Event]:
        for chunk in chunks:
            for choice in chunk.choices:
                delta, logprobs = choice.delta, choice.logprobs.content if choice.logprobs else []
                if delta.reasoning_content:
                    self._n_thought += chunk.edgespec.n_tokens if chunk.edgespec else 0
                    yield from self._add(ThoughtWriter, delta.reasoning_content)
                elif delta.content:
                    yield from self._add(OutputTextWriter, delta.content, logprobs)
                elif logprobs and isinstance(self._item, OutputTextWriter):
                    yield from self._item.add("", logprobs)
                for call in delta.tool_calls or ():
                    yield from self._call(call)
                self._reason = choice.finish_reason

    def _add(
        self, kind: type[OutputTextWriter | ThoughtWriter], text: str, logprobs: Sequence[TokenLogprob] = ()
    ) -> Iterator[Event]:
        if not isinstance(self._item, kind):
            yield from self._end_item()
            index = len(self._answer.output)
            if kind is OutputTextWriter:
                yield from self._begin(OutputTextWriter(OutputMessage(id=new_id("msg")), index))
            else:
                item = OutputReasoning(id=new_id("rs"), encrypted_content=None)
                yield from self._begin(ThoughtWriter(item, index, seals=self._seals))
        assert self._item  # noqa: S101
        yield from self._item.add(text, logprobs)

    def _call(self, call: ToolCallDelta) -> Iterator[Event]:
        if call.id and call.function:
            yield from self._end_item()
            index, tool = len(self._answer.output), self._tools[call.function.name or ""]
            names: dict[str, Any] = {"call_id": call.id, "name": tool.name, "namespace": tool.namespace}
            if tool.type == "custom":
                yield from self._begin(CustomWriter(OutputCustomCall(id=new_id("ctc"), **names), index))
            else:
                yield from self._begin(FunctionWriter(OutputCall(id=new_id("fc"), **names), index))
        if self._item and call.function:
            yield from self._item.add(call.function.arguments)

    def _begin(self, item: AnyItemWriter) -> Iterator[Event]:
        self._item = item
        self._answer.output.append(item.item)
        yield from item.begin()

    def _end_item(self, *, cut: bool = False) -> Iterator[Event]:
        if self._item:
            yield from self._item.end(cut=cut)

    def _finish(self, result: Result) -> Iterator[Event]:
        yield from self._write(self._writing.finish(result))
        answer, cut = self._answer, self._reason == "length"
        if not self._item:
            yield from self._add(OutputTextWriter, "")
        yield from self._end_item(cut=cut)
        answer.status = "incomplete" if cut else "completed"
        if cut:
            answer.incomplete_details = IncompleteDetails()
        else:
            answer.completed_at = int(time.time())
        answer.usage = ResponseUsage.of(Usage.of(result, warnings=self._warnings), n_thought=self._n_thought)
        self._on_end(answer)
        yield self._about(answer.status)

    # ---- events ----

    def _about(self, status: str) -> Event:
        return f"response.{status}", {"response": dumped_answer(self._answer)}

    def _sent(self, events: Iterable[Event]) -> str:
        made = ""
        for name, fields in events:
            told = {"type": name, "sequence_number": self._n_events, **fields}
            made += f"event: {name}\ndata: {json.dumps(told, ensure_ascii=False)}\n\n"
            self._n_events += 1
        if made:
            self._spoke = time.monotonic()
        return made
