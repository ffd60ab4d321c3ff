"""A cut: which finished model loses which experts, in one or several selections.

As with `tasks.job`, every task holds the same few strings and gets the same `CutJob` from them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from pipeline.digest import spec_digest
from pipeline.errors import OutputError
from pipeline.experts.importers.open import read_keep
from pipeline.experts.routing import routing_of
from pipeline.store import ShardStore
from tasks.cut.variant import Variant
from tasks.cut.whole import WholeModel
from tasks.job import store_of


@dataclass(frozen=True, slots=True)
class CutParameters:
    """What a user says: ``keep`` names one keep list or several, with commas between them."""

    path: str
    keep: str
    out: str


class CutJob:
    """Everything that follows from `CutParameters`; computed when first asked for."""

    def __init__(self, parameters: CutParameters) -> None:
        self.parameters = parameters

    @cached_property
    def whole(self) -> WholeModel:
        """The model that loses experts."""
        return WholeModel(Path(self.parameters.path))

    @cached_property
    def variants(self) -> tuple[Variant, ...]:
        """One output for each keep list, in the order of the lists.

        Raises:
            PlanError: A list does not fit the model, or the model cannot lose experts.
            SourceError: A file holds no keep list.
            OutputError: Two outputs would have one name, or one that of the model itself.
        """
        routing = routing_of(self.whole.plans[0].config)
        keeps = [read_keep(Path(path), routing) for path in self.parameters.keep.split(",")]
        variants = tuple(Variant(self.whole, keep, self.parameters.out) for keep in keeps)
        _check_names(variants)
        return variants

    @property
    def store(self) -> ShardStore:
        """Where shards are made."""
        return store_of(self.parameters.out)

    @property
    def spec(self) -> str:
        """The identity of all outputs together."""
        return spec_digest([variant.spec for variant in self.variants])

    def shard_spec(self, no: int) -> str:
        """The identity of what one file becomes in all outputs."""
        return spec_digest([variant.shard_specs[no] for variant in self.variants])


def _check_names(variants: Sequence[Variant]) -> None:
    twice = [name for name, n in Counter(variant.name for variant in variants).items() if n > 1]
    if twice:
        raise OutputError(
            "two keep lists would give outputs of one name",
            expected="lists of different numbers of experts",
            found=", ".join(twice),
            next_step="Cut them one by one, each with an --out of its own.",
        )
    for variant in variants:
        if variant.folder.resolve() == variant.whole.folder.resolve():
            raise OutputError(
                "the output folder is the model's own",
                file=variant.folder,
                next_step="Choose another --out.",
            )


@lru_cache(maxsize=8)
def open_cut(parameters: CutParameters) -> CutJob:
    """The job of these parameters; one per process."""
    return CutJob(parameters)
