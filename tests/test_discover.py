"""Rules found by execution: those that are written are found again, and rows that depend on one another are not cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import planner
from planner import discover
from planner.discover import discover_rule, with_discovered_rules
from planner.errors import BadInput
from planner.ir.graph import Node, Ref, Value
from planner.sharding_rules import rule_of, strategies
from planner.trace import Batch, trace


def call(
    op: str, *arguments: Any, outputs: tuple[tuple[int, ...], ...], **kwargs: Any
) -> tuple[Node, dict[str, Value]]:
    """A node; tuples of numbers inside Value are operands."""
    values = {value.name: value for value in arguments if isinstance(value, Value)}
    args = tuple(Ref(x.name) if isinstance(x, Value) else x for x in arguments)
    results = tuple(Value(f"y{i}", shape, "float64", True) for i, shape in enumerate(outputs))
    return Node(op, args, results, tuple(kwargs.items())), values


def floats(name: str, *shape: int) -> Value:
    return Value(name, shape, "float64", True)


def ids(name: str, *shape: int) -> Value:
    return Value(name, shape, "int64")


def found(op: str, *arguments: Any, outputs: tuple[tuple[int, ...], ...]) -> str:
    return discover_rule(*call(op, *arguments, outputs=outputs))


CASES: dict[str, tuple[tuple[Any, ...], tuple[tuple[int, ...], ...], str]] = {
    "aten.linear.default": ((floats("x", 6, 3), floats("w", 5, 3), floats("b", 5)), ((6, 5),), "b"),
    "aten.softmax.int": ((floats("x", 6, 5), -1), ((6, 5),), "b"),
    "aten.mul.Tensor": ((floats("x", 6, 5), floats("y", 6, 5)), ((6, 5),), "bt"),
    "aten.bmm.default": ((floats("x", 4, 3, 5), floats("y", 4, 5, 6)), ((4, 3, 6),), "b"),
    "aten.embedding.default": ((floats("w", 7, 4), ids("i", 6, 5)), ((6, 5, 4),), "b"),
    "aten.layer_norm.default": ((floats("x", 6, 5), (5,), floats("w", 5), floats("b", 5)), ((6, 5),), "b"),
    "aten.gather.default": ((floats("x", 6, 5), 1, ids("i", 6, 4)), ((6, 4),), "b"),
    "aten.conv1d.default": ((floats("x", 6, 3, 8), floats("w", 5, 3, 3)), ((6, 5, 6),), "b"),
}


@pytest.mark.parametrize("op", CASES)
def test_written_rules_are_found_again(op: str) -> None:
    arguments, outputs, _ = CASES[op]
    node, values = call(op, *arguments, outputs=outputs)
    notation = discover_rule(node, values)
    written = rule_of(node, values)
    ours = rule_of(replace(node, rule=notation), values)

    def cuts(rule: Any) -> set[Any]:
        return {(s.operands, s.outputs) for s in strategies(rule, node, values, 2) if s.letter}

    batch = {c for c in cuts(written) if str(c[1][0].value) == "S(0)" and outputs[0][0] % 2 == 0}
    assert batch & cuts(ours), notation
    assert cuts(ours) <= cuts(written), notation


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("aten.cumsum.default", (floats("x", 6, 5), 0)),
        ("aten.softmax.int", (floats("x", 6, 5), 0)),
        ("aten.flip.default", (floats("x", 6, 5), (0,))),
        ("aten.sort.stable", (floats("x", 6, 5),)),
    ],
)
def test_rows_that_depend_on_one_another_are_not_cut(op: str, arguments: tuple[Any, ...]) -> None:
    outputs = ((6, 5), (6, 5)) if "sort" in op else ((6, 5),)
    if "sort" in op:
        node, values = call(op, *arguments, outputs=outputs, stable=True, dim=0)
        notation = discover_rule(node, values)
    else:
        notation = found(op, *arguments, outputs=outputs)
    assert notation.partition(" -> ")[2].split(",")[0].split() in (["_", "b"], [])


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 7), st.integers(2, 7), st.integers(2, 7))
def test_a_product_is_cut_where_it_can_be_whatever_its_shape(n: int, i: int, o: int) -> None:
    node, values = call("aten.mm.default", floats("x", n, i), floats("w", i, o), outputs=((n, o),))
    rule = rule_of(replace(node, rule=discover_rule(node, values)), values)
    for strategy in strategies(rule, node, values, 2):
        if strategy.letter:
            assert str(strategy.outputs[0].value) in ("S(0)", "S(1)")
            place = [str(pair.value) for pair in strategy.operands]
            assert place == (["S(0)", "R"] if strategy.outputs[0].value.dim == 0 else ["R", "S(1)"])


def test_random_operators_and_those_that_write_are_left_alone() -> None:
    assert not found("aten.bernoulli.p", floats("x", 6, 5), 0.5, outputs=((6, 5),))
    assert not found("aten.add_.Tensor", floats("x", 6, 5), floats("y", 6, 5), outputs=((6, 5),))
    assert not found("aten.nosuch.default", floats("x", 6, 5), outputs=((6, 5),))


def test_large_tensors_are_tried_at_smaller_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = discover._Operator.inputs

    def inputs(self: Any, *arguments: Any) -> list[Tensor]:
        made = original(self, *arguments)
        seen.extend(x.numel() for x in made)
        return made

    monkeypatch.setattr(discover._Operator, "inputs", inputs)
    big = floats("x", 4096, 512)
    assert found("aten.softmax.int", big, -1, outputs=((4096, 512),)) == "b _ -> b _"
    assert max(seen) < 1000


# --- an operator of the user's ----------------------------------------------------------------------------------------


@torch.library.custom_op("meshwright_tests::swish", mutates_args=())
def swish(x: Tensor, scale: Tensor) -> Tensor:
    return x * torch.sigmoid(x * scale)


@swish.register_fake
def _(x: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, scale = ctx.saved_tensors
    s = torch.sigmoid(x * scale)
    return gradient * (s + x * scale * s * (1 - s)), (gradient * x * x * s * (1 - s)).sum(0)


swish.register_autograd(_backward, setup_context=_setup)


class Swish(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale, self.last = nn.Linear(6, 6), nn.Parameter(torch.randn(6)), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.ops.meshwright_tests.swish(self.first(x), self.scale))


def test_a_custom_operator_gets_a_rule_that_is_told_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Swish().double()
    batch = Batch((torch.randn(8, 6, dtype=torch.float64),), {}, torch.arange(8) % 4)
    graph = trace(model, batch, F.cross_entropy).graph
    first = with_discovered_rules(graph, tmp_path)
    assert first.notes == ("rule found by execution for meshwright_tests.swish: b t, t -> b t",)
    assert first.digest != graph.digest
    (file,) = tmp_path.iterdir()

    def fail(*_: Any) -> str:
        raise AssertionError("it is known")

    monkeypatch.setattr(discover, "_discovered", fail)
    assert with_discovered_rules(graph, tmp_path) == first
    file.write_text(file.read_text().replace("b t, t -> b t", "t b, t -> b t"))  # no longer true: found again
    with pytest.raises(AssertionError, match="it is known"):
        with_discovered_rules(graph, tmp_path)


def test_the_text_calls_it_by_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = planner.auto_parallelize(
        Swish(),
        gpus=2,
        strategy="dp2",
        example_inputs=(torch.randn(8, 6),),
        loss_fn=F.cross_entropy,
        cluster="dgx-h100",
    )
    assert "swish = torch.ops.meshwright_tests.swish.default(x, self.scale)" in made.source()
    assert "rule found by execution for meshwright_tests.swish: b t, t -> b t" in made.plan.notes
    with pytest.raises(BadInput, match="meshwright_tests.swish.default is registered by a library.*torchrun"):
        made.forward_backward(torch.randn(8, 6), target=torch.arange(8) % 4)
