"""Graphs run in one process: whole, or sharded with the local tensors of all ranks side by side.

No plan is trained with this: it is the check. Every step is what the algebra says it is, in plain torch, and a run can be
compared tensor by tensor with the whole one.

    run_whole(graph, tensors)              the reference: every node once, on whole tensors
    run_sharded(graph, axes, tensors)      a graph after ``shard``: every value is a list with one local tensor a rank

Both are differentiated by autograd and give a Result of whole tensors. A collective is a function of all the local
tensors of a group, so nothing here knows of processes. A sharded run has the same semantics as one process a rank:

    convert        move(value f, value t) forward, move(gradient t, gradient f) backward
    the seed       each rank's loss, whole or partial, has gradient 1
    a gradient     S: the shards joined, P: their sum, R: equal on all ranks, or the run is refused
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.ir.graph import MODULE, Argument, Graph, Node, Ref, Symbol, Value
from planner.ir.layout import Pair, Placement, R
from planner.ir.program import ModuleSpec, TensorSpec
from runtime.opaque import OpaqueModule


class NotReplicated(AssertionError):
    """Ranks that should hold the same tensor do not."""


@dataclass(frozen=True)
class Result:
    """Whole tensors. ``gradients``: by name of trainable leaf, None where there is none. ``buffers``: what is written.

    ``values``: every tensor of the graph by name (whole runs), or the local tensors of all ranks (sharded runs).
    """

    loss: Tensor
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class AxisOf:
    """One axis the graph was sharded over: how its leaves are stored, and the pair of its loss.

    ``shares``: how many equal units each rank holds of what is cut, where they hold unequal parts.
    """

    name: str
    size: int
    leaves: Mapping[str, Pair]
    loss: Pair
    shares: tuple[int, ...] = ()

    @property
    def parts(self) -> tuple[int, ...]:
        return self.shares or (1,) * self.size


# --- placements -------------------------------------------------------------------------------------------------------


def partition(whole: Tensor, placement: Placement, parts: Sequence[int]) -> list[Tensor]:
    """The local tensors of the ranks, one for each of ``parts``, in proportion to them."""
    if placement.kind == "R":
        return [whole] * len(parts)
    if placement.kind == "P":
        return [whole, *(torch.zeros_like(whole) for _ in parts[1:])]
    d, o = placement.dim, placement.outer
    seen = whole.unflatten(d, (o, whole.shape[d] // o))
    unit = seen.shape[d + 1] // sum(parts)
    return [part.flatten(d, d + 1).contiguous() for part in seen.split([unit * share for share in parts], d + 1)]


def combine(parts: Sequence[Tensor], placement: Placement) -> Tensor:
    """The whole tensor. Raises NotReplicated when ranks that hold it whole differ."""
    if placement.kind == "R":
        close = 1e-9 if parts[0].dtype in (torch.float64, torch.complex128) else 1e-5
        for other in parts[1:]:
            if other.shape != parts[0].shape or not torch.allclose(other, parts[0], close, close, equal_nan=True):
                raise NotReplicated(f"ranks differ by {_distance(other, parts[0])}")
        return parts[0]
    if placement.kind == "P":
        return torch.stack(list(parts)).sum(0)
    d, o = placement.dim, placement.outer
    return torch.cat([part.unflatten(d, (o, part.shape[d] // o)) for part in parts], d + 1).flatten(d, d + 1)


def _distance(a: Tensor, b: Tensor) -> object:
    return (a - b).abs().max().item() if a.shape == b.shape and a.is_floating_point() else (a.shape, b.shape)


def move(locals_: Sequence[Tensor], source: Placement, target: Placement, parts: Sequence[int]) -> list[Tensor]:
    if source == target:
        return list(locals_)
    return partition(combine(locals_, source), target, parts)


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Pair, target: Pair, parts: Sequence[int], *locals_: Tensor) -> tuple[Tensor, ...]:
        ctx.source, ctx.target, ctx.parts = source, target, parts
        return tuple(local.clone() for local in move(locals_, source.value, target.value, parts))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return (None, None, None, *move(gradients, ctx.target.gradient, ctx.source.gradient, ctx.parts))


class _Share(torch.autograd.Function):
    """One tensor as k equal ones, R:R: every rank has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: int) -> tuple[Tensor, ...]:
        return tuple(x.clone() for _ in range(k))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return combine(gradients, R), None


