"""A linear program with some whole-numbered variables, gathered in lists and solved by HiGHS through OR-Tools MathOpt.

    minimise  sum_x price[x] x     with  lower[x] <= x <= upper[x]  and, for every row,  lower <= sum_x c[x] x <= upper

Variables are numbers counted from 0. MathOpt's own model objects would cost more time than the solver.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortools.math_opt import model_pb2


@dataclass(frozen=True)
class Solution:
    """``values`` of the variables; ``bound``: proven, no solution costs less."""

    values: tuple[float, ...]
    objective: float
    bound: float


class NoSolution(RuntimeError):
    """No values satisfy every row."""


class LinearProgram:
    def __init__(self) -> None:
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.whole: list[bool] = []
        self.price: list[float] = []
        self._row_lower: list[float] = []
        self._row_upper: list[float] = []
        self._entries: list[tuple[int, int, float]] = []

    def variable(self, upper: float = 1.0, whole: bool = False) -> int:
        """A variable from 0 to ``upper``."""
        self.lower.append(0.0)
        self.upper.append(upper)
        self.whole.append(whole)
        self.price.append(0.0)
        return len(self.price) - 1

    def row(self, terms: Iterable[tuple[int, float]], lower: float = -math.inf, upper: float = math.inf) -> int:
        """lower <= sum of coefficient * variable <= upper; no variable twice. Returns the number of the row."""
        number = len(self._row_lower)
        self._row_lower.append(lower)
        self._row_upper.append(upper)
        self._entries.extend((number, variable, coefficient) for variable, coefficient in terms)
        return number

    def limit(self, row: int, upper: float) -> None:
        """Give a row another upper limit."""
        self._row_upper[row] = upper

    def solve(
        self,
        time_limit_s: float,
        relative_gap: float = 1e-9,
        price: Sequence[float] | None = None,
        relaxed: bool = False,
    ) -> Solution:
        """``price``: instead of the variables' own. ``relaxed``: no variable need be whole.

        Raises NoSolution when there is none, RuntimeError when none was found in time.
        """
        from ortools.math_opt.python import mathopt  # here, so that what is priced without solving needs no solver

        parameters = mathopt.SolveParameters(
            time_limit=datetime.timedelta(seconds=time_limit_s), relative_gap_tolerance=relative_gap, random_seed=0
        )
        model = mathopt.Model.from_model_proto(self._proto(self.price if price is None else price, relaxed))
        result = mathopt.solve(model, mathopt.SolverType.HIGHS, params=parameters)
        if result.termination.reason == mathopt.TerminationReason.INFEASIBLE:
            raise NoSolution(f"the program has no solution: {result.termination.detail}")
        if not result.has_primal_feasible_solution():
            raise RuntimeError(f"the program has no solution: {result.termination}")
        values = result.variable_values(list(model.variables()))
        return Solution(tuple(values), result.objective_value(), result.best_objective_bound())

    def _proto(self, prices: Sequence[float], relaxed: bool) -> model_pb2.ModelProto:
        from ortools.math_opt import model_pb2

        proto = model_pb2.ModelProto()
        variables, rows, matrix = proto.variables, proto.linear_constraints, proto.linear_constraint_matrix
        variables.ids.extend(range(len(self.price)))
        variables.lower_bounds.extend(self.lower)
        variables.upper_bounds.extend(self.upper)
        variables.integers.extend([False] * len(self.whole) if relaxed else self.whole)
        priced = [(x, price) for x, price in enumerate(prices) if price]
        proto.objective.linear_coefficients.ids.extend(x for x, _ in priced)
        proto.objective.linear_coefficients.values.extend(price for _, price in priced)
        rows.ids.extend(range(len(self._row_lower)))
        rows.lower_bounds.extend(self._row_lower)
        rows.upper_bounds.extend(self._row_upper)
        entries = sorted(self._entries)
        matrix.row_ids.extend(row for row, _, _ in entries)
        matrix.column_ids.extend(x for _, x, _ in entries)
        matrix.coefficients.extend(coefficient for _, _, coefficient in entries)
        return proto
