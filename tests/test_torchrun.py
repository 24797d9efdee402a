"""The same code under torchrun: every rank calls auto_parallelize, and each gets the same plan, weights and losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.models import Case, gpt_tied

pytestmark = pytest.mark.gloo

ROOT = Path(__file__).parent.parent
STRATEGIES = ("auto", "fsdp", "1f1b", "tp")
STEPS = 3

COMMON = """
import json
import os
import sys
from pathlib import Path

import torch

import planner
from tests.models import gpt_tied

rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])


def parallel(strategy, seed, **options):
    case = gpt_tied(torch.float64, seed=seed)
    batch = gpt_tied(torch.float64)
    made = planner.auto_parallelize(
        case.model, example_inputs=batch.inputs, loss_fn=batch.loss_fn, cluster="dgx-a100-80gb", strategy=strategy, **options
    )
    return made, batch
"""

TRAIN = """
found = {}
for strategy in STRATEGIES:
    made, batch = parallel(strategy, seed=rank)  # other weights on each rank: those of rank 0 count
    with made:
        losses = made.train([(batch.inputs, batch.target)], lambda ps: torch.optim.AdamW(ps, lr=1e-2), STEPS, progress=True)
        weights = made.state_dict()
    made, _ = parallel(strategy, seed=rank)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
    own = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        own.append(made.forward_backward(*batch.inputs, target=batch.target))
        gradients = made.gradients()
        made.clip_grad_norm(0.5)
        optimizer.step()
    torch.save({"weights": weights, "gradients": gradients, "own": made.state_dict()}, folder / f"{strategy}.{rank}.pt")
    found[strategy] = {"plan": made.plan.to_json(), "losses": losses, "own": own}
(folder / f"{rank}.json").write_text(json.dumps(found))
"""

FAIL = """
for strategy, options in (("dp3", {}), ("auto", {"memory_limit": 600_000})):
    try:
        parallel(strategy, seed=0, **options)
    except planner.errors.MeshwrightError as error:
        with (folder / f"{rank}.txt").open("a") as file:
            file.write(f"{type(error).__name__}: {error}\\n")
if rank == 0:
    def broken(*_, **__):
        raise ZeroDivisionError("a defect")
else:
    broken = print
parallel("auto", seed=0, progress=broken)
"""


OTHER_SIZES = """
found = {}
for strategy in ("fsdp", "pp2 mb=2"):
    made, batch = parallel(strategy, seed=rank)
    (tokens,), targets = batch.inputs, batch.target
    losses = [made.forward_backward(tokens[:rows], target=targets[:rows]) for rows in (8, 5, 8, 5)]
    try:
        made.forward_backward(tokens[:1], target=targets[:1])
    except planner.errors.BadInput as error:
        losses.append(str(error))
    found[strategy] = losses
(folder / f"{rank}.json").write_text(json.dumps(found))
"""


def torchrun(folder: Path, body: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(COMMON + f"STRATEGIES, STEPS = {STRATEGIES}, {STEPS}\n" + body)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
        str(folder),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)


def single(
    case: Case, optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer], max_norm: float | None
) -> list[float]:
    update, losses = optimizer(case.model), []
    for _ in range(STEPS):
        update.zero_grad()
        loss = case.loss()
        loss.backward()
        losses.append(loss.item())
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(case.model.parameters(), max_norm)
        update.step()
    return losses


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-9 * float(tensor.abs().max()), msg=name)


def test_ranks_of_torchrun_train_as_one_device(tmp_path: Path) -> None:
    done = torchrun(tmp_path, TRAIN)
    assert done.returncode == 0, done.stderr
    adamw, sgd = gpt_tied(torch.float64), gpt_tied(torch.float64)
    losses = single(adamw, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2), None)
    own = single(sgd, lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 0.5)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second  # plans and losses, to the last digit
    assert {json.loads(found["plan"])["strategy"] for found in first.values()} == set(STRATEGIES)
    for strategy, found in first.items():
        assert found["losses"] == pytest.approx(losses, rel=1e-9), strategy
        assert found["own"] == pytest.approx(own, rel=1e-9), strategy
        for rank in range(2):
            tensors = torch.load(tmp_path / f"{strategy}.{rank}.pt")
            close(tensors["weights"], adamw.model.state_dict())
            close(tensors["own"], sgd.model.state_dict())
            assert set(tensors["gradients"]) == {name for name, _ in sgd.model.named_parameters()}


def test_batches_of_other_sizes(tmp_path: Path) -> None:
    done = torchrun(tmp_path, OTHER_SIZES)
    assert done.returncode == 0, done.stderr
    case = gpt_tied(torch.float64)
    (tokens,), targets = case.inputs, case.target
    assert case.loss_fn is not None
    expected = [case.loss_fn(case.model(tokens[:rows]), targets[:rows]).item() for rows in (8, 5, 8, 5)]
    for rank in range(2):
        for losses in json.loads((tmp_path / f"{rank}.json").read_text()).values():
            assert losses[:4] == pytest.approx(expected, rel=1e-9)
            assert losses[4].startswith("a batch of 1 cannot be cut")


def test_an_error_in_planning_reaches_every_rank_and_ends_the_job(tmp_path: Path) -> None:
    done = torchrun(tmp_path, FAIL)
    assert done.returncode != 0
    first, second = ((tmp_path / f"{rank}.txt").read_text() for rank in range(2))
    assert first == second
    assert "BadInput: strategy 'dp3' is for 3 devices, but 2 are to be used" in first
    assert "Infeasible: GPT does not fit on 2 x dgx-a100-80gb with 600 kB each" in first
    assert "ZeroDivisionError: a defect" in done.stderr
    assert "planning failed on rank 0: ZeroDivisionError: a defect" in done.stderr
