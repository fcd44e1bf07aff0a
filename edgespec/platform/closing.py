"""A base class for context managers that have a `close` method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """A context manager that is closed when its block ends."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
