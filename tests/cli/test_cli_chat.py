"""`edgespec chat` as a user meets it: the real program over tiny models, in a terminal and in pipes."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from command_line import COMMAND, failed, run_cli
from edgespec.cli.chat import _context
from edgespec.cli.chat_lines import file_name
from edgespec.cli.conversation import ChatAnswer, Conversation, Exchange
from edgespec.decoding.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.llama.gguf_header import read_header
from edgespec.models import footprint
from edgespec.platform.machine import MemoryLeft
from terminals import Terminal
from tiny_gguf import EOS, IM_END, write_tiny_gguf

RANDOM = ("--temp", 1, "--top-k", 0, "--top-p", 1, "--min-p", 0)
GREEDY = ("--temp", 0)
CHAIN = ("--drafter", "model", "--gamma", 3)
ENDLESS = ("--logit-bias", f"{EOS}=-inf", "--logit-bias", f"{IM_END}=-inf", "-c", 1 << 15)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def environment(with_kernels):
    return with_kernels


@pytest.fixture
def models(tiny_path, tiny_draft_path):
    return ("--target", str(tiny_path), "--draft", str(tiny_draft_path))


@pytest.fixture(scope="module")
def long_path(tmp_path_factory):
    """A model whose answers can take long enough to be ended."""
    return write_tiny_gguf(tmp_path_factory.mktemp("long") / "long.gguf", seed=1, n_ctx=1 << 15)


@pytest.fixture
def pipe(environment, models):
    """Run `edgespec chat` with these lines; `command` may be another one."""

    def pipe(lines, *arguments, models=models, command="chat"):
        typed = lines if isinstance(lines, bytes) else "".join(f"{line}\n" for line in lines).encode()
        return run_cli(command, *models, *arguments, env=environment, stdin=typed, text=False)

    return pipe


@pytest.fixture
def type_in(environment, models):
    """Run `edgespec chat` in a terminal."""

    def type_in(*arguments, models=models, **options):
        return Terminal([*COMMAND, "chat", *map(str, (*models, *arguments))], environment, **options)

    return type_in


def answers(process):
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]


def lines_of(process):
    return process.stderr.decode().splitlines()


def test_the_context_leaves_room_for_the_draft(tiny_path, tiny_draft_path, monkeypatch):
    target, draft = (SimpleNamespace(header=read_header(path)) for path in (tiny_path, tiny_draft_path))
    enough = footprint.PROCESS_BYTES + footprint.session_bytes(target.header, 512)
    monkeypatch.setattr(footprint, "memory_left", lambda _root: MemoryLeft(enough, ""))
    alone, pair = (
        _context(SimpleNamespace(n_ctx_shared=None, target=target, draft=one)) for one in (None, draft)
    )
    assert (alone, pair) == (512, 256)


# ---- going on with the last conversation ----


def test_the_last_conversation_goes_on_with_its_state(pipe, environment):
    options = ("--json", "-n", 60, "--system", "be brief", *RANDOM, *CHAIN)
    whole = answers(pipe(["abc", "the other"], "--seed", 7, *options))
    pipe(["/system be brief", "abc"], "--continue", "--seed", 7, *options[:3], *RANDOM, *CHAIN)
    process = pipe(["the other"], "--continue", "--seed", 8, *options[:3], *RANDOM, *CHAIN)
    assert [one["token_ids"] for one in answers(process)] == [whole[1]["token_ids"]]
    n_known = whole[1]["cached_tokens"]
    assert answers(process)[0]["cached_tokens"] == n_known > 60
    said = lines_of(process)
    assert "edgespec: the last conversation continues, after 1 exchange" in said
    assert any(re.search(rf"restored {n_known} tokens from disk in \d+\.\d\d s", line) for line in said)
    folder = Path(environment["XDG_CACHE_HOME"], "edgespec")
    (kept,) = folder.glob("chats/*.json")
    assert kept.stat().st_mode & 0o777 == 0o600
    content = json.loads(kept.read_text())
    assert [message["role"] for message in content["messages"]] == ["system", *["user", "assistant"] * 2]
    content["messages"][2]["token_ids"][0] += 1  # as if another model had written it
    kept.write_text(json.dumps(content))
    assert answers(pipe(["more"], "--continue", "--json", "-n", 2))[0]["prompt_tokens"] > n_known
    kept.write_text("{")
    process = pipe(["abc"], "--continue", "--json", "-n", 2)
    assert answers(process)
    assert "set aside" in process.stderr.decode()


def test_run_reads_a_prompt_once(environment, models, tmp_path):
    prompt = "the quick brown fox jumps over the lazy dog " * 2
    command = ("run", prompt, *models, "--json", "--raw", "-n", 20, *GREEDY, "--state-dir", tmp_path / "s")
    first, second = (run_cli(*command, env=environment) for _ in range(2))
    one, two = json.loads(first.stdout), json.loads(second.stdout)
    assert one["token_ids"] == two["token_ids"]
    assert (one["cached_tokens"], two["cached_tokens"]) == (0, two["prompt_tokens"] - 1)
    assert f"restored {two['cached_tokens']} tokens from disk" in second.stderr


# ---- what is written ----


def test_turns_are_what_a_fresh_engine_writes_and_only_the_new_part_is_read(pipe, tiny_path):
    """With many random draws: a tiny model's likeliest tokens hardly depend on the prompt."""
    options = ("--json", "-n", 150, "--seed", 7, "--system", "be brief", *RANDOM, *CHAIN)
    turns = answers(pipe(["abc", "", "  ", "the other"], *options))
    (first,) = answers(pipe([], *options, "abc", command="run"))
    assert len(turns) == 2
    assert turns[0]["token_ids"] == first["token_ids"]
    with Engine(tiny_path, drafter="none") as engine:
        model = engine.target
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "abc"}]
        between = "<|im_end|>\n<|im_start|>user\nthe other<|im_end|>\n<|im_start|>assistant\n"
        tokens = [
            *model.tokenize_chat(messages),
            *turns[0]["token_ids"],
            *model.tokenize(between, add_special=False, parse_special=True),
        ]
        params = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)

        def alone(tokens):
            return list(engine.generate(tokens, params=params, seed=8, n_predict=150).token_ids)

        assert turns[1]["token_ids"] == alone(tokens) != alone([*tokens[:-9], *tokens[-8:]])
    assert (turns[0]["seed"], turns[1]["seed"]) == (7, 8)
    assert turns[1]["prompt_tokens"] == len(tokens)
    # All of the first turn but its last token, which nothing came after.
    n_cached = first["prompt_tokens"] + first["tokens"] - 1
    assert (turns[0]["cached_tokens"], turns[1]["cached_tokens"]) == (0, n_cached)


