"""Nodes as Python text: the familiar spelling where there is one, ``aten.op.overload(...)`` otherwise."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping

from planner.ir.graph import MODULE, Argument, Node, Ref, Symbol
from planner.ir.layout import Pair, conversion

WORDS = {
    "all_reduce": "all-reduce", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "all_to_all": "all-to-all",
    "keep": "keep on one rank", "none": "nothing", "slice": "slice", "pad": "pad",
}  # fmt: skip
INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "__and__": "&", "__or__": "|", "eq": "==", "ne": "!=", "lt": "<",
         "le": "<=", "gt": ">", "ge": ">=", "bitwise_and": "&", "bitwise_or": "|"}  # fmt: skip
METHODS = frozenset(
    "transpose permute unsqueeze expand repeat split split_with_sizes chunk unbind t detach rsqrt cos sin tanh exp sqrt".split()
)
FUNCTIONS = {
    "linear": "F.linear", "embedding": "F.embedding", "layer_norm": "F.layer_norm", "gelu": "F.gelu", "silu": "F.silu",
    "relu": "F.relu", "conv1d": "F.conv1d", "conv2d": "F.conv2d", "conv3d": "F.conv3d", "addmm": "torch.addmm", "mm": "torch.mm",
    "bmm": "torch.bmm", "matmul": "torch.matmul", "cat": "torch.cat", "stack": "torch.stack", "softmax": "torch.softmax",
    "max_pool2d": "F.max_pool2d", "adaptive_avg_pool2d": "F.adaptive_avg_pool2d", "sigmoid": "torch.sigmoid",
    "group_norm": "F.group_norm",
}  # fmt: skip
LINE = 118

Name = Callable[[str], str]


def argument_text(argument: Argument, name: Name) -> str:
    if isinstance(argument, Ref):
        return name(argument.name)
    if isinstance(argument, Symbol):
        return argument.name
    if isinstance(argument, tuple):
        return "[" + ", ".join(argument_text(item, name) for item in argument) + "]"
    if isinstance(argument, float) and not math.isfinite(argument):
        return f'float("{argument}")'
    if isinstance(argument, str):
        return f'"{argument}"'
    return repr(argument)


def _sizes(argument: Argument, name: Name) -> str:
    return ", ".join(argument_text(item, name) for item in argument)


def expression(node: Node, name: Name, site: str = "") -> str:
    """The right-hand side for ``node``; ``name`` spells tensors. ``site``: text of the number of a random operator's place."""
    base = node.base
    if node.op == "convert":
        return _convert(node, name)
    if node.op in OWN:
        return OWN[node.op](node, name, site)
    if node.is_random:
        return _seeded(node, _operator(node), site, _call(node, name, skip=frozenset({"axes"})))
    args = node.args
    kwargs = dict(node.kwargs)
    if base in INFIX and len(args) == 2 and not kwargs:
        return f"{_atom(args[0], name)} {INFIX[base]} {_atom(args[1], name)}"
    if base == "rsub" and len(args) == 2 and not kwargs:
        return f"{_atom(args[1], name)} - {_atom(args[0], name)}"
    if base == "neg":
        return f"-{_atom(args[0], name)}"
    if base == "pow" and len(args) == 2:
        return f"{_atom(args[0], name)} ** {_atom(args[1], name)}"
    if base == "view":
        return f"{name(args[0].name)}.reshape({_sizes(args[1], name) or '()'})"
    if base in ("permute", "expand", "repeat") and not kwargs:
        return f"{name(args[0].name)}.{base}({_sizes(args[1], name)})"
    if base == "slice" and len(args) >= 3 and len(args) < 5:
        return _slice(node, name)
    if base == "select":
        return _index(node, str(args[2]), name)
    if base == "index" and isinstance(args[1], tuple):
        inside = ", ".join(":" if item is None else argument_text(item, name) for item in args[1])
        return f"{name(args[0].name)}[{inside}]"
    if base == "scaled_dot_product_attention":
        return f"F.scaled_dot_product_attention({_call(node, name, ATTENTION_NAMES)})"
    if base == "_to_copy" and set(kwargs) <= {"dtype", "device"} and "dtype" in kwargs:
        return f"{name(args[0].name)}.to({kwargs['dtype'].name})"
    if base == "arange" and len(args) == 1:
        return f"torch.arange({_call(node, name)})"
    if base in ("sum", "mean") and kwargs == {}:
        return _reduction(node, base, name)
    if base in METHODS and not kwargs:
        rest = ", ".join(argument_text(a, name) for a in args[1:])
        return f"{name(args[0].name)}.{_METHOD_NAMES.get(base, base)}({rest})"
    if base in FUNCTIONS:
        return _function(node, base, name)
    return f"{_operator(node)}({_call(node, name)})"


