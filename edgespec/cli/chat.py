"""`edgespec chat`: a conversation, in a terminal or line by line from a pipe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from edgespec.cli.chat_lines import COMMANDS, Chat, Settings, check_unicode
from edgespec.cli.console import INTERRUPTED, err, message, out
from edgespec.cli.options import (
    OUTPUT,
    PROMPT,
    CacheOption,
    DrafterOption,
    DraftOption,
    FrequencyPenaltyOption,
    GammaOption,
    KernelsOption,
    LogitBiasOption,
    MinPOption,
    PairOption,
    PresencePenaltyOption,
    RepeatLastNOption,
    RepeatPenaltyOption,
    ShowDraftOption,
    SystemOption,
    TargetOption,
    TemperatureOption,
    TextSeedOption,
    ThreadsOption,
    TopKOption,
    TopPOption,
    TypicalOption,
    parse_bias,
    refuse_contradictions,
)
from edgespec.cli.progress import pull_chosen
from edgespec.conversation import Conversation
from edgespec.engine import Engine
from edgespec.errors import EdgespecError, UsageError
from edgespec.models.footprint import CTX_STEP, fits_in_memory
from edgespec.options import Options
from edgespec.pair import MAX_DRAFT_CTX
from edgespec.platform.files import cache_root, expand_user
from edgespec.platform.signals import SignalPipe
from edgespec.sampling import SamplingParams

_DEFAULT = SamplingParams()


def chat_command(
    *,
    target: TargetOption = None,
    draft: DraftOption = None,
    pair: PairOption = None,
    drafter: DrafterOption = None,
    gamma: GammaOption = None,
    cache: CacheOption = True,
    n_predict: Annotated[
        int, typer.Option("--n-predict", "-n", help="Most tokens of an answer; -1: to its end.")
    ] = -1,
    ctx: Annotated[
        int | None,
        typer.Option("--ctx", "-c", min=1, help="Context in tokens.", show_default="the model's, in memory"),
    ] = None,
    threads: ThreadsOption = None,
    kernels: KernelsOption = "auto",
    system: SystemOption = None,
    load: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Go on with a saved conversation.", rich_help_panel=PROMPT),
    ] = None,
    temp: TemperatureOption = _DEFAULT.temperature,
    top_k: TopKOption = _DEFAULT.top_k,
    top_p: TopPOption = _DEFAULT.top_p,
    min_p: MinPOption = _DEFAULT.min_p,
    typical: TypicalOption = _DEFAULT.typical_p,
    repeat_penalty: RepeatPenaltyOption = _DEFAULT.repeat_penalty,
    presence_penalty: PresencePenaltyOption = _DEFAULT.presence_penalty,
    frequency_penalty: FrequencyPenaltyOption = _DEFAULT.frequency_penalty,
    repeat_last_n: RepeatLastNOption = _DEFAULT.penalty_last_n,
    logit_bias: LogitBiasOption = None,
    seed: TextSeedOption = None,
    json: Annotated[
        bool,
        typer.Option("--json", help="Print a JSON object a line for each answer.", rich_help_panel=OUTPUT),
    ] = False,
    show_draft: ShowDraftOption = False,
) -> int:
    """Talk with a model. From a pipe, each line is a turn. /help says what else can be typed."""
    refuse_contradictions(
        {
            "--pair and --target or --draft": pair is not None and bool(target or draft),
            f"--draft and --drafter {drafter}": draft is not None and drafter in ("none", "suffix"),
            "--json and --show-draft": json and show_draft,
            "--system and --load": system is not None and load is not None,
        }
    )
    params = SamplingParams(
        temperature=temp,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical,
        repeat_penalty=repeat_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        penalty_last_n=repeat_last_n,
        logit_bias=parse_bias(logit_bias or []),
    )
    limit = None if n_predict == -1 else n_predict
    Options(gamma=gamma, n_predict=limit, seed=seed)
    if sys.stdin is None:
        raise UsageError("standard input is closed")
    check_unicode(system or "")
    if show_draft and not out.is_terminal:
        message("--show-draft has an effect only in a terminal")
    conversation = Conversation(system) if load is None else Conversation.load(expand_user(str(load)))
    drafter = "none" if gamma == 0 else drafter or "auto"
    target, draft = pull_chosen(pair, target, draft, drafter)
    with SignalPipe() as signals:
        with err.status("loading the models"):
            engine = Engine(
                target,
                draft,
                drafter=drafter,
                n_ctx=ctx,
                n_threads=threads,
                kernels=kernels,
                history=cache,
                signals=signals,
                prefix_cache=0,
                on_message=message,
            )
        with engine:
            if engine.target.chat_template is None:
                raise EdgespecError(
                    f"{engine.target_name} has no chat template, and cannot chat: "
                    "`edgespec run` continues a text with it"
                )
            settings = Settings(params, seed, limit, gamma, ctx, json=json, show_draft=show_draft)
            chat = Chat(engine, conversation, settings, n_ctx=ctx or _context(engine))
            return _type(chat, cache=cache) if sys.stdin.isatty() else _pipe(chat)


def _type(chat: Chat, *, cache: bool) -> int:
    """Answer what is typed in a terminal."""
    from edgespec.cli.line_editor import LineEditor, open_history  # 0.1 s that no other command should take

    history = cache_root() / "chat-lines" if cache else None
    if history and (reason := open_history(history)):
        message(f"lines are not kept: {reason}")
        history = None
    editor = LineEditor({name: command.argument for name, command in COMMANDS.items()}, history)
    message(f"{chat.models}; /help lists the commands, Ctrl-D ends")
    line = ""
    while not chat.ended:
        try:
            typed = editor.read(line)
        except EOFError:
            break
        except KeyboardInterrupt:
            line = ""
            continue
        try:
            line = chat.take(typed)
        except KeyboardInterrupt:  # before an answer began, or a second one at its end
            line = typed
    return 0


def _pipe(chat: Chat) -> int:
    """Answer line after line of stdin; return 1 if one of them could not be done."""
    for number, data in enumerate(sys.stdin.buffer, 1):
        try:
            line = data.decode()
        except UnicodeDecodeError as error:
            raise EdgespecError(
                f"stdin is not UTF-8 text: byte 0x{data[error.start]:02x} in line {number}; convert it first"
            ) from None
        chat.take(line)
        if chat.interrupted:
            return INTERRUPTED
        if chat.ended:
            break
    return EdgespecError.exit_code if chat.failed else 0


def _context(engine: Engine) -> int:
    """Return the most tokens of context that the target was trained for and that fit in memory."""
    models = [model.header for model in (engine.target, engine.draft) if model]

    def fits(n_ctx: int) -> bool:
        limits = [n_ctx, MAX_DRAFT_CTX]
        wanted = [(header, min(n_ctx, n)) for header, n in zip(models, limits, strict=False)]
        try:
            fits_in_memory(wanted, weights_loaded=True)
        except EdgespecError:
            return False
        return True

    most = engine.target.n_ctx_train
    low, high = 1, -(-most // CTX_STEP)  # in steps; the first one must do
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(min(most, middle * CTX_STEP)) else (low, middle - 1)
    return min(most, low * CTX_STEP)
