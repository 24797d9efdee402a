"""This machine measured with its ranks at work, kept in a file, and read back."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from costmodels.compute import operator_time_s
from costmodels.hardware import Cluster, Device, Link
from planner.errors import BadInput, RankFailed
from runtime import measure
from runtime.machine import free_memory_bytes, processor_name
from runtime.measure import DTYPES, SIZES, measured, measured_cluster, round_down


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def two(folder: Path) -> Cluster:
    return measured_cluster(2, cache_dir=folder)


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever tries to measure fails."""

    def start(*_: object, **__: object) -> None:
        raise RankFailed("rank 1 was killed by SIGKILL while starting")

    monkeypatch.setattr(measure.LocalRanks, "start", start)


@pytest.mark.gloo
def test_two_ranks_give_a_plausible_cluster(two: Cluster) -> None:
    device = two.device
    assert (two.name, two.gpus, two.gpus_per_node, two.nodes) == ("this machine (2 ranks)", 2, 2, 1)
    assert device.kind in ("cpu", "gpu") and device.name
    assert tuple(device.peak_flops_per_s) == DTYPES
    assert all(1e7 < peak < 1e16 for peak in device.peak_flops_per_s.values())
    assert 1e8 < device.memory_bytes_per_s < 1e14
    assert 1e-8 < device.kernel_launch_s < 1e-2
    assert two.intra == two.inter
    assert 1e5 < two.intra.bandwidth_bytes_per_s < 1e14 and two.intra.latency_s < 1.0
    assert device.matmul_efficiency == 1.0
    if device.kind == "cpu":
        assert 10**6 < device.memory_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2


@pytest.mark.gloo
def test_every_number_that_was_measured_says_so(two: Cluster) -> None:
    sources = dict(two.sources)
    assert set(sources.values()) == {"measured"}
    peaks = {f"device.peak_flops_per_s.{dtype}" for dtype in DTYPES}
    assert peaks | {"device.memory_bytes", "device.kernel_launch_s", "intra.latency_s"} <= set(sources)


@pytest.mark.gloo
def test_the_next_call_reads_the_file(two: Cluster, folder: Path, no_ranks: None) -> None:
    (file,) = folder.iterdir()  # and nothing beside it
    assert file.suffix == ".toml" and "2ranks" in file.name
    said: list[str] = []
    assert measured_cluster(2, cache_dir=folder, progress=said.append) == two
    assert said == []


@pytest.mark.gloo
@pytest.mark.parametrize("content", [b"gpus = ", b"\xff\xfe", b"", None])
def test_a_broken_file_is_measured_again(
    two: Cluster, folder: Path, tmp_path: Path, no_ranks: None, content: bytes | None
) -> None:
    (file,) = folder.iterdir()
    wrong = replace(two, gpus=3).to_toml().encode()  # a good file, but of another number of ranks
    (tmp_path / file.name).write_bytes(wrong if content is None else content)
    with pytest.raises(RankFailed, match="while starting"):
        measured_cluster(2, cache_dir=tmp_path)


@pytest.mark.gloo
def test_refresh_measures_again_and_replaces_the_file(two: Cluster, folder: Path, tmp_path: Path) -> None:
    (file,) = folder.iterdir()
    old = replace(two, name="yesterday")
    (tmp_path / file.name).write_text(old.to_toml())
    assert measured_cluster(2, cache_dir=tmp_path) == old
    said: list[str] = []
    new = measured_cluster(2, cache_dir=tmp_path, refresh=True, progress=said.append)
    assert new.name == two.name and len(said) >= 2
    assert Cluster.parse((tmp_path / file.name).read_text()) == new
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_the_default_folder_follows_the_environment(
    two_by_hand: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_ranks: None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said: list[str] = []
    with pytest.raises(RankFailed):
        measured_cluster(2, progress=said.append)
    assert said[0].startswith("measuring this machine with 2 ranks")
    names = []
    monkeypatch.setattr(measure, "_read", lambda path, gpus: names.append(path) or two_by_hand)
    assert measured_cluster(2) == two_by_hand
    assert names[0].parent == tmp_path / "meshwright"


def test_a_folder_that_cannot_be_written_is_done_without(
    two_by_hand: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoRanks:
        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(measure.LocalRanks, "start", lambda *_, **__: NoRanks())
    monkeypatch.setattr(measure, "_measure", lambda *_: two_by_hand)
    (tmp_path / "file").touch()
    said: list[str] = []
    assert measured_cluster(2, cache_dir=tmp_path / "file" / "folder", progress=said.append) == two_by_hand
    assert said[-1].startswith("cannot keep the measurement")


@pytest.mark.parametrize("gpus", [0, -1, 10**6])
def test_a_number_of_ranks_that_cannot_be(gpus: int, tmp_path: Path) -> None:
    with pytest.raises(BadInput):
        measured_cluster(gpus, cache_dir=tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.fixture
def two_by_hand() -> Cluster:
    device = Device("box", 10**9, {"float32": 1.23456789e10}, 1.6e10, 1e-5, 1.0, "cpu")
    return measured(device, Link(1.23456e9, 1e-4), 2)


def test_numbers_are_short_and_survive_the_file(two_by_hand: Cluster) -> None:
    assert two_by_hand.device.peak("float32") == 1.235e10
    assert two_by_hand.intra.bandwidth_bytes_per_s == 1.235e9
    assert Cluster.parse(two_by_hand.to_toml()) == two_by_hand


def test_one_rank_says_what_its_link_is() -> None:
    device = Device("box", 10**9, {"float32": 1e10}, 1.6e10, 1e-5, 1.0, "cpu")
    alone = measured(device, Link(8e9, 1e-5), 1)
    assert alone.name == "this machine (1 rank)"
    assert "copy" in dict(alone.sources)["intra.bandwidth_bytes_per_s"]


@pytest.mark.parametrize("kind", sorted(SIZES))
def test_the_cost_model_knows_what_is_timed(kind: str) -> None:
    """Every call has a forward time of its own, and a backward where gradients are asked for."""
    sizes = SIZES[kind]
    device = Device("box", 10**9, {"float32": 1e12}, 1e12, 0.0, 1.0, "gpu" if kind == "cuda" else "cpu")
    calls = [
        measure.linear_call(sizes, "bfloat16", 256),
        measure.large_sum(sizes),
        *measure.memory_bound_operators(sizes),
    ]
    calls += measure.small_operators(kind)
    calls += [measure.attention_call(sizes, is_causal) for is_causal in (False, True)]
    for call in calls:
        time = operator_time_s(call.op, call.inputs, call.outputs, call.needs_grad, device, call.hint)
        assert time.forward_s > 0 and (time.backward_s > 0) == any(call.needs_grad), call


@pytest.mark.parametrize(("value", "rounded"), [(987654321, 980000000), (10, 10), (7, 7), (100, 100), (1999, 1900)])
def test_memory_is_rounded_down_to_two_digits(value: int, rounded: int) -> None:
    assert round_down(value) == rounded


def test_free_memory_is_some_of_the_memory() -> None:
    assert 0 < free_memory_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_the_processor_has_a_name() -> None:
    assert processor_name().strip()
