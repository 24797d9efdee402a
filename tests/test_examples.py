"""The demo's text and model do what their docstrings say."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from itertools import islice
from pathlib import Path

import pytest
import torch

from examples import gpt, text
from planner.models import load_model

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


@pytest.mark.gloo
def test_the_readmes_script_runs_as_it_stands(tmp_path: Path) -> None:
    section = (ROOT / "README.md").read_text().partition("## In code\n")[2].partition("\n## ")[0]
    block = section[: section.index("`example_inputs`")]
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(block))
    cache = {"XDG_CACHE_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    environment = {**os.environ, **cache, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith("Sequential on 4 x this machine (4 ranks)")
    first, last = (float(loss) for loss in done.stdout.splitlines()[-1].removeprefix("loss ").split(" -> "))
    assert last < first


def test_text_reads_back_but_for_characters_outside_the_vocabulary() -> None:
    assert text.decode(text.encode("for x in range(3):\n    print(x)")) == "for x in range(3):\n    print(x)"
    assert text.decode(text.encode("caf\u00e9\t")) == "caf??"


def test_the_two_parts_are_the_whole_text_in_order() -> None:
    training, validation = text.load(0.25)
    whole, nothing = text.load(0.0)
    assert torch.equal(torch.cat([training, validation]), whole) and len(nothing) == 0
    assert abs(len(validation) / len(whole) - 0.25) < 1e-4
    assert 0 <= int(whole.min()) and int(whole.max()) < text.VOCABULARY


def test_batches_follow_the_seed_and_targets_are_one_character_on() -> None:
    tokens, _ = text.load()
    first, again, other = (list(islice(text.batches(tokens, 4, 16, seed), 2)) for seed in (0, 0, 1))
    assert all(torch.equal(x, y) for a, b in zip(first, again, strict=True) for x, y in zip(a, b, strict=True))
    assert not torch.equal(first[0][0], other[0][0])
    inputs, targets = first[0]
    assert inputs.shape == targets.shape == (4, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_a_token_cannot_change_the_logits_before_it() -> None:
    torch.manual_seed(0)
    model = gpt.GPT(vocabulary=96, length=16, width=32, layers=2, heads=4)
    tokens = torch.randint(96, (2, 16))
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 96
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 16, 96)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_an_untrained_model_guesses_evenly() -> None:
    torch.manual_seed(0)
    model = gpt.GPT()
    tokens, _ = text.load()
    inputs, targets = next(text.batches(tokens, 8, 128, seed=0))
    loss = gpt.loss_fn(model(inputs), targets)
    torch.testing.assert_close(loss, torch.tensor(96.0).log(), rtol=0.05, atol=0)


@pytest.mark.parametrize(
    ("name", "parameters"), [("llama-3-8b", 8_030_261_248), ("gpt2", 124_439_808)], ids=["llama-3-8b", "gpt2"]
)
def test_configs_are_the_published_models(name: str, parameters: int) -> None:
    loaded = load_model(f"{EXAMPLES}/configs/{name}.json", global_batch=2, sequence_length=8)
    assert sum(parameter.numel() for parameter in loaded.model.parameters()) == parameters


def test_the_command_line_example_takes_its_batch_from_the_options() -> None:
    loaded = load_model("examples.command_line:small_gpt", global_batch=2, sequence_length=32)
    assert loaded.example_inputs is not None
    assert [tuple(tensor.shape) for tensor in loaded.example_inputs] == [(2, 32), (2, 32)]
    loss = loaded.model(*loaded.example_inputs)
    tokens, targets = loaded.example_inputs
    torch.testing.assert_close(loss, gpt.loss_fn(loaded.model.model(tokens), targets))
