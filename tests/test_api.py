"""The public calls before any process starts: what they accept, what they find out, and one clear message for the rest."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import planner
from planner import errors
from planner.api import Parallel
from planner.inputs import example_batch, guess_target
from planner.trace import Batch
from runtime.launch import LocalRanks
from tests.models import gpt_tied, hf_gpt2, mlp, resnet_digits

CLUSTER = "dgx-a100-80gb"


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was to be started")

    monkeypatch.setattr(LocalRanks, "start", refuse)


def plan(model: Any = None, **options: Any) -> Parallel:
    """A plan of the small MLP, unless told otherwise."""
    case = mlp()
    defaults = {"gpus": 2, "example_inputs": case.inputs, "loss_fn": F.mse_loss, "cluster": CLUSTER}
    return planner.auto_parallelize(case.model if model is None else model, **{**defaults, **options})


def refused(kind: type[Exception], words: str, model: Any = None, **options: Any) -> str:
    with pytest.raises(kind, match=words) as caught:
        plan(model, **options)
    return str(caught.value)


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpus": 0}, "gpus=0; pass a whole number"),
        ({"gpus": "4"}, "gpus='4'"),
        ({"gpus": True}, "gpus=True"),
        ({"cluster": "dgx-a1000"}, "no cluster preset 'dgx-a1000'. Did you mean"),
        ({"cluster": "missing.toml"}, "cannot read cluster file missing.toml"),
        ({"cluster": 3}, "cluster is a int"),
        ({"optimizer": "adam"}, "optimizer 'adam' is unknown; use one of adamw"),
        ({"precision": "int8"}, "precision 'int8' is unknown; use one of fp32"),
        ({"precision": torch.float16}, "precision torch.float16 is unknown"),
        ({"memory_limit": "0GB"}, "above zero"),
        ({"memory_limit": "much"}, "'much' is not a memory size"),
        ({"memory_limit": -1}, "memory_limit=-1"),
        ({"memory_limit": 1.5}, "memory_limit=1.5"),
        ({"strategy": "dpp"}, "strategy 'dpp' starts with 'dpp'"),
        ({"strategy": "dp4"}, "is for 4 devices, but 2 are to be used"),
        ({"strategy": None}, "strategy=None"),
        ({"strategy": "ddp zero=4"}, "'zero=4' is not an option"),
        ({"time_limit": 0}, "time_limit=0"),
        ({"time_limit": "1"}, "time_limit='1'"),
        ({"seed": -1}, "seed=-1"),
        ({"global_batch": 0}, "global_batch=0"),
        ({"global_batch": 2.0}, "global_batch=2.0"),
        ({"loss_fn": "mse"}, "loss_fn is a str"),
        ({"example_kwargs": (1,)}, "example_kwargs is a tuple"),
        ({"plan": 3}, "plan is a int"),
    ],
    ids=lambda value: json.dumps(value, default=str) if isinstance(value, dict) else "",
)
def test_options_that_cannot_be_used(options: dict[str, Any], words: str) -> None:
    refused(errors.BadInput, words, **options)


def test_a_model_must_be_a_module() -> None:
    refused(errors.BadInput, "model is a function; pass a torch.nn.Module", model=F.relu)


def test_without_gpus_their_number_must_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    refused(errors.BadInput, "say how many devices to use", gpus=None)


def test_more_gpus_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    words = "2 GPUs were asked for and this machine has 1. Ask for at most 1"
    refused(errors.BadInput, words, cluster="auto")
    case = mlp()
    with pytest.raises(errors.BadInput, match=words):
        planner.compare(
            case.model, gpus=2, example_inputs=case.inputs, loss_fn=case.loss_fn, cluster=CLUSTER, measure=True
        )
    elsewhere = plan()  # a plan for another machine is made, but not run here
    assert elsewhere.plan.mesh.size == 2
    with pytest.raises(errors.BadInput, match=words):
        elsewhere.forward_backward(*case.inputs, target=case.target)


def test_torchrun_started_another_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    refused(errors.BadInput, "gpus=4, but torchrun started 2 ranks", gpus=4)
    case = mlp()
    with pytest.raises(errors.BadInput, match="not under torchrun"):
        planner.compare(
            case.model, gpus=2, example_inputs=case.inputs, loss_fn=case.loss_fn, cluster=CLUSTER, measure=True
        )


# --- batch and model --------------------------------------------------------------------------------------------------


def test_fewer_rows_than_shards_and_micro_batches() -> None:
    refused(errors.BadInput, "a batch of 8 cannot be cut into 9 .* at least 9 rows", gpus=9, strategy="ddp")
    refused(errors.BadInput, "at most 8 micro-batches", strategy="pp2 mb=9")


def test_a_model_that_does_not_fit_says_what_is_missing_and_what_would_do() -> None:
    message = refused(errors.Infeasible, "does not fit on 2 x dgx-a100-80gb with 50.0 kB each", memory_limit=50_000)
    assert "kB over on its fullest device" in message
    assert re.search(r"more devices +\d+ devices instead of 2 ", message), message
    assert re.search(r"more memory +[\d.]+ kB a device, [\d.]+ kB more ", message), message


def test_the_time_may_run_out() -> None:
    refused(errors.OutOfTime, "time limit passed", time_limit=1e-9)


def test_a_model_without_a_loss() -> None:
    refused(errors.BadInput, "the model returns no loss: pass loss_fn", loss_fn=None)
    case = hf_gpt2()
    with pytest.raises(errors.BadInput, match=r"example_kwargs with labels="):
        planner.auto_parallelize(case.model, gpus=2, cluster=CLUSTER)  # its dummy_inputs hold none
    refused(errors.BadInput, "the loss has shape", loss_fn=lambda y, _: y, example_target=torch.zeros(8, 16))
    refused(errors.BadInput, "does not depend on any trainable parameter", model=mlp().model.requires_grad_(False))


class Branch(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.kind == "if" and y.sum() > 0:  # a branch on values
            y = 2 * y
        if self.kind == "mask":
            return y[y > 0].sum()  # a shape by values
        if self.kind == "item":
            y = y[:, : int(y.max().item())]  # a slice by values
        if self.kind == "shape":
            y = y @ torch.ones(3, 3)  # a defect
        return y.sum()


@pytest.mark.parametrize("loss_fn", [None, F.mse_loss])
@pytest.mark.parametrize("kind", ["if", "mask", "item"])
def test_a_model_that_cannot_be_traced_is_kept_whole(
    kind: str, loss_fn: Callable[..., Tensor] | None, capfd: pytest.CaptureFixture[str]
) -> None:
    (note,) = plan(Branch(kind), example_inputs=torch.randn(4, 4), loss_fn=loss_fn).plan.notes
    assert f"{Path(__file__).name}:" in note and "depends on the values of tensors" in note
    assert capfd.readouterr() == ("", "")  # torch's own reports stay away


@pytest.mark.parametrize("loss_fn", [None, F.mse_loss])
def test_a_model_that_does_not_run_is_told_where(
    loss_fn: Callable[..., Tensor] | None, capfd: pytest.CaptureFixture[str]
) -> None:
    message = refused(
        errors.TraceError,
        "the model cannot be traced",
        Branch("shape"),
        example_inputs=torch.randn(4, 4),
        loss_fn=loss_fn,
    )
    assert f"{Path(__file__).name}:" in message and "a defect" in message
    assert capfd.readouterr() == ("", "")


# --- plans made before ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = mlp()
    made = planner.auto_parallelize(
        case.model, gpus=2, example_inputs=case.inputs, loss_fn=case.loss_fn, cluster=CLUSTER, strategy="pp2.dp1 mb=2"
    )
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    made.plan.save(path)
    return path


def test_a_plan_made_before_is_taken_over(saved: Path) -> None:
    again = plan(gpus=None, plan=saved)
    assert again.plan == planner.Plan.load(saved)
    assert plan(plan=planner.Plan.load(saved)).program == again.program
    # with the plan's batch and precision, whatever the example's
    rows = (torch.zeros(3, 32),)
    assert plan(mlp(torch.float64).model, example_inputs=rows, plan=saved).program == again.program


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda data: json.dumps(data)[:1000], "not valid JSON"),
        (lambda data: json.dumps({**data, "version": 99}), "version 99"),
        (lambda data: json.dumps({**data, "mesh": "pp2.dp2"}), "not legal|has 2 stages|estimate"),
        (lambda data: json.dumps({**data, "micro_batches": 9}), "a batch of 8 cannot be cut"),
        (lambda data: json.dumps({**data, "stages": [[0, 1], [2, 4]]}), "stage 1 starts at segment 2"),
        (lambda data: json.dumps({**data, "zero": 4}), "ZeRO stage 4"),
        (lambda data: json.dumps({k: v for k, v in data.items() if k != "stages"}), "stages"),
        (lambda data: json.dumps({**data, "graph_digest": "0" * 64}), "for another model or another batch"),
    ],
    ids=["truncated", "version", "mesh", "micro-batches", "stages", "zero", "field", "digest"],
)
def test_a_plan_that_cannot_be_used(saved: Path, tmp_path: Path, edit: Callable[[Any], str], words: str) -> None:
    path = tmp_path / "edited.json"
    path.write_text(edit(json.loads(saved.read_text())))
    refused(errors.InvalidPlan, words, plan=path, gpus=None)


@pytest.mark.parametrize("strategy", ["tp2", "dp2"])
@pytest.mark.parametrize("value", ["q", "i@7", "P9", ""])
def test_a_strategy_no_operator_has(tmp_path: Path, strategy: str, value: str) -> None:
    data = json.loads(plan(strategy=strategy).plan.to_json())
    data["layouts"][0][strategy[:2]] = value
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(data))
    refused(errors.InvalidPlan, "strategy", plan=path)


def test_a_plan_of_another_model_or_number_of_devices(saved: Path) -> None:
    refused(errors.InvalidPlan, "the plan is for 2 devices, not 4; pass gpus=2", plan=saved, gpus=4)
    refused(errors.InvalidPlan, "for another model or another batch", model=nn.Linear(32, 16), plan=saved)
    refused(errors.InvalidPlan, "cannot read plan missing.json", plan="missing.json")


# --- the example batch ------------------------------------------------------------------------------------------------


def with_attribute(name: str, value: Any) -> nn.Module:
    model = mlp().model
    setattr(model, name, value)
    return model


@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        (with_attribute("example_input_array", torch.zeros(5, 32)), [(5, 32)]),
        (with_attribute("example_input_array", (torch.zeros(5, 32), torch.zeros(5, 3))), [(5, 32), (5, 3)]),
        (with_attribute("dummy_inputs", {"input": torch.zeros(6, 32)}), [(6, 32)]),
        (with_attribute("example_inputs", lambda: [torch.zeros(7, 32)]), [(7, 32)]),
        (nn.Sequential(nn.Linear(3, 2)), [(8, 3)]),
        (nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 2)), [(8, 16)]),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(2)), [(8, 3, 32, 32)]),
        (hf_gpt2().model, [(3, 5)]),
    ],
    ids=["tensor", "tuple", "dict", "method", "linear", "embedding", "conv2d", "hugging face"],
)
def test_the_model_tells_what_it_takes(model: nn.Module, shapes: list[tuple[int, ...]]) -> None:
    batch = example_batch(model)
    found = [*batch.args, *batch.kwargs.values()]
    assert [tuple(tensor.shape) for tensor in found] == shapes
    wider = example_batch(model, global_batch=9)
    assert [tuple(tensor.shape) for tensor in (*wider.args, *wider.kwargs.values())] == [(9, *s[1:]) for s in shapes]


def test_a_model_that_does_not_tell() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    refused(errors.BadInput, "pass example_inputs=", model=Scale(), example_inputs=None)


def test_global_batch_resizes_the_example() -> None:
    assert plan(global_batch=12).plan.global_batch == 12
    case = hf_gpt2()
    made = planner.auto_parallelize(case.model, gpus=2, example_inputs=case.kwargs, cluster=CLUSTER, global_batch=4)
    assert {spec.shape for spec in made.program.inputs} == {(4, 16)}


CLASSES, FLOATS = torch.int64, torch.float32


@pytest.mark.parametrize(
    ("output", "loss_fn", "shape", "dtype"),
    [
        ((8, 5), F.cross_entropy, (8,), CLASSES),
        ((8, 5), nn.CrossEntropyLoss(label_smoothing=0.1), (8,), CLASSES),
        ((8, 4, 5), lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()), (8, 4), CLASSES),
        ((8, 4, 5), lambda y, t: F.cross_entropy(y.view(-1, 5), t.view(-1)), (8, 4), CLASSES),
        ((8, 5, 6, 7), F.cross_entropy, (8, 6, 7), CLASSES),
        ((8, 5), lambda y, t: F.nll_loss(y.log_softmax(-1), t), (8,), CLASSES),
        ((8, 5), F.mse_loss, (8, 5), FLOATS),
        ((8, 4, 5), nn.L1Loss(), (8, 4, 5), FLOATS),
        ((8, 1), F.binary_cross_entropy_with_logits, (8, 1), FLOATS),
        ((8, 1), lambda y, t: F.binary_cross_entropy_with_logits(y.squeeze(-1), t), (8,), FLOATS),
        ((8,), nn.BCEWithLogitsLoss(), (8,), FLOATS),
    ],
)
def test_the_target_is_found_by_trying(
    output: tuple[int, ...], loss_fn: Callable[..., Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    target = guess_target(nn.Identity(), Batch((torch.zeros(output),), {}), loss_fn)
    assert (tuple(target.shape), target.dtype) == (shape, dtype)


def test_the_target_of_a_model_with_several_outputs() -> None:
    case = hf_gpt2()

    def loss_fn(output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())

    tokens = {"input_ids": case.kwargs["input_ids"]}
    made = planner.auto_parallelize(case.model, gpus=2, example_kwargs=tokens, loss_fn=loss_fn, cluster=CLUSTER)
    assert {spec.path: spec.shape for spec in made.program.inputs} == {"[1]['input_ids']": (8, 16), "[2]": (8, 16)}


def test_trying_targets_leaves_a_module_known_by_two_names_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model.append(model[0])
    weight = model[0].weight
    guess_target(model, Batch((torch.zeros(2, 4),), {}), F.mse_loss)
    assert model[2].weight is model[0].weight is weight


def test_a_target_that_cannot_be_found() -> None:
    def odd(output: Tensor, target: Any) -> Tensor:
        return ((output - target["wanted"]) ** 2).mean()

    refused(errors.BadInput, "pass example_target=", loss_fn=odd)
    made = plan(loss_fn=odd, example_target={"wanted": torch.zeros(8, 16)})
    assert [spec.path for spec in made.program.inputs] == ["[0][0]", "[2]['wanted']"]
    alone = plan(loss_fn=lambda output: output.square().mean())
    assert [spec.path for spec in alone.program.inputs] == ["[0][0]"]


# --- what planning leaves alone, and what it shows --------------------------------------------------------------------


def test_planning_changes_neither_the_model_nor_the_random_state() -> None:
    case = resnet_digits()
    before = {name: tensor.clone() for name, tensor in case.model.state_dict().items()}
    state = torch.get_rng_state()
    planner.auto_parallelize(
        case.model, gpus=2, example_inputs=case.inputs, loss_fn=case.loss_fn, cluster=CLUSTER, precision="bf16"
    )
    assert torch.equal(torch.get_rng_state(), state)
    after = case.model.state_dict()
    assert all(
        torch.equal(after[name], tensor) and after[name].dtype == tensor.dtype for name, tensor in before.items()
    )
    assert all(parameter.grad is None for parameter in case.model.parameters()) and case.model.training


@pytest.mark.parametrize("where", ["model", "example", "both"])
def test_a_plan_of_a_model_on_meta_can_be_looked_at_but_not_run(where: str) -> None:
    case = mlp()
    model = mlp().model.to("meta") if where != "example" else case.model
    inputs = tuple(x.to("meta") for x in case.inputs) if where != "model" else case.inputs
    made = plan(model, example_inputs=inputs)
    assert made.plan == plan().plan
    if where != "example":
        with pytest.raises(errors.BadInput, match="parameter '0.weight' is on meta and has no values"):
            made.forward_backward(*case.inputs, target=case.target)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "bfloat16"), ("fp64", "float64"), (None, "float32")])
def test_precision_is_that_of_the_plan(precision: str | None, dtype: str) -> None:
    made = plan(precision=precision)
    assert made.plan.precision == dtype
    assert {spec.dtype for stage in made.program.stages for spec in stage.states} == {dtype}
    assert {spec.dtype for spec in made.program.inputs} == {dtype}


def test_a_parallel_prints_as_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    case = gpt_tied()
    made = planner.auto_parallelize(
        case.model, gpus=2, example_inputs=case.inputs, loss_fn=case.loss_fn, cluster=CLUSTER, strategy="1f1b"
    )
    monkeypatch.setenv("COLUMNS", "80")
    text = str(made)
    assert text.startswith("GPT on 2 x dgx-a100-80gb:") and max(map(len, text.splitlines())) <= 80
    assert repr(made).startswith("<Parallel GPT on 2 x dgx-a100-80gb: pp2 mb=8")
    assert "GPT" in made._repr_html_() and made._repr_html_().startswith("<pre")
    first, last = made.source(0), made.source(1)
    assert "class Stage(StageModule)" in first and "cross_entropy" in last and first != last
    compile(first, "stage 0", "exec")
    with pytest.raises(errors.BadInput, match="the plan has 2 stages, 0 to 1"):
        made.source(2)


def test_compare_prices_every_strategy_and_says_why_one_cannot_be_used() -> None:
    case = gpt_tied()
    rows = planner.compare(
        case.model,
        gpus=4,
        strategies=("auto", "ddp", "tp", "pp8", "ddpp"),
        example_inputs=case.inputs,
        loss_fn=case.loss_fn,
        cluster=CLUSTER,
    )
    assert [row.name for row in rows] == ["auto", "ddp", "tp", "pp8", "ddpp"]
    best, *others = (row.plan.objective_s for row in rows if row.plan is not None)
    assert len(others) == 2 and all(best <= other for other in others)
    assert [bool(row.refused) for row in rows] == [False, False, False, True, True]
    assert "8 devices, but 4" in str(rows[3].refused)


def test_progress_is_told_in_words() -> None:
    told: list[str] = []
    plan(progress=lambda message, done=None, total=None: told.append(message))
    assert list(dict.fromkeys(told)) == ["tracing the model", "searching", "lowering"]
