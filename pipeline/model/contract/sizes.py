"""What the keys of a finished file say about sizes: the only base its tensors are judged on."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pipeline.model.layout import Layout
from pipeline.model.metadata.header_keys import HeaderKeys

ENGRAM_NAMES: Mapping[Layout, Mapping[str, str]] = {
    Layout.FORK: {
        "layers": "engram.layer_ids",
        "max_ngram": "engram.max_ngram_size",
        "n_heads": "engram.head_count",
        "width": "engram.key_length",
        "multipliers": "engram.multipliers",
        "sizes": "engram.primes",
        "offsets": "engram.offsets",
    },
    Layout.MAINLINE: {
        "layers": "ple.layers",
        "max_ngram": "ple.ngram_size",
        "n_heads": "ple.heads_per_ngram",
        "width": "embedding_length_per_layer_input",
        "multipliers": "ple.layer_multipliers",
        "sizes": "ple.head_vocab_sizes",
        "offsets": "ple.head_offsets",
    },
}
"""The same seven facts under each layout's names."""


@dataclass(frozen=True, slots=True)
class EngramSizes:
    """Engram layers, lookups per layer and token, width of a row, rows of each layer's table."""

    layers: tuple[int, ...]
    n_columns: int
    width: int
    n_rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Counts (``n_x``) and widths of one file."""

    n_layers: int
    n_vocab: int
    hidden: int
    n_heads: int
    head_dim: int
    q_lora: int
    o_groups: int
    o_lora: int
    n_index_heads: int
    index_dim: int
    n_experts: int
    n_shared: int
    expert_ff: int
    n_streams: int
    ratios: tuple[int, ...]
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    engram: EngramSizes


def read_sizes(keys: HeaderKeys, layout: Layout, tensor_names: Collection[str]) -> Sizes:
    """The sizes that the keys state.

    Loaders of the fork layout tell source layers by their tensors; where the keys do not name
    these layers, so does this.

    Raises:
        FormatError: A key is missing or holds no integers.
    """
    kv_sources = keys.find_numbers("attention.kv_source_layers")
    index_sources = keys.find_numbers("attention.indexer.source_layers")
    if layout is Layout.FORK:
        kv_sources = kv_sources or layers_with("attn_compressor_kv.weight", tensor_names)
        index_sources = index_sources or layers_with("indexer.attn_q_b.weight", tensor_names)
    return Sizes(
        n_layers=keys.number("block_count"),
        n_vocab=keys.number("vocab_size"),
        hidden=keys.number("embedding_length"),
        n_heads=keys.number("attention.head_count"),
        head_dim=keys.number("attention.key_length"),
        q_lora=keys.number("attention.q_lora_rank"),
        o_groups=keys.number("attention.output_group_count"),
        o_lora=keys.number("attention.output_lora_rank"),
        n_index_heads=keys.number("attention.indexer.head_count"),
        index_dim=keys.number("attention.indexer.key_length"),
        n_experts=keys.number("expert_count"),
        n_shared=keys.number("expert_shared_count"),
        expert_ff=keys.number("expert_feed_forward_length"),
        n_streams=keys.number("hyper_connection.count"),
        ratios=keys.numbers("attention.compress_ratios"),
        kv_sources=kv_sources or (),
        index_sources=index_sources or (),
        engram=_engram_sizes(keys, layout),
    )


def _engram_sizes(keys: HeaderKeys, layout: Layout) -> EngramSizes:
    names = ENGRAM_NAMES[layout]
    layers = keys.numbers(names["layers"])
    n_columns = (keys.number(names["max_ngram"]) - 1) * keys.number(names["n_heads"])
    buckets = keys.numbers(names["sizes"])
    n_rows = tuple(sum(buckets[n * n_columns : (n + 1) * n_columns]) for n in range(len(layers)))
    return EngramSizes(layers, n_columns, keys.number(names["width"]), n_rows)


def layers_with(part: str, tensor_names: Collection[str]) -> tuple[int, ...]:
    """The layers that have the tensor ``blk.N.<part>``, in order."""
    rule = re.compile(rf"blk\.(\d+)\.{re.escape(part)}")
    found = (rule.fullmatch(name) for name in tensor_names)
    return tuple(sorted(int(match[1]) for match in found if match))
