"""What a recipe says of a budget: limits, what is free to choose, and what counts how much."""

from __future__ import annotations

from typing import Generic, Self, TypeVar

from pydantic import model_validator

from pipeline.model.roles import Role
from pipeline.model.targets.tensor import TargetTensor
from pipeline.recipe.mistakes import mistake
from pipeline.recipe.tables import Table
from pipeline.recipe.values import (
    Factor,
    Granularity,
    GranularityName,
    NotNegative,
    Positive,
    TypeName,
)

Candidates = tuple[TypeName, ...]
Value = TypeVar("Value")


class ByRole(Table, Generic[Value]):
    """Something for some roles and sub-roles; ``attention`` is the role."""

    routed: Value | None = None
    engram: Value | None = None
    attention: Value | None = None
    embedding: Value | None = None
    shared: Value | None = None
    routed_gate: Value | None = None
    routed_up: Value | None = None
    routed_down: Value | None = None
    engram_table: Value | None = None
    engram_dense: Value | None = None
    engram_gate: Value | None = None
    indexer: Value | None = None
    compressor: Value | None = None
    hyper_connection: Value | None = None
    token_embd: Value | None = None
    output: Value | None = None
    router: Value | None = None
    shared_gate: Value | None = None
    shared_up: Value | None = None
    shared_down: Value | None = None

    def of(self, target: TargetTensor) -> Value | None:
        """What counts for ``target``: its sub-role's, else its role's."""
        sub_role = target.sub_role
        is_own = sub_role.value != Role.ATTENTION.value
        named: Value | None = getattr(self, sub_role.value, None) if is_own else None
        by_role: Value | None = getattr(self, target.role.value, None)
        return by_role if named is None else named


class Machine(Table):
    """The machine a file is to run on, from which limits follow.

    ``reserve_*`` is what the machine needs for everything but weights. ``drive_nbytes`` is what the
    files may take on disk.
    """

    vram_nbytes: Positive | None = None
    ram_nbytes: Positive | None = None
    drive_nbytes: Positive | None = None
    reserve_vram_nbytes: NotNegative = 0
    reserve_ram_nbytes: NotNegative = 0

    @model_validator(mode="after")
    def _leaves_something(self) -> Self:
        pairs = (
            ("vram", self.vram_nbytes, self.reserve_vram_nbytes),
            ("ram", self.ram_nbytes, self.reserve_ram_nbytes),
        )
        for name, nbytes, reserve in pairs:
            if nbytes is not None and reserve >= nbytes:
                raise mistake(
                    f"reserve_{name}_nbytes leaves nothing of {name}_nbytes for weights",
                    expected=f"less than {nbytes:,}",
                )
        return self

    @property
    def has_limit(self) -> bool:
        """Whether it says of anything how much there is."""
        sizes = (self.vram_nbytes, self.ram_nbytes, self.drive_nbytes)
        return any(size is not None for size in sizes)


class BudgetTable(Table):
    """A limit, and what may be chosen to stay below it with the least error.

    ``file_nbytes`` limits all files, the draft's among them if one is made, ``store_nbytes`` all
    routed expert stacks, ``per_token_nbytes`` what one token reads. ``types`` names what is free,
    each role or sub-role with the types it may become, an empty list standing for ``candidates``;
    what is not named keeps the type that the recipe gives it, and so does what an override selects.
    ``weights`` multiply errors, 1 where nothing is said. A
    recipe with a budget becomes one that can be run by being solved.
    """

    file_nbytes: Positive | None = None
    store_nbytes: Positive | None = None
    per_token_nbytes: Positive | None = None
    granularity: GranularityName = Granularity.SUB_ROLE
    layers_per_group: Positive = 4
    candidates: Candidates = ()
    types: ByRole[Candidates] = ByRole[Candidates]()
    weights: ByRole[Factor] = ByRole[Factor]()
    machine: Machine | None = None

    @property
    def has_limit(self) -> bool:
        """Whether anything limits the choice."""
        limits = (self.file_nbytes, self.store_nbytes, self.per_token_nbytes)
        has_machine = self.machine is not None and self.machine.has_limit
        return has_machine or any(limit is not None for limit in limits)
