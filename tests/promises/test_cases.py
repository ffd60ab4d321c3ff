"""Kinds of faults that public bug reports of such tools tell of, each by its smallest input.

Here those about sources, FD-1 to FD-7; test_cases_of_files has those about types and files,
test_cases_at_work those about whole runs. FD-8 (pruning) and FD-14 (importance matrices) are about
what this version does not do; that a type needs a matrix is told by P10.
"""

import json
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from pipeline.errors import SourceError
from pipeline.model.expected.tensors import expected_tensors
from pipeline.model.roles import Role
from pipeline.quant.ggml import GgmlQuantizer
from pipeline.quant.types import TYPES
from pipeline.source.agreement import check_agreement
from pipeline.source.checkpoint import INDEX_NAME, open_checkpoint
from pipeline.source.reader import SourceReader
from pipeline.source.spec import Codec, MatrixRef, TensorSpec
from tests.pipeline.filling import job_of
from tests.pipeline.released_plans import released_config
from tests.pipeline.tiny_shards import write_checkpoint
from tests.promises.whole_job import linked_copy, run_job

RNG = np.random.default_rng(1)


def fp8_codes(n_rows, n_cols):
    codes = RNG.integers(0, 256, (n_rows, n_cols), dtype=np.uint8)
    return np.where(codes & 0x7F == 0x7F, 0x40, codes)


def fp8_values(codes, scales, block):
    """By torch's own float8 types."""
    values = torch.from_numpy(codes.astype(np.uint8)).view(torch.float8_e4m3fn).float().numpy()
    powers = 2.0 ** (scales.astype(np.float64) - 127)
    powers = powers.repeat(block[0], 0).repeat(block[1], 1)[: codes.shape[0], : codes.shape[1]]
    return values * powers


def decoded(folder, matrix):
    with SourceReader(open_checkpoint(folder)) as source:
        out = np.empty((matrix.n_rows, matrix.n_cols), np.float32)
        source.decode_rows(matrix, 0, out)
    return out


def one_shard(folder, tensors):
    return write_checkpoint(folder, {"model.safetensors": tensors})


def test_fd_01_the_block_size_comes_from_the_config(tmp_path):
    codes, scales = fp8_codes(64, 96), np.arange(120, 126).reshape(2, 3)
    one_shard(tmp_path, {"a.weight": ("F8_E4M3", codes), "a.scale": ("F8_E8M0", scales)})
    matrix = MatrixRef(Codec.FP8, "a.weight", "a.scale", 64, 96, (32, 32))
    wanted = fp8_values(codes, scales, (32, 32))
    assert np.array_equal(decoded(tmp_path, matrix), wanted.astype(np.float32))
    with pytest.raises(SourceError, match=r"a\.scale"):
        decoded(tmp_path, replace(matrix, block=(128, 128)))


def test_fd_02_engram_tables_have_another_geometry(tmp_path):
    table, table_scales = fp8_codes(68, 64), RNG.integers(100, 140, (68, 2))
    dense, dense_scales = fp8_codes(64, 64), RNG.integers(100, 140, (2, 2))
    tensors = {
        "t.weight": ("F8_E4M3", table),
        "t.scale": ("F8_E8M0", table_scales),
        "d.weight": ("F8_E4M3", dense),
        "d.scale": ("F8_E8M0", dense_scales),
    }
    one_shard(tmp_path, tensors)
    matrix = MatrixRef(Codec.FP8, "t.weight", "t.scale", 68, 64, (1, 32))
    wanted = fp8_values(table, table_scales, (1, 32)).astype(np.float32)
    assert np.array_equal(decoded(tmp_path, matrix), wanted)
    matrix = MatrixRef(Codec.FP8, "d.weight", "d.scale", 64, 64, (32, 32))
    wanted = fp8_values(dense, dense_scales, (32, 32)).astype(np.float32)
    assert np.array_equal(decoded(tmp_path, matrix), wanted)
    for wrong in (replace(matrix, block=(1, 32)), replace(matrix, scale="t.scale")):
        with pytest.raises(SourceError, match="scale"):
            decoded(tmp_path, wrong)


