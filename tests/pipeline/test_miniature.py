"""Generated miniatures: the released layout, true casts, same seed same bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from pipeline.errors import OutputError, QuantmillError
from pipeline.miniature.blueprint import MARKER
from pipeline.miniature.checkpoint import miniature_blueprint, write_miniature
from pipeline.miniature.draws import row_chunks
from pipeline.miniature.released import config_of
from pipeline.miniature.size import LayerKinds, MiniatureSize
from pipeline.model.config import ModelConfig, read_config
from pipeline.model.engram.arithmetic import row_counts
from pipeline.model.expected.tensors import expected_tensors
from pipeline.model.tokens.token_map import compress_vocabulary
from pipeline.source.agreement import check_agreement
from pipeline.source.checkpoint import INDEX_NAME, open_checkpoint
from pipeline.source.spec import TensorSpec

SMALL = MiniatureSize(
    n_layers=6,
    hidden=256,
    n_experts=4,
    n_experts_used=2,
    n_heads=2,
    engram_base=100,
    engram_heads=1,
    n_draft_experts=3,
    vocab_size=640,
    vision_layers=1,
    vision_hidden=32,
    index_heads=2,
)
FP4_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@pytest.fixture(scope="module")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("miniature") / "small"
    assert write_miniature(folder, SMALL, seed=1)
    return folder


@pytest.fixture(scope="module")
def config(miniature: Path) -> ModelConfig:
    return read_config(json.loads((miniature / "config.json").read_bytes()))


def load(folder: Path, *names: str) -> tuple[torch.Tensor, ...]:
    where = json.loads((folder / INDEX_NAME).read_bytes())["weight_map"]
    loaded = []
    for name in names:
        with safe_open(folder / where[name], framework="pt") as shard:
            loaded.append(shard.get_tensor(name))
    return tuple(loaded)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_tensors_on_disk_are_those_that_the_config_implies(
    miniature: Path, config: ModelConfig
) -> None:
    found = set()
    dtypes = {"F8_E4M3", "F8_E8M0", "BF16", "F32", "I8"}
    for shard in miniature.glob("*.safetensors"):
        with safe_open(shard, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (no iterator of its own)
                part = opened.get_slice(name)
                found.add(TensorSpec(name, part.get_dtype(), tuple(part.get_shape())))
    assert found == set(expected_tensors(config))
    assert {spec.dtype for spec in found} == dtypes


def test_index_headers_and_config_agree(miniature: Path, config: ModelConfig) -> None:
    assert check_agreement(open_checkpoint(miniature), expected_tensors(config)) == []


def test_one_layer_is_one_shard_and_tables_come_last(miniature: Path) -> None:
    where = json.loads((miniature / INDEX_NAME).read_bytes())["weight_map"]
    numbers = {name: int(file.split("-")[1]) for name, file in where.items()}
    expected = {
        "vision.norm.weight": 1,
        "aligner.w1.bias": 1,
        "embed.weight": 2,
        "image_newline": 2,
        "layers.0.attn_norm.weight": 3,
        "layers.5.ffn.experts.3.w2.scale": 8,
        "head.weight": 9,
        "norm.weight": 9,
        "mtp.0.main_proj.scale": 10,
        "mtp.2.norm.weight": 12,
        "layers.1.engram.q_weight": 13,
        "layers.2.engram.embed.weight": 14,
    }
    assert {name: numbers[name] for name in expected} == expected
    assert set(numbers.values()) == set(range(1, 15))


def test_config_has_the_released_keys_in_their_order(miniature: Path) -> None:
    def keys(values: Mapping[str, object]) -> list[object]:
        return [(k, keys(v)) if isinstance(v, dict) else k for k, v in values.items()]

    small = json.loads((miniature / "config.json").read_bytes())
    assert keys(small) == keys(config_of("v4.1-flash"))


def test_engram_rows_and_vocabulary_follow_the_rules(miniature: Path, config: ModelConfig) -> None:
    assert config.engram is not None
    assert config.engram.n_rows == row_counts(config.engram)
    token_map = compress_vocabulary((miniature / "tokenizer.json").read_bytes(), SMALL.vocab_size)
    assert len(np.unique(token_map)) == config.engram.n_compressed < SMALL.vocab_size


def test_every_kind_of_layer_is_there(config: ModelConfig) -> None:
    kinds = {
        (ratio, layer in config.kv_sources, layer in config.index_sources)
        for layer, ratio in enumerate(config.layer_ratios)
    }
    window, full_2, full_1 = (0, False, False), (2, True, True), (1, True, True)
    reindex, reuse = (1, False, True), (1, False, False)
    assert kinds == {window, full_2, full_1, reindex, reuse}


def test_forty_layers_have_the_released_kinds() -> None:
    released = read_config(config_of("v4.1-flash"))
    kinds = LayerKinds.of(40)
    assert kinds.ratios == released.layer_ratios
    assert kinds.kv_sources == released.kv_sources
    assert kinds.index_sources == released.index_sources
    assert released.engram is not None
    assert kinds.engram == released.engram.layers


@pytest.mark.parametrize(
    ("stem", "most"),
    [
        pytest.param("layers.3.ffn.experts.2.w2", 0.2, id="fp4"),
        pytest.param("layers.3.attn.wq_b", 0.04, id="fp8"),
        pytest.param("layers.1.engram.embed", 0.04, id="fp8 table"),
    ],
)
def test_stored_values_are_the_drawn_ones_cast(miniature: Path, stem: str, most: float) -> None:
    weight, scale = load(miniature, f"{stem}.weight", f"{stem}.scale")
    if weight.dtype == torch.int8:
        nibbles = torch.stack([weight & 15, (weight >> 4) & 15], dim=-1).flatten(1).int()
        values = FP4_VALUES[nibbles & 7] * torch.where(nibbles > 7, -1.0, 1.0)
    else:
        values = weight.float()
    n_rows, n_cols = values.shape
    factors = scale.float().repeat_interleave(n_rows // scale.shape[0], 0)
    decoded = values * factors.repeat_interleave(n_cols // scale.shape[1], 1)
    chunks = row_chunks(f"{stem}.weight", (n_rows, n_cols), 1)
    drawn = torch.from_numpy(np.concatenate([rows for _, rows in chunks]))
    assert (decoded - drawn).norm() / drawn.norm() < most


def test_plain_tensors_are_the_drawn_ones(miniature: Path) -> None:
    norm, mix = load(miniature, "layers.0.attn_norm.weight", "layers.0.hc_attn_fn")
    assert norm.dtype == torch.bfloat16
    assert abs(norm.float().mean() - 1) < 0.05
    (_, drawn), *_ = row_chunks("layers.0.hc_attn_fn", tuple(mix.shape), 1)
    assert torch.equal(mix, torch.from_numpy(drawn))


def test_same_seed_same_bytes_and_another_seed_others(miniature: Path, tmp_path: Path) -> None:
    write_miniature(tmp_path / "again", SMALL, seed=1)
    assert contents(tmp_path / "again") == contents(miniature)
    write_miniature(tmp_path / "other", SMALL, seed=2)
    again, other = contents(miniature), contents(tmp_path / "other")
    assert {name for name in again if again[name] != other[name]} == {
        MARKER,
        *(path.name for path in miniature.glob("*.safetensors")),
    }


def test_a_second_run_does_nothing_and_an_unfinished_one_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    write_miniature(folder, SMALL, seed=0)
    whole = contents(folder)
    assert not write_miniature(folder, SMALL, seed=0)
    (folder / INDEX_NAME).unlink()
    victim = sorted(folder.glob("*.safetensors"))[3]
    victim.with_name(f".{victim.name}.part").write_bytes(b"left by a killed run" * 1_000_000)
    victim.unlink()
    assert write_miniature(folder, SMALL, seed=0)
    assert contents(folder) == whole


@pytest.mark.parametrize("mark", [None, b"{}"], ids=["foreign files", "another checkpoint"])
def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path, mark: bytes | None) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    if mark is not None:
        (tmp_path / MARKER).write_bytes(mark)
    before = contents(tmp_path)
    with pytest.raises(OutputError, match=r"already holds .*Choose a new folder"):
        write_miniature(tmp_path, SMALL, seed=0)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden": 300}, "hidden must be a multiple of 256"),
        ({"n_layers": 5}, "n_layers is too low.*at least 6"),
        ({"n_experts": 3}, "n_experts is too low.*at least 4"),
        ({"o_groups": 0}, "must be a multiple"),
        ({"head_dim": 128, "n_heads": 2}, "2 problems"),
        ({"vocab_size": 0}, "vocab_size is too low"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(QuantmillError, match=message):
        MiniatureSize(**sizes)


def test_default_size_is_some_tens_of_megabytes() -> None:
    shards = miniature_blueprint(MiniatureSize(), 0).shards
    assert 50e6 < sum(shard.nbytes for shard in shards) < 100e6


def test_the_script_writes_then_has_nothing_to_do_then_refuses(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "scripts" / "make_checkpoint"
    sizes = ["--layers=6", "--hidden=256", "--experts=4", "--engram-base=50", "--engram-heads=1"]

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script), str(tmp_path / "small"), *sizes, *options]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert run().stdout.startswith("wrote ")
    assert run().stdout.startswith("nothing to do")
    refused = run("--seed=1")
    assert refused.returncode == 1
    assert "already holds another generated checkpoint" in refused.stderr
