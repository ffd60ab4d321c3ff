"""Which tensors an entry of a list speaks of: by name, by role, by sub-role, by layer."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from pipeline.model.targets.tensor import TargetTensor
from pipeline.recipe.mistakes import mistake
from pipeline.recipe.tables import Table
from pipeline.recipe.values import Pattern, RoleName, SubRoleName, Text, TypeOrSource

_RANGE = re.compile(r"(\d{1,5})(-(\d{1,5})?)?")


def _layer_ranges(text: str) -> str:
    """``text`` without spaces, once it is sure to be a list of ranges."""
    bare = text.replace(" ", "")
    for part in bare.split(","):
        match = _RANGE.fullmatch(part)
        if match is None or (match[3] and int(match[3]) < int(match[1])):
            raise mistake(
                "not layers",
                expected='numbers from 0 and ranges that rise, such as "0-1,5,30-"',
                next_step="A range without an end goes to the last layer.",
            )
    return bare


@lru_cache
def _bounds(ranges: str) -> tuple[tuple[int, float], ...]:
    found = []
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        found.append((int(first), int(last) if last else float("inf") if dash else int(first)))
    return tuple(found)


def _not_none_named(words: tuple[str, ...]) -> tuple[str, ...]:
    if not words:
        raise mistake("an empty list selects nothing", expected="a name, or no such key")
    return words


LayerRanges = Annotated[str, AfterValidator(_layer_ranges)]


_SELECTORS = ("match", "roles", "sub_roles", "layers")


class Selection(Table):
    """Tensors of the target; everything that is said must hold.

    ``match`` is searched in GGUF names (`re.search`). ``layers`` are ranges with both ends inside;
    what belongs to no layer is in none of them. ``optional``: that nothing is left for the entry is
    no mistake; so it is for entries of a parent below those of its child.
    """

    match: Pattern | None = None
    roles: Annotated[tuple[RoleName, ...], AfterValidator(_not_none_named)] | None = None
    sub_roles: Annotated[tuple[SubRoleName, ...], AfterValidator(_not_none_named)] | None = None
    layers: LayerRanges | None = None
    optional: bool = False

    @model_validator(mode="after")
    def _selects(self) -> Self:
        if not self.model_fields_set & set(_SELECTORS):
            raise mistake(
                "nothing says which tensors are meant",
                expected="one or more of " + ", ".join(_SELECTORS),
            )
        return self

    @property
    def is_by_name(self) -> bool:
        """Whether a pattern is all there is: tensors are meant one by one, not by what they do."""
        return (self.roles, self.sub_roles, self.layers) == (None, None, None)

    @property
    def title(self) -> str:
        """How messages call it."""
        named = (", ".join(words) for words in (self.roles, self.sub_roles) if words)
        what = " of ".join(part for part in (self.match, *named) if part)
        layers = f"layers {self.layers}" if self.layers is not None else ""
        return " in ".join(part for part in (what, layers) if part)

    def selects(self, target: TargetTensor) -> bool:
        """Whether ``target`` is meant."""
        return (
            (self.match is None or re.search(self.match, target.name) is not None)
            and (self.roles is None or target.role in self.roles)
            and (self.sub_roles is None or target.sub_role in self.sub_roles)
            and (self.layers is None or in_ranges(self.layers, target.layer))
        )


def in_ranges(ranges: str, layer: int | None) -> bool:
    """Whether a layer lies in ``ranges``, which are written as in `Selection`."""
    return layer is not None and any(low <= layer <= high for low, high in _bounds(ranges))


class Override(Selection):
    """A type for some tensors, which wins over what roles and sub-roles say."""

    type: TypeOrSource


class Graft(Selection):
    """Tensors that are taken from another source.

    ``from`` is a path beside the recipe, or a label for which the command line gives the path.
    """

    origin: Text = Field(alias="from")
