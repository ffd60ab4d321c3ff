"""V4 files with one thing wrong: what llama.cpp says of each, or does without a word.

Both builds use the same words. Where they say nothing, our own contract must; where nothing in the
file tells, only config.json does, and what is written must be what stands there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.gguf.keys import KeyValue, f32, text, u32
from pipeline.gguf.model_file import read_model
from pipeline.model.contract.check import check_contract
from pipeline.model.form import V4_TARGET
from tests.engines.conversion import convert
from tests.engines.edited import Content, Edited
from tests.engines.engine import Engine, EngineDied, Refused

pytestmark = pytest.mark.engine

P = "deepseek4."
RATIOS = f"{P}attention.compress_ratios"
CLAMPS = (f"{P}swiglu_clamp_exp", f"{P}swiglu_clamp_shexp")
HASHES = "blk.1.ffn_gate_tid2eid.weight"
"""The experts of each token in the second of three hash-routed layers."""

N_LAYERS, N_EXPERTS, N_USED = 5, 4, 2
"""A hash-routed window, another, one at ratio 4; then 128 and 4 by score."""

N_TOKENS = 200
WRONG = 0.05
"""Mean distance of log-probabilities from where on a file computes something else."""

Edit = Callable[[Edited], Edited]


@dataclass(frozen=True)
class Right:
    """The untouched model, its draft, its config.json."""

    model: Edited
    draft: Edited
    config: Mapping[str, object]


@pytest.fixture(scope="module")
def right(small_v4_miniature: Path, tmp_path_factory: pytest.TempPathFactory) -> Right:
    made = convert(small_v4_miniature, tmp_path_factory.mktemp("V4 rules"), "v4-native")
    config = json.loads((small_v4_miniature / "config.json").read_text())
    return Right(Edited.read(made.target), Edited.read([made.draft]), config)


@pytest.fixture(params=["mainline", "native"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def answer(right: Right, tmp_path_factory: pytest.TempPathFactory):
    """What an engine says of an edit of the model; ``answer(engine)`` of the model as it is."""

    def asked(engine: Engine, edit: Edit) -> NDArray[np.float64]:
        path = tmp_path_factory.mktemp("edited") / "edited.gguf"
        with engine.load([edit(right.model).write(path)]) as session:
            tokens = np.random.default_rng(3).integers(0, session.n_vocab, N_TOKENS)
            return session.logprobs(tokens.tolist())

    as_it_is = cache(lambda engine: asked(engine, lambda model: model))
    return lambda engine, edit=None: asked(engine, edit) if edit else as_it_is(engine)


@pytest.fixture
def told(right: Right, tmp_path: Path) -> Callable[[Edit], list[str]]:
    """What our contract says of an edit."""

    def asked(edit: Edit) -> list[str]:
        path = edit(right.model).write(tmp_path / "told.gguf")
        return [str(problem) for problem in check_contract(read_model(path), V4_TARGET)]

    return asked


def test_the_untouched_model_breaks_no_rule(told: Callable[[Edit], list[str]]) -> None:
    assert told(lambda model: model) == []


def without(name: str) -> Edit:
    return lambda m: m.without_tensor(name)


def moved(name: str, to: str) -> Edit:
    """An edit that has a tensor in another place as well."""
    return lambda m: m.tensor(to, m.tensors[name])


def value(entry: KeyValue) -> Edit:
    return lambda m: m.key(entry)


def values(key: str, change: Callable[[list], list]) -> Edit:
    return lambda m: m.values(f"{P}{key}", change)


def transposed(name: str) -> Edit:
    def edit(m: Edited) -> Edited:
        old = m.tensors[name]
        return m.tensor(name, Content(old.ne[::-1], old.type_name, old.data))

    return edit


def cut(m: Edited, name: str, n: int = N_EXPERTS - 1) -> Edited:
    """With the first entries only along the last axis, as of a stack of experts."""
    old = m.tensors[name]
    data = old.data[: len(old.data) // old.ne[-1] * n]
    return m.tensor(name, Content((*old.ne[:-1], n), old.type_name, data))


def pruned(m: Edited) -> Edited:
    """Everything by the expert cut and counted, but for the hash table."""
    parts = re.compile(r"_exps\.|ffn_gate_inp\.|exp_probs_b\.")
    m = reduce(cut, filter(parts.search, m.tensors), m)
    return m.key(u32(f"{P}expert_count", N_EXPERTS - 1))


def hashes(change: Callable[[NDArray[np.int32]], NDArray], type_name: str = "I32") -> Edit:
    """An edit of the experts of every token, ``[n_vocab, n_used]``, in one layer."""

    def edit(m: Edited) -> Edited:
        old = m.tensors[HASHES]
        ids = np.frombuffer(old.data, "<i4").reshape(old.ne[::-1])
        return m.tensor(HASHES, Content(old.ne, type_name, change(ids).tobytes()))

    return edit


WRONG_NUMBER = r"wrong number of tensors; expected 151, got 150"
REFUSED = {
    # what a layer has depends on its kind
    "a tensor too many": (moved("output_norm.weight", "blk.0.odd.weight"), WRONG_NUMBER),
    "a stage under its own name": (moved("blk.0.attn_norm.weight", "mtp.0.n.weight"), WRONG_NUMBER),
    "a bias beside hashes": (
        moved("blk.3.exp_probs_b.bias", "blk.0.exp_probs_b.bias"),
        WRONG_NUMBER,
    ),
    "hashes beside a bias": (moved(HASHES, "blk.4.ffn_gate_tid2eid.weight"), WRONG_NUMBER),
    "an indexer at ratio 128": (
        moved("blk.2.indexer.proj.weight", "blk.3.indexer.proj.weight"),
        WRONG_NUMBER,
    ),
    "a compressor in a window": (
        moved("blk.3.attn_compressor_kv.weight", "blk.0.attn_compressor_kv.weight"),
        WRONG_NUMBER,
    ),
    "no head": (without("output.weight"), "tensor 'output.weight' not found"),
    "no hashes": (without(HASHES), f"tensor '{HASHES}' not found"),
    "no bias": (without("blk.4.exp_probs_b.bias"), "tensor 'blk.4.exp_probs_b.bias' not found"),
    "no mixing at the end": (without("output_hc_fn.weight"), "'output_hc_fn.weight' not found"),
    "no norm of the compressor": (
        without("blk.2.indexer_compressor_norm.weight"),
        "'blk.2.indexer_compressor_norm.weight' not found",
    ),
    "places transposed": (
        transposed("blk.3.attn_compressor_ape.weight"),
        r"'blk.3.attn_compressor_ape.weight' has wrong shape; expected +256, +128, got +128, +256",
    ),
    # counts
    "pruned but not counted": (
        lambda m: pruned(m).key(u32(f"{P}expert_count", N_EXPERTS)),
        "'blk.0.ffn_gate_inp.weight' has wrong shape",
    ),
    "counted but not pruned": (
        value(u32(f"{P}expert_count", N_EXPERTS - 1)),
        "'blk.0.ffn_gate_inp.weight' has wrong shape",
    ),
    "one layer pruned": (
        lambda m: cut(m, "blk.4.ffn_up_exps.weight"),
        "'blk.4.ffn_up_exps.weight' has wrong shape",
    ),
    "more experts used": (
        value(u32(f"{P}expert_used_count", N_USED + 1)),
        "'blk.0.ffn_gate_tid2eid.weight' has wrong shape",
    ),
    "fewer hash layers": (
        value(u32(f"{P}hash_layer_count", 2)),
        "'blk.2.exp_probs_b.bias' not found",
    ),
    "more hash layers": (
        value(u32(f"{P}hash_layer_count", 4)),
        "'blk.3.ffn_gate_tid2eid.weight' not found",
    ),
    "fewer streams": (
        value(u32(f"{P}hyper_connection.count", 2)),
        "'output_hc_fn.weight' has wrong shape",
    ),
    # values
    "ratios too few": (
        values("attention.compress_ratios", lambda ratios: ratios[:-1]),
        "compress_ratios is shorter than block_count",
    ),
    "ratio 2": (
        values("attention.compress_ratios", lambda ratios: [*ratios[:3], 2, *ratios[4:]]),
        "'blk.3.attn_compressor_ape.weight' has wrong shape",
    ),
    "clamps too few": (
        values("swiglu_clamp_exp", lambda clamps: clamps[:-1]),
        "swiglu_clamp_exp has wrong array length; expected 5, got 4",
    ),
    "another gating function": (
        value(u32(f"{P}expert_gating_func", 2)),
        "expects sqrtsoftplus MoE scoring",
    ),
}


@pytest.mark.parametrize(("edit", "words"), REFUSED.values(), ids=REFUSED)
def test_it_is_refused_by_the_engine_and_by_us(
    engine: Engine, answer, told, edit: Edit, words: str
) -> None:
    with pytest.raises(Refused, match=words):
        answer(engine, edit)
    assert told(edit)


NEEDED = """
    attention.compress_ratios attention.compress_rope_freq_base attention.head_count
    attention.indexer.head_count attention.indexer.key_length attention.indexer.top_k
    attention.key_length attention.layer_norm_rms_epsilon attention.output_group_count
    attention.output_lora_rank attention.q_lora_rank attention.sliding_window block_count
    context_length embedding_length expert_feed_forward_length expert_gating_func
    expert_shared_count expert_weights_norm expert_weights_scale hash_layer_count
    hyper_connection.count hyper_connection.epsilon hyper_connection.sinkhorn_iterations
    swiglu_clamp_exp
