"""Prints a generation: the progress of its prompt, the text as it comes, statistics, the JSON object."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator
from threading import Event, Thread
from typing import TYPE_CHECKING, Protocol, Self

import msgspec
from rich.style import Style
from rich.text import Text

from edgespec.cli.console import OpenLine, WordWrap, err, out, print_line
from edgespec.decoding.records import FROM, Origin, PromptProgress, Result, Token

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edgespec.cli.options import Explanation
    from edgespec.decoding.tree import Tree
    from edgespec.drafting.step import DraftStep
    from edgespec.llama.weights import Model
    from edgespec.platform.metering import Measurement

_LATE_S = 0.5  # seconds without a word after which a person wonders
_REDRAW_S = 0.1

COLOURS: dict[Origin, str] = {
    "target": "",
    "accepted": "green",
    "resampled": "red",
    "bonus": "cyan",
    "alone": "yellow",
}

# Text from a model must not steer the user's terminal: control characters but newline and tab.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class TextWriter:
    """Writes tokens to stdout as they come; colours, and breaks lines between words, only in a terminal."""

    def __init__(self, *, show_draft: bool, explain: bool = False) -> None:
        self._coloured = show_draft and out.is_terminal and out.color_system and not out.no_color
        # In a terminal, lines about the steps would cut the text into pieces, so the text follows them.
        self._held: list[Token] | None = [] if explain and out.is_terminal else None
        self._wrap = WordWrap(out.width, indent=0, is_answer=True) if out.is_terminal else None
        self._n_written = 0

    def write(self, token: Token) -> None:
        """Write the text that became certain with `token`."""
        if self._held is not None:
            self._held.append(token)
            return
        self._write(token.text, COLOURS[token.origin] if self._coloured else "")

    def _write(self, text: str, colour: str) -> None:
        self._n_written += len(text)
        if self._wrap:
            shown = printable(text)
            sys.stdout.write(self._wrap.feed(Style.parse(colour).render(shown) if colour else shown))
        else:
            sys.stdout.write(text)
        sys.stdout.flush()
        if text.endswith("\n"):
            OpenLine.end()
        elif text:
            OpenLine.is_open = True

    def finish(self, text: str) -> None:
        """Write the rest of `text`, which may have been held back when the generation ended; end the line."""
        held, self._held = self._held or [], None
        for token in held:
            self.write(token)
        self._write(text[self._n_written :], "")
        sys.stdout.write((self._wrap.end() if self._wrap else "") + "\n" * (not text.endswith("\n")))
        sys.stdout.flush()
        OpenLine.end()


class ReadStream(Protocol):
    """A stream of tokens that reports how much of its prompt is read."""

    @property
    def prompt_progress(self) -> PromptProgress:
        """How much of the prompt is read; any thread may ask."""

    def __iter__(self) -> Iterator[Token]:
        """Yield the tokens as they come."""


def shown_while_read(stream: ReadStream, *, hides_text: bool = False) -> Iterator[Token]:
    """Yield the tokens of `stream`; until the first, a bar in a terminal shows the progress of its prompt.

    `hides_text`: nothing is written before the end, so the bar stays, and counts what is written.
    """
    tokens = iter(stream)
    with StreamDisplay(stream) as display:
        for token in tokens:
            if not hides_text:
                break
            display.n_written += 1
            yield token
        else:
            return
    yield token
    yield from tokens


class StreamDisplay:
    """A bar that shows how much of a long prompt is read, and then how much is written.

    A context manager; it draws on its own thread, since this one is busy with the model's passes.
    """

    def __init__(self, stream: ReadStream) -> None:
        self.n_written = 0
        self._stream = stream
        self._ended = Event()
        self._thread = Thread(target=self._draw, name="edgespec progress", daemon=True)

    def __enter__(self) -> Self:
        if err.is_terminal:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if err.is_terminal:
            self._thread.join()

    def _draw(self) -> None:
        if self._ended.wait(_LATE_S):
            return
        from rich.progress import Progress

        from edgespec.cli.progress import columns

        with Progress(*columns(), console=err, transient=True, auto_refresh=False) as bars:
            reading = bars.add_task("reading the prompt", total=None, unit="tokens")
            writing = bars.add_task("writing", total=None, unit="tokens", visible=False)
            while not self._ended.wait(_REDRAW_S):
                n = self.n_written
                n_read, n_tokens = self._stream.prompt_progress
                bars.update(reading, completed=n_read, total=n_tokens or None, visible=not n)
                bars.update(writing, description=f"writing: {n} tokens", visible=n > 0, refresh=True)


def printable(text: str) -> str:
    """Return `text` without characters that control a terminal."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


