"""`edgespec models` and `edgespec quantize`, called as a user does, with a local hub."""

import hashlib
import json
import os
import re

import gguf
import pytest
import typer
from typer.testing import CliRunner

from edgespec.apps.bench.quantizations import BITS
from edgespec.apps.forge.commands import quantize as quantize_module
from edgespec.apps.forge.commands.quantize import quantize_command
from edgespec.apps.forge.importance import CHUNK
from edgespec.cli.models import models_app
from edgespec.errors import EdgespecError
from edgespec.llama.quantize import QUANT_TYPES
from edgespec.models import pull, registry
from edgespec.models.draft_records import record_file
from edgespec.models.registry import load_registry, user_models_file
from edgespec.models.resolve import resolve
from hub_server import FakeServer
from kept_drafts import keep_draft
from tiny_architectures import write_architecture
from tiny_gguf import write_tiny_gguf
from tiny_states import tiny

CONTENT = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A hub with one model, `m`, and a pair of it with itself in the user's models.toml."""
    server = FakeServer()
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name.startswith("HF_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("EDGESPEC_MODELS_DIR", str(tmp_path / "models"))
    server.hub["me/repo/m.gguf"] = CONTENT
    user_models_file().parent.mkdir(parents=True)
    user_models_file().write_text(
        f"""
        [models.m]
        size = {len(CONTENT)}
        sha256 = "{hashlib.sha256(CONTENT).hexdigest()}"
        sources = [{{ kind = "hub", repo = "me/repo", file = "m.gguf", revision = "v1" }}]
        [models.u]
        sources = [{{ kind = "hub", repo = "me/repo", file = "m.gguf" }}]
        [pairs.mm]
        target = "m"
        draft = "u"
        """
    )
    yield server
    server.close()


def run(app, *arguments):
    return CliRunner().invoke(app, list(arguments), catch_exceptions=True)


def ok(app, *arguments):
    result = run(app, *arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def error(app, *arguments):
    result = run(app, *arguments)
    assert isinstance(result.exception, EdgespecError), (result.output, result.exception)
    assert "\n" not in str(result.exception)
    return result.exception


def test_list(server):
    """A line each, of 80 columns: what is here, or all."""
    ok(models_app, "pull", "m")
    here, everything = (ok(models_app, "list", *options) for options in ((), ("--all",)))
    assert max(map(len, [*here.splitlines(), *everything.splitlines()])) <= 80
    assert [line.split()[0] for line in here.split("\n\n")[0].splitlines()] == ["name", HEAD, "m"]
    assert "absent" not in here and "`edgespec models list --all`" in here
    text = " ".join(everything.split())  # columns are as wide as their longest name
    assert "qwen2.5-coder-1.5b-q4_k_m 1.12 GB Apache-2.0 absent" in text
    assert "qwen2.5-coder-0.5b-q4_0 491 MB Apache-2.0 absent, derived" in text
    assert "absent, unverified" in text
    assert "default qwen2.5-coder-1.5b-q4_k_m qwen2.5-coder-1.5b-head-q4_0" in text
    assert "\x1b" not in text


def test_list_json(server):
    ok(models_app, "pull", "m")
    data = json.loads(ok(models_app, "list", "--json"))
    entries = {entry["name"]: entry for entry in data["models"]}
    assert entries["m"]["present"]
    assert not entries["u"]["present"]
    assert not entries["u"]["verified"]
    assert entries["qwen2.5-coder-0.5b-q4_0"]["derived_from"] == "qwen2.5-coder-0.5b-q4_k_m"
    assert data["pairs"]["mm"] == {"target": "m", "draft": "u", "small": None}


def test_list_of_made_drafts(server, tmp_path):
    assert json.loads(ok(models_app, "list", "--json"))["drafts"] == []
    target = tmp_path / "target.gguf"
    target.write_bytes(CONTENT)
    record = keep_draft(tmp_path / "models", "my-head", target)
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    (row,) = [line.split() for line in ok(models_app, "list").splitlines() if line.startswith("my-head ")]
    assert " ".join(row[-4:]) == "drafts for target, 1.32x"
    (draft,) = json.loads(ok(models_app, "list", "--json"))["drafts"]
    assert draft["target_sha256"] == sha256
    assert draft["acceptance"] == [0.61, 0.55, 0.5]
    assert draft["data"] == record.data
    assert draft["uses_own_texts"]
    record_file(tmp_path / "models/my-head.gguf").write_text("{")
    result = run(models_app, "list")
    assert "draft remove my-head" in result.stderr
    assert result.exit_code == 0


def test_pull_prints_paths_on_stdout_and_the_rest_on_stderr(server, tmp_path):
    result = run(models_app, "pull", "mm", "m")
    assert result.stdout.splitlines() == [str(tmp_path / "models" / f"{name}.gguf") for name in ("m", "u")]
    assert "pulling m (10 kB)" in result.stderr
    assert "u: unverified; its SHA-256" in result.stderr
    again = run(models_app, "pull", "m")
    assert again.stderr == ""
    described = json.loads(ok(models_app, "pull", "m", "--json"))["models"]
    assert [entry["name"] for entry in described] == ["m"]


def test_pull_of_several_is_refused_before_the_first_byte_when_the_disk_is_too_small(server, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1}))
    assert "no disk space for qwen3-8b-q4_k_m, qwen3-0.6b-q8_0, qwen3-0.6b-q4_0: it needs 6.37 GB" in str(
        error(models_app, "pull", "qwen3-8b")
    )


