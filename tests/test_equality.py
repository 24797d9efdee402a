"""Training under every strategy equals single-device training.

Six models, ten strategies, 4 ranks (and 8 for the GPT): loss and every gradient in float32 to 1e-5, and in float64 to 1e-9
together with parameters, buffers and losses of 3 AdamW steps. In float64 the Hugging Face models are compared with their
traced graph, whose casts to float32 are widened for the test.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import pytest
import torch

from costmodels.hardware import load_cluster
from planner.equality import largest_error
from planner.inputs import BatchForm
from planner.interpreter import widened
from planner.ir.plan import Plan
from planner.ir.verify import verify_plan
from planner.lower import lower
from planner.parallel import Parallel
from planner.solve.configuration import Evaluator
from planner.solve.problem import Problem
from planner.solve.search import search
from planner.strategies import plan_by_hand
from planner.trace import Batch, Traced
from runtime.launch import LocalRanks
from tests.models import MODELS, Case
from tests.reference import LEARNING_RATE, STEPS, Reference, by_graph, by_module, traced

pytestmark = pytest.mark.gloo

NAMES = ("gpt_tied", "resnet_digits", "hf_llama", "hf_gpt2", "hf_bert", "hf_vit")
STRATEGIES = ("ddp", "fsdp", "tp", "model", "gpipe", "1f1b", "dp2.tp2", "pp2.dp2", "pp2.tp2", "auto")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}
CLUSTER = "dgx-a100-80gb"


@dataclass(frozen=True)
class Setting:
    case: Case
    traced: Traced
    reference: Reference


@lru_cache(maxsize=2)
def setting(name: str, dtype: torch.dtype) -> Setting:
    case = MODELS[name](dtype)
    found = traced(case)
    if name.startswith("hf_") and dtype == torch.float64:
        found = replace(found, graph=widened(found.graph))
        return Setting(case, found, by_graph(case, found))
    return Setting(case, found, by_module(MODELS[name](dtype)))


def make_plan(here: Setting, strategy: str, ranks: int) -> Plan:
    cluster = load_cluster(CLUSTER, ranks)
    problem = Problem("model", here.traced.graph, cluster, "adamw", "float32", cluster.device.memory_bytes)
    plan = search(problem) if strategy == "auto" else plan_by_hand(Evaluator(problem), strategy)
    verify_plan(plan, here.traced.graph)
    return plan


def check(here: Setting, strategy: str, dtype: torch.dtype, ranks: int = 4) -> None:
    plan = make_plan(here, strategy, ranks)
    case, truth, tolerance = here.case, here.reference, TOLERANCE[dtype]
    program = lower(here.traced.graph, plan)
    batch = Batch(case.inputs, case.kwargs, case.target)
    form = BatchForm.of(batch)
    with Parallel(case.model, plan, program, form, start=lambda: LocalRanks.start(ranks)) as parallel:
        loss = parallel.forward_backward(*case.inputs, target=case.target, **case.kwargs)
        assert loss == pytest.approx(truth.loss, rel=tolerance), plan.configuration
        error, tensor = largest_error(parallel.gradients(), truth.gradients)
        assert error <= tolerance, f"gradient of {tensor} under {plan.configuration}"
        if dtype == torch.float32:
            return
        # BatchNorm statistics moved in the first pass too: start again from the initial weights and buffers.
        parallel.close()
    with Parallel(case.model, plan, program, form, start=lambda: LocalRanks.start(ranks)) as parallel:
        losses = parallel.train(
            [batch], lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE), STEPS, progress=False
        )
        assert losses == pytest.approx(truth.losses, rel=tolerance)
        error, tensor = largest_error(parallel.state_dict(), truth.state)
        assert error <= tolerance, f"{tensor} after {STEPS} steps under {plan.configuration}"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=("fp32", "fp64"))
@pytest.mark.parametrize("name", NAMES)
def test_equals_single_device(name: str, dtype: torch.dtype, strategy: str) -> None:
    check(setting(name, dtype), strategy, dtype)


@pytest.mark.parametrize("strategy", ("pp2.dp2.tp2", "pp2.dp2.tp2 mb=2 zero=3 recompute=full schedule=1f1b"))
def test_three_axes_on_eight_ranks(strategy: str) -> None:
    check(setting("gpt_tied", torch.float64), strategy, torch.float64, ranks=8)


@pytest.mark.parametrize("name", ("gpt_tied", "hf_llama"))
@pytest.mark.parametrize(
    "strategy",
    (
        "dp2.tp2 mb=4 recompute=full",
        "dp4 mb=2 zero=3 recompute=full",
        "dp2.tp2 mb=4 zero=3",
        "pp2.tp2 mb=1",
        "pp2.dp2 mb=2 zero=3 v=2",
        "pp2.tp2 mb=4 schedule=zero-bubble v=2",
    ),  # fmt: skip
)
def test_options_of_the_grammar(name: str, strategy: str) -> None:
    check(setting(name, torch.float32), strategy, torch.float32)
