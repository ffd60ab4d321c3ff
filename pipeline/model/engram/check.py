"""Whether engram tables fit their hash buckets: in a checkpoint, and in a GGUF of either layout.

A table that is a row short, swapped with the other, or addressed with the other layout's offsets
loads in every engine and gives wrong output; only this arithmetic sees it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from pipeline.model.config import EngramConfig, ModelConfig
from pipeline.model.engram.arithmetic import bucket_sizes, row_counts
from pipeline.model.engram.dialect import engram_tensors, recognise
from pipeline.model.engram.facts import (
    EngramFacts,
    check_factors,
    check_primes,
    number,
    read_facts,
)
from pipeline.model.engram.findings import EngramChecks, EngramReport, EngramRow, row_cause
from pipeline.model.engram.layout_check import HeaderLike, check_layout
from pipeline.model.form import Architecture
from pipeline.model.layout import Layout

__all__ = ["EngramReport", "EngramRow", "check_checkpoint_engram", "check_gguf_engram"]

TableShapes = tuple[tuple[int, ...], tuple[int, ...]]
"""Shapes (numpy order) of a table's ``embed.weight`` and ``embed.scale``."""

_WITHOUT_ENGRAM = (Architecture.DEEPSEEK4, Architecture.DFLASH)
_NO_READER = "Only the target of V4.1 has them; no loader of this architecture reads one."

_SCALE_GROUP = 32
"""Values of a table row that share a scale (checkpoint: 8 scales per 256 values)."""

_RELEASED_VOCAB = 16_000_000
_RELEASED_COMPRESSED = 99_092
# fmt: off
_RELEASED_PRIMES = (
    16000057, 16000079, 16000081, 16000097, 16000121, 16000129, 16000133, 16000183,
    16000189, 16000207, 16000211, 16000253, 16000277, 16000289, 16000307, 16000321,
    16000339, 16000381, 16000393, 16000399, 16000403, 16000409, 16000447, 16000463,
    16000477, 16000487, 16000499, 16000507, 16000511, 16000573, 16000609, 16000627,
    16000667, 16000669, 16000693, 16000697, 16000711, 16000729, 16000759, 16000769,
    16000781, 16000799, 16000813, 16000819, 16000841, 16000877, 16000879, 16000889,
)
# fmt: on
"""Bucket sizes of the released model, layers 1 and 14, as its own code prints them."""


def check_checkpoint_engram(
    config: ModelConfig,
    tables: Mapping[int, TableShapes],
    token_map: NDArray[np.int32] | None = None,
) -> EngramReport:
    """The source tables against the buckets computed from config.json; V4 must have none.

    Args:
        config: The model.
        tables: Layer -> shapes of its table and scales, from the shard headers.
        token_map: Raw id -> compressed id, where the tokenizer is at hand.
    """
    checks = EngramChecks("checkpoint")
    engram = config.engram
    layers = engram.layers if engram else ()
    checks.equal("engram layers with a table", layers, tuple(sorted(tables)))
    if engram is None:
        return checks.report()
    _check_compressed(config, engram, token_map, checks)
    if engram.vocab_size == _RELEASED_VOCAB:
        flat = [size for layer in bucket_sizes(engram) for size in layer]
        n_known = min(len(flat), len(_RELEASED_PRIMES))
        checks.same_run(
            "bucket sizes of the released model", _RELEASED_PRIMES[:n_known], flat[:n_known]
        )
    _check_rows(engram, tables, checks)
    for layer in engram.layers:
        if layer in tables:
            _check_widths(engram, layer, tables[layer], checks)
    return checks.report()


def _check_compressed(
    config: ModelConfig,
    engram: EngramConfig,
    token_map: NDArray[np.int32] | None,
    checks: EngramChecks,
) -> None:
    what = "config.json engram_compressed_vocab_size"
    if token_map is not None:
        checks.equal("entries of the token map", config.vocab_size, len(token_map))
        checks.equal(what, int(token_map.max(initial=-1)) + 1, engram.n_compressed)
    elif engram.vocab_size == _RELEASED_VOCAB:
        checks.equal(what, _RELEASED_COMPRESSED, engram.n_compressed)