def test_path(server, tmp_path):
    assert "edgespec models pull m" in str(error(models_app, "path", "m"))
    ok(models_app, "pull", "m")
    assert ok(models_app, "path", "m").strip() == str(tmp_path / "models" / "m.gguf")
    assert json.loads(ok(models_app, "path", "m", "--json"))["path"].endswith("m.gguf")


def test_a_pair_is_named_where_one_model_is_wanted(server, tmp_path):
    ok(models_app, "add", str(tiny("qwen3")), "--name", "own")
    with user_models_file().open("a") as file:
        file.write('[pairs]\nmine = { target = "own", draft = "m" }\n')
    assert "edgespec models pull m" in str(error(models_app, "path", "mine"))
    ok(models_app, "pull", "m")
    files = {"target": str(tiny("qwen3")), "draft": str(tmp_path / "models" / "m.gguf")}
    assert ok(models_app, "path", "mine").splitlines() == [*files.values()]
    assert json.loads(ok(models_app, "path", "mine", "--json")) == {"name": "mine", **files}


HEAD = "qwen2.5-coder-1.5b-head-q4_0"


def test_a_model_that_comes_with_edgespec(server, monkeypatch):
    assert ok(models_app, "path", HEAD).strip() == str(registry.PACKED / f"{HEAD}.gguf")
    assert ok(models_app, "verify", HEAD) == f"{HEAD}: ok\n"
    assert "comes with edgespec" in str(error(models_app, "remove", HEAD))
    known = {line.split()[0]: line for line in ok(models_app, "list").splitlines() if line.strip()}
    assert "present, built in" in known[HEAD]
    monkeypatch.setattr(pull, "hash_file", lambda *_: "0" * 64)
    result = run(models_app, "verify", HEAD)
    assert str(result.exception) == f"damaged: {HEAD}; install edgespec again"


def test_verify(server, tmp_path):
    assert ok(models_app, "verify") == f"{HEAD}: ok\n"
    assert "not on this machine" in str(error(models_app, "verify", "m"))
    ok(models_app, "pull", "m")
    assert ok(models_app, "verify") == f"{HEAD}: ok\nm: ok\n"
    (tmp_path / "models" / "m.gguf").write_bytes(CONTENT[:-1] + b"x")
    result = run(models_app, "verify", "m")
    assert result.stdout.startswith("m: DIFFERS")
    assert isinstance(result.exception, EdgespecError)
    assert result.exception.exit_code == 1
    assert "edgespec models remove m" in str(result.exception)
    rows = json.loads(run(models_app, "verify", "--json").stdout)["models"]
    assert {row["name"]: row["ok"] for row in rows} == {HEAD: True, "m": False}


def split_model(folder):
    """Write a model split over three files, and return them."""
    return [
        write_tiny_gguf(
            folder / f"own-{no + 1:05}-of-00003.gguf", seed=no, extra={"split.no": no, "split.count": 3}
        )
        for no in range(3)
    ]


def flip(path):
    """Change the last byte of a file."""
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("damage", ["a bit", "truncated", "gone"])
def test_verify_names_the_damaged_part_of_a_split_model(server, tmp_path, number, damage):
    files = split_model(tmp_path)
    ok(models_app, "add", str(files[0]), "--name", "own")
    assert ok(models_app, "verify", "own") == "own: ok\n"
    file = files[number - 1]
    if damage == "a bit":
        flip(file)
    elif damage == "truncated":
        os.truncate(file, file.stat().st_size - 100)
    elif number == 1:
        return  # then there is no such model
    else:
        file.unlink()
    result = run(models_app, "verify", "own")
    (line,) = result.stdout.splitlines()
    why = "No such file" if damage == "gone" else ", expected "
    assert line.startswith(f"own: DIFFERS: {file}: ")
    assert why in line
    assert (result.exception.exit_code, "damaged: own" in str(result.exception)) == (1, True)
    (row,) = json.loads(run(models_app, "verify", "own", "--json").stdout)["models"]
    assert not row["ok"]
    bad = [part["path"] for part in row["parts"] if not part["ok"]]
    assert bad == ([] if number == 1 else [str(file)])


