"""What torch.export would drop without a word, found while the model runs: kept where it can be, refused by name where not.

refused    hooks of parameters and tensors: they act on complete gradients
untraced   custom ``autograd.Function``s (their backward is code of its own), reentrant checkpoints, inference_mode,
           detach_() in place: the module around them runs as it is (planner.trace_opaque)
kept       a new tensor assigned to a buffer, as a write into the buffer
told       numbers a module counts in forward: a plan holds those of the first call
restored   the model's attributes
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from planner.errors import BadInput, TraceError
from planner.trace_failure import Untraceable, modules_of, place_here, place_in_text

PLAIN = (bool, int, float, str)
HOOKS = frozenset(
    f"_{when}{more}"
    for when in ("forward_hooks", "forward_pre_hooks")
    for more in ("", "_with_kwargs", "_always_called")
)


def refuse_modes() -> None:
    """Raises BadInput when autocast is on or gradients are off around the call: ranks, and the traced step, would not know."""
    on = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    if on:
        raise BadInput(
            f"torch.autocast({on[0]!r}) is on around this call, which the ranks would not see; put it inside the model's "
            "forward, or pass precision="
        )
    if not torch.is_grad_enabled():
        raise BadInput("gradients are switched off around this call (torch.no_grad); call it outside")


def refuse_hooks(model: torch.nn.Module) -> None:
    """Raises TraceError naming the first parameter with a hook."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise TraceError(
                f"parameter {name!r} has a hook, which would not run on the ranks; remove it before planning"
            )


@contextmanager
def attributes_kept(model: torch.nn.Module) -> Iterator[None]:
    """What forward keeps on its modules is gone afterwards: it would be stand-ins. So are the hooks it registers."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    held = [(own, dict(own)) for _, found in before for name, own in found.items() if name in HOOKS]
    try:
        yield
    finally:
        for module, attributes in before:
            now = vars(module)
            for name in [name for name in now if name not in attributes]:
                del now[name]
            now.update({name: value for name, value in attributes.items() if now.get(name) is not value})
        for own, hooks in held:
            own.clear()
            own.update(hooks)


@contextmanager
def watched(model: torch.nn.Module, tell: Callable[[str], None]) -> Iterator[None]:
    """Around one call of ``model``: raises TraceError for what would be lost, tells what is fixed."""
    buffers = [(name, module, dict(module._buffers)) for name, module in model.named_modules()]
    plain = [(name, module, _plain(module)) for name, module in model.named_modules()]
    with _no_functions(), _Watch():
        yield
    for prefix, module, before in buffers:
        for name, buffer in before.items():
            new = module._buffers.get(name)
            if buffer is not None and new is not buffer:
                _write(f"{prefix}.{name}".lstrip("."), buffer, new)
                module._buffers[name] = buffer
    for name, module, values in plain:
        for attribute in sorted(k for k, v in _plain(module).items() if values.get(k, v) != v):
            tell(
                f"{name or 'the model'} changes its attribute {attribute!r} in forward; the plan keeps what the first call "
                "made of it"
            )


def refuse_unseen_writes(exported: torch.export.ExportedProgram) -> None:
    """Raises TraceError for a write under ``no_grad`` into anything but a buffer: autograd does not see it, a plan would."""
    buffers = set(exported.graph_signature.inputs_to_buffers)
    for region in exported.graph.nodes:
        if region.target is not torch.ops.higher_order.wrap_with_set_grad_enabled or region.args[0] is not False:
            continue
        inner = getattr(exported.graph_module, region.args[1].target).graph
        placeholders = [node for node in inner.nodes if node.op == "placeholder"]
        outside = dict(zip(placeholders, region.args[2:], strict=True))
        for node in inner.nodes:
            mutable = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
            if mutable and node.args[0] in outside and outside[node.args[0]].name not in buffers:
                raise Untraceable(
                    "a tensor with a gradient is written in place under no_grad; write a new tensor, or do it between steps"
                    f"{place_in_text(str(node.meta.get('stack_trace') or ''))}",
                    modules_of(region),
                )


def _plain(module: torch.nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, PLAIN)}


def _write(name: str, buffer: torch.Tensor, new: torch.Tensor | None) -> None:
    if new is None or new.shape != buffer.shape or new.dtype != buffer.dtype:
        now = "nothing" if new is None else f"{new.dtype} {list(new.shape)}"
        raise TraceError(
            f"forward turns buffer {name!r} from {buffer.dtype} {list(buffer.shape)} into {now}; keep its shape and dtype"
        )
    with torch.no_grad():
        buffer.copy_(new)


class _Watch(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.register_hook:
            raise TraceError(f"a tensor gets a hook, which tracing would drop; take it out of the model{place_here()}")
        if function is torch.Tensor.detach_:
            raise Untraceable(f"detach_() in place is not kept when tracing; write x = x.detach(){place_here()}")
        if any(type(x) is torch.nn.Parameter and x.requires_grad for x in args):  # the model's own are stand-ins here
            raise TraceError(
                "the loss, or the model, uses a trainable tensor that is no parameter of the model planned, so it would stay "
                "as it is; register it there. A loss_fn that knows the model's weights needs the model in the precision it "
                f"is to train in (model.to(dtype)){place_here()}"
            )
        if torch.is_inference_mode_enabled():
            raise Untraceable(f"inference_mode is not kept when tracing; write torch.no_grad(){place_here()}")
        return function(*args, **(kwargs or {}))


@contextmanager
def _no_functions() -> Iterator[None]:
    """``autograd.Function.apply`` refuses, on this thread."""
    function: Any = torch.autograd.Function
    original, thread = vars(function)["apply"], threading.get_ident()

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # The gradient of a custom operator, which stays one call.
        registered = cls.__module__ == "torch._library.autograd"
        if threading.get_ident() != thread or registered:
            return original.__get__(None, cls)(*args, **kwargs)
        if cls is torch.utils.checkpoint.CheckpointFunction:
            raise Untraceable(
                f"reentrant checkpoints are not kept when tracing; pass use_reentrant=False{place_here()}"
            )
        raise Untraceable(
            f"the backward of autograd.Function {cls.__qualname__} is code that a plan cannot hold; use operators whose "
            f"gradient torch knows{place_here()}"
        )

    function.apply = classmethod(apply)
    try:
        yield
    finally:
        function.apply = original
