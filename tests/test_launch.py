"""Local ranks start from anywhere, answer, fail with the right error, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from planner.errors import BadInput, RankFailed
from runtime.helper_handle import current_helper
from runtime.launch import LocalRanks
from tests.processes import MARK, children, is_alive, listening_addresses, marked, wait_until_gone

ROOT = Path(__file__).parent.parent
ECHO = "tests.launch_ranks:EchoRank"

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks at processes through /proc"),
]


def start(n: int = 2, **options: object) -> LocalRanks:
    return LocalRanks.start(n, device="cpu", rank_class=ECHO, timeout_s=60.0, **options)  # type: ignore[arg-type]


@pytest.fixture
def ranks() -> Iterator[LocalRanks]:
    with start(arguments={"start_with": 1.0}) as two:
        yield two


def assert_nothing_left(ranks: LocalRanks) -> None:
    """No process (not even a zombie) and no folder of ``ranks``."""
    assert ranks.closed
    assert not set(ranks.process_ids) & set(children(current_helper().process_id))
    assert not any(is_alive(pid) for pid in ranks.process_ids)
    assert not os.path.exists(ranks.directory)


# calls


def test_values_and_tensors_make_the_round_trip(ranks: LocalRanks) -> None:
    arguments = {"a": [1, None, {"b": 2.5}], "x": torch.arange(6).view(2, 3), "text": "é"}
    for reply in ranks.call("echo", arguments):
        assert reply.keys() == arguments.keys()
        assert torch.equal(reply["x"], arguments["x"]) and reply["a"] == arguments["a"] and reply["text"] == "é"


def test_large_tensors_pass_both_ways_at_once(ranks: LocalRanks) -> None:
    """32 MB each way and rank: far more than a socket holds."""
    x = torch.arange(4_000_000.0, dtype=torch.float64)
    assert all(torch.equal(reply["x"], x) for reply in ranks.call("echo", {"x": x}))


def test_each_rank_gets_its_own_arguments_and_they_form_one_group(ranks: LocalRanks) -> None:
    totals = ranks.call("total", [{"x": torch.ones(2)}, {"x": torch.full((2,), 10.0)}])
    assert [total.tolist() for total in totals] == [[13.0, 13.0]] * 2  # 1 + 10, and each rank's start_with of 1


def test_some_ranks_answer_in_the_order_asked(ranks: LocalRanks) -> None:
    assert ranks.call("echo", [{"n": 10}, {"n": 20}], ranks=[1, 0]) == [{"n": 10}, {"n": 20}]
    assert ranks.call("facts", ranks=[1])[0]["rank"] == 1


def test_ranks_live_in_the_parents_settings_without_its_code(
    ranks: LocalRanks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The helper runs already; what changed since then must still reach the ranks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(MARK, "late")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with start(1) as own:
        facts = own.call("facts")[0]
    assert (facts["mark"], facts["directory"], facts["threads"]) == ("late", str(tmp_path), 2)
    assert (facts["world_size"], facts["device"], facts["backend"]) == (1, "cpu", "gloo")
    assert "pytest" not in facts["user_code"]


def test_calls_that_cannot_be_made_are_refused_and_do_no_harm(ranks: LocalRanks) -> None:
    with pytest.raises(BadInput, match="'wipe_disk' cannot be called"):
        ranks.call("wipe_disk")
    with pytest.raises(BadInput, match=r"echo\['arguments'\]\['f'\] is a builtins.function"):
        ranks.call("echo", {"f": lambda: None})
    with pytest.raises(BadInput, match="one dict each"):
        ranks.call("echo", [{}])
    with pytest.raises(BadInput, match="distinct numbers from 0 to 1"):
        ranks.call("echo", ranks=[0, 2])
    assert ranks.call("echo", {"still": "here"}) == [{"still": "here"}] * 2


@pytest.mark.parametrize(("n", "options"), [(0, {}), (1000, {}), (2, {"device": "tpu"})])
def test_impossible_starts_are_refused_before_anything_runs(n: int, options: dict[str, str]) -> None:
    with pytest.raises(BadInput):
        LocalRanks.start(n, rank_class=ECHO, **options)  # type: ignore[arg-type]


def test_more_gpus_than_there_are_is_refused() -> None:
    with pytest.raises(BadInput, match="190 GPUs were asked for"):
        LocalRanks.start(190, device="cuda", rank_class=ECHO)


def test_only_loopback_is_listened_on(ranks: LocalRanks) -> None:
    ranks.call("total", {"x": torch.ones(1)})
    addresses = set().union(*(listening_addresses(pid) for pid in ranks.process_ids))
    assert addresses <= {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert not listening_addresses(current_helper().process_id)


def test_the_helper_has_one_thread(ranks: LocalRanks) -> None:
    """Forking a process with more would copy locks nobody releases."""
    assert len(os.listdir(f"/proc/{current_helper().process_id}/task")) == 1


def test_a_terminals_interrupt_does_not_reach_the_ranks(ranks: LocalRanks) -> None:
    for pid in (*ranks.process_ids, current_helper().process_id):
        assert os.getsid(pid) != os.getsid(0)
        os.kill(pid, signal.SIGINT)
    assert ranks.call("echo", {"a": 1}) == [{"a": 1}] * 2


def test_output_of_a_rank_is_passed_on_with_its_number() -> None:
    script = (
        "from runtime.launch import LocalRanks\n"
        f"with LocalRanks.start(1, device='cpu', rank_class={ECHO!r}) as ranks:\n"
        "    ranks.call('say', {'text': 'good day'})\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == ""
    assert "[rank 0] good day\n" in done.stderr


# sessions


def test_sessions_one_after_another_and_side_by_side_share_one_helper(ranks: LocalRanks) -> None:
    helper = current_helper().process_id
    for _ in range(2):
        with start(2) as other:
            assert not set(other.process_ids) & set(ranks.process_ids)
            assert all(set(children(helper)) >= set(each.process_ids) for each in (ranks, other))
            assert [total.item() for total in other.call("total", {"x": torch.ones(1)})] == [2.0, 2.0]
        assert_nothing_left(other)
        other.close()
    assert current_helper().process_id == helper
    assert ranks.call("echo", {"a": 1}) == [{"a": 1}] * 2


def test_a_closed_session_says_so() -> None:
    with start(1) as closed:
        pass
    with pytest.raises(BadInput, match="closed; start new ones"):
        closed.call("echo")


def test_forgotten_ranks_are_stopped() -> None:
    forgotten = start(1)
    pids, directory = set(forgotten.process_ids), forgotten.directory
    del forgotten
    assert not wait_until_gone(pids) and not os.path.exists(directory)


def test_a_ranks_own_child_does_not_outlive_it() -> None:
    with start(1) as ranks:
        grandchild = ranks.call("spawn")[0]
        assert is_alive(grandchild)
    assert not wait_until_gone({grandchild})


# failures


@pytest.mark.parametrize("who", [0, 2])
def test_an_exception_ends_all_and_is_the_error_told(who: int) -> None:
    """The others are blocked in a collective and fail too, a moment later, with lost connections."""
    ranks = start(3)
    with pytest.raises(RankFailed) as caught:
        ranks.call("fail_alone", {"who": who})
    text = str(caught.value)
    assert text.startswith(f"rank {who} failed in 'fail_alone': ValueError: no such colour on rank {who}")
    assert "raise ValueError" in text and "rank_process.py" not in text
    assert_nothing_left(ranks)
    with pytest.raises(RankFailed, match="start new ones. The error was: rank . failed in 'fail_alone'"):
        ranks.call("echo")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_rank_is_named_with_its_signal_and_last_words(number: signal.Signals) -> None:
    ranks = start(2)
    with pytest.raises(RankFailed) as caught:
        ranks.call("die", {"who": 1, "number": int(number)})
    assert str(caught.value).startswith(f"rank 1 was killed by {number.name} in 'die'\n  | last words")
    assert_nothing_left(ranks)


def test_a_rank_that_leaves_is_named_with_its_exit_code() -> None:
    ranks = start(2)
    with pytest.raises(RankFailed, match="rank 0 ended with exit code 3 in 'leave'"):
        ranks.call("leave", {"who": 0})
    assert_nothing_left(ranks)


def test_a_rank_killed_between_calls_is_told_at_the_next() -> None:
    ranks = start(2)
    os.kill(ranks.process_ids[1], signal.SIGKILL)
    assert not wait_until_gone(set(ranks.process_ids))  # the helper stops the other one without being asked
    with pytest.raises(RankFailed, match="rank 1 was killed by SIGKILL between calls"):
        ranks.call("echo")
    assert_nothing_left(ranks)


def test_a_result_that_is_not_data_is_an_error_of_the_rank() -> None:
    ranks = start(1)
    with pytest.raises(RankFailed, match="EchoRank; processes exchange only"):
        ranks.call("unsendable")
    assert_nothing_left(ranks)


@pytest.mark.parametrize(
    ("rank_class", "message"),
    [
        ("tests.launch_ranks:BrokenRank", "rank 1 failed while starting: RuntimeError: rank 1 cannot be built"),
        ("tests.launch_ranks:Nobody", "cannot load the rank class 'tests.launch_ranks:Nobody'"),
    ],
)
def test_a_rank_that_cannot_start_is_an_error_of_the_start(rank_class: str, message: str) -> None:
    before = set(children(current_helper().process_id))
    with pytest.raises(RankFailed, match=message):
        LocalRanks.start(2, device="cpu", rank_class=rank_class)
    assert set(children(current_helper().process_id)) == before


def test_a_start_that_takes_too_long_is_given_up() -> None:
    before = set(children(current_helper().process_id))
    with pytest.raises(RankFailed, match="not ready in time"):
        LocalRanks.start(1, device="cpu", rank_class="tests.launch_ranks:SlowRank", timeout_s=1.0)
    assert set(children(current_helper().process_id)) == before


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where the tests run in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_keyboard_interrupt_stops_ranks_that_ignore_sigterm() -> None:
    ranks = start(2)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        ranks.call("hang")
    timer.join()
    assert_nothing_left(ranks)


def test_closing_from_another_thread_ends_a_running_call() -> None:
    ranks = start(1)
    timer = threading.Timer(0.5, ranks.close)
    timer.start()
    with pytest.raises(BadInput, match="closed in 'hang'"):
        ranks.call("hang")
    timer.join()
    assert_nothing_left(ranks)


# deaths of the parent and of the helper; other ways to be started


def run_script(text: str, mark: str) -> subprocess.Popen[str]:
    """A Python that reads its program from standard input, as a notebook's kernel: no file, no main guard."""
    process = subprocess.Popen(
        [sys.executable, "-"],
        cwd=ROOT,
        env={**os.environ, MARK: mark},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(text)
    process.stdin.close()
    return process


SCRIPT = f"""
import os, sys, threading
from runtime.launch import LocalRanks
class OnlyHere: pass
sys.executable = ""  # as in some embedding programs
ranks = LocalRanks.start(2, device="cpu", rank_class="{ECHO}")
"""


def test_killing_the_parent_leaves_nobody() -> None:
    """The parent is killed inside a call; a child it forked (a data loader's worker, say) lives on."""
    mark = uuid.uuid4().hex
    process = run_script(
        SCRIPT
        + """
if os.fork() == 0:
    import time
    time.sleep(600)
print(ranks.directory, flush=True)
ranks.call("hang")
""",
        mark,
    )
    assert process.stdout is not None
    directory = process.stdout.readline().strip()
    everyone = marked(mark)
    forked = set(children(process.pid)) & everyone
    assert os.path.isdir(directory) and len(everyone) == 5  # the parent, its child, the helper, two ranks
    process.kill()
    process.wait(timeout=60)
    process.stdout.close()
    sleeper = {pid for pid in forked if os.getsid(pid) == os.getsid(0)}
    left = wait_until_gone(everyone - sleeper)
    for pid in sleeper:
        os.kill(pid, signal.SIGKILL)
    assert len(sleeper) == 1 and not left
    assert not os.path.exists(directory)


def test_a_script_that_just_ends_leaves_nobody() -> None:
    """Started from standard input without sys.executable, called from a thread, never closed."""
    mark = uuid.uuid4().hex
    process = run_script(
        SCRIPT
        + """
results = []
thread = threading.Thread(target=lambda: results.extend(ranks.call("echo", {"a": 1})))
thread.start()
thread.join()
print(results, ranks.directory)
""",
        mark,
    )
    assert process.stdout is not None
    with process.stdout:
        results, _, directory = process.stdout.read().strip().rpartition(" ")
    assert process.wait(timeout=60) == 0
    assert results == "[{'a': 1}, {'a': 1}]"
    assert not marked(mark) and not os.path.exists(directory)


def test_killing_the_helper_ends_its_ranks_and_the_next_start_has_a_new_one() -> None:
    ranks = start(2)
    helper = current_helper().process_id
    timer = threading.Timer(0.5, os.kill, (helper, signal.SIGKILL))
    timer.start()
    with pytest.raises(RankFailed, match="the helper process that runs the ranks was killed by SIGKILL in 'hang'"):
        ranks.call("hang")
    timer.join()
    assert not wait_until_gone(set(ranks.process_ids)) and not os.path.exists(ranks.directory)
    with start(1) as fresh:
        assert fresh.call("echo", {"a": 1}) == [{"a": 1}]
    assert current_helper().process_id != helper
