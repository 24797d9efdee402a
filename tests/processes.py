"""Looking at processes from outside, through /proc: who is left, whose child is whose, who listens where."""

from __future__ import annotations

import os
import time
from pathlib import Path

MARK = "LAUNCH_TEST_MARK"


def marked(mark: str) -> set[int]:
    """Processes that were started, directly or not, with ``LAUNCH_TEST_MARK=mark`` in their environment."""
    wanted = f"{MARK}={mark}".encode()
    return {pid for pid in _all() if wanted in _read(pid, "environ").split(b"\0")}


def children(parent: int) -> dict[int, str]:
    """State letter ('R', 'S', 'Z' for a zombie, ...) of each child of ``parent``."""
    found = {}
    for pid in _all():
        fields = _read(pid, "stat").rpartition(b")")[2].split()
        if fields and int(fields[1]) == parent:
            found[pid] = fields[0].decode()
    return found


def is_alive(pid: int) -> bool:
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return bool(fields) and fields[0] != b"Z"


def wait_until_gone(pids: set[int], ceiling_s: float = 30.0) -> set[int]:
    """The processes still alive when all are gone or ``ceiling_s`` has passed."""
    deadline_s = time.monotonic() + ceiling_s
    while (alive := {pid for pid in pids if is_alive(pid)}) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return alive


def listening_addresses(pid: int) -> set[str]:
    """Hexadecimal local addresses ``pid`` listens on over TCP."""
    inodes = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    return found


def _all() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
