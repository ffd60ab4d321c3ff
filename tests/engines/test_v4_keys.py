"""Metadata of V4 files, one key missing or wrong: what llama.cpp says, or does without a word.

Both builds use the same words. Where they say nothing, our own contract must; where nothing in the
file tells, config.json alone does, and what is written must be what stands there.
"""

from __future__ import annotations

import re
from functools import reduce
from pathlib import Path

import pytest

from pipeline.gguf.keys import KeyValue, f32, text, u32
from pipeline.model.metadata.vocabulary import tokenizer_keys
from tests.engines.edited import Edited
from tests.engines.engine import Engine, EngineDied, Refused
from tests.engines.v4_edits import WRONG, Edit, P, V4Edits, with_key, with_values, without_key
from tests.pipeline.test_tokenizer import released

pytestmark = pytest.mark.engine

NEEDED = (
    *("block_count", "context_length", "embedding_length", "swiglu_clamp_exp", "hash_layer_count"),
    *("attention.layer_norm_rms_epsilon", "attention.sliding_window"),
    *("attention.q_lora_rank", "attention.output_group_count", "attention.output_lora_rank"),
    "attention.compress_ratios",
    *("attention.compress_rope_freq_base", "attention.indexer.head_count"),
    *("attention.indexer.key_length", "attention.indexer.top_k"),
    *("expert_feed_forward_length", "expert_gating_func", "expert_shared_count"),
    *("expert_weights_norm", "expert_weights_scale"),
    *("hyper_connection.count", "hyper_connection.epsilon"),
    "hyper_connection.sinkhorn_iterations",
)
GUESSED = ("attention.head_count", "attention.key_length")
"""Loaders take zero heads, or the width divided by the heads, and then miss the shapes of that."""

ABORTING = {
    "attention.head_count_kv": "a->ne[0] == b->ne[0]",
    "attention.value_length": "n_embd_head == n_embd_head_v",
    "expert_count": "n_expert_used_max <= hparams.n_expert",
    "expert_used_count": "n_expert_used_max > 0",
    "rope.dimension_count": "n_embd_head >= n_embd_head_rope",
}
WRONG_WITHOUT = (
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
)
SPARE = (
    "rope.freq_base",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "swiglu_clamp_shexp",
    "vocab_size",
)


@pytest.fixture(scope="module")
def edits(small_v4_miniature: Path, tmp_path_factory: pytest.TempPathFactory) -> V4Edits:
    return V4Edits(small_v4_miniature, tmp_path_factory.mktemp("V4 keys"))


