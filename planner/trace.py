"""From an ``nn.Module`` and one example batch to a Graph.

    trace(model, inputs) -> Traced       torch.export (non-strict) on fake tensors: no memory, no arithmetic
      export_step                        model + loss as one exported program
      to_graph                           its torch.fx graph as frozen data

The loss is traced with the model, so a stage program needs no user code. Weights shared by several names are one leaf.
A region under ``torch.no_grad`` keeps its meaning: its results are detached.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from planner import trace_opaque as opaque
from planner.errors import BadInput, TraceError
from planner.ir.graph import Argument, Graph, Leaf, Node, Ref, Symbol, Value
from planner.ir.program import SOURCE_NAMES
from planner.normalise import normalise
from planner.trace_failure import (
    ModelRaised,
    Untraceable,
    modules_of,
    quietly,
    refuse_unknown_shapes,
    trace_failure,
)
from planner.trace_guards import attributes_kept, refuse_hooks, refuse_modes, refuse_unseen_writes, watched
from planner.trace_record import Calls, record
from runtime.opaque import register_dataclasses

SKIPPED_OPS = {"aten._assert_tensor_metadata.default", "aten._assert_scalar.default"}
# A functional graph needs no copies: ``clone`` only fixed strides, and views are emitted as reshapes.
IDENTITY_OPS = {"aten.alias.default", "aten.lift_fresh_copy.default", "aten.lift_fresh.default", "aten.clone.default",
                "aten.contiguous.default"}  # fmt: skip
# Operators that write into a buffer without their schema saying so.
WRITES_UNSEEN = frozenset(
    {"batch_norm", "instance_norm", "feature_dropout", "alpha_dropout", "rrelu", "native_batch_norm"}
)
CASTS = frozenset({"to", "type_as"})
# A tensor of the code that is not the model's own is written into the graph, up to this size.
MOST_CONSTANT_ELEMENTS = 4096
# Each finds one more kind of module that cannot be traced.
MOST_TRACES = 24
DROPPED_KEYWORDS = {"pin_memory", "layout", "non_blocking"}


@dataclass(frozen=True)
class Batch:
    """One global batch as the user passes it."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any = None


@dataclass(frozen=True)
class Traced:
    """A graph, and for each of its inputs the key path in (args, kwargs, target)."""

    graph: Graph
    input_paths: Mapping[str, str]


