"""What autograd keeps, compared with what PyTorch packs on a CPU; the state of ZeRO by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from costmodels.memory import OPTIMIZERS, Saved, gathered_bytes, saved_for_backward_bytes, state_bytes
from costmodels.operators import Tensor, argument_hint, size_bytes
from costmodels.software import Software

ATEN = torch.ops.aten
Call = tuple[Any, ...]


def g(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A positive tensor that needs a gradient."""
    return (torch.rand(*shape, dtype=dtype) + 0.1).requires_grad_()


def c(*shape: int) -> torch.Tensor:
    """A tensor that needs none."""
    return torch.rand(*shape)


def ids(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape)


UNARY = (
    "relu tanh sigmoid exp exp2 expm1 sqrt rsqrt reciprocal log log1p sin cos tan abs square erf gelu glu silu "
    "softplus mish hardswish hardsigmoid elu selu leaky_relu relu6 hardtanh neg clone floor sign triu tril sum mean "
    "norm prod linalg_vector_norm detach std var"
).split()


def cases() -> dict[str, Callable[[], Call]]:
    table: dict[str, Callable[[], Call]] = {}
    for name in UNARY:
        op = getattr(ATEN, name)
        table[name] = lambda op=op: (op.Scalar if op is ATEN.norm else op.default, g(4, 8, 16))
    for name in ("mul", "div", "add", "sub"):
        op = getattr(ATEN, name).Tensor
        table[f"{name}, both"] = lambda op=op: (op, g(4, 8), g(4, 8))
        table[f"{name}, left"] = lambda op=op: (op, g(4, 8), c(4, 8))
        table[f"{name}, right"] = lambda op=op: (op, c(4, 8), g(8))
        table[f"{name}, number"] = lambda op=op: (op, g(4, 8), 2.0)
    for dtype in (torch.float32, torch.bfloat16):
        x = f", {dtype}"
        table["layer_norm" + x] = lambda t=dtype: (ATEN.layer_norm.default, g(4, 8, 16, dtype=t), [16], g(16, dtype=t),
                                                   g(16, dtype=t))  # fmt: skip
        table["rms_norm" + x] = lambda t=dtype: (ATEN.rms_norm.default, g(4, 64, 16, dtype=t), [16], g(16, dtype=t))
        table["group_norm" + x] = lambda t=dtype: (ATEN.group_norm.default, g(4, 8, 5, 5, dtype=t), 2, g(8, dtype=t),
                                                   g(8, dtype=t))  # fmt: skip
    qkv = (2, 4, 64, 32)
    sdpa = ATEN.scaled_dot_product_attention.default
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        table[f"sdpa, {dtype}"] = lambda t=dtype: (sdpa, g(*qkv, dtype=t), g(*qkv, dtype=t), g(*qkv, dtype=t))
    norms = (ATEN.batch_norm.default, ATEN.native_batch_norm.default, ATEN._native_batch_norm_legit_functional.default)
    for norm in norms:
        flags = (True, 0.1, 1e-5, False) if norm is norms[0] else (True, 0.1, 1e-5)
        table[f"{norm}"] = lambda norm=norm, flags=flags: (norm, g(4, 8, 5, 5), g(8), g(8), c(8), c(8), *flags)
    table |= {
        "softmax": lambda: (ATEN.softmax.int, g(4, 8), -1),
        "log_softmax": lambda: (ATEN.log_softmax.int, g(4, 8), -1),
        "pow": lambda: (ATEN.pow.Tensor_Scalar, g(4, 8), 2),
        "pow of tensors": lambda: (ATEN.pow.Tensor_Tensor, g(4, 8), g(4, 8)),
        "clamp": lambda: (ATEN.clamp.default, g(4, 8), 0.0),
        "maximum": lambda: (ATEN.maximum.default, g(4, 8), g(4, 8)),
        "max of two": lambda: (ATEN.max.other, g(4, 8), g(4, 8)),
        "max over a dim": lambda: (ATEN.max.dim, g(4, 8), -1),
        "max of all": lambda: (ATEN.max.default, g(4, 8)),
        "amax": lambda: (ATEN.amax.default, g(4, 8), [-1]),
        "topk": lambda: (ATEN.topk.default, g(4, 8), 2),
        "sort": lambda: (ATEN.sort.default, g(4, 8)),
        "logsumexp": lambda: (ATEN.logsumexp.default, g(4, 8), [-1]),
        "cumsum": lambda: (ATEN.cumsum.default, g(4, 8), -1),
        "comparison": lambda: (ATEN.lt.Scalar, g(4, 8), 0.5),
        "linear": lambda: (ATEN.linear.default, g(4, 16), g(32, 16), g(32)),
        "linear, frozen weight": lambda: (ATEN.linear.default, g(4, 16), c(32, 16)),
        "linear, first layer": lambda: (ATEN.linear.default, c(4, 16), g(32, 16), g(32)),
        "mm": lambda: (ATEN.mm.default, g(4, 8), g(8, 5)),
        "bmm": lambda: (ATEN.bmm.default, g(2, 4, 8), g(2, 8, 5)),
        "addmm": lambda: (ATEN.addmm.default, g(5), g(4, 8), g(8, 5)),
        "baddbmm": lambda: (ATEN.baddbmm.default, g(2, 4, 5), g(2, 4, 8), g(2, 8, 5)),
        "matmul": lambda: (ATEN.matmul.default, g(2, 3, 4, 8), g(2, 3, 8, 5)),
        "einsum": lambda: (ATEN.einsum.default, "bij,bjk->bik", [g(2, 4, 8), g(2, 8, 5)]),
        "addcmul": lambda: (ATEN.addcmul.default, g(4, 8), g(4, 8), g(4, 8)),
        "lerp": lambda: (ATEN.lerp.Scalar, g(4, 8), g(4, 8), 0.5),
        "layer_norm without weight": lambda: (ATEN.layer_norm.default, g(4, 8, 16), [8, 16], None, None),
        "native_layer_norm": lambda: (ATEN.native_layer_norm.default, g(4, 8, 16), [16], g(16), g(16), 1e-5),
        "batch_norm in evaluation": lambda: (
            ATEN.batch_norm.default, g(4, 8, 5, 5), g(8), g(8), c(8), c(8), False, 0.1, 1e-5, False
        ),
        "instance_norm": lambda: (
            ATEN.instance_norm.default, g(4, 8, 5, 5), g(8), g(8), None, None, True, 0.1, 1e-5, False
        ),
        "sdpa, causal": lambda: (sdpa, g(*qkv), g(*qkv), g(*qkv), None, 0.0, True),
        "sdpa, dropout": lambda: (sdpa, g(*qkv), g(*qkv), g(*qkv), None, 0.1),
        "sdpa, mask": lambda: (sdpa, g(*qkv), g(*qkv), g(*qkv), c(64, 64)),
        "sdpa, boolean mask": lambda: (sdpa, g(*qkv), g(*qkv), g(*qkv), c(2, 1, 64, 64) > 0.5),
        "sdpa, learned mask": lambda: (sdpa, g(*qkv), g(*qkv), g(*qkv), g(64, 64)),
        "cross_entropy": lambda: (ATEN.cross_entropy_loss.default, g(64, 100), ids(100, 64)),
        "cross_entropy, smoothed": lambda: (
            ATEN.cross_entropy_loss.default, g(64, 100), ids(100, 64), None, 1, -100, 0.1
        ),
        "nll_loss": lambda: (ATEN.nll_loss_forward.default, g(32, 10), ids(10, 32), None, 1, -100),
        "mse_loss": lambda: (ATEN.mse_loss.default, g(4, 8), c(4, 8)),
        "l1_loss": lambda: (ATEN.l1_loss.default, g(4, 8, 16), c(4, 8, 16)),
        "smooth_l1_loss": lambda: (ATEN.smooth_l1_loss.default, g(4, 8), c(4, 8)),
        "kl_div": lambda: (ATEN.kl_div.default, g(4, 8), c(4, 8)),
        "binary_cross_entropy": lambda: (ATEN.binary_cross_entropy_with_logits.default, g(4, 8), c(4, 8)),
        "embedding": lambda: (ATEN.embedding.default, g(32, 10), ids(32, 7)),
        "dropout": lambda: (ATEN.dropout.default, g(4, 8), 0.1, True),
        "dropout, off": lambda: (ATEN.dropout.default, g(4, 8), 0.1, False),
        "native_dropout": lambda: (ATEN.native_dropout.default, g(4, 8), 0.1, True),
        "conv2d": lambda: (ATEN.conv2d.default, g(2, 3, 8, 8), g(4, 3, 3, 3), g(4)),
        "conv2d, first layer": lambda: (ATEN.conv2d.default, c(2, 3, 8, 8), g(4, 3, 3, 3), g(4)),
        "conv_transpose2d": lambda: (ATEN.conv_transpose2d.input, g(2, 3, 8, 8), g(3, 4, 3, 3), g(4)),
        "max_pool2d": lambda: (ATEN.max_pool2d.default, g(2, 3, 8, 8), [2, 2]),
        "max_pool2d_with_indices": lambda: (ATEN.max_pool2d_with_indices.default, g(2, 3, 8, 8), [2, 2]),
        "avg_pool2d": lambda: (ATEN.avg_pool2d.default, g(2, 3, 8, 8), [2, 2]),
        "adaptive_avg_pool2d": lambda: (ATEN.adaptive_avg_pool2d.default, g(2, 3, 8, 8), [2, 2]),
        "adaptive_avg_pool2d to one": lambda: (ATEN.adaptive_avg_pool2d.default, g(2, 3, 8, 8), [1, 1]),
        "upsample": lambda: (ATEN.upsample_nearest2d.vec, g(2, 3, 4, 4), [8, 8], None),
        "cat": lambda: (ATEN.cat.default, [g(4, 8), g(4, 8)]),
        "view": lambda: (ATEN.view.default, g(4, 8), [32]),
        "expand": lambda: (ATEN.expand.default, g(1, 8), [4, 8]),
        "slice": lambda: (ATEN.slice.Tensor, g(4, 8), 0, 0, 2),
        "cast": lambda: (ATEN._to_copy.default, g(4, 8)),
        "pad": lambda: (ATEN.constant_pad_nd.default, g(4, 8), [1, 1]),
        "index": lambda: (ATEN.index.Tensor, g(4, 8), [ids(4, 2)]),
        "index_select": lambda: (ATEN.index_select.default, g(4, 8), 0, ids(4, 2)),
        "index_add": lambda: (ATEN.index_add.default, g(4, 8), 0, ids(4, 2), g(2, 8)),
        "index_put": lambda: (ATEN.index_put.default, g(4, 8), [ids(4, 2)], g(2, 8)),
        "gather": lambda: (ATEN.gather.default, g(4, 8), 0, ids(4, 1, 8)),
        "scatter_add": lambda: (ATEN.scatter_add.default, g(4, 8), 0, ids(4, 4, 8), g(4, 8)),
        "masked_fill": lambda: (ATEN.masked_fill.Scalar, g(4, 8), c(4, 8) > 0.5, 0.0),
        "where": lambda: (ATEN.where.self, c(4, 8) > 0.5, g(4, 8), g(4, 8)),
        "prelu": lambda: (ATEN.prelu.default, g(4, 8), g(8)),
    }  # fmt: skip
    return table


