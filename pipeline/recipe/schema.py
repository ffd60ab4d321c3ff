"""The recipe file: TOML, checked whole, every mistake reported at once.

A recipe gives one type to every role, refines it by sub-role and by `[[override]]`, and says how
the output is laid out. Precedence: the first override that matches a tensor's name, else its
sub-role, else its role. Tensors that must stay F32 are F32 without being mentioned.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from pipeline import files
from pipeline.errors import RecipeError, raise_problems
from pipeline.model.layout import Layout
from pipeline.model.roles import SubRole
from pipeline.recipe.mistakes import describe
from pipeline.recipe.mistakes import did_you_mean as did_you_mean
from pipeline.recipe.values import (
    Allowance,
    DraftMode,
    DraftModeName,
    ExpertCount,
    LayoutName,
    Name,
    Pattern,
    ShardSize,
    TypeName,
)


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Roles(_Table):
    """A type for each role of the target file; models without an engram need none for it."""

    routed: TypeName
    engram: TypeName | None = None
    attention: TypeName
    embedding: TypeName
    shared: TypeName


class SubRoles(_Table):
    """Types that refine a role; all optional."""

    routed_gate: TypeName | None = None
    routed_up: TypeName | None = None
    routed_down: TypeName | None = None
    engram_table: TypeName | None = None
    engram_dense: TypeName | None = None
    engram_gate: TypeName | None = None
    attention: TypeName | None = None
    indexer: TypeName | None = None
    compressor: TypeName | None = None
    hyper_connection: TypeName | None = None
    token_embd: TypeName | None = None
    output: TypeName | None = None
    router: TypeName | None = None
    norm: TypeName | None = None
    bias: TypeName | None = None
    shared_gate: TypeName | None = None
    shared_up: TypeName | None = None
    shared_down: TypeName | None = None

    def type_of(self, sub_role: SubRole) -> str | None:
        """The type this table gives to ``sub_role``, if any."""
        return getattr(self, sub_role.value, None)


class Override(_Table):
    """A type for the tensors whose GGUF name ``match`` is found in (`re.search`)."""

    match: Pattern
    type: TypeName


class ExpertsTable(_Table):
    """Which routed experts of the trunk stay; all of them without it.

    ``keep`` is a file: a keep list; the command line may name another. ``n_keep`` is how many of a
    layer the recipe is made for, so that a list of another length is noticed.
    """

    keep: str | None = None
    n_keep: ExpertCount | None = None


class SourceTable(_Table):
    """Where the checkpoint comes from, when the command line does not say."""

    path: str | None = None


class DraftTable(_Table):
    """What becomes of the MTP/DSpark module, and the types of its file.

    The target file never holds it: engines load it from a file of its own (``keep``), and want no
    tensor too many in the target. ``only`` makes that file and no target, ``drop`` leaves it out.
    The types that stand here when nothing is said are those of the published draft.
    """

    mode: DraftModeName = DraftMode.KEEP
    routed: TypeName = "MXFP4"
    attention: TypeName = "Q8_0"
    shared: TypeName = "Q8_0"
    hyper_connection: TypeName = "F32"
    router: TypeName = "BF16"
    draft_input: TypeName = "Q8_0"
    markov: TypeName = "BF16"
    confidence: TypeName = "BF16"
    routed_gate: TypeName | None = None
    routed_up: TypeName | None = None
    routed_down: TypeName | None = None
    shared_gate: TypeName | None = None
    shared_up: TypeName | None = None
    shared_down: TypeName | None = None

    def type_of(self, sub_role: SubRole) -> tuple[str, str]:
        """The key that gives ``sub_role`` its type, and that type."""
        named = getattr(self, sub_role.value)
        key = sub_role.value if named else sub_role.value.split("_")[0]
        return key, named or getattr(self, key)


class OutputTable(_Table):
    """How the output is laid out."""

    layout: LayoutName = Layout.MAINLINE
    shard_nbytes: ShardSize = 45_000_000_000


class Recipe(_Table):
    """One recipe file. ``name`` is the file's stem unless it says otherwise."""

    name: Name
    description: str = ""
    allow: tuple[Allowance, ...] = ()
    roles: Roles | None = None
    """Only a recipe that makes nothing but a draft has none."""
    sub_roles: SubRoles = SubRoles()
    override: tuple[Override, ...] = ()
    experts: ExpertsTable = ExpertsTable()
    source: SourceTable = SourceTable()
    draft: DraftTable = DraftTable()
    output: OutputTable = OutputTable()


_ADAPTER = TypeAdapter(Recipe)

_TABLES: Mapping[str, type[_Table]] = {
    "": Recipe,
    "roles": Roles,
    "sub_roles": SubRoles,
    "override": Override,
    "experts": ExpertsTable,
    "source": SourceTable,
    "draft": DraftTable,
    "output": OutputTable,
}
_KEYS = {name: tuple(table.model_fields) for name, table in _TABLES.items()}
"""The keys that each table of a recipe knows."""


def load_recipe(path: Path) -> Recipe:
    """The recipe in the TOML file at ``path``.

    Raises:
        SourceError: The file cannot be read.
        RecipeError: It is no TOML, or breaks the schema; several mistakes come as `Problems`.
    """
    return parse_recipe(files.read_bytes(path), path)


def parse_recipe(content: bytes, path: Path) -> Recipe:
    """The recipe that ``content`` holds; ``path`` names it in errors and gives its default name.

    Raises:
        RecipeError: As `load_recipe`.
    """
    table = _toml(content, path)
    table.setdefault("name", path.stem)
    try:
        recipe = _ADAPTER.validate_python(_frozen(table))
    except ValidationError as error:
        found = [describe(path, one, _KEYS) for one in error.errors()]
        raise_problems(f"recipe {path}", found)
        raise AssertionError("pydantic raised without an error") from error
    makes_target = recipe.draft.mode is not DraftMode.ONLY
    if not makes_target and (recipe.override or recipe.experts != ExpertsTable()):
        raise RecipeError(
            "overrides and experts speak of the target, and this recipe makes a draft only",
            file=path,
            next_step="Types of the draft stand in [draft].",
        )
    if recipe.roles is None and makes_target:
        raise RecipeError(
            "the table [roles] is missing",
            file=path,
            expected=", ".join(_KEYS["roles"]),
            next_step="Every role must get a type.",
        )
    return recipe


def _toml(content: bytes, path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise RecipeError(
            "the recipe is not UTF-8 text",
            file=path,
            offset=error.start,
            found=f"byte 0x{content[error.start]:02x}",
            next_step="Save it as UTF-8.",
        ) from error
    except (ValueError, RecursionError) as error:
        raise RecipeError(
            "the recipe is not valid TOML",
            file=path,
            found=str(error),
            next_step="Names of types are text and stand in quotes; see https://toml.io.",
        ) from error


def _frozen(value: object) -> object:
    """TOML lists as tuples, which is what the strict schema asks for."""
    if isinstance(value, dict):
        return {key: _frozen(inner) for key, inner in value.items()}
    return tuple(_frozen(inner) for inner in value) if isinstance(value, list) else value
