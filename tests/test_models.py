"""Models named on the command line: callables and Hugging Face configs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.errors import BadInput
from planner.models import LoadedModel, example_batch, load_model

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 40, "dtype": "float16",
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 24}
BERT = {
    "model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 64, "hidden_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48, "max_position_embeddings": 16,
}  # fmt: skip
T5 = {
    "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 64, "d_model": 32, "d_kv": 16,
    "d_ff": 48, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0,
}  # fmt: skip
VIT = {
    "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "intermediate_size": 48, "image_size": 16, "patch_size": 8, "num_channels": 3,
    "num_labels": 5,
}  # fmt: skip


def written(folder: Path, config: Any, name: str = "config.json") -> str:
    (folder / name).write_text(json.dumps(config))
    return str(folder / name)


@pytest.mark.parametrize(
    ("config", "architecture", "shapes"),
    [
        (LLAMA, "LlamaForCausalLM", {"input_ids": (4, 40), "labels": (4, 40)}),
        (GPT2, "GPT2LMHeadModel", {"input_ids": (4, 24), "labels": (4, 24)}),
        (BERT, "BertForMaskedLM", {"input_ids": (4, 16), "labels": (4, 16)}),
        (T5, "T5ForConditionalGeneration", {"input_ids": (4, 2048), "labels": (4, 2048)}),
        (VIT, "ViTForImageClassification", {"pixel_values": (4, 3, 16, 16), "labels": (4,)}),
    ],
)
def test_configs_build_without_memory(
    tmp_path: Path, config: dict[str, Any], architecture: str, shapes: dict[str, tuple[int, ...]]
) -> None:
    pytest.importorskip("transformers")
    loaded = load_model(written(tmp_path, config), global_batch=4)
    assert type(loaded.model).__name__ == architecture
    assert {str(parameter.device) for parameter in loaded.model.parameters()} == {"meta"}
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}
    assert {name: tuple(value.shape) for name, value in loaded.example_kwargs.items()} == shapes
    assert {str(value.device) for value in loaded.example_kwargs.values()} == {"meta"}
    assert loaded.name == tmp_path.name
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("config", [LLAMA, GPT2, BERT, VIT])
def test_configs_build_for_real_and_return_a_loss(tmp_path: Path, config: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    loaded = load_model(written(tmp_path, config, "tiny.json"), global_batch=2, precision="fp32", device="cpu")
    assert loaded.name == "tiny"
    torch.manual_seed(0)
    output = loaded.model(**example_batch(loaded))
    assert output.loss.dtype == torch.float32 and output.loss.isfinite()
    assert output.get("past_key_values") is None
    assert loaded.model.config._attn_implementation == "sdpa"


def test_batch_sizes_and_repeatability(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = written(tmp_path, LLAMA)
    one, two = (load_model(path, 3, sequence_length=8, device="cpu").example_kwargs for _ in range(2))
    assert one["input_ids"].shape == (3, 8)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["input_ids"], one["labels"])
    assert load_model(str(tmp_path)).example_kwargs["input_ids"].shape == (64, 40)


@pytest.mark.parametrize(
    ("config", "options", "told"),
    [
        ([1], {}, "it has no model_type"),
        ({"architectures": ["LlamaForCausalLM"]}, {}, "it has no model_type"),
        ({"model_type": "no_such_type"}, {}, "knows no model_type 'no_such_type'"),
        ({**LLAMA, "architectures": ["LlamaForNothing"]}, {}, "has no architecture 'LlamaForNothing'"),
        ({**LLAMA, "hidden_size": "wide"}, {}, "is not a legal llama config"),
        ({"model_type": "vit"}, {}, "model type 'vit' has no language-model head"),
        (LLAMA, {"sequence_length": 41}, "sequences of at most 40 tokens, not 41"),
        (VIT, {"sequence_length": 41}, "takes images; leave --sequence-length out"),
        ({**BERT, "architectures": ["BertForQuestionAnswering"]}, {}, "no example batch is known for BertForQuestion"),
        (LLAMA, {"precision": "fp8"}, "unknown precision 'fp8'; write one of fp32, bf16, fp16, fp64"),
    ],
)
def test_bad_configs(tmp_path: Path, config: Any, options: dict[str, Any], told: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(BadInput, match=told):
        load_model(written(tmp_path, config), **options)


def test_config_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot read .*missing.json: No such file"):
        load_model(str(tmp_path / "missing.json"))
    (tmp_path / "cut.json").write_text('{"model_type": ')
    with pytest.raises(BadInput, match="cut.json is not a Hugging Face config: not valid JSON"):
        load_model(str(tmp_path / "cut.json"))


def test_missing_transformers_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(BadInput, match=r"needs transformers: pip install 'meshwright\[hf\]'"):
        load_model(written(tmp_path, LLAMA))


FILE = """
import torch
import torch.nn.functional as F

