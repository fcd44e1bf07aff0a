"""The image encoder of a target: pictures become rows that its passes read in the place of tokens.

libmtmd computes them, on a thread of its own, when a prompt with a picture is read for the first time. The
pictures that came last are kept with their rows, by the hash of their pixels and of the encoder; where states
of prompts are kept on disk, the rows are kept with them.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import time
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from edgespec.apps.images import Picture, read_file, read_picture
from edgespec.decoding.session import EmbeddedSpan, Inputs, Medium, Places
from edgespec.errors import EdgespecError, MessageFn, UsageError
from edgespec.llama import backend
from edgespec.llama.choices import StateRoom
from edgespec.llama.gguf_header import check_complete_file, read_header
from edgespec.llama.kernels import STOCK, packing
from edgespec.llama.prompt_states import StateFolder
from edgespec.models.hub import HubRepository, SourceFailure
from edgespec.models.on_disk import is_projector, quantization_in, repository_files
from edgespec.models.registry import Entry, HubSource, load_registry
from edgespec.models.resolve import ModelRef, resolve
from edgespec.models.store import Store
from edgespec.platform.closing import Closing

if TYPE_CHECKING:
    from edgespec.llama.weights import Model

KEPT_BYTES = 256 << 20
"""Most bytes of rows that are kept of pictures that came before."""

_MARKER = b"<__media__>"

Parts = Sequence[list[int] | EmbeddedSpan]


class _Kept(msgspec.Struct):
    parts: Parts
    n_bytes: int


class Encoder(Closing):
    """The encoder of one target, loaded with its first picture. Thread-safe."""

    n_encoded = 0
    """Pictures encoded so far."""
    seconds = 0.0
    """Seconds that took."""

    def __init__(
        self,
        target: Model,
        mmproj: str | Path | None,
        *,
        n_threads: int,
        states: StateRoom | None,
        on_message: MessageFn,
    ) -> None:
        """Encode for `target` with the file `mmproj`; None: the one beside it.

        `states`: where rows are kept on disk.
        """
        self._target, self._given, self._n_threads = target, mmproj, n_threads
        self._folder = StateFolder(states, on_message) if states else None
        self._problems: dict[bool, str] = {}
        self._lock = Lock()
        self._library: _Library | None = None
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "images")

    def problem(self, *, ask_hub: bool) -> str:
        """Return why the target reads no images here, in one line; "" if it does; looked for once.

        Without `ask_hub` only the disk says: a server that starts waits for no network.
        """
        if ask_hub not in self._problems:
            try:
                self._file(pull_missing=False, ask_hub=ask_hub)
                load()
                self._problems[ask_hub] = ""
            except EdgespecError as error:
                self._problems[ask_hub] = str(error)
        return self._problems[ask_hub]

    def _file(self, *, pull_missing: bool = True, ask_hub: bool = True) -> Path:
        file = find_mmproj(self._target.path, self._given, pull_missing=pull_missing, ask_hub=ask_hub)
        if file is None:
            line = (
                f"no image encoder (mmproj*.gguf) lies beside {self._target.name}: give one by --mmproj FILE"
            )
            raise UsageError(line)
        return file

    def read(self, medium: Medium, name: str) -> Parts:
        """Return the tokens around a picture and the spans that stand for it. Raises UsageError."""
        picture = read_picture(medium if isinstance(medium, bytes) else read_file(medium), name)
        with self._lock:
            if self._library is None:
                try:
                    self._library = _Library(self._file(), self._target, self._n_threads)
                except EdgespecError as error:
                    raise UsageError(str(error), field="images") from error
            if (kept := self._kept.get(picture.digest)) is None:
                parts = self._library.parts(picture, name, self)
                n_rows = sum(len(part.ids) for part in parts if isinstance(part, EmbeddedSpan))
                kept = self._kept[picture.digest] = _Kept(parts, 4 * n_rows * self._target.n_input)
            self._kept.move_to_end(picture.digest)
            while len(self._kept) > 1 and sum(one.n_bytes for one in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)
        return kept.parts

    def compute(self, rows: _Rows) -> Future[Inputs]:
        """Begin to compute the rows of a picture, after those that were asked for before."""
        return self._thread.submit(self._compute, rows)

    def _compute(self, rows: _Rows) -> Inputs:
        if (made := self._stored(rows)) is None:
            started = time.perf_counter()
            made = rows.encode()
            self.n_encoded += 1
            self.seconds += time.perf_counter() - started
            if self._folder:
                state = (len(made), made.view(np.uint8).reshape(-1))
                self._folder.write(rows.encoder_key, rows.ids, iter([state]), made.nbytes)
        return made

    def _stored(self, rows: _Rows) -> Inputs | None:
        """Return the rows that are kept on disk; None if there are none."""
        for stored in self._folder.sequences(rows.encoder_key) if self._folder else ():
            if self._folder and stored.tokens == rows.ids and (states := self._folder.states(stored)):
                self._folder.touch(stored)
                return states[0].view(np.float32).reshape(len(rows.ids), -1)
        return None

    def close(self) -> None:
        """Free the encoder; what is being computed is waited for."""
        self._thread.shutdown(cancel_futures=True)
        self._kept.clear()
        if self._library:
            self._library.close()


class _Library(Closing):
    """libmtmd's context for one target."""

    def __init__(self, file: Path, target: Model, n_threads: int) -> None:
        self.mtmd: Any = load()
        params = self.mtmd.mtmd_context_params_default()
        params.use_gpu = params.print_timings = params.warmup = False
        params.n_threads, params.media_marker = n_threads, _MARKER
        kernels = STOCK
        wanted = target.uses_kernels and facts(file).is_quantized
        with packing(wanted):
            if plugin := target.plugin if wanted else None:
                kernels, params.use_gpu, params.device = plugin.isa, True, plugin.device(n_threads)

            def progressed(progress: float, _data: object) -> bool:
                if plugin:
                    plugin.ask_for_weights(progress == 0.0)  # what is asked for next is their memory
                return True

            params.progress_callback = self.mtmd.mtmd_progress_callback(progressed)
            self.context = backend.create(
                lambda _: self.mtmd.mtmd_init_from_file(os.fsencode(file), target.handle, params),
                self.mtmd.mtmd_free,
            )
        if self.context is None:
            raise EdgespecError(f"{file}: llama.cpp cannot load it: {backend.failure_reason()}")
        self._free = weakref.finalize(self, self.mtmd.mtmd_free, self.context)
        if not self.mtmd.mtmd_support_vision(self.context):
            raise EdgespecError(f"{file}: it encodes no images")
        self.n_embd = target.n_input
        with file.open("rb") as opened:
            content = hashlib.file_digest(opened, "sha256").digest()
        self.key = hashlib.blake2b(
            content + kernels.encode() + backend.library_version().encode(), digest_size=8
        ).hexdigest()
        """A hash of all that the rows depend on."""

    def parts(self, picture: Picture, name: str, encoder: Encoder) -> list[list[int] | EmbeddedSpan]:
        """Return the tokens around a picture, and its spans. Raises UsageError about `name`."""
        mtmd = self.mtmd
        bitmap = mtmd.mtmd_bitmap_init(
            picture.width,
            picture.height,
            (ctypes.c_uint8 * len(picture.pixels)).from_buffer_copy(picture.pixels),
        )
        chunks = mtmd.mtmd_input_chunks_init()
        text = mtmd.mtmd_input_text(_MARKER, len(_MARKER), False, True)
        owner = _Chunks(chunks, mtmd.mtmd_input_chunks_free)
        backend.clear_log()
        code = mtmd.mtmd_tokenize(
            self.context, chunks, ctypes.byref(text), (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap), 1
        )
        mtmd.mtmd_bitmap_free(bitmap)
        if code:
            raise UsageError(f"{name} cannot be encoded: {backend.failure_reason()}", field="images")
        found: list[list[int] | EmbeddedSpan] = []
        for i in range(mtmd.mtmd_input_chunks_size(chunks)):
            chunk = mtmd.mtmd_input_chunks_get(chunks, i)
            if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
                n = ctypes.c_size_t()
                tokens = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(n))
                found.append(tokens[: n.value])
                continue
            n_rows = int(mtmd.mtmd_input_chunk_get_n_tokens(chunk))
            content = self.key.encode() + picture.digest + i.to_bytes(2, "little")
            n_positions = int(mtmd.mtmd_input_chunk_get_n_pos(chunk))
            ids = EmbeddedSpan.ids_of(content, n_rows, n_positions)
            span = EmbeddedSpan(
                ids,
                _Rows(self, encoder, owner, chunk, array("i", ids)).start,
                self._places(chunk, n_rows) if mtmd.mtmd_decode_use_mrope(self.context) else None,
                bool(mtmd.mtmd_decode_use_non_causal(self.context, chunk)),
            )
            found.append(span)
        return found

    def _places(self, chunk: int, n_rows: int) -> Places:
        tokens = self.mtmd.mtmd_input_chunk_get_tokens_image(chunk)
        place = self.mtmd.mtmd_image_tokens_get_decoder_pos
        places = [place(tokens, 0, i) for i in range(n_rows)]
        return np.array([(p.t, p.y, p.x, p.z) for p in places], np.int32).T

    def close(self) -> None:
        """Free the context; a second call does nothing."""
        self._free()


