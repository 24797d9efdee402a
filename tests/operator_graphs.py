"""Operators and small models as graphs, with a value for each leaf."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from planner.ir.graph import Graph
from planner.normalise import prune
from planner.trace import Batch, tensors_by_target, trace
from tests.models import seeded

Function = Callable[..., Any]


class Traced(NamedTuple):
    graph: Graph
    tensors: dict[str, Tensor]


class Case(NamedTuple):
    """``function(*weights, *inputs)`` calls the operator. ``weights`` get gradients, ``inputs`` and ``buffers`` do not.

    ``op``: base name of the operator. ``cut``: names of the letters that 2 devices can cut.
    """

    op: str
    cut: str
    function: Function
    weights: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...] = ()


def from_model(model: nn.Module, batch: Batch, loss_fn: Callable[..., Tensor] | None = None) -> Traced:
    """The graph of ``model`` and the values of all its leaves: weights, buffers, constants and inputs."""
    found = trace(model, batch, loss_fn)
    states = [leaf for leaf in found.graph.leaves if leaf.kind != "input"]
    targets = tensors_by_target(model, [leaf.target for leaf in states])
    tensors = {leaf.name: targets[leaf.target].detach().clone() for leaf in states}
    arguments = (batch.args, dict(batch.kwargs), batch.target)
    at_path = {torch.utils._pytree.keystr(p): x for p, x in torch.utils._pytree.tree_flatten_with_path(arguments)[0]}
    tensors |= {leaf.name: at_path[leaf.target] for leaf in found.graph.leaves_of("input")}
    return Traced(found.graph, tensors)


class _Operator(nn.Module):
    """sum over results of sum (scale * result): every element of every result has a gradient of its own."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.function = case.function
        self.weights = nn.ParameterList(case.weights)
        for i, x in enumerate(case.inputs):
            self.register_buffer(f"input{i}", x)
        self.count = len(case.inputs)
        with seeded(1):
            results = _floating(case.function(*self.weights, *case.inputs))
            for i, result in enumerate(results):
                self.register_buffer(f"scale{i}", torch.randn(result.shape, dtype=torch.float64))

    def forward(self) -> Tensor:
        inputs = [getattr(self, f"input{i}") for i in range(self.count)]
        results = _floating(self.function(*self.weights, *inputs))
        losses = [(result * getattr(self, f"scale{i}")).sum() for i, result in enumerate(results)]
        return sum(losses[1:], losses[0])


def _floating(result: Any) -> list[Tensor]:
    results = list(result) if isinstance(result, tuple | list) else [result]
    return [x.double() for x in results]


class _All(nn.Module):
    def __init__(self, cases: Mapping[str, Case]) -> None:
        super().__init__()
        self.cases = nn.ModuleDict({f"case_{name}": _Operator(case) for name, case in cases.items()})

    def forward(self, x: Tensor) -> Tensor:
        losses = [operator() for operator in self.cases.values()]
        return sum(losses, x.sum())


def trace_cases(cases: Mapping[str, Case]) -> dict[str, Traced]:
    """A graph for each case. All are traced in one go, for speed, and taken apart by module."""
    with seeded(0):
        whole = from_model(_All(cases), Batch((torch.randn(8),), {}))
    found = {}
    for name in cases:
        nodes = [node for node in whole.graph.nodes if node.module == f"cases.case_{name}"]
        graph = prune(replace(whole.graph, loss=nodes[-1].name, writes=()))
        found[name] = Traced(graph, {leaf.name: whole.tensors[leaf.name] for leaf in graph.leaves})
    return found
