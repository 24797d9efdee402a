"""A Parallel on local ranks, as a user drives it: batches of all kinds, what they may not be, state, and ends."""

from __future__ import annotations

import copy
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import planner
from planner import errors
from planner.api import Parallel
from tests.models import Case, gpt_tied, hf_gpt2, mlp, resnet_digits
from tests.processes import wait_until_gone

pytestmark = pytest.mark.gloo

CLUSTER = "dgx-a100-80gb"
Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def parallelize(case: Case, **options: Any) -> Parallel:
    defaults = {"gpus": 2, "example_inputs": case.inputs, "example_kwargs": case.kwargs, "loss_fn": case.loss_fn}
    return planner.auto_parallelize(case.model, **{**defaults, "cluster": CLUSTER, "strategy": "dp2", **options})


def single(case: Case, steps: int, optimizer: Optimizer = adamw, max_norm: float | None = None) -> list[float]:
    """Train on one device; the loss of each step."""
    update, losses = optimizer(list(case.model.parameters())), []
    for _ in range(steps):
        update.zero_grad()
        loss = case.loss()
        loss.backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(case.model.parameters(), max_norm)
        update.step()
        losses.append(loss.item())
    return losses


def close(found: dict[str, Any], expected: dict[str, Tensor | None], relative: float = 1e-9) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if tensor is None:
            assert found[name] is None, name
        else:
            largest = float(tensor.abs().max())
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=relative * largest, msg=f"{name} differs")


# --- batches ----------------------------------------------------------------------------------------------------------


def test_a_batch_of_another_form_is_refused_and_nothing_is_lost() -> None:
    case, reference = mlp(torch.float64), mlp(torch.float64)
    (x,), y = case.inputs, case.target
    bad: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        (
            (x[:4],),
            {"target": y},
            "positional input 0 has 4 rows, the target 8; they were one batch in the example, of 8 rows",
        ),
        (
            (x[:, :4],),
            {"target": y},
            "positional input 0 is torch.float64 [8, 4]; the plan is for torch.float64 [8, 32]",
        ),
        ((x,), {"target": y[:, :3]}, "the target is torch.float64 [8, 3]"),
        ((x.long(),), {"target": y}, "positional input 0 is torch.int64"),
        ((), {"target": y}, "the batch lacks positional input 0"),
        ((x, x), {"target": y}, "the batch holds positional input 1, which the example did not"),
        ((x,), {"target": y, "mask": x}, "the batch holds input 'mask', which the example did not"),
        ((x,), {}, "the target must be a tensor, as in the example, not None"),
        ((x.numpy(),), {"target": y}, "positional input 0 must be a tensor, as in the example, not a ndarray"),
    ]
    with parallelize(case) as parallel:
        before = parallel.train([(x, y)], adamw, 1)
        for args, kwargs, message in bad:
            with pytest.raises(errors.BadInput, match=re.escape(message)):
                parallel.forward_backward(*args, **kwargs)
        for batch, message in (
            (x, "each batch must be an (inputs, target) pair"),
            ((x, x, y), "holds positional input 1"),
        ):
            with pytest.raises(errors.BadInput, match=re.escape(message)):
                parallel.train([batch])
        for optimizer, message in (
            (lambda _: None, "the optimizer factory returned NoneType"),
            (torch.optim.LBFGS, "LBFGS does not treat every element"),
            (lambda _: torch.optim.SGD([nn.Parameter(x)], lr=1.0), "no parameter of the model"),
            (lambda _: 1 / 0, "the optimizer factory failed: ZeroDivisionError"),
        ):
            with pytest.raises(errors.BadInput, match=re.escape(message)):
                parallel.train([(x, y)], optimizer)
        after = parallel.train([(x.float(), y.requires_grad_())], steps=2)  # cast, and without gradients
        assert parallel.source()
    assert before + after == pytest.approx(single(reference, 3), rel=1e-6)


def test_keywords_and_values_that_are_no_tensors() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2).double()

        def forward(self, x: Tensor, times: int, *, shift: Tensor, negate: bool = False) -> Tensor:
            y = self.layer(x) * times + shift
            return -y if negate else y

    x, shift, target = torch.randn(8, 4).double(), torch.randn(8, 2).double(), torch.randn(8, 2).double()
    model = Scaled()
    with planner.auto_parallelize(
        model,
        gpus=2,
        example_inputs=(x, 3),
        example_kwargs={"shift": shift, "negate": True},
        loss_fn=F.mse_loss,
        cluster=CLUSTER,
        strategy="dp2",
    ) as parallel:
        loss = parallel.forward_backward(x, 3, shift=shift, negate=True, target=target)
        for args, negate, message in (
            ((x, 4), True, "positional input 1 is 4, but was 3 in the example"),
            ((x, 3), False, "input 'negate' is False, but was True in the example"),
            ((x, 3.0), True, "positional input 1 is 3.0, but was 3"),
        ):
            with pytest.raises(errors.BadInput, match=re.escape(message)):
                parallel.forward_backward(*args, shift=shift, negate=negate, target=target)
        with pytest.raises(errors.BadInput, match="the batch lacks input 'negate'"):
            parallel.forward_backward(x, 3, shift=shift, target=target)
        gradients = parallel.gradients()
    expected = F.mse_loss(model(x, 3, shift=shift, negate=True), target)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    close(gradients, {name: p.grad for name, p in model.named_parameters()})


