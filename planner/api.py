"""The public calls: plan a model, run the plan, compare strategies.

    auto_parallelize(model, gpus=...) -> Parallel     the plan, and the training run on its ranks
    compare(model, gpus=...) -> rows                  the solver's plan beside hand-picked ones, measured if asked
    verify(model, gpus=...) -> Verification           the run under a plan against one device, tensor by tensor
    verify_each(model, gpus=...) -> Verifications     the same for several strategies

A Parallel runs in three ways: it starts local ranks itself (gloo processes on CPUs, NCCL where there are GPUs); under
torchrun every rank calls ``auto_parallelize`` and is one of its ranks; or it is only a plan and nothing is started.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from costmodels.mixed import Machine
from planner.errors import BadInput, MeshwrightError
from planner.inputs import (
    BatchForm,
    with_values,
)
from planner.ir.graph import Graph
from planner.ir.plan import Plan
from planner.ir.program import Program
from planner.ir.verify import verify_plan
from planner.lower import lower
from planner.options import Progress, Request, asked, check_gpus, check_request, dtype_to_trace
from planner.parallel import OptimizerFactory, Parallel
from planner.planning import Prepared, prepare_run
from planner.report.comparison import ComparisonRow
from planner.report.verification import Verification
from planner.single_device import dropout_modules_off, without_dropout
from planner.solve.configuration import Evaluator
from planner.solve.search import search
from planner.strategies import NAMED, plan_by_hand
from planner.trace import Batch, Traced
from planner.tracing import problem_of, trace_model
from planner.verification import Case, Verifier, drawing, dropout_off
from runtime.launch import LocalRanks, current_world, init_world, share_bytes
from runtime.worker import Rank
from runtime.world import World

COLLECTIVE_TIMEOUT_S = 600.0


def auto_parallelize(
    model: torch.nn.Module,
    gpus: int | None = None,
    *,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    example_target: Any = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    cluster: str | Path | Machine = "auto",
    global_batch: int | None = None,
    not_batched: Sequence[str] = (),
    optimizer: str = "adamw",
    precision: str | None = None,
    memory_limit: int | str | None = None,
    strategy: str = "auto",
    time_limit: float | None = None,
    seed: int = 0,
    samplewise: bool | Sequence[str] = (),
    plan: Plan | str | Path | None = None,
    progress: Progress | None = None,
) -> Parallel:
    """Plan how to train ``model`` on ``gpus`` devices, and return what runs it.

    ``example_inputs`` (a tuple; a dict means keywords) and ``example_kwargs``: one global batch, as
    ``model(*inputs, **kwargs)`` takes it; dim 0 of every tensor as long as the first is the batch. Without them: the
    model's ``example_input_array``, ``dummy_inputs`` or ``example_inputs``, or what its first layer takes.
    ``loss_fn(output, target)`` gives one number; without it the model must return its loss (Hugging Face: ``labels`` among
    the kwargs). ``example_target``: loss_fn's target for that batch; without it its shape is found by trying.

    ``cluster``: a preset's name, a TOML path, or "auto", this machine, measured (a few seconds, kept). ``global_batch``:
    rows of one step, if not those of the example; later batches may have other numbers of rows. ``not_batched``: names of
    arguments whose dim 0 is not the batch though it is as long, such as a mask [T, T]. ``optimizer``: adamw, sgd or
    sgd-momentum, for its cost; the one that trains is passed to ``train``. ``precision``: fp32, bf16, fp16 or fp64; default:
    as the model is. ``memory_limit``: bytes of one device, or '40GB'; default: what the cluster's device has.
    ``strategy``: "auto", or a hand-picked one (planner.strategies). ``time_limit``: seconds for the search; the best plan
    so far comes back with its gap. ``plan``: an
    earlier plan, or its path, to run instead of searching.

    A module that cannot be traced runs as it is, as one operator on the whole batch. ``samplewise``: paths of such modules
    (patterns such as 'blocks.*.router'; True: all) of which you know that they treat each row of the batch alone; the
    batch is then cut through them.

    Under torchrun every rank calls this; rank 0 plans, and the others get the very same plan and rank 0's weights.

    Raises BadInput, TraceError, InvalidPlan, Infeasible or OutOfTime, each before any process of the run is started.
    """
    world = current_world()
    batch = (example_inputs, example_kwargs, example_target, global_batch)

    def prepare(count: int | None) -> Prepared:
        request = check_request(
            count,
            loss_fn,
            cluster,
            optimizer,
            precision,
            memory_limit,
            strategy,
            time_limit,
            seed,
            plan,
            progress,
            not_batched,
        )
        if request.cluster is None and request.plan is None and (world is None or world.size == 1):
            check_gpus(request.gpus)
        return prepare_run(model, batch, request, samplewise)

    if world is not None and (world.size > 1 or gpus == 1):
        if gpus not in (None, world.size):
            raise BadInput(
                f"gpus={gpus}, but torchrun started {world.size} ranks; start {gpus} ranks or leave gpus out"
            )
        return _of_rank(model, world, lambda: prepare(world.size))
    prepared = prepare(gpus)

    def start() -> LocalRanks:
        check_gpus(prepared.plan.mesh.size)
        return LocalRanks.start(prepared.plan.mesh.size, timeout_s=COLLECTIVE_TIMEOUT_S)

    return Parallel(
        model, prepared.plan, prepared.program, prepared.form, start=start, other_batch=prepared.other_batch
    )


def _of_rank(model: torch.nn.Module, world: World, prepare: Callable[[], Prepared]) -> Parallel:
    """This process as a rank of ``world``: rank 0 prepares, and all get what it made, or its error."""
    device = init_world(world, timeout_s=COLLECTIVE_TIMEOUT_S)
    first: list[Prepared] = []

    def make() -> dict[str, Any]:
        first.append(prepare())
        (made,) = first
        return {"plan": made.plan.to_json(), "program": made.program.to_dict(), "form": dict(made.form.entries)}

    def other_batch(batch: Batch, rows: int, fixed: tuple[str, ...]) -> Program:
        made = _of_rank_0(world, lambda: {"program": first[0].other_batch(batch, rows, fixed).to_dict()})
        return Program.from_dict(made["program"])

    shared = _of_rank_0(world, make)
    rank = Rank(rank=world.rank, world_size=world.size, device=device, timeout_s=COLLECTIVE_TIMEOUT_S)
    program, form = Program.from_dict(shared["program"]), BatchForm(shared["form"])
    return Parallel(model, Plan.from_json(shared["plan"]), program, form, rank=rank, other_batch=other_batch)


def _of_rank_0(world: World, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``make`` returns on rank 0, on every rank, as JSON; an error is raised on all."""
    mine: dict[str, Any] | None = None
    failure: Exception | None = None
    if world.rank == 0:
        try:
            mine = make()
        except Exception as error:
            failure = error
            mine = {"error": str(error), "kind": type(error).__name__}
    shared: dict[str, Any] = json.loads(share_bytes(json.dumps(mine).encode() if mine is not None else None))
    if failure is not None:
        raise failure
    if "error" in shared:
        raise _error_of(shared["kind"], shared["error"])
    return shared


