"""A board as a node: the service that `make deploy` leaves there, with the edgespec of this machine."""

import os
import shlex

import pytest

import sshd as sshd_room
from command_line import COMMAND, python_path
from edgespec.apps.nodes.connection import connect
from edgespec.errors import EdgespecError
from edgespec.llama.node_addresses import read_addresses
from pi.node_service import look_after
from pi.ssh import Connection
from sshd import Board


@pytest.fixture
def board(tmp_path):
    """A board with a systemd, and an edgespec where `make deploy` installs it."""
    board = Board(tmp_path / "board")
    board.has_systemd()
    program = board.home / "edgespec/venv/bin/edgespec"
    program.parent.mkdir(parents=True)
    settings = f"EDGESPEC_KERNELS=off PYTHONPATH={shlex.quote(python_path())}"
    free_port = '[ "$*" = node ] && set -- node --port 0\n'
    program.write_text(f'#!/bin/sh\n{free_port}{settings} exec {" ".join(COMMAND)} "$@"\n')
    program.chmod(0o755)
    return board


def test_a_board_that_was_made_a_node_is_reached_until_it_is_none(tmp_path, monkeypatch, board, capfd):
    with sshd_room.serving(tmp_path / "sshd", board) as server:
        monkeypatch.setenv("PATH", f"{sshd_room.ssh_for(server, tmp_path)}:{os.environ['PATH']}")
        address = read_addresses(server.host, unsafe=False)
        with Connection(server.host) as connection:
            look_after(connection, f"{board.home}/edgespec", "keep")
            with pytest.raises(EdgespecError, match="no node runs there"):
                connect(address)
            look_after(connection, f"{board.home}/edgespec", "start")
            with connect(address) as nodes:
                assert nodes.nodes[0].speed.kernels == "stock"
                assert nodes.lost == {}
            look_after(connection, f"{board.home}/edgespec", "stop")
            with pytest.raises(EdgespecError, match="no node runs there"):
                connect(address)
    assert (board.fakes / "journal").read_text().count("node ready on 127.0.0.1:") == 1
    said = [line for line in capfd.readouterr().err.splitlines() if "asking systemd" not in line]
    assert said == [
        f"edgespec: {server.host} is a node: edgespec doctor --nodes {server.host}",
        f"edgespec: {server.host} is no node any more",
    ]
