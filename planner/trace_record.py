"""What a module takes and gives, seen in one real forward pass of the model.

    record(model, args, kwargs, paths)     every call of the modules at ``paths``, each as a Call
    tree(value, tensors)                   arguments as JSON

What a module does besides returning tensors is seen too: buffers it writes, tensors it leaves in its attributes. What cannot
be told so (an argument that is no data, a write into an argument, the use of another module's weights, results whose shapes
depend on values, tried with a few others) raises Untraceable: then the module around it may be one operator.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from planner.errors import BadInput, TraceError
from planner.trace_failure import Untraceable, place_here
from runtime.opaque import bound, flattened, states_of

PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
TENSOR = object()


@dataclass(frozen=True)
class Form:
    """A tensor without its numbers. ``shape`` in elements."""

    shape: tuple[int, ...]
    dtype: str
    differentiable: bool = False

    @staticmethod
    def of(tensor: torch.Tensor) -> Form:
        return Form(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad)


@dataclass(frozen=True)
class Call:
    """What one call of a module took and gave.

    ``arguments``: the tree of its arguments as text, ``inputs``: its tensors. ``results``: tensors; TENSOR stands for them
    among ``leaves`` of ``structure``; ``plain``: the other leaves as text. ``written``, ``kept``: as in ModuleSpec of
    planner.ir.program; ``attributes``: numbers and texts it leaves on itself, by (path, attribute). ``draws``: random numbers.
    """

    arguments: str
    inputs: tuple[Form, ...]
    results: tuple[Form, ...]
    plain: str
    leaves: tuple[Any, ...]
    structure: Any
    written: tuple[tuple[int, Form], ...]
    kept: tuple[tuple[str, str, Form], ...]
    attributes: Mapping[tuple[str, str], Any]
    draws: bool


Calls = Mapping[str, Sequence[Call]]


def tree(value: Any, tensors: list[torch.Tensor]) -> Any:
    """``value`` as JSON: containers are [kind, items...], the i-th tensor is ["tensor", i]."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ["tensor", len(tensors) - 1]
    if isinstance(value, torch.dtype | torch.device):
        return ["symbol", str(value) if isinstance(value, torch.dtype) else "device"]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value) in (tuple, list, torch.Size):
        return ["list" if isinstance(value, list) else "tuple", *(tree(item, tensors) for item in value)]
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return ["dict", *([key, tree(item, tensors)] for key, item in value.items())]
    raise Untraceable(f"it is called with a {type(value).__qualname__}, which is neither a tensor nor plain data")


def record(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    paths: Sequence[str],
    samplewise: Sequence[str],
) -> Calls:
    """Every call of the modules at ``paths`` while ``model`` runs on real tensors; ``model`` stays as it is.

    Raises Untraceable where a module cannot be one operator, TraceError where the model cannot run, BadInput where a
    module named in ``samplewise`` mixes rows.
    """
    copy = _with_own_states(model, {id(t) for path in paths for _, t in states_of(model.get_submodule(path))})
    for name, module in copy.named_modules():
        module.__dict__["_path_in_model"] = name
    everything = {id(tensor) for whole in (model, copy) for _, tensor in states_of(whole)}
    calls: dict[str, list[Call]] = {path: [] for path in paths}
    returned: list[tuple[str, torch.Tensor, int]] = []
    for path in paths:
        module = copy.get_submodule(path)
        recorder = _Recorder(path, module, everything, calls[path], returned, path in samplewise)
        module.__dict__["_compiled_call_impl"] = recorder
    _run(copy, args, kwargs)
    for path, tensor, version in returned:
        if tensor._version != version:
            raise TraceError(
                f"module {path!r} returns one of its arguments, which is written in place afterwards; return a copy"
            )
    return calls


