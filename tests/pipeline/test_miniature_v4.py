"""Generated V4-Flash-0731 miniatures: the released layout and layer kinds, true casts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from pipeline.errors import QuantmillError
from pipeline.miniature.checkpoint import miniature_blueprint, write_miniature
from pipeline.miniature.draws import row_chunks
from pipeline.miniature.released import config_of
from pipeline.miniature.v4_size import V4Size, layer_ratios
from pipeline.model.config import ModelConfig, read_config
from pipeline.model.expected.tensors import expected_tensors
from pipeline.model.tokens.tokenizer import read_tokenizer
from pipeline.source.agreement import check_agreement
from pipeline.source.checkpoint import INDEX_NAME, open_checkpoint
from pipeline.source.spec import TensorSpec
from tests.conftest import SMALL_V4

SEED = 1
"""That of the small miniature."""

FP4_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@pytest.fixture(scope="module")
def config(small_v4_miniature: Path) -> ModelConfig:
    return read_config(json.loads((small_v4_miniature / "config.json").read_bytes()))


def weight_map(folder: Path) -> dict[str, str]:
    where: dict[str, str] = json.loads((folder / INDEX_NAME).read_bytes())["weight_map"]
    return where


def load(folder: Path, *names: str) -> tuple[torch.Tensor, ...]:
    where = weight_map(folder)
    loaded = []
    for name in names:
        with safe_open(folder / where[name], framework="pt") as shard:
            loaded.append(shard.get_tensor(name))
    return tuple(loaded)


def drawn(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([rows for _, rows in row_chunks(name, shape, SEED)]))


def test_tensors_on_disk_are_those_that_the_config_implies(
    small_v4_miniature: Path, config: ModelConfig
) -> None:
    found = set()
    for shard in small_v4_miniature.glob("*.safetensors"):
        with safe_open(shard, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (no iterator of its own)
                part = opened.get_slice(name)
                found.add(TensorSpec(name, part.get_dtype(), tuple(part.get_shape())))
    assert found == set(expected_tensors(config))
    assert {spec.dtype for spec in found} == {"I64", "F8_E4M3", "F8_E8M0", "BF16", "F32", "I8"}


def test_index_headers_and_config_agree(small_v4_miniature: Path, config: ModelConfig) -> None:
    assert check_agreement(open_checkpoint(small_v4_miniature), expected_tensors(config)) == []


def test_one_layer_is_one_shard_and_the_draft_comes_last(small_v4_miniature: Path) -> None:
    where = weight_map(small_v4_miniature)
    numbers = {name: int(file.split("-")[1]) for name, file in where.items()}
    expected = {
        "embed.weight": 1,
        "layers.0.ffn.gate.tid2eid": 2,
        "layers.2.attn.indexer.compressor.ape": 4,
        "layers.4.ffn.experts.3.w2.scale": 6,
        "head.weight": 7,
        "norm.weight": 7,
        "hc_head_fn": 7,
        "mtp.0.main_proj.scale": 8,
        "mtp.2.hc_head_base": 10,
        "mtp.2.markov_head.markov_w2.weight": 10,
    }
    assert {name: numbers[name] for name in expected} == expected
    assert set(numbers.values()) == set(range(1, 11))


def test_config_has_the_released_keys_in_their_order(small_v4_miniature: Path) -> None:
    small = json.loads((small_v4_miniature / "config.json").read_bytes())
    assert list(small) == list(config_of("v4-flash-0731"))
    assert list(small["rope_scaling"]) == list(config_of("v4-flash-0731")["rope_scaling"])


def test_every_kind_of_layer_is_there(config: ModelConfig) -> None:
    kinds = Counter(
        (ratio, layer < config.n_hash_layers) for layer, ratio in enumerate(config.layer_ratios)
    )
    assert kinds == {(0, True): 2, (4, True): 1, (128, False): 1, (4, False): 1}
    assert config.compress_ratios[config.n_layers :] == (0, 0, 0)


def test_forty_three_layers_have_the_released_ratios() -> None:
    released = read_config(config_of("v4-flash-0731"))
    assert layer_ratios(43) == released.layer_ratios


@pytest.mark.parametrize("size", [V4Size(), SMALL_V4], ids=["default", "small"])
def test_a_short_text_uses_every_path_of_an_engine(size: V4Size) -> None:
    config = read_config(json.loads(miniature_blueprint(size, 0).config))
    assert config.sliding_window < 128
    assert config.index_top_k < 128 // 4
    # Hadamard rotation in the index wants a power of two of at least 64, and fewer heads give
    # scores of exactly zero, whose order is open.
    assert config.index_dim in {64, 128}
    assert config.index_heads >= 16


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_hash_tables_name_different_experts_for_each_token(
    small_v4_miniature: Path, config: ModelConfig, layer: int
) -> None:
    (table,) = load(small_v4_miniature, f"layers.{layer}.ffn.gate.tid2eid")
    assert table.dtype == torch.int64
    assert table.shape == (config.vocab_size, config.n_experts_used)
    assert table.unique().tolist() == list(range(config.n_experts))
    ordered = table.sort(dim=1).values
    assert torch.all(ordered[:, 1:] > ordered[:, :-1])
    assert not torch.equal(ordered, table)


def test_hash_tables_differ_between_layers(small_v4_miniature: Path) -> None:
    first, second = load(
        small_v4_miniature, "layers.0.ffn.gate.tid2eid", "layers.1.ffn.gate.tid2eid"
    )
    assert (first != second).float().mean() > 0.5


@pytest.mark.parametrize(
    ("stem", "block", "most"),
    [
        pytest.param("layers.3.ffn.experts.2.w2", (1, 32), 0.2, id="fp4"),
        pytest.param("layers.3.attn.wq_b", (128, 128), 0.04, id="fp8"),
        pytest.param("mtp.0.main_proj", (128, 128), 0.04, id="fp8 of the draft"),
    ],
)
def test_stored_values_are_the_drawn_ones_cast(
    small_v4_miniature: Path, stem: str, block: tuple[int, int], most: float
) -> None:
    weight, scale = load(small_v4_miniature, f"{stem}.weight", f"{stem}.scale")
    if weight.dtype == torch.int8:
        nibbles = torch.stack([weight & 15, (weight >> 4) & 15], dim=-1).flatten(1).int()
        values = FP4_VALUES[nibbles & 7] * torch.where(nibbles > 7, -1.0, 1.0)
    else:
        values = weight.float()
    factors = scale.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    expected = drawn(f"{stem}.weight", tuple(values.shape))
    assert (values * factors - expected).norm() / expected.norm() < most


def test_plain_tensors_are_the_drawn_ones(small_v4_miniature: Path) -> None:
    for name in ("layers.3.attn.compressor.ape", "hc_head_fn", "layers.2.hc_attn_base"):
        (stored,) = load(small_v4_miniature, name)
        assert torch.equal(stored, drawn(name, tuple(stored.shape)).reshape(stored.shape))
    (ape,) = load(small_v4_miniature, "layers.3.attn.compressor.ape")
    assert 0.3 < ape.std() < 1


def test_vocabulary_has_the_named_tokens_and_the_draft_its_mask(
    small_v4_miniature: Path, config: ModelConfig
) -> None:
    content = (small_v4_miniature / "tokenizer.json").read_bytes()
    tokenizer = Tokenizer.from_str(content.decode())
    assert tokenizer.get_vocab_size() == config.vocab_size
    assert tokenizer.id_to_token(config.draft.mask_token) == "<｜place▁holder▁no▁799｜>"
    for name in ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<｜image｜>"):
        assert tokenizer.encode(name, add_special_tokens=False).tokens == [name]
    assert tokenizer.token_to_id("<｜deepseek_image｜>") is None
    settings = (small_v4_miniature / "tokenizer_config.json").read_bytes()
    assert read_tokenizer(content, settings, config.vocab_size).eos == config.eos_token


def test_same_seed_same_bytes_and_another_seed_others(
    small_v4_miniature: Path, tmp_path: Path
) -> None:
    write_miniature(tmp_path / "again", SMALL_V4, seed=SEED)
    write_miniature(tmp_path / "other", SMALL_V4, seed=SEED + 1)
    shards = [path.name for path in small_v4_miniature.glob("*.safetensors")]
    for name in shards:
        content = (small_v4_miniature / name).read_bytes()
        assert (tmp_path / "again" / name).read_bytes() == content
        assert (tmp_path / "other" / name).read_bytes() != content
    assert not write_miniature(tmp_path / "again", SMALL_V4, seed=SEED)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden": 300}, "hidden must be a multiple of 256"),
        ({"n_layers": 4}, "n_layers is too low.*at least 5"),
        ({"n_experts": 3}, "n_experts is too low.*at least 4"),
        ({"head_dim": 128, "n_heads": 2}, "2 problems"),
        ({"vocab_size": 0}, "vocab_size is too low"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(QuantmillError, match=message):
        V4Size(**sizes)


def test_default_size_is_some_tens_of_megabytes() -> None:
    shards = miniature_blueprint(V4Size(), 0).shards
    assert 40e6 < sum(shard.nbytes for shard in shards) < 60e6


def test_the_script_writes_either_release_and_knows_whose_sizes_are_whose(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "scripts" / "make_checkpoint"

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script), str(tmp_path / "small"), "--like=v4-flash-0731"]
        return subprocess.run(
            [*command, "--layers=5", "--hidden=256", "--experts=4", *options],
            capture_output=True,
            text=True,
            check=False,
        )

    assert "v4-flash-0731 has no --engram-base" in run("--engram-base=50").stderr
    assert run().stdout.startswith("wrote ")
    written = json.loads((tmp_path / "small" / "config.json").read_bytes())
    assert written["architectures"] == ["DeepseekV4ForCausalLM"]
    assert written["num_hidden_layers"] == 5
