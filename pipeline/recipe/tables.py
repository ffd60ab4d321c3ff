"""The tables of a recipe file, but for selections and the budget."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from pipeline.model.layout import Layout
from pipeline.model.roles import SubRole
from pipeline.recipe.values import (
    DraftMode,
    DraftModeName,
    ExpertCount,
    Factor,
    LayoutName,
    NotNegative,
    ShardSize,
    Text,
    TypeName,
    TypeOrSource,
)


class Table(BaseModel):
    """Keys and values as they stand in TOML: nothing is converted, nothing unknown is taken."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Roles(Table):
    """A type for each role of the target file; models without an engram need none for it."""

    routed: TypeOrSource
    engram: TypeOrSource | None = None
    attention: TypeOrSource
    embedding: TypeOrSource
    shared: TypeOrSource


class SubRoles(Table):
    """Types that refine a role; all optional."""

    routed_gate: TypeOrSource | None = None
    routed_up: TypeOrSource | None = None
    routed_down: TypeOrSource | None = None
    engram_table: TypeOrSource | None = None
    engram_dense: TypeOrSource | None = None
    engram_gate: TypeOrSource | None = None
    attention: TypeOrSource | None = None
    indexer: TypeOrSource | None = None
    compressor: TypeOrSource | None = None
    hyper_connection: TypeOrSource | None = None
    token_embd: TypeOrSource | None = None
    output: TypeOrSource | None = None
    router: TypeOrSource | None = None
    norm: TypeOrSource | None = None
    bias: TypeOrSource | None = None
    shared_gate: TypeOrSource | None = None
    shared_up: TypeOrSource | None = None
    shared_down: TypeOrSource | None = None

    def type_of(self, sub_role: SubRole) -> str | None:
        """The type this table gives to ``sub_role``, if any."""
        return getattr(self, sub_role.value, None)


class ExpertsTable(Table):
    """Which routed experts of the trunk stay; all of them without it.

    ``keep`` is a file: a keep list; the command line may name another. ``n_keep`` is how many of a
    layer the recipe is made for, so that a list of another length is noticed.
    """

    keep: str | None = None
    n_keep: ExpertCount | None = None


class ImatrixTable(Table):
    """The importance matrix that types are searched with.

    ``file`` lies beside the recipe; the command line may name another. ``prior``: how many tokens
    of an average expert every expert is given on top of those it saw, which keeps what was hardly
    seen from running wild. Experts that saw fewer than ``threshold`` tokens are listed.
    ``required``: the recipe is made for one, and to run it without is a mistake.
    """

    file: Text | None = None
    prior: Factor = 1.0
    threshold: NotNegative = 10
    required: bool = False


class SourceTable(Table):
    """Where the source comes from, when the command line does not say.

    ``path`` lies beside the recipe, or is a hub's ``owner/name@commit``.
    """

    path: str | None = None


class DraftTable(Table):
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


class OutputTable(Table):
    """How the output is laid out."""

    said_layout: LayoutName | None = Field(default=None, alias="layout")
    """Nothing where the source's own, if it has one, is to stay."""
    shard_nbytes: ShardSize = 45_000_000_000

    @property
    def layout(self) -> Layout:
        """The layout of what is made of a checkpoint."""
        return self.said_layout or Layout.MAINLINE
