"""The example batch a model is traced with: given, found on the model, or told by its first layer.

    example_batch(model, ...)     inputs, keywords and target of one global batch
    resized(batch, size)          the same with another number of rows
    guess_target(model, ...)      the shape of loss_fn's target, where the user gave none

Only shapes and dtypes matter to planning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from planner.errors import BadInput
from planner.trace import Batch

EXAMPLE_ATTRIBUTES = ("example_input_array", "dummy_inputs", "example_inputs")
DEFAULT_ROWS = 8
DEFAULT_IMAGE = 32
DEFAULT_TOKENS = 16


def example_batch(
    model: torch.nn.Module,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    example_target: Any = None,
    global_batch: int | None = None,
) -> Batch:
    """One global batch. Raises BadInput saying what to pass when none can be found."""
    if example_inputs is not None or example_kwargs is not None:
        args = _as_tuple(example_inputs)
        batch = Batch(args, dict(example_kwargs or {}), example_target)
    else:
        batch = _from_model(model, example_target, global_batch or DEFAULT_ROWS)
    return batch if global_batch is None else resized(batch, global_batch)


def _as_tuple(inputs: Any) -> tuple[Any, ...]:
    if inputs is None:
        return ()
    if isinstance(inputs, list):
        return tuple(inputs)
    return inputs if isinstance(inputs, tuple) else (inputs,)


def _from_model(model: torch.nn.Module, target: Any, rows: int) -> Batch:
    for name in EXAMPLE_ATTRIBUTES:
        found = getattr(model, name, None)
        found = found() if callable(found) and not isinstance(found, torch.Tensor) else found
        if isinstance(found, Mapping) and found:
            return Batch((), dict(found), target)
        if found is not None and not isinstance(found, Mapping):
            return Batch(_as_tuple(found), {}, target)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            return Batch((torch.empty(rows, module.in_features, dtype=module.weight.dtype, device=device),), {}, target)
        if isinstance(module, torch.nn.Embedding):
            tokens = torch.zeros(rows, DEFAULT_TOKENS, dtype=torch.int64, device=device)
            return Batch((tokens,), {}, target)
        if isinstance(module, torch.nn.Conv2d):
            image = torch.empty(rows, module.in_channels, DEFAULT_IMAGE, DEFAULT_IMAGE, dtype=module.weight.dtype, device=device)
            return Batch((image,), {}, target)
    raise BadInput(
        "cannot tell what the model takes: pass example_inputs=(tensor, ...) and example_kwargs={...}, one global batch"
    )


def rows_of(batch: Batch) -> int | None:
    """Dim 0 of the first tensor that has one."""
    for leaf in pytree.tree_leaves((batch.args, dict(batch.kwargs), batch.target)):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return int(leaf.shape[0])
    return None


def resized(batch: Batch, rows: int) -> Batch:
    """``batch`` with ``rows`` rows: rows are repeated or dropped in every tensor whose dim 0 is the batch."""
    present = rows_of(batch)
    if rows < 1:
        raise BadInput(f"global_batch is {rows}; it must be at least 1")
    if present is None or present == rows:
        return batch

    def resize(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape[0] != present:
            return value
        if value.device.type == "meta":
            return value.new_empty((rows, *value.shape[1:]))
        return value[torch.arange(rows) % present]

    args, kwargs, target = pytree.tree_map(resize, (batch.args, dict(batch.kwargs), batch.target))
    return Batch(args, kwargs, target)


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    """Floating-point tensors of ``batch`` in ``dtype``."""

    def convert(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    args, kwargs, target = pytree.tree_map(convert, (batch.args, dict(batch.kwargs), batch.target))
    return Batch(args, kwargs, target)


def guess_target(model: torch.nn.Module, batch: Batch, loss_fn: Callable[..., Any]) -> torch.Tensor:
    """A tensor of the shape and dtype ``loss_fn(output, target)`` takes, found by trying, without arithmetic.

    Losses over classes (cross_entropy, nll_loss) take class indices; others a tensor like the output.
    Raises BadInput asking for example_target when nothing fits.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.func import functional_call

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def fake(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return torch.empty(value.shape, dtype=value.dtype, device=value.device)

        tensors = {name: fake(t) for name, t in (*model.named_parameters(), *model.named_buffers())}
        args, kwargs = pytree.tree_map(fake, (batch.args, dict(batch.kwargs)))
        try:
            output = functional_call(model, tensors, args, kwargs)
        except Exception as error:
            raise BadInput(f"the model does not run on the example inputs: {error}") from error
        if not isinstance(output, torch.Tensor):
            raise BadInput("the model returns more than one tensor: pass example_target=, one global batch of loss_fn's target")
        for shape, dtype in _candidates(output, _is_class_loss(loss_fn, output)):
            try:
                loss = loss_fn(output, torch.empty(shape, dtype=dtype, device=output.device))
            except Exception:
                continue
            if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                device = next((p.device for p in model.parameters()), torch.device("cpu"))
                del mode
                return torch.empty(shape, dtype=dtype, device=device) if device.type == "meta" else _real(shape, dtype)
    raise BadInput("cannot tell what target loss_fn takes: pass example_target=, one global batch of it")


def _real(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return torch.zeros(shape, dtype=dtype)


def _candidates(output: torch.Tensor, classes: bool) -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
    shape = tuple(output.shape)
    if classes:
        yield shape[:-1], torch.int64
        if len(shape) > 2:
            yield (shape[0], *shape[2:]), torch.int64
    yield shape, output.dtype
    if shape[-1:] == (1,):
        yield shape[:-1], output.dtype
    yield shape[:1], torch.int64


def _is_class_loss(loss_fn: Callable[..., Any], output: torch.Tensor) -> bool:
    """Whether ``loss_fn`` calls a loss over class indices: seen by running it with a target like the output, and without."""
    from torch.overrides import TorchFunctionMode

    called: list[str] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(getattr(function, "__name__", ""))
            return function(*args, **(kwargs or {}))

    shape = tuple(output.shape)
    for target in (torch.empty(shape[:-1], dtype=torch.int64, device=output.device), torch.empty_like(output)):
        try:
            with Watch():
                loss_fn(output, target)
        except Exception:
            pass
        if any(name in called for name in ("cross_entropy", "nll_loss", "cross_entropy_loss", "nll_loss_nd")):
            return True
    return False
