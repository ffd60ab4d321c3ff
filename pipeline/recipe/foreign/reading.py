"""A recipe from another tool's rules and, for what they leave open, from a recipe of ours."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.errors import RecipeError
from pipeline.model.roles import TARGET_ROLES
from pipeline.model.targets.tensor import TargetTensor
from pipeline.recipe.choose import choose, title_of
from pipeline.recipe.foreign.rules import Rule
from pipeline.recipe.schema import Override, Recipe, Roles
from pipeline.recipe.tables import OutputTable


@dataclass(frozen=True, slots=True)
class ImportedRecipe:
    """What became of rules, and which of them came to nothing."""

    recipe: Recipe
    notes: tuple[str, ...] = ()


def import_rules(
    rules: Sequence[Rule],
    targets: Sequence[TargetTensor],
    *,
    name: str,
    base: Recipe | None = None,
    output: OutputTable | None = None,
) -> ImportedRecipe:
    """The recipe that gives tensors the types of ``rules``, and the rest those of ``base``.

    Rules become overrides in their order. The tools leave norms, biases and the like alone whatever
    matches them; a rule whose pattern matches such a tensor too is therefore held to roles.

    Args:
        rules: What the other tool was told.
        targets: The tensors of the model, as this project names them.
        name: Name of the recipe.
        base: What says the rest. Its overrides stand below.
        output: The layout of ``targets``, if it is not the base's.

    Raises:
        RecipeError: Without a base, a tensor is left without a type.
    """
    free = {target.name: target for target in targets if target.only_type is None}
    fixed = [target.name for target in targets if target.only_type is not None]
    owner = {tensor: first for tensor in free if (first := _first(rules, tensor)) is not None}
    used = set(owner.values())
    overrides = [_override(rule, fixed) for no, rule in enumerate(rules) if no in used]
    notes = tuple(_unused(rules, used, free, fixed))
    if base is None:
        roles = _roles(rules, owner, free)
        bare = Recipe(name=name, roles=Roles(**roles), override=tuple(overrides))
        return ImportedRecipe(_with_output(bare, output), notes)
    left = _left_over(base, [target for target in free.values() if target.name not in owner])
    changed = {"name": name, "description": "", "override": (*overrides, *left)}
    return ImportedRecipe(_with_output(base.model_copy(update=changed), output), notes)


def _with_output(recipe: Recipe, output: OutputTable | None) -> Recipe:
    return recipe if output is None else recipe.model_copy(update={"output": output})


def _first(rules: Sequence[Rule], name: str) -> int | None:
    return next((no for no, rule in enumerate(rules) if re.search(rule.pattern, name)), None)


def _override(rule: Rule, fixed: Sequence[str]) -> Override:
    too_wide = any(re.search(rule.pattern, name) for name in fixed)
    roles = tuple(role.value for role in TARGET_ROLES) if too_wide else None
    return Override(match=rule.pattern, roles=roles, type=rule.type.name)


def _unused(
    rules: Sequence[Rule], used: set[int], free: Collection[str], fixed: Sequence[str]
) -> Iterator[str]:
    for no, rule in enumerate(rules):
        if no in used:
            continue
        what = f"line {rule.line}: {rule.pattern} is left out: "
        if any(re.search(rule.pattern, name) for name in free):
            yield what + "earlier rules win"
        elif not any(re.search(rule.pattern, name) for name in fixed):
            # What has one type everywhere has it here too, and is not worth a word.
            yield what + "the model has no such tensor"


def _roles(
    rules: Sequence[Rule], owner: Mapping[str, int], free: Mapping[str, TargetTensor]
) -> dict[str, str]:
    """For each role the type that most of its tensors were given."""
    open_ones = [tensor for tensor in free if tensor not in owner]
    if open_ones:
        raise RecipeError(
            f"the rules say nothing of {len(open_ones):,} tensors",
            tensor=", ".join(open_ones[:3]),
            next_step="Name a recipe that says the rest (--base), or one type for it (--rest).",
        )
    counted: dict[str, Counter[str]] = {}
    for tensor, no in owner.items():
        role = free[tensor].role.value
        counted.setdefault(role, Counter())[rules[no].type.name] += 1
    return {role: counter.most_common(1)[0][0] for role, counter in counted.items()}


def _left_over(base: Recipe, open_ones: Sequence[TargetTensor]) -> list[Override]:
    """The overrides of ``base`` that something is left for."""
    reached = {choose(base, target).reason for target in open_ones}
    return [
        override
        for number, override in enumerate(base.override, 1)
        if title_of("override", number, override) in reached
    ]