class _Chunks:
    """Owns what libmtmd made of a picture."""

    def __init__(self, chunks: int, free: Any) -> None:  # noqa: ANN401 - a function of ctypes
        weakref.finalize(self, free, chunks)


class _Rows:
    """The rows of a picture, which are computed once, when they are first asked for."""

    def __init__(
        self, library: _Library, encoder: Encoder, owner: _Chunks, chunk: int, ids: array[int]
    ) -> None:
        self._library, self._encoder = library, encoder
        self._owner: _Chunks | None = owner  # of the chunk, until it is encoded
        self._chunk, self.ids, self.encoder_key = chunk, ids, library.key
        self._lock = Lock()
        self._made: Future[Inputs] | None = None

    def start(self) -> Future[Inputs]:
        """Begin to compute them, unless that has begun."""
        with self._lock:
            if self._made is None:
                self._made = self._encoder.compute(self)
            return self._made

    def encode(self) -> Inputs:
        """Return the rows, shape (n_rows, n_embd). Raises EdgespecError."""
        mtmd, context = self._library.mtmd, self._library.context
        if mtmd.mtmd_encode_chunk(context, self._chunk):
            raise EdgespecError(f"an image could not be encoded: {backend.failure_reason()}")
        self._owner = None
        rows = mtmd.mtmd_get_output_embd(context)
        return np.ctypeslib.as_array(rows, (len(self.ids), self._library.n_embd)).copy()


