"""Relayout: the other layout from finished files, same weights, shared expert shards."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from pipeline import files
from pipeline.errors import FormatError, OutputError
from pipeline.gguf.keys import KeyValue, ValueType, array, i32, u32
from pipeline.gguf.model_file import GgufModel, read_model
from pipeline.model.contract.check import check_contract
from pipeline.model.contract.form import form_of
from pipeline.model.engram.arithmetic import prime_start
from pipeline.model.engram.check import check_gguf_engram
from pipeline.model.engram.keys import engram_keys
from pipeline.model.layout import Layout
from pipeline.model.metadata.file_facts import HashFacts, SourceFacts
from pipeline.model.metadata.required import MAINLINE_KEYS, UNION_KEYS
from pipeline.quant.types import TYPES
from pipeline.relayout.keys import layout_keys
from pipeline.relayout.run import relayout
from pipeline.relayout.shards import plan_relayout
from tests.gguf_builder import (
    TOKEN_MAP,
    bf16,
    content_of,
    full_plan,
    plan_contents,
    plan_tensors,
    released_config,
    small_config,
    small_keys,
    small_plan,
    write_hollow,
    write_plan,
    write_set,
)

P = "deepseek41."
TABLES = ("blk.1.engram_embd.weight", "blk.3.engram_embd.weight")


def other(layout: Layout) -> Layout:
    return Layout.FORK if layout is Layout.MAINLINE else Layout.MAINLINE


def floats(content: bytes, type_name: str) -> np.ndarray:
    if type_name == "F32":
        return np.frombuffer(content, "<f4")
    return (np.frombuffer(content, "<u2").astype(np.uint32) << 16).view(np.float32)


def tensor_bytes(model: GgufModel) -> dict[str, bytes]:
    return {
        name: files.read_bytes(model.files[no].path, t.offset, t.nbytes)
        for name, (no, t) in model.tensors.items()
    }


def mainline_contents(fork: dict[str, bytes], factors: str) -> dict[str, bytes]:
    """What the fork's tensors are in the mainline layout, computed here again."""
    made = {name: content for name, content in fork.items() if "engram" not in name}
    made["per_layer_token_embd.weight"] = b"".join(fork[name] for name in TABLES)
    for layer in (1, 3):
        made[f"blk.{layer}.engram_kv.weight"] = fork[f"blk.{layer}.engram_wkv.weight"]
        q, k = (floats(fork[f"blk.{layer}.engram_{f}.weight"], factors) for f in "qk")
        made[f"blk.{layer}.engram_gate.weight"] = (q * k).astype("<f4").tobytes()
    return made


def assert_whole(path: Path) -> GgufModel:
    """The model at ``path``, good for its loaders and with engram tables that fit."""
    model = read_model(path)
    assert check_contract(model, form_of(model)) == []
    assert check_gguf_engram(model).problems == ()
    return model


@pytest.mark.parametrize("factors", ["BF16", "F32"])
@pytest.mark.parametrize("table", ["Q8_0", "Q3_K", "IQ4_KS"])
def test_fork_becomes_the_file_that_is_made_in_the_mainline_layout(tmp_path, factors, table):
    config = small_config(table_width=32 if table == "Q8_0" else 256)
    plan = small_plan(Layout.FORK, config, factors=factors, table=table)
    contents = plan_contents(plan)
    write_plan(plan, tmp_path / "fork", contents)
    wanted = small_plan(Layout.MAINLINE, config, table=table)
    write_plan(wanted, tmp_path / "wanted", mainline_contents(contents, factors))
    relayout(tmp_path / "fork", Layout.MAINLINE, tmp_path / "made")
    names = sorted(path.name for path in (tmp_path / "wanted").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "made").iterdir())
    for name in names:
        assert (tmp_path / "made" / name).read_bytes() == (tmp_path / "wanted" / name).read_bytes()


