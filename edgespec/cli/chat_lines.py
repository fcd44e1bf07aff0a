"""Handles the lines typed in `edgespec chat`: answers questions and runs commands."""

from __future__ import annotations

import codecs
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output.defaults import create_output

from edgespec.cli.console import err, line_of, message, print_error, print_line
from edgespec.cli.conversation import (
    ChatAnswer,
    Conversation,
    Exchange,
    LastConversation,
    PromptSettings,
    answer_of,
    joined_answer,
)
from edgespec.cli.render import (
    TextWriter,
    as_json,
    full_context,
    printable,
    said_drafts,
    said_prompt,
    said_text,
    shown_while_read,
)
from edgespec.decoding.options import Options
from edgespec.decoding.records import Result
from edgespec.errors import EdgespecError, UsageError, describe_os_error
from edgespec.llama.chat_template import Thinking
from edgespec.llama.control_names import MEDIA_MARKER
from edgespec.models.hub import format_size
from edgespec.platform import plugins
from edgespec.platform.files import expand_user

if TYPE_CHECKING:
    from edgespec.engine.engine import Engine
    from edgespec.engine.stream import Stream

# ---- reads lines typed in `edgespec chat`: with prompt_toolkit's editing, or plainly in a dumb terminal ----


_PROMPT, _CONTINUED = "> ", "  "
_DUMB = ("", "dumb", "unknown")  # values of TERM


class LineEditor:
    """Reads what the user types: Enter sends it, Alt+Enter begins a new line, Tab completes /commands."""

    def __init__(self, commands: Mapping[str, str], history: Path | None) -> None:
        """Complete `commands` (name -> argument); keep lines in the file `history`, None for no file."""
        self._session: PromptSession[str] = PromptSession(
            history=InMemoryHistory() if history is None else _PersistedHistory(str(history)),
            completer=_Commands(commands),
            complete_while_typing=False,
            key_bindings=_keys(),
            multiline=True,
            enable_suspend=True,  # Ctrl-Z
            prompt_continuation=_CONTINUED,
            output=create_output(always_prefer_tty=True),  # stderr if stdout is a file
        )

    def read(self) -> str:
        """Return the next line.

        Raises EOFError for Ctrl-D on an empty line, KeyboardInterrupt for Ctrl-C.
        """
        with _signals_kept():
            return self._session.prompt(_PROMPT)


class PlainLines:
    """Reads lines in a terminal without escape sequences, such as an editor's shell or a serial line."""

    def read(self) -> str:
        """Return the next line. Raises EOFError for Ctrl-D, KeyboardInterrupt for Ctrl-C."""
        print(_PROMPT, end="", file=sys.stdout if sys.stdout.isatty() else sys.stderr, flush=True)
        line = sys.stdin.buffer.readline()
        if not line:
            raise EOFError
        return line.decode(errors="surrogateescape").rstrip("\n")


def is_dumb() -> bool:
    """Whether the terminal understands no escape sequences."""
    return os.environ.get("TERM", "").lower() in _DUMB


def open_history(file: Path) -> str | None:
    """Create the history file, readable only by its owner; return why that failed, or None."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        with file.open("ab"):
            return None
    except OSError as error:
        return describe_os_error(error)


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore a SignalPipe's wakeup descriptor, which asyncio (under prompt_toolkit) replaces."""
    descriptor = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)


class _PersistedHistory(FileHistory):
    def store_string(self, string: str) -> None:
        """Append a line; a full disk is no reason to lose a conversation."""
        with suppress(OSError):
            Path(str(self.filename)).touch(mode=0o600)  # `cache clear` may have deleted it
            super().store_string(string)


class _Commands(Completer):
    def __init__(self, commands: Mapping[str, str]) -> None:
        self._commands = commands
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        typed = document.text_before_cursor
        name, space, path = typed.partition(" ")
        if not space and typed.startswith("/"):
            for command in self._commands:
                if command.startswith(typed):
                    yield Completion(command, start_position=-len(typed))
        elif self._commands.get(name) == "FILE":
            yield from self._paths.get_completions(Document(path), complete_event)


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


# ---- chat_lines ----


