"""Weights, gradients and optimizer state of a segment on one device, and what keeping the data-parallel ranks alike costs.

Of W bytes of trainable weights on N ranks of dp (see costmodels.memory for what is held), as the runtime does it:

    ZeRO 0     once a step        all-reduce W, during backward
    ZeRO 1     once a step        reduce-scatter W, during backward; all-gather W after the update
    ZeRO 2     a micro-batch      reduce-scatter W, during backward; once a step all-gather W after the update
    ZeRO 3     a micro-batch      all-gather W during forward; all-gather and reduce-scatter W during backward

What takes t and overlaps with operators of w slows them down by s t (``overlap_slowdown``), and so is exposed as

    max(s t, t - (1 - s) w)

Of what is done once a step everything is exposed for the first segment, whose backward is the last to finish; under
zero-bubble and software that reduces when backward is over; and on a CPU, which has no engine of its own for copies. Shards
are cut along dim 0, so the first rank holds ceil(rows / N) rows. ZeRO-1 and 2 leave scalars whole, ZeRO-3 weights that several
segments use: these have no single owner to gather them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from costmodels.collectives import collective_time_s
from costmodels.compute import optimizer_step_s
from costmodels.memory import StateBytes, gathered_bytes, state_bytes
from costmodels.operators import DTYPE_BYTES
from costmodels.software import OURS, Software
from costmodels.views import AnyCluster, AnyDevice
from planner.ir.graph import Leaf
from planner.ir.mesh import Mesh
from planner.placement import Boundary


@dataclass(frozen=True)
class States:
    """Bytes on one device; exposed seconds: ``ahead_s`` of a forward, ``behind_s`` of a backward, ``*_per_step_s``.

    ``unhidden_s``: of ``sync_per_step_s``, what on dp is exposed whatever else takes time.
    """

    weights_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    temporary_bytes: int = 0
    ahead_s: float = 0.0
    behind_s: float = 0.0
    sync_per_step_s: float = 0.0
    unhidden_s: float = 0.0
    update_per_step_s: float = 0.0


@dataclass(frozen=True)
class Weights:
    """A segment's parameters. ``shared``: used by other segments too; ``partial``: gradients summed over tp once a step;
    ``first``: those of the first segment."""

    parameters: Sequence[Leaf]
    shared: frozenset[str]
    partial: frozenset[str]
    first: bool


def states(
    weights: Weights,
    forward_s: float,
    backward_s: float,
    mesh: Mesh,
    cluster: AnyCluster,
    optimizer: str,
    zero: int,
    reduces_in_backward: bool = True,
    between_copies: Boundary | None = None,
) -> States:
    """``forward_s``, ``backward_s``: of one micro-batch of the segment, what exchanges may overlap with.

    ``between_copies``: the way between stages that hold the same weights, where they lie on unequal machines."""
    dp = mesh.dp
    stage = zero if dp > 1 else 0
    trainable = [leaf for leaf in weights.parameters if leaf.trainable]
    cut = [leaf for leaf in trainable if _is_cut(leaf, weights, stage)]
    names = {leaf.name for leaf in cut}
    whole = [leaf for leaf in trainable if leaf.name not in names]
    software = cluster.software

    def state(leaf: Leaf, size: int, stage: int) -> StateBytes:
        return state_bytes(size, leaf.value.dtype, optimizer, stage, dp, software=software)

    held = [state(leaf, leaf.value.size_bytes, 0) for leaf in whole]
    held += [state(leaf, padded_bytes(leaf, dp), stage) for leaf in cut]
    uncut = [state(leaf, leaf.value.size_bytes, 0) for leaf in trainable]  # without what fills shards up
    weights_bytes = sum(h.weights_bytes for h in (uncut if stage < 3 else held))
    gradients_bytes = sum(h.gradients_bytes for h in (uncut if stage < 2 else held))

    def seconds(kind: str, size: float, axis: str = "dp") -> float:
        if not size:
            return 0.0
        if axis == "dp" and stage == 3:
            return collective_time_s(kind, size, mesh.degree(axis), mesh.stride(axis), cluster)
        return bucketed_s(kind, size, mesh, axis, cluster, starts=weights.first)

    def exposed(time_s: float, hiding_s: float) -> float:
        return exposed_s(time_s, hiding_s, cluster.device)

    waits = weights.first or not reduces_in_backward or reduces_alone(cluster)

    def last(time_s: float) -> float:
        return time_s if waits else exposed(time_s, backward_s)

    def unhidden_part(time_s: float) -> float:
        return time_s if waits else exposed(time_s, math.inf)

    cut_bytes = _bytes(cut)
    gather, scatter = seconds("all_gather", cut_bytes), seconds("reduce_scatter", _travelling_bytes(cut, software))
    reduce = seconds("all_reduce", _travelling_bytes(whole, software)) if dp > 1 else 0.0
    sync, unhidden = last(reduce), unhidden_part(reduce)
    ahead = behind = 0.0
    temporary = 0
    if stage == 1:
        sync += last(scatter) + gather
        unhidden += unhidden_part(scatter)
    elif stage == 2:
        behind = exposed(scatter, backward_s)
        sync += last(scatter) - behind + gather
        temporary = cut_bytes  # gradients are whole until they are reduced
    if stage in (1, 2):
        unhidden += gather
    elif stage == 3 and cut:
        ahead, behind = exposed(gather, forward_s), exposed(gather + scatter, backward_s)
        temporary = gathered_bytes([cut_bytes, cut_bytes])
    if mesh.tp > 1:
        partial = [leaf for leaf in trainable if leaf.name in weights.partial]
        sync += seconds("all_reduce", _reduced_bytes(partial, names, dp), "tp")
    if mesh.pp > 1:
        copies = [leaf for leaf in trainable if leaf.name in weights.shared]
        sync += _copies_s(_reduced_bytes(copies, names, dp), mesh, cluster, between_copies)
    return States(
        weights_bytes + _bytes([leaf for leaf in weights.parameters if not leaf.trainable]),
        gradients_bytes,
        sum(h.optimizer_bytes for h in held),
        temporary,
        ahead,
        behind,
        sync,
        unhidden,
        _update_s(trainable, names, dp, optimizer, cluster),
    )


def bucketed_s(kind: str, size: float, mesh: Mesh, axis: str, cluster: AnyCluster, starts: bool = False) -> float:
    """Seconds of exchanging ``size`` bytes of many weights, once a step.

    By measured times at the rate of whole buckets, as the runtime fills them with the weights of all segments; ``starts``: with
    what one exchange takes to start. By modelled times as one exchange of its own.
    """
    degree, stride = mesh.degree(axis), mesh.stride(axis)
    if cluster.measured is None or cluster.software is not OURS:
        return collective_time_s(kind, size, degree, stride, cluster)
    start_s = collective_time_s(kind, 0, degree, stride, cluster)
    full_s = collective_time_s(kind, OURS.bucket_bytes, degree, stride, cluster)
    return size * max(full_s - start_s, 0.0) / OURS.bucket_bytes + (start_s if starts else 0.0)


def exposed_s(time_s: float, hiding_s: float, device: AnyDevice) -> float:
    """Of communication of ``time_s`` behind operators of ``hiding_s``: what it adds to their time."""
    if device.kind == "cpu":
        return time_s
    slowdown = device.overlap_slowdown
    return max(slowdown * time_s, time_s - (1 - slowdown) * hiding_s)


def reduces_alone(cluster: AnyCluster) -> bool:
    """Whether nothing overlaps with the reduction of gradients over dp."""
    return cluster.device.kind == "cpu" or not cluster.software.overlaps_reduction


def update_moves(leaf: Leaf, software: Software) -> float:
    """Bytes the optimizer moves of each of a weight; 0: the usual."""
    return software.update_bytes / DTYPE_BYTES[leaf.value.dtype]


def reduced_ratio(leaf: Leaf, software: Software) -> float:
    """Bytes that travel of each of a gradient."""
    return software.reduced_bytes / DTYPE_BYTES[leaf.value.dtype] if software.reduced_bytes else 1.0


def _travelling_bytes(leaves: Sequence[Leaf], software: Software) -> float:
    return sum(leaf.value.size_bytes * reduced_ratio(leaf, software) for leaf in leaves)


def measured_update_s(
    optimizer: str, size_bytes: float, tensors: int, sharded: bool, cluster: AnyCluster
) -> float | None:
    """Seconds of an update as measured on the cluster; None where it was not, or other software runs."""
    if cluster.measured is None or cluster.software is not OURS:
        return None
    return cluster.measured.update_s(optimizer, size_bytes, tensors, sharded)


def update_correction(cluster: AnyCluster) -> float:
    """What modelled times of updates are multiplied with."""
    if cluster.measured is None or cluster.software is not OURS:
        return 1.0
    return cluster.measured.corrections.update


def _update_s(trainable: Sequence[Leaf], cut: set[str], dp: int, optimizer: str, cluster: AnyCluster) -> float:
    parts = [[x for x in trainable if (x.name in cut) == sharded] for sharded in (False, True)]
    measured = [
        measured_update_s(optimizer, _reduced_bytes(part, cut, dp), len(part), sharded, cluster)
        for part, sharded in zip(parts, (False, True), strict=True)
        if part
    ]
    if all(seconds is not None for seconds in measured):
        return sum(seconds for seconds in measured if seconds is not None)
    launches = cluster.software.update_launches * len(trainable) or 1
    sizes: dict[float, int] = {}
    for leaf in trainable:
        moves = update_moves(leaf, cluster.software)
        sizes[moves] = sizes.get(moves, 0) + _reduced_bytes([leaf], cut, dp)
    kinds = len(sizes) or 1
    return update_correction(cluster) * sum(
        optimizer_step_s(size, optimizer, cluster.device, -(-launches // kinds), moves) for moves, size in sizes.items()
    )


def _is_cut(leaf: Leaf, weights: Weights, zero: int) -> bool:
    if zero == 3:
        return leaf.name not in weights.shared
    return zero > 0 and bool(leaf.value.shape)


def _bytes(leaves: Sequence[Leaf]) -> int:
    return sum(leaf.value.size_bytes for leaf in leaves)


def padded_bytes(leaf: Leaf, dp: int) -> int:
    """``dp`` times the largest shard."""
    rows = leaf.value.shape[0] if leaf.value.shape else 1
    return leaf.value.size_bytes // rows * -(-rows // dp) * dp if rows else 0


def _reduced_bytes(leaves: Sequence[Leaf], cut: set[str], dp: int) -> int:
    """What a device holds of the gradients of ``leaves`` once they are reduced over dp."""
    return sum(padded_bytes(x, dp) // dp if x.name in cut else x.value.size_bytes for x in leaves)


def _copies_s(size: int, mesh: Mesh, cluster: AnyCluster, between: Boundary | None) -> float:
    """Adding the gradients of copies of a weight on two stages."""
    if between is not None:
        return between.add_s(size) if size else 0.0
    return collective_time_s("all_reduce", size, 2, mesh.stride("pp"), cluster) if size else 0.0
