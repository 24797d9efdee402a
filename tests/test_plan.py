"""A plan survives its text form; anything else is refused in one message."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import InvalidPlan
from planner.ir.plan import VERSION, Plan
from tests.plan_examples import example_plan, plans


@given(plans())
@settings(max_examples=50)
def test_json_round_trip(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan


def test_text_is_the_same_each_time_and_file_round_trip(tmp_path: Path) -> None:
    plan = example_plan()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert (tmp_path / "plan.json").read_text() == example_plan().to_json()
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def message(text: str) -> str:
    with pytest.raises(InvalidPlan) as caught:
        Plan.from_json(text, "plan.json")
    told = str(caught.value)
    assert told.startswith("plan.json is ")
    assert "'planner plan'" in told
    return told


@given(st.integers(0, len(example_plan().to_json()) - 3))
def test_truncated(length: int) -> None:
    message(example_plan().to_json()[:length])


@given(st.text() | st.sampled_from(["[" * 100_000, "1e999", "null", "[]", "{}", '"x"', '{"version": 2}', "NaN"]))
def test_not_a_plan(text: str) -> None:
    message(text)


def test_other_version() -> None:
    data = json.loads(example_plan().to_json())
    data["version"] = VERSION + 1
    assert f"version {VERSION + 1}; this planner reads version {VERSION}" in message(json.dumps(data))
    del data["version"]
    assert "no version field" in message(json.dumps(data))


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in parsed JSON."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


PLACES = list(places(json.loads(example_plan().to_json())))


def edited(place: tuple[Any, ...], value: Any) -> str:
    data = copy.deepcopy(json.loads(example_plan().to_json()))
    at = data
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    return json.dumps(data)


@given(st.sampled_from(PLACES), st.sampled_from([None, "word", True, {"a": 1}, [[1]], [1, 2, 3], 1.5, 10**400, 7]))
@settings(max_examples=400)
def test_wrong_types(place: tuple[Any, ...], value: Any) -> None:
    """A value of another type is named or, where the type is right, taken as it is."""
    text = edited(place, value)
    try:
        plan = Plan.from_json(text, "plan.json")
    except InvalidPlan as error:
        assert str(error).startswith("plan.json is ")
    else:
        assert Plan.from_json(plan.to_json()) == plan
        taken: Any = json.loads(plan.to_json())
        for key in place:
            taken = taken[key]
        assert taken == value and isinstance(taken, bool) == isinstance(value, bool)


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        (("mesh",), 8, "Plan.mesh must be str, not int"),
        (("mesh",), "pp0", "is not a mesh"),
        (("micro_batches",), "4", "Plan.micro_batches must be int, not str"),
        (("micro_batches",), True, "Plan.micro_batches must be int, not bool"),
        (("stages",), [[0, 3, 6]], "Plan.stages must hold pairs"),
        (("stages", 0), [0, "3"], "Plan.stages must be int, not str"),
        (("recompute", 1), 0, "Plan.recompute must be str, not int"),
        (("bound_s",), None, "Plan.bound_s must be a number, not NoneType"),
        (("searched", 0, "objective_s"), "0.1", "Searched.objective_s must be a number, not str"),
        (("estimate",), [], "expected the fields of Estimate, found list"),
        (("estimate", "stages", 1, "memory", "weights_bytes"), 1.5, "MemoryEstimate.weights_bytes must be int"),
        (("extra",), 1, "Plan has no field 'extra'"),
        (("layouts", 0, "pp"), "x", "OperatorLayout has no field 'pp'"),
    ],
)
def test_the_field_is_named(place: tuple[Any, ...], value: Any, told: str) -> None:
    assert told in message(edited(place, value))


def test_missing_fields_are_named() -> None:
    for name in ("model", "mesh", "estimate", "bound_s"):
        data = json.loads(example_plan().to_json())
        del data[name]
        assert f"Plan lacks the field {name!r}" in message(json.dumps(data))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidPlan, match="cannot read plan .*missing.json: No such file"):
        Plan.load(tmp_path / "missing.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidPlan, match=r"binary\.json is not a plan: not text"):
        Plan.load(tmp_path / "binary.json")


def test_gap_and_configuration() -> None:
    plan = example_plan()
    assert plan.configuration == "pp2.dp2.tp2 mb=4 zero=0 recompute=some schedule=1f1b"
    assert plan.gap == pytest.approx(1 - plan.bound_s / plan.estimate.step_time_s)
