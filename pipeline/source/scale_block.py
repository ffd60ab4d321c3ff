"""Scale blocks: which rectangle of weights shares a scale, and what a scale's shape says of it."""

from __future__ import annotations


def scale_shape(n_rows: int, n_cols: int, block: tuple[int, int]) -> tuple[int, int]:
    """Shape of the scales of ``n_rows`` x ``n_cols`` weights; the last blocks may be ragged."""
    return -(-n_rows // block[0]), -(-n_cols // block[1])


def implied_block(n_rows: int, n_cols: int, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """The scale block that scales of ``shape`` imply for ``n_rows`` x ``n_cols`` weights.

    Several sizes can give the same number of blocks; a power of two is taken where one does.
    None when no block gives that shape.
    """
    if len(shape) != 2:
        return None
    rows, cols = _implied_size(n_rows, shape[0]), _implied_size(n_cols, shape[1])
    return None if rows is None or cols is None else (rows, cols)


def _implied_size(n_weights: int, n_blocks: int) -> int | None:
    if not 0 < n_blocks <= n_weights:
        return None
    smallest = -(-n_weights // n_blocks)
    power = 1 << (smallest - 1).bit_length()
    for size in (power, smallest):
        if -(-n_weights // size) == n_blocks:
            return size
    return None
