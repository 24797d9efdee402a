"""Several devices or clusters priced as one: by the fastest of them for a bound, by the slowest for ranks that wait for it.

    Several(devices, slowest)      stands for a Device in the functions of costmodels.compute (``over_several``)
    Views(clusters, slowest)       stands for a Cluster in collective_time_s

Every price is the least, or the most, of those of its members. So a sum of fastest prices is no more than the price of any
member, and one of slowest prices no less: what a chain of operators takes on devices that meet after each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property, wraps
from typing import Any, ParamSpec, TypeVar

from costmodels.hardware import Cluster, Device
from costmodels.software import Software

P = ParamSpec("P")
R = TypeVar("R")


def picked(prices: Iterable[R], slowest: bool) -> R:
    """Of equal records the one with the least, or the most, of every number; of numbers that one; None of None."""
    found = list(prices)
    if found[0] is None:
        return found[0]
    if isinstance(found[0], int | float):
        return (max if slowest else min)(found)  # type: ignore[type-var]
    first: Any = found[0]
    return type(first)(*(picked([getattr(x, f.name) for x in found], slowest) for f in fields(first)))  # type: ignore[no-any-return]


def over_several(price: Callable[P, R]) -> Callable[..., R]:
    """``price``, a function of a device among others, for Several devices too."""

    @wraps(price)
    def priced(*arguments: P.args, **options: P.kwargs) -> R:
        for place, given in enumerate(arguments):
            if isinstance(given, Several):
                before, after = arguments[:place], arguments[place + 1 :]
                prices = (price(*before, one, *after, **options) for one in given.devices)  # type: ignore[call-arg, arg-type]
                return picked(prices, given.slowest)
        return price(*arguments, **options)

    return priced


@dataclass(frozen=True)
class Several:
    """Devices of one kind ('gpu' or 'cpu'); at least one."""

    devices: tuple[Device, ...]
    slowest: bool

    @property
    def kind(self) -> str:
        return self.devices[0].kind

    @property
    def overlap_slowdown(self) -> float:
        return picked((device.overlap_slowdown for device in self.devices), self.slowest)

    @property
    def serial_share(self) -> float:
        return picked((device.serial_share for device in self.devices), self.slowest)

    def host_s(self, launches: int) -> float:
        return picked((device.host_s(launches) for device in self.devices), self.slowest)

    def elapsed_s(self, on_device_s: float, launches: int) -> float:
        return picked((device.elapsed_s(on_device_s, launches) for device in self.devices), self.slowest)


@dataclass(frozen=True)
class Views:
    """Ways to see the devices of some ranks, each as a cluster of like ones or again as Views; at least one."""

    clusters: tuple[Cluster | Views, ...]
    slowest: bool

    @cached_property
    def _hash(self) -> int:
        return hash((self.clusters, self.slowest))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def device(self) -> Device | Several:
        """Those of all clusters; Views in Views that are not picked alike have none."""
        devices: list[Device] = []
        for cluster in self.clusters:
            device = cluster.device
            devices += device.devices if isinstance(device, Several) else (device,)
        alike = tuple(dict.fromkeys(devices))
        return alike[0] if len(alike) == 1 else Several(alike, self.slowest)

    @property
    def measured(self) -> None:
        """Tables of measured times: there are none of unequal machines."""

    @property
    def software(self) -> Software:
        return self.clusters[0].software

    def of_devices(self, change: Callable[[Device], Device]) -> Views:
        """The same with every device changed."""
        return replace(self, clusters=tuple(with_devices(cluster, change) for cluster in self.clusters))


AnyDevice = Device | Several
AnyCluster = Cluster | Views


def with_devices(cluster: AnyCluster, change: Callable[[Device], Device]) -> AnyCluster:
    if isinstance(cluster, Views):
        return cluster.of_devices(change)
    return replace(cluster, device=change(cluster.device))


def fastest(clusters: Iterable[AnyCluster]) -> AnyCluster:
    """The least price of any of them."""
    distinct = tuple(dict.fromkeys(clusters))
    return distinct[0] if len(distinct) == 1 else Views(distinct, slowest=False)
