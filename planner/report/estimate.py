"""An estimate as a report: the parts of a step, and the memory of the devices of every pipeline rank."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Group
from rich.text import Text

from planner.ir.plan import Estimate
from planner.report.tables import heading, table
from planner.report.words import limit_words
from planner.sizes import format_bytes, format_seconds

_MEMORY = ("weights", "gradients", "optimizer", "activations", "temporary")


def estimate_report(found: Estimate, strategy: str) -> Group:
    parts = (
        ("compute", found.compute_s),
        ("exposed communication", found.exposed_communication_s),
        ("bubble", found.bubble_s),
    )
    time = table("part", ">time", ">share")
    for name, seconds in parts:
        time.add_row(name, format_seconds(seconds), f"{seconds / found.step_time_s:.1%}")
    memory = table("rank", *(f">{name}" for name in _MEMORY), ">in all")
    for rank, device in enumerate(found.devices):
        sizes = (getattr(device, f"{name}_bytes") for name in _MEMORY)
        memory.add_row(str(rank), *map(format_bytes, sizes), format_bytes(device.total_bytes))
    fits = "" if found.fits else "; does not fit"
    return Group(
        Text(f"{strategy}: {format_seconds(found.step_time_s)} a step", style="bold"),
        time,
        heading(f"Memory of a device of each pipeline rank, of {limit_words(found)}{fits}"),
        memory,
    )


def estimate_figures(found: Estimate, strategy: str) -> dict[str, Any]:
    return {
        "strategy": strategy,
        "peak_memory_bytes": found.peak_memory_bytes,
        "fits": found.fits,
        **asdict(found),
    }