def test_fd_03_weights_without_scales_stop_the_run(tmp_path):
    weight = {"a.weight": ("F8_E4M3", fp8_codes(32, 32))}
    scale = {"a.scale": ("F8_E8M0", np.full((1, 1), 115))}
    other = {"a.weight_scale_inv": ("F32", np.ones((1, 1)))}
    expected = [
        TensorSpec("a.weight", "F8_E4M3", (32, 32)),
        TensorSpec("a.scale", "F8_E8M0", (1, 1)),
    ]
    good = open_checkpoint(one_shard(tmp_path / "good", weight | scale))
    assert check_agreement(good, expected) == []
    matrix = MatrixRef(Codec.FP8, "a.weight", "a.scale", 32, 32, (32, 32))
    assert np.abs(decoded(tmp_path / "good", matrix)).max() <= 448 * 2.0**-12
    for name, tensors in {"none": weight, "another name": weight | other}.items():
        bare = open_checkpoint(one_shard(tmp_path / name, tensors))
        messages = "\n".join(map(str, check_agreement(bare, expected)))
        assert "an FP8 or FP4 weight has no scale" in messages
        assert "a.weight" in messages


def test_fd_04_fp4_becomes_mxfp4_without_loss(tmp_path):
    """One row of 64 codes in order, two scales; then MXFP4 values quantized to MXFP4 again."""
    nibbles = np.arange(64) % 16
    codes = (nibbles[0::2] | nibbles[1::2] << 4).reshape(1, 32)
    scales = np.array([[120, 130]])
    one_shard(tmp_path, {"e.weight": ("I8", codes), "e.scale": ("F8_E8M0", scales)})
    matrix = MatrixRef(Codec.FP4, "e.weight", "e.scale", 1, 64, (1, 32))
    packed = np.empty((1, 34), np.uint8)
    with SourceReader(open_checkpoint(tmp_path)) as source:
        source.repack_rows(matrix, 0, packed)
    blocks = packed.reshape(2, 17)
    assert blocks[:, 0].tolist() == [120, 130]
    for block, row in zip(blocks, nibbles.reshape(2, 32), strict=True):
        assert np.array_equal(block[1:], row[:16] | row[16:] << 4)
    values = decoded(tmp_path, matrix)
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    signed = np.concatenate([magnitudes, -magnitudes])
    assert np.array_equal(values[0], signed[nibbles] * (2.0 ** (scales[0] - 127)).repeat(32))
    kind = gguf.GGMLQuantizationType.MXFP4
    assert np.array_equal(dequantize(packed, kind) + 0.0, values + 0.0)
    again = np.empty_like(packed)
    quantizer = GgmlQuantizer()
    quantizer.prepare([TYPES["MXFP4"]])
    quantizer.quantize(TYPES["MXFP4"], values, again, None)
    assert np.array_equal(dequantize(again, kind), dequantize(packed, kind))


def reindexed(copy, change):
    index = json.loads((copy / INDEX_NAME).read_text())
    change(index["weight_map"])
    (copy / INDEX_NAME).write_text(json.dumps(index))


SECOND, THIRD = "model-00002-of-00014.safetensors", "model-00003-of-00014.safetensors"
DISAGREEMENTS = {
    "a shard is gone": (lambda copy: (copy / SECOND).unlink(), "a shard is missing", SECOND),
    "a phantom name": (
        lambda copy: reindexed(copy, lambda m: m.update({"layers.0.ghost": SECOND})),
        "the index lists a tensor that no shard holds",
        "layers.0.ghost",
    ),
    "a tensor elsewhere": (
        lambda copy: reindexed(copy, lambda m: m.update({"embed.weight": THIRD})),
        "a tensor is in another shard than the index says",
        "embed.weight",
    ),
    "a tensor not listed": (
        lambda copy: reindexed(copy, lambda m: m.pop("embed.weight")),
        "a shard holds a tensor that the index does not list",
        "embed.weight",
    ),
}


