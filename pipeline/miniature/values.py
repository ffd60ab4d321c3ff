"""Random float weights cast to their stored form and written into a shard, some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.files import write_exact
from pipeline.miniature.cast import E2M1, E4M3, bf16_bits, cast_blocks, pack_nibbles
from pipeline.miniature.draws import Floats, row_chunks
from pipeline.miniature.shards import Shard
from pipeline.source.spec import TensorSpec

Piece = tuple[TensorSpec, int, NDArray[np.uint8]]
"""A tensor, an offset in its bytes, and the bytes that belong there."""


def write_values(fd: int, path: Path, shard: Shard, seed: int) -> None:
    """Write every tensor of ``shard``; memory stays bounded by row chunks."""
    by_name = {spec.name: spec for spec in shard.tensors}
    for spec in shard.tensors:
        if spec.dtype == "F8_E8M0":
            continue  # written along with the weights it scales
        scale = by_name.get(spec.name.removesuffix(".weight") + ".scale")
        for target, offset, content in stored_pieces(spec, scale, seed):
            at = shard.offsets[target.name] + offset
            write_exact(fd, content.data.cast("B"), at, path)


def stored_pieces(spec: TensorSpec, scale: TensorSpec | None, seed: int) -> Iterator[Piece]:
    """The stored bytes of a tensor and, for FP8 and FP4, of its scales, in row order."""
    if scale is None:
        yield from _plain(spec, seed)
    else:
        yield from _scaled(spec, scale, seed)


def weight_shape(spec: TensorSpec) -> tuple[int, ...]:
    """Shape in weights: two of them share a byte in an FP4 tensor."""
    return (spec.shape[0], 2 * spec.shape[1]) if spec.dtype == "I8" else spec.shape


def _plain(spec: TensorSpec, seed: int) -> Iterator[Piece]:
    row_nbytes = spec.nbytes if len(spec.shape) == 1 else spec.nbytes // spec.shape[0]
    for first, floats in row_chunks(spec.name, spec.shape, seed):
        stored = bf16_bits(floats) if spec.dtype == "BF16" else floats
        yield spec, first * row_nbytes, stored.view(np.uint8)


def _scaled(spec: TensorSpec, scale: TensorSpec, seed: int) -> Iterator[Piece]:
    shape = weight_shape(spec)
    block = (shape[0] // scale.shape[0], shape[1] // scale.shape[1])
    assert (block[0] * scale.shape[0], block[1] * scale.shape[1]) == shape
    for first, floats in row_chunks(spec.name, shape, seed):
        stored, scales = _cast(spec.dtype, floats, block)
        yield spec, first * spec.shape[1], stored
        yield scale, first // block[0] * scale.shape[1], scales


def _cast(
    dtype: str, floats: Floats, block: tuple[int, int]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    if dtype == "F8_E4M3":
        return cast_blocks(floats, block, E4M3)
    fp4, scales = cast_blocks(floats, block, E2M1)
    return pack_nibbles(fp4), scales
