"""``planner.verify`` on real ranks: finds equal what is equal, and what has been broken on purpose, by name."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import Tensor, nn

import planner
from planner import sharding_rules, trace, tracing, verification  # noqa: F401
from planner.cli import cli
from planner.errors import BadInput, RankFailed, TraceError
from planner.ir.graph import Graph, Node, Value
from planner.ir.layout import REPLICATED, WHOLE
from planner.report import Verification
from planner.shard import _Builder
from planner.sharding_rules import Rule
from runtime.launch import LocalRanks

pytestmark = pytest.mark.gloo

CLUSTER = "dgx-a100-80gb"


class Net(nn.Module):
    """A linear layer, a block with a residual, an output; ``mean`` of squares as loss, made by the model."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(8, width)
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(width, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h = h + self.narrow(F.gelu(self.wide(self.norm(h))))
        return self.frozen(h).square().mean()


def net(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return Net().to(dtype), {"example_inputs": (torch.randn(8, 8, dtype=dtype),), "cluster": CLUSTER}


def sequential() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    options = {"example_inputs": (torch.randn(8, 8),), "example_target": torch.randn(8, 4), "loss_fn": F.mse_loss}
    return model, {**options, "cluster": CLUSTER}


def test_equal_strategies_are_found_equal_and_the_model_stays_as_it_was() -> None:
    model, options = net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.random.get_rng_state()
    found = list(planner.verify_each(model, 2, strategies=("ddp", "tp", "model", "pp2 mb=16", "auto"), **options))
    assert [row.outcome for row in found] == ["equal", "equal", "equal", "refused", "equal"]
    assert "batch of 8" in found[3].reason
    for row in found[:3]:
        kinds = [tensor.kind for tensor in row.compared]
        assert (kinds.count("loss"), kinds.count("gradient"), kinds.count("parameter")) == (3, 10, 12)
        assert row.first is None and row.cause is None and row.tolerance == 1e-5 and row.dtype == "float32"
        assert 0 < row.worst.error < 1e-5 if row.strategy == "ddp" else row.worst is not None
        assert "frozen.weight" not in [t.name for t in row.compared if t.kind == "gradient"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_one_run_on_one_device_serves_all_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    traces, runs = [], []
    run = planner.verification.train_on_one_device
    monkeypatch.setattr(tracing, "trace", lambda *a: traces.append(a) or trace.trace(*a))
    monkeypatch.setattr(planner.verification, "train_on_one_device", lambda *a: runs.append(a) or run(*a))
    model, options = net(torch.float64)
    rows = list(planner.verify_each(model, 2, strategies=("ddp", "tp", "ddp"), steps=1, **options))
    assert [row.outcome for row in rows] == ["equal"] * 3
    assert len(traces) == len(runs) == 1
    assert rows[0].optimizer == "AdamW" and rows[0].tolerance == 1e-9


def test_precision_and_a_plan_made_before() -> None:
    model, options = sequential()
    plan = planner.auto_parallelize(model, 2, strategy="tp", precision="fp64", **options).plan
    found = planner.verify(model, 2, plan=plan, precision="fp64", **options)
    assert found.equal and found.strategy == "tp" and found.dtype == "float64"
    coarse = planner.verify(model, 2, strategy="ddp", precision="bf16", steps=1, **options)
    assert coarse.equal and coarse.dtype == "bfloat16" and coarse.tolerance == 0.1
    assert model[0].weight.dtype == torch.float32


def test_buffers_written_in_forward_are_compared_at_both_ends() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    options = {"loss_fn": lambda y: y.square().mean(), "cluster": CLUSTER}
    found = planner.verify(model, 2, strategy="ddp", example_inputs=(torch.randn(8, 4),), **options)
    names = [tensor.name for tensor in found.compared if tensor.kind == "buffer"]
    assert found.equal
    assert "1.running_mean, step 1" in names and "1.num_batches_tracked, step 3" in names


def test_a_loss_that_knows_the_models_weights() -> None:
    model, options = sequential()
    options["loss_fn"] = lambda y, target: (
        F.mse_loss(y, target) + 0.1 * sum(p.square().sum() for p in model.parameters())
    )
    assert planner.verify(model, 2, strategy="ddp", **options).equal
    with pytest.raises(TraceError, match="trainable tensor that is no parameter of the model planned"):
        planner.verify(model, 2, strategy="ddp", precision="fp64", **options)  # traced from a copy in float64


# --- dropout and other random numbers ---------------------------------------------------------------------------------


def test_dropout_is_switched_off_and_the_report_says_so() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
    options = {"example_target": torch.randn(4, 3, 8), "loss_fn": F.mse_loss, "cluster": CLUSTER}
    found = planner.verify(layer, 2, strategy="tp", example_inputs=(torch.randn(4, 3, 8),), **options)
    assert found.equal
    assert "dropout was switched off in both runs" in str(found)
    assert layer.training and layer.dropout.p == 0.5
    quiet = planner.verify(layer.eval(), 2, strategy="ddp", steps=1, example_inputs=(torch.randn(4, 3, 8),), **options)
    assert quiet.equal and not quiet.notes


def test_a_plan_of_a_model_with_dropout_is_verified_as_it_is() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))
    options = {"example_inputs": (torch.randn(8, 8),), "example_target": torch.randn(8, 4), "loss_fn": F.mse_loss}
    plan = planner.auto_parallelize(model, 2, strategy="dp2 mb=2", cluster=CLUSTER, **options).plan
    found = planner.verify(model, plan=plan, cluster=CLUSTER, **options)
    assert found.equal and found.configuration == plan.configuration and "dropout" in found.notes[0]
    assert any(row.op == "dropout" for row in plan.layouts)


def test_dropout_of_whole_channels_is_switched_off_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.Dropout1d(0.5), nn.Flatten(), nn.Linear(24, 1))
    options = {"loss_fn": lambda y: y.square().mean(), "cluster": CLUSTER}
    found = planner.verify(model, 2, strategy="ddp", example_inputs=(torch.randn(8, 2, 8),), **options)
    assert found.equal and "dropout" in found.notes[0]


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn_like(x)).mean()