def test_verify_of_parts_that_have_no_recorded_hash(server, tmp_path):
    """Added by an earlier edgespec: what the files themselves tell is checked, and the rest is said."""
    files = split_model(tmp_path)
    ok(models_app, "add", str(files[0]), "--name", "own")
    text = re.sub(r"parts = .*\n", "", user_models_file().read_text())
    user_models_file().write_text(text)
    assert ok(models_app, "verify", "own").count("complete; no hash of it is recorded") == 2
    os.truncate(files[2], files[2].stat().st_size - 100)
    line = run(models_app, "verify", "own").stdout
    assert f"own: DIFFERS: {files[2]}: " in line
    assert "truncated" in line


def test_all_parts_of_a_model_of_the_hub_are_pulled_verified_and_removed(server, tmp_path):
    files = split_model(tmp_path)
    for file in files:
        server.hub[f"me/repo/{file.name}"] = file.read_bytes()
    name = f"hf:me/repo/{files[0].name}"
    pulled = [tmp_path / "models" / f"hf--me--repo--{file.name}" for file in files]
    assert ok(models_app, "pull", name).split() == [str(path) for path in pulled]
    assert resolve(name) == pulled[0]
    assert ok(models_app, "verify", name).count(": ok") == 3
    flip(pulled[1])
    result = run(models_app, "verify", name)
    (line,) = [line for line in result.stdout.splitlines() if "DIFFERS" in line]
    assert line.startswith("hf--me--repo--own-00002-of-00003: DIFFERS: ")
    again = f"hf:me/repo/{files[1].name}"
    assert f"`edgespec models remove {again}`" in str(result.exception)
    ok(models_app, "remove", again)
    ok(models_app, "pull", name)
    assert ok(models_app, "verify", name).count(": ok") == 3
    ok(models_app, "remove", name)
    assert not list((tmp_path / "models").glob("*.gguf"))
    assert resolve(name) == pulled[0]
    assert sorted((tmp_path / "models").glob("*.gguf")) == pulled


def test_remove(server, tmp_path):
    ok(models_app, "pull", "m")
    assert "removed" in ok(models_app, "remove", "m")
    assert [p.name for p in (tmp_path / "models").iterdir()] == [".m.lock"]
    assert "nothing to remove" in str(error(models_app, "remove", "m"))


def test_list_says_which_models_have_a_head_that_drafts(server):
    """From the header of a file that is here, else from models.toml."""
    ok(models_app, "add", str(tiny("glm4-moe-mtp")), "--name", "own")
    ok(models_app, "add", str(tiny("glm4-moe")), "--name", "headless")
    ok(models_app, "pull", "m")
    known = {line.split()[0]: line for line in ok(models_app, "list", "-a").splitlines() if line.strip()}
    assert "present, MTP head, yours" in known["own"]
    assert "absent, MTP head" in known["qwen3.5-4b-mtp-q4_k_m"]
    assert "MTP" not in known["headless"] + known["m"]
    heads = {one["name"]: one["mtp_head"] for one in json.loads(ok(models_app, "list", "--json"))["models"]}
    assert (heads["own"], heads["headless"], heads["qwen3.5-4b-mtp-q4_k_m"]) == (True, False, True)


def test_add_and_remove_a_file_of_ones_own(server, tmp_path):
    path = write_tiny_gguf(tmp_path / "own.gguf")
    assert ok(models_app, "add", str(path)) == "own\n"
    assert load_registry().get("own").path == path
    assert resolve("own") == path
    assert "present, yours" in ok(models_app, "list")
    assert ok(models_app, "verify", "own") == "own: ok\n"
    assert ok(models_app, "add", str(path), "--name", "own2") == "own2\n"
    assert f"{path} is untouched" in ok(models_app, "remove", "own", "own2")
    assert path.exists()
    assert "own" not in load_registry().entries


# --- quantize -----------------------------------------------------------------------------------

app = typer.Typer()
app.command("quantize")(quantize_command)