def _check_rows(
    engram: EngramConfig, tables: Mapping[int, TableShapes], checks: EngramChecks
) -> None:
    """Rows that config.json states, of the values and of their scales, for every layer."""
    none: TableShapes = ((0,), (0,))
    shapes = [tables.get(layer, none) for layer in engram.layers]
    sums = row_counts(engram)
    counts = {
        "config.json engram_num_embeddings of layer {}": engram.n_rows,
        "rows of layers.{}.engram.embed.weight": tuple(_rows(weight) for weight, _ in shapes),
        "rows of layers.{}.engram.embed.scale": tuple(_rows(scale) for _, scale in shapes),
    }
    for what, found in counts.items():
        for at, layer in enumerate(engram.layers):
            cause = _restart_cause(engram, found[at]) or row_cause(found, at, sums, engram.layers)
            checks.equal(what.format(layer), sums[at], found[at], cause=cause)


def _restart_cause(engram: EngramConfig, n_rows: int) -> str | None:
    n_orders = engram.max_ngram - 1
    if n_orders == 1 or n_rows != n_orders * sum(bucket_sizes(engram)[0][: engram.n_heads]):
        return None
    return "The primes were started again for every n-gram order; they must run on over all."


def _check_widths(
    engram: EngramConfig, layer: int, shapes: TableShapes, checks: EngramChecks
) -> None:
    name = f"layers.{layer}.engram.embed"
    widths = {"weight": engram.head_dim, "scale": engram.head_dim // _SCALE_GROUP}
    for (part, width), shape in zip(widths.items(), shapes, strict=True):
        what = f"width of {name}.{part}"
        checks.equal(what, (width,), shape[1:], tensor=f"{name}.{part}")


def _rows(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 0


def check_gguf_engram(model: HeaderLike) -> EngramReport:
    """The engram tables of a GGUF against its hash constants, and those against their rules.

    The layout is recognised by the tensors. Forms that no common loader reads are refused by name.
    A V4 target and a draft have no tables; that they have none is all there is to check.
    """
    architecture = model.key_values.get("general.architecture")
    if architecture is not None and architecture.value in _WITHOUT_ENGRAM:
        return _check_absence(model, str(architecture.value))
    dialect = recognise(model.tensors, model.key_values)
    checks = EngramChecks(dialect.name)
    layout = dialect.layout
    if layout is None:
        cause = "Convert the released checkpoint instead; this form cannot be checked."
        checks.equal("engram layout", " or ".join(Layout), dialect.name, cause=cause)
        return checks.report()
    facts = read_facts(model.key_values, layout, checks)
    if facts is not None:
        _check_token_map(model, facts, checks)
        check_factors(facts, checks)
        check_primes(facts, _first_prime(model, facts), checks)
        check_layout(model, facts, layout, checks)
    return checks.report()


def _check_absence(model: HeaderLike, architecture: str) -> EngramReport:
    checks = EngramChecks(f"{architecture}: a model without engram tables")
    found = engram_tensors(model.tensors)
    checks.equal("engram tensors", "none", ", ".join(found) or "none", cause=_NO_READER)
    return checks.report()


def _first_prime(model: HeaderLike, facts: EngramFacts) -> int:
    """Where the primes start: what the file says of it, else its own first bucket size."""
    said = model.key_values.get("deepseek41.engram.vocab_size")
    return facts.sizes[0] if said is None else number(said)


def _check_token_map(model: HeaderLike, facts: EngramFacts, checks: EngramChecks) -> None:
    tokens = model.key_values.get("tokenizer.ggml.tokens")
    said = model.key_values.get("deepseek41.vocab_size")
    n_vocab = len(tokens.value) if tokens and isinstance(tokens.value, tuple) else None
    if n_vocab is None and said is not None:
        n_vocab = number(said)
    checks.equal("entries of the token map", n_vocab, len(facts.token_map))
    distinct = len(set(facts.token_map))
    checks.equal(
        "compressed ids without a gap",
        (0, distinct - 1),
        (min(facts.token_map), max(facts.token_map)),
    )