def _error_of(kind: str, message: str) -> MeshwrightError:
    """Rank 0's error for another rank."""
    import planner.errors

    found = getattr(planner.errors, kind, None)
    if isinstance(found, type) and issubclass(found, MeshwrightError):
        return found(message)
    return MeshwrightError(f"planning failed on rank 0: {kind}: {message}")


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
    cluster: str | Path | Machine = "auto",
    global_batch: int | None = None,
    not_batched: Sequence[str] = (),
    optimizer: str = "adamw",
    precision: str | None = None,
    memory_limit: int | str | None = None,
    time_limit: float | None = None,
    seed: int = 0,
    samplewise: bool | Sequence[str] = (),
    progress: Progress | None = None,
) -> tuple[ComparisonRow, ...]:
    """The solver's plan first, then each of ``strategies``, priced by the same functions; ``measure``: and run.

    ``steps``: training steps measured on local ranks after one that warms up; the median counts. The other arguments are
    those of ``auto_parallelize``. A strategy that cannot be used has its reason in ``refused``.
    """
    if steps < 1:
        raise BadInput(f"steps={steps}; at least one step is measured")
    world = current_world()
    if measure and world is not None and world.size > 1:
        raise BadInput("compare(measure=True) starts ranks of its own; run it in a plain script, not under torchrun")
    request = check_request(
        gpus,
        loss_fn,
        cluster,
        optimizer,
        precision,
        memory_limit,
        "auto",
        time_limit,
        seed,
        None,
        progress,
        not_batched,
    )
    if measure or request.cluster is None:
        check_gpus(request.gpus)
    example = (example_inputs, example_kwargs, example_target, global_batch)
    traced, whole_batch = trace_model(model, example, request, samplewise)
    tensors = _tensors(traced, whole_batch) if measure else {}
    problem = problem_of(model, traced.graph, request)
    evaluator = Evaluator(problem)
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


