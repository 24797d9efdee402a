"""Batches of another size than the example's, such as the last one of an epoch: the same plan, lowered again.

The model is traced again with the other number of rows, as its code may write the number into the graph (a mean over the
batch, a view). The program made from it holds the same tensors in the same places, so ranks run it on what they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from planner.batch import check_count
from planner.errors import BadInput
from planner.ir.graph import Graph
from planner.ir.plan import Plan
from planner.ir.program import Program
from planner.lower import lower


def other_rows(program: Program, tensors: Mapping[str, torch.Tensor]) -> int | None:
    """The rows of a batch that differs from the one of ``program`` in its number of rows alone; None for any other.

    Raises BadInput when its tensors have different numbers of rows.
    """
    rows: dict[str, int] = {}
    for spec in program.inputs:
        shape = tuple(tensors[spec.name].shape)
        if spec.follows_batch and len(shape) == len(spec.shape) and shape[1:] == spec.shape[1:]:
            rows[spec.label] = shape[0]
        elif shape != spec.shape:
            return None
    different = {count: label for label, count in reversed(rows.items())}
    if len(different) > 1:
        (count, label), (other, second) = sorted(different.items(), key=lambda item: list(rows).index(item[1]))[:2]
        raise BadInput(
            f"{label} has {count} rows, {second} {other}; they were one batch in the example, of {program.batch_size} rows. If "
            "dim 0 of one of them is not the batch, name it in not_batched=(...) when planning"
        )
    return next((count for count in different if count != program.batch_size), None)


def unchanged_paths(program: Program, tensors: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Key paths of the inputs that are as long as before, so that dim 0 is not the batch."""
    return tuple(spec.path for spec in program.inputs if tuple(tensors[spec.name].shape) == spec.shape)


def other_program(first: Program, plan: Plan, graph: Graph, rows: int, trace: Callable[[], Graph]) -> Program:
    """The program of ``plan`` for ``rows`` rows, beside ``first``, which is for ``graph``; ``trace`` traces the model anew.

    Raises BadInput when there are too few rows, or when the model runs other operators with that many; TraceError.
    """
    check_count(rows, plan.mesh.dp, plan.micro_batches)
    again = trace()
    _check_same(graph, again, rows)
    program = lower(again, plan, other_batch=True)
    for mine, other in zip(first.stages, program.stages, strict=True):
        if mine.states != other.states or len(mine.segments) != len(other.segments):
            raise BadInput(
                f"a batch of {rows} rows would hold the weights of stage {mine.index} in another way than the plan's batch "
                f"of {graph.batch_size} does. {_remedy(graph)}"
            )
    return program


def _check_same(graph: Graph, again: Graph, rows: int) -> None:
    """The same operators on the same tensors, but for sizes and the numbers that follow from them."""
    leaves = [[(leaf.kind, leaf.target, leaf.trainable) for leaf in g.leaves] for g in (graph, again)]
    if leaves[0] != leaves[1]:
        raise BadInput(
            f"with {rows} rows the model reads other weights or inputs than with {graph.batch_size}. {_remedy(graph)}"
        )
    for before, after in zip(graph.nodes, again.nodes, strict=False):
        if (before.op, before.module) != (after.op, after.module):
            raise BadInput(
                f"with {rows} rows the model runs {after.op} where it runs {before.op} with {graph.batch_size}, in "
                f"{before.module or 'the model'} (or it was changed since the plan was made). {_remedy(graph)}"
            )
    if len(graph.nodes) != len(again.nodes) or len(graph.writes) != len(again.writes):
        raise BadInput(
            f"with {rows} rows the model runs {len(again.nodes)} operators, with {graph.batch_size} {len(graph.nodes)} (or it "
            f"was changed since the plan was made). {_remedy(graph)}"
        )


def _remedy(graph: Graph) -> str:
    return f"Pass batches of {graph.batch_size} rows, or plan again with an example of the new size"
