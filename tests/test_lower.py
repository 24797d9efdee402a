"""Lowering: the text of a stage reads as it should, and running it gives the model's numbers."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from planner.errors import InvalidPlan
from planner.ir.program import Program
from planner.lower import lower
from planner.solve.configuration import Evaluator
from planner.strategies import plan_by_hand
from planner.trace import Batch, Traced, tensors_by_target, trace
from runtime.collectives import Axis
from runtime.stage_module import build_stage
from runtime.state import fill
from tests.models import MODELS, Case
from tests.reference import input_tensors, traced
from tests.search_cases import cluster, problem

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("gpt_tied", "resnet_digits", "hf_llama", "hf_gpt2", "hf_bert", "hf_vit", "mlp")


@cache
def case_of(name: str) -> tuple[Case, Traced]:
    case = MODELS[name](torch.float64 if name in ("gpt_tied", "resnet_digits", "mlp") else torch.float32)
    return case, traced(case)


def program_of(name: str, strategy: str, ranks: int) -> tuple[Case, Traced, Program]:
    case, found = case_of(name)
    evaluator = Evaluator(problem(found.graph, cluster(ranks, link_bytes_per_s=1e11)))
    return case, found, lower(found.graph, plan_by_hand(evaluator, strategy))


def test_golden_text_of_a_stage() -> None:
    """The second stage of a GPT under pipeline and tensor parallelism, as a person would write it."""
    _, _, program = program_of("gpt_tied", "pp2.tp2 mb=2", 4)
    golden = GOLDEN / "gpt_pp2_tp2_stage1.txt"
    assert program.stages[1].source == golden.read_text()


@pytest.mark.parametrize("name", NAMES)
def test_running_the_text_gives_the_models_numbers(name: str, tmp_path: Path) -> None:
    """The source, written to a file and imported from it, computes the model's loss and gradients."""
    case, found, program = program_of(name, "ddp", 1)
    path = tmp_path / "stage.py"
    path.write_text(program.stages[0].source)
    spec = importlib.util.spec_from_file_location("written_stage", path)
    assert spec is not None and spec.loader is not None
    written = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(written)
    assert issubclass(written.Stage, torch.nn.Module)

    axes = {axis: Axis(axis) for axis in ("pp", "dp", "tp")}
    stage = build_stage(replace(program.stages[0], source=path.read_text()), axes, torch.device("cpu"))
    targets = {state.target for state in program.stages[0].states}
    fill(
        stage,
        {t: x.detach().clone() for t, x in tensors_by_target(case.model, targets).items()},
        axes,
        torch.device("cpu"),
    )
    inputs = input_tensors(case, found)
    (loss,) = stage(**{name: inputs[name] for name in program.stages[0].inputs})
    loss.backward()
    case.model.zero_grad()
    truth = case.loss()
    truth.backward()
    torch.testing.assert_close(loss, truth)
    for held in stage.held:
        if held.spec.trainable:
            expected = case.model.get_parameter(held.spec.target).grad
            torch.testing.assert_close(held.tensor.grad, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ("gpt_tied", "hf_llama"))
def test_equal_layers_share_one_class_and_run_in_a_loop(name: str) -> None:
    _, _, program = program_of(name, "tp", 2)
    source = program.stages[0].source
    classes = {segment.class_name for segment in program.stages[0].segments}
    assert len(classes) < len(program.stages[0].segments)
    assert "for i in range(" in source
    assert source.count("scaled_dot_product_attention") <= 2


@pytest.mark.parametrize("strategy", ("pp2.dp2.tp2 mb=2", "pp2.dp2.tp2 mb=2 zero=3 recompute=full"))
@pytest.mark.parametrize("name", NAMES)
def test_a_program_is_data_and_stages_fit_together(name: str, strategy: str) -> None:
    if name == "resnet_digits":
        strategy = strategy.replace("mb=2", "mb=1")
    _, _, program = program_of(name, strategy, 8)
    assert Program.from_dict(program.to_dict()) == program
    assert program.stages[0].receives == ()
    for before, after in zip(program.stages, program.stages[1:], strict=False):
        assert before.sends == after.receives
    for stage in program.stages:
        compile(stage.source, "stage", "exec")
        assert max(map(len, stage.source.splitlines())) < 140


def test_every_parameter_is_owned_once_and_tied_ones_are_known() -> None:
    case, _, program = program_of("gpt_tied", "pp2.tp2 mb=2", 4)
    holders: dict[str, list[int]] = {}
    for stage in program.stages:
        for state in stage.states:
            holders.setdefault(state.target, []).append(stage.index)
            assert state.tied_stages == tuple(sorted(state.tied_stages))
    assert set(holders) == {name for name, _ in case.model.named_parameters()}
    tied = {name for name, stages in holders.items() if len(stages) > 1}
    assert tied == {"token_embedding.weight"}


def test_a_strategy_the_operator_does_not_have_is_refused() -> None:
    case = MODELS["gpt_tied"](torch.float32)
    found = traced(case)
    made = problem(found.graph, cluster(2))
    plan = plan_by_hand(Evaluator(made), "tp")
    edited = tuple(replace(row, tp="nonsense") if row.op == "aten.linear.default" else row for row in plan.layouts)  # type: tuple[OperatorLayout, ...]
    with pytest.raises(InvalidPlan, match="strategy 'nonsense'"):
        lower(found.graph, replace(plan, layouts=edited))
    with pytest.raises(InvalidPlan, match="another model"):
        lower(found.graph, replace(plan, graph_digest="0" * 64))


class Teacher(nn.Module):
    """An input called x that the last stage reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            y = layer(y + x).tanh()
        return y.square().mean()


def test_an_input_keeps_its_name_beside_what_a_stage_receives() -> None:
    found = trace(Teacher(), Batch((torch.randn(8, 8),), {}))
    made = problem(found.graph, cluster(2))
    program = lower(found.graph, plan_by_hand(Evaluator(made), "model"))
    assert program.stages[1].inputs == ("x",)
    assert "def forward(self, x_1, *, x):" in program.stages[1].source
