"""What the cost models have to know of an operator: its plain name, the arguments that matter, sizes, and aliases.

A tensor is a ``(shape, dtype name)`` pair; the arguments that are no tensors come as a ``Hint``, (name, value) pairs.
Operators of namespaces other than ``aten`` keep their namespace, so that a user's ``mylib.linear`` is not taken for
ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

Shape = tuple[int, ...]
Tensor = tuple[Shape, str]
Hint = tuple[tuple[str, object], ...]

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
HALF = frozenset({"float16", "bfloat16"})

VIEWS = frozenset({
    "view", "_unsafe_view", "reshape", "_reshape_alias", "view_as", "reshape_as", "flatten", "unflatten", "ravel",
    "transpose", "permute", "t", "numpy_T", "matrix_H", "mH", "mT", "T", "H", "adjoint", "swapaxes", "swapdims",
    "movedim", "moveaxis", "expand", "expand_as", "broadcast_to", "slice", "select", "narrow", "unsqueeze", "squeeze",
    "alias", "detach", "split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk", "unbind",
    "diagonal", "unfold", "as_strided", "real", "imag", "view_as_real", "view_as_complex", "_conj", "lift_fresh",
    "hsplit", "vsplit", "dsplit",
})  # fmt: skip
METADATA = frozenset({
    "sym_size", "sym_numel", "sym_stride", "_assert_async", "_assert_scalar", "_assert_tensor_metadata",
})  # fmt: skip
DROPOUTS = frozenset({"dropout", "native_dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"})

# Where the arguments that matter stand, for operators called with positional arguments.
_POSITIONS: Mapping[str, Mapping[str, int]] = {
    "scaled_dot_product_attention": {"dropout_p": 4, "is_causal": 5},
    "convolution": {"transposed": 6},
    "_convolution": {"transposed": 6},
    "dropout": {"p": 1, "train": 2},
    "native_dropout": {"p": 1, "train": 2},
    "alpha_dropout": {"p": 1, "train": 2},
    "feature_dropout": {"p": 1, "train": 2},
    "feature_alpha_dropout": {"p": 1, "train": 2},
    "batch_norm": {"training": 5},
    "native_batch_norm": {"training": 5},
    "_native_batch_norm_legit": {"training": 5},
    "_native_batch_norm_legit_functional": {"training": 5},
    "layer_norm": {"normalized_shape": 1},
    "native_layer_norm": {"normalized_shape": 1},
    "rms_norm": {"normalized_shape": 1},
    "_fused_rms_norm": {"normalized_shape": 1},
    "group_norm": {"num_groups": 1},
    "native_group_norm": {"group": 6},
    "einsum": {"equation": 0},
}


@lru_cache(maxsize=8192)
def base_name(op: str) -> str:
    """``aten.add_.Tensor`` -> ``add``: namespace ``aten``, overload and the mark of in-place operators removed."""
    parts = op.split(".")
    if len(parts) == 1:
        return op
    namespace, name = parts[0], parts[1]
    if name.endswith("_") and not name.startswith("__"):
        name = name[:-1]
    return name if namespace == "aten" else f"{namespace}.{name}"


def argument_hint(
    op: str, args: Sequence[object], kwargs: Mapping[str, object] | Iterable[tuple[str, object]] = ()
) -> Hint:
    """The arguments of a call that change its cost, by name; tensors in ``args`` may be any objects."""
    positions = _POSITIONS.get(base_name(op))
    if positions is None:
        return ()
    named = dict(kwargs)
    found = {name: args[i] for name, i in positions.items() if i < len(args)}
    found.update((name, named[name]) for name in positions if name in named)
    return tuple(sorted((name, tuple(value) if isinstance(value, list) else value) for name, value in found.items()))


def hinted(hint: Hint, name: str, default: object = None) -> object:
    return next((value for key, value in hint if key == name), default)


def numel(shape: Shape) -> int:
    return math.prod(shape)


def size_bytes(tensor: Tensor) -> int:
    return math.prod(tensor[0]) * DTYPE_BYTES[tensor[1]]


def is_floating(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat", "complex"))


def drops_nothing(name: str, hint: Hint) -> bool:
    """A dropout that passes its input through: not training, or probability 0."""
    return name in DROPOUTS and (hinted(hint, "train", True) is False or hinted(hint, "p", 0.5) == 0)


def is_view(op: str, inputs: tuple[Tensor, ...] = (), outputs: tuple[Tensor, ...] = (), hint: Hint = ()) -> bool:
    """Whether the outputs share the storage of the first input (views, idle dropouts, casts to the same dtype).

    A ``reshape`` is counted as a view though it copies when strides do not allow one.
    """
    name = base_name(op)
    if name in VIEWS or drops_nothing(name, hint):
        return True
    return name in ("to", "type_as") and bool(inputs) and bool(outputs) and inputs[0] == outputs[0]


def attention_is_fused(dtype: str, kind: str, hint: Hint = (), mask_needs_grad: bool = False) -> bool:
    """Whether scaled_dot_product_attention runs without storing its (queries x keys) matrix.

    On GPUs the flash and memory-efficient kernels take every floating dtype but float64; on CPUs the flash kernel takes
    all of them, but no dropout. Neither gives a gradient of the mask.
    """
    if mask_needs_grad:
        return False
    if kind == "gpu":
        return dtype != "float64"
    return not hinted(hint, "dropout_p", 0.0)