class Net(torch.nn.Linear):
    def __init__(self, width=3):
        super().__init__(width, 1)

    @staticmethod
    def sample():
        return Net(), [torch.zeros(2, 3)]

def tensor():
    x = torch.zeros(2, 3)
    return Net(), x, {}, F.mse_loss

def keywords(sequence_length=7, precision="fp64"):
    return Net(), None, {"input": torch.zeros(sequence_length, 3), "precision": precision}

def both():
    return Net(), (torch.zeros(2, 3),), {"scale": 2}

def nothing(): return None
def five(): return Net(), (), {}, None, 5
def words(): return Net(), (), ["a"]
def loss(): return Net(), (), {}, 3
number = 3
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "few_models", raising=False)
    (tmp_path / "few_models.py").write_text(FILE)
    return str(tmp_path / "few_models.py")


def test_callables(models: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(f"{models}:Net")
    assert (loaded.name, loaded.example_inputs, loaded.example_kwargs, loaded.loss_fn) == ("Net", None, {}, None)
    loaded = load_model(f"{models}:Net.sample", global_batch=8, precision="fp32")
    assert isinstance(loaded.example_inputs, tuple) and loaded.example_inputs[0].shape == (2, 3)
    loaded = load_model(f"{models}:tensor")
    assert loaded.example_inputs is not None and len(loaded.example_inputs) == 1
    assert loaded.loss_fn is torch.nn.functional.mse_loss
    loaded = load_model(f"{models}:keywords", sequence_length=5)
    assert loaded.example_kwargs["input"].shape == (5, 3) and loaded.example_kwargs["precision"] == "fp64"
    assert load_model(f"{models}:keywords", precision="bf16").example_kwargs["precision"] == "bf16"
    monkeypatch.chdir(Path(models).parent)
    assert load_model("few_models:Net").name == "Net"


def test_example_batches(models: str) -> None:
    (x,) = example_batch(load_model(f"{models}:tensor"))
    assert x.shape == (2, 3)
    assert set(example_batch(load_model(f"{models}:keywords"))) == {"input", "precision"}
    batch = example_batch(load_model(f"{models}:both"))
    assert (len(batch.args), dict(batch.kwargs)) == (1, {"scale": 2})
    assert example_batch(LoadedModel(torch.nn.Identity())) == ()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nothing", "returned a NoneType; it must return an nn.Module"),
        ("five", "returned a tuple of Net, tuple, dict, NoneType, int"),
        ("words", "example_kwargs returned by .* is a list"),
        ("loss", "loss_fn returned by .* is a int; it must be callable"),
        ("number", "has no callable 'number'"),
        ("Net.sample.more", "has no callable 'Net.sample.more'"),
    ],
)
def test_bad_callables(models: str, name: str, told: str) -> None:
    with pytest.raises(BadInput, match=told):
        load_model(f"{models}:{name}")


def test_a_length_nobody_takes_is_refused(models: str) -> None:
    with pytest.raises(BadInput, match="takes no sequence_length"):
        load_model(f"{models}:Net", sequence_length=5)


def test_broken_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "syntax_wrong.py").write_text("def build(:\n")
    with pytest.raises(BadInput, match="syntax_wrong.py cannot be loaded: invalid syntax"):
        load_model(f"{tmp_path}/syntax_wrong.py:build")
    (tmp_path / "needs_more.py").write_text("import no_such_package\n")
    with pytest.raises(BadInput, match="cannot be loaded: No module named 'no_such_package'"):
        load_model(f"{tmp_path}/needs_more.py:build")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match="no module 'no_such_package'; needs_more needs it: install it"):
        load_model("needs_more:build")
