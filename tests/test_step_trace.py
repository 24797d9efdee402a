"""Steps as they ran: recorded on ranks, written and read as a Chrome trace, and held against the plan's estimate."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import planner
from costmodels.measured import Corrections
from planner.cli import cli
from planner.errors import BadInput
from planner.ir.plan import Plan
from planner.step_trace import Event, StepTrace, corrected, parts, require_folder_of
from runtime.recorder import Recorder
from runtime.tables import priced_with

MODEL = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
X = torch.randn(8, 8)
Y = torch.randn(8, 4)
OPTIONS: dict[str, Any] = {"example_inputs": (X,), "example_target": Y, "loss_fn": nn.functional.mse_loss}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))


def traced(strategy: str, folder: Path, steps: int = 3) -> StepTrace:
    file = folder / "trace.json"
    with planner.auto_parallelize(MODEL, gpus=2, strategy=strategy, **OPTIONS) as parallel:
        losses = parallel.train([(X, Y)] * steps, progress=False, trace=file)
    with planner.auto_parallelize(MODEL, gpus=2, strategy=strategy, **OPTIONS) as parallel:
        assert parallel.train([(X, Y)] * steps, progress=False) == losses
    return StepTrace.load(file)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("strategy", "kinds"),
    [
        ("ddp mb=2", {"forward", "backward", "gradient reduction", "optimizer step"}),
        ("tp", {"forward", "backward", "communication", "optimizer step"}),
        ("pp2 mb=4", {"forward", "backward", "optimizer step"}),
        ("pp2 mb=4 schedule=zero-bubble", {"forward", "backward", "backward of weights", "optimizer step"}),
    ],
)
def test_every_rank_tells_every_pass(strategy: str, kinds: set[str], tmp_path: Path) -> None:
    trace = traced(strategy, tmp_path)
    plan = trace.plan
    for rank in (0, 1):
        for step in (1, 2, 3):
            mine = [event for event in trace.events if (event.rank, event.step) == (rank, step)]
            assert kinds <= {event.what for event in mine if event.seconds > 0}
            forwards = [(e.stage, e.micro_batch) for e in mine if e.what == "forward"]
            assert sorted(forwards) == [(rank if plan.mesh.pp > 1 else 0, m) for m in range(plan.micro_batches)]
            (whole,) = [e for e in mine if e.what == "step"]
            assert all(whole.holds(e) and e.seconds <= whole.seconds for e in mine)
    names = [part.name for part in parts(trace)]
    assert names == ["forward", "backward", "communication", "optimizer step", "step"]
    assert all(part.measured_s > 0 for part in parts(trace) if part.name != "communication")


@pytest.mark.gloo
def test_prices_are_corrected_by_a_run(tmp_path: Path) -> None:
    traced("tp", tmp_path)
    before = planner.estimate(MODEL, 2, strategy="tp", **OPTIONS)
    run = CliRunner().invoke(cli, ["calibrate", str(tmp_path / "trace.json"), "--json"])
    assert run.exit_code == 0, run.output
    found = json.loads(run.stdout)
    after = planner.estimate(MODEL, 2, strategy="tp", **OPTIONS)
    for name, part in (("forward", 0), ("backward", 1), ("communication", 2), ("update", 3)):
        ratio = found["parts"][part]["measured_s"] / found["parts"][part]["predicted_s"]
        assert found["after"][name] == pytest.approx(ratio, rel=1e-3) and found["before"][name] == 1.0
    one, two = before.stages[0], after.stages[0]
    exchanged_s = one.forward_communication_s * found["after"]["communication"]
    assert two.forward_communication_s == pytest.approx(exchanged_s, rel=0.05)  # with it are counted copies, which stay
    computed = [s.forward_s - s.forward_communication_s for s in (one, two)]
    assert computed[1] == pytest.approx(computed[0] * found["after"]["forward"])
    assert two.optimizer_per_step_s == pytest.approx(one.optimizer_per_step_s * found["after"]["update"])
    assert priced_with(2)[1].runs == 1
    assert (
        "prices are corrected by 2 runs" in CliRunner().invoke(cli, ["calibrate", str(tmp_path / "trace.json")]).stdout
    )


# --- by hand ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plans(home: Path) -> dict[str, Plan]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home))
        strategies = ("tp", "ddp mb=2", "fsdp")
        return {s: planner.auto_parallelize(MODEL, gpus=2, strategy=s, **OPTIONS).plan for s in strategies}


def by_hand(plan: Plan, slower: float, steps: int = 2) -> StepTrace:
    """A step in which everything takes ``slower`` times what is predicted, on both ranks alike; the first one far longer."""
    stage, events = plan.estimate.stages[0], []
    exchanged = stage.forward_communication_s
    for rank in (0, 1):
        for step in range(1, steps + 1):
            factor = 100.0 if step == 1 else slower
            at = 10.0 * step
            for m in range(plan.micro_batches):
                events.append(Event(rank, step, "forward", at, factor * stage.forward_s, 0, m))
                events.append(Event(rank, step, "communication", at, factor * exchanged))
                events.append(Event(rank, step, "backward", at + 3, factor * stage.backward_s, 0, m))
                events.append(Event(rank, step, "communication", at + 3, factor * stage.backward_communication_s))
                at += 0.5
            events.append(Event(rank, step, "gradient reduction", at + 5, factor * stage.gradient_sync_per_step_s))
            events.append(Event(rank, step, "optimizer step", at + 6, factor * stage.optimizer_per_step_s))
            events.append(Event(rank, step, "step", 10.0 * step, factor * plan.objective_s))
    return StepTrace(plan, "here", Corrections(), tuple(events))


@pytest.mark.gloo
@pytest.mark.parametrize("strategy", ["tp", "ddp mb=2"])
def test_what_is_twice_as_slow_is_priced_at_twice(plans: dict[str, Plan], strategy: str) -> None:
    trace = by_hand(plans[strategy], 2.0)
    found = corrected(trace, Corrections())
    for name in ("forward", "backward", "update", "communication"):
        assert getattr(found, name) == pytest.approx(2.0, rel=1e-3), name
    again = corrected(by_hand(plans[strategy], 8.0), replace(found, runs=1))
    assert again.runs == 2 and again.forward == pytest.approx(4.0, rel=1e-3)  # the geometric mean of both runs
    earlier = replace(trace, corrections=Corrections(3.0, 1.0, 1.0, 1.0, runs=1))
    assert corrected(earlier, Corrections()).forward == pytest.approx(6.0, rel=1e-3)  # priced at 3 times then


@pytest.mark.gloo
def test_a_trace_comes_back_from_its_text(plans: dict[str, Plan]) -> None:
    trace = by_hand(plans["tp"], 2.0)
    again = StepTrace.parse(trace.to_json())
    assert (again.plan, again.machine, again.corrections) == (trace.plan, trace.machine, trace.corrections)
    for one, two in zip(trace.events, again.events, strict=True):
        assert (one.rank, one.step, one.what, one.stage, one.micro_batch) == (
            two.rank, two.step, two.what, two.stage, two.micro_batch,
        )  # fmt: skip
        assert two.seconds == pytest.approx(one.seconds, abs=1e-9)
    events = json.loads(trace.to_json())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"} and min(e["ts"] for e in events if e["ph"] == "X") == 0


@pytest.mark.gloo
def test_what_cannot_be_used_is_refused(plans: dict[str, Plan], tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    with pytest.raises(BadInput, match="cannot read"):
        planner.calibrate(tmp_path / "none.json")
    for text in ("", "{}", "[1]", '{"meshwright": {"format": 1}, "traceEvents": []}'):
        file.write_text(text)
        with pytest.raises(BadInput, match="no trace of training steps.*--trace"):
            planner.calibrate(file)
    with pytest.raises(BadInput, match="ZeRO-3"):
        parts(by_hand(plans["fsdp"], 1.0))
    with pytest.raises(BadInput, match="no whole training step"):
        parts(replace(by_hand(plans["tp"], 1.0), events=()))
    file.write_text(by_hand(plans["tp"], 1.0).to_json())
    with pytest.raises(BadInput, match="another machine"):
        planner.calibrate(file)
    machine, _ = priced_with(2)
    elsewhere = replace(by_hand(plans["tp"], 1.0), machine=machine, plan=replace(plans["tp"], cluster="dgx-h100"))
    file.write_text(elsewhere.to_json())
    with pytest.raises(BadInput, match="priced for dgx-h100"):
        planner.calibrate(file)


def test_where_a_trace_cannot_be_written_no_step_is_taken(tmp_path: Path) -> None:
    missing = tmp_path / "no" / "trace.json"
    with pytest.raises(BadInput, match="there is no folder"):
        require_folder_of(missing)
    with pytest.raises(BadInput, match="it is a folder"):
        require_folder_of(tmp_path)
    require_folder_of(tmp_path / "trace.json")
    done = CliRunner().invoke(cli, ["run", "examples.command_line:small_gpt", "--gpus", "2", "--trace", str(missing)])
    assert done.exit_code != 0 and "there is no folder" in str(done.exception) + done.output


def test_a_recorder_records_while_it_is_active() -> None:
    recorder = Recorder(torch.device("cpu"))
    with recorder.span("forward"):
        pass
    assert recorder.taken() == []
    recorder.active = True
    with recorder.span("step"), recorder.span("forward", 1, 2):
        pass
    outer, inner = recorder.taken()
    assert (outer["what"], inner["what"], inner["stage"], inner["micro_batch"]) == ("step", "forward", 1, 2)
    assert outer["seconds"] >= inner["seconds"] >= 0 and recorder.taken() == []
