"""The engram: table rows of the last tokens, gated into every stream.

Source: DeepSeek-V4.1-Flash inference/engram.py and inference/model.py.
"""

from __future__ import annotations

import numpy as np

from tests.reference import hyper_connection
from tests.reference.arrays import Floats
from tests.reference.layer import Layer
from tests.reference.norm import rms


def written(streams: Floats, memories: Floats, layer: Layer) -> Floats:
    """The streams ``[T, S, D]`` after the table's word.

    Args:
        streams: Before the layer's own block.
        memories: The rows of each token, one after the other, ``[T, n_columns * row]``.
        layer: The engram layer.
    """
    n_streams, width = streams.shape[1:]
    keys, value = keys_and_value(memories @ layer("engram_wkv.weight").T, n_streams)
    eps = layer.h.rms_eps
    # Queries' and keys' gains only ever meet as a product, which is what the tensor holds.
    matches = stream_norm(streams, eps) * stream_norm(keys, eps) * layer("engram_gate.weight")
    shares = gate(matches.sum(axis=-1) / np.sqrt(streams.dtype.type(width)))
    return streams + shares[:, :, None] * value[:, None, :]


def keys_and_value(projected: Floats, n_streams: int) -> tuple[Floats, Floats]:
    """A key ``[T, S, D]`` for each stream, then one value ``[T, D]`` for all."""
    parts = projected.reshape(len(projected), n_streams + 1, -1)
    return parts[:, :-1], parts[:, -1]


def stream_norm(x: Floats, eps: float) -> Floats:
    """Each stream normalised by itself."""
    return rms(x, eps)


def gate(dot: Floats) -> Floats:
    """Sigmoid of the signed root; the sign of zero is plus (engines with sgn give 0.5 there)."""
    root = np.sqrt(np.maximum(np.abs(dot), 1e-6))
    return hyper_connection.sigmoid(np.where(dot < 0, -root, root))