class _Step(torch.nn.Module):
    """What is traced: the model and its loss."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[..., torch.Tensor] | None,
        tell: Callable[[str], None],
        standing_in: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.tell = tell
        self.standing_in = standing_in

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> torch.Tensor:
        try:
            with watched(self.model, self.tell), self.standing_in():
                output = self.model(*args, **kwargs)
                if self.loss_fn is not None:
                    loss = self.loss_fn(output) if target is None else self.loss_fn(output, target)
                else:
                    loss = find_loss(output)
        except (BadInput, TraceError):
            raise
        except Exception as error:  # under a name of ours: torch prints the graph so far for some of its own
            raise ModelRaised from error
        if not isinstance(loss, torch.Tensor):
            raise BadInput(f"the loss is a {type(loss).__name__}; it must be a tensor with one element")
        if loss.numel() != 1:
            raise BadInput(f"the loss has shape {list(loss.shape)}; it must be one number, for example its mean")
        return loss if loss.dim() == 0 else loss.reshape(())


def find_loss(output: Any) -> torch.Tensor:
    """The loss a model returns: the output itself, its ``loss`` attribute or entry, or the first element of a tuple."""
    candidates = [output, getattr(output, "loss", None)]
    if isinstance(output, Mapping):
        candidates.append(output.get("loss"))
    if isinstance(output, tuple | list) and output:
        candidates.append(output[0])
    for candidate in candidates:
        if isinstance(candidate, torch.Tensor) and candidate.numel() == 1 and candidate.is_floating_point():
            return candidate
    raise BadInput(
        "the model returns no loss: pass loss_fn=..., called as loss_fn(output, target), "
        "or give the model what it needs to return one (Hugging Face: example_kwargs with labels=...)"
    )


def trace(
    model: torch.nn.Module,
    batch: Batch,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    global_batch: int | None = None,
    samplewise: Any = (),
    example: Batch | None = None,
    weights: torch.nn.Module | None = None,
    not_batched: Collection[str] = (),
) -> Traced:
    """Trace one training step. ``not_batched``: key paths of inputs whose dim 0 is not the batch, however long it is.

    A module that cannot be traced is kept as one operator, where one forward pass on real tensors can tell what it takes
    and gives. ``samplewise``: paths of such modules (patterns; True: all) that treat each row of the batch alone.
    ``example``: the batch with its values, where ``batch`` has none. ``weights``: the model whose weights ``model``, a
    copy of it, should have.

    Raises TraceError naming the place when the model cannot be traced, BadInput when the loss is not one number.
    """
    refuse_modes()
    refuse_hooks(model)
    register_dataclasses((batch.args, dict(batch.kwargs), batch.target))
    alone = opaque.check_samplewise(model, samplewise)
    arguments = pytree.tree_map(_stand_in, (batch.args, dict(batch.kwargs), batch.target))
    size = global_batch or batch_size(arguments, not_batched)
    kept = opaque.known_from_the_start(model)
    first: Untraceable | None = None
    for _ in range(MOST_TRACES):
        notes: list[str] = []
        try:
            calls: Calls = {}
            if kept:
                opaque.check_values(model if weights is None else weights, example or batch, kept, first)
                if weights is not None:
                    opaque.take_values(model, weights)
                    weights = None
                calls = _record(model, example or batch, kept, alone, first)
            standing_in = partial(opaque.standing_in, model, calls, alone, size)
            step = _Step(model, loss_fn, notes.append, standing_in)
            with attributes_kept(model):
                traced = _to_graph(model, _export(step, arguments), arguments, size, not_batched)
        except Untraceable as error:
            first = first or error
            path = opaque.blamed(error, model, kept)
            if path is None:
                either = "" if error is first else f"\nIt cannot be kept as one operator either: {error}"
                raise TraceError(f"{first}{either}") from error
            kept = opaque.with_module(model, kept, path, opaque.reason(error))
            continue
        told = [opaque.note(path, why, opaque.matches(path, alone)) for path, why in kept.items()]
        return replace(traced, graph=replace(traced.graph, notes=tuple(dict.fromkeys((*told, *notes)))))
    raise TraceError(str(first)) from first


def _record(
    model: torch.nn.Module, batch: Batch, kept: Collection[str], samplewise: Sequence[str], first: Exception | None
) -> Calls:
    try:
        alone = [path for path in kept if opaque.matches(path, samplewise)]
        return record(model, batch.args, batch.kwargs, tuple(kept), alone)
    except (BadInput, TraceError):
        raise
    except Exception as error:  # the model does not run; a trace has said why, if there was one
        raise TraceError(str(first or trace_failure(error))) from error


def _stand_in(value: Any) -> Any:
    """A tensor of its own for each input: torch.export takes two inputs that are one object for one input."""
    return torch.empty_like(value, requires_grad=False) if isinstance(value, torch.Tensor) else value


def is_among(path: str, paths: Collection[str]) -> bool:
    """Whether a key path is one of ``paths``, or inside it."""
    return any(path == each or path.startswith((each + "[", each + ".")) for each in paths)


def batch_size(arguments: Any, not_batched: Collection[str] = ()) -> int:
    """Dim 0 of the first tensor with a dim."""
    for path, leaf in pytree.tree_flatten_with_path(arguments)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and not is_among(pytree.keystr(path), not_batched):
            return int(leaf.shape[0])
    raise BadInput("the example batch holds no tensor with a batch dim; pass example_inputs=(tensor, ...)")


def _export(step: _Step, arguments: tuple[Any, ...]) -> torch.export.ExportedProgram:
    try:
        with quietly():
            exported = torch.export.export(step, arguments, strict=False)
            refuse_unknown_shapes(exported.graph)
            refuse_unseen_writes(exported)
            _detach_no_grad_regions(exported)
            return exported if _is_functional(exported.graph) else exported.run_decompositions({})
    except (BadInput, TraceError):
        raise
    except Exception as error:
        cause = error.__cause__ if isinstance(error, ModelRaised) and error.__cause__ is not None else error
        raise trace_failure(cause) from cause


def _is_functional(graph: torch.fx.Graph) -> bool:
    """Whether no operator writes into its arguments, so that decomposition, half the time of a trace, has nothing to do."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            if node.op == "get_attr":
                return False
            continue
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
            return False
        if str(target).split(".")[1] in WRITES_UNSEEN:
            return False
    return True


