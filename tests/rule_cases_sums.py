"""Calls of operators that add up along an index, of recurrent cells, bags, Fourier transforms and grouped products."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.operator_graphs import Case


def _r(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _ids(count: int, *shape: int) -> Tensor:
    return torch.randint(count, shape)


def _put(x: Tensor, values: Tensor, index: Tensor, **options: Any) -> Tensor:
    return x.index_put((index,), values, **options)


def sums() -> dict[str, Case]:
    def bag(weight: Tensor, ids: Tensor, **options: Any) -> Tensor:
        return F.embedding_bag(ids, weight, **options)

    def lstm_cell(x: Tensor, h: Tensor, c: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        return torch.lstm_cell(x, (h, c), *weights)

    permuted = torch.randperm(8)
    gates = (_r(12, 4), _r(12, 3), _r(12), _r(12))
    return {
        "index_add": Case(
            "index_add", "t d1", lambda x, y, i: x.index_add(0, i, y), (_r(6, 8), _r(8, 8)), (_ids(6, 8),)
        ),
        "index_add_last": Case(
            "index_add", "d0 t", lambda x, y, i: x.index_add(1, i, y), (_r(8, 6), _r(8, 4)), (_ids(6, 4),)
        ),
        "index_add_scaled": Case(
            "index_add", "t d1", lambda x, y, i: x.index_add(0, i, y, alpha=0.5), (_r(6, 8), _r(8, 8)), (_ids(6, 8),)
        ),
        "scatter_add_line": Case(
            "scatter_add", "t", lambda x, y, i: x.scatter_add(0, i, y), (_r(4), _r(16)), (_ids(4, 16),)
        ),
        "index_put": Case("index_put", "r0", _put, (_r(8, 4), _r(8, 4)), (permuted,)),
        "index_put_added": Case(
            "index_put", "r0 i0", lambda x, v, i: _put(x, v, i, accumulate=True), (_r(6, 4), _r(8, 4)), (_ids(6, 8),)
        ),
        "index_put_pairs": Case(
            "index_put",
            "i0 i1",
            lambda x, v, i, j: x.index_put((i, j), v, accumulate=True),
            (_r(6, 3), _r(8, 4)),
            (_ids(6, 8, 4), _ids(3, 8, 4)),
        ),
        "lstm_cell": Case("lstm_cell", "n", lstm_cell, (_r(8, 4), _r(8, 3), _r(8, 3), *gates)),
        "gru_cell": Case("gru_cell", "n", torch.gru_cell, (_r(8, 4), _r(8, 3), _r(9, 4), _r(9, 3), _r(9), _r(9))),
        "rnn_cell": Case("rnn_tanh_cell", "n", torch.rnn_tanh_cell, (_r(8, 4), _r(8, 3), _r(3, 4), _r(3, 3))),
        "bag_mean": Case("embedding", "v h b2 b1", bag, (_r(16, 8),), (_ids(16, 8, 4),)),
        "bag_sum": Case("embedding", "v h b2 b1", lambda w, i: bag(w, i, mode="sum"), (_r(16, 8),), (_ids(16, 8, 4),)),
        "bag_weighted": Case(
            "embedding",
            "v h b2 b1",
            lambda w, s, i: bag(w, i, mode="sum", per_sample_weights=s),
            (_r(16, 8), _r(8, 4)),
            (_ids(16, 8, 4),),
        ),
        "bag_max": Case("embedding_bag", "", lambda w, i: bag(w, i, mode="max"), (_r(16, 8),), (_ids(16, 8, 4),)),
        "bag_uneven": Case(
            "embedding_bag",
            "",
            lambda w, i, o: bag(w, i, offsets=o),
            (_r(16, 8),),
            (_ids(16, 8), torch.tensor([0, 3])),
        ),
        "bag_padded": Case("embedding_bag", "", lambda w, i: bag(w, i, padding_idx=0), (_r(16, 8),), (_ids(16, 8, 4),)),
        "weight_norm": Case("_weight_norm", "d0", lambda v, g: torch._weight_norm(v, g, 0), (_r(8, 4, 2), _r(8, 1, 1))),
        "weight_norm_last": Case(
            "_weight_norm", "d2", lambda v, g: torch._weight_norm(v, g, 2), (_r(8, 4, 2), _r(1, 1, 2))
        ),
        "fft_there_and_back": Case(
            "fft_irfft", "d0 d2", lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1), 8, dim=1), (_r(4, 8, 2),)
        ),
        "rfft": Case("fft_rfft", "d0 d1", lambda x: torch.view_as_real(torch.fft.rfft(x)), (_r(4, 2, 8),)),
        "repeat_all": Case("repeat_interleave", "d0 d1", lambda x: x.repeat_interleave(3), (_r(8, 4),)),
        "fill": Case("expand", "d0 d1", lambda x, y: y.expand(4, 8) * torch.fill(x, y[0]), (_r(4, 8), _r(8))),
        "fill_number": Case("full", "d0 d1", lambda x: x * torch.fill(x, 2.0), (_r(4, 8),)),
    }
