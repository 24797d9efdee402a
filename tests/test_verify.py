"""Each way a plan can be illegal is found and named; legal plans pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from planner.errors import InvalidPlan
from planner.ir.graph import Graph, Leaf, Node, Ref, Value
from planner.ir.mesh import Mesh
from planner.ir.plan import OperatorLayout, Plan, Searched
from planner.ir.verify import verify_plan
from tests.plan_examples import example_plan, plans, single_device_plan

PLAN = example_plan()


@given(plans())
@settings(max_examples=50)
def test_legal_plans_pass(plan: Plan) -> None:
    verify_plan(plan)


def test_examples_pass() -> None:
    verify_plan(PLAN)
    verify_plan(single_device_plan())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"segments": (), "recompute": ()}, "it has no segments"),
        ({"stages": ((0, 6),)}, r"it has 1 stages, but its mesh pp2\.dp2\.tp2 has 2"),
        ({"mesh": Mesh(1, 2, 2)}, "it has 2 stages, but its mesh dp2.tp2 has 1"),
        ({"stages": ((1, 3), (3, 6))}, "stage 0 starts at segment 1 instead of 0"),
        ({"stages": ((0, 3), (4, 6))}, "stage 1 starts at segment 4 instead of 3"),
        ({"stages": ((0, 4), (3, 6))}, "stage 1 starts at segment 3 instead of 4"),
        ({"stages": ((0, 0), (0, 6))}, r"stage 0 holds no segment \(0 to 0\)"),
        ({"stages": ((0, 3), (3, 2))}, r"stage 1 holds no segment \(3 to 2\)"),
        ({"stages": ((0, 3), (3, 5))}, "its stages end at segment 5, but it has 6 segments"),
        ({"recompute": ("none",) * 5}, "recompute has 5 entries for 6 segments"),
        (
            {"recompute": ("none",) * 5 + ("half",)},
            "recompute holds 'half'; a segment's word is one of none, selective, full",
        ),
        ({"schedule": "zigzag"}, "unknown schedule 'zigzag'; the schedules are gpipe, 1f1b, interleaved, zero-bubble"),
        ({"micro_batches": 0}, "0 micro-batches of a batch of 64; both must be at least 1"),
        ({"global_batch": 7}, "a batch of 7 cannot be cut into 2 data shards x 4 micro-batches"),
        ({"micro_batches": 1}, "1f1b needs at least as many micro-batches as stages, not 1 for 2"),
        ({"chunks": 2}, r"it has 2 stages, but its mesh pp2\.dp2\.tp2 has 2 of 2 stages each"),
        ({"schedule": "interleaved"}, r"interleaved needs at least 2 stages a rank \(v=2\)"),
        ({"schedule": "zero-bubble"}, "zero-bubble runs without recomputation only"),
        ({"schedule": "zero-bubble", "zero": 3}, "zero-bubble runs with ZeRO 0 and 1 only, not 3"),
        (
            {"schedule": "zero-bubble", "micro_batches": 7},
            r"equal rounds, of which 7 on pp2 make 3; use a multiple of 3, such as mb=6",
        ),
        ({"zero": 4}, "ZeRO stage 4; it must be one of 0, 1, 2, 3"),
        ({"layouts": (OperatorLayout("a", "op", "", 7, "b", "R"),)}, "operator a is laid out for segments of kind 7"),
        (
            {"layouts": (OperatorLayout("a", "op", "", 0, "", "R"),)},
            "operator a has no strategy on axis dp, of degree 2",
        ),
        (
            {"layouts": (OperatorLayout("a", "op", "", 0, "b", ""),)},
            "operator a has no strategy on axis tp, of degree 2",
        ),
        (
            {"layouts": (OperatorLayout("a", "op", "", 0, "b", "R", "X:R"),)},
            "output of operator a: 'X' is not a placement",
        ),
        ({"bound_s": 0.2}, r"its bound of 0\.2 s is above its objective of 0\.1"),
        ({"bound_s": float("nan")}, "bound_s is nan"),
        ({"searched": (Searched("dp8", 0.1, "lost"),)}, "configuration dp8 has the unknown outcome 'lost'"),
    ],
)
def test_illegal_plans(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidPlan, match=f"^the plan for gpt is not legal: .*{told}") as caught:
        verify_plan(replace(PLAN, **changes))
    assert "'planner plan'" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"step_time_s": 0.1}, r"its step_time_s is 0\.1, but its stages give 0\.1"),
        ({"bubble_s": 0.0}, r"its bubble_s is 0, but its stages give"),
        ({"compute_s": -1.0}, r"estimate: compute_s is -1\.0"),
        ({"stages": PLAN.estimate.stages[:1]}, "its estimate has 1 stages"),
        ({"memory_limit_bytes": 15 * 10**9 - 1}, "stage 0 needs 15000000000 bytes a device, the limit is 14999999999"),
    ],
)
def test_illegal_estimates(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidPlan, match=told):
        verify_plan(replace(PLAN, estimate=replace(PLAN.estimate, **changes)))


def test_stage_figures() -> None:
    first, second = PLAN.estimate.stages

    def with_first(**changes: float) -> Plan:
        return replace(PLAN, estimate=replace(PLAN.estimate, stages=(replace(first, **changes), second)))

    for changes, told in (
        ({"forward_s": first.forward_s * (1 - 1e-7)}, "its step_time_s is"),
        ({"backward_s": float("inf")}, "estimate of stage 0: backward_s is inf"),
        ({"forward_communication_s": 0.1}, r"estimate of stage 0: the parts of its forward, 0\.1 s, exceed 0\.01 s"),
        ({"recomputation_s": 0.1}, r"estimate of stage 0: the parts of its backward, 0\.104 s, exceed 0\.02 s"),
    ):
        with pytest.raises(InvalidPlan, match=told):
            verify_plan(with_first(**changes))


def test_a_hand_picked_plan_may_overflow() -> None:
    verify_plan(replace(PLAN, strategy="fsdp", estimate=replace(PLAN.estimate, memory_limit_bytes=1)))


def small_graph(segments: int, batch: int) -> Graph:
    x = Value("x", (batch, 3), "float32")
    nodes = []
    for i in range(segments):
        nodes.append(
            Node(
                "aten.relu.default",
                (Ref(f"y{i - 1}" if i else "x"),),
                (Value(f"y{i}", (batch, 3), "float32"),),
                segment=i,
            )
        )
    nodes.append(
        Node("aten.sum.default", (Ref(f"y{segments - 1}"),), (Value("loss", (), "float32"),), segment=segments - 1)
    )
    return Graph((Leaf("input", "[0][0]", x, batched=True),), tuple(nodes), "loss", batch_size=batch)


def test_another_graph() -> None:
    graph = small_graph(6, 64)
    plan = replace(PLAN, graph_digest=graph.digest)
    verify_plan(plan, graph)
    with pytest.raises(InvalidPlan, match=r"for another model or another batch: .*batch 64.*batch 32"):
        verify_plan(plan, small_graph(6, 32))
    fewer = small_graph(6, 64)
    cut = replace(fewer, nodes=tuple(replace(node, segment=node.segment // 2) for node in fewer.nodes))
    with pytest.raises(InvalidPlan, match="has 6 segments, this model 3"):
        verify_plan(plan, cut)