def test_more_goes_on_with_an_answer_that_was_cut(pipe, tiny_path, tmp_path):
    """With the tokens that it would have had; the file has one answer, and the next turn builds on it."""
    file = tmp_path / "chat.json"
    options = ("--json", "--temp", 0, *CHAIN, *ENDLESS[:4])
    process = pipe(["abc", "/more", f"/save {file}", "the other"], *options, "-n", 9)
    first, rest, after = answers(process)
    (whole,) = answers(pipe(["abc"], *options, "-n", 18))
    assert [*first["token_ids"], *rest["token_ids"]] == whole["token_ids"]
    assert rest["cached_tokens"] == rest["prompt_tokens"] - 1
    assert lines_of(process)[:2] == ["edgespec: cut after 9 tokens by -n; /more continues"] * 2
    assert [message["content"] for message in json.loads(file.read_text())["messages"]] == [
        "abc",
        whole["text"],
    ]
    assert after["cached_tokens"] == rest["prompt_tokens"] + rest["tokens"] - 1


@pytest.mark.parametrize("lines", [["/more"], ["abc", "/more"]], ids=["no answer", "a whole answer"])
def test_more_needs_an_answer_that_was_cut(pipe, lines):
    process = pipe(lines, "--logit-bias", f"{IM_END}=1000")
    assert process.returncode == 1
    assert lines_of(process)[-1] == "edgespec: error: no answer was cut"


