"""The image encoder of a target: where it is found, which of several, and what is refused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from edgespec.apps.images import encoder
from edgespec.apps.images.encoder import facts, find_mmproj, image_facts
from edgespec.errors import EdgespecError, UsageError
from edgespec.models import on_disk
from edgespec.models.registry import user_models_file
from edgespec.models.resolve import resolve
from edgespec.models.store import Store
from hub_server import FakeServer
from tiny_gguf import write_tiny_gguf
from towers import TOWERS, write_tower


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_tower("gemma3", tmp_path_factory.mktemp("tower"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder for a wider model."""
    return write_tower("gemma3", tmp_path_factory.mktemp("other"), width=96)[1]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name.startswith("HF_"):
            monkeypatch.delenv(name)
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "EDGESPEC_MODELS_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    on_disk._listed.cache_clear()


def copied(folder: Path, **files: Path) -> Path:
    """Copy files into `folder`, named by the arguments, and return the target."""
    folder.mkdir(exist_ok=True)
    for name, file in files.items():
        shutil.copyfile(file, folder / f"{name.replace('__', '-')}.gguf")
    return folder / "target.gguf"


@pytest.mark.parametrize("kind", TOWERS)
def test_each_kind_of_encoder_fits_its_own_model(kind: str, tmp_path: Path) -> None:
    target, eye = write_tower(kind, tmp_path)
    assert find_mmproj(target, None) == eye
    found = facts(eye)
    assert (found.projector, found.n_bytes) == (TOWERS[kind].projector, eye.stat().st_size)


def test_of_several_the_one_that_fits_is_chosen_and_f16_first(
    tower: tuple[Path, Path], other: Path, tmp_path: Path
) -> None:
    target, eye = tower
    assert find_mmproj(copied(tmp_path / "none", target=target), None) is None
    folder = tmp_path / "several"
    path = copied(folder, target=target, mmproj__a__F16=other, mmproj__q8_0=eye)
    assert find_mmproj(path, None) == folder / "mmproj-q8_0.gguf"
    copied(folder, mmproj__z__F16=eye)
    assert find_mmproj(path, None) == folder / "mmproj-z-F16.gguf"
    copied(folder, mmproj__target__q8_0=eye)
    assert find_mmproj(path, None) == folder / "mmproj-target-q8_0.gguf"
    assert find_mmproj(path, folder / "mmproj-q8_0.gguf") == folder / "mmproj-q8_0.gguf"


def test_wrong_files_are_refused_in_one_line(tower: tuple[Path, Path], other: Path, tmp_path: Path) -> None:
    target, eye = tower
    cut, text = tmp_path / "cut.gguf", tmp_path / "text.gguf"
    cut.write_bytes(eye.read_bytes()[:-5000])
    text.write_text("no model")
    sound = write_tiny_gguf(
        tmp_path / "sound.gguf", architecture="clip", extra={"clip.has_audio_encoder": True}
    )
    for wrong in (other, target, cut, text, sound, tmp_path / "none.gguf", tmp_path):
        with pytest.raises(EdgespecError) as found:
            find_mmproj(target, wrong)
        assert str(wrong) in str(found.value)
        assert "\n" not in str(found.value)
    with pytest.raises(EdgespecError):
        find_mmproj(copied(tmp_path / "wrong", target=target, mmproj=other), None)
    with pytest.raises(UsageError):
        find_mmproj(target, "no-such-model")


def test_models_toml_names_one(tower: tuple[Path, Path], tmp_path: Path) -> None:
    path = copied(tmp_path / "models", target=tower[0])
    eye = copied(tmp_path / "elsewhere", target=tower[0], eye=tower[1]).with_name("eye.gguf")
    user_models_file().parent.mkdir(parents=True)
    user_models_file().write_text(f'[models.m]\npath = "{path}"\nmmproj = "{eye}"\n')
    assert find_mmproj(path, None) == eye
    user_models_file().write_text(
        f'[models.m]\npath = "{path}"\nmmproj = "eye"\n[models.eye]\npath = "{eye}"\n'
    )
    assert find_mmproj(path, None) == eye


@pytest.mark.parametrize("named", ["hf:me/repo", "m"])
def test_one_in_the_repository_is_pulled_with_the_first_image(
    named: str, tower: tuple[Path, Path], other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FakeServer()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    files = {"m-Q8_0.gguf": tower[0], "mmproj-BF16.gguf": other, "mmproj-F16.gguf": tower[1]}
    server.hub = {f"me/repo/{name}": file.read_bytes() for name, file in files.items()}
    source = '{ kind = "hub", repo = "me/repo", file = "m-Q8_0.gguf" }'
    user_models_file().parent.mkdir(parents=True)
    user_models_file().write_text(f"[models.m]\nsources = [{source}]\n")
    try:
        target = resolve(named)
        assert find_mmproj(target, None, pull_missing=False, ask_hub=False) is None
        expected = find_mmproj(target, None, pull_missing=False)
        assert not server.downloads("mmproj")
        eyeless = user_models_file().read_text()
        user_models_file().write_text(f'{eyeless}mmproj = "hf:me/repo/mmproj-F16.gguf"\n')
        if named == "m":
            assert "pulled" in image_facts(target)["problem"]
        user_models_file().write_text(eyeless)
        found = find_mmproj(target, None)
        assert found is not None
        assert found == expected
        assert found.read_bytes() == tower[1].read_bytes()
        assert found.parent == Store.default().root
    finally:
        server.close()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert find_mmproj(target, None) == found  # no hub is asked for what is here
    found.unlink()
    assert find_mmproj(target, None, ask_hub=False) is None, "only the disk says"
    with pytest.raises(EdgespecError, match=r"hub me/repo"):
        find_mmproj(target, None)


def test_doctor_tells_it_and_whether_images_are_read(
    tower: tuple[Path, Path], other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, eye = tower
    told = image_facts(target)
    assert (told["file"], told["projector"], told["bytes"]) == (str(eye), "gemma3", eye.stat().st_size)
    assert told["problem"] == "" if encoder.is_built() else "make images" in told["problem"]
    monkeypatch.setattr(encoder.backend, "library_folder", lambda: tmp_path)
    assert "make images" in image_facts(target)["problem"]
    none = image_facts(copied(tmp_path / "none", target=target))
    assert (none["file"], none["problem"]) == (None, "")
    assert "another model" in image_facts(copied(tmp_path / "wrong", target=target, mmproj=other))["problem"]
