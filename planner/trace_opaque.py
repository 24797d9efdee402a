"""Modules that cannot be traced, each kept as one operator that calls it.

    known_from_the_start(model)       those with hooks that run in backward
    blamed(error, model, opaque)      the innermost module that was being called when a trace failed
    standing_in(model, calls, ...)    during a trace a call of one of them is one operator, meshwright::module
    read_call(fx_node, ...)           that operator as a Node

The operator takes the module's tensors (arguments, then states: parameters and buffers) and a text, and knows from the text
what it returns (planner.trace_record); so it has no state, and the graph made of it is data. Buffers the module writes and
tensors it leaves in its attributes are results too.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from planner.errors import BadInput, TraceError
from planner.ir.graph import MODULE, Argument, Node, Ref, Symbol, Value
from planner.trace_failure import Untraceable
from planner.trace_record import TENSOR, Call, Calls, Form, tree
from runtime.opaque import states_of

OPERATOR = "meshwright.module.default"

_LIBRARY = torch.library.Library("meshwright", "DEF")
_LIBRARY.define("module(Tensor[] inputs, Tensor[] states, str call) -> Tensor[]")


@torch.library.register_fake("meshwright::module", lib=_LIBRARY)
def _results(inputs: list[torch.Tensor], states: list[torch.Tensor], call: str) -> list[torch.Tensor]:
    device = (*inputs, *states)[0].device
    return [torch.empty(s, dtype=getattr(torch, dtype), device=device) for s, dtype, _ in json.loads(call)["results"]]


# --- which modules ----------------------------------------------------------------------------------------------------


def known_from_the_start(model: torch.nn.Module) -> dict[str, str]:
    """Path -> why it cannot be traced, of modules with hooks that run in backward and of BatchNorms that count steps."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        if module._backward_hooks or getattr(module, "_backward_pre_hooks", None):
            found[name] = "it has a backward hook"
        elif isinstance(module, torch.nn.modules.batchnorm._NormBase) and module.momentum is None:
            if module.training and module.track_running_stats:
                found[name] = "it averages its statistics over all steps (momentum=None), by a counter that is a tensor"
    return outermost(found)


def with_module(model: torch.nn.Module, opaque: Mapping[str, str], path: str, why: str) -> dict[str, str]:
    """``opaque`` and ``path``; other modules of a class of the user's share its fate, modules inside are part of it."""
    kind = type(model.get_submodule(path))
    alike = [] if kind.__module__.startswith("torch.") else [n for n, m in model.named_modules() if type(m) is kind]
    return outermost({**opaque, **dict.fromkeys(alike, why), path: why})


def outermost(found: Mapping[str, str]) -> dict[str, str]:
    return {name: reason for name, reason in found.items() if not any(_is_inside(name, other) for other in found)}


def _is_inside(path: str, other: str) -> bool:
    return path != other and (not other or path.startswith(other + "."))


def blamed(error: BaseException, model: torch.nn.Module, opaque: Mapping[str, str]) -> str | None:
    """The path of the innermost module being called when ``error`` was raised that is not kept whole yet."""
    paths = [path for path in (*_called(error, model), *getattr(error, "modules", ())) if path not in opaque]
    if paths:
        return paths[-1]
    return "" if getattr(error, "depends_on_values", False) and "" not in opaque else None


def _called(error: BaseException, model: torch.nn.Module) -> Iterator[str]:
    """Paths of the modules on the stack of ``error`` and of what caused it, from outside to inside."""
    path_of = {id(vars(module)): name for name, module in model.named_modules()}
    cause: BaseException | None = error
    while cause is not None:
        trace = cause.__traceback__
        while trace is not None:
            owner = trace.tb_frame.f_locals.get("self")
            if trace.tb_frame.f_code.co_name in ("_wrapped_call_impl", "_call_impl") and hasattr(owner, "__dict__"):
                name = path_of.get(id(owner.__dict__))
                original = owner.__dict__.get("_path_in_model", name)
                if original is not None:
                    yield original
            trace = trace.tb_next
        cause = cause.__cause__


def reason(error: Untraceable) -> str:
    """Why a module cannot be traced, in the middle of a sentence."""
    text = str(error).partition("\n")[0].removeprefix("the model cannot be traced: ")
    place = next((line.strip() for line in str(error).splitlines()[1:] if line.strip().startswith("at ")), "")
    return f"{text} ({place.partition(', in ')[0]})" if place else text


