"""Values of a finished file's keys that a loader insists on, or that must agree with each other.

A value that is missing or of another type is no subject here (see `keys`): every rule passes over
what it cannot read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeline.errors import FormatError
from pipeline.gguf.keys import KeyValue, Scalar
from pipeline.model.contract.engram_values import check_engram_values
from pipeline.model.form import V4_DRAFT, V4_TARGET, V41_DRAFT, V41_FORK, V41_MAINLINE, Form
from pipeline.model.metadata.header_keys import HeaderKeys

_Fixed = Mapping[str, tuple[Scalar, str]]
"""Key -> the only value that passes, and why."""

_FIXED: _Fixed = {
    "attention.head_count_kv": (1, "All heads share one key; decoding aborts otherwise."),
    "expert_gating_func": (4, "The loader expects sqrt-softplus."),
    "hyper_connection.count": (4, "The graph is built for four streams."),
}
_NOT_HASHED: _Fixed = {"hash_layer_count": (0, "Only V4's trunk has hash-routed layers.")}
_YARN: _Fixed = {
    "rope.scaling.yarn_beta_fast": (32.0, "The engine never reads it and always takes 32."),
    "rope.scaling.yarn_beta_slow": (1.0, "The engine never reads it and always takes 1."),
}
_V41_FLAGS: _Fixed = {
    "hyper_connection.single_pass": (True, "mainline llama.cpp looks for output_hc_* otherwise."),
    "dsv41_semantics": (True, "Forks run the file as a V4 draft otherwise."),
}

_FIXED_IN: Mapping[Form, _Fixed] = {
    V41_MAINLINE: {**_FIXED, **_NOT_HASHED, **_YARN},
    V41_FORK: {**_FIXED, **_NOT_HASHED, **_YARN},
    V4_TARGET: {**_FIXED, **_YARN},
    V41_DRAFT: {**_FIXED, **_NOT_HASHED, **_V41_FLAGS},
    V4_DRAFT: {**_FIXED, **_NOT_HASHED},
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

_TOKEN_IDS = ("bos", "eos", "padding", "mask")


def check_values(entries: Mapping[str, KeyValue], form: Form) -> Iterator[FormatError]:
    """A problem for each value that no loader takes, or that contradicts another."""
    keys = HeaderKeys(entries, form.architecture)
    yield from _check_fixed(keys, _FIXED_IN[form])
    yield from _check_same(keys)
    yield from _check_widths(keys)
    yield from _check_counts(keys)
    yield from _check_lengths(entries, keys)
    yield from _check_tokens(entries, keys)
    if form.layout:
        yield from check_engram_values(keys, form.layout)
    if form.is_draft:
        yield from _check_draft(keys, first=1 if form == V4_DRAFT else 0)


def _check_fixed(keys: HeaderKeys, fixed: _Fixed) -> Iterator[FormatError]:
    for name, (wanted, cause) in fixed.items():
        found = keys.find(name)
        if type(found) is type(wanted) and found != wanted:
            yield FormatError(
                f"{keys.full(name)} has a value that loaders refuse or pass over",
                expected=wanted,
                found=found,
                next_step=cause,
            )


def _check_same(keys: HeaderKeys) -> Iterator[FormatError]:
    for name, other in _SAME:
        pair = [_value(keys, name), _value(keys, other)]
        if None not in pair and pair[0] != pair[1]:
            yield FormatError(
                f"{keys.full(name)} and {keys.full(other)} differ",
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
            f"the heads do not divide into {keys.full('attention.output_group_count')}",
            expected=f"a divisor of {n_heads * width:,}",
            found=groups,
        )
    rotary = keys.find_number("rope.dimension_count")
    if width and rotary is not None and not (0 < rotary <= width and rotary % 2 == 0):
        yield FormatError(
            f"{keys.full('rope.dimension_count')} does not fit a head",
            expected=f"an even number up to {width}",
            found=rotary,
        )


def _check_counts(keys: HeaderKeys) -> Iterator[FormatError]:
    limits = (
        ("expert_used_count", 1, "expert_count"),
        ("hash_layer_count", 0, "block_count"),
    )
    for name, least, other in limits:
        found, most = keys.find_number(name), keys.find_number(other)
        if found is not None and most is not None and not least <= found <= most:
            yield FormatError(
                f"{keys.full(name)} does not fit {keys.full(other)}",
                expected=f"{least} to {most}",
                found=found,
            )


def _check_lengths(entries: Mapping[str, KeyValue], keys: HeaderKeys) -> Iterator[FormatError]:
    n_layers, n_vocab = keys.find_number("block_count"), keys.find_number("vocab_size")
    lengths = {
        keys.full("swiglu_clamp_exp"): n_layers,
        keys.full("swiglu_clamp_shexp"): n_layers,
        keys.full("engram.token_map"): n_vocab,
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


def _check_draft(keys: HeaderKeys, first: int) -> Iterator[FormatError]:
    """How far a draft looks ahead, and the layers whose input it is given, from ``first`` on.

    V4's config.json counts outputs: the input of the layer after them, so of none before 1.
    """
    block_size = keys.find_number("block_size")
    if block_size is not None and block_size < 1:
        yield FormatError(
            f"{keys.full('block_size')} drafts nothing", expected="above 0", found=block_size
        )
    layers = keys.find_numbers("target_layers")
    if layers is None:
        return
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < first:
        yield FormatError(
            f"{keys.full('target_layers')} are no increasing layer numbers",
            expected=f"{first} or more",
            found=list(layers),
        )
