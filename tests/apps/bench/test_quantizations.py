"""Which quantization a name tells, and those that are made for a comparison."""

from __future__ import annotations

import gguf
import pytest

from edgespec.apps.bench.quantizations import (
    ModelFile,
    expected_bytes,
    model_file,
    parse_types,
    quantization_in,
    variants,
)
from edgespec.errors import UsageError
from edgespec.models.registry import Entry, load_registry, user_models_file
from edgespec.models.store import Stamp, Store, hash_file
from tiny_gguf import write_tiny_gguf


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    """A registry and a store of the test's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("EDGESPEC_MODELS_DIR", str(tmp_path / "store"))


def know(text: str) -> None:
    user_models_file().parent.mkdir(parents=True, exist_ok=True)
    user_models_file().write_text(text)


def kinds(path) -> set[str]:
    return {tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors if len(tensor.shape) > 1}


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("model-q4_k_m", "Q4_K_M"),
        ("Model.Q4_K_M", "Q4_K_M"),
        ("model-f32-q8_0", "Q8_0"),
        ("model-bf16", "BF16"),
        ("model-q4_k", "Q4_K"),
        ("modelq8_0", ""),
        ("model-iq4_xs", "IQ4_XS"),
        ("model", ""),
        ("", ""),
    ],
)
def test_the_quantization_that_a_name_tells(name, quantization):
    assert quantization_in(name) == quantization


def test_types():
    assert parse_types(" Q4_0, q8_0,,q4_0", "quants") == ["q4_0", "q8_0"]
    with pytest.raises(UsageError, match=r"^quants: no quantization is called 'q4_k' \(nearest: q4_k_"):
        parse_types("q8_0,q4_k", "quants")
    with pytest.raises(UsageError, match=r"^quants: name at least one"):
        parse_types(" , ", "quants")


def test_expected_bytes(tmp_path):
    source = tmp_path / "model-f16.gguf"
    source.write_bytes(bytes(161))
    assert expected_bytes(source, "q8_0") == pytest.approx(86, abs=1)


def test_missing_ones_are_made_once(tmp_path):
    source = write_tiny_gguf(tmp_path / "Tiny-F32.gguf", n_embd=256, n_ff=256)
    made: list[str] = []
    folder = tmp_path / "new" / "models"
    found = variants(str(source), ["f32", "q8_0", "q4_0"], folder, on_making=made.append)
    assert made == ["Tiny-q8_0", "Tiny-q4_0"]
    assert [(file.name, file.made_from) for file in found] == [
        ("Tiny-F32", ""),
        ("Tiny-q8_0", "Tiny-F32"),
        ("Tiny-q4_0", "Tiny-F32"),
    ]
    assert found[0].path == source
    assert sorted(folder.iterdir()) == sorted(file.path for file in found[1:])
    assert "Q8_0" in kinds(found[1].path)
    assert "Q4_0" in kinds(found[2].path)
    facts = found[2].facts()
    assert (facts.quantization, facts.made_from) == ("Q4_0", "Tiny-F32")
    assert (facts.sha256, facts.size) == (hash_file(found[2].path), found[2].path.stat().st_size)

    before = [file.path.stat() for file in found]
    assert variants(str(source), ["f32", "q8_0", "q4_0"], folder, on_making=made.append) == found
    assert len(made) == 2
    assert [(one.st_ino, one.st_mtime_ns) for one in before] == [
        (one.st_ino, one.st_mtime_ns) for one in (file.path.stat() for file in found)
    ]


def test_of_a_source_that_changed_they_are_made_anew(tmp_path):
    source = write_tiny_gguf(tmp_path / "model.gguf", seed=1)
    (first,) = variants(str(source), ["q8_0"], tmp_path / "models")
    old = first.path.read_bytes()
    write_tiny_gguf(source, seed=2)
    (second,) = variants(str(source), ["q8_0"], tmp_path / "models")
    assert second.name == first.name == "model-q8_0"
    assert second.facts().sha256 != first.facts().sha256
    assert first.path.read_bytes() == old


def test_a_file_of_the_users_own_is_not_replaced(tmp_path):
    (tmp_path / "models").mkdir()
    own = tmp_path / "models" / "model-q8_0.gguf"
    own.write_text("mine")
    source = write_tiny_gguf(tmp_path / "model.gguf")
    (made,) = variants(str(source), ["q8_0"], tmp_path / "models")
    assert made.path != own
    assert own.read_text() == "mine"


def test_names_without_a_quantization_twice(tmp_path):
    source = write_tiny_gguf(tmp_path / "model-q4_k_m.gguf")
    assert [file.name for file in variants(str(source), ["q4_0"], tmp_path)] == ["model-q4_0"]
    source = write_tiny_gguf(tmp_path / "q8_0.gguf")
    assert [file.name for file in variants(str(source), ["q4_0"], tmp_path)] == ["q8_0-q4_0"]


def test_the_registrys_are_taken_from_there(tmp_path):
    files = {name: write_tiny_gguf(tmp_path / f"{name}.gguf") for name in ("net-f32", "other")}
    know(
        f'[models.net-f32]\npath = "{files["net-f32"]}"\nquantization = "F32"\n'
        f'[models.net-q8_0]\npath = "{files["other"]}"\nquantization = "Q8_0"\n'
        '[models.net-q5_0]\nderived = { from = "net-f32", type = "q5_0", pure = true }\n'
    )
    made: list[str] = []
    found = variants("net-f32", ["q8_0", "q5_0", "q4_0"], tmp_path / "models", on_making=made.append)
    assert made == ["net-q4_0"]
    assert [(file.name, file.made_from) for file in found] == [
        ("net-q8_0", ""),
        ("net-q5_0", "net-f32"),
        ("net-q4_0", "net-f32"),
    ]
    assert found[0].path == files["other"]
    assert found[1].path == tmp_path / "store" / "net-q5_0.gguf"
    assert found[1].facts().sha256 == hash_file(found[1].path)
    # Of one that was made, others are made of what it was made from.
    (again,) = variants("net-q5_0", ["q4_0"], tmp_path / "models", on_making=made.append)
    assert again == found[2]
    assert len(made) == 1


def test_a_file_that_is_called_as_one_of_the_registry_is_itself(tmp_path):
    file = write_tiny_gguf(tmp_path / "net-q8_0.gguf", seed=5)
    theirs = Entry("net-q8_0", path=write_tiny_gguf(tmp_path / "theirs.gguf"))
    know(
        f'[models.net-q8_0]\npath = "{theirs.path}"\nquantization = "Q4_1"\n[models.net-q4_0]\npath = "/x"\n'
    )
    Store.default().root.mkdir()
    Store.default().write_stamp(theirs, Stamp("0" * 64, file.stat().st_size, "somewhere"))
    facts = model_file(str(file)).facts()
    assert (facts.sha256, facts.quantization) == (hash_file(file), "Q8_0")
    (made,) = variants(str(file), ["q4_0"], tmp_path / "models")
    assert made.path.parent == tmp_path / "models"
    assert model_file("net-q8_0").facts().quantization == "Q4_1"


def test_a_stored_hash_is_trusted(tmp_path):
    Store.default().root.mkdir()
    know('[models.net]\nsources = [{ kind = "wheels", packages = ["a==1"], member = "m" }]\n')
    file = write_tiny_gguf(tmp_path / "store" / "net.gguf")
    stamp = Stamp("1" * 64, file.stat().st_size, "somewhere")
    Store.default().write_stamp(load_registry().get("net"), stamp)
    assert model_file("net").facts().sha256 == "1" * 64, "not hashed again"


def test_hashing_tells_how_far_it_is(tmp_path):
    file = write_tiny_gguf(tmp_path / "new.gguf")
    seen: list[int] = []
    ModelFile("target", file).facts(seen.append)
    assert seen[-1] == file.stat().st_size
