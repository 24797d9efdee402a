"""How far two runs of one model are apart.

    error of a tensor = max |found - expected| / max |expected|

A tensor that is nothing but rounding (the gradient of a key bias is zero, exactly) is measured against the largest entry
of its kind in the whole model instead. A tensor that one run has and the other lacks is an infinite error.

The tolerance follows from the least precise dtype that a gradient passes through:

    float64   1e-9
    float32   1e-5
    float16   2e-2     about 20 roundings (2^-10 each)
    bfloat16  1e-1     about 13 roundings (2^-7 each): only gross errors show
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

TOLERANCES = {"float64": 1e-9, "float32": 1e-5, "float16": 2e-2, "bfloat16": 1e-1}
SAME_PRECISION = {"complex128": "float64", "complex64": "float32"}
# A tensor this much smaller than the largest of its kind is rounding.
ROUNDING = 1e-6
# Losses closer to zero than this are compared by their distance: a difference of two means may be anything.
SMALLEST_LOSS = 1e-2

Tensors = Mapping[str, torch.Tensor | None]


def coarsest(dtypes: Iterable[str]) -> str:
    """The least precise of ``dtypes`` (torch names); float32 where none is floating-point."""
    known = {SAME_PRECISION.get(dtype, dtype) for dtype in dtypes} & TOLERANCES.keys()
    return max(known, key=lambda dtype: TOLERANCES[dtype], default="float32")


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """max |found - expected|; entries that are equal, or not a number in both, count as 0. inf for another shape."""
    if found.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    a, b = _plain(found), _plain(expected)
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(same, torch.zeros_like(a), (a - b).abs()).nan_to_num(float("inf"), float("inf")).max())


def largest_entry(tensor: torch.Tensor) -> float:
    return float(_plain(tensor).abs().max()) if tensor.numel() else 0.0


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def relative_errors(found: Tensors, expected: Tensors, rounding: float = ROUNDING) -> dict[str, float]:
    """The error of every tensor of ``expected``, in its order, then of those only ``found`` has.

    None must be None in both.
    """
    known = {name: tensor for name, tensor in expected.items() if tensor is not None}
    entries = {name: largest_entry(tensor) for name, tensor in known.items()}
    overall = max(entries.values(), default=0.0)
    errors: dict[str, float] = {}
    for name, truth in expected.items():
        got = found.get(name)
        if truth is None or got is None:
            errors[name] = 0.0 if truth is None and got is None else float("inf")
            continue
        off = distance(got, truth)
        scale = entries[name] if entries[name] > rounding * overall else overall
        errors[name] = off / scale if scale else off
    errors |= {name: float("inf") for name, tensor in found.items() if name not in expected and tensor is not None}
    return errors


def largest_error(found: Tensors, expected: Tensors) -> tuple[float, str]:
    """The largest error and the tensor that has it; (0, '') where all are equal."""
    errors = relative_errors(found, expected)
    worst = max(errors, key=lambda name: errors[name], default="")
    return (errors[worst], worst) if worst and errors[worst] else (0.0, "")


def loss_error(found: float, expected: float) -> float:
    """|found - expected|, relative where |expected| is at least SMALLEST_LOSS."""
    off = abs(found - expected) / max(abs(expected), SMALLEST_LOSS)
    return off if off == off else float("inf")