@pytest.mark.parametrize(("strategy", "use_cache"), [("pp2", False), ("dp2", True), ("tp2", True)])
def test_a_model_that_returns_its_loss_takes_dicts(strategy: str, use_cache: bool) -> None:
    case, reference = hf_gpt2(torch.float64), hf_gpt2(torch.float64)
    case.model.config.use_cache = use_cache  # Hugging Face's default; the cache is empty in training
    with parallelize(case, strategy=strategy) as parallel:
        losses = parallel.train([case.kwargs], adamw, 2)
        with pytest.raises(errors.BadInput, match="has a target, but the plan was made without loss_fn"):
            parallel.forward_backward(**case.kwargs, target=torch.zeros(8))
        with pytest.raises(errors.BadInput, match="the batch lacks input 'labels'"):
            parallel.train([{"input_ids": case.kwargs["input_ids"]}])
        weights = parallel.state_dict()
    assert losses == pytest.approx(single(reference, 2), rel=1e-6)  # the model casts its loss to float32
    assert weights.keys() == reference.model.state_dict().keys()


def test_batches_may_be_a_list_an_iterator_or_a_loader() -> None:
    case = mlp(torch.float64)
    (x,), y = case.inputs, case.target
    assert y is not None
    data = [(x, y), ((x + 1,), y), ({"input": x}, y)]

    def endless() -> Iterator[Any]:
        while True:
            yield from data[:2]

    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.cat([x, x + 1]), torch.cat([y, y])), batch_size=8
    )

    def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    with parallelize(case) as parallel:
        five = parallel.train(data[:2], sgd, steps=5)  # over again
        assert len(five) == 5 and five[-1] < five[0]
        assert len(parallel.train(data[:2])) == 2  # once, and on with the same optimizer
        assert len(parallel.train(iter(data[:2]), steps=5)) == 2  # an iterator ends
        assert len(parallel.train(endless(), steps=3)) == 3
        assert len(parallel.train(loader)) == 2
        assert parallel.train(data, steps=0) == []
        with pytest.raises(errors.BadInput, match="batches is empty"):
            parallel.train([], steps=5)
        with pytest.raises(errors.BadInput, match="the batch lacks positional input 0"):
            parallel.train(data[2:])


class Coupled(nn.Module):
    """Every block mixes the samples of the batch, so it runs whole; the first one is fed a share of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        for block in self.blocks:
            x = x + torch.cumsum(block(x), 0) / 8
        return x


@pytest.mark.parametrize("strategy", ["dp2", "tp2", "pp2"])
def test_equal_layers_that_cutting_the_batch_makes_different(strategy: str) -> None:
    torch.manual_seed(0)
    model = Coupled().double()
    x, y = torch.randn(8, 4).double(), torch.randn(8, 4).double()
    case = Case(model, (x,), {}, y, F.mse_loss)
    with parallelize(case, strategy=strategy) as parallel:
        loss, gradients = parallel.forward_backward(x, target=y), parallel.gradients()
    expected = case.loss()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    close(gradients, {name: p.grad for name, p in model.named_parameters()})


def test_another_global_batch_than_the_examples() -> None:
    case = mlp(torch.float64)
    x, y = torch.randn(12, 32).double(), torch.randn(12, 16).double()
    with parallelize(case, global_batch=12) as parallel:
        loss = parallel.forward_backward(x, target=y)
        examples = parallel.forward_backward(*case.inputs, target=case.target)
    assert examples == pytest.approx(case.loss().item(), rel=1e-12)
    assert loss == pytest.approx(F.mse_loss(case.model(x), y).item(), rel=1e-12)


# --- state ------------------------------------------------------------------------------------------------------------


class Partial(nn.Module):
    """One weight is unused, one is frozen, one is used twice, a buffer is never read."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.again = self.used
        self.register_buffer("never", torch.arange(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(torch.relu(self.frozen(self.used(x))))


@pytest.mark.parametrize("strategy", ["dp2", "tp2", "pp2", "dp2 zero=3"])
def test_gradients_and_state_have_the_names_of_one_device(strategy: str) -> None:
    torch.manual_seed(0)
    model = Partial().double()
    reference = copy.deepcopy(model)
    x, y = torch.randn(8, 4).double(), torch.randn(8, 4).double()
    with planner.auto_parallelize(
        model, gpus=2, example_inputs=x, loss_fn=F.mse_loss, cluster=CLUSTER, strategy=strategy
    ) as parallel:
        assert set(parallel.gradients().values()) == {None}
        for _ in range(2):  # gradients accumulate
            parallel.forward_backward(x, target=y)
            F.mse_loss(reference(x), y).backward()
        gradients = parallel.gradients()
        close(gradients, {name: p.grad for name, p in reference.named_parameters() if p.requires_grad})
        assert gradients["unused.weight"] is None and "frozen.weight" not in gradients
        norm = parallel.clip_grad_norm(0.01)
        assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)), rel=1e-9)
        parallel.set_optimizer(adamw)
        parallel.step()
        adamw(list(reference.parameters())).step()
        weights = parallel.state_dict()
        parallel.zero_grad()
        assert set(parallel.gradients().values()) == {None}
    close(weights, reference.state_dict())
    model.load_state_dict(weights, strict=True)
    assert torch.equal(model.again.weight, weights["used.weight"])


