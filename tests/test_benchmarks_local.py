"""What benchmarks.local says follows from what it ran; and every one of its strategies can be meant."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from benchmarks import local
from benchmarks.local_models import CASES
from benchmarks.rows import Row
from planner.strategies import parse_strategy

ROW: Row = {"model": "gpt", "ranks": 2, "rounds": 1, "steps": 1, "plain": True, "refresh": False}


def one(strategy: str, predicted_s: float, measured_s: float, **more: object) -> dict[str, object]:
    found = {"strategy": strategy, "plan": strategy, "predicted_s": predicted_s, "measured_s": measured_s}
    return {**found, "predicted_bytes": 100, "measured_bytes": 200, **more}


def test_a_summary_by_hand() -> None:
    """Errors 0, +50 % and -20 %; the order is right but for the first two, so that the choice loses a tenth."""
    found = {
        "coverage": "",
        "ran": [
            one("auto", 1.0, 1.0),
            one("tp", 0.9, 1.1),
            one("ddp", 3.0, 2.0),
            {"strategy": "fsdp", "plan": "", "reason": "it cannot be"},
        ],
    }
    rows = local.ran(local.read(ROW, found))
    assert [row.strategy for row in rows] == ["auto", "tp", "ddp"]
    cells = dict(zip(local.HEADINGS, local.summary(ROW, found), strict=True))
    assert cells["strategies"] == "3" and cells["plan"] == "auto" and cells["priced by"] == "constants"
    assert cells["MAPE"] == f"{(0 + 2 / 11 + 0.5) / 3:.1%}" and cells["worst"] == "+50%"
    assert cells["regret"] == "10.0%" and cells["rank"] == "0.50" and cells["memory MAPE"] == "50%"
    shown = list(local.details(ROW, found))
    assert len(shown) == 4 and any("it cannot be" in line for line in shown)
    assert "3 runs, MAPE 22.7%" in local.words(2, rows)


def test_a_row_that_fails_says_why() -> None:
    assert local.summary(ROW, {"error": "no answer in 1 s"})[2] == "no answer in 1 s"
    assert len(local.summary(ROW, {"error": "no"})) == len(local.HEADINGS)


@pytest.mark.parametrize("gpus", local.STRATEGIES)
def test_every_strategy_is_one(gpus: int) -> None:
    parsed = [parse_strategy(text, gpus) for text in local.STRATEGIES[gpus]]
    assert len({(p.mesh, p.micro_batches, p.zero, p.schedule, p.recompute) for p in parsed}) == len(parsed)


@pytest.mark.parametrize("name", CASES)
def test_every_model_gives_its_loss(name: str) -> None:
    assert set(CASES) == set(local.MODELS)
    torch.manual_seed(0)
    loss = CASES[name].make()(*CASES[name].batch())
    assert loss.shape == () and torch.isfinite(loss)


@pytest.mark.gloo
def test_a_model_is_priced_and_run(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(local.STRATEGIES, 2, ("ddp", "tp", "pp2 mb=3 schedule=interleaved v=8"))
    monkeypatch.setitem(CASES, "gpt", local_case())  # type: ignore[misc]
    rows = local.read(ROW, local.run(ROW))
    assert {row.strategy for row in rows} == {"auto", "ddp", "tp", "pp2 mb=3 schedule=interleaved v=8"}
    assert len(local.ran(rows)) == 3
    for row in local.ran(rows):
        assert 0 < row.predicted_s < 10 and 0 < row.measured_s < 60 and row.measured_bytes > 0, asdict(row)


def local_case():  # type: ignore[no-untyped-def]
    from benchmarks.local_models import Case
    from benchmarks.models import MLP

    return Case(lambda: MLP(3, 8), lambda: (torch.randn(4, 8), torch.randn(4, 8)))
