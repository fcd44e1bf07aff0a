"""The names by which Ollama's clients know the served model."""

from __future__ import annotations

from collections.abc import Collection

from edgespec.server.faults import Fault
from edgespec.server.requests import ALIAS, Service

LATEST = "latest"
"""The tag of a name without one."""


class Names:
    """The served model's name, its aliases, and what may stand after a colon."""

    def __init__(self, service: Service, tags: Collection[str]) -> None:
        """Know `service`'s model, also with one of `tags`: its size, its quantization."""
        self.full = service.name if ":" in service.name else f"{service.name}:{LATEST}"
        """The name that lists show."""
        self._names = {name.lower() for name in (service.name, *service.aliases)}
        self._tags = {LATEST, *(tag.lower() for tag in tags)}

    def check(self, asked: str) -> None:
        """Raise a Fault if no model of this name is served, in Ollama's words."""
        if not asked:
            raise Fault(400, "model is required", param="model")
        if not self._is_served(asked.lower()):
            line = f"model '{asked[:80]}' not found: this server has '{self.full}', also called '{ALIAS}'"
            raise Fault(404, line, param="model", code="model_not_found")

    def _is_served(self, asked: str) -> bool:
        name, _, tag = asked.rpartition(":")
        # Ollama writes qwen2.5-coder:1.5b for what is qwen2.5-coder-1.5b here.
        return bool({asked, f"{name}-{tag}"} & self._names) or (name in self._names and tag in self._tags)
