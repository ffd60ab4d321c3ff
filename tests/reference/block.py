"""One block of trunk or draft: attention and experts between hyper-connections.

Source: DeepSeek-V4.1-Flash inference/model.py (class Block). Mixes lag: a sublayer collapses the
streams with weights that the sublayer before it computed. V4's did not, and V4 had a learned
collapse at the end.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.reference import hyper_connection
from tests.reference.arrays import Floats
from tests.reference.layer import Layer
from tests.reference.norm import rms

Sublayer = Callable[[Floats], Floats]


def start(embedded: Floats, n_streams: int) -> tuple[Floats, Floats]:
    """Streams (copies) and first collapse (the first stream) of the tokens ``[T, D]``."""
    streams = np.repeat(embedded[:, None, :], n_streams, axis=1)
    pre = np.zeros(streams.shape[:2], embedded.dtype)
    pre[:, 0] = 1
    return streams, pre


def run(
    streams: Floats, pre: Floats, layer: Layer, attention: Sublayer, experts: Sublayer
) -> tuple[Floats, Floats]:
    """Streams ``[T, S, D]`` after the block, and the collapse that its successor uses."""
    for name, sublayer in (("attn", attention), ("ffn", experts)):
        mix = hyper_connection.mixes(streams, layer, name)
        collapsed = hyper_connection.collapse(streams, pre)
        y = sublayer(rms(collapsed, layer.h.rms_eps, layer(f"{name}_norm.weight")))
        streams = hyper_connection.expand(y, streams, mix)
        pre = mix.pre
    return streams, pre


def final(streams: Floats, pre: Floats) -> Floats:
    """The vector ``[T, D]`` that the last block leaves, before the final norm."""
    return hyper_connection.collapse(streams, pre)
