"""A real sshd on loopback whose sessions are on a made-up board: its own home folder, its own answers.

What a session asks of the system is answered by programs first on its PATH, from files of the test; all
else (sh, tar, venv, pip) is this machine's.
"""

import getpass
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")

PI4 = "fp asimd evtstrm crc32 cpuid"
PI5 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"

_QUICK_VENV = "--without-pip --system-site-packages"  # its pip is the system's: ten seconds less
_BASE_PIP = Path(sysconfig.get_path("purelib", vars={"base": sys.base_prefix}), "pip")

_PROGRAMS = {
    "uname": 'case $* in -m) exec cat "$FAKES/machine" ;; *) exec {uname} "$@" ;; esac',
    "getconf": 'cat "$FAKES/$1"',
    "ldconfig": 'cat "$FAKES/libraries"',
    "df": 'cat "$FAKES/df"',
    "cat": 'case $1 in /proc/*|/etc/*) exec {cat} "$FAKES/root$1" ;; *) exec {cat} "$@" ;; esac',
    "python3": """[ -e "$FAKES/python" ] || exit 127
case $* in
    *version_info*) exec cat "$FAKES/python" ;;
    *ensurepip*) exec cat "$FAKES/venv" ;;
    "-m venv "*) shift 2; exec {python} -m venv $(cat "$FAKES/venv_options") "$@" ;;
    *) exec {python} "$@" ;;
esac""",
}


_SYSTEMCTL = """
import os, pathlib, re, signal, subprocess, sys, time

fakes, home = pathlib.Path(os.environ["FAKES"]), pathlib.Path(os.environ["HOME"])
unit, pid = home / ".config/systemd/user/edgespec-node.service", fakes / "node.pid"
assert sys.argv[1] == "--user", sys.argv
with (fakes / "systemctl").open("a") as log:
    print(*sys.argv[2:], file=log)
if sys.argv[2] in ("restart", "disable") and pid.exists():
    os.kill(int(pid.read_text()), signal.SIGINT)
    while pathlib.Path(f"/proc/{pid.read_text()}").exists():
        time.sleep(0.01)
    pid.unlink()
if sys.argv[2] == "restart":
    program = re.search('^ExecStart="(.*)" node$', unit.read_text(), re.MULTILINE)[1]
    with (fakes / "journal").open("ab") as log:
        service = subprocess.Popen([program, "node"], stdin=0, stdout=log, stderr=log, start_new_session=True)
    pid.write_text(str(service.pid))
"""


class Board:
    """The folders of a board: `home`, and `fakes` with its answers. It is a Raspberry Pi 5."""

    def __init__(self, folder):
        self.home, self.fakes, self.programs = folder / "home", folder / "fakes", folder / "bin"
        for path in (self.home, self.fakes, self.programs):
            path.mkdir(parents=True)
        paths = {"cat": shutil.which("cat"), "uname": shutil.which("uname")}
        paths["python"] = shlex.quote(sys.executable)
        for name, template in _PROGRAMS.items():
            text = re.sub(r"{(cat|uname|python)}", lambda found: paths[found[1]], template)
            self.program(name, text)
        self.environment = {
            "PATH": f"{self.programs}:/usr/bin:/bin",
            "HOME": str(self.home),
            "FAKES": str(self.fakes),
        }
        self.put("machine", "aarch64")
        self.put("LONG_BIT", "64")
        self.put("GNU_LIBC_VERSION", "glibc 2.36")
        self.put("libraries", "\tlibgomp.so.1 (libc6,AArch64) => /lib/aarch64-linux-gnu/libgomp.so.1")
        self.put("python", "3.11.2")
        self.put("venv", "yes")
        self.put("venv_options", _QUICK_VENV if _BASE_PIP.exists() else "")
        self.put("root/etc/os-release", 'NAME="Debian"\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"')
        self.processor("Raspberry Pi 5 Model B Rev 1.0", PI5)
        self.memory(8_245_248)
        self.disk(20_000_000)

    def program(self, name, script):
        """Have this program, which all sessions find first."""
        (self.programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.programs / name).chmod(0o755)

    def has_systemd(self):
        """Have a systemd of the user that runs one service, as `pi/node_service.py` writes it."""
        file = self.fakes / "systemctl.py"
        file.write_text(_SYSTEMCTL)
        self.program("systemctl", f'exec {shlex.quote(sys.executable)} {file} "$@"')
        self.program("loginctl", "exit 0")

    def put(self, name, text):
        file = self.fakes / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def lacks(self, name):
        """Have no answer, as a program that fails without one."""
        (self.fakes / name).unlink()

    def processor(self, model, features, cores=4):
        if model:
            self.put("root/proc/device-tree/model", f"{model}\0")
        else:
            self.lacks("root/proc/device-tree/model")
        cpus = [f"processor\t: {i}\nFeatures\t: {features}\nCPU part\t: 0xd0b\n" for i in range(cores)]
        self.put("root/proc/cpuinfo", "\n".join(cpus))

    def memory(self, kibibytes):
        self.put("root/proc/meminfo", f"MemTotal: {kibibytes:>14} kB\nMemAvailable: {kibibytes // 2:>10} kB")

    def disk(self, free_kibibytes):
        head = "Filesystem     1024-blocks    Used Available Capacity Mounted on"
        self.put("df", f"{head}\n/dev/mmcblk0p2    30000000 9000000 {free_kibibytes:>9}      31% /")


