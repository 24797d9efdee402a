"""Modules of the user's that run as one operator, because their code could not be traced.

The module is a function of its states and arguments. Every call runs a copy of the module's tree (not of its tensors)
that holds the states given, so what forward assigns to the module ends with the call, and a checkpoint inside
recomputes with the states of its own call. Its backward is autograd's: custom Functions and hooks of modules act.

    states_of(module)              its parameters and buffers, each once, in a fixed order
    bound(module, tensors)         the copy
    dump_modules / load_modules    how local ranks get the user's code: without weights, by cloudpickle

What a module returns is flattened to its tensors; everything else it returns must be as it was when it was traced.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import io
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import cloudpickle
import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils import _pytree as pytree

from planner.errors import BadInput, RankFailed
from planner.ir.program import ModuleSpec

Slots = tuple[tuple[str, ...], torch.Tensor]


def states_of(module: nn.Module) -> list[Slots]:
    """(every name, tensor) of each parameter and buffer, parameters first; a tensor under two names comes once."""
    parameters: dict[int, tuple[list[str], torch.Tensor]] = {}
    buffers: dict[int, tuple[list[str], torch.Tensor]] = {}
    for prefix, owner in module.named_modules():
        for found, own in ((parameters, owner._parameters), (buffers, owner._buffers)):
            for name, tensor in own.items():
                if tensor is not None:
                    found.setdefault(id(tensor), ([], tensor))[0].append(f"{prefix}.{name}" if prefix else name)
    return [(tuple(names), tensor) for names, tensor in (*parameters.values(), *buffers.values())]


def bound(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """A copy of the tree of ``module`` in which ``tensors`` stand for the parameters and buffers of those names."""
    copies: dict[int, nn.Module] = {}

    def copied(owner: nn.Module, prefix: str) -> nn.Module:
        if id(owner) in copies:
            return copies[id(owner)]
        made = copies[id(owner)] = owner.__class__.__new__(owner.__class__)
        made.__dict__ = dict(owner.__dict__)
        for kind in ("_parameters", "_buffers"):
            made.__dict__[kind] = {n: tensors.get(prefix + n, t) for n, t in getattr(owner, kind).items()}
        made.__dict__["_modules"] = {
            name: None if child is None else copied(child, f"{prefix}{name}.") for name, child in owner._modules.items()
        }
        if isinstance(made, nn.RNNBase):  # keeps its weights in a list, too
            made.__dict__["_flat_weights"] = [made._parameters.get(n) for n in owner.__dict__["_flat_weights_names"]]
        return made

    result = copied(module, "")
    for made in copies.values():  # a method that stands for another, as forward often does, is of the copy
        for name, value in vars(made).items():
            if isinstance(value, types.MethodType) and id(value.__self__) in copies:
                made.__dict__[name] = types.MethodType(value.__func__, copies[id(value.__self__)])
    return result


def flattened(output: Any) -> tuple[list[torch.Tensor], str, Any]:
    """The tensors in ``output``, the rest of its leaves as text, and its structure. Dataclasses are looked into."""
    register_dataclasses(output)
    leaves, structure = pytree.tree_flatten(output)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    rest = ["" if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]
    return tensors, ", ".join(rest) if any(rest) else "", structure


def register_dataclasses(value: Any) -> None:
    """Makes torch look into the dataclasses in ``value``, as torch.export.register_dataclass does."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if type(value) not in pytree.SUPPORTED_NODES and all(f.init for f in dataclasses.fields(value)):
            name = f"{type(value).__module__}.{type(value).__qualname__}"
            torch.export.register_dataclass(type(value), serialized_type_name=name)
        for field in dataclasses.fields(value):
            register_dataclasses(getattr(value, field.name, None))
    elif isinstance(value, Mapping):
        for item in value.values():
            register_dataclasses(item)
    elif isinstance(value, tuple | list):
        for item in value:
            register_dataclasses(item)


