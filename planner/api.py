"""The public calls: plan a model, run the plan, compare strategies.

    auto_parallelize(model, gpus=...) -> Parallel     the plan, and the training run on its ranks
    compare(model, gpus=...) -> rows                  the solver's plan beside hand-picked ones, measured if asked

A Parallel runs in three ways: it starts local ranks itself (gloo processes on CPUs, NCCL where there are GPUs); under
torchrun every rank calls ``auto_parallelize`` and is one of its ranks; or it is only a plan and nothing is started.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from costmodels.hardware import Cluster, ClusterError, load_cluster
from planner.errors import BadInput, InvalidPlan, MeshwrightError
from planner.inputs import cast, example_batch, guess_target
from planner.ir.graph import Graph
from planner.ir.plan import Plan
from planner.ir.program import Program
from planner.ir.verify import verify_plan
from planner.lower import lower
from planner.parallel import OptimizerFactory, Parallel
from planner.report.comparison import ComparisonRow
from planner.sizes import parse_bytes
from planner.solve.configuration import Evaluator, Problem
from planner.solve.search import search
from planner.strategies import NAMED, plan_by_hand
from planner.trace import Batch, Traced, trace
from runtime.launch import LocalRanks, current_world, init_world, share_bytes
from runtime.measure import measured_cluster
from runtime.worker import Rank

Progress = Callable[..., None]
OPTIMIZERS = ("adamw", "sgd", "sgd-momentum")
PRECISIONS = {
    "fp32": torch.float32, "float32": torch.float32, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
    "fp16": torch.float16, "float16": torch.float16, "fp64": torch.float64, "float64": torch.float64,
}  # fmt: skip


def auto_parallelize(
    model: torch.nn.Module,
    gpus: int | None = None,
    *,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    example_target: Any = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    cluster: str | Path | Cluster = "auto",
    global_batch: int | None = None,
    optimizer: str = "adamw",
    precision: str | None = None,
    memory_limit: int | str | None = None,
    strategy: str = "auto",
    time_limit: float | None = None,
    seed: int = 0,
    plan: Plan | str | Path | None = None,
    progress: Progress | None = None,
) -> Parallel:
    """Plan how to train ``model`` on ``gpus`` devices, and return what runs it.

    ``example_inputs`` (a tuple) and ``example_kwargs``: one global batch, as ``model(*inputs, **kwargs)`` takes it; dim 0
    of every tensor as long as the first is the batch. Without them: the model's ``example_input_array``,
    ``dummy_inputs`` or ``example_inputs``, or what its first layer takes. ``loss_fn(output, target)`` gives one number;
    without it the model must return its loss (Hugging Face: ``labels`` among the kwargs). ``example_target``: loss_fn's
    target for that batch; without it its shape is found by trying.

    ``cluster``: a preset's name, a TOML path, or "auto", this machine, measured (a few seconds, kept). ``global_batch``:
    rows of one step, if not those of the example. ``optimizer``: adamw, sgd or sgd-momentum, for its cost; the one that
    trains is passed to ``train``. ``precision``: fp32, bf16, fp16 or fp64; default: as the model is. ``memory_limit``:
    bytes of one device, or '40GB'; default: what the cluster's device has. ``strategy``: "auto", or a hand-picked one
    (planner.strategies). ``time_limit``: seconds for the search; the best plan so far comes back with its gap. ``plan``: an
    earlier plan to run instead of searching.

    Under torchrun every rank calls this; rank 0 plans and the others get the very same plan.

    Raises BadInput, TraceError, InvalidPlan, Infeasible or OutOfTime, each before any process of the run is started.
    """
    world = current_world()
    if world is not None and world.size > 1:
        if gpus not in (None, world.size):
            raise BadInput(f"gpus={gpus}, but torchrun started {world.size} ranks; start {gpus} ranks or leave gpus out")
        gpus = world.size
    count = _gpu_count(gpus)
    request = _Request(
        count, loss_fn, cluster, optimizer, precision, _memory_limit(memory_limit), strategy, time_limit, seed, plan, progress
    )
    batch = (example_inputs, example_kwargs, example_target, global_batch)
    if world is None or world.size == 1:
        prepared = _prepare(model, batch, request)
        return Parallel(model, prepared.plan, prepared.program, prepared.has_target, start=lambda: LocalRanks.start(count))
    device = init_world(world)
    decided = None
    if world.rank == 0:
        try:
            mine = _prepare(model, batch, request)
            decided = {"plan": mine.plan.to_json(), "program": mine.program.to_dict(), "has_target": mine.has_target}
        except MeshwrightError as error:
            decided = {"error": str(error), "kind": type(error).__name__}
    shared = json.loads(share_bytes(json.dumps(decided).encode() if decided is not None else None))
    if "error" in shared:
        raise _error_of(shared["kind"])(shared["error"])
    program = Program.from_dict(shared["program"])
    rank = Rank(rank=world.rank, world_size=world.size, device=device)
    return Parallel(model, Plan.from_json(shared["plan"]), program, shared["has_target"], rank=rank)


def compare(
    model: torch.nn.Module,
    gpus: int | None = None,
    *,
    strategies: Sequence[str] = (*NAMED, "dp2.tp2", "pp2.dp2", "pp2.tp2"),
    measure: bool = False,
    steps: int = 5,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    example_target: Any = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    cluster: str | Path | Cluster = "auto",
    global_batch: int | None = None,
    optimizer: str = "adamw",
    precision: str | None = None,
    memory_limit: int | str | None = None,
    time_limit: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[ComparisonRow, ...]:
    """The solver's plan first, then each of ``strategies``, priced by the same functions; ``measure``: and run.

    ``steps``: training steps measured on local ranks after one that warms up; the median counts. The other arguments are
    those of ``auto_parallelize``. A strategy that cannot be used has its reason in ``refused``.
    """
    count = _gpu_count(gpus)
    request = _Request(
        count, loss_fn, cluster, optimizer, precision, _memory_limit(memory_limit), "auto", time_limit, seed, None, progress
    )
    traced, whole_batch, _ = _traced(model, (example_inputs, example_kwargs, example_target, global_batch), request)
    problem = _problem(model, traced.graph, request)
    evaluator = Evaluator(problem)
    tensors = _tensors(traced, whole_batch) if measure else {}
    rows = []
    for name in ("auto", *(s for s in strategies if s != "auto")):
        if progress is not None:
            progress(f"planning {name}")
        try:
            plan = search(problem, time_limit, progress) if name == "auto" else plan_by_hand(evaluator, name)
        except MeshwrightError as error:
            rows.append(ComparisonRow(name, None, str(error)))
            continue
        row = ComparisonRow(name, plan)
        if measure:
            if progress is not None:
                progress(f"measuring {name}")
            row = _measured(model, traced.graph, row, tensors, steps, optimizer)
        rows.append(row)
    return tuple(rows)


# --- planning ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Request:
    gpus: int
    loss_fn: Callable[..., torch.Tensor] | None
    cluster: str | Path | Cluster
    optimizer: str
    precision: str | None
    memory_limit_bytes: int | None
    strategy: str
    time_limit_s: float | None
    seed: int
    plan: Plan | str | Path | None
    progress: Progress | None

    def say(self, what: str) -> None:
        if self.progress is not None:
            self.progress(what)


@dataclass(frozen=True)
class _Prepared:
    plan: Plan
    program: Program
    has_target: bool


def _prepare(model: torch.nn.Module, batch: tuple[Any, ...], request: _Request) -> _Prepared:
    """Trace, plan and lower."""
    traced, _, has_target = _traced(model, batch, request)
    if request.plan is not None:
        plan = request.plan if isinstance(request.plan, Plan) else Plan.load(request.plan)
        verify_plan(plan, traced.graph)
        if plan.mesh.size != request.gpus:
            raise InvalidPlan(f"the plan is for {plan.mesh.size} devices, not {request.gpus}; pass gpus={plan.mesh.size}")
    else:
        problem = _problem(model, traced.graph, request)
        request.say("searching")
        if request.strategy == "auto":
            plan = search(problem, request.time_limit_s, request.progress)
        else:
            plan = plan_by_hand(Evaluator(problem), request.strategy)
        verify_plan(plan, traced.graph)
    request.say("lowering")
    return _Prepared(plan, lower(traced.graph, plan), has_target)


def _traced(model: torch.nn.Module, batch: tuple[Any, ...], request: _Request) -> tuple[Traced, Batch, bool]:
    if not isinstance(model, torch.nn.Module):
        raise BadInput(f"model is a {type(model).__name__}; pass a torch.nn.Module")
    if request.optimizer not in OPTIMIZERS:
        raise BadInput(f"optimizer {request.optimizer!r} is unknown; use one of {', '.join(OPTIMIZERS)}")
    inputs, kwargs, target, rows = batch
    example = example_batch(model, inputs, kwargs, target, rows)
    if request.precision is not None:
        dtype = _dtype(request.precision)
        model, example = _cast_model(model, dtype), cast(example, dtype)
    if request.loss_fn is not None and example.target is None:
        example = replace(example, target=guess_target(model, example, request.loss_fn))
    request.say("tracing the model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        traced = trace(model, example, request.loss_fn, rows)
    return traced, example, request.loss_fn is not None


def _problem(model: torch.nn.Module, graph: Graph, request: _Request) -> Problem:
    cluster = _cluster(request)
    limit = request.memory_limit_bytes
    return Problem(
        name=type(model).__name__,
        graph=graph,
        cluster=cluster,
        optimizer=request.optimizer,
        precision=request.precision or _main_dtype(graph),
        memory_limit_bytes=limit if limit is not None else cluster.device.memory_bytes,
        seed=request.seed,
    )


def _main_dtype(graph: Graph) -> str:
    """The dtype most parameters have."""
    counts: dict[str, int] = {}
    for leaf in graph.leaves_of("parameter"):
        counts[leaf.value.dtype] = counts.get(leaf.value.dtype, 0) + leaf.value.numel
    return max(counts, key=lambda dtype: counts[dtype])


def _cluster(request: _Request) -> Cluster:
    if isinstance(request.cluster, Cluster):
        return request.cluster.with_gpus(request.gpus)
    if request.cluster == "auto":
        request.say("measuring this machine")
        return measured_cluster(request.gpus)
    try:
        return load_cluster(request.cluster, request.gpus)
    except ClusterError as error:
        raise BadInput(str(error)) from None


def _gpu_count(gpus: int | None) -> int:
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus is None:
        if not available:
            raise BadInput("say how many devices to use: gpus=4 (this machine has no GPU; local processes stand for them)")
        return available
    if isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 1:
        raise BadInput(f"gpus={gpus!r}; pass a whole number of at least 1")
    return gpus


def _memory_limit(limit: int | str | None) -> int | None:
    if isinstance(limit, str):
        return parse_bytes(limit)
    if limit is not None and (isinstance(limit, bool) or limit <= 0):
        raise BadInput(f"memory_limit={limit!r}; pass a positive number of bytes or a text such as '40GB'")
    return limit


def _dtype(precision: str) -> torch.dtype:
    if precision not in PRECISIONS:
        raise BadInput(f"precision {precision!r} is unknown; use one of {', '.join(PRECISIONS)}")
    return PRECISIONS[precision]


def _cast_model(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """A copy for tracing whose floating-point tensors have ``dtype``; nothing of the weights is copied."""
    stand_ins: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        wanted = dtype if tensor.is_floating_point() else tensor.dtype
        empty = torch.empty(tensor.shape, dtype=wanted, device=tensor.device)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        stand_ins[id(tensor)] = torch.nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(model, stand_ins)


def _error_of(kind: str) -> type[MeshwrightError]:
    import planner.errors

    found = getattr(planner.errors, kind, MeshwrightError)
    return found if isinstance(found, type) and issubclass(found, MeshwrightError) else MeshwrightError


# --- measuring --------------------------------------------------------------------------------------------------------


def _tensors(traced: Traced, batch: Batch) -> dict[str, torch.Tensor]:
    """The program's inputs by name."""
    from torch.utils import _pytree as pytree

    arguments = (batch.args, dict(batch.kwargs), batch.target)
    by_path = {pytree.keystr(path): value for path, value in pytree.tree_flatten_with_path(arguments)[0]}
    tensors = {name: by_path[path] for name, path in traced.input_paths.items()}
    if any(t.device.type == "meta" for t in tensors.values()):
        raise BadInput("measuring needs a real example batch: pass example_inputs that are not on meta")
    return tensors


def _measured(
    model: torch.nn.Module,
    graph: Graph,
    row: ComparisonRow,
    tensors: Mapping[str, torch.Tensor],
    steps: int,
    optimizer: str,
) -> ComparisonRow:
    """The row with the median time of a training step on local ranks."""
    assert row.plan is not None
    factories: dict[str, OptimizerFactory] = {
        "adamw": torch.optim.AdamW,
        "sgd": torch.optim.SGD,
        "sgd-momentum": lambda params: torch.optim.SGD(params, momentum=0.9),
    }
    try:
        program = lower(graph, row.plan)
        with Parallel(model, row.plan, program, False, start=lambda: LocalRanks.start(program.mesh.size)) as parallel:
            parallel.set_optimizer(factories[optimizer])
            times = parallel.measure(tensors, steps)
    except MeshwrightError as error:
        return replace(row, refused=f"not measured: {error}")
    return replace(row, measured_step_time_s=sorted(times)[len(times) // 2])


__all__ = ["Parallel", "auto_parallelize", "compare"]
