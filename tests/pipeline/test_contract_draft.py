"""The loader contract of both drafts, held against a statement of their tensors made here."""

from __future__ import annotations

import math
from functools import cache

import pytest

from pipeline.errors import FormatError
from pipeline.gguf.keys import ValueType, array, f32, flag, u32
from pipeline.gguf.model_file import GgufModel
from pipeline.model.contract.check import check_contract
from pipeline.model.contract.form import form_of
from pipeline.model.form import V4_DRAFT, V41_DRAFT, Form
from pipeline.model.metadata.required import spare_keys
from pipeline.quant.types import TYPES
from tests.gguf_forms import (
    V4_RELEASED,
    V41_DRAFT_RELEASED,
    extra,
    n_weights,
    tensor,
    v4_draft,
    v41_draft,
    with_keys,
    with_tensors,
)

P = "dflash."
FORMS = {"v4.1": V41_DRAFT, "v4": V4_DRAFT}
BOTH = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
FLAGS = (f"{P}hyper_connection.single_pass", f"{P}dsv41_semantics")
STREAMS = {"output_hc_fn.weight": (320, 4), "output_hc_base.weight": (4,)}


@cache
def model(form: Form) -> GgufModel:
    return v4_draft() if form == V4_DRAFT else v41_draft()


def messages(changed: GgufModel, form: Form, *, union: bool = True) -> list[str]:
    return [str(problem) for problem in check_contract(changed, form, union=union)]


@BOTH
def test_stated_draft_fulfils_the_contract(form):
    assert form_of(model(form)) == form
    assert messages(model(form), form) == []


def stored_nbytes(draft: GgufModel) -> int:
    """With MXFP4 experts, Q8_0 matrices, BF16 router and Markov pair, the rest F32."""
    total = 0
    for name, (_, stored) in draft.tensors.items():
        is_plain = len(stored.ne) == 1 or "hc_" in name
        is_half = name.startswith(("markov", "conf")) or "ffn_gate_inp" in name
        kind = "F32" if is_plain else "BF16" if is_half else "MXFP4" if "_exps" in name else "Q8_0"
        total += TYPES[kind].row_nbytes(stored.ne[0]) * math.prod(stored.ne[1:])
    return total


def test_released_drafts_have_the_tensors_weights_and_bytes_of_published_ones():
    v4, v41 = v4_draft(V4_RELEASED), v41_draft(V41_DRAFT_RELEASED)
    assert messages(v4, V4_DRAFT) == messages(v41, V41_DRAFT) == []
    assert (len(v4.tensors), n_weights(v4), stored_nbytes(v4)) == (
        81,
        19_845_850_983,
        10_890_804_124,
    )
    assert (len(v41.tensors), stored_nbytes(v41)) == (78, 7_967_705_480)


@BOTH
def test_every_tensor_that_is_left_out_is_named(form):
    for name in model(form).tensors:
        (named,) = messages(with_tensors(model(form), without=[name]), form)
        assert "a tensor is missing" in named
        assert f"-draft.gguf; tensor {name}; expected" in named


@BOTH
def test_every_tensor_of_another_shape_is_named(form):
    for name, (_, stored) in model(form).tensors.items():
        for ne in ((stored.ne[0] + 1, *stored.ne[1:]), (*stored.ne, 1)):
            (named,) = messages(with_tensors(model(form), tensor(model(form), name, ne=ne)), form)
            assert name in named
            assert "another shape" in named


@BOTH
def test_every_key_that_is_left_out_is_named(form):
    for key in model(form).key_values:
        named = messages(with_keys(model(form), without=[key]), form)
        assert any(f"the key {key} is missing" in message for message in named), key


@BOTH
def test_keys_that_loaders_do_without_are_asked_for_in_our_own_files_only(form):
    bare = with_keys(model(form), without=spare_keys(form))
    assert messages(bare, form, union=False) == []
    assert len(messages(bare, form)) == len(spare_keys(form)) > 10
    needed = with_keys(bare, without=["tokenizer.ggml.mask_token_id"])
    assert len(messages(needed, form, union=False)) == 1


@BOTH
def test_embedding_and_head_of_its_own_are_a_drafts_choice(form):
    own = [extra(name, (80, 36)) for name in ("token_embd.weight", "output.weight")]
    assert messages(with_tensors(model(form), *own), form) == []
    (named,) = messages(with_tensors(model(form), extra("output.weight", (80, 35))), form)
    assert "another shape" in named


F32_ONLY = (
    "enc.output_norm.weight output_norm.weight blk.1.attn_norm.weight blk.1.attn_sinks.weight "
    "blk.1.attn_q_a_norm.weight blk.1.attn_kv_a_norm.weight blk.1.hc_attn_base.weight "
    "blk.1.hc_attn_scale.weight blk.1.hc_ffn_base.weight blk.1.hc_ffn_scale.weight "
    "blk.1.ffn_norm.weight blk.1.exp_probs_b.bias output_hc_base.weight output_hc_scale.weight"
)


@BOTH
def test_types_that_abort_decoding_are_named_and_no_other(form):
    for name in (name for name in model(form).tensors if not name.startswith(("blk.0", "blk.2"))):
        changed = with_tensors(model(form), tensor(model(form), name, type=TYPES["IQ4_K"]))
        named = messages(changed, form)
        assert len(named) == (name in F32_ONLY.split()), name
        assert all("must be F32" in message for message in named)


