"""One table out of several: their sums are added, so that every token counts the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.errors import SourceError
from pipeline.experts.honesty import GATES, weakest
from pipeline.experts.saliency import SaliencyTable


def merge(tables: Sequence[SaliencyTable]) -> SaliencyTable:
    """The table of all texts together; only sums that every table has are kept.

    The order of ``tables`` does not matter, not even for the last bit.

    Raises:
        SourceError: No table, other shapes, gates or top-k, or the same file twice.
    """
    if not tables:
        raise SourceError("there is no saliency to merge")
    tables = sorted(tables, key=lambda table: table.origins)
    _check_alike(tables)
    shared = [name for name in tables[0].sums if all(name in table.sums for table in tables)]
    sums = {name: np.sum([table.sums[name] for table in tables], axis=0) for name in shared}
    if not sums:
        raise SourceError(
            "the tables have no sum in common",
            found="; ".join(f"{_names(table)}: {', '.join(table.sums)}" for table in tables),
        )
    return SaliencyTable(
        kind="+".join(sorted({table.kind for table in tables})),
        honesty=weakest(table.honesty for table in tables),
        origins=tuple(origin for table in tables for origin in table.origins),
        tokens=_tokens(tables),
        top_k=tables[0].top_k if len({table.top_k for table in tables}) == 1 else None,
        sums=sums,
    )


def _check_alike(tables: Sequence[SaliencyTable]) -> None:
    """Of each fact, the tables that say it must say the same, and no file may stand twice."""
    _check_same("gates", [(t.honesty, t) for t in tables if t.honesty in GATES])
    _check_same("top-k", [(t.top_k, t) for t in tables if t.top_k is not None])
    _check_same("shapes (layers, experts)", [(t.shape, t) for t in tables])
    seen = set[str]()
    for origin in (origin for table in tables for origin in table.origins):
        if origin.sha256 in seen:
            raise SourceError("the same tokens would count twice", file=origin.name)
        seen.add(origin.sha256)


def _check_same(what: str, said: Sequence[tuple[object, SaliencyTable]]) -> None:
    for value, table in said:
        if value != said[0][0]:
            raise SourceError(
                f"the tables have different {what}",
                file=_names(table),
                expected=f"{said[0][0]} as in {_names(said[0][1])}",
                found=value,
                next_step="Merge only what was measured in one way on one model.",
            )


def _tokens(tables: Sequence[SaliencyTable]) -> tuple[int, ...] | None:
    known = [table.tokens for table in tables if table.tokens is not None]
    if len(known) < len(tables):
        return None
    return tuple(sum(layer) for layer in zip(*known, strict=True))


def _names(table: SaliencyTable) -> str:
    return " + ".join(origin.name for origin in table.origins)
