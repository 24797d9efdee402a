"""A plan priced again, from the graph and the plan's own decisions: no search, no solver.

Everything in the estimate follows from the mesh, the micro-batches, the schedule, the ZeRO stage, the stages, the
recomputation and the strategies of the operators, which all stand in the plan.
"""

from __future__ import annotations

from dataclasses import replace

from costmodels.mixed import Machine
from planner.ir.plan import Plan
from planner.layouts import recall
from planner.solve.configuration import Configuration, Evaluator
from planner.solve.letters import Letters


def configuration_of(plan: Plan) -> Configuration:
    return Configuration(plan.mesh, plan.micro_batches, plan.zero, plan.schedule, plan.chunks, plan.groups)


def price_again(plan: Plan, evaluator: Evaluator) -> Plan:
    """``plan`` with the estimate that the evaluator's problem gives it; its proof is left as it is.

    Raises InvalidPlan when its strategies are not those of the graph, BadInput when the batch cannot be cut as it says.
    """
    graph = evaluator.split(plan.mesh.dp, plan.micro_batches).graph
    strategies, leaves = recall(graph, plan.layouts, plan.mesh.tp)
    letters = Letters(strategies, leaves, 0.0, 0.0)
    again = evaluator.build_plan(configuration_of(plan), letters, plan.stages, plan.recompute, plan.strategy)
    return replace(plan, estimate=again.estimate, cluster=again.cluster, placement=again.placement)


def price_on(plan: Plan, evaluator: Evaluator, cluster: Machine) -> Plan:
    """``plan`` as it is, on another cluster of as many devices."""
    return price_again(plan, Evaluator(replace(evaluator.problem, cluster=cluster)))
