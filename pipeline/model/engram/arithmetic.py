"""Engram arithmetic: bucket sizes, offsets, multipliers, and the table rows a text reads.

An engram table is 24 hash tables one after the other (per n-gram order 2 … 4 and head), each with a
prime number of buckets. Everything here follows from `EngramConfig` alone. Public sources of the
rules: the checkpoint's own inference/engram.py and its port in ROCm/ATOM (model_ops/engram.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import EngramError
from pipeline.model.config import EngramConfig

_SEED_STEP = 10007
"""A layer's multipliers are drawn with this times the layer number as seed."""

_FIRST_PRIME = 2


def bucket_sizes(engram: EngramConfig) -> tuple[tuple[int, ...], ...]:
    """Buckets of every hash table: one tuple per engram layer, ordered by n-gram order, then head.

    The rule takes, for each layer and order afresh, the primes from ``vocab_size`` on that no
    earlier table has taken. Since every earlier choice started at the same place, that is one run
    of consecutive primes over all layers.
    """
    flat: list[int] = []
    last = engram.vocab_size - 1
    for _ in range(len(engram.layers) * engram.n_columns):
        last = next_prime(last)
        flat.append(last)
    return split_layers(flat, engram.n_columns)


def next_prime(number: int) -> int:
    """The smallest prime above ``number``."""
    # Half a second of import that most commands never need.
    from sympy import nextprime

    return int(nextprime(number))


def prime_start(sizes: Sequence[int]) -> int | None:
    """A number from which on the consecutive primes are ``sizes``; nothing if they are not that.

    The mainline layout does not keep the number that the config names. Every number after the
    prime before the first gives the same primes; the roundest is the one that people choose.
    """
    run = [sizes[0]]
    while len(run) < len(sizes):
        run.append(next_prime(run[-1]))
    if run != list(sizes) or next_prime(sizes[0] - 1) != sizes[0]:
        return None
    # Half a second of import that few commands need.
    from sympy import prevprime

    below = int(prevprime(sizes[0])) if sizes[0] > _FIRST_PRIME else 1
    steps: list[int] = [10**power for power in reversed(range(len(str(sizes[0]))))]
    return next(n for n in (sizes[0] // step * step for step in steps) if n > below)


def split_layers(flat: Sequence[int], n_columns: int) -> tuple[tuple[int, ...], ...]:
    """A list over all layers (as metadata stores it) cut into one tuple per layer."""
    return tuple(tuple(flat[at : at + n_columns]) for at in range(0, len(flat), n_columns))


def row_counts(engram: EngramConfig) -> tuple[int, ...]:
    """Rows of each layer's table: the sum of its buckets."""
    return tuple(sum(sizes) for sizes in bucket_sizes(engram))


def layer_offsets(sizes: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """First row of every bucket run, counted from the start of its own layer's table."""
    return tuple(_exclusive_sums(of_layer) for of_layer in sizes)


def running_offsets(sizes: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """First row of every bucket run where the layers' tables are one table, in layer order."""
    starts = _exclusive_sums([sum(of_layer) for of_layer in sizes])
    return tuple(
        tuple(start + offset for offset in offsets)
        for start, offsets in zip(starts, layer_offsets(sizes), strict=True)
    )


def _exclusive_sums(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(sizes, initial=0))[:-1]


def multipliers(engram: EngramConfig) -> tuple[tuple[int, ...], ...]:
    """Odd hash multipliers: one tuple per layer, one number per position looked back (0 … n-1).

    They are bounded so that a compressed id times a multiplier stays below 2^63.
    """
    bound = max(1, (2**63 - 1) // engram.n_compressed // 2)
    return tuple(
        tuple(
            int(drawn) * 2 + 1
            for drawn in np.random.default_rng(_SEED_STEP * layer).integers(
                0, bound, size=engram.max_ngram, dtype=np.int64
            )
        )
        for layer in engram.layers
    )


def hash_rows(
    token_ids: Sequence[int],
    token_map: NDArray[np.int32],
    engram: EngramConfig,
    *,
    image_token: int | None = None,
) -> NDArray[np.int64]:
    """The table rows that each position of a text reads.

    Args:
        token_ids: Raw token ids, ``T`` of them, one sequence from its start.
        token_map: Raw id -> compressed id, ``[vocab]``.
        engram: The tables.
        image_token: Raw id of image positions; neither they nor what lies before them is looked at.

    Returns:
        Rows within each layer's own table, int64 ``[n_layers, T, n_columns]``.

    Raises:
        EngramError: A token id lies outside the map, or a mapped id outside the compressed
            vocabulary.
    """
    windows = _windows(np.asarray(token_ids, np.int64), token_map, engram, image_token)
    sizes = bucket_sizes(engram)
    rows = np.empty((len(engram.layers), len(token_ids), engram.n_columns), np.int64)
    for layer, factors in enumerate(multipliers(engram)):
        mixed = windows[0] * factors[0]
        columns = iter(zip(sizes[layer], layer_offsets(sizes)[layer], strict=True))
        for order in range(2, engram.max_ngram + 1):
            mixed = mixed ^ (windows[order - 1] * factors[order - 1])
            for head in range(engram.n_heads):
                size, offset = next(columns)
                rows[layer, :, (order - 2) * engram.n_heads + head] = mixed % size + offset
    return rows


def _windows(
    ids: NDArray[np.int64],
    token_map: NDArray[np.int32],
    engram: EngramConfig,
    image_token: int | None,
) -> list[NDArray[np.int64]]:
    """Compressed id of the token k back, for k = 0 … n-1; the pad id where nothing may be seen."""
    _check_ids(ids, token_map, engram)
    compressed = token_map[ids].astype(np.int64)
    pad = int(token_map[engram.pad_token])
    hidden = np.zeros(len(ids), bool) if image_token is None else ids == image_token
    blocked = np.zeros(len(ids), bool)
    windows = []
    for back in range(engram.max_ngram):
        seen = np.full(len(ids), pad, np.int64)
        seen[back:] = compressed[: len(ids) - back] if back < len(ids) else []
        here = np.ones(len(ids), bool)
        here[back:] = hidden[: len(ids) - back] if back < len(ids) else []
        # What is hidden hides everything older too, so a window never reads across an image.
        blocked = blocked | here
        windows.append(np.where(blocked, pad, seen))
    return windows


def _check_ids(ids: NDArray[np.int64], token_map: NDArray[np.int32], engram: EngramConfig) -> None:
    lookups = np.append(ids, engram.pad_token)
    if lookups.min() < 0 or lookups.max() >= len(token_map):
        raise EngramError(
            "a token id lies outside the engram token map",
            expected=f"0 to {len(token_map) - 1:,}",
            found=f"{lookups.min():,} to {lookups.max():,}",
        )
    mapped = token_map[lookups]
    if mapped.min() < 0 or mapped.max() >= engram.n_compressed:
        raise EngramError(
            "the engram token map names an id outside the compressed vocabulary",
            expected=f"0 to {engram.n_compressed - 1:,}",
            found=f"{mapped.min():,} to {mapped.max():,}",
        )
