"""The example batch a model is traced with: given, found on the model, or told by its first layer.

    example_batch(model, ...)     inputs, keywords and target of one global batch
    resized(batch, size)          the same with another number of rows
    guess_target(model, ...)      the shape of loss_fn's target, where the user gave none
    BatchForm                     what later batches must hold: the same tensors, and the same other values

Only shapes and dtypes matter to planning.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from planner.errors import BadInput, TraceError
from planner.ir.program import InputSpec, spoken
from planner.trace import Batch, is_among
from planner.trace_failure import quietly, trace_failure
from planner.trace_guards import attributes_kept
from planner.trace_record import real_output
from runtime.opaque import register_dataclasses

EXAMPLE_ATTRIBUTES = ("example_input_array", "dummy_inputs", "example_inputs")
DEFAULT_ROWS = 8
DEFAULT_IMAGE = 32
DEFAULT_TOKENS = 16
MOST_OUTPUTS = 4
CLASS_LOSSES = frozenset({"cross_entropy", "nll_loss", "cross_entropy_loss", "nll_loss_nd"})


def example_batch(
    model: torch.nn.Module,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    example_target: Any = None,
    global_batch: int | None = None,
    not_batched: Collection[str] = (),
) -> Batch:
    """One global batch. Raises BadInput saying what to pass when none can be found.

    ``not_batched``: names of arguments that ``global_batch`` leaves as they are.
    """
    if example_kwargs is not None and not isinstance(example_kwargs, Mapping):
        raise BadInput(
            f"example_kwargs is a {type(example_kwargs).__name__}; pass a dict of the model's keyword arguments"
        )
    if global_batch is not None and (
        isinstance(global_batch, bool) or not isinstance(global_batch, int) or global_batch < 1
    ):
        raise BadInput(f"global_batch={global_batch!r}; pass a whole number of at least 1")
    if example_inputs is not None or example_kwargs is not None:
        batch = arguments_of(example_inputs, example_target)
        batch = Batch(batch.args, {**batch.kwargs, **(example_kwargs or {})}, example_target)
    else:
        batch = _from_model(model, example_target, global_batch or DEFAULT_ROWS)
    register_dataclasses((batch.args, dict(batch.kwargs), batch.target))
    return batch if global_batch is None else resized(batch, global_batch, paths_of(model, batch, not_batched))


def paths_of(model: torch.nn.Module, batch: Batch, names: Collection[str]) -> tuple[str, ...]:
    """Key paths in (args, kwargs, target) of the model's arguments called ``names``; 'target' is that of loss_fn.

    Raises BadInput when there is no such argument.
    """
    parameters = [p for p in inspect.signature(model.forward).parameters.values() if p.kind in _POSITIONAL]
    places = {p.name: f"[0][{i}]" for i, p in enumerate(parameters[: len(batch.args)])}
    places |= {name: f"[1][{name!r}]" for name in batch.kwargs}
    if batch.target is not None:
        places.setdefault("target", "[2]")
    for name in names:
        if name not in places:
            raise BadInput(f"not_batched names {name!r}, which the example does not hold; it holds {', '.join(places)}")
    return tuple(places[name] for name in names)


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def arguments_of(inputs: Any, target: Any = None) -> Batch:
    """``inputs`` as the model is called with them: a mapping as keywords, a tuple or list as positional, else the only one."""
    if isinstance(inputs, Mapping):
        return Batch((), dict(inputs), target)
    if inputs is None:
        return Batch((), {}, target)
    return Batch(tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}, target)


def _from_model(model: torch.nn.Module, target: Any, rows: int) -> Batch:
    for name in EXAMPLE_ATTRIBUTES:
        found = getattr(model, name, None)
        found = found() if callable(found) and not isinstance(found, torch.Tensor) else found
        if found is not None and not (isinstance(found, Mapping) and not found):
            return arguments_of(found, target)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            return Batch((torch.zeros(rows, module.in_features, dtype=module.weight.dtype, device=device),), {}, target)
        if isinstance(module, torch.nn.Embedding):
            tokens = torch.zeros(rows, DEFAULT_TOKENS, dtype=torch.int64, device=device)
            return Batch((tokens,), {}, target)
        if isinstance(module, torch.nn.Conv2d):
            image = torch.zeros(
                rows, module.in_channels, DEFAULT_IMAGE, DEFAULT_IMAGE, dtype=module.weight.dtype, device=device
            )
            return Batch((image,), {}, target)
    raise BadInput(
        "cannot tell what the model takes: pass example_inputs=(tensor, ...) and example_kwargs={...}, one global batch"
    )


def rows_of(batch: Batch, not_batched: Collection[str] = ()) -> int | None:
    """Dim 0 of the first tensor that has one, but for those at the key paths ``not_batched``."""
    for path, leaf in _leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and not is_among(path, not_batched):
            return int(leaf.shape[0])
    return None


def resized(batch: Batch, rows: int, not_batched: Collection[str] = ()) -> Batch:
    """``batch`` with ``rows`` rows: rows are repeated or dropped in every tensor whose dim 0 is the batch."""
    present = rows_of(batch, not_batched)
    if present is None or present == rows:
        return batch

    def resize(path: Any, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape[0] != present:
            return value
        if is_among(pytree.keystr(path), not_batched):
            return value
        if value.device.type == "meta":
            return value.new_empty((rows, *value.shape[1:]))
        return value[torch.arange(rows) % present]

    args, kwargs, target = pytree.tree_map_with_path(resize, (batch.args, dict(batch.kwargs), batch.target))
    return Batch(args, kwargs, target)


def with_values(batch: Batch, invented: bool) -> Batch:
    """``batch`` fit to be computed with: zeros that stand for inputs nobody gave (``invented``) become random numbers.

    Raises BadInput when a tensor is on meta.
    """
    generator = torch.Generator().manual_seed(0)

    def fill(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.device.type == "meta":
            raise BadInput("this needs a real example batch: pass example_inputs that are not on meta")
        if invented and value.is_floating_point() and not value.any():
            drawn = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            return drawn.to(value.device, value.dtype)
        return value

    args, kwargs, target = pytree.tree_map(fill, (batch.args, dict(batch.kwargs), batch.target))
    return Batch(args, kwargs, target)


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    """Floating-point tensors of ``batch`` in ``dtype``."""

    def convert(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    args, kwargs, target = pytree.tree_map(convert, (batch.args, dict(batch.kwargs), batch.target))
    return Batch(args, kwargs, target)


def on_device_of(model: torch.nn.Module, batch: Batch) -> Batch:
    """Stand-ins for the tensors of ``batch`` where the model's parameters are, so that the two can be traced together."""
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1:
        return batch
    (device,) = devices

    def stand_in(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device == device:
            return value
        return torch.empty(value.shape, dtype=value.dtype, device=device)

    args, kwargs, target = pytree.tree_map(stand_in, (batch.args, dict(batch.kwargs), batch.target))
    return Batch(args, kwargs, target)


def moved_to(model: torch.nn.Module, batch: Batch) -> Batch:
    """``batch`` with its values where the model's parameters are."""
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1 or torch.device("meta") in devices:
        return batch
    (device,) = devices

    def move(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) and not value.is_meta else value

    args, kwargs, target = pytree.tree_map(move, (batch.args, dict(batch.kwargs), batch.target))
    return Batch(args, kwargs, target)


def takes_target(loss_fn: Callable[..., Any]) -> bool:
    """Whether ``loss_fn`` is called with a target: False only for a function of one argument."""
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(None, None)
    except TypeError:
        return False
    return True


@dataclass(frozen=True)
class BatchForm:
    """``entries``: key path in (args, kwargs, target) -> '' for a tensor, else the value the trace has fixed, as text."""

    entries: Mapping[str, str]

    @staticmethod
    def of(batch: Batch) -> BatchForm:
        return BatchForm({path: _text(value) for path, value in _leaves(batch)})

    @property
    def has_target(self) -> bool:
        return self.entries.get("[2]") != "None"

    def tensors(self, batch: Batch, inputs: Iterable[InputSpec]) -> dict[str, torch.Tensor]:
        """The program's inputs by name. Floating-point tensors are cast to the plan's dtypes.

        Raises BadInput when ``batch`` holds more or less than the example did, or another value where that is no tensor.
        """
        found = dict(_leaves(batch))
        for path, expected in self.entries.items():
            if path not in found:
                raise BadInput(f"the batch lacks {spoken(path)}; pass batches of the same form as the example")
            text = _text(found[path])
            if text == expected:
                continue
            if path == "[2]" and expected == "None":
                raise BadInput(
                    "the batch has a target, but the plan was made without loss_fn; leave it out, or plan with one"
                )
            if not expected:
                raise BadInput(f"{spoken(path)} must be a tensor, as in the example, not {text}")
            raise BadInput(
                f"{spoken(path)} is {text or 'a tensor'}, but was {expected} in the example; what is no tensor is fixed when "
                "the model is traced. Plan again with an example of the new form"
            )
        for path in found:
            if path not in self.entries:
                raise BadInput(f"the batch holds {spoken(path)}, which the example did not; plan again with it")
        tensors = {}
        for spec in inputs:
            value, dtype = found[spec.path], getattr(torch, spec.dtype)
            tensors[spec.name] = value.to(dtype) if value.is_floating_point() and dtype.is_floating_point else value
        return tensors


def _leaves(batch: Batch) -> list[tuple[str, Any]]:
    arguments = (batch.args, dict(batch.kwargs), batch.target)
    register_dataclasses(arguments)
    return [(pytree.keystr(path), value) for path, value in pytree.tree_flatten_with_path(arguments)[0]]


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return ""
    plain = value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device)
    return repr(value) if plain else f"a {type(value).__qualname__}"


