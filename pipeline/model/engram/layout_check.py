"""The engram tensors and offsets of a GGUF, per layout, against its hash constants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Protocol

from pipeline.gguf.keys import KeyValue
from pipeline.model.engram.arithmetic import layer_offsets, running_offsets
from pipeline.model.engram.dialect import MAINLINE_TABLE, table_layers
from pipeline.model.engram.facts import EngramFacts, number, numbers
from pipeline.model.engram.findings import EngramChecks, row_cause
from pipeline.model.layout import Layout
from pipeline.model.metadata.required import MAINLINE_KEYS

_RAW_PAD = 2
"""``engram_pad_token_id`` of the released model, for fork files that do not say it."""

_FOREIGN_KEYS = {Layout.FORK: "deepseek41.ple.", Layout.MAINLINE: "deepseek41.engram."}
"""Prefix of the other layout's engram keys."""

_F32_NBYTES = 4


class TensorLike(Protocol):
    """A tensor of a GGUF header."""

    @property
    def ne(self) -> tuple[int, ...]:
        """Dimensions, GGUF order."""

    @property
    def nbytes(self) -> int:
        """Stored bytes."""


class HeaderLike(Protocol):
    """The headers of a GGUF model, all shards together."""

    @property
    def key_values(self) -> Mapping[str, KeyValue]:
        """Metadata by key."""

    @property
    def tensors(self) -> Mapping[str, tuple[object, TensorLike]]:
        """Shard and tensor by name."""


def check_layout(
    model: HeaderLike, facts: EngramFacts, layout: Layout, checks: EngramChecks
) -> None:
    """Offsets, pad id, table rows, projections and stray keys, as the layout wants them."""
    _check_offsets(facts, layout, checks)
    if layout is Layout.FORK:
        _check_fork_pad(model.key_values, facts, checks)
        _check_fork_tables(model, facts, checks)
    else:
        _check_mainline_keys(model.key_values, facts, checks)
        _check_mainline_table(model, facts, checks)
    for layer in facts.layers:
        _check_projections(model, layer, layout, facts, checks)
    _check_stray_keys(model.key_values, layout, checks)


def _check_stray_keys(keys: Mapping[str, KeyValue], layout: Layout, checks: EngramChecks) -> None:
    own = MAINLINE_KEYS if layout is Layout.MAINLINE else {}
    stray = sorted(key for key in keys if key.startswith(_FOREIGN_KEYS[layout]) and key not in own)
    checks.equal(
        "engram keys of another layout",
        "none",
        ", ".join(stray) or "none",
        cause="Some readers prefer them and would look up wrong rows.",
    )


def _check_offsets(facts: EngramFacts, layout: Layout, checks: EngramChecks) -> None:
    per_table = _flat(layer_offsets(facts.layer_sizes))
    running = running_offsets(facts.layer_sizes)
    if layout is Layout.FORK:
        cause = (
            "These run on over all tables, as the mainline layout counts; here every table has "
            "its own rows from 0."
        )
        is_other = facts.offsets == _flat(running)
        what, expected = "bucket offsets, per table", per_table
    else:
        first = facts.layers[-1]
        cause = (
            "These are the fork layout's offsets, counted per table. In the one table of this "
            f"layout they must run on: layer {first} starts at {running[-1][0]:,}. "
            "Loaders take them as they are and compute wrong output."
        )
        is_other = facts.offsets == per_table
        what, expected = "bucket offsets, running on", _flat(running)
    checks.same_run(what, expected, facts.offsets, cause=cause if is_other else None)


def _check_fork_pad(keys: Mapping[str, KeyValue], facts: EngramFacts, checks: EngramChecks) -> None:
    said = keys.get("deepseek41.engram.pad_token_id")
    raw = _RAW_PAD if said is None else number(said)
    mapped = facts.token_map[raw] if raw < len(facts.token_map) else "outside the token map"
    checks.equal(
        "pad_id is the compressed id of the pad token",
        mapped,
        number(keys["deepseek41.engram.pad_id"]),
        cause=f"The raw pad token is {raw}; this layout stores what the token map makes of it.",
    )


