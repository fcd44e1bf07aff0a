"""dist/release: the wheels of a tagged commit, their checksums and notes, and what is refused."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from edgespec.errors import EdgespecError, UsageError
from pi import ROOT, needs, recipe, release
from pi.manylinux import LOCAL_VERSION

MACHINES = ["x86_64", "aarch64"]
LLAMA = recipe.llama_version() + LOCAL_VERSION


def wheel(folder: Path, package: str, version: str, machine: str) -> Path:
    """A wheel that pip installs."""
    tag = f"py3-none-manylinux_2_34_{machine}"
    file = folder / f"{package}-{version}-{tag}.whl"
    info = f"{package}-{version}.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{package}.py", "")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        archive.writestr(f"{info}/RECORD", "")
    return file


@pytest.fixture
def dist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of all wheels of version 0.1.0, built of its tagged commit."""
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## 0.1.0 - 2026-11-27\n\n### Added\n- All of it.\n\n## 0.0.9 - 2026-10-01\n"
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / ".gitignore").write_text("dist/\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=me", "-c", "user.email=me@localhost"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"], ["tag", "v0.1.0"]):
        subprocess.run([*git, *arguments], check=True)
    dist = tmp_path / "dist"
    dist.mkdir()
    for machine in MACHINES:
        wheel(dist, "edgespec", "0.1.0", machine)
        wheel(dist, "llama_cpp_python", LLAMA, machine)
    monkeypatch.setattr(needs, "ROOT", tmp_path)
    for module in (needs, release):
        monkeypatch.setattr(module, "DIST", dist)
    return dist


def test_what_is_released(dist: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (dist / "release").mkdir()
    (dist / "release" / "older.whl").touch()
    folder = release.release(MACHINES)
    wheels = sorted(file.name for file in dist.glob("*.whl"))
    assert sorted(file.name for file in folder.iterdir()) == sorted([*wheels, "NOTES.md", "SHA256SUMS"])
    subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=folder, check=True, capture_output=True
    )
    assert sorted(line.split()[1] for line in (folder / "SHA256SUMS").read_text().splitlines()) == wheels
    notes = (folder / "NOTES.md").read_text()
    assert notes.startswith("### Added\n- All of it.\n\n### Install\n")
    assert "0.0.9" not in notes
    said = capfd.readouterr()
    assert said.out == (folder / "SHA256SUMS").read_text()
    assert "4 wheels, SHA256SUMS and NOTES.md. Nothing was uploaded: push the tag v0.1.0" in said.err


def test_pip_installs_it_as_its_notes_say(dist: Path, tmp_path: Path) -> None:
    folder = release.release(MACHINES)
    notes = (folder / "NOTES.md").read_text()
    check, install = (line.strip() for line in notes.splitlines() if line.startswith("    "))
    subprocess.run(check.split(), cwd=folder, check=True, capture_output=True)
    pip = [sys.executable, "-m", *install.split(), "--isolated", "--no-index", "--only-binary=:all:"]
    where = ["--platform=manylinux_2_34_x86_64", f"--target={tmp_path / 'site'}"]
    subprocess.run([*pip, *where], cwd=folder, check=True, capture_output=True)
    assert (tmp_path / "site" / "edgespec.py").exists()


def test_one_kind_of_processors_can_be_released_alone(dist: Path) -> None:
    for file in dist.glob("*aarch64.whl"):
        file.unlink()
    assert len(list(release.release(["x86_64"]).glob("*.whl"))) == 2
    with pytest.raises(EdgespecError, match="0 wheels of edgespec for aarch64; make wheels first"):
        release.release(MACHINES)
    with pytest.raises(UsageError, match="arm: not a kind of processor"):
        release.release(["arm"])


def test_a_damaged_wheel_is_not_released(dist: Path) -> None:
    file = next(dist.glob("edgespec-*aarch64.whl"))
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(EdgespecError, match=rf"{file.name}: damaged \(.*\); delete it, and make wheels"):
        release.release(MACHINES)


def test_the_readme_says_whether_there_is_a_release() -> None:
    headings = re.findall(r"^## .*$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    published = [heading for heading in headings if "unreleased" not in heading]
    assert ("No release is published yet" in (ROOT / "README.md").read_text()) == (not published)