@pytest.mark.parametrize("sampling", [("--temp", 0), (*RANDOM, "--seed", 4)], ids=["greedy", "random"])
def test_answers_are_those_of_run_with_the_same_messages(pipe, tiny_target, tmp_path, sampling):
    file, rendered = tmp_path / "chat.json", tmp_path / "rendered.txt"
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "abc"},
        {"role": "assistant", "content": "on the other"},
    ]
    file.write_text(json.dumps({"messages": messages}))
    rendered.write_text(tiny_target.render_chat([*messages, {"role": "user", "content": "and?"}]))
    options = (*sampling, "-n", 150, "--json")
    (chatted,) = answers(pipe(["and?"], "--load", file, *options))
    (ran,) = answers(pipe([], "--raw", "--file", rendered, *options, command="run"))
    assert chatted["prompt_tokens"] == ran["prompt_tokens"]
    assert chatted["token_ids"] == ran["token_ids"]


def test_piped_lines_are_answered_as_plain_text(pipe):
    process = pipe(["abc", "//abc", "/system", "/exit", "abc"], "-n", 8, "--temp", 0, "--show-draft")
    (alone,) = answers(pipe(["abc"], "-n", 8, "--temp", 0, "--json", command="run"))
    assert process.returncode == 0
    assert b"\x1b[" not in process.stdout + process.stderr
    text = alone["text"].encode()
    assert process.stdout.startswith(text + b"\n")
    assert process.stdout.count(text) == 2, "what comes after /exit is not read"
    assert "edgespec: no system message" in lines_of(process)


@pytest.mark.parametrize("word", ["exit", "quit", "Quit", " exit ", "exit()", ":q", "/quit", "/bye"])
def test_words_that_leave_are_no_questions(pipe, word):
    process = pipe([word, "abc"], "-n", 5, "--json")
    assert (process.returncode, process.stdout) == (0, b"")
    said = [f"edgespec: {word.strip()} ends the chat, as /exit does"] if not word.startswith("/") else []
    assert [line for line in lines_of(process) if "ends the chat" in line] == said


def test_words_about_leaving_are_questions(pipe):
    assert len(answers(pipe(["exit the shop", "how do I quit", "//exit"], "-n", 3, "--json"))) == 3


def test_a_line_that_cannot_be_done_costs_nothing_but_the_exit_code(pipe, tmp_path):
    file = tmp_path / "chat.json"
    process = pipe(
        [
            "abc",
            "/nope",
            "/undo now",
            "/save a\0b",
            "/load",
            "/load /no/such",
            "x" * 600,
            "abc",
            f"/save {file}",
        ],
        "-n",
        5,
    )
    assert process.returncode == 1
    errors = [line for line in lines_of(process) if line.startswith("edgespec: error: ")]
    for line, word in zip(
        errors,
        [
            "no command /nope",
            "/undo takes nothing",
            "byte 0x00 in line 4",
            "/load FILE",
            "/no/such",
            "larger context",
        ],
        strict=True,
    ):
        assert word in line
    assert len(Conversation.load(file).exchanges) == 2


def test_what_leaves_the_prompt_is_said_and_stays_in_the_file(pipe, tmp_path):
    file = tmp_path / "chat.json"
    process = pipe([*["abc " * 20] * 8, "/stats", f"/save {file}"], "-n", 10, "-c", 300)
    assert process.returncode == 0
    said = [line for line in lines_of(process) if "left out of the prompt" in line]
    numbers = [tuple(map(int, re.findall(r"\d+", line)[:2])) for line in said]
    assert len(numbers) > 1
    assert numbers[0][0] == 1
    assert all(after[0] == before[-1] + 1 for before, after in pairwise(numbers))
    assert all("300 tokens" in line for line in said)
    assert any(line.startswith("left out     the first ") for line in lines_of(process))
    assert len(Conversation.load(file).exchanges) == 8


