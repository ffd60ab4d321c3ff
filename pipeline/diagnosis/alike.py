"""How to make a file of the same types from the checkpoint, by a command that works."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.diagnosis import commands
from pipeline.diagnosis.finding import Finding
from pipeline.diagnosis.opened import by_name
from pipeline.errors import QuantmillError
from pipeline.gguf.model_file import GgufModel, read_model
from pipeline.model.roles import sub_role_of
from pipeline.quant.types import TYPES
from pipeline.recipe.dump import recipe_toml
from pipeline.recipe.from_file import recipe_of_file
from pipeline.recipe.schema import Recipe


@dataclass(frozen=True, slots=True)
class Alike:
    """The command, and the recipe it follows where no command of ours tells that of the file."""

    command: str
    recipe: str | None = None


def with_alike(
    findings: Iterable[Finding], path: Path, model: GgufModel
) -> tuple[tuple[Finding, ...], str | None]:
    """``findings`` with the commands of those that ask for a file's like, and its recipe to show.

    Args:
        findings: What was found.
        path: The first file of the model.
        model: Its headers, as far as they could be read.
    """
    listed = tuple(findings)
    if not any(finding.mend and finding.mend.alike for finding in listed):
        return listed, None
    alike = _alike_of(path, model)
    return tuple(_told(finding, alike.command) for finding in listed), alike.recipe


def _told(finding: Finding, command: str) -> Finding:
    if finding.mend is None or not finding.mend.alike:
        return finding
    return replace(finding, mend=replace(finding.mend, commands=(command,)))


def _alike_of(path: Path, model: GgufModel) -> Alike:
    """What `scripts/recipe` tells; else the same of headers that it does not take; else nothing.

    Types that no recipe can name are left for the reader to choose.
    """
    try:
        as_read = read_model(path)
        if all(map(_is_known, by_name(as_read))):
            recipe_of_file(as_read)
            return Alike(commands.convert_alike(path))
    except QuantmillError:
        pass
    try:
        recipe = _recipe(model)
    except QuantmillError:
        recipe = None
    if recipe is None:
        return Alike(commands.convert())
    return Alike(commands.convert(commands.ALIKE_FILE), recipe_toml(recipe))


def _recipe(model: GgufModel) -> Recipe | None:
    """The recipe of all tensors that a model of its form has."""
    files = tuple(
        replace(file, tensors={n: t for n, t in file.tensors.items() if _is_known(n)})
        for file in model.files
    )
    types = {tensor.type for file in files for tensor in file.tensors.values()}
    if any(TYPES.get(one.name) != one for one in types):
        return None
    return recipe_of_file(GgufModel(files)).recipe


def _is_known(name: str) -> bool:
    try:
        sub_role_of(name)
    except KeyError:
        return False
    return True
