"""A recipe found again from the types that tensors have."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.errors import RecipeError
from pipeline.model.layout import Layout
from pipeline.model.roles import TARGET_ROLES, ReadMode, SubRole
from pipeline.model.targets.tensor import TargetTensor
from pipeline.quant.types import GgmlType
from pipeline.recipe.ranges import as_ranges
from pipeline.recipe.rules import FP4_BPW, PROTECTED
from pipeline.recipe.schema import DraftTable, Override, Recipe, Roles, SubRoles
from pipeline.recipe.tables import OutputTable
from pipeline.recipe.values import TARGET_SUB_ROLES, DraftMode

Types = Mapping[str, GgmlType]

_BLOCK = re.compile(r"blk\.\d+\.")


@dataclass(frozen=True, slots=True)
class _Free:
    """The tensors whose type is a choice, and the type that each has."""

    targets: tuple[TargetTensor, ...]
    types: Types

    def name_of(self, target: TargetTensor) -> str:
        return self.types[target.name].name

    def most_common(self, targets: Iterable[TargetTensor]) -> str | None:
        counted = Counter(self.name_of(target) for target in targets).most_common(1)
        return counted[0][0] if counted else None


def derive_recipe(
    targets: Sequence[TargetTensor], types: Types, *, name: str, layout: Layout = Layout.MAINLINE
) -> Recipe:
    """The recipe of a target whose tensors have ``types``, in as few words as it takes.

    Roles and sub-roles get the type that most of their tensors have, overrides say the rest. What
    published files did and a recipe must ask for by name is allowed where it is needed.

    Args:
        targets: All tensors.
        types: The type of each by name.
        name: Name of the recipe.
        layout: Layout of the file.

    Raises:
        RecipeError: No type is a choice: this is no target.
    """
    free = _Free(tuple(t for t in targets if t.only_type is None), types)
    roles = _roles(free)
    sub_roles = _sub_roles(free, roles)
    return Recipe(
        name=name,
        allow=_allowances(free),
        roles=Roles(**roles),
        sub_roles=SubRoles(**sub_roles),
        override=tuple(_overrides(free, roles, sub_roles)),
        draft=DraftTable(mode=DraftMode.DROP),
        output=OutputTable(layout=layout),
    )


def derive_draft(targets: Sequence[TargetTensor], types: Types, *, name: str) -> Recipe:
    """The recipe of a draft whose tensors have ``types``.

    Raises:
        RecipeError: A sub-role has tensors of several types, which no recipe gives a draft.
    """
    free = _Free(tuple(t for t in targets if t.only_type is None), types)
    said: dict[str, str] = {}
    for sub_role in dict.fromkeys(target.sub_role for target in free.targets):
        found = sorted({free.name_of(t) for t in free.targets if t.sub_role is sub_role})
        if len(found) > 1:
            raise RecipeError(
                f"{sub_role} has several types in this draft, and a recipe gives it one",
                found=", ".join(found),
            )
        said[sub_role.value] = found[0]
    for kind in ("routed", "shared"):
        parts = [key for key in said if key.startswith(f"{kind}_")]
        if parts:
            said[kind] = Counter(said[key] for key in parts).most_common(1)[0][0]
            said = {k: v for k, v in said.items() if k not in parts or v != said[kind]}
    return Recipe(
        name=name,
        allow=_allowances(free),
        draft=DraftTable(mode=DraftMode.ONLY, **said),
    )


def _roles(free: _Free) -> dict[str, str]:
    whole = free.most_common(free.targets)
    if whole is None:
        raise RecipeError("no tensor here has a type that is a choice")
    found = {role.value: free.most_common(_of_role(free, role)) for role in TARGET_ROLES}
    # Models without an engram need no type for it; the other roles are asked for.
    if found["engram"] is None:
        del found["engram"]
    return {role: named or whole for role, named in found.items()}


def _of_role(free: _Free, role: str) -> Iterator[TargetTensor]:
    return (target for target in free.targets if target.role == role)


def _sub_roles(free: _Free, roles: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for sub_role in TARGET_SUB_ROLES:
        members = [t for t in free.targets if t.sub_role is sub_role]
        named = free.most_common(members)
        if named is not None and any(roles[t.role] != named for t in members):
            found[sub_role.value] = named
    return found


def _allowances(free: _Free) -> tuple[str, ...]:
    def is_coarse(target: TargetTensor) -> bool:
        return target.sub_role in PROTECTED and free.types[target.name].bpw < 16

    def is_large(target: TargetTensor) -> bool:
        ggml_type = free.types[target.name]
        is_sparse = target.read_mode is ReadMode.SPARSE
        return is_sparse and ggml_type.name != "MXFP4" and ggml_type.bpw >= FP4_BPW

    checks = {"below_bf16": is_coarse, "larger_than_fp4": is_large}
    return tuple(name for name, needs in checks.items() if any(map(needs, free.targets)))


def _overrides(
    free: _Free, roles: Mapping[str, str], sub_roles: Mapping[str, str]
) -> Iterator[Override]:
    """What roles and sub-roles get wrong: whole sub-roles in some layers, then tensors by name."""
    wrong = [
        target
        for target in free.targets
        if free.name_of(target) != sub_roles.get(target.sub_role, roles[target.role])
    ]
    groups: dict[tuple[str, str], list[SubRole]] = {}
    rest: list[TargetTensor] = []
    for (sub_role, type_name), members in _grouped(wrong, free).items():
        layers = _layers(members)
        same = [t for t in free.targets if t.sub_role is sub_role]
        if members == [target for target in same if target.layer in layers]:
            ranges = as_ranges(layers, _layers(same))
            groups.setdefault((ranges, type_name), []).append(sub_role)
        else:
            rest.extend(members)
    for (ranges, type_name), named in groups.items():
        yield Override(sub_roles=tuple(one.value for one in named), layers=ranges, type=type_name)
    yield from _by_name(rest, free)


def _grouped(
    wrong: Sequence[TargetTensor], free: _Free
) -> dict[tuple[SubRole, str], list[TargetTensor]]:
    found: dict[tuple[SubRole, str], list[TargetTensor]] = {}
    for target in wrong:
        found.setdefault((target.sub_role, free.name_of(target)), []).append(target)
    return found


def _layers(targets: Iterable[TargetTensor]) -> set[int]:
    return {target.layer for target in targets if target.layer is not None}


def _by_name(rest: Sequence[TargetTensor], free: _Free) -> Iterator[Override]:
    by_tail: dict[tuple[str, str], list[TargetTensor]] = {}
    for target in rest:
        key = (_BLOCK.sub("", target.name, count=1), free.name_of(target))
        by_tail.setdefault(key, []).append(target)
    together: dict[tuple[str, str], list[str]] = {}
    for (tail, type_name), members in by_tail.items():
        if members[0].layer is None:
            yield Override(match=f"^{re.escape(tail)}$", type=type_name)
            continue
        present = _layers(t for t in free.targets if _BLOCK.sub("", t.name, count=1) == tail)
        wanted = _layers(members)
        ranges = "" if wanted == present else as_ranges(wanted, present)
        together.setdefault((ranges, type_name), []).append(tail)
    for (ranges, type_name), tails in together.items():
        pattern = rf"^blk\.\d+\.{alternatives(tails)}$"
        yield Override(match=pattern, layers=ranges or None, type=type_name)


def alternatives(tails: Sequence[str]) -> str:
    """A regular expression for one of ``tails``, their common end written once."""
    end = ".weight" if all(tail.endswith(".weight") for tail in tails) else ""
    stems = [re.escape(tail.removesuffix(end)) for tail in tails]
    joined = stems[0] if len(stems) == 1 else f"({'|'.join(stems)})"
    return joined + re.escape(end)
