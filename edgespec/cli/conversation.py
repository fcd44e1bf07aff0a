"""A conversation with a model: its messages, the prompt for the next turn, and its file.

The model's chat template makes the prompt from the messages. An answer stands in it as the very tokens that
the model wrote: its text, tokenised again, might give others. So each prompt begins with the sequence of the
turn before, and only the new part is prefilled.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from edgespec.decoding.records import Result
from edgespec.decoding.session import PromptTokens
from edgespec.errors import EdgespecError, MessageFn, UsageError, check_text, describe_os_error
from edgespec.llama.chat_template import AS_USUAL, Thinking, joined_parts
from edgespec.llama.control_names import MEDIA_MARKER
from edgespec.llama.weights import Model
from edgespec.platform.files import write_atomically
from edgespec.platform.kept import CONVERSATIONS, DamagedFileError, StateFile

if TYPE_CHECKING:
    from edgespec.engine.engine import Engine

_VERSION = 1
_MAX_BYTES = 256 << 20  # of a file: its images in base64, and far more text than fits in a context
_ANSWER_SHARE = 8  # keep 1/8 of the context for an answer of no stated length
_KEPT_SHARE = 0.75  # of what fits: leave out more than needed, else each later turn would read all again


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The model's answer to one question."""

    text: str
    cut: bool = False
    """Whether it was ended before the model was done."""
    token_ids: tuple[int, ...] | None = None
    """The tokens it was written in; None if they are not known, or contain more than the text."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question of the user, and the model's answer to it."""

    question: str
    answer: ChatAnswer
    images: tuple[bytes, ...] = ()
    """Files of the images that stand before the question."""


def answer_of(result: Result, model: Model) -> ChatAnswer:
    """Return the answer that `model` wrote."""
    same = _text_of(result.token_ids, model) == result.text
    return ChatAnswer(result.text, result.stop_reason != "eog", result.token_ids if same else None)


def _text_of(token_ids: Sequence[int], model: Model) -> str:
    return b"".join(model.piece(token, special=True) for token in token_ids).decode(errors="replace")


def joined_answer(first: ChatAnswer, rest: ChatAnswer, model: Model) -> ChatAnswer:
    """Return the answer that `model` wrote in two parts."""
    if first.token_ids is None or rest.token_ids is None:
        return ChatAnswer(first.text + rest.text, rest.cut)
    token_ids = first.token_ids + rest.token_ids
    text = b"".join(map(model.piece, token_ids)).decode(errors="replace")
    return ChatAnswer(text, rest.cut, token_ids)


@dataclass(frozen=True, slots=True)
class PromptSettings:
    """How prompts are made from a conversation."""

    model: Model
    n_ctx: int
    """Tokens of context."""
    n_predict: int | None = None
    """Most tokens of an answer; None: no stated length."""
    parse_special: bool = False
    """As of `Model.render_chat`, and so `thinking`."""
    thinking: Thinking = AS_USUAL
    engine: Engine | None = None
    """Reads images; None: there are none."""

    def tokenize(self, text: str, images: Sequence[bytes], *, begins: bool) -> PromptTokens:
        """Return the tokens of a part of a prompt, and of the images in it."""
        if images and self.engine:
            made = self.engine.tokenize(text, images, begins=begins)
        else:
            made = self.model.tokenize_rendered(text, begins=begins)
        return made if isinstance(made, PromptTokens) else PromptTokens(made)


