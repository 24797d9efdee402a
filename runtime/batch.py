"""A rank's share of the global batch: rows of its dp coordinate, then micro-batches.

The rows are dealt over the dp ranks in order, and a rank's rows over its micro-batches, as evenly as can be
(planner.ir.mesh.deal). Inputs that are not batched go whole to every micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from planner.errors import BadInput
from planner.ir.mesh import deal
from planner.ir.program import RNG, InputSpec, Program
from runtime.collectives import Axis

Keywords = dict[str, torch.Tensor]


def micro_batches(
    program: Program, names: Iterable[str], batch: Mapping[str, torch.Tensor], dp: Axis, device: torch.device, step: int
) -> list[Keywords]:
    """The inputs ``names`` of each micro-batch on ``device``; ``rng`` among them stays on the CPU.

    Raises BadInput when an input is missing or has another shape or dtype than the program was made for.
    """
    specs = {spec.name: spec for spec in program.inputs}
    result: list[Keywords] = [{} for _ in range(program.micro_batches)]
    for name in names:
        if name == RNG:
            for i, keywords in enumerate(result):
                keywords[RNG] = torch.tensor([program.seed, step, i], dtype=torch.int64)
            continue
        spec = specs[name]
        whole = _checked(spec, batch)
        if not spec.batched:
            moved = whole.to(device, non_blocking=True)
            for keywords in result:
                keywords[name] = moved
            continue
        dealt = deal(whole.shape[0], dp.size)
        mine = whole.narrow(0, sum(dealt[: dp.index]), dealt[dp.index]).to(device, non_blocking=True)
        for keywords, rows in zip(result, mine.split(deal(dealt[dp.index], len(result))), strict=True):
            keywords[name] = rows
    return result


def check_batch(program: Program, batch: Mapping[str, torch.Tensor]) -> None:
    """Raises BadInput when an input of ``program`` is missing or has another shape or dtype."""
    for spec in program.inputs:
        _checked(spec, batch)


def fits(program: Program, batch: Mapping[str, torch.Tensor]) -> bool:
    """Whether the shapes in ``batch`` are those ``program`` was made for."""
    return all(spec.name in batch and tuple(batch[spec.name].shape) == spec.shape for spec in program.inputs)


def _checked(spec: InputSpec, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if spec.name not in batch:
        raise BadInput(f"the batch lacks {spec.label} ({spec.name}). Pass inputs of the same form as the example.")
    tensor = batch[spec.name]
    dtype = getattr(torch, spec.dtype)
    if tuple(tensor.shape) != spec.shape or tensor.dtype != dtype:
        raise BadInput(
            f"{spec.label} is {tensor.dtype} {list(tensor.shape)}; the plan is for {dtype} {list(spec.shape)}. "
            "Pass batches of that shape, or plan again with an example of the new one."
        )
    return tensor.detach()
