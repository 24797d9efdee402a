"""The options of a request, checked: what ``auto_parallelize`` and ``compare`` are asked, before anything is traced."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from costmodels.hardware import Cluster, ClusterError
from costmodels.mixed import Machine, MixedCluster, load_machine
from planner.errors import BadInput, InvalidPlan
from planner.ir.plan import Plan
from planner.sizes import parse_bytes

Progress = Callable[..., None]
OPTIMIZERS = ("adamw", "sgd", "sgd-momentum")
PRECISIONS = {
    "fp32": torch.float32, "float32": torch.float32, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
    "fp16": torch.float16, "float16": torch.float16, "fp64": torch.float64, "float64": torch.float64,
}  # fmt: skip


@dataclass(frozen=True)
class Request:
    """Checked options. ``cluster`` is None for this machine, measured; ``dtype`` None for the model's own."""

    gpus: int
    loss_fn: Callable[..., torch.Tensor] | None
    cluster: Machine | None
    optimizer: str
    dtype: torch.dtype | None
    memory_limit_bytes: int | None
    strategy: str
    time_limit_s: float | None
    seed: int
    plan: Plan | None
    progress: Progress | None
    not_batched: tuple[str, ...] = ()

    def say(self, what: str) -> None:
        if self.progress is not None:
            self.progress(what)


def check_request(
    gpus: int | None,
    loss_fn: Any,
    cluster: str | Path | Machine,
    optimizer: str,
    precision: str | None,
    memory_limit: int | str | None,
    strategy: str,
    time_limit: float | None,
    seed: int,
    plan: Plan | str | Path | None,
    progress: Progress | None,
    not_batched: Sequence[str] = (),
) -> Request:
    """The options as a Request. Raises BadInput, or InvalidPlan, at the first that cannot be used."""
    made = None if plan is None else plan if isinstance(plan, Plan) else _load_plan(plan)
    count = _gpu_count(gpus if made is None or gpus is not None else made.mesh.size)
    if made is not None and made.mesh.size != count:
        raise InvalidPlan(f"the plan is for {made.mesh.size} devices, not {count}; pass gpus={made.mesh.size}")
    if loss_fn is not None and not callable(loss_fn):
        raise BadInput(f"loss_fn is a {type(loss_fn).__name__}; pass a function called as loss_fn(output, target)")
    if optimizer not in OPTIMIZERS:
        raise BadInput(
            f"optimizer {optimizer!r} is unknown; use one of {', '.join(OPTIMIZERS)} "
            "(the one that trains is passed to train())"
        )
    if not isinstance(strategy, str):
        raise BadInput(f"strategy={strategy!r}; pass 'auto' or a text such as 'ddp' or 'pp2.dp2 mb=8'")
    if strategy != "auto":
        from planner.strategies import parse_strategy  # here, as it brings the solver with it

        parse_strategy(strategy, count)
    if time_limit is not None and (
        isinstance(time_limit, bool) or not isinstance(time_limit, int | float) or not time_limit > 0
    ):
        raise BadInput(f"time_limit={time_limit!r}; pass a positive number of seconds")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**31:
        raise BadInput(f"seed={seed!r}; pass a whole number from 0 to {2**31 - 1}")
    return Request(
        count,
        loss_fn,
        _cluster(cluster, count),
        optimizer,
        None if precision is None else _dtype(precision),
        _memory_limit(memory_limit),
        strategy,
        time_limit,
        seed,
        made,
        progress,
        _names(not_batched),
    )


