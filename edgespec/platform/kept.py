"""Everything that edgespec keeps between runs: a row each, with its place, its content, and what deletes it.

A module that keeps something asks its row for the place, such as `HISTORY.path()`. `edgespec cache` lists and
deletes by these rows, and docs/start.md shows them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edgespec.platform.files import TEMPORARY, begins_with, cache_root, config_root, expand_user


@dataclass(frozen=True, slots=True)
class Kept:
    """One kind of thing that is kept on disk: where, what for, and whether it may go."""

    name: str
    """The word for it in `edgespec cache`."""
    places: tuple[str, ...]
    """Paths below the root, each with one * at most, which no slash matches; a folder's ends in a slash.

    (): wherever the user wants it.
    """
    holds: str
    deleted: Literal["always", "all", "named", "never"] = "all"
    """Deleted by `cache clear`, by `cache clear all`, by `cache clear NAME` alone, or not by any of them."""
    names: str = ".*"
    """Paths of its files below a folder of `places`, as a regular expression: others are not ours."""
    magics: tuple[bytes, ...] = (b"",)
    """What its files begin with."""
    personal: bool = False
    """Whether there are texts of the user in it."""
    root: Literal["cache", "config", "models", "home"] = "cache"
    where: str = ""
    """The place in Markdown, if `places` do not say it."""
    cure: str = ""
    """The means of deleting it, in Markdown, if there is more than `deleted` to say."""

    def path(self, part: str = "") -> Path:
        """Return where it is or would be; `part` stands in the place of the *.

        Raises UsageError where no home directory is known.
        """
        return self._root() / self.places[0].replace("*", part)

    def _root(self) -> Path:
        roots = {"cache": cache_root, "config": config_root, "models": models_root}
        return roots[self.root]() if self.root in roots else expand_user("~")

    @property
    def deleted_by(self) -> str:
        """The means of deleting it, in Markdown."""
        command = "edgespec cache clear" + ("" if self.deleted == "always" else f" {self.name}")
        return self.cure or f"`{command}`"

    def owns(self, file: Path) -> bool:
        """Whether `file` is of this thing, or was put beside it by StateFile."""
        root = self._root()
        if not file.is_relative_to(root):
            return False
        below = file.relative_to(root)
        finished = below.with_name(re.sub(r"^\.(.*)\.new$", r"\1", below.name)).as_posix()
        return any(re.fullmatch(self._pattern(place), finished) for place in self.places)

    def _pattern(self, place: str) -> str:
        names = f"({self.names}|(.*/)?({TEMPORARY}|\\.[^/]*lock))" if _is_folder(place) else ""
        return re.escape(place).replace(r"\*", "[^/]*") + names + r"(\.set-aside(-\d+)?)?"

    def files(self) -> Iterator[Path]:
        """Yield the files of ours that are there now, ordinary ones with our names and beginnings.

        But no locks: whoever waits for one must find it.
        """
        for place in self.places:
            base, is_folder = self._root() / place, _is_folder(place)
            for folder, folders, names in os.walk(base if is_folder else base.parent):
                if not is_folder:
                    folders.clear()
                for name in sorted(names):
                    if name.startswith(".") and name.endswith("lock"):
                        continue
                    if owner_of(file := Path(folder, name)) is self and begins_with(file, *self.magics):
                        yield file

    def bytes(self) -> int:
        """Return the size of all that is there now."""
        total = 0
        for file in self.files():
            with suppress(OSError):  # deleted by now
                total += file.stat().st_size
        return total


def _is_folder(place: str) -> bool:
    return not place or place.endswith("/")


def models_root() -> Path:
    """Return the models directory: $EDGESPEC_MODELS_DIR, or in the user's cache directory."""
    if root := os.environ.get("EDGESPEC_MODELS_DIR"):
        return expand_user(root).absolute()
    return cache_root() / "models"


_JSON = r"[^/]+\.json"

