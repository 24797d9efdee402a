"""Clusters as data: presets read, round-trip and name the source of each number; bad files get one clear message."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.hardware import Cluster, ClusterError, Device, Link, load_cluster, presets
from costmodels.software import Software, load_software

EXPECTED = {
    "dgx-a100-80gb", "dgx-a100-40gb", "dgx-h100", "dgx-h200", "dgx-v100-32gb", "a100-pcie-80gb", "l4", "a10g", "l40s",
    "rtx-3090", "rtx-4090", "mi300x", "b200", "dgx-v100-16gb", "dgx-2", "gb200-nvl72", "mi250x",
}  # fmt: skip
SMALL = """
name = "box"
gpus = 2
gpus_per_node = 2
[device]
name = "chip"
memory_bytes = 8e9
memory_bytes_per_s = 100e9
kernel_launch_s = 0
matmul_efficiency = 1.0
[device.peak_flops_per_s]
float32 = 1e12
[intra]
bandwidth_bytes_per_s = 10e9
latency_s = 1e-6
"""


def test_the_presets_are_these() -> None:
    assert set(presets()) == EXPECTED


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_preset_round_trips_and_names_a_source_for_every_number(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert Cluster.parse(cluster.to_toml()) == cluster
    data = tomllib.loads(resources.files("costmodels").joinpath("presets", f"{name}.toml").read_text())
    numbers = {"gpus_per_node", "nics_per_node"}
    numbers |= {f"{table}.{key}" for table in ("intra", "inter") for key in data[table]}
    numbers |= {f"device.{key}" for key, value in data["device"].items() if isinstance(value, int | float)}
    numbers |= {f"device.peak_flops_per_s.{dtype}" for dtype in data["device"]["peak_flops_per_s"]}
    assert set(dict(cluster.sources)) == numbers
    assert all(dict(cluster.sources).values())


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_figures_of_a_preset_are_in_proportion(name: str) -> None:
    """Limits that no machine of the last ten years breaks: a slip of a unit or of a power of ten does."""
    cluster, device = load_cluster(name), load_cluster(name).device
    assert device.peak("float16") >= device.peak("float32") >= device.peak("float64")
    assert 30 < device.peak("float16") / device.memory_bytes_per_s < 500  # operations a byte
    assert 5e-3 < device.memory_bytes / device.memory_bytes_per_s < 0.1  # seconds to read all of its memory
    assert device.memory_bytes_per_s > 4 * cluster.intra.bandwidth_bytes_per_s
    assert cluster.intra.bandwidth_bytes_per_s > cluster.inter.bandwidth_bytes_per_s
    assert cluster.intra.latency_s < 2 * cluster.inter.latency_s
    assert cluster.gpus % cluster.gpus_per_node == 0 and cluster.nics_per_node <= cluster.gpus_per_node
    assert load_cluster(name, 4 * cluster.gpus).nodes == 4 * cluster.nodes


def test_published_figures() -> None:
    a100, h100 = load_cluster("dgx-a100-80gb"), load_cluster("dgx-h100")
    assert a100.device.peak("bfloat16") == 312e12
    assert a100.device.memory_bytes_per_s == 2039e9
    assert (a100.intra.bandwidth_bytes_per_s, a100.inter.bandwidth_bytes_per_s) == (300e9, 25e9)
    assert h100.device.peak("float16") == 989e12
    assert load_cluster("dgx-h200").device.memory_bytes == 141_000_000_000


def test_a_dtype_without_hardware_runs_at_the_float32_rate() -> None:
    device = load_cluster("dgx-v100-32gb").device
    assert device.peak("bfloat16") == device.peak("float32") == 15.7e12


@pytest.mark.parametrize(("gpus", "nodes"), [(1, 1), (8, 1), (9, 2), (16, 2), (20, 3)])
def test_any_number_of_gpus_fills_nodes_in_order(gpus: int, nodes: int) -> None:
    cluster = load_cluster("dgx-h100", gpus)
    assert (cluster.gpus, cluster.nodes) == (gpus, nodes)


def test_a_point_to_point_mesh_is_slow_towards_few_peers() -> None:
    link = load_cluster("mi300x").intra
    assert link.towards(1) == pytest.approx(64e9 * link.efficiency)
    assert link.towards(7) == pytest.approx(448e9 * link.efficiency)
    assert load_cluster("dgx-h100").intra.towards(1) == load_cluster("dgx-h100").intra.towards(7)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "box.toml"
    path.write_text(SMALL)
    cluster = load_cluster(path, gpus=4)
    assert (cluster.gpus, cluster.nodes) == (4, 2)
    assert cluster.inter == cluster.intra  # a single node needs no [inter]
    assert cluster.device.memory_bytes == 8_000_000_000
    assert load_cluster(str(path)).gpus == 2
    path.write_text(cluster.to_toml())
    assert load_cluster(path) == cluster


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("gpus = 2", "gpus = 0"), "gpus is 0"),
        (("gpus = 2", "gpus = 2.5"), "gpus is 2.5; write a whole number"),
        (("gpus = 2", "gpus = true"), "gpus is True; write a finite number"),
        (("gpus_per_node = 2", ""), "field gpus_per_node is missing; add it"),
        (("memory_bytes = 8e9", "memory_byte = 8e9"), "field device.memory_byte; did you mean device.memory_bytes?"),
        (("memory_bytes = 8e9", "memory_bytes = inf"), "device.memory_bytes is inf"),
        (("memory_bytes = 8e9", 'memory_bytes = "8 GB"'), "device.memory_bytes is '8 GB'"),
        (("matmul_efficiency = 1.0", "matmul_efficiency = 1.5"), "it must be above 0 and at most 1"),
        (("matmul_efficiency = 1.0", 'matmul_efficiency = 1.0\nkind = "tpu"'), "write one of gpu, cpu"),
        (("float32 = 1e12", "float16 = 1e12"), "has no float32"),
        (("float32 = 1e12", "float32 = -1"), "device.peak_flops_per_s.float32 is -1"),
        (("latency_s = 1e-6", "latency_s = nan"), "in [intra], latency_s is nan"),
        (("latency_s = 1e-6", "delay = 1"), "in [intra], unknown field delay"),
        (("[intra]", "[link]"), "table [intra] is missing"),
        (("[device]", "[device"), "is not valid TOML"),
        (("[intra]", "[sources]\nx = 1\n[intra]"), "[sources] must hold lines"),
    ],
)
def test_bad_files_say_what_where_and_what_to_do(tmp_path: Path, change: tuple[str, str], told: str) -> None:
    path = tmp_path / "bad.toml"
    text = SMALL.replace(*change)
    assert text != SMALL
    path.write_text(text)
    with pytest.raises(ClusterError) as caught:
        load_cluster(path)
    assert told in str(caught.value)
    assert str(path) in str(caught.value)


def test_an_unknown_preset_lists_the_names_and_the_closest() -> None:
    with pytest.raises(ClusterError, match=r"no cluster preset 'dgx-h10'.*Did you mean 'dgx-h100'\?") as caught:
        load_cluster("dgx-h10")
    assert all(name in str(caught.value) for name in presets())
    with pytest.raises(ClusterError, match="Did you mean 'dgx-a100-40gb'"):
        load_cluster("a100-40")
    with pytest.raises(ClusterError, match="cannot read cluster file nowhere.toml: No such file"):
        load_cluster("nowhere.toml")


@pytest.mark.parametrize("gpus", [0, -1, True, 2.0])
def test_a_number_of_gpus_that_is_none(gpus: object) -> None:
    with pytest.raises(ClusterError, match="positive whole number"):
        load_cluster("l4", gpus)  # type: ignore[arg-type]


@given(
    name=st.text(st.characters(exclude_categories=["Cs"])),
    dtype=st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    figures=st.tuples(*[st.floats(1e-12, 1e30)] * 4),
    counts=st.tuples(*[st.integers(1, 10**12)] * 3),
    share=st.floats(1e-6, 1),
)
def test_any_cluster_round_trips(
    name: str, dtype: str, figures: tuple[float, ...], counts: tuple[int, ...], share: float
) -> None:
    device = Device(name, counts[0], {"float32": figures[0], dtype: figures[1]}, figures[2], 0.0, share, kind="cpu")
    link = Link(figures[3], figures[2], share, figures[1])
    cluster = Cluster(name, device, counts[1], counts[2], link, link, sources=((dtype, name),))
    again = Cluster.parse(cluster.to_toml())
    assert again == cluster
    assert hash(again) == hash(cluster)
    assert again.to_toml() == cluster.to_toml()


def test_cost_models_load_neither_torch_nor_a_solver_nor_the_planner() -> None:
    code = (
        "import sys, costmodels.collectives, costmodels.compute, costmodels.memory, costmodels.hardware as h;"
        "h.load_cluster('dgx-h100'); print([m for m in ('torch', 'ortools', 'planner', 'numpy') if m in sys.modules])"
    )
    root = Path(__file__).parent.parent
    answer = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_a_gpu_and_its_host_overlap_in_part() -> None:
    device = replace(load_cluster("dgx-a100-80gb").device, kernel_launch_s=1e-3, serial_share=0.6)
    assert device.elapsed_s(0.1, 10) == 0.1  # the host is long done
    assert device.elapsed_s(1e-3, 10) == 0.01  # the GPU waits
    assert device.elapsed_s(0.01, 10) == pytest.approx(0.012)
    assert replace(device, kind="cpu").elapsed_s(0.01, 10) == 0.01
    with pytest.raises(ClusterError, match=r"device.serial_share is 0.4; it must be between 0.5 and 1"):
        replace(device, serial_share=0.4)


def test_software_with_slower_kernels() -> None:
    cluster = load_cluster("dgx-h100")
    slower = Software("old", attention_share=0.5, matmul_share=(("A100", 0.9), ("H100", 0.8)))
    device = cluster.run_by(slower).device
    assert device.attention_efficiency == pytest.approx(0.5 * cluster.device.attention_efficiency)
    assert device.matmul_efficiency == pytest.approx(0.8 * cluster.device.matmul_efficiency)
    other = load_cluster("dgx-v100-32gb")
    assert other.run_by(slower).device.matmul_efficiency == other.device.matmul_efficiency
    assert load_software("llm-foundry").matmul_share_on("H100-SXM-80GB") < 1
    with pytest.raises(ValueError, match=r"H100 is 1.5; it must be above 0 and at most 1"):
        Software("wrong", matmul_share=(("H100", 1.5),))
