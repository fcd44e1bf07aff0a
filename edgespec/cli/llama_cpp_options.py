"""Options of llama.cpp's programs, as people bring them: they mean the same, or a line says what they do.

    -ngl 0, -b 512     left out, with a line that says why this changes nothing here
    -s 7               the option here that means the same: --seed 7
    -cnv               refused, with what to do instead

A parser of short options would read most of them as others: -hf as -h, -fa as -f a, -ngl 0 as -n gl.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from edgespec.cli.console import message
from edgespec.errors import UsageError
from edgespec.platform.files import read_text_file

_Does = Literal["same", "left out", "nothing", "refused"]


@dataclass(frozen=True, slots=True)
class _Option:
    """One option of llama.cpp."""

    does: _Does
    text: str = ""
    """The option here; or why it is left out; or what to do instead."""
    takes_value: bool = True


_ONE_SIZE = "how prompts are read is chosen here"
_NO_GPU = "all layers run on the processor here"
_THREADS = "--threads is for prompts, answers and drafts alike"
_DRAFTED = "as many tokens are drafted as pay; --gamma N sets their number"
_MEMORY = "how a file is read is chosen here"
_TALK = "a conversation is `edgespec chat`"
_ONE_ANSWER = "a single answer is `edgespec run`"

_OPTIONS: Mapping[str, _Option] = {
    name: option
    for names, option in {
        # the same here
        "-c --ctx-size": _Option("same", "--ctx"),
        "-n --predict": _Option("same", "--n-predict"),
        "-s": _Option("same", "--seed"),
        "--top-n-sigma": _Option("same", "--top-nsigma"),
        "-sys --system-prompt": _Option("same", "--system"),
        "-mu --model-url": _Option("same", "--target"),
        "-md --model-draft": _Option("same", "--draft"),
        "-r --reverse-prompt": _Option("same", "--stop"),
        "-j": _Option("same", "--json-schema"),
        "-jf --json-schema-file": _Option("same", "--json-schema"),
        "--grammar-file": _Option("same", "--grammar"),
        "--chat-template-file": _Option("same", "--chat-template"),
        "-np": _Option("same", "--parallel"),
        # so here without being asked for
        "--jinja -cb --cont-batching --no-context-shift --no-escape --no-display-prompt": _Option(
            "nothing", takes_value=False
        ),
        # without effect on the text
        "-ngl --gpu-layers --n-gpu-layers -ngld --gpu-layers-draft --n-gpu-layers-draft": _Option(
            "left out", _NO_GPU
        ),
        "-sm --split-mode -ts --tensor-split -mg --main-gpu -dev --device -devd --device-draft -ot "
        "--override-tensor -ncmoe --n-cpu-moe": _Option("left out", _NO_GPU),
        "-cmoe --cpu-moe -nkvo --no-kv-offload -kvo --kv-offload": _Option("left out", _NO_GPU, False),
        "-b --batch-size -ub --ubatch-size": _Option("left out", _ONE_SIZE),
        "-tb --threads-batch -td --threads-draft -tbd --threads-batch-draft": _Option("left out", _THREADS),
        "--draft-max --draft-n --draft-min --draft-n-min --draft-p-min --draft-p-split": _Option(
            "left out", _DRAFTED
        ),
        "--mlock --mmap --no-mmap -nr --no-repack": _Option("left out", _MEMORY, False),
        "--numa --prio --poll -lv --verbosity": _Option("left out", "it changes no text"),
        "--no-warmup --log-disable --no-perf --simple-io -co --color -mli": _Option(
            "left out", "it changes no text", False
        ),
        "-v --verbose": _Option("left out", "--stats full and --explain say what is done", False),
        # to be done otherwise
        "-e --escape": _Option(
            "refused", "a prompt is taken as it is; a shell's $'a\\nb' has line breaks", False
        ),
        "-i --interactive -if --interactive-first": _Option("refused", _TALK, False),
        "-hft --hf-token": _Option("refused", "set HF_TOKEN, or log in with `hf auth login`"),
        "-bf --binary-file": _Option("refused", "prompts are text, from -f FILE"),
        "-cd --ctx-size-draft": _Option(
            "refused", "a draft model's context is as long as it needs; leave it out"
        ),
        "-ctkd --cache-type-k-draft -ctvd --cache-type-v-draft": _Option(
            "refused", "the draft model's cache is always f16; leave it out"
        ),
        "-dr --docker-repo": _Option("refused", "name a file, or hf:OWNER/REPO"),
        "-mm --mmproj -mmu --mmproj-url": _Option("refused", "images are not read here; leave it out"),
        "-sp --special -ptc": _Option("refused", "there is no such output here; leave it out", False),
        "-gan -gaw -C -Cr -Cb -Crb -dt": _Option("refused", "there is no such setting here; leave it out"),
    }.items()
    for name in names.split()
}

_REPOSITORY = ("-hf", "-hfr", "--hf-repo")
_REPOSITORY_FILE = ("-hff", "--hf-file")
_DRAFT_REPOSITORY = ("-hfd", "-hfrd", "--hf-repo-draft")
_CACHE_TYPES = ("-ctk", "--cache-type-k", "-ctv", "--cache-type-v")
_ATTENTION = ("-fa", "--flash-attn")
_ATTENTION_VALUES = ("on", "off", "auto", "1", "0", "true", "false", "enabled", "disabled")
_CONVERSATION = ("-cnv", "--conversation")
_NO_CONVERSATION = ("-no-cnv", "--no-conversation")
_SINGLE_TURN = ("-st", "--single-turn")
_BIAS = ("-l",)
_SYSTEM_FILE = ("-sysf", "--system-prompt-file")
_VALUED = (*_REPOSITORY, *_REPOSITORY_FILE, *_DRAFT_REPOSITORY, *_CACHE_TYPES, *_BIAS, *_SYSTEM_FILE)


def as_options_here(command: str, options: Mapping[str, bool], words: Sequence[str]) -> list[str]:
    """Return a command's `words` with llama.cpp's options as edgespec has them; tell of those left out.

    `command`: its name. `options`: its options, and whether each takes a value. Raises UsageError for what
    cannot be meant here.
    """
    return _Translation(command, options, deque(words)).run()


@dataclass(slots=True)
class _Translation:
    command: str
    options: Mapping[str, bool]
    rest: deque[str]
    written: list[str] = field(default_factory=list)
    repository: tuple[str, str] | None = None
    """Option and value of -hf."""
    file: tuple[str, str] | None = None
    cache_types: dict[str, str] = field(default_factory=dict)
    """Type and the option that named it, of keys ("k") and values ("v")."""
    talks: str = ""
    """-cnv as it was written."""
    single: str = ""

    def run(self) -> list[str]:
        while self.rest:
            word = self.rest.popleft()
            if word == "--":
                self._end()
                return [*self.written, word, *self.rest]
            if word.startswith("-"):
                self._option(word)
            else:
                self.written.append(word)
        self._end()
        return self.written

    def _option(self, word: str) -> None:
        name, equals, value = word.partition("=")
        if name in self.options:
            self.written.append(word)
            if self.options[name] and not equals and self.rest:
                self.written.append(self.rest.popleft())
            return
        if name in _OPTIONS:
            self._known(name, _OPTIONS[name], value if equals else None)
        elif not self._special(name, value if equals else None):
            self._check_spelling(word, name)
            self.written.append(word)

    def _known(self, name: str, option: _Option, value: str | None) -> None:
        if option.takes_value and value is None:
            value = self._value(name)
        if option.does == "same":
            self._write(name, option.text, value or "")
        elif option.does == "left out":
            message(f"{name} is left out: {option.text}")
        elif option.does == "refused":
            raise UsageError(f"{name} is llama.cpp's: {option.text}")

    def _special(self, name: str, value: str | None) -> bool:
        if name in _ATTENTION:
            if self.rest and self.rest[0].lower() in _ATTENTION_VALUES:
                self.rest.popleft()
            message(f"{name} is left out: how attention is computed is chosen here")
        elif name in _CONVERSATION:
            self.talks = name
        elif name in _NO_CONVERSATION:
            self._write(name, "--raw")
        elif name in _SINGLE_TURN:
            self.single = name
        elif name in _VALUED:
            self._valued(name, self._value(name) if value is None else value)
        else:
            return False
        return True

    def _valued(self, name: str, value: str) -> None:
        if name in _REPOSITORY:
            self.repository = name, value
        elif name in _REPOSITORY_FILE:
            self.file = name, value
        elif name in _DRAFT_REPOSITORY:
            self._write(name, "--draft", f"hf:{value}")
        elif name in _SYSTEM_FILE:
            self._write(name, "--system", read_text_file(Path(value), name).removesuffix("\n"))
        elif name in _BIAS:
            match = re.fullmatch(r"(\d+)([+-].+)", value)
            if not match:
                raise UsageError(
                    f"{name} {value}: expected TOKEN+BIAS or TOKEN-BIAS, or --logit-bias TOKEN=BIAS"
                )
            self._write(name, "--logit-bias", f"{match[1]}={match[2]}")
        else:
            self.cache_types["k" if "k" in name[-1:] else "v"] = value
            self._require(name, "--cache-type")

    def _end(self) -> None:
        if self.file and not self.repository:
            raise UsageError(f"{self.file[0]} {self.file[1]}: needs -hf OWNER/REPO beside it")
        if self.repository:
            name, repo = self.repository
            target = f"{repo.partition(':')[0]}/{self.file[1]}" if self.file else repo
            self._write(name, "--target", f"hf:{target}")
        keys, values = (self.cache_types.get(which, "f16") for which in "kv")
        if keys != values:
            raise UsageError("-ctk and -ctv: keys and values have the same type here; name one --cache-type")
        if self.cache_types:
            self.written += ["--cache-type", keys]
        if self.talks and self.command != "chat" and not (self.command == "run" and self.single):
            raise UsageError(f"{self.talks} is llama.cpp's: {_TALK}")
        if self.single and self.command != "run":
            raise UsageError(f"{self.single} is llama.cpp's: {_ONE_ANSWER}")

    def _write(self, name: str, option: str, value: str | None = None) -> None:
        self._require(name, option, value or "")
        self.written.append(option)
        if value is not None:
            self.written.append(value)

    def _require(self, name: str, option: str, value: str = "") -> None:
        if option in self.options:
            return
        instead = f"name the model alone: {value}" if option == "--target" else f"it has no {option}"
        raise UsageError(f"{name}: no option of `edgespec {self.command}`; {instead}")

    def _value(self, name: str) -> str:
        if not self.rest:
            raise UsageError(f"{name} needs a value")
        return self.rest.popleft()

    def _check_spelling(self, word: str, name: str) -> None:
        """Raise UsageError for a word that is read as other options than were meant: -help as -h -e -l -p."""
        if re.match(r"-[A-Za-z]{2}", word) is None:
            return
        if f"-{name}" in (*self.options, "--help", "--version"):
            raise UsageError(f"{name}: no such option; is -{name} meant?")
        if word.startswith("-h"):
            raise UsageError(f"{name}: no such option; -h alone prints the help")
