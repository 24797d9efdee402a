"""The order of actions is the one torch executes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.ir.schedule import Action, parse_order, print_order
from planner.schedules import actions, check, held, in_flight

SIZES = st.integers(1, 8), st.integers(1, 20)
IN_ROUNDS = ["interleaved", "zero-bubble"]


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


class StageOfRank:
    """What torch's schedules of several stages a rank ask of a stage before they run."""

    def __init__(self, index: int, pp: int, chunks: int) -> None:
        self.stage_index, self.num_stages = index, pp * chunks
        self.group_size, self.group_rank = pp, 0
        self.is_first, self.is_last = index == 0, index == pp * chunks - 1
        self.submod = None


def torch_orders(schedule: str, pp: int, micro_batches: int, chunks: int) -> list[list[str]] | None:
    """The order of each rank, as torch builds and checks it; None where it refuses."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    cls = {"interleaved": "ScheduleInterleaved1F1B", "zero-bubble": "ScheduleInterleavedZeroBubble"}[schedule]
    stages = [StageOfRank(chunk * pp, pp, chunks) for chunk in range(chunks)]
    try:
        built = getattr(schedules, cls)(stages, micro_batches)
    except ValueError as error:
        assert "multiple of the number of rounds" in str(error)
        return None
    return [[str(action) for action in built.pipeline_order[rank] if action is not None] for rank in range(pp)]


@pytest.mark.parametrize("schedule", IN_ROUNDS)
@pytest.mark.parametrize("pp", [2, 3, 4, 6])
def test_orders_of_several_stages_are_torchs(schedule: str, pp: int) -> None:
    """For every number of micro-batches: the same order, or torch refuses and so do we."""
    refused = 0
    for chunks in range(1 + (schedule == "interleaved"), 5):
        for micro_batches in range(1, 3 * pp + 2):
            theirs = torch_orders(schedule, pp, micro_batches, chunks)
            if theirs is None:
                refused += 1
                assert "in equal rounds" in check(schedule, pp, micro_batches, chunks)
                with pytest.raises(ValueError, match="in equal rounds"):
                    actions(schedule, pp, micro_batches, chunks)
            else:
                assert check(schedule, pp, micro_batches, chunks) == ""
                ours = actions(schedule, pp, micro_batches, chunks)
                assert [[str(action) for action in order] for order in ours] == theirs
    assert refused


def test_zero_bubble_by_hand() -> None:
    assert [print_order(order) for order in actions("zero-bubble", 3, 3)] == [
        "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2",
        "1F0 1F1 1I0 1F2 1I1 1W0 1I2 1W1 1W2",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2W1 2W2",
    ]


def test_interleaved_by_hand() -> None:
    # rank 0 has stages 0 and 2, rank 1 stages 1 and 3; rounds of 2 micro-batches
    assert [print_order(order) for order in actions("interleaved", 2, 4, 2)] == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


@st.composite
def several(draw: st.DrawFn) -> tuple[str, int, int, int]:
    schedule = draw(st.sampled_from(IN_ROUNDS))
    pp, chunks = draw(st.integers(2, 6)), draw(st.integers(2 if schedule == "interleaved" else 1, 4))
    return schedule, pp, draw(st.integers(1, 20).filter(lambda m: not check(schedule, pp, m, chunks))), chunks


@given(several())
def test_held_vectors_cover_what_is_held(sizes: tuple[str, int, int, int]) -> None:
    """Replayed: everything held at any moment is covered by a vector; each vector happens; none covers another."""
    _, pp, _, chunks = sizes
    for rank, (order, vectors) in enumerate(zip(actions(*sizes), held(*sizes), strict=True)):
        now, seen = [0] * chunks, set()
        for action in order:
            assert action.stage % pp == rank
            now[action.stage // pp] += {"F": 1, "I": 0}.get(action.kind, -1)
            seen.add(tuple(now))
        assert now == [0] * chunks
        assert set(vectors) <= seen
        for moment in seen:
            assert any(all(a <= b for a, b in zip(moment, vector, strict=True)) for vector in vectors)
        for one in vectors:
            assert not any(one != two and all(a <= b for a, b in zip(one, two, strict=True)) for two in vectors)


@given(st.sampled_from(["gpipe", "1f1b"]), *SIZES)
def test_held_with_one_stage_a_rank(schedule: str, stages: int, micro_batches: int) -> None:
    assert held(schedule, stages, micro_batches) == tuple(
        ((in_flight(schedule, stages, micro_batches, stage),),) for stage in range(stages)
    )


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        (("1f1b", 4, 3), "1f1b needs at least as many micro-batches as stages, not 3 for 4"),
        (("gpipe", 2, 4, 2), "gpipe runs one stage a rank, not 2"),
        (("interleaved", 2, 4), "interleaved needs at least 2 stages a rank"),
        (("interleaved", 1, 4, 2), "interleaved needs at least 2 pipeline ranks"),
        (("zero-bubble", 1, 4), "zero-bubble needs at least 2 pipeline ranks"),
        (("zero-bubble", 4, 11), "11 on pp4 make 2; use a multiple of 2, such as mb=8"),
        (("1f1b", 2, 4, 0), "0 chunks; each must be at least 1"),
    ],
)
def test_why_a_schedule_does_not_exist(sizes: tuple[Any, ...], told: str) -> None:
    assert told in check(*sizes)


@given(st.builds(Action, st.integers(0, 10**6), st.sampled_from("FBIW"), st.integers(0, 10**6)))
def test_words_round_trip(action: Action) -> None:
    assert Action.parse(str(action)) == action


def test_order_round_trip() -> None:
    (order,) = actions("1f1b", 1, 12)
    assert parse_order(print_order(order)) == order


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2F0 ", "-1F0", "02F0", "2F0B1", "\u0662F0"])
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
