"""Deploying to a board: a real ssh and sshd, real venvs and pip, wheels and answers that are made up."""

import fcntl
import hashlib
import json
import os
import socket
import subprocess
import threading
import time
import zipfile

import pytest

import sshd as sshd_room
from edgespec.errors import EdgespecError
from hub_server import FakeServer
from pi import deploy as room
from pi.dependencies import download, folder_name
from pi.ssh import Connection
from sshd import PI4, PI5, Board

DOCTOR = """\
import os, signal, sys
from pathlib import Path
NODE = Path(os.environ["HOME"], "node")
def main():
    if sys.argv[1:] == ["node"]:
        NODE.write_text("{version}")
        signal.sigwait([signal.SIGINT])
        NODE.unlink()
        return 0
    if sys.argv[1:] == ["node", "--describe", "--json"]:
        print('{{"running":[' + "{{}}" * NODE.exists() + "]}}")
        return 0
    assert sys.argv[1:] == ["doctor"], sys.argv
    print("cpu      Cortex-A76, edgespec {version}")
    print("testing the kernels", file=sys.stderr)
    return {code}
"""


def make_wheel(folder, name, version, *, needs=(), tag="py3-none-any", members=None):
    """A wheel's file, with an `edgespec` command if it has a module of that name."""
    package = name.replace("-", "_")
    info = f"{package}-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{package}-{version}-{tag}.whl"
    requirements = "".join(f"Requires-Dist: {need}\n" for need in needs)
    with zipfile.ZipFile(file, "w") as archive:
        for path, content in (members or {}).items():
            archive.writestr(path, content)
        head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        archive.writestr(f"{info}/METADATA", head + requirements)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        if "edgespec.py" in (members or {}):
            archive.writestr(f"{info}/entry_points.txt", "[console_scripts]\nedgespec = edgespec:main\n")
        archive.writestr(f"{info}/RECORD", "")
    return file


class Dist:
    """Wheels as pi/wheels.py leaves them, but for any machine and without what they need."""

    def __init__(self, folder):
        self.folder = folder

    def make(self, board, version="0.1.0", code="0", **options):
        folder = self.folder / board
        for old in folder.glob("*"):
            old.unlink()
        members = {"edgespec.py": DOCTOR.format(version=version, code=code)}
        wheels = [
            make_wheel(folder, "edgespec", version, members=members, **options),
            make_wheel(folder, "llama-cpp-python", "0.3.36", tag=f"1{board}-py3-none-any"),
        ]
        self.write(board, wheels={file.name: sha256(file) for file in wheels})
        return wheels

    def write(self, name, **changes):
        file = self.folder / name / "manifest.json"
        old = json.loads(file.read_text()) if file.exists() else {}
        plain = {
            "board": name,
            "machine": "aarch64",
            "glibc": "2.34",
            "compiler": "",
            "tools": {},
            "packages": {},
        }
        file.write_text(json.dumps({**plain, **old, **changes}))


