"""Small safetensors files, built byte by byte so that each rule of the format can be broken."""

import json
from pathlib import Path

import numpy as np

DTYPES = {
    "F32": np.float32,
    "BF16": np.uint16,
    "I64": np.int64,
    "F8_E4M3": np.uint8,
    "F8_E8M0": np.uint8,
    "I8": np.uint8,
}


def header_bytes(entries, *, length=None):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text


def write_shard(path: Path, tensors):
    """``tensors``: name -> (dtype, array of stored elements)."""
    entries, payload, offset = {}, [], 0
    for name, (dtype, values) in tensors.items():
        content = np.ascontiguousarray(values, dtype=DTYPES[dtype]).tobytes()
        span = [offset, offset + len(content)]
        entries[name] = {"dtype": dtype, "shape": list(np.shape(values)), "data_offsets": span}
        payload.append(content)
        offset = span[1]
    path.write_bytes(header_bytes(entries) + b"".join(payload))


def write_checkpoint(folder: Path, shards, *, with_index=True):
    """``shards``: file name -> tensors as in `write_shard`; the index fits them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    weight_map, total = {}, 0
    for file_name, tensors in shards.items():
        write_shard(folder / file_name, tensors)
        for name, (dtype, values) in tensors.items():
            weight_map[name] = file_name
            total += np.size(values) * np.dtype(DTYPES[dtype]).itemsize
    if with_index:
        write_index(folder, weight_map, total)
    return folder


def write_index(folder: Path, weight_map, total_size):
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
