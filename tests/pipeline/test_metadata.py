"""The header of a V4.1 target: every key and type that loaders demand, with the released values."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.errors import ConfigError, FormatError, QuantmillError, SourceError, TypeRuleError
from pipeline.gguf.keys import KeyValue, ValueType, text, u32
from pipeline.model.config import ModelConfig, read_config
from pipeline.model.layout import Layout
from pipeline.model.metadata.file_type import file_type_id
from pipeline.model.metadata.required import MAINLINE_KEYS, NINE_KEYS, UNION_KEYS, required_keys
from pipeline.model.metadata.target import target_metadata
from pipeline.model.targets.trunk import target_form
from pipeline.model.tokens.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data"
N_VOCAB, N_COMPRESSED = 129_280, 99_092

BASE = {
    "general.architecture": "deepseek41",
    "general.name": "DeepSeek V4.1 Flash",
    "general.license": "mit",
    "general.file_type": 12,
    "general.quantization_version": 2,
    "deepseek41.block_count": 40,
    "deepseek41.context_length": 1_048_576,
    "deepseek41.embedding_length": 5_120,
    "deepseek41.vocab_size": N_VOCAB,
    "deepseek41.attention.head_count": 64,
    "deepseek41.attention.head_count_kv": 1,
    "deepseek41.attention.key_length": 512,
    "deepseek41.attention.value_length": 512,
    "deepseek41.attention.layer_norm_rms_epsilon": 1e-20,
    "deepseek41.attention.q_lora_rank": 1_280,
    "deepseek41.attention.sliding_window": 128,
    "deepseek41.attention.output_group_count": 8,
    "deepseek41.attention.output_lora_rank": 1_024,
    "deepseek41.attention.compress_ratios": (0,) * 2 + (2,) * 18 + (1,) * 20,
    "deepseek41.attention.compress_rope_freq_base": 160_000.0,
    "deepseek41.attention.indexer.head_count": 32,
    "deepseek41.attention.indexer.key_length": 128,
    "deepseek41.attention.indexer.top_k": 512,
    "deepseek41.attention.kv_source_layers": (2, 8, 14, 20),
    "deepseek41.attention.indexer.source_layers": (2, 8, 14, 20, 24, 28, 32, 36),
    "deepseek41.attention.indexer.candidate_source_layer": 20,
    "deepseek41.attention.indexer.candidate_block_size": 8,
    "deepseek41.attention.indexer.candidate_top_k_blocks": 2_048,
    "deepseek41.rope.dimension_count": 64,
    "deepseek41.rope.freq_base": 10_000.0,
    "deepseek41.rope.scaling.type": "yarn",
    "deepseek41.rope.scaling.factor": 16.0,
    "deepseek41.rope.scaling.original_context_length": 65_536,
    "deepseek41.rope.scaling.yarn_beta_fast": 32.0,
    "deepseek41.rope.scaling.yarn_beta_slow": 1.0,
    "deepseek41.expert_count": 384,
    "deepseek41.expert_used_count": 6,
    "deepseek41.expert_shared_count": 1,
    "deepseek41.expert_feed_forward_length": 2_304,
    "deepseek41.expert_gating_func": 4,
    "deepseek41.expert_weights_scale": 1.5,
    "deepseek41.expert_weights_norm": True,
    "deepseek41.swiglu_clamp_exp": (10.0,) * 40,
    "deepseek41.swiglu_clamp_shexp": (10.0,) * 40,
    "deepseek41.hyper_connection.count": 4,
    "deepseek41.hyper_connection.sinkhorn_iterations": 20,
    "deepseek41.hyper_connection.epsilon": 1e-6,
    "deepseek41.hash_layer_count": 0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "joyai-llm",
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.padding_token_id": 1,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.add_eos_token": False,
}
FORK = {
    "deepseek41.engram.layer_ids": (1, 14),
    "deepseek41.engram.head_count": 8,
    "deepseek41.engram.key_length": 256,
    "deepseek41.engram.max_ngram_size": 4,
    "deepseek41.engram.pad_id": 1,
    "deepseek41.engram.layers": (1, 14),
    "deepseek41.engram.head_dim": 256,
    "deepseek41.engram.pad_token_id": 2,
    "deepseek41.engram.compressed_vocab_size": N_COMPRESSED,
    "deepseek41.engram.vocab_size": 16_000_000,
    "deepseek41.engram.table_rows": (384_006_168, 384_016_682),
    "deepseek41.attention.candidate_source_layer_id": 20,
    "deepseek41.attention.candidate_block_size": 8,
    "deepseek41.attention.candidate_topk_blocks": 2_048,
    "deepseek41.attention.candidate.source_layer": 20,
    "deepseek41.attention.candidate.topk_blocks": 2_048,
    "deepseek41.attention.candidate.block_size": 8,
    "deepseek41.attention.kv_source_layer_ids": (2, 8, 14, 20),
    "deepseek41.attention.index_source_layer_ids": (2, 8, 14, 20, 24, 28, 32, 36),
    "deepseek41.hyper_connection.single_pass": True,
}
MAINLINE = {
    "deepseek41.embedding_length_per_layer_input": 256,
    "deepseek41.ple.layers": (1, 14),
    "deepseek41.ple.ngram_size": 4,
    "deepseek41.ple.heads_per_ngram": 8,
    "deepseek41.engram.pad_token_id": 2,
}
MULTIPLIERS = (
    *(76632096046245, 4839876093313, 35959672319349, 73987337458391),
    *(67716810739261, 51510806800915, 30921347202721, 82619226485591),
)


@cache
def config(name: str = "deepseek-v4.1-flash") -> ModelConfig:
    return read_config(json.loads((DATA / f"{name}.config.json").read_bytes()))


@cache
def token_map() -> NDArray[np.int32]:
    """As many compressed ids as the released one; the pad token 2 becomes 1, to tell them apart."""
    mapped = np.minimum(np.arange(N_VOCAB), N_COMPRESSED).astype(np.int32) - 1
    mapped[0] = 0
    return mapped


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(
        tokens=tuple(f"t{n}" for n in range(N_VOCAB)),
        token_types=(1,) * N_VOCAB,
        merges=("a b",),
        bos=0,
        eos=1,
        pad=1,
        add_bos=False,
        add_eos=False,
        pre="joyai-llm",
        sha256="0" * 64,
    )


@cache
def header(layout: Layout) -> tuple[KeyValue, ...]:
    return metadata(layout=layout)


def metadata(
    model: ModelConfig | None = None,
    vocabulary: Tokenizer | None = None,
    mapped: NDArray[np.int32] | None = None,
    *,
    layout: Layout = Layout.FORK,
    extra: tuple[KeyValue, ...] = (),
) -> tuple[KeyValue, ...]:
    return target_metadata(
        model or config(),
        vocabulary or tokenizer(),
        token_map() if mapped is None else mapped,
        form=target_form(model or config(), layout),
        file_type=file_type_id("Q3_K"),
        name="DeepSeek V4.1 Flash",
        extra=extra,
    )


@pytest.mark.parametrize("layout", Layout)
def test_header_holds_what_loaders_demand_and_nothing_unknown(layout: Layout) -> None:
    found = {entry.key: (entry.type, entry.element) for entry in header(layout)}
    labels = {"general.type": (ValueType.STRING, None), "general.license": (ValueType.STRING, None)}
    assert found == {**required_keys(target_form(config(), layout)), **labels}


@pytest.mark.parametrize(
    ("layout", "values"),
    [(Layout.FORK, BASE | FORK), (Layout.MAINLINE, BASE | MAINLINE)],
    ids=["fork", "mainline"],
)
def test_values_of_the_released_model(layout: Layout, values: dict[str, object]) -> None:
    found = {entry.key: entry.value for entry in header(layout)}
    assert {key: found.get(key) for key in values} == values


@pytest.mark.parametrize(
    ("layout", "key", "length", "first", "middle", "last"),
    [
        (Layout.FORK, "engram.primes", 48, 16_000_057, 16_000_477, 16_000_889),
        (Layout.FORK, "engram.head_bucket_sizes", 48, 16_000_057, 16_000_477, 16_000_889),
        (Layout.FORK, "engram.offsets", 48, 0, 0, 368_015_793),
        (Layout.FORK, "engram.head_offsets", 48, 0, 0, 368_015_793),
        (Layout.MAINLINE, "ple.head_vocab_sizes", 48, 16_000_057, 16_000_477, 16_000_889),
        (Layout.MAINLINE, "ple.head_offsets", 48, 0, 384_006_168, 752_021_961),
        (Layout.FORK, "engram.token_map", N_VOCAB, 0, 64_639, 99_091),
        (Layout.MAINLINE, "engram.token_map", N_VOCAB, 0, 64_639, 99_091),
    ],
)
def test_hash_constants(
    layout: Layout, key: str, length: int, first: int, middle: int, last: int
) -> None:
    value = {entry.key: entry.value for entry in header(layout)}[f"deepseek41.{key}"]
    assert isinstance(value, tuple)
    assert (len(value), value[0], value[len(value) // 2], value[-1]) == (
        length,
        first,
        middle,
        last,
    )


@pytest.mark.parametrize(
    ("layout", "key"),
    [
        (Layout.FORK, "engram.multipliers"),
        (Layout.FORK, "engram.hash_multipliers"),
        (Layout.MAINLINE, "ple.layer_multipliers"),
    ],
)
def test_multipliers_follow_from_the_compressed_vocabulary(layout: Layout, key: str) -> None:
    value = {entry.key: entry.value for entry in header(layout)}[f"deepseek41.{key}"]
    assert value == MULTIPLIERS


def test_the_layouts_share_no_engram_key_but_two() -> None:
    fork = {entry.key for entry in header(Layout.FORK)}
    mainline = {entry.key for entry in header(Layout.MAINLINE)}
    assert not any(key.startswith("deepseek41.ple.") for key in fork)
    assert {key for key in mainline if ".engram." in key} == {
        "deepseek41.engram.token_map",
        "deepseek41.engram.pad_token_id",
    }


def test_contract_counts() -> None:
    assert (len(NINE_KEYS), len(UNION_KEYS), len(MAINLINE_KEYS)) == (9, 23, 14)


def test_architecture_comes_first_and_extra_keys_last() -> None:
    keys = metadata(extra=(text("general.source.repo_url", "u"), u32("reap.kept", 256)))
    assert keys[0].key == "general.architecture"
    assert [entry.key for entry in keys[-2:]] == ["general.source.repo_url", "reap.kept"]


def test_values_are_plain_python_numbers() -> None:
    """Writers pack these; a numpy scalar in a list would be refused or wrap."""
    kinds = (int, float, bool, str)
    for entry in header(Layout.FORK):
        values = entry.value if isinstance(entry.value, tuple) else (entry.value,)
        assert {type(value) for value in values} <= set(kinds), entry.key


def test_pruned_model_says_its_own_expert_count() -> None:
    keys = {entry.key: entry.value for entry in metadata(replace(config(), n_experts=256))}
    assert keys["deepseek41.expert_count"] == 256


OTHER_BETA = replace(config().rope_scaling, beta_fast=16.0)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        pytest.param({"model": {"family": "v4"}}, ConfigError, "one layout", id="V4"),
        pytest.param({"model": {"engram": None}}, ConfigError, "without engram", id="no engram"),
        pytest.param(
            {"model": {"rope_scaling": OTHER_BETA}}, ConfigError, "betas", id="other beta"
        ),
        pytest.param({"model": {"candidate": None}}, ConfigError, "candidate_", id="no candidate"),
        pytest.param({"model": {"scoring_func": "sigmoid"}}, ConfigError, "scoring", id="scoring"),
        pytest.param({"model": {"eos_token": 5}}, SourceError, "belong together", id="other eos"),
        pytest.param(
            {"vocabulary": {"tokens": ("a",)}},
            SourceError,
            "belong together",
            id="small vocabulary",
        ),
        pytest.param({"mapped": token_map()[:-1]}, ConfigError, "token map", id="short map"),
        pytest.param({"mapped": token_map() // 2}, ConfigError, "token map", id="other map"),
        pytest.param(
            {"extra": (u32("general.file_type", 1),)}, FormatError, "given twice", id="key twice"
        ),
    ],
)
def test_refuses_what_does_not_fit(
    change: dict[str, Any], kind: type[QuantmillError], message: str
) -> None:
    given = dict(change)
    for part, whole in (("model", config()), ("vocabulary", tokenizer())):
        if part in given:
            given[part] = replace(whole, **given[part])
    with pytest.raises(kind, match=message):
        metadata(**given)


def test_refuses_another_rope_scaling() -> None:
    rope = replace(config().rope_scaling, kind="linear")
    with pytest.raises(ConfigError, match="rope scaling"):
        metadata(replace(config(), rope_scaling=rope))


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("F32", 0),
        ("F16", 1),
        ("BF16", 32),
        ("Q4_0", 2),
        ("Q8_0", 7),
        ("Q2_K", 10),
        ("Q3_K", 12),
        ("Q3_K_M", 12),
        ("Q4_K", 15),
        ("Q5_K", 17),
        ("Q6_K", 18),
        ("IQ2_XXS", 19),
        ("IQ3_XXS", 23),
        ("IQ1_S", 24),
        ("IQ4_XS", 30),
        ("IQ1_M", 31),
        ("TQ1_0", 36),
        ("MXFP4", 38),
        ("NVFP4", 39),
        ("Q6_0", 135),
        ("IQ2_K", 138),
        ("IQ6_K", 142),
        ("IQ4_KS", 145),
        ("IQ4_KSS", 148),
        ("IQ1_KT", 156),
    ],
)
def test_file_type_numbers(name: str, number: int) -> None:
    assert file_type_id(name) == number


def test_file_type_of_an_unknown_type() -> None:
    with pytest.raises(TypeRuleError, match="Q9_K"):
        file_type_id("Q9_K")
