"""A model again with every tensor in F32, written by gguf-py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from gguf import GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize

from tests.reference.arrays import Floats

NOT_COPIED = ("GGUF.", "split.", "general.architecture")


def as_it_is(_name: str, values: Floats) -> Floats:
    return values


def write_twin(
    files: Sequence[Path], path: Path, change: Callable[[str, Floats], Floats] = as_it_is
) -> Path:
    """One file with the keys of ``files`` and the values of their tensors.

    An engine computes with these without rounding activations to the type of the weights, so that
    what it gives can be compared with arithmetic on the same values.

    Args:
        files: A model.
        path: Where to.
        change: Name and values of a tensor -> what is written instead.
    """
    readers = [GGUFReader(file) for file in files]
    keys = readers[0].fields
    writer = GGUFWriter(path, keys["general.architecture"].contents())
    for key, field in keys.items():
        if not key.startswith(NOT_COPIED):
            element = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], element)
    for reader in readers:
        for tensor in reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, change(tensor.name, values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
