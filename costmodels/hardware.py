"""Machines as data: a cluster is a TOML file, shipped as a preset or written by a user or a measurement.

    Device    one accelerator (or CPU process): memory, peaks by dtype, bandwidth, launch cost, reachable fractions
    Link      one direction of a connection
    Cluster   how many devices, how many a node, the link inside a node and the network cards between nodes

The text form holds exactly the fields of these classes; the keys of ``[sources]`` name fields and say where each number
comes from:

    name = "my-box"
    gpus = 4
    gpus_per_node = 4
    nics_per_node = 1

    [device]
    name = "..."
    ...
    [device.peak_flops_per_s]
    bfloat16 = 312e12
    [intra]
    bandwidth_bytes_per_s = 300e9
    latency_s = 1.9e-6
    [inter]
    ...
    [sources]
    "device.memory_bytes" = "..."

Only peaks that the hardware has are listed. A dtype that is missing runs at the float32 rate; "tfloat32" is kept apart
since torch multiplies float32 matrices in full float32 unless told otherwise.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodels.software import OURS, Software

if TYPE_CHECKING:
    from costmodels.measured import MeasuredTables

KINDS = ("gpu", "cpu")


class ClusterError(ValueError):
    """A cluster that cannot be read or makes no sense; the message says what, where and what to do."""


@dataclass(frozen=True)
class Device:
    """One device.

    ``memory_bytes``: what a process may plan to fill. ``peak_flops_per_s``: dense peak by dtype name (a multiply-add
    is two operations); read only. ``kernel_launch_s``: least time between the starts of two operators,
    which the host takes to send one. ``kernel_least_s``: what one keeps a GPU at least, however small.
    ``serial_share``: the part of what the host and the GPU take for a sequence of operators, summed, that it takes at least:
    1/2 if either always hides the other, 1 if they take turns.
    ``matmul_efficiency``, ``attention_efficiency`` and ``memory_efficiency``: the fraction of the peak that a large
    matrix product, a fused attention kernel and a large copy reach. ``multiprocessors`` and ``matmul_tile``: how a
    matrix product is cut (costmodels.compute); 1 and 1 mean that its shape has no effect. ``alignment_bytes``: what rows in
    half precision must be a multiple of to be loaded at the full rate. ``overlap_slowdown``: the part of its time that
    communication costs the operators it overlaps with.
    """

    name: str
    memory_bytes: int
    peak_flops_per_s: Mapping[str, float] = field(hash=False)
    memory_bytes_per_s: float
    kernel_launch_s: float
    matmul_efficiency: float
    kind: str = "gpu"
    attention_efficiency: float = 0.5
    memory_efficiency: float = 1.0
    multiprocessors: int = 1
    matmul_tile: int = 1
    alignment_bytes: int = 1
    overlap_slowdown: float = 0.0
    kernel_least_s: float = 0.0
    serial_share: float = 0.5

    def __post_init__(self) -> None:
        peaks = {str(dtype): float(peak) for dtype, peak in self.peak_flops_per_s.items()}
        object.__setattr__(self, "peak_flops_per_s", peaks)
        _require(self.kind in KINDS, f"device.kind is {self.kind!r}", f"write one of {', '.join(KINDS)}")
        _require("float32" in peaks, "device.peak_flops_per_s has no float32", "add it: other dtypes fall back to it")
        for dtype, peak in peaks.items():
            _positive(f"device.peak_flops_per_s.{dtype}", peak)
        for name in ("memory_bytes", "memory_bytes_per_s", "multiprocessors", "matmul_tile", "alignment_bytes"):
            _positive(f"device.{name}", getattr(self, name))
        for name in ("kernel_launch_s", "kernel_least_s"):
            _not_negative(f"device.{name}", getattr(self, name))
        _require(
            0 <= self.overlap_slowdown < 1,
            f"device.overlap_slowdown is {self.overlap_slowdown}",
            "it must be 0 or more and less than 1",
        )
        _require(
            0.5 <= self.serial_share <= 1,
            f"device.serial_share is {self.serial_share}",
            "it must be between 0.5 and 1",
        )
        for name in ("matmul_efficiency", "attention_efficiency", "memory_efficiency"):
            _fraction(f"device.{name}", getattr(self, name))

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.kind, self.memory_bytes, self.memory_bytes_per_s, self.matmul_efficiency))

    def __hash__(self) -> int:
        return self._hash

    def host_s(self, launches: int) -> float:
        """The least time the host takes for so many operators while a GPU works; on a CPU it is part of their own time."""
        return launches * self.kernel_launch_s if self.kind != "cpu" else 0.0

    def elapsed_s(self, on_device_s: float, launches: int) -> float:
        """Of a sequence of so many operators that take ``on_device_s``: as long as the device or the host takes, or a part of
        both."""
        host_s = self.host_s(launches)
        return max(on_device_s, host_s, self.serial_share * (on_device_s + host_s))

    def peak(self, dtype: str) -> float:
        """Peak operations per second in ``dtype``; that of float32 where the device lists none."""
        return self.peak_flops_per_s.get(dtype) or self.peak_flops_per_s["float32"]


@dataclass(frozen=True)
class Link:
    """One direction of a connection: inside a node that of one device, between nodes that of one network card.

    ``latency_s``: of one hop; ``start_s``: what a collective takes besides, however small and near.
    ``efficiency``: fraction of the bandwidth that a large transfer reaches. ``peer_bandwidth_bytes_per_s``: what one
    device reaches towards a single other one, where that is less (a mesh of point-to-point links); 0 means no such
    limit.
    """

    bandwidth_bytes_per_s: float
    latency_s: float
    efficiency: float = 1.0
    peer_bandwidth_bytes_per_s: float = 0.0
    start_s: float = 0.0

    def __post_init__(self) -> None:
        _positive("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s)
        _not_negative("latency_s", self.latency_s)
        _fraction("efficiency", self.efficiency)
        _not_negative("peer_bandwidth_bytes_per_s", self.peer_bandwidth_bytes_per_s)
        _not_negative("start_s", self.start_s)

    def towards(self, peers: int) -> float:
        """Bytes per second that one device reaches when it talks to ``peers`` others at once."""
        bandwidth = self.bandwidth_bytes_per_s
        if self.peer_bandwidth_bytes_per_s:
            bandwidth = min(bandwidth, peers * self.peer_bandwidth_bytes_per_s)
        return bandwidth * self.efficiency


@dataclass(frozen=True)
class Cluster:
    """``gpus`` devices that fill nodes of ``gpus_per_node`` in rank order (the last may be part filled).

    ``intra`` is one device's link inside its node, ``inter`` one network card; a node has ``nics_per_node`` of them.
    ``software``: what runs on it, and ``measured``: times measured there (costmodels.measured); neither is part of the text
    form. ``sources``: (field, where its number comes from) pairs.
    """

    name: str
    device: Device
    gpus: int
    gpus_per_node: int
    intra: Link
    inter: Link
    nics_per_node: int = 1
    software: Software = OURS
    sources: tuple[tuple[str, str], ...] = ()
    measured: MeasuredTables | None = None

    def __post_init__(self) -> None:
        for name in ("gpus", "gpus_per_node", "nics_per_node"):
            _positive(name, getattr(self, name))

    @property
    def nodes(self) -> int:
        return math.ceil(self.gpus / self.gpus_per_node)

    def with_gpus(self, gpus: int) -> Cluster:
        """The same machines with ``gpus`` devices. Raises ClusterError unless that is a positive integer."""
        if isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 1:
            raise ClusterError(f"cannot use {gpus!r} gpus of cluster {self.name}: pass a positive whole number")
        return replace(self, gpus=gpus)

    def run_by(self, software: Software) -> Cluster:
        """The same machines running ``software``, whose host code and kernels may be slower."""
        device = replace(
            self.device,
            kernel_launch_s=max(self.device.kernel_launch_s, software.launch_s),
            attention_efficiency=self.device.attention_efficiency * software.attention_share,
            matmul_efficiency=self.device.matmul_efficiency * software.matmul_share_on(self.device.name),
        )
        return replace(self, software=software, device=device)

    def to_toml(self) -> str:
        """The text form; ``Cluster.parse`` reads it back to an equal cluster."""
        lines = [f"{f.name} = {text_of(getattr(self, f.name))}" for f in fields(self) if f.name in CLUSTER_SCALARS]
        return "\n".join([*lines, *tables(self)]) + "\n"

    @staticmethod
    def parse(text: str, source: str = "cluster") -> Cluster:
        """Read the text form. Raises ClusterError naming ``source`` and the field that is wrong."""
        data = toml_of(text, source)
        if "groups" in data:
            raise ClusterError(f"{source} describes groups of unequal machines; here machines of one kind are wanted")
        try:
            return build_cluster(data)
        except ClusterError as error:
            raise ClusterError(f"{source}: {error}") from None


_PEAKS = "peak_flops_per_s"
CLUSTER_SCALARS = ("name", "gpus", "gpus_per_node", "nics_per_node")
_TYPES = {"str": str, "int": int, "float": float}


def toml_of(text: str, source: str) -> dict[str, Any]:
    """Raises ClusterError naming ``source`` where ``text`` is no TOML."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(f"{source} is not valid TOML: {error}. Correct the file.") from None