@pytest.fixture(params=["mainline", "native"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return request.getfixturevalue(request.param)


def test_every_key_of_the_architecture_has_its_say(edits: V4Edits) -> None:
    keys = {key.removeprefix(P) for key in edits.model.keys if key.startswith(P)}
    assert keys == {*NEEDED, *GUESSED, *ABORTING, *WRONG_WITHOUT, *SPARE}


@pytest.mark.parametrize("name", NEEDED)
def test_without_a_key_it_is_refused(native: Engine, edits: V4Edits, name: str) -> None:
    file = edits(without_key(name))
    with pytest.raises(Refused, match=rf"key not found in model: {P}{name}\n"):
        file.said(native)
    assert f"the key {P}{name} is missing" in file.told[0]


@pytest.mark.parametrize("name", GUESSED)
def test_without_a_key_that_is_guessed_shapes_are_refused(
    native: Engine, edits: V4Edits, name: str
) -> None:
    file = edits(without_key(name))
    with pytest.raises(Refused, match="has wrong shape"):
        file.said(native)
    assert f"the key {P}{name} is missing" in file.told[0]


@pytest.mark.parametrize(("name", "words"), ABORTING.items(), ids=ABORTING)
def test_without_a_key_the_engine_aborts(
    engine: Engine, edits: V4Edits, name: str, words: str
) -> None:
    file = edits(without_key(name))
    with pytest.raises(EngineDied, match=re.escape(words)):
        file.said(engine)
    assert f"the key {P}{name} is missing" in file.told[0]


@pytest.mark.parametrize("name", WRONG_WITHOUT)
def test_without_a_key_something_else_is_computed_and_only_we_say_so(
    native: Engine, edits: V4Edits, name: str
) -> None:
    file = edits(without_key(name))
    assert file.distance(native) > WRONG
    assert f"the key {P}{name} is missing" in file.told[0]


@pytest.mark.parametrize("name", SPARE)
def test_without_a_key_that_has_a_default_nothing_changes(
    native: Engine, edits: V4Edits, name: str
) -> None:
    assert edits(without_key(name)).distance(native) == 0


REFUSED = {
    "ratios too few": (
        with_values("attention.compress_ratios", lambda ratios: ratios[:-1]),
        "compress_ratios is shorter than block_count",
    ),
    "ratio 2": (
        with_values("attention.compress_ratios", lambda ratios: [*ratios[:3], 2, *ratios[4:]]),
        "'blk.3.attn_compressor_ape.weight' has wrong shape",
    ),
    "clamps too few": (
        with_values("swiglu_clamp_exp", lambda clamps: clamps[:-1]),
        "swiglu_clamp_exp has wrong array length; expected 5, got 4",
    ),
    "another gating function": (
        with_key(u32(f"{P}expert_gating_func", 2)),
        "expects sqrtsoftplus MoE scoring",
    ),
    "fewer streams": (
        with_key(u32(f"{P}hyper_connection.count", 2)),
        "'output_hc_fn.weight' has wrong shape",
    ),
    "fewer hash layers": (
        with_key(u32(f"{P}hash_layer_count", 2)),
        "'blk.2.exp_probs_b.bias' not found",
    ),
    "more hash layers": (
        with_key(u32(f"{P}hash_layer_count", 4)),
        "'blk.3.ffn_gate_tid2eid.weight' not found",
    ),
    "more experts used": (
        with_key(u32(f"{P}expert_used_count", 3)),
        "'blk.0.ffn_gate_tid2eid.weight' has wrong shape",
    ),
}


@pytest.mark.parametrize(("edit", "words"), REFUSED.values(), ids=REFUSED)
def test_a_value_that_does_not_fit_is_refused_by_the_engine_and_by_us(
    engine: Engine, edits: V4Edits, edit: Edit, words: str
) -> None:
    file = edits(edit)
    with pytest.raises(Refused, match=words):
        file.said(engine)
    assert file.told


SILENT = {
    "sliding_window": u32(f"{P}attention.sliding_window", 16),
    "index_topk": u32(f"{P}attention.indexer.top_k", 4),
    "rms_norm_eps": f32(f"{P}attention.layer_norm_rms_epsilon", 1e-3),
    "routed_scaling_factor": f32(f"{P}expert_weights_scale", 1.0),
    "hc_eps": f32(f"{P}hyper_connection.epsilon", 1e-2),
    "hc_sinkhorn_iters": u32(f"{P}hyper_connection.sinkhorn_iterations", 1),
    "rope_theta": f32(f"{P}rope.freq_base", 20000.0),
    "compress_rope_theta": f32(f"{P}attention.compress_rope_freq_base", 1000.0),
    "qk_rope_head_dim": u32(f"{P}rope.dimension_count", 32),
    "rope_scaling.type": text(f"{P}rope.scaling.type", "none"),
    "rope_scaling.factor": f32(f"{P}rope.scaling.factor", 2.0),
    "rope_scaling.original_max_position_embeddings": u32(
        f"{P}rope.scaling.original_context_length", 4096
    ),
}
"""By the entry of config.json. Nothing else in the file contradicts these values."""


@pytest.mark.parametrize(("entry", "wrong"), SILENT.items(), ids=SILENT)
def test_a_wrong_value_runs_without_a_word_and_ours_is_that_of_config_json(
    native: Engine, edits: V4Edits, entry: str, wrong: KeyValue
) -> None:
    assert edits(with_key(wrong)).distance(native) > WRONG
    stands = reduce(lambda table, key: table[key], entry.split("."), edits.config)
    written = edits.model.keys[wrong.key].value
    assert written == (stands if isinstance(stands, str) else pytest.approx(stands))


@pytest.mark.parametrize("name", ["swiglu_clamp_exp", "swiglu_clamp_shexp"])
def test_a_wrong_clamp_runs_without_a_word_and_ours_is_that_of_config_json(
    native: Engine, edits: V4Edits, name: str
) -> None:
    assert edits(with_key(f32(f"{P}{name}", 100.0))).distance(native) > WRONG
    assert set(edits.model.keys[f"{P}{name}"].value) == {edits.config["swiglu_limit"]}


IGNORED = {
    "fast beta": (f32(f"{P}rope.scaling.yarn_beta_fast", 16.0), "always takes 32"),
    "slow beta": (f32(f"{P}rope.scaling.yarn_beta_slow", 2.0), "always takes 1"),
    "stages announced": (u32(f"{P}nextn_predict_layers", 1), "announces MTP blocks"),
    "label of types": (u32("general.file_type", 7), None),
    "context": (u32(f"{P}context_length", 4096), None),
    "width at the end": (u32(f"{P}embedding_length_out", 64), None),
    "a key of others": (u32("other.key", 1), None),
}


@pytest.mark.parametrize(("entry", "told"), IGNORED.values(), ids=IGNORED)
def test_what_the_engine_passes_over_is_told_where_it_matters(
    native: Engine, edits: V4Edits, entry: KeyValue, told: str | None
) -> None:
    file = edits(with_key(entry))
    assert file.distance(native) == 0
    assert len(file.told) == (told is not None)
    assert all(told in problem for problem in file.told)


def test_another_pre_tokenizer_splits_otherwise_without_a_word(
    native: Engine, edits: V4Edits, tmp_path: Path
) -> None:
    vocabulary = {**edits.model.keys, **{entry.key: entry for entry in tokenizer_keys(released())}}
    told = []
    for pre in ("joyai-llm", "deepseek-llm"):
        keys = {**vocabulary, "tokenizer.ggml.pre": text("tokenizer.ggml.pre", pre)}
        path = Edited(keys, {}).write(tmp_path / "vocabulary.gguf")
        with native.load_vocabulary([path]) as session:
            told.append(session.tokenize("Line 1234567:\n\n  for (i=0; i<10; ++i) {x += y[i];}"))
    assert told[0] != told[1]
    assert edits.model.keys["tokenizer.ggml.pre"].value == "joyai-llm"
