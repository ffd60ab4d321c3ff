import dataclasses
import functools
import json
import re
import time
from pathlib import Path

import numpy as np
import pytest

from pipeline.source.agreement import check_agreement
from pipeline.source.checkpoint import Checkpoint, open_checkpoint
from pipeline.source.header import SourceFile, SourceTensor
from pipeline.source.scale_block import implied_block, scale_shape
from pipeline.source.spec import TensorSpec
from tests.pipeline.tiny_shards import write_checkpoint, write_index, write_shard

ONE, TWO, THREE = (f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3))


def good_shards():
    return {
        ONE: {"embed.weight": ("BF16", np.zeros((8, 4)))},
        TWO: {
            "layers.0.attn.wq.weight": ("F8_E4M3", np.zeros((256, 256))),
            "layers.0.attn.wq.scale": ("F8_E8M0", np.zeros((8, 8))),
            "layers.0.experts.0.w1.weight": ("I8", np.zeros((64, 32))),
            "layers.0.experts.0.w1.scale": ("F8_E8M0", np.zeros((64, 2))),
        },
        THREE: {"norm.weight": ("BF16", np.zeros(4)), "hc": ("F32", np.zeros((3, 2)))},
    }


EXPECTED = [
    TensorSpec(name, dtype, values.shape)
    for tensors in good_shards().values()
    for name, (dtype, values) in tensors.items()
]
GOOD_MAP = {name: file for file, tensors in good_shards().items() for name in tensors}


@pytest.fixture
def folder(tmp_path):
    return write_checkpoint(tmp_path, good_shards())


def reindex(folder: Path, weight_map, *, more_nbytes=0):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    write_index(folder, weight_map, index["metadata"]["total_size"] + more_nbytes)


def phantom(folder):
    reindex(folder, GOOD_MAP | {"layers.0.ghost": TWO})


def phantom_for_a_real_one(folder):
    write_shard(folder / THREE, {"hc": ("F32", np.zeros((3, 2)))})


def moved(folder):
    shards = good_shards()
    shards[ONE]["hc"] = shards[THREE].pop("hc")
    for name in (ONE, THREE):
        write_shard(folder / name, shards[name])


def in_two_shards(folder):
    write_shard(folder / ONE, good_shards()[ONE] | {"hc": ("F32", np.zeros((3, 2)))})


def not_in_the_index(folder):
    reindex(folder, {name: file for name, file in GOOD_MAP.items() if name != "hc"})


def whole_shard_not_in_the_index(folder):
    write_shard(folder / "other.safetensors", {"hc": ("F32", np.zeros((3, 2)))})


def total(folder):
    reindex(folder, GOOD_MAP, more_nbytes=1)


def rewrite(file, **changes):
    """Change tensors of one shard (None: leave out) and let the index follow."""

    def fault(folder):
        shards = good_shards()
        for name, tensor in changes.pop("tensors").items():
            if tensor is None:
                del shards[file][name]
            else:
                shards[file][name] = tensor
        write_checkpoint(folder, shards)

    return fault


WQ, W1 = "layers.0.attn.wq", "layers.0.experts.0.w1"
FAULTS = {
    "phantom name": (phantom, "index lists a tensor that no shard holds.*layers.0.ghost"),
    "phantom for a real one": (phantom_for_a_real_one, "no shard holds.*norm.weight"),
    "moved": (moved, f"another shard than the index.*hc.*expected {THREE}.*found {ONE}"),
    "in two shards": (in_two_shards, f"two shards hold the same tensor.*{ONE}.*hc.*in {THREE}"),
    "not in the index": (not_in_the_index, f"index does not list.*{THREE}.*hc"),
    "whole shard not in the index": (
        whole_shard_not_in_the_index,
        "a shard lies in the folder that the index does not name.*other.safetensors",
    ),
    "index total": (total, r"another total.*total_size 67,873.*found 67,872"),
    "wrong dtype": (
        rewrite(ONE, tensors={"embed.weight": ("F32", np.zeros((8, 4)))}),
        "another dtype.*embed.weight.*expected BF16.*found F32",
    ),
    "wrong shape": (
        rewrite(ONE, tensors={"embed.weight": ("BF16", np.zeros((4, 8)))}),
        r"another shape.*embed.weight.*expected \(8, 4\).*found \(4, 8\)",
    ),
    "decoded copy of an FP8 matrix": (
        rewrite(
            TWO,
            tensors={f"{WQ}.weight": ("BF16", np.zeros((256, 256))), f"{WQ}.scale": None},
        ),
        "another dtype.*wq.weight.*expected F8_E4M3.*found BF16",
    ),
    "FP8 without scale": (
        rewrite(TWO, tensors={f"{WQ}.scale": None}),
        "weight has no scale.*wq.weight",
    ),
    "FP4 without scale": (
        rewrite(TWO, tensors={f"{W1}.scale": None}),
        "weight has no scale.*w1.weight",
    ),
    "scale without weight": (
        rewrite(TWO, tensors={f"{W1}.weight": None}),
        "a scale has no weight.*w1.scale",
    ),
    "V4's scale block": (
        rewrite(TWO, tensors={f"{WQ}.scale": ("F8_E8M0", np.zeros((2, 2)))}),
        "another block.*wq.scale.*expected 32x32.*found 128x128",
    ),
    "one scale per row and 32": (
        rewrite(TWO, tensors={f"{WQ}.scale": ("F8_E8M0", np.zeros((256, 8)))}),
        "another block.*wq.scale.*expected 32x32.*found 1x32",
    ),
    "FP4 scales of 64": (
        rewrite(TWO, tensors={f"{W1}.scale": ("F8_E8M0", np.zeros((64, 1)))}),
        "another block.*w1.scale.*expected 1x32.*found 1x64",
    ),
    "scales of no block": (
        rewrite(TWO, tensors={f"{WQ}.scale": ("F8_E8M0", np.zeros((300, 8)))}),
        r"another block.*wq.scale.*expected 32x32.*found shape \(300, 8\)",
    ),
    "missing": (rewrite(THREE, tensors={"hc": None}), "asks for a tensor that is nowhere.*hc"),
    "a whole part missing": (
        rewrite(TWO, tensors=dict.fromkeys(good_shards()[TWO])),
        r"a part of the model that is nowhere.*expected 4 tensors layers\.0\.\*; found none",
    ),
    "unexpected": (
        rewrite(THREE, tensors={"extra": ("F32", np.zeros(1))}),
        "config.json does not imply.*extra",
    ),
}


