"""The loader contract of a V4 target, held against a statement of its tensors made here."""

from __future__ import annotations

from functools import cache

import pytest

from pipeline.gguf.keys import ValueType, array, f32, i32, u32
from pipeline.gguf.model_file import GgufModel
from pipeline.model.contract.check import check_contract
from pipeline.model.contract.form import form_of
from pipeline.model.form import V4_TARGET
from pipeline.quant.types import TYPES
from tests.gguf_forms import (
    V4_RELEASED,
    Numbers,
    extra,
    n_weights,
    tensor,
    v4_target,
    with_keys,
    with_tensors,
)

P = "deepseek4."


@cache
def model() -> GgufModel:
    """Five layers: hash-routed with a window only and at ratio 4; by score at 128, at 4, window."""
    return v4_target()


def messages(changed: GgufModel, *, union: bool = True) -> list[str]:
    return [str(problem) for problem in check_contract(changed, V4_TARGET, union=union)]


def test_stated_model_fulfils_the_contract():
    assert form_of(model()) == V4_TARGET
    assert messages(model()) == []


def test_released_model_has_the_tensors_and_weights_that_the_engine_counts():
    """llama.cpp b11549 reports so many for a header of these shapes."""
    released = v4_target(V4_RELEASED)
    assert (len(released.tensors), n_weights(released)) == (1328, 284_334_567_511)
    assert messages(released) == []


def test_every_tensor_that_is_left_out_is_named():
    for name in model().tensors:
        (named,) = messages(with_tensors(model(), without=[name]))
        assert name in named


def test_every_tensor_of_another_shape_is_named():
    for name, (_, stored) in model().tensors.items():
        (named,) = messages(with_tensors(model(), tensor(model(), name, ne=(*stored.ne, 1))))
        assert name in named
        assert "another shape" in named


def test_every_key_that_is_left_out_is_named():
    for key in model().key_values:
        named = messages(with_keys(model(), without=[key]))
        assert any(f"the key {key} is missing" in message for message in named), key


def test_size_of_the_vocabulary_may_stand_in_the_token_list_alone():
    bare = with_keys(model(), without=[f"{P}vocab_size"])
    assert messages(bare, union=False) == []
    assert len(messages(bare)) == 1


F32_ONLY = """
    output_norm.weight output_hc_base.weight output_hc_scale.weight
    blk.3.attn_norm.weight blk.3.attn_sinks.weight blk.3.attn_q_a_norm.weight
    blk.3.attn_kv_a_norm.weight blk.3.hc_attn_base.weight blk.3.hc_attn_scale.weight
    blk.3.hc_ffn_base.weight blk.3.hc_ffn_scale.weight blk.3.ffn_norm.weight
    blk.3.exp_probs_b.bias blk.3.attn_compressor_norm.weight blk.3.indexer_compressor_norm.weight
"""
I32_ONLY = "blk.0.ffn_gate_tid2eid.weight blk.1.ffn_gate_tid2eid.weight"


def test_types_that_abort_decoding_are_named_and_no_other():
    listed = dict.fromkeys(F32_ONLY.split(), "F32") | dict.fromkeys(I32_ONLY.split(), "I32")
    for name in (name for name in model().tensors if not name.startswith(("blk.2.", "blk.4."))):
        changed = with_tensors(model(), tensor(model(), name, type=TYPES["IQ4_K"]))
        alike = name.replace("blk.0.", "blk.3.").replace("blk.1.", "blk.3.")
        only_type = listed.get(name) or listed.get(alike)
        named = messages(changed)
        assert len(named) == (only_type is not None), name
        assert all(f"must be {only_type}" in message for message in named)


def test_router_bias_of_image_tokens_is_optional_in_every_layer():
    biases = [extra(f"blk.{layer}.exp_probs_b_vl.bias", (6,)) for layer in range(5)]
    assert messages(with_tensors(model(), *biases)) == []
    (named,) = messages(with_tensors(model(), extra("blk.0.exp_probs_b_vl.bias", (5,))))
    assert "another shape" in named


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("blk.0.exp_probs_b.bias", "A hash-routed layer looks its experts up"),
        ("blk.2.ffn_gate_tid2eid.weight", "this layer chooses experts by score"),
        ("blk.2.indexer.proj.weight", "has no use for it"),
        ("blk.2.indexer_compressor_kv.weight", "has no use for it"),
        ("blk.4.attn_compressor_kv.weight", "has no use for it"),
        ("blk.1.indexer.attn_k.weight", "has no use for it"),
        ("blk.5.attn_norm.weight", "block_count is 5: layers count from 0 to 4. A DSpark stage"),
        ("mtp.0.attn_norm.weight", "MTP module is a file of its own"),
        ("blk.1.engram_wkv.weight", "none of the engram tensors"),
        ("per_layer_token_embd.weight", "none of the engram tensors"),
        ("fc.weight", "No loader of this form knows it"),
    ],
    ids=lambda value: value,
)
def test_extra_tensor_is_refused_with_its_cause(name, cause):
    (named,) = messages(with_tensors(model(), extra(name)))
    assert f"tensor {name}" in named
    assert "a tensor too many" in named
    assert cause in named


