"""A board as a node: `edgespec node` as a service of the user's systemd, which `make deploy` looks after.

~/.config/systemd/user/edgespec-node.service     begins at boot, again after a failure
"""

from __future__ import annotations

from typing import Literal

from edgespec.errors import EdgespecError
from pi.console import message, status
from pi.ssh import Connection

Wish = Literal["start", "stop", "keep"]
"""The wish for a board: a node; none; or as it was, of the version that is there now."""

WISHES: dict[bool | None, Wish] = {True: "start", False: "stop", None: "keep"}
"""The wish by option: --node, --no-node or neither."""

# $1 is the folder with the venv, $2 the wish. Prints one line: what became of it, and why.
_SCRIPT = r"""
set -u
unit=edgespec-node.service
file=${XDG_CONFIG_HOME:-$HOME/.config}/systemd/user/$unit
program=$1/venv/bin/edgespec
# A login that PAM does not know of has no such variable.
export XDG_RUNTIME_DIR="${XDG_RUNTIME_DIR:-/run/user/$(id -u)}"
fail() { echo "failed $*"; exit; }
control() { said=$(systemctl --user "$@" 2>&1) || fail "systemctl --user $1: $(echo "$said" | head -n 1)"; }
[ "$2" = start ] || [ -e "$file" ] || { echo none; exit; }
if [ "$2" = stop ]; then
    control disable --now "$unit"
    rm -f "$file"
    control daemon-reload
    echo stopped
    exit
fi
mkdir -p "${file%/*}" || fail "no folder for the service"
cat >"$file.new" <<END
[Unit]
Description=edgespec node: holds layers of models for other machines

[Service]
ExecStart="$program" node
KillSignal=SIGINT
KillMode=mixed
Restart=on-failure
RestartSec=5

[Install]
WantedBy=default.target
END
mv "$file.new" "$file" || fail "the service cannot be written"
control daemon-reload
control enable "$unit"
control restart "$unit"
lingers=yes
loginctl enable-linger >/dev/null 2>&1 || lingers=no
tries=0
while [ $tries -lt 60 ]; do
    case $("$program" node --describe --json 2>/dev/null) in
        *'"running":[{'*) echo "started $lingers"; exit ;;
    esac
    tries=$((tries + 1))
    sleep 1
done
fail "the node does not begin to serve"
"""


def look_after(connection: Connection, folder: str, wish: Wish) -> None:
    """Make the board a node, or none, or restart its node, and say so.

    `folder` there has the venv. The connection must be open. Raises EdgespecError if it fails.
    """
    with status("asking systemd there"):
        said = connection.ask(_SCRIPT, folder, wish)
    became, _, why = (said.strip().splitlines() or ["failed it said nothing"])[-1].partition(" ")
    if became == "failed":
        raise EdgespecError(
            f"{connection.host}: edgespec is installed, but not as a node: {why}; look there: "
            "journalctl --user -u edgespec-node"
        )
    if became == "stopped":
        message(f"{connection.host} is no node any more")
    if became == "started":
        message(f"{connection.host} is a node: edgespec doctor --nodes {connection.host}")
    if why == "no":
        message("the node ends when its user logs out; on the board: sudo loginctl enable-linger $USER")