EXTRAS = {
    "blk.3.attn_norm.weight": "block_count is 3: layers count from 0 to 2.",
    "blk.0.exp_probs_b_vl.bias": "No draft loader knows the router bias of image tokens",
    "blk.0.attn_compressor_kv.weight": "has no use for it",
    "blk.0.ffn_gate_tid2eid.weight": "chooses experts by score",
    "blk.1.engram_q.weight": "none of the engram tensors",
    "mtp.0.main_proj.weight": "MTP module is a file of its own",
    "blk.0.nextn.eh_proj.weight": "MTP module is a file of its own",
    "dspark.weight": "No loader of this form knows it",
}


@BOTH
@pytest.mark.parametrize(("name", "cause"), EXTRAS.items(), ids=EXTRAS)
def test_extra_tensor_is_refused_with_its_cause(form, name, cause):
    (named,) = messages(with_tensors(model(form), extra(name)), form)
    assert f"tensor {name}" in named
    assert cause in named


def layers(values, element=ValueType.INT32):
    return array(f"{P}target_layers", element, values)


FAULTS = {
    "ratio": (
        array(f"{P}attention.compress_ratios", ValueType.INT32, (0, 4, 0)),
        "layer 1 compresses at ratio 4, which dflash does not do",
    ),
    "ratios short": (
        array(f"{P}attention.compress_ratios", ValueType.INT32, (0, 0)),
        "is shorter than block_count",
    ),
    "hash layers": (u32(f"{P}hash_layer_count", 3), "hash_layer_count has a value"),
    "block size": (u32(f"{P}block_size", 0), "block_size drafts nothing"),
    "no captured layers": (layers(()), "target_layers are no increasing layer numbers"),
    "disorder": (layers((3, 1, 4)), "target_layers are no increasing layer numbers"),
    "negative": (layers((-1, 3, 4)), "target_layers are no increasing layer numbers"),
    "fewer captured": (layers((1, 3)), "tensor fc.weight; expected (160, 80); found (240, 80)"),
    "u64 layers": (layers((1, 3, 4), ValueType.UINT64), "target_layers has a type"),
    "mask outside": (u32("tokenizer.ggml.mask_token_id", 36), "outside the vocabulary"),
    "experts": (u32(f"{P}expert_count", 7), "tensor blk.0.ffn_gate_inp.weight"),
    "gating": (u32(f"{P}expert_gating_func", 2), "expert_gating_func has a value"),
    "clamps": (array(f"{P}swiglu_clamp_exp", ValueType.FLOAT32, [10.0] * 5), "another length"),
    "value length": (u32(f"{P}attention.value_length", 16), "value_length and"),
    "mtp announced": (u32(f"{P}nextn_predict_layers", 3), "announces MTP blocks"),
    "engram": (u32(f"{P}engram.head_count", 8), "is about engram tables"),
}


@BOTH
@pytest.mark.parametrize(("entry", "message"), FAULTS.values(), ids=FAULTS)
def test_wrong_value_is_named(form, entry, message):
    named = messages(with_keys(model(form), entry), form)
    assert any(message in problem for problem in named), named


@BOTH
def test_accepted_spellings_pass(form):
    entries = (layers((1, 3, 4), ValueType.UINT32), f32(f"{P}swiglu_clamp_exp", 10.0))
    assert messages(with_keys(model(form), *entries), form) == []


def test_first_layer_has_an_input_but_v4_counts_outputs():
    embedding = layers((0, 3, 4))
    assert messages(with_keys(model(V41_DRAFT), embedding), V41_DRAFT) == []
    (named,) = messages(with_keys(model(V4_DRAFT), embedding), V4_DRAFT)
    assert "expected 1 or more" in named


@pytest.mark.parametrize("key", FLAGS)
def test_flags_of_v41_are_true_and_none_of_v4s(key):
    off, odd = flag(key, False), u32(key, 1)
    (named,) = messages(with_keys(model(V41_DRAFT), off), V41_DRAFT)
    assert f"{key} has a value" in named
    (named,) = messages(with_keys(model(V41_DRAFT), odd), V41_DRAFT)
    assert f"{key} has a type" in named
    (named,) = messages(with_keys(model(V4_DRAFT), off), V4_DRAFT)
    assert f"the key {key} calls this a V4.1 draft" in named


def test_v41_has_no_stream_head():
    (named,) = messages(with_tensors(model(V41_DRAFT), extra("output_hc_base.weight")), V41_DRAFT)
    assert "V4.1 has no output hyper-connection" in named


@pytest.mark.parametrize("key", FLAGS)
def test_one_sign_is_enough_to_tell_a_v41_draft(key):
    bare = with_keys(model(V41_DRAFT), without=FLAGS)
    assert form_of(bare) == V41_DRAFT
    assert form_of(with_keys(bare, flag(key, True))) == V41_DRAFT


def test_signs_that_contradict_each_other_are_named():
    both = with_tensors(model(V41_DRAFT), *(extra(name, ne) for name, ne in STREAMS.items()))
    with pytest.raises(FormatError) as caught:
        form_of(both)
    for sign in (f"{FLAGS[0]} true", f"{FLAGS[1]} true", *STREAMS, "v41-draft.gguf"):
        assert sign in str(caught.value)
    torn = with_keys(model(V41_DRAFT), flag(FLAGS[0], False))
    with pytest.raises(FormatError, match=f"V4.1 by {FLAGS[1]} true; V4 by {FLAGS[0]} false"):
        form_of(torn)