# --- operators --------------------------------------------------------------------------------------------------------


def _torch_constant(name: str) -> Any:
    return "cpu" if name == "device" else getattr(torch, name.removeprefix("torch."))


def _resolve(argument: Argument, tensor: Callable[[str], Tensor]) -> Any:
    if isinstance(argument, Ref):
        return tensor(argument.name)
    if isinstance(argument, Symbol):
        return complex(argument.name) if argument.name.endswith(("j", "j)")) else _torch_constant(argument.name)
    if isinstance(argument, tuple):
        return [_resolve(item, tensor) for item in argument]
    return argument


def _cross_entropy_sum(z: Tensor, y: Tensor, weight: Tensor | None, ignored: int, smoothing: float) -> Tensor:
    return F.cross_entropy(z, y, weight, ignore_index=ignored, label_smoothing=smoothing, reduction="sum")


def _cross_entropy_count(y: Tensor, classes: int, weight: Tensor | None, ignored: int, dtype: torch.dtype) -> Tensor:
    if y.is_floating_point():
        return torch.tensor(y.numel() // classes, dtype=dtype)
    kept = y[y != ignored]
    return torch.tensor(kept.numel(), dtype=dtype) if weight is None else weight.detach()[kept].sum().to(dtype)


def _batch_norm(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    y, _, _, mean, var = torch.ops.aten._native_batch_norm_legit_functional(*arguments)
    return y, mean, var


def _grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    group = torch.searchsorted(ends.long(), torch.arange(x.shape[0]), right=True)
    inside = group < len(ends)
    return torch.bmm(x[:, None], weight[group.clamp(max=len(ends) - 1)]).squeeze(1) * inside[:, None]


def _dropout(x: Tensor, p: float, *_: Any) -> Tensor:
    assert p == 0, "these runs have no random numbers"
    return x


def _attention(*arguments: Any, **options: Any) -> Tensor:
    q, k, v, mask, p, *rest = arguments
    assert p == 0, "these runs have no random numbers"
    return torch.ops.aten.scaled_dot_product_attention.default(q, k, v, mask, 0.0, *rest, **options)


OWN: Mapping[str, Callable[..., Any]] = {
    "cross_entropy_sum": _cross_entropy_sum,
    "cross_entropy_count": _cross_entropy_count,
    "batch_norm": _batch_norm,
    "tensor": torch.tensor,
    "grouped_mm": _grouped_mm,
    "dropout": _dropout,
    "attention_with_dropout": _attention,
    "aten.view.default": lambda x, shape: x.reshape(shape),
}


def _call(node: Node, tensor: Callable[[str], Tensor], model: nn.Module | None) -> tuple[Tensor, ...]:
    """The results of a node that needs no other rank."""
    if node.op == MODULE and model is not None:
        return _own_module(node, tensor, model)
    arguments = [_resolve(a, tensor) for a in node.args]
    options = {key: _resolve(value, tensor) for key, value in node.kwargs if key != "axes"}
    function = OWN.get(node.op)
    if function is None:
        if node.op.count(".") != 2:
            raise LookupError(f"{node.op} is no operator of torch's")
        packet, name, overload = node.op.split(".")
        function = getattr(getattr(getattr(torch.ops, packet), name), overload)
    results = function(*arguments, **options)
    return tuple(results) if isinstance(results, tuple | list) else (results,)


def _own_module(node: Node, tensor: Callable[[str], Tensor], model: nn.Module) -> tuple[Tensor, ...]:
    """A module of the user's that runs as it is, as a function of its states."""

    def tree(argument: Argument) -> Any:
        if not isinstance(argument, tuple):
            return _resolve(argument, tensor)
        kind, *items = argument
        if kind == "dict":
            return {key: tree(item) for key, item in items}
        return [tree(item) for item in items] if kind == "list" else tuple(tree(item) for item in items)

    path, args, kwargs, states = node.args
    options = dict(node.kwargs)
    results = tuple(TensorSpec(v.name, v.shape, v.dtype, v.differentiable) for v in node.outputs)
    plain, written, kept = options.get("plain", ""), options.get("written", ()), options.get("kept", ())
    module = OpaqueModule(ModuleSpec(path, path, 0, results, plain, written, kept), model.get_submodule(path))
    autocast = _resolve(options["autocast"], tensor) if "autocast" in options else None
    found = module([tensor(state.name) for state in states], tree(args), tree(kwargs), autocast)
    return found if isinstance(found, tuple) else (found,)


def _vocab_embedding(node: Node, ranks: Sequence[Callable[[str], Tensor]]) -> list[tuple[Tensor, ...]]:
    table, ids, *options = node.args
    padding = options[0] if options else -1
    found: list[tuple[Tensor, ...]] = []
    first = 0
    for tensor in ranks:
        weight, index = tensor(table.name), tensor(ids.name)
        rows = weight.shape[0]
        own = (index >= first) & (index < first + rows)
        picked = weight[(index - first).clamp(0, rows - 1)]
        picked = torch.where((index == padding).unsqueeze(-1), picked.detach(), picked)
        found.append((picked * own.unsqueeze(-1),))
        first += rows
    return found


def _vocab_cross_entropy(node: Node, ranks: Sequence[Callable[[str], Tensor]]) -> list[tuple[Tensor, ...]]:
    logits, *rest = node.args
    parts = [tensor(logits.name) for tensor in ranks]
    whole = torch.cat(parts, 1 if parts[0].dim() > 1 else 0)
    others = [_resolve(argument, ranks[0]) for argument in rest]
    return [(loss,) for loss in _Share.apply(_cross_entropy_sum(whole, *others), len(ranks))]


def _batch_norm_over(node: Node, ranks: Sequence[Callable[[str], Tensor]]) -> list[tuple[Tensor, ...]]:
    """Statistics as plain sums over every rank of the group; autograd carries their gradients to all of them."""
    arguments = [[_resolve(argument, tensor) for argument in node.args] for tensor in ranks]
    inputs = [a[0] for a in arguments]
    dims = [0, *range(2, inputs[0].dim())]
    count = sum(x.numel() // x.shape[1] for x in inputs)
    mean = torch.stack([x.sum(dims) for x in inputs]).sum(0) / count
    shape = (1, -1, *([1] * (inputs[0].dim() - 2)))
    squares = torch.stack([(x - mean.view(shape)).square().sum(dims) for x in inputs]).sum(0)
    inverse = (squares / count + arguments[0][7]).rsqrt()
    results: list[tuple[Tensor, ...]] = []
    for x, weight, bias, old_mean, old_var, _, momentum, _ in arguments:
        y = (x - mean.view(shape)) * inverse.view(shape)
        y = y if weight is None else y * weight.view(shape)
        y = y if bias is None else y + bias.view(shape)
        new_mean = old_mean.lerp(mean.detach(), momentum)
        new_var = old_var.lerp(squares.detach() / (count - 1), momentum)
        results.append((y, new_mean, new_var))
    return results


JOINT: Mapping[str, Callable[[Node, Sequence[Callable[[str], Tensor]]], list[tuple[Tensor, ...]]]] = {
    "vocab_embedding": _vocab_embedding,
    "vocab_cross_entropy": _vocab_cross_entropy,
    "batch_norm_over": _batch_norm_over,
}


# --- runs -------------------------------------------------------------------------------------------------------------


def _leaf(tensor: Tensor, trainable: bool) -> Tensor:
    return tensor.detach().clone().requires_grad_(trainable)


def run_whole(graph: Graph, tensors: Mapping[str, Tensor], model: nn.Module | None = None) -> Result:
    """``tensors``: of each leaf, by name. Intermediate values keep their gradients (``values[name].grad``).

    ``model``: whose modules run as they are, where the graph has such.
    """
    values = {leaf.name: _leaf(tensors[leaf.name], leaf.trainable) for leaf in graph.leaves}
    for node in graph.nodes:
        for value, result in zip(node.outputs, _call(node, values.__getitem__, model), strict=True):
            assert tuple(result.shape) == value.shape, f"{node} gives {list(result.shape)}"
            if result.requires_grad:
                result = result.view_as(result)  # an identity would be the same tensor as its operand
                result.retain_grad()
            values[value.name] = result if value.differentiable else result.detach()
    values[graph.loss].backward()
    return Result(
        values[graph.loss].detach(),
        {leaf.name: values[leaf.name].grad for leaf in graph.leaves if leaf.trainable},
        {buffer: values[name].detach() for buffer, name in graph.writes},
        values,
    )


@dataclass(frozen=True)
class World:
    """All ranks of a mesh, in row-major order of ``axes``."""

    axes: tuple[AxisOf, ...]

    @property
    def size(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    def groups(self, names: Sequence[str]) -> list[list[int]]:
        """Ranks that differ on the named axes only, in the order of ``names`` (outermost first)."""
        at = {axis.name: i for i, axis in enumerate(self.axes)}
        coordinates = list(itertools.product(*(range(axis.size) for axis in self.axes)))
        found: dict[tuple[int, ...], list[int]] = {}
        order = sorted(range(len(coordinates)), key=lambda rank: [coordinates[rank][at[name]] for name in names])
        for rank in order:
            rest = tuple(c for i, c in enumerate(coordinates[rank]) if self.axes[i].name not in names)
            found.setdefault(rest, []).append(rank)
        return list(found.values())

    def partition(self, whole: Tensor, placements: Sequence[Placement]) -> list[Tensor]:
        parts = [whole]
        for axis, placement in zip(self.axes, placements, strict=True):
            parts = [local for part in parts for local in partition(part, placement, axis.parts)]
        return parts

    def combine(self, parts: Sequence[Tensor], placements: Sequence[Placement]) -> Tensor:
        current = list(parts)
        for axis, placement in reversed(list(zip(self.axes, placements, strict=True))):
            k = axis.size
            current = [combine(current[i : i + k], placement) for i in range(0, len(current), k)]
        return current[0]


def run_sharded(
    graph: Graph | Sequence[Graph],
    axes: Sequence[AxisOf],
    tensors: Mapping[str, Tensor],
    values: dict[str, list[Tensor]] | None = None,
    model: nn.Module | None = None,
) -> Result:
    """``graph``: what one rank runs, sharded over ``axes`` one after the other; one a rank where their shapes differ.

    ``tensors``: whole leaves, by name.

    ``values`` is filled with the local tensors of all ranks as they are made, so that a run that raises leaves them.
    Raises NotReplicated when ranks disagree on a value or gradient that their layout calls whole.
    """
    world = World(tuple(axes))
    values = {} if values is None else values
    graphs = [graph] * world.size if isinstance(graph, Graph) else graph
    graph = graphs[0]
    for leaves in zip(*(of_rank.leaves for of_rank in graphs), strict=True):
        leaf = leaves[0]
        placements = [axis.leaves[leaf.name].value for axis in axes]
        parts = world.partition(tensors[leaf.name], placements)
        for own, part in zip(leaves, parts, strict=True):
            assert tuple(part.shape) == own.value.shape, f"{own} is stored as {list(part.shape)}"
        values[leaf.name] = [_leaf(part, leaf.trainable) for part in parts]
    for nodes in zip(*(of_rank.nodes for of_rank in graphs), strict=True):
        for index, results in enumerate(_run_node(nodes, world, values, model)):
            for node, result in zip(nodes, results, strict=True):
                expected = node.outputs[index].shape
                assert tuple(result.shape) == expected, f"{node} gives {list(result.shape)} on a rank"
            value = nodes[0].outputs[index]
            if value.differentiable and results[0].requires_grad:
                results = [result.view_as(result) for result in results]
                for result in results:
                    result.retain_grad()
            values[value.name] = results if value.differentiable else [x.detach() for x in results]
    losses = values[graph.loss]
    torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses])
    gradients: dict[str, Tensor | None] = {}
    for leaf in graph.leaves:
        if leaf.trainable:
            own = [x.grad for x in values[leaf.name]]
            kinds = [axis.leaves[leaf.name].gradient or R for axis in axes]
            used = any(g is not None for g in own)
            filled = [x.grad if x.grad is not None else torch.zeros_like(x) for x in values[leaf.name]]
            gradients[leaf.name] = world.combine(filled, kinds) if used else None
    return Result(
        world.combine([loss.detach() for loss in losses], [axis.loss.value for axis in axes]),
        gradients,
        {
            buffer: world.combine([x.detach() for x in values[name]], [axis.leaves[buffer].value for axis in axes])
            for buffer, name in graph.writes
        },
        values,
    )


def _of_rank(values: Mapping[str, list[Tensor]], rank: int) -> Callable[[str], Tensor]:
    return lambda name: values[name][rank]


def _run_node(
    nodes: Sequence[Node], world: World, values: Mapping[str, list[Tensor]], model: nn.Module | None
) -> list[list[Tensor]]:
    """For each result of a node, here as each rank has it, the local tensors of all ranks."""
    node = nodes[0]
    by_rank: list[tuple[Tensor, ...]] = [()] * world.size
    if node.op == "convert":
        reference, axis, text = node.args
        source, target = (Pair.parse(part.strip()) for part in text.split("->"))
        parts = next(x.parts for x in world.axes if x.name == axis)
        for group in world.groups([axis]):
            held = [values[reference.name][rank] for rank in group]
            if source.gradient is None or target.gradient is None:
                moved = tuple(move([part.detach() for part in held], source.value, target.value, parts))
            else:
                moved = _Convert.apply(source, target, parts, *held)
            for rank, part in zip(group, moved, strict=True):
                by_rank[rank] = (part,)
    elif node.op in JOINT:
        for group in world.groups([str(axis) for axis in dict(node.kwargs)["axes"]]):
            ranks = [_of_rank(values, rank) for rank in group]
            for rank, results in zip(group, JOINT[node.op](node, ranks), strict=True):
                by_rank[rank] = results
    else:
        by_rank = [_call(own, _of_rank(values, rank), model) for rank, own in enumerate(nodes)]
    return [list(results) for results in zip(*by_rank, strict=True)]


# --- precision --------------------------------------------------------------------------------------------------------

_WIDER = {"float32": "float64", "float16": "float64", "bfloat16": "float64", "complex64": "complex128"}


def widened(graph: Graph) -> Graph:
    """``graph`` computing in float64 where it would cast to less (Hugging Face norms, rotary tables and losses do)."""

    def wide(argument: Argument) -> Argument:
        if isinstance(argument, tuple):
            return tuple(map(wide, argument))
        if isinstance(argument, Symbol):
            dtype = _WIDER.get(argument.name.removeprefix("torch."))
            return argument if dtype is None else Symbol(f"torch.{dtype}")
        return argument

    def value(v: Value) -> Value:
        return replace(v, dtype=_WIDER.get(v.dtype, v.dtype))

    nodes = tuple(
        replace(n, args=wide(n.args), kwargs=wide(n.kwargs), outputs=tuple(map(value, n.outputs))) for n in graph.nodes
    )
    leaves = tuple(replace(leaf, value=value(leaf.value)) for leaf in graph.leaves)
    return replace(graph, nodes=nodes, leaves=leaves)


def widened_tensor(tensor: Tensor) -> Tensor:
    dtype = _WIDER.get(str(tensor.dtype).removeprefix("torch."))
    return tensor if dtype is None else tensor.to(getattr(torch, dtype))
