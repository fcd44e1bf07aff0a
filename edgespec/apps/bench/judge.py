"""Measures the accuracy of a comparison's targets, each against its best quantization, in other processes.

    FOLDER/accuracy-TARGET+KERNELS.json     perplexity, KL divergence, top-1 agreement on a text (accuracy.py)
    FOLDER/humaneval-TARGET+KERNELS.json    which of HumanEval's tests its answers pass (humaneval.py)
    FOLDER/humaneval-TARGET+DRAFT+VARIANT+KERNELS.json      the same for a variant that is not exact

A result is measured again only if something it depends on has changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from edgespec.apps.bench.accuracy import WINDOW, Reference, Score, score, text_tokens
from edgespec.apps.bench.humaneval import Problem, ProblemResult, pass_at_1
from edgespec.apps.bench.runs import AccuracyScore, Cell, ProblemsSolved, WorkProgressFn, as_json
from edgespec.apps.bench.variants import Variant
from edgespec.engine.engine import Engine
from edgespec.errors import EdgespecError
from edgespec.llama.choices import KernelsChoice
from edgespec.llama.gguf_header import check_model_file
from edgespec.llama.kernels import STOCK
from edgespec.llama.kernels import load as load_kernels
from edgespec.llama.weights import Model
from edgespec.models.footprint import fits_in_memory
from edgespec.models.quantizations import FileFacts, ModelFile
from edgespec.platform.child import ReportingChild, answer, say
from edgespec.platform.cpu import default_threads
from edgespec.platform.files import write_atomically

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class AccuracyJudge:
    """Judges the targets of a comparison."""

    folder: Path
    files: Sequence[ModelFile]
    """The targets."""
    facts: Mapping[str, FileFacts]
    kernels: KernelsChoice
    n_threads: int | None
    on_progress: WorkProgressFn
    on_message: Callable[[str], None]
    """Called with the reason if a target cannot be judged."""
    references: Sequence[ModelFile] = ()
    """Other files that the targets are judged by: what they were made from."""

    def texts(self, text: str, n_tokens: int) -> dict[str, AccuracyScore]:
        """Return each target's accuracy on `text` by name, without those that cannot be judged."""
        found: dict[str, AccuracyScore] = {}
        for group in groups((*self.files, *self.references), self.facts, self.on_message):
            found |= self._group(group, text, n_tokens)
        return found

    def _group(self, group: Sequence[ModelFile], text: str, n_tokens: int) -> dict[str, AccuracyScore]:
        """Return the accuracy of the quantizations of one model; the first readable one is the reference."""
        hashes = [(file.name, self.facts[file.name].sha256) for file in group]
        key = _key(text, n_tokens, self.kernels, *hashes)
        kept = self.folder / f"accuracy-{group[0].name}+kernels-{self.kernels}.json"
        if stored := _read(kept, key, dict[str, AccuracyScore]):
            return stored
        request = _TextRequest(
            [str(file.path) for file in group],
            text,
            n_tokens,
            self.kernels,
            self.n_threads or default_threads(),
            str(self.folder),
        )
        found: dict[str, AccuracyScore] = {}
        for kind, value in self._ask("_score_in_child", request, f"accuracy of {group[0].name} ..."):
            if kind == "progress":
                at, done, total = value
                self.on_progress(f"accuracy of {group[at].name}", done, total)
            elif kind == "failed":
                at, why = value
                self.on_message(_failure(group[at], why))
            else:
                at, kernels, scored = value[0], value[1], msgspec.convert(value[2], Score)
                found[group[at].name] = AccuracyScore(
                    target=group[at].name,
                    reference=next(iter(found), group[at].name),
                    kernels=kernels,
                    n_tokens=scored.n_tokens,
                    perplexity=scored.perplexity,
                    kl=scored.kl,
                    kl_error=scored.kl_error,
                    top1=scored.top1,
                )
        if len(found) == len(group):
            _keep(kept, key, found)
        return found

    def human_eval(
        self,
        accuracy: Mapping[str, AccuracyScore],
        problems: Sequence[Problem],
        drafts: Mapping[str, ModelFile],
    ) -> dict[str, AccuracyScore]:
        """Return `accuracy` with the number of problems that each target solves.

        `drafts`: draft models by the target's name. They save time and change no answer.
        """
        found = dict(accuracy)
        for file in self.files:
            if file.name not in found:
                self.on_message(f"HumanEval by {file.name}: left out, as its score on the text is missing")
                continue
            judged = self._problems(file, problems, drafts.get(file.name))
            if judged is not None:
                n_passed = sum(one.passed for one in judged)
                found[file.name] = replace(found[file.name], passed=n_passed, n_problems=len(judged))
        return found

    def _problems(
        self,
        file: ModelFile,
        problems: Sequence[Problem],
        draft: ModelFile | None,
        variant: Variant | None = None,
    ) -> list[ProblemResult] | None:
        """Return whether each problem was solved; None if not all could be tried.

        `variant`: a variant that is not exact, so its answers depend on the draft; None: the target's own
        answers.
        """
        key = _key(*problems, self.kernels, self.facts[file.name].sha256)
        name = file.name
        if variant and draft:
            key = _key(key, self.facts[draft.name].sha256, variant)
            name = f"{file.name}+{draft.name}+{variant.name}"
        kept = self.folder / f"humaneval-{name}+kernels-{self.kernels}.json"
        judged = _read(kept, key, list[ProblemResult]) or []
        left = problems[len(judged) :]
        if not left:
            return judged
        request = _ProblemsRequest(
            str(file.path),
            str(draft.path) if draft else None,
            list(left),
            self.kernels,
            self.n_threads,
            variant,
        )
        what = f"HumanEval by {file.name}{f', {variant.name}' if variant else ''}"
        self.on_progress(what, len(judged), len(problems))
        for _, value in self._ask("_solve_in_child", request, what):
            judged.append(msgspec.convert(value, ProblemResult))
            _keep(kept, key, judged)  # after each problem: all of them may take hours
            self.on_progress(what, len(judged), len(problems))
        return judged if len(judged) == len(problems) else None

    def variants(
        self,
        problems: Sequence[Problem],
        cells: Sequence[Cell],
        variants: Sequence[Variant],
        drafts: Sequence[ModelFile],
    ) -> list[ProblemsSolved]:
        """Return how many problems each cell with one of `drafts` solves in the inexact `variants`."""
        found = []
        by_name = {file.name: file for file in (*self.files, *drafts)}
        for cell in cells:
            if not cell.runs or cell.draft not in by_name:
                continue
            for variant in variants:
                judged = self._problems(by_name[cell.target], problems, by_name[cell.draft], variant)
                if judged is None:
                    continue
                n_tokens = sum(one.tokens for one in judged)
                share = sum(one.target_share * one.tokens for one in judged) / n_tokens if n_tokens else 1.0
                n_passed = sum(one.passed for one in judged)
                found.append(
                    ProblemsSolved(
                        cell.target, cell.draft, cell.kernels, variant.name, n_passed, len(judged), share
                    )
                )
        return found

    def _ask(self, function: str, request: object, what: str) -> Iterator[tuple[str, Any]]:
        conversation = ReportingChild("edgespec.apps.bench.judge", function, request)
        yield from conversation
        ended = conversation.ended
        if ended.code != 0:
            why = ended.complaint or f"its process ended with code {ended.code}"
            self.on_message(f"{what}: {why}")


