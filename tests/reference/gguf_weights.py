"""Weights of a GGUF through gguf-py's reader and dequantizers, and nothing else.

Both layouts of the trunk are read: *fork*, the nine ``engram.*`` keys and tensors of
ggml-org/llama.cpp PR #28696 and the branches after it, and *mainline*, the ``ple.*`` keys and the
joined table that llama.cpp has had since PR #30817; and drafts (arch ``dflash``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize

from tests.reference import metadata
from tests.reference.arrays import Floats, Ints
from tests.reference.hyperparameters import Hyperparameters


class GgufWeights:
    """Float32 tensors of the model in ``files`` (its shards, the one with the keys first)."""

    def __init__(self, files: Sequence[Path]) -> None:
        readers = [GGUFReader(file) for file in files]
        self._tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
        keys = {key: field.contents() for key, field in readers[0].fields.items()}
        self.hyperparameters: Hyperparameters = metadata.hyperparameters(keys, set(self._tensors))

    def tensor(self, name: str) -> Floats:
        if name not in self._tensors and (engram := re.fullmatch(r"(.*\.engram_)(\w+)(.*)", name)):
            start, part, end = engram.groups()
            if part == "wkv":
                return self.tensor(f"{start}kv{end}")
            if part == "gate":
                return np.multiply(*(self.tensor(f"{start}{side}{end}") for side in "qk"))
        return _values(self._tensors[name])

    def rows(self, name: str, numbers: Ints) -> Floats:
        tensor = self._tensors[name]
        assert 0 <= numbers.min() <= numbers.max() < tensor.shape[1]
        return dequantize(tensor.data[numbers], tensor.tensor_type)


def _values(tensor: ReaderTensor) -> Floats:
    values = dequantize(tensor.data, tensor.tensor_type)
    assert values.shape == tuple(tensor.shape[::-1])
    return values
