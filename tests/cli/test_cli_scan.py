"""Models in other programs' stores, named and scanned as a user does; the stores are laid out like theirs."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from command_line import COMMAND, failed, run_cli
from edgespec.llama.quantize import quantize
from model_stores import IMAGE, OllamaStore, add_to_hub, stores_environment
from tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models: a target, a draft of its vocabulary, one of another, and files of other kinds."""
    folder = tmp_path_factory.mktemp("files")

    def write(name: str, **facts: object) -> Path:
        return write_tiny_gguf(folder / f"{name}.gguf", name=name, **facts)  # type: ignore[arg-type]

    small = {"n_layer": 1, "n_embd": 32, "n_ff": 64, "n_head": 2}
    return {
        "target": write("target", seed=1, n_layer=6, n_embd=128, n_ff=256),
        "draft": write("draft", seed=2, **small),
        "other": write("other", seed=3, texts={40: "another"}, **small),
        "adapter": write("adapter", general_type="adapter", **small),
        "embedder": write("embedder", extra={"{arch}.pooling_type": 1}, **small),
        "projector": write("mmproj", architecture="clip", general_type="mmproj", **small),
        "speech": write("speech", architecture="whisper", **small),
    }


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def env(environment: dict[str, str], home: Path) -> dict[str, str]:
    home.mkdir(exist_ok=True)
    return environment | stores_environment(home)


@pytest.fixture
def ollama(home: Path) -> OllamaStore:
    return OllamaStore(home / ".ollama" / "models")


def scan(env: dict[str, str], *words: object) -> dict[str, dict[str, object]]:
    """Return what a scan finds besides the models that come with edgespec, by name."""
    result = run_cli("models", "scan", "--json", *words, env=env)
    assert result.returncode == 0, result.stderr
    return {one["name"]: one for one in json.loads(result.stdout)["models"] if one["source"] != "edgespec"}


def problems(env: dict[str, str], *words: object) -> list[str]:
    found: list[str] = json.loads(run_cli("models", "scan", "--json", *words, env=env).stdout)["problems"]
    return found


def path_of(name: str, env: dict[str, str]) -> Path:
    result = run_cli("models", "path", name, env=env)
    assert result.returncode == 0, result.stderr
    return Path(result.stdout.strip())


# ---- Ollama ----


def test_a_model_of_ollama_by_the_name_that_it_has_there(ollama, files, env):
    blob = ollama.add("qwen:7b", files["target"])
    ollama.add("hf.co/me/My-Model-GGUF/Q4_K_M", files["draft"])
    assert path_of("ollama:qwen:7b", env) == blob
    assert path_of("ollama:qwen", env) == blob  # its only tag
    assert path_of("ollama:library/Qwen:7B", env) == blob
    assert path_of("ollama:registry.ollama.ai/library/qwen:7b", env) == blob
    assert path_of("ollama:hf.co/me/My-Model-GGUF:Q4_K_M", env).read_bytes() == files["draft"].read_bytes()
    found = scan(env)["ollama:qwen:7b"]
    assert found["sha256"] == blob.name.removeprefix("sha256-")
    assert (found["architecture"], found["kind"], found["quantization"]) == ("llama", "model", "F32")
    assert found["size"] == files["target"].stat().st_size
    assert "ollama:hf.co/me/My-Model-GGUF:Q4_K_M" in scan(env)
    listed = json.loads(run_cli("models", "list", "--json", env=env).stdout)["elsewhere"]
    assert {one["name"] for one in listed} == {"ollama:qwen:7b", "ollama:hf.co/me/My-Model-GGUF:Q4_K_M"}


