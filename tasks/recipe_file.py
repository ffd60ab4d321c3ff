"""Finding a recipe by shipped name or by path."""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import RecipeError, SourceError
from pipeline.recipe.load import beside
from pipeline.recipe.schema import Recipe, did_you_mean, load_recipe

SHIPPED = Path(__file__).resolve().parent.parent / "recipes"
"""The recipes that come with the package."""


def read_recipe(recipe: str) -> Recipe:
    """The recipe given by shipped name or by path, with those that it extends.

    Raises:
        SourceError: It does not exist, or cannot be read.
        RecipeError: It breaks the schema, or extends one that does not exist.
    """
    return load_recipe(recipe_path(recipe), find_parent)


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
        names = shipped_names()
        raise SourceError(
            "no such recipe",
            file=recipe,
            expected="a TOML file or one of " + ", ".join(names),
            next_step=did_you_mean(recipe, names),
        )
    return path


def find_parent(word: str, child: Path) -> Path:
    """The file that the recipe at ``child`` means by ``extends = "word"``.

    Raises:
        RecipeError: No recipe of this name comes along, and none lies beside ``child``.
    """
    shipped = SHIPPED / f"{word}.toml"
    path = shipped if shipped.exists() else beside(word, child)
    if path is None:
        names = shipped_names()
        raise RecipeError(
            "the recipe that this one extends is not there",
            file=child,
            expected="a TOML file beside it or one of " + ", ".join(names),
            found=repr(word),
            next_step=did_you_mean(word, names),
        )
    return path


def shipped_names() -> list[str]:
    """The recipes that come with the package, by name."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))
