"""The plan: the only artefact. Plain data, written as JSON, naming the graph it is for by digest.

    Plan
      what runs     mesh, micro-batches, schedule, ZeRO stage, stages (ranges of segments), recomputation per segment,
                    layouts (the strategy of each operator on the dp and tp axes; equal segments share one entry)
      why           estimate (time and memory, per stage), objective, bound and gap, the configurations searched
      for what      model, graph digest, cluster, global batch, precision, optimizer, memory limit

Segments are numbered along the chain of cuts; stage i holds segments ``stages[i][0]`` up to, but not, ``stages[i][1]``. Each
pipeline rank runs ``chunks`` stages: stage i lives on rank i % pp.

Between forward and backward of a micro-batch a segment keeps, by its word in ``recompute``,

    none          what autograd saves
    selective     its input and the results of matrix products with weights, convolutions, fused attention and reductions
                  over tp; the rest is computed again
    full          its input; all is computed again
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from planner.errors import InvalidPlan
from planner.ir.mesh import Mesh

VERSION = 2
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
RECOMPUTATIONS = ("none", "selective", "full")
_REMEDY = "Write it again with 'planner plan'."


@dataclass(frozen=True)
class SegmentInfo:
    """One link of the chain. ``kind``: equal segments have the same number. ``label``: its module path."""

    kind: int
    label: str
    operators: int
    parameters: int


@dataclass(frozen=True)
class OperatorLayout:
    """The strategies of one operator. ``name``: its first output in the first segment of its kind.

    ``dp``, ``tp``: strategy names (a letter of the operator's rule, ``R``, ``RP``, ``P``; '' on an axis of degree 1).
    ``output``: resulting layout of its first output on the tp axis, as a pair text.
    """

    name: str
    op: str
    module: str
    kind: int
    dp: str = ""
    tp: str = ""
    output: str = ""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device of a stage at its peak, by kind."""

    weights_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    activations_bytes: int = 0
    temporary_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self))


@dataclass(frozen=True)
class StageEstimate:
    """Times of one micro-batch on one stage, in seconds; ``*_per_step_s`` are paid once a step.

    ``forward_s`` and ``backward_s`` include their share of communication (``forward_communication_s``, ...) and of
    recomputation (``recomputation_s``, part of backward, without the communication that is repeated, which is part of
    ``backward_communication_s``), but not ``transfer_s``: the delay, each way, of what travels
    between this stage and the next. ``weight_backward_s``: the part of backward that makes gradients of weights only.
    ``memory``: of several stages on one device, each one's share of what the device needs at its peak.
    ``gradient_sync_per_step_s`` is the exposed part of the gradient reduction and, under ZeRO-1 and 2, the gathering of what
    other ranks updated; ``optimizer_per_step_s`` the update.
    """

    forward_s: float
    backward_s: float
    forward_communication_s: float = 0.0
    backward_communication_s: float = 0.0
    recomputation_s: float = 0.0
    transfer_s: float = 0.0
    gradient_sync_per_step_s: float = 0.0
    optimizer_per_step_s: float = 0.0
    memory: MemoryEstimate = field(default_factory=MemoryEstimate)
    weight_backward_s: float = 0.0


