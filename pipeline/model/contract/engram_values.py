"""Engram keys that must agree with each other. The arithmetic behind them is `engram.check`'s."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from pipeline.errors import FormatError
from pipeline.model.contract.sizes import ENGRAM_NAMES
from pipeline.model.layout import Layout
from pipeline.model.metadata.header_keys import HeaderKeys


def check_engram_values(keys: HeaderKeys, layout: Layout) -> Iterator[FormatError]:
    """A problem for each engram key that contradicts another."""
    names = ENGRAM_NAMES[layout]
    layers = keys.find_numbers(names["layers"])
    max_ngram, n_heads = keys.find_number(names["max_ngram"]), keys.find_number(names["n_heads"])
    if layers is None or max_ngram is None or n_heads is None:
        return
    yield from _check_layers(names["layers"], layers, keys)
    n_columns = (max_ngram - 1) * n_heads
    wanted = {
        "multipliers": len(layers) * max_ngram,
        "sizes": len(layers) * n_columns,
        "offsets": len(layers) * n_columns,
    }
    for fact, length in wanted.items():
        found = keys.find_numbers(names[fact])
        if found is not None and len(found) != length:
            yield FormatError(
                f"the array {keys.full(names[fact])} has another length than its layers and "
                "columns",
                expected=f"{length} entries",
                found=f"{len(found)} entries",
            )
    yield from _check_buckets(keys, layout, n_columns)
    yield from _check_pad(keys, layout)


def _check_layers(name: str, layers: Sequence[int], keys: HeaderKeys) -> Iterator[FormatError]:
    n_layers = keys.find_number("block_count")
    if n_layers is None:
        return
    is_increasing = list(layers) == sorted(set(layers))
    if not layers or not is_increasing or not 0 <= layers[0] <= layers[-1] < n_layers:
        yield FormatError(
            f"{keys.full(name)} are no increasing layer numbers",
            expected=f"0 to {n_layers - 1}",
            found=list(layers),
        )


def _check_buckets(keys: HeaderKeys, layout: Layout, n_columns: int) -> Iterator[FormatError]:
    names = ENGRAM_NAMES[layout]
    sizes, offsets = keys.find_numbers(names["sizes"]), keys.find_numbers(names["offsets"])
    if sizes is not None and min(sizes, default=1) < 1:
        yield FormatError(
            f"{keys.full(names['sizes'])} holds an empty bucket run", expected="above 0"
        )
    if sizes is None or offsets is None or n_columns < 1:
        return
    per_layer = [
        first
        for at in range(0, len(sizes), n_columns)
        for first in _first_rows(sizes[at : at + n_columns])
    ]
    running = _first_rows(sizes)
    wanted, other = (per_layer, running) if layout is Layout.FORK else (running, per_layer)
    if list(offsets) != wanted:
        what = "from 0 in every layer" if layout is Layout.FORK else "on over all layers"
        foreign = " They are those of the other layout." if list(offsets) == other else ""
        yield FormatError(
            f"{keys.full(names['offsets'])} do not count the rows {what}",
            next_step=f"Nothing fails when this file is loaded; it looks up wrong rows.{foreign}",
        )


def _first_rows(sizes: Sequence[int]) -> list[int]:
    return list(accumulate(sizes, initial=0))[:-1]


def _check_pad(keys: HeaderKeys, layout: Layout) -> Iterator[FormatError]:
    token_map, raw = keys.find_numbers("engram.token_map"), keys.find_number("engram.pad_token_id")
    mapped = keys.find_number("engram.pad_id")
    if token_map is None:
        return
    if raw is not None and not 0 <= raw < len(token_map):
        yield FormatError(
            f"{keys.full('engram.pad_token_id')} lies outside the token map",
            expected=f"below {len(token_map):,}",
            found=raw,
        )
    elif layout is Layout.FORK and mapped is not None:
        compressed = token_map[raw] if raw is not None else mapped
        if mapped != compressed or mapped not in token_map:
            yield FormatError(
                f"{keys.full('engram.pad_id')} is not what the token map makes of the pad token",
                expected=compressed if raw is not None else "an id the map holds",
                found=mapped,
            )
