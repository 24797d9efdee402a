"""Predicted peak memory beside rows that others measured, and what the table says of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from click.testing import CliRunner

from benchmarks import memory, shapes
from benchmarks.published import FOLDER, read
from costmodels.hardware import load_cluster
from costmodels.software import load_software
from planner.ir.plan import MemoryEstimate
from planner.solve.configuration import Evaluator
from planner.solve.problem import Problem
from planner.strategies import plan_by_hand

MCORE, ZERO_BUBBLE = memory.SOURCES


@pytest.mark.parametrize(
    ("source", "row"),
    [
        (ZERO_BUBBLE, 3),  # GPT 6.2B, pp8, 1F1B
        (ZERO_BUBBLE, 6),  # the same, interleaved, a layer a stage
        (MCORE, 2),  # GPT 7B, tp4, ZeRO-1
        (MCORE, 12),  # 12 layers of 512 on dp8, unfused attention
    ],
    ids=str,
)
def test_rows_that_nothing_was_calibrated_on(source: memory.Source, row: int) -> None:
    rows = read(FOLDER / f"{source.name}.csv")
    found = memory.predict(rows[row], row, source)
    assert not found.calibrates and not found.reason
    assert found.predicted_bytes == pytest.approx(found.measured_bytes, rel=0.06)


def test_activations_of_the_22b_model_as_its_authors_count_them() -> None:
    """59.25 GiB a device: Korthikanti and others (2022), figure 1, without sequence parallelism and recomputation. The loss and
    the embedding, which they leave out, are a hundredth more."""
    shape = replace(shapes.SHAPES["megatron-22b"], fused=False, dropout=0.1)
    graph = shapes.graph_of(shape, 4, "bfloat16")
    cluster = load_cluster("dgx-a100-80gb", 8).run_by(load_software(MCORE.software))
    evaluator = Evaluator(Problem("22b", graph, cluster, "adamw", "bfloat16", 2**60))
    found = plan_by_hand(evaluator, "tp8 mb=1 sequence=whole").estimate.stages[0].memory
    assert found.activations_bytes == pytest.approx(59.25 * memory.GIB, rel=0.01)


def test_what_a_row_says_becomes_a_strategy_and_a_model() -> None:
    row = {
        "layers": "12", "hidden": "512", "heads": "8", "vocab": "50257", "seq_len": "1024", "tp": "2", "pp": "4", "vp": "3",
        "dp": "2", "global_batch": "32", "micro_batch": "4", "zero_stage": "1", "sequence_parallel": "0",
        "recompute": "full", "swiglu": "1", "untied": "1", "attention": "unfused",
    }  # fmt: skip
    assert memory.strategy_of(row) == (
        "pp4.dp2.tp2 mb=4 zero=1 recompute=full split=layers schedule=interleaved v=3 sequence=whole"
    )
    shape = memory.shape_of(row)
    assert (shape.vocabulary, shape.inner, shape.tied, shape.fused) == (50432, 1344, False, False)


def predicted(row: int, measured: float, bytes_: int) -> memory.Predicted:
    return memory.Predicted("source", row, "model", "ddp", measured, MemoryEstimate(weights_bytes=bytes_))


def test_errors_are_of_rows_that_do_not_calibrate() -> None:
    found = [predicted(0, 100.0, 1), predicted(1, 100.0, 110), predicted(2, 200.0, 180), predicted(5, 100.0, 61)]
    assert memory.summary("source", found) == ("source", "4", "2", "10.0%", "0.0%", "10.0%", "1.000")
    assert memory.calibrated_bytes(found, replace(MCORE, software="meshwright")) == (99 + 39) / 2
    assert memory.summary("source", found[:1]) == ("source", "1", "0", "", "", "", "")


def test_an_unknown_source_is_refused() -> None:
    answer = CliRunner().invoke(memory.main, ["--only", "nothing"])
    assert answer.exit_code == 1 and "the sources are mcore_memory, zero_bubble" in answer.output
