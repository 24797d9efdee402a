"""The user's model trained for a few steps on one device, in this process: what every plan has to equal.

The model is lent for the run: afterwards its weights, buffers, gradients and attributes are as before. Dropout can be
switched off around a run or a trace (``without_dropout``): on shards its masks are others than on one device, by design.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from planner.errors import BadInput
from planner.trace import Batch, find_loss, storage_key
from planner.trace_guards import attributes_kept

OptimizerFactory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
Named = Mapping[str, torch.Tensor | None]


@dataclass(frozen=True)
class SingleDevice:
    """``losses`` of all steps; ``gradients`` and ``buffers`` of the first step; ``parameters`` after the last.

    By original name, whole, on the CPU. ``last_buffers``: the buffers after the last step.
    """

    losses: tuple[float, ...]
    gradients: Named
    buffers: Named
    parameters: Named
    last_buffers: Named


@contextmanager
def borrowed(model: torch.nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Inside, ``model`` may be trained (in ``dtype``, where one is given); afterwards it is as it was.

    It is the model itself, not a copy: ``loss_fn`` may know its weights. Its tensors get other memory for the time.
    Raises BadInput when they have no values.
    """
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
    if any(t.device.type == "meta" for t in tensors):
        raise BadInput("the model is on meta and has no values to compare; build it with weights")
    before = [(tensor, tensor.data, tensor.grad) for tensor in tensors]
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    lent: dict[Any, torch.Tensor] = {}  # tensors that share memory go on doing so
    try:
        with attributes_kept(model), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            for tensor, data, _ in before:
                key = storage_key(data)
                if key not in lent:
                    wanted = dtype if dtype is not None and data.is_floating_point() else data.dtype
                    lent[key] = data.to(wanted, copy=True)
                tensor.grad, tensor.data = None, lent[key]
            yield
    finally:
        for module, own in buffers:
            module._buffers.clear()
            module._buffers.update(own)
        for tensor, data, gradient in before:
            tensor.grad = None
            tensor.data = data
            tensor.grad = gradient


def train_on_one_device(
    model: torch.nn.Module,
    batch: Batch,
    loss_fn: Callable[..., torch.Tensor] | None,
    optimizer: OptimizerFactory,
    steps: int,
) -> SingleDevice:
    """Train ``model`` in place for ``steps`` on the same ``batch``, as a loop written by hand would.

    Raises BadInput when a loss or gradient is not finite: nothing can be equal to it.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    updates = optimizer(list(trained.values()))
    losses: list[float] = []
    gradients: Named = {}
    buffers: Named = {}
    for step in range(steps):
        updates.zero_grad(set_to_none=True)
        args, kwargs, target = pytree.tree_map(
            lambda x: x.detach().to(device, copy=True) if isinstance(x, torch.Tensor) else x,
            (batch.args, dict(batch.kwargs), batch.target),
        )
        with torch.autograd.set_multithreading_enabled(False):  # what is recomputed in backward sees the same mode
            output = model(*args, **kwargs)
            if loss_fn is None:
                loss = find_loss(output)
            else:
                loss = loss_fn(output) if target is None else loss_fn(output, target)
            loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
        if step == 0:
            gradients = {name: None if p.grad is None else _kept(p.grad) for name, p in trained.items()}
            buffers = {name: _kept(b) for name, b in model.named_buffers()}
        _check_finite(step, losses[-1], gradients)
        updates.step()
    return SingleDevice(
        tuple(losses),
        gradients,
        buffers,
        {name: _kept(p) for name, p in model.named_parameters()},
        {name: _kept(b) for name, b in model.named_buffers()},
    )


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _check_finite(step: int, loss: float, gradients: Named) -> None:
    wrong = [name for name, g in gradients.items() if g is not None and not torch.isfinite(g).all()]
    if loss - loss != 0 or wrong:
        what = f"the gradient of {wrong[0]}" if wrong else f"the loss of step {step + 1}"
        raise BadInput(
            f"{what} is not finite on one device, so nothing can be compared with it; pass example_inputs (and "
            "example_target) that the model can train on"
        )


# --- dropout ----------------------------------------------------------------------------------------------------------

# Where each function takes its probability: the position and the keyword.
_PROBABILITY: Mapping[str, tuple[int, str]] = {
    **dict.fromkeys(
        ("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "alpha_dropout_", "native_dropout",
         "feature_dropout", "feature_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_"),
        (1, "p"),
    ),
    "scaled_dot_product_attention": (4, "dropout_p"),
    "multi_head_attention_forward": (10, "dropout_p"),
}  # fmt: skip
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_DEFAULTS = {"dropout": 0.5, "dropout1d": 0.5, "dropout2d": 0.5, "dropout3d": 0.5, "alpha_dropout": 0.5,
             "feature_alpha_dropout": 0.5}  # fmt: skip


class _WithoutDropout(TorchFunctionMode):
    """Every dropout runs with probability 0. ``found``: names of those that would have dropped something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(function, "__name__", ""), dict(kwargs or {})
        place, keyword = _PROBABILITY.get(name, (-1, ""))
        if name in _RECURRENT and len(args) > 6:
            place = 5 if isinstance(args[3], bool) else 6  # a packed sequence has its lengths in front
        if place < 0:
            return function(*args, **kwargs)
        probability = args[place] if place < len(args) else kwargs.get(keyword, _DEFAULTS.get(name, 0.0))
        if probability and self._is_training(name, args, kwargs, place):
            self.found.append(name)
        if place < len(args):
            args = (*args[:place], 0.0, *args[place + 1 :])
        else:
            kwargs[keyword] = 0.0
        if keyword == "p" and len(args) > place + 1:  # not training: or it would draw numbers and use none
            args = (*args[: place + 1], False, *args[place + 2 :])
        elif keyword == "p":
            kwargs["train" if "train" in kwargs else "training"] = False
        return function(*args, **kwargs)

    @staticmethod
    def _is_training(name: str, args: Any, kwargs: Mapping[str, Any], place: int) -> bool:
        if name == "scaled_dot_product_attention":
            return True
        if name == "multi_head_attention_forward":
            return bool(kwargs.get("training", True))
        given = args[place + 1] if place + 1 < len(args) else kwargs.get("training", kwargs.get("train", True))
        return bool(given)


@contextmanager
def without_dropout() -> Iterator[list[str]]:
    """Inside, dropout of any kind keeps everything. Yields the names of those met that would have dropped something."""
    mode = _WithoutDropout()
    with mode:
        yield mode.found


@contextmanager
def dropout_modules_off(model: torch.nn.Module) -> Iterator[None]:
    """Inside, the dropout modules of ``model`` (and attention and recurrent ones) have probability 0.

    For code of the model's own that runs in other processes, where ``without_dropout`` does not reach.
    """
    before: list[tuple[torch.nn.Module, str, float]] = []
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            before.append((module, "p", module.p))
        elif isinstance(module, torch.nn.MultiheadAttention | torch.nn.RNNBase):
            before.append((module, "dropout", module.dropout))
    try:
        for module, attribute, _ in before:
            setattr(module, attribute, 0.0)
        yield
    finally:
        for module, attribute, value in before:
            setattr(module, attribute, value)