_LONGEST_ANSWER = 4096  # tokens, if neither --n-predict nor --ctx allows more
_SEEDS = 1 << 64
_MOST_IMAGES = 128 << 20  # bytes of their files
_LEAVE = ("exit", "quit", "exit()", "quit()", ":q")
"""Words that leave other programs; a model has no answer to them."""
_ALIASES = {"/quit": "/exit", "/bye": "/exit"}


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Settings that all answers of a chat share."""

    options: Options
    """Options of every answer; `seed` is the first answer's, and each further answer adds 1."""
    ctx: int | None
    """The context that the user asked for."""
    json: bool
    show_draft: bool
    parse_special: bool = False
    """Whether names of control tokens in messages are these tokens."""


class Chat:
    """Handles lines: answers questions and runs commands."""

    def __init__(
        self,
        engine: Engine,
        conversation: Conversation,
        settings: ChatSettings,
        *,
        n_ctx: int,
        last: LastConversation | None = None,
    ) -> None:
        """Continue `conversation` in at most `n_ctx` tokens of context; `last`: where it is kept."""
        self.conversation = conversation
        self.ended = False
        """Whether the user asked to leave."""
        self.failed = False
        """Whether a line failed."""
        self.interrupted = False
        """Whether Ctrl-C ended the last answer."""
        self._engine = engine
        self._settings = settings
        self._prompts = PromptSettings(
            engine.target,
            n_ctx,
            settings.options.n_predict,
            settings.parse_special,
            Thinking(budget=settings.options.reasoning_budget),
            engine,
        )
        self._images: list[bytes] = []  # that the next question is about
        self._n_ctx = n_ctx
        self._results: list[Result] = []  # of all answers, undone ones included
        self._kept = last

    @property
    def models(self) -> str:
        """The names of the models."""
        draft = self._engine.draft_name
        return self._engine.target_name + (f", drafted by {draft}" if draft else ", alone")

    def answer(self, typed: str | bytes, number: int = 0) -> None:
        """Answer or run a line; an error is printed, and noted in `failed`.

        `number`: the number of a pipe's line, which comes as bytes.
        """
        try:
            line = typed if isinstance(typed, str) else _decoded(typed, number)
            text = line.strip()
            check_unicode(text)
            if text.lower() in _LEAVE:
                message(f"{text} ends the chat, as /exit does")
                self.ended = True
            elif text.startswith("/") and not text.startswith("//"):
                self._obey(text)
            elif text:
                self._ask(text.removeprefix("/") if text.startswith("//") else text)
        except EdgespecError as error:
            print_error(printable(line_of(error)))
            self.failed = True
        if self._kept:
            self._kept.store(self.conversation)

    def _obey(self, text: str) -> None:
        name, *rest = text.split(maxsplit=1)
        argument = rest[0] if rest else ""
        takes, obey = COMMANDS.get(_ALIASES.get(name, name), (None, None))
        if takes is None or obey is None:
            raise UsageError(f"there is no command {name}: see /help; //TEXT sends text that begins with a /")
        if takes == "FILE":
            argument = file_name(argument)
            if not argument:
                raise UsageError(f"{name} needs a file: {name} FILE")
        if not takes and argument:
            raise UsageError(f"{name} takes nothing after it")
        obey(self, argument)

    def _ask(self, question: str) -> None:
        """Answer `question`, with the images before it."""
        n_left_out, images = self.conversation.n_left_out, tuple(self._images)
        tokens = self.conversation.prompt(question, self._prompts, images)
        self._print_left_out(n_left_out)

        def keep(answer: ChatAnswer) -> None:
            self.conversation.add(Exchange(question, answer, images))
            self._images.clear()

        self._write(tokens, keep)

    def _write(self, tokens: Sequence[int], keep: Callable[[ChatAnswer], None]) -> None:
        """Write an answer after `tokens`, and pass it to `keep`."""
        settings = self._settings
        options = settings.options
        most = options.n_predict or (self._n_ctx if settings.ctx else _LONGEST_ANSWER)
        most = min(most, self._n_ctx - len(tokens))
        seed = None if options.seed is None else (options.seed + len(self._results)) % _SEEDS
        writer = None if settings.json else TextWriter(show_draft=settings.show_draft)
        stream: Stream | None = None
        self.interrupted = False
        try:
            stream = self._engine.stream(tokens, replace(options, seed=seed, n_predict=most))
            for token in shown_while_read(stream, hides_text=settings.json):
                if writer:
                    writer.write(token)
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            written = stream is not None and self._store(keep, stream, writer)
        if self.interrupted:
            message("cut by Ctrl-C; /more continues" if written else "ended before anything was written")
        elif written and self._results[-1].stop_reason != "eog":
            n = _count(len(self._results[-1].token_ids), "token")
            message(f"cut after {n}{self._reason(most, len(tokens))}")

    def _store(self, keep: Callable[[ChatAnswer], None], stream: Stream, writer: TextWriter | None) -> bool:
        """Pass the answer of `stream` to `keep`; return whether it wrote anything."""
        stream.close()
        result = stream.result
        if not result.token_ids and result.stop_reason != "eog":
            return False
        if writer:
            writer.finish(result.text)
        else:
            sys.stdout.write(as_json(result) + "\n")
            sys.stdout.flush()
        keep(answer_of(result, self._engine.target))
        self._results.append(result)
        return True

    def _print_left_out(self, before: int) -> None:
        if self.conversation.n_left_out > before:
            message(_left_out(before, self.conversation.n_left_out, self._n_ctx))

    def _reason(self, most: int, n_prompt: int) -> str:
        if n_prompt + most >= self._n_ctx:
            return f": {full_context(self._n_ctx, self._engine.target.n_ctx_train)}"
        return " by -n; /more continues" if most == self._settings.options.n_predict else "; /more continues"

    # ---- commands ----

    def undo(self, _argument: str) -> None:
        """Take back the last question and its answer."""
        self.conversation.undo()
        n = len(self.conversation.exchanges)
        message(f"the last question and its answer are taken back; {_count(n, 'exchange')} left")

    def retry(self, _argument: str) -> None:
        """Take the last answer back and write another to the same question."""
        last = self.conversation.undo()
        n = len(self.conversation.exchanges)
        waiting, self._images = self._images, [*last.images]
        try:
            self._ask(last.question)
        finally:
            self._images = waiting
            if len(self.conversation.exchanges) == n:  # nothing was written
                self.conversation.add(last)

    def more(self, _argument: str) -> None:
        """Continue the last answer, which was cut."""
        model, conversation = self._engine.target, self.conversation
        n_left_out = conversation.n_left_out
        tokens = conversation.continued(self._prompts)
        self._print_left_out(n_left_out)

        def keep(rest: ChatAnswer) -> None:
            last = conversation.undo()
            conversation.add(replace(last, answer=joined_answer(last.answer, rest, model)))

        self._write(tokens, keep)

    def image(self, file: str) -> None:
        """Put an image before the next question."""
        try:
            data = plugins.part("images.read_file")(expand_user(file))
            n = len(self._engine.tokenize(MEDIA_MARKER, [data], begins=False))
        except UsageError as error:
            raise UsageError(error.problem) from None
        earlier = (image for exchange in self.conversation.exchanges for image in exchange.images)
        if sum(map(len, [*earlier, *self._images, data])) > _MOST_IMAGES:
            raise UsageError(f"a conversation has at most {format_size(_MOST_IMAGES)} of images")
        self._images.append(data)
        message(f"{printable(file)}, {_count(n, 'token')}, stands before the next question")

    def save(self, file: str) -> None:
        """Write the conversation to a file."""
        path = expand_user(file)
        self.conversation.save(path)
        n, size = _count(len(self.conversation.exchanges), "exchange"), format_size(path.stat().st_size)
        message(f"{n} saved to {printable(str(path))} ({size})")

    def load(self, file: str) -> None:
        """Continue a saved conversation instead of this one."""
        path = expand_user(file)
        self.conversation = Conversation.load(path)
        n = _count(len(self.conversation.exchanges), "exchange")
        system = "no system message" if self.conversation.system is None else "a system message"
        message(f"{n} and {system} loaded from {printable(str(path))}")

    def system(self, text: str) -> None:
        """Set the system message; show it without TEXT, remove it with -."""
        if text:
            self.conversation.system = None if text == "-" else text
        shown = self.conversation.system
        message("no system message" if shown is None else f"system message: {printable(shown)}")

    def stats(self, _argument: str) -> None:
        """Show figures of the last answer, and of all of this chat."""
        if not self._results:
            raise UsageError("nothing was answered yet")
        last, all_ = self._results[-1], self._results
        _line("prompt", said_prompt(last))
        _line("text", said_text(last))
        if drafts := said_drafts(last):
            _line("drafts", drafts)
        if len(all_) > 1:
            timed = [one for one in all_ if one.stats.ttft_s is not None and len(one.token_ids) > 1]
            seconds = sum(one.stats.total_s - (one.stats.ttft_s or 0.0) for one in timed)
            n_timed = sum(len(one.token_ids) - 1 for one in timed)
            rate = f", {n_timed / seconds:.1f} tokens/s" if seconds > 0 else ""
            n_drafted, n_accepted = (
                sum(getattr(one.stats, n) for one in all_) for n in ("n_drafted", "n_accepted")
            )
            drafts = f"; drafts: {n_accepted:,} of {n_drafted:,} accepted" if n_drafted else ""
            n_cached, n_prompt = sum(one.n_cached for one in all_), sum(one.prompt_tokens for one in all_)
            cached = f"; {n_cached:,} of {n_prompt:,} tokens of prompts were in the cache"
            n_tokens = sum(len(one.token_ids) for one in all_)
            _line(f"{len(all_)} answers", f"{n_tokens:,} tokens{rate}{drafts}{cached}")
        if n := self.conversation.n_left_out:
            _line("left out", f"the first {_count(n, 'exchange')} of {len(self.conversation.exchanges)}")

    def help(self, _argument: str) -> None:
        """List the commands and keys."""
        for name, (takes, obey) in COMMANDS.items():
            _line(f"{name} {takes}", obey.__doc__ or "")
        _line("//TEXT", "Send TEXT that begins with a slash.")
        _line("Alt+Enter", "Begin a new line (Esc, then Enter, does too); Enter sends.")
        _line("Ctrl-C", "End the answer and keep what was written; at the prompt, clear the line.")
        _line("Arrow up", "Bring back an earlier line, one that failed too.")
        _line("Ctrl-Z", "Suspend; fg in the shell resumes.")
        _line("Ctrl-D", "Leave.")

    def exit(self, _argument: str) -> None:
        """Leave; exit, quit and Ctrl-D do too."""
        self.ended = True


