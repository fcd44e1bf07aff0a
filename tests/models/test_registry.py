"""models.toml: reading, overriding, complaints, the user's own entries; and the store's stamps."""

import tomllib

import pytest

from edgespec.errors import EdgespecError, UsageError
from edgespec.models import registry as models
from edgespec.models.hub import hub_entry
from edgespec.models.registry import SHIPPED_FILE, Entry, HubSource, ModelShape, WheelsSource, load_registry
from edgespec.models.resolve import locate
from edgespec.models.store import Stamp, Store


@pytest.fixture
def user_toml(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    file = models.user_models_file()
    assert file == tmp_path / "config" / "edgespec" / "models.toml"
    file.parent.mkdir(parents=True)
    return file


def test_shipped_entries_are_pinned_and_complete(user_toml):
    for entry in load_registry().entries.values():
        assert entry.family
        assert entry.params
        assert entry.licence
        if entry.speech:  # converted here, so that only what it is converted from has a hash
            assert entry.verified and entry.download_bytes
            assert entry.quantization.lower() == entry.converted
            assert entry.name.startswith("whisper-")
            continue
        assert entry.quantization.lower().replace("_", "") in entry.name.replace("_", "")
        assert entry.derived or (entry.size and entry.verified)
        assert load_registry().shape(entry), "doctor tells whether it fits before it is here"


def test_a_derived_model_has_the_shape_of_its_source(user_toml):
    registry = load_registry()
    draft = registry.get("qwen2.5-0.5b-q4_0")
    assert draft.shape is None
    assert registry.shape(draft) == ModelShape(cache=12_288, heads=14, width=6_656, vocabulary=151_936)
    user_toml.write_text('[models.mine]\npath = "/mine.gguf"\n')
    registry = load_registry()
    assert registry.shape(registry.get("mine")) is None


def test_pairs_for_boards(user_toml):
    registry = load_registry()
    for name in ("pi-2gb", "pi-4gb"):
        pair = registry.pair(name)
        shapes = [registry.shape(registry.get(model)) for model in (pair.target, pair.draft)]
        assert shapes[0].vocabulary == shapes[1].vocabulary
        assert registry.complete(pair.target, None) == (pair.target, pair.draft)


def test_top_level_file_is_the_packaged_one():
    top = SHIPPED_FILE.parents[2] / "models.toml"
    if not top.exists():
        pytest.skip("not run from a source tree")
    assert top.samefile(SHIPPED_FILE)


def test_user_file_extends_and_overrides(user_toml):
    user_toml.write_text(
        """
        [models.mine]
        sources = [{ kind = "hub", repo = "me/mine", file = "mine.gguf" }]
        [models."smollm2-135m-q4_1"]
        params = "mine too"
        sources = [{ kind = "wheels", packages = ["a==1", "b==2"], member = "*.bin" }]
        [pairs]
        default = { target = "mine", draft = "smollm2-135m-q4_1" }
        small = { target = "mine", draft = "mine" }
        """
    )
    registry = load_registry()
    mine = registry.get("mine")
    assert mine.sources == (HubSource("me/mine", "mine.gguf", "main"),)
    assert not mine.verified
    assert registry.get("smollm2-135m-q4_1").params == "mine too"
    assert registry.get("smollm2-135m-q4_1").sources == (WheelsSource("*.bin", ("a==1", "b==2")),)
    assert registry.pairs["default"].target == "mine"
    assert "small" in registry.pairs
    assert "qwen2.5-coder-1.5b-q4_k_m" in registry.entries


def test_a_changed_user_file_is_read_again(user_toml):
    assert "later" not in load_registry().entries
    user_toml.write_text('[models.later]\npath = "/x.gguf"\n')
    assert "later" in load_registry().entries
    user_toml.unlink()
    assert "later" not in load_registry().entries


HUB = '{ kind = "hub", repo = "a/b", file = "c.gguf" }'


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("models = [", "not valid TOML"),
        ("[model.x]\npath='/x'", "top level.model: no such field (nearest: models, folders, default)"),
        ("[models.x]\nfamily = 'y'", "models.x: needs exactly one of sources, derived and path, got none"),
        ("[models.x]\nsources = []", "models.x.sources: expected array of length >= 1"),
        ("[models.x]\nsources = [{kind='ftp'}]", "models.x.sources[0].kind: invalid value"),
        ("[models.x]\npacked = '../x.gguf'", "models.x.packed: expected str of another form"),
        ("[models.x]\nsources = [{kind='hub', file='f'}]", "models.x.sources[0].repo: missing"),
        (
            "[models.x]\nsources = [{kind='hub', repo='a/b', file='../f'}]",
            "file: expected str of another form",
        ),
        (
            "[models.x]\nsources = [{kind='wheels', packages=['--index-url=x'], member='m'}]",
            "packages[0]: expected str",
        ),
        (f"[models.x]\nsize = -1\nsources = [{HUB}]", "models.x.size: expected int >= 1"),
        (f"[models.x]\nsha256 = 'ABC'\nsources = [{HUB}]", "models.x.sha256: expected str of another form"),
        (
            f"[models.x]\nshape = {{cache=1, heads=0, width=1, vocabulary=1}}\nsources = [{HUB}]",
            "models.x.shape.heads: expected int >= 1, got 0",
        ),
        (f"[models.x]\nfamliy = 'f'\nsources = [{HUB}]", "models.x.famliy: no such field (nearest: family)"),
        (f"[models.'../x']\nsources = [{HUB}]", "'../x' is not a usable name"),
        ("[models.x]\npath = 'rel.gguf'", "models.x.path: expected an absolute path"),
        (
            "[models.x]\nderived = {from = 'nobody', type = 'q4_0'}",
            "derived.from: 'nobody' is not a known model",
        ),
        (
            "[models.x]\nderived = {from = 'qwen2.5-coder-0.5b-q4_0', type = 'q4_1'}",
            "'qwen2.5-coder-0.5b-q4_0' is itself derived",
        ),
        ("[pairs.p]\ntarget = 'smollm2-135m-q4_1'", "pairs.p.draft: missing"),
        (
            "[pairs.p]\ntarget = 'smollm2-135m-q4_1'\ndraft = 'smolm2-135m'",
            "pairs.p.draft: 'smolm2-135m' is not a known model (nearest: smollm2-135m-q4_1",
        ),
    ],
)
def test_a_bad_user_file_is_one_line_with_file_entry_and_field(user_toml, text, complaint):
    user_toml.write_text(text)
    with pytest.raises(EdgespecError) as caught:
        load_registry()
    assert complaint in str(caught.value)
    assert str(caught.value).startswith(str(user_toml))
    assert "\n" not in str(caught.value)


