"""What travels from layer to layer, and which layer it was made by.

A layer reads compressed rows and index keys of the last kv source at or before it, the pick of the
last index source, and chooses among the candidates of the candidate source (config.json
``kv_source_layer_ids``, ``index_source_layer_ids``, ``candidate_source_layer_id``).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from pipeline.model.config import ModelConfig


class Slot(StrEnum):
    """One kind of values that is carried on, per sequence."""

    STREAMS = "streams"
    """``[T, S, D]``."""
    PRE = "pre"
    """``[T, S]``: the mix with which the next sublayer collapses the streams."""
    ROWS = "rows"
    """``[T // ratio, d]``: compressed rows, rotated."""
    KEYS = "keys"
    """``[T // ratio, index_dim]``: index keys, rotated."""
    PICKS = "picks"
    """int32 ``[T, k]``: numbers of the rows each token reads, -1 where there are fewer."""
    BLOCKS = "blocks"
    """bool ``[T, n_blocks]``: the blocks that later indexers may choose from."""


def makers(config: ModelConfig, layer: int) -> Mapping[Slot, int]:
    """Which layer made what is carried on from ``layer``; what is not there is not carried."""
    made = {Slot.STREAMS: layer, Slot.PRE: layer}
    if config.layer_ratios[layer]:
        made[Slot.ROWS] = made[Slot.KEYS] = _last(config.kv_sources, layer)
        made[Slot.PICKS] = _last(config.index_sources, layer)
        candidate = config.candidate
        if candidate and layer >= candidate.source_layer:
            made[Slot.BLOCKS] = candidate.source_layer
    return made


def written(config: ModelConfig, layer: int) -> tuple[Slot, ...]:
    """What ``layer`` itself makes."""
    return tuple(slot for slot, maker in makers(config, layer).items() if maker == layer)


def shape_of(slot: Slot, config: ModelConfig, maker: int, n_tokens: int) -> tuple[int, ...]:
    """Shape of what layer ``maker`` makes of a sequence of ``n_tokens``."""
    n_rows = n_tokens // max(1, config.layer_ratios[maker])
    block = config.candidate.block_size if config.candidate else 1
    return {
        Slot.STREAMS: (n_tokens, config.hc_mult, config.hidden),
        Slot.PRE: (n_tokens, config.hc_mult),
        Slot.ROWS: (n_rows, config.head_dim),
        Slot.KEYS: (n_rows, config.index_dim),
        Slot.PICKS: (n_tokens, min(n_rows, config.index_top_k)),
        Slot.BLOCKS: (n_tokens, -(-n_rows // block)),
    }[slot]


def _last(sources: tuple[int, ...], layer: int) -> int:
    return max(source for source in sources if source <= layer)