""".split()
ABORTING = {
    "attention.head_count_kv": "a->ne[0] == b->ne[0]",
    "attention.value_length": "n_embd_head == n_embd_head_v",
    "expert_count": "n_expert_used_max <= hparams.n_expert",
    "expert_used_count": "n_expert_used_max > 0",
    "rope.dimension_count": "n_embd_head >= n_embd_head_rope",
}
WRONG_IF_MISSING = (
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
)
SPARE = """
    rope.freq_base rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow swiglu_clamp_shexp
    vocab_size
""".split()


def test_every_key_of_the_architecture_has_its_say(right: Right) -> None:
    keys = {key.removeprefix(P) for key in right.model.keys if key.startswith(P)}
    assert keys == {*NEEDED, *ABORTING, *WRONG_IF_MISSING, *SPARE}


def lacking(name: str) -> Edit:
    return lambda m: m.without_key(f"{P}{name}")


@pytest.mark.parametrize("name", NEEDED)
def test_without_a_key_it_is_refused(native: Engine, answer, told, name: str) -> None:
    with pytest.raises(Refused, match=rf"key not found in model: {P}{name}$"):
        answer(native, lacking(name))
    assert f"the key {P}{name} is missing" in told(lacking(name))[0]


@pytest.mark.parametrize(("name", "words"), ABORTING.items(), ids=ABORTING)
def test_without_a_key_the_engine_aborts(
    engine: Engine, answer, told, name: str, words: str
) -> None:
    with pytest.raises(EngineDied, match=re.escape(words)):
        answer(engine, lacking(name))
    assert f"the key {P}{name} is missing" in told(lacking(name))[0]


@pytest.mark.parametrize("name", WRONG_IF_MISSING)
def test_without_a_key_it_computes_something_else_and_only_we_say_so(
    engine: Engine, answer, told, name: str
) -> None:
    assert np.abs(answer(engine, lacking(name)) - answer(engine)).mean() > WRONG
    assert f"the key {P}{name} is missing" in told(lacking(name))[0]


def test_keys_that_nothing_changes_without(native: Engine, answer) -> None:
    for name in SPARE:
        assert np.array_equal(answer(native, lacking(name)), answer(native)), name


F32_ONLY = {
    "blk.3.attn_norm.weight": "unsupported types",
    "blk.3.attn_compressor_norm.weight": "unsupported types",
    "blk.3.exp_probs_b.bias": "unsupported types",
    "output_norm.weight": "unsupported types",
    "output_hc_base.weight": "unsupported types",
    "output_hc_scale.weight": "unsupported types",
    "blk.3.attn_sinks.weight": "sinks->type == GGML_TYPE_F32",
    "blk.3.hc_attn_base.weight": "base->type == GGML_TYPE_F32",
    "blk.3.hc_ffn_scale.weight": "scale->type == GGML_TYPE_F32",
}


@pytest.mark.parametrize(("name", "words"), F32_ONLY.items(), ids=F32_ONLY)
def test_what_must_be_f32_aborts_otherwise(
    engine: Engine, answer, told, name: str, words: str
) -> None:
    with pytest.raises(EngineDied, match=re.escape(words)):
        answer(engine, lambda m: m.in_f16(name))
    (problem,) = told(lambda m: m.in_f16(name))
    assert f"tensor {name}" in problem
    assert "must be F32" in problem


@pytest.mark.parametrize(("type_name", "dtype"), [("F32", "<f4"), ("I64", "<i8"), ("I16", "<i2")])
def test_hashes_must_be_i32(engine: Engine, answer, told, type_name: str, dtype: str) -> None:
    edit = hashes(lambda ids: ids.astype(dtype), type_name)
    with pytest.raises(EngineDied, match=r"b->type == GGML_TYPE_I32"):
        answer(engine, edit)
    (problem,) = told(edit)
    assert "must be I32" in problem


OUT_OF_RANGE = {
    "an expert past the last": hashes(lambda ids: ids + 1),
    "a negative one": hashes(lambda ids: ids - 1),
    "pruned, but for the hashes": pruned,
}


@pytest.mark.parametrize("edit", OUT_OF_RANGE.values(), ids=OUT_OF_RANGE)
def test_experts_that_are_not_there_abort_decoding(engine: Engine, answer, edit: Edit) -> None:
    """No header tells: our own writer holds every id against the number of experts."""
    with pytest.raises(EngineDied, match=r"i01 >= 0 && i01 < ne01"):
        answer(engine, edit)


def test_a_pruned_model_with_its_hashes_renumbered_runs(engine: Engine, answer) -> None:
    def edit(m: Edited) -> Edited:
        m = pruned(m)
        for name in filter(re.compile("tid2eid").search, m.tensors):
            old = m.tensors[name]
            first = np.frombuffer(old.data, "<i4").reshape(old.ne[::-1])[:, 0] % (N_EXPERTS - 1)
            both = np.stack([first, (first + 1) % (N_EXPERTS - 1)], axis=1).astype("<i4")
            m = m.tensor(name, Content(old.ne, "I32", both.tobytes()))
        return m

    assert np.isfinite(answer(engine, edit)).all()


def test_an_expert_named_twice_runs_wrong_without_a_word(engine: Engine, answer) -> None:
    twice = hashes(lambda ids: np.repeat(ids[:, :1], N_USED, axis=1))
    assert np.abs(answer(engine, twice) - answer(engine)).mean() > WRONG


# Nothing else in the file contradicts these: config.json alone does.
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


@pytest.mark.parametrize(("config_key", "wrong"), SILENT.items(), ids=SILENT)
def test_a_wrong_value_runs_without_a_word_and_ours_is_that_of_config_json(
    engine: Engine, answer, right: Right, config_key: str, wrong: KeyValue
) -> None:
    assert np.abs(answer(engine, value(wrong)) - answer(engine)).mean() > WRONG
    stands = reduce(lambda table, key: table[key], config_key.split("."), right.config)
    written = right.model.keys[wrong.key]
    assert written.value == stands if isinstance(stands, str) else np.isclose(written.value, stands)


@pytest.mark.parametrize("name", CLAMPS)
def test_a_wrong_clamp_runs_without_a_word_and_ours_is_that_of_config_json(
    native: Engine, answer, right: Right, name: str
) -> None:
    assert np.abs(answer(native, value(f32(name, 100.0))) - answer(native)).mean() > WRONG
    assert right.model.keys[name].value == (right.config["swiglu_limit"],) * N_LAYERS


IGNORED = {
    "fast beta": f32(f"{P}rope.scaling.yarn_beta_fast", 16.0),
    "slow beta": f32(f"{P}rope.scaling.yarn_beta_slow", 2.0),
    "file type": u32("general.file_type", 7),
    "context": u32(f"{P}context_length", 4096),
    "output width": u32(f"{P}embedding_length_out", 64),
    "stages announced": u32(f"{P}nextn_predict_layers", 1),
    "a key of others": u32("other.key", 1),
}
TOLD = {"fast beta": "always takes 32", "slow beta": "always takes 1", "stages announced": "MTP"}


@pytest.mark.parametrize("case", IGNORED)
def test_values_that_the_engine_passes_over(native: Engine, answer, told, case: str) -> None:
    """Betas that config.json asks for would be lost: those are told, and the stages."""
    edit = value(IGNORED[case])
    assert np.array_equal(answer(native, edit), answer(native))
    problems = told(edit)
    assert len(problems) == (case in TOLD)
    assert all(TOLD[case] in problem for problem in problems)


def with_stage(draft: Edited, n_layers: int) -> Edit:
    """The first stage as one more layer; ``n_layers`` is what the file says it has."""

    def edit(m: Edited) -> Edited:
        for name, content in draft.tensors.items():
            if name.startswith("blk.0."):
                m = m.tensor(name.replace("blk.0.", f"blk.{N_LAYERS}."), content)
        return m.key(u32(f"{P}block_count", n_layers))

    return edit


def longer(m: Edited) -> Edited:
    """With the lists that config.json and a whole-minded converter would give six layers."""
    for name in CLAMPS:
        m = m.values(name, lambda clamps: [*clamps, clamps[0]])
    return m.values(RATIOS, lambda ratios: [*ratios, 0])


def test_a_stage_that_is_not_counted_is_refused(engine: Engine, answer, told, right: Right) -> None:
    edit = with_stage(right.draft, N_LAYERS)
    with pytest.raises(Refused, match="wrong number of tensors; expected 174, got 150"):
        answer(engine, edit)
    assert any("A DSpark stage is no layer" in problem for problem in told(edit))


def test_lists_of_the_trunks_length_keep_a_stage_from_being_counted(
    engine: Engine, answer, told, right: Right
) -> None:
    edit = with_stage(right.draft, N_LAYERS + 1)
    with pytest.raises(Refused, match="swiglu_clamp_exp has wrong array length; expected 6, got 5"):
        answer(engine, edit)
    assert any("compress_ratios is shorter than block_count" in problem for problem in told(edit))


def test_a_stage_that_is_counted_runs_as_one_more_layer_and_only_we_say_so(
    engine: Engine, answer, told, right: Right
) -> None:
    counted = with_stage(right.draft, N_LAYERS + 1)

    def edit(m: Edited) -> Edited:
        return longer(counted(m)).key(u32(f"{P}nextn_predict_layers", 1))

    assert np.abs(answer(engine, edit) - answer(engine)).mean() > WRONG
    (problem,) = told(edit)
    assert "is run as one more layer, without a word" in problem


def test_another_pre_tokenizer_splits_otherwise_without_a_word(
    native: Engine, right: Right, tmp_path: Path
) -> None:
    said = "Don't split 1234567 numbers, über-long wörds or 中文字 alike!"
    tokens = []
    for no, edit in enumerate((lambda m: m, value(text("tokenizer.ggml.pre", "deepseek-llm")))):
        path = edit(right.model).write(tmp_path / f"{no}.gguf")
        with native.load_vocabulary([path]) as session:
            tokens.append(session.tokenize(said))
    assert tokens[0] != tokens[1]
    assert right.model.keys["tokenizer.ggml.pre"].value == "joyai-llm"