def verify(
    model: torch.nn.Module,
    gpus: int | None = None,
    *,
    strategy: str = "auto",
    steps: int = 3,
    tolerance: float | None = None,
    train_with: OptimizerFactory | None = None,
    plan: Plan | str | Path | None = None,
    **options: Any,
) -> Verification:
    """Train ``model`` for ``steps`` on one device, in this process, and under a plan on local ranks, and compare.

    Both start from the same weights and see the same batch in every step; ``model`` itself stays as it is. Compared are
    the losses, every gradient of the first step, buffers, and parameters after the last. Where something differs, the
    report names the first tensor that does and the operator it comes from. Dropout is switched off in both runs.

    ``tolerance``: the error allowed, of a tensor's largest entry; default: 1e-5 in float32, 1e-9 in float64, 2e-2 in
    float16, 1e-1 in bfloat16. ``train_with(parameters)`` makes the optimizer; default: AdamW in float64, gradient descent
    with momentum otherwise, which carries rounding through as it is. ``plan``: a plan made before, instead of
    ``strategy``. ``options``: the other arguments of ``auto_parallelize``; precision='fp64' makes the sharpest check.

    Raises BadInput where there is nothing to compare (random operators other than dropout, a loss that is not finite),
    and what ``auto_parallelize`` and its run raise.
    """
    request, verifier, make_plan = _verifier(model, gpus, steps, tolerance, train_with, strategy, plan, options)
    with verifier:
        made = make_plan(strategy)
        request.say("running the plan")
        return verifier.check(strategy if plan is None else made.strategy, made)


def verify_each(
    model: torch.nn.Module,
    gpus: int | None = None,
    *,
    strategies: Sequence[str] = ("auto", *NAMED),
    steps: int = 3,
    tolerance: float | None = None,
    train_with: OptimizerFactory | None = None,
    **options: Any,
) -> Iterator[Verification]:
    """``verify`` for each of ``strategies``, as they are asked for: the model is traced, and runs on one device, once.

    A strategy that cannot be used, or whose run fails, is a Verification that says so. Raises before the first what is no
    matter of the strategy.
    """
    request, verifier, make_plan = _verifier(model, gpus, steps, tolerance, train_with, "auto", None, options)

    def each() -> Iterator[Verification]:
        with verifier:
            for strategy in strategies:
                request.say(f"verifying {strategy}")
                yield verifier.outcome(strategy, lambda strategy=strategy: make_plan(strategy))  # type: ignore[misc]

    return each()


# --- verifying --------------------------------------------------------------------------------------------------------


def _verifier(
    model: torch.nn.Module,
    gpus: int | None,
    steps: int,
    tolerance: float | None,
    train_with: OptimizerFactory | None,
    strategy: str,
    plan: Plan | str | Path | None,
    options: Mapping[str, Any],
) -> tuple[Request, Verifier, Callable[[str], Plan]]:
    """What compares plans of ``model`` with one device, and what makes a strategy's plan."""
    world = current_world()
    if world is not None and world.size > 1:
        raise BadInput("verify starts ranks of its own; run it in a plain script, not under torchrun")
    made = asked("verify", gpus, strategy, plan, options)
    request, example, samplewise = made.request, made.batch, made.samplewise
    check_gpus(request.gpus)
    traced, batch = trace_model(model, example, request, samplewise)
    planned = traced.graph
    quiet, dropped = dropout_off(planned)
    if drawing(quiet) is not None:  # dropout of other kinds cannot be told from other draws in the graph
        with without_dropout(), dropout_modules_off(model):
            traced, batch = trace_model(model, example, request, samplewise)
        planned, quiet, dropped = traced.graph, traced.graph, (*dropped, "dropout")
    traced = replace(traced, graph=quiet)
    batch = with_values(batch, invented=example[0] is None and example[1] is None)
    case = Case(type(model).__name__, model, traced, batch, request.loss_fn, dtype_to_trace(model, request), dropped)
    request.say("running on one device")
    verifier = Verifier(
        case, steps, tolerance, train_with, start=lambda n: LocalRanks.start(n, timeout_s=COLLECTIVE_TIMEOUT_S)
    )
    evaluators: list[Evaluator] = []

    def make_plan(name: str) -> Plan:
        if request.plan is not None:
            found = request.plan
        else:
            if not evaluators:
                evaluators.append(Evaluator(problem_of(model, planned, request)))
            problem = evaluators[0].problem
            request.say("searching")
            if name == "auto":
                found = search(problem, request.time_limit_s, request.progress)
            else:
                found = plan_by_hand(evaluators[0], name)
        verify_plan(found, planned)
        return replace(found, graph_digest=quiet.digest) if found.graph_digest == planned.digest else found

    return request, verifier, make_plan


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
        with Parallel(
            model, row.plan, program, BatchForm({}), start=lambda: LocalRanks.start(program.mesh.size)
        ) as parallel:
            parallel.set_optimizer(factories[optimizer])
            times = parallel.measure(tensors, steps)
    except MeshwrightError as error:
        return replace(row, refused=f"not measured: {error}")
    return replace(row, measured_step_time_s=sorted(times)[len(times) // 2])


__all__ = ["Parallel", "auto_parallelize", "compare", "verify", "verify_each"]
