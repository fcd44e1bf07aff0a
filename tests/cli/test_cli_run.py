"""`edgespec run` as a user types it: in a process of its own, with real (tiny) models."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import COMMAND, failed, run_cli
from edgespec.apps.energy.meter import EnergyMeter
from edgespec.models import resolve
from edgespec.models.resolve import locate
from terminals import Terminal
from tiny_bert import TinyBert
from tiny_gguf import EOS, write_tiny_gguf
from tiny_models import make_tiny
from user_models import write_user_models


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """One cache for all runs: the kernels' self-test runs once, as it does for a user."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def run(tiny_path, tiny_draft_path, with_kernels):
    """Run `edgespec run` on the tiny pair unless `models` are given; returns what became of it."""

    def run(*arguments, models=("--target", tiny_path, "--draft", tiny_draft_path), env=(), **options):
        return run_cli("run", *models, *arguments, env=with_kernels | dict(env), text=False, **options)

    return run


# ---- which models ----


def test_each_model_is_located_once(run, tiny_path, tiny_draft_path, with_kernels, monkeypatch):
    """From the command line to the engine, be the draft named or the pair's."""
    names = {"big": tiny_path, "small": tiny_draft_path}
    pairs = '[pairs.both]\ntarget = "big"\ndraft = "small"\n'
    write_user_models(Path(with_kernels["XDG_CONFIG_HOME"]), names, pairs)
    located = []
    monkeypatch.setattr(resolve, "locate", lambda name: (located.append(name), locate(name))[1])
    for models in (("-t", "big", "-d", "small"), ("-m", "big"), ("-p", "both")):
        located.clear()
        process = run("abc", "-n", 2, "--json", models=models)
        assert (json.loads(process.stdout)["target"], sorted(located)) == ("big", ["big", "small"])


# ---- what it prints ----


MODEL = ("--drafter", "model", "--gamma", 3)
"""Drafts whatever a pass costs; tiny models are so quick that the scheduler may draft nothing."""


def test_text_on_stdout_and_statistics_on_stderr(run):
    process = run("abc", "-n", 20, "--seed", 1, "--stats", "full", *MODEL)
    assert process.returncode == 0
    assert process.stdout.endswith(b"\n")
    for word in (
        "tokens/s",
        "tau",
        "alpha",
        "of the drafted accepted",
        "by position",
        "why",
        "verify",
        "began after",
        "GiB",
        "seed 1",
    ):
        assert word in process.stderr.decode()
    assert b"\x1b[" not in process.stdout + process.stderr, "piped output is plain"


def test_three_lines_of_statistics(run):
    process = run("abc", "-n", 20, "--seed", 1, *MODEL)
    empty, prompt, text, drafts = process.stderr.decode().splitlines()
    assert empty == ""
    assert re.fullmatch(r"prompt   \d+ tokens in [\d.]+ s", prompt), prompt
    limit = "cut after 20 tokens: -n 40, or -n -1 for all"
    assert re.fullmatch(rf"text     20 tokens in [\d.]+ s, [\d.]+ tokens/s; {limit}", text), text
    found = re.fullmatch(r"drafts   (\d+) of \d+ accepted(, (\d+) from the draft model)?", drafts)
    assert found and int(found[3] or 0) == int(found[1]), drafts
    full = run("abc", "-n", 20, "--seed", 1, "--stats", "full", *MODEL).stderr.decode().splitlines()
    assert [line[:9] for line in full[1:4]] == ["prompt   ", "text     ", "drafts   "]
    assert full[3] == drafts, "the same words"


def test_nothing_is_said_of_drafts_that_were_not_asked_for_or_of_a_few_tokens(run):
    for options in (("-n", 20, "--drafter", "none"), ("-n", 20, "--gamma", 0), ("-n", 2, *MODEL)):
        for stats in ("short", "full"):
            said = run("abc", *options, "--stats", stats).stderr.decode()
            assert "\ndrafts" not in said and "was drafted" not in said, (options, said)


