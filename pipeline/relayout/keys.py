"""The metadata of a finished V4.1 file, said again in the other layout's keys.

Values are those of the file, not computed anew: it may hold other constants than the release. Keys
stand in the order in which `pipeline.model.engram.keys` writes them, so a file that is relaid and
one that was made in this layout have the same header.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.gguf.keys import KeyValue, ValueType, array, flag, i32, u32
from pipeline.gguf.model_file import FILE_KEYS, GgufModel
from pipeline.model.engram.arithmetic import layer_offsets, prime_start, running_offsets
from pipeline.model.layout import Layout
from pipeline.model.metadata.file_facts import (
    PREFIX,
    HashFacts,
    SourceFacts,
    read_hash_facts,
    read_source_facts,
)
from pipeline.model.metadata.required import MAINLINE_KEYS, NINE_KEYS, UNION_KEYS

_OWN_KEYS = frozenset({*NINE_KEYS, *UNION_KEYS, *MAINLINE_KEYS})
_OWN_PREFIXES = (f"{PREFIX}engram.", f"{PREFIX}ple.")


def convert_keys(model: GgufModel, have: Layout, want: Layout) -> tuple[KeyValue, ...]:
    """The metadata of ``model``, with the keys of ``want`` in place of those of ``have``.

    Split keys, alignment and filler are left to the writer of the files.

    Raises:
        FormatError: A key of ``have`` is missing or contradicts another.
    """
    new = layout_keys(read_hash_facts(model, have), read_source_facts(model), want)
    entries = [e for e in model.key_values.values() if e.key not in FILE_KEYS]
    is_own = [e.key in _OWN_KEYS or e.key.startswith(_OWN_PREFIXES) for e in entries]
    place = is_own.index(True)
    kept = [entry for entry, own in zip(entries, is_own, strict=True) if not own]
    return (*kept[:place], *new, *kept[place:])


def layout_keys(facts: HashFacts, sources: SourceFacts, want: Layout) -> tuple[KeyValue, ...]:
    """All keys that belong to ``want`` alone, and the source keys that both layouts share."""
    if want is Layout.MAINLINE:
        return (*_source_keys(sources), *_mainline_keys(facts))
    return (
        *_source_keys(sources),
        *_nine_keys(facts),
        *_other_source_names(sources),
        *_other_engram_names(facts),
    )


def _source_keys(sources: SourceFacts) -> Iterator[KeyValue]:
    attention, candidate = f"{PREFIX}attention", sources.candidate
    yield _i32s(f"{attention}.kv_source_layers", sources.kv_sources)
    yield _i32s(f"{attention}.indexer.source_layers", sources.index_sources)
    yield i32(f"{attention}.indexer.candidate_source_layer", candidate.source_layer)
    yield u32(f"{attention}.indexer.candidate_block_size", candidate.block_size)
    yield u32(f"{attention}.indexer.candidate_top_k_blocks", candidate.top_k)


def _mainline_keys(facts: HashFacts) -> Iterator[KeyValue]:
    yield u32(f"{PREFIX}embedding_length_per_layer_input", facts.width)
    yield _i32s(f"{PREFIX}ple.layers", facts.layers)
    yield u32(f"{PREFIX}ple.ngram_size", facts.max_ngram)
    yield u32(f"{PREFIX}ple.heads_per_ngram", facts.n_heads)
    yield _u64s(f"{PREFIX}ple.layer_multipliers", facts.multipliers)
    yield _u64s(f"{PREFIX}ple.head_vocab_sizes", facts.sizes)
    yield _u64s(f"{PREFIX}ple.head_offsets", running_offsets(facts.sizes))
    yield _i32s(f"{PREFIX}engram.token_map", facts.token_map)
    yield u32(f"{PREFIX}engram.pad_token_id", facts.pad_token)


def _nine_keys(facts: HashFacts) -> Iterator[KeyValue]:
    yield _i32s(f"{PREFIX}engram.layer_ids", facts.layers)
    yield u32(f"{PREFIX}engram.head_count", facts.n_heads)
    yield u32(f"{PREFIX}engram.key_length", facts.width)
    yield u32(f"{PREFIX}engram.max_ngram_size", facts.max_ngram)
    yield _u64s(f"{PREFIX}engram.multipliers", facts.multipliers)
    yield _u64s(f"{PREFIX}engram.primes", facts.sizes)
    yield _u64s(f"{PREFIX}engram.offsets", layer_offsets(facts.sizes))
    yield _i32s(f"{PREFIX}engram.token_map", facts.token_map)
    yield u32(f"{PREFIX}engram.pad_id", facts.token_map[facts.pad_token])


def _other_source_names(sources: SourceFacts) -> Iterator[KeyValue]:
    attention, candidate = f"{PREFIX}attention", sources.candidate
    yield u32(f"{attention}.candidate_source_layer_id", candidate.source_layer)
    yield u32(f"{attention}.candidate_block_size", candidate.block_size)
    yield u32(f"{attention}.candidate_topk_blocks", candidate.top_k)
    yield u32(f"{attention}.candidate.source_layer", candidate.source_layer)
    yield u32(f"{attention}.candidate.topk_blocks", candidate.top_k)
    yield u32(f"{attention}.candidate.block_size", candidate.block_size)
    yield _i32s(f"{attention}.kv_source_layer_ids", sources.kv_sources)
    yield _i32s(f"{attention}.index_source_layer_ids", sources.index_sources)
    yield flag(f"{PREFIX}hyper_connection.single_pass", True)


def _other_engram_names(facts: HashFacts) -> Iterator[KeyValue]:
    yield _i32s(f"{PREFIX}engram.layers", facts.layers)
    yield u32(f"{PREFIX}engram.head_dim", facts.width)
    yield u32(f"{PREFIX}engram.pad_token_id", facts.pad_token)
    yield u32(f"{PREFIX}engram.compressed_vocab_size", max(facts.token_map) + 1)
    start = prime_start([size for sizes in facts.sizes for size in sizes])
    if start is not None:
        yield u32(f"{PREFIX}engram.vocab_size", start)
    yield array(f"{PREFIX}engram.table_rows", ValueType.UINT32, facts.n_rows)
    yield _u64s(f"{PREFIX}engram.hash_multipliers", facts.multipliers)
    yield _u64s(f"{PREFIX}engram.head_offsets", layer_offsets(facts.sizes))
    yield _u64s(f"{PREFIX}engram.head_bucket_sizes", facts.sizes)


def _i32s(key: str, values: Sequence[int]) -> KeyValue:
    return array(key, ValueType.INT32, values)


def _u64s(key: str, per_layer: Sequence[Sequence[int]]) -> KeyValue:
    """All layers' numbers, one layer after the other."""
    return array(key, ValueType.UINT64, [number for layer in per_layer for number in layer])