def test_other_random_numbers_are_refused_by_name() -> None:
    with pytest.raises(BadInput, match="aten.randn_like.default in the model draws random numbers"):
        planner.verify(Noisy(4, 4), 2, strategy="ddp", example_inputs=(torch.randn(4, 4),), cluster=CLUSTER)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"steps": 0}, "steps=0"), ({"tolerance": 0.0}, "tolerance=0.0"), ({"steps": True}, "steps=True")],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    model, others = net()
    with pytest.raises(BadInput, match=message):
        planner.verify(model, 2, strategy="ddp", **others, **options)


def test_an_option_nobody_has_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="'stategy'"):
        planner.verify(nn.Linear(2, 2), 2, stategy="ddp")


# --- broken on purpose ------------------------------------------------------------------------------------------------


def wrong(monkeypatch: pytest.MonkeyPatch, op: str, **changes: Any) -> None:
    """The rule of ``op`` with fields replaced."""
    right = sharding_rules.BY_NAME[op]

    def rule(node: Node, values: Mapping[str, Value]) -> Rule | None:
        found = right(node, values)
        return None if found is None else replace(found, **changes)

    monkeypatch.setitem(sharding_rules.BY_NAME, op, rule)  # type: ignore[arg-type]


def test_a_sum_taken_for_a_mean_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(monkeypatch, "mean", mean=False)
    model, options = net()
    found = planner.verify(model, 2, strategy="ddp", **options)
    assert not found.equal
    assert found.first is not None and (found.first.kind, found.first.name) == ("loss", "step 1")
    assert found.first.error == pytest.approx(1.0, rel=1e-3)  # twice the mean
    assert found.cause is not None
    assert (found.cause.where, found.cause.operators) == ("sharding", ("mean in the model",))
    assert "value of %mean" in found.cause.what
    text = str(found)
    assert "NOT equal to one device" in text and "mean in the model" in text


def test_a_bias_added_on_every_rank_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(monkeypatch, "linear", additive=frozenset())
    model, options = net()
    plan = planner.auto_parallelize(model, 2, strategy="tp", **options).plan
    found = planner.verify(model, plan=plan, **options)
    assert found.outcome == "unequal" and found.cause is not None
    summed = next(row for row in plan.layouts if row.op == "aten.linear.default" and row.tp == "i")
    assert (found.cause.where, found.cause.operators) == ("sharding", (f"linear in {summed.module}",))


def test_a_wrong_rule_is_found_in_a_batch_that_does_not_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    model, options = sequential()
    options |= {"example_inputs": (torch.randn(7, 8),), "example_target": torch.randn(7, 4)}
    assert planner.verify(model, 4, strategy="dp2.tp2", **options).equal
    wrong(monkeypatch, "linear", additive=frozenset())
    found = planner.verify(model, 4, strategy="dp2.tp2", **options)
    assert found.cause is not None
    assert (found.cause.where, found.cause.operators) == ("sharding", ("linear in 2",))


