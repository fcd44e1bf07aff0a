"""The names that requests may use for the models of a server: one rule for every route and API."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, WithJsonSchema

from edgespec.apps.server.api_errors import ApiError
from edgespec.errors import UsageError

if TYPE_CHECKING:  # it loads llama.cpp
    from edgespec.llama.weights import Model

ALIAS = "edgespec"
"""A name of the first model that a route is for."""
OPENAI_SPEECH = "whisper-1"
"""OpenAI's name of its Whisper model: here of the first one."""

ModelKind = Literal["text", "speech", "vectors"]


def _named(asked: Any) -> Any:  # noqa: ANN401 - whatever was sent
    return ALIAS if asked is None or asked == "" else asked


RequestedModel = Annotated[
    str,
    BeforeValidator(_named),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "null"}]}),
]
"""The field `model` of a request; its default is ALIAS."""


@dataclass(frozen=True)
class NamedModel:
    """A model, as requests name it."""

    name: str
    """The name in answers."""
    aliases: tuple[str, ...] = ()
    kinds: frozenset[ModelKind] = frozenset({"text"})
    """What it can do."""
    title: str = ""
    """What its file calls itself."""
    quantization: str = ""
    """Such as Q4_K_M: a name may lack it, or have it as a tag after a colon."""
    size: str = ""
    """Such as 1.5B, which may be a tag."""

    @classmethod
    def of(cls, model: Model, names: Sequence[str]) -> NamedModel:
        """Return the names of a loaded model: `names`, the first of which answers use, and its file's."""
        size = human_number(model.n_params)
        return cls(
            names[0], (*names[1:],), title=model.name, quantization=quantization(model.ftype), size=size
        )

    @property
    def full(self) -> str:
        """The name as Ollama's lists show it, with a tag."""
        return self.name if ":" in self.name else f"{self.name}:latest"

    def level(self, wanted: str) -> int:
        """Return how closely `wanted` matches. 0: the name, 1: the file, 2: all but a tag, 3: not at all."""
        names = {_plain(name) for name in (self.name, *self.aliases)}
        if wanted in names:
            return 0
        names |= {_plain(self.title)} - {""}
        if wanted in names:
            return 1
        names |= {name.removesuffix(f"-{self.quantization.lower()}") for name in names}
        name, _, tag = wanted.rpartition(":")
        # Ollama writes qwen2.5-coder:1.5b for what is qwen2.5-coder-1.5b-q4_k_m here.
        is_tagged = name in names and tag in (self.quantization.lower(), self.size.lower())
        return 2 if is_tagged or {wanted, f"{name}-{tag}"} & names else 3


@dataclass(frozen=True)
class ServedNames:
    """The names of the models of a server, in their order."""

    models: Sequence[NamedModel]

    def find(self, asked: str | None, kind: ModelKind | None = None) -> int:
        """Return the number of the model that a request asks for; without a name the first of that `kind`.

        Case does not matter, and `:latest` may follow. Raises a 404.
        """
        wanted, numbers = _plain(asked or ALIAS), range(len(self.models))
        able = [i for i in numbers if kind in (None, *self.models[i].kinds)]
        order = [*able, *(i for i in numbers if i not in able)]
        level, found = min((self.models[i].level(wanted), order.index(i)) for i in order)
        speech = [i for i in numbers if "speech" in self.models[i].kinds]
        if level and (usual := {ALIAS: order, OPENAI_SPEECH: speech}.get(wanted)):
            return usual[0]
        if level < 3:
            return order[found]
        here = ", ".join(repr(model.name) for model in self.models)
        line = f"model {(asked or '')[:80]!r} not found: this server has {here}, also called {ALIAS!r}"
        raise ApiError(404, line, param="model", code="model_not_found")

    def others(self, number: int) -> list[str]:
        """Return the other names of a model."""
        model = self.models[number]
        is_speech = model is next((one for one in self.models if "speech" in one.kinds), None)
        usual = [*([] if number else [ALIAS]), *([OPENAI_SPEECH] if is_speech else [])]
        return [name for name in dict.fromkeys([*usual, model.title, *model.aliases]) if name]

    def check(self, where: str) -> None:
        """Raise UsageError if two models have one name; `where` they were named."""
        owners: dict[str, NamedModel] = {}
        for model in self.models:
            for name in (model.name, *model.aliases):
                owner = owners.setdefault(_plain(name), model)
                if owner is not model:
                    raise UsageError(
                        f"{where}: two models are called {name!r}: {owner.name} and {model.name}"
                    )


_SIZES = {"Small": "S", "Medium": "M", "Large": "L"}


def quantization(ftype: str) -> str:
    """Return llama.cpp's name of a quantization as Ollama writes it: Q4_K_M for "Q4_K - Medium"."""
    name, _, rest = ftype.removeprefix("(guessed) ").removeprefix("all ").partition(" - ")
    name = re.split(r"[ ,]", name)[0]
    return f"{name}_{_SIZES[rest]}" if rest in _SIZES else name


def human_number(n: int) -> str:
    """Return a number of parameters as Ollama writes it: 1.5B, 494.03M."""
    for unit, letter, digits in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0)):
        if n >= unit:
            return f"{n // unit}{letter}" if n % unit == 0 else f"{n / unit:.{digits}f}{letter}"
    return str(n)


def plain_name(model: str) -> str:
    """Return the name that a server uses for a model: for a file, its name without the folder."""
    return PurePath(model).name.removesuffix(".gguf")


def _plain(name: str) -> str:
    return name.strip().lower().removesuffix(":latest")
