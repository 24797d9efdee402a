"""From a request to a plan that can run: trace, search (or price by hand), verify, lower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from planner.errors import Infeasible
from planner.garbage import uncollected
from planner.inputs import BatchForm
from planner.ir.graph import Graph
from planner.ir.plan import Plan
from planner.ir.program import Program
from planner.ir.verify import verify_plan
from planner.lower import lower
from planner.options import Request
from planner.other_batch import other_program
from planner.parallel import OtherBatch
from planner.solve.configuration import Evaluator
from planner.solve.problem import Problem
from planner.solve.search import search
from planner.strategies import plan_by_hand
from planner.trace import Batch
from planner.tracing import problem_of, retracing, trace_batch, trace_model
from planner.ways_out import Retrace, infeasible_with_ways_out


@dataclass(frozen=True)
class Prepared:
    plan: Plan
    program: Program
    form: BatchForm
    other_batch: OtherBatch


def prepare_run(
    model: torch.nn.Module, batch: tuple[Any, ...], request: Request, samplewise: bool | Sequence[str]
) -> Prepared:
    """Trace, plan and lower."""
    traced, example = trace_model(model, batch, request, samplewise)
    plan = request.plan
    if plan is None:
        problem = problem_of(model, traced.graph, request)
        request.say("searching")
        with uncollected():
            if request.strategy == "auto":
                plan = found_or_ways_out(problem, request, retracing(model, batch, request, samplewise))
            else:
                plan = plan_by_hand(Evaluator(problem), request.strategy)
    verify_plan(plan, traced.graph)
    request.say("lowering")
    program = lower(traced.graph, plan)

    def other_batch(batch: Batch, rows: int, fixed: tuple[str, ...]) -> Program:
        def again() -> Graph:
            return trace_batch(model, batch, request, rows, samplewise, fixed)[0].graph

        return other_program(program, plan, traced.graph, rows, again)

    return Prepared(plan, program, BatchForm.of(example), other_batch)


def found_or_ways_out(problem: Problem, request: Request, retrace: Retrace) -> Plan:
    """The best plan. Raises Infeasible with the least change of each kind that would fit."""
    try:
        return search(problem, request.time_limit_s, request.progress)
    except Infeasible as error:
        raise infeasible_with_ways_out(error, problem, retrace, request.say) from None