class Conversation:
    """The system message and the exchanges so far. A method that raises changes nothing."""

    def __init__(self, system: str | None = None, exchanges: Sequence[Exchange] = ()) -> None:
        self.system = system
        self.exchanges = list(exchanges)
        self.n_left_out = 0
        """How many of the oldest exchanges are left out of the prompt."""

    def add(self, exchange: Exchange) -> None:
        """Append an exchange to the conversation."""
        self.exchanges.append(exchange)

    def undo(self) -> Exchange:
        """Remove the last exchange and return it. Raises UsageError if there is none."""
        if not self.exchanges:
            raise UsageError("nothing was said yet")
        last = self.exchanges.pop()
        if self.n_left_out >= len(self.exchanges):
            self.n_left_out = 0  # the remaining ones may fit
        return last

    def prompt(self, question: str, settings: PromptSettings, images: Sequence[bytes] = ()) -> PromptTokens:
        """Return the tokens of the prompt for `images` and `question`, with room for an answer.

        The room is `n_predict` tokens, but at most half of the context; if it is None, an eighth of the
        context. If the prompt does not leave that room, the oldest exchanges are left out of this prompt and
        of all later ones (`n_left_out`), until the prompt takes three quarters of its limit. The
        system message and the question always stay.
        Raises EdgespecError if those two alone leave too little room, or the template fails.
        """
        check_text("question", question)

        def tokens_without(n: int) -> PromptTokens:
            return self._tokens(question, images, settings, n)

        n_ctx, n_predict = settings.n_ctx, settings.n_predict
        room = max(1, n_ctx // _ANSWER_SHARE if n_predict is None else min(n_predict, n_ctx // 2))
        n_fitting = n_ctx - room
        n_left_out, n_all = self.n_left_out, len(self.exchanges)
        tokens = tokens_without(n_left_out)
        if len(tokens) > n_fitting and n_left_out < n_all:
            goal = int(_KEPT_SHARE * n_fitting)
            # Perhaps all exchanges are left out; whether the question alone fits is checked below.
            n_left_out += 1 + bisect_left(
                range(n_left_out + 1, n_all),
                True,
                key=lambda n: len(tokens_without(n)) <= goal,
            )
            tokens = tokens_without(n_left_out)
        if len(tokens) > n_fitting:
            with_system = "" if self.system is None else " with the system message"
            raise EdgespecError(
                f"the question{with_system} has {len(tokens):,} tokens and does not fit in a context of "
                f"{n_ctx:,} of which {room:,} are for the answer; shorten it, or choose a larger context"
            )
        self.n_left_out = n_left_out
        return tokens

    def continued(self, settings: PromptSettings) -> PromptTokens:
        """Return the tokens of the prompt that continues the last answer.

        Raises UsageError if there is none that was cut, EdgespecError as `prompt`.
        """
        if not self.exchanges or not self.exchanges[-1].answer.cut:
            raise UsageError("no answer was cut")
        last = self.exchanges.pop()
        written = last.answer.token_ids
        if written is None:
            tokens = settings.model.tokenize(last.answer.text, add_special=False, parse_special=False)
            written = tuple(tokens)
        n_ctx, n_predict = settings.n_ctx, settings.n_predict
        room = len(written) + (n_ctx // _ANSWER_SHARE if n_predict is None else n_predict)
        try:
            prompt = self.prompt(last.question, replace(settings, n_predict=room), last.images)
            prompt += written
        finally:
            self.exchanges.append(last)
        if len(prompt) >= n_ctx:
            raise EdgespecError(f"the context of {n_ctx:,} tokens is full: choose a larger one")
        return prompt

    def _tokens(
        self, question: str, images: Sequence[bytes], settings: PromptSettings, n_left_out: int
    ) -> PromptTokens:
        """Return the tokens of the prompt without the first `n_left_out` exchanges."""
        kept, model = self.exchanges[n_left_out:], settings.model
        media = [*chain.from_iterable(exchange.images for exchange in kept), *images]
        question = joined_parts([*[None] * len(images), question])
        said = [exchange.answer.text for exchange in kept]
        render = partial(model.render_chat, thinking=settings.thinking, parse_special=settings.parse_special)
        text = render(self._messages(kept, question, said))
        if not any(exchange.answer.token_ids for exchange in kept):
            return settings.tokenize(text, media, begins=True)
        marks = [f"\ue000{i}\ue001" for i in range(len(kept))]
        marked = render(self._messages(kept, question, marks))
        first, *others = _parts(text, _split(marked, marks), [exchange.answer for exchange in kept])
        unread = iter(media)

        def tokenize(part: str, *, begins: bool) -> PromptTokens:
            images = [*islice(unread, part.count(MEDIA_MARKER))]
            return settings.tokenize(part, images, begins=begins)

        tokens = tokenize(first[1], begins=True)
        for token_ids, following in others:
            rest = tokenize(following, begins=False)
            if not rest or not (rest[0] < 0 or model.is_control(rest[0]) or model.is_eog(rest[0])):
                # Unless a control token or an image begins it, it could change the tokens of the text before.
                return settings.tokenize(text, media, begins=True)
            tokens += [*token_ids, *rest]
            tokens.spans += rest.spans
        return tokens

    def _messages(
        self, exchanges: Sequence[Exchange], question: str, answers: Sequence[str]
    ) -> list[dict[str, str]]:
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for exchange, answer in zip(exchanges, answers, strict=True):
            asked = joined_parts([*[None] * len(exchange.images), exchange.question])
            messages.append({"role": "user", "content": asked})
            messages.append({"role": "assistant", "content": answer})
        return [*messages, {"role": "user", "content": question}]

    def save(self, file: Path) -> None:
        """Write the whole conversation as JSON, exchanges left out of the prompt included.

        Raises UsageError if the file exists but is no conversation, EdgespecError if it cannot be written.
        """
        try:
            if file.exists():
                Conversation.load(file)
            write_atomically(file, msgspec.json.format(self.encoded(), indent=1))
        except UsageError as error:
            raise UsageError(f"not saved: {error}; choose another name") from None
        except OSError as error:
            raise EdgespecError(f"not saved: {describe_os_error(error)}") from None
        except ValueError as error:  # a NUL in the name
            raise UsageError(f"not saved: {file}: {error}") from None

    def encoded(self, *, with_tokens: bool = False) -> bytes:
        """Return the content of its file; `with_tokens`: with the token ids of the answers."""
        messages = []
        if self.system is not None:
            messages.append(_Message("system", self.system))
        for exchange in self.exchanges:
            answer = exchange.answer
            token_ids = answer.token_ids if with_tokens else None
            messages.append(_Message("user", exchange.question, images=exchange.images))
            messages.append(_Message("assistant", answer.text, answer.cut, token_ids))
        return msgspec.json.encode(_File(messages=messages))

    @classmethod
    def load(cls, file: Path) -> Conversation:
        """Return the conversation in a file that `save` wrote, or in another file of this form.

        Raises UsageError, in one line, if the file cannot be read or is no conversation.
        """
        try:
            if not file.is_file():
                raise UsageError(f"{file}: {'not a file' if file.exists() else 'no such file'}")
            if file.stat().st_size > _MAX_BYTES:
                raise UsageError(f"{file}: larger than {_MAX_BYTES >> 20} MiB: this is no conversation")
            return cls.decoded(file.read_bytes(), file)
        except OSError as error:
            raise UsageError(describe_os_error(error)) from None

    @classmethod
    def decoded(cls, data: bytes, file: Path) -> Conversation:
        """Return the conversation that is the content of `file`. Raises UsageError, in one line."""
        try:
            found = msgspec.json.decode(data, type=_File)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(f"{file}: this is no conversation: {error}") from None
        if found.edgespec_conversation > _VERSION:
            raise UsageError(f"{file}: written by a newer edgespec: upgrade this one")
        messages = found.messages
        system = messages.pop(0).content if messages and messages[0].role == "system" else None
        if [message.role for message in messages] != ["user", "assistant"] * (len(messages) // 2):
            raise UsageError(
                f"{file}: after the system message, if any, must come pairs of a user's and an assistant's"
            )
        pairs = zip(messages[::2], messages[1::2], strict=True)
        exchanges = [
            Exchange(user.content, ChatAnswer(said.content, said.cut, said.token_ids), user.images)
            for user, said in pairs
        ]
        return cls(system, exchanges)


class LastConversation:
    """The file of the last conversation with a model, which `chat --continue` continues.

    It has the tokens that answers were written in, so that the prompt begins as the state on disk does.
    """

    def __init__(self, model: Model, on_message: MessageFn) -> None:
        """Name the file; `on_message` takes lines that the user should know."""
        path = CONVERSATIONS.path() / f"{model.header.fingerprint()[:32]}.json"
        self._file = StateFile(path, self._parsed, on_message=on_message)
        self._model = model
        self._stored: list[Exchange] = []

    def _parsed(self, data: bytes) -> Conversation:
        try:
            return Conversation.decoded(data, self._file.path)
        except UsageError as error:
            raise DamagedFileError(error.problem) from None

    def load(self) -> Conversation | None:
        """Return the conversation; None if there is no usable one."""
        try:
            found = self._file.read()
        except OSError as error:
            self._file.warn_once(f"the last conversation cannot be read: {describe_os_error(error)}")
            return None
        if found:
            found.exchanges = [replace(one, answer=self._checked(one.answer)) for one in found.exchanges]
        return found

    def _checked(self, answer: ChatAnswer) -> ChatAnswer:
        token_ids = answer.token_ids or ()
        known = all(0 <= token < self._model.n_vocab for token in token_ids)
        if known and _text_of(token_ids, self._model) == answer.text:
            return answer
        return replace(answer, token_ids=None)

    def store(self, conversation: Conversation) -> None:
        """Store a conversation that is not empty, if it has changed."""
        if not conversation.exchanges or conversation.exchanges == self._stored:
            return
        self._stored = list(conversation.exchanges)
        try:
            self._file.update(lambda _: conversation.encoded(with_tokens=True))
        except OSError as error:
            self._file.warn_once(f"the conversation is not kept: {describe_os_error(error)}")


class _Message(msgspec.Struct, omit_defaults=True):
    role: Literal["system", "user", "assistant"]
    content: str
    cut: bool = False
    token_ids: tuple[int, ...] | None = None
    images: tuple[bytes, ...] = ()


class _File(msgspec.Struct, kw_only=True):
    edgespec_conversation: int = _VERSION
    messages: list[_Message]


def _split(marked: str, marks: Sequence[str]) -> list[str]:
    gaps = []
    for mark in marks:
        gap, _, marked = marked.partition(mark)
        gaps.append(gap)
    return [*gaps, marked]


def _parts(
    text: str, gaps: Sequence[str], answers: Sequence[ChatAnswer]
) -> list[tuple[tuple[int, ...], str]]:
    """Cut `text` into parts: the tokens of an answer (none in the first part), and the text after them.

    Together the parts are all of `text`. An answer stays text if the template changed it (trimmed it, left
    out its thoughts) or its tokens are unknown; so does everything after an answer that is not found.
    """
    parts: list[tuple[tuple[int, ...], str]] = []
    before: tuple[int, ...] = ()
    start = 0  # of the text that comes after `before`
    at = len(gaps[0])
    if not text.startswith(gaps[0]):
        return [((), text)]
    for answer, gap in zip(answers, gaps[1:], strict=True):
        if answer.token_ids and text.startswith(answer.text + gap, at):
            parts.append((before, text[start:at]))
            before, start = answer.token_ids, at + len(answer.text)
            at = start + len(gap)
        elif (found := text.find(gap, at)) >= 0:
            at = found + len(gap)
        else:
            break
    return [*parts, (before, text[start:])]
