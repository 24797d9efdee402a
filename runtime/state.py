"""Whole tensors into local ones and back.

A state with global shape G is held on tp as its placement says, and on dp, where ZeRO-3 shards it, cut along dim 0 as
FSDP2 does (torch.chunk: the last shards may be smaller or empty):

    local = chunk(part(whole, placement, tp), dp)          fill
    whole = all_gather over tp of (full tensor over dp)    assemble

Every rank reads its own part only; whole tensors are assembled one at a time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from planner.errors import BadInput
from planner.ir.layout import R
from planner.ir.mesh import Mesh
from planner.ir.program import Program, StateSpec
from runtime.collectives import Axis, move, part
from runtime.stage_module import Held, RankModule, StageModule


def owner_stage(spec: StateSpec) -> int | None:
    """The stage that answers for a state held by several (None: the one that holds it)."""
    return min(spec.tied_stages) if spec.tied_stages else None


def answers_for(spec: StateSpec, pp: Axis) -> bool:
    """Whether this pipeline rank, which holds the state, is the one that answers for it."""
    owner = owner_stage(spec)
    return owner is None or owner % pp.size == pp.index


def owned(held: tuple[Held, ...], pp: Axis) -> tuple[Held, ...]:
    """The states for which this pipeline rank answers."""
    return tuple(h for h in held if answers_for(h.spec, pp))


def left_whole(program: Program) -> frozenset[str]:
    """Parameters that ZeRO-3 leaves whole on every stage; ``runtime.gradients`` reduces them.

    FSDP2 takes no scalars and one dtype a segment (the others, such as float32 norms of a bfloat16 model, are small);
    states of the stage itself are used by several segments, states of several stages of one rank by several of them; and all
    copies of a state must be held alike.
    """
    whole: set[str] = set()
    for stage in program.stages:
        whole.update(spec.target for spec in stage.states if spec.segment is None)
        for i in range(len(stage.segments)):
            parameters = [spec for spec in stage.states if spec.segment == i and not spec.is_buffer]
            sizes: dict[str, int] = {}
            for spec in parameters:
                sizes[spec.dtype] = sizes.get(spec.dtype, 0) + math.prod(spec.shape)
            main = max(sizes, key=lambda dtype: sizes[dtype], default="")
            whole.update(spec.target for spec in parameters if not spec.shape or spec.dtype != main)
    for rank in range(program.mesh.pp):
        uses = Counter(spec.target for i in program.on_rank(rank) for spec in program.stages[i].states)
        whole.update(target for target, count in uses.items() if count > 1)
    return frozenset(whole)


def shard_segments(module: StageModule, program: Program, dp: Axis, device: torch.device) -> None:
    """ZeRO-3: FSDP2 on each segment, gradients summed (not averaged) over dp, the stage itself left plain."""
    if dp.size == 1 or dp.group is None:
        return
    targets = left_whole(program)
    whole = {h.tensor for h in module.held if h.spec.target in targets}
    ignored = {t for t in whole if isinstance(t, torch.nn.Parameter)}
    mesh = DeviceMesh.from_group(dp.group, device.type)
    for segment in module.segments:
        if not set(segment.parameters()) - ignored:
            continue
        fully_shard(segment, mesh=mesh, reshard_after_forward=True, ignored_params=ignored)
        assert isinstance(segment, FSDPModule)
        segment.set_gradient_divide_factor(1.0)
        segment.set_force_sum_reduction_for_comms(True)


def fill(
    module: RankModule | StageModule, source: Mapping[str, torch.Tensor], axes: Mapping[str, Axis], device: torch.device
) -> None:
    """Give the tensors of ``module`` memory on ``device`` and this rank's part of ``source``: original name -> whole."""
    module.to_empty(device=device)
    for held in module.held:
        name = next((n for n in (held.spec.target, *held.spec.aliases) if n in source), None)
        if name is None:
            raise BadInput(
                f"the weights given hold no {held.spec.target}. Pass the state_dict() of the model the plan is for."
            )
        load_local(held.tensor, held.spec, source[name], axes)


@torch.no_grad()
def load_local(tensor: torch.Tensor, spec: StateSpec, whole: torch.Tensor, axes: Mapping[str, Axis]) -> None:
    """Copy this rank's part of ``whole`` into ``tensor``. Raises BadInput on another shape."""
    if tuple(whole.shape) != spec.shape:
        raise BadInput(
            f"{spec.target} has shape {list(whole.shape)} in the weights given and {list(spec.shape)} in the plan. "
            "Pass the state_dict() of the model the plan is for."
        )
    local = part(whole, spec.placement, axes["tp"].size, axes["tp"].index)
    if not isinstance(tensor, DTensor):
        tensor.copy_(local)
        return
    chunks = local.chunk(axes["dp"].size) if local.shape[0] else (local,)
    index = axes["dp"].index
    if index < len(chunks):
        tensor.to_local().copy_(chunks[index])


@torch.no_grad()
def assemble(tensor: torch.Tensor, spec: StateSpec, axes: Mapping[str, Axis]) -> torch.Tensor:
    """The whole tensor from the local parts, on this rank's device. Every rank of the stage must call it."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return move(tensor.detach(), axes["tp"], spec.placement, R)


@torch.no_grad()
def gather_over_stages(
    program: Program, mapping: Mapping[str, torch.Tensor | None], rank: int, device: torch.device
) -> dict[str, torch.Tensor | None]:
    """Every stage's entries on every rank, on the CPU. ``mapping``: what ``Rank.state`` or ``Rank.gradients`` returned.

    Collective over all ranks. Names are those of the program's states, as far as ``mapping`` of their stage has them.
    """
    mesh: Mesh = program.mesh
    result: dict[str, torch.Tensor | None] = {}
    for stage in program.stages:
        source = mesh.rank(stage.index % mesh.pp)
        specs = [s for s in stage.states if owner_stage(s) in (None, stage.index)]
        names = [(name, s) for s in specs for name in (s.target, *s.aliases)]
        # 0: not among the entries, 1: None, 2: a tensor
        kinds = torch.tensor(
            [0 if n not in mapping else 1 if mapping[n] is None else 2 for n, _ in names], device=device
        )
        if mesh.size > 1 and names:
            dist.broadcast(kinds, src=source)
        for (name, spec), kind in zip(names, kinds.tolist(), strict=True):
            if kind == 1:
                result[name] = None
            elif kind == 2:
                held = mapping.get(name) if rank == source else None
                whole = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
                if held is not None:
                    whole.copy_(held)
                if mesh.size > 1:
                    dist.broadcast(whole, src=source)
                result[name] = whole.cpu()
    return result
