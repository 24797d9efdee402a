"""Plan, compare and train a small GPT on several local ranks, and check it against training on one device.

    python examples/train_gpt.py                        # the fastest plan found, on 4 local ranks
    python examples/train_gpt.py --strategy pp2.dp2     # a strategy picked by hand
    python examples/train_gpt.py --skip-measure         # predicted times only, no timed runs

Exits with 1 when the two loss curves differ by more than 1e-4 anywhere.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from itertools import islice

import click
import text
import torch
from gpt import GPT, loss_fn
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import planner
from planner.report.comparison import comparison_report

TOLERANCE = 1e-4
BATCH = 16
HAND_PICKED = ("ddp", "fsdp", "tp", "model", "gpipe", "1f1b", "dp2.tp2", "pp2.dp2")

Batch = tuple[tuple[Tensor], Tensor]


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def train_on_one_device(
    model: nn.Module, data: list[Batch], optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
) -> list[float]:
    """The ordinary loop, for comparison. Returns the loss of each step."""
    update = optimizer(list(model.parameters()))
    losses = []
    for (tokens,), targets in data:
        update.zero_grad()
        loss = loss_fn(model(tokens), targets)
        loss.backward()
        update.step()
        losses.append(loss.item())
    return losses


def loss_table(ranks: int, parallel: list[float], single: list[float], rows: int = 12) -> Table:
    """Both loss curves, ``rows`` steps evenly spread with the first and the last among them."""
    table = Table(title="Loss, nats a character")
    for heading in ("step", f"{ranks} ranks", "one device", "difference"):
        table.add_column(heading, justify="right")
    last = len(single) - 1
    for step in sorted({round(last * row / max(1, rows - 1)) for row in range(rows)}):
        difference = abs(parallel[step] - single[step])
        table.add_row(f"{step + 1}", f"{parallel[step]:.6f}", f"{single[step]:.6f}", f"{difference:.1e}")
    return table


@torch.no_grad()
def validation_loss(model: nn.Module, tokens: Tensor, length: int, batches: int = 4) -> float:
    excerpts = islice(text.batches(tokens, BATCH, length, seed=1), batches)
    return sum(loss_fn(model(inputs), targets).item() for inputs, targets in excerpts) / batches


@click.command(context_settings={"show_default": True})
@click.option(
    "--gpus", type=click.IntRange(min=1), default=4, help="Ranks to train on (processes, where there are no GPUs)."
)
@click.option("--steps", type=click.IntRange(min=1), default=100, help="Optimizer steps.")
@click.option("--strategy", default="auto", help="'auto', or a strategy such as ddp, fsdp, tp, 1f1b, 'pp2.dp2 mb=4'.")
@click.option("--skip-measure", is_flag=True, help="Compare predicted times only.")
def main(gpus: int, steps: int, strategy: str, skip_measure: bool) -> None:
    """Plan, compare and train a small GPT, and check it against one device."""
    console = Console()
    torch.manual_seed(0)
    model = GPT(vocabulary=text.VOCABULARY)
    reference = copy.deepcopy(model)
    length = model.position_embedding.num_embeddings
    training, validation = text.load()
    data: list[Batch] = [
        ((inputs,), targets) for inputs, targets in islice(text.batches(training, BATCH, length, seed=0), steps)
    ]
    (tokens,), targets = data[0]
    count = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"A GPT of {count:,} parameters on Python's language reference ({len(training):,} characters to train on, "
        f"{len(validation):,} to validate), {BATCH} excerpts of {length} characters a step."
    )

    with console.status("planning") as status:

        def progress(message: str, done: float | None = None, total: float | None = None) -> None:
            status.update(message)

        parallel = planner.auto_parallelize(
            model,
            gpus=gpus,
            example_inputs=(tokens,),
            example_target=targets,
            loss_fn=loss_fn,
            strategy=strategy,
            progress=progress,
        )
        console.rule("The plan")
        console.print(parallel)
        console.rule("Compared with strategies picked by hand")
        rows = planner.compare(
            model,
            gpus=gpus,
            example_inputs=(tokens,),
            example_target=targets,
            loss_fn=loss_fn,
            strategies=HAND_PICKED,
            measure=not skip_measure,
            progress=progress,
        )
    console.print(comparison_report(rows))

    with parallel:
        console.rule(f"Training, {steps} steps")
        start = time.perf_counter()
        losses = parallel.train(data, optimizer=adamw, steps=steps)
        parallel_s = time.perf_counter() - start
        trained = GPT(vocabulary=text.VOCABULARY)
        trained.load_state_dict(parallel.state_dict())

    start = time.perf_counter()
    single = train_on_one_device(reference, data, adamw)
    single_s = time.perf_counter() - start

    console.print(loss_table(gpus, losses, single))
    largest = (torch.tensor(losses, dtype=torch.float64) - torch.tensor(single, dtype=torch.float64)).abs().max().item()
    console.print(f"Largest difference over {steps} steps: {largest:.1e} (allowed: {TOLERANCE:.0e})")
    console.print(
        f"Validation loss: {validation_loss(trained, validation, length):.6f} on {gpus} ranks, "
        f"{validation_loss(reference, validation, length):.6f} on one device"
    )
    console.print(f"Time: {parallel_s:.1f} s on {gpus} ranks, {single_s:.1f} s on one device, on this machine")
    if not largest <= TOLERANCE:
        console.print("[bold red]The losses differ by more than allowed.")
        sys.exit(1)
    console.print("[bold green]The losses are those of one device.")


if __name__ == "__main__":
    main()