def test_without_a_limit_an_answer_goes_on_until_the_model_ends_it(run, tmp_path):
    """More than the 256 tokens of earlier versions; where a limit cuts, the line says how it goes on."""
    model = write_tiny_gguf(tmp_path / "long.gguf", seed=1, n_ctx=1024)
    options = ("--raw", "a b", "--temp", 0, "--logit-bias", f"{ord('a')}=1000", "--json")
    choose = {"models": ("-t", model)}
    cut = json.loads(run(*options, **choose).stdout)
    assert (cut["stop_reason"], cut["prompt_tokens"] + cut["tokens"]) == ("context", 1024)
    said = run(*options[:-1], **choose).stderr.decode()
    assert f"; cut after {cut['tokens']:,} tokens: the context of 1,024 is full, all that the model" in said
    small = run(*options[:-1], "-c", 300, **choose).stderr.decode()
    assert re.search(r"; cut after 29\d tokens: the context of 300 is full; -c 600 holds more\n", small)
    ended = json.loads(run("--raw", "a b", "--logit-bias", f"{EOS}=1000", "--json", **choose).stdout)
    assert (ended["stop_reason"], ended["tokens"]) == ("eog", 0)


@pytest.mark.parametrize("architecture", ["openai-moe", "qwen35", "rwkv7"])
def test_experts_hybrid_and_recurrent_models(run, tmp_path, architecture):
    target = make_tiny(architecture, tmp_path / "tiny.gguf")
    process = run("abc", "-n", 12, "--temp", 0, "--json", models=("--target", target, "--drafter", "suffix"))
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    assert (len(result["token_ids"]), result["stop_reason"]) == (12, "length")


def test_no_stats(run):
    for option in (["--no-stats"], ["--stats", "none"]):
        process = run("abc", "-n", 5, *option)
        assert (process.returncode, process.stderr) == (0, b"")


def test_json(run, tiny_path):
    process = run("abc", "-n", 20, "--seed", 5, "--json")
    result = json.loads(process.stdout)
    assert process.stderr == b""
    assert set(result) >= {
        "text",
        "tokens",
        "prompt_tokens",
        "stop_reason",
        "seed",
        "target",
        "draft",
        "stats",
    }
    assert set(result["stats"]) >= {
        "prompt_tokens_per_s",
        "generation_tokens_per_s",
        "ttft_s",
        "steps",
        "tau",
        "alpha",
        "draft_acceptance_rate",
        "peak_rss_bytes",
    }
    assert result["seed"] == 5
    assert result["tokens"] == len(result["token_ids"])
    assert result["target"] == str(tiny_path)
    again = json.loads(run("abc", "-n", 20, "--seed", 5, "--json").stdout)
    assert again["text"] == result["text"]


def in_terminal(environment, *options):
    """Return what `run` shows in a terminal."""
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "run", *map(str, options)],
        stdout=terminal,
        stderr=terminal,
        stdin=subprocess.DEVNULL,
        env={**environment, "TERM": "xterm-256color"},
    )
    os.close(terminal)
    shown = b""
    while True:
        try:
            chunk = os.read(controller, 4096)
        except OSError:  # the terminal's other end is closed
            break
        if not chunk:
            break
        shown += chunk
    os.close(controller)
    assert process.wait(timeout=60) == 0
    return shown


def test_show_draft_colours_only_in_a_terminal(run, tiny_path, tiny_draft_path, child_environment):
    plain = run("abc", "-n", 30, "--seed", 2, "--show-draft", "--no-stats")
    assert b"\x1b[" not in plain.stdout
    options = ("-n", 30, "--seed", 2, "--show-draft", "--drafter", "model", "--gamma", 3)
    shown = in_terminal(child_environment, "-t", tiny_path, "-d", tiny_draft_path, "abc", *options)
    assert b"\x1b[32m" in shown
    assert b"\x1b[31m" in shown


def test_explain_does_not_cut_the_text_into_pieces(tiny_path, child_environment):
    """In a terminal, where both are seen, the text comes after the lines about the steps."""
    options = ("--drafter", "suffix", "--gamma", 3, "-n", 30, "--seed", 2, "--explain", "steps", "--no-stats")
    shown = in_terminal(child_environment, "-t", tiny_path, "abc", *options)
    last_line = shown.rindex(b"emitted, draft")
    assert shown.count(b"emitted, draft") > 5
    assert len(shown[last_line:]) > len("emitted, draft 0.0 ms, verify 0.0 ms") + 30


