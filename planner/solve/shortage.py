"""Why there is no plan: the least memory that is missing, in which configuration, on which stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from planner.errors import Infeasible, Shortage
from planner.schedules import ZERO_BUBBLE
from planner.sizes import format_bytes
from planner.solve.configuration import FAST, LEAN, Evaluator
from planner.solve.linear_program import NoSolution
from planner.solve.space import Configuration
from planner.solve.stages import least_missing


def infeasible(evaluator: Evaluator, too_large: Sequence[Configuration], reasons: Iterable[str]) -> Infeasible:
    """The error that says so. ``too_large``: configurations that do not fit; ``reasons``: why others cannot be."""
    problem = evaluator.problem
    gpus = problem.cluster.gpus
    found = nearest(evaluator, too_large)
    if found is None:
        why = "; ".join(sorted(set(reasons))[:3]) or "the batch or model cannot be split so"
        return Infeasible(f"no plan exists on {gpus} devices: {why}")
    missing, configuration, stage = found
    limit = evaluator.problem.limits_bytes(configuration)[stage]
    where = f"stage {stage} of " if configuration.mesh.pp > 1 else ""
    places = evaluator.problem.places(configuration)
    each = f"{format_bytes(limit)} each" if places is None else f"{format_bytes(limit)} on {places[stage].words}"
    return Infeasible(
        f"{problem.name} does not fit on {gpus} x {problem.cluster.name} with {each}: the nearest plan, "
        f"{where}{configuration} with recomputation where it helps, is {format_bytes(missing)} over on its fullest device",
        Shortage(missing, str(configuration), stage, limit),
    )


def nearest(evaluator: Evaluator, too_large: Sequence[Configuration]) -> tuple[int, Configuration, int] | None:
    """(bytes that are missing, configuration, stage), the least of those with one stage a rank and a whole backward.

    The others hold no less: they keep as many micro-batches as 1f1b or more. None where there is none of the first kind.
    """
    plain = [c for c in too_large if c.chunks == 1 and c.schedule != ZERO_BUBBLE]
    found: tuple[int, Configuration, int] | None = None
    for least, _, configuration in sorted((evaluator.least_excess_bytes(c), i, c) for i, c in enumerate(plain)):
        if found is not None and least >= found[0]:
            break
        for variant in (FAST, LEAN) if configuration.mesh.tp > 1 else (FAST,):
            try:
                letters = evaluator.letters(configuration, variant)
            except NoSolution:
                letters = evaluator.leanest_letters(configuration)
            missing = least_missing(
                evaluator.rank_costs(configuration, letters),
                configuration.mesh.pp,
                configuration.micro_batches,
                configuration.schedule,
                evaluator.problem.limits_bytes(configuration),
            )
            if found is None or missing.missing_bytes < found[0]:
                found = missing.missing_bytes, configuration, missing.stage
    return found
