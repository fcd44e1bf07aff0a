"""Addresses of nodes: the text of `--nodes`.

    pi@board1,board2:50053,127.0.0.1:50060,board3=12

Each node is named once:

    user@host, host          through ssh, with all that ~/.ssh/config says of the host
    127.0.0.1, localhost     directly: a node of this machine, or the end of a tunnel that the user has opened
    host, --unsafe-no-ssh    directly, over the open network; user@host goes through ssh all the same
    :PORT                    the node's port; without it that of the one which runs there (directly: 50052)
    =LAYERS                  number of the model's layers there; without it splitting.py decides
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from edgespec.errors import UsageError
from edgespec.llama.rpc import DEFAULT_PORT
from edgespec.platform.ssh import is_host

_ADDRESS = re.compile(r"(?:\[(?P<ipv6>[^]]*)\]|(?P<host>[^]:=[]*))(?::(?P<port>[^:=]*))?(?:=(?P<layers>.*))?")
_MOST_LAYERS = 512  # of llama.cpp's models


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """Address of one node."""

    name: str
    """The user's text, without the layers."""
    host: str
    """Host for ssh, or for a socket."""
    port: int | None
    """Port; None: that of the only node that runs there."""
    direct: bool
    """Whether it is connected to without ssh."""
    n_layers: int | None = None
    """Layers that the user wants there; None: the best number."""


def read_addresses(text: str, *, unsafe: bool) -> tuple[NodeAddress, ...]:
    """Return the nodes that `text` names, in its order, at least one.

    `unsafe`: --unsafe-no-ssh was given. Raises UsageError, with the field "nodes", for what is no address
    and for two nodes of one name.
    """
    found: dict[tuple[str, int | None], NodeAddress] = {}
    for part in text.split(","):
        address = _read(part.strip(), unsafe=unsafe)
        other = found.setdefault((address.host, address.port), address)
        if other is not address:
            raise UsageError("two nodes of one name; name each once", field="nodes", value=address.name)
    return tuple(found.values())


def _read(text: str, *, unsafe: bool) -> NodeAddress:
    if not text:
        raise UsageError(
            "an empty name; name nodes as user@host or host:port, with commas between", field="nodes"
        )
    match = _ADDRESS.fullmatch(text)
    host = match and (match["ipv6"] or match["host"])
    if not match or not host or not is_host(host):
        raise UsageError("not user@host, host or host:port", field="nodes", value=text)
    port = _number(match["port"], "a port is", 65535, text)
    n_layers = _number(match["layers"], "a number of layers is", _MOST_LAYERS, text)
    name = text.partition("=")[0]
    direct = _is_loopback(host) or (unsafe and "@" not in host)
    if not direct:
        return NodeAddress(name, host, port, direct, n_layers)
    if ":" in host:
        raise UsageError(
            "llama.cpp's protocol runs over IPv4 alone; give such an address, or user@host, for ssh",
            field="nodes",
            value=name,
        )
    host = "127.0.0.1" if host == "localhost" else host
    return NodeAddress(name, host, port or DEFAULT_PORT, direct, n_layers)


def _number(digits: str | None, what: str, most: int, text: str) -> int | None:
    """Return the number after ":" or "=", None where there is neither."""
    if digits is None:
        return None
    if not re.fullmatch(r"[0-9]{1,5}", digits) or not 1 <= int(digits) <= most:
        raise UsageError(f"{what} a number from 1 to {most}", field="nodes", value=text)
    return int(digits)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
