"""First stage of `edgespec draft make`: the target writes texts that drafts are trained and evaluated on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, zip_longest
from pathlib import Path

import numpy as np

from edgespec.apps.bench.suites import Prompt, evenly, load_suite
from edgespec.apps.forge.dataset import (
    BUILT_IN,
    FROM_FILE,
    FROM_HISTORY,
    READ,
    REJECTED,
    Dataset,
    TrainingText,
    is_held_out,
)
from edgespec.apps.forge.prompts import TextPrompt, TokenPrompt, built_in
from edgespec.apps.forge.request import (
    LEAST_TOKENS,
    DraftRequest,
    StageContext,
    is_suite,
    text_of,
)
from edgespec.apps.forge.writing import LONGEST_PROMPT, TargetWriter, WritingRun, WritingSettings
from edgespec.decoding.session import n_common
from edgespec.drafting.history import History
from edgespec.drafting.rejections import RejectedPlaces, RejectedText
from edgespec.errors import EdgespecError, MessageFn
from edgespec.llama.gguf_header import tokenizer_fingerprint
from edgespec.llama.weights import Model
from edgespec.models.hub import format_size

# ---- the user's own prompts and texts ----
#
#     rejected places texts      whole texts; the target reads them before all others
#     the history     prompts    documents up to their last answer: the target answers anew
#                     texts      whole documents: the target only reads them
#     a text file     prompts    beginnings of passages, which the target continues
#                     texts      whole passages
#     a .jsonl file   prompts    of a suite (suites.py)
#
# A prompt and a text that begin alike are both held out, or neither.

PASSAGE = 512

CONTEXT = 64
"""Tokens at the beginning of a passage that are its prompt."""

LEAST = 2_000
"""Fewest tokens of a history, rejected texts included, that is worth training on."""

PLACE_WEIGHT = 4.0
"""Weight in training of a rejected place where the target was sure; of other tokens 1."""

Prompts = Iterator[TextPrompt | TokenPrompt]


def all_prompts(
    model: Model,
    files: Sequence[Path] = (),
    *,
    from_history: bool = False,
    rejected: Sequence[RejectedText] = (),
) -> Prompts:
    """Yield the user's prompts, the user's texts and built-in prompts in turns; at last only built-in ones.

    First of all come some of the user's texts that are held out. `rejected`: texts that are read apart from
    these, and may be in the history too. Raises EdgespecError for a history that is too small, and UsageError
    while a file is read that is no text.
    """
    n_rejected = sum(len(text.tokens) for text in rejected)
    known = {tuple(text.tokens.tolist()): text.n_prompt for text in rejected}
    own = [HistoryTexts(model, least=LEAST - n_rejected, n_prompts=known)] if from_history else []
    prompts = in_turns(*(file_prompts(path, model) for path in files), *(one.prompts() for one in own))
    texts = in_turns(*(file_texts(path, model) for path in files), *(one.texts() for one in own))
    held_out = filter(_is_held_out, chain.from_iterable(one.texts() for one in own))
    return chain(islice(held_out, _N_HELD_OUT), in_turns(prompts, texts, built_in()))


def rejected_texts(texts: Sequence[RejectedText], longest: int = LONGEST_PROMPT) -> Iterator[TokenPrompt]:
    """Yield the texts, newest first, in passages of at most `longest` tokens, with weights of their tokens.

    A place weighs more the surer the target was of its likeliest token there: unpredictable ones teach
    little.
    """
    for text in reversed(texts):
        weights = np.ones(len(text.tokens))
        weights[text.places] += (PLACE_WEIGHT - 1.0) * text.probs[:, 0]
        yield from _passages(text.tokens.tolist(), text.n_prompt, longest, REJECTED, weights.tolist())


def in_turns(*sources: Iterable[TextPrompt | TokenPrompt]) -> Prompts:
    """Yield the prompts of the sources in turns, until all have ended."""
    return (found for one_of_each in zip_longest(*sources) for found in one_of_each if found is not None)


class RejectedTexts:
    """The texts with rejected drafts for which a dataset has room, and those that it has already."""

    def __init__(self, dataset: Dataset, budget: int) -> None:
        """Read the newest, up to half of `budget` bytes.

        Raises EdgespecError for a file of another model, and if it cannot be read.
        """
        self._dataset, self._budget = dataset, budget
        self.stored = RejectedPlaces(dataset.target.sha256).texts()
        parts = list(rejected_texts(self.stored))
        sizes = [_expected_bytes(part, dataset.target.n_embd) for part in parts]
        parts = parts[: int(np.searchsorted(np.cumsum(sizes), budget // 2, "right"))]
        known = {text.key for text in dataset.texts()}
        self._wanted = {part.key for part in parts}
        self.unread = [part for part in parts if part.key not in known]
        """Passages that the dataset has not, the newest first."""
        self._needed = sum(_expected_bytes(part, dataset.target.n_embd) for part in self.unread)

    def prompts(self, writer: Dataset, on_message: MessageFn) -> Prompts:
        """Return the unread passages in turns with new built-in prompts.

        If the budget has no room for them, texts are deleted, and only the passages are returned. Raises
        OSError.
        """
        if not self.unread:
            return iter(())
        if n_gone := writer.make_room(self._needed, self._expendable()):
            n = len(self.unread)
            on_message(f"{n_gone:,} earlier texts made room for {n:,} in which drafts were rejected")
        if n_gone or not writer.has_room(self._needed):
            return iter(self.unread)
        known = {text.key for text in self._dataset.texts()}
        new = (prompt for prompt in built_in() if not (prompt.key in known or _is_held_out(prompt)))
        return in_turns(self.unread, islice(new, len(self.unread)))

    def _expendable(self) -> Sequence[Callable[[TrainingText], bool]]:
        """Return what may be deleted, kind by kind; a third of the budget is the built-in texts'."""
        left = sum(text.features.nbytes for text in self._dataset.texts() if text.source == BUILT_IN)

        def is_spare(text: TrainingText) -> bool:
            nonlocal left
            if text.source != BUILT_IN or text.held_out or left <= self._budget // 3:
                return False
            left -= text.features.nbytes
            return True

        return (
            lambda text: text.source == REJECTED and text.key not in self._wanted,
            lambda text: text.source in (READ, FROM_HISTORY, FROM_FILE) and not text.held_out,
            is_spare,
        )


