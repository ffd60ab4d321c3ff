"""What becomes of the files of a checkpoint that loses experts."""

from __future__ import annotations

import ctypes
import json
from dataclasses import replace

import pytest
from safetensors import TensorSpec as LibrarySpec
from safetensors import serialize

from pipeline.errors import PlanError
from pipeline.miniature.hollow import write_headers_only
from pipeline.miniature.released import config_bytes as released_bytes
from pipeline.miniature.released import config_of
from pipeline.model.config import read_config
from pipeline.prune.config_json import config_bytes, cut_config, index_bytes
from pipeline.prune.header import header_bytes, stored_order
from pipeline.prune.plan import plan_pruned
from pipeline.report.pruned_report import CutDisk, cut_disk_table, pruned_table
from pipeline.source.checkpoint import open_checkpoint
from pipeline.source.spec import DTYPE_NBYTES, TensorSpec
from tests.pipeline.prune.pruning import keep_of, planned

LAYERS = [f"model-{n:05}-of-00014.safetensors" for n in range(3, 9)]
"""The files of the small miniature that hold layers, without their engram."""


@pytest.mark.slow
def test_the_real_model_becomes_as_large_as_the_published_one(tmp_path):
    write_headers_only(tmp_path, like="v4.1-flash", tokenizer=None)
    keep = keep_of(256, n_experts=384, n_layers=40, top_k=6)
    source, plan = planned(tmp_path, keep)
    rows = {row.cells[0]: row.cells[2:4] for row in pruned_table(source, plan).rows}
    assert rows["total"] == (510_286_023_000, 413_974_276_440)
    assert rows["routed experts"] == (288_777_830_400, 192_518_553_600)
    assert plan.tensor_nbytes == 413_974_276_440
    written, shared, *_ = cut_disk_table(plan, CutDisk(0, 0)).rows
    assert (written.cells[1], shared.cells[1]) == (40, 8)


def test_only_files_with_experts_of_the_trunk_change(small_miniature):
    _, plan = planned(small_miniature, keep_of(3))
    assert [file.name for file in plan.files if file.is_changed] == LAYERS
    assert len(plan.files) == 14


def test_where_no_expert_goes_no_file_changes(small_miniature):
    source, plan = planned(small_miniature, keep_of(4))
    assert [file.name for file in plan.files if file.is_changed] == []
    assert [file.nbytes for file in plan.files] == [f.nbytes for f in source.files.values()]


def test_an_expert_lies_in_two_pieces_of_one_file(small_miniature):
    """What engines that read experts from a drive insist on."""
    _, plan = planned(small_miniature, keep_of(3))
    for layer, name in enumerate(LAYERS):
        specs = [t.spec for file in plan.files if file.name == name for t in file.tensors]
        names = [spec.name for spec in specs]
        for expert in range(3):
            stem = f"layers.{layer}.ffn.experts.{expert}."
            for half in ("weight", "scale"):
                first = names.index(f"{stem}w1.{half}")
                assert names[first : first + 3] == [f"{stem}{p}.{half}" for p in ("w1", "w2", "w3")]


def library_file(specs, metadata):
    """The file that the safetensors writer makes of tensors full of zeros."""
    zeros = ctypes.create_string_buffer(max(spec.nbytes for spec in specs))
    tensors = {
        spec.name: LibrarySpec(
            dtype=_LIBRARY_DTYPES[spec.dtype],
            shape=list(spec.shape),
            data_ptr=ctypes.addressof(zeros),
            data_len=spec.nbytes,
        )
        for spec in specs
    }
    return bytes(serialize(tensors, metadata=metadata))


_LIBRARY_DTYPES = {
    "I64": "int64",
    "F64": "float64",
    "F32": "float32",
    "I32": "int32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3": "float8_e4m3fn",
    "I8": "int8",
    "U8": "uint8",
}


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}], ids=["no metadata", "metadata"])
def test_headers_are_those_of_the_safetensors_writer(small_miniature, metadata):
    _, plan = planned(small_miniature, keep_of(3))
    every_dtype = [TensorSpec(f"t{n}", dtype, (2, 3)) for n, dtype in enumerate(DTYPE_NBYTES)]
    groups = [[t.spec for t in file.tensors] for file in plan.files if file.is_changed]
    for specs in (every_dtype, groups[0], groups[3]):
        ordered = sorted(specs, key=stored_order)
        ours = header_bytes(ordered, metadata)
        theirs = library_file(specs, metadata)
        assert theirs[: len(ours)] == ours
        assert len(theirs) == len(ours) + sum(spec.nbytes for spec in specs)


