"""Who listens on a port of this machine, for an error message. Linux; elsewhere nobody is found. No torch."""

from __future__ import annotations

from pathlib import Path

LISTENS = "0A"


def port_holder(port: int) -> str:
    """`process 1234 (python)`, or `another process` where it is not this user's to see."""
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for process in Path("/proc").glob("[0-9]*") if sockets else ():
        try:
            if any(str(link.readlink()) in sockets for link in (process / "fd").iterdir()):
                return f"process {process.name} ({(process / 'comm').read_text().strip()})"
        except OSError:  # another user's, or gone
            continue
    return "another process"


def _listening_inodes(port: int) -> set[str]:
    """Lines of /proc/net/tcp: number, local address:port in hex, remote, state, …, the tenth the socket's inode."""
    found = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        lines = table.read_text().splitlines()[1:] if table.exists() else []
        for fields in map(str.split, lines):
            if fields[3] == LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(fields[9])
    return found