def _detach_no_grad_regions(exported: torch.export.ExportedProgram) -> None:
    """A ``no_grad`` region is a higher-order call that decomposition inlines: detach what leaves it first."""
    graph = exported.graph
    for node in list(graph.nodes):
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and node.args[0] is False:
            for result in [user for user in node.users if user.target is operator.getitem]:
                with graph.inserting_after(result):
                    detached = graph.call_function(torch.ops.aten.detach.default, (result,))
                detached.meta = dict(result.meta)
                result.replace_all_uses_with(detached, delete_user_cb=lambda user, keep=detached: user is not keep)
    exported.graph_module.recompile()


# --- from torch.fx to Graph -------------------------------------------------------------------------------------------


def _to_graph(
    model: torch.nn.Module,
    exported: torch.export.ExportedProgram,
    arguments: tuple[Any, ...],
    size: int,
    not_batched: Collection[str],
) -> Traced:
    leaves, paths = _leaves(model, exported, arguments, size, not_batched)
    reader = _Reader({leaf.name: leaf.value for leaf in leaves.values()})
    for placeholder, leaf in leaves.items():
        reader.names[placeholder] = leaf.name
    for spec in exported.graph_signature.input_specs:
        if spec.arg.name not in leaves and spec.kind.name == "CONSTANT_TENSOR":
            name = identifier(_strip(spec.target).replace("lifted_tensor", "constant"))
            reader.names[spec.arg.name] = reader.constant(name, exported.constants[spec.target or ""])
    for fx_node in exported.graph.nodes:
        if fx_node.op == "call_function":
            try:
                reader.read(fx_node)
            except Untraceable as error:
                error.modules = modules_of(fx_node)
                raise
        elif fx_node.op == "get_attr":
            raise Untraceable(f"the model calls {fx_node.target!r} as a whole", modules_of(fx_node))
    outputs = [n for n in exported.graph.nodes if n.op == "output"][0].args[0]
    loss, writes = "", []
    for spec, result in zip(exported.graph_signature.output_specs, outputs, strict=True):
        if spec.kind.name == "USER_OUTPUT":
            loss = reader.names[result.name]
        elif spec.kind.name in ("BUFFER_MUTATION", "USER_INPUT_MUTATION"):
            written = next((x for x in leaves.values() if x.target == _strip(spec.target)), None)
            if written is None or written.kind != "buffer":
                raise TraceError(f"the model writes into its input {spec.target!r}; return the new value instead")
            writes.append((written.name, reader.detached(reader.names[result.name])))
        elif spec.kind.name == "PARAMETER_MUTATION":
            raise TraceError(
                f"the model writes into its parameter {_strip(spec.target)!r} in forward; do that between steps"
            )
    unique = tuple(dict.fromkeys(leaves.values()))
    graph = normalise(Graph(unique, tuple(reader.nodes), loss, tuple(writes), size))
    if not graph.values[loss].differentiable:
        raise BadInput("the loss does not depend on any trainable parameter; there is nothing to train")
    return Traced(graph, paths)


def _strip(target: str | None) -> str:
    return (target or "").removeprefix("model.")