def check_values(model: torch.nn.Module, batch: Any, kept: Mapping[str, str], first: Untraceable | None) -> None:
    """Raise TraceError when the modules in ``kept`` cannot be run, because the model or the batch is on meta."""
    given = pytree.tree_leaves((batch.args, dict(batch.kwargs)))
    if any(isinstance(t, torch.Tensor) and t.is_meta for t in (*(t for _, t in states_of(model)), *given)):
        path, why = next(iter(kept.items()))
        raise TraceError(
            f"{first or f'module {path!r} cannot be traced: {why}'}\nA module that cannot be traced is kept as it is, but "
            "only where the model and example_inputs have values: build them on a device other than meta."
        )


def take_values(model: torch.nn.Module, source: torch.nn.Module) -> None:
    """Copy the numbers of ``source`` into ``model``, its copy in another precision."""
    with torch.no_grad():
        for (_, tensor), (_, values) in zip(states_of(model), states_of(source), strict=True):
            tensor.copy_(values)


def matches(path: str, samplewise: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in samplewise)


def check_samplewise(model: torch.nn.Module, samplewise: Any) -> tuple[str, ...]:
    """``samplewise`` as patterns of module paths. Raises BadInput for one that fits no module."""
    if samplewise is True:
        return ("*",)
    names = (samplewise,) if isinstance(samplewise, str) else tuple(samplewise or ())
    paths = [name for name, _ in model.named_modules()]
    for name in names:
        if not isinstance(name, str) or not fnmatch.filter(paths, name):
            some = ", ".join(repr(path) for path in paths[1:6])
            raise BadInput(f"samplewise names {name!r}, which is no module of the model; its modules are {some}, ...")
    return names


def _argument(tree: Any, refs: Sequence[Ref]) -> Argument:
    if not isinstance(tree, list):
        return tree
    kind, *items = tree
    if kind == "tensor":
        return refs[items[0]]
    if kind == "symbol":
        return Symbol(items[0])
    if kind == "dict":
        return (kind, *((key, _argument(item, refs)) for key, item in items))
    return (kind, *(_argument(item, refs) for item in items))


def read_call(fx_node: torch.fx.Node, argument: Callable[[Any], Argument], unique: Callable[[str], str]) -> Node:
    """A call of the operator in an exported graph as a Node. ``argument``: an fx argument as ours."""
    inputs, states, text = fx_node.args
    call = json.loads(text)  # type: ignore[arg-type]
    refs = argument(inputs)
    word = next((part.lower() for part in reversed(call["path"].split(".")) if part.isidentifier()), "module")
    outputs = tuple(
        Value(unique(f"{word}_{i}" if i else word), tuple(shape), dtype, differentiable)
        for i, (shape, dtype, differentiable) in enumerate(call["results"])
    )
    given = {
        "plain": call["plain"],
        "written": tuple(call["written"]),
        "kept": tuple(map(tuple, call["kept"])),
        "draws": call["draws"],
        "autocast": Symbol(call["autocast"]) if call["autocast"] else None,
    }
    return Node(
        MODULE,
        (call["path"], _argument(call["args"], refs), _argument(call["kwargs"], refs), argument(states)),
        outputs,
        tuple((name, value) for name, value in given.items() if value),
        call["path"],
        rule=call["rule"],
    )


# --- in the trace -----------------------------------------------------------------------------------------------------


@contextmanager
def standing_in(model: torch.nn.Module, calls: Calls, samplewise: Sequence[str], batch_size: int) -> Iterator[None]:
    """Around one call of ``model`` while it is traced: the modules in ``calls`` are one operator each."""
    changed: list[tuple[dict[str, Any], Any]] = []
    for path, recorded in calls.items():
        module = model.get_submodule(path)
        attributes = vars(module)
        changed.append((attributes, attributes.get("_compiled_call_impl", changed)))
        attributes["_compiled_call_impl"] = _StandIn(path, module, recorded, matches(path, samplewise), batch_size)
    try:
        yield
    finally:
        for attributes, before in changed:
            if before is changed:
                attributes.pop("_compiled_call_impl", None)
            else:
                attributes["_compiled_call_impl"] = before