def test_a_file_keeps_its_own_words(small_miniature, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in small_miniature.iterdir():
        (copy / path.name).hardlink_to(path)
    name = LAYERS[2]
    content = (copy / name).read_bytes()
    length = int.from_bytes(content[:8], "little")
    entries = {"__metadata__": {"format": "pt"}} | json.loads(content[8 : 8 + length])
    text = json.dumps(entries).encode()
    (copy / name).unlink()
    (copy / name).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    _, plan = planned(copy, keep_of(3))
    headers = {file.name: file.header for file in plan.files}
    assert b'{"__metadata__":{"format":"pt"},' in headers[name]
    assert b"__metadata__" not in headers[LAYERS[0]]


def test_all_parts_of_an_expert_go_where_its_first_is(small_miniature):
    """A checkpoint that was divided otherwise than the release."""
    source = open_checkpoint(small_miniature)
    first, other = LAYERS[0], LAYERS[1]
    moved = {
        name: tensor
        for name, tensor in source.files[first].tensors.items()
        if name.startswith("layers.0.ffn.experts.") and not name.endswith("w1.weight")
    }
    staying = {n: t for n, t in source.files[first].tensors.items() if n not in moved}
    files = dict(source.files)
    files[first] = replace(files[first], tensors=staying)
    files[other] = replace(files[other], tensors={**files[other].tensors, **moved})
    divided = replace(
        source, files=files, weight_map={**source.weight_map, **dict.fromkeys(moved, other)}
    )
    plan = plan_pruned(divided, read_config(source.config), keep_of(3))
    homes = {spec.name: file for file, spec in plan.tensors}
    assert {homes[n] for n in homes if n.startswith("layers.0.ffn.experts.")} == {first}
    made = next(file for file in plan.files if file.name == first)
    assert made.source_names == (first, other)


def test_what_is_left_of_the_released_config():
    released, keep = config_of("v4.1-flash"), keep_of(256, n_experts=384, n_layers=40, top_k=6)
    made = config_bytes(cut_config(released, read_config(released), keep))
    before, after = released_bytes("v4.1-flash").splitlines(), made.splitlines()
    changed = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert changed == [(b'    "n_routed_experts": 384,', b'    "n_routed_experts": 256,')]
    assert made.endswith(b"\n")


def test_a_copy_at_the_top_of_the_config_changes_too():
    released, keep = config_of("v4.1-flash"), keep_of(256, n_experts=384, n_layers=40, top_k=6)
    entries = released | {"n_routed_experts": 384}
    made = cut_config(entries, read_config(entries), keep)
    assert made["n_routed_experts"] == 256
    assert entries["n_routed_experts"] == 384
    assert config_of("v4.1-flash") == released


def test_a_draft_counted_with_the_trunk_is_not_cut():
    v4 = config_of("v4-flash-0731") | {"num_hash_layers": 0}
    keep = keep_of(128, n_experts=256, n_layers=43, top_k=6)
    with pytest.raises(PlanError, match="counts more than the trunk's experts"):
        cut_config(v4, read_config(v4), keep)


def test_a_model_with_hash_routed_layers_is_not_cut(small_v4_miniature):
    with pytest.raises(PlanError, match="look them up by token id"):
        planned(small_v4_miniature, keep_of(3, n_layers=5))


def test_a_list_of_another_model_is_refused(small_miniature):
    with pytest.raises(PlanError, match="beyond the model"):
        planned(small_miniature, keep_of(3, n_layers=7))


def test_the_index_counts_what_is_left(small_miniature):
    _, plan = planned(small_miniature, keep_of(3))
    index = json.loads(index_bytes(plan))
    assert index["metadata"]["total_size"] == plan.tensor_nbytes
    assert len(index["weight_map"]) == 426 + 36
    assert index["weight_map"]["layers.2.ffn.experts.2.w3.scale"] == LAYERS[2]
    assert "layers.2.ffn.experts.3.w3.scale" not in index["weight_map"]