class ExplainedSteps:
    """Prints a line for each step: its inputs, choice and result; for "ir" also the tree after each pass."""

    def __init__(self, target: Model, explanation: Explanation) -> None:
        self._target = target
        self._explanation = explanation
        self._n = 0

    def print(self, step: DraftStep) -> None:
        """Print `step` to stderr."""
        self._n += 1
        known = [f"{step.rate:.1f} {step.unit}"]
        if step.offered:
            known.append("suffix offers " + " ".join(f"{chance:.2f}" for chance in step.offered))
        if step.n_unread is not None:
            known.append(f"draft model has {step.n_unread} unread")
        chosen = [f"draft model prefilled {step.n_prefilled}"] if step.n_prefilled else []
        chosen += [f"pass over {n} ({guesses} guessed)" for n, guesses in step.passes]
        runs = itertools.groupby(step.proposed, key=lambda token: token.source)
        for source, tokens in runs:
            chosen.append(f"{source} " + " ".join(f"{token.chance:.2f}" for token in tokens))
        times = f"draft {1e3 * step.draft_s:.1f} ms, verify {1e3 * step.verify_s:.1f} ms"
        got = f"{step.n_accepted} of {len(step.proposed)} accepted, {step.n_emitted} emitted, {times}"
        line = f"step {self._n}: {'; '.join(known)} -> {'; '.join(chosen) or 'nothing'} -> {got}"
        err.print(line)
        if self._explanation == "ir":
            from edgespec.decoding.tree import dump  # numpy with it

            before: Tree = ()
            for name, tree in step.passes_of_tree or [("drafted", step.proposed)]:
                if tree != before:
                    drawn = dump(tree, self._piece)
                    err.print(f"{name}:\n{drawn}")
                before = tree

    def _piece(self, token: int) -> str:
        return self._target.piece(token, special=True).decode(errors="replace")


def as_json(result: Result) -> str:
    """Return the JSON object of `edgespec run --json`; docs/measuring.md explains its fields."""
    stats = msgspec.structs.asdict(result.stats) | {"time_shares": result.stats.time_shares}
    fields = {
        "text": result.text,
        "tokens": len(result.token_ids),
        "token_ids": result.token_ids,
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": result.n_cached,
        "stop_reason": result.stop_reason,
        "seed": result.seed,
        "mode": result.mode,
        "exact": result.exact,
        "target_share": result.target_share,
        "note": result.note,
        "plain_tokens_per_s": result.plain_tokens_per_s,
        "times_plain": result.times_plain,
        "sources": {
            name: {"drafted": drafted, "accepted": accepted}
            for name, (drafted, accepted) in result.sources.items()
        },
        "target": result.target,
        "draft": result.draft,
        "kernels": result.kernels,
        "stats": stats,
        "energy": result.energy and result.energy.facts(len(result.token_ids)),
    }
    return json.dumps(fields, ensure_ascii=False)


def print_stats(result: Result, *, n_ctx_train: int, full: bool, show_draft: bool) -> None:
    """Print the statistics to stderr: what was read, written and drafted; `full`: a line for each subject.

    `n_ctx_train`: the longest context of the target.
    """
    err.print()
    ending = _ending(result, n_ctx_train)
    reading, writing = said_prompt(result), said_text(result)
    if full and (rate := result.stats.prompt_tokens_per_s) is not None:
        reading += f", {rate:.1f} tokens/s"
    if not full and result.stop_reason != "eog":
        writing += f"; {ending}"
    _line("prompt", reading)
    _line("text", writing)
    if drafts := said_drafts(result):
        _line("drafts", drafts)
    if full:
        _full_stats(result, ending)
    _mode(result)
    if result.energy:
        _energy(result.energy, len(result.token_ids))
    if show_draft and err.is_terminal:
        names = ((f" {name}", colour) for name, colour in COLOURS.items())
        err.print(Text.assemble(("colours ", "dim"), *names))


_FEW = 4
"""Tokens of a text of whose drafts nothing is said: there is nothing to gain in it."""


def said_prompt(result: Result) -> str:
    """Return in words how many tokens of the prompt were read, in what time, and how many were cached."""
    stats, n_cached = result.stats, result.n_cached
    seconds = stats.total_s if stats.ttft_s is None else stats.ttft_s
    counted = f"{result.prompt_tokens - n_cached:,} tokens" if result.prompt_tokens else "not counted"
    read = f"{counted} in {seconds:.2f} s"
    return read + (f", {n_cached:,} more were in the cache" if n_cached else "")


def said_text(result: Result) -> str:
    """Return in words how many tokens were written after the prompt was read, in what time, how fast."""
    stats, n_tokens = result.stats, len(result.token_ids)
    if stats.ttft_s is None:
        return f"{n_tokens:,} tokens"
    rate = stats.generation_tokens_per_s
    text = f"{n_tokens:,} tokens in {stats.total_s - stats.ttft_s:.2f} s"
    return text if rate is None else f"{text}, {rate:.1f} tokens/s"