def build_cluster(data: Mapping[str, Any]) -> Cluster:
    """A cluster from its TOML tables. Raises ClusterError naming the field that is wrong."""
    peaks = _table(_table(data, "device"), _PEAKS, "device.")
    for dtype, peak in peaks.items():
        _number(f"device.{_PEAKS}.{dtype}", peak)
    values: dict[str, Any] = {
        "device": _build(Device, _table(data, "device"), "device.", {_PEAKS: peaks}),
        "intra": link_of(data, "intra"),
        "inter": link_of(data, "inter") if "inter" in data else link_of(data, "intra"),
        "sources": sources_of(data.get("sources", {})),
    }
    cluster: Cluster = _build(Cluster, data, "", values)
    return cluster


def tables(cluster: Cluster, prefix: str = "") -> list[str]:
    """The lines of the text form behind its plain fields; ``prefix``: of the names of tables."""
    device = cluster.device
    lines = ["", f"[{prefix}device]"]
    lines += [f"{f.name} = {text_of(getattr(device, f.name))}" for f in fields(Device) if f.name != _PEAKS]
    lines += ["", f"[{prefix}device.{_PEAKS}]"]
    lines += [f"{text_of(dtype)} = {text_of(peak)}" for dtype, peak in device.peak_flops_per_s.items()]
    for name in ("intra", "inter"):
        link = getattr(cluster, name)
        lines += ["", f"[{prefix}{name}]", *(f"{f.name} = {text_of(getattr(link, f.name))}" for f in fields(Link))]
    lines += ["", f"[{prefix}sources]", *(f"{text_of(key)} = {text_of(source)}" for key, source in cluster.sources)]
    return lines


