"""V4.1's loader contract: what plans write passes, and each way to break a file is named."""

from __future__ import annotations

import pytest

from pipeline.errors import FormatError
from pipeline.gguf.keys import ValueType, array, f32, flag, i32, text, u32
from pipeline.gguf.model_file import GgufModel, read_model
from pipeline.model.contract.check import check_contract
from pipeline.model.contract.form import V41_FORMS, form_of
from pipeline.model.form import V41_FORK
from pipeline.model.layout import Layout
from pipeline.model.metadata.required import UNION_KEYS
from pipeline.quant.types import TYPES
from tests.gguf_builder import full_plan, small_plan, write_hollow, write_plan
from tests.gguf_forms import extra, tensor, with_keys, with_tensors

P = "deepseek41."
BOTH = pytest.mark.parametrize("layout", Layout, ids=str)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[Layout, GgufModel]:
    return {
        layout: read_model(write_plan(small_plan(layout), tmp_path_factory.mktemp(layout)))
        for layout in Layout
    }


@pytest.fixture
def fork(models) -> GgufModel:
    return models[Layout.FORK]


@pytest.fixture
def mainline(models) -> GgufModel:
    return models[Layout.MAINLINE]


def messages(model: GgufModel, layout: Layout) -> list[str]:
    return [str(problem) for problem in check_contract(model, V41_FORMS[layout])]


@BOTH
def test_planned_file_fulfils_the_contract(models, layout):
    assert messages(models[layout], layout) == []
    assert form_of(models[layout]) == V41_FORMS[layout]


@BOTH
def test_released_shapes_fulfil_the_contract(tmp_path, layout):
    model = read_model(write_hollow(full_plan(layout), tmp_path))
    assert len(model.tensors) == {Layout.FORK: 1046, Layout.MAINLINE: 1043}[layout]
    assert messages(model, layout) == []


@BOTH
def test_every_key_that_is_left_out_is_named(models, layout):
    model = models[layout]
    free = {"general.type", "general.license", "quantmill.header_pad", "split.tensors.count"}
    for key in {*model.key_values} - free - {"split.no", "split.count"}:
        named = messages(with_keys(model, without=[key]), layout)
        assert any(f"the key {key} is missing" in message for message in named), key


@BOTH
def test_every_tensor_that_is_left_out_is_named(models, layout):
    model = models[layout]
    for name in model.tensors:
        named = messages(with_tensors(model, without=[name]), layout)
        if name.endswith("exp_probs_b_vl.bias"):
            assert named == []
        else:
            assert len(named) == 1
            assert name in named[0]


def test_the_file_that_holds_the_tensor_is_named(fork):
    no, stored = fork.tensors["blk.3.engram_embd.weight"]
    assert no > 0
    (named,) = messages(with_tensors(fork, tensor(fork, stored.name, ne=(32, 7))), Layout.FORK)
    assert f"file {fork.files[no].path}; tensor {stored.name}" in named


@BOTH
def test_every_tensor_of_another_shape_is_named(models, layout):
    model = models[layout]
    for name, (_, stored) in model.tensors.items():
        for ne in ((*stored.ne[:-1], stored.ne[-1] + 1), (*stored.ne, 1)):
            named = messages(with_tensors(model, tensor(model, name, ne=ne)), layout)
            assert len(named) == 1
            assert name in named[0]
            assert "another shape" in named[0]


@BOTH
@pytest.mark.parametrize(
    "part",
    ["attn_norm.weight", "attn_sinks.weight", "hc_attn_base.weight", "hc_ffn_scale.weight",
     "exp_probs_b.bias", "exp_probs_b_vl.bias", "attn_q_a_norm.weight", "ffn_norm.weight"],
)  # fmt: skip
def test_norms_sinks_and_biases_are_f32_only(models, layout, part):
    changed = tensor(models[layout], f"blk.2.{part}", type=TYPES["F16"])
    (named,) = messages(with_tensors(models[layout], changed), layout)
    assert "must be F32" in named


def test_gate_is_f32_only(mainline):
    changed = tensor(mainline, "blk.1.engram_gate.weight", type=TYPES["BF16"])
    assert "must be F32" in messages(with_tensors(mainline, changed), Layout.MAINLINE)[0]