def sha256(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture(autouse=True)
def own_pip(monkeypatch, tmp_path):
    """No registry and no settings of this machine; what is downloaded stays in a folder of the test."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setattr(room, "BUILD", tmp_path / "kept")


@pytest.fixture
def board(tmp_path):
    return Board(tmp_path / "board")


@pytest.fixture
def server(tmp_path, board):
    with sshd_room.serving(tmp_path / "sshd", board) as server:
        yield server


@pytest.fixture
def dist(tmp_path):
    dist = Dist(tmp_path / "dist")
    dist.make("pi4")
    dist.make("pi5")
    return dist


@pytest.fixture
def run(server, dist, capfd):
    """Call the command for this server; return its exit code, stdout and the lines on stderr."""

    def call(*arguments, to=None):
        code = room.main([*(to or server.arguments), "--dist", str(dist.folder), *arguments])
        said = capfd.readouterr()
        return code, said.out, said.err.splitlines()

    return call


def last_line(outcome, code=1):
    """The line for a user's mistake: what else is on stderr is what was being done."""
    assert outcome[0] == code, outcome
    assert outcome[1] == ""
    assert all(line.startswith("edgespec: ") for line in outcome[2]), outcome
    return outcome[2][-1].removeprefix("edgespec: ")


def doctor(board, folder="edgespec"):
    """What the edgespec on the board says."""
    command = [board.home / folder / "venv/bin/edgespec", "doctor"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# ---- it works ----


@pytest.mark.slow
def test_a_plain_venv(run, board):
    board.put("venv_options", "")
    code, _, err = run()
    assert code == 0, err[-1]
    assert (board.home / "edgespec/venv/bin/pip").exists()


def test_installs_into_a_venv_and_shows_doctor(run, board, server):
    code, out, err = run()
    assert code == 0, err[-1]
    assert out == "cpu      Cortex-A76, edgespec 0.1.0\n"
    assert "testing the kernels" in err
    assert (
        f"edgespec: {server.host}: Raspberry Pi 5 Model B Rev 1.0, Debian GNU/Linux 12 (bookworm), "
        "Python 3.11.2, 8.44 GB of memory, 4.22 GB available, 20.48 GB free on disk" in err
    )
    assert err[-1] == (
        f"edgespec: installed; on {server.host}: {board.home}/edgespec/venv/bin/edgespec run "
        '"Write a quicksort in Python."'
    )
    assert doctor(board) == out
    link = (board.home / "edgespec/venv").readlink()
    assert names(board.home / "edgespec") == [str(link), "venv"]
    assert not (board.home / "edgespec/venv/wheels").exists()
    assert server.sessions() == 1
    assert "Disconnected from user" in server.log.read_text()


def test_a_second_deploy_takes_the_place_of_the_first(run, board, dist):
    assert run()[0] == 0
    first = (board.home / "edgespec/venv").readlink()
    leftover = board.home / "edgespec/.edgespec-venv-cutoff"
    leftover.mkdir()
    dist.make("pi5", version="0.2.0")
    assert run()[0] == 0
    second = (board.home / "edgespec/venv").readlink()
    assert second != first
    assert names(board.home / "edgespec") == [str(second), "venv"]
    assert "edgespec 0.2.0" in doctor(board)


def test_a_doctor_that_fails_leaves_the_old_one_and_its_exit_code_is_passed_on(run, board, dist, server):
    assert run()[0] == 0
    before = names(board.home / "edgespec")
    dist.make("pi5", version="0.2.0", code="3")
    code, out, err = run()
    assert (code, out) == (3, "cpu      Cortex-A76, edgespec 0.2.0\n")
    assert err[-1] == (
        f"edgespec: `edgespec doctor` failed on {server.host} (exit code 3); nothing has changed there"
    )
    assert names(board.home / "edgespec") == before
    assert "edgespec 0.1.0" in doctor(board)


def test_an_installation_that_fails_leaves_the_old_one(run, board, dist, server):
    assert run()[0] == 0
    before = names(board.home / "edgespec")
    dist.make("pi5", tag="cp311-abi3-manylinux_2_34_aarch64")  # in truth this board is no aarch64
    if os.uname().machine != "aarch64":
        line = last_line(run())
        assert line.startswith(f"{server.host}: installing failed: edgespec-0.1.0-cp311-abi3-manylinux")
        assert line.endswith("is not a supported wheel on this platform.; nothing has changed there")
    assert names(board.home / "edgespec") == before
    assert "edgespec 0.1.0" in doctor(board)


@pytest.mark.parametrize("into", ["-x y", "~/deep/er"])
def test_a_folder_of_ones_own(run, board, into):
    code, _, err = run(f"--into={into}")
    assert code == 0, err[-1]
    folder = into.removeprefix("~/")
    assert "edgespec 0.1.0" in doctor(board, folder)
    assert names(board.home) == [folder.split("/")[0]]


def test_other_packages_come_along(run, board, dist, tmp_path):
    kept = tmp_path / "kept/wheels-aarch64-cp311"
    make_wheel(kept, "helper", "1.0", members={"helper.py": ""})
    make_wheel(kept, "unwanted", "1.0")
    dist.make("pi5", needs=["helper>=1"])
    assert run()[0] == 0
    packages = next((board.home / "edgespec/venv/lib").glob("python*/site-packages"))
    assert (packages / "helper.py").exists()
    assert not list(packages.glob("unwanted*"))


# ---- a node ----


UNIT = ".config/systemd/user/edgespec-node.service"


def test_a_board_becomes_a_node_of_each_new_version_and_then_none(run, board, dist, server):
    board.has_systemd()
    code, _, err = run("--node")
    assert (code, err[-2]) == (
        0,
        f"edgespec: {server.host} is a node: edgespec doctor --nodes {server.host}",
    )
    assert (board.home / "node").read_text() == "0.1.0"
    unit = (board.home / UNIT).read_text()
    assert f'\nExecStart="{board.home}/edgespec/venv/bin/edgespec" node\n' in unit
    assert (board.fakes / "systemctl").read_text().splitlines() == [
        "daemon-reload",
        "enable edgespec-node.service",
        "restart edgespec-node.service",
    ]
    dist.make("pi5", version="0.2.0")
    assert run()[0] == 0
    assert (board.home / "node").read_text() == "0.2.0"
    code, _, err = run("--no-node")
    assert (code, err[-2]) == (0, f"edgespec: {server.host} is no node any more")
    assert not (board.home / "node").exists()
    assert not (board.home / UNIT).exists()
    assert (board.fakes / "systemctl").read_text().splitlines()[-2:] == [
        "disable --now edgespec-node.service",
        "daemon-reload",
    ]
    code, _, err = run("--no-node")
    assert code == 0
    assert "no node any more" not in err[-2]


def test_a_node_that_ends_with_its_users_login(run, board):
    board.has_systemd()
    board.program("loginctl", "exit 1")
    code, _, err = run("--node", "--into", "a folder")
    assert code == 0
    assert err[-2] == (
        "edgespec: the node ends when its user logs out; on the board: sudo loginctl enable-linger $USER"
    )
    run("--no-node", "--into", "a folder")


def test_a_board_whose_systemd_cannot_be_reached(run, board, server):
    board.program("systemctl", "echo Failed to connect to bus: No medium found >&2; exit 1")
    code, _, err = run("--node")
    assert (code, err[-1]) == (
        1,
        f"edgespec: {server.host}: edgespec is installed, but not as a node: systemctl --user daemon-reload: "
        "Failed to connect to bus: No medium found; look there: journalctl --user -u edgespec-node",
    )
    assert "edgespec 0.1.0" in doctor(board)


# ---- which wheels ----


@pytest.mark.parametrize(
    ("model", "features", "arguments", "chosen"),
    [
        ("Raspberry Pi 4 Model B Rev 1.5", PI4, [], "pi4"),
        ("Raspberry Pi Compute Module 5 Rev 1.0", PI5, [], "pi5"),
        ("Raspberry Pi 5 Model B Rev 1.0", PI5, ["--board", "pi4"], "pi4"),
        ("Radxa ROCK 5B", PI5, [], "pi5"),
        ("Raspberry Pi 3 Model B Plus Rev 1.3", PI4, [], "pi4"),
        ("", PI4, [], "pi4"),
    ],
)
def test_the_board_is_known_by_its_model_or_its_features(
    run, board, dist, model, features, arguments, chosen
):
    board.processor(model, features)
    (dist.folder / chosen / "manifest.json").unlink()
    assert last_line(run(*arguments)) == (
        f"{dist.folder / chosen}: no wheels for this board; build them with `make {chosen}`"
    )


def test_features_count_where_all_processors_have_them(run, board):
    board.processor("A board with two kinds", PI5)
    cpuinfo = board.fakes / "root/proc/cpuinfo"
    cpuinfo.write_text(cpuinfo.read_text() + f"\nprocessor\t: 4\nFeatures\t: {PI4}\n")
    line = last_line(run("--board", "pi5"), code=2)
    assert "A board with two kinds) lacks atomics asimdrdm fphp asimdhp asimddp" in line


# ---- the board cannot ----


BIT_64 = "the wheels need 64-bit Raspberry Pi OS, so write that to its card"
NEWER = "(Debian GNU/Linux 12 (bookworm)); use Raspberry Pi OS bookworm or later"


def set_up(method, *arguments):
    return lambda board: getattr(board, method)(*arguments)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            set_up("put", "machine", "x86_64"),
            "its processor is x86_64, not 64-bit ARM; check that this is the board",
        ),
        (
            set_up("put", "machine", "armv7l"),
            "a 32-bit system (armv7l); " + BIT_64,
        ),
        (
            set_up("put", "LONG_BIT", "32"),
            "a 64-bit kernel with 32-bit programs; " + BIT_64,
        ),
        (
            set_up("processor", "Raspberry Pi 9", "fp asimd"),
            "Raspberry Pi 9 lacks crc32, which all wheels need; they run on a Raspberry Pi 4 (Cortex-A72) "
            "and better",
        ),
        (
            set_up("put", "GNU_LIBC_VERSION", "glibc 2.31"),
            "its glibc is 2.31, and the wheels need 2.34 " + NEWER,
        ),
        (
            set_up("lacks", "GNU_LIBC_VERSION"),
            "its C library is not glibc, and the wheels need 2.34 " + NEWER,
        ),
        (
            set_up("memory", 927_000),
            "949 MB of memory, which is too little; use a board with 2 GB or more",
        ),
        (set_up("lacks", "python"), "it has no python3; on the board: sudo apt install python3 python3-venv"),
        (set_up("put", "python", "3.9.2"), "its Python is 3.9.2, and 3.11 is needed " + NEWER),
        (set_up("lacks", "venv"), "packages are missing; on the board: sudo apt install python3-venv"),
        (set_up("lacks", "libraries"), "packages are missing; on the board: sudo apt install libgomp1"),
    ],
)  # fmt: skip
def test_a_board_that_cannot_run_it_is_told_by_one_line(run, board, server, change, line):
    change(board)
    assert last_line(run()) == f"{server.host}: {line}"
    assert names(board.home) == []


