"""The shared models are what the equality tests take them to be."""

from __future__ import annotations

import pytest
import torch

from tests.models import IGNORED, MODELS, gpt_tied, hf_bert, hf_llama


@pytest.mark.parametrize("name", MODELS)
def test_the_same_seed_gives_the_same_loss_in_both_precisions(name: str) -> None:
    single, double, again = MODELS[name](), MODELS[name](torch.float64), MODELS[name](torch.float64)
    assert torch.equal(double.loss(), again.loss())
    torch.testing.assert_close(single.loss().double(), double.loss().double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_another_seed_gives_another_model_and_batch(name: str) -> None:
    first, second = MODELS[name](seed=0), MODELS[name](seed=1)
    pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs)
    tensors = [(first.inputs[0], second.inputs[0])] if first.inputs else []
    tensors += [(first.kwargs[key], second.kwargs[key]) for key in ("input_ids", "pixel_values") if key in first.kwargs]
    assert tensors and all(not torch.equal(a, b) for a, b in tensors)


@pytest.mark.parametrize("name", MODELS)
def test_two_forward_passes_agree_and_every_trained_weight_has_a_gradient(name: str) -> None:
    case = MODELS[name](torch.float64)
    first, second = case.loss(), case.loss()
    assert torch.equal(first, second), "dropout is on"
    first.backward()
    for target, parameter in case.model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, target


@pytest.mark.parametrize("name", MODELS)
def test_no_two_tensors_of_a_batch_share_memory(name: str) -> None:
    case = MODELS[name]()
    tensors = [*case.inputs, *case.kwargs.values(), *([] if case.target is None else [case.target])]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


def test_the_output_weight_of_the_gpt_is_its_embedding() -> None:
    model = gpt_tied().model
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert set(names) - {name for name, _ in model.named_parameters()} == {"head.weight"}


@pytest.mark.parametrize("build", [hf_llama, hf_bert])
def test_rows_leave_out_unequal_numbers_of_tokens(build) -> None:
    counted = (build().kwargs["labels"] != IGNORED).sum(dim=1)
    assert len(set(counted.tolist())) > 2
