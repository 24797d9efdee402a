"""What benchmarks.network says follows from what it ran; hosts are emulated where that is possible, and leave nothing behind."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import hosts, network
from benchmarks.local_models import CASES
from benchmarks.rows import Row
from planner.strategies import parse_strategy


def row(rate: str) -> Row:
    return {"model": "gpt", "rate": rate, "rounds": 1, "steps": 1}


def found(plan: str, *measured: tuple[str, float]) -> dict[str, Any]:
    return {
        "ran": [
            {"strategy": name, "plan": plan if name == "auto" else name, "predicted_s": 1.0, "measured_s": seconds}
            for name, seconds in measured
        ]
    }


def test_a_summary_by_hand() -> None:
    slow, fast = found("pp2", ("auto", 1.1), ("ddp", 2.0), ("model", 1.0)), found("dp2", ("auto", 1.0), ("tp", 3.0))
    cells = dict(zip(network.HEADINGS, network.summary(row("1 Gbit/s"), slow), strict=True))
    assert (cells["plan"], cells["best"], cells["regret"]) == ("pp2", "model", "10.0%")
    assert [line[2] for line in network.details(row("1 Gbit/s"), slow)] == ["model", "auto", "ddp"]
    answers = [(row("1 Gbit/s"), slow), (row("10 Gbit/s"), fast), (row("100 Mbit/s"), {"error": "rank 0: gone"})]
    assert network.words(answers) == (
        "the plan changes with the link for 1 of 1 models; its regret: median 5.0%, mean 5.0%, worst 10.0%"
    )
    assert network.summary(*answers[2])[2] == "rank 0: gone"


def test_models_and_strategies_exist() -> None:
    assert set(network.MODELS) <= set(CASES)
    assert all(parse_strategy(text, network.HOSTS) for text in network.STRATEGIES)


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    run = CliRunner().invoke(network.main)
    assert run.exit_code == 0 and run.output.startswith("skipped: ") and "root" in run.output
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 0)
    monkeypatch.setattr(hosts.sys, "platform", "linux")
    monkeypatch.setattr(hosts.shutil, "which", lambda tool: None)
    assert "iproute2" in hosts.why_not()


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@pytest.mark.net
def test_hosts_are_removed_whatever_happens() -> None:
    if reason := hosts.why_not():
        pytest.skip(reason)
    with pytest.raises(KeyboardInterrupt), hosts.Hosts() as two:
        two.limit(1e8)
        two.limit(1e9)
        assert all(name in namespaces() for name in two.names)
        raise KeyboardInterrupt
    assert not any(name in namespaces() for name in two.names)


@pytest.mark.net
@pytest.mark.timeout(600)
def test_the_plan_of_a_small_model_runs_on_two_hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    if reason := hosts.why_not():
        pytest.skip(reason)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    from tests.test_benchmarks_local import local_case

    monkeypatch.setitem(CASES, "gpt", local_case())  # type: ignore[misc]
    with hosts.Hosts() as two:
        rows = network.read(row("1 Gbit/s"), network.run(row("1 Gbit/s"), two))
    assert {one.strategy for one in rows} >= {"auto", "ddp", "tp", "model"}
    assert all(0 < one.measured_s < 60 and 0 < one.predicted_s < 60 for one in rows)