@pytest.mark.parametrize("options", [(), ("--show-draft", "--drafter", "suffix", "--gamma", 3)])
def test_words_are_on_the_screen_before_the_last_token_exists(tmp_path, child_environment, options):
    """Ctrl-C after the first words: what comes after them was not yet written."""
    model = write_tiny_gguf(tmp_path / "long.gguf", seed=1, n_ctx=1 << 15)
    n_asked = 30_000
    command = (*COMMAND, "run", "-t", model, "abc", "-n", n_asked, *options)
    only_a = ("--logit-bias", f"{ord('a')}=1000")
    program = [*map(str, (*command, *only_a))]
    with Terminal(program, child_environment, timeout_s=120, columns=40) as terminal:
        terminal.expect("a{20}")
        terminal.type("\x03")
        shown = terminal.expect("; interrupted")
        assert terminal.wait() == 130
    assert 20 <= int(re.search(r"text +([\d,]+) tokens in", shown)[1].replace(",", "")) < n_asked


def test_a_bar_in_a_terminal_shows_how_far_a_prompt_is_read(tmp_path, child_environment):
    """And goes when Ctrl-C ends the reading."""
    model = write_tiny_gguf(tmp_path / "long.gguf", seed=1, n_ctx=1 << 15)
    (tmp_path / "prompt").write_text("a" * 32_000)
    command = (*COMMAND, "run", "-t", model, "--raw", "-n", 5, "-f", tmp_path / "prompt")
    with Terminal([*map(str, command)], child_environment, timeout_s=120) as terminal:
        terminal.expect(r"reading the prompt .* [1-9]\d*/32000 tokens")
        terminal.type("\x03")
        assert "0 tokens in" in terminal.expect("; interrupted")
        assert terminal.wait() == 130
    assert "\x1b[2K" in terminal.shown.rpartition("reading the prompt")[2], "its line is erased"


def test_json_counts_tokens_in_a_terminal_until_it_is_printed(tmp_path, child_environment):
    model = write_tiny_gguf(tmp_path / "long.gguf", seed=1, n_ctx=1 << 15)
    command = (
        *COMMAND,
        "run",
        "-t",
        model,
        "abc",
        "-n",
        30_000,
        "--logit-bias",
        f"{ord('a')}=1000",
        "--json",
    )
    with Terminal([*map(str, command)], child_environment, timeout_s=120) as terminal:
        n_shown = int(terminal.expect(r"writing: \d+ tokens").split()[-2])
        terminal.type("\x03")
        found = json.loads(re.search(r"{\"text.*}", terminal.expect(r"{\"text.*}\s"))[0])
        assert n_shown <= found["tokens"] < 30_000
        assert terminal.wait() == 130


def test_help_names_every_command_in_its_group(child_environment):
    with Terminal([*COMMAND, "--help"], child_environment) as terminal:
        shown = terminal.expect("Example: edgespec")
    panels = re.split(r"╭─ ([A-Z][\w ]+) ─+╮", shown)[1:]
    groups = {
        panel: re.findall(r"│ (\w+) +\w", rows) for panel, rows in zip(panels[::2], panels[1::2], strict=True)
    }
    assert groups.pop("Options") == []
    assert groups == {
        "Write": ["run", "chat", "serve", "batch", "embed", "transcribe"],
        "Measure": ["bench", "compare", "profile", "calibrate", "energy"],
        "Models and drafts": ["models", "draft", "cache", "quantize"],
        "Machine": ["doctor", "node", "ps"],
    }
    rows = dict(re.findall(r"│ (\w+) +(\w[^│]*)", shown))
    assert {"run", "quantize", "models", "draft", "cache"} <= set(rows)
    assert rows["models"].startswith("List, pull, check and remove models.")
    assert rows["draft"].startswith("Make drafts: ")
    assert rows["cache"].startswith("Show and delete what is kept")


@pytest.mark.parametrize("command", [[], ["models"]])
def test_a_command_that_needs_another_one_shows_its_help_and_no_error(command, child_environment):
    process = run_cli(*command, env=child_environment)
    assert (process.returncode, process.stderr) == (2, "")
    assert "Usage: edgespec" in process.stdout


@pytest.mark.parametrize("module", ["rich.console", "typer", "llama_cpp"])
def test_ctrl_c_while_modules_are_loaded_is_one_line(child_environment, module):
    code = f"""
import sys
from importlib.abc import MetaPathFinder

class Interrupted(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupted())
from edgespec.cli import main
sys.exit(main(["run", "hello"]))
"""
    process = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=child_environment,
        check=False,
        timeout=60,
    )
    assert (process.returncode, process.stderr) == (130, "edgespec: error: interrupted\n")