class Soft(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores, self.values = nn.Linear(8, 64), nn.Linear(64, 8)
        self.soft = nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.values(self.soft(self.scores(x)))


class Guarded(nn.Module):
    """What it runs depends on the values: it cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.layer(x)) if x.isfinite().all() else x


def test_modules_that_run_as_they_are_are_replayed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Guarded(), nn.Linear(8, 4))
    options = {"loss_fn": lambda y: y.square().mean(), "cluster": CLUSTER, "example_inputs": (torch.randn(8, 8),)}
    equal = planner.verify(model, 2, strategy="ddp", **options)
    assert equal.equal and model[1].drop.p == 0.5, equal
    assert any("dropout was switched off" in note for note in equal.notes)
    wrong(monkeypatch, "mean", mean=False)
    found = planner.verify(model, 2, strategy="ddp", samplewise=True, **options)
    assert found.cause is not None
    assert (found.cause.where, found.cause.operators) == ("sharding", ("mean in the model",))


def test_a_letter_that_must_stay_whole_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(monkeypatch, "softmax", whole=frozenset())
    torch.manual_seed(0)
    options = {"example_target": torch.randn(4, 8), "loss_fn": F.mse_loss, "cluster": CLUSTER}
    found = planner.verify(Soft(), 2, strategy="tp", example_inputs=(torch.randn(4, 8),), **options)
    assert found.outcome == "unequal" and found.cause is not None
    assert (found.cause.where, found.cause.operators) == ("sharding", ("softmax in soft",))


def test_a_gradient_that_is_never_summed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The input of a column-parallel layer needs its gradient's all-reduce: forward is right without it."""
    convert = _Builder.convert

    def without(self: _Builder, name: str, target: Any, node: Node) -> str:
        if node.module == "wide" and (self.pairs[name], target) == (WHOLE, REPLICATED):
            return name
        return convert(self, name, target, node)

    monkeypatch.setattr(_Builder, "convert", without)
    model, options = net()
    found = planner.verify(model, 2, strategy="tp", **options)
    assert found.outcome == "unequal" and found.cause is not None and found.first is not None
    assert found.first.kind == "gradient" and found.first.name.startswith("norm.")
    assert (found.cause.where, found.cause.operators) == ("sharding", ("linear in wide",))
    assert "the gradient of %layer_norm" in found.cause.what


def test_a_trace_that_changes_the_model_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    normalise = trace.normalise

    def relu_for_gelu(graph: Graph) -> Graph:
        graph = normalise(graph)
        nodes = (replace(n, op="aten.relu.default", kwargs=()) if n.base == "gelu" else n for n in graph.nodes)
        return replace(graph, nodes=tuple(nodes))

    monkeypatch.setattr(trace, "normalise", relu_for_gelu)
    model, options = net()
    found = planner.verify(model, 2, strategy="ddp", **options)
    assert found.outcome == "unequal" and found.cause is not None
    assert found.cause.where == "tracing" and "the graph is not the model" in found.cause.why


def broken(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Ranks of ``tests.broken_ranks``: they are processes that a monkeypatch here does not reach."""
    start: Callable[..., LocalRanks] = LocalRanks.start
    monkeypatch.setattr(LocalRanks, "start", functools.partial(start, rank_class=f"tests.broken_ranks:{name}"))


def test_a_sum_over_ranks_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, "WithoutOneSum")
    model, options = sequential()
    found = planner.verify(model, 2, strategy="ddp", **options)
    assert found.outcome == "unequal" and found.first is not None and found.cause is not None
    assert (found.first.kind, found.first.name) == ("gradient", "2.weight")
    differing = {t.name for t in found.compared if t.kind == "gradient" and t.error > found.tolerance}
    assert differing == {"2.weight"}
    assert (found.cause.where, found.cause.operators) == ("running", ("linear in 2",))
    assert "replayed shard by shard it is right" in found.cause.why


def test_an_optimizer_that_does_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, "StaleWeights")
    model, options = sequential()
    found = planner.verify(model, 2, strategy="ddp", **options)
    assert found.outcome == "unequal" and found.first is not None
    assert (found.first.kind, found.first.name) == ("loss", "step 2")
    assert not [t for t in found.compared if t.kind == "gradient" and t.error > found.tolerance]
    assert found.cause is not None and found.cause.where == "running" and found.cause.operators == ()
    assert "the optimizer" in found.cause.why


def test_ranks_that_die_fail_their_strategy_only(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, "Dies")
    model, options = sequential()
    with pytest.raises(RankFailed, match="out of order"):
        planner.verify(model, 2, strategy="ddp", **options)
    rows: list[Verification] = list(planner.verify_each(model, 2, strategies=("ddp", "tp"), **options))
    assert [row.outcome for row in rows] == ["failed", "failed"]
    assert "out of order" in rows[1].reason and rows[1].cause is None


def test_a_run_that_fails_for_a_wrong_rule_names_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(monkeypatch, "layer_norm", whole=frozenset())
    model, options = net()
    (row,) = planner.verify_each(model, 2, strategies=("tp",), **options)
    assert row.outcome == "failed" and row.cause is not None
    assert (row.cause.where, row.cause.operators) == ("sharding", ("layer_norm in norm",))
    assert "layer_norm in norm" in str(row) and "normalized_shape" in str(row)


# --- the README -------------------------------------------------------------------------------------------------------

README = Path(__file__).parent.parent / "README.md"
SECTION = README.read_text().partition("## Is it the same training?\n")[2].partition("\n## ")[0]
COMMANDS = [line.strip() for line in SECTION.splitlines() if line.startswith("    planner verify ")]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the measured machine is kept."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_readme_find_the_example_equal(
    command: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    words = shlex.split(command)[1:]
    done = CliRunner().invoke(cli, words, env={"COLUMNS": "100"})
    assert done.exit_code == 0, done.output
    strategies = words[words.index("--strategy") + 1].split(",")
    assert all(f"GPTWithLoss under {name}: equal to one device" in done.stdout for name in strategies)
    assert done.stdout.count(": equal to one device") == len(strategies)
