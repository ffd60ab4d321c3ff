"""Every tensor of a V4.1 target, in either layout.

Sources: llama.cpp src/models/deepseek41.cpp (pull request 30817) for the mainline layout, pull
request 28696 and ik_llama.cpp pull request 2455 for the fork layout.
"""

from __future__ import annotations

from pipeline.model.contract.shapes import Ne, bias, block, image_bias, named, vocabulary
from pipeline.model.contract.sizes import EngramSizes, Sizes


def mainline_shapes(s: Sizes) -> dict[str, Ne]:
    """Names and dimensions with one engram table for all layers."""
    assert s.engram is not None
    table = (s.engram.width, sum(s.engram.n_rows))
    wanted = {**_trunk(s), "per_layer_token_embd.weight": table}
    for layer in s.engram.layers:
        wanted[f"blk.{layer}.engram_kv.weight"] = _projection(s, s.engram)
        wanted[f"blk.{layer}.engram_gate.weight"] = (s.hidden, s.n_streams)
    return wanted


def fork_shapes(s: Sizes) -> dict[str, Ne]:
    """Names and dimensions with one engram table for each of its layers."""
    assert s.engram is not None
    wanted = _trunk(s)
    for layer, n_rows in zip(s.engram.layers, s.engram.n_rows, strict=True):
        wanted[f"blk.{layer}.engram_embd.weight"] = (s.engram.width, n_rows)
        wanted[f"blk.{layer}.engram_wkv.weight"] = _projection(s, s.engram)
        wanted[f"blk.{layer}.engram_q.weight"] = (s.hidden, s.n_streams)
        wanted[f"blk.{layer}.engram_k.weight"] = (s.hidden, s.n_streams)
    return wanted


def _projection(s: Sizes, engram: EngramSizes) -> Ne:
    """One key per stream, then the value."""
    return (engram.n_columns * engram.width, (s.n_streams + 1) * s.hidden)


def _trunk(s: Sizes) -> dict[str, Ne]:
    wanted = {**vocabulary(s), "output_norm.weight": (s.hidden,)}
    for layer in range(s.n_layers):
        parts = {
            **block(s),
            **bias(s),
            **image_bias(s),
            **(_kv_source(s, layer) if layer in s.kv_sources else {}),
            **(_index_source(s) if layer in s.index_sources else {}),
        }
        wanted |= named(layer, parts)
    return wanted


def _kv_source(s: Sizes, layer: int) -> dict[str, Ne]:
    parts: dict[str, Ne] = {
        "attn_compressor_kv.weight": (s.hidden, s.head_dim),
        "attn_compressor_norm.weight": (s.head_dim,),
        "indexer.attn_k.weight": (s.head_dim, s.index_dim),
        "indexer.k_norm.weight": (s.index_dim,),
    }
    # Pooling one token is no pooling: such a source has no gate.
    if layer < len(s.ratios) and s.ratios[layer] != 1:
        parts["attn_compressor_gate.weight"] = (s.hidden, s.head_dim)
    return parts


def _index_source(s: Sizes) -> dict[str, Ne]:
    return {
        "indexer.attn_q_b.weight": (s.q_lora, s.n_index_heads * s.index_dim),
        "indexer.proj.weight": (s.hidden, s.n_index_heads),
    }