def test_wheels_for_another_board_are_refused(run, board, server):
    board.processor("Raspberry Pi 4 Model B Rev 1.5", PI4)
    assert last_line(run("--board", "pi5"), code=2) == (
        f"--board pi5: wheels for another board: {server.host} (Raspberry Pi 4 Model B Rev 1.5) lacks "
        "atomics asimdrdm fphp asimdhp asimddp; leave --board out"
    )


def test_no_room_on_the_disk(run, board, server):
    board.disk(50_000)
    line = last_line(run())
    assert line.startswith(f"{server.host}: 51 MB free for {board.home}/edgespec, and 101 MB are needed; ")
    assert names(board.home) == []


def test_a_folder_that_is_none_of_ours(run, board, server):
    (board.home / "file").touch()
    assert last_line(run("--into", "file/edgespec")) == (
        f"{server.host}: {board.home}/file/edgespec cannot be written to there; "
        "choose another folder with --into"
    )
    venv = board.home / "edgespec/venv"
    line = f"{server.host}: {venv} there is no deploy's; move it away, or choose another folder with --into"
    venv.mkdir(parents=True)
    assert last_line(run()) == line
    venv.rename(board.home / "another")
    venv.symlink_to(board.home / "another")
    assert last_line(run()) == line
    assert names(board.home / "edgespec") == ["venv"]