class _StandIn:
    """In the place of ``module.__call__`` during a trace."""

    def __init__(
        self, path: str, module: torch.nn.Module, calls: Sequence[Call], samplewise: bool, batch_size: int
    ) -> None:
        self.path, self.module, self.samplewise, self.batch_size = path, module, samplewise, batch_size
        self.calls = iter(calls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors: list[torch.Tensor] = []
        trees = [tree(args, tensors), tree(kwargs, tensors)]
        call = next(self.calls, None)
        if call is None or json.dumps(trees) != call.arguments:
            raise Untraceable("it is not called as in a forward pass outside of the trace")
        for tensor, form in zip(tensors, call.inputs, strict=True):
            if any(isinstance(size, torch.SymInt) for size in tensor.shape) or tuple(tensor.shape) != form.shape:
                raise Untraceable("the shapes it is called with depend on the values of tensors")
        states = [self._state(names[0]) for names, _ in states_of(self.module)]
        results = [*call.results, *(form for _, form in call.written), *(form for *_, form in call.kept)]
        text = {
            "path": self.path,
            "args": trees[0],
            "kwargs": trees[1],
            "results": [[form.shape, form.dtype, form.differentiable] for form in results],
            "plain": call.plain,
            "written": [number for number, _ in call.written],
            "kept": [(path, name) for path, name, _ in call.kept],
            "autocast": _autocast(tensors),
            "draws": call.draws,
            "rule": self._rule(call) if self.samplewise else "",
        }
        made = iter(torch.ops.meshwright.module(tensors, states, json.dumps(text)))
        leaves = [next(made) if leaf is TENSOR else leaf for leaf in call.leaves]
        with torch.no_grad():
            for number, _ in call.written:
                states[number].copy_(next(made))
        for path, name, _ in call.kept:
            setattr(self.module.get_submodule(path), name, next(made))
        for (path, name), value in call.attributes.items():
            setattr(self.module.get_submodule(path), name, value)
        return pytree.tree_unflatten(leaves, call.structure)

    def _state(self, name: str) -> torch.Tensor:
        path, _, last = name.rpartition(".")
        owner = self.module.get_submodule(path)
        tensor = owner._parameters[last] if last in owner._parameters else owner._buffers[last]
        assert tensor is not None
        return tensor

    def _rule(self, call: Call) -> str:
        """``r _, _ -> r _``: r names the rows, dim 0 of every tensor that is cut with the batch."""
        rows = next((f.shape[0] for f in call.inputs if f.shape and f.shape[0] % self.batch_size == 0), None)
        if rows is None:
            return ""
        if call.written or call.kept or any(form.shape[:1] != (rows,) for form in call.results):
            what = (
                "writes buffers or keeps tensors"
                if call.written or call.kept
                else "returns a tensor without a dim of rows"
            )
            raise BadInput(f"samplewise names {self.path or 'the model'!r}, which {what}; leave it out")
        states = [Form(tuple(tensor.shape), "") for _, tensor in states_of(self.module)]

        def dims(form: Form, cut: bool) -> str:
            return " ".join(["r" if cut else "_", *"_" * (len(form.shape) - 1)]) if form.shape else ""

        operands = [dims(form, form.shape[:1] == (rows,)) for form in call.inputs] + [
            dims(form, False) for form in states
        ]
        return ", ".join(operands) + " -> " + ", ".join(dims(form, True) for form in call.results)


def _autocast(tensors: Sequence[torch.Tensor]) -> str:
    """The dtype of the autocast region the call is in; '' outside."""
    kind = tensors[0].device.type if tensors else "cpu"
    return str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else ""


def note(path: str, why: str, samplewise: bool) -> str:
    """What the report says about a module that is kept whole."""
    name = path or "the whole model"
    text = f"{name} runs as one operator, priced by the tensors it reads and makes, because {why}"
    if samplewise:
        return f"{text}; each device and micro-batch gives it its own rows (samplewise)"
    return f"{text}; every device runs it on the whole batch, unless {asked(path)} says that it treats rows alone"


def asked(path: str) -> str:
    """How to say that the module at ``path`` is samplewise."""
    return f"samplewise=({path!r},)" if path else "samplewise=True"