def _operator(node: Node) -> str:
    """The operator as the text calls it; those of other libraries by torch.ops."""
    is_ours = node.op.startswith("aten.") or "." not in node.op
    return node.op if is_ours else f"torch.ops.{node.op}"


_METHOD_NAMES = {"split_with_sizes": "split"}
ATTENTION_NAMES = {3: "attn_mask", 4: "dropout_p", 5: "is_causal"}


def _atom(argument: Argument, name: Name) -> str:
    text = argument_text(argument, name)
    return f"({text})" if text.startswith("-") else text


def _call(node: Node, name: Name, keywords: Mapping[int, str] | None = None, skip: frozenset[str] = frozenset()) -> str:
    parts = []
    for i, argument in enumerate(node.args):
        text = argument_text(argument, name)
        keyword = (keywords or {}).get(i)
        parts.append(f"{keyword}={text}" if keyword else text)
    parts += [f"{k}={argument_text(v, name)}" for k, v in node.kwargs if k not in skip]
    return ", ".join(parts)


def _function(node: Node, base: str, name: Name) -> str:
    if base == "layer_norm":
        args = node.args[:5]  # without cudnn_enable
        names = {2: "weight", 3: "bias", 4: "eps"}
        parts = [f"{names[i]}={t}" if i in names else t for i, t in enumerate(argument_text(a, name) for a in args)]
        return f"F.layer_norm({', '.join(parts)})"
    if base == "embedding":
        weight, ids, *options = node.args
        padding = f", padding_idx={options[0]}" if options and options[0] != -1 else ""
        if len(options) > 1 and any(options[1:]):
            return f"{node.op}({_call(node, name)})"
        return f"F.embedding({argument_text(ids, name)}, {argument_text(weight, name)}{padding})"
    if base == "group_norm":
        return f"F.group_norm({', '.join(argument_text(a, name) for a in node.args[:5])})"
    return f"{FUNCTIONS[base]}({_call(node, name)})"


def _reduction(node: Node, base: str, name: Name) -> str:
    subject = name(node.args[0].name)
    if len(node.args) == 1:
        return f"{subject}.{base}()"
    dims = node.args[1]
    if dims is None or dims == ():
        return f"{node.op}({_call(node, name)})"
    text = ", ".join(map(str, dims)) if isinstance(dims, tuple) else str(dims)
    text = text if not isinstance(dims, tuple) or len(dims) == 1 else f"({text})"
    keep = ", keepdim=True" if len(node.args) > 2 and node.args[2] else ""
    return f"{subject}.{base}({text}{keep})"


def _slice(node: Node, name: Name) -> str:
    start = node.args[2] if len(node.args) > 2 else None
    end = node.args[3] if len(node.args) > 3 else None
    end = None if isinstance(end, int) and end >= 2**62 else end
    return _index(node, f"{start or ''}:{'' if end is None else end}", name)


def _index(node: Node, inside: str, name: Name) -> str:
    dim = int(node.args[1])
    if dim < 0:
        return f"{node.op}({_call(node, name)})"
    return f"{name(node.args[0].name)}[{':, ' * dim}{inside}]"


def _axes(node: Node) -> str:
    axes = dict(node.kwargs).get("axes", ())
    return "(" + "".join(f"{axis}, " for axis in axes).rstrip(" ") + ")" if axes else ""


def _convert(node: Node, name: Name) -> str:
    axis, text = str(node.args[1]), str(node.args[2])
    return f'convert({name(node.args[0].name)}, {axis}, "{text}")'


def conversion_comment(node: Node) -> str:
    """What a conversion does, in words: '# all-gather; backward reduce-scatter'."""
    source, target = (Pair.parse(text.strip()) for text in str(node.args[2]).split("->"))
    forward, backward = conversion(source, target)
    if not node.output.differentiable or backward == "none":
        return f"  # {WORDS[forward]}"
    return f"  # {WORDS[forward]}; backward: {WORDS[backward]}"


def _dropout(node: Node, name: Name, site: str) -> str:
    axes = _axes(node)
    return f"dropout({name(node.args[0].name)}, {node.args[1]!r}, rng, {site}{f', axes={axes}' if axes else ''})"


