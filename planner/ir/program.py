"""The lowered program: what each stage runs, as data. Made by ``planner.lower``, run by ``runtime``.

A ``Program`` holds one ``StageProgram`` a stage. A stage is Python source text (readable, run as it stands) together
with the tensors it owns. The source defines one class a distinct segment and the class ``Stage``:

    class Block(Segment):                    # one class per distinct segment
        def forward(self, add_1, mul_3):     # weights are attributes: self.attn_q_proj_weight
            ...
            return add_9

    class Stage(StageModule):
        def prologue(self, labels):          # only where counts are needed: this micro-batch's share of global counts
            ...
            return (count,)
        def forward(self, add_1, *, input_ids, labels, count):
            ...
            add_9 = self.segments[0](add_1, mul_3)
            ...
            return add_17,                   # a tuple: the tensors for the next stage; the last stage returns (loss,)

The source starts with ``PREAMBLE``. ``tp`` and ``dp`` in it are ``runtime.collectives.Axis`` objects;
``convert(x, tp, "P:R -> R:R")`` is the one primitive for a conversion of planner.ir.layout.

Rules a source keeps: buffers are written by ``Stage.forward`` (``self.write(self.running_mean, x)``, done after
backward), never inside a segment, which may run twice (recomputation); a tensor a segment returns is not changed in
place; ``Stage.prologue`` reduces over dp itself. A stage that draws random numbers names ``rng`` among its inputs
(``RNG``): an int64 tensor on the CPU of [seed, step, micro-batch], for ``dropout`` and ``seeded``. In a segment
``self.opaque(name, rng, site, states)(...)`` calls a module of the user's, as a function of its states, by
``StageProgram.modules``. ``self.keep.product(f, ...)`` calls f and keeps what it computes for the recomputation of the
segment (``runtime.keep``); in one that is not recomputed selectively it just calls f.

Between processes a program travels as plain data: ``to_dict`` and ``from_dict``.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from planner.errors import InvalidPlan
from planner.ir.layout import Placement, R
from planner.ir.mesh import Mesh, deal

RNG = "rng"

PREAMBLE = """\
import torch
from torch import nn
from torch.nn import functional as F

from runtime.program import (
    Axis,
    Segment,
    StageModule,
    aten,
    batch_norm,
    convert,
    cross_entropy_count,
    dropout,
    grouped_mm,
    micro_slice,
    seeded,
    vocab_parallel_cross_entropy_sum,
    vocab_parallel_embedding,
)

device: torch.device  # set by runtime.stage_module.build_stage, as are the axes
tp: Axis
dp: Axis
"""

# Names that mean something in a source: what the preamble imports, its globals, arguments and builtins that lines use.
SOURCE_NAMES = frozenset(re.findall(r"^(?:    )?(\w+)[,:]", PREAMBLE, re.MULTILINE)) | frozenset(
    "self rng site micro_batch i range part sum type math Stage torch nn F float complex".split()
)
# Attributes of the base classes of a source (runtime.stage_module), which no tensor may hide.
SOURCE_ATTRIBUTES = frozenset(
    "finish_writes forward held keep opaque opaque_modules prologue running segments shards write".split()
)


@dataclass(frozen=True)
class TensorSpec:
    """A tensor travelling between stages, local to one device and one micro-batch."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    differentiable: bool


@dataclass(frozen=True)
class StateSpec:
    """A parameter or buffer of a stage.

    ``target``: name in the original model (``aliases``: its further names there). ``shape``: global. ``placement``: how
    the tp axis holds it. ``segment``: index in ``StageProgram.segments`` of the module that owns it, None for the stage
    itself (shared by several segments). ``attributes``: attribute names it is bound to, as (segment index or None,
    name) pairs.
    ``sum_over_tp``: its gradient is partial on tp and is summed once a step.
    ``tied_stages``: all stages that hold a copy (gradients are summed over them); just this stage when not shared.
    """

    target: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    is_buffer: bool = False
    placement: Placement = R
    segment: int | None = None
    attributes: tuple[tuple[int | None, str], ...] = ()
    sum_over_tp: bool = False
    tied_stages: tuple[int, ...] = ()
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class SegmentSpec:
    """One segment of a stage: the class in the source that runs it, and what backward recomputes of its forward.

    ``recompute``: 'none', 'full', or 'selective': what the source calls by ``self.keep`` is not computed again.
    """

    class_name: str
    label: str
    recompute: str


@dataclass(frozen=True)
class ModuleSpec:
    """A call of a module of the user's that runs as one operator: ``self.opaque(name, ...)`` in segment ``segment``.

    ``path``: of the module in the original model. ``results``: the tensors it returns, local to one device and one
    micro-batch; ``plain``: what else it returns, as text. ``written``: numbers of its states that are buffers it writes;
    ``kept``: (path in the module, attribute) of tensors it leaves on itself. These follow the results.
    """

    name: str
    path: str
    segment: int
    results: tuple[TensorSpec, ...]
    plain: str = ""
    written: tuple[int, ...] = ()
    kept: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class StageProgram:
    index: int
    source: str
    segments: tuple[SegmentSpec, ...]
    states: tuple[StateSpec, ...]
    receives: tuple[TensorSpec, ...]  # positional arguments of Stage.forward; () on the first stage
    sends: tuple[TensorSpec, ...]  # what Stage.forward returns; the loss on the last stage
    inputs: tuple[str, ...]  # names of program inputs passed to Stage.forward by keyword
    prologue_inputs: tuple[str, ...]  # names of program inputs passed to Stage.prologue
    counts: tuple[TensorSpec, ...]  # what Stage.prologue returns; summed over micro-batches, then keywords of forward
    modules: tuple[ModuleSpec, ...] = ()


