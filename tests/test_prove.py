"""planner prove: a true proof holds, and every way to falsify one is found, without a solver."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch.nn.functional as F

import planner
from planner.errors import BadInput, InvalidPlan
from planner.ir.mesh import Mesh
from planner.ir.plan import Plan, Searched
from planner.pricing_again import configuration_of
from planner.prove_file import prove_file
from planner.prove_model import Part, parse_part, prove_against, work_bound_s
from planner.report.proof import Proof, proof_figures, record_report
from planner.solve.configuration import Configuration, Evaluator
from planner.solve.problem import Problem
from planner.solve.search import search
from planner.solve.space import Space
from planner.strategies import plan_by_hand
from tests.models import gpt_tied, mlp
from tests.search_cases import cluster, graph_of, problem, tight_problem
from tests.test_report import text_of


@cache
def made() -> tuple[Problem, Plan]:
    found = tight_problem()
    return found, search(found)


def recorded() -> Plan:
    """The plan with every outcome in its record."""
    plan = made()[1]
    solved = Searched("pp4 mb=64 zero=0 schedule=gpipe", 2 * plan.objective_s, "solved", 3 * plan.objective_s)
    return replace(plan, searched=(*plan.searched, solved))


def wrong(proof: Proof) -> dict[str, str]:
    assert proof.holds == (not any(check.problem for check in proof.checks))
    return {check.name: check.problem for check in proof.checks if check.problem}


def changed(plan: Plan, outcome: str, **fields: object) -> Plan:
    """``plan`` with the first configuration of that outcome in its record changed."""
    place = next(i for i, entry in enumerate(plan.searched) if entry.outcome == outcome)
    entry = replace(plan.searched[place], **fields)  # type: ignore[arg-type]
    return replace(plan, searched=(*plan.searched[:place], entry, *plan.searched[place + 1 :]))


def test_the_proof_of_a_search_holds() -> None:
    found, plan = made()
    assert prove_file(recorded()).holds
    proof = prove_file(plan)
    assert proof.holds and not wrong(proof)
    against = prove_against(plan, found)
    assert against.holds, wrong(against)
    assert [check.name for check in against.checks] == [
        *(check.name for check in proof.checks), "model: graph", "model: prices", "model: bounds",
        *(check.name for check in against.checks[len(proof.checks) + 3 :]),
    ]  # fmt: skip
    assert "is no preset" in proof.checks[-1].found
    assert against.checks[len(proof.checks) - 1].found.endswith("make up the space, each in the record")
    assert "The proof holds." in text_of(proof)


FALSE: list[tuple[str, str, Callable[[Plan], Plan]]] = [
    ("legal: mesh, stages and schedule", "stages end at segment", lambda p: replace(p, segments=p.segments[:-1])),
    ("legal: estimate", "step_time_s is",
     lambda p: replace(p, estimate=replace(p.estimate, step_time_s=0.9 * p.objective_s), bound_s=0.0)),
    ("legal: estimate", "bytes a device, the limit is",
     lambda p: replace(p, estimate=replace(p.estimate, memory_limit_bytes=1000))),
    ("legal: bound", "is above its objective", lambda p: replace(p, bound_s=2 * p.objective_s)),
    ("bound", "no record of a search", lambda p: replace(p, searched=())),
    ("record: best", "0 configurations are called the best",
     lambda p: replace(p, searched=tuple(s for s in p.searched if s.outcome != "best"))),
    ("record: best", "the best is dp4 mb=99 zero=0", lambda p: changed(p, "best", configuration="dp4 mb=99 zero=0")),
    ("record: best", "the plan", lambda p: changed(p, "best", objective_s=1.1 * p.objective_s)),
    ("record: solved", "less than the plan", lambda p: changed(p, "solved", objective_s=0.9 * p.objective_s)),
    ("record: solved", "has no objective", lambda p: changed(p, "solved", objective_s=None)),
    ("record: solved", "below the plan's bound", lambda p: changed(p, "solved", bound_s=0.5 * p.objective_s)),
    ("record: solved", "is above its objective", lambda p: changed(p, "solved", bound_s=1e9)),
    ("record: pruned", "below the plan's time", lambda p: changed(p, "pruned", bound_s=0.9 * p.objective_s)),
    ("record: open", "below the plan's bound",
     lambda p: replace(p, searched=(*p.searched, Searched("pp4 mb=4 zero=0", 0.5 * p.bound_s, "open")))),
    ("record: infeasible", "without a reason", lambda p: changed(p, "infeasible", reason="")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "told", "change"), FALSE, ids=range(len(FALSE)))
def test_a_false_proof_is_found_out(name: str, told: str, change: Callable[[Plan], Plan]) -> None:
    problems = wrong(prove_file(change(recorded())))
    assert told in problems[name]
    assert len(problems) == (2 if name == "bound" else 1)  # no record has no best either


def test_a_plan_of_a_strategy_by_hand_claims_no_bound() -> None:
    found, _ = made()
    plan = plan_by_hand(Evaluator(found), "ddp")
    proof = prove_file(plan)
    assert not proof.holds and list(wrong(proof)) == ["memory"]
    assert any(check.found == "a hand-picked strategy (ddp) claims none" for check in proof.checks)


def test_the_graph_and_every_price_are_checked_against_the_model() -> None:
    found, plan = made()
    other = problem(graph_of(mlp), found.cluster, found.memory_limit_bytes)
    assert "another model" in wrong(prove_against(plan, other))["model: graph"]
    slower = replace(found, cluster=cluster(4, flops_per_s=5e10))
    told = wrong(prove_against(plan, slower))["model: prices"]
    assert "stage 0: forward_s is" in told and "from the graph" in told


def pretended(found: Problem, outcome: str) -> tuple[Plan, str]:
    """The best data-parallel plan of the wrong ZeRO stage, given out for the best of the space; the better is ``outcome``."""
    best = search(found)
    assert best.mesh == Mesh(dp=4)
    worse = search(found, within=lambda c: c.mesh == best.mesh and c.zero != best.zero)
    assert worse.objective_s > best.objective_s * 1.001
    text, mine = str(configuration_of(best)), str(configuration_of(worse))
    lie = Searched(text, worse.objective_s, outcome, reason="too large" * (outcome == "infeasible"))
    space = Space(found.cluster, worse.global_batch, len(worse.segments))
    rest = [Searched(str(c), worse.objective_s, "pruned") for c in space if str(c) not in (text, mine)]
    own = next(entry for entry in worse.searched if entry.outcome == "best")
    return replace(worse, searched=(own, lie, *rest), bound_s=worse.objective_s), text


@pytest.mark.parametrize(
    ("outcome", "told"), [("pruned", "less than the plan's bound"), ("infeasible", "is called infeasible, but takes")]
)
def test_a_faster_plan_that_the_record_hides_is_found_out(outcome: str, told: str) -> None:
    found = replace(made()[0], memory_limit_bytes=10**9)
    false, text = pretended(found, outcome)
    assert prove_file(false).holds
    problem = wrong(prove_against(false, found))["model: bounds"]
    assert problem.startswith(text) and told in problem


def test_a_record_with_a_hole_is_found_out() -> None:
    found, plan = made()
    for entry in plan.searched:
        rest = tuple(other for other in plan.searched if other != entry)
        if entry.outcome != "best" and entry.configuration not in {other.configuration for other in rest}:
            told = wrong(prove_file(replace(plan, searched=rest), found.cluster))["record: whole space"]
            assert told.endswith("is not in the record, nor is a part of the space that contains it")
            assert told.split()[0].split(".")[-1] == entry.configuration.split()[0].split(".")[-1]


def test_the_bound_by_work_alone_holds_for_every_plan_by_hand() -> None:
    graph = graph_of(gpt_tied)
    on_2, on_4 = (Evaluator(problem(graph, cluster(n, flops_per_s=1e11))) for n in (2, 4))
    for on, text in (
        (on_4, "ddp"), (on_4, "tp"), (on_4, "dp2.tp2"), (on_4, "pp2.tp2 mb=2"), (on_4, "pp4 mb=8 schedule=gpipe"),
        (on_2, "pp2 mb=4"), (on_2, "pp2 mb=4 schedule=interleaved v=2"), (on_2, "pp2 mb=4 schedule=zero-bubble"),
    ):  # fmt: skip
        plan = plan_by_hand(on, text)
        part = Part(plan.mesh.tp, plan.mesh, plan.micro_batches, plan.zero, plan.schedule, plan.chunks)
        assert 0 < work_bound_s(on, part) <= plan.objective_s
        assert work_bound_s(on, Part(plan.mesh.tp)) <= plan.objective_s


def test_parts_of_the_space_are_read() -> None:
    assert parse_part("tp2", 4) == Part(2) and parse_part("tp1", 4) == Part(1)
    assert parse_part("dp2.tp2", 4) == Part(2, Mesh(dp=2, tp=2))
    assert parse_part("pp2.dp2 mb=4", 4) == Part(1, Mesh(2, 2), 4)
    whole = parse_part("pp2.dp2 mb=4 zero=3 schedule=interleaved v=2", 4)
    assert whole == Part(1, Mesh(2, 2), 4, 3, "interleaved", 2)
    assert whole.configuration == Configuration(Mesh(2, 2), 4, 3, "interleaved", 2)
    for text in ("dp2", "tp3", "dp2 mb=4", "dp4 mb=4 colour=red", "nothing"):
        with pytest.raises(ValueError, match=text.split()[0]):
            parse_part(text, 4)


# --- call, data, imports ----------------------------------------------------------------------------------------------


def test_the_call_checks_files_and_models(tmp_path: Path) -> None:
    case = mlp()
    given = {"example_inputs": case.inputs, "loss_fn": F.mse_loss}
    plan = planner.auto_parallelize(case.model, 2, cluster="dgx-a100-80gb", **given).plan
    plan.save(tmp_path / "plan.json")
    assert planner.prove(tmp_path / "plan.json").holds
    proof = planner.prove(plan, case.model, **given)
    assert proof.holds and any(check.name == "model: prices" for check in proof.checks)
    with pytest.raises(BadInput, match="is no preset; pass cluster="):
        planner.prove(replace(plan, cluster="my-own"), case.model, **given)
    with pytest.raises(InvalidPlan, match="cannot read plan"):
        planner.prove(tmp_path / "missing.json")


def test_the_data_and_the_record() -> None:
    _, plan = made()
    figures = proof_figures(prove_file(plan))
    assert json.loads(json.dumps(figures)) == figures
    assert figures["holds"] and all(check["ok"] for check in figures["checks"])
    assert len(figures["searched"]) == len(plan.searched)
    lines = text_of(record_report(plan), 120)
    assert lines.startswith(f"\nConfigurations searched: {len(plan.searched)} (1 best, ")
    for entry in plan.searched:
        assert entry.configuration in lines


def test_a_file_is_proven_without_torch_or_a_solver_and_a_model_without_a_solver(tmp_path: Path) -> None:
    case = mlp()
    plan = planner.auto_parallelize(
        case.model, 2, example_inputs=case.inputs, loss_fn=F.mse_loss, cluster="dgx-a100-80gb"
    ).plan
    plan.save(tmp_path / "plan.json")
    root = str(Path(__file__).parent.parent)
    loaded = "print([name for name in ('torch', 'ortools', 'networkx') if name in sys.modules])"
    file = f"import sys, planner; assert planner.prove('plan.json').holds; {loaded}"
    model = (
        "import sys, planner, torch.nn.functional as F; from tests.models import mlp; case = mlp(); assert planner.prove("
        "'plan.json', case.model, example_inputs=case.inputs, loss_fn=F.mse_loss).holds; print('ortools' in sys.modules)"
    )
    for code, printed in ((file, "[]"), (model, "False")):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": root}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == printed
