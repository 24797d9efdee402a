"""A backward in two parts: gradients of what was received now, gradients of the weights later (zero bubble).

The graph that autograd recorded has, between the outputs and the inputs (what was received), a *trunk*: the nodes from
which an input can be reached. Weights hang on it by *branches*: nodes from which weights but no input can be reached.

    gradients_of_inputs     runs the trunk, without the branches, and keeps the gradient that came to each node a branch
                            leaves from (a *fork*)
    WeightGradients.run     runs the branches: each from its fork with the kept gradient, or from an output that isn't on
                            the trunk with the gradient of that output

A fork runs twice, but each time autograd computes only what is asked for: of a matmul, one of its two gradients.
Branches that meet (one weight used twice) run together; the trunk between their forks then runs again, with the kept
gradients put in at each fork, so that nothing counts twice. What results is what one backward gives, for any graph.

torch's own stage_backward_input and stage_backward_weight group weights by their forks, but miss groups that should be
one, leave out what isn't below a fork, and free graphs that overlapping groups still need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients = tuple[torch.Tensor | None, ...]


@dataclass
class _Group:
    """Branches that meet. ``kept``: of each fork, the gradients that came to it."""

    forks: list[Node] = field(default_factory=list)
    kept: dict[Node, Gradients] = field(default_factory=dict)
    outputs: list[tuple[GradientEdge, torch.Tensor]] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)


class WeightGradients:
    """The second part of a backward. Holds the graph until it ran."""

    def __init__(self, groups: Sequence[_Group]) -> None:
        self.groups = list(groups)

    def run(self) -> None:
        """Add to ``grad`` of every weight, as ``backward`` does."""
        while self.groups:
            group = self.groups.pop()
            found = self._run(group)
            for weight, gradient in zip(group.weights, found, strict=True):
                if gradient is None:
                    continue
                if weight.grad is None:
                    # It may be the gradient of something else too, and the next ones are added in place.
                    weight.grad = gradient.clone(memory_format=torch.contiguous_format)
                else:
                    weight.grad += gradient

    def _run(self, group: _Group) -> Gradients:
        edges, gradients = [edge for edge, _ in group.outputs], [gradient for _, gradient in group.outputs]
        for fork, kept in group.kept.items():
            for number, gradient in enumerate(kept):
                if gradient is not None:
                    edges.append(GradientEdge(fork, number))
                    gradients.append(gradient)
        if not edges:
            return (None,) * len(group.weights)
        several = len(group.kept) > 1
        handles = [fork.register_prehook(_replace_by(kept)) for fork, kept in group.kept.items() if several]
        try:
            targets = [get_gradient_edge(weight) for weight in group.weights]
            return torch.autograd.grad(edges, targets, gradients, retain_graph=True, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()


def gradients_of_inputs(
    outputs: Sequence[torch.Tensor],
    output_gradients: Sequence[torch.Tensor | None] | None,
    inputs: Sequence[Any],
    weights: Sequence[torch.Tensor],
) -> tuple[Gradients, WeightGradients]:
    """The gradient of each of ``inputs`` (None where there is none), and what is left to do for ``weights``.

    ``output_gradients`` None: the outputs are scalars with gradient 1. All ``inputs`` and ``weights`` that need gradients
    are leaves.
    """
    pairs = [
        (get_gradient_edge(x), torch.ones_like(x) if output_gradients is None else gradient)
        for x, gradient in zip(outputs, output_gradients or [None] * len(outputs), strict=True)
        if x.requires_grad
    ]
    roots = [(edge, gradient) for edge, gradient in pairs if gradient is not None]
    wanted = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    graph = _Graph([edge.node for edge, _ in roots])
    trunk = graph.leading_to({get_gradient_edge(x).node for x in wanted})
    of_node = {get_gradient_edge(w).node: w for w in weights if w.requires_grad}
    groups = _groups(graph, roots, trunk, graph.leading_to(set(of_node)), of_node)
    handles = [fork.register_prehook(_keep(group, fork)) for group in groups for fork in group.forks]
    try:
        reached = [(edge, gradient) for edge, gradient in roots if edge.node in trunk]
        found: Gradients = (None,) * len(wanted)
        if reached:
            targets = [get_gradient_edge(x) for x in wanted]
            edges, gradients = zip(*reached, strict=True)
            found = torch.autograd.grad(edges, targets, gradients, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    by_input = {id(x): gradient for x, gradient in zip(wanted, found, strict=True)}
    return tuple(by_input.get(id(x)) for x in inputs), WeightGradients(groups)


class _Graph:
    """The nodes that the outputs come from, each after those that need it (outputs first)."""

    def __init__(self, roots: Sequence[Node]) -> None:
        order: list[Node] = []
        seen: set[Node] = set()
        for root in roots:
            stack = [(root, False)]
            while stack:
                node, done = stack.pop()
                if done:
                    order.append(node)
                elif node not in seen:
                    seen.add(node)
                    stack.append((node, True))
                    stack += [(following, False) for following in _following(node) if following not in seen]
        self.order = order[::-1]

    def leading_to(self, targets: set[Node]) -> set[Node]:
        """The nodes from which one of ``targets`` can be reached, with these."""
        found: set[Node] = set()
        for node in reversed(self.order):
            if node in targets or any(following in found for following in _following(node)):
                found.add(node)
        return found


def _following(node: Node) -> list[Node]:
    return [following for following, _ in node.next_functions if following is not None]


def _groups(
    graph: _Graph,
    roots: Sequence[tuple[GradientEdge, torch.Tensor]],
    trunk: set[Node],
    to_weights: set[Node],
    of_node: dict[Node, torch.Tensor],
) -> list[_Group]:
    """The branches, those that meet together, with the forks and outputs they leave from."""
    parent: dict[Node, Node] = {}

    def first(node: Node) -> Node:
        while parent.setdefault(node, node) is not node:
            node = parent[node]
        return node

    forks: list[tuple[Node, Node]] = []
    for node in graph.order:
        branches = [x for x in _following(node) if x in to_weights and x not in trunk]
        if not branches:
            continue
        if node in trunk:
            forks.append((node, branches[0]))
        together = branches if node in trunk else [node, *branches]
        for other in together[1:]:
            parent[first(other)] = first(together[0])
    groups: dict[Node, _Group] = {}
    for fork, branch in forks:
        groups.setdefault(first(branch), _Group()).forks.append(fork)
    for edge, gradient in roots:
        if edge.node in to_weights and edge.node not in trunk:
            groups.setdefault(first(edge.node), _Group()).outputs.append((edge, gradient))
    for node in graph.order:
        if node in of_node and node not in trunk:
            groups.setdefault(first(node), _Group()).weights.append(of_node[node])
    return list(groups.values())


def _keep(group: _Group, fork: Node) -> Callable[[Gradients], None]:
    def hook(gradients: Gradients) -> None:
        group.kept[fork] = gradients

    return hook


def _replace_by(kept: Gradients) -> Callable[[Gradients], Gradients]:
    return lambda gradients: kept
