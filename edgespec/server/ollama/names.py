"""The names by which Ollama's clients know the served model."""

from __future__ import annotations

from edgespec.server.faults import Fault
from edgespec.server.requests import ALIAS, Service

LATEST = "latest"
"""The tag of a name without one."""


class Names:
    """The served model's name, its aliases, and what may stand after a colon."""

    def __init__(self, service: Service, quantization: str, size: str) -> None:
        """Know `service`'s model, also without its `quantization`, or with that or its `size` as a tag."""
        self.full = service.name if ":" in service.name else f"{service.name}:{LATEST}"
        """The name that lists show."""
        names = {name.lower() for name in (service.name, *service.aliases)}
        self._names = names | {name.removesuffix(f"-{quantization.lower()}") for name in names}
        self._tags = {LATEST, quantization.lower(), size.lower()}

    def check(self, asked: str) -> None:
        """Raise a Fault if no model of this name is served, in Ollama's words."""
        if not asked:
            raise Fault(400, "model is required", param="model")
        if not self._is_served(asked.lower()):
            line = f"model '{asked[:80]}' not found: this server has '{self.full}', also called '{ALIAS}'"
            raise Fault(404, line, param="model", code="model_not_found")

    def _is_served(self, asked: str) -> bool:
        name, _, tag = asked.rpartition(":")
        # Ollama writes qwen2.5-coder:1.5b for what is qwen2.5-coder-1.5b-q4_k_m here.
        return bool({asked, f"{name}-{tag}"} & self._names) or (name in self._names and tag in self._tags)
