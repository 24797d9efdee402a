"""Tracing: what a model becomes, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.errors import BadInput
from planner.interpreter import run_whole
from planner.ir.graph import RANDOM, RECURRENT
from planner.segments import cut_into_segments, segment_kinds, segment_label, segment_nodes
from planner.sharding_rules import has_rule, rule_of, unknown_rule
from planner.trace import Batch, Traced, trace


def traced(model: nn.Module, *inputs: Tensor, loss: Callable[..., Tensor] | None = None, target: Any = None) -> Traced:
    return trace(model, Batch(inputs, {}, target), loss)


class Wrapped(nn.Module):
    """A module whose forward is ``function(self, x)``, returning the loss."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def gradients_of(
    model: nn.Module, found: Traced, *inputs: Tensor
) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """(of the graph, of the module), by original name."""
    leaves = {leaf.name: leaf for leaf in found.graph.leaves}
    tensors = {n: model.get_parameter(x.target).detach() for n, x in leaves.items() if x.kind == "parameter"}
    tensors |= {n: model.get_buffer(x.target) for n, x in leaves.items() if x.kind == "buffer"}
    tensors |= dict(zip((n for n, x in leaves.items() if x.kind == "input"), inputs, strict=True))
    result = run_whole(found.graph, tensors)
    model.zero_grad()
    model(*inputs).backward()
    graph = {leaves[name].target: g for name, g in result.gradients.items()}
    return graph, {name: p.grad for name, p in model.named_parameters()}


def test_a_no_grad_region_gives_no_gradient() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = self.second(x) * 2
        return ((self.first(x) - teacher) ** 2).mean()

    model, x = Wrapped(forward), torch.randn(3, 4)
    graph, module = gradients_of(model, traced(model, x), x)
    torch.testing.assert_close(graph["first.weight"], module["first.weight"])
    assert module["second.weight"] is None and graph.get("second.weight") is None


def test_detach_stops_the_gradient() -> None:
    model, x = Wrapped(lambda self, x: (self.first(x) * self.second(x).detach()).sum()), torch.randn(3, 4)
    graph, module = gradients_of(model, traced(model, x), x)
    torch.testing.assert_close(graph["first.weight"], module["first.weight"])
    assert graph.get("second.weight") is None


def test_in_place_operators_become_functional() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.first(x)
        y.mul_(2.0).add_(1.0)
        y[:, 0] = y[:, 1] * 2
        return self.second(y).sum()

    model, x = Wrapped(forward), torch.randn(3, 4)
    graph, module = gradients_of(model, traced(model, x), x)
    for name, gradient in module.items():
        torch.testing.assert_close(graph[name], gradient)


def test_two_inputs_that_are_one_tensor_stay_two() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self.linear(x), y)

    x = torch.randn(3, 4)
    found = trace(Both(), Batch((x,), {"y": x}))
    assert {leaf.name for leaf in found.graph.leaves_of("input")} == {"x", "y"}


def test_a_shared_weight_is_one_leaf_with_further_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
            self.outer.weight = self.inner.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.outer(self.inner(ids)).sum()

    (leaf,) = traced(Tied(), torch.zeros(2, 3, dtype=torch.int64)).graph.leaves_of("parameter")
    assert (leaf.target, leaf.aliases) == ("inner.weight", ("outer.weight",))


def test_frozen_parameters_are_not_trainable_and_unused_ones_not_there() -> None:
    model = Wrapped(lambda self, x: self.first(x).sum())
    model.first.bias.requires_grad_(False)
    leaves = {leaf.target: leaf for leaf in traced(model, torch.randn(2, 4)).graph.leaves_of("parameter")}
    assert set(leaves) == {"first.weight", "first.bias"}
    assert leaves["first.weight"].trainable and not leaves["first.bias"].trainable


def test_token_means_become_sums_over_counts() -> None:
    model = nn.Linear(4, 8)
    found = traced(model, torch.randn(6, 4), loss=F.cross_entropy, target=torch.zeros(6, dtype=torch.int64))
    assert [node.op for node in found.graph.nodes][-3:] == [
        "cross_entropy_sum",
        "cross_entropy_count",
        "aten.div.Tensor",
    ]


def test_buffers_written_in_forward_are_known() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
    found = traced(model, torch.randn(2, 1, 5, 5), loss=lambda y: y.sum())
    targets = {found.graph.leaf_by_name[buffer].target for buffer, _ in found.graph.writes}
    assert targets == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def test_the_digest_depends_on_shapes_and_not_on_values() -> None:
    a, b = nn.Linear(4, 2), nn.Linear(4, 2)
    digests = [
        traced(model, torch.randn(rows, 4), loss=lambda y: y.sum()).graph.digest
        for model, rows in ((a, 3), (b, 3), (a, 4))
    ]
    assert digests[0] == digests[1] != digests[2]