def _leaves(
    model: torch.nn.Module,
    exported: torch.export.ExportedProgram,
    arguments: tuple[Any, ...],
    size: int,
    not_batched: Collection[str],
) -> tuple[dict[str, Leaf], dict[str, str]]:
    """Placeholder name -> Leaf; placeholders of one shared parameter map to one Leaf."""
    names_of: dict[Any, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(storage_key(parameter), []).append(name)
    key_of = {name: key for key, names in names_of.items() for name in names}
    parameters, buffers = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_buffers())
    placeholders = {n.name: n for n in exported.graph.nodes if n.op == "placeholder"}
    flat = [(pytree.keystr(path), value) for path, value in pytree.tree_flatten_with_path(arguments)[0]]
    user_inputs = iter(flat)
    leaves: dict[str, Leaf] = {}
    by_key: dict[Any, Leaf] = {}
    paths: dict[str, str] = {}
    taken: set[str] = set()

    def unique(name: str) -> str:
        candidate, n = name, 1
        while candidate in taken or candidate in SOURCE_NAMES:
            candidate, n = f"{name}_{n}", n + 1
        taken.add(candidate)
        return candidate

    for spec in exported.graph_signature.input_specs:
        placeholder, kind = spec.arg.name, spec.kind.name
        fake = placeholders[placeholder].meta.get("val") if placeholder in placeholders else None
        target = _strip(spec.target)
        if kind == "PARAMETER":
            key = key_of[target]
            if key not in by_key:
                first, *aliases = names_of[key]
                trainable = parameters[first].requires_grad
                value = _value(unique(identifier(first)), fake, trainable)
                by_key[key] = Leaf("parameter", first, value, trainable, aliases=tuple(aliases))
            leaves[placeholder] = by_key[key]
        elif kind == "BUFFER" or (kind == "CONSTANT_TENSOR" and target in buffers):
            leaves[placeholder] = Leaf("buffer", target, _value(unique(identifier(target)), fake, False))
        elif kind == "CONSTANT_TENSOR":
            if _is_attribute(model, target) or exported.constants[spec.target or ""].is_meta:
                leaves[placeholder] = Leaf("constant", target, _value(unique(identifier(target)), fake, False))
        elif kind == "USER_INPUT":
            path, _ = next(user_inputs)
            if not isinstance(fake, torch.Tensor):
                continue
            name = unique(_input_name(path))
            value = _value(name, fake, False)
            batched = fake.dim() > 0 and int(fake.shape[0]) == size and not is_among(path, not_batched)
            leaves[placeholder] = Leaf("input", path, value, batched=batched)
            paths[name] = path
        else:
            raise TraceError(f"the model uses an input of kind {kind}, which is not supported")
    return leaves, paths


RESERVED_NAMES = frozenset(
    {"self", "torch", "aten", "F", "convert", "tp", "dp", "device", "rng", "micro_batch", "math"}
)


