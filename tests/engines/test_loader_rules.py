"""Files with one thing wrong: what mainline llama.cpp says of each, or does without a word.

Its words are those of build b12211. Where it says nothing, our own checks are all there is.
"""

import numpy as np
import pytest

from pipeline.gguf.keys import ValueType, i32, u32
from pipeline.quant.types import TYPES
from tests.engines.edited import Content, Edited
from tests.engines.engine import EngineDied, Refused

pytestmark = pytest.mark.engine

TEXT = "The quick brown fox jumps over the lazy dog, and 7 more things happen."

PRIMES = "deepseek41.ple.head_vocab_sizes"
OFFSETS = "deepseek41.ple.head_offsets"
MULTIPLIERS = "deepseek41.ple.layer_multipliers"
TOKEN_MAP = "deepseek41.engram.token_map"
PAD = "deepseek41.engram.pad_token_id"
RATIOS = "deepseek41.attention.compress_ratios"
CANDIDATES = "deepseek41.attention.indexer.candidate_source_layer"
TABLE = "per_layer_token_embd.weight"
ODD = Content((32,), "F32", bytes(128))


def missing(key):
    return pytest.param(
        lambda m: m.without_key(f"deepseek41.{key}"),
        f"not found in model: deepseek41.{key}",
        id=key,
    )


def missing_tensor(name):
    return pytest.param(lambda m: m.without_tensor(name), f"tensor '{name}' not found", id=name)


def of_type(name, type_name):
    """An edit that stores a matrix, zeroed, as another type."""

    def edit(model):
        ne = model.tensors[name].ne
        nbytes = TYPES[type_name].row_nbytes(ne[0]) * ne[1]
        return model.tensor(name, Content(ne, type_name, bytes(nbytes)))

    return edit


REFUSED = [
    # tensors
    pytest.param(
        lambda m: m.tensor("blk.0.odd.weight", ODD),
        "wrong number of tensors; expected 174, got 173",
        id="a tensor too many",
    ),
    pytest.param(
        lambda m: m.tensor("output_hc_base.weight", ODD),
        "wrong number of tensors; expected 174, got 173",
        id="a tensor of V4",
    ),
    missing_tensor("output.weight"),
    missing_tensor("blk.3.attn_sinks.weight"),
    missing_tensor("blk.2.attn_compressor_norm.weight"),
    missing_tensor("blk.2.indexer.k_norm.weight"),
    pytest.param(
        lambda m: m.shorter(TABLE),
        f"{TABLE} has 2913 rows, too few for the Engram heads (2914)",
        id="a table one row short",
    ),
    pytest.param(
        of_type("output.weight", "IQ4_K"),
        "tensor 'output.weight' has invalid ggml type 139. should be in [0, 44)",
        id="a type of ik_llama.cpp",
    ),
    # types of keys
    pytest.param(
        lambda m: m.element(PRIMES, ValueType.INT32),
        f"{PRIMES} has wrong array element type i32",
        id="primes as i32",
    ),
    pytest.param(
        lambda m: m.element(TOKEN_MAP, ValueType.UINT64),
        f"{TOKEN_MAP} has wrong array element type u64",
        id="token map as u64",
    ),
    pytest.param(
        lambda m: m.key(i32(PAD, 2)),
        f"key {PAD} has wrong type i32 but expected type u32",
        id="pad id as i32",
    ),
    pytest.param(
        lambda m: m.key(u32(CANDIDATES, m.keys[CANDIDATES].value)),
        f"key {CANDIDATES} has wrong type u32 but expected type i32",
        id="candidate source as u32",
    ),
    # values of keys
    pytest.param(
        lambda m: m.values(PRIMES, lambda primes: [0, *primes[1:]]),
        "engram head 0: bucket range out of range",
        id="a prime of zero",
    ),
    pytest.param(
        lambda m: m.values(MULTIPLIERS, lambda values: values[:-1]),
        "engram metadata is inconsistent",
        id="a multiplier too few",
    ),
    pytest.param(
        lambda m: m.key(u32(PAD, 9999)), "engram metadata is inconsistent", id="pad id off the map"
    ),
    pytest.param(
        lambda m: m.values(RATIOS, lambda ratios: [*ratios[:3], 2, *ratios[4:]]),
        "layer 4: ratio 1 without a matching kv/index source",
        id="another ratio than the source's",
    ),
    pytest.param(
        lambda m: m.values(RATIOS, lambda ratios: ratios[:4]),
        "compress_ratios is shorter than block_count",
        id="ratios too few",
    ),
    pytest.param(
        lambda m: m.key(u32("deepseek41.expert_gating_func", 2)),
        "expects sqrtsoftplus MoE scoring",
        id="another gating function",
    ),
    # keys that are missing
    missing("attention.kv_source_layers"),
    missing("attention.indexer.source_layers"),
    missing("attention.layer_norm_rms_epsilon"),
    missing("embedding_length_per_layer_input"),
    missing("swiglu_clamp_exp"),
    pytest.param(
        lambda m: m.without_key("deepseek41.ple.layers"),
        "wrong number of tensors; expected 173, got 168",
        id="ple.layers",
    ),
]