def real_output(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What ``model`` returns for real tensors; it stays as it is."""
    return _run(_with_own_states(model, {id(t) for _, t in states_of(model)}), args, kwargs)


def _run(copy: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    args, kwargs = pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, (args, dict(kwargs)))
    with torch.random.fork_rng(devices=_devices(states_of(copy))), torch.enable_grad():
        return copy(*args, **kwargs)


def _devices(states: Sequence[tuple[tuple[str, ...], torch.Tensor]]) -> list[int]:
    return sorted({tensor.device.index or 0 for _, tensor in states if tensor.device.type == "cuda"})


class _Recorder:
    """In the place of ``module.__call__`` during the real forward pass."""

    def __init__(
        self,
        path: str,
        module: torch.nn.Module,
        everything: set[int],
        calls: list[Call],
        returned: list[tuple[str, torch.Tensor, int]],
        samplewise: bool,
    ) -> None:
        self.path, self.module, self.calls, self.returned = path, module, calls, returned
        self.strangers = everything - {id(tensor) for _, tensor in states_of(module)}
        self.samplewise = samplewise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors: list[torch.Tensor] = []
        arguments = json.dumps([tree(args, tensors), tree(kwargs, tensors)])
        inputs = tuple(Form.of(tensor) for tensor in tensors)
        versions = [tensor._version for tensor in tensors]
        states = _before(self.module)
        before = _attributes(self.module)
        apart = pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, (args, kwargs))
        random = _generators(tensors)
        with _Use(self.strangers) as use:
            output = self.module._call_impl(*args, **kwargs)
        if use.stranger:
            raise Untraceable("it uses parameters or buffers that are not its own")
        if any(tensor._version != version for tensor, version in zip(tensors, versions, strict=True)):
            raise Untraceable("it writes into its arguments")
        results, plain, structure = flattened(output)
        for leaf in pytree.tree_leaves(output):
            if not isinstance(leaf, (torch.Tensor, *PLAIN)):
                raise Untraceable(
                    f"it returns a {type(leaf).__qualname__}, which is neither a tensor nor plain data; register the class "
                    "with torch.utils._pytree.register_pytree_node, or return a dict"
                )
        kept, attributes = _left_behind(self.module, before)
        call = Call(
            arguments,
            inputs,
            tuple(map(Form.of, results)),
            plain,
            tuple(TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in pytree.tree_leaves(output)),
            structure,
            tuple(_written(self.module, states)),
            tuple(kept),
            attributes,
            use.drops or any(map(torch.ne, random, _generators(tensors))),
        )
        if not call.results:
            raise Untraceable("it returns no tensor")
        call = _tried(self.module, call, apart)
        if self.samplewise:
            _check_rows(self.path, self.module, call, apart)
        memory = {tensor.untyped_storage().data_ptr() for tensor in (*tensors, *(state.tensor for state in states))}
        shared = [tensor for tensor in results if tensor.untyped_storage().data_ptr() in memory]
        self.returned.extend((self.path, tensor, tensor._version) for tensor in shared)
        self.calls.append(call)
        return output


class _Use(TorchFunctionMode):
    """Sees whether a tensor among ``strangers`` (ids) is used; refuses hooks on tensors."""

    def __init__(self, strangers: set[int]) -> None:
        super().__init__()
        self.strangers, self.stranger, self.drops = strangers, False, False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.register_hook:
            raise TraceError(f"a tensor gets a hook, which tracing would drop; take it out of the model{place_here()}")
        given = (item for value in args for item in (value if isinstance(value, tuple | list) else (value,)))
        self.stranger |= any(id(item) in self.strangers for item in given)
        self.drops |= _drops(function, args, kwargs or {})
        return function(*args, **(kwargs or {}))


def _drops(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether this is a dropout that drops: those around this mode may have been switched off."""
    name = getattr(function, "__name__", "")
    if name == "scaled_dot_product_attention":
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    if "dropout" not in name:
        return False
    p, training = (kwargs.get(word, args[i] if len(args) > i else True) for i, word in ((1, "p"), (2, "training")))
    return bool(p) and bool(training)


def _generators(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The states of the random generators a module called with ``tensors`` may draw from, as far as they can differ."""
    kinds = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in kinds)]
    return [(state.long() * torch.arange(1, len(state) + 1)).sum() for state in states]


def _attributes(module: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """What each module inside holds; the content of lists and dicts by identity."""
    found = {}
    for path, owner in module.named_modules():
        held = {name: value for name, value in vars(owner).items() if name not in STRUCTURE}
        found[path] = {n: _content(v) if isinstance(v, list | dict | set) else v for n, v in held.items()}
    return found


STRUCTURE = frozenset({"_parameters", "_buffers", "_modules", "_compiled_call_impl", "_flat_weights"})


def _content(value: Any) -> tuple[Any, ...]:
    items = value.items() if isinstance(value, dict) else value
    return tuple(id(item) for pair in items for item in (pair if isinstance(pair, tuple) else (pair,)))


def _left_behind(
    module: torch.nn.Module, before: Mapping[str, Mapping[str, Any]]
) -> tuple[list[tuple[str, str, Form]], dict[tuple[str, str], Any]]:
    """Tensors and plain values that forward has left in attributes, by (path, attribute)."""
    kept: list[tuple[str, str, Form]] = []
    plain: dict[tuple[str, str], Any] = {}
    now = _attributes(module)
    for path, owner in module.named_modules():
        for name, value in now[path].items():
            old = before[path].get(name, plain)
            raw = vars(owner)[name]
            if isinstance(raw, torch.Tensor) and raw is not old:
                kept.append((path, name, Form.of(raw)))
            elif isinstance(raw, list | dict | set) and value != old:
                items = raw.values() if isinstance(raw, dict) else raw
                if any(isinstance(item, torch.Tensor) for item in items):
                    raise Untraceable(f"it collects tensors in its attribute {name!r}")
            elif isinstance(raw, bool | int | float | str) and (old is plain or raw != old):
                plain[path, name] = raw
    return kept, plain


@dataclass(frozen=True)
class _State:
    """A parameter or buffer before a call. ``values`` of buffers: some operators write without being seen to."""

    names: tuple[str, ...]
    tensor: torch.Tensor
    version: int
    values: torch.Tensor | None


def _before(module: torch.nn.Module) -> list[_State]:
    return [
        _State(names, x, x._version, None if isinstance(x, torch.nn.Parameter) else x.detach().clone())
        for names, x in states_of(module)
    ]


def _written(module: torch.nn.Module, states: Sequence[_State]) -> Iterator[tuple[int, Form]]:
    for number, state in enumerate(states):
        names, tensor, version = state.names, state.tensor, state.version
        path, _, name = names[0].rpartition(".")
        owner = module.get_submodule(path)
        if name in owner._parameters:
            if owner._parameters[name] is not tensor or tensor._version != version:
                raise TraceError(f"the model writes into its parameter {names[0]!r} in forward; do that between steps")
            continue
        new = owner._buffers.get(name)
        if new is None or new.shape != tensor.shape or new.dtype != tensor.dtype:
            now = "nothing" if new is None else f"{new.dtype} {list(new.shape)}"
            raise TraceError(
                f"forward turns buffer {names[0]!r} from {tensor.dtype} {list(tensor.shape)} into {now}; keep its shape and "
                "dtype"
            )
        assert state.values is not None
        if new is not tensor or tensor._version != version or not torch.equal(new, state.values):
            yield number, Form(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _with_own_states(module: torch.nn.Module, parameters: set[int]) -> torch.nn.Module:
    """A copy of ``module`` with buffers of its own, and those ``parameters`` (by id): forward may write into them."""
    own: dict[str, torch.Tensor] = {}
    for names, tensor in states_of(module):
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        if not is_parameter or id(tensor) in parameters:
            clone = tensor.detach().clone()
            own.update(dict.fromkeys(names, torch.nn.Parameter(clone, tensor.requires_grad) if is_parameter else clone))
    return bound(module, own)


def _alone(module: torch.nn.Module) -> tuple[torch.nn.Module, list[_State]]:
    """A copy of ``module`` with buffers of its own that is not watched, and its states."""
    copy = _with_own_states(module, set())
    copy.__dict__.pop("_compiled_call_impl", None)
    return copy, _before(copy)


def _negated(x: torch.Tensor) -> torch.Tensor:
    turned = x.flip(0) if x.dim() else x
    return ~turned if x.dtype == torch.bool else -turned if x.is_floating_point() else turned


def _shifted(x: torch.Tensor) -> torch.Tensor:
    turned = x.roll(1)
    return turned * 1.7 + 0.3 if x.is_floating_point() else turned


def _zeroed(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x) if x.is_floating_point() or x.dtype == torch.bool else x


def _tried(module: torch.nn.Module, call: Call, arguments: Any) -> Call:
    """``call``, with the buffers that only other values make it write. Raises Untraceable when results change their form."""
    written = dict(call.written)
    for change in (_negated, _shifted, _zeroed):
        args, kwargs = pytree.tree_map(lambda x, f=change: f(x) if isinstance(x, torch.Tensor) else x, arguments)
        copy, states = _alone(module)
        try:
            with torch.no_grad():
                output = copy(*args, **kwargs)
        except Exception:
            continue  # values the module was not made for
        results, plain, structure = flattened(output)
        forms = [(tuple(x.shape), x.dtype) for x in results]
        known = [(form.shape, getattr(torch, form.dtype)) for form in call.results]
        if forms != known or plain != call.plain or structure != call.structure:
            raise Untraceable("what it returns besides the numbers of tensors depends on the values of tensors")
        written.update(_written(copy, states))
    return Call(**{**vars(call), "written": tuple(sorted(written.items()))})


def _check_rows(path: str, module: torch.nn.Module, call: Call, arguments: Any) -> None:
    """Raise BadInput when halves of the rows give other rows than all of them together, for a module that draws nothing."""
    rows = next((form.shape[0] for form in call.inputs if form.shape), 0)
    if rows < 2:
        return

    def run(first: int, end: int) -> list[torch.Tensor]:
        def part(x: Any) -> Any:
            return x[first:end] if isinstance(x, torch.Tensor) and x.dim() and x.shape[0] == rows else x

        args, kwargs = pytree.tree_map(part, arguments)
        with torch.no_grad():
            return flattened(_alone(module)[0](*args, **kwargs))[0]

    try:
        whole, again = run(0, rows), run(0, rows)
        halves = [torch.cat(pair) for pair in zip(run(0, rows // 2), run(rows // 2, rows), strict=True)]
    except Exception as error:
        raise BadInput(f"samplewise names {path!r}, which does not run on half of the rows: {error}") from error
    if all(map(torch.equal, whole, again)) and not all(
        x.shape == y.shape and torch.allclose(x, y, 1e-3, 1e-5, equal_nan=True)
        for x, y in zip(whole, halves, strict=True)
    ):
        raise BadInput(f"samplewise names {path!r}, but what it makes of a row depends on other rows; leave it out")
