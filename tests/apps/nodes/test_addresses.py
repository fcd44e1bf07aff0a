"""Addresses of nodes: which go through ssh, and which are refused."""

import pytest

from edgespec.errors import UsageError
from edgespec.llama.node_addresses import NodeAddress, read_addresses


def test_names_go_through_ssh_and_this_machine_directly():
    text = "pi@board1, board2:50053,127.0.0.1:50060,localhost"
    assert read_addresses(text, unsafe=False) == (
        NodeAddress("pi@board1", "pi@board1", None, direct=False),
        NodeAddress("board2:50053", "board2", 50053, direct=False),
        NodeAddress("127.0.0.1:50060", "127.0.0.1", 50060, direct=True),
        NodeAddress("localhost", "127.0.0.1", 50052, direct=True),
    )


def test_without_ssh_only_names_of_users_go_through_it():
    found = read_addresses("pi@board1,board2,10.0.0.7:5000,pi@127.0.0.1", unsafe=True)
    assert [(address.direct, address.port) for address in found] == [
        (False, None),
        (True, 50052),
        (True, 5000),
        (False, None),
    ]


def test_layers_that_the_user_wants_there():
    found = read_addresses("board1=12,board2:50053=3,[fe80::1%eth0]:50052=4", unsafe=False)
    assert [(address.name, address.host, address.n_layers) for address in found] == [
        ("board1", "board1", 12),
        ("board2:50053", "board2", 3),
        ("[fe80::1%eth0]:50052", "fe80::1%eth0", 4),
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "nodes: an empty name; name nodes as user@host or host:port, with commas between"),
        ("a,,b", "nodes: an empty name; name nodes as user@host or host:port, with commas between"),
        ("a:0", "nodes a:0: a port is a number from 1 to 65535"),
        ("a:65536", "nodes a:65536: a port is a number from 1 to 65535"),
        ("a:", "nodes a:: a port is a number from 1 to 65535"),
        ("a:x", "nodes a:x: a port is a number from 1 to 65535"),
        ("a:\N{SUPERSCRIPT TWO}", "nodes a:\N{SUPERSCRIPT TWO}: a port is a number from 1 to 65535"),
        ("a=0", "nodes a=0: a number of layers is a number from 1 to 512"),
        ("-oProxyCommand=x", "nodes -oProxyCommand=x: not user@host, host or host:port"),
        ("a b", "nodes a b: not user@host, host or host:port"),
        (":50052", "nodes :50052: not user@host, host or host:port"),
        ("a:1:2", "nodes a:1:2: not user@host, host or host:port"),
        ("[::1]:50052", "nodes [::1]:50052: llama.cpp's protocol runs over IPv4 alone; "),
        ("a,b,a", "nodes a: two nodes of one name; name each once"),
        ("127.0.0.1,localhost:50052", "nodes localhost:50052: two nodes of one name; name each once"),
    ],
)
def test_what_is_no_address_is_one_line(text, line):
    with pytest.raises(UsageError) as refused:
        read_addresses(text, unsafe=False)
    assert str(refused.value).startswith(line)
    assert refused.value.field == "nodes"
