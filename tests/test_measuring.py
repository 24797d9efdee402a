"""A tiny model's operators timed on local ranks: kept, used by plans, and gone on with after an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import planner
from costmodels.measured import MEASURED, operator_price
from planner.cli import cli
from planner.errors import BadInput
from planner.options import asked
from planner.report.measurement import Measurement
from planner.solve.configuration import Evaluator
from planner.timings import calls_of
from planner.tracing import problem_of, trace_model
from runtime import tables as runtime_tables
from runtime.launch import LocalRanks

MODEL = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
OPTIONS: dict[str, Any] = {"example_inputs": (torch.randn(4, 8),), "loss_fn": lambda y: y.square().mean()}
FILE = "tests.test_measuring:tiny"


def tiny() -> tuple[nn.Module, tuple[torch.Tensor, ...], None, Any]:
    return MODEL, OPTIONS["example_inputs"], None, OPTIONS["loss_fn"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home


@pytest.fixture(scope="module")
def measured(home: Path) -> Measurement:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home))
        return planner.measure(MODEL, 2, **OPTIONS)


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("nothing was to be measured")

    monkeypatch.setattr(runtime_tables.LocalRanks, "start", start)


def problem(**options: Any):  # type: ignore[no-untyped-def]
    made = asked("test", 2, "auto", None, {**OPTIONS, **options})
    traced, _ = trace_model(MODEL, made.batch, made.request, made.samplewise)
    return problem_of(MODEL, traced.graph, made.request)


@pytest.mark.gloo
def test_every_call_is_timed_once_and_in_reason(measured: Measurement) -> None:
    tables = measured.tables
    assert measured.refused == ()
    assert measured.calls == measured.measured == len(tables.operators) > 10
    assert all(0 < o.forward_s < 1 and (o.backward_s > 0) == any(o.call.needs_grad) for o in tables.operators)
    kinds = {(c.kind, c.ranks) for c in tables.collectives}
    assert kinds == {(kind, 2) for kind in runtime_tables.KINDS}
    assert {(u.optimizer, u.sharded) for u in tables.updates} == {("adamw", False), ("adamw", True)}
    assert measured.path.read_text() == tables.to_json()


@pytest.mark.gloo
def test_shards_of_every_axis_are_among_the_calls(measured: Measurement) -> None:
    linears = {c.call.inputs[:2] for c in measured.tables.operators if c.call.kind[0] == "linear"}
    rows = {x[0][0] for x, _ in linears}
    weights = {weight[0] for _, weight in linears}
    assert {1, 2, 4} <= rows  # dp, micro-batches
    assert {(16, 8), (8, 8), (16, 4), (4, 16), (2, 16), (4, 8)} <= weights  # whole; output and input features on tp


@pytest.mark.gloo
def test_the_next_call_times_nothing(measured: Measurement, no_ranks: None) -> None:
    again = planner.measure(MODEL, 2, **OPTIONS)
    assert again.new == 0 and again.tables == measured.tables


@pytest.mark.gloo
def test_plans_for_this_machine_are_priced_by_the_tables(measured: Measurement) -> None:
    found = problem()
    assert found.cluster.measured == measured.tables
    evaluator = Evaluator(found)
    hows = {operator_price(c.call, found.cluster.device, found.cluster.measured)[1] for c in calls_of(evaluator)}
    assert hows == {MEASURED}
    plan = planner.auto_parallelize(MODEL, gpus=2, **OPTIONS).plan
    assert 0 < plan.bound_s <= plan.objective_s
    (note,) = plan.notes
    count = note.removeprefix("prices: ").split(" operator calls measured")[0].split(" of ")
    assert note.endswith("measured on this machine") and count[0] == count[1] != "0"
    other = planner.auto_parallelize(MODEL, gpus=2, **{**OPTIONS, "example_inputs": (torch.randn(24, 8),)}).plan
    assert "scaled from like ones" in other.notes[0]


@pytest.mark.gloo
def test_an_interrupted_call_keeps_what_it_has(
    measured: Measurement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "meshwright" / measured.path.with_suffix(".toml").name
    file.parent.mkdir()
    file.write_bytes(measured.path.with_suffix(".toml").read_bytes())
    told: list[int] = []

    def stop(what: str, done: int | None = None, total: int | None = None) -> None:
        if what == "measuring operators":
            told.append(done or 0)
            if len(told) == 4:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        planner.measure(MODEL, 2, progress=stop, **OPTIONS)
    kept = runtime_tables.read_tables(tmp_path / "meshwright" / measured.path.name)
    assert kept is not None and len(kept.operators) == 3
    rest = planner.measure(MODEL, 2, **OPTIONS)
    assert rest.measured == measured.calls
    assert rest.tables.operators[:3] == kept.operators  # these were not timed again


@pytest.mark.gloo
def test_an_operator_that_does_not_run_alone_is_told() -> None:
    with LocalRanks.start(2, device="cpu", rank_class="runtime.timer:Timer") as ranks:
        operand = {"shape": (2, 3), "dtype": "float32", "needs_grad": True, "below": 1}
        found = ranks.call("operator", {"expression": "torch.nonsense(x0)", "operands": [operand]})
        assert all("nonsense" in of_rank["refused"] for of_rank in found)
        found = ranks.call(
            "operator", {"expression": "x0 * x1", "operands": [operand, {**operand, "needs_grad": False}]}
        )
        assert all(len(of_rank["backward"]) == len(of_rank["forward"]) > 0 for of_rank in found)


def test_only_this_machine_is_measured() -> None:
    with pytest.raises(BadInput, match="only this machine"):
        planner.measure(MODEL, 2, cluster="dgx-h100", **OPTIONS)


@pytest.mark.gloo
def test_the_command_says_what_it_found(measured: Measurement, no_ranks: None) -> None:
    run = CliRunner().invoke(cli, ["measure", FILE, "--gpus", "2", "--json"])
    assert run.exit_code == 0, run.output
    found = json.loads(run.stdout)
    assert (found["calls"], found["measured"], found["new"]) == (measured.calls, measured.calls, 0)
    shown = CliRunner().invoke(cli, ["measure", FILE, "--gpus", "2"]).stdout
    assert f"{measured.calls} of {measured.calls} operator calls measured" in shown and "all_reduce" in shown
