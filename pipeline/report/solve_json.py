"""A solved budget as a JSON document: limits, frontier, and what every group got."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from pipeline.solve.choose import Answer
from pipeline.solve.frontier import Frontier, GroupAnswer, Step
from pipeline.solve.question import Question


def solve_json(
    name: str,
    question: Question,
    answer: Answer,
    around: Frontier,
    groups: Sequence[GroupAnswer],
) -> dict[str, object]:
    """Everything that was found for the recipe called ``name``."""
    limits = zip(question.limits, answer.used, strict=True)
    return {
        "schema": 1,
        "recipe": name,
        "objective": question.objective.value,
        "error": question.error(answer.types),
        "error_of_free": answer.error,
        "error_of_fixed": around.fixed_error,
        "gap": answer.picks.gap,
        "is_proved": answer.picks.is_proved,
        "limits": [{"title": x.title, "nbytes": x.nbytes, "used": used} for x, used in limits],
        "axis": question.limits[around.axis].title,
        "points": [asdict(point) for point in around.points],
        "next": _next(around.next),
        "groups": [_group(one) for one in groups],
    }


def _next(step: Step | None) -> dict[str, object] | None:
    if step is None:
        return None
    changes = [[group.title, before.name, after.name] for group, before, after in step.changes]
    return {"nbytes": step.nbytes, "error": step.error, "changes": changes}


def _group(one: GroupAnswer) -> dict[str, object]:
    return {
        "group": one.group.title,
        "type": one.type.name,
        "nbytes": one.nbytes,
        "error": one.error,
        "rmse": one.rmse,
        "refused": [[ggml_type.name, why] for ggml_type, why in one.group.refused],
        "tensors": [target.name for target in one.group.targets],
    }
