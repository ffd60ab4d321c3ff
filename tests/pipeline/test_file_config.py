"""A model's description read back from the files that were made of it."""

from dataclasses import replace

import pytest

from pipeline.errors import FormatError
from pipeline.gguf.keys import ValueType, array, f32, u32
from pipeline.gguf.model_file import read_model
from pipeline.model.contract.form import form_of
from pipeline.model.layout import Layout
from pipeline.model.metadata.file_config import NO_DRAFT, UNSCALED, config_of
from pipeline.model.targets.draft import draft_model
from tests.gguf_builder import (
    draft_plan,
    full_config,
    full_plan,
    small_config,
    small_plan,
    small_v4_config,
    write_hollow,
)
from tests.gguf_forms import with_keys

V4 = "v4-flash-0731"
MODELS = {
    "mainline": (small_config, lambda: small_plan(Layout.MAINLINE)),
    "fork": (small_config, lambda: small_plan(Layout.FORK)),
    "V4": (small_v4_config, lambda: small_plan(Layout.MAINLINE, small_v4_config())),
    "released mainline": (full_config, lambda: full_plan(Layout.MAINLINE)),
    "released fork": (full_config, lambda: full_plan(Layout.FORK)),
    "released V4": (lambda: full_config(V4), lambda: full_plan(Layout.MAINLINE, release=V4)),
}


def carried(config):
    """What of a description can be in files."""
    return replace(config, vision=None, scale_block=UNSCALED)


@pytest.mark.parametrize(("config", "plan"), MODELS.values(), ids=MODELS)
def test_target_and_draft_give_back_the_config_they_were_made_of(tmp_path, config, plan):
    target = read_model(write_hollow(plan(), tmp_path / "target"))
    draft = read_model(write_hollow(draft_plan(config()), tmp_path / "draft"))
    form, draft_form = form_of(target), form_of(draft)
    assert config_of(target, form, (draft, draft_form)) == carried(config())
    assert config_of(draft, draft_form) == carried(draft_model(config()))
    n_stages = config().draft.n_stages
    alone = replace(
        carried(config()), draft=NO_DRAFT, compress_ratios=config().compress_ratios[:-n_stages]
    )
    assert config_of(target, form) == alone


@pytest.fixture
def fork(tmp_path):
    return read_model(write_hollow(small_plan(Layout.FORK), tmp_path))


P = "deepseek41."
UNION = [
    f"{P}attention.{name}"
    for name in (
        "kv_source_layers",
        "kv_source_layer_ids",
        "indexer.source_layers",
        "index_source_layer_ids",
    )
]


def test_a_file_with_the_nine_keys_only_tells_its_sources_by_tensors(fork):
    candidates = [key for key in fork.key_values if "candidate" in key]
    bare = with_keys(fork, without=[*UNION, *candidates, f"{P}engram.vocab_size"])
    config = config_of(bare, form_of(bare))
    assert config.kv_sources == small_config().kv_sources
    assert config.index_sources == small_config().index_sources
    assert config.candidate is None
    assert config.engram == small_config().engram


@pytest.mark.parametrize("value", [1e-6, 1e-20, 0.1, 1.5, 160000.0, 2.5e-5])
def test_floats_are_the_shortest_that_32_bits_stand_for(fork, value):
    model = with_keys(fork, f32(f"{P}attention.layer_norm_rms_epsilon", value))
    assert config_of(model, form_of(model)).rms_eps == value


def test_one_clamp_may_be_said_for_all_layers(fork):
    model = with_keys(fork, f32(f"{P}swiglu_clamp_exp", 10.0))
    assert config_of(model, form_of(model)).swiglu_limit == 10.0


FAULTS = {
    "clamps": (array(f"{P}swiglu_clamp_exp", ValueType.FLOAT32, [1, 1, 1, 1, 1, 2]), "differs"),
    "scoring": (u32(f"{P}expert_gating_func", 2), "no scoring of these models.*found 2"),
    "number": (array(f"{P}rope.freq_base", ValueType.FLOAT32, [1.0]), "a number under"),
    "token": (array("tokenizer.ggml.bos_token_id", ValueType.UINT32, [1]), "special tokens"),
}


@pytest.mark.parametrize(("entry", "message"), FAULTS.values(), ids=FAULTS)
def test_what_no_description_can_say_is_refused(fork, entry, message):
    model = with_keys(fork, entry)
    with pytest.raises(FormatError, match=message):
        config_of(model, form_of(model))