def said_drafts(result: Result) -> str:
    """Return in words how many drafted tokens were accepted, by source, or why nothing was drafted.

    "" for a short text, or if drafting was off.
    """
    if len(result.token_ids) <= _FEW:
        return ""
    return said_accepted(result.sources) if result.sources else result.note


def said_accepted(sources: Mapping[str, tuple[int, int]]) -> str:
    """Return in words how many tokens were drafted and accepted, and how many from each source."""
    n_drafted, n_accepted = map(sum, zip(*sources.values(), strict=True))
    origins = [f"{n:,} {FROM.get(name, f'from {name}')}" for name, (_, n) in sources.items() if n]
    return ", ".join([f"{n_accepted:,} of {n_drafted:,} accepted", *origins])


def _mode(result: Result) -> None:
    if not result.exact:
        _line("mode", f"not exact: the target saw {result.target_share:.0%} of the tokens".replace("%", " %"))


def _full_stats(result: Result, ending: str) -> None:
    stats = result.stats
    if stats.tau is not None and stats.alpha is not None and stats.draft_acceptance_rate is not None:
        positions = " ".join(f"{share:.0%}" for share in stats.acceptance_by_position)
        rates = f"tau {stats.tau:.2f} tokens a step, alpha {stats.alpha:.1%}"
        _line("", f"{stats.steps} steps, {rates}, {stats.draft_acceptance_rate:.1%} of the drafted accepted")
        _line("", f"accepted by position: {positions or '-'}")
    if result.sources and result.note:
        _line("why", result.note)
    plain = result.plain_tokens_per_s
    _line("plain", "not measured yet" if plain is None else f"{plain:.1f} tokens/s expected without drafts")
    if stats.steps:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in stats.time_shares.items())
        began = f"; drafting began after {stats.draft_prefill_s:.2f} s" if stats.n_drafted else ""
        _line("time", shares + began)
    if stats.embed_s:
        _line("images", f"encoded in {stats.embed_s:.2f} s")
    _line("memory", f"{stats.peak_rss_bytes / 2**30:.2f} GiB at the peak")
    _line("models", result.target + (f", drafted by {result.draft}" if result.draft else ", alone"))
    _line("kernels", result.kernels)
    seed = "no seed: another run may write another text" if result.seed is None else f"seed {result.seed}"
    _line("ended", f"{ending}; {seed}")


def _energy(energy: Measurement, n_tokens: int) -> None:
    """Print the joules of a generation of `n_tokens` tokens; "unavailable" if nothing measured them."""
    if energy.joules is None:
        _line("energy", f"unavailable: {energy.reason} (see `edgespec energy`)")
        return
    estimated = "estimated: " if energy.estimated else ""
    gross, net = energy.per_token(n_tokens), energy.net_per_token(n_tokens)
    a_token = "" if gross is None else f", {gross:.3g} J a token"
    if energy.idle_w is None:
        beyond_idle = "idle power not known"
    else:
        net_a_token = "" if net is None else f", {net:.3g} J a token"
        beyond_idle = f"{energy.net_joules:.3g} J{net_a_token} beyond {energy.idle_w:.3g} W idle"
    figures = f"{energy.joules:.3g} J{a_token}; {beyond_idle}; {energy.joule_seconds:.3g} J s"
    _line("energy", f"{estimated}{figures}; {energy.source}")
    if energy.joules > 0 and energy.phases:
        shares = ", ".join(f"{phase} {joules / energy.joules:.1%}" for phase, joules in energy.phases.items())
        _line("", f"{estimated}{shares}")


def _line(label: str, text: str) -> None:
    print_line(label, text, to=err)


_ENDINGS = {"eog": "the model ended its answer", "stop": "a stop string came", "interrupted": "interrupted"}


def _ending(result: Result, n_ctx_train: int) -> str:
    n, ended = len(result.token_ids), result.stop_reason
    if ended == "length":
        return f"cut after {n:,} tokens: -n {2 * n}, or -n -1 for all"
    if ended == "context":
        return f"cut after {n:,} tokens: {full_context(result.prompt_tokens + n, n_ctx_train)}"
    return _ENDINGS[ended]


def full_context(n_ctx: int, n_ctx_train: int) -> str:
    """Return a sentence saying that a context of `n_ctx` tokens is full, and what to do."""
    larger = min(2 * n_ctx, n_ctx_train)
    full = f"the context of {n_ctx:,} is full"
    return (
        f"{full}; -c {larger} holds more"
        if larger > n_ctx + 1
        else f"{full}, all that the model was made for"
    )