def test_mainline_becomes_the_file_that_is_made_in_the_fork_layout(tmp_path):
    plan = small_plan(Layout.MAINLINE)
    contents = plan_contents(plan)
    write_plan(plan, tmp_path / "mainline", contents)
    relayout(tmp_path / "mainline", Layout.FORK, tmp_path / "made")
    wanted = small_plan(Layout.FORK, factors="F32")
    split = wanted.tensors[[t.name for t in wanted.tensors].index(TABLES[0])].nbytes
    table = contents.pop("per_layer_token_embd.weight")
    contents |= {TABLES[0]: table[:split], TABLES[1]: table[split:]}
    for layer in (1, 3):
        contents[f"blk.{layer}.engram_wkv.weight"] = contents.pop(f"blk.{layer}.engram_kv.weight")
        gate = contents.pop(f"blk.{layer}.engram_gate.weight")
        contents[f"blk.{layer}.engram_q.weight"] = gate
        contents[f"blk.{layer}.engram_k.weight"] = np.ones(len(gate) // 4, "<f4").tobytes()
    write_plan(wanted, tmp_path / "wanted", contents)
    for path in (tmp_path / "wanted").iterdir():
        assert (tmp_path / "made" / path.name).read_bytes() == path.read_bytes(), path.name


def test_round_trip_from_mainline_gives_back_every_byte(tmp_path):
    first = write_plan(small_plan(Layout.MAINLINE), tmp_path / "a")
    there = relayout(first, Layout.FORK, tmp_path / "b")
    back = relayout(there, Layout.MAINLINE, tmp_path / "c")
    assert_whole(there)
    assert_whole(back)
    for path in (tmp_path / "a").iterdir():
        assert (tmp_path / "c" / path.name).read_bytes() == path.read_bytes(), path.name


def test_round_trip_from_the_fork_keeps_all_but_the_factors(tmp_path):
    first = write_plan(small_plan(Layout.FORK, factors="BF16"), tmp_path / "a")
    there = relayout(first, Layout.MAINLINE, tmp_path / "b")
    back = relayout(there, Layout.FORK, tmp_path / "c")
    before, after = (tensor_bytes(assert_whole(path)) for path in (first, back))
    assert_whole(there)
    factors = {f"blk.{layer}.engram_{f}.weight" for layer in (1, 3) for f in "qk"}
    assert {*before} == {*after}
    assert all(before[name] == after[name] for name in {*before} - factors)
    for layer in (1, 3):
        names = [f"blk.{layer}.engram_{factor}.weight" for factor in "qk"]
        q, k = (floats(before[name], "BF16") for name in names)
        new_q, new_k = (floats(after[name], "F32") for name in names)
        np.testing.assert_array_equal(new_q * new_k, q * k)
        # Exact, not only equal after the same rounding.
        np.testing.assert_array_equal(new_q.astype(np.float64), q.astype(np.float64) * k)
    keys, new_keys = (read_model(path).key_values for path in (first, back))
    padding = "quantmill.header_pad"
    assert {k: e for k, e in keys.items() if k != padding} == {
        k: e for k, e in new_keys.items() if k != padding
    }


@pytest.mark.parametrize("layout", Layout, ids=str)
def test_expert_shards_are_the_same_files(tmp_path, layout):
    first = write_plan(small_plan(layout), tmp_path / "a")
    model = read_model(relayout(first, other(layout), tmp_path / "b"))
    experts = [f for f in model.files if any("_exps" in name for name in f.tensors)]
    assert len(experts) > 1
    for file in model.files:
        is_shared = file.path.samefile(tmp_path / "a" / file.path.name)
        assert is_shared is (file in experts), file.path.name


def test_expert_shards_that_are_linked_already_stay(tmp_path):
    first = write_plan(small_plan(Layout.FORK), tmp_path / "a")
    out = tmp_path / "b"
    out.mkdir()
    shards = plan_relayout(read_model(first), Layout.MAINLINE)
    shared = [shard.shared for shard in shards if shard.shared is not None]
    for path in shared:
        os.link(path, out / path.name)
    relayout(first, Layout.MAINLINE, out)
    assert all((out / path.name).samefile(path) for path in shared)


@pytest.mark.parametrize("table", ["Q3_K"])
def test_full_size_headers_are_those_of_a_plan_in_the_other_layout(tmp_path, table):
    model = read_model(write_hollow(full_plan(Layout.FORK, table=table), tmp_path))
    made = plan_relayout(model, Layout.MAINLINE)
    wanted = full_plan(Layout.MAINLINE, table=table).shards
    assert len(made) == len(wanted) > 4
    for shard, planned in zip(made, wanted, strict=True):
        if planned.kind == "experts":
            assert shard.shared == tmp_path / planned.file_name
        else:
            assert (shard.header, shard.nbytes) == (planned.header, planned.nbytes)
    joined = made[1].pieces[0]
    n_rows = released_config().engram.n_rows
    row_nbytes = TYPES[table].row_nbytes(256)
    assert [part.nbytes for part in joined.content] == [n * row_nbytes for n in n_rows]
    back = plan_relayout(
        read_model(write_hollow(full_plan(Layout.MAINLINE, table=table), tmp_path / "m")),
        Layout.FORK,
    )
    parts = [back[no].pieces[0].content[0] for no in (1, 2)]
    assert parts[1].offset - parts[0].offset == n_rows[0] * row_nbytes == parts[0].nbytes


def test_progress_counts_the_written_bytes_without_padding(tmp_path):
    first = write_plan(small_plan(Layout.FORK), tmp_path / "a")
    told: list[int] = []
    relayout(first, Layout.MAINLINE, tmp_path / "b", progress=told.append)
    planned = plan_relayout(read_model(first), Layout.MAINLINE)
    written = [shard for shard in planned if shard.shared is None]
    wanted = sum(len(s.header) + sum(p.nbytes for p in s.pieces) for s in written)
    assert sum(told) == wanted
    for shard in written:
        assert (tmp_path / "b" / shard.file_name).stat().st_size == shard.nbytes


def foreign_model(path: Path, layout: Layout, division: str, keys=None) -> Path:
    """A model as other converters divide it; every shard says how many tensors there are."""
    plan = small_plan(layout)
    tensors = plan_tensors(plan)
    tables = [t for t in tensors if "engram_embd" in t[0] or "per_layer" in t[0]]
    rest = [t for t in tensors if t not in tables]
    groups = {
        "single": [tensors],
        "tables last": [rest[:40], rest[40:], tables],
        "engram apart": [
            [t for t in rest if "engram" not in t[0]],
            *([t] for t in tables),
            *small_groups(rest, layout),
        ],
        "mixed": [tensors[:30], tensors[30:90], tensors[90:]],
    }[division]
    keys = small_keys(small_config(), layout) if keys is None else keys
    return write_set(path, keys, groups, plan_contents(plan))


def small_groups(tensors, layout: Layout):
    """Small engram tensors: all in one shard, or (mainline, as many files) one shard a layer."""
    small = [t for t in tensors if "engram" in t[0]]
    if layout is Layout.FORK:
        return [small]
    return [[t for t in small if t[0].startswith(f"blk.{layer}.")] for layer in (1, 3)]


@pytest.mark.parametrize("division", ["single", "tables last", "engram apart", "mixed"])
@pytest.mark.parametrize("layout", Layout, ids=str)
def test_foreign_files_are_relaid_there_and_back(tmp_path, layout, division):
    first = foreign_model(tmp_path / "a/model.gguf", layout, division)
    there = relayout(first, other(layout), tmp_path / "b")
    back = relayout(there, layout, tmp_path / "c")
    before, between, after = (assert_whole(path) for path in (first, there, back))
    for model in (between, after):
        assert [f.path.name for f in model.files] == [f.path.name for f in before.files]
        assert all(file.tensors for file in model.files)
    old, middle, new = map(tensor_bytes, (before, between, after))
    assert {*old} == {*new}
    for name, content in old.items():
        if "engram" not in name and "per_layer" not in name:
            assert middle[name] == content
        if "engram_q" not in name and "engram_k." not in name:
            assert new[name] == content, name


def without(keys, names) -> tuple[KeyValue, ...]:
    return tuple(entry for entry in keys if entry.key not in names)


def test_nine_keys_are_enough(tmp_path):
    released = (u32(f"{P}block_count", 40), u32(f"{P}context_length", 1 << 20))
    keys = without(small_keys(small_config(), Layout.FORK), UNION_KEYS)
    path = foreign_model(tmp_path / "a/model.gguf", Layout.FORK, "single", keys)
    with pytest.raises(FormatError, match="how candidate blocks are selected"):
        relayout(path, Layout.MAINLINE, tmp_path / "b")
    smalinin = (
        u32(f"{P}attention.candidate_source_layer_id", 4),
        u32(f"{P}attention.candidate_block_size", 2),
        u32(f"{P}attention.candidate_topk_blocks", 3),
    )
    path = foreign_model(tmp_path / "c/model.gguf", Layout.FORK, "single", (*keys, *smalinin))
    made = read_model(relayout(path, Layout.MAINLINE, tmp_path / "d")).key_values
    native = {entry.key: entry for entry in small_keys(small_config(), Layout.MAINLINE)}
    pad = f"{P}engram.pad_token_id"
    assert all(made[key] == native[key] for key in MAINLINE_KEYS if key != pad)
    assert TOKEN_MAP[made[pad].value] == TOKEN_MAP[2]
    assert not {entry.key for entry in smalinin} & {*made}
    top_k = u32(f"{P}attention.indexer.top_k", 512)
    entries = {entry.key: entry for entry in (*keys, *released, top_k)}
    path = foreign_model(tmp_path / "e/model.gguf", Layout.FORK, "single", (*entries.values(),))
    made = read_model(relayout(path, Layout.MAINLINE, tmp_path / "f")).key_values
    assert made[f"{P}attention.indexer.candidate_source_layer"].value == 20
    assert made[f"{P}attention.kv_source_layers"].value == (2, 4)


def test_layout_keys_are_those_of_the_converter():
    config = released_config()
    engram, candidate = config.engram, config.candidate
    token_map = np.arange(config.vocab_size, dtype=np.int32) % engram.n_compressed
    fork = {e.key: e for e in engram_keys(config, token_map, Layout.FORK)}

    def per_layer(key: str, n: int) -> tuple[tuple[int, ...], ...]:
        values = fork[P + key].value
        return tuple(values[at : at + n] for at in range(0, len(values), n))

    facts = HashFacts(
        layers=engram.layers,
        max_ngram=4,
        n_heads=8,
        width=256,
        multipliers=per_layer("engram.multipliers", 4),
        sizes=per_layer("engram.primes", 24),
        token_map=tuple(token_map.tolist()),
        pad_token=2,
    )
    sources = SourceFacts(config.kv_sources, config.index_sources, candidate)
    for layout in Layout:
        assert layout_keys(facts, sources, layout) == engram_keys(config, token_map, layout)
    assert facts.n_rows == engram.n_rows


@pytest.mark.parametrize(
    ("sizes", "start"),
    [
        ([16000057, 16000079], 16_000_000),
        ([1009, 1013, 1019], 1000),
        ([31, 37], 30),
        ([2, 3, 5], 2),
        ([3, 5], 3),
        ([31, 41], None),
        ([32, 37], None),
    ],
    ids=str,
)
def test_prime_start(sizes, start):
    assert prime_start(sizes) == start


def test_same_layout_is_nothing_to_do(tmp_path):
    first = write_plan(small_plan(Layout.FORK), tmp_path / "a")
    with pytest.raises(OutputError, match="already has the fork layout"):
        relayout(first, Layout.FORK, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {p.name: (p.stat().st_ino, p.read_bytes()) for p in sorted(folder.iterdir())}


IN_THE_WAY = {
    "same folder": "the output folder is the model's own",
    "linked folder": "the output folder is the model's own",
    "symlink": "a link to the model itself",
    "hard link": "a link to the model itself",
    "foreign": "the file is there already",
}


@pytest.mark.parametrize(("how", "message"), IN_THE_WAY.items(), ids=IN_THE_WAY)
def test_input_and_others_files_are_never_overwritten(tmp_path, how, message):
    first = write_plan(small_plan(Layout.FORK), tmp_path / "a")
    out = tmp_path / "b"
    if how == "same folder":
        out = tmp_path / "a" / ".." / "a"
    elif how == "linked folder":
        out.symlink_to(tmp_path / "a")
    else:
        out.mkdir()
        target = out / first.name
        if how == "symlink":
            target.symlink_to(first)
        elif how == "hard link":
            os.link(first, target)
        else:
            target.write_bytes(b"somebody's")
    before = snapshot(tmp_path / "a"), snapshot(out)
    with pytest.raises(OutputError, match=message):
        relayout(first, Layout.MAINLINE, out)
    assert (snapshot(tmp_path / "a"), snapshot(out)) == before


def test_disk_that_is_too_small_is_refused_at_the_start(tmp_path, monkeypatch):
    first = write_plan(small_plan(Layout.FORK), tmp_path / "a")
    monkeypatch.setattr(files, "free_nbytes", lambda _: 100)
    with pytest.raises(OutputError, match="disk is too small"):
        relayout(first, Layout.MAINLINE, tmp_path / "b")
    assert list((tmp_path / "b").iterdir()) == []


def test_failed_write_leaves_no_final_name_and_the_next_run_succeeds(tmp_path, monkeypatch):
    first = write_plan(small_plan(Layout.FORK), tmp_path / "a")
    relayout(first, Layout.MAINLINE, tmp_path / "whole")
    failures = 0
    for n_calls in range(1, 200):
        out = tmp_path / f"b{n_calls}"
        calls = iter(range(n_calls))
        with monkeypatch.context() as patch:
            for name in ("_pwrite", "_fdatasync", "_truncate"):
                patch.setattr(files, name, failing(getattr(files, name), calls))
            try:
                relayout(first, Layout.MAINLINE, out)
            except OutputError:
                failures += 1
            else:
                break
        assert list(out.glob("*.gguf")) == []
        made = relayout(first, Layout.MAINLINE, out)
        assert sorted(p.name for p in out.iterdir()) == sorted(
            p.name for p in first.parent.iterdir()
        )
        for path in (tmp_path / "whole").iterdir():
            assert (made.parent / path.name).read_bytes() == path.read_bytes()
        shutil.rmtree(out)
    assert failures > 5


def failing(call, calls):
    def wrapped(*args):
        if next(calls, None) is None:
            raise OSError(28, "No space left on device")
        return call(*args)

    return wrapped


def test_first_shard_gets_its_name_last(tmp_path, monkeypatch):
    first = write_plan(small_plan(Layout.FORK), tmp_path / "a")
    named: list[str] = []
    replace = files._replace
    monkeypatch.setattr(
        files, "_replace", lambda part, final: (replace(part, final), named.append(final.name))[0]
    )
    relayout(first, Layout.MAINLINE, tmp_path / "b")
    assert len(named) == len(read_model(first).files)
    assert named[-1] == first.name


def fork_with(tmp_path: Path, *, entries=(), tensors=None, contents=None) -> Path:
    plan = small_plan(Layout.FORK)
    keys = {entry.key: entry for entry in small_keys(small_config(), Layout.FORK)}
    keys |= {entry.key: entry for entry in entries}
    listed = [(tensors or {}).get(t[0], t) for t in plan_tensors(plan)]
    made = plan_contents(plan) | (contents or {})
    listed = [t for t in listed if t is not None]
    return write_set(tmp_path / "a/model.gguf", (*keys.values(),), [listed], made)


def test_tables_of_different_types_are_refused(tmp_path):
    rows = small_config().engram.n_rows[1]
    content = content_of("other", "BF16", rows * 64)
    path = fork_with(
        tmp_path,
        tensors={TABLES[1]: (TABLES[1], (32, rows), "BF16")},
        contents={TABLES[1]: content},
    )
    with pytest.raises(FormatError, match="different types and cannot become one table"):
        relayout(path, Layout.MAINLINE, tmp_path / "b")


def test_spare_rows_are_left_out(tmp_path):
    plan = small_plan(Layout.FORK)
    rows = small_config().engram.n_rows
    content = content_of("spare", "Q8_0", (rows[0] + 7) * 34)
    path = fork_with(
        tmp_path,
        tensors={TABLES[0]: (TABLES[0], (32, rows[0] + 7), "Q8_0")},
        contents={TABLES[0]: content},
    )
    made = assert_whole(relayout(path, Layout.MAINLINE, tmp_path / "b"))
    joined = tensor_bytes(made)["per_layer_token_embd.weight"]
    assert joined == content[: rows[0] * 34] + plan_contents(plan)[TABLES[1]]


def test_factors_of_any_type_are_multiplied_as_f32(tmp_path):
    q = np.linspace(-1, 1, 256, dtype=np.float32)
    blocks = np.zeros((8, 34), np.uint8)
    blocks[:, :2] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    blocks[:, 2:] = np.arange(-128, 128, dtype=np.int8).reshape(8, 32).view(np.uint8)
    names = ["blk.1.engram_q.weight", "blk.1.engram_k.weight"]
    path = fork_with(
        tmp_path,
        tensors={names[0]: (names[0], (64, 4), "BF16"), names[1]: (names[1], (64, 4), "Q8_0")},
        contents={names[0]: bf16(q), names[1]: blocks.tobytes()},
    )
    made = assert_whole(relayout(path, Layout.MAINLINE, tmp_path / "b"))
    gate = np.frombuffer(tensor_bytes(made)["blk.1.engram_gate.weight"], "<f4")
    wanted = floats(bf16(q), "BF16") * (np.arange(-128, 128, dtype=np.float32) * np.float32(0.5))
    np.testing.assert_array_equal(gate, wanted)
    assert made.tensors["blk.1.engram_gate.weight"][1].type is TYPES["F32"]


FAULTS = {
    "offsets of mainline": (
        {"entries": [array(f"{P}engram.offsets", ValueType.UINT64, range(8))]},
        "do not count the rows as the fork layout does",
    ),
    "few multipliers": (
        {"entries": [array(f"{P}engram.multipliers", ValueType.UINT64, range(5))]},
        "multipliers has another length",
    ),
    "pad outside": (
        {"entries": [u32(f"{P}engram.pad_token_id", 48)]},
        "pad_token_id lies outside",
    ),
    "no table": (
        {"entries": [array(f"{P}engram.layer_ids", ValueType.INT32, [1, 2])]},
        "lacks a tensor; file .*; tensor blk.2.engram_embd.weight",
    ),
    "no projection": (
        {"tensors": {"blk.3.engram_wkv.weight": None}},
        "lacks a tensor; file .*; tensor blk.3.engram_wkv.weight",
    ),
    "width": (
        {"entries": [u32(f"{P}engram.key_length", 16)]},
        "does not fit its buckets; tensor blk.1.engram_embd.weight",
    ),
}


@pytest.mark.parametrize(("changes", "message"), FAULTS.values(), ids=FAULTS)
def test_contradicting_input_is_refused(tmp_path, changes, message):
    path = fork_with(tmp_path, **changes)
    with pytest.raises(FormatError, match=message):
        relayout(path, Layout.MAINLINE, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_candidate_mask_that_is_off_is_not_carried_over(tmp_path):
    keys = {entry.key: entry for entry in small_keys(small_config(), Layout.MAINLINE)}
    off = i32(f"{P}attention.indexer.candidate_source_layer", -1)
    keys[off.key] = off
    path = foreign_model(tmp_path / "a/model.gguf", Layout.MAINLINE, "single", (*keys.values(),))
    with pytest.raises(FormatError, match="how candidate blocks are selected"):
        relayout(path, Layout.FORK, tmp_path / "b")
