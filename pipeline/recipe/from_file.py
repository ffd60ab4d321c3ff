"""The recipe of a finished GGUF: the one stored in it, or one told from its tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import FormatError, QuantmillError
from pipeline.gguf.model_file import GgufModel, model_stem
from pipeline.gguf.reader import GgufTensor
from pipeline.model.contract.form import form_of
from pipeline.model.layout import Layout
from pipeline.model.roles import SubRole, sub_role_of
from pipeline.model.targets.rows import BLOCK_ROWS, F32, STREAM_HEAD_ROWS
from pipeline.model.targets.tensor import TargetTensor
from pipeline.model.targets.trunk import MAINLINE_GATE
from pipeline.quant.types import GgmlType
from pipeline.recipe.choose import choose
from pipeline.recipe.derive import derive_draft, derive_recipe
from pipeline.recipe.dump import RECIPE_KEY as RECIPE_KEY
from pipeline.recipe.schema import Recipe, parse_recipe
from pipeline.source.spec import Codec, MatrixRef

_MOST_REPEATS = 3
"""Repeats in a stored pattern: of names of 63 characters these are soon tried through."""

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")

_FIXED = {
    **{row.target: row.only_type for row in (*BLOCK_ROWS, *STREAM_HEAD_ROWS) if row.only_type},
    MAINLINE_GATE.removeprefix("blk.{n}."): F32,
}
"""Names, without their block, of tensors that have one type in every file that loads."""


@dataclass(frozen=True, slots=True)
class FoundRecipe:
    """A file's recipe, whether the file itself said it, and what it leaves unsaid."""

    recipe: Recipe
    is_recorded: bool
    notes: tuple[str, ...] = ()


def recipe_of_file(model: GgufModel) -> FoundRecipe:
    """The recipe by which ``model`` is as it is.

    A recipe that stands in the metadata counts if it gives every tensor the type it has: a tool
    that requantized the file may have carried the key along. Otherwise a recipe is derived.

    Raises:
        FormatError: The file is of no form that this project knows.
        RecipeError: A draft has several types where a recipe gives one.
    """
    form = form_of(model)
    tensors = [tensor for _, tensor in model.tensors.values()]
    targets = [_target(tensor, is_draft=form.is_draft) for tensor in tensors]
    types = {tensor.name: tensor.type for tensor in tensors}
    notes = list(_misfits(targets, types))
    name = _recipe_name(model.files[0].path)
    if form.is_draft:
        return FoundRecipe(derive_draft(targets, types, name=name), False, tuple(notes))
    recorded = _recorded(model)
    if isinstance(recorded, Recipe):
        wrong = _disagreeing(recorded, targets, types)
        if not wrong:
            # The command line may have chosen another layout than the recipe.
            output = recorded.output.model_copy(update={"said_layout": form.layout})
            return FoundRecipe(recorded.model_copy(update={"output": output}), True)
        notes.insert(0, f"the recipe stored in the file gives {_some(wrong)} another type")
    elif recorded is not None:
        notes.insert(0, f"the recipe stored in the file cannot be read: {recorded}")
    layout = form.layout or Layout.MAINLINE
    recipe = derive_recipe(targets, types, name=name, layout=layout)
    return FoundRecipe(recipe, False, tuple(notes))


def _target(tensor: GgufTensor, *, is_draft: bool) -> TargetTensor:
    """A stored tensor as one that might be planned: read from itself."""
    block = _BLOCK.fullmatch(tensor.name)
    *before, n_cols = tensor.shape
    stored = MatrixRef(
        Codec.GGML, tensor.name, None, math.prod(before), n_cols, ggml_type=tensor.type.name
    )
    return TargetTensor(
        name=tensor.name,
        layer=int(block[1]) if block else None,
        shape=tensor.shape,
        only_type=_only_type(tensor.name, block[2] if block else tensor.name),
        matrices=(stored,),
        is_draft=is_draft,
    )


def _only_type(name: str, tail: str) -> str | None:
    try:
        is_fixed_kind = sub_role_of(name) in (SubRole.NORM, SubRole.BIAS)
    except KeyError as error:
        raise FormatError(
            "the file holds a tensor that these models do not have",
            tensor=name,
            next_step="scripts/doctor says what kind of file it is.",
        ) from error
    return _FIXED.get(tail, F32 if is_fixed_kind else None)


def _misfits(targets: Sequence[TargetTensor], types: Mapping[str, GgmlType]) -> list[str]:
    """A note on tensors that have a type which no recipe may give them."""
    wrong = [t.name for t in targets if t.only_type not in (None, types[t.name].name)]
    return [f"{_some(wrong)} should be F32 and will be when made anew"] if wrong else []


def _recorded(model: GgufModel) -> Recipe | str | None:
    """The stored recipe, or why it cannot be read."""
    entry = model.key_values.get(RECIPE_KEY)
    if entry is None:
        return None
    try:
        recipe = parse_recipe(str(entry.value).encode(), model.files[0].path, _nobody)
    except QuantmillError as error:
        return str(error)
    slow = [one.match for one in (*recipe.override, *recipe.graft) if not _is_quick(one.match)]
    return f"its pattern {slow[0]!r} might take for ever" if slow else recipe


def _nobody(word: str, child: Path) -> None:
    """What a stored recipe extends: a file that anybody made must not have others read."""
    del word, child


def _is_quick(pattern: str | None) -> bool:
    """Whether a stranger's pattern is sure to end soon: few repeats, and none of a group.

    Those that repeat repeats take time without end on a name that does not match.
    """
    repeats = re.findall(r"(?<!\\)[*+?{]", pattern or "")
    return len(repeats) <= _MOST_REPEATS and not re.search(r"\)[*+{]", pattern or "")


def _disagreeing(
    recipe: Recipe, targets: Sequence[TargetTensor], types: Mapping[str, GgmlType]
) -> list[str]:
    if recipe.roles is None:
        return list(types)
    free = [target for target in targets if target.only_type is None]
    return [t.name for t in free if choose(recipe, t).type != types[t.name]]


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1:,} more"


def _recipe_name(path: Path) -> str:
    """A name for a recipe, after the file."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", model_stem(path)).lstrip("-._")
    return plain[:100] or "recipe"