@dataclass(frozen=True)
class InputSpec:
    """A tensor of the user's batch.

    ``path``: where it sits in (args, kwargs, target), as a key path text: '[0][0]', '[1]["labels"]' or '[2]'.
    """

    name: str
    path: str
    shape: tuple[int, ...]  # global
    dtype: str
    batched: bool  # dim 0 is cut over dp, then over micro-batches
    follows_batch: bool = False  # dim 0 is as long as the batch, and may be another number of rows in another batch

    @property
    def label(self) -> str:
        return spoken(self.path)


def spoken(path: str) -> str:
    """A key path as a person says it: 'positional input 1', "input 'labels'", 'the target'."""
    if path.startswith("[2]"):
        return "the target" + path[3:]
    place, _, rest = path[3:].strip("[").partition("]")
    return f"{'input' if path.startswith('[1]') else 'positional input'} {place}{rest}"


@dataclass(frozen=True)
class SmallerPiece:
    """The stages for micro-batches of ``rows`` rows on a dp rank whose micro-batches have ``rank_rows`` together."""

    rank_rows: int
    rows: int
    stages: tuple[StageProgram, ...]


@dataclass(frozen=True)
class Program:
    """``stages[i]`` runs on pipeline rank i % pp.

    ``loss_is_partial_on_dp``: each dp rank's loss is a share of the global loss (summed to report it).

    ``stages`` are for the largest micro-batch; where the ``batch_size`` rows do not divide evenly (planner.ir.mesh.deal),
    ``smaller`` holds the same for the others: equal states, other sizes. ``library_operators``: those that a process finds
    only when it has loaded the library that registers them.
    """

    mesh: Mesh
    micro_batches: int
    schedule: str
    zero: int
    inputs: tuple[InputSpec, ...]
    stages: tuple[StageProgram, ...]
    loss_is_partial_on_dp: bool = True
    loss_is_partial_on_tp: bool = False
    seed: int = 0
    batch_size: int = 0
    smaller: tuple[SmallerPiece, ...] = ()
    library_operators: tuple[str, ...] = ()

    def on_rank(self, pp_rank: int) -> range:
        """The numbers of the stages of a pipeline rank."""
        return range(pp_rank, len(self.stages), self.mesh.pp)

    def stages_for(self, rank_rows: int, rows: int) -> tuple[StageProgram, ...]:
        """The stages for one size of micro-batch."""
        found = (piece.stages for piece in self.smaller if (piece.rank_rows, piece.rows) == (rank_rows, rows))
        return next(found, self.stages)

    def pieces_of(self, dp_index: int) -> tuple[int, tuple[int, ...]]:
        """Rows of a dp rank, and of each of its micro-batches."""
        rank_rows = deal(self.batch_size, self.mesh.dp)[dp_index]
        return rank_rows, deal(rank_rows, self.micro_batches)

    def to_dict(self) -> dict[str, Any]:
        """The program as dicts, lists and primitives; placements and the mesh in their text form."""
        data = _plain(self)
        assert isinstance(data, dict)
        return data

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Program:
        """The inverse of ``to_dict``. Raises InvalidPlan naming the field when ``data`` is no program."""
        program = _read(Program, data, "program")
        assert isinstance(program, Program)
        counts = [len(stages) for stages in (program.stages, *(piece.stages for piece in program.smaller))]
        several = program.mesh.pp > 1 and program.schedule in ("interleaved", "zero-bubble")
        fits = counts[0] > 0 and counts[0] % program.mesh.pp == 0 if several else counts[0] == program.mesh.pp
        if not fits or len(set(counts)) > 1:
            raise InvalidPlan(
                f"the program has {len(program.stages)} stages for a mesh of {program.mesh}. Lower the plan again."
            )
        return program


def _plain(value: Any) -> Any:
    if isinstance(value, Mesh | Placement):
        return str(value)
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


@lru_cache(maxsize=64)
def _field_types(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _read(annotation: Any, value: Any, where: str) -> Any:
    """``value`` as the type ``annotation`` names, checked all the way down. ``where`` is its path in the program."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return None if value is None else _read(arguments[0], value, where)
    if origin is tuple:
        _check(isinstance(value, list | tuple), where, "a list", value)
        kinds = (arguments[0],) * len(value) if arguments[-1] is Ellipsis else arguments
        _check(len(kinds) == len(value), where, f"a list of {len(kinds)}", value)
        return tuple(
            _read(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(kinds, value, strict=True))
        )
    if annotation in (Mesh, Placement):
        _check(isinstance(value, str), where, "text", value)
        try:
            return annotation.parse(value)
        except ValueError as error:
            raise InvalidPlan(f"{where}: {error}. Lower the plan again.") from None
    if is_dataclass(annotation):
        names = _field_types(annotation)  # type: ignore[arg-type]
        _check(isinstance(value, Mapping) and set(value) == set(names), where, f"the fields of {annotation}", value)
        return annotation(**{name: _read(kind, value[name], f"{where}.{name}") for name, kind in names.items()})  # type: ignore[operator]
    _check(
        isinstance(value, annotation) and (annotation is not int or not isinstance(value, bool)),
        where,
        annotation.__name__,
        value,
    )
    return value


def _check(holds: bool, where: str, expected: str, value: Any) -> None:
    if not holds:
        raise InvalidPlan(f"{where} must be {expected}, not {str(value)[:60]!r}. Lower the plan again.")
