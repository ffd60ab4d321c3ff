"""Values of a finished file's keys that a loader insists on, or that must agree with each other.

A value that is missing or of another type is no subject here (see `contract_keys`): every rule
passes over what it cannot read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from pipeline.errors import FormatError
from pipeline.gguf.keys import KeyValue
from pipeline.model.contract.sizes import ENGRAM_NAMES
from pipeline.model.layout import Layout
from pipeline.model.metadata.header_keys import PREFIX, HeaderKeys

_FIXED: Mapping[str, tuple[int, str]] = {
    "attention.head_count_kv": (1, "All heads share one key; decoding aborts otherwise."),
    "expert_gating_func": (4, "The loader expects sqrt-softplus."),
    "hyper_connection.count": (4, "The graph is built for four streams."),
    "hash_layer_count": (0, "V4.1 has no hash-routed layer."),
}

_SAME: tuple[tuple[str, str], ...] = (
    ("attention.value_length", "attention.key_length"),
    ("engram.layers", "engram.layer_ids"),
    ("engram.head_dim", "engram.key_length"),
    ("engram.hash_multipliers", "engram.multipliers"),
    ("engram.head_offsets", "engram.offsets"),
    ("engram.head_bucket_sizes", "engram.primes"),
    ("attention.kv_source_layer_ids", "attention.kv_source_layers"),
    ("attention.index_source_layer_ids", "attention.indexer.source_layers"),
    ("attention.candidate_source_layer_id", "attention.indexer.candidate_source_layer"),
    ("attention.candidate_block_size", "attention.indexer.candidate_block_size"),
    ("attention.candidate_topk_blocks", "attention.indexer.candidate_top_k_blocks"),
    ("attention.candidate.source_layer", "attention.indexer.candidate_source_layer"),
    ("attention.candidate.block_size", "attention.indexer.candidate_block_size"),
    ("attention.candidate.topk_blocks", "attention.indexer.candidate_top_k_blocks"),
)
"""Pairs of keys that say one thing."""

_TOKEN_IDS = ("bos", "eos", "padding")


def check_values(entries: Mapping[str, KeyValue], layout: Layout) -> Iterator[FormatError]:
    """A problem for each value that no loader takes, or that contradicts another."""
    keys = HeaderKeys(entries)
    yield from _check_fixed(keys)
    yield from _check_same(keys)
    yield from _check_widths(keys)
    yield from _check_lengths(entries, keys)
    yield from _check_tokens(entries, keys)
    yield from _check_engram(keys, layout)


def _check_fixed(keys: HeaderKeys) -> Iterator[FormatError]:
    for name, (wanted, cause) in _FIXED.items():
        found = keys.find_number(name)
        if found not in (None, wanted):
            yield FormatError(
                f"{PREFIX}{name} has a value that loaders refuse",
                expected=wanted,
                found=found,
                next_step=cause,
            )


def _check_same(keys: HeaderKeys) -> Iterator[FormatError]:
    for name, other in _SAME:
        pair = [_value(keys, name), _value(keys, other)]
        if None not in pair and pair[0] != pair[1]:
            yield FormatError(
                f"{PREFIX}{name} and {PREFIX}{other} differ",
                expected=_shown(pair[1]),
                found=_shown(pair[0]),
            )


def _value(keys: HeaderKeys, name: str) -> int | tuple[int, ...] | None:
    number = keys.find_number(name)
    return keys.find_numbers(name) if number is None else number


def _shown(value: int | tuple[int, ...] | None) -> str:
    return str(value) if len(str(value)) <= 200 else f"{str(value)[:200]} …"


def _check_widths(keys: HeaderKeys) -> Iterator[FormatError]:
    n_heads, width = (
        keys.find_number("attention.head_count"),
        keys.find_number("attention.key_length"),
    )
    groups = keys.find_number("attention.output_group_count")
    if n_heads and width and groups is not None and (groups < 1 or n_heads * width % groups):
        yield FormatError(
            f"the heads do not divide into {PREFIX}attention.output_group_count",
            expected=f"a divisor of {n_heads * width:,}",
            found=groups,
        )
    rotary = keys.find_number("rope.dimension_count")
    if width and rotary is not None and not (0 < rotary <= width and rotary % 2 == 0):
        yield FormatError(
            f"{PREFIX}rope.dimension_count does not fit a head",
            expected=f"an even number up to {width}",
            found=rotary,
        )
    n_experts, n_used = keys.find_number("expert_count"), keys.find_number("expert_used_count")
    if n_experts is not None and n_used is not None and not 0 < n_used <= n_experts:
        yield FormatError(
            f"{PREFIX}expert_used_count does not fit {PREFIX}expert_count",
            expected=f"1 to {n_experts}",
            found=n_used,
        )


def _check_lengths(entries: Mapping[str, KeyValue], keys: HeaderKeys) -> Iterator[FormatError]:
    n_layers, n_vocab = keys.find_number("block_count"), keys.find_number("vocab_size")
    lengths = {
        f"{PREFIX}swiglu_clamp_exp": n_layers,
        f"{PREFIX}swiglu_clamp_shexp": n_layers,
        f"{PREFIX}engram.token_map": n_vocab,
        "tokenizer.ggml.tokens": n_vocab,
        "tokenizer.ggml.token_type": n_vocab,
    }
    for key, wanted in lengths.items():
        entry = entries.get(key)
        if entry is None or not isinstance(entry.value, tuple) or wanted is None:
            continue
        if len(entry.value) != wanted:
            yield FormatError(
                f"the array {key} has another length than the model",
                expected=f"{wanted:,} entries",
                found=f"{len(entry.value):,} entries",
            )


def _check_tokens(entries: Mapping[str, KeyValue], keys: HeaderKeys) -> Iterator[FormatError]:
    n_vocab = keys.find_number("vocab_size")
    for token in _TOKEN_IDS:
        entry = entries.get(f"tokenizer.ggml.{token}_token_id")
        if n_vocab is None or entry is None or not isinstance(entry.value, int):
            continue
        if not 0 <= entry.value < n_vocab:
            yield FormatError(
                f"{entry.key} lies outside the vocabulary",
                expected=f"below {n_vocab:,}",
                found=entry.value,
            )


def _check_engram(keys: HeaderKeys, layout: Layout) -> Iterator[FormatError]:
    names = ENGRAM_NAMES[layout]
    layers = keys.find_numbers(names["layers"])
    max_ngram, n_heads = keys.find_number(names["max_ngram"]), keys.find_number(names["n_heads"])
    if layers is None or max_ngram is None or n_heads is None:
        return
    yield from _check_engram_layers(names["layers"], layers, keys)
    n_columns = (max_ngram - 1) * n_heads
    wanted = {
        "multipliers": len(layers) * max_ngram,
        "sizes": len(layers) * n_columns,
        "offsets": len(layers) * n_columns,
    }
    for fact, length in wanted.items():
        found = keys.find_numbers(names[fact])
        if found is not None and len(found) != length:
            yield FormatError(
                f"the array {PREFIX}{names[fact]} has another length than its layers and columns",
                expected=f"{length} entries",
                found=f"{len(found)} entries",
            )
    yield from _check_buckets(keys, layout, n_columns)
    yield from _check_pad(keys, layout)


def _check_engram_layers(
    name: str, layers: Sequence[int], keys: HeaderKeys
) -> Iterator[FormatError]:
    n_layers = keys.find_number("block_count")
    if n_layers is None:
        return
    if (
        not layers
        or list(layers) != sorted(set(layers))
        or not 0 <= layers[0] <= layers[-1] < (n_layers)
    ):
        yield FormatError(
            f"{PREFIX}{name} are no increasing layer numbers",
            expected=f"0 to {n_layers - 1}",
            found=list(layers),
        )


def _check_buckets(keys: HeaderKeys, layout: Layout, n_columns: int) -> Iterator[FormatError]:
    names = ENGRAM_NAMES[layout]
    sizes, offsets = keys.find_numbers(names["sizes"]), keys.find_numbers(names["offsets"])
    if sizes is not None and min(sizes, default=1) < 1:
        yield FormatError(f"{PREFIX}{names['sizes']} holds an empty bucket run", expected="above 0")
    if sizes is None or offsets is None or n_columns < 1:
        return
    per_layer = [
        first
        for at in range(0, len(sizes), n_columns)
        for first in _first_rows(sizes[at : at + n_columns])
    ]
    running = _first_rows(sizes)
    wanted, other = (per_layer, running) if layout is Layout.FORK else (running, per_layer)
    if list(offsets) != wanted:
        what = "from 0 in every layer" if layout is Layout.FORK else "on over all layers"
        foreign = " They are those of the other layout." if list(offsets) == other else ""
        yield FormatError(
            f"{PREFIX}{names['offsets']} do not count the rows {what}",
            next_step=f"Nothing fails when this file is loaded; it looks up wrong rows.{foreign}",
        )


def _first_rows(sizes: Sequence[int]) -> list[int]:
    return list(accumulate(sizes, initial=0))[:-1]


def _check_pad(keys: HeaderKeys, layout: Layout) -> Iterator[FormatError]:
    token_map, raw = keys.find_numbers("engram.token_map"), keys.find_number("engram.pad_token_id")
    mapped = keys.find_number("engram.pad_id")
    if token_map is None:
        return
    if raw is not None and not 0 <= raw < len(token_map):
        yield FormatError(
            f"{PREFIX}engram.pad_token_id lies outside the token map",
            expected=f"below {len(token_map):,}",
            found=raw,
        )
    elif layout is Layout.FORK and mapped is not None:
        compressed = token_map[raw] if raw is not None else mapped
        if mapped != compressed or mapped not in token_map:
            yield FormatError(
                f"{PREFIX}engram.pad_id is not what the token map makes of the pad token",
                expected=compressed if raw is not None else "an id the map holds",
                found=mapped,
            )