def test_buffers_are_trained_too() -> None:
    case, reference = resnet_digits(torch.float64), resnet_digits(torch.float64)
    (images,), classes = case.inputs, case.target
    with parallelize(case) as parallel:
        losses = parallel.train([(images, classes)], adamw, 2, max_norm=0.1)
        weights = parallel.state_dict()
    assert losses == pytest.approx(single(reference, 2, max_norm=0.1), rel=1e-9)
    close(weights, reference.model.state_dict())
    assert int(weights["bn.num_batches_tracked"]) == 2


def test_a_checkpoint_goes_on_under_another_strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, reference = gpt_tied(torch.float64), gpt_tied(torch.float64)
    batch = (case.inputs, case.target)
    with parallelize(case, strategy="dp2 zero=3") as parallel:
        losses = parallel.train([batch], adamw, 2)
        monkeypatch.chdir(tmp_path)  # the ranks have another working folder
        parallel.save("kept/here")
        (tmp_path / "file").write_text("")
        for path in ("file", "file/below"):
            with pytest.raises(errors.BadInput, match=r"file"):
                parallel.save(path)
        parallel.save("kept/here")
    with parallelize(gpt_tied(torch.float64, seed=1), strategy="pp2") as parallel:
        parallel.set_optimizer(adamw)
        parallel.load("kept/here")
        losses += parallel.train([batch], steps=2)
        with pytest.raises(errors.BadInput, match="is not a complete checkpoint"):
            parallel.load("nowhere")
        weights = parallel.state_dict()
    with parallelize(mlp()) as other:
        with pytest.raises(errors.BadInput, match=r"holds no \S+: it is of another model"):
            other.load("kept/here")
    assert losses == pytest.approx(single(reference, 4), rel=1e-9)
    close(weights, reference.model.state_dict())


@pytest.mark.parametrize(
    ("precision", "dtype", "relative"), [("bf16", torch.bfloat16, 5e-2), ("fp64", torch.float64, 1e-9)]
)
def test_precision(precision: str, dtype: torch.dtype, relative: float) -> None:
    case, reference = gpt_tied(), gpt_tied()
    with parallelize(case, precision=precision) as parallel:
        losses = parallel.train([(case.inputs, case.target)], adamw, 2)
        gradients, weights = parallel.gradients(), parallel.state_dict()
    assert {tensor.dtype for tensor in (*weights.values(), *gradients.values()) if tensor is not None} == {dtype}
    assert {p.dtype for p in case.model.parameters()} == {torch.float32}  # the user's model stays as it is
    reference.model.double()
    assert losses == pytest.approx(single(reference, 2), rel=relative)
    case.model.load_state_dict(weights)


# --- ranks ------------------------------------------------------------------------------------------------------------


def test_two_at_once() -> None:
    first, second = mlp(torch.float64), gpt_tied(torch.float64)
    with parallelize(first) as one, parallelize(second, strategy="pp2") as other:
        losses: list[list[float]] = [[], []]
        for _ in range(2):
            losses[0] += one.train([(first.inputs, first.target)], None if losses[0] else adamw, 1)
            losses[1] += other.train([(second.inputs, second.target)], None if losses[1] else adamw, 1)
    assert losses[0] == pytest.approx(single(mlp(torch.float64), 2), rel=1e-9)
    assert losses[1] == pytest.approx(single(gpt_tied(torch.float64), 2), rel=1e-9)