# ---- its file: named by somebody, beside the target, or in its repository ----

_LAST = ("mm.", "resampler.", "adapter.")  # begin the names of a projector's tensors


class MmprojFacts(msgspec.Struct, frozen=True):
    """Facts from the header of an image encoder's file."""

    projector: str
    """Its kind, such as "gemma3"."""
    n_bytes: int
    """Bytes of the file, which are in memory once it is loaded."""
    widths: frozenset[int]
    """Lengths in its projector's tensors, among them the width of the text model."""
    is_quantized: bool
    """Whether edgespec's kernels gain anything: for 16-bit weights llama.cpp's are as fast."""


_UNQUANTIZED = ("f32", "f16", "bf16")


def facts(path: Path) -> MmprojFacts:
    """Return the facts of a file. Raises EdgespecError if it is damaged or no image encoder."""
    header = check_complete_file(path)
    gguf, kind = header.gguf, header.architecture
    if kind != "clip" and header.general_type != "mmproj":
        raise EdgespecError(f"{path}: no image encoder (mmproj), but a model of architecture {kind}")
    if "clip.has_vision_encoder" not in gguf.fields or not gguf.number("clip.has_vision_encoder"):
        raise EdgespecError(f"{path}: an encoder of sound alone, not of images")
    names = ("clip.projector_type", "clip.vision.projector_type")
    projector = next((gguf.text(name) for name in names if name in gguf.fields), "")
    widths = frozenset(n for one in gguf.tensors if one.name.startswith(_LAST) for n in one.shape)
    is_quantized = any(one.type not in _UNQUANTIZED for one in gguf.tensors)
    return MmprojFacts(projector, header.file_bytes, widths, is_quantized)


def find_mmproj(
    target: Path, given: str | Path | None, *, pull_missing: bool = True, ask_hub: bool = True
) -> Path | None:
    """Return the file of the image encoder for the model at `target`; None if there is none.

    `given`: a path or a name as of `resolve`; without it models.toml may name one. Of several beside the
    target one that fits is chosen, then one with words of its name, then one in F16. Without any its
    repository of the hub is searched, if `ask_hub` also for files that are not here. A missing file is
    pulled; if `pull_missing` is false, the path that it will have is returned. Raises EdgespecError for a
    file that is no encoder or does not fit.
    """
    store = Store.default()
    entry = next((one for one in load_registry().entries.values() if store.file(one) == target), None)
    named = (
        given or (entry.mmproj if entry else "") or _beside(target) or _in_repository(target, entry, ask_hub)
    )
    if not named:
        return None
    ref = ModelRef(str(named))
    path = store.file(ref.found) if isinstance(ref.found, Entry) else ref.found
    return path if not pull_missing and not path.exists() else _checked(resolve(ref), target)


