"""The census outlives what its cells do to it, and its table says what they found."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import census
from benchmarks.census import Cell

# Stands for the process that makes cells: (b, tp) crashes, (c, ddp) never ends.
WORKER = """
import json, os, sys, time
for name, strategies in json.loads(sys.argv[1]):
    for strategy in strategies:
        if (name, strategy) == ("b", "tp"):
            os._exit(9)
        if (name, strategy) == ("c", "ddp"):
            time.sleep(600)
        print(json.dumps({"model": name, "strategy": strategy, "outcome": "equal"}), flush=True)
"""


def test_a_crash_and_a_hang_cost_one_cell_each(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    found = list(census.census([(m, ["ddp", "tp", "auto"]) for m in "abc"], 5.0, (sys.executable, str(worker))))
    assert [(cell.model, cell.strategy) for cell in found] == [(m, s) for m in "abc" for s in ("ddp", "tp", "auto")]
    failed = {(cell.model, cell.strategy): cell.reason for cell in found if cell.outcome != "equal"}
    assert failed == {("b", "tp"): "the process ended with exit code 9", ("c", "ddp"): "no answer in 5 s"}


CELLS = [
    Cell("gpt", "ddp", "equal", plan="dp4", dtype="float64", error=2e-16),
    Cell("gpt", "auto", "equal", plan="pp2.tp2", dtype="float64", error=3e-12),
    Cell("moe", "ddp", "refused", "operator sort couples the samples"),
    Cell("moe", "auto", "fails", "NameError: x | y"),
    Cell("cnn", "ddp", "unequal", "gradient of a_b is 1e-3 off"),
    Cell("cnn", "auto", "refused", "operator sort couples the samples"),
]


def test_the_table_has_a_row_a_model_and_every_reason_once() -> None:
    text = census.markdown(CELLS, ["ddp", "auto"])
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows == [
        "| model | `ddp` | `auto` | dtype | error |",
        "| gpt | equal | equal | float64 | 3e-12 |",
        "| moe | refused 1 | **fails** 2 |  |  |",
        "| cnn | **UNEQUAL** 3 | refused 1 |  |  |",
    ]
    assert text.count("operator sort couples the samples") == 1
    assert "1. operator sort couples the samples  \n   *moe (ddp); cnn (auto)*" in text
    assert "NameError: x \\| y" in text and "a\\_b" in text
    assert "- `pp2.tp2`: gpt" in text


def test_the_summary_counts() -> None:
    assert census.summary(CELLS) == (
        "3 models x 2 strategies = 6 cells: equal 2 (33.3%), refused 2 (33.3%), fails 1 (16.7%), unequal 1 (16.7%)"
    )


def test_cells_made_before_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def made(wanted: list[tuple[str, list[str]]], timeout_s: float) -> list[Cell]:
        asked.append(wanted)
        return [Cell(name, strategy, "equal") for name, strategies in wanted for strategy in strategies]

    monkeypatch.setattr(census, "census", made)
    options = [
        "--models",
        "mlp_mixer,deep",
        "--cells",
        str(tmp_path / "cells"),
        "--output",
        str(tmp_path / "census.md"),
    ]
    for strategies in ("ddp", "ddp,tp", "ddp,tp"):
        done = CliRunner().invoke(census.main, [*options, "--strategies", strategies])
        assert done.exit_code == 0, done.output
    assert asked == [[("mlp_mixer", ["ddp"]), ("deep", ["ddp"])], [("mlp_mixer", ["tp"]), ("deep", ["tp"])], []]
    assert "4 cells: equal 4 (100.0%)" in done.stdout
    text = (tmp_path / "census.md").read_text()
    assert "| deep | equal | equal |" in text and "4 cells were kept from runs of earlier versions" in text


@pytest.mark.gloo
def test_cells_of_a_model() -> None:
    found = list(census.cells_of("tied_embedding", ["ddp", "model", "pp2 mb=2", "pp2.dp2 mb=64"]))
    assert [cell.outcome for cell in found] == ["equal", "equal", "equal", "refused"]
    assert found[0].dtype == "float64" and found[0].error is not None and found[0].error < 1e-9
    assert found[2].plan.startswith("pp2 ")


def test_a_reason_is_one_line_and_says_what_was_raised() -> None:
    text = textwrap.dedent(
        """\
        rank 1 failed in 'train_step': NameError: name 'x' is not defined
          | Traceback (most recent call last):
          | NameError: name 'x' is not defined
        All ranks were stopped."""
    )
    assert census._one_line(text) == "rank 1 failed in 'train_step': NameError: name 'x' is not defined"
