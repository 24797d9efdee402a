"""The command line: ``planner plan``, ``inspect``, ``compare``, ``estimate``, ``explain``, ``size``, ``prove``, ``verify``,
``run``, ``measure`` and ``calibrate``.

Results go to stdout, progress and messages to stderr. Exit codes: 2 for wrong usage, and those of ``planner.errors``.
torch and the solver are imported by the commands that trace or solve, never by ``inspect``,
``prove`` without a model, and ``explain --diff``.
"""

from __future__ import annotations

import io
import sys
from typing import Any

import click

from planner.commands import measuring, plans, questions, runs
from planner.errors import MeshwrightError

INTERRUPTED = 130


class _Commands(click.Group):
    """Turns errors meant for the user into one message and their exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MeshwrightError as error:
            click.echo(f"planner: {error}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("planner: interrupted", err=True)
            ctx.exit(INTERRUPTED)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Plans, proves and runs the fastest way to train a PyTorch model on N GPUs.

    MODEL is module:callable, path/to/file.py:callable, or a Hugging Face config file. The callable returns a model, or
    (model, example_inputs, example_kwargs, loss_fn) with any of the last ones left out.
    """


_COMMANDS = (
    plans.plan, plans.inspect, plans.compare, questions.estimate, questions.explain, questions.size, questions.prove,
    runs.verify, runs.run, measuring.measure, measuring.calibrate,
)  # fmt: skip
for _command in _COMMANDS:
    cli.add_command(_command)


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without these characters shows ? instead of failing
    cli(prog_name="planner")