def test_an_unreadable_user_file(user_toml):
    user_toml.write_bytes(b"\xff\xfe")
    with pytest.raises(EdgespecError, match="cannot be read"):
        load_registry()


def test_unknown_name_offers_the_nearest(user_toml):
    with pytest.raises(UsageError) as caught:
        load_registry().get("qwen2.5-coder-1.5b")
    assert "nearest: qwen2.5-coder-1.5b-q4_k_m" in str(caught.value)
    assert "edgespec models list" in str(caught.value)
    with pytest.raises(UsageError, match=r"'zzz'; see"):
        load_registry().get("zzz")


@pytest.mark.parametrize(
    ("ref", "source", "name"),
    [
        ("hf:a/b/c.gguf", HubSource("a/b", "c.gguf", "main"), "hf--a--b--c"),
        ("hf:a/b/s/c.Q4.gguf@v1", HubSource("a/b", "s/c.Q4.gguf", "v1"), "hf--a--b--s--c.Q4@v1"),
        *(
            (url, HubSource("a/b", "c.gguf", "main"), "hf--a--b--c")
            for url in (
                "https://huggingface.co/a/b/resolve/main/c.gguf",
                "https://huggingface.co/a/b/blob/main/c.gguf",
                "https://huggingface.co/a/b/resolve/main/c.gguf?download=true#x",
                "http://www.huggingface.co/a/b/raw/main/c.gguf",
                "HTTPS://HuggingFace.co/a/b/blob/main/c.gguf",
                "https://hf.co/a/b/blob/main/c.gguf",
                "huggingface.co/a/b/blob/main/c.gguf",
                "https://mirror.example:8443/a/b/resolve/main/c.gguf",
            )
        ),
        (
            "https://huggingface.co/a/b/blob/0123abcd/s/c%20d.gguf",
            HubSource("a/b", "s/c d.gguf", "0123abcd"),
            "hf--a--b--s--c_d@0123abcd",
        ),
        (
            "https://huggingface.co/a/b/resolve/refs%2Fpr%2F3/c.gguf",
            HubSource("a/b", "c.gguf", "refs/pr/3"),
            "hf--a--b--c@refs--pr--3",
        ),
    ],
)
def test_hf_reference(ref, source, name, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example:8443")
    assert locate(ref) == hub_entry(ref)
    entry = hub_entry(ref)
    assert entry.sources == (source,)
    assert entry.name == name
    assert not entry.verified


@pytest.mark.parametrize(
    ("ref", "said"),
    [
        *((ref, "hf:OWNER/REPO/FILE.gguf") for ref in ("hf:a/b/c.bin", "hf:a/b/../c.gguf", "hf:")),
        ("hf:a/b/c.gguf@--x", "not a revision"),
        ("https://huggingface.co/a/b/blob/main/README.md", "hf:OWNER/REPO/FILE.gguf"),
        ("https://huggingface.co/", "hf:OWNER/REPO"),
        ("https://huggingface.co/a/b/blob/main/..%2Fc.gguf", "hf:OWNER/REPO/FILE.gguf"),
        ("https://example.com/c.gguf", "only URLs of huggingface.co"),
        ("", "is empty"),
        ("  ", "is empty"),
    ],
)
def test_bad_hub_names(ref, said):
    with pytest.raises(UsageError, match=said):
        locate(ref)


def test_add_and_remove_keep_the_rest_of_the_user_file(user_toml, tmp_path):
    before = '# mine\n[pairs]\np = { target = "smollm2-135m-q4_1", draft = "smollm2-135m-q4_1" } # x\n'
    user_toml.write_text(before)
    path = tmp_path / 'odd "name" ü.gguf'
    models.add_local("one", path, 12, "a" * 64)
    models.add_local("t.wo", path, 12, "b" * 64)
    registry = load_registry()
    assert registry.get("one") == Entry("one", path=path, size=12, sha256="a" * 64)
    assert user_toml.read_text().startswith(before)
    models.remove_local("one")
    assert "one" not in load_registry().entries
    assert load_registry().get("t.wo").path == path
    models.remove_local("t.wo")
    assert user_toml.read_text().rstrip() == before.rstrip()


A, B = (f'path = "/{name}.gguf"\n' for name in "ab")
PAIR = '[pairs.p]\ntarget = "b"\ndraft = "b"\n'


@pytest.mark.parametrize(
    "text",
    [
        f"[models.a]\n{A}\n[models.b]\n{B}{PAIR}",
        f"# mine\n  [models.a]\n  {A}\n  # about b\n  [models.b] # x\n  {B}{PAIR}",
        f"  [ models . 'a' ]\n{A}\n\t[models.b]\n{B}\n  {PAIR}",
        f'["models"."a"]\n{A}[models.b]\n{B}',
        f"[models.b]\n{B}[models.a]\n{A}{PAIR}",
        f"[models.b]\n{B}{PAIR}[models.a]\n{A}",
        f"[models.a]\n{A}{PAIR}[models.b]\n{B}",
        '[models]\na = { path = "/a.gguf" } # one\nb = { path = "/b.gguf" }\n',
        '[models]\na.path = "/a.gguf"\nb.path = "/b.gguf"\n',
        'models.a.path = "/a.gguf"\nmodels.b.path = "/b.gguf"\n',
        'models = { a = { path = "/a.gguf" }, b = { path = "/b.gguf" } }\n',
        f"[models.b]\npath = '''/b\n[models.a]\n'''\n[models.a]\n{A}{PAIR}",
        f'[models.a]\n{A}parts = [\n"{"0" * 64}",\n  "{"1" * 64}"]\n[models.b]\n{B}',
        f"[models.a]\r\n{A}\r\n# about b\r\n[models.b]\r\n{B}",
    ],
)
def test_a_file_written_by_hand_loses_only_what_is_removed(user_toml, text):
    """And gets a default, and loses it, without another change: however the user wrote it."""
    user_toml.write_text(text, newline="")
    written = user_toml.read_bytes()
    before = tomllib.loads(written.decode())
    models.set_default("b")
    assert tomllib.loads(user_toml.read_text()) == {"default": "b", **before}
    models.set_default("")
    assert tomllib.loads(user_toml.read_text()) == before
    models.remove_local("a")
    del before["models"]["a"]
    assert tomllib.loads(user_toml.read_text()) == before
    lines = user_toml.read_bytes().splitlines(keepends=True)
    comments = [line for line in written.splitlines(keepends=True) if line.lstrip().startswith(b"#")]
    assert [line for line in lines if line.lstrip().startswith(b"#")] == comments
    assert "a" not in load_registry().entries and "b" in load_registry().entries


def test_add_refuses_a_taken_or_unusable_name(user_toml, tmp_path):
    with pytest.raises(UsageError, match="exists already"):
        models.add_local("smollm2-135m-q4_1", tmp_path / "x.gguf", 1, "a" * 64)
    with pytest.raises(UsageError, match="name default: a pair of this name exists already"):
        models.add_local("default", tmp_path / "x.gguf", 1, "a" * 64)
    with pytest.raises(UsageError, match="not a usable name"):
        models.add_local("a b", tmp_path / "x.gguf", 1, "a" * 64)
    assert not user_toml.exists()


def test_store_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("EDGESPEC_MODELS_DIR", str(tmp_path / "here"))
    assert Store.default().root == tmp_path / "here"
    monkeypatch.delenv("EDGESPEC_MODELS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Store.default().root == tmp_path / "edgespec" / "models"


def test_a_file_is_present_only_with_a_stamp_of_its_size_and_hash(tmp_path, user_toml):
    registry, store = load_registry(), Store(tmp_path / "models")
    entry = Entry("x", sha256="a" * 64, sources=(HubSource("a/b", "c.gguf"),))
    assert not store.is_present(entry, registry)
    store.write_stamp(entry, Stamp("a" * 64, 4, "test"))
    assert not store.is_present(entry, registry)
    store.file(entry).write_bytes(b"GGUF")
    store.write_stamp(entry, Stamp("a" * 64, 4, "test"))
    assert store.is_present(entry, registry)
    store.write_stamp(entry, Stamp("b" * 64, 4, "test"))
    assert not store.is_present(entry, registry)
    (tmp_path / "models" / "x.json").write_text("{")
    assert not store.is_present(entry, registry)
    assert sorted(path.name for path in store.remove(entry)) == ["x.gguf", "x.json"]
    assert store.remove(entry) == []
