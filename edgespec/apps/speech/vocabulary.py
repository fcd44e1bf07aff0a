"""Tokens that begin a window's text, and those that the rules are about, under a transcription's options."""

from __future__ import annotations

from edgespec.apps.speech.languages import LANGUAGES
from edgespec.apps.speech.options import SpeechOptions
from edgespec.apps.speech.rules import RuleTokens
from edgespec.apps.speech.tokenizer import SECONDS_PER_TIMESTAMP, WhisperTokenizer
from edgespec.errors import UsageError

_ENGLISH = "the model knows English alone; choose a multilingual one, such as whisper-base"


def start_tokens(tokenizer: WhisperTokenizer, options: SpeechOptions, language: str) -> list[int]:
    """Return the tokens with which a window's text begins: start, language, task."""
    translate = options.task == "translate"
    return tokenizer.start(language, translate=translate, timestamps=options.timestamps)


def check_language(tokenizer: WhisperTokenizer, options: SpeechOptions) -> None:
    """Raise UsageError if the model does not know the language or the task."""
    language = options.language
    if tokenizer.is_multilingual:
        if language is not None and language not in tokenizer.languages:
            problem = f"this model does not know {LANGUAGES[language]}; whisper-large-v3 does"
            raise UsageError(problem, field="language", value=language)
    else:
        check_english(options)


def check_english(options: SpeechOptions) -> None:
    """Raise UsageError for another language or task than a model has that knows English alone."""
    if options.language not in (None, "en"):
        raise UsageError(_ENGLISH, field="language", value=options.language)
    if options.task == "translate":
        raise UsageError(f"nothing can be translated: {_ENGLISH}")


def rule_tokens(tokenizer: WhisperTokenizer, options: SpeechOptions) -> RuleTokens:
    """Return what the rules need to know of the tokenizer, under these options."""
    latest = options.max_initial_timestamp
    return RuleTokens(
        n_vocab=tokenizer.n_vocab,
        end=tokenizer.eot,
        first_timestamp=tokenizer.timestamp_begin,
        no_timestamps=tokenizer.no_timestamps,
        suppressed=tokenizer.suppressed,
        blank=tuple(tokenizer.encode(" ")),
        last_initial=None if latest is None else round(latest / SECONDS_PER_TIMESTAMP),
        timed=options.timestamps,
    )
