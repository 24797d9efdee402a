"""What differs between kinds of devices while a program runs: waiting for one, and its peak memory."""

from __future__ import annotations

import resource
import sys

import torch


def synchronize(device: torch.device) -> None:
    """Return when all work queued on ``device`` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory_bytes(device: torch.device) -> int:
    """Largest memory held so far: by tensors on a GPU (since the last reset), by the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_memory(device: torch.device) -> None:
    """Start a new peak measurement. The operating system's peak of a CPU process cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