# ---- in a terminal ----


def test_a_conversation_in_a_terminal(type_in, tmp_path):
    file = tmp_path / "chat.json"

    def saved():
        """What /save writes now."""
        file.unlink(missing_ok=True)
        terminal.type(f"/save {file}\r")
        terminal.expect("saved to ")
        terminal.expect(">")
        return Conversation.load(file)

    with type_in("-n", 8, *RANDOM, "--seed", 3) as terminal:
        terminal.expect("/help lists the commands")
        terminal.expect(">")
        terminal.type("abc\r")
        terminal.expect("cut after 8 tokens")
        terminal.expect(">")  # before it is there, keys are the terminal's
        terminal.type("two\x1b\rlines\r")  # Alt+Enter
        terminal.expect("cut after 8 tokens")
        before = saved()
        assert [exchange.question for exchange in before.exchanges] == ["abc", "two\nlines"]

        terminal.type("/retry\r")
        terminal.expect("cut after 8 tokens")
        retried = saved()
        assert retried.exchanges[0] == before.exchanges[0]
        assert retried.exchanges[1].question == "two\nlines"
        assert retried.exchanges[1].answer != before.exchanges[1].answer, "another seed"

        terminal.type("/system be brief\r")
        terminal.expect("system message: be brief")
        terminal.type("/undo\r")
        terminal.expect("1 exchange left")
        assert (saved().system, saved().exchanges) == ("be brief", before.exchanges[:1])

        terminal.type("/nope\r")
        terminal.expect("there is no command /nope")
        terminal.expect(">")
        terminal.type("/he\t")  # the prompt is empty; Tab completes
        terminal.expect("/help")
        terminal.type("\r")
        terminal.expect("Begin a new line")
        terminal.expect(">")
        terminal.type("not sent\x03")  # Ctrl-C clears the line
        terminal.expect(">")
        terminal.type("abc\r")
        terminal.expect("cut after 8 tokens")
        assert [exchange.question for exchange in saved().exchanges] == ["abc", "abc"]

        terminal.type(f"/system -\r/load {file}\r")
        terminal.expect("2 exchanges and a system message loaded")
        terminal.expect(">")
        terminal.type("\x04")  # Ctrl-D
        assert terminal.wait() == 0


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_dumb_terminal_gets_no_escape_sequences(type_in, tmp_path, term):
    file = tmp_path / "chat.json"
    with type_in("-n", 8, *RANDOM, "--seed", 3, "--show-draft", term=term) as terminal:
        terminal.expect("/help lists the commands")
        terminal.expect("> ")
        terminal.type("abc\n")
        terminal.expect("cut after 8 tokens")
        terminal.expect("> ")
        terminal.type("not sent\x03")  # Ctrl-C clears the line
        terminal.expect("> ")
        terminal.type("/help\n")
        terminal.expect("Leave; exit, quit")
        terminal.expect("> ")
        terminal.type(f"/save {file}\n")
        terminal.expect(r"saved to\s")
        terminal.expect("> ")
        terminal.type("quit\n")
        assert terminal.wait() == 0
        assert "\x1b" not in terminal.shown
    assert [exchange.question for exchange in Conversation.load(file).exchanges] == ["abc"]


def test_ctrl_d_leaves_a_dumb_terminal(type_in):
    with type_in(term="dumb") as terminal:
        terminal.expect("> ")
        terminal.type("\x04")
        assert terminal.wait() == 0
        assert "\x1b" not in terminal.shown