def test_a_whole_checkpoint_agrees(folder):
    assert check_agreement(open_checkpoint(folder), EXPECTED) == []


@pytest.mark.parametrize(("fault", "message"), FAULTS.values(), ids=FAULTS)
def test_one_fault_gives_one_problem_of_its_own(folder, fault, message):
    fault(folder)
    problems = check_agreement(open_checkpoint(folder), EXPECTED)
    assert len(problems) == 1, problems
    assert re.search(message, str(problems[0]))
    assert problems[0].next_step


def test_every_rule_has_another_wording(folder):
    words = {message.split(".*")[0] for _, message in FAULTS.values()}
    assert len(words) >= 14


def test_a_missing_shard_is_one_problem(folder):
    checkpoint = open_checkpoint(folder)
    files = {name: file for name, file in checkpoint.files.items() if name != TWO}
    (problem,) = check_agreement(dataclasses.replace(checkpoint, files=files), EXPECTED)
    assert TWO in str(problem)
    assert "4 tensors" in str(problem)


def test_a_wrong_config_is_one_problem_per_kind(folder):
    expected = [
        dataclasses.replace(spec, shape=(2, 2)) if spec.name == f"{WQ}.scale" else spec
        for spec in EXPECTED
    ]
    more = [TensorSpec(f"layers.1.t{n}", "F32", (1,)) for n in range(50)]
    problems = check_agreement(open_checkpoint(folder), [*expected, *more])
    assert len(problems) == 2
    assert "expected 128x128 (config.json); found 32x32" in str(problems[0])
    assert "(50 tensors, the first is named)" in str(problems[1])


def test_two_faults_are_told_together(folder):
    rewrite(THREE, tensors={"hc": None, "norm.weight": ("F32", np.zeros(4))})(folder)
    assert len(check_agreement(open_checkpoint(folder), EXPECTED)) == 2


def test_without_an_index_two_shards_with_one_tensor_are_refused(folder):
    in_two_shards(folder)
    (folder / "model.safetensors.index.json").unlink()
    (problem,) = check_agreement(open_checkpoint(folder), EXPECTED)
    assert "two shards hold the same tensor" in str(problem)


@functools.cache
def many_tensors(n):
    """A checkpoint of ``n`` tensors in 48 files, without files."""
    shards = {}
    for index in range(n):
        name = f"layers.{index % 40}.ffn.experts.{index}.w1.weight"
        tensor = SourceTensor(name, "BF16", (4, 4), 0, 32)
        shards.setdefault(f"{index % 48:05}.safetensors", {})[name] = tensor
    files = {name: SourceFile(Path(name), 0, 0, "", tensors) for name, tensors in shards.items()}
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    return Checkpoint(Path(), {}, "", "", files, weight_map, n * 32)


@pytest.mark.parametrize("fault", ["none", "all phantom", "all unexpected"])
def test_the_real_number_of_tensors_is_quick(fault):
    checkpoint = many_tensors(96_085)
    expected = [TensorSpec(name, "BF16", (4, 4)) for name in checkpoint.weight_map]
    if fault == "all phantom":
        files = {
            name: dataclasses.replace(file, tensors={}) for name, file in checkpoint.files.items()
        }
        checkpoint = dataclasses.replace(checkpoint, files=files)
    if fault == "all unexpected":
        expected = []
    begin = time.thread_time()
    problems = check_agreement(checkpoint, expected)
    assert time.thread_time() - begin < 20
    assert len(problems) == {"none": 0, "all phantom": 48, "all unexpected": 40}[fault]


@pytest.mark.parametrize(
    ("n_rows", "n_cols", "shape", "block"),
    [
        (25_600, 6_144, (800, 192), (32, 32)),
        (384_006_168, 256, (384_006_168, 8), (1, 32)),
        (4_096, 4_096, (32, 32), (128, 128)),
        (70, 33, (3, 2), (32, 32)),
        (64, 96, (1, 1), (64, 128)),
        (100, 100, (25, 50), (4, 2)),
        (64, 64, (65, 2), None),
        (64, 64, (0, 2), None),
        (64, 64, (4,), None),
        (10, 10, (7, 10), None),
    ],
)
def test_the_block_that_a_scale_shape_implies(n_rows, n_cols, shape, block):
    assert implied_block(n_rows, n_cols, shape) == block
    assert block is None or scale_shape(n_rows, n_cols, block) == shape
