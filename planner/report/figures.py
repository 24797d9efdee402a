"""Figures computed from a plan: what binds it, its summary in one line, and a mapping for scripts.

memory binds          a device uses more than 90 % of the limit
then the largest of   compute, exposed communication, bubble as shares of the step
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from planner.ir.plan import Plan
from planner.report.words import device_words
from planner.sizes import format_bytes, format_seconds

MEMORY_BINDS = 0.9
PROVEN = 1e-6  # relative gap below which a plan is called proven fastest


def shares(plan: Plan) -> dict[str, float]:
    """Seconds of the step spent in each of compute, communication and bubble."""
    estimate = plan.estimate
    return {
        "compute": estimate.compute_s,
        "communication": estimate.exposed_communication_s,
        "bubble": estimate.bubble_s,
    }


def share_of_limit(plan: Plan, rank: int) -> float:
    """What a device of pipeline rank ``rank`` needs of its memory, all its stages together."""
    limit = plan.estimate.limits_bytes[rank]
    total = plan.estimate.devices[rank].total_bytes
    return total / limit if limit else float(total > 0)


def fullest_rank(plan: Plan) -> int:
    devices = plan.estimate.devices
    return max(range(len(devices)), key=lambda rank: (share_of_limit(plan, rank), devices[rank].total_bytes))


def bindings(plan: Plan) -> tuple[tuple[str, str], ...]:
    """What binds the plan, as (kind, reason); kinds are 'memory', 'compute', 'communication' and 'bubble'."""
    found = []
    rank = fullest_rank(plan)
    full = share_of_limit(plan, rank)
    if full > MEMORY_BINDS:
        limit = format_bytes(plan.estimate.limits_bytes[rank])
        found.append(("memory", f"{device_words(plan, rank)} uses {full:.0%} of {limit}"))
    parts = shares(plan)
    largest = max(parts, key=parts.__getitem__)
    step = plan.estimate.step_time_s
    share = parts[largest] / step if step else 0.0
    found.append((largest, f"{share:.0%} of the step"))
    return tuple(found)


def proof(plan: Plan) -> str:
    """How good the plan is proven to be."""
    if plan.strategy != "auto":
        return f"hand-picked ({plan.strategy})"
    if plan.gap <= PROVEN:
        return "proven fastest"
    if not plan.bound_s:
        return "no lower bound found"
    return f"within {plan.gap:.2%} of the proven bound"


def summary(plan: Plan) -> str:
    """The plan in one line."""
    estimate = plan.estimate
    rank = fullest_rank(plan)
    peak, limit = estimate.devices[rank].total_bytes, estimate.limits_bytes[rank]
    memory = f"peak {format_bytes(peak)} of {format_bytes(limit)}"
    return (
        f"{plan.model} on {_devices(plan)}: {plan.configuration}, "
        f"{format_seconds(estimate.step_time_s)} a step ({proof(plan)}), {memory}"
    )


def _devices(plan: Plan) -> str:
    return f"{plan.mesh.size} x {plan.cluster}"


def plan_figures(plan: Plan) -> dict[str, Any]:
    """The report for scripts: plain data, units in the names."""
    estimate = plan.estimate
    stages = []
    for index, (stage, (first, end)) in enumerate(zip(estimate.stages, plan.stages, strict=True)):
        figures = asdict(stage)
        figures["memory"]["total_bytes"] = stage.memory.total_bytes
        figures |= {
            "segments": [first, end],
            "labels": [segment.label for segment in plan.segments[first:end]],
            "parameters": sum(segment.parameters for segment in plan.segments[first:end]),
            "recomputed_segments": sum(word != "none" for word in plan.recompute[first:end]),
            "recompute": list(plan.recompute[first:end]),
            "rank": index % plan.mesh.pp,
            "memory_limit_bytes": estimate.limits_bytes[index % plan.mesh.pp],
            "on": plan.placement[index % plan.mesh.pp] if plan.placement else plan.cluster,
            "share_of_memory_limit": share_of_limit(plan, index % plan.mesh.pp),
        }
        stages.append(figures)
    return {
        "model": plan.model,
        "graph_digest": plan.graph_digest,
        "configuration": plan.configuration,
        "strategy": plan.strategy,
        "mesh": {"pp": plan.mesh.pp, "dp": plan.mesh.dp, "tp": plan.mesh.tp},
        "devices": plan.mesh.size,
        "cluster": plan.cluster,
        "precision": plan.precision,
        "optimizer": plan.optimizer,
        "global_batch": plan.global_batch,
        "micro_batches": plan.micro_batches,
        "schedule": plan.schedule,
        "chunks": plan.chunks,
        "zero": plan.zero,
        "step_time_s": estimate.step_time_s,
        "samples_per_s": plan.global_batch / estimate.step_time_s if estimate.step_time_s else None,
        "compute_s": estimate.compute_s,
        "exposed_communication_s": estimate.exposed_communication_s,
        "bubble_s": estimate.bubble_s,
        "bound_s": plan.bound_s,
        "gap": plan.gap,
        "peak_memory_bytes": estimate.peak_memory_bytes,
        "memory_limit_bytes": estimate.memory_limit_bytes,
        "placement": list(plan.placement),
        "fits": estimate.fits,
        "binds": [kind for kind, _ in bindings(plan)],
        "stages": stages,
        "searched": [asdict(entry) for entry in plan.searched],
        "notes": list(plan.notes),
    }
