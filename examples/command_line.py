"""The demo's GPT for the command line: a callable that returns a model and one global batch.

planner plan examples.command_line:small_gpt --gpus 8 --cluster dgx-h100
planner compare examples.command_line:small_gpt --gpus 4 --measure
"""

from __future__ import annotations

from torch import Tensor, nn

from examples import gpt, text


class GPTWithLoss(nn.Module):
    """Tokens and targets, [batch, length] each, to the mean loss a token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return gpt.loss_fn(self.model(tokens), targets)


def small_gpt(global_batch: int = 16, sequence_length: int = 128) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The options --global-batch and --sequence-length arrive as the parameters of the same name."""
    model = gpt.GPT(vocabulary=text.VOCABULARY, length=sequence_length)
    training, _ = text.load()
    return GPTWithLoss(model), next(text.batches(training, global_batch, sequence_length, seed=0))
