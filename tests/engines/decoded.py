"""A shard again with every weight as the plain number that it stands for."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipeline.gguf.header import ALIGNMENT, TensorInfo, encode_header
from pipeline.gguf.reader import GgufTensor, read_gguf
from pipeline.quant.dequant import dequantize
from pipeline.quant.types import TYPES, GgmlType

UNTOUCHED = ("F32", "I32")


def write_decoded(shard: Path, path: Path) -> Path:
    """The shard at ``shard`` with the same keys and F32 tensors, decoded by this project.

    An engine that means by a type's bytes what we mean says the same of both, but for what it
    rounds: it multiplies with activations in a type that goes with the weights'.
    """
    header, stored = read_gguf(shard), shard.read_bytes()
    infos, pieces, offset = [], [], 0
    for tensor in header.tensors.values():
        content_type, content = _decoded(tensor, stored)
        padding = bytes(-len(content) % ALIGNMENT)
        infos.append(TensorInfo(tensor.name, tensor.ne, content_type.type_id, offset))
        pieces += [content, padding]
        offset += len(content) + len(padding)
    path.write_bytes(b"".join([encode_header(tuple(header.key_values.values()), infos), *pieces]))
    return path


def _decoded(tensor: GgufTensor, stored: bytes) -> tuple[GgmlType, bytes]:
    packed = np.frombuffer(stored, np.uint8, tensor.nbytes, tensor.offset)
    if tensor.type.name in UNTOUCHED:
        return tensor.type, packed.tobytes()
    width = tensor.ne[0]
    rows = packed.reshape(-1, tensor.type.row_nbytes(width))
    return TYPES["F32"], dequantize(tensor.type, rows, width).tobytes()
