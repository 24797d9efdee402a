"""Times operators, collectives and the optimizer's step on one rank, while all other ranks do the same.

An operator is timed as the program of a stage runs it: its line of source (planner.lower.source), on tensors of its local
shapes, with autograd recording. It runs on several sets of operands in turn, so that they come out of memory as often as in a
step, and one call of autograd goes back through all of them. A window gives seconds of one call, forward and backward.
A collective is timed between products of matrices, so that ranks meet at it as unevenly, and find caches as cold, as they do
in a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from planner.ir.program import PREAMBLE
from runtime.collectives import Axis, convert
from runtime.device import synchronize

WINDOWS, WINDOW_S = 4, 0.01
# Operands in turn: as many sets as take this much memory together, more than caches hold, and this long, within limits.
SETS_BYTES, SETS_S, FEWEST_SETS, MOST_SETS = 2**27, 0.04, 2, 32
BETWEEN = 192  # rows and columns of the product between two collectives
# How a collective is spelled as a conversion of a tensor [n, k].
CONVERSIONS = {
    "all_reduce": "P:R -> R:R", "all_gather": "S(0):S(0) -> R:P", "reduce_scatter": "P:R -> S(0):S(0)",
    "all_to_all": "S(0):S(0) -> S(1):S(1)",
}  # fmt: skip
UPDATED_TENSORS = {"many": (32, 64), "large": (4, 2**19)}  # how many, elements of each

Windows = list[float]


class Timer:
    """Every method is called on all ranks at once."""

    REMOTE = frozenset({"operator", "collective", "update"})

    def __init__(self, rank: int, world_size: int, device: torch.device, timeout_s: float) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self._axes: dict[int, Axis] = {}

    def operator(self, expression: str, operands: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Seconds of a call, ``forward`` and ``backward``, of each window; or ``refused``: why it does not run.

        ``expression``: of tensors x0, x1, ...; ``operands``: their shape, dtype, whether they need gradients, and below what
        integers lie.
        """
        try:
            sets, run = self._prepared(expression, operands)
            forward, backward = self._call(sets, run)
        except Exception as error:  # alike on all ranks, as their calls are
            return {"refused": f"{type(error).__name__}: {error}"}
        result: dict[str, Any] = {"forward": [], "backward": []}
        for _ in range(WINDOWS):
            dist.barrier()
            forward = backward = 0.0
            calls = 0
            while forward + backward < WINDOW_S:
                took = self._call(sets, run)
                forward, backward, calls = forward + took[0], backward + took[1], calls + len(sets)
            result["forward"].append(forward / calls)
            result["backward"].append(backward / calls)
        return result

    def collective(self, kind: str, size_bytes: int, group_size: int) -> Windows:
        """Seconds of one collective (costmodels.collectives) of ``size_bytes`` on all groups of neighbours at once."""
        axis = self._axis(group_size)
        run = self._sending(axis, size_bytes) if kind == "send" else self._converting(axis, kind, size_bytes)
        a, b = (torch.randn(BETWEEN, BETWEEN, device=self.device) for _ in range(2))
        seconds, calls = [], 8 if size_bytes < 2**20 else 2
        for _ in range(WINDOWS + 1):
            dist.barrier()
            total_s = 0.0
            for _ in range(calls):
                torch.mm(a, b)
                synchronize(self.device)
                start_s = time.perf_counter()
                run()
                synchronize(self.device)
                total_s += time.perf_counter() - start_s
            seconds.append(total_s / calls)
        return seconds[1:]

    def update(self, optimizer: str, options: Mapping[str, Any], sharded: bool, which: str) -> Windows:
        """Seconds of a step of torch.optim's ``optimizer`` on UPDATED_TENSORS[``which``] of float32 on this rank."""
        count, elements = UPDATED_TENSORS[which]
        mesh = init_device_mesh(self.device.type, (self.world_size,)) if sharded else None
        parameters = []
        for _ in range(count):
            pair = [torch.rand(elements, device=self.device) for _ in range(2)]
            if mesh is not None:
                pair = [DTensor.from_local(x, mesh, [Shard(0)]) for x in pair]
            parameter = torch.nn.Parameter(pair[0])
            parameter.grad = pair[1]
            parameters.append(parameter)
        made = getattr(torch.optim, optimizer)(parameters, **options)
        made.step()
        seconds = []
        for _ in range(WINDOWS):
            dist.barrier()
            steps, passed_s, start_s = 0, 0.0, time.perf_counter()
            while passed_s < WINDOW_S:
                made.step()
                synchronize(self.device)
                steps, passed_s = steps + 1, time.perf_counter() - start_s
            seconds.append(passed_s / steps)
        return seconds

    # --- operators ----------------------------------------------------------------------------------------------------

    def _prepared(
        self, expression: str, operands: Sequence[Mapping[str, Any]]
    ) -> tuple[list[list[torch.Tensor]], Callable[..., Any]]:
        alone = {"tp": Axis("tp"), "dp": Axis("dp"), "device": self.device, "rng": torch.zeros(3, dtype=torch.int64)}
        namespace: dict[str, Any] = {"__name__": "timed", **alone}
        names = ", ".join(f"x{i}" for i in range(len(operands)))
        exec(compile(f"{PREAMBLE}\n\ndef run({names}):\n    return {expression}\n", "<timed>", "exec"), namespace)
        first = [self._operand(**operand) for operand in operands]
        self._call([first], namespace["run"])
        once_s = sum(self._call([first], namespace["run"]))
        size = sum(x.numel() * x.element_size() for x in first) or 1
        count = max(FEWEST_SETS, min(MOST_SETS, SETS_BYTES // size, int(SETS_S / once_s)))
        return [first, *([self._operand(**o) for o in operands] for _ in range(count - 1))], namespace["run"]

    def _operand(self, shape: Sequence[int], dtype: str, needs_grad: bool, below: int) -> torch.Tensor:
        kind = getattr(torch, dtype)
        if kind.is_floating_point or kind.is_complex:
            return torch.rand(tuple(shape), device=self.device).to(kind).requires_grad_(needs_grad)
        return torch.randint(0, max(below, 1), tuple(shape), device=self.device).to(kind)

    def _call(self, sets: list[list[torch.Tensor]], run: Callable[..., Any]) -> tuple[float, float]:
        """Seconds of a call on every set of operands, and of going back through all of them."""
        start_s = time.perf_counter()
        results = [run(*operands) for operands in sets]
        synchronize(self.device)
        forward_s = time.perf_counter() - start_s
        wanted = [x for operands in sets for x in operands if x.requires_grad]
        made = [x for result in results for x in (result if isinstance(result, tuple | list) else (result,))]
        roots = [x for x in made if isinstance(x, torch.Tensor) and x.requires_grad]
        if not wanted or not roots:
            return forward_s, 0.0
        gradients = [torch.ones_like(x) for x in roots]
        synchronize(self.device)
        start_s = time.perf_counter()
        torch.autograd.grad(roots, wanted, gradients, allow_unused=True)
        synchronize(self.device)
        return forward_s, time.perf_counter() - start_s

    # --- collectives --------------------------------------------------------------------------------------------------

    def _axis(self, size: int) -> Axis:
        """This rank's group of ``size`` neighbours. All ranks make the same groups."""
        if size not in self._axes:
            for first in range(0, self.world_size, size):
                members = list(range(first, first + size))
                group = dist.new_group(members)
                if self.rank in members:
                    self._axes[size] = Axis("tp", size, self.rank - first, group)
        return self._axes[size]

    def _converting(self, axis: Axis, kind: str, size_bytes: int) -> Callable[[], object]:
        text = CONVERSIONS[kind]
        rows, columns = axis.size, max(size_bytes // 4 // axis.size // axis.size, 1) * axis.size
        held = rows if text.startswith("P") else 1
        x = torch.randn(held, columns, device=self.device, requires_grad=True)
        return lambda: convert(x, axis, text)

    def _sending(self, axis: Axis, size_bytes: int) -> Callable[[], object]:
        message, other = (torch.zeros(max(size_bytes // 4, 1), device=self.device) for _ in range(2))

        def run() -> None:
            actions = []
            if axis.index < axis.size - 1:
                actions.append(dist.P2POp(dist.isend, message, self.rank + 1, axis.group))
            if axis.index > 0:
                actions.append(dist.P2POp(dist.irecv, other, self.rank - 1, axis.group))
            for request in dist.batch_isend_irecv(actions):
                request.wait()

        return run
