"""From a recipe to one type per tensor, or to every reason why not.

All rules that need no weights are applied here, before anything is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from pipeline.errors import QuantmillError, RecipeError, TypeRuleError, raise_problems
from pipeline.model.roles import Role
from pipeline.model.targets.tensor import TargetTensor
from pipeline.quant.types import GgmlType
from pipeline.recipe.choose import Choice, applies, choose, first_graft, title_of
from pipeline.recipe.rules import Rules, Weighted, next_step, wording
from pipeline.recipe.schema import Recipe
from pipeline.recipe.selection import Selection


def resolve_types(
    recipe: Recipe, targets: Sequence[TargetTensor], *, weighted: Weighted = lambda _: False
) -> dict[str, GgmlType]:
    """One type for every tensor of one file: a target, or a draft.

    Overrides, roles and sub-roles speak of the target; a draft, whose blocks have the same names,
    takes its types from the recipe's draft table.

    Args:
        recipe: The recipe, whose budget, if it had one, is solved.
        targets: The tensors, and how the source has them.
        weighted: Whether there is importance for a tensor of the target.

    Raises:
        RecipeError: An override or a graft selects nothing, a type may not be used where it is
            asked for, or the budget is not solved.
        TypeRuleError: A type's block does not divide the rows of a tensor.
        Problems: Several of these.
    """
    is_draft = any(target.is_draft for target in targets)
    if not is_draft:
        _require_types(recipe, targets)
    choices = {target.name: choose(recipe, target) for target in targets}
    problems: list[QuantmillError] = [
        *(() if is_draft else _unreached(recipe, targets, choices)),
        *_grouped(Rules(recipe, weighted), targets, choices),
    ]
    raise_problems(f"recipe {recipe.name} does not fit the model", problems)
    return {name: choice.type for name, choice in choices.items() if choice.type is not None}


def _require_types(recipe: Recipe, targets: Sequence[TargetTensor]) -> None:
    """Refuse a recipe that says too little of a target."""
    if recipe.roles is None:
        raise RecipeError(
            f"recipe {recipe.name} makes a draft only and gives the target no types",
            expected="the table [roles]",
        )
    if recipe.roles.engram is None and any(t.role is Role.ENGRAM for t in targets):
        raise RecipeError(
            f"recipe {recipe.name} gives no type to the engram, and this model has one",
            expected="roles.engram",
            next_step="Add it, or take a recipe for V4.1.",
        )
    if recipe.budget is not None:
        raise RecipeError(
            f"recipe {recipe.name} has a budget that is not solved yet",
            expected="a type for everything",
            next_step="SolveBudget makes a recipe of it that can be run.",
        )


def _unreached(
    recipe: Recipe, targets: Sequence[TargetTensor], choices: Mapping[str, Choice]
) -> Iterator[RecipeError]:
    """Overrides and grafts that nothing is left for."""
    reasons = {name: choice.reason for name, choice in choices.items()}
    for number, override in enumerate(recipe.override, 1):
        title = title_of("override", number, override)
        would = [t.name for t in targets if applies(override, t)]
        yield from _one_unreached(recipe, title, override, would, reasons)
    grafted = {}
    for target in targets:
        first = first_graft(recipe, target)
        if first is not None:
            grafted[target.name] = title_of("graft", first + 1, recipe.graft[first])
    for number, graft in enumerate(recipe.graft, 1):
        title = title_of("graft", number, graft)
        would = [t.name for t in targets if graft.selects(t)]
        yield from _one_unreached(recipe, title, graft, would, grafted)


def _one_unreached(
    recipe: Recipe,
    title: str,
    entry: Selection,
    would: Sequence[str],
    reasons: Mapping[str, str],
) -> Iterator[RecipeError]:
    """A complaint if none of the tensors that ``entry`` would take falls to it.

    Args:
        recipe: The recipe.
        title: How ``entry`` is called there.
        entry: An override or a graft.
        would: The tensors that it selects.
        reasons: Tensor name -> title of the entry that it falls to.
    """
    kind = title.split(" ")[0]
    if entry.optional:
        return
    if not would:
        patterns = (
            "Patterns are searched in GGUF names such as blk.0.ffn_down_exps.weight; "
            "engram tensors have other names in the other layout."
        )
        rest = "All that is said of an entry must hold together, for a tensor whose type is free."
        yield RecipeError(
            f"recipe {recipe.name}: {title} matches no tensor",
            next_step=patterns if entry.is_by_name else rest,
        )
    elif all(reasons[name] != title for name in would):
        winners = ", ".join(dict.fromkeys(reasons[name] for name in would))
        yield RecipeError(
            f"recipe {recipe.name}: {title} is never reached: {winners} wins first",
            next_step=f"The first {kind} that matches a name wins: write this one above.",
        )


def _grouped(
    rules: Rules, targets: Sequence[TargetTensor], choices: Mapping[str, Choice]
) -> Iterable[QuantmillError]:
    """One problem per broken rule and recipe entry, however many tensors share it."""
    groups: dict[tuple[str, str], list[TargetTensor]] = {}
    for target in targets:
        choice = choices[target.name]
        rule = rules.broken(target, choice.type)
        if rule:
            groups.setdefault((rule, choice.reason), []).append(target)
    for (rule, reason), tensors in groups.items():
        ggml_type = choices[tensors[0].name].type
        is_block = rule == "block" and ggml_type is not None
        error = TypeRuleError if is_block else RecipeError
        yield error(
            f"recipe {rules.recipe.name}: {reason} asks for{wording(rule, tensors[0], ggml_type)}",
            # Whose rows do not divide, the user has to treat one by one: all are named.
            tensor=_list(tensors, most=len(tensors) if is_block else 8),
            expected=f"rows of a multiple of {ggml_type.block} weights"
            if is_block and ggml_type
            else None,
            next_step=next_step(rules, rule, reason, tensors, ggml_type),
        )


def _list(tensors: Sequence[TargetTensor], *, most: int) -> str:
    named = [f"{t.name} [{' x '.join(map(str, t.shape))}]" for t in tensors[:most]]
    more = f" and {len(tensors) - most} more" if len(tensors) > most else ""
    return ", ".join(named) + more
