"""Finding a recipe by shipped name or by path."""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import SourceError
from pipeline.recipe.schema import did_you_mean

SHIPPED = Path(__file__).resolve().parent.parent / "recipes"
"""The recipes that come with the package."""


def recipe_path(recipe: str) -> Path:
    """The file of a recipe given by shipped name or by path.

    Raises:
        SourceError: Neither exists; the message lists the shipped names.
    """
    shipped = SHIPPED / f"{recipe}.toml"
    if shipped.exists():
        return shipped
    path = Path(recipe)
    if not path.is_file():
        names = sorted(p.stem for p in SHIPPED.glob("*.toml"))
        raise SourceError(
            "no such recipe",
            file=recipe,
            expected="a TOML file or one of " + ", ".join(names),
            next_step=did_you_mean(recipe, names),
        )
    return path
