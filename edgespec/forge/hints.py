"""Says, once a day at most, that a better draft could be made for a target, and what to type.

    cache_root()/hints.json    the day on which it was last said

It pays where the user's history is long enough to train a draft on, or where drafts gained little.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

import msgspec

from edgespec.decoding.records import Stats
from edgespec.engine.engine import Engine
from edgespec.errors import EdgespecError
from edgespec.models.made_drafts import MadeDraft, drafts_for
from edgespec.models.registry import load_registry
from edgespec.platform.files import cache_root
from edgespec.platform.kept_file import KeptFile, parse_struct
from edgespec.platform.messages import MessageFn

LEAST_HISTORY = 20_000
"""Tokens of the history from which on a draft is trained on it: about 50 prompts with their answers."""

LOW_TAU = 1.4
"""Tokens a step below which drafts gained little."""

_LEAST_STEPS = 64  # fewer say little about a draft


@dataclass(frozen=True, slots=True)
class _Said:
    day: date
    """When the hint was last given."""


def tell_of_better_draft(
    engine: Engine, stats: Stats, on_message: MessageFn, *, today: date | None = None
) -> None:
    """Tell `on_message` in one line if a better draft could be made for the engine's target.

    Called when the text is complete; `stats` are its statistics, and the engine may be closed by then.
    Silent if it was said on this day already, and where nothing can be kept in the cache.
    """
    if not engine.target.can_rewind:  # nothing drafts for it
        return
    today = today or date.today()
    try:
        kept = KeptFile(
            cache_root() / "hints.json", lambda data: parse_struct(data, _Said), lock=".hints.lock"
        )
        said = kept.read()
        if said and said.day == today:
            return
        made = drafts_for(engine.target_name)
        entry = load_registry().entries.get(engine.draft_name or "")
        is_made = bool(made) or (entry is not None and entry.is_packed)
        if line := better_draft(engine.target_name, made, engine.n_earlier_tokens, stats, is_made=is_made):
            kept.update(lambda _: msgspec.json.encode(_Said(today)))
            on_message(line)
    except (EdgespecError, OSError):
        return


def better_draft(
    target: str, made: Sequence[MadeDraft], n_history: int, stats: Stats, *, is_made: bool
) -> str | None:
    """Return the line that says that a better draft could be made; None where nothing suggests it.

    `made`: the drafts that were made for `target` here. `n_history`: tokens of the history. `is_made`:
    whether what drafts was made for `target`, here or elsewhere.
    """
    wanted = "" if target == load_registry().pairs["default"].target else f" --target {shlex.quote(target)}"
    if n_history >= LEAST_HISTORY and not any(draft.uses_own_texts for draft in made):
        return (
            f"a draft trained on your own texts may be faster: `edgespec draft make{wanted} --from-history "
            "--when-idle` makes one while the machine is idle"
        )
    if stats.tau is not None and stats.steps >= _LEAST_STEPS and stats.tau < LOW_TAU and not is_made:
        return (
            f"drafts gained little here ({stats.tau:.1f} tokens a step); one made for this target may gain "
            f"more: `edgespec draft make{wanted}`"
        )
    return None
