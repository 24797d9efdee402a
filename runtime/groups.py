"""Process groups along the axes of a mesh, made once and kept: a rank may load one program after another."""

from __future__ import annotations

import datetime

import torch.distributed as dist

from planner.errors import BadInput
from planner.ir.mesh import AXES, Mesh
from runtime.collectives import Axis


class Groups:
    """The groups this process has made. Every rank must ask for the same groups in the same order."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout = datetime.timedelta(seconds=timeout_s)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self._made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    @property
    def world(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD if self.world_size > 1 else None

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group of ``ranks`` (global, ascending); None when it has one member, or this rank is none of them."""
        if len(ranks) == 1:
            return None
        if ranks == tuple(range(self.world_size)):
            return self.world
        if ranks not in self._made:
            made = dist.new_group(list(ranks), timeout=self.timeout)
            self._made[ranks] = made if self.rank in ranks else None
        return self._made[ranks]

    def axes(self, mesh: Mesh) -> dict[str, Axis]:
        """This rank's axes of ``mesh``. Raises BadInput when the mesh is not as large as the number of processes."""
        if mesh.size != self.world_size:
            raise BadInput(
                f"the plan is for {mesh.size} devices ({mesh}) but {self.world_size} processes run. "
                f"Start {mesh.size} processes, or plan for {self.world_size} devices."
            )
        axes = {}
        for name in AXES:
            own: dist.ProcessGroup | None = None
            for ranks in mesh.groups(name):
                group = self.group(ranks)
                own = group if self.rank in ranks else own
            axes[name] = Axis(name, mesh.degree(name), mesh.coordinate(self.rank, name), own)
        return axes

    def over_stages(self, mesh: Mesh, pp_ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group of this rank's counterparts on ``pp_ranks``; None where it is none of them, or they are one."""
        own: dist.ProcessGroup | None = None
        for dp in range(mesh.dp):
            for tp in range(mesh.tp):
                ranks = tuple(mesh.rank(pp, dp, tp) for pp in pp_ranks)
                group = self.group(ranks)
                own = group if self.rank in ranks else own
        return own
