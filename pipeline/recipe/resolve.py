"""From a recipe to one type per tensor, or to every reason why not.

All rules that need no weights are applied here, before anything is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.errors import QuantmillError, RecipeError, TypeRuleError, raise_problems
from pipeline.model.roles import ReadMode, Role, SubRole
from pipeline.model.targets.tensor import TargetTensor
from pipeline.quant.guard import NEEDS_IMPORTANCE
from pipeline.quant.types import TYPES, GgmlType, find_type
from pipeline.recipe.schema import Override, Recipe
from pipeline.recipe.values import ALLOWANCES, WRITABLE_TYPES
from pipeline.source.spec import Codec

PROTECTED = frozenset({SubRole.ENGRAM_GATE, SubRole.HYPER_CONNECTION, SubRole.ROUTER})
"""Small and sensitive: a quantized hyper-connection mix alone costs four digits of precision."""

FP4_BPW = 4.25
"""Bits per weight of FP4 experts as stored and of MXFP4, which holds them exactly."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The type of one tensor and the recipe entry that chose it."""

    type: GgmlType
    reason: str


def resolve_types(recipe: Recipe, targets: Sequence[TargetTensor]) -> dict[str, GgmlType]:
    """One type for every tensor of one file: a target, or a draft.

    Overrides, roles and sub-roles speak of the target; a draft, whose blocks have the same names,
    takes its types from the recipe's draft table.

    Raises:
        RecipeError: An override matches nothing, or a type may not be used where it is asked for.
        TypeRuleError: A type's block does not divide the rows of a tensor.
        Problems: Several of these.
    """
    is_draft = any(target.is_draft for target in targets)
    roles = recipe.roles
    if not is_draft and roles is None:
        raise RecipeError(
            f"recipe {recipe.name} makes a draft only and gives the target no types",
            expected="the table [roles]",
        )
    if roles is not None and roles.engram is None and any(t.role is Role.ENGRAM for t in targets):
        raise RecipeError(
            f"recipe {recipe.name} gives no type to the engram, and this model has one",
            expected="roles.engram",
            next_step="Add it, or take a recipe for V4.1.",
        )
    choose = _choose_draft if is_draft else _choose
    choices = {target.name: choose(recipe, target) for target in targets}
    problems: list[QuantmillError] = [
        *(() if is_draft else _unmatched(recipe, choices)),
        *_grouped(recipe, targets, choices),
    ]
    raise_problems(f"recipe {recipe.name} does not fit the model", problems)
    return {name: choice.type for name, choice in choices.items()}


def _choose_draft(recipe: Recipe, target: TargetTensor) -> Choice:
    if target.only_type is not None:
        return _unasked(target.only_type)
    key, name = recipe.draft.type_of(target.sub_role)
    return Choice(find_type(name), f"draft.{key}")


def _choose(recipe: Recipe, target: TargetTensor) -> Choice:
    for number, override in enumerate(recipe.override, 1):
        if re.search(override.match, target.name):
            return Choice(find_type(override.type), _override_title(number, override))
    named = recipe.sub_roles.type_of(target.sub_role)
    if named is not None:
        # hc base/scale, sinks and the hash routing share a sub-role with matrices but stay so.
        mixed = target.only_type and target.sub_role not in (SubRole.NORM, SubRole.BIAS)
        if not mixed:
            return Choice(find_type(named), f"sub_roles.{target.sub_role}")
    if target.only_type is not None:
        return _unasked(target.only_type)
    return Choice(find_type(getattr(recipe.roles, target.role)), f"roles.{target.role}")


def _unasked(only_type: str) -> Choice:
    return Choice(TYPES[only_type], f"stays {only_type}")


def _override_title(number: int, override: Override) -> str:
    return f"override {number} ({override.match})"


def _unmatched(recipe: Recipe, choices: Mapping[str, Choice]) -> Iterable[RecipeError]:
    used = {choice.reason for choice in choices.values()}
    for number, override in enumerate(recipe.override, 1):
        title = _override_title(number, override)
        if title in used:
            continue
        shadowing = {c.reason: None for n, c in choices.items() if re.search(override.match, n)}
        if shadowing:
            what = f"{title} is never reached: {', '.join(shadowing)} wins first"
            next_step = "The first override that matches a name wins: write this one above."
        else:
            what = f"{title} matches no tensor"
            next_step = (
                "Patterns are searched in GGUF names such as blk.0.ffn_down_exps.weight; "
                "engram tensors have other names in the other layout."
            )
        yield RecipeError(f"recipe {recipe.name}: {what}", next_step=next_step)


