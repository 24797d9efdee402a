"""What selective recomputation keeps of a segment between forward and backward.

The source of a segment calls by ``self.keep`` what need not be computed again (planner.saved):

    product(f, ...)      a matrix product or convolution: its result is kept
    attention(f, ...)    what a fused attention kernel makes is kept; where no such kernel runs, nothing is
    reduction(f, ...)    a conversion that sums over devices: its result is kept
    shape(f, ...)        a product that only reductions read: nothing is kept, and it is not computed again

In the forward pass the results are noted; when the segment runs again in backward they are handed out in the same order.
Autograd sees the same calls both times, so it keeps the same tensors: results are noted and handed out below it, by a
dispatch mode that takes the place of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = frozenset(
    f"aten::{name}"
    for name in (
        "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear", "matmul", "convolution", "_convolution",
        "mkldnn_convolution", "mkldnn_linear", "_grouped_mm",
    )
)  # fmt: skip
FUSED_ATTENTION = frozenset(
    f"aten::_scaled_dot_product_{name}"
    for name in (
        "flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention",
        "fused_attention_overrideable",
    )
)  # fmt: skip

Noted = Any  # what one call returned: a tensor, or a tuple of tensors and numbers


class Keep(Protocol):
    def product(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...
    def attention(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...
    def reduction(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...
    def shape(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...


class _Plain:
    """Just calls."""

    def product(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    attention = reduction = shape = product


PLAIN: Keep = _Plain()


class Kept:
    """What one micro-batch keeps of one segment."""

    def __init__(self) -> None:
        self._noted: list[Noted] = []
        self._ran = False

    @property
    def size_bytes(self) -> int:
        return sum(map(_size_bytes, self._noted))

    def again(self) -> Keep:
        """What the next run is to call: the first notes, all others take what it noted."""
        if self._ran:
            return _Take(self._noted)
        self._ran = True
        self._noted.clear()
        return _Note(self._noted)


class _Note:
    def __init__(self, noted: list[Noted]) -> None:
        self._noted = noted

    def product(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _Noting(self._noted, PRODUCTS):
            return function(*args, **kwargs)

    def attention(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _Noting(self._noted, FUSED_ATTENTION):
            return function(*args, **kwargs)

    def reduction(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        self._noted.append(_apart(result))
        return result

    def shape(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _Noting(self._noted, PRODUCTS, as_shape=True):
            return function(*args, **kwargs)


class _Take:
    def __init__(self, noted: Sequence[Noted]) -> None:
        self._left = iter(noted)

    def product(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _Taking(self._left, PRODUCTS):
            return function(*args, **kwargs)

    def attention(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _Taking(self._left, FUSED_ATTENTION):
            return function(*args, **kwargs)

    def reduction(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs, known=next(self._left).tensor())

    shape = product


class _OfTensor:
    """A tensor apart from autograd."""

    def __init__(self, x: torch.Tensor) -> None:
        self._x = x.detach()
        self.size_bytes = x.numel() * x.element_size()

    def tensor(self) -> torch.Tensor:
        return self._x.detach()


class _OfShape:
    """A tensor of which only shape, dtype and device are noted."""

    def __init__(self, x: torch.Tensor) -> None:
        self._shape, self._strides, self._dtype, self._device = x.shape, x.stride(), x.dtype, x.device

    def tensor(self) -> torch.Tensor:
        return torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device=self._device)


def _apart(result: Any, as_shape: bool = False) -> Noted:
    if isinstance(result, torch.Tensor):
        return _OfShape(result) if as_shape else _OfTensor(result)
    return tuple(_apart(x, as_shape) for x in result) if isinstance(result, tuple | list) else result


def _size_bytes(noted: Noted) -> int:
    if isinstance(noted, tuple):
        return sum(map(_size_bytes, noted))
    return noted.size_bytes if isinstance(noted, _OfTensor) else 0


def _handed_out(noted: Noted) -> Any:
    if isinstance(noted, _OfTensor | _OfShape):
        return noted.tensor()
    return tuple(map(_handed_out, noted)) if isinstance(noted, tuple) else noted


class _Noting(TorchDispatchMode):
    """Notes what the ``operators`` return."""

    def __init__(self, noted: list[Noted], operators: frozenset[str], as_shape: bool = False) -> None:
        super().__init__()
        self._noted, self._operators, self._as_shape = noted, operators, as_shape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name in self._operators:
            self._noted.append(_apart(result, self._as_shape))
        return result


class _Taking(TorchDispatchMode):
    """Lets the ``operators`` return what was noted, without computing it."""

    def __init__(self, left: Any, operators: frozenset[str]) -> None:
        super().__init__()
        self._left, self._operators = left, operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in self._operators:
            return _handed_out(next(self._left))
        return func(*args, **(kwargs or {}))
