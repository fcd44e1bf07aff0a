"""What other packages offer by entry points, from a package made up for the test."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import wave
from importlib import metadata
from types import SimpleNamespace

import pytest

from command_line import run_cli, user_environment
from edgespec.errors import EdgespecError
from edgespec.platform import plugins
from edgespec.platform.metering import choose_meter
from other_package import install
from tiny_whisper import write_tiny_whisper

ENTRIES = """[edgespec.commands]
hello = their_package:hello
run = their_package:hello
broken = no_such_module:command
without = their_package:nothing
"""
SOURCE = '''def hello(name: str = "you") -> None:
    """Greet somebody."""
    print(f"hello {name}")
'''


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package of somebody else's."""
    install(tmp_path, monkeypatch, entries=ENTRIES, source=SOURCE)


def edgespec(*words: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from edgespec.cli import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", code, *words], check=False, capture_output=True, text=True, timeout=120
    )


@pytest.mark.usefixtures("package")
def test_a_command_of_another_package_is_a_command():
    assert edgespec("hello", "--name", "Ada").stdout == "hello Ada\n"


@pytest.mark.usefixtures("package")
def test_help_shows_it_and_names_what_cannot_be_loaded():
    shown = edgespec("--help")

    assert shown.returncode == 0
    assert "Greet somebody." in shown.stdout
    for name in ("broken", "without"):
        assert f"{name} of their-package" in shown.stderr
        assert f"│ {name} " not in shown.stdout


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", ["broken", "without"])
def test_one_that_cannot_be_loaded_is_one_line(name):
    ended = edgespec(name)

    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert "their-package" in ended.stderr


@pytest.mark.usefixtures("package")
def test_no_other_package_takes_a_name_of_ours():
    assert plugins.is_ours(plugins.offered("edgespec.commands")["run"])


def test_all_that_we_offer_can_be_loaded():
    groups = ("edgespec.commands", "edgespec.parts")
    ours = [point for group in groups for point in plugins.offered(group).values() if plugins.is_ours(point)]

    assert len(ours) > 20
    assert all(point.load() for point in ours)


def test_an_installation_older_than_the_code_is_one_line(monkeypatch):
    ours = metadata.distribution("edgespec").entry_points
    older = metadata.EntryPoints(point for point in ours if point.group != "edgespec.drafts")
    monkeypatch.setattr(plugins, "distribution", lambda _name: SimpleNamespace(entry_points=older))
    with pytest.raises(EdgespecError, match=r"newer than its installation, .*no drafts: call `make run`"):
        plugins.groups.__wrapped__()


FAULTS = """
def hello() -> None:
    raise GeneratorExit("hm")
def odd(what: "Nowhere") -> None: pass
number = 3
"""
FAULTY = "hello = their_package:hello\nodd = their_package:odd\nnumber = their_package:number\n"


def test_a_command_that_fails_in_any_way_is_one_line(tmp_path, monkeypatch):
    install(tmp_path / "a", monkeypatch, entries=f"[edgespec.commands]\n{FAULTY}", source=FAULTS)

    for name, code in (("hello", 1), ("odd", 2), ("number", 2)):
        ended = edgespec(name)
        assert (ended.returncode, len(ended.stderr.splitlines())) == (code, 1), ended.stderr
        assert f"{name} of their-package" in ended.stderr
    assert "their_package.py:3)" in edgespec("hello").stderr
    assert "Traceback" in edgespec("hello", "--debug").stderr
    shown = edgespec("--help")
    assert (shown.returncode, len(shown.stderr.splitlines())) == (0, 2)


@pytest.mark.parametrize("error", ["SystemExit(3)", "GeneratorExit", "KeyboardInterrupt", "ValueError"])
def test_a_command_that_fails_at_import_leaves_help_whole(tmp_path, monkeypatch, error):
    install(tmp_path / "a", monkeypatch, entries=f"[edgespec.commands]\n{FAULTY}", source=f"raise {error}\n")

    shown = edgespec("--help")
    assert (shown.returncode, len(shown.stderr.splitlines())) == (0, 3)
    assert "their_package.py:1)" in shown.stderr


def test_a_real_ctrl_c_is_told_from_a_raised_one():
    with pytest.raises(KeyboardInterrupt):
        plugins.guarded("it failed", lambda: signal.default_int_handler(signal.SIGINT, None))
    with pytest.raises(
        plugins.PluginError, match=r"it failed: KeyboardInterrupt: x \(.*test_plugins.py:\d+\)"
    ):
        plugins.guarded("it failed", interrupted)


