"""Whether a target and a draft belong together: each way in which they do not is named."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from pipeline.gguf.keys import ValueType, array, text, u32
from pipeline.gguf.model_file import GgufModel
from pipeline.model.contract.pair import check_pair
from tests.gguf_forms import (
    Numbers,
    block_keys,
    header_only,
    v4_draft,
    v4_target,
    v41_draft,
    vocabulary_keys,
    with_keys,
)

SOURCE = "quantmill.source.config_sha256"


@cache
def v41_target() -> GgufModel:
    """As much of one as a pair is judged by."""
    keys = (*block_keys("deepseek41", Numbers(), 5), *vocabulary_keys(Numbers()))
    engram = text("deepseek41.engram.primes", "")
    return header_only("v41.gguf", (*keys, engram), {"blk.1.engram_embd.weight": (4, 4)})


PAIRS = {"v4.1": (v41_target, v41_draft), "v4": (v4_target, v4_draft)}
BOTH = pytest.mark.parametrize("family", PAIRS)


def pair(family: str) -> tuple[GgufModel, GgufModel]:
    target, draft = PAIRS[family]
    return target(), draft()


def messages(target: GgufModel, draft: GgufModel) -> list[str]:
    return [str(problem) for problem in check_pair(target, draft)]


@BOTH
def test_target_and_its_draft_belong_together(family):
    assert messages(*pair(family)) == []


def test_draft_of_the_other_family_is_the_one_problem():
    (named,) = messages(v4_target(), v41_draft(replace(Numbers(), hidden=96)))
    assert "differ in family" in named
    assert "v4.gguf and v41-draft.gguf" in named


@pytest.mark.parametrize(
    "models", [(v4_target, v4_target), (v4_draft, v4_draft), (v4_draft, v4_target)]
)
def test_two_files_that_are_no_target_and_draft_are_refused(models):
    (named,) = messages(*(make() for make in models))
    assert "no target and its draft" in named


SIZES = {
    "vocab_size": 35,
    "embedding_length": 96,
    "attention.head_count": 4,
    "attention.key_length": 64,
    "attention.value_length": 64,
    "hyper_connection.count": 2,
}


@BOTH
@pytest.mark.parametrize(("name", "value"), SIZES.items(), ids=SIZES)
def test_other_sizes_are_named_with_both_files(family, name, value):
    target, draft = pair(family)
    (named,) = messages(target, with_keys(draft, u32(f"dflash.{name}", value)))
    assert f"target and draft differ in {name}" in named
    assert f"found {value} in the draft" in named
    for model in (target, draft):
        assert str(model.files[0].path) in named


VOCABULARY = {
    "other model": (text("tokenizer.ggml.model", "spm"), "tokenizer.ggml.model"),
    "other splitting": (text("tokenizer.ggml.pre", "deepseek-llm"), "tokenizer.ggml.pre"),
    "other token": (
        array("tokenizer.ggml.tokens", ValueType.STRING, [f"t{n}" for n in range(35)] + ["x"]),
        "entry 35 of tokenizer.ggml.tokens; file .*; expected t35, .*; found x in",
    ),
    "fewer tokens": (
        array("tokenizer.ggml.tokens", ValueType.STRING, ["a"] * 30),
        "the length of tokenizer.ggml.tokens; file .*; expected 36, .*; found 30 in",
    ),
    "token type": (
        array("tokenizer.ggml.token_type", ValueType.INT32, [3] + [1] * 35),
        "entry 0 of tokenizer.ggml.token_type",
    ),
    "merges": (array("tokenizer.ggml.merges", ValueType.STRING, ["a b"]), "tokenizer.ggml.merges"),
    "bos": (u32("tokenizer.ggml.bos_token_id", 5), "tokenizer.ggml.bos_token_id"),
    "eos": (u32("tokenizer.ggml.eos_token_id", 5), "tokenizer.ggml.eos_token_id"),
    "padding": (u32("tokenizer.ggml.padding_token_id", 5), "tokenizer.ggml.padding_token_id"),
}


@BOTH
@pytest.mark.parametrize(("entry", "message"), VOCABULARY.values(), ids=VOCABULARY)
def test_another_vocabulary_is_named(family, entry, message):
    target, draft = pair(family)
    (problem,) = check_pair(target, with_keys(draft, entry))
    with pytest.raises(type(problem), match=message):
        raise problem


@BOTH
def test_mask_token_is_a_token_of_the_target(family):
    target, draft = pair(family)
    mask = "tokenizer.ggml.mask_token_id"
    (named,) = messages(target, with_keys(draft, u32(mask, 36)))
    assert f"{mask} is no token of the target" in named
    (named,) = messages(with_keys(target, u32(mask, 3)), draft)
    assert f"differ in {mask}" in named


def captured(draft: GgufModel, layers) -> GgufModel:
    return with_keys(draft, array("dflash.target_layers", ValueType.INT32, layers))


def test_v41_counts_inputs_so_the_last_layer_is_one_below_their_number():
    target, draft = pair("v4.1")
    assert messages(target, captured(draft, (2, 3, 4))) == []
    (named,) = messages(target, captured(draft, (3, 4, 5)))
    assert "dflash.target_layers are not among the target's layers" in named
    assert "They count outputs, as V4's do" in named
    (named,) = messages(target, captured(draft, (3, 4, 6)))
    assert "They count" not in named


def test_v4_counts_outputs_so_the_last_one_is_their_number():
    target, draft = pair("v4")
    assert messages(target, captured(draft, (3, 4, 5))) == []
    (named,) = messages(target, captured(draft, (3, 4, 6)))
    assert "expected up to 5; found [3, 4, 6]" in named


@BOTH
def test_source_is_the_same_where_both_say_it(family):
    target, draft = pair(family)
    ours, theirs = text(SOURCE, "a" * 64), text(SOURCE, "b" * 64)
    assert messages(with_keys(target, ours), draft) == []
    assert messages(with_keys(target, ours), with_keys(draft, ours)) == []
    (named,) = messages(with_keys(target, ours), with_keys(draft, theirs))
    assert f"differ in {SOURCE}" in named


def test_vocabulary_may_stand_in_the_token_list_alone():
    target, draft = with_keys(v4_target(), without=["deepseek4.vocab_size"]), v4_draft()
    assert messages(target, draft) == []
    (named,) = messages(target, with_keys(draft, u32("dflash.vocab_size", 35)))
    assert "differ in vocab_size" in named
