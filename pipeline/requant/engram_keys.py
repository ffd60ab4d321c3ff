"""Engram keys of a V4.1 file made again of its tables and its tokens.

Buckets are primes one after the other, and a table has as many rows as they have together, so the
rows tell the primes; offsets are their running sums, and the rest follows from the token list.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.errors import FormatError
from pipeline.gguf.keys import KeyValue, ValueType, array, u32
from pipeline.gguf.model_file import GgufModel
from pipeline.model.config import EngramConfig
from pipeline.model.contract.sizes import ENGRAM_NAMES, layers_with
from pipeline.model.dialects import FORK_TABLE, MAINLINE_TABLE
from pipeline.model.engram.arithmetic import (
    layer_offsets,
    multipliers,
    prime_start,
    running_offsets,
    split_layers,
)
from pipeline.model.form import Architecture
from pipeline.model.layout import Layout
from pipeline.model.metadata.header_keys import HeaderKeys
from pipeline.model.tokens.token_map import compress_tokens
from pipeline.requant.primes import prime_run

_ARCHITECTURE = Architecture.DEEPSEEK41
_PAD = "<｜▁pad▁｜>"
_RELEASED_PAD = 2
"""``engram_pad_token_id`` of the released config; tokenizers may name another token for padding."""

_RELEASED_SHAPE = (4, 8)
"""Longest n-gram and heads of the released model, where the width of the projection fits them."""


def engram_keys(model: GgufModel, layout: Layout) -> Iterator[KeyValue]:
    """Every engram key of ``layout``, from the file's own where it has them.

    Raises:
        FormatError: Tables do not have the rows that any buckets give, or what would tell a
            missing key is missing, too.
    """
    names = {fact: f"{_ARCHITECTURE}.{name}" for fact, name in ENGRAM_NAMES[layout].items()}
    wanted = (*names.values(), f"{_ARCHITECTURE}.engram.token_map")
    if all(key in model.key_values for key in wanted):
        yield from _pad_keys(model, layout, None)
        return
    token_map = _token_map(model)
    engram = _engram(model, layout, max(token_map) + 1)
    sizes = split_layers(_buckets(model, layout, engram), engram.n_columns)
    _check_rows(model, layout, engram, [sum(of_layer) for of_layer in sizes])
    offsets = layer_offsets(sizes) if layout is Layout.FORK else running_offsets(sizes)
    yield array(names["layers"], ValueType.INT32, engram.layers)
    yield u32(names["max_ngram"], engram.max_ngram)
    yield u32(names["n_heads"], engram.n_heads)
    yield u32(names["width"], engram.head_dim)
    for fact, per_layer in (
        ("multipliers", multipliers(engram)),
        ("sizes", sizes),
        ("offsets", offsets),
    ):
        flat = [number for of_layer in per_layer for number in of_layer]
        yield array(names[fact], ValueType.UINT64, flat)
    yield array(f"{_ARCHITECTURE}.engram.token_map", ValueType.INT32, token_map)
    yield from _pad_keys(model, layout, token_map)


def _pad_keys(
    model: GgufModel, layout: Layout, token_map: tuple[int, ...] | None
) -> Iterator[KeyValue]:
    """The pad id, raw and as the fork layout's loaders take it."""
    keys = _keys(model)
    mapped = keys.find_number("engram.pad_id")
    if token_map is None:
        token_map = keys.find_numbers("engram.token_map") or ()
    raw = keys.find_number("engram.pad_token_id")
    if raw is None and mapped is None:
        tokens = _strings(model, "tokenizer.ggml.tokens")
        raw = tokens.index(_PAD) if _PAD in tokens else _RELEASED_PAD
    if raw is not None:
        yield u32(keys.full("engram.pad_token_id"), raw)
    if layout is Layout.FORK and raw is not None and raw < len(token_map):
        yield u32(keys.full("engram.pad_id"), token_map[raw])


def _token_map(model: GgufModel) -> tuple[int, ...]:
    said = _keys(model).find_numbers("engram.token_map")
    if said:
        return said
    tokens = _strings(model, "tokenizer.ggml.tokens")
    types = model.key_values.get("tokenizer.ggml.token_type")
    kinds = types.value if types is not None and isinstance(types.value, tuple) else ()
    if not tokens or len(kinds) != len(tokens):
        raise FormatError(
            "the file has neither an engram token map nor the tokens to make one of",
            file=model.files[0].path,
            expected="tokenizer.ggml.tokens and tokenizer.ggml.token_type, equally many",
            found=f"{len(tokens):,} and {len(kinds):,}",
        )
    numbers = [kind if isinstance(kind, int) else 0 for kind in kinds]
    return tuple(compress_tokens(tokens, numbers).tolist())


