"""ZeRO-1 and 2: training equals one device, and a rank holds what the plan says: its shards and no more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from planner.lower import lower
from planner.solve.configuration import Evaluator
from planner.strategies import plan_by_hand
from runtime.buckets import local
from runtime.gradients import _Stream
from runtime.optimizer import describe_optimizer
from runtime.worker import Rank
from tests.models import MODELS
from tests.ranks import run_ranks
from tests.reference import input_tensors, traced
from tests.search_cases import cluster, problem
from tests.test_equality import check, setting


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "strategy", "ranks"),
    [
        ("mlp", "dp3 mb=2 zero=2", 3),  # rows and shards of unequal size
        ("hf_llama", "dp2.tp2 mb=2 zero=1", 4),
        ("gpt_tied", "pp2.dp2 mb=4 zero=2", 4),  # the tied weight is a shard on both stages
        ("gpt_tied", "pp2.dp2 mb=4 zero=1 schedule=zero-bubble", 4),
        ("gpt_tied", "pp2.dp2 mb=2 zero=2 v=2 recompute=selective", 4),
    ],
)
def test_equals_single_device(name: str, strategy: str, ranks: int) -> None:
    check(setting(name, torch.float64), strategy, torch.float64, ranks)


@pytest.mark.gloo
def test_equals_single_device_in_single_precision() -> None:
    check(setting("gpt_tied", torch.float32), "pp2.dp2 mb=2 zero=2 schedule=gpipe", torch.float32)


def holds(index: int, size: int, programs: list[dict[str, Any]], expected: list[dict[str, int]]) -> None:
    """Bytes of each kind on this rank, at their most between micro-batches, against the plan's."""
    case = MODELS["mlp"](torch.float32)
    inputs = input_tensors(case, traced(case))
    parameters = dict(case.model.named_parameters())
    spec = describe_optimizer(torch.optim.AdamW, parameters)  # type: ignore[arg-type]
    for zero, (program, plan) in enumerate(zip(programs, expected, strict=True)):
        rank = Rank(index, size)
        rank.load(program, {name: p.detach().clone() for name, p in parameters.items()})
        rank.optimizer(spec)
        between: list[int] = []
        held = rank.module.held

        def note(_: torch.Tensor, between: list[int] = between, held: Any = held, zero: int = zero) -> None:
            gradients = {id(g): g for h in held for g in (h.tensor.grad, h.updated.grad) if g is not None}
            between.append(sum(bytes_of(local(g)) for g in gradients.values()))

        if zero < 3:
            for h in held:
                h.tensor.register_post_accumulate_grad_hook(note)
        rank.train_step(inputs)
        weights = {x.untyped_storage().data_ptr(): x for h in held for x in (local(h.tensor), local(h.updated))}
        assert sum(x.untyped_storage().nbytes() for x in weights.values()) == plan["weights_bytes"], zero
        rank.step()
        assert rank._optimizer is not None
        remembered = [local(x) for _, key, x in rank._optimizer.entries() if key != "step"]
        assert sum(map(bytes_of, remembered)) == plan["optimizer_bytes"], zero
        kept = sum(bytes_of(local(h.updated.grad)) for h in held)
        assert kept == plan["weights_bytes"] // (1 if zero == 0 else 1 if zero == 3 else size)
        if zero < 3:
            # The second micro-batch's first gradient joins those of the first; the largest weight is not reduced yet.
            whole = sum(bytes_of(h.tensor) for h in held)
            assert max(between) == whole if zero < 2 else between[len(held) - 1] == 0
            assert plan["gradients_bytes"] == (whole if zero < 2 else whole // size)
        assert {isinstance(h.updated, DTensor) for h in held} == {zero > 0}


def bytes_of(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


@pytest.mark.gloo
def test_a_rank_holds_what_the_plan_says() -> None:
    case = MODELS["mlp"](torch.float32)
    found = traced(case)
    evaluator = Evaluator(problem(found.graph, cluster(2, kind="cpu")))
    plans = [plan_by_hand(evaluator, f"dp2 mb=2 zero={zero}") for zero in range(4)]
    kinds = ("weights_bytes", "gradients_bytes", "optimizer_bytes")
    expected = [{kind: getattr(plan.estimate.devices[0], kind) for kind in kinds} for plan in plans]
    run_ranks(holds, 2, [lower(found.graph, plan).to_dict() for plan in plans], expected)


def weights(count: int) -> list[Any]:
    return [SimpleNamespace(tensor=torch.zeros(1)) for _ in range(count)]


def test_buckets_go_in_order_and_again_for_every_micro_batch() -> None:
    a, b, c, d = weights(4)
    stream = _Stream([[a, b], [c], [d]], again=True)

    def reached(*order: Any) -> list[list[Any]]:
        return [list(bucket) for h in order for bucket in stream.complete_with(h.tensor)]

    stream.start({h.tensor: 1 for h in (a, b, c, d)})
    assert reached(a, c) == []  # c waits for b: the order is the same on every rank
    assert reached(b) == [[a, b], [c]]
    assert reached(a, b, c) == []  # d got no gradient, and nobody knows yet that it gets none
    assert list(stream.rest()) == [[d], [a, b], [c]]
    stream.start({h.tensor: 1 for h in (a, b, c, d)})
    assert reached(a, b, c) == [[a, b], [c], [d]]
    assert reached(a, b, c) == [[a, b], [c], [d]]


def test_buckets_of_a_step_go_once() -> None:
    a, b = weights(2)
    stream = _Stream([[a], [b]], again=False)
    stream.start({a.tensor: 2, b.tensor: 2})
    found = [list(bucket) for h in (b, a, a) for bucket in stream.complete_with(h.tensor)]
    assert found == [[a]] and list(stream.rest()) == [[b]]
    assert list(stream.complete_with(b.tensor)) == []
