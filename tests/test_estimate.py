"""The prediction of one strategy: the plan's own figures, for any software, in code and on the command line."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

import planner
from benchmarks.published import FOLDER, SOURCES, Predicted, predict, ranks, read, regrets, shape_of, strategy_of
from costmodels.software import OURS, load_software, software_names
from planner.cli import cli
from planner.errors import BadInput
from planner.strategies import even_layers
from tests.models import gpt


def asked(strategy: str, **options: object) -> planner.ir.plan.Estimate:
    with torch.device("meta"):
        model, tokens = gpt.GPT(96, 16, 32, 4, 4), torch.zeros(8, 16, dtype=torch.int64)
    return planner.estimate(
        model,
        4,
        strategy=strategy,
        cluster="dgx-a100-80gb",
        example_inputs=(tokens,),
        example_target=tokens,
        loss_fn=gpt.loss_fn,
        **options,
    )


@pytest.mark.parametrize("strategy", ["ddp", "pp2.tp2 mb=4 split=layers sequence=whole", "auto"])
def test_the_figures_are_those_of_the_plan(strategy: str) -> None:
    found = asked(strategy)
    with torch.device("meta"):
        model, tokens = gpt.GPT(96, 16, 32, 4, 4), torch.zeros(8, 16, dtype=torch.int64)
    with planner.auto_parallelize(
        model,
        4,
        strategy=strategy,
        cluster="dgx-a100-80gb",
        example_inputs=(tokens,),
        example_target=tokens,
        loss_fn=gpt.loss_fn,
    ) as parallel:
        assert found == parallel.plan.estimate


def test_software_that_reduces_after_backward_holds_more_and_is_slower() -> None:
    ours, theirs = asked("ddp"), asked("ddp", software="megatron-deepspeed")
    assert theirs.step_time_s > ours.step_time_s
    weights = ours.devices[0].weights_bytes  # float32 here; theirs is said in bytes of an element
    assert theirs.devices[0].optimizer_bytes == 12 * weights // 4
    with pytest.raises(BadInput, match="software 'caffe' is unknown; use one of meshwright, llm-foundry"):
        asked("ddp", software="caffe")


@pytest.mark.parametrize("name", software_names())
def test_every_description_of_software_can_be_read(name: str) -> None:
    assert load_software(name).name == name
    assert (load_software(name) == OURS) == (name == "meshwright")


def test_the_command_prints_parts_and_memory() -> None:
    arguments = ["estimate", "examples.command_line:small_gpt", "--gpus", "4", "--cluster", "dgx-h100", "--strategy"]
    told = CliRunner().invoke(cli, [*arguments, "pp2.dp2 mb=4"])
    assert told.exit_code == 0 and "exposed communication" in told.stdout and "activations" in told.stdout
    data = json.loads(CliRunner().invoke(cli, [*arguments, "fsdp", "--json"]).stdout)
    parts = data["compute_s"] + data["exposed_communication_s"] + data["bubble_s"]
    assert data["step_time_s"] == pytest.approx(parts) and data["fits"]
    refused = CliRunner().invoke(cli, [*arguments, "split=thirds"])
    assert refused.exit_code != 0


@pytest.mark.parametrize(
    ("kinds", "count", "expected"),
    [
        ((0, 1, 1, 1, 1, 2), 2, ((0, 3), (3, 6))),
        ((0, 1, 2, 1, 2, 1, 2, 3), 3, ((0, 3), (3, 5), (5, 8))),
        ((1, 1, 1), 2, ((0, 2), (2, 3))),
        ((0, 1, 2), 3, ((0, 1), (1, 2), (2, 3))),
    ],
)
def test_layers_are_dealt_evenly(kinds: tuple[int, ...], count: int, expected: tuple[tuple[int, int], ...]) -> None:
    assert even_layers(kinds, count) == expected


# --- published rows ---------------------------------------------------------------------------------------------------


def test_a_row_becomes_a_model_and_a_strategy() -> None:
    row = {
        "layers": "24", "hidden": "1024", "heads": "16", "vocab": "50257", "seq_len": "1024", "tp": "4", "pp": "2",
        "dp": "1", "vp": "1", "global_batch": "16", "micro_batch": "4", "recompute": "full", "sequence_parallel": "0",
    }  # fmt: skip
    assert shape_of(row, "megatron").vocabulary == 50688  # a multiple of 4 x 128
    assert strategy_of(row, "megatron") == (
        "pp2.tp4 mb=4 zero=0 recompute=full split=layers schedule=1f1b sequence=whole"
    )


def test_a_published_row_is_predicted_within_a_factor() -> None:
    source = SOURCES[0]
    rows = read(FOLDER / f"{source.name}.csv")
    assert len(rows) == 767
    one = predict(rows[0], 0, source)
    assert not one.reason and 0.5 < one.predicted_s / one.measured_s < 2.0


def test_figures_by_hand() -> None:
    def one(group: str, measured_s: float, predicted_s: float) -> Predicted:
        return Predicted("s", 0, "m", group, "ddp", measured_s, predicted_s)

    assert ranks([3.0, 1.0, 3.0]) == [1.5, 0.0, 1.5]
    found = [one("a", 1.0, 5.0), one("a", 2.0, 4.0), one("b", 1.0, 1.0), one("b", 3.0, 2.0), one("c", 1.0, 1.0)]
    assert regrets(found) == [0.0, 1.0]
    assert found[0].error == 4.0
