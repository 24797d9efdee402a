"""Clusters of unequal machines: groups of equal ones, joined by a link.

    MixedCluster     groups in the order in which ranks fill them, each a Cluster, and the link between groups
    load_machine     a preset or a file, of one kind of machine or of several

The text form lists the groups; each is a preset with what differs from it, or written out like a cluster
(costmodels.hardware), its tables inside ``groups``:

    name = "old-and-new"

    [[groups]]
    preset = "dgx-a100-80gb"
    name = "new"                 # the preset's, if left out
    gpus = 8

    [[groups]]
    name = "old"
    gpus = 4
    gpus_per_node = 4
    [groups.device]
    ...
    [groups.intra]
    ...

    [inter]                      # the slower of the groups' own, if left out
    bandwidth_bytes_per_s = 12.5e9
    latency_s = 4e-6

``inter`` is one direction of one network card's way to a card of another group. Every group fills nodes of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from costmodels.hardware import (
    CLUSTER_SCALARS,
    Cluster,
    ClusterError,
    Link,
    build_cluster,
    is_path,
    link_of,
    load_cluster,
    presets,
    read_text,
    sources_of,
    tables,
    text_of,
    toml_of,
    unknown_preset,
)
from costmodels.software import Software

# Orders of the groups along a pipeline are all looked at.
MOST_GROUPS = 4
_FOLDER = "mixed_presets"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class MixedCluster:
    """``groups``: two to four, of one kind of device ('gpu' or 'cpu'), with different names. ``inter``: see the module.

    ``sources``: (field, where its number comes from) pairs, of the fields that are not a group's.
    """

    name: str
    groups: tuple[Cluster, ...]
    inter: Link
    sources: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        count = len(self.groups)
        if not 2 <= count <= MOST_GROUPS:
            raise ClusterError(f"a mixed cluster has {count} groups; give it 2 to {MOST_GROUPS}")
        names = [group.name for group in self.groups]
        for name in names:
            if not _NAME.fullmatch(name):
                raise ClusterError(
                    f"a group is named {name!r}; a name is made of letters, digits, '.', '_' and '-', since strategies use it"
                )
            if names.count(name) > 1:
                raise ClusterError(f"two groups are named {name!r}; give each a name of its own")
        for group in self.groups:
            if group.measured is not None:
                raise ClusterError(
                    f"group {group.name} has measured times, which are used for one kind of machine only"
                )
        if len({group.device.kind for group in self.groups}) > 1:
            raise ClusterError("the groups mix devices of kind 'gpu' and 'cpu'; describe those of one kind")

    @property
    def gpus(self) -> int:
        return sum(group.gpus for group in self.groups)

    @property
    def nodes(self) -> int:
        return sum(group.nodes for group in self.groups)

    @property
    def measured(self) -> None:
        """Tables of measured times: there are none."""

    @property
    def software(self) -> Software:
        return self.groups[0].software

    def group(self, name: str) -> Cluster:
        """Raises KeyError where there is none of that name."""
        return {group.name: group for group in self.groups}[name]

    def in_order(self, names: Iterable[str]) -> tuple[Cluster, ...]:
        """The groups in another order; as they are where there are no ``names``."""
        return tuple(map(self.group, names)) or self.groups

    def with_gpus(self, gpus: int) -> Machine:
        """The first ``gpus`` devices, in the order of the groups; or, of a multiple of all, every group so many times as large.

        Of one group only, that group. Raises ClusterError for any other number.
        """
        if isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 1:
            raise ClusterError(f"cannot use {gpus!r} gpus of cluster {self.name}: pass a positive whole number")
        if gpus % self.gpus == 0:
            times = gpus // self.gpus
            return replace(self, groups=tuple(replace(group, gpus=group.gpus * times) for group in self.groups))
        if gpus > self.gpus:
            raise ClusterError(
                f"cluster {self.name} has {self.gpus} devices ({self.words}); {gpus} is more, and no multiple of it. "
                "Write a file that says which devices there are"
            )
        taken, left = [], gpus
        for group in self.groups:
            if left:
                taken.append(replace(group, gpus=min(left, group.gpus)))
            left = max(0, left - group.gpus)
        return replace(self, groups=tuple(taken)) if len(taken) > 1 else taken[0]

    @property
    def words(self) -> str:
        """``8 new + 4 old``"""
        return " + ".join(f"{group.gpus} {group.name}" for group in self.groups)

    def run_by(self, software: Software) -> MixedCluster:
        """The same machines running ``software``, whose host code may be slower."""
        return replace(self, groups=tuple(group.run_by(software) for group in self.groups))

    def merged(self) -> Machine:
        """With neighbouring groups that differ in nothing joined to one; the cluster itself where that leaves one group.

        They differ in nothing where the first fills its nodes and the link between groups is their own.
        """
        groups = [self.groups[0]]
        for group in self.groups[1:]:
            last = groups[-1]
            alike = replace(group, name=last.name, gpus=last.gpus, sources=last.sources) == last
            if alike and group.inter == self.inter and last.gpus % last.gpus_per_node == 0:
                groups[-1] = replace(last, gpus=last.gpus + group.gpus)
            else:
                groups.append(group)
        if len(groups) > 1:
            return replace(self, groups=tuple(groups))
        return replace(groups[0], name=self.name)

    def to_toml(self) -> str:
        """The text form; ``MixedCluster.parse`` reads it back to an equal cluster."""
        lines = [f"name = {text_of(self.name)}"]
        for group in self.groups:
            lines += ["", "[[groups]]", *(f"{name} = {text_of(getattr(group, name))}" for name in CLUSTER_SCALARS)]
            lines += tables(group, "groups.")
        lines += ["", "[inter]", *(f"{f.name} = {text_of(getattr(self.inter, f.name))}" for f in fields(Link))]
        lines += ["", "[sources]", *(f"{text_of(key)} = {text_of(source)}" for key, source in self.sources)]
        return "\n".join(lines) + "\n"

    @staticmethod
    def parse(text: str, source: str = "cluster") -> MixedCluster:
        """Read the text form. Raises ClusterError naming ``source``, the group and the field that is wrong."""
        data = toml_of(text, source)
        try:
            return _built(data)
        except ClusterError as error:
            raise ClusterError(f"{source}: {error}") from None


Machine = Cluster | MixedCluster


def mixed_presets() -> tuple[str, ...]:
    """The names of mixed clusters that ``load_machine`` knows besides ``presets()``, sorted."""
    folder = resources.files(__package__).joinpath(_FOLDER)
    return tuple(sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml")))


def load_machine(name_or_path: str | Path, gpus: int | None = None) -> Machine:
    """The preset of that name, or the TOML file at that path, with ``gpus`` devices (default: as the file says).

    As ``load_cluster``, for clusters of unequal machines too. Raises ClusterError.
    """
    text = str(name_or_path)
    if text in mixed_presets():
        file = resources.files(__package__).joinpath(_FOLDER, f"{text}.toml")
        machine: Machine = MixedCluster.parse(file.read_text(encoding="utf-8"), f"preset {text}")
    elif is_path(name_or_path) and "groups" in toml_of(content := read_text(Path(name_or_path)), text):
        machine = MixedCluster.parse(content, text)
    elif is_path(name_or_path) or text in presets():
        machine = load_cluster(name_or_path)
    else:
        raise unknown_preset(text, (*presets(), *mixed_presets()))
    machine = machine if gpus is None else machine.with_gpus(gpus)
    return machine.merged() if isinstance(machine, MixedCluster) else machine


def memory_bytes_of(machine: Machine) -> int:
    """Of the device that has most."""
    groups = machine.groups if isinstance(machine, MixedCluster) else (machine,)
    return max(group.device.memory_bytes for group in groups)


def of_each_group(machine: Machine, change: Callable[[Cluster], Cluster]) -> Machine:
    """The machine with every group changed; one kind of machine is one group."""
    if isinstance(machine, MixedCluster):
        return replace(machine, groups=tuple(map(change, machine.groups)))
    return change(machine)


def slower(one: Link, other: Link) -> Link:
    """A link as slow as the slower of two in every respect."""
    if one == other:
        return one
    least = min(one, other, key=lambda link: link.bandwidth_bytes_per_s * link.efficiency)
    return replace(least, latency_s=max(one.latency_s, other.latency_s), start_s=max(one.start_s, other.start_s))


def cards_of(senders: int, group: Cluster) -> float:
    """Network cards that each of ``senders`` devices of a node has to itself when they all talk to another group."""
    owned = max(1.0, group.nics_per_node / group.gpus_per_node)
    return min(owned, group.nics_per_node / min(senders, group.gpus_per_node))


def joined_bytes_per_s(senders: int, one: Cluster, other: Cluster, link: Link) -> float:
    """What each of ``senders`` devices of one group reaches towards its own one of another group."""
    return link.towards(1) * min(cards_of(senders, one), cards_of(senders, other))


def _built(data: Mapping[str, Any]) -> MixedCluster:
    for key in data:
        if key not in ("name", "groups", "inter", "sources"):
            raise ClusterError(f"unknown field {key}; a mixed cluster has name, groups, inter and sources")
    name, listed = data.get("name"), data.get("groups")
    if not isinstance(name, str):
        raise ClusterError("field name is missing or no text; add it")
    if not isinstance(listed, list) or not all(isinstance(group, dict) for group in listed):
        raise ClusterError("the groups are missing; write a [[groups]] table for each")
    groups = tuple(_group(table, number) for number, table in enumerate(listed, 1))
    if not groups:
        raise ClusterError("the groups are missing; write a [[groups]] table for each")
    inter = link_of(data, "inter") if "inter" in data else _slowest([group.inter for group in groups])
    return MixedCluster(name, groups, inter, sources_of(data.get("sources", {})))


def _slowest(links: list[Link]) -> Link:
    found = links[0]
    for link in links[1:]:
        found = slower(found, link)
    return found


def _group(table: Mapping[str, Any], number: int) -> Cluster:
    try:
        if "preset" not in table:
            return build_cluster(table)
        for key in table:
            if key not in ("preset", "name", "gpus"):
                raise ClusterError(f"unknown field {key}; a group from a preset has preset, name and gpus only")
        preset = table["preset"]
        if not isinstance(preset, str) or preset not in presets():
            raise ClusterError(f"there is no preset {preset!r}; the presets are {', '.join(presets())}")
        cluster = load_cluster(preset, table.get("gpus"))
        name = table.get("name", cluster.name)
        if not isinstance(name, str):
            raise ClusterError(f"name is {name!r}; write a text in quotes")
        return replace(cluster, name=name)
    except ClusterError as error:
        raise ClusterError(f"group {number}: {error}") from None
