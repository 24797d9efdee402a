"""The first real error is the one that is told."""

from __future__ import annotations

import signal

import pytest

from planner.errors import RankFailed
from runtime.failure import Failure, end_of_process, rank_failed

CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:64899."
RESET = "RuntimeError: [gloo/transport/tcp/pair.cc:456] recv: Connection reset by peer"
NCCL = "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error"


def killed(rank: int, number: int, time_s: float) -> Failure:
    return Failure(rank, end_of_process(-number), "", time_s, -number)


@pytest.mark.parametrize("echo", [CLOSED, RESET, NCCL])
def test_a_lost_connection_never_hides_its_cause(echo: str) -> None:
    for cause in (
        Failure(2, "ValueError: wrong shape", "", 7.0),
        Failure(2, end_of_process(3), "", 7.0, 3),
        killed(2, signal.SIGKILL, 7.0),
        killed(2, signal.SIGABRT, 7.0),
    ):
        error = rank_failed([Failure(0, echo, "", 5.0), cause, Failure(1, echo, "", 6.0)], "in 'step'")
        assert str(error).startswith("rank 2 "), error


def test_the_earlier_of_two_real_errors_is_told() -> None:
    failures = [Failure(0, "ValueError: late", "", 2.0), Failure(1, "ValueError: early", "", 1.0)]
    assert str(rank_failed(failures, "in 'step'")).startswith("rank 1 failed in 'step': ValueError: early")


def test_a_kill_is_the_cause_even_if_noticed_later_than_its_effects() -> None:
    failures = [Failure(0, "RuntimeError: got 3 of 8 bytes", "", 1.0), killed(1, signal.SIGKILL, 1.1)]
    assert str(rank_failed(failures, "in 'step'")).startswith("rank 1 was killed by SIGKILL in 'step'")


def test_only_lost_connections_are_still_told() -> None:
    error = rank_failed([Failure(1, CLOSED, "", 2.0), Failure(0, RESET, "", 1.0)], "in 'step'")
    assert isinstance(error, RankFailed) and "rank 0" in str(error) and "reset by peer" in str(error)


def test_the_text_shows_details_and_advice() -> None:
    text = str(rank_failed([Failure(3, end_of_process(-9), "one\ntwo", 0.0, -9)], "in 'step'"))
    assert text == (
        "rank 3 was killed by SIGKILL in 'step'\n  | one\n  | two\n"
        "If nobody killed it, the machine ran out of memory: use fewer ranks or smaller micro-batches.\n"
        "All ranks were stopped."
    )


def test_ends_are_named() -> None:
    assert end_of_process(3) == "ended with exit code 3"
    assert end_of_process(-signal.SIGSEGV) == "was killed by SIGSEGV"