def test_equal_blocks_are_equal_segments() -> None:
    model = nn.Sequential(
        nn.Linear(4, 8), *(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)), nn.Linear(8, 2)
    )
    graph = cut_into_segments(traced(model, torch.randn(2, 4), loss=lambda y: y.sum()).graph)
    assert segment_kinds(graph) == (0, 1, 1, 1, 2)
    assert [segment_label(graph, nodes) for nodes in segment_nodes(graph)] == ["0", "1.0", "2.0", "3.0", "4"]


def test_a_residual_is_not_cut_inside() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(F.relu(self.up(x)))

    model = nn.Sequential(nn.Linear(4, 4), Residual(), Residual())
    graph = cut_into_segments(traced(model, torch.randn(2, 4), loss=lambda y: y.sum()).graph)
    assert segment_kinds(graph) == (0, 1, 2)  # the last also sums
    for nodes in segment_nodes(graph)[1:]:
        assert sum(node.op == "aten.linear.default" for node in nodes) == 2


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda self, x: self.first(x), "loss has shape"),
        (lambda self, x: {"logits": self.first(x)}, "returns no loss"),
        (lambda self, x: x.sum(), "nothing to train"),
    ],
)
def test_a_loss_that_is_none_is_refused(forward: Callable[..., Any], message: str) -> None:
    loss = None if message != "loss has shape" else (lambda y: y)
    with pytest.raises(BadInput, match=message):
        traced(Wrapped(forward), torch.randn(2, 4), loss=loss)


RANDOM_CALLS = {
    "normal": lambda: torch.normal(0.0, 1.0, (4,)),
    "bernoulli": lambda: torch.bernoulli(torch.full((4,), 0.5)),
    "multinomial": lambda: torch.multinomial(torch.ones(4), 4).float(),
    "uniform": lambda: torch.empty(4).uniform_(),
    "exponential": lambda: torch.empty(4).exponential_(),
    "poisson": lambda: torch.poisson(torch.ones(4)),
    "randperm": lambda: torch.randperm(4).float(),
    "rand_like": lambda: torch.rand_like(torch.zeros(4)),
}


@pytest.mark.parametrize("op", RANDOM_CALLS)
def test_two_draws_stay_two(op: str) -> None:
    draw = RANDOM_CALLS[op]
    found = traced(Wrapped(lambda self, x: (self.first(x) * draw() - draw()).mean()), torch.randn(3, 4))
    assert sum(node.base == op for node in found.graph.nodes) == 2
    assert all(node.is_random == (node.base == op) for node in found.graph.nodes)


def test_every_operator_that_torch_calls_random_is_known() -> None:
    tagged = set()
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        overloads = packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ()
        if any(torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags for overload in overloads):
            tagged.add(name)
    # Kernels behind scaled_dot_product_attention and the recurrent operators, which no traced model calls itself.
    inside = {name for name in tagged if "attention" in name or name in ("_cudnn_rnn", "miopen_rnn")}
    functional = {name.removesuffix("_") if not name.startswith("_") else name for name in tagged - inside}
    assert len(functional) > 20 and functional <= RANDOM | RECURRENT


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_recurrent_operator_is_random_when_it_drops(dropout: float) -> None:
    lstm = nn.LSTM(4, 4, 2, dropout=dropout)
    graph = traced(lstm, torch.randn(3, 2, 4), loss=lambda output: output[0].mean()).graph
    assert [node.is_random for node in graph.nodes if node.base == "lstm"] == [dropout > 0]


def test_complex_numbers_of_the_code_are_written_out() -> None:
    turn = torch.tensor([1j, 1.0, -1j, 2 + 1j])
    model = Wrapped(lambda self, x: ((self.first(x) * turn * (1 + 2j)).sum(-1).abs() ** 2).mean())
    x = torch.randn(3, 4)
    graph, module = gradients_of(model, traced(model, x), x)
    torch.testing.assert_close(graph["first.weight"], module["first.weight"])


def test_an_operator_of_another_library_is_not_taken_for_torch_s() -> None:
    @torch.library.custom_op("meshwright_tests::relu", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda context, gradient: gradient * 2)
    found = traced(Wrapped(lambda self, x: torch.ops.meshwright_tests.relu(self.first(x)).mean()), torch.randn(3, 4))
    node = next(node for node in found.graph.nodes if node.base == "meshwright_tests.relu")
    assert not has_rule(node) and rule_of(node, found.graph.values) == unknown_rule(node)


class Imitating(nn.Module):
    """A teacher under no_grad, which sees what the student makes too."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            goal = self.teacher(self.student(x)).relu()
        return (self.student(x) - goal).square().mean()


def test_what_no_derivative_reaches_is_not_trained() -> None:
    found = trace(Imitating(), Batch((torch.randn(3, 4),), {})).graph
    trained = {leaf.target: (leaf.trainable, leaf.value.differentiable) for leaf in found.leaves_of("parameter")}
    assert trained == {
        "student.weight": (True, True),
        "student.bias": (True, True),
        "teacher.weight": (False, False),
        "teacher.bias": (False, False),
    }
    inside = [node for node in found.nodes if node.base == "linear"]
    assert [node.output.differentiable for node in inside] == [False, False, True]