@pytest.mark.parametrize(
    ("arguments", "loaded"),
    [
        (["--version"], ""),
        (["energy"], ""),
        (["models", "list"], ""),
        (["--help"], "edgespec.apps.bench.commands.bench"),
        (["bench", "--help"], "edgespec.apps.bench.commands.bench"),
    ],
)
def test_only_the_command_that_is_called_is_loaded(child_environment, arguments, loaded):
    code = (
        "import sys; from edgespec.cli import main; main(sys.argv[1:]); "
        "print(*{'llama_cpp', 'edgespec.apps.bench.commands.bench'} & {*sys.modules}, file=sys.stderr)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        env=child_environment,
        check=False,
        timeout=60,
    )
    assert process.stderr.decode() == f"{loaded}\n"


# ---- drafting ----


RANDOM = ("--temp", 1, "--top-k", 0, "--top-p", 1, "--min-p", 0)


@pytest.fixture
def own_cache(tmp_path):
    """The environment of a user who never ran edgespec."""
    return {"XDG_CACHE_HOME": str(tmp_path / "own cache"), "EDGESPEC_KERNELS": "off"}


def documents(environment):
    """The number of documents in the histories of that environment's cache."""
    from edgespec.drafting.history import find_histories

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", environment["XDG_CACHE_HOME"])
        return sum(history.documents for history in find_histories())


def test_explain_prints_a_line_a_step_to_stderr(run):
    options = ("abc", "-n", 20, "--seed", 1, "--no-stats", *MODEL)
    process = run(*options, "--explain", "steps")
    lines = process.stderr.decode().splitlines()
    assert process.stdout == run(*options).stdout
    assert [line.split(":")[0] for line in lines] == [f"step {i}" for i in range(1, len(lines) + 1)]
    for line in lines:
        assert re.fullmatch(
            r"step \d+: [\d.]+ tokens/s; draft model has \d+ unread -> .* -> "
            r"\d+ of \d+ accepted, \d+ emitted, draft [\d.]+ ms, verify [\d.]+ ms",
            line,
        ), line
    emitted = sum(int(re.search(r"(\d+) emitted", line)[1]) for line in lines)
    assert emitted == 19, "all but the first token, which the prompt gives"


def test_explain_beside_json(run):
    process = run("abc", "-n", 20, "--json", "--explain", "steps", *MODEL)
    assert len(process.stderr.splitlines()) == json.loads(process.stdout)["stats"]["steps"]
    assert all(line.startswith(b"step ") for line in process.stderr.splitlines())


def test_explain_says_what_the_suffix_store_offered(run, tiny_path):
    options = ("--drafter", "suffix", "--gamma", 4, "--temp", 0, "-n", 60, "--no-stats", "--explain", "steps")
    shown = run("abc " * 20, *options, models=("--target", tiny_path)).stderr.decode()
    assert re.search(r"; suffix offers 0\.\d\d.* -> suffix 0\.\d\d", shown), shown


def test_the_suffix_store_needs_no_draft_model(run, tiny_path):
    options = ("--drafter", "suffix", "--gamma", 4, "--temp", 0, "-n", 60, "--json", "--no-cache")
    process = run("abc " * 20, *options, models=("--target", tiny_path))
    result = json.loads(process.stdout)
    assert process.returncode == 0, process.stderr
    assert result["draft"] is None
    assert set(result["sources"]) == {"suffix"}
    assert result["sources"]["suffix"]["drafted"] == result["stats"]["n_drafted"] > 0
    assert result["sources"]["suffix"]["accepted"] == result["stats"]["n_accepted"]


MY_DRAFTER = """
class Again:
    def begin(self, tokens): pass
    def draft(self, tokens, room, sample): return list(tokens[-8:][:room])
    def accept(self, tokens, n_accepted): pass
class Stops(Again):
    def accept(self, tokens, n_accepted):
        raise ValueError("enough")
"""