def test_text_of_a_model_of_ollama_with_the_draft_that_is_there(ollama, files, env):
    ollama.add("big:latest", files["target"])
    ollama.add("small:1b", files["draft"])
    found = scan(env)
    assert found["ollama:big:latest"]["draft"] == "ollama:small:1b"
    assert found["ollama:big:latest"]["draft_speedup"] > 1.1
    assert found["ollama:small:1b"]["draft"] is None
    run = run_cli("run", "-t", "ollama:big", "--temp", "0", "-n", "12", "one two", env=env)
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stderr.splitlines() if line.startswith("edgespec: ")]
    assert [line for line in lines if "ollama:small:1b drafts: found on this disk" in line]
    plain = run_cli(
        "run", "-t", files["target"], "--drafter", "none", "--temp", "0", "-n", "12", "one two", env=env
    )
    assert run.stdout == plain.stdout
    without = run_cli("run", "-t", "ollama:big", "--drafter", "suffix", "-n", "2", "one two", env=env)
    assert "drafts: found" not in without.stderr
    config = Path(env["XDG_CONFIG_HOME"]) / "edgespec"
    config.mkdir(parents=True)
    (config / "models.toml").write_text("find_drafts = false\n")
    switched_off = run_cli("run", "-t", "ollama:big", "-n", "2", "one two", env=env)
    assert "drafts: found" not in switched_off.stderr


def test_a_draft_of_another_vocabulary_is_not_taken(ollama, files, env):
    ollama.add("big:latest", files["target"])
    ollama.add("other:latest", files["other"])
    assert scan(env)["ollama:big:latest"]["draft"] is None


def test_hashes_are_ollamas_own(ollama, files, env):
    blob = ollama.add("qwen:7b", files["target"])
    digest = blob.name.removeprefix("sha256-")
    result = run_cli("models", "verify", "ollama:qwen:7b", "--json", env=env)
    (verified,) = json.loads(result.stdout)["models"]
    assert (verified["ok"], verified["expected"]) == (True, digest)
    blob.unlink()
    shutil.copyfile(files["target"], blob)
    with blob.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    result = run_cli("models", "verify", "ollama:qwen:7b", env=env)
    assert result.returncode == 1
    assert "DIFFERS: " in result.stdout and f"expected {digest}" in result.stdout
    assert "pull again with the program" in result.stderr


def test_nothing_of_ollama_is_changed(ollama, files, env, tmp_path):
    ollama.add("qwen:7b", files["target"])
    before = sorted(ollama.root.rglob("*"))
    assert run_cli("models", "pull", "ollama:qwen:7b", env=env).stdout.strip() == str(
        path_of("ollama:qwen", env)
    )
    failed(
        run_cli("models", "remove", "ollama:qwen:7b", env=env), 2, "ollama:qwen:7b: another program's file"
    )
    made = run_cli("quantize", "ollama:qwen:7b", "--type", "q8_0", env=env, cwd=tmp_path)
    assert made.stdout.strip() == "qwen-7b-q8_0.gguf"
    assert (tmp_path / "qwen-7b-q8_0.gguf").exists()
    assert sorted(ollama.root.rglob("*")) == before


def unusable(env: dict[str, str], name: str, *words: str) -> str:
    """Check that a model is refused in one line that has `words`, and that a scan says the same."""
    line = failed(run_cli("run", "-t", name, "hello", env=env), 1, f"{name}: ", *words)
    problem = scan(env)[name]["problem"]
    assert problem in line
    return line


def test_a_blob_that_is_gone_or_too_short(ollama, files, env):
    blob = ollama.add("qwen:7b", files["target"])
    blob.unlink()
    unusable(env, "ollama:qwen:7b", f"{blob} is missing", "`ollama pull qwen:7b`")
    blob.write_bytes(files["target"].read_bytes()[:-100])
    unusable(env, "ollama:qwen:7b", "bytes of ")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is no manifest"),
        ("[]", "is no manifest"),
        ('{"layers": 3}', "is no manifest"),
        ("{}", "is no manifest"),
        ('{"layers": []}', "consists of nothing"),
        (
            '{"layers": [{"mediaType": "application/vnd.oci.image.layer", "digest": "x"}]}',
            "vnd.oci.image.layer",
        ),
        (f'{{"layers": [{{"mediaType": "{IMAGE}model", "digest": "sha256:../../x"}}]}}', "is no digest"),
        (
            f'{{"layers": [{{"mediaType": "{IMAGE}model", "digest": "../../../secret.gguf"}}]}}',
            "is no digest",
        ),
        (f'{{"layers": [{{"mediaType": "{IMAGE}tensor", "digest": "x", "name": "a"}}]}}', "of tensor"),
    ],
)
def test_a_broken_manifest(ollama, files, env, content, words):
    file = ollama.manifest("qwen:7b", [])
    shutil.copyfile(files["target"], ollama.root.parent / "secret.gguf")
    file.write_text(content)
    unusable(env, "ollama:qwen:7b", words)


