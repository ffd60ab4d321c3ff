"""The target file's tensors, held against the loaders' shape table and the stored tensors."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from functools import cache

import pytest

from pipeline.errors import ConfigError
from pipeline.miniature.checkpoint import miniature_blueprint
from pipeline.miniature.size import MiniatureSize
from pipeline.model.config import ModelConfig, read_config
from pipeline.model.expected.tensors import expected_tensors
from pipeline.model.layout import Layout
from pipeline.model.targets import Combine, TargetTensor, carried_names, target_tensors
from pipeline.source.scale_block import scale_shape
from pipeline.source.spec import Codec, TensorSpec
from tests.pipeline.released_plans import ROOT, released_config

FORK, MAINLINE = Layout.FORK, Layout.MAINLINE


@cache
def miniature_config() -> ModelConfig:
    return read_config(json.loads(miniature_blueprint(MiniatureSize(), seed=0).config))


CONFIGS = {"released": released_config, "miniature": miniature_config}


@cache
def stored(model: str) -> dict[str, TensorSpec]:
    return {spec.name: spec for spec in expected_tensors(CONFIGS[model]())}


@cache
def targets(layout: Layout, model: str = "released") -> dict[str, TargetTensor]:
    return {t.name: t for t in target_tensors(CONFIGS[model](), layout)}


ALL_LAYERS = tuple(range(40))
KV_SOURCES, POOLED, INDEX_SOURCES = (2, 8, 14, 20), (2, 8, 14), (2, 8, 14, 20, 24, 28, 32, 36)

# GGUF name below its block -> (layers, ne, only F32 accepted)
LAYER_TENSORS: dict[str, tuple[tuple[int, ...], tuple[int, ...], bool]] = {
    "attn_norm.weight": (ALL_LAYERS, (5120,), True),
    "attn_sinks.weight": (ALL_LAYERS, (64,), True),
    "attn_q_a.weight": (ALL_LAYERS, (5120, 1280), False),
    "attn_q_a_norm.weight": (ALL_LAYERS, (1280,), True),
    "attn_q_b.weight": (ALL_LAYERS, (1280, 32768), False),
    "attn_kv.weight": (ALL_LAYERS, (5120, 512), False),
    "attn_kv_a_norm.weight": (ALL_LAYERS, (512,), True),
    "attn_output_a.weight": (ALL_LAYERS, (4096, 8192), False),
    "attn_output_b.weight": (ALL_LAYERS, (8192, 5120), False),
    "hc_attn_fn.weight": (ALL_LAYERS, (20480, 24), False),
    "hc_attn_base.weight": (ALL_LAYERS, (24,), True),
    "hc_attn_scale.weight": (ALL_LAYERS, (3,), True),
    "hc_ffn_fn.weight": (ALL_LAYERS, (20480, 24), False),
    "hc_ffn_base.weight": (ALL_LAYERS, (24,), True),
    "hc_ffn_scale.weight": (ALL_LAYERS, (3,), True),
    "ffn_norm.weight": (ALL_LAYERS, (5120,), True),
    "ffn_gate_inp.weight": (ALL_LAYERS, (5120, 384), False),
    "exp_probs_b.bias": (ALL_LAYERS, (384,), True),
    "exp_probs_b_vl.bias": (ALL_LAYERS, (384,), True),
    "ffn_gate_exps.weight": (ALL_LAYERS, (5120, 2304, 384), False),
    "ffn_down_exps.weight": (ALL_LAYERS, (2304, 5120, 384), False),
    "ffn_up_exps.weight": (ALL_LAYERS, (5120, 2304, 384), False),
    "ffn_gate_shexp.weight": (ALL_LAYERS, (5120, 2304), False),
    "ffn_up_shexp.weight": (ALL_LAYERS, (5120, 2304), False),
    "ffn_down_shexp.weight": (ALL_LAYERS, (2304, 5120), False),
    "attn_compressor_kv.weight": (KV_SOURCES, (5120, 512), False),
    "attn_compressor_gate.weight": (POOLED, (5120, 512), False),
    "attn_compressor_norm.weight": (KV_SOURCES, (512,), True),
    "indexer.attn_k.weight": (KV_SOURCES, (512, 128), False),
    "indexer.k_norm.weight": (KV_SOURCES, (128,), True),
    "indexer.attn_q_b.weight": (INDEX_SOURCES, (1280, 4096), False),
    "indexer.proj.weight": (INDEX_SOURCES, (5120, 32), False),
}
GLOBAL_TENSORS = {
    "token_embd.weight": ((5120, 129_280), False),
    "output_norm.weight": ((5120,), True),
    "output.weight": ((5120, 129_280), False),
}
ENGRAM_TENSORS = {
    FORK: {
        "blk.1.engram_embd.weight": ((256, 384_006_168), False),
        "blk.14.engram_embd.weight": ((256, 384_016_682), False),
        **{f"blk.{n}.engram_wkv.weight": ((6144, 25_600), False) for n in (1, 14)},
        **{f"blk.{n}.engram_{x}.weight": ((5120, 4), False) for n in (1, 14) for x in "qk"},
    },
    MAINLINE: {
        "per_layer_token_embd.weight": ((256, 768_022_850), False),
        **{f"blk.{n}.engram_kv.weight": ((6144, 25_600), False) for n in (1, 14)},
        **{f"blk.{n}.engram_gate.weight": ((5120, 4), True) for n in (1, 14)},
    },
}


@pytest.mark.parametrize("layout", Layout)
def test_names_shapes_and_f32_constraints_are_the_loaders(layout: Layout) -> None:
    wanted = GLOBAL_TENSORS | ENGRAM_TENSORS[layout]
    for name, (layers, ne, f32_only) in LAYER_TENSORS.items():
        wanted |= {f"blk.{n}.{name}": (ne, f32_only) for n in layers}
    found = {t.name: (t.shape[::-1], t.f32_only) for t in targets(layout).values()}
    assert found == wanted


@pytest.mark.parametrize("layout", Layout)
def test_f32_only_is_norms_sinks_biases_small_mixes_and_mainlines_gate(layout: Layout) -> None:
    rule = r"_norm\.|sinks|\.bias$|hc_\w+_(base|scale)|engram_gate"
    found = {name for name, t in targets(layout).items() if t.f32_only}
    assert found == {name for name in targets(layout) if re.search(rule, name)}


@pytest.mark.parametrize("model", CONFIGS)
@pytest.mark.parametrize("layout", Layout)
def test_every_stored_tensor_of_the_trunk_is_carried_exactly_once(
    layout: Layout, model: str
) -> None:
    uses = Counter(name for t in targets(layout, model).values() for name in t.source_names)
    left = r"mtp\.|vision\.|aligner\.|image_(start|end|newline)$"
    assert uses == {name: 1 for name in stored(model) if not re.match(left, name)}
    assert carried_names(list(targets(layout, model).values())) == uses.keys()


@pytest.mark.parametrize("model", CONFIGS)
@pytest.mark.parametrize("layout", Layout)
def test_matrices_are_read_in_the_form_they_are_stored_in(layout: Layout, model: str) -> None:
    specs = stored(model)
    wrong = [
        matrix.weight
        for target in targets(layout, model).values()
        for matrix in target.matrices
        if stored_form(specs, matrix.source_names)
        != (matrix.codec, matrix.n_rows, matrix.n_cols, matrix_scale(specs, target, matrix.weight))
    ]
    assert wrong == []


def stored_form(
    specs: dict[str, TensorSpec], names: Iterable[str]
) -> tuple[Codec, int, int, tuple[int, ...] | None]:
    weight, *scales = (specs[name] for name in names)
    codecs = {"F32": Codec.F32, "BF16": Codec.BF16, "F8_E4M3": Codec.FP8, "I8": Codec.FP4}
    codec = codecs[weight.dtype]
    n_rows, n_cols = math.prod(weight.shape[:-1]), weight.shape[-1]
    width = 2 * n_cols if codec is Codec.FP4 else n_cols
    return codec, n_rows, width, scales[0].shape if scales else None


def matrix_scale(
    specs: dict[str, TensorSpec], target: TargetTensor, weight: str
) -> tuple[int, ...] | None:
    """Shape of the scales by the matrix's own scale block."""
    matrix = next(m for m in target.matrices if m.weight == weight)
    if matrix.scale is None:
        return None
    return scale_shape(matrix.n_rows, matrix.n_cols, matrix.block)


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("blk.0.attn_q_a.weight", (32, 32)),
        ("blk.0.ffn_up_shexp.weight", (32, 32)),
        ("blk.1.engram_wkv.weight", (32, 32)),
        ("blk.1.engram_embd.weight", (1, 32)),
        ("blk.0.ffn_up_exps.weight", (1, 32)),
        ("blk.0.ffn_gate_inp.weight", (1, 1)),
    ],
)
def test_scale_blocks(name: str, block: tuple[int, int]) -> None:
    assert targets(FORK)[name].matrices[0].block == block