def test_quantize_a_file(server, tmp_path):
    source = write_tiny_gguf(tmp_path / "tiny.gguf")
    made = ok(app, str(source), "--type", "q8_0,q4_0", "--pure").split()
    assert made == [str(tmp_path / "tiny-q8_0.gguf"), str(tmp_path / "tiny-q4_0.gguf")]
    q8, q4 = (gguf.GGUFReader(path) for path in made)
    assert {t.tensor_type.name for t in q4.tensors if len(t.shape) > 1} == {"Q4_0"}
    assert {t.tensor_type.name for t in q8.tensors if len(t.shape) > 1} == {"Q8_0"}
    assert sorted(p.name for p in tmp_path.glob("*.gguf*")) == [
        "tiny-q4_0.gguf",
        "tiny-q8_0.gguf",
        "tiny.gguf",
    ]
    refused = error(app, str(source), "--type", "q8_0")
    assert "exists already; replace with --force" in str(refused)
    assert refused.exit_code == 2
    ok(app, str(source), "--type", "q8_0", "--force")


def test_columns_are_measured_over_texts_of_the_model_for_a_type_that_asks(server, tmp_path, monkeypatch):
    source = write_architecture(tmp_path, "llama", CHUNK)
    monkeypatch.setattr(quantize_module, "own_texts", lambda *_, **__: [[*range(200)] * 6])
    (made,) = ok(app, str(source), "--type", "iq2_xs").split()
    assert "IQ2_XS" in {tensor.tensor_type.name for tensor in gguf.GGUFReader(made).tensors}


def test_quantize_into_a_file(server, tmp_path):
    source, wanted = write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "new" / "x.GGUF"
    assert ok(app, str(source), "--type", "q8_0", "-o", str(wanted)).split() == [str(wanted)]
    assert {t.tensor_type.name for t in gguf.GGUFReader(wanted).tensors if len(t.shape) > 1} == {"Q8_0"}
    assert [path.name for path in wanted.parent.iterdir()] == ["x.GGUF"]
    folder = tmp_path / "folder.gguf"
    folder.mkdir()
    assert ok(app, str(source), "--type", "q8_0", "-o", str(folder)).split() == [f"{folder}/tiny-q8_0.gguf"]


def test_quantize_a_registry_model_into_a_directory(server, tmp_path):
    path = write_tiny_gguf(tmp_path / "own.gguf")
    ok(models_app, "add", str(path))
    data = json.loads(ok(app, "own", "--type", "Q4_1", "-o", str(tmp_path / "new" / "dir"), "--json"))
    assert data["files"][0]["path"] == str(tmp_path / "new" / "dir" / "own-q4_1.gguf")
    assert data["files"][0]["size"] > 0


def test_derived_with_the_real_quantizer(server, tmp_path):
    server.hub["me/repo/m.gguf"] = write_tiny_gguf(tmp_path / "tiny.gguf").read_bytes()
    with user_models_file().open("a") as file:
        file.write('[models.d]\nderived = { from = "u", type = "q4_0", pure = true }\n')
    told = []
    path = resolve("d", on_progress=told.append)
    assert path == tmp_path / "models" / "d.gguf"
    made = [(step.done, step.total) for step in told if step.phase == "quantize"]
    n_tensors = len(gguf.GGUFReader(path).tensors)
    assert made == [(0, None), *((done, n_tensors) for done in range(1, n_tensors + 1))]
    assert {t.tensor_type.name for t in gguf.GGUFReader(path).tensors if len(t.shape) > 1} == {"Q4_0"}
    assert resolve("d", pull_missing=False) == path


def test_quantize_knows_the_size_of_every_type():
    assert BITS.keys() == QUANT_TYPES.keys()


def test_quantize_imports_nothing_from_the_current_directory(tmp_path, monkeypatch, tiny_path):
    (tmp_path / "tempfile.py").write_text("raise SystemExit('imported from here')")
    monkeypatch.chdir(tmp_path)
    from edgespec.llama.quantize import quantize

    quantize(tiny_path, tmp_path / "out.gguf", "q8_0")
    assert (tmp_path / "out.gguf").read_bytes().startswith(b"GGUF")
    assert [file.name for file in tmp_path.glob("out.gguf*")] == ["out.gguf"]


def test_quantize_takes_any_path_and_leaves_nothing_of_what_is_stopped(tmp_path, tiny_path):
    from edgespec.llama.quantize import quantize

    out = tmp_path / os.fsdecode(b"\xff.gguf")  # not UTF-8
    quantize(tiny_path, out, "q8_0")
    out.unlink()

    def stop(done, total):
        if done > 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(tiny_path, out, "q8_0", on_progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_types_that_do_not_fit_on_the_disk(server, tmp_path, monkeypatch):
    source = write_tiny_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1}))
    assert "no disk space for q4_0, q8_0" in str(error(app, str(source), "--type", "q4_0,q8_0"))
