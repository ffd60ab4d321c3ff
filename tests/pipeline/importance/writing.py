"""Importance matrices of made-up measurements for any set of tensors, in both forms."""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from pipeline.gguf.keys import ValueType, array, text, u32
from pipeline.importance.fit import n_matrices, names_for
from tests.gguf_builder import file_bytes

N_TOKENS = 400
CHUNKS, CHUNK_SIZE = 3, 512
DATASETS = ("wiki.train.raw",)

Measured = dict[str, tuple[np.ndarray, np.ndarray]]
"""Sums of squares ``[n_matrices, n_cols]`` and counts ``[n_matrices]`` by tensor."""


def measured(targets, *, seed: int, unseen: Collection[int] = ()) -> Measured:
    """What could have been measured of ``targets``; experts ``unseen`` saw nothing in any layer.

    As in truth the stacks of a layer see the same tokens, gate and up the same inputs too.
    """
    found: Measured = {}
    for target in targets:
        if names_for(target):
            input_name = target.name.replace("ffn_up_", "ffn_gate_")
            n = n_matrices(target)
            counts = _random(seed, str(target.layer)).integers(1, N_TOKENS, n)
            counts = counts if n > 1 else np.array([N_TOKENS])
            counts[[expert for expert in unseen if n > 1]] = 0
            scales = _random(seed, input_name).lognormal(0, 1.2, (n, target.n_cols))
            found[target.name] = (
                (scales * counts[:, None]).astype(np.float32),
                counts.astype(np.float32),
            )
    return found


def write_imatrix(
    path: Path,
    targets,
    *,
    seed: int = 0,
    form: str = "gguf",
    unseen: Collection[int] = (),
    changes: Mapping[str, tuple[np.ndarray, np.ndarray] | None] | None = None,
) -> Path:
    """A matrix as llama.cpp writes it; ``changes`` replace entries or, if None, leave them out."""
    made = {**measured(targets, seed=seed, unseen=unseen), **(changes or {})}
    entries = {name: entry for name, entry in made.items() if entry is not None}
    path.write_bytes((gguf_bytes if form == "gguf" else dat_bytes)(entries))
    return path


def gguf_bytes(entries: Measured, keys=(), datasets=DATASETS) -> bytes:
    rows, contents = [], {}
    for name, (sums, counts) in entries.items():
        for suffix, values in ((".in_sum2", sums), (".counts", counts.reshape(-1, 1))):
            rows.append((name + suffix, values.shape[::-1], "F32"))
            contents[name + suffix] = values.astype("<f4").tobytes()
    head = (
        text("general.type", "imatrix"),
        array("imatrix.datasets", ValueType.STRING, datasets),
        u32("imatrix.chunk_count", CHUNKS),
        u32("imatrix.chunk_size", CHUNK_SIZE),
    )
    return file_bytes((*head, *keys), rows, contents)


def dat_bytes(entries: Measured, tail: bytes | None = None) -> bytes:
    content = struct.pack("<i", len(entries))
    for name, (sums, counts) in entries.items():
        n_calls = max(1, -(-int(counts.max()) // CHUNK_SIZE) * 7)
        means = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], 1)
        content += struct.pack("<i", len(name.encode())) + name.encode()
        content += struct.pack("<ii", n_calls, means.size)
        content += (means * n_calls).astype("<f4").tobytes()
    name = DATASETS[0].encode()
    return content + (struct.pack("<ii", CHUNKS, len(name)) + name if tail is None else tail)


def _random(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng([seed, *name.encode()])
