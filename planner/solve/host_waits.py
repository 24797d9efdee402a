"""What a GPU waits for its host, in the letters program.

    idle             I_k >= host_k - device_k                       of equal segments k, each way
                     I_k >= a host_k - (1 - a) device_k             a = Device.serial_share

Then device_k + I_k is no less than Device.elapsed_s of the segments together. On a CPU nothing waits.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping

from costmodels.views import AnyDevice
from planner.costing import Cost
from planner.solve.letter_prices import MICROSECONDS_PER_S
from planner.solve.linear_program import LinearProgram

WAYS = ("forward", "backward")


class HostWaits:
    """Terms of the rows, in microseconds, gathered as the program pays for its variables."""

    def __init__(self, device: AnyDevice) -> None:
        self.device = device
        share = device.serial_share
        # (Share of the host, share of the device), a row each. With a serial share of 1/2 the second is half of the first.
        self.rows = ((1.0, 1.0),) if share == 0.5 else ((1.0, 1.0), (share, 1 - share))
        # Kind of segment, way, number of the row -> the terms, and the most they can sum to.
        self.terms: dict[tuple[Hashable, str, int], dict[int, float]] = {}
        self.most: dict[tuple[Hashable, str, int], float] = {}

    def pay(self, kind: Hashable, costs: Mapping[int, Cost], count: int) -> None:
        """Of each variable what ``count`` of it cost in segments of a kind; at most one of the variables is 1."""
        if self.device.kind == "cpu":
            return
        for way in WAYS:
            times = {
                x: (self.device.host_s(getattr(cost, f"{way}_launches")), getattr(cost, f"{way}_s"))
                for x, cost in costs.items()
            }
            for row, (of_host, of_device) in enumerate(self.rows):
                place = (kind, way, row)
                late_us = {
                    x: count * (of_host * host_s - of_device * device_s) * MICROSECONDS_PER_S
                    for x, (host_s, device_s) in times.items()
                }
                found = self.terms.setdefault(place, {})
                for x, more_us in late_us.items():
                    found[x] = found.get(x, 0.0) + more_us
                self.most[place] = self.most.get(place, 0.0) + max(0.0, *late_us.values())

    def add_to(self, program: LinearProgram) -> dict[Hashable, list[int]]:
        """The rows, where they can bind at all. Kind of segment -> what its waits are, each way."""
        waits: dict[tuple[Hashable, str], int] = {}
        for (kind, way, row), terms in self.terms.items():
            if self.most[kind, way, row] <= 0.0:
                continue
            if (kind, way) not in waits:
                waits[kind, way] = program.variable(math.inf)
                program.price[waits[kind, way]] = 1.0
            program.row([*terms.items(), (waits[kind, way], -1.0)], upper=0.0)
        found: dict[Hashable, list[int]] = {}
        for (kind, _), x in waits.items():
            found.setdefault(kind, []).append(x)
        return found