def _beside(target: Path) -> Path | None:
    def rank(path: Path) -> tuple[bool, int, tuple[bool, str]]:
        return not _fits(path, target), -len(_words(path.stem) & _words(target.stem)), _rank(path.name)

    return min(
        (path for path in target.parent.glob("*.gguf") if is_projector(path.name)), key=rank, default=None
    )


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower().replace(quantization_in(name).lower() or "\0", "")))


def _in_repository(target: Path, entry: Entry | None, ask_hub: bool) -> str:
    """Return the name of a file in a model's repository of the hub, or ""."""
    if (repository := _repository(target, entry)) is None:
        return ""
    try:
        files = [*filter(is_projector, repository_files(repository, ask=ask_hub))]
    except SourceFailure as failure:
        problem = f"looking for its image encoder: hub {repository.repo}: {failure}"
        raise EdgespecError(f"{target.name}: {problem}") from None
    name = f"hf:{repository.repo}/{min(files, key=_rank)}@{repository.revision}" if files else ""
    return name.removesuffix("@main")


def _rank(name: str) -> tuple[bool, str]:
    return quantization_in(name) != "F16", name


def _fits(path: Path, target: Path) -> bool:
    try:
        return bool(_checked(path, target))
    except EdgespecError:
        return False


def _checked(path: Path, target: Path) -> Path:
    widths, wanted = facts(path).widths, read_header(target).n_embd
    if widths and wanted not in widths:
        problem = f"the image encoder of another model: {target.name} reads rows of {wanted} numbers"
        raise EdgespecError(f"{path}: {problem}, which it does not make; name the right one by --mmproj FILE")
    return path


def _repository(target: Path, entry: Entry | None) -> HubRepository | None:
    for source in entry.sources if entry else ():
        if isinstance(source, HubSource):
            return HubRepository(source.repo, "", source.revision)
    if cached := re.search(r"/models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})/", str(target)):
        return HubRepository(f"{cached[1]}/{cached[2]}", "", cached[3])
    store = Store.default()
    stamp = store.stamp(Entry(target.stem)) if target.parent == store.root else None
    pulled = re.match(r"hub ([^/]+/[^/]+)/", stamp.source) if stamp else None
    return HubRepository(pulled[1], "", target.stem.partition("@")[2] or "main") if pulled else None


def image_facts(target: Path) -> dict[str, Any]:
    """Return a report of a target's image encoder: file, projector, bytes, and why it reads none, or ""."""
    told: dict[str, Any] = dict.fromkeys(("file", "projector", "bytes")) | {"problem": ""}
    try:
        if (path := find_mmproj(target, None, pull_missing=False, ask_hub=False)) is None:
            return told
        if not path.exists():
            return told | {"file": str(path), "problem": "their encoder is pulled with the first one"}
        found = facts(path)
    except EdgespecError as error:
        return told | {"problem": str(error)}
    problem = "" if is_built() else "run `make images`, which builds what reads them"
    return {"file": str(path), "projector": found.projector, "bytes": found.n_bytes, "problem": problem}


# ---- llama.cpp's library that runs it, which `make images` builds ----

_LIBRARY = "libmtmd.so"


def is_built() -> bool:
    """Whether the library lies beside llama.cpp's own."""
    return (backend.library_folder() / _LIBRARY).exists()


@cache
def load() -> ModuleType:
    """Return `llama_cpp.mtmd_cpp`, whose log is llama.cpp's (backend.py).

    Raises EdgespecError if its library is not built, or cannot be loaded.
    """
    if not is_built():
        raise EdgespecError(f"llama.cpp's encoders of images ({_LIBRARY}) are not built; run `make images`")
    try:
        module = backend.bindings("llama_cpp.mtmd_cpp")
    except (OSError, RuntimeError, AttributeError) as error:
        problem = f"{backend.library_folder() / _LIBRARY}: cannot be loaded: {error}; run `make images` again"
        raise EdgespecError(problem) from error
    backend.take_log(module.mtmd_log_set)
    backend.take_log(module.mtmd_helper_log_set)
    return module
