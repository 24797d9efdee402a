"""A torch optimizer as data, so that it can be built in every process over that process's shards.

``describe_optimizer`` calls the user's factory on stand-ins for the model's parameters and reads the class and the
parameter groups off the result; ``StageOptimizer`` builds the same class over local parameters. This is exact for
optimizers that treat every element by itself (SGD, Adam, AdamW, ...). Optimizers that look at a whole weight or model
(LBFGS, Muon, Adafactor, SparseAdam) are refused.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from planner.errors import BadInput

NOT_ELEMENT_WISE = frozenset({"LBFGS", "SparseAdam", "Adafactor", "Muon"})
Factory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
Spec = dict[str, Any]


def describe_optimizer(factory: Factory, named_parameters: Mapping[str, torch.Tensor]) -> Spec:
    """The optimizer ``factory(parameters)`` would make, as ``{module, class, defaults, groups: [{names, options}]}``.

    ``named_parameters``: original name -> tensor (only shape, dtype and requires_grad are read; nothing is allocated).
    Raises BadInput when the factory makes no torch optimizer, one that other processes cannot import, one that is not
    element-wise, or one over other tensors than the model's.
    """
    optimizer, names = _make(factory, named_parameters)
    cls = type(optimizer)
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        raise BadInput(
            f"the optimizer class {cls.__qualname__} is defined in the running script, where worker processes cannot "
            "import it. Move it into a module of its own, or start the script with torchrun."
        )
    if cls.__name__ in NOT_ELEMENT_WISE:
        raise BadInput(
            f"{cls.__name__} does not treat every element of a weight by itself, so it is not right on shards. "
            "Use an element-wise optimizer such as AdamW or SGD."
        )
    groups = []
    for group in optimizer.param_groups:
        unknown = [p for p in group["params"] if id(p) not in names]
        if unknown:
            raise BadInput(
                f"the optimizer holds a tensor of shape {list(unknown[0].shape)} that is no parameter of the model. "
                "Build it from the parameters it is given: optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)."
            )
        options = {key: _plain(key, value) for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({"names": [names[id(p)] for p in group["params"]], "options": options})
    accepted = inspect.signature(cls).parameters
    defaults = {key: _plain(key, value) for key, value in optimizer.defaults.items() if key in accepted}
    return {"module": cls.__module__, "class": cls.__qualname__, "defaults": defaults, "groups": groups}


def _make(
    factory: Factory, named_parameters: Mapping[str, torch.Tensor]
) -> tuple[torch.optim.Optimizer, dict[int, str]]:
    """The factory's result over stand-ins, and the names of the stand-ins by id."""
    failure: Exception | None = None
    for device in ("meta", "cpu"):  # some optimizers refuse meta tensors; one element on the CPU stands for all
        stand_ins = {
            name: torch.nn.Parameter(torch.empty((), dtype=p.dtype, device=device).expand(p.shape), p.requires_grad)
            for name, p in named_parameters.items()
        }
        try:
            optimizer = factory(list(stand_ins.values()))
        except Exception as error:
            failure = failure or error
            continue
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise BadInput(
                f"the optimizer factory returned {type(optimizer).__name__}, not a torch.optim.Optimizer. "
                "Pass for example optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)."
            )
        return optimizer, {id(p): name for name, p in stand_ins.items()}
    raise BadInput(f"the optimizer factory failed: {type(failure).__name__}: {failure}") from failure


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return value.item()
    if isinstance(value, list | tuple):
        return tuple(_plain(key, item) for item in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise BadInput(
        f"the optimizer option {key}={value!r} is no number, text or list, so it cannot reach other processes."
    )


class StageOptimizer:
    """The optimizer of ``spec`` over those of its parameters that live here.

    Plain tensors and DTensors do not mix in one multi-tensor update: each kind has its own torch optimizer.
    Raises BadInput when the class cannot be imported or built.
    """

    def __init__(self, spec: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]) -> None:
        cls = _import(spec["module"], spec["class"])
        self.names = {id(p): name for name, p in parameters.items()}
        self.parts: list[torch.optim.Optimizer] = []
        for sharded in (False, True):
            groups = []
            for group in spec["groups"]:
                mine = [parameters[n] for n in group["names"] if n in parameters]
                mine = [p for p in mine if isinstance(p, DTensor) == sharded]
                if mine:
                    groups.append({**_options(group["options"]), "params": mine})
            if groups:
                try:
                    self.parts.append(cls(groups, **_options(spec["defaults"])))
                except (TypeError, ValueError, RuntimeError) as error:
                    raise BadInput(f"{spec['class']} cannot be built from its options: {error}") from error

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def entries(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """(parameter name, state name, tensor) of everything the optimizer remembers, in order of the parameters."""
        for part in self.parts:
            for group in part.param_groups:
                for parameter in group["params"]:
                    for key, value in sorted(part.state.get(parameter, {}).items()):
                        if value is not None:
                            yield self.names[id(parameter)], key, torch.as_tensor(value)

    def load(self, entries: Iterable[tuple[str, str, torch.Tensor]]) -> None:
        """Replace what the optimizer remembers by ``entries``, local tensors as ``entries()`` gives them."""
        table: dict[str, dict[str, torch.Tensor]] = {}
        for name, key, value in entries:
            table.setdefault(name, {})[key] = value
        for part in self.parts:
            state = part.state_dict()
            parameters = [p for group in part.param_groups for p in group["params"]]
            numbers = [i for group in state["param_groups"] for i in group["params"]]
            pairs = zip(numbers, parameters, strict=True)
            state["state"] = {i: table[self.names[id(p)]] for i, p in pairs if self.names[id(p)] in table}
            part.load_state_dict(state)


def _options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Lists back to tuples: a message between processes may turn one into the other."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}


def _import(module: str, name: str) -> type[torch.optim.Optimizer]:
    try:
        found: Any = importlib.import_module(module)
        for attribute in name.split("."):
            found = getattr(found, attribute)
    except (ImportError, AttributeError) as error:
        raise BadInput(
            f"a worker process cannot import the optimizer {module}.{name}: {error}. "
            "Put it in a module that is installed or on PYTHONPATH."
        ) from None
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise BadInput(f"{module}.{name} is no torch optimizer class.")
    return found
