"""What a step spends its time on, in parts that sum to the step time; a mean over the devices.

computing              operators, without those run again
computing again        recomputation in backward
inside layers          communication of every micro-batch: on tp, and the gathering of weights under ZeRO-3
between stages         waiting for tensors on their way
gradients              the exposed part of the reductions, once a step
update                 the optimizer
bubble                 waiting for other stages
"""

from __future__ import annotations

from typing import Any

from planner.ir.plan import Plan

PARTS = ("computing", "computing again", "inside layers", "between stages", "gradients", "update", "bubble")


def step_parts(plan: Plan) -> dict[str, float]:
    """Seconds of one step in each of PARTS."""
    estimate, m, devices = plan.estimate, plan.micro_batches, plan.mesh.pp
    stages = estimate.stages
    again = m * sum(stage.recomputation_s for stage in stages) / devices
    exchanged = m * sum(s.forward_communication_s + s.backward_communication_s for s in stages) / devices
    gradients = sum(stage.gradient_sync_per_step_s for stage in stages) / devices
    update = sum(stage.optimizer_per_step_s for stage in stages) / devices
    waiting = max(0.0, estimate.exposed_communication_s - exchanged - gradients)
    computing = max(0.0, estimate.compute_s - again - update)
    return dict(zip(PARTS, (computing, again, exchanged, waiting, gradients, update, estimate.bubble_s), strict=True))


def brief(plan: Plan | None, refused: str = "") -> dict[str, Any]:
    """A plan in a few figures; None: why there is none."""
    if plan is None:
        return {"configuration": None, "refused": refused}
    estimate = plan.estimate
    return {
        "configuration": plan.configuration,
        "cluster": plan.cluster,
        "devices": plan.mesh.size,
        "step_time_s": estimate.step_time_s,
        "bound_s": plan.bound_s,
        "peak_memory_bytes": estimate.peak_memory_bytes,
        "memory_limit_bytes": estimate.memory_limit_bytes,
        "parts_s": step_parts(plan),
    }
