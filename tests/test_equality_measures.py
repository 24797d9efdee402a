"""How far two runs are apart: errors, tolerances, and the single-device run."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from planner.equality import coarsest, distance, largest_error, loss_error, relative_errors
from planner.errors import BadInput
from planner.single_device import borrowed, dropout_modules_off, train_on_one_device, without_dropout
from planner.trace import Batch


def test_distance_counts_equal_entries_as_zero_whatever_they_are() -> None:
    a = torch.tensor([1.0, -math.inf, math.nan])
    assert distance(a, a.clone()) == 0.0
    assert distance(a, torch.tensor([1.5, -math.inf, math.nan])) == 0.5
    assert distance(a, torch.tensor([1.0, 0.0, math.nan])) == math.inf
    assert distance(a, torch.tensor([1.0, -math.inf, 0.0])) == math.inf
    assert distance(torch.zeros(2), torch.zeros(3)) == math.inf
    assert distance(torch.zeros(0), torch.zeros(0)) == 0.0
    assert distance(torch.tensor([True, False]), torch.tensor([True, True])) == 1.0
    assert distance(torch.tensor([1 + 2j]), torch.tensor([1 - 1j])) == 3.0


def test_errors_are_of_the_largest_entry_and_rounding_of_the_largest_of_all() -> None:
    expected = {"a": torch.tensor([4.0, 1.0]), "zero": torch.tensor([1e-9]), "none": None}
    found = {"a": torch.tensor([4.0, 1.5]), "zero": torch.tensor([-1e-9]), "none": None}
    errors = relative_errors(found, expected)
    assert errors == {"a": 0.125, "zero": pytest.approx(5e-10), "none": 0.0}
    assert largest_error(found, expected) == (0.125, "a")
    assert largest_error(expected, expected) == (0.0, "")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"a": None}, {"a": torch.ones(1)}),
        ({}, {"a": torch.ones(1)}),
        ({"a": torch.ones(1)}, {"a": None}),
        ({"a": torch.ones(1)}, {}),
    ],
)
def test_a_tensor_only_one_run_has_is_an_infinite_error(
    found: dict[str, Tensor | None], expected: dict[str, Tensor | None]
) -> None:
    assert relative_errors(found, expected) == {"a": math.inf}


@given(st.floats(-1e6, 1e6), st.floats(1e-12, 1e-3))
def test_the_error_of_a_loss_is_relative_but_near_zero(loss: float, share: float) -> None:
    off = loss_error(loss * (1 + share), loss)
    assert off <= share * (1 + 1e-3) + 1e-9
    assert abs(loss) < 1e-2 or off >= share * (1 - 1e-2) - 1e-9


def test_a_loss_that_is_no_number_is_an_infinite_error() -> None:
    assert loss_error(math.nan, 1.0) == math.inf


@pytest.mark.parametrize(
    ("dtypes", "least"),
    [
        (["float64"], "float64"),
        (["float64", "float32", "int64"], "float32"),
        (["bfloat16", "float32"], "bfloat16"),
        (["complex128"], "float64"),
        (["complex64", "float64"], "float32"),
        ([], "float32"),
    ],
)
def test_the_least_precise_dtype_sets_the_tolerance(dtypes: list[str], least: str) -> None:
    assert coarsest(dtypes) == least


# --- dropout ----------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], packed: bool) -> None:
        super().__init__()
        self.layers, self.packed = kind(4, 4, num_layers=2, dropout=0.5, batch_first=True), packed

    def forward(self, x: Tensor) -> Tensor:
        if self.packed:
            return self.layers(nn.utils.rnn.pack_padded_sequence(x, [3] * len(x), batch_first=True))[0].data
        return self.layers(x)[0]


class Functional(nn.Module):
    def __init__(self, function: str, **options: float) -> None:
        super().__init__()
        self.function, self.options = function, options

    def forward(self, x: Tensor) -> Tensor:
        if self.function == "attention":
            p = self.options["dropout_p"] if self.training else 0.0
            return F.scaled_dot_product_attention(x, x, x, dropout_p=p)
        return getattr(F, self.function)(x, training=self.training, **self.options)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


DROPPING = {
    "module": nn.Dropout(0.5),
    "in place": nn.Sequential(nn.Identity(), nn.Dropout(0.5)),
    "channels": nn.Dropout1d(0.5),
    "alpha": nn.AlphaDropout(0.5),
    "feature alpha": nn.FeatureAlphaDropout(0.5),
    "default probability": Functional("dropout"),
    "keyword": Functional("dropout", p=0.3),
    "attention": Functional("attention", dropout_p=0.5),
    "multi-head attention": Attention(),
    "encoder layer": nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True),
    "lstm": Recurrent(nn.LSTM, False),
    "packed gru": Recurrent(nn.GRU, True),
    "rnn": Recurrent(nn.RNN, False),
}


@pytest.mark.parametrize("name", DROPPING)
def test_no_dropout_of_any_kind_drops(name: str) -> None:
    torch.manual_seed(0)
    model, x = DROPPING[name], torch.randn(2, 3, 4)
    assert not torch.equal(model.train()(x), model(x))
    state = torch.random.get_rng_state()
    with without_dropout() as found:
        first = model(x)
        assert found
        assert torch.equal(torch.random.get_rng_state(), state)
        assert torch.equal(first, model(x))
    assert torch.allclose(first, model.eval()(x), atol=1e-6)
    with without_dropout() as found:
        model(x)
    assert not [name for name in found if name != "scaled_dot_product_attention"]
    model.train()


def test_dropout_modules_are_off_inside_and_as_before_outside() -> None:
    model = nn.ModuleList([nn.Dropout(0.3), Attention(), nn.LSTM(4, 4, 2, dropout=0.2), nn.AlphaDropout(0.1)])
    with pytest.raises(ZeroDivisionError), dropout_modules_off(model):
        assert (model[0].p, model[1].attention.dropout, model[2].dropout, model[3].p) == (0.0, 0.0, 0.0, 0.0)
        raise ZeroDivisionError
    assert (model[0].p, model[1].attention.dropout, model[2].dropout, model[3].p) == (0.3, 0.5, 0.2, 0.1)


# --- the single-device run --------------------------------------------------------------------------------------------


def test_one_device_is_the_loop_a_person_writes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    x, y = torch.randn(6, 3), torch.randn(6, 2)
    model[2].weight.requires_grad_(False)
    with borrowed(model, None):
        found = train_on_one_device(model, Batch((x,), {}, y), F.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), 2)
    assert model[1].num_batches_tracked == 0 and model[0].weight.grad is None
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        assert found.losses[step] == loss.item()
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            assert largest_error(found.gradients, gradients) == (0.0, "")
            assert "2.weight" not in found.gradients
            assert largest_error(found.buffers, dict(model.named_buffers())) == (0.0, "")
        optimizer.step()
    assert largest_error(found.parameters, dict(model.named_parameters())) == (0.0, "")
    assert largest_error(found.last_buffers, dict(model.named_buffers())) == (0.0, "")


def test_nothing_is_equal_to_a_loss_that_is_not_finite() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(BadInput, match="gradient of weight is not finite on one device"):
        train_on_one_device(
            model,
            Batch((torch.full((4, 2), math.inf),), {}),
            lambda y: y.sum(),
            lambda p: torch.optim.SGD(p, lr=0.1),
            1,
        )
    with pytest.raises(BadInput, match="loss of step 1 is not finite"):
        train_on_one_device(
            nn.Linear(2, 1), Batch((torch.ones(4, 2),), {}), lambda y: (y * 0).sum() + math.inf,
            lambda p: torch.optim.SGD(p, lr=0.1), 1,
        )  # fmt: skip


class Remembering(nn.Module):
    """Replaces a buffer, counts its calls, and shares memory between two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))
        self.same = nn.Parameter(self.weight.data)
        self.register_buffer("last", torch.zeros(1))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = self.last + 1
        return (x * self.weight * self.same).sum() * torch.rand(()).add(1)


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_borrowed_model_comes_back_as_it_was(dtype: torch.dtype | None) -> None:
    model = Remembering()
    model.weight.grad = gradient = torch.ones(1)
    weight, buffer, memory = model.weight, model.last, model.weight.data_ptr()
    state = torch.random.get_rng_state()
    with pytest.raises(ZeroDivisionError), borrowed(model, dtype):
        assert model.weight is weight and weight.dtype == (dtype or torch.float32) and weight.grad is None
        assert weight.data_ptr() == model.same.data_ptr() != memory
        model(torch.ones(1)).backward()
        with torch.no_grad():
            weight.add_(1)
        assert model.calls == 1 and model.last == 1 and model.same == 3
        raise ZeroDivisionError
    assert model.calls == 0 and model.last is buffer and buffer == 0 and model.weight is weight
    assert weight.grad is gradient and model.same.grad is None and weight.dtype == torch.float32
    assert weight.data_ptr() == model.same.data_ptr() == memory and weight == 2
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_model_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(BadInput, match="on meta"), borrowed(model, None):
        pass
