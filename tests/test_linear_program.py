"""Linear programs: known answers, and the bound of a program cut short."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.solve.linear_program import LinearProgram


def test_a_known_answer() -> None:
    program = LinearProgram()
    x, y = program.variable(upper=4.0), program.variable(upper=3.0)
    program.price[x], program.price[y] = -3.0, -5.0
    program.row([(x, 3.0), (y, 2.0)], upper=18.0 - 6.0)
    found = program.solve(10.0)
    assert found.values == pytest.approx((2.0, 3.0))
    assert found.objective == pytest.approx(-21.0) and found.bound == pytest.approx(-21.0)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.lists(st.integers(1, 9), min_size=6, max_size=6),
    st.integers(0, 30),
)
def test_whole_numbers_by_enumeration(weights: list[int], gains: list[int], room: int) -> None:
    """A knapsack."""
    program = LinearProgram()
    taken = [program.variable(whole=True) for _ in weights]
    for x, gain in zip(taken, gains, strict=False):
        program.price[x] = -float(gain)
    program.row([(x, float(w)) for x, w in zip(taken, weights, strict=True)], upper=float(room))
    best = max(
        sum(g for g, t in zip(gains, choice, strict=False) if t)
        for choice in itertools.product((0, 1), repeat=len(weights))
        if sum(w for w, t in zip(weights, choice, strict=True) if t) <= room
    )
    assert program.solve(10.0).objective == pytest.approx(-best)


def test_a_lower_bound_of_a_variable_holds() -> None:
    program = LinearProgram()
    x = program.variable()
    program.lower[x], program.price[x] = 1.0, 2.0
    assert program.solve(10.0).objective == pytest.approx(2.0)


def test_no_solution_is_an_error() -> None:
    program = LinearProgram()
    program.row([(program.variable(), 1.0)], lower=2.0)
    with pytest.raises(RuntimeError, match="no solution"):
        program.solve(10.0)