def guess_target(
    model: torch.nn.Module, batch: Batch, loss_fn: Callable[..., Any], example: Batch | None = None
) -> torch.Tensor:
    """A tensor of the shape and dtype ``loss_fn(output, target)`` takes, found by trying, without arithmetic.

    Losses over classes (cross_entropy, nll_loss) take class indices; others a tensor like the output (or, where the model
    returns several tensors, like one of them). Raises BadInput asking for example_target when nothing fits, TraceError when
    the model does not run. ``example``: the batch with its values, for a model that does not run on stand-ins.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.func import functional_call

    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    with quietly(), warnings.catch_warnings(), attributes_kept(model), fakes:
        warnings.simplefilter("ignore")  # of a loss given targets that do not fit

        def fake(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return torch.empty(value.shape, dtype=value.dtype, device=value.device)

        tensors = {name: fake(tensor) for name, tensor in _slots(model)}
        args, kwargs = pytree.tree_map(fake, (batch.args, dict(batch.kwargs)))
        try:
            output = functional_call(model, tensors, args, kwargs, tie_weights=False)
        except Exception as error:
            failure = trace_failure(error)
            output = pytree.tree_map(fake, _real_output(model, example or batch, failure, error))
        for like in [x for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor)][:MOST_OUTPUTS]:
            for shape, dtype in _candidates(like, _given_to_class_loss(loss_fn, output, like)):
                try:
                    loss = loss_fn(output, torch.empty(shape, dtype=dtype, device=like.device))
                except Exception:
                    continue
                if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                    return _real(shape, dtype, like.device)
    raise BadInput("cannot tell what target loss_fn takes: pass example_target=, one global batch of it")


def _real_output(model: torch.nn.Module, batch: Batch, failure: TraceError, error: Exception) -> Any:
    """What ``model`` returns on real tensors, where it does not run on stand-ins. Raises TraceError where it cannot."""
    from torch.utils._python_dispatch import _disable_current_modes

    tensors = (*model.parameters(), *model.buffers(), *pytree.tree_leaves((batch.args, dict(batch.kwargs))))
    if any(isinstance(tensor, torch.Tensor) and tensor.is_meta for tensor in tensors):
        raise TraceError(str(failure)) from error
    with _disable_current_modes():
        try:
            output = real_output(model, batch.args, batch.kwargs)
        except Exception:
            raise TraceError(str(failure)) from error
    register_dataclasses(output)
    return output


def _slots(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every place that holds a parameter or buffer, once: a module known by two names is one place."""
    for prefix, module in model.named_modules():
        own = (
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        )
        for name, tensor in own:
            yield f"{prefix}.{name}" if prefix else name, tensor


