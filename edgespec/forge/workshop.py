"""Where drafts of one source are made: their names, a folder under a lock, a place among the models.

A candidate is made in a folder of its own in the models directory, under a lock, and gets its name when it is
complete. A killed run leaves nothing but that folder, which the next one removes.
"""

from __future__ import annotations

import fcntl
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgespec.errors import EdgespecError, UsageError, describe_os_error
from edgespec.forge.cutting import cut
from edgespec.llama.backend import quantize
from edgespec.llama.gguf_header import check_model_file
from edgespec.models.pull import hash_file
from edgespec.models.quantizations import ModelFile, expected_bytes, quantization_in
from edgespec.models.registry import add_local, check_name, load_registry, remove_local
from edgespec.models.resolve import resolve
from edgespec.models.sources import check_disk
from edgespec.models.store import Store


class Workshop:
    """Makes candidates of `source`, and keeps one."""

    def __init__(self, source: ModelFile, on_message: Callable[[str], None]) -> None:
        """Work in the models directory; `on_message` takes lines that the user should know."""
        self._source = source
        self._on_message = on_message
        self._root = Store.default().root

    def names(self, n_kept: int, types: Sequence[str]) -> dict[str, str]:
        """Return what the draft of each quantization is called; "": quantized as the source is."""
        size = f"{n_kept // 1024}k" if n_kept % 1024 == 0 else str(n_kept)
        source = self._source
        own = quantization_in(source.name) or quantization_in(source.path.stem)
        stem = re.sub(rf"[-._]*{own}$", "", source.name, flags=re.IGNORECASE) if own else source.name
        words = {"": own, **{type_: type_ for type_ in types if type_ != own}}
        return {type_: "-".join(filter(None, (stem, word, f"cut{size}"))) for type_, word in words.items()}

    def check_name(self, name: str, *, replace: bool) -> None:
        """Raise UsageError for a name that cannot be given, or is taken (unless it may `replace` a draft)."""
        check_name(name)
        entry, file = load_registry().entries.get(name), self._root / f"{name}.gguf"
        if entry and entry.path != file:
            raise UsageError("a model of that name exists already; choose another", field="name", value=name)
        if (entry or file.exists()) and not replace:
            problem = "exists already; choose another name, or replace it with force"
            raise UsageError(problem, field="name", value=name)

    @contextmanager
    def opened(self) -> Iterator[Path]:
        """Hold the lock of this source's drafts, and a folder that is gone afterwards."""
        folder = self._root / f".drafts-of-{self._source.name}"
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            with (self._root / f"{folder.name}.lock").open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self._on_message(f"another process makes drafts of {self._source.name}; waiting")
                    fcntl.flock(lock, fcntl.LOCK_EX)
                try:
                    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
                    folder.mkdir()
                    yield folder
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
        except OSError as error:
            raise EdgespecError(f"cannot make a draft: {describe_os_error(error)}") from error

    def check_space(self, types: Sequence[str]) -> None:
        """Raise EdgespecError unless the disk holds a draft of each type, and one whole model beside."""
        origin = self._origin()
        sizes = [expected_bytes(origin, type_) for type_ in types if type_]
        needed = sum(sizes, self._source.path.stat().st_size) + max(sizes, default=0)
        check_disk(self._root, needed, f"drafts of {self._source.name}")

    def _origin(self) -> Path:
        """Return what other quantizations are made from: what the source itself was, if that is here."""
        try:
            made_from = self._source.made_from
            return resolve(made_from, pull_missing=False) if made_from else self._source.path
        except EdgespecError:
            return self._source.path

    def make(self, type_: str, path: Path, token_ids: npt.NDArray[np.int64], source_sha256: str) -> None:
        """Make a candidate as `path`; its whole model, if it needs one, is removed again."""
        whole = self._source.path
        if type_:
            whole = path.with_name(f"{type_}.gguf")
            quantize(self._origin(), whole, type_, pure=True)
        try:
            cut(check_model_file(whole), path, token_ids, source_sha256=source_sha256)
        finally:
            if type_:
                whole.unlink(missing_ok=True)

    def keep(self, made: Path, name: str) -> Path:
        """Give a candidate its name and its place among the models."""
        file = self._root / f"{name}.gguf"
        if name in load_registry().entries:
            remove_local(name)
        made.replace(file)
        try:
            add_local(name, file, file.stat().st_size, hash_file(file))
        except BaseException:
            file.unlink(missing_ok=True)
            raise
        return file