def presets() -> tuple[str, ...]:
    """The names ``load_cluster`` knows, sorted."""
    folder = resources.files(__package__).joinpath("presets")
    return tuple(sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml")))


def load_cluster(name_or_path: str | Path, gpus: int | None = None) -> Cluster:
    """The preset of that name, or the TOML file at that path, with ``gpus`` devices (default: as the file says).

    A text with a path separator or ending in ``.toml`` is a path. Any number of gpus works: the nodes it takes are
    filled in order. Raises ClusterError.
    """
    text = str(name_or_path)
    if is_path(name_or_path):
        cluster = Cluster.parse(read_text(Path(name_or_path)), text)
    elif text in presets():
        file = resources.files(__package__).joinpath("presets", f"{text}.toml")
        cluster = Cluster.parse(file.read_text(encoding="utf-8"), f"preset {text}")
    else:
        raise unknown_preset(text, presets())
    return cluster if gpus is None else cluster.with_gpus(gpus)


def unknown_preset(text: str, names: Sequence[str]) -> ClusterError:
    """The error that says which of ``names`` may be meant."""
    wanted = text.lower()
    close = [name for name in names if wanted and wanted in name][:1]
    close = close or difflib.get_close_matches(wanted, names, n=1, cutoff=0.3)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return ClusterError(
        f"there is no cluster preset {text!r}.{hint} The presets are {', '.join(names)}; "
        "for a machine of your own pass the path of a TOML file."
    )


def is_path(name_or_path: str | Path) -> bool:
    """Whether it names a file, not a preset."""
    text = str(name_or_path)
    return isinstance(name_or_path, Path) or text.endswith(".toml") or "/" in text or "\\" in text


def read_text(path: Path) -> str:
    """Raises ClusterError for a file that cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ClusterError(
            f"cannot read cluster file {path}: {error.strerror}. "
            f"Check the path, or pass a preset: {', '.join(presets())}."
        ) from None
    except UnicodeDecodeError:
        raise ClusterError(f"cluster file {path} is not text. Pass a TOML file.") from None


def _build(cls: type, data: Mapping[str, Any], prefix: str, ready: Mapping[str, Any]) -> Any:
    """An instance of ``cls`` from a TOML table: fields in ``ready`` as they are, the others checked by their type."""
    known = {f.name: f for f in fields(cls) if f.name not in ("software", "measured")}
    for key in data:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {prefix}{close[0]}?" if close else f"the fields are {', '.join(known)}"
            raise ClusterError(f"unknown field {prefix}{key}; {hint}")
    values: dict[str, Any] = {}
    for name, f in known.items():
        if name in ready:
            values[name] = ready[name]
        elif name in data:
            values[name] = _typed(prefix + name, data[name], _TYPES[str(f.type)])
        elif f.default is MISSING:
            raise ClusterError(f"field {prefix}{name} is missing; add it")
    return cls(**values)


def _typed(name: str, value: object, kind: type) -> Any:
    if kind is str:
        _require(isinstance(value, str), f"{name} is {value!r}", "write a text in quotes")
        return value
    number = _number(name, value)
    if kind is int:
        _require(number == int(number), f"{name} is {value!r}", "write a whole number")
        return int(number)
    return float(number)


def _number(name: str, value: object) -> float:
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    _require(usable, f"{name} is {value!r}", "write a finite number")
    assert isinstance(value, int | float)
    return value


def _table(data: Mapping[str, Any], name: str, prefix: str = "") -> Mapping[str, Any]:
    value = data.get(name)
    if not isinstance(value, dict):
        raise ClusterError(f"table [{prefix}{name}] is missing; add it")
    return value


def link_of(data: Mapping[str, Any], name: str) -> Link:
    try:
        link: Link = _build(Link, _table(data, name), "", {})
    except ClusterError as error:
        raise ClusterError(f"in [{name}], {error}") from None
    return link


def sources_of(data: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(data, dict) or not all(isinstance(text, str) for text in data.values()):
        raise ClusterError('[sources] must hold lines such as "device.memory_bytes" = "where the number is from"')
    return tuple(data.items())


def _require(condition: bool, what: str, remedy: str) -> None:
    if not condition:
        raise ClusterError(f"{what}; {remedy}")


def _positive(name: str, value: float) -> None:
    _require(math.isfinite(value) and value > 0, f"{name} is {value}", "it must be a finite number above 0")


def _not_negative(name: str, value: float) -> None:
    _require(math.isfinite(value) and value >= 0, f"{name} is {value}", "it must be a finite number, 0 or more")


def _fraction(name: str, value: float) -> None:
    _require(0 < value <= 1, f"{name} is {value}", "it must be above 0 and at most 1")


def text_of(value: object) -> str:
    """A TOML value. JSON escapes are TOML escapes, but for DEL, which JSON leaves as it is."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