HISTORY = Kept(
    "history",
    ("history/",),
    "prompts and answers of `run` and `chat` (not with `--no-cache`), imported texts",
    deleted="always",
    names=r"texts\.db(-journal)?|[^/]+-[0-9a-f]{16}\.tokens",
    personal=True,
)
REJECTED = Kept(
    "rejected",
    ("rejected/",),
    "where drafts were rejected, with the texts, for `draft make --from-history` (not with `--no-cache`)",
    deleted="always",
    names=r"texts\.db(-journal)?|[^/]+-[0-9a-f]{16}\.rejected",
    personal=True,
)
CHAT_LINES = Kept(
    "chat-lines",
    ("chat-lines",),
    "lines typed in `chat`, and when (not with `--no-cache`)",
    deleted="always",
    personal=True,
)
FORGE = Kept(
    "forge",
    ("forge/",),
    "texts that drafts are made from, yours too; what is left of trainings",
    names="[0-9a-f]{16}/.*",
    personal=True,
    cure="`edgespec cache clear`: your texts; `edgespec cache clear forge`: all",
)
CONVERSATIONS = Kept(
    "chats",
    ("chats/",),
    "the last conversation of `chat` with each model (not with `--no-cache`)",
    deleted="always",
    names=_JSON,
    personal=True,
)
STATES = Kept(
    "states",
    ("states/",),
    "states of conversations of `chat --continue`, at most `--state-limit` (not those of `--state-dir`)",
    deleted="always",
    names=r"[0-9a-f]{16}(-[0-9a-f]{32}){1,2}\.state",
    magics=(b"edgespec prompt state 2\n", b"edgespec prompt state 1\n"),  # the second is not used any more
    personal=True,
)
PROFILES = Kept(
    "profiles",
    ("profiles/",),
    "costs and acceptance learnt on this machine, thresholds of `calibrate`; no text",
    names=_JSON,
)
IDLE_POWER = Kept("idle-power", ("energy.json",), "the idle power of this machine")
SELF_TESTS = Kept("self-tests", ("selftest-*.json",), "the kernels' self-test, and how far they prefetch")
HASHES = Kept("hashes", ("hashes.json",), "paths and hashes of model files")
MODEL_FACTS = Kept("model-facts", ("model_facts.json",), "paths and facts of other programs' models")
PACKED_WEIGHTS = Kept(
    "packed-weights",
    ("packed/",),
    "weights packed for the kernels, at most 16 GB; a tenth of the disk stays free "
    "(`EDGESPEC_PACKED_WEIGHTS=off`: none)",
    names=r"[0-9a-f]{16}-[a-z0-9-]+-[0-9a-f]{16}\.weights",
    magics=(b"edgespec packed weights 2\n", b'{"tensors":'),  # the second: without checksums, not used
)
SERVERS = Kept(
    "servers",
    ("servers/",),
    "addresses and keys of running servers",
    deleted="never",
    names=_JSON,
    cure="the server, when it ends",
)
BUILDS = Kept("builds", ("pip/",), "llama.cpp as `make run` compiled it")
QUANTIZED = Kept(
    "quantized",
    ("quantized/",),
    "quantizations that `compare` made",
    names=r"[^/]+-of-[0-9a-f]{12}\.gguf(\.part\.[^/]+)?",
    magics=(b"GGUF", bytes(4), b"PK\3\4"),  # a model, one that is not finished, importances
    root="models",
)
MODELS = Kept(
    "models",
    ("",),
    "models pulled or converted, unfinished pulls, drafts made here",
    deleted="named",
    root="models",
    where="`~/.cache/edgespec/models`, or `EDGESPEC_MODELS_DIR`",
    cure="`edgespec models remove`, `edgespec draft remove`; `edgespec cache clear models`: all but drafts",
)
OWN_MODELS = Kept(
    "models.toml",
    ("models.toml",),
    "names of your own models and pairs",
    deleted="never",
    root="config",
    cure="`edgespec models remove`",
)
COMPLETION = Kept(
    "completion",
    (".bash_completions/edgespec.sh", ".zfunc/_edgespec", ".config/fish/completions/edgespec.fish"),
    "completion of commands in a shell, if you installed it",
    deleted="never",
    root="home",
    cure="by hand",
)
COMPARISONS = Kept(
    "comparisons",
    (),
    "raw runs of `compare`",
    deleted="never",
    where="DIR of `compare -o`: `edgespec-compare`",
    cure="by hand",
)
BATCHES = Kept(
    "batches",
    (),
    "answers of a `batch` that was stopped",
    deleted="never",
    personal=True,
    where="`OUT.partial`, beside OUT of `batch -o`",
    cure="the batch, when it ends",
)
LOCKS = Kept(
    "locks",
    (".*lock",),
    "nothing: empty files held while another is written",
    deleted="never",
    cure="by hand",
)

EVERYTHING = (
    *(HISTORY, REJECTED, CHAT_LINES, FORGE, CONVERSATIONS, STATES),
    *(PROFILES, IDLE_POWER, SELF_TESTS, HASHES, MODEL_FACTS),
    *(PACKED_WEIGHTS, SERVERS, BUILDS, QUANTIZED, MODELS, OWN_MODELS),
    *(COMPLETION, COMPARISONS, BATCHES, LOCKS),
)
"""All rows; of two that own a file, it is the first one's."""


def owner_of(file: Path) -> Kept | None:
    """Return the row that `file` belongs to; None: edgespec keeps no such file."""
    return next((row for row in EVERYTHING if row.owns(file)), None)
