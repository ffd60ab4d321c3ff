"""The choice as a mixed-integer linear programme, given to HiGHS through scipy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, linprog, milp
from scipy.sparse import csr_array

from pipeline.solve.milp import Option
from pipeline.solve.quiet import quiet

_SCALE = 1e6
"""What the largest error of an option is scaled to: HiGHS's own tolerances are absolute, 1e-6."""

_DONE, _OUT_OF_TIME, _INFEASIBLE = 0, 1, 2
"""Statuses of `scipy.optimize.milp`; others are troubles of its own."""


class Programme:
    """A 0/1 variable for each option: one of each group is 1, all costs are within ``rooms``."""

    def __init__(self, groups: Sequence[Sequence[Option]], rooms: Sequence[int]) -> None:
        counts = [len(group) for group in groups]
        self._first = np.cumsum([0, *counts[:-1]])
        self._n_groups = len(groups)
        options = [option for group in groups for option in group]
        self._errors = np.array([option.error for option in options])
        costs = np.array([option.costs for option in options], np.float64).T
        one_each = np.repeat(np.arange(len(groups)), counts)
        self._one_each = csr_array(
            (np.ones(len(options)), (one_each, np.arange(len(options)))),
            shape=(len(groups), len(options)),
        )
        self._span = float(self._errors.max()) or 1.0
        self._units = [_unit(o.costs[at] for o in options) for at in range(len(rooms))]
        self._costs = costs / np.array(self._units, np.float64)[:, None]
        self._rooms = [room // unit for room, unit in zip(rooms, self._units, strict=True)]
        self._forbidden: list[NDArray[np.float64]] = []

    def forbid(self, picks: Sequence[int]) -> None:
        """Leave one choice out."""
        row = np.zeros(len(self._errors))
        row[self._first + np.array(picks, np.intp)] = 1
        self._forbidden.append(row)

    def prices(self) -> tuple[float, ...]:
        """What a unit of each limit's costs is worth in error, where options may be mixed.

        They are guesses that any bound may be reckoned with; 0 where the solver has none.
        """
        if not self._rooms:
            return ()
        scale = np.maximum(self._costs.max(axis=1), 1.0)
        with quiet():
            result = linprog(
                self._errors / self._span * _SCALE,
                A_ub=self._costs / scale[:, None],
                b_ub=np.array(self._rooms, np.float64) / scale,
                A_eq=self._one_each,
                b_eq=np.ones(self._n_groups),
                method="highs",
            )
        if result.status != _DONE:
            return (0.0,) * len(self._rooms)
        found = -result.ineqlin.marginals * self._span / _SCALE / scale / np.array(self._units)
        return tuple(max(0.0, price) for price in found.tolist())

    def solve(self, seconds: float) -> tuple[tuple[int, ...], bool] | None:
        """Option numbers within the groups; whether it is sure of them; or that nothing fits.

        None of its word is to be trusted: on costs far apart it may be wrong in all of them.

        Raises:
            TimeoutError: No choice was found in time.
            ArithmeticError: The solver gave up for another reason.
        """
        constraints = [LinearConstraint(self._one_each, 1, 1)]
        if len(self._rooms):
            constraints.append(LinearConstraint(self._costs, -np.inf, self._rooms))
        constraints += [
            LinearConstraint(row, -np.inf, self._n_groups - 1) for row in self._forbidden
        ]
        # Its simplifications are known to fail on coefficients far apart; without, it is slower.
        for presolve in (True, False):
            with quiet():
                result = milp(
                    self._errors / self._span * _SCALE,
                    integrality=np.ones(len(self._errors), np.int64),
                    bounds=Bounds(0, 1),
                    constraints=constraints,
                    options={"mip_rel_gap": 0, "time_limit": seconds, "presolve": presolve},
                )
            if result.status in (_DONE, _OUT_OF_TIME):
                break
        if result.x is None:
            _require_none(result)
            return None
        ends = np.append(self._first[1:], len(self._errors))
        picks = tuple(
            int(np.argmax(result.x[begin:end]))
            for begin, end in zip(self._first, ends, strict=True)
        )
        return picks, result.status == _DONE


def _unit(costs: Iterable[int]) -> int:
    """The largest number that all costs are multiples of."""
    return math.gcd(*costs) or 1


def _require_none(result: OptimizeResult) -> None:
    """Tell "none exists" from "none was found"."""
    if result.status == _OUT_OF_TIME:
        raise TimeoutError
    if result.status != _INFEASIBLE:
        raise ArithmeticError(result.message)