def _expected_bytes(text: TokenPrompt, n_embd: int) -> int:
    n_rows = len(text.tokens) - max(0, text.n_prompt - WritingSettings().window)
    return 2 * n_embd * n_rows + 8 * len(text.tokens) + _BYTES_OF_TEXT


class HistoryTexts:
    """The documents of the history that have a model's tokenizer."""

    def __init__(
        self,
        model: Model,
        history: History | None = None,
        *,
        least: int = LEAST,
        n_prompts: Mapping[tuple[int, ...], int] | None = None,
    ) -> None:
        """Read the history. Raises EdgespecError for one of fewer than `least` tokens.

        `n_prompts`: number of prompt tokens by document, where known, so that a text that is stored
        elsewhere too is held out in both places or in neither.
        """
        self._n_prompts = n_prompts or {}
        history = history or History(tokenizer_fingerprint(model.header))
        stored = history.load(n_vocab=model.n_vocab)
        ends = np.flatnonzero(stored < 0)
        documents = [part[part >= 0].tolist() for part in np.split(stored, ends)]
        self.documents: list[list[int]] = [tokens for tokens in documents if len(tokens) > 1]
        self.n_tokens = sum(map(len, self.documents))
        if self.n_tokens < least:
            raise EdgespecError(
                f"the history has {self.n_tokens:,} tokens of the kind that {model.name} writes; "
                f"at least {LEAST:,} are needed: use the model for a while, or leave the history out"
            )
        self._opening, self._mark = _template_tokens(model)

    def prompts(self) -> Iterator[TokenPrompt]:
        """Yield beginnings for the target to continue, newest first."""
        for tokens in reversed(self.documents):
            n_prompt = self._n_prompt(tokens)
            # A later turn of a conversation is stored without the turns before: it cannot be answered.
            if tokens[:1] == self._opening[:1] or not self._opening:
                yield TokenPrompt(FROM_HISTORY, tuple(tokens[:n_prompt]), n_prompt)

    def texts(self, longest: int = LONGEST_PROMPT) -> Iterator[TokenPrompt]:
        """Yield the documents, newest first, in passages of at most `longest` tokens."""
        for tokens in reversed(self.documents):
            yield from _passages(tokens, self._n_prompt(tokens), longest)

    def _n_prompt(self, tokens: Sequence[int]) -> int:
        """Return where a document's last answer begins; without an answer, where its first part ends."""
        if known := self._n_prompts.get(tuple(tokens)):
            return known
        n = len(self._mark)
        for end in range(len(tokens) - 1, n - 1, -1):
            if n and tokens[end - n : end] == self._mark:
                return end
        return max(1, min(CONTEXT, len(tokens) // 2))


def file_prompts(path: Path, model: Model) -> Prompts:
    """Yield the prompts of a suite, or the beginnings of a text's passages. Raises UsageError."""
    if is_suite(path):
        yield from (TextPrompt(FROM_FILE, (prompt.text,)) for prompt in load_suite(str(path)).prompts)
    for text in file_texts(path, model):
        yield TokenPrompt(FROM_FILE, text.tokens[: text.n_prompt], text.n_prompt)


def file_texts(path: Path, model: Model) -> Iterator[TokenPrompt]:
    """Yield the passages of a text; a suite has none. Raises UsageError."""
    if not is_suite(path):
        tokens = model.tokenize(text_of(path), add_special=False, parse_special=False)
        yield from _passages(tokens, min(CONTEXT, max(1, len(tokens) // 2)), PASSAGE)


def _passages(
    tokens: Sequence[int],
    n_prompt: int,
    longest: int,
    source: str = READ,
    weights: Sequence[float] = (),
) -> Iterator[TokenPrompt]:
    """Yield passages of at most `longest` tokens, each with the last CONTEXT tokens of the one before."""
    start = 0 if n_prompt < longest else n_prompt - longest // 2  # the end of a long prompt
    while True:
        end = min(start + longest, len(tokens))
        if end > n_prompt:
            yield TokenPrompt(source, tuple(tokens[start:end]), n_prompt - start, tuple(weights[start:end]))
        if end == len(tokens):
            return
        start += longest - CONTEXT
        n_prompt = start + CONTEXT


def _template_tokens(model: Model) -> tuple[list[int], list[int]]:
    """Return the tokens that begin a conversation, and those between a question and its answer.

    Both are empty without a chat template.
    """
    if model.chat_template is None:
        return [], []
    one, other = (
        model.tokenize_chat([{"role": "user", "content": content}]) for content in ("Why?", "Tell me.")
    )
    n_end = n_common(one[::-1], other[::-1])
    return one[: n_common(one, other)], one[len(one) - n_end :]


_BYTES_OF_TEXT = 1024  # beside its tokens and hidden states
_N_HELD_OUT = 4  # texts to evaluate training on, however few are written


def tokens_wanted(request: DraftRequest, dataset: Dataset, *, learns: bool) -> int:
    """Return how many tokens the dataset is to have, at the beginning of a run.

    `learns`: the training is of a head that learns from its mistakes.
    """
    tokens = request.data_tokens or request.default_tokens
    if learns and not request.names_more:
        rejected = RejectedTexts(dataset, request.budget)
        news = sum(len(text.tokens) - text.n_prompt + request.answer_tokens for text in rejected.unread)
        tokens = news if rejected.stored else LEAST_TOKENS
    return tokens + (dataset.n_answer_tokens() if request.prompts or request.from_history else 0)


def write_texts(
    model: Model,
    dataset: Dataset,
    request: DraftRequest,
    until: int,
    context: StageContext,
    *,
    learns: bool = False,
) -> None:
    """Let `model` write until the dataset has `until` tokens, or its budget is used up.

    `learns`: a head learns from its mistakes; their texts are read first, and no more is written than they
    need, unless tokens or files are asked for. Raises EdgespecError, and KeyboardInterrupt
    when it is stopped; what was written by then is stored.
    """

    def show(run: WritingRun) -> None:
        detail = f"{run.tokens_per_s:.0f} tokens/s, {run.share * until:,.0f} tokens"
        context.on_progress("writing", run.share, detail)

    rejected = RejectedTexts(dataset, request.budget) if request.from_history else None
    stored = rejected.stored if rejected else ()
    prompts = all_prompts(model, request.prompts, from_history=request.from_history, rejected=stored)
    target_writer = TargetWriter(
        model,
        WritingSettings(n_predict=request.answer_tokens),
        n_threads=request.evaluation.n_threads,
        interrupt=context.signals.interrupt if context.signals else None,
        on_message=context.on_message,
    )
    with target_writer, dataset.writer(request.budget) as writer:
        if rejected and rejected.stored:
            n_before = dataset.n_answer_tokens()
            first = rejected.prompts(writer, context.on_message)
            until -= n_before - dataset.n_answer_tokens()  # what made room is not written again
            prompts = first if learns and not request.names_more else chain(first, prompts)
        # Some held-out prompts come first, so that each dataset has texts to evaluate on.
        prompts = chain(islice(filter(_is_held_out, built_in()), _N_HELD_OUT), prompts)
        run = target_writer.fill(writer, prompts, until=until, on_progress=show)
        if run.full:
            budget = f"the budget of {format_size(request.budget)} for the data of {dataset.target.name}"
            context.on_message(f"{budget} is used up; a larger one lets the target write more")


def _is_held_out(prompt: TextPrompt | TokenPrompt) -> bool:
    return is_held_out(prompt.key)


def evaluation_prompts(dataset: Dataset, n: int) -> tuple[Prompt, ...]:
    """Return `n` held-out prompts: up to half of them the user's own, then built-in ones."""
    own = [text for text in dataset.texts(held_out=True) if text.source != BUILT_IN and text.n_prompt > 1]
    found = [
        Prompt(f"{text.key:016x}", text.source, tokens=tuple(map(int, text.tokens[: text.n_prompt])))
        for text in evenly(own, n // 2)
    ]
    for prompt in islice(filter(_is_held_out, built_in()), n - len(found)):
        found.append(Prompt(f"{prompt.key:016x}", BUILT_IN, text=prompt.turns[-1]))
    return tuple(found)