def interrupted():
    raise KeyboardInterrupt("x")


# ---- meters ----

METER = """
from edgespec.platform.closing import Closing
from edgespec.platform.metering import Measurement

class Wattmeter(Closing):
    available, counts = True, False
    def __init__(self, *, on_message): pass
    def close(self): pass
    def begin(self): return self
    def mark(self, phase): pass
    def end(self): return Measurement(1.0, 7.0, source="their wattmeter")
"""


BROKEN = (
    """
raise SystemExit(3)
""",
    """
def Wattmeter(on_message): raise GeneratorExit
""",
    """
class Wattmeter:
    counts = False
    def __init__(self, on_message): pass
    @property
    def available(self): raise KeyboardInterrupt
""",
)


@pytest.mark.parametrize("source", BROKEN)
def test_a_meter_that_cannot_be_had_is_left_out_in_one_line(tmp_path, monkeypatch, source):
    entries = "[edgespec.meters]\nwattmeter = their_package:Wattmeter\n"
    install(tmp_path / "packages", monkeypatch, entries=entries, source=source)

    said = []
    with choose_meter(assume_watts=None, on_message=said.append) as meter:
        assert meter.begin().end().source != "their wattmeter"
    (line,) = [line for line in said if "wattmeter" in line]
    assert "their_package.py:" in line


@pytest.mark.parametrize("place", ["begin", "mark", "end", "close"])
@pytest.mark.parametrize("does", ["raise SystemExit(3)", "raise KeyboardInterrupt", "return 7"])
def test_a_meter_that_fails_later_measures_nothing_and_says_so(tmp_path, monkeypatch, place, does):
    lines = [
        f"    def {place}(self, *_): {does}" if f"def {place}(" in line else line
        for line in METER.split("\n")
    ]
    entries = "[edgespec.meters]\nwattmeter = their_package:Wattmeter\n"
    install(tmp_path / "packages", monkeypatch, entries=entries, source="\n".join(lines))

    said = []
    with choose_meter(on_message=said.append) as meter:
        for _ in range(2):
            window = meter.begin()
            window.mark("draft")
            measured = window.end()
    harmless = does == "return 7" and place in ("mark", "close")
    assert (measured.joules == 7.0) == (harmless or place == "close")
    assert [("their_package.py:" in line, "\n" in line) for line in said] == [(True, False)] * (not harmless)
    assert measured.joules or measured.reason in said[0]


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Run a command where another package offers a meter; the document that it prints."""
    entries = "[edgespec.meters]\nwattmeter = their_package:Wattmeter\n"
    install(tmp_path / "packages", monkeypatch, entries=entries, source=METER)

    def run(*words: object) -> dict[str, object]:
        done = run_cli(*words, "--threads", 1, "--json", env=user_environment(tmp_path), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.fixture
def whisper(tmp_path):
    """The arguments for a second of silence and a model that hears it."""
    model, recording = write_tiny_whisper(tmp_path / "whisper.gguf"), tmp_path / "a.wav"
    with wave.open(str(recording), "wb") as out:
        out.setparams((1, 2, 16000, 0, "NONE", ""))
        out.writeframes(bytes(32000))
    return model, recording


def test_transcribe_asks_a_meter_of_another_package(measured, whisper):
    model, recording = whisper
    energy = measured("transcribe", recording, "-m", model, "--language", "en", "--energy")["stats"]["energy"]

    assert (energy["joules"], energy["source"]) == (7.0, "their wattmeter")


def test_bench_asks_it(measured, tiny_path, tmp_path):
    suite = tmp_path / "one.jsonl"
    suite.write_text('{"question_id": "a", "category": "b", "turns": ["the cat"]}\n')
    texts = ("--suite", suite, "-t", tiny_path, "-n", 2, "--variants", "suffix-2")
    (cell,) = measured("bench", *texts, "--rounds", 1)["outcome"]["cells"]
    assert {run["energy"]["joules"] for run in cell["runs"]} == {7.0}


def test_compare_asks_it_in_its_children_too(measured, tiny_path, tmp_path):
    (tmp_path / "one.jsonl").write_text('{"question_id": "a", "category": "b", "turns": ["the cat"]}\n')
    models = ("--targets", tiny_path, "--drafts", "none", "--kernels", "off")

    outcome = measured("compare", *models, "--suite", "one.jsonl", "-n", 2, "--rounds", 1)["outcome"]
    assert outcome["machine"]["energy"] == "their wattmeter"
    assert {run["energy"]["joules"] for run in outcome["cells"][0]["runs"]} == {7.0}
