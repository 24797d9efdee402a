"""The search against every plan of small random problems (tests.oracle), with limits of memory from ample to hopeless."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from costmodels.collectives import collective_time_s
from costmodels.measured import (
    MeasuredCollective,
    MeasuredOperator,
    MeasuredTables,
    MeasuredUpdate,
    operator_price,
)
from planner.errors import Infeasible
from planner.ir.plan import Plan, Searched
from planner.ir.verify import verify_plan
from planner.pricing_again import price_again
from planner.simulate import estimate_step
from planner.solve.configuration import Evaluator
from planner.solve.problem import Problem
from planner.solve.search import search
from planner.solve.space import Configuration, Region
from planner.timings import calls_of
from tests.oracle import Frontier, Oracle, with_limit
from tests.oracle_cases import Model, clusters, graph_of_model, mixed_clusters, models
from tests.search_cases import AMPLE, cluster
from tests.search_cases import problem as made_problem

RELATIVE = 1e-9
LIMITS = ("ample", "not the fastest", "half way", "the least", "none without tp", "less")
# Letters of a configuration that are tried; all where there are no more.
LETTERS = 100

EVERY = settings(
    phases=[Phase.generate, Phase.shrink], derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
problems = st.builds(
    lambda model, on, optimizer: made_problem(graph_of_model(model), on, optimizer=optimizer),
    models(),
    clusters(),
    st.sampled_from(["adamw", "sgd", "sgd-momentum"]),
)


def limit_of(word: str, oracle: Oracle) -> int:
    """Bytes: what plans without tp need, and just less."""
    points = Frontier.of(point for frontier in oracle.without_tp.values() for point in frontier.points).points
    if word == "ample" or not points:
        return AMPLE
    sizes = [size for size, _ in points]
    return {
        "not the fastest": sizes[-1] - 1,
        "half way": sizes[len(sizes) // 2],
        "the least": sizes[0],
        "none without tp": sizes[0] - 1,
        "less": sizes[0] * 5 // 8,
    }[word]


def found_or_none(problem: Problem) -> Plan | None:
    try:
        return search(problem)
    except Infeasible as refused:
        assert "does not fit" in str(refused)
        return None


def entry_of(plan: Plan, configuration: Configuration) -> Searched | None:
    """What the record says of a configuration; None of one whose axes are in an order like another's."""
    shape = configuration.shape
    parts = (configuration, shape, Region(shape.mesh.tp, shape.mesh), Region(shape.mesh.tp))
    entries = {entry.configuration: entry for entry in plan.searched}
    return next((entries[str(part)] for part in parts if str(part) in entries), None)


def check_bound(plan: Plan | None, configuration: Configuration, best_s: float) -> None:
    """Nothing that is recorded denies a plan of ``configuration`` that takes ``best_s`` and fits."""
    if plan is None or math.isinf(best_s):
        return
    assert plan.bound_s <= best_s * (1 + RELATIVE), f"{configuration} takes {best_s}, less than the plan's bound"
    entry = entry_of(plan, configuration)
    if entry is not None:
        assert entry.outcome != "infeasible", f"{configuration} fits"
        assert entry.bound_s <= best_s * (1 + RELATIVE), f"the bound of {configuration} is not one"


def check_search(problem: Problem, word: str, letters: int, configurations: int) -> None:
    """One problem under one limit; under so many letters of so many configurations with tp."""
    oracle, draw = Oracle(problem), random.Random(0)
    limit = limit_of(word, oracle)
    problem = with_limit(problem, limit)
    plan = found_or_none(problem)
    best_s = {configuration: frontier.best_s(limit) for configuration, frontier in oracle.without_tp.items()}
    least_s = min(best_s.values(), default=math.inf)
    if plan is None:
        assert math.isinf(least_s), f"a plan takes {least_s} and fits"
    else:
        check_plan(plan, problem, oracle, least_s)
    for configuration, seconds in best_s.items():
        check_bound(plan, configuration, seconds)
    even = [c for c in oracle.configurations if c.mesh.tp > 1 and oracle.is_even(c)]
    for configuration in draw.sample(even, min(configurations, len(even))):
        check_bound(plan, configuration, oracle.with_tp(configuration, letters, draw)[0].best_s(limit))


