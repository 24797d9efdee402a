"""Operations and times of operators: hand-computed GPT layer, PyTorch's own flop counter, roofline properties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from costmodels.compute import NO_TIME, OperatorTime, matmul_time_s, operator_flops, operator_time_s, optimizer_step_s
from costmodels.hardware import Device, load_cluster
from costmodels.matmuls import Matmul, matmuls
from costmodels.operators import Tensor, argument_hint, base_name, is_view

A100 = load_cluster("dgx-a100-80gb").device
PLAIN = Device("plain", 1, {"float32": 1e12, "float16": 4e12}, 1e11, 0.0, 1.0, attention_efficiency=1.0)
ATEN = torch.ops.aten


def half(*shape: int) -> Tensor:
    return shape, "float16"


def full(*shape: int) -> Tensor:
    return shape, "float32"


def time_of(op: str, inputs: list[Tensor], output: Tensor, needs: tuple[bool, ...] | None = None) -> OperatorTime:
    return operator_time_s(f"aten.{op}", tuple(inputs), (output,), needs or (True,) * len(inputs), PLAIN)


def test_names() -> None:
    assert base_name("aten.linear.default") == "linear"
    assert base_name("aten.add_.Tensor") == "add"
    assert base_name("aten.__and__.Tensor") == "__and__"
    assert base_name("mylib.linear.default") == "mylib.linear"


def test_a_gpt_layer_by_hand() -> None:
    """24 b s h^2 + 4 b s^2 h operations forward (Narayanan et al., 2021, appendix) and twice that backward."""
    b, s, h, heads = 2, 512, 1024, 16
    linears = [((b, s, h), (3 * h, h)), ((b, s, h), (h, h)), ((b, s, h), (4 * h, h)), ((b, s, 4 * h), (h, 4 * h))]
    flops = sum(operator_flops("aten.linear.default", pair, ((b, s, pair[1][0]),)) for pair in linears)
    assert flops == 24 * b * s * h * h
    qkv = ((b, heads, s, h // heads),) * 3
    attention = "aten.scaled_dot_product_attention.default"
    assert operator_flops(attention, qkv, qkv[:1]) == 4 * b * s * s * h
    for x, w in linears:
        result = time_of("linear.default", [(x, "float16"), (w, "float16")], half(b, s, w[0]))
        assert result.backward_flops == 2 * result.forward_flops
        assert result.backward_s == pytest.approx(2 * result.forward_s, rel=1e-4)


def calls() -> dict[str, Callable[[], tuple[object, tuple[object, ...]]]]:
    r = torch.randn
    return {
        "linear": lambda: (ATEN.linear.default, (r(2, 3, 8), r(5, 8), r(5))),
        "mm": lambda: (ATEN.mm.default, (r(4, 8), r(8, 5))),
        "addmm": lambda: (ATEN.addmm.default, (r(5), r(4, 8), r(8, 5))),
        "bmm": lambda: (ATEN.bmm.default, (r(3, 4, 8), r(3, 8, 5))),
        "baddbmm": lambda: (ATEN.baddbmm.default, (r(3, 4, 5), r(3, 4, 8), r(3, 8, 5))),
        "matmul, folded": lambda: (ATEN.matmul.default, (r(2, 3, 4, 8), r(8, 5))),
        "matmul, broadcast": lambda: (ATEN.matmul.default, (r(2, 1, 4, 8), r(3, 8, 5))),
        "conv1d": lambda: (ATEN.conv1d.default, (r(2, 3, 9), r(4, 3, 3))),
        "conv2d": lambda: (ATEN.conv2d.default, (r(2, 4, 9, 7), r(6, 4, 3, 2), r(6), [2, 1], [1, 0])),
        "conv2d, unbatched": lambda: (ATEN.conv2d.default, (r(4, 9, 7), r(6, 4, 3, 2))),
        "conv3d": lambda: (ATEN.conv3d.default, (r(1, 2, 5, 6, 7), r(3, 2, 2, 2, 3))),
        "convolution": lambda: (
            ATEN.convolution.default,
            (r(2, 4, 9, 9), r(6, 4, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        ),
        "convolution, transposed": lambda: (
            ATEN.convolution.default,
            (r(2, 4, 9, 9), r(4, 6, 3, 3), None, [2, 2], [0, 0], [1, 1], True, [0, 0], 1),
        ),
        "conv_transpose2d": lambda: (ATEN.conv_transpose2d.input, (r(2, 4, 5, 5), r(4, 6, 3, 3), r(6), [2, 2])),
        "einsum": lambda: (ATEN.einsum.default, ("bqhd,bkhd->bhqk", [r(2, 3, 4, 5), r(2, 6, 4, 5)])),
        "einsum, ellipsis": lambda: (ATEN.einsum.default, ("...ij,jk->...ik", [r(2, 3, 4, 5), r(5, 6)])),
        "einsum, implied output": lambda: (ATEN.einsum.default, ("ij,jk", [r(4, 5), r(5, 6)])),
    }


def tensors_in(arguments: tuple[object, ...]) -> list[torch.Tensor]:
    flat = [item for argument in arguments for item in (argument if isinstance(argument, list) else [argument])]
    return [item for item in flat if isinstance(item, torch.Tensor)]


@pytest.mark.parametrize("case", sorted(calls()))
def test_flops_equal_those_torch_counts(case: str) -> None:
    op, arguments = calls()[case]()
    with FlopCounterMode(display=False) as counter:
        output = op(*arguments)  # type: ignore[operator]
    shapes = tuple(tuple(tensor.shape) for tensor in tensors_in(arguments))
    hint = argument_hint(str(op), arguments)
    assert operator_flops(str(op), shapes, (tuple(output.shape),), hint) == counter.get_total_flops() > 0


def test_products_that_torch_does_not_count() -> None:
    assert operator_flops("aten.matmul.default", ((2, 3, 8), (8,)), ((2, 3),)) == 2 * 6 * 8
    assert operator_flops("aten.mv.default", ((3, 8), (8,)), ((3,),)) == 2 * 3 * 8
    qkv = ((2, 3, 7, 4), (2, 3, 9, 4), (2, 3, 9, 5))
    assert operator_flops("aten.scaled_dot_product_attention.default", qkv, ((2, 3, 7, 5),)) == 2 * 6 * 7 * 9 * (4 + 5)


def test_grouped_convolutions_and_foreign_operators() -> None:
    depthwise = operator_flops("aten.conv2d.default", ((2, 8, 9, 9), (8, 1, 3, 3)), ((2, 8, 7, 7),))
    assert depthwise == 2 * (2 * 8 * 7 * 7) * 9
    assert matmuls("conv2d", ((2, 8, 9, 9), (8, 1, 3, 3)), ((2, 8, 7, 7),))[0].batch == 8
    assert operator_flops("mylib.linear.default", ((2, 8), (4, 8)), ((2, 4),)) == 8


def test_einsum_without_its_equation_is_read_off_the_sizes() -> None:
    shapes = ((2, 3, 4), (2, 4, 5))
    assert operator_flops("aten.einsum.default", shapes, ((2, 3, 5),)) == 2 * 2 * 3 * 4 * 5


def test_three_operands_of_an_einsum_are_contracted_in_turn() -> None:
    hint = (("equation", "ij,jk,kl->il"),)
    shapes = ((2, 3), (3, 4), (4, 5))
    assert operator_flops("aten.einsum.default", shapes, ((2, 5),), hint) == 2 * (2 * 3 * 4 + 2 * 4 * 5)


def test_elementwise_and_reductions_count_elements() -> None:
    assert operator_flops("aten.add.Tensor", ((4, 5), (5,)), ((4, 5),)) == 20
    assert operator_flops("aten.mean.dim", ((4, 5),), ((4,),)) == 20


def test_backward_of_a_product_follows_who_needs_a_gradient() -> None:
    x, w = half(64, 32), half(16, 32)
    both = time_of("linear.default", [x, w], half(64, 16), (True, True))
    first = time_of("linear.default", [x, w], half(64, 16), (False, True))
    none = time_of("linear.default", [x, w], half(64, 16), (False, False))
    assert both.backward_flops == 2 * both.forward_flops == 2 * (2 * 64 * 32 * 16)
    assert first.backward_flops == first.forward_flops
    assert (none.backward_s, none.backward_flops, none.backward_bytes) == (0, 0, 0)
    bias = time_of("linear.default", [x, w, half(16)], half(64, 16), (True, True, True))
    assert bias.backward_bytes == both.backward_bytes + 2 * (64 * 16 + 16)
    assert bias.backward_flops == both.backward_flops


def test_roofline_of_a_product_by_hand() -> None:
    # compute bound: 2 * 1000^3 operations at 4e12; no tiles
    assert matmul_time_s(Matmul(1, 1000, 1000, 1000), "float16", PLAIN) == pytest.approx(0.5e-3, rel=1e-5)
    # memory bound: a vector product reads 2 (1000 * 1000 + 2000) bytes at 1e11
    assert matmul_time_s(Matmul(1, 1, 1000, 1000), "float16", PLAIN) == pytest.approx(2 * 1_002_000 / 1e11, rel=1e-5)
    assert matmul_time_s(Matmul(1, 0, 8, 8), "float16", PLAIN) == 0


def test_tiles_and_waves_by_hand() -> None:
    chip = Device("chip", 1, {"float32": 1e12}, 1e15, 1e-6, 0.5, multiprocessors=10, matmul_tile=128)
    # 200 x 130: of tiles of 64 x 64 it takes 4 x 3, which is 1.2 rounds of 10 workers, counted 0.64 x 2 + 0.36 x 1.2
    rounds_s = 10 * (2 * 64 * 64 * 64) / (1e12 * 0.5 * 0.87)
    assert matmul_time_s(Matmul(1, 200, 130, 64), "float32", chip) == pytest.approx((0.64 * 2 + 0.36 * 1.2) * rounds_s)
    # 256 x 256 x 5: of the 20 tiles of 128 x 128 all rounds are full, and they are faster
    full_s = 2 * 5 * 256 * 256 * 64 / (1e12 * 0.5)
    assert matmul_time_s(Matmul(5, 256, 256, 64), "float32", chip) == pytest.approx(full_s)


def test_rows_that_are_not_aligned_are_slower_each_way() -> None:
    chip = Device("chip", 1, {"float32": 1e12, "float16": 1e12}, 1e15, 0.0, 1.0, alignment_bytes=16)

    def seconds(product: Matmul, dtype: str = "float16") -> float:
        return matmul_time_s(product, dtype, chip) / product.flops * 1e12

    for n, rate in ((1024, 1.0), (1032, 1.0), (1028, 0.64), (1026, 0.64), (1025, 0.28)):
        product = Matmul(1, 77, n, 512)
        for one in (product, product.left_gradient(), product.right_gradient()):
            assert seconds(one) == pytest.approx(1 / rate)
        assert seconds(product, "float32") == pytest.approx(1)


def test_a_cpu_launches_its_operators_itself_and_a_gpu_has_a_host() -> None:
    n = 1_000_000
    gpu = replace(PLAIN, kernel_launch_s=1.0)
    cpu = replace(gpu, kind="cpu")
    on_gpu, on_cpu = (operator_time_s("aten.gelu.default", (full(n),), (full(n),), (True,), on) for on in (gpu, cpu))
    assert (on_gpu.forward_s, on_cpu.forward_s) == pytest.approx((8 * n / 1e11, 8 * n / 1e11 + 1.0))
    assert (on_gpu.forward_launches, on_gpu.backward_launches) == (1, 1)
    assert (gpu.host_s(3), cpu.host_s(3)) == (3.0, 0.0)
    assert optimizer_step_s(8, "adamw", gpu, launches=2) == 2.0


def test_elementwise_time_is_memory_traffic() -> None:
    n = 1_000_000
    gelu = time_of("gelu.default", [full(n)], full(n))
    assert gelu.forward_s == pytest.approx(8 * n / 1e11)
    assert gelu.backward_s == pytest.approx(12 * n / 1e11)  # gradient and input read, gradient written
    add = time_of("add.Tensor", [full(n), full(n)], full(n))
    assert add.forward_bytes == 12 * n
    frozen = time_of("gelu.default", [full(n)], full(n), (False,))
    assert (frozen.forward_s, frozen.backward_s) == (gelu.forward_s, 0.0)


def test_an_embedding_reads_rows_not_the_table() -> None:
    ids = ((10,), "int64")
    rows = operator_time_s("aten.embedding.default", (full(50_000, 64), ids), (full(10, 64),), (True, False), PLAIN)
    assert rows.forward_bytes == 2 * 10 * 64 * 4 + 80
    assert rows.backward_bytes == 3 * 10 * 64 * 4 + 80 + 50_000 * 64 * 4  # its gradient is dense


VIEWS = ("view", "reshape", "transpose.int", "permute", "expand", "slice.Tensor", "select.int", "unsqueeze", "squeeze",
         "alias", "detach", "t", "split.Tensor", "chunk", "flatten.using_ints", "unbind.int")  # fmt: skip


@pytest.mark.parametrize("view", VIEWS)
def test_views_are_free(view: str) -> None:
    op = f"aten.{view if '.' in view else view + '.default'}"
    assert is_view(op)
    assert operator_time_s(op, (full(4, 4),), (full(4, 4),), (True,), A100) == NO_TIME
    assert operator_flops(op, ((4, 4),), ((4, 4),)) == 0


def test_dropout_and_casts_that_do_nothing_are_views() -> None:
    hint = argument_hint("aten.dropout.default", ("x", 0.1, True))
    assert hint == (("p", 0.1), ("train", True))
    assert not is_view("aten.dropout.default", hint=hint)
    assert is_view("aten.dropout.default", hint=argument_hint("aten.dropout.default", ("x", 0.1, False)))
    assert is_view("aten.dropout.default", hint=argument_hint("aten.dropout.default", ("x", 0.0), {"train": True}))
    assert is_view("aten.to.dtype", (full(4),), (full(4),))
    assert not is_view("aten.to.dtype", (full(4),), (half(4),))


def attention(dtype: str, device: Device, hint: tuple[tuple[str, object], ...] = ()) -> OperatorTime:
    qkv = (((2, 8, 1024, 64), dtype),) * 3
    op = "aten.scaled_dot_product_attention.default"
    return operator_time_s(op, qkv, qkv[:1], (True,) * 3, device, hint)


def test_fused_attention_moves_no_matrix_and_recomputes() -> None:
    fused, whole = attention("float16", PLAIN), attention("float64", PLAIN)
    operand = 2 * 8 * 1024 * 64
    assert fused.forward_bytes == 4 * operand * 2
    assert whole.forward_bytes == 4 * operand * 8 + 6 * (2 * 8 * 1024 * 1024) * 8
    assert fused.backward_flops == 2.5 * fused.forward_flops
    assert whole.backward_flops == 2 * whole.forward_flops
    causal = attention("float16", PLAIN, (("dropout_p", 0.0), ("is_causal", True)))
    assert causal.forward_flops == fused.forward_flops
    assert causal.forward_s == pytest.approx(fused.forward_s / 2)


def test_optimizer_moves_parameters_gradients_and_moments() -> None:
    assert optimizer_step_s(10**9, "adamw", PLAIN) == pytest.approx(7e9 / 1e11)
    assert optimizer_step_s(10**9, "sgd-momentum", PLAIN) == pytest.approx(5e9 / 1e11)
    assert optimizer_step_s(10**9, "sgd", PLAIN) == pytest.approx(3e9 / 1e11)
    assert optimizer_step_s(0, "adamw", A100) == 0
    with pytest.raises(ValueError, match="unknown optimizer 'lion'; the cost model knows adamw"):
        optimizer_step_s(1, "lion", PLAIN)


sizes = st.integers(1, 5000)


@given(b=st.integers(1, 64), m=sizes, n=sizes, k=sizes, more=st.integers(0, 5000))
def test_a_product_is_no_faster_than_its_roofline_or_a_smaller_one(b: int, m: int, n: int, k: int, more: int) -> None:
    product = Matmul(b, m, n, k, rows=16)  # all as if aligned
    time_s = matmul_time_s(product, "bfloat16", A100)
    ideal_s = max(product.flops / A100.peak("bfloat16"), 2 * b * (m * k + k * n + m * n) / A100.memory_bytes_per_s)
    assert time_s >= ideal_s * (1 - 1e-9)
    for sizes in ((m + more, n, k), (m, n + more, k), (m, n, k + more)):
        larger = Matmul(b, *sizes, rows=16)
        assert matmul_time_s(larger, "bfloat16", A100) >= time_s * (1 - 1e-9)


@given(m=st.integers(1, 5000), n=st.integers(1, 5000), k=sizes, ways=st.sampled_from([2, 3, 8]), cut=st.integers(0, 2))
def test_a_shard_of_a_product_gains_at_most_its_share(m: int, n: int, k: int, ways: int, cut: int) -> None:
    """Whatever dim is cut, unless shards are aligned where the whole is not."""
    on = replace(A100, kernel_launch_s=0.0)
    whole, shard = [m, n, k], [m, n, k]
    whole[cut] *= ways
    whole_s, shard_s = (matmul_time_s(Matmul(1, *sizes, rows=16), "bfloat16", on) for sizes in (whole, shard))
    assert shard_s >= whole_s / ways * (1 - 1e-9)


@pytest.mark.parametrize(
    ("side", "published_us"),
    [(2048, 177.9), (4096, 574.7), (8192, 2185.6)],  # EleutherAI/cookbook, A100, float16, k = 4096, launch included
)
def test_large_square_products_near_published_times(side: int, published_us: float) -> None:
    assert matmul_time_s(Matmul(1, side, side, 4096), "float16", A100) * 1e6 == pytest.approx(published_us, rel=0.15)


def test_a_small_kernel_keeps_a_gpu_for_its_least_time() -> None:
    device = replace(load_cluster("dgx-a100-80gb").device, kernel_least_s=2e-6)
    small, large = ((8,), "float32"), ((1 << 28,), "float32")
    assert operator_time_s("aten.relu.default", (small,), (small,), (True,), device).forward_s == 2e-6
    without = replace(device, kernel_least_s=0.0)
    times = [operator_time_s("aten.relu.default", (large,), (large,), (True,), d).forward_s for d in (device, without)]
    assert times[0] == times[1] > 1e-3
