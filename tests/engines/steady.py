"""A target that gives one token after whatever it reads: a sound draft for it is always right."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tests.engines.edited import Content, Edited

_CHANNEL = 7
_LOUD, _SURE = 1e4, 1e3


def steady(model: Edited, token: int) -> Edited:
    """``model`` with one channel of the embeddings that outweighs all others, and a head that reads
    ``token`` from it; both matrices are BF16.

    A draft borrows both: it guesses anything else only if it computes what is no number.
    """
    inputs, outputs = (_matrix(model, name) for name in ("token_embd.weight", "output.weight"))
    inputs[:, _CHANNEL] = _LOUD
    outputs[:, _CHANNEL] = 0
    outputs[token, _CHANNEL] = _SURE
    return model.tensor("token_embd.weight", _bf16(inputs)).tensor("output.weight", _bf16(outputs))


def _matrix(model: Edited, name: str) -> NDArray[np.float32]:
    content = model.tensors[name]
    assert content.type_name == "BF16"
    bits = np.frombuffer(content.data, "<u2").astype(np.uint32) << 16
    return bits.view(np.float32).reshape(content.ne[::-1]).copy()


def _bf16(matrix: NDArray[np.float32]) -> Content:
    bits = (matrix.view(np.uint32) >> 16).astype("<u2")
    return Content(matrix.shape[::-1], "BF16", bits.tobytes())