@dataclass(frozen=True)
class Estimate:
    """What one training step is predicted to cost. Times in seconds, averaged over devices where they split a step:

    step_time_s = compute_s + exposed_communication_s + bubble_s

    ``chunks``: stages a device. ``memory_limits_bytes``: of a device of each pipeline rank, where they differ; then
    ``memory_limit_bytes`` is the largest.
    """

    step_time_s: float
    compute_s: float
    exposed_communication_s: float
    bubble_s: float
    stages: tuple[StageEstimate, ...]
    memory_limit_bytes: int
    chunks: int = 1
    memory_limits_bytes: tuple[int, ...] = ()

    @property
    def limits_bytes(self) -> tuple[int, ...]:
        """Of a device of each pipeline rank."""
        return self.memory_limits_bytes or (self.memory_limit_bytes,) * (len(self.stages) // self.chunks)

    @property
    def over_bytes(self) -> tuple[int, ...]:
        """By how much a device of each pipeline rank exceeds its limit; negative: what it has left."""
        return tuple(memory.total_bytes - limit for memory, limit in zip(self.devices, self.limits_bytes, strict=True))

    @property
    def devices(self) -> tuple[MemoryEstimate, ...]:
        """Memory of a device of each pipeline rank: its stages' together."""
        if self.chunks == 1:
            return tuple(stage.memory for stage in self.stages)
        ranks = len(self.stages) // self.chunks
        names = [f.name for f in fields(MemoryEstimate)]
        return tuple(
            MemoryEstimate(**{name: sum(getattr(s.memory, name) for s in self.stages[rank::ranks]) for name in names})
            for rank in range(ranks)
        )

    @property
    def peak_memory_bytes(self) -> int:
        return max(memory.total_bytes for memory in self.devices)

    @property
    def fits(self) -> bool:
        return max(self.over_bytes) <= 0


@dataclass(frozen=True)
class Searched:
    """One configuration the search looked at: its lower bound, and what became of it.

    A coarser one stands for all it contains: 'tp8', 'pp4.dp2.tp8', 'pp4.dp2.tp8 mb=16'.

    ``outcome``: 'best', 'solved' (the best plan found costs ``objective_s``), 'tried' (no plan better than the best was
    found, but its bound does not rule one out), 'pruned' (its bound is no better than the best), 'infeasible'
    (``reason``), or 'open' (not reached in the time or work there was).
    """

    configuration: str
    bound_s: float
    outcome: str
    objective_s: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Plan:
    """See the module. On a cluster of unequal machines (costmodels.mixed) ``groups`` is the order in which ranks fill its
    groups, () for the cluster's own, and ``placement`` says of each pipeline rank which groups its devices are of."""

    model: str
    graph_digest: str
    mesh: Mesh
    micro_batches: int
    schedule: str
    zero: int
    stages: tuple[tuple[int, int], ...]
    recompute: tuple[str, ...]
    segments: tuple[SegmentInfo, ...]
    layouts: tuple[OperatorLayout, ...]
    global_batch: int
    cluster: str
    precision: str
    optimizer: str
    strategy: str
    estimate: Estimate
    bound_s: float
    searched: tuple[Searched, ...] = ()
    notes: tuple[str, ...] = ()
    seed: int = 0
    chunks: int = 1
    groups: tuple[str, ...] = ()
    placement: tuple[str, ...] = ()
    version: int = VERSION

    @property
    def objective_s(self) -> float:
        return self.estimate.step_time_s

    @property
    def gap(self) -> float:
        """Relative distance of the objective from the proven lower bound; 0 means proven optimal."""
        return max(0.0, (self.objective_s - self.bound_s) / self.objective_s) if self.objective_s else 0.0

    @property
    def configuration(self) -> str:
        """The plan in the strategy grammar: ``pp2.dp2.tp2 mb=8 zero=3 recompute=full schedule=1f1b``."""
        recompute = self.recompute[0] if len(set(self.recompute)) == 1 else "some"
        parts = [str(self.mesh), f"mb={self.micro_batches}", f"zero={self.zero}", f"recompute={recompute}"]
        parts += [f"schedule={self.schedule}"] if self.mesh.pp > 1 else []
        parts += [f"v={self.chunks}"] if self.chunks > 1 else []
        return " ".join(parts + ([f"groups={'+'.join(self.groups)}"] if self.groups else []))

    def to_json(self) -> str:
        data = asdict(self)
        data["mesh"] = str(self.mesh)
        return json.dumps(data, indent=1) + "\n"

    @staticmethod
    def from_json(text: str, source: str = "plan") -> Plan:
        """Read a plan. Raises InvalidPlan naming ``source`` and the field when it is not one."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidPlan(f"{source} is not a plan: not valid JSON ({error}). {_REMEDY}") from None
        if not isinstance(data, dict) or "version" not in data:
            raise InvalidPlan(f"{source} is not a plan: it has no version field. {_REMEDY}")
        if data["version"] != VERSION:
            raise InvalidPlan(
                f"{source} is a plan of version {data['version']}; this planner reads version {VERSION}. {_REMEDY}"
            )
        try:
            plan: Plan = _build(Plan, data)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidPlan(f"{source} is not a complete plan: {error}. {_REMEDY}") from None
        return plan

    def save(self, path: str | Path) -> None:
        """Write beside, then rename: an interrupted write leaves the old file."""
        path = Path(path)
        beside = path.with_name(path.name + ".writing")
        beside.write_text(self.to_json())
        beside.replace(path)

    @staticmethod
    def load(path: str | Path) -> Plan:
        path = Path(path)
        try:
            text = path.read_text()
        except OSError as error:
            raise InvalidPlan(f"cannot read plan {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise InvalidPlan(f"{path} is not a plan: not text. {_REMEDY}") from None
        return Plan.from_json(text, str(path))


@lru_cache(maxsize=16)
def _fields(cls: type) -> Mapping[str, tuple[str, bool]]:
    """Annotation of each field of a plan dataclass, and whether it must be given."""
    return {f.name: (str(f.type), f.default is MISSING and f.default_factory is MISSING) for f in fields(cls)}


def _build(cls: type, data: Any) -> Any:
    """An instance of a plan dataclass from parsed JSON, every field checked for presence and type."""
    if not isinstance(data, dict):
        raise TypeError(f"expected the fields of {cls.__name__}, found {type(data).__name__}")
    known = _fields(cls)
    for name in data:
        if name not in known:
            raise TypeError(f"{cls.__name__} has no field {name!r}")
    for name, (_, required) in known.items():
        if required and name not in data:
            raise TypeError(f"{cls.__name__} lacks the field {name!r}")
    return cls(**{name: _convert(cls, name, value) for name, value in data.items()})


_NESTED = {
    cls.__name__: cls for cls in (SegmentInfo, OperatorLayout, StageEstimate, Searched, Estimate, MemoryEstimate)
}


def _convert(cls: type, name: str, value: Any) -> Any:
    annotation = _fields(cls)[name][0]
    if annotation in _NESTED:
        return _build(_NESTED[annotation], value)
    if annotation == "Mesh":
        return Mesh.parse(_expect(value, str, cls, name))
    if annotation == "tuple[tuple[int, int], ...]":
        pairs = [_expect(pair, list, cls, name) for pair in _expect(value, list, cls, name)]
        for pair in pairs:
            if len(pair) != 2:
                raise TypeError(f"{cls.__name__}.{name} must hold pairs, not {pair}")
        return tuple((_expect(first, int, cls, name), _expect(end, int, cls, name)) for first, end in pairs)
    if annotation.startswith("tuple["):
        item = annotation.removeprefix("tuple[").removesuffix(", ...]")
        items = _expect(value, list, cls, name)
        if item in _NESTED:
            return tuple(_build(_NESTED[item], entry) for entry in items)
        return tuple(_expect(entry, _SCALARS[item], cls, name) for entry in items)
    if annotation == "float | None" and value is None:
        return None
    if annotation.startswith("float"):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{cls.__name__}.{name} must be a number, not {type(value).__name__}")
        return float(value)
    return _expect(value, _SCALARS[annotation], cls, name)


_SCALARS: Mapping[str, type] = {"int": int, "str": str, "bool": bool}


def _expect(value: Any, kind: type, cls: type, name: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{cls.__name__}.{name} must be {kind.__name__}, not {type(value).__name__}")
    return value