def test_a_rank_that_dies_ends_the_others_and_is_named() -> None:
    case = mlp(torch.float64)
    with parallelize(case, strategy="pp2") as parallel:
        parallel.train([(case.inputs, case.target)], adamw, 1)
        assert parallel._ranks is not None
        ranks = set(parallel._ranks.process_ids)
        os.kill(max(ranks), signal.SIGKILL)
        with pytest.raises(errors.RankFailed, match=r"rank \d.*killed|SIGKILL|signal 9"):
            parallel.train([(case.inputs, case.target)], steps=50)
        assert not wait_until_gone(ranks)
        with pytest.raises(errors.RankFailed, match="have stopped after an error"):
            parallel.state_dict()
    with parallelize(case) as again:  # a new one starts new ranks
        assert again.forward_backward(*case.inputs, target=case.target) > 0


def test_after_the_end_there_are_no_ranks_and_no_state() -> None:
    case = mlp(torch.float64)
    with parallelize(case) as parallel:
        with pytest.raises(errors.BadInput, match="no optimizer is set"):
            parallel.step()
        with pytest.raises(errors.BadInput, match="start the script with torchrun to hold them"):
            parallel.parameters()
        parallel.forward_backward(*case.inputs, target=case.target)
        assert parallel._ranks is not None
        ranks = set(parallel._ranks.process_ids)
        assert len(parallel.peak_memory_bytes()) == 2
    assert not wait_until_gone(ranks)
    with pytest.raises(errors.BadInput, match="the ranks have been stopped"):
        parallel.state_dict()
    parallel.close()
    assert parallel.plan.mesh.size == 2  # what was planned can still be looked at


def test_an_error_inside_the_block_stops_the_ranks() -> None:
    case = mlp(torch.float64)
    ranks: set[int] = set()
    with pytest.raises(ZeroDivisionError), parallelize(case) as parallel:
        parallel.forward_backward(*case.inputs, target=case.target)
        assert parallel._ranks is not None
        ranks = set(parallel._ranks.process_ids)
        raise ZeroDivisionError
    assert ranks and not wait_until_gone(ranks)


def test_compare_measures_on_ranks_of_its_own() -> None:
    case = mlp(torch.float64)
    rows = planner.compare(
        case.model,
        gpus=2,
        strategies=("ddp", "model"),
        measure=True,
        steps=2,
        example_inputs=case.inputs,
        loss_fn=case.loss_fn,
        cluster=CLUSTER,
        optimizer="sgd-momentum",
    )
    assert [row.name for row in rows] == ["auto", "ddp", "model"]
    assert all(row.measured_step_time_s is not None and row.measured_step_time_s > 0 for row in rows)
    assert not any(row.refused for row in rows)


class Decaying(nn.Module):
    """Reads a buffer before and after it gives it a new value."""

    decay: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("decay", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x) * self.decay)
        self.decay = self.decay * 0.5
        return self.second(torch.tanh(x) * self.decay)


@pytest.mark.gloo
@pytest.mark.parametrize("strategy", ["dp2", "dp2 recompute=full", "pp2 mb=1 recompute=full"])
def test_backward_sees_a_buffer_as_forward_saw_it(strategy: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    found = planner.verify(
        Decaying(), 2, strategy=strategy, example_inputs=(x,), example_target=y, loss_fn=F.mse_loss, cluster=CLUSTER
    )
    assert found.equal, str(found)


class Awkward(nn.Module):
    """Names that mean something in a source: classes, functions, arguments, attributes."""

    opaque: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.f, self.segment, self.stage = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.write = nn.Parameter(torch.ones(8))
        self.register_buffer("opaque", torch.full((8,), 0.5))

    def forward(self, x: Tensor, i: Tensor, dropout: Tensor, F: Tensor, range: Tensor) -> Tensor:
        x = self.stage(torch.tanh(self.segment(torch.tanh(self.f(x)))))
        for layer in self.layers:
            x = torch.tanh(layer(x)) + i
        return ((x * dropout * self.write + F * self.opaque) * range).square().mean()


@pytest.mark.gloo
@pytest.mark.parametrize("strategy", ["tp", "pp2 mb=2"])
def test_names_that_mean_something_in_a_source(strategy: str) -> None:
    torch.manual_seed(0)
    kwargs = {name: torch.randn(8, 8) for name in ("i", "dropout", "F", "range")}
    found = planner.verify(
        Awkward(), 2, strategy=strategy, example_inputs=(torch.randn(8, 8),), example_kwargs=kwargs, cluster=CLUSTER
    )
    assert found.equal, str(found)
