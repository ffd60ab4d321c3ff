"""What a finished file says about sizes: the only base its tensors are judged on.

All of it stands in the keys, but for the rank of a draft's Markov pair.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pipeline.gguf.model_file import GgufModel
from pipeline.model.form import V41_FORK, Form
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

_RELEASED_RANK = 256
"""``dspark_markov_rank`` of both models, for a file that has no tensor to tell it by."""


@dataclass(frozen=True, slots=True)
class EngramSizes:
    """Engram layers, lookups per layer and token, width of a row, rows of each layer's table."""

    layers: tuple[int, ...]
    n_columns: int
    width: int
    n_rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DraftSizes:
    """Captured layers, whose rows lie side by side, and the rank of the Markov pair."""

    n_captured: int
    markov_rank: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """Counts (``n_x``) and widths of one file; its layers are those of the trunk or the stages.

    What a form has no use for is nothing: sources and engram but for V4.1's target, the indexer
    in drafts.
    """

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
    n_used: int
    n_shared: int
    expert_ff: int
    n_streams: int
    n_hash_layers: int
    ratios: tuple[int, ...]
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    engram: EngramSizes | None
    draft: DraftSizes | None


def read_sizes(model: GgufModel, form: Form) -> Sizes:
    """The sizes that ``model`` states.

    Loaders of the fork layout tell source layers by their tensors; where the keys do not name
    these layers, so does this. Other makers' files may leave the size of the vocabulary to the
    token list.

    Raises:
        FormatError: A key is missing or holds no integers.
    """
    keys = HeaderKeys(model.key_values, form.architecture)
    kv_sources = keys.find_numbers("attention.kv_source_layers")
    index_sources = keys.find_numbers("attention.indexer.source_layers")
    if form == V41_FORK:
        kv_sources = kv_sources or layers_with("attn_compressor_kv.weight", model.tensors)
        index_sources = index_sources or layers_with("indexer.attn_q_b.weight", model.tensors)
    hidden, n_vocab = keys.number("embedding_length"), vocabulary_of(model, form)
    return Sizes(
        n_layers=keys.number("block_count"),
        n_vocab=keys.number("vocab_size") if n_vocab is None else n_vocab,
        hidden=hidden,
        n_heads=keys.number("attention.head_count"),
        head_dim=keys.number("attention.key_length"),
        q_lora=keys.number("attention.q_lora_rank"),
        o_groups=keys.number("attention.output_group_count"),
        o_lora=keys.number("attention.output_lora_rank"),
        n_index_heads=0 if form.is_draft else keys.number("attention.indexer.head_count"),
        index_dim=0 if form.is_draft else keys.number("attention.indexer.key_length"),
        n_experts=keys.number("expert_count"),
        n_used=keys.number("expert_used_count"),
        n_shared=keys.number("expert_shared_count"),
        expert_ff=keys.number("expert_feed_forward_length"),
        n_streams=keys.number("hyper_connection.count"),
        n_hash_layers=0 if form.is_draft else keys.number("hash_layer_count"),
        ratios=() if form.is_draft else keys.numbers("attention.compress_ratios"),
        kv_sources=kv_sources or (),
        index_sources=index_sources or (),
        engram=_engram_sizes(keys, form.layout) if form.layout else None,
        draft=_draft_sizes(keys, model, hidden) if form.is_draft else None,
    )


def vocabulary_of(model: GgufModel, form: Form) -> int | None:
    """Tokens of ``model`` by its key or, where that is missing, by its token list."""
    said = HeaderKeys(model.key_values, form.architecture).find_number("vocab_size")
    tokens = model.key_values.get("tokenizer.ggml.tokens")
    if said is None and tokens is not None and isinstance(tokens.value, tuple):
        return len(tokens.value)
    return said


def _engram_sizes(keys: HeaderKeys, layout: Layout) -> EngramSizes:
    names = ENGRAM_NAMES[layout]
    layers = keys.numbers(names["layers"])
    n_columns = (keys.number(names["max_ngram"]) - 1) * keys.number(names["n_heads"])
    buckets = keys.numbers(names["sizes"])
    n_rows = tuple(sum(buckets[n * n_columns : (n + 1) * n_columns]) for n in range(len(layers)))
    return EngramSizes(layers, n_columns, keys.number(names["width"]), n_rows)


def _draft_sizes(keys: HeaderKeys, model: GgufModel, hidden: int) -> DraftSizes:
    """No key states the rank; where its three tensors differ, most of them are taken at their word.

    ``conf_proj`` reads a row of the stream and one of the Markov pair side by side.
    """
    beside = {"markov_w1.weight": 0, "markov_w2.weight": 0, "conf_proj.weight": hidden}
    ranks = Counter(
        model.tensors[name][1].ne[0] - before
        for name, before in beside.items()
        if name in model.tensors
    )
    rank = ranks.most_common(1)[0][0] if ranks else _RELEASED_RANK
    return DraftSizes(len(keys.numbers("target_layers")), rank)


def layers_with(part: str, tensor_names: Collection[str]) -> tuple[int, ...]:
    """The layers that have the tensor ``blk.N.<part>``, in order."""
    rule = re.compile(rf"blk\.(\d+)\.{re.escape(part)}")
    found = (rule.fullmatch(name) for name in tensor_names)
    return tuple(sorted(int(match[1]) for match in found if match))
