"""What is free to choose: groups of tensors that get one type each, and the types they may get."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pipeline.errors import RecipeError, raise_problems
from pipeline.model.targets.tensor import TargetTensor
from pipeline.quant.types import GgmlType, find_type
from pipeline.recipe.choose import applies
from pipeline.recipe.schema import Recipe
from pipeline.recipe.values import Granularity

WhyNot = Callable[[TargetTensor, GgmlType], str | None]
"""Why a tensor may not have a type, with the type's name; nothing where it may."""


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that get the same type, and the types that all of them may get, smallest first."""

    title: str
    targets: tuple[TargetTensor, ...]
    types: tuple[GgmlType, ...]

    def nbytes(self, ggml_type: GgmlType) -> int:
        """Bytes of all tensors in a type."""
        return nbytes_of(self.targets, ggml_type)


def nbytes_of(targets: Iterable[TargetTensor], ggml_type: GgmlType) -> int:
    """Bytes of ``targets`` in a type."""
    return sum(target.n_rows * ggml_type.row_nbytes(target.n_cols) for target in targets)


def free_types(recipe: Recipe, target: TargetTensor) -> tuple[str, ...] | None:
    """The types that the recipe's budget lets ``target`` become; nothing where it is fixed.

    Fixed is what has one possible type, what an override chooses, and what is not named in the
    budget's types. A sub-role that is named there is free whatever its role is, and one that has a
    type of its own is fixed where its role alone is named.
    """
    budget = recipe.budget
    if budget is None or target.only_type is not None:
        return None
    if any(applies(override, target) for override in recipe.override):
        return None
    names: tuple[str, ...] | None = budget.types.of(target)
    is_own = target.sub_role.value != target.role.value and (
        getattr(budget.types, target.sub_role.value, None) is not None
    )
    if not is_own and recipe.sub_roles.type_of(target.sub_role) is not None:
        return None
    return budget.candidates if names == () else names


def groups_of(
    recipe: Recipe, targets: Sequence[TargetTensor], why_not: WhyNot
) -> tuple[Group, ...]:
    """The groups of all free ``targets``, in model order.

    Raises:
        RecipeError: Nothing is free, or a group may become none of its types.
        Problems: Several groups may not.
    """
    members: dict[tuple[str, tuple[str, ...]], list[TargetTensor]] = {}
    for target in targets:
        names = free_types(recipe, target)
        if names is not None:
            members.setdefault((_title(recipe, target), names), []).append(target)
    if not members:
        raise RecipeError(
            f"recipe {recipe.name} has a budget, and nothing that is free to choose",
            expected="roles or sub-roles in budget.types",
            next_step="Overrides and types of sub-roles leave nothing of what is named there free.",
        )
    groups, problems = [], []
    for (title, names), tensors in members.items():
        types, reasons = _allowed(names, tensors, why_not)
        groups.append(Group(title, tuple(tensors), types))
        if not types:
            problems.append(_nothing_left(recipe, groups[-1], reasons))
    raise_problems(f"the budget of recipe {recipe.name}", problems)
    return tuple(groups)


def _title(recipe: Recipe, target: TargetTensor) -> str:
    assert recipe.budget is not None
    match recipe.budget.granularity:
        case Granularity.TENSOR:
            return target.name
        case Granularity.LAYERS if target.layer is not None:
            size = recipe.budget.layers_per_group
            first = target.layer // size * size
            layers = f"layer {first}" if size == 1 else f"layers {first}-{first + size - 1}"
            return f"{target.sub_role}, {layers}"
        case _:
            return target.sub_role.value


def _allowed(
    names: Iterable[str], targets: Sequence[TargetTensor], why_not: WhyNot
) -> tuple[tuple[GgmlType, ...], list[str]]:
    """The types that every one of ``targets`` may have, and why not the others."""
    types, reasons = [], []
    for ggml_type in dict.fromkeys(map(find_type, names)):
        found = (why_not(target, ggml_type) for target in targets)
        reason = next((reason for reason in found if reason), None)
        if reason is None:
            types.append(ggml_type)
        else:
            reasons.append(reason.strip(" ,"))
    return tuple(sorted(types, key=lambda t: nbytes_of(targets, t))), reasons


def _nothing_left(recipe: Recipe, group: Group, reasons: Sequence[str]) -> RecipeError:
    return RecipeError(
        f"recipe {recipe.name}: {group.title} may become none of the types that its budget allows",
        tensor=", ".join(t.name for t in group.targets[:8]),
        found="; ".join(reasons) or "an empty list (budget.candidates has none either)",
        next_step=f"Give {group.targets[0].sub_role} types of its own in budget.types, or fix it "
        "in sub_roles.",
    )
