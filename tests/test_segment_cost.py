"""Memory of devices that hold several stages, and the part of a backward that is for weights alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from planner.ir.mesh import Mesh
from planner.schedules import actions, held
from planner.segment_cost import SegmentCost, stage_estimate, stage_estimates
from planner.simulate import estimate_step
from planner.solve.configuration import Configuration, Evaluator
from planner.trace import Batch, trace
from tests.search_cases import cluster, problem
from tests.test_schedules import several

SIZES = st.integers(0, 20)
SEGMENT = st.builds(
    lambda a, w, t: SegmentCost(1.0, 2.0, activations_bytes=a, weights_bytes=w, gradients_bytes=w, temporary_bytes=t),
    SIZES, SIZES, SIZES,
)  # fmt: skip


@given(several(), st.data())
@settings(max_examples=80)
def test_the_peak_of_a_device_is_that_of_its_schedule(sizes: tuple[str, int, int, int], data: st.DataObject) -> None:
    """Replayed: states of all its stages, what is held at each moment, and the largest temporary of any of them."""
    schedule, pp, micro_batches, chunks = sizes
    count = pp * chunks
    segments = data.draw(st.lists(SEGMENT, min_size=count, max_size=count))
    stages = [(i, i + 1) for i in range(count)]
    estimates = stage_estimates(segments, stages, ("none",) * count, held(*sizes))
    estimate = estimate_step(estimates, schedule, micro_batches, 0, chunks)
    for rank, order in enumerate(actions(*sizes)):
        now = most = 0
        for action in order:
            kept = segments[action.stage].activations_bytes
            now += {"F": kept, "I": 0}.get(action.kind, -kept)
            most = max(most, now)
        mine = segments[rank::pp]
        expected = sum(s.states_bytes for s in mine) + most + max(s.temporary_bytes for s in mine)
        assert estimate.devices[rank].total_bytes == expected


def test_what_stages_exchange_and_put_off_by_hand() -> None:
    """Buffers of 4 micro-batches of 3 bytes each way, what was sent until its backward, inputs counted once; and under
    zero-bubble 5 bytes a micro-batch put off, of up to r + 1."""
    inner = SegmentCost(1.0, 2.0, activations_bytes=3, crossing_bytes=3, buffers_bytes=12, pending_bytes=5)
    segments = [inner, inner, inner, SegmentCost(1.0, 2.0, activations_bytes=3, pending_bytes=5)]
    stages = [(i, i + 1) for i in range(4)]

    def kept(schedule: str, chain: list[SegmentCost]) -> list[int]:
        estimates = stage_estimates(chain, stages, ("none",) * 4, held(schedule, 4, 4))
        return [estimate.memory.activations_bytes for estimate in estimates]

    plain = [replace(segment, pending_bytes=0) for segment in segments]
    assert kept("1f1b", plain) == [4 * 3 + 24, 3 * 3 + 24, 2 * 3 + 24, 1 * 3 + 9]
    assert kept("zero-bubble", plain) == [4 * 3 + 24, 4 * 3 + 24, 4 * 3 + 24, 4 * 3 + 0]
    put_off = [both - one for both, one in zip(kept("zero-bubble", segments), kept("zero-bubble", plain), strict=True)]
    assert put_off == [5, 10, 15, 20]


def test_communication_that_is_repeated_is_communication_and_no_other_part() -> None:
    """Recomputed in full, all of it communication: the parts of a backward never exceed it."""
    segment = SegmentCost(2.0, 3.0, forward_communication_s=1.5, backward_communication_s=2.5)
    stage = stage_estimate([segment], ["full"], 1, True)
    assert (stage.backward_s, stage.backward_communication_s, stage.recomputation_s) == (5.0, 4.0, 0.5)
    silent = stage_estimate([SegmentCost(2.0, 0.0, forward_communication_s=2.0)], ["full"], 1, True)
    assert (silent.backward_s, silent.backward_communication_s, silent.recomputation_s) == (2.0, 2.0, 0.0)


class Rows(nn.Module):
    """Four linear layers of one width; the last is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(4))
        self.layers[3].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


def test_weights_take_one_of_the_two_matmuls_of_a_backward() -> None:
    """Where matmuls are all that costs: half of the backward of a layer, all of the first, whose input needs no gradient,
    none of a frozen one's."""
    on = cluster(2, latency_s=0.0, launch_s=0.0, flops_per_s=1e6)
    traced = trace(Rows(), Batch((torch.randn(64, 256),), {}, torch.randn(64, 256)), F.mse_loss)
    evaluator = Evaluator(problem(traced.graph, on))
    configuration = Configuration(Mesh(pp=2), 1, 0, "zero-bubble")
    costs = [c for c in evaluator.costs(configuration, evaluator.letters(configuration)) if c.backward_s > 1.0]
    shares = [cost.weight_backward_s / cost.backward_s for cost in costs]
    assert shares == pytest.approx([1.0, 0.5, 0.5, 0.0], abs=0.01)
    assert all(cost.weight_backward_s <= cost.backward_s for cost in costs)