class OpaqueModule:
    """``module`` as the operator that ``spec`` describes."""

    def __init__(self, spec: ModuleSpec, module: nn.Module) -> None:
        self.spec, self.module = spec, module
        self.names = [names for names, _ in states_of(module)]

    def __call__(
        self,
        states: Sequence[torch.Tensor],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        autocast: torch.dtype | None,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """The tensors of one call. Raises RankFailed when they are not those of the trace."""
        held = [tensor.clone() if i in self.spec.written else tensor for i, tensor in enumerate(states)]
        versions = [tensor._version for tensor in held]
        own = {name: tensor for names, tensor in zip(self.names, held, strict=True) for name in names}
        copy = bound(self.module, own)
        device = next(t.device for t in (*states, *pytree.tree_leaves((args, kwargs))) if isinstance(t, torch.Tensor))
        with nullcontext() if autocast is None else torch.autocast(device.type, autocast):
            output = copy(*args, **kwargs)
        tensors, plain, _ = flattened(output)
        after = [_state(copy, names[0]) for names in self.names]
        for i, (tensor, new) in enumerate(zip(held, after, strict=True)):
            if i not in self.spec.written and (new is not tensor or tensor._version != versions[i]):
                raise RankFailed(
                    f"module {self._called} wrote {self.names[i][0]!r}, which it did not when it was planned; write it in "
                    "every forward pass, or between steps"
                )
        results = [*tensors, *(after[i].detach() for i in self.spec.written)]
        results += [getattr(copy.get_submodule(path), attribute, None) for path, attribute in self.spec.kept]
        found = [_form(result) for result in results]
        expected = [f"{result.dtype}{list(result.shape)}" for result in self.spec.results]
        if found != expected or plain != self.spec.plain:
            raise RankFailed(
                f"module {self._called} returned {' '.join([*found, plain])} where it gave "
                f"{' '.join([*expected, self.spec.plain])} when it was planned; a plan needs results whose shapes and other "
                "values do not depend on the batch"
            )
        return results[0] if len(results) == 1 else tuple(results)

    @property
    def _called(self) -> str:
        return repr(self.spec.path or "model")


def _state(module: nn.Module, name: str) -> Any:
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    return owner._parameters[last] if last in owner._parameters else owner._buffers.get(last)


def _form(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__


# --- from process to process ------------------------------------------------------------------------------------------


def dump_modules(model: nn.Module, paths: Sequence[str]) -> bytes:
    """The modules at ``paths`` of ``model``, without the numbers of its parameters and buffers.

    Raises BadInput naming the module that cannot be sent to another process, and why.
    """
    places = {id(tensor) for _, tensor in states_of(model)}
    modules = {path: model.get_submodule(path) for path in paths}
    for path, module in modules.items():
        try:
            _pickled({path: module}, places)
        except Exception as error:
            raise BadInput(
                f"module {path or 'model'!r} runs as it is on every rank, but cannot be sent to them "
                f"({type(error).__name__}: {error}); keep files, locks and open handles out of it, or start the script "
                "under torchrun, where every rank builds the model"
            ) from error
    return _pickled(modules, places)


def load_modules(data: bytes) -> dict[str, nn.Module]:
    """The inverse of ``dump_modules``: path -> module, its parameters and buffers on meta.

    ``data`` must come from this process or its parent: it is code.
    """
    modules: dict[str, nn.Module] = cloudpickle.loads(data)
    return modules


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, places: set[int]) -> None:
        super().__init__(file)
        self.places = places

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and id(obj) in self.places:
            return _place, (tuple(obj.shape), obj.dtype, obj.requires_grad, isinstance(obj, nn.Parameter))
        if isinstance(obj, nn.Module) and is_parametrized(
            obj
        ):  # torch refuses to pickle these, as their class is made anew
            return _blank, (type(obj),), dict(vars(obj))
        return super().reducer_override(obj)


def _blank(cls: type[nn.Module]) -> nn.Module:
    return cls.__new__(cls)


def _place(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, is_parameter: bool) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype, device="meta")
    return nn.Parameter(tensor, requires_grad) if is_parameter else tensor


def _pickled(modules: Mapping[str, nn.Module], places: set[int]) -> bytes:
    file = io.BytesIO()
    with _code_sent(modules.values()):
        _Pickler(file, places).dump(dict(modules))
    return file.getvalue()


@contextmanager
def _code_sent(modules: Any) -> Iterator[None]:
    """Classes of files that another process cannot import are sent with their code."""
    names = {type(part).__module__ for module in modules for part in module.modules()}
    sent = [sys.modules[name] for name in sorted(names) if name in sys.modules and not _is_importable(name)]
    for code in sent:
        cloudpickle.register_pickle_by_value(code)
    try:
        yield
    finally:
        for code in sent:
            cloudpickle.unregister_pickle_by_value(code)


def _is_importable(name: str) -> bool:
    """Whether another process with the same sys.path finds the module ``name`` in the same file."""
    if name == "__main__" or name in sys.builtin_module_names:
        return True  # cloudpickle's own rules
    parent, _, _ = name.rpartition(".")
    folders = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    if parent and (folders is None or not _is_importable(parent)):
        return False
    found = importlib.machinery.PathFinder.find_spec(name, folders)
    return found is not None and found.origin == getattr(sys.modules[name], "__file__", found.origin)
