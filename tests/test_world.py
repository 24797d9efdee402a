"""Under torchrun: who am I, joining once, and the very same bytes on every rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from planner.errors import BadInput
from runtime.world import World, current_world, init_world, share_bytes
from tests.processes import wait_until_gone

ROOT = Path(__file__).parent.parent
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost"}


def test_the_world_is_read_from_the_environment() -> None:
    assert current_world(TORCHRUN) == World(rank=3, size=8, local_rank=1)


@pytest.mark.parametrize("missing", sorted(TORCHRUN))
def test_without_all_of_torchruns_variables_there_is_no_world(missing: str) -> None:
    assert current_world({name: value for name, value in TORCHRUN.items() if name != missing}) is None


@pytest.mark.parametrize("wrong", [{"RANK": "8"}, {"RANK": "-1"}, {"WORLD_SIZE": "many"}, {"LOCAL_RANK": "4"}])
def test_a_senseless_world_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(BadInput, match="torchrun"):
        current_world({**TORCHRUN, **wrong})


def test_alone_what_is_shared_is_kept() -> None:
    assert share_bytes(b"plan") == b"plan"
    with pytest.raises(BadInput, match="nothing to share"):
        share_bytes(None)


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(BadInput, match="'tpu' is unknown"):
        init_world(World(0, 1, 0), device="tpu")
    with pytest.raises(BadInput, match="local rank 99 has no GPU"):
        init_world(World(99, 100, 99), device="cuda")


SCRIPT = """
import os, sys, time
from pathlib import Path
from planner.errors import BadInput
from runtime.launch import World, current_world, init_world, share_bytes
folder = Path(sys.argv[1])
world = current_world()
device = init_world(world, device="cpu", timeout_s=5.0)
assert init_world(world, device="cpu") == device
try:
    init_world(World(world.rank, 7, world.local_rank), device="cpu")
except BadInput:
    pass
else:
    raise AssertionError("a group of another size was accepted")
if world.rank == 0:
    time.sleep(7.0)  # longer than the timeout of a collective: rank 0 solves
first = share_bytes(bytes(range(256)) * 4096 if world.rank == 0 else None)
second = share_bytes(b"" if world.rank == 0 else None)
(folder / f"{world.rank}.bytes").write_bytes(first + second)
(folder / f"{world.rank}.pid").write_text(f"{os.getpid()} ")
time.sleep(600)
"""


@pytest.mark.gloo
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")
def test_torchrun_ranks_share_bytes_and_end_with_their_launcher(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launcher = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            str(script),
            str(tmp_path),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    files = [tmp_path / "0.pid", tmp_path / "1.pid"]
    try:
        while launcher.poll() is None and not all(file.exists() and file.read_text().endswith(" ") for file in files):
            time.sleep(0.1)
        assert launcher.poll() is None, "the ranks failed; their errors stand above"
        workers = {int(file.read_text()) for file in files}
        assert [(tmp_path / f"{rank}.bytes").read_bytes() for rank in range(2)] == [bytes(range(256)) * 4096] * 2
    finally:
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait()
    assert not wait_until_gone(workers)
