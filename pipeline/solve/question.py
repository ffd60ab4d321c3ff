"""A budget's question in numbers: what each choice costs and loses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

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
    group's tensors in every type of the group, and the fixed ones in theirs; sizes can be asked for
    without. ``fixed_by`` names the entry of the recipe that fixes a tensor's type; ``draft_nbytes``
    are the bytes of the draft's file, where one is made beside the target's.
    """

    config: ModelConfig
    targets: Sequence[TargetTensor]
    groups: Sequence[Group]
    fixed: Mapping[str, GgmlType]
    losses: Losses
    limits: Sequence[Limit]
    objective: Objective
    weight: Callable[[TargetTensor], float]
    fixed_by: Mapping[str, str] = field(default_factory=dict)
    draft_nbytes: int = 0

    def error(self, types: Mapping[str, GgmlType]) -> float:
        """What is made least: the sum over all tensors in these types."""
        return sum(self._error(target, types[target.name]) for target in self.targets)

    def used(self, types: Mapping[str, GgmlType], limit: Limit) -> int:
        """What these types take of a limit, headers left out."""
        free = sum(_cost(limit, target, types[target.name]) for target in self.targets)
        return free + self._of_draft(limit)

    def rmse(self, targets: Sequence[TargetTensor], ggml_type: GgmlType) -> float:
        """Relative root mean square error of ``targets`` together, each as large as it is."""
        losses = [self.losses[target.name][ggml_type.name] for target in targets]
        error = sum(loss.squared_error / loss.n_rows * loss.n_rows_total for loss in losses)
        norm = sum(loss.squared_norm / loss.n_rows * loss.n_rows_total for loss in losses)
        return math.sqrt(error / norm) if norm else 0.0

    def options(self, group: Group) -> tuple[Option, ...]:
        """What each type of a group costs and loses, in the order of its types."""
        return tuple(
            Option(sum(self._error(target, ggml_type) for target in group.targets), costs)
            for ggml_type, costs in zip(group.types, self.costs(group), strict=True)
        )

    def costs(self, group: Group) -> tuple[tuple[int, ...], ...]:
        """What each type of a group takes of each limit."""
        return tuple(
            tuple(
                sum(_cost(limit, target, ggml_type) for target in group.targets)
                for limit in self.limits
            )
            for ggml_type in group.types
        )

    def fixed_cost(self, limit: Limit) -> int:
        """What the tensors that are not free take of a limit, and the draft's file."""
        return sum(n for _, n in self.fixed_parts(limit))

    def fixed_parts(self, limit: Limit) -> list[tuple[str, int]]:
        """What is fixed and why, with what it takes of a limit; the most first."""
        parts: Counter[str] = Counter()
        for target in self.targets:
            if target.name in self.fixed:
                ggml_type = self.fixed[target.name]
                by = self.fixed_by.get(target.name, "")
                # Norms and the like: "stays F32" is all there is to say.
                reason = by if by.startswith("stays") else f"stays {ggml_type.name} by {by}"
                parts[f"{target.sub_role} {reason}"] += _cost(limit, target, ggml_type)
        parts["the draft's file"] = self._of_draft(limit)
        return [part for part in parts.most_common() if part[1]]

    def fixed_error(self) -> float:
        """What the tensors that are not free add to the sum."""
        return sum(self._error(t, self.fixed[t.name]) for t in self.targets if t.name in self.fixed)

    def types_of(self, picks: Sequence[int]) -> dict[str, GgmlType]:
        """The type of every tensor when each group takes the type of this number."""
        types = {**self.fixed, **dict(self._chosen(picks))}
        return {target.name: types[target.name] for target in self.targets}

    def _chosen(self, picks: Sequence[int]) -> Iterator[tuple[str, GgmlType]]:
        for group, number in zip(self.groups, picks, strict=True):
            for target in group.targets:
                yield target.name, group.types[number]

    def _of_draft(self, limit: Limit) -> int:
        return self.draft_nbytes if limit.has_headers else 0

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