# The arguments of ``auto_parallelize`` that say what is planned, with their defaults.
DEFAULTS: Mapping[str, Any] = {
    "example_inputs": None, "example_kwargs": None, "example_target": None, "loss_fn": None, "cluster": "auto",
    "global_batch": None, "not_batched": (), "optimizer": "adamw", "precision": None, "memory_limit": None,
    "time_limit": None, "seed": 0, "progress": None, "samplewise": (),
}  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A request with its batch: (inputs, keywords, target, rows), as planner.tracing takes it."""

    request: Request
    batch: tuple[Any, ...]
    samplewise: bool | Sequence[str]


def asked(
    call: str, gpus: int | None, strategy: str, plan: Plan | str | Path | None, options: Mapping[str, Any]
) -> Asked:
    """``options``: arguments of auto_parallelize, those left out by default, handed on by ``call``.

    Raises TypeError for an unknown one, else what ``check_request`` raises.
    """
    chosen = {**DEFAULTS, **options}
    if unknown := sorted(chosen.keys() - DEFAULTS.keys()):
        raise TypeError(f"{call} got an unexpected argument {unknown[0]!r}; it takes those of auto_parallelize")
    example = tuple(chosen.pop(f"example_{part}") for part in ("inputs", "kwargs", "target"))
    batch, samplewise = (*example, chosen.pop("global_batch")), chosen.pop("samplewise")
    return Asked(check_request(gpus, strategy=strategy, plan=plan, **chosen), batch, samplewise)


def _names(given: Any) -> tuple[str, ...]:
    if not isinstance(given, tuple | list) or not all(isinstance(name, str) for name in given):
        raise BadInput(f"not_batched={given!r}; pass names of the model's arguments, such as ('mask',)")
    return tuple(given)


def _load_plan(plan: Any) -> Plan:
    if not isinstance(plan, str | Path):
        raise BadInput(f"plan is a {type(plan).__name__}; pass a Plan or the path of a plan.json")
    return Plan.load(plan)


def _gpu_count(gpus: int | None) -> int:
    available = torch.cuda.device_count()
    if gpus is None:
        if not available:
            raise BadInput(
                "say how many devices to use: gpus=4 (this machine has no GPU; local processes stand for them)"
            )
        return available
    if isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 1:
        raise BadInput(f"gpus={gpus!r}; pass a whole number of at least 1")
    return gpus


def check_gpus(count: int) -> None:
    """Raises BadInput when this machine has GPUs, but fewer than ``count``. Without any, processes stand for them."""
    available = torch.cuda.device_count()
    if 0 < available < count:
        raise BadInput(
            f"{count} GPUs were asked for and this machine has {available}. Ask for at most {available}; start the script "
            f"with torchrun on enough machines; or hide the GPUs (CUDA_VISIBLE_DEVICES='') to run on {count} CPU "
            "processes. To plan for another machine, name it: cluster='dgx-h100'"
        )


def _cluster(cluster: Any, gpus: int) -> Machine | None:
    try:
        if isinstance(cluster, Cluster | MixedCluster):
            return cluster.with_gpus(gpus)
        if cluster == "auto":
            return None
        if not isinstance(cluster, str | Path):
            raise BadInput(
                f"cluster is a {type(cluster).__name__}; pass 'auto', a preset's name or the path of a TOML file"
            )
        return load_machine(cluster, gpus)
    except ClusterError as error:
        raise BadInput(str(error)) from None


def _memory_limit(limit: Any) -> int | None:
    if isinstance(limit, str):
        return parse_bytes(limit)
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit <= 0):
        raise BadInput(f"memory_limit={limit!r}; pass a positive whole number of bytes or a text such as '40GB'")
    return limit


def _dtype(precision: Any) -> torch.dtype:
    if not isinstance(precision, str) or precision not in PRECISIONS:
        raise BadInput(f"precision {precision!r} is unknown; use one of {', '.join(PRECISIONS)}")
    return PRECISIONS[precision]


def main_dtype(model: torch.nn.Module) -> torch.dtype | None:
    """The floating-point dtype most elements of parameters have; None without parameters."""
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return max(counts, key=lambda dtype: counts[dtype], default=None)


def dtype_to_trace(model: torch.nn.Module, request: Request) -> torch.dtype | None:
    """The dtype the model must be cast to; None when it can stay as it is.

    A model whose parameters all have the precision asked for stays, with buffers of another kind. For a plan made before,
    a model in the plan's precision stays as it is.
    """
    if request.dtype is not None:
        kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
        return None if kinds == {request.dtype} else request.dtype
    if request.plan is not None:
        planned = PRECISIONS.get(request.plan.precision)
        return None if planned == main_dtype(model) else planned
    return None


def cast_model(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """A copy for tracing whose floating-point tensors have ``dtype``; nothing of the weights is copied."""
    stand_ins: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        wanted = dtype if tensor.is_floating_point() else tensor.dtype
        empty = torch.empty(tensor.shape, dtype=wanted, device=tensor.device)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        stand_ins[id(tensor)] = torch.nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    try:
        return copy.deepcopy(model, stand_ins)
    except Exception as error:
        raise BadInput(
            f"the model cannot be copied to trace it in another precision ({type(error).__name__}: {error}); "
            "cast it yourself with model.to(dtype) and leave precision out"
        ) from error