def _check_fork_tables(model: HeaderLike, facts: EngramFacts, checks: EngramChecks) -> None:
    checks.equal("layers with a table", facts.layers, table_layers(model.tensors))
    sums = [sum(sizes) for sizes in facts.layer_sizes]
    names = [f"blk.{layer}.engram_embd.weight" for layer in facts.layers]
    found = [_n_rows(model, name) for name in names]
    for at, name in enumerate(names):
        checks.equal(f"width of {name}", facts.head_dim, _width(model, name), tensor=name)
        cause = row_cause(found, at, sums, facts.layers)
        checks.equal(f"rows of {name}", sums[at], found[at], tensor=name, cause=cause)


def _check_mainline_table(model: HeaderLike, facts: EngramFacts, checks: EngramChecks) -> None:
    n_rows = _n_rows(model, MAINLINE_TABLE)
    total = sum(facts.sizes)
    cause = row_cause([n_rows], 0, [total], facts.layers)
    what = f"rows of {MAINLINE_TABLE}"
    checks.equal(what, total, n_rows, tensor=MAINLINE_TABLE, cause=cause)
    checks.equal(f"width of {MAINLINE_TABLE}", facts.head_dim, _width(model, MAINLINE_TABLE))


def _check_mainline_keys(
    keys: Mapping[str, KeyValue], facts: EngramFacts, checks: EngramChecks
) -> None:
    raw = number(keys["deepseek41.engram.pad_token_id"])
    checks.equal(
        "raw pad id lies inside the token map",
        f"below {len(facts.token_map):,}",
        f"below {len(facts.token_map):,}" if raw < len(facts.token_map) else f"{raw:,}",
    )
    source = number(keys["deepseek41.attention.indexer.candidate_source_layer"])
    sources = numbers(keys["deepseek41.attention.kv_source_layers"])
    checks.equal(
        "candidate source layer is a kv source layer",
        f"one of {sources}",
        f"one of {sources}" if source in sources else source,
        cause="A negative or wrong layer switches the candidate mask off.",
    )


def _n_rows(model: HeaderLike, name: str) -> int:
    ne = _ne(model, name)
    return ne[1] if ne is not None and len(ne) == 2 else 0


def _width(model: HeaderLike, name: str) -> int:
    return (_ne(model, name) or (0,))[0]


def _check_projections(
    model: HeaderLike, layer: int, layout: Layout, facts: EngramFacts, checks: EngramChecks
) -> None:
    keys = model.key_values
    widths = [
        keys.get(f"deepseek41.{key}") for key in ("embedding_length", "hyper_connection.count")
    ]
    hidden, n_streams = (0 if entry is None else number(entry) for entry in widths)
    wide = (facts.n_columns * facts.head_dim, hidden * (n_streams + 1))
    vectors = (hidden, n_streams)
    shapes = (
        {"engram_wkv": wide, "engram_q": vectors, "engram_k": vectors}
        if layout is Layout.FORK
        else {"engram_kv": wide, "engram_gate": vectors}
    )
    for part, shape in shapes.items():
        name = f"blk.{layer}.{part}.weight"
        checks.equal(f"shape of {name}", shape, _ne(model, name) or "absent", tensor=name)
        # The fork's q and k are widened by the engines that serve published files; the gate is not.
        if part == "engram_gate" and name in model.tensors:
            _check_f32(model.tensors[name][1], name, checks)


def _check_f32(tensor: TensorLike, name: str, checks: EngramChecks) -> None:
    checks.equal(
        f"bytes of {name} (F32)",
        prod(tensor.ne) * _F32_NBYTES,
        tensor.nbytes,
        tensor=name,
        cause="It must be F32: the file loads with another type, but decoding aborts.",
    )


def _ne(model: HeaderLike, name: str) -> tuple[int, ...] | None:
    entry = model.tensors.get(name)
    return None if entry is None else tuple(entry[1].ne)


def _flat(per_layer: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(number for layer in per_layer for number in layer)
