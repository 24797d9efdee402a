"""The public call that checks a plan's proof again.

prove(plan) -> Proof                   from the file alone: neither torch nor a solver
prove(plan, model, ...) -> Proof       against the model too: torch traces it, still no solver
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodels.hardware import Cluster, ClusterError, presets
from costmodels.mixed import Machine, MixedCluster, load_machine, mixed_presets
from planner.errors import BadInput
from planner.ir.plan import Plan
from planner.prove_file import prove_file
from planner.report.proof import Proof

if TYPE_CHECKING:
    import torch


def prove(
    plan: Plan | str | Path,
    model: torch.nn.Module | None = None,
    *,
    cluster: str | Path | Machine | None = None,
    **options: Any,
) -> Proof:
    """Check a plan's proof without a solver, each check a line of the Proof; ``holds`` says whether all are right.

    From the plan: that it is legal, its step time simulated again, its memory, its bound against every part of the search's
    record. With ``model``: traced again, its graph, every stage priced again, and bounds of the parts of the space computed
    again. ``cluster``: the machine the plan is for; default: the preset of its name. ``options``: what the batch is made of
    (``example_inputs``, ``loss_fn`` and so on, as in ``auto_parallelize``).

    Raises InvalidPlan for a file that is no plan, BadInput, TraceError.
    """
    made = plan if isinstance(plan, Plan) else Plan.load(plan)
    machine = cluster if isinstance(cluster, Cluster | MixedCluster | None) else _loaded(cluster)
    proof = prove_file(made, machine)
    if model is None or not proof.holds:
        return proof
    from planner.options import asked
    from planner.prove_model import prove_against
    from planner.tracing import problem_of, trace_model

    if machine is None:
        if made.cluster not in (*presets(), *mixed_presets()):
            raise BadInput(
                f"the plan is for cluster {made.cluster!r}, which is no preset; pass cluster= with its TOML file"
            )
        machine = _loaded(made.cluster)
    given = {
        "optimizer": made.optimizer,
        "memory_limit": made.estimate.memory_limit_bytes,
        "seed": made.seed,
        **options,
        "cluster": machine,
    }
    question = asked("prove", made.mesh.size, "auto", made, given)
    traced, _ = trace_model(model, question.batch, question.request, question.samplewise)
    return prove_against(made, problem_of(model, traced.graph, question.request))


def _loaded(cluster: str | Path) -> Machine:
    try:
        return load_machine(cluster)
    except ClusterError as error:
        raise BadInput(str(error)) from None
