"""Writes the models.toml of a user whose files have names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_user_models(config: Path, paths: Mapping[str, Path], pairs: str = "") -> None:
    """Give the files `paths` their names in the configuration folder `config`; `pairs`: TOML as it stands."""
    (config / "edgespec").mkdir(parents=True, exist_ok=True)
    text = "".join(f'[models.{name}]\npath = "{path}"\n' for name, path in paths.items())
    (config / "edgespec" / "models.toml").write_text(text + pairs)