ABORTED = [
    pytest.param(lambda m: m.without_key("deepseek41.expert_count"), "n_expert", id="expert_count"),
    pytest.param(
        lambda m: m.without_key("deepseek41.attention.head_count_kv"),
        "a->ne[0] == b->ne[0]",
        id="head_count_kv",
    ),
    pytest.param(
        lambda m: m.in_f16("blk.1.attn_sinks.weight"),
        "sinks->type == GGML_TYPE_F32",
        id="sinks in F16",
    ),
]

ABORTED_AT_DECODE = ["blk.1.attn_norm.weight", "blk.1.engram_gate.weight"]


def offsets_per_layer(model):
    """Every layer's offsets counted from its own first row, as the fork layout has them."""

    def own(offsets):
        half = len(offsets) // 2
        return [*offsets[:half], *(offset - offsets[half] for offset in offsets[half:])]

    return model.values(OFFSETS, own)


WRONG_WITHOUT_A_WORD = [
    pytest.param(offsets_per_layer, id="offsets per layer"),
    pytest.param(lambda m: m.key(u32(PAD, 5)), id="another pad id"),
    pytest.param(lambda m: m.without_key("deepseek41.rope.scaling.type"), id="no rope scaling"),
    pytest.param(
        lambda m: m.key(u32("deepseek41.attention.sliding_window", 16)), id="a shorter window"
    ),
]


@pytest.fixture(scope="module")
def model(small_mainline):
    return Edited.read(small_mainline.shards)


@pytest.fixture(scope="module")
def right(mainline, small_mainline):
    """Tokens, and what the untouched model says to them."""
    with mainline.load(small_mainline.shards) as session:
        tokens = session.tokenize(TEXT)
        return tokens, session.logprobs(tokens)


@pytest.mark.parametrize(("edit", "words"), REFUSED)
def test_it_is_refused(mainline, model, edit, words, tmp_path):
    path = edit(model).write(tmp_path / "edited.gguf")
    with pytest.raises(Refused) as refusal:
        mainline.load([path])
    assert words in str(refusal.value)


@pytest.mark.parametrize(("edit", "words"), ABORTED)
def test_the_engine_aborts_over_it(mainline, model, edit, words, tmp_path):
    path = edit(model).write(tmp_path / "edited.gguf")
    with pytest.raises(EngineDied) as death:
        mainline.load([path])
    assert words in str(death.value)


@pytest.mark.parametrize("name", ABORTED_AT_DECODE)
def test_what_must_be_f32_loads_in_f16_and_aborts_at_the_first_token(
    mainline, model, name, right, tmp_path
):
    path = model.in_f16(name).write(tmp_path / "edited.gguf")
    with mainline.load([path]) as session:
        with pytest.raises(EngineDied, match="unsupported types"):
            session.logprobs(right[0])
        with pytest.raises(EngineDied, match="unsupported types"):
            session.logprobs(right[0])


@pytest.mark.parametrize("edit", WRONG_WITHOUT_A_WORD)
def test_it_runs_wrong_without_a_word(mainline, model, edit, right, tmp_path):
    tokens, logprobs = right
    path = edit(model).write(tmp_path / "edited.gguf")
    with mainline.load([path]) as session:
        assert np.abs(session.logprobs(tokens) - logprobs).max() > 1


def test_a_spare_row_and_keys_of_others_change_nothing(mainline, model, right, tmp_path):
    tokens, logprobs = right
    table = model.tensors[TABLE]
    width, n_rows = table.ne
    longer = Content((width, n_rows + 1), table.type_name, table.data + table.data[-272:])
    edited = model.tensor(TABLE, longer).key(u32("quantmill.odd", 7))
    with mainline.load([edited.write(tmp_path / "edited.gguf")]) as session:
        assert np.array_equal(session.logprobs(tokens), logprobs)