class Sshd:
    """An sshd for one test. `options` are those with which ssh reaches it, and is let in."""

    def __init__(self, folder, board):
        self.folder = folder
        self.user = getpass.getuser()
        self.identity, self._host_key = folder / "identity", folder / "host_key"
        self.known_hosts = folder / "known_hosts"
        for key in (self.identity, self._host_key):
            make_key(key)
        shutil.copy(f"{self.identity}.pub", folder / "authorized_keys")
        self.port = free_port()
        self._config = folder / "sshd_config"
        self._config.write_text(f"""\
Port {self.port}
ListenAddress 127.0.0.1
HostKey {self._host_key}
AuthorizedKeysFile {folder / "authorized_keys"}
PubkeyAuthentication yes
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
StrictModes no
UsePAM no
PidFile none
MaxStartups 100
SetEnv {" ".join(f"{name}={value}" for name, value in board.environment.items())}
""")
        self.trust(Path(f"{self._host_key}.pub"))
        self.process = None
        self.log = folder / "sshd.log"

    @property
    def host(self):
        return f"{self.user}@127.0.0.1"

    @property
    def options(self):
        return [f"UserKnownHostsFile={self.known_hosts}", "IdentitiesOnly=yes"]

    @property
    def arguments(self):
        """For a command line."""
        options = [part for option in self.options for part in ("-o", option)]
        return [self.host, "--port", str(self.port), "--identity", str(self.identity), *options]

    def trust(self, key):
        """Have ssh know the server by this key alone."""
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {key.read_text()}")

    def force(self, command):
        """Run this instead of what a session asks for."""
        self.stop()
        with self._config.open("a") as config:
            config.write(f"ForceCommand {command}\n")
        self.start()

    def sessions(self):
        """How often someone logged in."""
        return self.log.read_text().count("Accepted publickey")

    def start(self):
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where sshd puts what it does not trust
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([SSHD, "-D", "-e", "-f", self._config], stderr=log)
        deadline = time.monotonic() + 20
        while "Server listening" not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.01)

    def stop(self):
        if self.process is not None:
            self.process.terminate()
            self.process.wait()


@contextmanager
def serving(folder, board):
    """An sshd of this board while the test runs, which is skipped where there is none."""
    if SSHD is None:
        pytest.skip("sshd is not installed (apt install openssh-server)")
    folder.mkdir()
    server = Sshd(folder, board)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def ssh_for(server, folder):
    """A folder with an `ssh` that finds the server at 127.0.0.1 and is let in, for the front of PATH."""
    config = folder / "ssh_config"
    config.write_text(
        f"IdentityFile {server.identity}\nUserKnownHostsFile {server.known_hosts}\n"
        f"Host 127.*\nPort {server.port}\n"
    )
    programs = folder / "programs"
    programs.mkdir()
    (programs / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {config} "$@"\n')
    (programs / "ssh").chmod(0o755)
    return programs


def make_key(file):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", file], check=True)


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]
