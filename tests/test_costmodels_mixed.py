"""Clusters of unequal machines: their text form, what makes them up, and prices of several devices as one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from costmodels.collectives import COLLECTIVES, collective_time_s
from costmodels.compute import copy_s, optimizer_step_s
from costmodels.hardware import Cluster, ClusterError, Link, load_cluster, presets
from costmodels.mixed import MixedCluster, cards_of, load_machine, mixed_presets, slower
from costmodels.software import load_software, software_names
from costmodels.views import Several, Views, fastest

NEW, OLD = (replace(load_cluster(name, 8), name=short) for name, short in (("dgx-a100-80gb", "new"), ("l4", "old")))
JOIN = Link(5e9, 1e-5)
TWO = MixedCluster("two", (NEW, OLD), JOIN)


@pytest.mark.parametrize("name", mixed_presets())
def test_presets_are_made_of_presets_and_their_text_reads_back(name: str) -> None:
    machine = load_machine(name)
    assert isinstance(machine, MixedCluster) and machine.name == name and machine.name not in presets()
    assert MixedCluster.parse(machine.to_toml()) == machine
    assert dict(machine.sources).keys() >= {"groups", "inter.bandwidth_bytes_per_s", "inter.latency_s"}
    assert machine.inter == slower(machine.groups[0].inter, machine.groups[1].inter)
    for group in machine.groups:
        assert all(source for _, source in group.sources)


def test_what_is_left_out_of_a_file(tmp_path: Path) -> None:
    text = 'name = "mine"\n[[groups]]\npreset = "dgx-h100"\n[[groups]]\npreset = "l4"\nname = "small"\ngpus = 3\n'
    path = tmp_path / "mine.toml"
    path.write_text(text)
    machine = load_machine(path)
    assert isinstance(machine, MixedCluster)
    assert machine.words == "8 dgx-h100 + 3 small" and machine.gpus == 11
    h100, l4 = load_cluster("dgx-h100"), load_cluster("l4")
    assert machine.inter == slower(h100.inter, l4.inter)
    assert machine.group("small").device == l4.device
    with pytest.raises(
        ClusterError, match=r"mine.toml describes groups of unequal machines; here machines of one kind"
    ):
        load_cluster(path)
    assert load_machine("l4") == load_cluster("l4")
    with pytest.raises(
        ClusterError, match=r"no cluster preset 'dgx-v100-a100'. Did you mean .* dgx-a100-v100, dgx-h100-a100"
    ):
        load_machine("dgx-v100-a100")


GROUP = '[[groups]]\npreset = "l4"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("groups = ", "file is not valid TOML"),
        (GROUP, "file: field name is missing"),
        ('name = "x"', "file: the groups are missing; write a"),
        ('name = "x"\ngroups = 3', "file: the groups are missing"),
        ('name = "x"\ngroups = []', "file: the groups are missing"),
        ('name = "x"\n' + GROUP, "file: a mixed cluster has 1 groups; give it 2 to 4"),
        ('name = "x"\n' + 2 * GROUP, "file: two groups are named 'l4'"),
        ('name = "x"\n' + GROUP + '[[groups]]\npreset = "l5"', "file: group 2: there is no preset 'l5'"),
        ('name = "x"\n' + GROUP + '[[groups]]\npreset = "l4"\ngpus = 0', "file: group 2: cannot use 0 gpus"),
        ('name = "x"\n' + GROUP + '[[groups]]\npreset = "l4"\nname = "a b"', "a group is named 'a b'"),
        ('name = "x"\n' + GROUP + '[[groups]]\npreset = "l4"\nname = 3', "file: group 2: name is 3"),
        ('name = "x"\n' + GROUP + '[[groups]]\npreset = "l4"\nnodes = 3', "file: group 2: unknown field nodes"),
        ('name = "x"\n' + GROUP + '[[groups]]\nname = "own"\ngpus = 3', r"file: group 2: table \[device\] is missing"),
        ('name = "x"\nnodes = 3\n' + GROUP, "file: unknown field nodes; a mixed cluster has name, groups"),
        (
            'name = "x"\n' + GROUP + "[inter]\nlatency_s = 1",
            r"file: in \[inter\], field bandwidth_bytes_per_s is missing",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said(text: str, words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        MixedCluster.parse(text, "file")


def test_kinds_of_devices_do_not_mix() -> None:
    with pytest.raises(ClusterError, match="'gpu' and 'cpu'"):
        replace(TWO, groups=(NEW, replace(OLD, device=replace(OLD.device, kind="cpu"))))


def test_numbers_of_gpus() -> None:
    assert TWO.with_gpus(16) == TWO
    some = TWO.with_gpus(11)
    assert isinstance(some, MixedCluster) and some.words == "8 new + 3 old"
    assert TWO.with_gpus(8) == NEW and TWO.with_gpus(3) == replace(NEW, gpus=3)
    more = TWO.with_gpus(32)
    assert isinstance(more, MixedCluster) and more.words == "16 new + 16 old"
    with pytest.raises(ClusterError, match=r"has 16 devices \(8 new \+ 8 old\); 24 is more, and no multiple of it"):
        TWO.with_gpus(24)
    with pytest.raises(ClusterError, match="positive whole number"):
        TWO.with_gpus(0)


def test_groups_that_do_not_differ_are_one() -> None:
    again = replace(NEW, name="again")
    assert replace(TWO, groups=(NEW, again), inter=NEW.inter).merged() == replace(NEW, name="two", gpus=16)
    assert isinstance(replace(TWO, groups=(NEW, again)).merged(), MixedCluster)  # the link between them is another
    part = replace(TWO, groups=(replace(NEW, gpus=4), again), inter=NEW.inter)
    assert part.merged() == part  # the first group's node is not full
    three = replace(TWO, groups=(NEW, again, OLD), inter=NEW.inter).merged()
    assert isinstance(three, MixedCluster) and three.words == "16 new + 8 old"


def test_cards_are_shared_by_the_senders_of_a_node() -> None:
    v100 = load_cluster("dgx-v100-32gb")
    assert [cards_of(n, v100) for n in (1, 2, 4, 8, 16)] == [1.0, 1.0, 1.0, 0.5, 0.5]


def test_software_runs_on_every_group() -> None:
    software = load_software(software_names()[1])
    assert {group.software for group in TWO.run_by(software).groups} == {software}


PRICES = {
    "copy": lambda device: copy_s(10**6, device),
    "update": lambda device: optimizer_step_s(10**6, "adamw", device, launches=3),
    "host": lambda device: device.host_s(7),
    "elapsed": lambda device: device.elapsed_s(1e-5, 7),
}  # fmt: skip


@pytest.mark.parametrize("name", PRICES)
def test_several_devices_take_the_least_or_the_most_of_any(name: str) -> None:
    devices = (NEW.device, OLD.device, load_cluster("dgx-v100-32gb").device)
    each = [PRICES[name](device) for device in devices]
    assert PRICES[name](Several(devices, slowest=False)) == min(each)
    assert PRICES[name](Several(devices, slowest=True)) == max(each)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_several_clusters_take_the_least_or_the_most_of_any(kind: str) -> None:
    each = [collective_time_s(kind, 1e8, 4, 2, cluster) for cluster in (NEW, OLD)]
    assert collective_time_s(kind, 1e8, 4, 2, fastest((NEW, OLD))) == min(each)
    assert collective_time_s(kind, 1e8, 4, 2, Views((NEW, OLD), slowest=True)) == max(each)


def test_equal_views_are_one() -> None:
    assert fastest((NEW, NEW)) == NEW
    assert Views((NEW, replace(NEW, gpus=16)), slowest=True).device == NEW.device
    faster = fastest((NEW, OLD)).of_devices(lambda device: replace(device, kernel_launch_s=0.0))  # type: ignore[union-attr]
    assert faster.device.host_s(5) == 0.0
    assert isinstance(NEW, Cluster)