def test_a_drafter_of_a_users_own_file(run, tmp_path, tiny_path):
    file = tmp_path / "mine.py"
    file.write_text(MY_DRAFTER)
    options = ("abc " * 20, "--temp", 0, "-n", 60, "--json")
    target = ("--target", tiny_path)
    plain = json.loads(run(*options, "--drafter", "none", models=target).stdout)
    for name in ("Again", "Stops"):
        process = run(*options, "--drafter", f"{file}:{name}", models=target)
        assert process.returncode == 0, process.stderr
        found = json.loads(process.stdout)
        assert found["text"] == plain["text"]
        assert found["sources"][name]["drafted"] == found["stats"]["n_drafted"] > 0
        lines = [line for line in process.stderr.decode().splitlines() if "mine" in line or name in line]
        said = f"edgespec: Stops: accept failed: ValueError: enough ({file}:"
        assert [line.startswith(said) for line in lines] == [True] * (name == "Stops"), lines


def test_a_drafter_that_fails_is_told_on_a_line_of_its_own_in_a_terminal(
    tmp_path, tiny_path, child_environment
):
    file = tmp_path / "mine.py"
    file.write_text(MY_DRAFTER)
    options = ("--drafter", f"{file}:Stops", "-n", 60, "--temp", 0, "--no-stats", "--no-cache")
    shown = in_terminal(child_environment, "-t", tiny_path, "abc " * 20, *options).decode(errors="replace")
    before, _, after = shown.partition("edgespec: Stops: accept failed: ValueError: enough")
    assert before.endswith("\r\n") and before.strip()
    assert "the text went on without it" in " ".join(after.split())


# ---- energy ----


def test_assumed_watts_are_called_estimated(run):
    energy = json.loads(run("abc", "-n", 20, "--assume-watts", 15, "--json", *MODEL).stdout)["energy"]
    assert (energy["estimated"], energy["source"], energy["reason"]) == (True, "15 W assumed", "")
    assert energy["joules"] == pytest.approx(15 * energy["seconds"])
    assert energy["joules_per_token"] == pytest.approx(energy["joules"] / 20)
    assert energy["joule_seconds"] == pytest.approx(energy["joules"] * energy["seconds"])
    assert set(energy["phases"]) == {"prefill", "draft", "verify", "rest"}
    assert sum(energy["phases"].values()) == pytest.approx(energy["joules"])
    assert (energy["idle_w"], energy["net_joules"], energy["net_joules_per_token"]) == (None, None, None)

    lines = run("abc", "-n", 20, "--assume-watts", 15, *MODEL).stderr.decode().splitlines()
    (at,) = (i for i, line in enumerate(lines) if line.startswith("energy"))
    assert re.fullmatch(
        r"energy   estimated: \S+ J, \S+ J a token; idle power not known; \S+ J s; 15 W assumed", lines[at]
    ), lines[at]
    assert re.fullmatch(r" {9}estimated: .*prefill [\d.]+%.*", lines[at + 1]), lines[at + 1]
    assert "verify" in lines[at + 1]


@pytest.mark.skipif(EnergyMeter.choose().available, reason="this machine tells joules")
def test_joules_that_nothing_tells_are_unavailable_and_not_0(run):
    process = run("abc", "-n", 5, "--energy")
    assert process.returncode == 0
    (line,) = (line for line in process.stderr.decode().splitlines() if line.startswith("energy"))
    assert re.fullmatch(r"energy   unavailable: .+ \(see `edgespec energy`\)", line), line

    energy = json.loads(run("abc", "-n", 5, "--energy", "--json").stdout)["energy"]
    assert energy["reason"]
    assert energy["seconds"] > 0
    for name in ("joules", "joules_per_token", "net_joules", "net_joules_per_token", "joule_seconds"):
        assert energy[name] is None
    assert (energy["phases"], energy["domains"], energy["source"]) == ({}, {}, "")


def test_a_seed_gives_one_text_whatever_is_drafted(run, tiny_path):
    """The match rule: also where coins decide, and where the clock decides what is drafted."""
    options = ("abc", "-n", 60, "--seed", 11, "--no-stats", *RANDOM)
    drafted = [
        [],
        ["--gamma", 1],
        ["--gamma", 8],
        ["--drafter", "model"],
        ["--drafter", "model", "--gamma", 3],
        ["--drafter", "staged", "--gamma", 4],
    ]
    texts = {run(*options, *more).stdout for more in drafted}
    for more in (["--drafter", "suffix"], ["--drafter", "suffix", "--gamma", 4], ["--drafter", "none"]):
        texts.add(run(*options, *more, models=("--target", tiny_path)).stdout)
    assert len(texts) == 1
    other = run("abc", "-n", 60, "--seed", 12, "--no-stats", *RANDOM).stdout
    assert other not in texts, "the seed decides nothing here: this test would prove nothing"


