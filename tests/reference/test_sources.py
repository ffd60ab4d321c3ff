"""Weights from a checkpoint and from what it was converted to: two readers, one model."""

from dataclasses import asdict, replace

import gguf
import numpy as np
import pytest

from tests.reference.checkpoint_weights import BLOCK_NAMES, CheckpointWeights
from tests.reference.conversion import F32, converted
from tests.reference.draft import Draft
from tests.reference.engram_rows import rows_of
from tests.reference.gguf_weights import GgufWeights
from tests.reference.trunk import Trunk
from tests.reference.twin import write_twin
from tests.reference.weights import from_gguf

LAYOUTS = ["fork", "mainline"]
JOINED = "per_layer_token_embd.weight"


@pytest.fixture(scope="module", params=LAYOUTS)
def conversion(request, checkpoint, tmp_path_factory):
    """A lossless one, in each layout."""
    return converted(checkpoint, tmp_path_factory.mktemp("F32"), F32, request.param)


@pytest.fixture(scope="module")
def plain(conversion):
    return conversion.trunk


@pytest.fixture(scope="module")
def quantized(checkpoint, tmp_path_factory):
    types = {"routed": "MXFP4", "engram": "Q4_K", "attention": "Q8_0", "shared": "Q6_K"}
    roles = F32 | types | {"embedding": "BF16"}
    return converted(checkpoint, tmp_path_factory.mktemp("quantized"), roles, "fork").trunk


def names(h):
    """Every tensor that the trunk asks for by its name."""
    everywhere = {"token_embd.weight", "output_norm.weight", "output.weight"}
    stacks = {f"ffn_{part}_exps.weight" for part in ("gate", "up", "down")}
    for layer, ratio in enumerate(h.ratios):
        ends = {end for end in BLOCK_NAMES if not end.startswith("engram_")} | stacks
        if layer not in h.kv_sources:
            ends -= {end for end in ends if "compressor" in end or "r.attn_k" in end}
            ends.discard("indexer.k_norm.weight")
        if layer not in h.index_sources:
            ends -= {"indexer.attn_q_b.weight", "indexer.proj.weight"}
        if ratio == 1:
            ends.discard("attn_compressor_gate.weight")
        if layer in h.engram.layers:
            ends |= {"engram_wkv.weight", "engram_gate.weight"}
        everywhere |= {f"blk.{layer}.{end}" for end in ends}
    return sorted(everywhere)


def test_constants_are_the_same(plain, weights):
    """But for single precision, and for what the layout calls its tables."""
    ours, theirs = (asdict(source.hyperparameters) for source in (weights, from_gguf(plain)))
    for one in (ours, theirs):
        one["engram"] = {
            key: one["engram"][key] for key in ("layers", "n_heads", "multipliers", "primes", "pad")
        } | {"token_map": one["engram"]["token_map"]}
        for name in ("rms_eps", "hc_eps"):
            one[name] = pytest.approx(one[name], rel=1e-6)
    assert ours == theirs


def test_every_tensor_is_the_same(plain, checkpoint, weights):
    ours, theirs = CheckpointWeights.trunk(checkpoint), GgufWeights(plain)
    for name in names(weights.hyperparameters):
        assert np.array_equal(ours.tensor(name), theirs.tensor(name)), name


def test_rows_of_the_tables_are_the_same(plain, checkpoint, weights, tokens):
    ours, theirs = weights.hyperparameters.engram, from_gguf(plain).hyperparameters.engram
    reading, read = CheckpointWeights.trunk(checkpoint), GgufWeights(plain)
    ours_rows, theirs_rows = rows_of(tokens, ours), rows_of(tokens, theirs)
    for n, table in enumerate(theirs.tables):
        first = sum(map(sum, ours.primes[:n])) if table == JOINED else 0
        assert (theirs_rows[n] == ours_rows[n] + first).all()
        values = read.rows(table, theirs_rows[n].ravel())
        assert np.array_equal(values, reading.rows(ours.tables[n], ours_rows[n].ravel()))


def test_the_draft_is_the_same(conversion, draft_weights, weights, tokens):
    theirs = from_gguf(conversion.draft)
    ours, read = asdict(draft_weights.hyperparameters), asdict(theirs.hyperparameters)
    for one in (ours, read):
        for name in ("rms_eps", "hc_eps"):
            one[name] = pytest.approx(one[name], rel=1e-6)
    assert ours == read
    taps = np.random.default_rng(4).standard_normal((3, 9, 256))
    proposals = []
    for source in (draft_weights, theirs):
        context = Draft(source, weights).begin()
        context.follow(taps)
        proposals.append(context.propose(tokens[0]))
    one, other = proposals
    assert one.tokens == other.tokens
    assert np.abs(one.logits - other.logits).max() < 1e-6
    assert np.abs(one.confidence - other.confidence).max() < 1e-6


def test_logits_are_the_same(plain, weights, tight, tokens):
    theirs = from_gguf(plain)
    limits = replace(tight, engram=theirs.hyperparameters.engram)
    ours = Trunk(weights, tight).logits(tokens)
    assert np.abs(Trunk(theirs, limits).logits(tokens) - ours).max() < 1e-6


@pytest.mark.slow
def test_quantized_tensors_are_what_their_codes_say(quantized, checkpoint, weights):
    """MXFP4 holds FP4 as it is; Q8_0 and BF16 are gguf-py's own rounding."""
    ours, theirs = CheckpointWeights.trunk(checkpoint), GgufWeights(quantized)
    kinds = kinds_of(quantized)
    for name in names(weights.hyperparameters):
        kind = kinds.get(name)
        if kind in ("MXFP4", "F32"):
            expected = ours.tensor(name)
        elif kind in ("Q8_0", "BF16"):
            as_type = gguf.GGMLQuantizationType[kind]
            rounded = gguf.quants.quantize(ours.tensor(name), as_type)
            expected = gguf.quants.dequantize(rounded, as_type)
        else:
            continue
        assert np.array_equal(theirs.tensor(name), expected), name


def kinds_of(files):
    readers = map(gguf.GGUFReader, files)
    return {tensor.name: tensor.tensor_type.name for read in readers for tensor in read.tensors}


@pytest.mark.slow
def test_a_twin_in_f32_has_the_same_logits(quantized, tmp_path, weights, tight, tokens):
    theirs, twin = from_gguf(quantized), from_gguf(write_twin(quantized, tmp_path / "twin.gguf"))
    assert twin.hyperparameters == theirs.hyperparameters
    logits = Trunk(theirs, tight).logits(tokens)
    assert (Trunk(twin, tight).logits(tokens) == logits).all()
    changed = np.abs(logits - Trunk(weights, tight).logits(tokens)).max()
    assert changed > 1e-2
