"""Which tensor goes to which shard, the header of each shard, and the index over all of them.

The grouping, the header form and its order are those of the released shards: with the full
configs every file size of both releases comes out to the byte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from pipeline.source.spec import TensorSpec

_GROUPS = (
    r"(?:vision|aligner)\.()",
    r"(?:embed\.|image_)()",
    r"layers\.(\d+)\.(?!engram\.)",
    r"(?:head\.|norm\.|hc_head_)()",
    r"mtp\.(\d+)\.",
    r"layers\.(\d+)\.engram\.",
)
"""One pattern per kind of shard, in file order; the number orders shards of one kind."""

_DTYPE_ORDER = ("I64", "F32", "BF16", "F8_E8M0", "F8_E4M3", "I8")
"""Order of the safetensors writer: wider elements first, so that all of them are aligned."""

_ENGRAM_ORDER = (
    "embed.weight",
    "embed.scale",
    "wkv.weight",
    "wkv.scale",
    "q_weight",
    "k_weight",
)
"""The tables stand first in their shards. Only their own places are public, not the order after."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One file: its tensors in stored order, where each begins, and the bytes before them all."""

    file: str
    tensors: tuple[TensorSpec, ...]
    header: bytes
    offsets: Mapping[str, int]
    """Tensor name -> absolute offset in the file."""

    @property
    def nbytes(self) -> int:
        """Size of the whole file."""
        return len(self.header) + sum(spec.nbytes for spec in self.tensors)


def shards_of(specs: Iterable[TensorSpec]) -> tuple[Shard, ...]:
    """The shards of a checkpoint that holds ``specs``, in file order."""
    ordered = sorted(specs, key=_group)
    groups = [tuple(members) for _, members in groupby(ordered, key=_group)]
    return tuple(
        _shard(f"model-{number:05d}-of-{len(groups):05d}.safetensors", members)
        for number, members in enumerate(groups, 1)
    )


def index_bytes(shards: Sequence[Shard]) -> bytes:
    """The index file: total bytes of all tensors, and the shard of every tensor."""
    total = sum(spec.nbytes for shard in shards for spec in shard.tensors)
    where = {spec.name: shard.file for shard in shards for spec in shard.tensors}
    index = {"metadata": {"total_size": total}, "weight_map": where}
    return json.dumps(index, indent=2).encode()


def _group(spec: TensorSpec) -> tuple[int, int]:
    for kind, pattern in enumerate(_GROUPS):
        if found := re.match(pattern, spec.name):
            return kind, int(found[1] or 0)
    raise AssertionError(f"no shard for {spec.name}")


def _stored_order(spec: TensorSpec) -> tuple[int, str]:
    _, engram, part = spec.name.partition(".engram.")
    if engram:
        return _ENGRAM_ORDER.index(part), ""
    return _DTYPE_ORDER.index(spec.dtype), spec.name


def _shard(file: str, members: Iterable[TensorSpec]) -> Shard:
    tensors = tuple(sorted(members, key=_stored_order))
    starts = tuple(accumulate((spec.nbytes for spec in tensors), initial=0))
    header = _header(tensors, starts)
    offsets = {spec.name: len(header) + at for spec, at in zip(tensors, starts, strict=False)}
    return Shard(file, tensors, header, offsets)


def _header(tensors: Sequence[TensorSpec], starts: Sequence[int]) -> bytes:
    """Length as u64, then compact JSON padded with blanks to a multiple of eight bytes."""
    entries = {
        spec.name: {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [at, at + spec.nbytes],
        }
        for spec, at in zip(tensors, starts, strict=False)
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
