"""Output bytes by other means: whole tensors, torch and gguf-py, one ggml call per tensor."""

import ctypes
import importlib.util
import math
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors import safe_open

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
PLAIN = {"F32", "BF16", "Q8_0"}


class Oracle:
    """Decodes and encodes tensors of the checkpoint in ``folder``."""

    def __init__(self, checkpoint):
        self._checkpoint = checkpoint

    def stored(self, name):
        path = self._checkpoint.folder / self._checkpoint.weight_map[name]
        with safe_open(path, framework="pt") as opened:
            return opened.get_tensor(name)

    def decoded(self, matrix):
        """The values of a matrix as float32."""
        weight = self.stored(matrix.weight)
        if weight.dtype == torch.int8:
            codes = weight.view(torch.uint8).long()
            values = E2M1[torch.stack([codes & 15, codes >> 4], -1)].flatten(-2)
        else:
            values = weight.float()
        if matrix.scale is None:
            return values
        scale = self.stored(matrix.scale).float()
        for axis in (0, 1):
            n = values.shape[axis]
            scale = scale.repeat_interleave(n // scale.shape[axis], axis)
        assert scale.shape == values.shape
        return values * scale

    def values(self, tensor):
        """The values of a planned tensor: [rows, columns] float32."""
        parts = [self.decoded(matrix) for matrix in tensor.target.matrices]
        if tensor.transform == "product":
            whole = math.prod(parts[1:], start=parts[0])
        else:
            whole = torch.cat([part.reshape(-1, tensor.target.n_cols) for part in parts])
        return whole.reshape(-1, tensor.target.n_cols).numpy()

    def encoded(self, tensor):
        """The output bytes of a planned tensor."""
        if tensor.type.name == "MXFP4":
            return b"".join(self._repacked(matrix) for matrix in tensor.target.matrices)
        if tensor.type.name == "I32":
            (matrix,) = tensor.target.matrices
            return self.stored(matrix.weight).to(torch.int32).numpy().tobytes()
        return encode(tensor.type.name, self.values(tensor))

    def _repacked(self, matrix):
        codes = self.stored(matrix.weight).view(torch.uint8)
        nibbles = torch.stack([codes & 15, codes >> 4], -1).reshape(-1, 2, 16)
        scales = self.stored(matrix.scale).view(torch.uint8).reshape(-1, 1)
        return torch.cat([scales, nibbles[:, 0] | nibbles[:, 1] << 4], 1).numpy().tobytes()


def encode(type_name, values, importance=None):
    """``values`` in a ggml type: by gguf-py where it has an encoder, else by ggml in one call.

    ``importance``: [columns], for all rows.
    """
    ggml_type = gguf.GGMLQuantizationType[type_name]
    if type_name in PLAIN:
        return gguf.quants.quantize(values, ggml_type).tobytes()
    values = np.ascontiguousarray(values, np.float32)
    block, block_nbytes = gguf.GGML_QUANT_SIZES[ggml_type]
    out = np.empty(values.size // block * block_nbytes, np.uint8)
    quantize_chunk()(
        int(ggml_type),
        values.ctypes.data_as(ctypes.c_void_p),
        out.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(0),
        ctypes.c_int64(values.shape[0]),
        ctypes.c_int64(values.shape[1]),
        None if importance is None else importance.ctypes.data_as(ctypes.c_void_p),
    )
    return out.tobytes()


@cache
def quantize_chunk():
    folder = Path(importlib.util.find_spec("libggml").submodule_search_locations[0])
    function = ctypes.CDLL(str(folder / "lib64" / "libggml-base.so")).ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    return function
