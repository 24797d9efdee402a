"""The order of actions is the one torch executes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.ir.schedule import Action, parse_order, print_order
from planner.schedules import actions, in_flight

SIZES = st.integers(1, 8), st.integers(1, 20)


class RecordingStage:
    """Stands where torch's schedules expect a pipeline stage; sends nothing and writes down what it is told to run."""

    def __init__(self, stage: int, stages: int) -> None:
        self.stage_index = stage
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.ran: list[str] = []

    def forward_one_chunk(self, micro_batch: int, *_: Any, **__: Any) -> None:
        self.ran.append(f"{self.stage_index}F{micro_batch}")

    def backward_one_chunk(self, micro_batch: int, *_: Any, **__: Any) -> None:
        self.ran.append(f"{self.stage_index}B{micro_batch}")

    def get_fwd_recv_ops(self, micro_batch: int) -> list[Any]:
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops

    def perform_reduce_grad(self, divisor: int) -> None:
        return None


def torch_order(schedule: str, stages: int, micro_batches: int, stage: int) -> list[str]:
    """Runs torch's own loop on a stage that only records."""
    pipelining = pytest.importorskip("torch.distributed.pipelining")
    cls = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}[schedule]
    recorder = RecordingStage(stage, stages)
    loop = cls.__new__(cls)
    nothing = SimpleNamespace(
        _stage=recorder, _num_stages=stages, _n_microbatches=micro_batches, scale_grads=False,
        _check_inputs=lambda *_: ([()] * micro_batches, [{}] * micro_batches), _initialize_stage=lambda *_: None,
        _maybe_compute_loss=lambda *_: None, _maybe_get_loss=lambda *_: None, _update_losses=lambda *_: None,
    )  # fmt: skip
    loop.__dict__.update(nothing.__dict__)
    loop._step_microbatches()
    return recorder.ran


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("extra", [0, 1, 5])
def test_order_is_torchs(schedule: str, stages: int, extra: int) -> None:
    micro_batches = stages + extra
    ours = actions(schedule, stages, micro_batches)
    for stage in range(stages):
        assert [str(action) for action in ours[stage]] == torch_order(schedule, stages, micro_batches, stage)


def test_1f1b_by_hand() -> None:
    assert [print_order(order) for order in actions("1f1b", 3, 4)] == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


@given(st.sampled_from(["gpipe", "1f1b"]), *SIZES)
def test_every_action_once_and_in_flight(schedule: str, stages: int, micro_batches: int) -> None:
    for stage, order in enumerate(actions(schedule, stages, micro_batches)):
        assert sorted(order) == sorted(Action(stage, kind, i) for kind in "FB" for i in range(micro_batches))
        held, most = set[int](), 0
        for action in order:
            if action.kind == "F":
                held.add(action.micro_batch)
            else:
                held.remove(action.micro_batch)
            most = max(most, len(held))
        assert most == in_flight(schedule, stages, micro_batches, stage)


@given(st.builds(Action, st.integers(0, 10**6), st.sampled_from("FB"), st.integers(0, 10**6)))
def test_words_round_trip(action: Action) -> None:
    assert Action.parse(str(action)) == action


def test_order_round_trip() -> None:
    (order,) = actions("1f1b", 1, 12)
    assert parse_order(print_order(order)) == order


@pytest.mark.parametrize("text", ["", "F0", "2F", "2W0", "2F0 ", "-1F0", "02F0", "2F0B1", "\u0662F0"])
def test_not_a_word(text: str) -> None:
    with pytest.raises(ValueError, match="is not an action; write for example 2F0"):
        Action.parse(text)


@pytest.mark.parametrize(("schedule", "stages", "micro_batches"), [("zigzag", 2, 2), ("gpipe", 0, 2), ("1f1b", 2, 0)])
def test_bad_sizes(schedule: str, stages: int, micro_batches: int) -> None:
    with pytest.raises(ValueError):
        actions(schedule, stages, micro_batches)
    with pytest.raises(ValueError):
        in_flight(schedule, stages, micro_batches, 0)


def test_in_flight_of_a_missing_stage() -> None:
    with pytest.raises(ValueError, match="no stage 2"):
        in_flight("gpipe", 2, 4, 2)