def groups(
    files: Sequence[ModelFile],
    facts: Mapping[str, FileFacts],
    on_message: Callable[[str], None] = lambda _line: None,
) -> list[list[ModelFile]]:
    """Return the files grouped by the model that they are quantizations of, the best of each group first.

    Files belong together if the name in their headers, which quantizing keeps, and their shapes are equal;
    the shape alone would not tell a fine-tuned model apart. The best is the largest file that was not made
    from another. Files that are no models are left out, and `on_message` is called with the reason.
    """
    found: dict[tuple[str, str, int, int, int], list[ModelFile]] = {}
    for file in files:
        try:
            header = check_model_file(file.path)
        except EdgespecError as error:
            on_message(_failure(file, str(error)))
            continue
        model = (header.name, header.architecture, header.n_layer, header.n_embd, header.n_vocab)
        found.setdefault(model, []).append(file)
    for group in found.values():
        group.sort(key=lambda file: (bool(file.made_from), -facts[file.name].size))
    return list(found.values())


def _failure(file: ModelFile, why: str) -> str:
    return f"accuracy of {file.name}: {why.replace(str(file.path), file.name)}"


def _key(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


def _read(file: Path, key: str, kind: type[_T]) -> _T | None:
    """Return the stored value; None if it has another key, or is missing or damaged."""
    try:
        stored_key, value = msgspec.json.decode(file.read_bytes(), type=tuple[str, Any])
        return msgspec.convert(value, kind) if stored_key == key else None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _keep(file: Path, key: str, value: object) -> None:
    write_atomically(file, as_json((key, value)) + b"\n")


# ---- their processes ----


@dataclass(frozen=True, slots=True)
class _TextRequest:
    paths: list[str]
    text: str
    n_tokens: int
    kernels: KernelsChoice
    n_threads: int
    folder: str


@dataclass(frozen=True, slots=True)
class _ProblemsRequest:
    target: str
    draft: str | None
    problems: list[Problem]
    kernels: KernelsChoice
    n_threads: int | None
    variant: Variant | None = None


def _score_in_child() -> int:
    return answer(_TextRequest, _score_all)


def _score_all(request: _TextRequest) -> None:
    with Reference(request.folder) as reference:
        for at, path in enumerate(request.paths):
            try:
                _score(request, at, Path(path), reference)
            except EdgespecError as error:  # the other files may work
                say("failed", (at, str(error)))


def _score(request: _TextRequest, at: int, path: Path, reference: Reference) -> None:
    header = check_model_file(path)
    fits_in_memory([(header, WINDOW)])
    with Model(path, kernels=request.kernels == "auto", header=header) as model:
        scored = score(
            model,
            text_tokens(model, request.text, request.n_tokens),
            n_threads=request.n_threads,
            reference=reference,
            on_progress=lambda done, total: say("progress", (at, done, total)),
        )
        kernels = load_kernels().name if model.uses_kernels else STOCK
    say("score", (at, kernels, scored))


def _solve_in_child() -> int:
    return answer(_ProblemsRequest, _solve)


def _solve(request: _ProblemsRequest) -> None:
    with Engine(
        request.target,
        request.draft,
        drafter="auto" if request.draft else "suffix",
        n_threads=request.n_threads,
        kernels=request.kernels,
    ) as engine:
        variant = request.variant
        for judged in pass_at_1(
            engine,
            request.problems,
            cascade=variant.cascade if variant else None,
            lenience=variant.lenience if variant else 1.0,
        ):
            say("judged", judged)
