"""The bytes before a shard's tensors, and the order of these, as the safetensors writer has them.

Wider elements first, then by name as text (huggingface/safetensors ``safetensors/src/tensor.rs``):
so the three weights of an expert follow one another, and its three scales do. Engines that read
experts from a drive take each of the two in one piece and insist on that order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate

from pipeline.source.spec import TensorSpec

_DTYPE_ORDER = ("I64", "F64", "F32", "I32", "BF16", "F16", "F8_E8M0", "F8_E4M3", "I8", "U8")
_LENGTH_NBYTES = 8
METADATA = "__metadata__"


def stored_order(spec: TensorSpec) -> tuple[int, str]:
    """What tensors of one file are sorted by."""
    return _DTYPE_ORDER.index(spec.dtype), spec.name


def header_bytes(tensors: Sequence[TensorSpec], metadata: Mapping[str, object] | None) -> bytes:
    """The length field and the JSON of a file that holds ``tensors`` in this order.

    Args:
        tensors: In the order of the file.
        metadata: The file's own words, where it has some.
    """
    starts = accumulate((spec.nbytes for spec in tensors), initial=0)
    entries: dict[str, object] = {} if metadata is None else {METADATA: metadata}
    for spec, start in zip(tensors, starts, strict=False):
        span = [start, start + spec.nbytes]
        entries[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": span}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _LENGTH_NBYTES)
    return len(text).to_bytes(_LENGTH_NBYTES, "little") + text
