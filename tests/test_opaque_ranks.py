"""Modules kept whole, on real ranks: every strategy equals one device, for batches that take other branches too."""

from __future__ import annotations

import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.equality import largest_error
from planner.parallel import Parallel
from tests.models import Case
from tests.opaque_models import another_batch, dropping, everything, rowwise

pytestmark = pytest.mark.gloo

TOLERANCE = 1e-9


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def parallel(case: Case, gpus: int, strategy: str, **options: Any) -> Parallel:
    return planner.auto_parallelize(
        case.model, gpus=gpus, example_inputs=case.inputs, loss_fn=case.loss_fn, cluster="dgx-a100-80gb",
        strategy=strategy, **options,
    )  # fmt: skip


def check(case: Case, made: Parallel) -> None:
    batches = [(case.inputs, case.target), another_batch(case)]
    model = deepcopy(case.model)
    optimizer = adamw(list(model.parameters()))
    losses = []
    with made:
        for (x,), y in batches * 2:
            optimizer.zero_grad()
            loss = case.loss_fn(model(x), y)  # type: ignore[misc]
            loss.backward()
            losses.append(loss.item())
            if len(losses) == 1:
                assert made.forward_backward(x, target=y) == pytest.approx(losses[0], rel=TOLERANCE)
                true = {name: p.grad for name, p in model.named_parameters()}
                error, where = largest_error(made.gradients(), true)
                assert error <= TOLERANCE, where
                made.close()
            optimizer.step()
    with again(made) as other:
        assert other.train(batches, adamw, 4, progress=False) == pytest.approx(losses, rel=TOLERANCE)
        error, where = largest_error(other.state_dict(), model.state_dict())
        assert error <= TOLERANCE, where


def again(made: Parallel) -> Parallel:
    """The same plan from the start: buffers moved in the first pass."""
    return Parallel(made._model, made.plan, made.program, made._form, start=made._start)


@pytest.mark.parametrize(
    ("gpus", "strategy"),
    [(2, "ddp"), (2, "fsdp"), (2, "tp"), (2, "pp2 mb=1 recompute=full"), (4, "dp2.tp2"), (4, "pp2.dp2")],
)
def test_modules_that_run_whole(gpus: int, strategy: str) -> None:
    case = everything()
    made = parallel(case, gpus, strategy)
    assert {spec.path for stage in made.program.stages for spec in stage.modules} == {
        "quantised", "branching", "experts", "hooked", "checkpointed",
    }  # fmt: skip
    check(case, made)


@pytest.mark.parametrize(("gpus", "strategy"), [(2, "pp2 mb=2"), (2, "fsdp"), (4, "dp2.tp2")])
def test_modules_that_treat_rows_alone_are_cut_with_the_batch(gpus: int, strategy: str) -> None:
    case = rowwise()
    made = parallel(case, gpus, strategy, samplewise=("quantised", "experts"))
    if made.plan.mesh.dp > 1:  # nothing is gathered
        assert "S(0) -> R" not in made.source()
    check(case, made)


def test_dropout_inside_is_the_same_on_every_rank() -> None:
    case, losses = dropping(), []
    for strategy in ("dp2", "tp2"):
        with parallel(case, 2, strategy) as made:
            losses.append(made.forward_backward(*case.inputs, target=case.target))
    assert losses[0] == pytest.approx(losses[1], rel=TOLERANCE)


SCRIPT = """
import sys
from pathlib import Path
import torch
import planner
from tests.opaque_models import everything

case = everything()
made = planner.auto_parallelize(
    case.model, example_inputs=case.inputs, loss_fn=case.loss_fn, cluster="dgx-a100-80gb", strategy="dp2"
)
case.model.eval()  # what the model becomes later does not matter
made.train([(case.inputs, case.target)], lambda ps: torch.optim.AdamW(ps, lr=1e-2), 2, progress=False)
weights = made.state_dict()
if torch.distributed.get_rank() == 0:
    torch.save(weights, Path(sys.argv[1]))
"""


def test_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    subprocess.run([*command, str(tmp_path / "weights.pt")], env=environment, check=True, timeout=200)
    case = everything()
    optimizer = adamw(list(case.model.parameters()))
    for _ in range(2):
        optimizer.zero_grad()
        case.loss().backward()
        optimizer.step()
    error, where = largest_error(torch.load(tmp_path / "weights.pt"), case.model.state_dict())
    assert error <= TOLERANCE, where


class Normed(nn.Module):
    """Parametrized weights, which torch does not pickle, in a module that cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.second = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if x.sum() > 0:
            x = x * 2
        return self.second(x)


@pytest.mark.parametrize("strategy", ["fsdp", "tp"])
def test_parametrized_weights_reach_the_ranks(strategy: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    found = planner.verify(
        Normed(), 2, strategy=strategy, example_inputs=(x,), example_target=y, loss_fn=nn.functional.mse_loss,
        cluster="dgx-a100-80gb",
    )  # fmt: skip
    assert found.equal, str(found)