COMMANDS: dict[str, tuple[str, Callable[[Chat, str], None]]] = {
    "/undo": ("", Chat.undo),
    "/retry": ("", Chat.retry),
    "/more": ("", Chat.more),
    "/image": ("FILE", Chat.image),
    "/save": ("FILE", Chat.save),
    "/load": ("FILE", Chat.load),
    "/system": ("TEXT", Chat.system),
    "/stats": ("", Chat.stats),
    "/help": ("", Chat.help),
    "/exit": ("", Chat.exit),
}
"""Name -> what comes after it, and what it does."""


def file_name(typed: str) -> str:
    """Return the file that a user names as in a shell, in quotes or with backslashes; spaces need neither.

    Raises UsageError for an unclosed quote, and for text after a closed one.
    """
    quoted = typed.startswith(("'", '"'))
    try:
        words = shlex.split(typed)
    except ValueError:
        words = []
    if len(words) == 1:
        return words[0]
    if quoted:
        raise UsageError(f"{typed}: name one file, and end its quotes")
    return typed


def _decoded(data: bytes, number: int) -> str:
    """Return a line of a pipe as text. Raises EdgespecError."""
    if number == 1:
        data = data.removeprefix(codecs.BOM_UTF8)
    try:
        at = data.find(b"\0")
        text = data.decode()
    except UnicodeDecodeError as error:
        at = error.start
    if at < 0:
        return text
    where = f"byte 0x{data[at]:02x} in line {number}"
    raise EdgespecError(f"stdin is not UTF-8 text: {where}, which is left out; convert it first")


def check_unicode(text: str) -> None:
    """Raise UsageError for text that was typed with bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the text is not valid Unicode at character {error.start}") from None


def _left_out(before: int, after: int, n_ctx: int) -> str:
    first, last = before + 1, after
    which = f"exchange {first} is" if first == last else f"exchanges {first} to {last} are"
    return f"{which} left out of the prompt from now on: the context of {n_ctx:,} tokens is full"


def _count(n: int, name: str) -> str:
    return f"{n} {name}" if n == 1 else f"{n} {name}s"


def _line(label: str, text: str) -> None:
    print_line(label, text, width=12, to=err)