def int_array(key, values, element=ValueType.INT32):
    return array(P + key, element, values)


FAULTS = {
    "kv heads": (u32(f"{P}attention.head_count_kv", 2), "head_count_kv has a value"),
    "gating": (u32(f"{P}expert_gating_func", 2), "expert_gating_func has a value"),
    "streams": (u32(f"{P}hyper_connection.count", 2), "hyper_connection.count has a value"),
    "fast beta": (f32(f"{P}rope.scaling.yarn_beta_fast", 16), "never reads it and always takes 32"),
    "slow beta": (f32(f"{P}rope.scaling.yarn_beta_slow", 2), "never reads it and always takes 1."),
    "value length": (u32(f"{P}attention.value_length", 16), "value_length and"),
    "hash layers beyond": (u32(f"{P}hash_layer_count", 6), "hash_layer_count does not fit"),
    "hash layers fewer": (u32(f"{P}hash_layer_count", 1), "chooses experts by score"),
    "too many used": (u32(f"{P}expert_used_count", 7), "expert_used_count does not fit"),
    "rope": (u32(f"{P}rope.dimension_count", 34), "rope.dimension_count does not fit a head"),
    "groups": (u32(f"{P}attention.output_group_count", 5), "do not divide"),
    "clamps": (array(f"{P}swiglu_clamp_exp", ValueType.FLOAT32, [10.0] * 4), "another length"),
    "ratios short": (int_array("attention.compress_ratios", (0, 4, 128, 4)), "is shorter"),
    "ratio 2": (
        int_array("attention.compress_ratios", (0, 4, 128, 2, 0)),
        "layer 3 compresses at ratio 2, which deepseek4 does not do",
    ),
    "ratios i64": (
        int_array("attention.compress_ratios", (0, 4, 128, 4, 0), ValueType.INT64),
        "compress_ratios has a type",
    ),
    "float type": (f32(f"{P}block_count", 5), "block_count has a type"),
    "vocabulary": (u32(f"{P}vocab_size", 35), "tokenizer.ggml.tokens has another length"),
    "eos outside": (u32("tokenizer.ggml.eos_token_id", 36), "outside the vocabulary"),
    "mtp announced": (u32(f"{P}nextn_predict_layers", 1), "is run as one more layer"),
    "engram": (u32(f"{P}engram.head_count", 8), "is about engram tables"),
    "ple": (int_array("ple.layers", (1, 14)), "is about engram tables"),
    "row width": (u32(f"{P}embedding_length_per_layer_input", 256), "is about engram tables"),
}


@pytest.mark.parametrize(("entry", "message"), FAULTS.values(), ids=FAULTS)
def test_wrong_value_is_named(entry, message):
    named = messages(with_keys(model(), entry))
    assert any(message in problem for problem in named), named


def test_a_stage_that_is_counted_as_a_layer_is_named():
    """Such a file loads, and the stage runs as one more layer."""
    sixth = v4_target(Numbers(ratios=(0, 4, 128, 4, 0, 0)))
    short = {
        entry.key: entry
        for key, entry in model().key_values.items()
        if key.endswith(("compress_ratios", "swiglu_clamp_exp", "swiglu_clamp_shexp"))
    }
    trunk_lists = with_keys(sixth, *short.values())
    assert any("swiglu_clamp_exp has another length" in m for m in messages(trunk_lists))
    announced = with_keys(sixth, u32(f"{P}nextn_predict_layers", 1))
    (named,) = messages(announced)
    assert "announces MTP blocks" in named
    assert "without a word" in named


def test_accepted_spellings_pass():
    ratios = (0, 4, 128, 4, 0)
    entries = (
        int_array("attention.compress_ratios", ratios, ValueType.UINT32),
        f32(f"{P}swiglu_clamp_exp", 10.0),
        f32(f"{P}swiglu_clamp_shexp", 10.0),
        u32(f"{P}embedding_length_out", 320),
        i32("other.project.key", 1),
    )
    assert messages(with_keys(model(), *entries)) == []
