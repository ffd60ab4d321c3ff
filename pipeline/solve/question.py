"""A budget's question in numbers: what each choice costs and loses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.model.config import ModelConfig
from pipeline.model.targets.tensor import TargetTensor
from pipeline.quant.types import GgmlType
from pipeline.solve.candidates import Group
from pipeline.solve.limits import Limit
from pipeline.solve.measure import Losses
from pipeline.solve.milp import Option
from pipeline.solve.objective import Objective, error_of


@dataclass(frozen=True, slots=True)
class Question:
    """All that a choice of types depends on.

    ``fixed`` are the types of the tensors that are in no group, by name. ``losses`` has every
    group's tensors in every type of the group, and the fixed ones in theirs.
    """

    config: ModelConfig
    targets: Sequence[TargetTensor]
    groups: Sequence[Group]
    fixed: Mapping[str, GgmlType]
    losses: Losses
    limits: Sequence[Limit]
    objective: Objective
    weight: Callable[[TargetTensor], float]

    def error(self, types: Mapping[str, GgmlType]) -> float:
        """What is made least: the sum over all tensors in these types."""
        return sum(self._error(target, types[target.name]) for target in self.targets)

    def used(self, types: Mapping[str, GgmlType], limit: Limit) -> int:
        """What these types take of a limit, headers left out."""
        return sum(_cost(limit, target, types[target.name]) for target in self.targets)

    def rmse(self, targets: Sequence[TargetTensor], ggml_type: GgmlType) -> float:
        """Relative root mean square error of ``targets`` together, each as large as it is."""
        losses = [self.losses[target.name][ggml_type.name] for target in targets]
        error = sum(loss.squared_error / loss.n_rows * loss.n_rows_total for loss in losses)
        norm = sum(loss.squared_norm / loss.n_rows * loss.n_rows_total for loss in losses)
        return math.sqrt(error / norm) if norm else 0.0

    def options(self, group: Group) -> tuple[Option, ...]:
        """What each type of a group costs and loses, in the order of its types."""
        return tuple(
            Option(
                sum(self._error(target, ggml_type) for target in group.targets),
                tuple(
                    sum(_cost(limit, target, ggml_type) for target in group.targets)
                    for limit in self.limits
                ),
            )
            for ggml_type in group.types
        )

    def fixed_cost(self, limit: Limit) -> int:
        """What the tensors that are not free take of a limit."""
        return sum(
            _cost(limit, t, self.fixed[t.name]) for t in self.targets if t.name in self.fixed
        )

    def types_of(self, picks: Sequence[int]) -> dict[str, GgmlType]:
        """The type of every tensor when each group takes the type of this number."""
        types = {**self.fixed, **dict(self._chosen(picks))}
        return {target.name: types[target.name] for target in self.targets}

    def _chosen(self, picks: Sequence[int]) -> Iterator[tuple[str, GgmlType]]:
        for group, number in zip(self.groups, picks, strict=True):
            for target in group.targets:
                yield target.name, group.types[number]

    def _error(self, target: TargetTensor, ggml_type: GgmlType) -> float:
        return error_of(
            target,
            self.losses[target.name][ggml_type.name],
            objective=self.objective,
            config=self.config,
            weight=self.weight(target),
        )


def _cost(limit: Limit, target: TargetTensor, ggml_type: GgmlType) -> int:
    return limit.cost(target, target.n_rows * ggml_type.row_nbytes(target.n_cols))
