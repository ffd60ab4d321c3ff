"""The recipe file: TOML, checked whole, every mistake reported at once.

A recipe gives one type to every role, refines it by sub-role and by `[[override]]`, and says how
the output is laid out. Precedence: the first override that selects a tensor, else its sub-role,
else its role. Tensors that must stay F32 are F32 without being mentioned. A recipe may extend
another one: what it says wins, key by key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter, ValidationError

from pipeline import files
from pipeline.errors import RecipeError, raise_problems
from pipeline.recipe.budget_table import BudgetTable, ByRole, Machine
from pipeline.recipe.load import (
    EXTENDS,
    FindParent,
    RawFile,
    RawTable,
    beside,
    frozen,
    merged,
    read_chain,
)
from pipeline.recipe.mistakes import describe
from pipeline.recipe.mistakes import did_you_mean as did_you_mean
from pipeline.recipe.selection import Graft as Graft
from pipeline.recipe.selection import Override as Override
from pipeline.recipe.tables import DraftTable as DraftTable
from pipeline.recipe.tables import (
    ExpertsTable,
    ImatrixTable,
    OutputTable,
    SourceTable,
    Table,
)
from pipeline.recipe.tables import Roles as Roles
from pipeline.recipe.tables import SubRoles as SubRoles
from pipeline.recipe.values import Allowance, DraftMode, Name


class Recipe(Table):
    """One recipe. ``name`` is the file's stem unless it says otherwise."""

    name: Name
    description: str = ""
    allow: tuple[Allowance, ...] = ()
    roles: Roles | None = None
    """Only a recipe that makes nothing but a draft has none."""
    sub_roles: SubRoles = SubRoles()
    override: tuple[Override, ...] = ()
    graft: tuple[Graft, ...] = ()
    imatrix: ImatrixTable = ImatrixTable()
    experts: ExpertsTable = ExpertsTable()
    source: SourceTable = SourceTable()
    draft: DraftTable = DraftTable()
    output: OutputTable = OutputTable()
    budget: BudgetTable | None = None

    @property
    def makes_target(self) -> bool:
        """Whether anything but a draft is made."""
        return self.draft.mode is not DraftMode.ONLY

    def without_budget(self) -> Self:
        """The same recipe, whose types count as they stand."""
        return self.model_copy(update={"budget": None})


_ADAPTER = TypeAdapter(Recipe)

_TABLES: Mapping[str, type[Table]] = {
    "": Recipe,
    "roles": Roles,
    "sub_roles": SubRoles,
    "override": Override,
    "graft": Graft,
    "imatrix": ImatrixTable,
    "experts": ExpertsTable,
    "source": SourceTable,
    "draft": DraftTable,
    "output": OutputTable,
    "budget": BudgetTable,
    "budget.types": ByRole,
    "budget.weights": ByRole,
    "budget.machine": Machine,
}


def _keys(table: type[Table]) -> tuple[str, ...]:
    return tuple(field.alias or name for name, field in table.model_fields.items())


KEYS = {name: _keys(table) for name, table in _TABLES.items()}
"""The keys that each table of a recipe knows."""
KEYS[""] = (*KEYS[""], EXTENDS)


def load_recipe(path: Path, find: FindParent = beside) -> Recipe:
    """The recipe in the TOML file at ``path``.

    Args:
        path: The file.
        find: Which file a recipe extends, given the word that it says and its own path.

    Raises:
        SourceError: A file cannot be read.
        RecipeError: It is no TOML, breaks the schema, or extends a recipe that is not there or
            itself; several mistakes come as `Problems`, each with the file in which it stands.
    """
    return parse_recipe(files.read_bytes(path), path, find)


def parse_recipe(content: bytes, path: Path, find: FindParent = beside) -> Recipe:
    """The recipe that ``content`` holds; ``path`` names it in errors and gives its default name.

    Raises:
        SourceError: As `load_recipe`.
        RecipeError: As `load_recipe`.
    """
    chain = read_chain(content, path, find)
    if len(chain) > 1:
        # One by one first, so that each mistake is told of the file in which it stands.
        raise_problems(f"recipe {path}", [one for raw in chain for one in _mistakes_of(raw)])
    recipe = _checked({"name": path.stem, **merged(chain)}, path)
    raise_problems(f"recipe {path}", list(_contradictions(recipe, path)))
    return recipe


def _checked(table: RawTable, path: Path) -> Recipe:
    try:
        return _ADAPTER.validate_python(frozen(table))
    except ValidationError as error:
        raise_problems(f"recipe {path}", [describe(path, one, KEYS) for one in error.errors()])
        raise AssertionError("pydantic raised without an error") from error


def _mistakes_of(raw: RawFile) -> Iterable[RecipeError]:
    """What is wrong in one file of several; what it lacks, another may say."""
    try:
        _ADAPTER.validate_python(frozen({"name": raw.path.stem, **raw.table}))
    except ValidationError as error:
        for one in error.errors():
            is_list_entry = any(isinstance(step, int) for step in one["loc"])
            if one["type"] != "missing" or is_list_entry:
                yield describe(raw.path, one, KEYS)


def _contradictions(recipe: Recipe, path: Path) -> Iterable[RecipeError]:
    """What no table can see by itself."""
    of_target = recipe.override or recipe.graft or recipe.budget or recipe.experts != ExpertsTable()
    of_target = of_target or recipe.imatrix != ImatrixTable()
    if not recipe.makes_target and of_target:
        yield RecipeError(
            "overrides, grafts, experts, an importance matrix and a budget speak of the target, "
            "and this recipe makes a draft only",
            file=path,
            next_step="Types of the draft stand in [draft].",
        )
    if recipe.roles is None and recipe.makes_target:
        yield RecipeError(
            "the table [roles] is missing",
            file=path,
            expected=", ".join(KEYS["roles"]),
            next_step="Every role must get a type.",
        )
    if recipe.budget is not None:
        yield from _budget_contradictions(recipe.budget, path)


def _budget_contradictions(budget: BudgetTable, path: Path) -> Iterable[RecipeError]:
    if not budget.has_limit:
        yield RecipeError(
            "budget: nothing is limited",
            file=path,
            expected="file_nbytes, store_nbytes, per_token_nbytes or [budget.machine]",
        )
    free = budget.types.model_dump(exclude_none=True)
    if not free:
        yield RecipeError(
            "budget: nothing is free to choose",
            file=path,
            expected="roles or sub-roles in [budget.types], each with a list of types",
            next_step="An empty list stands for budget.candidates.",
        )
    bare = [name for name, types in free.items() if not types]
    if bare and not budget.candidates:
        yield RecipeError(
            f"budget: nothing says what {', '.join(bare)} may become",
            file=path,
            expected="types in [budget.types], or budget.candidates for all",
        )