def test_lines_are_kept_for_the_next_chat_unless_nothing_is_to_be(type_in, tmp_path, environment):
    environment["XDG_CACHE_HOME"] = str(tmp_path / "own cache")
    environment["EDGESPEC_KERNELS"] = "off"
    kept = tmp_path / "own cache" / "edgespec" / "chat-lines"
    with type_in("-n", 4, "--no-cache") as terminal:
        terminal.type("secret\r")
        terminal.expect("cut after 4 tokens")
        terminal.type("/exit\r")
        assert terminal.wait() == 0
    assert not kept.exists()
    with type_in("-n", 4) as terminal:
        terminal.type("remember me\r")
        terminal.expect("cut after 4 tokens")
        terminal.expect(">")
        terminal.type("\x04")
        assert terminal.wait() == 0
    assert "remember me" in kept.read_text()
    assert kept.stat().st_mode & 0o077 == 0
    file = tmp_path / "chat.json"
    with type_in("-n", 4) as terminal:
        terminal.expect(">")
        terminal.type("\x1b[A\r")  # up
        terminal.expect("cut after 4 tokens")
        terminal.type(f"/save {file}\r")
        terminal.expect("saved to ")
    assert Conversation.load(file).exchanges[0].question == "remember me"


@pytest.mark.parametrize("drafting", [("--drafter", "none"), ("--drafter", "suffix", "--show-draft")])
def test_ctrl_c_ends_an_answer_and_keeps_what_was_written(type_in, long_path, tmp_path, drafting):
    """Also in the second answer: the line editor must give the signals back."""
    file = tmp_path / "chat.json"
    with type_in(*ENDLESS, *RANDOM, models=("-t", long_path, *drafting)) as terminal:
        for question in ("abc", "the other"):
            terminal.expect(">")
            terminal.type(f"{question}\r")
            terminal.expect(re.escape(question))
            terminal.expect(r"[^\x00-\x1f━╸╺]{40}")  # some of the answer, not of the bar before it
            terminal.type("\x03")
            terminal.expect("cut by Ctrl-C")
        terminal.type(f"/save {file}\r")
        terminal.expect("saved to ")
        terminal.expect(">")
        terminal.type("\x04")
        assert terminal.wait() == 0
    exchanges = Conversation.load(file).exchanges
    assert [exchange.question for exchange in exchanges] == ["abc", "the other"]
    for exchange in exchanges:
        assert exchange.answer.cut
        assert len(exchange.answer.text) > 20


