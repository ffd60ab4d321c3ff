"""Every tensor of a V4 target.

Source: llama.cpp src/models/deepseek4.cpp (pull request 24162).
"""

from __future__ import annotations

from pipeline.model.contract.shapes import (
    Ne,
    bias,
    block,
    image_bias,
    named,
    stream_head,
    vocabulary,
)
from pipeline.model.contract.sizes import Sizes

PAIRED = 4
"""The ratio at which windows overlap: keys are twice as wide, and an indexer picks among them."""


def v4_shapes(s: Sizes) -> dict[str, Ne]:
    """Names and dimensions: every layer that compresses has a compressor of its own."""
    wanted = {**vocabulary(s), "output_norm.weight": (s.hidden,), **stream_head(s)}
    for layer, ratio in zip(range(s.n_layers), s.ratios, strict=False):
        router = _hash_router(s) if layer < s.n_hash_layers else bias(s)
        parts = {
            **block(s),
            **router,
            **image_bias(s),
            **(_compressor("attn_compressor", s.hidden, s.head_dim, ratio) if ratio else {}),
            **(_indexer(s) if ratio == PAIRED else {}),
        }
        wanted |= named(layer, parts)
    return wanted


def _hash_router(s: Sizes) -> dict[str, Ne]:
    """The experts of each token id."""
    return {"ffn_gate_tid2eid.weight": (s.n_used, s.n_vocab)}


def _compressor(name: str, hidden: int, head_dim: int, ratio: int) -> dict[str, Ne]:
    width = head_dim * (2 if ratio == PAIRED else 1)
    return {
        f"{name}_kv.weight": (hidden, width),
        f"{name}_gate.weight": (hidden, width),
        f"{name}_ape.weight": (width, ratio),
        f"{name}_norm.weight": (head_dim,),
    }


def _indexer(s: Sizes) -> dict[str, Ne]:
    return {
        "indexer.attn_q_b.weight": (s.q_lora, s.n_index_heads * s.index_dim),
        "indexer.proj.weight": (s.hidden, s.n_index_heads),
        **_compressor("indexer_compressor", s.hidden, s.index_dim, PAIRED),
    }