@pytest.mark.parametrize(
    ("kinds", "what"),
    [(["model", "adapter"], "adapter"), (["license"], "license"), (["model", "model"], "one GGUF file")],
)
def test_forms_of_models_that_are_not_for_edgespec(ollama, files, env, kinds, what):
    ollama.manifest("other:1", [ollama.layer(kind, files["target"]) for kind in kinds])
    unusable(env, "ollama:other:1", what)


def test_links_do_not_lead_out_of_ollamas_store(ollama, files, env, tmp_path):
    blob = ollama.add("qwen:7b", files["target"])
    outside = tmp_path / "outside.gguf"
    blob.rename(outside)
    blob.symlink_to(outside)
    unusable(env, "ollama:qwen:7b", "a link out of")
    blob.unlink()
    blob.symlink_to(blob)
    unusable(env, "ollama:qwen:7b", "Too many levels of symbolic links")
    manifest = ollama.root / "manifests/registry.ollama.ai/library/qwen/7b"
    secret = tmp_path / "manifest"
    manifest.rename(secret)
    manifest.symlink_to(secret)
    unusable(env, "ollama:qwen:7b", "link out of")


# ---- kinds of files ----


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("adapter", "a LoRA adapter"),
        ("embedder", "an embedding, reranking or encoder model (architecture llama)"),
        ("projector", "the vision or audio projector"),
        ("speech", "a Whisper model"),
    ],
)
def test_files_that_write_no_text_are_told_apart(ollama, files, env, file, what):
    ollama.add(f"{file}:1", files[file])
    failed(run_cli("run", "-t", f"ollama:{file}:1", "hello", env=env), 1, f"ollama:{file}:1: {what}")
    found = scan(env)[f"ollama:{file}:1"]
    assert str(found["kind"]).startswith(what)
    assert found["draft"] is None


