"""The routes of Anthropic's Messages API, and the writer of its answers and events."""

from __future__ import annotations

import secrets
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request, Response
from pydantic_core import from_json
from starlette.concurrency import run_in_threadpool

from edgespec.apps.server.api_errors import REQUEST_ID, ApiError, new_request_id
from edgespec.apps.server.choice_writers import AnswerHead, AnswerText, ChatChoiceWriter
from edgespec.apps.server.json_routes import route_class
from edgespec.apps.server.messages.request_reader import MessagesReader, with_anthropic_names
from edgespec.apps.server.messages.request_schema import CountTokensRequest, MessagesRequest
from edgespec.apps.server.messages.response_schema import (
    AnswerBlock,
    AnswerEnd,
    AnswerUsage,
    BlockDelta,
    BlockStart,
    BlockStop,
    InputPiece,
    MessageEnd,
    MessageEndDelta,
    MessageEvent,
    MessagesAnswer,
    MessagesError,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    SignaturePiece,
    TextBlock,
    TextPiece,
    ThinkingBlock,
    ThinkingPiece,
    TokenCount,
    ToolUseBlock,
)
from edgespec.apps.server.openapi import error_responses
from edgespec.apps.server.request_reader import ALIAS, PreparedRequest, PreparedText, RequestReader, Service
from edgespec.apps.server.response_schema import ChatChunk, Usage
from edgespec.apps.server.streaming import Answerer, AnswerWriter, with_warnings
from edgespec.decoding.records import PromptProgress, Result, Token
from edgespec.llama.weights import Model
from edgespec.platform.messages import MessageFn

_SIGNATURE = ALIAS

_BlockEvent = BlockStart | BlockDelta | BlockStop
_Kind = TypeVar("_Kind", TextBlock, ThinkingBlock)


class AnswerBlocks:
    """The blocks of an answer so far, made of the chunks of ChatChoiceWriter."""

    def __init__(self, *, shows_thoughts: bool) -> None:
        """Begin with none; without `shows_thoughts` those of thoughts stay empty."""
        self.blocks: list[AnswerBlock] = []
        self._shows_thoughts = shows_thoughts
        self._inputs: dict[int, str] = {}  # JSON text of each call, by its block
        self._open = False

    def add(self, chunks: Iterable[ChatChunk]) -> Iterator[_BlockEvent]:
        """Add what is in `chunks`, and yield the events that say so."""
        for delta in (choice.delta for chunk in chunks for choice in chunk.choices):
            if delta.reasoning_content:
                yield from self._think(delta.reasoning_content)
            if delta.content:
                yield from self._say(delta.content)
            for call in delta.tool_calls or ():
                if call.id and call.function.name:
                    yield from self._begin(ToolUseBlock(id=call.id, name=call.function.name))
                self._inputs[self._at] = self._inputs.get(self._at, "") + call.function.arguments
                yield self._delta(InputPiece(partial_json=call.function.arguments))

    def end(self) -> Iterator[BlockDelta | BlockStop]:
        """End the last block, if there is any; yield the events that say so."""
        if not self._open:
            return
        self._open = False
        block = self.blocks[-1]
        if isinstance(block, ThinkingBlock):
            block.signature = _SIGNATURE
            yield self._delta(SignaturePiece(signature=_SIGNATURE))
        elif isinstance(block, ToolUseBlock):
            block.input = _input(self._inputs[self._at])
        yield BlockStop(index=self._at)

    @property
    def _at(self) -> int:
        return len(self.blocks) - 1

    def _think(self, text: str) -> Iterator[_BlockEvent]:
        block = yield from self._block(ThinkingBlock)
        if self._shows_thoughts:
            block.thinking += text
            yield self._delta(ThinkingPiece(thinking=text))

    def _say(self, text: str) -> Iterator[_BlockEvent]:
        block = yield from self._block(TextBlock)
        block.text += text
        yield self._delta(TextPiece(text=text))

    def _block(self, kind: type[_Kind]) -> Generator[_BlockEvent, None, _Kind]:
        """Return the last block, one of this kind; yield the events of its beginning, if it is new."""
        if self._open and isinstance(last := self.blocks[-1], kind):
            return last
        block = kind()
        yield from self._begin(block)
        return block

    def _begin(self, block: AnswerBlock) -> Iterator[_BlockEvent]:
        yield from self.end()
        self.blocks.append(block)
        self._open = True
        yield BlockStart(index=self._at, content_block=block.model_copy())

    def _delta(self, piece: TextPiece | ThinkingPiece | SignaturePiece | InputPiece) -> BlockDelta:
        return BlockDelta(index=self._at, delta=piece)