def _attention_with_dropout(node: Node, name: Name, site: str) -> str:
    call = _call(node, name, ATTENTION_NAMES, frozenset({"axes"}))
    return _seeded(node, "F.scaled_dot_product_attention", site, call)


def _seeded(node: Node, function: str, site: str, call: str) -> str:
    axes = _axes(node)
    return f"seeded({function}, rng, {site}{f', {axes}' if axes else ''})({call})"


def _batch_norm(node: Node, name: Name, site: str) -> str:
    axes = _axes(node)
    call = ", ".join(argument_text(a, name) for a in node.args[:8])
    return f"batch_norm({call}{f', axes={axes}' if axes else ''})"


def _cross_entropy_sum(node: Node, name: Name, site: str) -> str:
    return f'F.cross_entropy({_cross_entropy_options(node, name)}, reduction="sum")'


def _vocab_cross_entropy(node: Node, name: Name, site: str) -> str:
    (axis,) = dict(node.kwargs)["axes"]
    return f"vocab_parallel_cross_entropy_sum({_cross_entropy_options(node, name, str(axis))})"


def _cross_entropy_options(node: Node, name: Name, axis: str = "") -> str:
    logits, target, weight, ignore_index, smoothing = node.args
    parts = [name(logits.name), name(target.name), *([axis] if axis else [])]
    if weight is not None:
        parts.append(f"weight={name(weight.name)}")
    if ignore_index != -100:
        parts.append(f"ignore_index={ignore_index}")
    if smoothing:
        parts.append(f"label_smoothing={smoothing!r}")
    return ", ".join(parts)


def _cross_entropy_count(node: Node, name: Name, site: str) -> str:
    target, classes, weight, ignore_index, dtype = node.args
    parts = [name(target.name), str(classes)]
    if weight is not None:
        parts.append(f"weight={name(weight.name)}")
    if ignore_index != -100:
        parts.append(f"ignore_index={ignore_index}")
    return f"cross_entropy_count({', '.join(parts)}, dtype={dtype.name})"


def _vocab_embedding(node: Node, name: Name, site: str) -> str:
    weight, ids, *options = node.args
    (axis,) = dict(node.kwargs)["axes"]
    padding = f", padding_idx={options[0]}" if options and options[0] != -1 else ""
    return f"vocab_parallel_embedding({name(ids.name)}, {name(weight.name)}, {axis}{padding})"


def _grouped_mm(node: Node, name: Name, site: str) -> str:
    return f"grouped_mm({_call(node, name)})"


def _module(node: Node, name: Name, site: str) -> str:
    """A call of a module of the user's: ``self.opaque("router", rng, site, [weights])(x, mask=y)``."""
    own, args, kwargs, states = node.args
    options = dict(node.kwargs)
    parts = [f'"{own}"', "rng", site, argument_text(states, name)]
    axes = _axes(node)
    parts += [f"axes={axes}"] if axes else []
    parts += [f"autocast={options['autocast'].name}"] if "autocast" in options else []
    given = [_tree_text(item, name) for item in args[1:]]
    given += [f"{key}={_tree_text(item, name)}" for key, item in kwargs[1:]]
    return f"self.opaque({', '.join(parts)})({', '.join(given)})"


def _tree_text(tree: Argument, name: Name) -> str:
    """An argument of a module as Python: containers are ('tuple' | 'list' | 'dict', items...)."""
    if not isinstance(tree, tuple):
        return argument_text(tree, name)
    kind, *items = tree
    if kind == "dict":
        return "{" + ", ".join(f"{json.dumps(key)}: {_tree_text(item, name)}" for key, item in items) + "}"
    inside = ", ".join(_tree_text(item, name) for item in items)
    return f"[{inside}]" if kind == "list" else f"({inside},)" if len(items) == 1 else f"({inside})"


def _tensor(node: Node, name: Name, site: str) -> str:
    return f"torch.tensor({_call(node, name)})"


OWN: Mapping[str, Callable[[Node, Name, str], str]] = {
    MODULE: _module,
    "tensor": _tensor,
    "grouped_mm": _grouped_mm,
    "dropout": _dropout,
    "attention_with_dropout": _attention_with_dropout,
    "batch_norm": _batch_norm,
    "batch_norm_over": _batch_norm,
    "cross_entropy_sum": _cross_entropy_sum,
    "vocab_cross_entropy": _vocab_cross_entropy,
    "cross_entropy_count": _cross_entropy_count,
    "vocab_embedding": _vocab_embedding,
}
