"""Single-device truth for the equality tests: the model itself, or its traced graph run whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from planner.interpreter import Result, run_whole
from planner.trace import Batch, Traced, tensors_by_target, trace
from tests.models import Case

LEARNING_RATE = 1e-3
STEPS = 3


@dataclass(frozen=True)
class Reference:
    """Loss and gradients of the first step; parameters, buffers and losses after STEPS steps of AdamW."""

    loss: float
    gradients: Mapping[str, torch.Tensor | None]
    losses: tuple[float, ...]
    state: Mapping[str, torch.Tensor]


def traced(case: Case) -> Traced:
    return trace(case.model, Batch(case.inputs, case.kwargs, case.target), case.loss_fn)


def input_tensors(case: Case, found: Traced) -> dict[str, torch.Tensor]:
    arguments = (case.inputs, case.kwargs, case.target)
    by_path = {pytree.keystr(path): value for path, value in pytree.tree_flatten_with_path(arguments)[0]}
    return {name: by_path[path] for name, path in found.input_paths.items()}


def by_module(case: Case) -> Reference:
    """The user's own training loop. Trains ``case.model`` in place."""
    parameters = dict(case.model.named_parameters())
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=LEARNING_RATE)
    gradients: dict[str, torch.Tensor | None] = {}
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = case.loss()
        loss.backward()
        losses.append(float(loss.detach()))
        if step == 0:
            gradients = {n: None if p.grad is None else p.grad.clone() for n, p in parameters.items()}
        optimizer.step()
    state = {name: t.detach().clone() for name, t in case.model.state_dict().items()}
    return Reference(losses[0], gradients, tuple(losses), state)


def by_graph(case: Case, found: Traced) -> Reference:
    """The traced graph run whole on one device."""
    graph = found.graph
    targets = {leaf.target: leaf for leaf in graph.leaves if leaf.kind != "input"}
    held = {t: x.detach().clone() for t, x in tensors_by_target(case.model, targets).items()}
    trained = {leaf.name: held[t].requires_grad_() for t, leaf in targets.items() if leaf.trainable}
    optimizer = torch.optim.AdamW(trained.values(), lr=LEARNING_RATE)
    inputs: dict[str, Any] = input_tensors(case, found)
    gradients: dict[str, torch.Tensor | None] = {}
    losses = []
    for step in range(STEPS):
        values = {leaf.name: held[t].detach() for t, leaf in targets.items()}
        result = run_whole(graph, {**values, **inputs})
        losses.append(float(result.loss))
        for name, parameter in trained.items():
            parameter.grad = result.gradients[name]
        for buffer, value in result.buffers.items():
            held[graph.leaf_by_name[buffer].target] = value
        if step == 0:
            gradients = {t: result.gradients[leaf.name] for t, leaf in targets.items() if leaf.trainable}
        optimizer.step()
    persistent = case.model.state_dict().keys()
    names = {name: t for t, leaf in targets.items() for name in (t, *leaf.aliases)}
    state = {name: held[t].detach() for name, t in names.items() if name in persistent}
    return Reference(losses[0], gradients, tuple(losses), state)


def assert_same(result: Result, reference: Result, tolerance: float) -> None:
    """Loss, gradients and buffers, each to ``tolerance`` of the largest entry of the reference's tensor."""
    _assert_close("loss", result.loss, reference.loss, tolerance)
    assert set(result.gradients) == set(reference.gradients)
    for name, expected in reference.gradients.items():
        found = result.gradients[name]
        assert (found is None) == (expected is None), f"gradient of {name}: {found} for {expected}"
        if found is not None and expected is not None:
            _assert_close(f"gradient of {name}", found, expected, tolerance)
    for name, expected in reference.buffers.items():
        _assert_close(f"buffer {name}", result.buffers[name], expected, tolerance)


def _assert_close(what: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype, f"{what}: {found.shape}, {expected.shape}"
    assert torch.isfinite(expected).all(), f"{what}: the reference is not finite"
    scale = max(expected.abs().max().item(), 1e-3) if expected.numel() else 1.0
    error = (found - expected).abs().max().item() / scale if expected.numel() else 0.0
    assert error <= tolerance, f"{what} differs by {error:.2e} of its largest entry"
