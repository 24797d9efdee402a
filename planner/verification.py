"""A model under plans, compared with itself on one device: from the same weights and batch, tensor by tensor.

The single-device run is made once and serves every strategy; so do the local ranks, which load one program after another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from planner.diagnosis import backward_order, diagnose
from planner.equality import TOLERANCES, coarsest, largest_entry, loss_error, relative_errors
from planner.errors import BadInput, Infeasible, InvalidPlan, MeshwrightError, OutOfTime
from planner.inputs import BatchForm
from planner.ir.graph import MODULE, RECURRENT, Graph, Node
from planner.ir.plan import Plan
from planner.lower import lower
from planner.parallel import Parallel
from planner.report.verification import Cause, ComparedTensor, Verification
from planner.single_device import (
    OptimizerFactory,
    SingleDevice,
    borrowed,
    dropout_modules_off,
    train_on_one_device,
    without_dropout,
)
from planner.trace import Batch, Traced, tensors_by_target
from runtime.launch import LocalRanks

# Of plain gradient descent: the largest entry of all gradients moves a weight by this share of the largest weight.
LARGEST_MOVE = 1e-2
# AdamW divides a gradient by its own size: where it is zero but for rounding, its default eps of 1e-8 would blow that up.
ADAM_EPS = 1e-4
LOCATED = ("tracing", "sharding")
REFUSALS = (BadInput, InvalidPlan, Infeasible, OutOfTime)


@dataclass(frozen=True)
class Case:
    """What is verified. ``batch``: with values. ``dtype``: that model and batch are cast to, if any."""

    name: str
    model: torch.nn.Module
    traced: Traced
    batch: Batch
    loss_fn: Callable[..., torch.Tensor] | None
    dtype: torch.dtype | None
    dropped: tuple[str, ...]


class Verifier:
    """Compares plans of one model with one device. A context manager: leaving it stops the ranks.

    ``tolerance``: None for that of the least precise dtype (planner.equality). ``train_with``: the optimizer; None for
    AdamW in float64, else gradient descent with momentum, because AdamW divides a gradient by its own size, so that an
    entry that is zero but for rounding moves its weight by a whole step in a random direction (in float64: see ADAM_EPS).
    """

    def __init__(
        self,
        case: Case,
        steps: int,
        tolerance: float | None,
        train_with: OptimizerFactory | None,
        start: Callable[[int], LocalRanks],
    ) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise BadInput(f"steps={steps!r}; pass a whole number of at least 1")
        if tolerance is not None and not tolerance > 0:
            raise BadInput(f"tolerance={tolerance!r}; pass a positive number, relative to a tensor's largest entry")
        _refuse_random(case.traced.graph)
        self.case, self.steps = case, steps
        values = case.traced.graph.values.values()
        self.dtype = coarsest(value.dtype for value in values if value.differentiable)
        self.tolerance = TOLERANCES[self.dtype] if tolerance is None else tolerance
        self._start = start
        self._ranks: LocalRanks | None = None
        self.optimizer, self.optimizer_name = self._choose_optimizer(train_with)
        self.reference = self._on_one_device(self.optimizer, steps)

    def check(self, strategy: str, plan: Plan) -> Verification:
        """Run ``plan`` and compare. Raises what lowering and running raise."""
        program = lower(self.case.traced.graph, plan)
        parallel = Parallel(
            self.case.model, plan, program, BatchForm.of(self.case.batch), start=lambda: self._started(plan.mesh.size)
        )
        with dropout_modules_off(self.case.model) if self._has_modules else nullcontext():
            found = self._under_plan(parallel)
        compared = self._compared(found)
        result = Verification(
            self.case.name,
            strategy,
            "equal",
            plan.configuration,
            self.dtype,
            self.tolerance,
            self.steps,
            self.optimizer_name,
            compared,
            notes=(*self._notes(), *self.case.traced.graph.notes),
        )
        first = result.first
        if first is None:
            return result
        return replace(
            result, outcome="unequal", cause=self._cause(plan, first.kind, first.name.partition(", step")[0])
        )

    def outcome(self, strategy: str, make_plan: Callable[[], Plan]) -> Verification:
        """``check``, with what is raised as an outcome: 'refused' before anything ran, or 'failed'."""
        failed = Verification(self.case.name, strategy, "failed")
        plan = None
        try:
            plan = make_plan()
            return self.check(strategy, plan)
        except REFUSALS as error:
            return replace(failed, outcome="refused", reason=str(error))
        except MeshwrightError as error:
            failed = replace(failed, reason=str(error))
        except Exception as error:
            failed = replace(failed, reason=f"{type(error).__name__}: {error}")
        self.close()
        if plan is None:
            return failed
        cause = self._cause(plan, "loss", "step 1")
        return replace(failed, configuration=plan.configuration, cause=cause if cause.where in LOCATED else None)

    def _cause(self, plan: Plan, kind: str, name: str) -> Cause:
        graph = self.case.traced.graph
        with without_dropout():
            return diagnose(graph, plan, self._leaves(), self.reference, (kind, name), self.tolerance, self.case.model)

    @property
    def _has_modules(self) -> bool:
        """Whether modules of the user's run as they are, in the ranks' processes."""
        return any(node.op == MODULE for node in self.case.traced.graph.nodes)

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the two runs -------------------------------------------------------------------------------------------------

    def _on_one_device(self, optimizer: OptimizerFactory, steps: int) -> SingleDevice:
        model = self.case.model
        with without_dropout(), borrowed(model, self.case.dtype):
            return train_on_one_device(model, self.case.batch, self.case.loss_fn, optimizer, steps)

    def _under_plan(self, parallel: Parallel) -> SingleDevice:
        first = parallel.train([self.case.batch], self.optimizer, steps=1, progress=False)
        gradients = parallel.gradients()  # of the step: they are dropped before the next
        buffers = parallel.buffers()
        rest = parallel.train([self.case.batch], steps=self.steps - 1, progress=False) if self.steps > 1 else []
        state = parallel.state_dict()
        names = [name for name, _ in self.case.model.named_parameters()]
        return SingleDevice(
            (*first, *rest), gradients, buffers, {name: state[name] for name in names}, parallel.buffers()
        )

    def _started(self, count: int) -> LocalRanks:
        if self._ranks is not None and (self._ranks.closed or self._ranks.n != count):
            self.close()
        if self._ranks is None:
            self._ranks = self._start(count)
        return self._ranks

    def _choose_optimizer(self, given: OptimizerFactory | None) -> tuple[OptimizerFactory, str]:
        if given is not None:
            return given, type(given([torch.nn.Parameter(torch.zeros(1))])).__name__
        if self.dtype == "float64":
            return (lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=ADAM_EPS)), "AdamW"
        probe = self._on_one_device(lambda parameters: torch.optim.SGD(parameters, lr=0.0), 1)
        weights = max((largest_entry(p) for p in probe.parameters.values() if p is not None), default=1.0)
        gradients = max((largest_entry(g) for g in probe.gradients.values() if g is not None), default=1.0)
        rate = LARGEST_MOVE * (weights or 1.0) / (gradients or 1.0)
        return (lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=0.9)), "SGD with momentum"

    # --- comparison ---------------------------------------------------------------------------------------------------

    def _compared(self, found: SingleDevice) -> tuple[ComparedTensor, ...]:
        truth, graph = self.reference, self.case.traced.graph
        rounding = max(1e-6, self.tolerance / 10)
        written = {leaf.target for leaf in graph.leaves if leaf.name in dict(graph.writes)}
        losses = [
            ComparedTensor("loss", f"step {i + 1}", loss_error(a, b))
            for i, (a, b) in enumerate(zip(found.losses, truth.losses, strict=True))
        ]
        gradients = relative_errors(found.gradients, truth.gradients, rounding)
        order = {name: i for i, name in enumerate(backward_order(graph))}
        ordered = sorted(gradients, key=lambda name: order.get(name, len(order)))
        first_buffers = {
            name: error
            for name, error in relative_errors(found.buffers, truth.buffers, rounding).items()
            if name in written
        }
        buffers = relative_errors(found.last_buffers, truth.last_buffers, rounding)
        parameters = relative_errors(found.parameters, truth.parameters, rounding)
        last = f", step {self.steps}"
        return (
            losses[0],
            *(ComparedTensor("buffer", f"{name}, step 1", error) for name, error in first_buffers.items()),
            *(ComparedTensor("gradient", name, gradients[name]) for name in ordered),
            *losses[1:],
            *(ComparedTensor("parameter", f"{name}{last}", error) for name, error in parameters.items()),
            *(ComparedTensor("buffer", f"{name}{last}", error) for name, error in buffers.items()),
        )

    def _leaves(self) -> dict[str, torch.Tensor]:
        """The values of the graph's leaves, by name."""
        graph = self.case.traced.graph
        states = {leaf.target: leaf for leaf in graph.leaves if leaf.kind != "input"}
        found = {
            states[target].name: tensor.detach().to("cpu", getattr(torch, states[target].value.dtype), copy=True)
            for target, tensor in tensors_by_target(self.case.model, states).items()
        }
        return found | input_tensors(self.case.traced, self.case.batch)

    def _notes(self) -> tuple[str, ...]:
        notes = []
        if self.case.dropped:
            notes.append(
                "dropout was switched off in both runs: on shards its masks are others than on one device, by design"
            )
        main = self.case.dtype or next((p.dtype for p in self.case.model.parameters()), torch.float32)
        if main == torch.float64 and self.dtype != "float64":
            notes.append(f"the model computes in {self.dtype} inside, which sets what is allowed")
        return tuple(notes)