def test_ik_types_go_with_the_fork_layout_only(mainline, fork):
    for model, layout, n_problems in ((mainline, Layout.MAINLINE, 1), (fork, Layout.FORK, 0)):
        changed = tensor(model, "output.weight", type=TYPES["IQ4_K"])
        named = messages(with_tensors(model, changed), layout)
        assert len(named) == n_problems
        assert all("mainline llama.cpp does not know" in message for message in named)


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("output_hc_fn.weight", "no output hyper-connection"),
        ("blk.6.attn_norm.weight", "block_count is 6"),
        ("blk.40.nextn.eh_proj.weight", "block_count is 6"),
        ("mtp.0.attn_norm.weight", "MTP module is a file of its own"),
        ("blk.3.attn_compressor_kv.weight", "no source"),
        ("blk.4.attn_compressor_gate.weight", "no source of this kind, or has no use"),
        ("blk.0.engram_q.weight", "none of the engram tensors"),
        ("rope_freqs.weight", "No loader of this form knows it"),
    ],
    ids=lambda value: value,
)
@BOTH
def test_extra_tensor_is_refused_with_its_cause(models, layout, name, cause):
    (named,) = messages(with_tensors(models[layout], extra(name)), layout)
    assert f"tensor {name}" in named
    assert "a tensor too many" in named
    assert cause in named


COMMON_FAULTS = {
    "kv heads": (u32(f"{P}attention.head_count_kv", 2), "head_count_kv has a value"),
    "gating": (u32(f"{P}expert_gating_func", 2), "expert_gating_func has a value"),
    "streams": (u32(f"{P}hyper_connection.count", 2), "hyper_connection.count has a value"),
    "hash layers": (u32(f"{P}hash_layer_count", 3), "hash_layer_count has a value"),
    "value length": (u32(f"{P}attention.value_length", 16), "value_length and"),
    "too many used": (u32(f"{P}expert_used_count", 5), "expert_used_count does not fit"),
    "rope": (u32(f"{P}rope.dimension_count", 34), "rope.dimension_count does not fit a head"),
    "groups": (u32(f"{P}attention.output_group_count", 3), "do not divide"),
    "clamps": (array(f"{P}swiglu_clamp_exp", ValueType.FLOAT32, [10.0] * 5), "another length"),
    "ratios": (array(f"{P}attention.compress_ratios", ValueType.INT32, [0] * 5), "is shorter"),
    "float type": (f32(f"{P}block_count", 6), "block_count has a type"),
    "bool type": (u32(f"{P}expert_weights_norm", 1), "expert_weights_norm has a type"),
    "candidate unsigned": (
        u32(f"{P}attention.indexer.candidate_source_layer", 4),
        "candidate_source_layer has a type",
    ),
    "candidate off": (
        i32(f"{P}attention.indexer.candidate_source_layer", -1),
        "candidate mask off",
    ),
    "map i64": (
        array(f"{P}engram.token_map", ValueType.INT64, range(48)),
        "engram.token_map has a type",
    ),
    "map short": (
        array(f"{P}engram.token_map", ValueType.INT32, [n % 40 for n in range(47)]),
        "token_map has another length",
    ),
    "tokens short": (
        array("tokenizer.ggml.tokens", ValueType.STRING, ["a"] * 47),
        "tokenizer.ggml.tokens has another length",
    ),
    "eos outside": (u32("tokenizer.ggml.eos_token_id", 48), "outside the vocabulary"),
    "mtp announced": (u32(f"{P}nextn_predict_layers", 3), "announces MTP blocks"),
    "split total": (i32("split.tensors.count", 9), "split.tensors.count does not fit"),
    "split type": (u32("split.count", 6), "split.count does not fit"),
}


@BOTH
@pytest.mark.parametrize(("entry", "message"), COMMON_FAULTS.values(), ids=COMMON_FAULTS)
def test_wrong_value_is_named(models, layout, entry, message):
    named = messages(with_keys(models[layout], entry), layout)
    assert any(message in problem for problem in named), named


def int_array(key, values, element=ValueType.UINT64):
    return array(f"{P}{key}", element, values)


def test_offsets_of_the_other_layout_are_named(fork, mainline):
    per_layer = fork.key_values[f"{P}engram.offsets"].value
    running = mainline.key_values[f"{P}ple.head_offsets"].value
    assert per_layer != running
    cases = (
        (fork, Layout.FORK, int_array("engram.offsets", running)),
        (mainline, Layout.MAINLINE, int_array("ple.head_offsets", per_layer)),
    )
    for model, layout, entry in cases:
        named = messages(with_keys(model, entry), layout)
        assert any("those of the other layout" in message for message in named)


FORK_FAULTS = {
    "pad raw": (u32(f"{P}engram.pad_id", 2), "engram.pad_id is not what the token map makes"),
    "alias": (u32(f"{P}engram.head_dim", 64), "engram.head_dim and"),
    "ple": (u32(f"{P}ple.ngram_size", 3), "belongs to the mainline layout"),
    "primes i64": (int_array("engram.primes", range(1, 9), ValueType.INT64), "primes has a type"),
    "multipliers": (int_array("engram.multipliers", range(5)), "multipliers has another length"),
    "layers": (int_array("engram.layer_ids", [3, 1], ValueType.INT32), "no increasing layer"),
    "single pass": (u32(f"{P}hyper_connection.single_pass", 1), "single_pass has a type"),
}