def _real(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return torch.zeros(shape, dtype=dtype, device=device)


def _candidates(output: torch.Tensor, classes: tuple[int, ...] | None) -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes to try, the likeliest first. ``classes``: shape of what a loss over classes is given, [n, c, ...]."""
    shape = tuple(output.shape)
    if classes is not None:
        own = (*classes[:1], *classes[2:])
        flattened = len(classes) == 2 and len(shape) > 2
        for target in (shape[:-1], own) if flattened else (own, shape[:-1]):
            yield target, torch.int64
    yield shape, output.dtype
    if shape[-1:] == (1,):
        yield shape[:-1], output.dtype
    yield shape[:1], torch.int64


def _given_to_class_loss(loss_fn: Callable[..., Any], output: Any, like: torch.Tensor) -> tuple[int, ...] | None:
    """The shape of the scores ``loss_fn`` gives a loss over class indices, seen by running it; None when it calls none."""
    from torch.overrides import TorchFunctionMode

    given: list[tuple[int, ...]] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(function, "__name__", "") in CLASS_LOSSES and args and isinstance(args[0], torch.Tensor):
                given.append(tuple(args[0].shape))
            return function(*args, **(kwargs or {}))

    for target in (torch.empty(like.shape[:-1], dtype=torch.int64, device=like.device), torch.empty_like(like)):
        try:
            with Watch():
                loss_fn(output, target)
        except Exception:
            pass
        if given:
            return given[0]
    return None