@pytest.mark.parametrize(("change", "what", "name"), DISAGREEMENTS.values(), ids=DISAGREEMENTS)
def test_fd_05_index_and_shards_agree(small_miniature, tmp_path, change, what, name):
    copy = linked_copy(small_miniature, tmp_path / "copy", but=[INDEX_NAME])
    change(copy)
    outcome = run_job(copy, tmp_path / "out")
    assert what in outcome.text
    assert name in outcome.text
    assert not (tmp_path / "out").exists()


POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 1234567\n"
)
DAMAGES = {
    "cut by ten bytes": (lambda content: content[:-10], "is cut: it ends before its last tensor"),
    "a git-lfs pointer": (lambda content: POINTER, "git-lfs pointer"),
    "empty": (lambda content: b"", "the file is empty"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_fd_06_a_damaged_shard_gets_a_clear_message(small_miniature, tmp_path, damage, message):
    copy = linked_copy(small_miniature, tmp_path / "copy", but=[SECOND])
    (copy / SECOND).write_bytes(damage((copy / SECOND).read_bytes()))
    outcome = run_job(copy, tmp_path / "out")
    assert message in outcome.text
    assert str(copy / SECOND) in outcome.text
    assert all(problem.next_step for problem in outcome.problems)


def without_count(text):
    del text["num_nextn_predict_layers"]


def one_stage_less(text):
    text["num_nextn_predict_layers"] -= 1


DRAFT_FAULTS = {
    "no count in the config": (without_count, (), "num_nextn_predict_layers"),
    "a count but no tensors": (lambda text: None, (10, 11, 12), "mtp.0"),
    "two stages of three": (lambda text: None, (12,), "mtp.2"),
    "three stages but two counted": (one_stage_less, (), "mtp.2|compress_ratios"),
}


@pytest.mark.parametrize(("change", "gone", "message"), DRAFT_FAULTS.values(), ids=DRAFT_FAULTS)
def test_fd_07_the_draft_module_is_counted(small_miniature, tmp_path, change, gone, message):
    copy = linked_copy(small_miniature, tmp_path / "copy", but=["config.json", INDEX_NAME])
    config = json.loads((copy / "config.json").read_text())
    change(config["text_config"])
    (copy / "config.json").write_text(json.dumps(config))
    for number in gone:
        name = f"model-{number:05}-of-00014.safetensors"
        (copy / name).unlink()
        index = json.loads((copy / INDEX_NAME).read_text())
        kept = {tensor: file for tensor, file in index["weight_map"].items() if file != name}
        (copy / INDEX_NAME).write_text(json.dumps(index | {"weight_map": kept}))
    outcome = run_job(copy, tmp_path / "out")
    assert not outcome.ok
    assert any(word in outcome.text for word in message.split("|")), outcome.text
    assert not (tmp_path / "out").exists()


def test_fd_07_the_draft_has_experts_of_its_own(small_miniature):
    specs = [s for s in expected_tensors(released_config()) if s.name.startswith("mtp.")]
    assert {s.name.split(".")[1] for s in specs} == {"0", "1", "2"}
    routed = {s.name.split(".experts.")[1].split(".")[0] for s in specs if ".experts." in s.name}
    assert routed == set(map(str, range(128)))
    assert "mtp.0.ffn.gate.bias_vl" in {s.name for s in specs}
    job = job_of(small_miniature, "out")
    stored = {n for n in open_checkpoint(small_miniature).weight_map if n.startswith("mtp.")}
    left = stored - {name for tensor in job.plans[1].tensors for name in tensor.target.source_names}
    assert left == {f"mtp.{stage}.ffn.gate.bias_vl" for stage in range(3)}
    (counted,) = [part for part in job.left_out() if part.role is Role.DRAFT]
    assert counted.n_tensors == len(left)
