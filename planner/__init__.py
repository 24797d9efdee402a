"""Plans, proves and writes the fastest way to train a PyTorch model on N devices.

    planner.auto_parallelize(model, gpus=8, example_inputs=(x,), loss_fn=loss_fn)   plan, and run, a model
    planner.compare(model, gpus=8, ...)                                             against hand-picked strategies
    planner.verify(model, gpus=4, strategy="tp", ...)                               a plan's training against one device
    planner.estimate(model, gpus=8, strategy="pp2.dp4 mb=8", ...)                   predicted time and memory of a strategy
    planner.explain(model, gpus=8, ...)                                             why that plan, and what would change it
    planner.size(model, step_time="0.5s", ...)                                      the smallest and the cheapest cluster
    planner.measure(model, gpus=4, ...)                                             times of this machine, for its plans
    planner.calibrate("trace.json")                                                 correct these by a run
    planner.prove("plan.json")                                                      a plan's proof, without the solver
    planner.Plan.load("plan.json")                                                  a plan, without importing torch

Names are imported when first used, so that reading a plan costs no import of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.api import auto_parallelize, compare, verify, verify_each
    from planner.ir.plan import Plan
    from planner.measuring import calibrate, measure
    from planner.proof import prove
    from planner.questions import estimate, explain, size

__all__ = [
    "Plan", "auto_parallelize", "calibrate", "compare", "estimate", "explain", "measure", "prove", "size", "verify",
    "verify_each",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "Plan":
        return import_module("planner.ir.plan").Plan
    if name in ("auto_parallelize", "compare", "verify", "verify_each"):
        return getattr(import_module("planner.api"), name)
    if name in ("estimate", "explain", "size"):
        return getattr(import_module("planner.questions"), name)
    if name in ("calibrate", "measure"):
        return getattr(import_module("planner.measuring"), name)
    if name == "prove":
        return import_module("planner.proof").prove
    raise AttributeError(f"module 'planner' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