def test_two_deploys_at_a_time(run, board, server):
    (board.home / "edgespec").mkdir()
    folder = os.open(board.home / "edgespec", os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        line = last_line(run())
    finally:
        os.close(folder)
    assert line == (
        f"{server.host}: preparing failed: another deploy, maybe one that was cut off, is at work in "
        f"{board.home}/edgespec; try again in a minute; nothing has changed there"
    )


# ---- the connection ----


def test_nobody_answers(run, server):
    server.stop()
    assert last_line(run()) == (
        f"{server.host}: connect to host 127.0.0.1 port {server.port}: Connection refused; "
        "switch ssh on there (Raspberry Pi: sudo raspi-config, Interface Options)"
    )


def test_no_such_host(run):
    line = last_line(run(to=["pi@no-such-board.invalid"]))
    assert line.startswith("pi@no-such-board.invalid: Could not resolve hostname no-such-board.invalid: ")
    assert line.endswith("; check the name, or give the machine's address")


def test_a_key_that_the_board_does_not_know(run, server):
    server.identity.unlink()
    sshd_room.make_key(server.identity)
    assert last_line(run()) == (
        f"{server.host}: {server.host}: Permission denied (publickey).; let this machine's key in, as no "
        f"passwords are asked for: ssh-copy-id -p {server.port} {server.host}"
    )


def test_a_board_that_ssh_does_not_know(run, server):
    server.known_hosts.write_text("")
    assert last_line(run()) == (
        f"{server.host}: Host key verification failed.; connect once by hand to look at its key and "
        f"accept it: ssh -p {server.port} {server.host}"
    )


def test_a_board_whose_key_has_changed(run, server):
    server.trust(server.identity.with_suffix(".pub"))
    assert last_line(run()) == (
        f"{server.host}: Host key verification failed.; this is not the key that was known; if the machine "
        f"was set up anew: ssh-keygen -R '[127.0.0.1]:{server.port}'"
    )


@pytest.mark.parametrize(
    "host",
    [
        "-oProxyCommand=touch${IFS}pwned",
        "pi@-oProxyCommand=x",
        "-l@board",
        "pi@board;id",
        "pi@board:22",
        "pi@$(id)",
        "pi@a b",
        "pi@",
        "@board",
        "a@b@c",
        "board\n",
        "",
    ],
)
def test_hostile_hosts_are_not_even_asked(run, host, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # ssh could not be started
    assert last_line(run("--", host, to=["--port=22"]), code=2) == (
        f"{host!r}: not user@host, such as pi@raspberrypi.local; a port goes to --port"
    )


@pytest.mark.parametrize(
    "host", ["raspberrypi", "pi@192.168.1.7", "first.last@fe80::1%wlan0", "a_b-c@pi-5.local"]
)
def test_plain_hosts(run, host, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert last_line(run(to=[host])) == "no ssh on this machine: apt install openssh-client"


FOLDER = "a folder's name here has letters, digits, spaces and . _ - / alone"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--port", "70000"], "--port 70000: not a number from 1 to 65535"),
        (["--port", "x"], "argument --port: invalid int value: 'x' (see `python -m pi.deploy --help`)"),
        (["--identity", "/nowhere/key"], "--identity /nowhere/key: no such file"),
        (["--into", ""], "--into '': " + FOLDER),
        (["--into", "a\nb"], "--into 'a\\nb': " + FOLDER),
        (["--into", "$(id)"], "--into '$(id)': " + FOLDER),
        (["--into", "a'; id"], '--into "a\'; id": ' + FOLDER),
        (["--verbose"], "unrecognized arguments: --verbose (see `python -m pi.deploy --help`)"),
    ],
)
def test_wrong_options(run, arguments, line):
    assert last_line(run(*arguments), code=2) == line


def test_a_board_that_is_unknown(run):
    line = last_line(run("--board", "pi6"), code=2)
    assert line.startswith("argument --board: invalid choice: 'pi6' (choose from ")
    assert line.endswith(" (see `python -m pi.deploy --help`)")


def test_arguments_are_no_part_of_a_script(server, board):
    texts = [
        "$(touch pwned)",
        "`touch pwned`",
        "'; touch pwned; '",
        '"; touch pwned',
        "a\\b",
        "-n",
        "two\nlines",
    ]
    way = {"port": server.port, "identity": server.identity, "options": server.options}
    with Connection(server.host, **way) as connection:
        answer = connection.ask('cd "$HOME"; for text; do printf "[%s]" "$text"; done', *texts)
    assert answer == "".join(f"[{text}]" for text in texts)
    assert names(board.home) == []


def test_no_shell_there(run, server):
    server.force("echo This account is not available.")
    assert last_line(run()) == (
        f"{server.host}: no POSIX shell, or the connection was cut; it answered: "
        "This account is not available."
    )


def test_a_shell_that_does_not_do_as_told(run, server, board):
    server.force('case $SSH_ORIGINAL_COMMAND in *flock*) ;; *) sh -c "$SSH_ORIGINAL_COMMAND" ;; esac')
    assert last_line(run()) == (
        f"{server.host}: preparing failed: no reason given; nothing has changed there"
    )
    assert names(board.home) == []


class CutAfter:
    """A way to a server that is cut after some bytes to it."""

    def __init__(self, port, n_bytes):
        self._port, self._left = port, n_bytes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        client, _ = self._listener.accept()
        server = socket.create_connection(("127.0.0.1", self._port))
        threading.Thread(target=self._back, args=(server, client), daemon=True).start()
        while self._left > 0 and (data := client.recv(min(self._left, 1 << 16))):
            server.sendall(data)
            self._left -= len(data)
        for end in (client, server):
            end.shutdown(socket.SHUT_RDWR)

    def _back(self, server, client):
        try:
            while data := server.recv(1 << 16):
                client.sendall(data)
        except OSError:
            pass  # cut

    def close(self):
        self._listener.close()


def test_a_connection_that_is_cut_leaves_nothing_half(run, board, dist, server):
    assert run()[0] == 0
    before = names(board.home / "edgespec")
    wheels = dist.make("pi5", version="0.2.0")
    with zipfile.ZipFile(wheels[1], "a") as archive:
        archive.writestr("ballast", os.urandom(4 << 20))
    dist.write("pi5", wheels={wheel.name: sha256(wheel) for wheel in wheels})
    way = CutAfter(server.port, 2 << 20)
    try:
        alias = ["-o", f"HostKeyAlias=[127.0.0.1]:{server.port}"]
        line = last_line(run("--port", str(way.port), *alias))
    finally:
        way.close()
    assert line.endswith("; the connection was lost, and leaves nothing half: run it again")
    deadline = time.monotonic() + 20
    while names(board.home / "edgespec") != before:  # the board sees the end a moment later
        assert time.monotonic() < deadline, names(board.home / "edgespec")
        time.sleep(0.02)
    assert "edgespec 0.1.0" in doctor(board)
    assert run()[0] == 0
    assert "edgespec 0.2.0" in doctor(board)


def test_what_arrives_is_checked(run, board, server, monkeypatch):
    def skip(stream, name, size, content):
        if not name.startswith("llama"):
            add(stream, name, size, content)

    add = room._add
    monkeypatch.setattr(room, "_add", skip)
    assert last_line(run()) == (
        f"{server.host}: copying failed: sha256sum: llama_cpp_python-0.3.36-1pi5-py3-none-any.whl: "
        "No such file or directory; nothing has changed there"
    )
    assert names(board.home / "edgespec") == []


# ---- wheels in dist/ ----


def test_no_wheels_built(run, dist):
    (dist.folder / "pi5/manifest.json").unlink()
    assert last_line(run()) == f"{dist.folder}/pi5: no wheels for this board; build them with `make pi5`"


def test_a_wheel_that_was_changed(run, dist, board):
    wheel = next((dist.folder / "pi5").glob("llama*"))
    wheel.write_bytes(wheel.read_bytes() + b"!")
    assert last_line(run()) == f"{wheel}: its SHA-256 is not the manifest's; build it again with `make pi5`"
    wheel.unlink()
    assert last_line(run()) == f"{wheel}: is in the manifest, and not here; build it again with `make pi5`"
    assert names(board.home) == []


def test_a_manifest_of_something_else(run, dist):
    manifest = dist.folder / "pi5/manifest.json"
    dist.write("pi5", board="pi4")
    assert last_line(run()) == (
        f"{manifest}: wheels for another board, pi4 (aarch64); build them with `make pi5`"
    )
    for content in (b"[]", b'{"board": 1}', b"\xff"):
        manifest.write_bytes(content)
        line = last_line(run())
        assert line.startswith(f"{manifest}: not a manifest of wheels (")
        assert line.endswith("); build them with `make pi5`")


# ---- other packages ----


@pytest.fixture
def registry(monkeypatch):
    server = FakeServer()
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
    try:
        yield server
    finally:
        server.close()


def publish(registry, folder, *arguments, **options):
    file = make_wheel(folder, *arguments, **options)
    registry.wheels[file.name] = file.read_bytes()


@pytest.mark.slow
def test_packages_are_those_that_the_board_needs(registry, tmp_path):
    at = tmp_path / "published"
    publish(registry, at, "fast", "1.0", tag="cp313-cp313-manylinux_2_17_x86_64")
    publish(registry, at, "fast", "1.0", tag="cp311-cp311-manylinux_2_17_aarch64")
    publish(registry, at, "fast", "1.0", tag="cp313-cp313-manylinux_2_36_aarch64", needs=["deep"])
    publish(registry, at, "fast", "2.0", tag="cp313-cp313-manylinux_2_40_aarch64")
    publish(
        registry,
        at,
        "deep",
        "1.0",
        needs=['later; python_version >= "3.13"', 'sooner; python_version < "3.13"'],
    )
    for name in ("later", "sooner", "ours", "theirs"):
        publish(registry, at, name, "1.0")
    needs = ["fast", 'ours; platform_machine == "aarch64"', 'theirs; platform_machine == "x86_64"']
    own = make_wheel(tmp_path, "edgespec", "1", tag="cp311-abi3-manylinux_2_34_aarch64", needs=needs)
    to = tmp_path / folder_name("aarch64", "3.13.5")
    assert to.name == "wheels-aarch64-cp313"
    got = download([own], "aarch64", "3.13.5", to, glibc="2.36")
    assert [file.name for file in got] == [
        "deep-1.0-py3-none-any.whl",
        "fast-1.0-cp313-cp313-manylinux_2_36_aarch64.whl",
        "later-1.0-py3-none-any.whl",
        "ours-1.0-py3-none-any.whl",
    ]
    assert sorted(to.iterdir()) == got
    asked = len(registry.gets)
    publish(registry, at, "ours", "2.0")
    assert download([own], "aarch64", "3.13.5", to, glibc="2.36") == got
    assert len(registry.gets) == asked


def test_no_registry(monkeypatch, tmp_path):
    own = make_wheel(tmp_path, "edgespec", "1", needs=["numpy"])
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{sshd_room.free_port()}/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(EdgespecError) as raised:
        download([own], "aarch64", "3.11.2", tmp_path / "to")
    line = str(raised.value)
    assert line.startswith("packages for Python 3.11.2 on aarch64: the package registry cannot be reached: ")
    assert "refused" in line
    assert "\n" not in line
    assert list((tmp_path / "to").iterdir()) == []


def test_no_fitting_package(registry, tmp_path):
    publish(registry, tmp_path / "published", "numpy", "1.0", tag="cp313-cp313-manylinux_2_17_x86_64")
    own = make_wheel(tmp_path, "edgespec", "1", needs=["numpy"])
    with pytest.raises(EdgespecError) as raised:
        download([own], "aarch64", "3.13.5", tmp_path / "to")
    assert str(raised.value) == (
        "packages for Python 3.13.5 on aarch64: No matching distribution found for numpy"
    )


def test_help_shows_an_example(capsys):
    with pytest.raises(SystemExit) as raised:
        room.main(["--help"])
    assert raised.value.code == 0
    assert "Example: python -m pi.deploy pi@raspberrypi.local" in capsys.readouterr().out
