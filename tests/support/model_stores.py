"""Stores of models laid out as Ollama and the hub library lay them out."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

IMAGE = "application/vnd.ollama.image."
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def stores_environment(home: Path) -> dict[str, str]:
    """Return the variables with which a user whose home is `home` has stores of their own, and no others."""
    unset = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
    return {
        **dict.fromkeys(unset, ""),
        "HOME": str(home),
        "OLLAMA_MODELS": str(home / ".ollama" / "models"),
        "HF_HOME": str(home / ".cache" / "huggingface"),
        "LLAMA_CACHE": str(home / ".cache" / "llama.cpp"),
    }


def link(file: Path, place: Path) -> None:
    """Put a file in a place without a copy where the file system can do that."""
    try:
        os.link(file, place)
    except OSError:
        shutil.copyfile(file, place)


class OllamaStore:
    """A store of Ollama at `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "manifests").mkdir(parents=True, exist_ok=True)
        (root / "blobs").mkdir(exist_ok=True)

    def blob(self, content: bytes | Path) -> tuple[str, int]:
        """Store bytes, or a hard link to a file, as a blob; return its digest and size."""
        data = content.read_bytes() if isinstance(content, Path) else content
        sha256 = hashlib.sha256(data).hexdigest()
        path = self.root / "blobs" / f"sha256-{sha256}"
        if not path.exists():
            if isinstance(content, Path):
                link(content, path)
            else:
                path.write_bytes(data)
        return f"sha256:{sha256}", len(data)

    def layer(self, kind: str, content: bytes | Path) -> dict[str, Any]:
        """Return a layer of a manifest; its blob is stored."""
        digest, size = self.blob(content)
        return {"mediaType": IMAGE + kind, "digest": digest, "size": size}

    def manifest(self, name: str, layers: list[dict[str, Any]], config: dict[str, Any] | None = None) -> Path:
        """Write the manifest of HOST/NAMESPACE/NAME/TAG; a NAME:TAG alone is in Ollama's library."""
        parts = name.split("/") if "/" in name else ["registry.ollama.ai", "library", *name.split(":")]
        file = self.root.joinpath("manifests", *parts)
        file.parent.mkdir(parents=True, exist_ok=True)
        digest, size = self.blob(json.dumps(config or {"model_format": "gguf"}).encode())
        facts = {
            "mediaType": "application/vnd.docker.container.image.v1+json",
            "digest": digest,
            "size": size,
        }
        file.write_text(
            json.dumps({"schemaVersion": 2, "mediaType": MANIFEST, "config": facts, "layers": layers})
        )
        return file

    def add(self, name: str, model: Path, *more: tuple[str, bytes]) -> Path:
        """Store a model with the usual layers, and `more` of (kind, content); return its blob."""
        layers = [self.layer("model", model), self.layer("template", b"{{ .Prompt }}")]
        layers += [self.layer(kind, content) for kind, content in more]
        self.manifest(name, layers)
        return self.root / "blobs" / str(layers[0]["digest"]).replace(":", "-")


def add_to_hub(
    root: Path, repo: str, file: str, model: Path, *, commit: str = COMMIT, main: bool = True
) -> Path:
    """Store a model in a cache of the hub library; return its place in the snapshot, a link to the blob."""
    folder = root / f"models--{repo.replace('/', '--')}"
    blob = folder / "blobs" / hashlib.sha256(model.read_bytes()).hexdigest()
    path = folder / "snapshots" / commit / file
    for directory in (blob.parent, path.parent, folder / "refs"):
        directory.mkdir(parents=True, exist_ok=True)
    if not blob.exists():
        link(model, blob)
    path.symlink_to(os.path.relpath(blob, path.parent))
    if main:
        (folder / "refs" / "main").write_text(commit)
    return path
