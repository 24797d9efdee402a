"""The graph of one training step's forward pass and loss, as frozen data free of torch.

    Graph   leaves (parameters, buffers, inputs, constants) + nodes in execution order + the loss + buffer writes
    Node    one operator call: ``op`` is its torch name (``aten.linear.default``); tensors in ``args`` are ``Ref``s
    Value   one tensor: name, shape, dtype, and whether a gradient flows back through it

Every tensor has one name, unique in the graph; a node that returns several tensors has several outputs.
Printed, a graph is one line a leaf or node; the digest is taken over that text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Ref:
    """A tensor argument, by name."""

    name: str

    def __repr__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True)
class Symbol:
    """A torch constant argument by its name: a dtype, device, layout or memory format (``torch.float32``)."""

    name: str

    def __repr__(self) -> str:
        return self.name


Argument = Any  # Ref | Symbol | int | float | bool | str | None | tuple of these


@dataclass(frozen=True)
class Value:
    """A tensor. ``shape`` in elements; ``differentiable``: a gradient flows back through it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    differentiable: bool = False

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def size_bytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"%{self.name}: {self.dtype}{list(self.shape)}{'' if self.differentiable else ' no-grad'}"


@dataclass(frozen=True)
class Leaf:
    """A tensor the graph starts from.

    ``kind``: 'parameter', 'buffer', 'input' or 'constant'. ``target``: the name in the original model (parameters and
    buffers), the input's path (inputs), or the constant's name. ``aliases``: further names of a shared parameter.
    ``batched``: dim 0 of an input is the batch.
    """

    kind: str
    target: str
    value: Value
    trainable: bool = False
    batched: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.value.name

    def __str__(self) -> str:
        marks = [word for word, on in (("trainable", self.trainable), ("batched", self.batched)) if on]
        return " ".join([self.kind, str(self.value), f"= {self.target!r}", *marks, *map(repr, self.aliases)])


RANDOM = frozenset(
    "_fused_dropout _standard_gamma alpha_dropout attention_with_dropout bernoulli binomial cauchy dropout exponential "
    "feature_alpha_dropout feature_dropout geometric log_normal multinomial native_dropout normal normal_functional "
    "poisson rand rand_like randint randint_like randn randn_like random randperm rrelu rrelu_with_noise "
    "rrelu_with_noise_functional uniform".split()
)
# A module of the user's that runs as one operator: args are its path, its arguments (planner.ir.graph.tree), its keyword
# arguments and its states; results are its tensors, then the buffers it writes, then the tensors it keeps as attributes.
MODULE = "module"
# Random when they drop between their layers.
RECURRENT = frozenset({"gru", "lstm", "rnn_relu", "rnn_tanh"})


@dataclass(frozen=True)
class Node:
    """One operator call. ``module``: path of the module it was called in; ``segment``: index in the chain of cuts.

    ``rule``: notation of a sharding rule that is known of this call alone (planner.sharding_rules.rule); '' mostly.
    """

    op: str
    args: tuple[Argument, ...]
    outputs: tuple[Value, ...]
    kwargs: tuple[tuple[str, Argument], ...] = ()
    module: str = ""
    segment: int = 0
    rule: str = ""

    @property
    def name(self) -> str:
        return self.outputs[0].name

    @property
    def output(self) -> Value:
        return self.outputs[0]

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the tensor arguments, in order of appearance (with repetition)."""
        return tuple(_refs((self.args, tuple(v for _, v in self.kwargs))))

    @property
    def base(self) -> str:
        """The operator's name: ``aten.add.Tensor`` -> ``add``, ``mylib.add.default`` -> ``mylib.add``."""
        return self.op.removeprefix("aten.").rsplit(".", 1)[0]

    @property
    def is_random(self) -> bool:
        """Whether it draws from the random generator, so that two equal calls differ."""
        if self.base in RECURRENT:
            place = 5 if self.op.endswith(".input") else 6  # of dropout; train follows
            return bool(self.args[place] and self.args[place + 1])
        return self.base in RANDOM or self.op == MODULE

    def __str__(self) -> str:
        inside = [*map(repr, self.args), *(f"{k}={v!r}" for k, v in self.kwargs)]
        rule = f" by {self.rule!r}" if self.rule else ""
        return f"{', '.join(map(str, self.outputs))} = {self.op}({', '.join(inside)}){rule}"


def _refs(argument: Argument) -> Iterator[str]:
    if isinstance(argument, Ref):
        yield argument.name
    elif isinstance(argument, tuple):
        for item in argument:
            yield from _refs(item)


def map_refs(argument: Argument, function: Callable[[str], Argument]) -> Argument:
    """``argument`` with every Ref replaced by ``function(its name)``."""
    if isinstance(argument, Ref):
        return function(argument.name)
    if isinstance(argument, tuple):
        return tuple(map_refs(item, function) for item in argument)
    return argument


@dataclass(frozen=True)
class Graph:
    """``loss`` names a value of shape []; ``writes`` are (buffer leaf name, value name) pairs stored back each step."""

    leaves: tuple[Leaf, ...]
    nodes: tuple[Node, ...]
    loss: str
    writes: tuple[tuple[str, str], ...] = ()
    batch_size: int = 1
    notes: tuple[str, ...] = field(default=(), compare=False)

    @cached_property
    def values(self) -> Mapping[str, Value]:
        """Every tensor by name, leaves first."""
        table = {leaf.name: leaf.value for leaf in self.leaves}
        table.update((value.name, value) for node in self.nodes for value in node.outputs)
        return table

    @cached_property
    def leaf_by_name(self) -> Mapping[str, Leaf]:
        return {leaf.name: leaf for leaf in self.leaves}

    @cached_property
    def producers(self) -> Mapping[str, Node]:
        """The node that makes each tensor (leaves are absent)."""
        return {value.name: node for node in self.nodes for value in node.outputs}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[Node, ...]]:
        """The nodes that read each tensor, in order, each once."""
        table: dict[str, list[Node]] = {name: [] for name in self.values}
        for node in self.nodes:
            for name in dict.fromkeys(node.operands):
                table[name].append(node)
        return {name: tuple(nodes) for name, nodes in table.items()}

    def leaves_of(self, kind: str) -> tuple[Leaf, ...]:
        return tuple(leaf for leaf in self.leaves if leaf.kind == kind)

    def __str__(self) -> str:
        lines = [str(leaf) for leaf in self.leaves]
        lines += [str(node) for node in self.nodes]
        lines += [f"write %{buffer} <- %{value}" for buffer, value in self.writes]
        return "\n".join([*lines, f"loss %{self.loss}"])

    @cached_property
    def digest(self) -> str:
        """sha256 of the printed graph: a plan names the graph it is for."""
        return hashlib.sha256(str(self).encode()).hexdigest()