def test_json_says_what_was_drafted_and_why(run):
    result = json.loads(run("abc", "-n", 30, "--json", "--seed", 3, *MODEL).stdout)
    assert result["seed"] == 3
    assert result["note"].startswith("drafts of 3 tokens a step were asked for")
    assert "\n" not in result["note"]
    stats = result["stats"]
    assert result["sources"] == {"model": {"drafted": stats["n_drafted"], "accepted": stats["n_accepted"]}}
    plain = json.loads(run("abc", "-n", 5, "--json", "--gamma", 0).stdout)
    assert plain["sources"] == {}
    assert plain["note"] == ""


def test_a_seed_is_named_only_where_it_gives_the_text_again(run):
    """Drafting that follows the clock leaves a trace in the text, unless the match rule takes it away."""

    def seed(*options):
        return json.loads(run("abc", "-n", 10, "--json", *options).stdout)["seed"]

    assert seed("--temp", 1) is None
    assert seed("--temp", 1, "--seed", 4) == 4
    assert seed("--temp", 1, "--rule", "block", "--seed", 4) is None
    assert isinstance(seed("--temp", 1, "--rule", "match"), int)
    assert isinstance(seed("--temp", 1, "--gamma", 0), int)
    assert isinstance(seed("--temp", 0), int)
    told = run("abc", "-n", 10, "--temp", 1, "--stats", "full").stderr.decode()
    assert "no seed: another run may write another text" in told


# ---- what is kept between runs ----


def test_a_history_is_written_unless_no_cache(run, own_cache):
    options = ("abc", "-n", 10, "--temp", 0, "--no-stats")
    first = run(*options, "--no-cache", env=own_cache)
    assert (first.returncode, first.stderr, documents(own_cache)) == (0, b"", 0)
    assert run(*options, env=own_cache).stdout == first.stdout
    assert documents(own_cache) == 1
    assert run(*options, "--no-cache", env=own_cache).stdout == first.stdout
    assert documents(own_cache) == 1


def test_a_second_run_drafts_from_the_first(run, own_cache, tiny_path):
    options = ("abc", "-n", 40, "--temp", 0, "--drafter", "suffix", "--gamma", 4, "--json")
    first, second, alone = (
        json.loads(run(*options, *more, models=("--target", tiny_path), env=own_cache).stdout)
        for more in ([], [], ["--no-cache"])
    )
    assert first["text"] == second["text"] == alone["text"]
    assert second["sources"]["suffix"]["drafted"] > 0
    # The whole answer is there to be copied: 5 tokens a step.
    assert second["stats"]["steps"] <= 10
    assert alone["stats"]["steps"] == first["stats"]["steps"] > 10


def test_plain_decoding_keeps_nothing(run, own_cache, tiny_path):
    run("abc", "-n", 10, models=("--target", tiny_path, "--drafter", "none"), env=own_cache)
    assert documents(own_cache) == 0


# ---- bad input ----


def test_names_of_control_tokens(run):
    """They are text in a chat, and tokens in a raw prompt, unless the user says otherwise."""

    def n_prompt(*options):
        process = run("<|im_end|>", "-n", 1, "--json", *options)
        return json.loads(process.stdout)["prompt_tokens"]

    as_text = len("<|im_end|>") - 1  # "en" is a token
    assert n_prompt() == n_prompt("--no-special") == n_prompt("--special") + as_text - 1
    assert (n_prompt("--raw"), n_prompt("--raw", "--no-special")) == (1, as_text)


def test_another_vocabulary(run, tiny_path, tmp_path):
    other = tmp_path / "other.gguf"
    data = tiny_path.read_bytes()
    other.write_bytes(
        data.replace(b"\x01\0\0\0\0\0\0\0A\x01\0\0\0\0\0\0\0B", b"\x01\0\0\0\0\0\0\0B\x01\0\0\0\0\0\0\0A")
    )
    assert other.read_bytes() != data
    process = run("x", "-n", 8, "--json", *MODEL, models=("--target", tiny_path, "--draft", other))
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout)["stats"]["n_drafted"] > 0
    (line,) = [line for line in process.stderr.decode().splitlines() if "vocabulary" in line]
    assert "tokens are the same" in line


