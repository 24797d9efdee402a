"""Tables of measured times: prices by them, and their text form."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from costmodels.collectives import collective_time_s
from costmodels.compute import operator_time_s
from costmodels.hardware import Cluster, Device, Link
from costmodels.measured import (
    FREE,
    MEASURED,
    MODELLED,
    SCALED,
    Corrections,
    MeasuredCollective,
    MeasuredError,
    MeasuredOperator,
    MeasuredTables,
    MeasuredUpdate,
    OperatorCall,
    operator_price,
)

DEVICE = Device("box", 10**9, {"float32": 1e10}, 1e10, 1e-5, 1.0, "cpu")
EMPTY = MeasuredTables("box", "torch 2.11", 2, 1)


def linear(rows: int, inner: int = 64, needs: tuple[bool, ...] = (True, True)) -> OperatorCall:
    x, weight, y = ((rows, inner), "float32"), ((32, inner), "float32"), ((rows, 32), "float32")
    return OperatorCall("aten.linear.default", (x, weight), (y,), needs)


def softmax(rows: int) -> OperatorCall:
    x = ((rows, 32), "float32")
    return OperatorCall("aten.softmax.int", (x,), (x,), (True,), (("dim", -1), ("sizes", (1, 2)), ("causal", True)))


def modelled(call: OperatorCall):  # type: ignore[no-untyped-def]
    return operator_time_s(*call[:4], DEVICE, call.hint)


@pytest.fixture
def tables() -> MeasuredTables:
    rows = [MeasuredOperator(linear(64), 3e-4, 7e-4), MeasuredOperator(linear(1024), 1e-3, 2e-3)]
    messages = [
        MeasuredCollective("all_reduce", 2, 1, size, t) for size, t in ((1000, 1e-4), (3000, 3e-4), (2000, 5e-5))
    ]
    updates = [MeasuredUpdate("adamw", False, 1e-4, 2e-9)]
    return EMPTY.with_operators(rows).with_collectives(messages).with_updates(updates)


def test_a_measured_call_takes_what_it_took(tables: MeasuredTables) -> None:
    time, how = operator_price(linear(64), DEVICE, tables)
    assert (time.forward_s, time.backward_s, how) == (3e-4, 7e-4, MEASURED)
    assert time.forward_flops == modelled(linear(64)).forward_flops


def test_a_call_between_takes_the_ratio_of_the_nearest(tables: MeasuredTables) -> None:
    time, how = operator_price(linear(100), DEVICE, tables)
    base, near = modelled(linear(100)), modelled(linear(64))
    assert how == SCALED
    assert time.forward_s == pytest.approx(base.forward_s * 3e-4 / near.forward_s)
    assert time.backward_s == pytest.approx(base.backward_s * 7e-4 / near.backward_s)


def test_other_gradients_are_another_call(tables: MeasuredTables) -> None:
    only = linear(64, needs=(False, True))
    assert operator_price(only, DEVICE, tables)[1] == SCALED
    both = tables.with_operators([MeasuredOperator(only, 3e-4, 4e-4)])
    assert operator_price(only, DEVICE, both)[0].backward_s == 4e-4
    assert operator_price(linear(64), DEVICE, both)[0].backward_s == 7e-4


def test_what_was_never_measured_is_modelled_and_views_are_free(tables: MeasuredTables) -> None:
    assert operator_price(softmax(8), DEVICE, tables) == (modelled(softmax(8)), MODELLED)
    assert operator_price(linear(64), DEVICE, None) == (modelled(linear(64)), MODELLED)
    x = ((4, 4), "float32")
    assert operator_price(OperatorCall("aten.t.default", (x,), (x,), (True,)), DEVICE, tables)[1] == FREE


def test_the_last_time_of_a_call_counts(tables: MeasuredTables) -> None:
    again = tables.with_operators([MeasuredOperator(linear(64), 1e-4, 2e-4)])
    assert len(again.operators) == len(tables.operators)
    assert operator_price(linear(64), DEVICE, again)[0].forward_s == 1e-4


@pytest.mark.parametrize("rows", [16, 64, 100, 512, 1024, 4096])
def test_no_part_costs_less_than_its_share_of_a_bounding_price(tables: MeasuredTables, rows: int) -> None:
    """The measured times here are not subadditive: 64 rows take a third of 1024's, less for each."""
    cheap = tables.with_operators([MeasuredOperator(linear(64), 1e-5, 2e-5)])
    whole, _ = operator_price(linear(rows), DEVICE, cheap.bounding_below())
    for parts in (1, 2, 4):
        part, _ = operator_price(linear(rows // parts), DEVICE, cheap)
        assert parts * part.forward_s >= whole.forward_s * (1 - 1e-9)
        assert parts * part.backward_s >= whole.backward_s * (1 - 1e-9)


def test_collectives_are_read_off_and_none_takes_longer_than_a_larger_one(tables: MeasuredTables) -> None:
    def seconds(size: float) -> float:
        found = tables.collective_s("all_reduce", size, 2, 1)
        assert found is not None
        return found

    assert seconds(0) == seconds(10) == seconds(1000) == 5e-5  # 1e-4 was measured, more than for twice as much
    assert seconds(2000) == 5e-5
    assert seconds(2500) == pytest.approx(1.75e-4)
    assert seconds(4000) == pytest.approx(5.5e-4)
    single = EMPTY.with_collectives([MeasuredCollective("send", 2, 1, 100, 1e-3)])
    assert single.collective_s("send", 50, 2, 1) == 1e-3 and single.collective_s("send", 300, 2, 1) == pytest.approx(
        3e-3
    )
    assert tables.collective_s("all_reduce", 10, 4, 1) is None
    assert tables.collective_s("send", 10, 2, 1) is None
    bound = tables.bounding_below()
    for size in (500, 1500, 2500, 5000):
        assert 0 < bound.collective_s("all_reduce", 2 * size, 2, 1) <= 2 * seconds(size)  # type: ignore[operator]


def test_a_cluster_prices_messages_by_its_tables(tables: MeasuredTables) -> None:
    link = Link(1e9, 1e-5)
    cluster = Cluster("box", DEVICE, 4, 4, link, link)
    with_tables = replace(cluster, measured=tables)
    assert collective_time_s("all_reduce", 1000, 2, 1, with_tables) == 5e-5
    assert collective_time_s("all_reduce", 1000, 2, 2, with_tables) == 5e-5
    assert collective_time_s("all_gather", 1000, 2, 1, with_tables) == collective_time_s(
        "all_gather", 1000, 2, 1, cluster
    )
    assert Cluster.parse(with_tables.to_toml()) == cluster  # the text form is of the constants alone


def test_an_update_takes_tensors_and_bytes(tables: MeasuredTables) -> None:
    assert tables.update_s("adamw", 10**6, 3, sharded=False) == pytest.approx(3e-4 + 2e-3)
    assert tables.update_s("adamw", 10**6, 3, sharded=True) is None
    assert tables.update_s("sgd", 10**6, 3, sharded=False) is None


def test_corrections_multiply_every_price(tables: MeasuredTables) -> None:
    corrected = replace(tables, corrections=Corrections(2.0, 3.0, 5.0, 7.0, runs=1))
    time, _ = operator_price(linear(64), DEVICE, corrected)
    assert (time.forward_s, time.backward_s) == pytest.approx((6e-4, 2.1e-3))
    plain, how = operator_price(softmax(8), DEVICE, corrected)
    assert plain.forward_s == pytest.approx(2 * modelled(softmax(8)).forward_s) and how == MODELLED
    assert corrected.collective_s("all_reduce", 1000, 2, 1) == pytest.approx(2.5e-4)
    assert corrected.update_s("adamw", 0, 1, sharded=False) == pytest.approx(7e-4)
    assert tables.scaled(messages=0.5).collective_s("all_reduce", 1000, 2, 1) == pytest.approx(2.5e-5)


def test_the_text_form_comes_back_equal(tables: MeasuredTables) -> None:
    full = replace(tables.with_operators([MeasuredOperator(softmax(8), 1e-6, 0.0)]), corrections=Corrections(runs=2))
    again = MeasuredTables.parse(full.to_json())
    assert again == full and hash(again) == hash(full)
    assert MeasuredTables.parse(EMPTY.to_json()) == EMPTY
    assert full.bounding_below() != full


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("format",), 0, "format 1"),
        (("ranks",), "2", "ranks is '2'"),
        (("ranks",), True, "ranks is True"),
        (("operators", 0, "forward_s"), -1.0, r"operators\[0\].forward_s is -1.0"),
        (("operators", 0, "inputs"), [["float32"]], r"operators\[0\] is no operator call"),
        (("operators",), {}, "operators is {}"),
        (("collectives", 1, "seconds"), "fast", r"collectives\[1\].seconds is 'fast'"),
        (("collectives", 1), {"kind": "send"}, r"its fields are kind, ranks"),
        (("updates", 0, "sharded"), 1, r"updates\[0\].sharded is 1"),
        (("corrections", "forward"), 0.0, "correction forward is 0.0"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(
    tables: MeasuredTables, place: tuple[str | int, ...], value: object, words: str
) -> None:
    data = json.loads(tables.to_json())
    inside = data
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    with pytest.raises(MeasuredError, match=f"(?s)box.json: .*{words}.*Measure again"):
        MeasuredTables.parse(json.dumps(data), "box.json")


@pytest.mark.parametrize("text", ["", "[]", "{", "null"])
def test_what_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(MeasuredError, match="Measure again"):
        MeasuredTables.parse(text)
