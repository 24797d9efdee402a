"""Tensors in flat buckets: collectives run on few large tensors instead of many small ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from costmodels.software import OURS

BUCKET_BYTES = OURS.bucket_bytes
BUCKETS_IN_FLIGHT = 4


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def buckets(tensors: Sequence[torch.Tensor], limit_bytes: int = BUCKET_BYTES) -> list[list[torch.Tensor]]:
    """``tensors`` in order, grouped by dtype into lists of at most ``limit_bytes`` (or one larger tensor)."""
    finished: list[list[torch.Tensor]] = []
    open_bucket: dict[torch.dtype, list[torch.Tensor]] = {}
    filled: dict[torch.dtype, int] = {}
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if tensor.dtype in open_bucket and filled[tensor.dtype] + size > limit_bytes:
            finished.append(open_bucket.pop(tensor.dtype))
        if tensor.dtype not in open_bucket:
            open_bucket[tensor.dtype], filled[tensor.dtype] = [], 0
        open_bucket[tensor.dtype].append(tensor)
        filled[tensor.dtype] += size
    return finished + list(open_bucket.values())
