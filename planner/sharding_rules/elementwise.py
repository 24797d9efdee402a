"""Operators that treat every element alone, with broadcasting; and those that draw every element alone.

Dims are matched from the right; a dim of size one that is stretched has no letter there.
"""

from __future__ import annotations

from collections.abc import Mapping

from planner.ir.graph import Node, Ref, Value
from planner.sharding_rules.rule import Dim, Dims, Rule

UNARY = frozenset(
    "abs absolute acos acosh arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atanh bitwise_not ceil celu "
    "clamp clamp_max clamp_min clip cos cosh deg2rad elu erf erfc erfinv exp exp2 expm1 fix float_power floor frac "
    "full_like gelu hardshrink hardsigmoid hardswish hardtanh imag isfinite isinf isnan leaky_relu lgamma log log10 "
    "log1p log2 log_sigmoid logical_not logit mish nan_to_num ones_like pow reciprocal relu relu6 round rsqrt selu "
    "sgn sigmoid sign silu sin sinc sinh softplus softshrink softsign sqrt square tan tanh tanhshrink threshold trunc "
    "zeros_like empty_like".split()
)
# Each draws the elements of a tensor like its operand; shards draw numbers of their own.
DRAWS = frozenset(
    "bernoulli cauchy exponential geometric log_normal poisson rand_like randint_like randn_like rrelu uniform".split()
)
BINARY = frozenset(
    "__and__ __iand__ __ior__ __or__ __xor__ addcdiv addcmul arctan2 atan2 bitwise_and bitwise_left_shift bitwise_or "
    "bitwise_right_shift bitwise_xor copysign eq floor_divide fmax fmin fmod ge greater greater_equal gt heaviside "
    "hypot le lerp less less_equal logaddexp logical_and logical_or logical_xor lt masked_fill maximum minimum ne "
    "not_equal remainder xlogy".split()
)
LINEAR_UNARY = frozenset("neg _to_copy to detach dropout negative positive real type_as".split())
ADDITIONS = frozenset("add sub rsub subtract".split())
PRODUCTS = frozenset("mul multiply".split())
QUOTIENTS = frozenset("div divide true_divide".split())
OPERATORS = UNARY | DRAWS | BINARY | LINEAR_UNARY | ADDITIONS | PRODUCTS | QUOTIENTS | {"where"}


def rule(node: Node, values: Mapping[str, Value], base: str) -> Rule | None:
    """The rule of an element-wise operator called ``base``."""
    shape = node.output.shape
    operands = tuple(broadcast_dims(values[name].shape, shape) for name in node.operands)
    if any(dims is None for dims in operands):
        return None
    output = broadcast_dims(shape, shape)
    assert output is not None
    sizes = {f"d{i}": size for i, size in zip(range(len(shape), 0, -1), shape, strict=True)}
    return Rule(
        tuple(dims for dims in operands if dims is not None),
        tuple(output for _ in node.outputs),
        sizes,
        linear=_linear(node, base),
    )


def broadcast_dims(shape: tuple[int, ...], full: tuple[int, ...]) -> Dims | None:
    """Letters of a tensor of ``shape`` broadcast to ``full``: d1 is the last dim, d2 the one before. None: no fit."""
    if len(shape) > len(full):
        return None
    dims: list[Dim] = []
    for i, size in zip(range(len(shape), 0, -1), shape, strict=True):
        if size == full[-i]:
            dims.append((f"d{i}",))
        elif size == 1:
            dims.append(())
        else:
            return None
    return tuple(dims)


def _linear(node: Node, base: str) -> tuple[frozenset[int], ...]:
    tensors = len(node.operands)
    if base == "_to_copy" or base in LINEAR_UNARY:
        return (frozenset({0}),)
    if base in ADDITIONS:
        adds_nothing = tensors == 1 and any(item == 0 for item in node.args[:2] if not isinstance(item, Ref))
        return (frozenset({0, 1}),) if tensors == 2 else (frozenset({0}),) if adds_nothing else ()
    if base in PRODUCTS:
        return tuple(frozenset({i}) for i in range(tensors))
    if base in QUOTIENTS:
        rounds = dict(node.kwargs).get("rounding_mode")
        return (frozenset({0}),) if isinstance(node.args[0], Ref) and not rounds else ()
    if base == "where" and tensors == 3:
        return (frozenset({1, 2}),)
    return ()


def prelu(node: Node, values: Mapping[str, Value]) -> Rule:
    """prelu(x [n, c, ..], weight [c] or [1]): the weight lies along dim 1, not the last."""
    shape, weight = values[node.operands[0]].shape, values[node.operands[1]].shape
    dims = tuple((f"d{i}",) for i in range(len(shape)))
    along = ((),) if weight == (1,) and shape[1:2] != (1,) else (dims[1] if len(shape) > 1 else (),)
    sizes = {f"d{i}": size for i, size in enumerate(shape)}
    return Rule((dims, along if weight else ()), (dims,), sizes)
