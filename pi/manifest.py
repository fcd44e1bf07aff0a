"""dist/BOARD: a board's wheels, and manifest.json, which says what they are."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from edgespec.errors import EdgespecError
from edgespec.platform.files import write_atomically
from pi.needs import MACHINE


class Manifest(msgspec.Struct, frozen=True):
    """The manifest that pi/wheels.py writes beside the wheels of a board."""

    board: str
    machine: str
    glibc: str
    """The oldest that the wheels work with."""
    compiler: str
    tools: dict[str, str]
    """Version of each tool that the wheels' bytes depend on, by its name."""
    packages: dict[str, str]
    """Version of each package, by its name."""
    wheels: dict[str, str]
    """SHA-256 of each file, by its name."""


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write a manifest beside its wheels."""
    write_atomically(folder / "manifest.json", msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")


def read_manifest(folder: Path) -> Manifest:
    """Return what the wheels in dist/BOARD are; EdgespecError if there are none, or another board's."""
    make = f"build them with `make {folder.name}`"
    file = folder / "manifest.json"
    try:
        manifest = msgspec.json.decode(file.read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise EdgespecError(f"{folder}: no wheels for this board; {make}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EdgespecError(f"{file}: not a manifest of wheels ({error}); {make}") from None
    if manifest.board != folder.name or manifest.machine != MACHINE:
        was = f"{manifest.board} ({manifest.machine})"
        raise EdgespecError(f"{file}: wheels for another board, {was}; {make}")
    return manifest


def check_wheels(folder: Path, manifest: Manifest) -> list[Path]:
    """Return the wheels of a manifest; EdgespecError unless all are there and as they were built."""
    wheels = [folder / name for name in manifest.wheels]
    for wheel in wheels:
        cure = f"build it again with `make {folder.name}`"
        if not wheel.is_file():
            raise EdgespecError(f"{wheel}: is in the manifest, and not here; {cure}")
        if sha256(wheel) != manifest.wheels[wheel.name]:
            raise EdgespecError(f"{wheel}: its SHA-256 is not the manifest's; {cure}")
    return wheels


def sha256(file: Path) -> str:
    """Return a file's SHA-256 in hexadecimal digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