def storage_key(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are the same memory seen the same way."""
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return id(tensor)
    return (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def identifier(text: str) -> str:
    """A Python name for a dotted path."""
    name = "".join(c if c.isalnum() else "_" for c in text).strip("_")
    return name if name and not name[0].isdigit() else f"w_{name}"


def _input_name(path: str) -> str:
    """A readable name for '[0][0]' (first positional), '[1]["labels"]' (keyword) or '[2]' (target)."""
    if path.startswith("[2]"):
        return identifier("target" + path[3:])
    if path.startswith("[1]"):
        return identifier(path[3:])
    return identifier("x" + path[3:]) if path != "[0][0]" else "x"


def _value(name: str, fake: torch.Tensor | None, differentiable: bool) -> Value:
    if fake is None:
        raise TraceError(f"tensor {name!r} has no shape in the traced graph")
    return Value(name, tuple(int(s) for s in fake.shape), str(fake.dtype).removeprefix("torch."), differentiable)


class _Reader:
    """Reads fx nodes into Nodes, one after the other."""

    def __init__(self, values: dict[str, Value]) -> None:
        self.values = values
        self.names: dict[str, str] = {}  # fx node name -> value name
        self.parts: dict[str, dict[int, str]] = {}  # fx node with several results -> index -> value name
        self.nodes: list[Node] = []

    def read(self, fx_node: torch.fx.Node) -> None:
        if fx_node.target is operator.getitem:
            source, index = fx_node.args
            part = self.parts[source.name].get(index)  # type: ignore[union-attr, index, arg-type]
            if part is not None:
                self.names[fx_node.name] = part
            return
        op = str(fx_node.target)
        if op in SKIPPED_OPS:
            return
        if op == opaque.OPERATOR:
            self.opaque(fx_node)
            return
        if op in IDENTITY_OPS:
            self.names[fx_node.name] = self.names[fx_node.args[0].name]  # type: ignore[union-attr, index]
            return
        if op == "aten.broadcast_tensors.default":
            self.broadcast(fx_node)
            return
        args = tuple(self.argument(a) for a in fx_node.args)
        kwargs = tuple((k, self.argument(v)) for k, v in fx_node.kwargs.items() if k not in DROPPED_KEYWORDS)
        op, args, kwargs, keep = _normalise(op, args, kwargs)
        module = _module_path(fx_node)
        results: Any = fx_node.meta["val"]
        base = op.split(".")[1] if "." in op else op
        if base in CASTS or op == "aten.dropout.default":
            original = self.values[args[0].name]
            result = _value(fx_node.name, results, False)
            dropped = op == "aten.dropout.default" and (args[1] == 0 or not args[2])
            if dropped or (base in CASTS and result.dtype == original.dtype):
                self.names[fx_node.name] = original.name
                return
            if base in CASTS:
                op, args, kwargs = "aten._to_copy.default", args[:1], (("dtype", Symbol(f"torch.{result.dtype}")),)
            else:
                op, args, kwargs = "dropout", args[:2], ()
        if base in ("squeeze", "flatten", "unflatten"):
            op, args, kwargs = "aten.view.default", (args[0], tuple(int(s) for s in results.shape)), ()
        if isinstance(results, torch.Tensor):
            name = self.unique(fx_node.name)
            self.names[fx_node.name] = name
            outputs = [_value(name, results, False)]
        else:
            parts = {}
            outputs = []
            for index in keep if keep is not None else range(len(results)):
                if results[index] is None:
                    continue
                name = self.unique(fx_node.name if keep is not None and not outputs else f"{fx_node.name}_{index}")
                parts[index] = name
                outputs.append(_value(name, results[index], False))
                self.values[name] = outputs[-1]
            self.parts[fx_node.name] = parts
        node = Node(op, args, tuple(outputs), kwargs, module)
        grad = any(self.values[name].differentiable for name in node.operands) and op not in NON_DIFFERENTIABLE
        outputs = [
            replace(v, differentiable=grad and _is_floating(v) and i not in _STATISTICS.get(op, ()))
            for i, v in enumerate(outputs)
        ]
        self.values.update((v.name, v) for v in outputs)
        self.nodes.append(Node(op, args, tuple(outputs), kwargs, module))

    def opaque(self, fx_node: torch.fx.Node) -> None:
        """A call of a module that is kept whole."""
        node = opaque.read_call(fx_node, self.argument, self.unique)
        grad = any(self.values[name].differentiable for name in node.operands)
        node = replace(node, outputs=tuple(replace(v, differentiable=v.differentiable and grad) for v in node.outputs))
        self.parts[fx_node.name] = {i: value.name for i, value in enumerate(node.outputs)}
        self.values.update((value.name, value) for value in node.outputs)
        self.nodes.append(node)

    def detached(self, name: str) -> str:
        """The value called ``name`` without a gradient: a buffer keeps none."""
        value = self.values[name]
        if not value.differentiable:
            return name
        result = replace(value, name=self.unique(f"{name}_detached"), differentiable=False)
        self.values[result.name] = result
        self.nodes.append(Node("aten.detach.default", (Ref(name),), (result,)))
        return result.name

    def constant(self, name: str, tensor: torch.Tensor) -> str:
        """A tensor the code made or found, such as class weights known to loss_fn: its numbers, in the graph."""
        if tensor.numel() > MOST_CONSTANT_ELEMENTS:
            raise TraceError(
                f"the model or loss_fn uses a tensor of shape {list(tensor.shape)} that is no parameter, buffer or input; "
                "register it as a buffer of the model"
            )
        if tensor.is_complex():
            parts = self.constant(f"{name}_parts", torch.view_as_real(tensor.resolve_conj()))
            value = _value(self.unique(name), tensor, False)
            self.values[value.name] = value
            self.nodes.append(Node("aten.view_as_complex.default", (Ref(parts),), (value,)))
            return value.name
        value = _value(self.unique(name), tensor, False)
        self.values[value.name] = value
        options = (("dtype", Symbol(str(tensor.dtype))), ("device", Symbol("device")))
        self.nodes.append(Node("tensor", (self.argument(tensor.tolist()),), (value,), options))
        return value.name

    def broadcast(self, fx_node: torch.fx.Node) -> None:
        """Each result is its tensor, expanded where its shape differs."""
        parts: dict[int, str] = {}
        for index, (source, result) in enumerate(zip(fx_node.args[0], fx_node.meta["val"], strict=True)):  # type: ignore[arg-type]
            value = self.values[self.names[source.name]]  # type: ignore[union-attr]
            shape = tuple(int(s) for s in result.shape)
            if shape != value.shape:
                expanded = Value(self.unique(f"{fx_node.name}_{index}"), shape, value.dtype, value.differentiable)
                self.values[expanded.name] = expanded
                self.nodes.append(
                    Node("aten.expand.default", (Ref(value.name), shape), (expanded,), (), _module_path(fx_node))
                )
                value = expanded
            parts[index] = value.name
        self.parts[fx_node.name] = parts

    def unique(self, name: str) -> str:
        candidate, n = name, 1
        while candidate in self.values or candidate in RESERVED_NAMES:
            candidate, n = f"{name}_{n}", n + 1
        return candidate

    def argument(self, value: Any) -> Argument:
        if isinstance(value, torch.fx.Node):
            return Ref(self.names[value.name])
        if isinstance(value, list | tuple):
            return tuple(self.argument(v) for v in value)
        if isinstance(value, torch.dtype | torch.memory_format):
            return Symbol(str(value))
        if isinstance(value, torch.device):
            return Symbol("device")
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, complex):
            return Symbol(repr(value))
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise Untraceable("the model's shapes depend on the values of its input; give it fixed shapes")
        raise Untraceable(f"an operator takes an argument of type {type(value).__name__}, which is not supported")


def _is_floating(value: Value) -> bool:
    return value.dtype.startswith(("float", "bfloat", "complex"))


NON_DIFFERENTIABLE = frozenset(
    {"aten.detach.default", "aten.argmax.default", "aten.zeros_like.default", "aten.ones_like.default"}
)
_STATISTICS = {"batch_norm": (1, 2)}


def _normalise(
    op: str, args: tuple[Argument, ...], kwargs: tuple[tuple[str, Argument], ...]
) -> tuple[str, tuple[Argument, ...], tuple[tuple[str, Argument], ...], tuple[int, ...] | None]:
    """Operators under the name the rules use, and which of their results are kept (None: all)."""
    if op == "aten._native_batch_norm_legit_functional.default":
        return "batch_norm", args, kwargs, (0, 3, 4)
    if op == "aten.native_dropout.default":
        return "dropout", args[:2], kwargs, (0,)
    if op == "aten.scaled_dot_product_attention.default" and dict(kwargs).get(
        "dropout_p", args[4] if len(args) > 4 else 0.0
    ):
        return "attention_with_dropout", args, kwargs, None
    if op in ("aten._unsafe_view.default", "aten.reshape.default"):
        return "aten.view.default", args, kwargs, None
    return op, args, kwargs, None


def _module_path(fx_node: torch.fx.Node) -> str:
    stack = fx_node.meta.get("nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    return _strip(path) if path != "model" else ""


def _is_attribute(model: torch.nn.Module, target: str) -> bool:
    owner: Any = model
    for part in target.split("."):
        owner = getattr(owner, part, None)
    return isinstance(owner, torch.Tensor)


def tensors_by_target(model: torch.nn.Module, targets: Iterable[str]) -> dict[str, torch.Tensor]:
    """Parameters and buffers of ``model`` (constants by attribute path), by name."""
    found: dict[str, torch.Tensor] = {}
    for target in targets:
        owner: Any = model
        for part in target.split("."):
            owner = getattr(owner, part)
        found[target] = owner
    return found