def _engram(model: GgufModel, layout: Layout, n_compressed: int) -> EngramConfig:
    """Layers, lookups and widths: from the keys, or from the tensors that have them, too."""
    keys, names = _keys(model), ENGRAM_NAMES[layout]
    layers, tables = engram_layers(model, layout), _tables(model, layout)
    width = tables[0][0]
    max_ngram, n_heads = (keys.find_number(names[fact]) for fact in ("max_ngram", "n_heads"))
    if max_ngram is None or n_heads is None:
        max_ngram, n_heads = _RELEASED_SHAPE
        _check_columns(model, layout, layers, (max_ngram - 1) * n_heads * width)
    return EngramConfig(
        layers=layers,
        n_rows=tuple(n_rows for _, n_rows in tables),
        max_ngram=max_ngram,
        vocab_size=0,
        n_heads=n_heads,
        head_dim=width,
        pad_token=0,
        n_compressed=n_compressed,
    )


def engram_layers(model: GgufModel, layout: Layout) -> tuple[int, ...]:
    """The layers that have what only those with an engram have."""
    part = "engram_embd" if layout is Layout.FORK else "engram_kv"
    return layers_with(f"{part}.weight", model.tensors)


def _check_columns(model: GgufModel, layout: Layout, layers: tuple[int, ...], wanted: int) -> None:
    part = "engram_wkv" if layout is Layout.FORK else "engram_kv"
    for layer in layers:
        entry = model.tensors.get(f"blk.{layer}.{part}.weight")
        if entry is None or entry[1].ne[0] != wanted:
            raise FormatError(
                "the file does not say how long n-grams are and how many heads look them up, and "
                "its projection is not as wide as the released model's",
                file=model.files[0].path,
                tensor=f"blk.{layer}.{part}.weight",
                expected=wanted,
                found="no such tensor" if entry is None else entry[1].ne,
            )


def _tables(model: GgufModel, layout: Layout) -> list[tuple[int, int]]:
    """Width and rows of each table, in layer order."""
    if layout is Layout.MAINLINE:
        found = [model.tensors[MAINLINE_TABLE][1]]
    else:
        named = {n: t for n, (_, t) in model.tensors.items() if FORK_TABLE.fullmatch(n)}
        found = [named[name] for name in sorted(named, key=lambda name: int(name.split(".")[1]))]
    return [(tensor.ne[0], tensor.ne[-1]) for tensor in found]


def _buckets(model: GgufModel, layout: Layout, engram: EngramConfig) -> tuple[int, ...]:
    said = _keys(model).find_numbers(ENGRAM_NAMES[layout]["sizes"])
    if said:
        return said
    n_buckets, n_rows = len(engram.layers) * engram.n_columns, sum(engram.n_rows)
    run = prime_run(n_rows, n_buckets)
    if run is None or prime_start(run) is None:
        raise FormatError(
            f"no {n_buckets} primes one after the other have as many buckets together as the "
            "engram tables have rows",
            file=model.files[0].path,
            found=f"{n_rows:,} rows",
            next_step="The tables are not those of the released model, or rows are missing.",
        )
    return run


def _check_rows(model: GgufModel, layout: Layout, engram: EngramConfig, sums: list[int]) -> None:
    wanted = tuple(sums) if layout is Layout.FORK else (sum(sums),)
    if engram.n_rows != wanted:
        raise FormatError(
            "the engram tables do not have the rows of their buckets",
            file=model.files[0].path,
            expected=" and ".join(f"{n:,}" for n in wanted),
            found=" and ".join(f"{n:,}" for n in engram.n_rows),
            next_step="The keys that are missing cannot be made for such tables; take the "
            "released checkpoint.",
        )


def _keys(model: GgufModel) -> HeaderKeys:
    return HeaderKeys(model.key_values, _ARCHITECTURE)


def _strings(model: GgufModel, key: str) -> tuple[str, ...]:
    entry = model.key_values.get(key)
    values = entry.value if entry is not None and isinstance(entry.value, tuple) else ()
    return tuple(value for value in values if isinstance(value, str))