def check_plan(plan: Plan, problem: Problem, oracle: Oracle, least_s: float) -> None:
    """Legal, fits, costs what its decisions cost, and nothing without tp is faster."""
    verify_plan(plan, problem.graph)
    again = price_again(plan, Evaluator(problem)).estimate
    own = estimate_step(again.stages, plan.schedule, plan.micro_batches, again.limits_bytes, plan.chunks)
    assert max(again.limits_bytes) <= problem.memory_limit_bytes
    assert plan.estimate.fits and own.fits
    assert plan.objective_s == pytest.approx(own.step_time_s, rel=RELATIVE)
    assert plan.bound_s <= plan.objective_s <= least_s * (1 + RELATIVE)
    if plan.mesh.tp == 1:
        assert plan.objective_s == pytest.approx(least_s, rel=RELATIVE)


@settings(EVERY, max_examples=30)
@given(problems, st.sampled_from(LIMITS))
def test_nothing_is_better_than_what_the_search_finds(problem: Problem, word: str) -> None:
    check_search(problem, word, LETTERS // 4, 1)


def with_measured_times(problem: Problem, seed: int) -> Problem:
    """Times as if measured, from a third to three times the modelled ones, each call and message on its own."""
    draw, on = random.Random(seed), problem.cluster
    tables = MeasuredTables("made-up", "none", on.gpus, 1)
    operators, messages = [], []
    for timed in calls_of(Evaluator(problem)):
        time, _ = operator_price(timed.call, on.device, None)
        if draw.random() < 0.8:  # the others are scaled
            forward_s, backward_s = (
                seconds * 3 ** draw.uniform(-1, 1) for seconds in (time.forward_s, time.backward_s)
            )
            operators.append(MeasuredOperator(timed.call, forward_s, backward_s))
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "send"):
        for size in (64, 4096):
            seconds = collective_time_s(kind, size, 2, 1, on) if on.gpus % 2 == 0 else 1e-5
            messages.append(MeasuredCollective(kind, 2, 1, size, seconds * 3 ** draw.uniform(-1, 1)))
    updates = [MeasuredUpdate(problem.optimizer, sharded, 1e-6, 1e-9) for sharded in (False, True)]
    tables = tables.with_operators(operators).with_collectives(messages).with_updates(updates)
    return replace(problem, cluster=replace(on, measured=tables))


@settings(EVERY, max_examples=20)
@given(problems, st.sampled_from(LIMITS), st.integers(0, 99))
def test_nothing_is_better_by_measured_times_either(problem: Problem, word: str, seed: int) -> None:
    check_search(with_measured_times(problem, seed), word, LETTERS // 4, 1)


mixed_problems = st.builds(
    lambda model, on, optimizer: made_problem(graph_of_model(model), on, optimizer=optimizer),
    models(3),
    mixed_clusters(),
    st.sampled_from(["adamw", "sgd", "sgd-momentum"]),
)


@settings(EVERY, max_examples=30)
@given(mixed_problems, st.sampled_from(LIMITS))
def test_nothing_is_better_on_unequal_machines(problem: Problem, word: str) -> None:
    check_search(problem, word, LETTERS // 4, 1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(EVERY, max_examples=400)
@given(mixed_problems, st.sampled_from(LIMITS))
def test_nothing_is_better_in_hundreds_of_problems_on_unequal_machines(problem: Problem, word: str) -> None:
    check_search(problem, word, LETTERS, 3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(EVERY, max_examples=400)
@given(problems, st.sampled_from(LIMITS))
def test_nothing_is_better_in_hundreds_of_problems(problem: Problem, word: str) -> None:
    check_search(problem, word, LETTERS, 3)


def test_strategies_that_were_not_tried_may_fit() -> None:
    """The ones that are tried fit on no tp, others do and are faster than any stages: the bound must leave room for them."""
    model = Model(1, 4, 5, ("linear",), length=2, tokens=True, classes=6, tied=True, loss="cross entropy")
    on = cluster(
        2,
        flops_per_s=1e8,
        memory_bytes_per_s=1e8,
        link_bytes_per_s=1e7,
        inter_bytes_per_s=1e6,
        launch_s=0.0,
        gpus_per_node=1,
    )
    problem = made_problem(graph_of_model(model), on, 643, "sgd")
    oracle = Oracle(problem)
    (configuration,) = [c for c in oracle.configurations if c.mesh.tp == 2]
    best_s = oracle.with_tp(configuration, 1000, random.Random(0))[0].best_s(643)
    assert best_s < min(frontier.best_s(643) for frontier in oracle.without_tp.values())
    check_bound(search(problem), configuration, best_s)
