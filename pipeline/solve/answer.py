"""From the types that were chosen back to a recipe that gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.model.targets.tensor import TargetTensor
from pipeline.quant.types import GgmlType
from pipeline.recipe.derive import derive_recipe
from pipeline.recipe.schema import Recipe


def solved_recipe(
    recipe: Recipe, targets: Sequence[TargetTensor], types: Mapping[str, GgmlType]
) -> Recipe:
    """``recipe`` without its budget, and with types that come to ``types``, by tensor name.

    Roles, sub-roles and overrides are written anew, in as few words as it takes; all else stays.
    """
    found = derive_recipe(targets, types, name=recipe.name, layout=recipe.output.layout)
    return recipe.model_copy(
        update={
            "budget": None,
            "roles": found.roles,
            "sub_roles": found.sub_roles,
            "override": found.override,
        }
    )
