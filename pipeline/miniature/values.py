"""Random float weights cast to their stored form and written into a shard, some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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

_HASH_TABLE = "tid2eid"


def write_values(fd: int, path: Path, shard: Shard, seed: int) -> None:
    """Write every tensor of ``shard``; memory stays bounded by row chunks."""
    by_name = {spec.name: spec for spec in shard.tensors}
    for spec in shard.tensors:
        for target, offset, content in stored_pieces(spec, by_name, seed):
            at = shard.offsets[target.name] + offset
            write_exact(fd, content.data.cast("B"), at, path)


def stored_pieces(
    spec: TensorSpec, by_name: Mapping[str, TensorSpec], seed: int
) -> Iterator[Piece]:
    """The stored bytes of a tensor, in row order; those of its scales come along with them.

    Args:
        spec: The tensor.
        by_name: The tensors of the same shard: scales, and the router that tells a hash table how
            many experts there are, stand beside what they belong to.
        seed: Same seed, same bytes.
    """
    if spec.dtype == "F8_E8M0":
        return  # written along with the weights it scales
    if spec.name.endswith(_HASH_TABLE):
        router = by_name[spec.name.removesuffix(_HASH_TABLE) + "weight"]
        yield from _hash_table(spec, router.shape[0], seed)
    elif scale := by_name.get(spec.name.removesuffix(".weight") + ".scale"):
        yield from _scaled(spec, scale, seed)
    else:
        yield from _plain(spec, seed)


def weight_shape(spec: TensorSpec) -> tuple[int, ...]:
    """Shape in weights: two of them share a byte in an FP4 tensor."""
    return (spec.shape[0], 2 * spec.shape[1]) if spec.dtype == "I8" else spec.shape


def _plain(spec: TensorSpec, seed: int) -> Iterator[Piece]:
    row_nbytes = spec.nbytes if len(spec.shape) == 1 else spec.nbytes // spec.shape[0]
    for first, floats in row_chunks(spec.name, spec.shape, seed):
        stored = bf16_bits(floats) if spec.dtype == "BF16" else floats
        yield spec, first * row_nbytes, stored.view(np.uint8)


def _hash_table(spec: TensorSpec, n_experts: int, seed: int) -> Iterator[Piece]:
    """The experts of each token: different ones, in no order."""
    n_tokens, n_used = spec.shape
    for first, floats in row_chunks(spec.name, (n_tokens, n_experts), seed):
        ids = np.argsort(floats, axis=1, kind="stable")[:, :n_used].astype(np.int64)
        yield spec, first * n_used * ids.itemsize, ids.view(np.uint8)


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
