"""`edgespec models pair`: tells whether a draft would help a target, even with another vocabulary."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec.cli.completion import complete_model
from edgespec.cli.console import err, out, print_line
from edgespec.cli.options import JsonOption, read_text
from edgespec.cli.progress import pull_named
from edgespec.errors import EdgespecError, UsageError
from edgespec.models.suites import DEFAULT, load_suite

if TYPE_CHECKING:
    from edgespec.drafting.foreign.overlap import Overlap

_MEASURED = ("code", "chat", "reasoning")  # categories of the suite, a prompt of each
_MEASURED_TOKENS = 64


def pair_command(
    target: Annotated[
        str,
        typer.Argument(
            help="The model that decides: a file, a name, or hf:...", autocompletion=complete_model
        ),
    ],
    draft: Annotated[
        str,
        typer.Argument(help="The small model that would draft for it.", autocompletion=complete_model),
    ],
    *,
    text: Annotated[
        Path | None,
        typer.Option(
            "--text", help="UTF-8 text like yours, to weigh tokens by.", show_default="the shipped prompts"
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run both models on a few prompts: the acceptance is measured.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Compare two models' vocabularies: should the one draft for the other?

    Without --measure only the tokenizers are loaded, and what is expected is an estimate.
    """
    from edgespec.drafting.foreign.overlap import suite_text
    from edgespec.llama.gguf_header import read_header
    from edgespec.models.resolve import resolve

    words = suite_text() if text is None else _read(text)
    pull_named(target, draft)
    paths = resolve(target), resolve(draft)
    for name, path in zip((target, draft), paths, strict=True):
        if read_header(path).only_drafts:
            raise UsageError(f"{name}: a draft head, which has no vocabulary of its own; name a model")
    with err.status("comparing the vocabularies"):
        overlap = _overlap(*paths, words)
    if measure:
        with err.status("running both models"):
            overlap = _measured(*paths, overlap)
    if json:
        out.print_json(data={"target": target, "draft": draft, **_described(overlap)})
    else:
        _print(overlap)


def _overlap(target: Path, draft: Path, words: str) -> Overlap:
    from edgespec.drafting.foreign.overlap import find_overlap
    from edgespec.drafting.foreign.vocabulary_map import map_vocabularies
    from edgespec.llama.weights import Model

    with Model(target, vocab_only=True) as ours, Model(draft, vocab_only=True) as theirs:
        return find_overlap(ours, theirs, map_vocabularies(ours, theirs), words)


def _measured(target: Path, draft: Path, overlap: Overlap) -> Overlap:
    from edgespec.drafting.foreign.overlap import measure_agreement, with_agreement
    from edgespec.llama.weights import Model
    from edgespec.platform.cpu import default_threads

    chosen = load_suite(DEFAULT).select(_MEASURED, 1).prompts
    with Model(target) as ours, Model(draft) as theirs:
        if not (ours.can_rewind and theirs.can_rewind):
            raise EdgespecError("--measure: one of the models cannot take tokens back")
        prompts = [
            ours.tokenize_chat([{"role": "user", "content": prompt.text}])
            if ours.chat_template
            else ours.tokenize(prompt.text, add_special=True, parse_special=False)
            for prompt in chosen
        ]
        shares = measure_agreement(
            ours, theirs, prompts, n_tokens=_MEASURED_TOKENS, n_threads=default_threads()
        )
    return with_agreement(overlap, shares)


def _described(overlap: Overlap) -> dict[str, Any]:
    return {
        **asdict(overlap),
        "acceptance": overlap.acceptance,
        "worth": overlap.worth,
        "advice": overlap.advice,
    }


def _print(overlap: Overlap) -> None:
    print_line("target", f"{overlap.n_target:,} tokens ({overlap.types[0]})")
    print_line("draft", f"{overlap.n_draft:,} tokens ({overlap.types[1]}), {overlap.cost:.0%} of its size")
    if overlap.equal:
        print_line("shared", "the vocabularies are the same: nothing has to be translated")
    else:
        print_line("shared", f"{overlap.n_shared:,} tokens; {overlap.coverage:.0%} of a text's are such")
        print_line(
            "text",
            f"{overlap.compression:.2f} tokens of the draft for one of the target, {overlap.same:.0%} cut "
            f"the same (over {overlap.n_tokens:,})",
        )
    how = "estimated from the vocabularies" if overlap.measured is None else "measured"
    print_line("accepted", f"{overlap.acceptance:.0%} of the drafted tokens, {how}")
    print_line("advice", overlap.advice)


def _read(file: Path) -> str:
    text = read_text(file)
    if not text.strip():
        raise UsageError("empty; give a text of a few lines or more", field="text", value=file)
    return text
