"""LM Studio's models: PUBLISHER/REPO/FILE.gguf below its folder, as it lays them out and asks others to.

`lmstudio:PUBLISHER/REPO[:QUANTIZATION]` names one. The folder is the `downloadsFolder` of its settings.json,
else `models` in its home; older versions had their home in ~/.cache/lm-studio.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from edgespec.models.found.files import Report, model_files
from edgespec.models.found.model import FoundModel, Listing
from edgespec.models.found.repositories import RepositoryFile, choose_file, found_models
from edgespec.platform.files import expand_user, text_of

PREFIX = "lmstudio:"


def lmstudio_roots() -> list[Path]:
    """Return the folders of models that LM Studio may have, the likeliest first."""
    homes = [expand_user("~/.lmstudio"), expand_user("~/.cache/lm-studio")]
    if pointer := text_of(expand_user("~/.lmstudio-home-pointer")):
        homes.insert(0, Path(pointer))
    chosen = [folder for home in homes if (folder := _downloads_folder(home))]
    return list(dict.fromkeys([*chosen, *(home / "models" for home in homes)]))


def _downloads_folder(home: Path) -> Path | None:
    """Return the folder that the user chose in LM Studio; None: none, or settings that say nothing of it."""
    try:
        settings = msgspec.json.decode(text_of(home / "settings.json"), type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return None
    folder = settings.get("downloadsFolder")
    return expand_user(folder) if isinstance(folder, str) and folder.strip() else None


def list_lmstudio(roots: Sequence[Path]) -> Listing:
    """Return all models of the folders."""
    listing = Listing()
    listing.models = found_models(PREFIX, "lmstudio", _files(roots, listing.problems.append))
    return listing


def find_lmstudio(ref: str, roots: Sequence[Path]) -> FoundModel:
    """Return the model that `ref` means. Raises UsageError for an unknown or ambiguous name."""
    files = _files(roots, lambda _: None)
    chosen = choose_file(ref, PREFIX, files, prefers=False)
    return found_models(PREFIX, "lmstudio", files)[files.index(chosen)]


def _files(roots: Sequence[Path], report: Report) -> list[RepositoryFile]:
    found: dict[str, RepositoryFile] = {}
    for root in roots:
        for files in model_files(root, report):
            parts = files.path.relative_to(root).parts
            n_repo = 2 if len(parts) > 2 else 0
            one = RepositoryFile("/".join(parts[:n_repo]), "/".join(parts[n_repo:]), files)
            found.setdefault(one.full_name.lower(), one)
    return list(found.values())