def test_ctrl_c_while_the_prompt_is_read(environment, long_path, tmp_path):
    file = tmp_path / "chat.json"
    Conversation(exchanges=[Exchange("a" * 28_000, ChatAnswer("b"))]).save(file)  # takes long to read
    process = subprocess.Popen(
        [*COMMAND, "chat", *map(str, ("-t", long_path, "--drafter", "none", "--load", file, *ENDLESS))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    process.stdin.write(b"/system\nabc\n")
    process.stdin.flush()
    assert process.stderr.readline() == b"edgespec: no system message\n"
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == b""
    assert re.fullmatch(rb"(edgespec: [^\n]*\n){1,2}", errors), errors  # two: it came before the reading


def test_ctrl_c_in_a_pipe_ends_all_and_keeps_what_was_written(environment, long_path):
    arguments = ("--target", long_path, "--drafter", "none", *ENDLESS)
    process = subprocess.Popen(
        [*COMMAND, "chat", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    process.stdin.write(b"abc\nabc\n")
    process.stdin.flush()
    written = os.read(process.stdout.fileno(), 10)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (written + out).endswith(b"\n")
    assert b"cut by Ctrl-C" in errors
    assert b"Traceback" not in errors


def test_a_line_that_failed_comes_back_by_arrow_up_only(type_in, tmp_path):
    with type_in("-n", 4, "--seed", 1) as terminal:
        terminal.expect(">")
        terminal.type("/load missing.json\r")
        terminal.expect("missing.json: no such file")
        terminal.expect(">")
        terminal.type("/help\r")  # the prompt was empty
        terminal.expect("Ctrl-Z")
        terminal.expect(">")
        terminal.type("\x1b[A\x1b[A")
        terminal.expect("/load missing.json")
        terminal.type("\x03")
        file = tmp_path / "my file.json"
        for typed in (f'"{file}"', f"'{file}'", str(file).replace(" ", "\\ "), str(file)):
            terminal.type(f"/save {typed}\r")
            terminal.expect(r"exchanges saved to .*my file\.json \(\d+ bytes\)")
            assert [one.name for one in tmp_path.glob("*.json*")] == ["my file.json"]
            file.unlink()


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("a.json", "a.json"),
        ('"my file.json"', "my file.json"),
        ("'my file.json'", "my file.json"),
        ("my\\ file.json", "my file.json"),
        ("my file.json", "my file.json"),
        ('my" "file.json', "my file.json"),
        ("it's mine.json", "it's mine.json"),
        ('"~/a b.json"', "~/a b.json"),
        ("", ""),
    ],
)
def test_names_of_files_are_read_as_in_a_shell(typed, name):
    assert file_name(typed) == name


def test_ctrl_z_suspends_at_the_prompt_and_in_an_answer(environment, long_path):
    """Under a shell with job control, as people have; what is typed after `fg` is answered."""
    chat = [*COMMAND, "chat", "-t", str(long_path), "--drafter", "none", *map(str, (*ENDLESS, *RANDOM))]
    with Terminal(["bash", "--norc", "--noprofile", "-i"], environment, timeout_s=60) as shell:
        shell.expect(r"[$#] ")
        shell.type(shlex.join(chat) + "\n")
        shell.expect("Ctrl-D ends")
        shell.expect(">")
        shell.type("\x1a")
        shell.expect("Stopped")
        shell.type("stty -a | grep -o ' icanon\\| echo '\n")  # the shell has its terminal back
        shell.expect("icanon")
        shell.type("fg\n")
        shell.expect(">")
        shell.type("abc\r")
        shell.expect(r"abc[\r\n]+")
        shell.expect(r"[^\x00-\x1f━]{40}")
        shell.type("\x1a")
        shell.expect("Stopped")
        shell.type("echo still $((40 + 2))\n")
        shell.expect("still 42")
        shell.type("fg\n")
        shell.expect(r"--min-p 0[\r\n]+")  # the shell prints the command; only then does the answer go on
        shell.expect(r"[^\x00-\x1f━]{40}")
        shell.type("\x03")
        shell.expect("cut by Ctrl-C")
        shell.expect(">")
        shell.type("/exit\r")
        shell.expect(r"[$#] ")
        shell.type("exit\n")
        assert shell.wait() == 0


# ---- bad input ----


def test_stdin_that_is_not_utf8(pipe):
    """Such a line alone is left out, also one of UTF-16; a mark at the beginning is no text."""
    process = pipe(b"\xef\xbb\xbfabc\r\nab\xff\nabc\n\0a\0b\n\xffabc\nabc", "-n", 3, "--temp", 0, "--json")
    assert process.returncode == 1
    left_out = [line for line in lines_of(process) if "error" in line]
    assert [line.partition(" in ")[2].partition(",")[0] for line in left_out] == [
        "line 2",
        "line 4",
        "line 5",
    ]
    assert "stdin is not UTF-8 text: byte 0xff in line 2" in left_out[0]
    first, *others = map(json.loads, process.stdout.decode().splitlines())
    assert len(others) == 2
    (alone,) = map(json.loads, pipe(["abc"], "-n", 3, "--temp", 0, "--json").stdout.decode().splitlines())
    assert first["prompt_tokens"] == alone["prompt_tokens"]


def test_a_system_message_that_is_not_utf8(environment, models):
    process = subprocess.run(
        [*map(os.fsencode, (*COMMAND, "chat", *models)), b"--system", b"a\xff"],
        input=b"abc\n",
        capture_output=True,
        env=environment,
        timeout=60,
        check=False,
    )
    failed(process, 2, "not valid Unicode at character 1")