SOURCES = {
    "token_embd.weight": "embed.weight",
    "output.weight": "head.weight",
    "output_norm.weight": "norm.weight",
    "blk.7.attn_q_a_norm.weight": "layers.7.attn.q_norm.weight",
    "blk.7.attn_kv_a_norm.weight": "layers.7.attn.kv_norm.weight",
    "blk.7.attn_norm.weight": "layers.7.attn_norm.weight",
    "blk.7.ffn_norm.weight": "layers.7.ffn_norm.weight",
    "blk.7.attn_sinks.weight": "layers.7.attn.attn_sink",
    "blk.7.attn_output_a.weight": "layers.7.attn.wo_a.weight",
    "blk.7.attn_output_b.weight": "layers.7.attn.wo_b.weight",
    "blk.7.ffn_gate_shexp.weight": "layers.7.ffn.shared_experts.w1.weight",
    "blk.7.ffn_down_shexp.weight": "layers.7.ffn.shared_experts.w2.weight",
    "blk.7.ffn_up_shexp.weight": "layers.7.ffn.shared_experts.w3.weight",
    "blk.7.exp_probs_b.bias": "layers.7.ffn.gate.bias",
    "blk.7.exp_probs_b_vl.bias": "layers.7.ffn.gate.bias_vl",
    "blk.8.attn_compressor_kv.weight": "layers.8.attn.compressor.wkv.weight",
    "blk.8.attn_compressor_gate.weight": "layers.8.attn.compressor.wgate.weight",
    "blk.8.indexer.attn_k.weight": "layers.8.attn.indexer.wk.weight",
    "blk.8.indexer.attn_q_b.weight": "layers.8.attn.indexer.wq_b.weight",
    "blk.8.indexer.proj.weight": "layers.8.attn.indexer.weights_proj.weight",
    "blk.14.engram_q.weight": "layers.14.engram.q_weight",
    "blk.14.engram_k.weight": "layers.14.engram.k_weight",
    "blk.14.engram_wkv.weight": "layers.14.engram.wkv.weight",
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_tensor_is_made_of_the_right_one(name: str) -> None:
    assert [m.weight for m in targets(FORK)[name].matrices] == [SOURCES[name]]


@pytest.mark.parametrize(
    ("part", "source"), [("gate", "w1"), ("down", "w2"), ("up", "w3")], ids=["gate", "down", "up"]
)
def test_a_stack_holds_the_experts_in_order(part: str, source: str) -> None:
    stack = targets(FORK)[f"blk.7.ffn_{part}_exps.weight"]
    wanted = [f"layers.7.ffn.experts.{e}.{source}.weight" for e in range(384)]
    assert [m.weight for m in stack.matrices] == wanted
    assert {m.codec for m in stack.matrices} == {Codec.FP4}
    assert stack.n_rows == sum(m.n_rows for m in stack.matrices)


def test_mainlines_table_is_both_tables_in_layer_order() -> None:
    table = targets(MAINLINE)["per_layer_token_embd.weight"]
    assert [(m.weight, m.n_rows) for m in table.matrices] == [
        ("layers.1.engram.embed.weight", 384_006_168),
        ("layers.14.engram.embed.weight", 384_016_682),
    ]
    assert (table.combine, table.is_table, table.layer) == (Combine.ROWS, True, None)


def test_only_mainlines_gate_is_a_product() -> None:
    products = {t.name: t for t in targets(MAINLINE).values() if t.combine is Combine.PRODUCT}
    assert [m.weight for m in products["blk.14.engram_gate.weight"].matrices] == [
        "layers.14.engram.q_weight",
        "layers.14.engram.k_weight",
    ]
    assert set(products) == {"blk.1.engram_gate.weight", "blk.14.engram_gate.weight"}
    assert {t.combine for t in targets(FORK).values()} == {Combine.ROWS}


def test_everything_but_the_engram_is_the_same_in_both_layouts() -> None:
    fork, mainline = (set(targets(layout).values()) for layout in (FORK, MAINLINE))
    assert {t.name for t in fork - mainline} == set(ENGRAM_TENSORS[FORK])
    assert {t.name for t in mainline - fork} == set(ENGRAM_TENSORS[MAINLINE])


def test_order_is_globals_then_layer_by_layer() -> None:
    layers = [-1 if t.layer is None else t.layer for t in targets(MAINLINE).values()]
    assert layers == sorted(layers)
    assert all(
        t.name.startswith(f"blk.{t.layer}.")
        for t in targets(MAINLINE).values()
        if t.layer is not None
    )


def test_another_model_is_refused_in_words() -> None:
    path = ROOT / "tests/data/deepseek-v4-flash-0731.config.json"
    config = read_config(json.loads(path.read_bytes()))
    with pytest.raises(ConfigError, match=r"V4\.1-Flash only; expected v4\.1 .*; found v4"):
        target_tensors(config, MAINLINE)