def described(tensor: torch.Tensor) -> Tensor:
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def packed_by_torch(op: Any, arguments: tuple[Any, ...]) -> tuple[set[tuple[str, int]], int, tuple[torch.Tensor, ...]]:
    """Inputs and outputs whose storage autograd packs, the bytes of other storages it packs, and the outputs."""
    storages: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = op(*arguments)
    outputs = tuple(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
    inputs = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    named: set[tuple[str, int]] = set()
    known: set[int] = set()
    for kind, tensors in (("input", inputs), ("output", outputs)):
        for i, tensor in enumerate(tensors):
            pointer = tensor.untyped_storage().data_ptr()
            if pointer in storages and pointer not in known:
                named.add((kind, i))
            known.add(pointer)
    extra = sum(t.untyped_storage().nbytes() for pointer, t in storages.items() if pointer not in known)
    return named, extra, outputs


@pytest.mark.parametrize("case", sorted(cases()))
def test_saved_tensors_are_those_that_torch_packs(case: str) -> None:
    torch.manual_seed(0)
    op, *arguments = cases()[case]()
    named, extra, outputs = packed_by_torch(op, tuple(arguments))
    inputs = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    saved = saved_for_backward_bytes(
        str(op),
        tuple(map(described, inputs)),
        tuple(map(described, outputs)),
        tuple(tensor.requires_grad for tensor in inputs),
        argument_hint(str(op), arguments),
        "cpu",
    )
    assert {entry for entry in saved if entry[0] != "extra"} == named
    expected = sum(value for kind, value in saved if kind == "extra")
    assert expected == pytest.approx(extra, rel=0.02, abs=16)  # scalars such as a loss's weight sum are left out


def test_everything_frozen_saves_nothing() -> None:
    pair: tuple[Tensor, Tensor] = (((4, 8), "float32"), ((4, 8), "float32"))
    assert saved_for_backward_bytes("aten.mul.Tensor", pair, pair[:1], (False, False)) == ()


def test_an_unknown_operator_saves_its_floating_tensors() -> None:
    x: Tensor = ((4, 8), "float32")
    i: Tensor = ((4,), "int64")
    saved = saved_for_backward_bytes("mylib.twist.default", (x, i), (x, i), (True, False))
    assert saved == (("input", 0), ("output", 0))


def on_gpu(op: str, inputs: tuple[Tensor, ...], outputs: int = 1, hint: tuple[tuple[str, object], ...] = ()) -> Saved:
    return saved_for_backward_bytes(op, inputs, inputs[:1] * outputs, (True,) * len(inputs), hint, "gpu")


def test_what_differs_on_a_gpu() -> None:
    x: Tensor = ((4, 8, 16), "bfloat16")
    weight: Tensor = ((16,), "bfloat16")
    assert on_gpu("aten.dropout.default", (x,), hint=(("p", 0.1), ("train", True))) == (("extra", 4 * 8 * 16),)
    assert on_gpu("aten.layer_norm.default", (x, weight))[-1] == ("extra", 2 * 4 * 8 * 4)
    assert on_gpu("aten.rms_norm.default", (x, weight)) == (("input", 0), ("input", 1), ("extra", 4 * 8 * 4))
    q: Tensor = ((2, 4, 64, 32), "bfloat16")
    fused = on_gpu("aten.scaled_dot_product_attention.default", (q, q, q), hint=(("dropout_p", 0.1),))
    assert fused == (("input", 0), ("input", 1), ("input", 2), ("output", 0), ("extra", 2 * 4 * 64 * 4))
    wide: Tensor = ((2, 4, 64, 32), "float64")
    whole = on_gpu("aten.scaled_dot_product_attention.default", (wide, wide, wide))
    assert whole == (("input", 2), ("extra", 8 * (2 * 2 * 4 * 64 * 32 + 2 * 4 * 64 * 64)))


def test_a_layer_of_a_transformer_by_hand() -> None:
    """34 s b h bytes of activations in half precision with dropout and fused attention (Korthikanti et al., 2022).

    Their count without the 5 a s^2 b of unfused attention: two norms 4, attention 11, feed-forward 19.
    """
    b, s, h, heads = 2, 128, 256, 8
    x: Tensor = ((b, s, h), "float16")
    wide: Tensor = ((b, s, 4 * h), "float16")
    head: Tensor = ((b, heads, s, h // heads), "float16")
    drop = (("p", 0.1), ("train", True))

    def weight(n: int, m: int) -> Tensor:
        return ((n, m), "float16")

    norm: Tensor = ((h,), "float16")
    steps: list[tuple[str, list[str], str, tuple[tuple[str, object], ...], tuple[Tensor, ...], Tensor]] = [
        ("layer_norm", ["x"], "n1", (), (x, norm, norm), x),
        ("linear", ["n1"], "q", (), (x, weight(h, h)), x),
        ("linear", ["n1"], "k", (), (x, weight(h, h)), x),
        ("linear", ["n1"], "v", (), (x, weight(h, h)), x),
        ("scaled_dot_product_attention", ["q", "k", "v"], "a", (), (head, head, head), head),
        ("linear", ["a"], "o", (), (x, weight(h, h)), x),
        ("dropout", ["o"], "d1", drop, (x,), x),
        ("add", ["x", "d1"], "r1", (), (x, x), x),
        ("layer_norm", ["r1"], "n2", (), (x, norm, norm), x),
        ("linear", ["n2"], "f1", (), (x, weight(4 * h, h)), wide),
        ("gelu", ["f1"], "f2", (), (wide,), wide),
        ("linear", ["f2"], "f3", (), (wide, weight(h, 4 * h)), x),
        ("dropout", ["f3"], "d2", drop, (x,), x),
        ("add", ["r1", "d2"], "r2", (), (x, x), x),
    ]
    kept: dict[str, int] = {}
    for op, names, result, hint, inputs, output in steps:
        saved = saved_for_backward_bytes(f"aten.{op}.default", inputs, (output,), (True,) * len(inputs), hint)
        for kind, value in saved:
            if kind == "extra":
                kept[f"{result}, extra"] = value
            elif kind == "output":
                kept[result] = size_bytes(output)
            elif value < len(names):  # the others are weights
                kept[names[value]] = size_bytes(inputs[value])
    statistics = 2 * 2 * b * s * 4 + b * heads * s * 4
    assert sum(kept.values()) == 34 * s * b * h + statistics


def test_state_by_hand() -> None:
    adamw = state_bytes(1000, "bfloat16")
    assert (adamw.weights_bytes, adamw.gradients_bytes, adamw.optimizer_bytes) == (1000, 1000, 2000)
    assert adamw.total_bytes == 4000
    mixed = state_bytes(1000, "bfloat16", software=Software(optimizer_bytes=12, gradient_bytes=4))
    assert (mixed.weights_bytes, mixed.gradients_bytes, mixed.optimizer_bytes) == (1000, 2000, 6000)
    assert state_bytes(1000, "float32", "sgd").optimizer_bytes == 0
    assert state_bytes(1000, "float32", "sgd-momentum").optimizer_bytes == 1000
    sharded = state_bytes(1001, "float32", zero=3, dp=4)
    assert (sharded.weights_bytes, sharded.gradients_bytes, sharded.optimizer_bytes) == (251, 251, 501)
    frozen = state_bytes(1000, "float32", trainable_bytes=100)
    assert (frozen.weights_bytes, frozen.gradients_bytes, frozen.optimizer_bytes) == (1000, 100, 200)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((1, "float32", "lion"), "unknown optimizer 'lion'"),
        ((1, "float32", "adamw", 4), "no ZeRO stage 4; choose 0, 1, 2 or 3"),
        ((1, "fp32"), "unknown dtype 'fp32'"),
        ((1, "float32", "adamw", 3, 0), "on 0 data-parallel ranks"),
    ],
)
def test_state_errors(arguments: tuple[Any, ...], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        state_bytes(*arguments)


@given(size=st.integers(0, 10**15), dp=st.integers(1, 4096), optimizer=st.sampled_from(OPTIMIZERS))
def test_shards_cover_the_whole_and_waste_less_than_a_byte_a_rank(size: int, dp: int, optimizer: str) -> None:
    whole = state_bytes(size, "float32", optimizer)
    shard = state_bytes(size, "float32", optimizer, 3, dp)
    assert state_bytes(size, "float32", optimizer, 0, dp) == whole
    one, two = (state_bytes(size, "float32", optimizer, stage, dp) for stage in (1, 2))
    assert (one.weights_bytes, one.gradients_bytes, one.optimizer_bytes) == (size, size, shard.optimizer_bytes)
    assert (two.weights_bytes, two.gradients_bytes, two.optimizer_bytes) == (
        size, shard.gradients_bytes, shard.optimizer_bytes
    )  # fmt: skip
    for field in ("weights_bytes", "gradients_bytes", "optimizer_bytes"):
        assert 0 <= getattr(shard, field) * dp - getattr(whole, field) < dp


def test_gathered_weights_are_the_two_largest_segments() -> None:
    assert gathered_bytes([5, 1, 9, 7]) == 16
    assert gathered_bytes([5]) == 5
    assert gathered_bytes([]) == 0
