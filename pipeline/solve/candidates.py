"""What is free to choose: groups of tensors that get one type each, and the types they may get."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pipeline.errors import RecipeError, raise_problems
from pipeline.model.targets.tensor import TargetTensor
from pipeline.quant.types import GgmlType, find_type
from pipeline.recipe.choose import applies
from pipeline.recipe.rules import PROTECTED
from pipeline.recipe.schema import Recipe
from pipeline.recipe.values import Granularity

WhyNot = Callable[[TargetTensor, GgmlType], str | None]
"""Why a tensor may not have a type, with the type's name; nothing where it may."""


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that get the same type, and the types that all of them may get, smallest first.

    ``refused`` are types that were allowed and that some may not get, each with the reason.
    """

    title: str
    targets: tuple[TargetTensor, ...]
    types: tuple[GgmlType, ...]
    refused: tuple[tuple[GgmlType, str], ...] = ()

    def nbytes(self, ggml_type: GgmlType) -> int:
        """Bytes of all tensors in a type."""
        return nbytes_of(self.targets, ggml_type)


def nbytes_of(targets: Iterable[TargetTensor], ggml_type: GgmlType) -> int:
    """Bytes of ``targets`` in a type."""
    return sum(target.n_rows * ggml_type.row_nbytes(target.n_cols) for target in targets)


def free_types(recipe: Recipe, target: TargetTensor) -> tuple[str, ...] | None:
    """The types that the recipe's budget lets ``target`` become; nothing where it is fixed.

    What is named in the budget's types is free, whatever roles and sub-roles say of it, here or in
    a recipe that this one extends. Fixed is what has one possible type, what an override chooses,
    and the small sensitive matrices (`PROTECTED`) unless their sub-role itself is named.
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
    if not is_own and target.sub_role in PROTECTED:
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
            next_step="Overrides leave nothing of what is named there free.",
        )
    groups, problems = [], []
    for (title, names), tensors in members.items():
        types, refused = _allowed(names, tensors, why_not)
        groups.append(Group(title, tuple(tensors), types, refused))
        if not types:
            problems.append(_nothing_left(recipe, groups[-1]))
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
) -> tuple[tuple[GgmlType, ...], tuple[tuple[GgmlType, str], ...]]:
    """The types that every one of ``targets`` may have, and why not the others."""
    types, refused = [], []
    for ggml_type in dict.fromkeys(map(find_type, names)):
        found = (why_not(target, ggml_type) for target in targets)
        reason = next((reason for reason in found if reason), None)
        if reason is None:
            types.append(ggml_type)
        else:
            refused.append((ggml_type, reason.strip(" ,")))
    return tuple(sorted(types, key=lambda t: nbytes_of(targets, t))), tuple(refused)


def _nothing_left(recipe: Recipe, group: Group) -> RecipeError:
    reasons = [reason for _, reason in group.refused]
    return RecipeError(
        f"recipe {recipe.name}: {group.title} may become none of the types that its budget allows",
        tensor=", ".join(t.name for t in group.targets[:8]),
        found="; ".join(reasons) or "an empty list (budget.candidates has none either)",
        next_step=f"Give {group.targets[0].sub_role} types of its own in budget.types, or fix it "
        "by an override.",
    )