def test_a_vocabulary_and_a_vision_part_in_the_same_file(ollama, env, tmp_path):
    import gguf

    def written(name, tensors):
        writer = gguf.GGUFWriter(tmp_path / name, "llama")
        writer.add_block_count(1)
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a", "b"])
        for tensor in tensors:
            import numpy as np

            writer.add_tensor(tensor, np.zeros((2, 32), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / name

    ollama.add("words:1", written("words.gguf", []))
    failed(run_cli("run", "-t", "ollama:words:1", "x", env=env), 1, "only a vocabulary")
    ollama.add("vision:1", written("vision.gguf", ["blk.0.attn_q.weight", "v.blk.0.attn_q.weight"]))
    failed(run_cli("run", "-t", "ollama:vision:1", "x", env=env), 1, "in Ollama's own form")


# ---- folders ----


def add(file: Path, model: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copyfile(model, file))


def test_files_of_lm_studio_and_llama_cpp_by_their_paths(home, files, env):
    of_lmstudio = add(home / ".lmstudio/models/me/Solo-GGUF/solo-Q4_K_M.gguf", files["draft"])
    of_llama_cpp = add(home / ".cache/llama.cpp/me_Big-GGUF_big.gguf", files["target"])
    found = scan(env)
    assert {*found} == {str(of_lmstudio), str(of_llama_cpp)}
    assert found[str(of_llama_cpp)]["draft"] == str(of_lmstudio)


def test_split_models_are_one(home, files, env):
    folder = home / ".lmstudio/models/me/Big"
    names = [f"big-{number:05}-of-00002.gguf" for number in (1, 2)]
    first, second = (add(folder / name, files["draft"]) for name in names)
    found = scan(env)
    assert [*found] == [str(first)]
    assert found[str(first)]["size"] == 2 * files["draft"].stat().st_size
    second.unlink()
    assert "is missing; download it" in str(scan(env)[str(first)]["problem"])


def test_links_in_a_folder(home, files, env, tmp_path):
    folder = home / ".lmstudio/models/me"
    real = add(tmp_path / "elsewhere" / "real.gguf", files["draft"])
    folder.mkdir(parents=True)
    (folder / "out.gguf").symlink_to(real)
    (folder / "loop.gguf").symlink_to("loop.gguf")
    (folder / "gone.gguf").symlink_to("nothing.gguf")
    (folder / "around").symlink_to(folder.parent)  # a loop of folders
    found = scan(env)
    assert {Path(name).name: bool(one["problem"]) for name, one in found.items()} == {
        "out.gguf": False,
        "loop.gguf": True,
        "gone.gguf": True,
    }


# ---- the hub's cache ----


def test_models_in_the_hubs_cache_need_no_network(home, files, env):
    root = home / ".cache" / "huggingface" / "hub"
    file = add_to_hub(root, "me/My-GGUF", "my-Q4_K_M.gguf", files["draft"])
    other = add_to_hub(root, "me/My-GGUF", "old.gguf", files["target"], commit="f" * 40, main=False)
    assert path_of("hf:me/My-GGUF/my-Q4_K_M.gguf", env) == file
    assert path_of(f"hf:me/My-GGUF/old.gguf@{'f' * 40}", env) == other
    assert path_of("https://huggingface.co/me/My-GGUF/blob/main/my-Q4_K_M.gguf", env) == file
    assert run_cli("models", "pull", "hf:me/My-GGUF/my-Q4_K_M.gguf", env=env).stdout.strip() == str(file)
    assert set(scan(env)) == {"hf:me/My-GGUF/my-Q4_K_M.gguf", f"hf:me/My-GGUF/old.gguf@{'f' * 40}"}
    run = run_cli("run", "-t", "hf:me/My-GGUF/my-Q4_K_M.gguf", "-n", "2", "hello", env=env)
    assert run.returncode == 0, run.stderr
    (verified,) = json.loads(
        run_cli("models", "verify", "hf:me/My-GGUF/my-Q4_K_M.gguf", "--json", env=env).stdout
    )["models"]
    assert verified["expected"] == file.resolve().name
    assert verified["ok"]
    failed(
        run_cli("models", "path", "hf:me/My-GGUF/old.gguf", env=env), 1, "models pull hf:me/My-GGUF/old.gguf"
    )


def test_damage_in_the_hubs_cache(home, files, env, tmp_path):
    root = home / ".cache" / "huggingface" / "hub"
    file = add_to_hub(root, "me/My-GGUF", "my.gguf", files["draft"])
    blob = file.resolve()
    blob.rename(tmp_path / "away.gguf")
    assert "is missing" in str(scan(env)["hf:me/My-GGUF/my.gguf"]["problem"])
    file.unlink()
    file.symlink_to(tmp_path / "away.gguf")
    assert "a link out of" in str(scan(env)["hf:me/My-GGUF/my.gguf"]["problem"])
    failed(run_cli("models", "path", "hf:me/My-GGUF/my.gguf", env=env), 1, "is not on this machine")


# ---- permissions, speed ----


def test_folders_that_the_user_names(files, env, tmp_path):
    folder = tmp_path / "mine" / "deep"
    folder.mkdir(parents=True)
    file = shutil.copyfile(files["target"], folder / "mine-Q4_0.gguf")
    assert set(scan(env, tmp_path / "mine")) == {str(file)}
    assert scan(env) == {}
    config = Path(env["XDG_CONFIG_HOME"]) / "edgespec"
    config.mkdir(parents=True)
    config.joinpath("models.toml").write_text(
        f'folders = ["{tmp_path / "mine"}", "{tmp_path / "disk"}", "/none"]'
    )
    OllamaStore(tmp_path / "disk").add("moved:1b", files["draft"])
    found = scan(env)
    assert set(found) == {str(file), "ollama:moved:1b"}
    assert found[str(file)]["draft"] == "ollama:moved:1b"
    assert [line for line in problems(env) if "/none: no such folder" in line]
    failed(run_cli("models", "scan", tmp_path / "nowhere", env=env), 2, "no such folder")
    config.joinpath("models.toml").write_text('folders = ["mine"]')
    failed(run_cli("models", "list", env=env), 1, "folders[0]: expected an absolute path")


def test_a_store_that_may_not_be_read(ollama, files, env, home):
    """Root may read all: the process gives that up before it starts."""
    ollama.add("qwen:7b", files["target"])
    add(home / ".lmstudio/models/me/solo.gguf", files["draft"])
    (ollama.root / "manifests").chmod(0)
    (home / ".lmstudio" / "models" / "me").chmod(0)

    def without_privileges(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *words],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            preexec_fn=_give_up_reading_all if os.getuid() == 0 else None,
        )

    try:
        listed = without_privileges("models", "scan", "--json")
        named = without_privileges("models", "path", "ollama:qwen:7b")
    finally:
        (ollama.root / "manifests").chmod(0o755)
        (home / ".lmstudio" / "models" / "me").chmod(0o755)
    assert listed.returncode == 0, listed.stderr
    found = json.loads(listed.stdout)["problems"]
    assert [line for line in found if line.startswith(f"{ollama.root / 'manifests'}: Permission denied")]
    assert [line for line in found if line.startswith(f"{home / '.lmstudio/models/me'}: Permission denied")]
    failed(named, 2, "ollama:qwen:7b: ", "manifests: Permission denied")


def _give_up_reading_all() -> None:
    """Drop what lets root read any file (CAP_DAC_OVERRIDE, _READ_SEARCH) of the program started next."""
    libc = ctypes.CDLL(None)
    for capability in (1, 2):
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def test_headers_are_read_once(ollama, files, env, monkeypatch):
    ollama.add("qwen:7b", files["target"])
    first = scan(env)
    monkeypatch.setattr("edgespec.models.footprint.check_complete_file", lambda _: pytest.fail("read again"))
    assert scan(env) == first


def test_the_table_is_for_people(ollama, files, env, tmp_path):
    quantize(files["target"], tmp_path / "q8.gguf", "q8_0")
    ollama.add("llama:7b", tmp_path / "q8.gguf")  # :llama: is an emoji to rich
    ollama.add("gone:1b", files["draft"]).unlink()
    result = run_cli("models", "scan", env=env)
    rows = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert rows[0] == "name architecture params quant size vocabulary kernels draft"
    assert [row for row in rows if row.startswith("ollama:llama:7b llama ") and " Q8_0 " in row]
    assert [row for row in rows if row.startswith("ollama:gone:1b not usable")]
    assert "edgespec: ollama:gone:1b: its file" in result.stderr


def test_what_would_be_worth_pulling(ollama, env, tmp_path):
    """A target whose family has a pair in models.toml, with nothing here that drafts for it."""
    model = write_tiny_gguf(tmp_path / "big.gguf", n_layer=6, n_embd=128, n_ff=256, name="Tiny Coder 7B")
    n_vocab = len(__import__("tiny_vocabulary").vocabulary(0)[0])
    config = Path(env["XDG_CONFIG_HOME"]) / "edgespec"
    config.mkdir(parents=True)
    shape = f"shape = {{ cache = 64, heads = 2, width = 64, vocabulary = {n_vocab} }}"
    source = 'sources = [{ kind = "hub", repo = "me/repo", file = "small.gguf" }]'
    config.joinpath("models.toml").write_text(
        f'[models.big]\nfamily = "Tiny-Coder"\n{source}\n'
        f'[models.small]\nfamily = "Tiny-Coder"\nsize = 1000\n{source}\n{shape}\n'
        '[pairs]\ntiny = { target = "big", draft = "small" }\n'
    )
    ollama.add("coder:7b", model)
    assert scan(env)["ollama:coder:7b"]["worth_pulling"] == "small"
    run = run_cli("run", "-t", "ollama:coder:7b", "-n", "2", "hello", env=env)
    assert run.returncode == 0, run.stderr
    assert "worth pulling (1 kB): `edgespec models pull small`" in run.stderr


@pytest.mark.pair
def test_the_real_pair_in_a_store_of_ollama(pair, env, ollama):
    """The target's blob is that of the registry: its registered draft is used; nothing is copied."""
    target, draft = pair
    for name, file in (("qwen2.5-coder:1.5b", target), ("qwen2.5-coder:0.5b", draft)):
        blob = ollama.add(name, file)
        assert blob.samefile(file)
    found = scan(env)
    assert found["ollama:qwen2.5-coder:1.5b"]["draft"] == "qwen2.5-coder-1.5b-head-q4_0"
    texts = [
        run_cli("run", "-t", name, "--temp", "0", "-n", "8", "Add two numbers in Python.", env=env).stdout
        for name in ("ollama:qwen2.5-coder:1.5b", str(target))
    ]
    assert texts[0] == texts[1] != ""
