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
from pipeline.errors import OutputError, PlanError
from pipeline.experts.criterion import Criterion
from pipeline.experts.importers.open import read_keep, read_saliency
from pipeline.experts.keep import KeepList
from pipeline.experts.merge import merge
from pipeline.experts.routing import Routing, routing_of
from pipeline.experts.select import select
from pipeline.store import ShardStore
from tasks.cut.variant import Variant
from tasks.cut.whole import WholeModel
from tasks.keep.select import parse_criterion, parse_files
from tasks.request import store_of


@dataclass(frozen=True, slots=True)
class CutParameters:
    """What a user says, with commas between files and numbers of one kind.

    Either ``keep`` names keep lists, or ``saliency`` names files to choose by, for each of the
    numbers in ``experts``.
    """

    path: str
    keep: str
    out: str
    saliency: str = ""
    experts: str = ""
    criterion: str = str(Criterion.REAP)


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
            PlanError: Nothing says what stays, a list does not fit the model, or the model cannot
                lose experts.
            SourceError: A file holds no keep list, or no saliency.
            OutputError: Two outputs would have one name, or one that of the model itself.
        """
        routing = routing_of(self.whole.plans[0].config)
        keeps = _keeps(self.parameters, routing)
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


def _keeps(said: CutParameters, routing: Routing) -> list[KeepList]:
    if bool(said.keep) == bool(said.saliency):
        raise PlanError(
            "nothing says which experts stay" if not said.keep else "two things say what stays",
            expected="either --keep, or --saliency with --experts",
            next_step="Experts are never chosen by their number.",
        )
    if said.keep:
        return [read_keep(Path(path), routing) for path in said.keep.split(",")]
    table = merge([read_saliency(path) for path in parse_files(said.saliency)])
    criterion = parse_criterion(said.criterion)
    return [select(table, criterion, n, routing).keep for n in _counts(said.experts)]


def _counts(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise PlanError(
            "--experts must say how many stay in each layer",
            expected="numbers with commas between them, such as 256,320",
            found=repr(text),
        )
    return [int(word) for word in words]


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
