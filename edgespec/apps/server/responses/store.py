"""Responses that are kept in memory, so that a client can go on with one by its id."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.apps.server.api_errors import ApiError
from edgespec.apps.server.responses.schema import Item

NamedItem = tuple[str, Item]
"""An item and its id."""

MOST_BYTES = 64 << 20
"""Bytes of JSON that are kept; the responses that were not used for longest go first."""


@dataclass(frozen=True)
class StoredResponse:
    """A response and the conversation that it ends."""

    answer: str
    """Its JSON."""
    items: Sequence[NamedItem]
    """The whole input, then the output; without instructions."""
    n_input: int
    """Items of the input."""
    n_bytes: int
    """JSON of all of it."""


class ResponseStore:
    """The last responses. For any thread. Nothing is written to a disk."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        """Keep up to `most_bytes`."""
        self._most = most_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self._n_bytes = 0

    def put(self, identity: str, response: StoredResponse) -> None:
        """Keep `response`, and forget others where there is no room."""
        with self._lock:
            self._kept[identity] = response
            self._n_bytes += response.n_bytes
            while self._n_bytes > self._most:
                self._n_bytes -= self._kept.popitem(last=False)[1].n_bytes

    def get(self, identity: str, param: str) -> StoredResponse:
        """Return a response; a 404 about the field `param` where it is not here."""
        with self._lock:
            found = self._kept.get(identity)
            if found is None:
                kind = "previous response" if param == "previous_response_id" else "response"
                raise _absent(kind, identity, param)
            self._kept.move_to_end(identity)
            return found

    def delete(self, identity: str) -> None:
        """Forget a response; a 404 where it is not here."""
        with self._lock:
            found = self._kept.pop(identity, None)
            if found is None:
                raise _absent("response", identity, "response_id")
            self._n_bytes -= found.n_bytes

    def item(self, identity: str) -> Item:
        """Return an item of a stored response's output; a 404 where it is not here."""
        with self._lock:
            for response in reversed(self._kept.values()):
                for name, item in response.items[response.n_input :]:  # a client chooses ids of its input
                    if name == identity:
                        return item
        raise _absent("item", identity, "input")


def _absent(kind: str, identity: str, param: str) -> ApiError:
    line = (
        f"{kind.capitalize()} with id {identity[:80]!r} not found: this server keeps responses in memory, "
        "the last ones, unless store is false"
    )
    return ApiError(404, line, param=param, code=f"{kind.replace(' ', '_')}_not_found")
