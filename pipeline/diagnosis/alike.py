"""How to make a file of the same types from the checkpoint, by a command that works."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.diagnosis import commands
from pipeline.diagnosis.finding import Finding
from pipeline.errors import QuantmillError
from pipeline.gguf.model_file import GgufModel, read_model
from pipeline.recipe.dump import recipe_toml
from pipeline.recipe.from_file import recipe_of_file
from pipeline.recipe.schema import parse_recipe


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
    """What `scripts/recipe` tells; else the same of headers that it does not take; else nothing."""
    try:
        recipe_of_file(read_model(path))
        return Alike(commands.convert_alike(path))
    except QuantmillError:
        pass
    try:
        recipe = recipe_toml(recipe_of_file(model).recipe)
        # Types that no recipe can name are left for the reader to choose.
        parse_recipe(recipe.encode(), Path(commands.ALIKE_FILE))
    except QuantmillError:
        return Alike(commands.convert())
    return Alike(commands.convert(commands.ALIKE_FILE), recipe)