def test_a_target_without_a_known_draft_can_still_repeat_text(run, tiny_path):
    process = run("abc", "-n", 5, "--json", models=("--target", tiny_path))
    assert process.returncode == 0
    assert json.loads(process.stdout)["draft"] is None


def test_gamma_0_needs_no_draft(run, tiny_path):
    assert run("abc", "--gamma", 0, "-n", 5, models=("--target", tiny_path)).returncode == 0


def test_models_that_do_not_fit_in_memory(run, child_environment, tiny_path, tiny_draft_path):
    """A context so large that its cache cannot fit, with the figures; nothing is loaded before."""
    file = tiny_path.parent / "long.gguf"
    write_tiny_gguf(file, n_ctx=1 << 30)
    failed(run("x", "-c", 1 << 30, models=("--target", file, "--drafter", "none")), 1, "memory")


def test_no_network_and_no_disk_space_are_one_line(environment):
    process = subprocess.run(  # pip and the hub's library read the environment when they are loaded
        [*COMMAND, "run", "x", "--target", "smollm2-135m-q4_1", "--drafter", "none"],
        capture_output=True,
        timeout=120,
        check=False,
        env={
            **environment,
            "HF_ENDPOINT": "http://127.0.0.1:9",
            "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_EXTRA_INDEX_URL": "",
            "PIP_FIND_LINKS": "",
            "PIP_RETRIES": "0",
        },
    )
    assert process.returncode == 1
    assert process.stdout == b""
    lines = process.stderr.decode().splitlines()
    assert lines[-1].startswith("edgespec: error: ")
    assert "smollm2-135m-q4_1" in lines[-1]
    assert "Traceback" not in process.stderr.decode()


@pytest.mark.parametrize(
    "command",
    [
        "run abc -n 400 --raw",
        "run --json abc -n 5",
        "models list",
        "models list --json",
        "doctor",
        "-h",
        "--help",
        "run --help",
        "draft make -h",
        "cache info",
        "energy --json",
        "embed",
    ],
)
def test_a_closed_pipe_is_silent_everywhere(command, tiny_path, tiny_draft_path, child_environment, tmp_path):
    text, vectors = tmp_path / "text", TinyBert().write(tmp_path / "bert.gguf")
    text.write_text("abc")
    models = {
        "run": ["-t", str(tiny_path), "-d", str(tiny_draft_path)],
        "embed": ["-m", str(vectors), str(text)],
    }
    words = command.split()
    process = subprocess.Popen(
        [*COMMAND, *words, *models.get(words[0], [])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env=child_environment,
    )
    process.stdout.close()
    stderr = process.stderr.read().decode()
    process.stderr.close()
    assert (process.wait(timeout=60), stderr) == (141, "")


def test_text_held_for_a_stop_string_is_written_when_interrupted(tiny_path, capsys, monkeypatch):
    from edgespec import SamplingParams
    from edgespec.cli import app
    from edgespec.engine.engine import Engine
    from edgespec.engine.stream import Stream

    with Engine(tiny_path, drafter="none") as engine:
        text = engine.generate("abc", params=SamplingParams(temperature=0), n_predict=20).text
    held = text[2:5] + "never"
    real = Stream.__next__

    def until_held(self):
        if self._text.holds or len(self.result.token_ids) > 15:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(Stream, "__next__", until_held)
    code = app.main(
        ["run", "-t", str(tiny_path), "--drafter", "none", "--temp", "0", "abc", "--stop", held, "--no-stats"]
    )
    shown = capsys.readouterr().out
    assert code == 130
    assert text.startswith(shown[:-1])
    assert len(shown) > 2


def test_the_installed_command_is_on_the_path(child_environment):
    command = shutil.which("edgespec", path=str(Path(sys.executable).parent)) or shutil.which("edgespec")
    assert command, "the package is not installed"
    process = subprocess.run([command, "--version"], capture_output=True, env=child_environment, check=False)
    assert re.fullmatch(r"edgespec \d+\.\d+\.\d+\n", process.stdout.decode())