def _grouped(
    recipe: Recipe, targets: Sequence[TargetTensor], choices: Mapping[str, Choice]
) -> Iterable[QuantmillError]:
    """One problem per broken rule and recipe entry, however many tensors share it."""
    groups: dict[tuple[str, str], list[TargetTensor]] = {}
    for target in targets:
        choice = choices[target.name]
        rule = _broken_rule(recipe, target, choice.type)
        if rule:
            groups.setdefault((rule, choice.reason), []).append(target)
    for (rule, reason), tensors in groups.items():
        ggml_type = choices[tensors[0].name].type
        error = TypeRuleError if rule == "block" else RecipeError
        yield error(
            f"recipe {recipe.name}: {reason} asks for {ggml_type.name}{_WORDING[rule]}",
            # Whose rows do not divide, the user has to treat one by one: all are named.
            tensor=_list(tensors, most=len(tensors) if rule == "block" else 8),
            expected=f"rows of a multiple of {ggml_type.block} weights"
            if rule == "block"
            else None,
            next_step=_next_step(recipe, rule, reason, tensors, ggml_type),
        )


def _broken_rule(recipe: Recipe, target: TargetTensor, ggml_type: GgmlType) -> str | None:
    """The first rule that ``target`` in ``ggml_type`` would break, if any."""
    is_fp4 = target.matrices[0].codec is Codec.FP4
    rules = {
        f"only_{target.only_type}": target.only_type not in (None, ggml_type.name),
        "family": ggml_type.name not in (*WRITABLE_TYPES, target.only_type),
        "importance": ggml_type.name in NEEDS_IMPORTANCE,
        "block": target.n_cols % ggml_type.block != 0,
        "below_bf16": "below_bf16" not in recipe.allow
        and target.sub_role in PROTECTED
        and ggml_type.bpw < 16,
        "larger_than_fp4": "larger_than_fp4" not in recipe.allow
        and target.read_mode is ReadMode.SPARSE
        and is_fp4
        and ggml_type.name != "MXFP4"
        and ggml_type.bpw >= FP4_BPW,
    }
    return next((name for name, broken in rules.items() if broken), None)


_WORDING = {
    "only_F32": ", but engines accept nothing but F32 here",
    "only_I32": ", but engines accept nothing but I32 here",
    "block": ", whose block does not divide the rows",
    "family": ", which this version cannot write",
    "importance": ", which needs an importance matrix, and this version takes none",
    "below_bf16": ", too coarse for these small sensitive matrices",
    "larger_than_fp4": ", but MXFP4 keeps experts that are stored as FP4 bit for bit and is no "
    "larger",
}


def _next_step(
    recipe: Recipe, rule: str, reason: str, tensors: Sequence[TargetTensor], asked: GgmlType
) -> str:
    if rule.startswith("only_"):
        is_override = reason.startswith("override")
        only_type = tensors[0].only_type
        unasked = f"Remove {reason}: they stay {only_type} unasked."
        return "Narrow the pattern." if is_override else unasked
    step = f"Types that fit: {', '.join(_fitting(recipe, tensors, asked))}."
    if rule in ALLOWANCES:
        step += f' To have it all the same, add "{rule}" to allow.'
    return step


def _fitting(
    recipe: Recipe, tensors: Sequence[TargetTensor], asked: GgmlType, most: int = 5
) -> Iterable[str]:
    """The types nearest in size that break no rule, with the bytes of ``tensors`` in each."""
    near = sorted(
        (t for t in TYPES.values() if not any(_broken_rule(recipe, x, t) for x in tensors)),
        key=lambda t: (abs(t.bpw - asked.bpw), t.bpw),
    )
    for t in near[:most]:
        nbytes = sum(x.n_rows * t.row_nbytes(x.n_cols) for x in tensors)
        yield f"{t.name} ({nbytes:,} bytes)"


def _list(tensors: Sequence[TargetTensor], *, most: int) -> str:
    named = [f"{t.name} [{' x '.join(map(str, t.shape))}]" for t in tensors[:most]]
    more = f" and {len(tensors) - most} more" if len(tensors) > most else ""
    return ", ".join(named) + more
