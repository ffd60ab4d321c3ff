"""Engram tables that fit, and every known way in which they do not, with the cause in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.gguf.keys import KeyValue, ValueType, array, i32, text, u32
from pipeline.model.config import EngramConfig, ModelConfig, read_config
from pipeline.model.engram.check import check_checkpoint_engram, check_gguf_engram
from pipeline.model.engram.keys import engram_keys
from pipeline.model.layout import Layout

DATA = Path(__file__).parents[1] / "data"
ROWS_1, ROWS_14 = 384_006_168, 384_016_682
P = "deepseek41."
TABLE_1, TABLE_14 = "blk.1.engram_embd.weight", "blk.14.engram_embd.weight"
JOINED = "per_layer_token_embd.weight"


@cache
def config(name: str = "deepseek-v4.1-flash") -> ModelConfig:
    return read_config(json.loads((DATA / f"{name}.config.json").read_bytes()))


def engram(**changes: Any) -> EngramConfig:
    released = config().engram
    assert released is not None
    return replace(released, **changes)


@cache
def token_map() -> NDArray[np.int32]:
    """As many compressed ids as the released one; the raw pad token 2 becomes 1."""
    mapped = np.minimum(np.arange(129_280), 99_092).astype(np.int32) - 1
    mapped[0] = 0
    return mapped


# --- checkpoint ---------------------------------------------------------------------------------


def tables(
    *,
    rows: tuple[int, int] = (ROWS_1, ROWS_14),
    scales: tuple[int, int] = (ROWS_1, ROWS_14),
    widths: tuple[int, int] = (256, 8),
) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    return {
        layer: ((rows[at], widths[0]), (scales[at], widths[1])) for at, layer in enumerate((1, 14))
    }


def test_released_checkpoint_fits() -> None:
    report = check_checkpoint_engram(config(), tables(), token_map())
    assert (report.subject, report.problems) == ("checkpoint", ())
    assert report.ok
    assert all(row.ok for row in report.rows)
    shown = [row for row in report.rows if row.what == "rows of layers.14.engram.embed.scale"]
    assert [(row.expected, row.found) for row in shown] == [("384,016,682", "384,016,682")]


def test_small_model_fits() -> None:
    small = engram(layers=(1,), n_rows=(156,), n_heads=2, vocab_size=16, head_dim=64)
    report = check_checkpoint_engram(replace(config(), engram=small), {1: ((156, 64), (156, 2))})
    assert report.problems == ()


def test_a_model_without_engram_has_no_tables() -> None:
    v4 = config("deepseek-v4-flash-0731")
    assert check_checkpoint_engram(v4, {}).ok
    assert not check_checkpoint_engram(v4, tables()).ok


@pytest.mark.parametrize(
    ("changed", "tables_", "n_problems", "message"),
    [
        pytest.param(
            {}, tables(rows=(ROWS_14, ROWS_1)), 2, "layers 14 and 1 are swapped", id="swap"
        ),
        pytest.param(
            {"n_rows": (ROWS_14, ROWS_1)}, tables(), 2, "are swapped", id="config swapped"
        ),
        pytest.param(
            {"n_rows": (ROWS_1, ROWS_1)},
            tables(),
            1,
            "the primes were started again for layer 14",
            id="primes restarted in config",
        ),
        pytest.param({"n_rows": (7, ROWS_14)}, tables(), 1, "384,006,161 rows", id="config rows"),
        pytest.param({}, tables(rows=(ROWS_1 + 1, ROWS_14)), 1, "One row more", id="row more"),
        pytest.param({}, tables(scales=(ROWS_1, ROWS_14 - 1)), 1, "One row less", id="scale less"),
        pytest.param({}, tables(rows=(ROWS_1, 1_000)), 1, "384,015,682 rows are missing", id="cut"),
        pytest.param({}, tables(rows=(ROWS_1, ROWS_1 + ROWS_14)), 1, "were joined", id="joined"),
        pytest.param({}, tables(widths=(264, 8)), 2, r"width of .* found \(264,\)", id="wide rows"),
        pytest.param({}, tables(widths=(256, 2)), 2, r"expected \(8,\)", id="scale groups of 128"),
        pytest.param({}, {1: tables()[1]}, 3, "engram layers with a table", id="table missing"),
        pytest.param(
            {}, {**tables(), 7: tables()[1]}, 1, "engram layers with a table", id="table too many"
        ),
        pytest.param({"n_compressed": 129_280}, tables(), 1, "compressed_vocab", id="vocabulary"),
    ],
)
def test_checkpoint_faults(
    changed: dict[str, Any],
    tables_: dict[int, tuple[tuple[int, ...], tuple[int, ...]]],
    n_problems: int,
    message: str,
) -> None:
    report = check_checkpoint_engram(replace(config(), engram=engram(**changed)), tables_)
    assert len(report.problems) == n_problems
    assert sum(not row.ok for row in report.rows) == n_problems
    with pytest.raises(type(report.problems[0]), match=message):
        raise report.problems[0]


def test_primes_restarted_for_every_order() -> None:
    once = sum((16000057, 16000079, 16000081, 16000097, 16000121, 16000129, 16000133, 16000183))
    changed = replace(config(), engram=engram(n_rows=(3 * once, ROWS_14)))
    (problem,) = check_checkpoint_engram(changed, tables()).problems
    assert "every n-gram order" in str(problem)


def test_token_map_of_another_tokenizer() -> None:
    report = check_checkpoint_engram(config(), tables(), token_map()[:-1] // 2)
    assert [row.what for row in report.rows if not row.ok] == [
        "entries of the token map",
        "config.json engram_compressed_vocab_size",
    ]


# --- GGUF ---------------------------------------------------------------------------------------


@dataclass
class Tensor:
    ne: tuple[int, ...]
    nbytes: int


@dataclass
class Header:
    key_values: dict[str, KeyValue]
    tensors: dict[str, tuple[int, Tensor]] = field(default_factory=dict)


def header(layout: Layout) -> Header:
    keys = (
        *engram_keys(config(), token_map(), layout),
        u32(f"{P}embedding_length", 5_120),
        u32(f"{P}hyper_connection.count", 4),
        u32(f"{P}vocab_size", 129_280),
    )
    made = Header({entry.key: entry for entry in keys})
    add(made, "token_embd.weight", (5_120, 129_280))
    if layout is Layout.MAINLINE:
        add(made, JOINED, (256, ROWS_1 + ROWS_14))
    for layer, rows in ((1, ROWS_1), (14, ROWS_14)):
        if layout is Layout.FORK:
            add(made, f"blk.{layer}.engram_embd.weight", (256, rows))
            add(made, f"blk.{layer}.engram_wkv.weight", (6_144, 25_600))
            add(made, f"blk.{layer}.engram_q.weight", (5_120, 4), nbytes=81_920)
            add(made, f"blk.{layer}.engram_k.weight", (5_120, 4), nbytes=81_920)
        else:
            add(made, f"blk.{layer}.engram_kv.weight", (6_144, 25_600))
            add(made, f"blk.{layer}.engram_gate.weight", (5_120, 4), nbytes=81_920)
    return made


def add(made: Header, name: str, ne: tuple[int, ...], nbytes: int = 1) -> None:
    made.tensors[name] = (0, Tensor(ne, nbytes))


def put(entry: KeyValue) -> Callable[[Header], object]:
    return lambda made: made.key_values.update({entry.key: entry})


def drop(key: str) -> Callable[[Header], object]:
    return lambda made: made.key_values.pop(f"{P}{key}")


def retype(key: str, element: ValueType) -> Callable[[Header], object]:
    def change(made: Header) -> None:
        entry = made.key_values[f"{P}{key}"]
        made.key_values[entry.key] = replace(entry, element=element)

    return change


def edit(key: str, values: Callable[[list[int]], list[int]]) -> Callable[[Header], object]:
    def change(made: Header) -> None:
        entry = made.key_values[f"{P}{key}"]
        assert isinstance(entry.value, tuple)
        made.key_values[entry.key] = replace(
            entry, value=tuple(values([int(n) for n in entry.value]))
        )

    return change


def resize(name: str, ne: tuple[int, ...]) -> Callable[[Header], object]:
    return lambda made: add(made, name, ne)


def swap_tables(made: Header) -> None:
    tensors = made.tensors
    tensors[TABLE_1], tensors[TABLE_14] = tensors[TABLE_14], tensors[TABLE_1]


def running(offsets: list[int]) -> list[int]:
    return offsets[:24] + [offset + ROWS_1 for offset in offsets[24:]]


def per_table(offsets: list[int]) -> list[int]:
    return offsets[:24] + [offset - ROWS_1 for offset in offsets[24:]]


@pytest.mark.parametrize("layout", Layout)
def test_own_header_fits(layout: Layout) -> None:
    report = check_gguf_engram(header(layout))
    assert (report.subject, report.problems) == (layout.value, ())
    assert len(report.rows) > 20


def test_fork_file_with_the_nine_keys_alone_fits() -> None:
    made = header(Layout.FORK)
    nine = (
        "layer_ids head_count key_length max_ngram_size pad_id multipliers primes offsets token_map"
    )
    wanted = {f"{P}engram.{key}" for key in nine.split()}
    for key in [key for key in made.key_values if ".engram." in key and key not in wanted]:
        del made.key_values[key]
    assert check_gguf_engram(made).problems == ()


def test_vocabulary_size_comes_from_the_token_list_first() -> None:
    made = header(Layout.FORK)
    put(array("tokenizer.ggml.tokens", ValueType.STRING, ["a"] * 129_281))(made)
    (problem,) = check_gguf_engram(made).problems
    assert "expected 129,281; found 129,280" in str(problem)


FORK_FAULTS = {
    "key missing": (drop("engram.offsets"), "engram.offsets.*found absent"),
    "i64 primes": (retype("engram.primes", ValueType.INT64), "ARRAY of UINT64.*INT64"),
    "u32 multipliers": (retype("engram.multipliers", ValueType.UINT32), "found ARRAY of UINT32"),
    "pad_id i32": (put(i32(f"{P}engram.pad_id", 1)), "expected UINT32; found INT32"),
    "raw pad id": (put(u32(f"{P}engram.pad_id", 2)), "The raw pad token is 2"),
    "tables swapped": (swap_tables, "layers 14 and 1 are swapped"),
    "row less": (resize(TABLE_14, (256, ROWS_14 - 1)), "One row less"),
    "spare rows": (resize(TABLE_1, (256, ROWS_1 + 7)), "7 rows more than the buckets need"),
    "rows of I8": (resize(TABLE_1, (264, ROWS_1)), "width of blk.1.engram_embd.weight"),
    "running offsets": (edit("engram.offsets", running), "as the mainline layout counts"),
    "one offset": (edit("engram.offsets", lambda o: [1, *o[1:]]), "found 1 at position 0"),
    "offsets short": (edit("engram.offsets", lambda o: o[:-1]), "expected 48; found 47"),
    "primes restarted": (
        edit("engram.primes", lambda p: p[:24] * 2),
        "The primes start again at layer 14",
    ),
    "no prime": (
        edit("engram.primes", lambda p: [*p[:-1], p[-1] + 2]),
        "16,000,891 is not a prime",
    ),
    "prime left out": (
        edit("engram.primes", lambda p: [*p[1:], 16_000_919]),
        "expected 16,000,057 at position 0",
    ),
    "multipliers of the raw vocabulary": (
        edit("engram.multipliers", lambda m: [2 * n + 1 for n in m]),
        "the 99,092 compressed ids",
    ),
    "token map short": (edit("engram.token_map", lambda t: t[:-1]), "entries of the token map"),
    "token map with a gap": (
        edit("engram.token_map", lambda t: [*t[:-1], 99_095]),
        "compressed ids without a gap",
    ),
    "layers out of order": (edit("engram.layer_ids", lambda n: n[::-1]), "increasing"),
    "no q": (lambda made: made.tensors.pop("blk.1.engram_q.weight"), "engram_q.*found absent"),
    "wkv shape": (resize("blk.1.engram_wkv.weight", (6_144, 20_480)), "25600.*20480"),
    "table of another layer": (resize("blk.3.engram_embd.weight", (256, 9)), r"found \(1, 3, 14\)"),
    "mainline keys": (put(u32(f"{P}ple.ngram_size", 4)), "engram keys of another layout"),
}
MAINLINE_FAULTS = {
    "offsets per table": (
        edit("ple.head_offsets", per_table),
        "fork layout's offsets.*layer 14 starts at 384,006,168",
    ),
    "one offset": (
        edit("ple.head_offsets", lambda o: [*o[:-1], o[-1] + 1]),
        "bucket offsets, running on.*at position 47",
    ),
    "row less": (resize(JOINED, (256, ROWS_1 + ROWS_14 - 1)), "One row less"),
    "first table only": (resize(JOINED, (256, ROWS_1)), "384,016,682 rows are missing"),
    "width": (resize(JOINED, (128, ROWS_1 + ROWS_14)), "width of per_layer_token_embd"),
    "gate in BF16": (
        lambda made: add(made, "blk.1.engram_gate.weight", (5_120, 4), 40_960),
        "must be F32",
    ),
    "no gate": (
        lambda made: made.tensors.pop("blk.14.engram_gate.weight"),
        "engram_gate.*found absent",
    ),
    "no candidate layer": (
        drop("attention.indexer.candidate_source_layer"),
        "candidate mask silently off",
    ),
    "candidate layer u32": (
        put(u32(f"{P}attention.indexer.candidate_source_layer", 20)),
        "expected INT32; found UINT32",
    ),
    "candidate layer -1": (
        put(i32(f"{P}attention.indexer.candidate_source_layer", -1)),
        "switches the candidate mask off",
    ),
    "pad id i32": (put(i32(f"{P}engram.pad_token_id", 2)), "unsigned number only"),
    "pad id outside": (put(u32(f"{P}engram.pad_token_id", 129_280)), "raw pad id lies inside"),
    "token map long": (edit("engram.token_map", lambda t: [*t, 0]), "found 129,281"),
    "token map u64": (retype("engram.token_map", ValueType.UINT64), "expected ARRAY of INT32"),
    "u32 sizes": (retype("ple.head_vocab_sizes", ValueType.UINT32), "expected ARRAY of UINT64"),
    "primes restarted": (
        edit("ple.head_vocab_sizes", lambda p: p[:24] * 2),
        "The primes start again at layer 14",
    ),
    "fork keys": (put(u32(f"{P}engram.pad_id", 1)), "engram keys of another layout"),
}


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        pytest.param(layout, change, message, id=f"{layout}: {name}")
        for layout, faults in ((Layout.FORK, FORK_FAULTS), (Layout.MAINLINE, MAINLINE_FAULTS))
        for name, (change, message) in faults.items()
    ],
)
def test_gguf_faults(layout: Layout, change: Callable[[Header], object], message: str) -> None:
    made = header(layout)
    change(made)
    report = check_gguf_engram(made)
    with pytest.raises(type(report.problems[0]), match=message):
        raise report.problems[0]


FOREIGN = {
    "no engram": ((), (), "no engram table"),
    "both layouts": ((TABLE_1, JOINED), (), "both layouts"),
    "JigSawPT": ((TABLE_1, "engram_primes.weight"), (), "JigSawPT"),
    "ds4": ((TABLE_1, "blk.1.engram_q_norm.weight"), (), "ds4: rows of 264"),
    "ds4 by key": ((TABLE_1,), ("engram.encoding",), "ds4: rows of 264"),
    "ds4 config": ((TABLE_1,), ("config",), "ds4: config"),
    "mx-llama.cpp": (("blk.1.engram_embed.weight",), (), "mx-llama.cpp"),
    "tarruda": ((TABLE_1, "blk.1.engram_embd_scale.weight"), (), "tarruda"),
    "sidecar": ((TABLE_1,), (), "sidecar"),
    "HelloKS": ((TABLE_1,), ("engram.head_bucket_sizes",), "HelloKS"),
    "kmbandy": ((TABLE_1,), ("engram.vocab_size",), "kmbandy"),
}


@pytest.mark.parametrize(("tensors", "keys", "name"), FOREIGN.values(), ids=FOREIGN)
def test_other_forms_are_refused_by_name(
    tensors: tuple[str, ...], keys: tuple[str, ...], name: str
) -> None:
    made = Header({f"{P}{key}": text(f"{P}{key}", "") for key in keys})
    for tensor in tensors:
        add(made, tensor, (256, 1))
    (problem,) = check_gguf_engram(made).problems
    assert "engram layout" in str(problem)
    assert name in str(problem)