def input_tensors(traced: Traced, batch: Batch) -> dict[str, torch.Tensor]:
    """The values of the graph's inputs, by name."""
    arguments = (batch.args, dict(batch.kwargs), batch.target)
    by_path: dict[str, Any] = {
        pytree.keystr(path): value for path, value in pytree.tree_flatten_with_path(arguments)[0]
    }
    dtypes: Mapping[str, str] = {leaf.name: leaf.value.dtype for leaf in traced.graph.leaves}
    return {
        name: by_path[path].detach().to("cpu", getattr(torch, dtypes[name]))
        for name, path in traced.input_paths.items()
        if name in dtypes
    }


def dropout_off(graph: Graph) -> tuple[Graph, tuple[str, ...]]:
    """``graph`` whose dropout drops nothing, node for node, and the operators that would have dropped something.

    A plan for ``graph`` fits it, but for the digest.
    """
    dropped = [node.op for node in graph.nodes if _probability(node)]
    if not dropped:
        return graph, ()
    return replace(graph, nodes=tuple(map(_quiet, graph.nodes))), tuple(dropped)


def _place(node: Node) -> int:
    """Where ``node`` takes its probability of dropping: an index of its args; -1 where it takes none there."""
    if node.base in RECURRENT:
        return 5 if node.op.endswith(".input") else 6
    return {"dropout": 1, "attention_with_dropout": 4}.get(node.op, -1)


def _probability(node: Node) -> float:
    place = _place(node)
    if place < 0 or not node.is_random:
        return 0.0
    return float(node.args[place] if place < len(node.args) else dict(node.kwargs).get("dropout_p", 0.0))


def _quiet(node: Node) -> Node:
    place = _place(node)
    if not _probability(node):
        return node
    if place < len(node.args):
        return replace(node, args=(*node.args[:place], 0.0, *node.args[place + 1 :]))
    return replace(node, kwargs=tuple((k, 0.0 if k == "dropout_p" else v) for k, v in node.kwargs))


def drawing(graph: Graph) -> Node | None:
    """The first node that draws random numbers, whatever it does with them."""
    for node in graph.nodes:
        draws = node.is_random if node.op != MODULE else bool(dict(node.kwargs).get("draws", False))
        if draws and not (_place(node) >= 0 and not _probability(node)):
            return node
    return None


def _refuse_random(graph: Graph) -> None:
    node = drawing(graph)
    if node is not None:
        raise BadInput(
            f"operator {node.op} in {node.module or 'the model'} draws random numbers, others on shards than on one device, "
            "so there is nothing to compare; pass what it draws as an input, or switch it off for this check"
        )
