"""A converted model in memory, to be written again with one thing wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.gguf.keys import KeyValue, array
from pipeline.gguf.model_file import read_shards
from tests.gguf_builder import file_bytes


@dataclass(frozen=True)
class Content:
    """One tensor: dimensions in GGUF order, type by name, bytes."""

    ne: tuple[int, ...]
    type_name: str
    data: bytes

    def floats(self) -> NDArray[np.float32]:
        """The numbers of an F32 tensor."""
        assert self.type_name == "F32"
        return np.frombuffer(self.data, "<f4")


@dataclass(frozen=True)
class Edited:
    """Metadata and tensors of a model, whatever files they came from; edits give new ones."""

    keys: Mapping[str, KeyValue]
    tensors: Mapping[str, Content]

    @classmethod
    def read(cls, files: Sequence[Path]) -> Edited:
        model = read_shards(files)
        data = [path.read_bytes() for path in files]
        return cls(
            {key: kv for key, kv in model.key_values.items() if not key.startswith("split.")},
            {
                name: Content(t.ne, t.type.name, data[no][t.offset : t.offset + t.nbytes])
                for name, (no, t) in model.tensors.items()
            },
        )

    def write(self, path: Path) -> Path:
        """One file with all of it."""
        tensors = [(name, t.ne, t.type_name) for name, t in self.tensors.items()]
        contents = {name: t.data for name, t in self.tensors.items()}
        path.write_bytes(file_bytes(tuple(self.keys.values()), tensors, contents))
        return path

    def key(self, entry: KeyValue) -> Edited:
        """With ``entry`` in the place of the one of its name, or added."""
        return replace(self, keys={**self.keys, entry.key: entry})

    def values(self, key: str, change: Callable[[list], Sequence]) -> Edited:
        """With other values in an array, of the same type."""
        entry = self.keys[key]
        return self.key(array(key, entry.element, change(list(entry.value))))

    def element(self, key: str, element) -> Edited:
        """With the values of an array stored as another type."""
        return self.key(array(key, element, self.keys[key].value))

    def without_key(self, key: str) -> Edited:
        assert key in self.keys
        return replace(self, keys={k: kv for k, kv in self.keys.items() if k != key})

    def tensor(self, name: str, content: Content) -> Edited:
        """With ``content`` as tensor ``name``, in its place or added."""
        return replace(self, tensors={**self.tensors, name: content})

    def without_tensor(self, name: str) -> Edited:
        assert name in self.tensors
        return replace(self, tensors={n: t for n, t in self.tensors.items() if n != name})

    def in_f16(self, name: str) -> Edited:
        """With an F32 tensor stored as F16."""
        old = self.tensors[name]
        return self.tensor(name, Content(old.ne, "F16", old.floats().astype("<f2").tobytes()))

    def shorter(self, name: str, n_rows: int = 1) -> Edited:
        """With the last rows of a matrix cut off."""
        old = self.tensors[name]
        width, rows = old.ne
        row_nbytes = len(old.data) // rows
        kept = rows - n_rows
        return self.tensor(
            name, Content((width, kept), old.type_name, old.data[: kept * row_nbytes])
        )
