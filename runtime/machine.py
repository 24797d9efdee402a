"""What the operating system says of this machine: its processor, and the memory still free."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def processor_name() -> str:
    """The model where Linux tells it, else the architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def free_memory_bytes() -> int:
    """Memory that processes can still take on this system: what the kernel calls available, within the cgroup's limit.

    Without Linux's /proc: the free pages.
    """
    found = [os.sysconf("SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES")]
    found = [found[0] * os.sysconf("SC_PAGE_SIZE")]
    try:
        found = [int(_table(Path("/proc/meminfo"))["MemAvailable:"]) * 1024]
        cgroup = Path("/proc/self/cgroup").read_text().partition("0::")[2].partition("\n")[0]
    except (OSError, KeyError):
        return found[0]
    place = Path("/sys/fs/cgroup", cgroup.lstrip("/"))
    for folder in (place, *place.parents[:-3]):
        try:
            limit, used = ((folder / f"memory.{name}").read_text().strip() for name in ("max", "current"))
            if limit != "max":
                reclaimable = int(_table(folder / "memory.stat").get("inactive_file", 0))
                found.append(max(int(limit) - int(used) + reclaimable, 1))
        except (OSError, ValueError):
            continue
    return min(found)


def _table(path: Path) -> dict[str, str]:
    """Lines 'key value ...' of a file of the kernel."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {line[0]: line[1] for line in lines if len(line) > 1}