@pytest.mark.parametrize(("entry", "message"), FORK_FAULTS.values(), ids=FORK_FAULTS)
def test_wrong_fork_key_is_named(fork, entry, message):
    named = messages(with_keys(fork, entry), Layout.FORK)
    assert any(message in problem for problem in named), named


MAINLINE_FAULTS = {
    "pad outside": (u32(f"{P}engram.pad_token_id", 48), "outside the token map"),
    "pad i32": (i32(f"{P}engram.pad_token_id", 2), "pad_token_id has a type"),
    "fork key": (u32(f"{P}engram.pad_id", 2), "belongs to the fork layout"),
    "fork offsets": (int_array("engram.offsets", [0]), "belongs to the fork layout"),
    "sizes u32": (
        int_array("ple.head_vocab_sizes", [31] * 8, ValueType.UINT32),
        "head_vocab_sizes has a type",
    ),
    "empty run": (int_array("ple.head_vocab_sizes", [0, *range(31, 38)]), "empty bucket run"),
}


@pytest.mark.parametrize(("entry", "message"), MAINLINE_FAULTS.values(), ids=MAINLINE_FAULTS)
def test_wrong_mainline_key_is_named(mainline, entry, message):
    named = messages(with_keys(mainline, entry), Layout.MAINLINE)
    assert any(message in problem for problem in named), named


SOURCE_FAULTS = {
    "reader before source": (
        {"attention.compress_ratios": [2, 0, 2, 2, 1, 1]},
        "layer 0 reads a compressed stream before any layer publishes one",
    ),
    "picks before source": (
        {"attention.indexer.source_layers": [4, 5]},
        "layer 2 reads picked rows before any layer picks them",
    ),
    "ratio mismatch": (
        {"attention.compress_ratios": [0, 0, 2, 1, 1, 1]},
        "layer 3 compresses at ratio 1 but reads layer 2, compressed at 2",
    ),
    "no gate": (
        {"attention.compress_ratios": [0, 0, 2, 2, 2, 2]},
        "layer 4 pools at ratio 2 and has no pooling gate",
    ),
    "idle source": (
        {"attention.compress_ratios": [0, 0, 0, 0, 1, 1]},
        "layer 2 is a kv source but compresses nothing",
    ),
    "disorder": (
        {"attention.kv_source_layers": [4, 2]},
        "the kv source layers are no increasing layer numbers",
    ),
    "beyond": (
        {"attention.indexer.source_layers": [2, 4, 6]},
        "the index source layers are no increasing layer numbers",
    ),
    "candidates at another ratio": (
        {"attention.indexer.source_layers": [2, 3, 4, 5], "candidate": 3},
        "layer 4 takes candidates from layer 3 but compresses at another ratio",
    ),
}


@BOTH
@pytest.mark.parametrize(("changes", "message"), SOURCE_FAULTS.values(), ids=SOURCE_FAULTS)
def test_broken_rule_between_layers_is_named(models, layout, changes, message):
    entries = [
        i32(f"{P}attention.indexer.candidate_source_layer", values)
        if key == "candidate"
        else int_array(key, values, ValueType.INT32)
        for key, values in changes.items()
    ]
    named = messages(with_keys(models[layout], *entries), layout)
    assert any(message in problem for problem in named), named


def test_accepted_spellings_of_a_key_pass(mainline):
    layers = mainline.key_values[f"{P}attention.kv_source_layers"].value
    entries = (
        int_array("attention.kv_source_layers", layers, ValueType.UINT32),
        f32(f"{P}swiglu_clamp_exp", 10.0),
        flag("other.project.key", True),
    )
    assert messages(with_keys(mainline, *entries), Layout.MAINLINE) == []


def test_nine_keys_alone_pass_where_the_union_is_not_asked_for(fork):
    bare = with_keys(fork, without=UNION_KEYS)
    assert len(check_contract(bare, V41_FORK)) == len(UNION_KEYS)
    assert check_contract(bare, V41_FORK, union=False) == []


FOREIGN = {
    "ds4": ([extra("blk.1.engram_q_norm.weight")], [], "ds4"),
    "sidecar": ([], [f"{P}engram"], "sidecar"),
    "jigsaw": ([extra("engram_primes.weight")], [], "JigSawPT"),
}


@pytest.mark.parametrize(("tensors", "dropped", "name"), FOREIGN.values(), ids=FOREIGN)
def test_unknown_dialect_is_refused_by_name(fork, tensors, dropped, name):
    without = [k for k in fork.key_values if any(k.startswith(prefix) for prefix in dropped)]
    with pytest.raises(FormatError, match=name):
        form_of(with_keys(with_tensors(fork, *tensors), without=without))


def test_other_architecture_is_refused(fork):
    other = with_keys(fork, text("general.architecture", "deepseek2"))
    with pytest.raises(FormatError, match="found deepseek2"):
        form_of(other)
    with pytest.raises(FormatError, match="found none"):
        form_of(with_keys(fork, without=["general.architecture"]))
