"""Prints a generation: the text as it comes, the statistics, the JSON object."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import sys
from typing import TYPE_CHECKING

from rich.text import Text

from edgespec.cli.console import OpenLine, err, out
from edgespec.cli.options import Explanation
from edgespec.decoding.records import Origin, Result, Stats, Token
from edgespec.decoding.tree import Tree, dump

if TYPE_CHECKING:
    from edgespec.drafting.proposal import DraftStep
    from edgespec.llama.weights import Model
    from edgespec.platform.metering import Measurement

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
    """Writes tokens to stdout as they come; colours only in a terminal."""

    def __init__(self, *, show_draft: bool, explain: bool = False) -> None:
        self._coloured = show_draft and out.is_terminal
        # In a terminal, lines about the steps would cut the text into pieces, so the text follows them.
        self._held: list[Token] | None = [] if explain and out.is_terminal else None
        self._n_written = 0

    def write(self, token: Token) -> None:
        """Write the text that became certain with `token`."""
        if self._held is not None:
            self._held.append(token)
            return
        self._write(token.text, COLOURS[token.origin] if self._coloured else "")

    def _write(self, text: str, colour: str) -> None:
        self._n_written += len(text)
        # Tabs go past rich, which would turn them into spaces.
        for part in re.split(r"(\t)", printable(text) if out.is_terminal else text):
            if colour and part != "\t":
                out.print(Text(part, style=colour), end="")
            else:
                sys.stdout.write(part)
        sys.stdout.flush()
        if text:
            OpenLine.is_open = out.is_terminal and not text.endswith("\n")

    def finish(self, text: str) -> None:
        """Write the rest of `text`, which may have been held back when the generation ended; end the line."""
        held, self._held = self._held or [], None
        for token in held:
            self.write(token)
        self._write(text[self._n_written :], "")
        if not text.endswith("\n"):
            sys.stdout.write("\n")
        sys.stdout.flush()
        OpenLine.is_open = False


def printable(text: str) -> str:
    """Return `text` without characters that steer a terminal."""
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
            before: Tree = ()
            for name, tree in step.passes_of_tree or [("drafted", step.proposed)]:
                if tree != before:
                    drawn = dump(tree, self._piece)
                    err.print(f"{name}:\n{drawn}")
                before = tree

    def _piece(self, token: int) -> str:
        return self._target.piece(token, special=True).decode(errors="replace")


def as_json(result: Result) -> str:
    """Return the JSON object of `edgespec run --json`; docs/statistics.md explains its fields."""
    stats = dataclasses.asdict(result.stats) | {"time_shares": result.stats.time_shares}
    fields = {
        "text": result.text,
        "tokens": len(result.token_ids),
        "token_ids": result.token_ids,
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": result.n_cached,
        "shifted_tokens": result.n_shifted,
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
    """Print the statistics to stderr: two lines, and what was asked for; `full`: a line for each subject.

    `n_ctx_train`: the longest context of the target.
    """
    err.print()
    ending = _ending(result, n_ctx_train)
    if full:
        _full_stats(result, ending)
    else:
        _line("speed", _short_speed(result) + ("" if result.stop_reason == "eog" else f"; {ending}"))
        _line("drafting", _short_drafting(result))
        _mode(result)
        if result.energy:
            _energy(result.energy, len(result.token_ids))
    if show_draft and err.is_terminal:
        _line("colours", *[(f"{name} ", colour) for name, colour in COLOURS.items()])


def _short_speed(result: Result) -> str:
    stats = result.stats
    parts = [f"{len(result.token_ids)} tokens in {stats.total_s:.2f} s"]
    if stats.generation_tokens_per_s is not None:
        parts.insert(0, f"{stats.generation_tokens_per_s:.1f} tokens/s")
    if result.times_plain is not None:
        plain = f"the {result.plain_tokens_per_s:.1f} tokens/s expected of plain decoding"
        parts.append(f"{result.times_plain:.2f} times {plain}")
    return ", ".join(parts)


def _short_drafting(result: Result) -> str:
    stats = result.stats
    if not stats.n_drafted or stats.draft_acceptance_rate is None:
        return result.note
    share = f"{stats.draft_acceptance_rate:.0%}".replace("%", " %")
    return f"{stats.n_accepted} of {stats.n_drafted} drafted tokens accepted ({share})"


def _mode(result: Result) -> None:
    if result.n_shifted:
        _line("mode", f"not exact: {said_shifted(result.n_shifted)}")
    elif not result.exact:
        _line("mode", f"not exact: the target saw {result.target_share:.0%} of the tokens".replace("%", " %"))


def said_shifted(n_shifted: int) -> str:
    """Return the line about tokens that were read after another text (`Result.n_shifted`)."""
    return f"{n_shifted:,} tokens of the prompt were read after another text"


def _full_stats(result: Result, ending: str) -> None:
    stats = result.stats
    _line("speed", _speed(result))
    _mode(result)
    _line("prompt", _prompt(result))
    if stats.n_drafted:
        _line("drafting", _drafting(stats))
        positions = " ".join(f"{share:.0%}" for share in stats.acceptance_by_position)
        _line("", f"accepted by position: {positions or '-'}")
    _line("why", result.note)
    if stats.steps:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in stats.time_shares.items())
        began = f"; drafting began after {stats.draft_prefill_s:.2f} s" if stats.n_drafted else ""
        _line("time", shares + began)
    if result.energy:
        _energy(result.energy, len(result.token_ids))
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


def _line(label: str, *parts: str | tuple[str, str]) -> None:
    err.print(Text.assemble((f"{label:9}", "dim"), *parts))


_ENDINGS = {"eog": "the model ended its answer", "stop": "a stop string came", "interrupted": "interrupted"}


def _ending(result: Result, n_ctx_train: int) -> str:
    n, ended = len(result.token_ids), result.stop_reason
    if ended == "length":
        return f"cut after {n:,} tokens: -n {2 * n}, or -n -1 for all"
    if ended == "context":
        return f"cut after {n:,} tokens: {full_context(result.prompt_tokens + n, n_ctx_train)}"
    return _ENDINGS[ended]


def full_context(n_ctx: int, n_ctx_train: int) -> str:
    """Say that a context of `n_ctx` tokens is full, and what to do."""
    larger = min(2 * n_ctx, n_ctx_train)
    full = f"the context of {n_ctx:,} is full"
    return (
        f"{full}; -c {larger} holds more"
        if larger > n_ctx + 1
        else f"{full}, all that the model was made for"
    )


def _speed(result: Result) -> str:
    stats = result.stats
    parts = [f"{len(result.token_ids)} tokens in {stats.total_s:.2f} s"]
    if stats.generation_tokens_per_s is not None:
        parts.insert(0, f"{stats.generation_tokens_per_s:.1f} tokens/s")
    if stats.ttft_s is not None:
        parts.append(f"the first after {stats.ttft_s:.2f} s")
    return ", ".join(parts)


def _prompt(result: Result) -> str:
    rate = result.stats.prompt_tokens_per_s
    return f"{result.prompt_tokens} tokens" + (f", {rate:.1f} tokens/s" if rate is not None else "")


def _drafting(stats: Stats) -> str:
    if stats.alpha is None or stats.draft_acceptance_rate is None or stats.tau is None:
        return "nothing was drafted"
    return (
        f"{stats.steps} steps, tau {stats.tau:.2f} tokens a step, alpha {stats.alpha:.1%}, "
        f"{stats.n_accepted} of {stats.n_drafted} drafted accepted ({stats.draft_acceptance_rate:.1%})"
    )
