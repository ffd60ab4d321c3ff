"""How a keep list came about: one choice of experts, on record with all it depended on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pipeline.experts.criterion import Criterion
from pipeline.experts.honesty import Honesty
from pipeline.experts.origin import Origin

Places = tuple[tuple[int, int], ...]
"""(layer, expert) pairs, ascending."""


@dataclass(frozen=True, slots=True)
class Choice:
    """``n_kept`` of ``n_experts`` experts in every layer, and why these.

    ``criterion`` is None where the scores are not known. ``forced`` were kept because a person
    named them, ``protected`` because a rule did (such as one for experts with extreme outputs);
    both in the numbering of the model that was cut. ``tokens`` is the fewest that a layer saw.
    """

    kind: str
    honesty: Honesty
    criterion: Criterion | None
    n_experts: int
    n_kept: int
    origins: tuple[Origin, ...]
    tokens: int | None = None
    forced: Places = ()
    protected: Places = ()


def places(experts: Mapping[int, Collection[int]]) -> Places:
    """Experts by layer as pairs."""
    return tuple(sorted({(layer, expert) for layer, ids in experts.items() for expert in ids}))