def _input(text: str) -> dict[str, Any]:
    """Return a call's input; of one that was cut off what there is, as Anthropic's clients read it."""
    try:
        found = from_json(text or "{}", allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class AnswerPlan:
    """The parts of a request that the writer of its answer needs."""

    id: str
    """Of the request."""
    model: str
    prepared: PreparedText
    max_tokens: int
    shows_thoughts: bool


class MessagesWriter(AnswerWriter[Token, Result]):
    """Writes an answer in Anthropic's form, whole or as events."""

    def __init__(self, plan: AnswerPlan, model: Model, writing: ChatChoiceWriter) -> None:
        """Begin the answer of `model` to what `plan` says, of the chunks of `writing`."""
        self._plan = plan
        self._model = model
        self._writing = writing
        self._blocks = AnswerBlocks(shows_thoughts=plan.shows_thoughts)
        self._answer = MessagesAnswer(
            id=f"msg_{secrets.token_hex(12)}",
            model=plan.model,
            usage=MessageUsage(
                input_tokens=len(plan.prepared.tokens),
                cache_creation_input_tokens=0,
                cache_read_input_tokens=0,
                output_tokens=0,
            ),
        )

    def begin(self) -> str:
        """Return the events before any text: message_start, and a ping."""
        return _event(MessageStart(message=self._answer)) + _event(Ping())

    def add(self, index: int, tokens: Sequence[Token]) -> str:
        """Return the events of a stream that `tokens` complete."""
        return "".join(map(_event, self._add(tokens)))

    def finish(self, index: int, result: Result) -> str:
        """Return the events that end a stream: the last block, why it ended, tokens used."""
        events = "".join(map(_event, self._finish(result)))
        end = AnswerEnd(stop_reason=self._answer.stop_reason, stop_sequence=self._answer.stop_sequence)
        last = MessageEndDelta(delta=end, usage=self._answer.usage)
        return events + _event(last) + _event(MessageStop())

    def collect(self, index: int, tokens: Sequence[Token]) -> None:
        """Add `tokens` to the message that `whole` returns."""
        for _ in self._add(tokens):
            pass

    def whole(self, results: Sequence[Result]) -> str:
        """Return the whole message of a request that does not stream, as JSON text."""
        for _ in self._finish(results[0]):
            pass
        self._answer.content = self._blocks.blocks
        return self._answer.model_dump_json()

    def idle(self, *, is_waiting: bool) -> str:
        """Return a ping, by which clients know in a silent connection that the server lives."""
        return _event(Ping())

    def queued(self, place: int) -> str:
        """Return the comment with the place in the queue, and a ping, which clients count."""
        return super().queued(place) + _event(Ping())

    def reading(self, progress: PromptProgress) -> str:
        """Return the comment with how many tokens of the prompt are read, and a ping."""
        return super().reading(progress) + _event(Ping())

    def failed(self, error: ApiError) -> str:
        """Return the event "error" that ends a stream, which names fields as Anthropic's API does."""
        body = with_anthropic_names(error).anthropic_body(self._plan.id)
        return _event(MessagesError.model_validate(body))

    def _add(self, tokens: Sequence[Token]) -> Iterator[_BlockEvent]:
        if self._plan.max_tokens:  # else the prompt alone is wanted
            yield from self._blocks.add(self._writing.add(tokens))

    def _finish(self, result: Result) -> Iterator[_BlockEvent]:
        """End the blocks, and add to the answer why it ended, and its usage."""
        chunks = [*self._writing.finish(result)]
        if self._plan.max_tokens:
            yield from self._blocks.add(chunks)
        yield from self._blocks.end()
        answer = self._answer
        answer.stop_sequence = self._stop_sequence(result)
        answer.stop_reason = self._stop_reason(result, chunks[-1].choices[0].finish_reason)
        answer.usage = AnswerUsage(
            input_tokens=result.prompt_tokens - result.n_cached,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=result.n_cached,
            output_tokens=min(len(result.token_ids), self._plan.max_tokens),
            edgespec=Usage.of(result, warnings=self._plan.prepared.warnings).edgespec,
        )

    def _stop_reason(self, result: Result, reason: str | None) -> MessageEnd:
        if reason == "length":
            is_full = len(result.token_ids) < self._plan.max_tokens
            return "model_context_window_exceeded" if is_full else "max_tokens"
        if self._answer.stop_sequence is not None:
            return "stop_sequence"
        return "tool_use" if reason == "tool_calls" else "end_turn"

    def _stop_sequence(self, result: Result) -> str | None:
        """Return the stop sequence that ended the text: it follows what is shown of it."""
        if result.stop_reason != "stop":
            return None
        pieces = b"".join(self._model.piece(token) for token in result.token_ids).decode(errors="replace")
        rest = pieces[len(result.text) :]
        return min((stop for stop in self._plan.prepared.options.stop if rest.startswith(stop)), default=None)


def _event(event: MessageEvent | MessagesError) -> str:
    return f"event: {event.type}\ndata: {event.model_dump_json()}\n\n"


def add_messages(
    app: FastAPI,
    target: Model,
    service: Service,
    reader: RequestReader,
    answerer: Answerer,
    *,
    log: MessageFn,
) -> None:
    """Add the routes to `app`; `log` takes a line for each failure that is not the client's fault."""
    router = APIRouter(
        prefix="/v1/messages", route_class=route_class(log), responses=error_responses(MessagesError)
    )
    own = MessagesReader(reader)
    events = {"type": "string", "description": "Server-sent events, as Anthropic's API has them."}
    stream: dict[int | str, dict[str, Any]] = {
        200: {"description": "The answer.", "content": {"text/event-stream": {"schema": events}}}
    }

    @router.post("", response_model=MessagesAnswer, responses=stream)
    async def create(request: Request, body: MessagesRequest) -> Response:
        """Answer a conversation."""
        text = await run_in_threadpool(own.read, body)
        display = body.thinking.display if body.thinking else None
        plan = AnswerPlan(new_request_id(), service.name, text, body.max_tokens, display != "omitted")
        written = AnswerText(target, keeps_tokens=False)
        writing = ChatChoiceWriter(AnswerHead.new("msg", service.name, ""), written, text.answer)
        writer = MessagesWriter(plan, target, writing)
        user = body.metadata.user_id if body.metadata else None
        prepared = PreparedRequest((text,))
        found = await answerer.answer(request, prepared, writer, streams=bool(body.stream), user=user)
        found.headers[REQUEST_ID] = plan.id
        return with_warnings(found, text.warnings)

    @router.post("/count_tokens")
    async def count(body: CountTokensRequest, response: Response) -> TokenCount:
        """Count the tokens of a conversation's prompt; nothing is answered."""
        response.headers[REQUEST_ID] = new_request_id()
        return TokenCount(input_tokens=await run_in_threadpool(own.count, body))

    app.include_router(router)
