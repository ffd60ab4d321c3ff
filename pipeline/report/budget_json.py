"""The byte budget for other programs: exact integers, no rounding, one schema number."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.budget import Budget, Item, Line, NotCarried
from pipeline.model.config import ModelConfig
from pipeline.model.roles import ROLE_TITLES, Role
from pipeline.report.engram_reads import engram_reads
from pipeline.report.planner_table import by_planner_role

SCHEMA = 1


def budget_json(
    steps: Sequence[Budget],
    config: ModelConfig,
    not_carried: Sequence[NotCarried] = (),
    *,
    items: Sequence[Item] = (),
) -> dict[str, object]:
    """What the tables show, as one JSON object. Sizes are bytes.

    Args:
        steps: In the order in which they happen.
        config: The model.
        not_carried: What the target file leaves out.
        items: The tensors of all files, for what is told by name: planner roles, engram reads.
    """
    items = [item for item in items if item.role is not Role.DRAFT]
    befores = (None, *steps)[: len(steps)]
    return {
        "schema": SCHEMA,
        "steps": [_step(step, old) for step, old in zip(steps, befores, strict=True)],
        "not_carried": [
            {"role": part.role.value, "n_tensors": part.n_tensors, "nbytes": part.nbytes}
            for part in not_carried
        ],
        "planner_roles": _planner_roles(items),
        "engram": _engram(items, config),
    }


def _step(step: Budget, before: Budget | None) -> dict[str, object]:
    return {
        "step": step.step,
        "n_tensors": step.n_tensors,
        "n_params": step.n_params,
        "nbytes": step.nbytes,
        "per_token_nbytes": step.per_token,
        "change_nbytes": step.nbytes - before.nbytes if before else None,
        "roles": [_line(line, before) for line in step.roles],
        "sub_roles": [_line(line, before) for line in step.sub_roles],
    }


def _line(line: Line, before: Budget | None) -> dict[str, object]:
    return {
        "role": line.role.value,
        "sub_role": line.sub_role.value if line.sub_role else None,
        "title": ROLE_TITLES[line.role],
        "n_tensors": line.n_tensors,
        "n_params": line.n_params,
        "nbytes": line.nbytes,
        "per_token_nbytes": line.per_token,
        "bits_per_weight": line.bits_per_weight,
        "change_nbytes": line.nbytes - _nbytes_before(line, before) if before else None,
        "types": {
            name: {"n_tensors": n, "nbytes": nbytes} for name, (n, nbytes) in line.types.items()
        },
    }


def _nbytes_before(line: Line, before: Budget) -> int:
    lines = before.sub_roles if line.sub_role else before.roles
    same = (line.role, line.sub_role)
    return sum(old.nbytes for old in lines if (old.role, old.sub_role) == same)


def _planner_roles(items: Sequence[Item]) -> list[dict[str, object]]:
    return [
        {
            "planner_role": role,
            "n_tensors": len(group),
            "nbytes": sum(item.nbytes for item in group),
            "per_token_nbytes": sum(item.per_token for item in group),
        }
        for role, group in by_planner_role(items).items()
    ]


def _engram(items: Sequence[Item], config: ModelConfig) -> list[dict[str, object]]:
    if config.engram is None:
        return []
    return [
        {
            "tensor": one.tensor,
            "type": one.type,
            "n_rows": one.n_rows,
            "row_nbytes": one.row_nbytes,
            "rows_per_token": one.rows_per_token,
            "payload_nbytes_per_token": one.payload,
            "pages_per_token": one.pages,
        }
        for one in engram_reads(items, config.engram)
    ]
