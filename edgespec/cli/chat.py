"""`edgespec chat`: a conversation, in a terminal or line by line from a pipe."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgespec.cli.console import INTERRUPTED, message, out
from edgespec.cli.groups import grouped, option_group, shown
from edgespec.cli.options import (
    OUTPUT,
    PROMPT,
    AnyCompute,
    ChatTemplateOption,
    DraftingOptions,
    ModelFirst,
    Sampling,
    ShowDraftOption,
    SpecialOption,
    StateOptions,
    SystemOption,
    most_tokens,
)
from edgespec.engine.options import EngineOptions
from edgespec.errors import EdgespecError, UsageError
from edgespec.platform.files import expand_user
from edgespec.platform.kept import CHAT_LINES, STATES

if TYPE_CHECKING:
    from edgespec.cli.chat_lines import Chat
    from edgespec.cli.conversation import Conversation, LastConversation
    from edgespec.decoding.options import Options
    from edgespec.engine.engine import Engine


@option_group()
class ChatLength:
    """How long an answer and the conversation may become, in tokens."""

    n_predict: Annotated[
        int, typer.Option("--n-predict", "-n", help="Most tokens of an answer; -1: to its end.")
    ] = -1
    ctx: Annotated[
        int | None,
        typer.Option("--ctx", "-c", min=1, help="Context in tokens.", show_default="the model's, in memory"),
    ] = None
    states: StateOptions
    compute: AnyCompute


@option_group(PROMPT)
class ChatStart:
    """How a conversation begins: with a system message, or where a saved one ended."""

    system: SystemOption = None
    chat_template: ChatTemplateOption = None
    special: SpecialOption = None
    load: Annotated[Path | None, typer.Option(metavar="FILE", help="Go on with a saved conversation.")] = None
    continues: Annotated[
        bool,
        typer.Option(
            "--continue", help="Go on with the last conversation with this model, and keep its state on disk."
        ),
    ] = False

    def conversation(self) -> Conversation:
        """Return the conversation so far. Raises UsageError."""
        from edgespec.cli.conversation import Conversation

        if self.load is None:
            return Conversation(self.system)
        return Conversation.load(expand_user(str(self.load)))


@option_group(OUTPUT)
class ChatOutput:
    """How answers are printed: as text or JSON, with drafted tokens marked or without."""

    json: Annotated[bool, typer.Option("--json", help="Print a JSON object a line for each answer.")] = False
    show_draft: ShowDraftOption = False


@shown("Write", 'edgespec chat --system "Answer in one sentence."')
@grouped
def chat_command(
    *,
    models: ModelFirst,
    drafting: DraftingOptions,
    length: ChatLength,
    beginning: ChatStart,
    sampling: Sampling,
    output: ChatOutput,
) -> int:
    """Talk with a model. From a pipe, each line is a turn. /help says what else can be typed."""
    from edgespec.cli.chat_lines import Chat, ChatSettings, check_unicode
    from edgespec.cli.conversation import LastConversation
    from edgespec.platform.processes import SignalPipe

    drafter = drafting.chosen()
    options = _options(drafting, length, sampling)
    if sys.stdin is None:
        raise UsageError("standard input is closed")
    check_unicode(beginning.system or "")
    if output.show_draft and not out.is_terminal:
        message("--show-draft has an effect only in a terminal")
    conversation = beginning.conversation()
    usual = STATES.path() if beginning.continues else None
    states = length.states.room(usual)
    names = models.pull(drafter, length.compute, chat_template=beginning.chat_template)
    with (
        SignalPipe() as signals,
        length.compute.load_engine(
            EngineOptions(
                names,
                drafter=drafter,
                n_ctx=length.ctx,
                history=drafting.cache,
                signals=signals,
                prefix_cache=0,
                chat_template=beginning.chat_template,
                states=states,
            )
        ) as engine,
    ):
        if engine.target.chat_template is None:
            raise EdgespecError(
                f"{engine.target_name} has no chat template, and cannot chat: "
                "`edgespec run` continues a text with it"
            )
        settings = ChatSettings(options, length.ctx, output.json, output.show_draft, bool(beginning.special))
        is_kept = beginning.continues or (drafting.cache and sys.stdin.isatty())  # not a pipe's
        last = LastConversation(engine.target, message) if is_kept else None
        if last and beginning.continues:
            conversation = _continued(last)
        chat = Chat(engine, conversation, settings, n_ctx=length.ctx or _context(engine), last=last)
        if not sys.stdin.isatty():
            return _pipe(chat)
        _type(chat, cache=drafting.cache)
    return 0


def _continued(last: LastConversation) -> Conversation:
    """Return the last conversation, or an empty one, and print which."""
    from edgespec.cli.conversation import Conversation

    conversation = last.load()
    if conversation is None:
        message("there is no earlier conversation with this model: a new one begins")
        return Conversation()
    n = len(conversation.exchanges)
    message(f"the last conversation continues, after {n} exchange{'' if n == 1 else 's'}")
    return conversation


def _options(drafting: DraftingOptions, length: ChatLength, sampling: Sampling) -> Options:
    from edgespec.decoding.options import Options

    return Options(
        params=sampling.params,
        seed=sampling.seed,
        n_predict=most_tokens(length.n_predict),
        gamma=drafting.gamma,
        reasoning_budget=sampling.reasoning_budget,
    )


def _type(chat: Chat, *, cache: bool) -> None:
    """Answer the lines typed in a terminal."""
    from edgespec.cli.chat_lines import (  # takes 0.1 s to import
        COMMANDS,
        LineEditor,
        PlainLines,
        is_dumb,
        open_history,
    )

    editor: PlainLines | LineEditor
    if is_dumb():
        editor = PlainLines()
    else:
        history = CHAT_LINES.path() if cache else None
        if history and (reason := open_history(history)):
            message(f"lines are not kept: {reason}")
            history = None
        editor = LineEditor({name: takes for name, (takes, _) in COMMANDS.items()}, history)
    message(f"{chat.models}; /help lists the commands, Ctrl-D ends")
    while not chat.ended:
        try:
            typed = editor.read()
        except EOFError:
            break
        except KeyboardInterrupt:
            continue
        with suppress(KeyboardInterrupt):  # before an answer began, or a second Ctrl-C at its end
            chat.answer(typed)


def _pipe(chat: Chat) -> int:
    """Answer stdin line by line, even after a line that fails; return 1 if any did."""
    for number, data in enumerate(sys.stdin.buffer, 1):
        chat.answer(data, number)
        if chat.interrupted:
            return INTERRUPTED
        if chat.ended:
            break
    return EdgespecError.exit_code if chat.failed else 0


def _context(engine: Engine) -> int:
    """Return the largest context, in tokens, that the target was trained for and that fits in memory.

    Its draft fits too. With nodes: the number of tokens that they must have room for.
    """
    if engine.n_ctx_shared is not None:
        return engine.n_ctx_shared
    from edgespec.models.footprint import CTX_STEP, fitting_tokens

    header, draft = engine.target.header, engine.draft.header if engine.draft else None
    fitting = fitting_tokens(header, draft, weights_loaded=True)[header.cache_type]
    return min(header.n_ctx_train, max(fitting, CTX_STEP))  # one step is assumed to fit
