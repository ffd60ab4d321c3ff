"""The target file's tensors, held against the loaders' shape table and the stored tensors."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache

import pytest

from pipeline.errors import ConfigError
from pipeline.miniature.checkpoint import miniature_blueprint
from pipeline.miniature.size import MiniatureSize
from pipeline.model.config import ModelConfig, read_config
from pipeline.model.expected.tensors import expected_tensors
from pipeline.model.layout import Layout
from pipeline.model.roles import Role
from pipeline.model.targets.draft import draft_tensors
from pipeline.model.targets.tensor import Combine, TargetTensor, carried_names
from pipeline.model.targets.trunk import target_tensors
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
    found = {t.name: (t.shape[::-1], t.only_type == "F32") for t in targets(layout).values()}
    assert found == wanted


@pytest.mark.parametrize("layout", Layout)
def test_f32_only_is_norms_sinks_biases_small_mixes_and_mainlines_gate(layout: Layout) -> None:
    rule = r"_norm\.|sinks|\.bias$|hc_\w+_(base|scale)|engram_gate"
    found = {name for name, t in targets(layout).items() if t.only_type == "F32"}
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


def v4_config() -> ModelConfig:
    path = ROOT / "tests/data/deepseek-v4-flash-0731.config.json"
    return read_config(json.loads(path.read_bytes()))


def test_v4_has_one_layout() -> None:
    with pytest.raises(ConfigError, match=r"one layout.*expected mainline; found fork"):
        target_tensors(v4_config(), FORK)


def test_v4s_tensors_are_the_loaders() -> None:
    found = {t.name: (t.shape[::-1], t.only_type) for t in target_tensors(v4_config(), MAINLINE)}
    assert len(found) == 1328
    per_layer = Counter(name.split(".")[1] for name in found if name.startswith("blk."))
    n_tensors = [per_layer[str(layer)] for layer in range(43)]
    assert n_tensors == [24, 24, 34] + [28, 34] * 20
    assert found["blk.2.ffn_gate_tid2eid.weight"] == ((6, 129_280), "I32")
    assert "blk.2.exp_probs_b.bias" not in found
    assert "blk.3.ffn_gate_tid2eid.weight" not in found
    assert found["blk.2.attn_compressor_ape.weight"] == ((1024, 4), "F32")
    assert found["blk.3.attn_compressor_ape.weight"] == ((512, 128), "F32")
    assert found["blk.4.indexer_compressor_kv.weight"] == ((4096, 256), None)
    assert found["blk.4.indexer.attn_q_b.weight"] == ((1024, 8192), None)
    assert found["output_hc_fn.weight"] == ((16_384, 4), None)
    assert found["output_hc_scale.weight"] == ((1,), "F32")


DRAFTS = {
    "v4.1": (
        released_config,
        78,
        {
            "fc.weight": ((15_360, 5120), None),
            "conf_proj.weight": ((5376, 1), None),
            "markov_w2.weight": ((256, 129_280), None),
            "blk.2.ffn_gate_exps.weight": ((5120, 2304, 128), None),
            "enc.output_norm.weight": ((5120,), "F32"),
        },
    ),
    "v4": (
        v4_config,
        81,
        {
            "fc.weight": ((12_288, 4096), None),
            "conf_proj.weight": ((4352, 1), None),
            "output_hc_base.weight": ((4,), "F32"),
            "blk.0.exp_probs_b.bias": ((256,), "F32"),
        },
    ),
}


@pytest.mark.parametrize(("config", "n_tensors", "some"), DRAFTS.values(), ids=DRAFTS)
def test_drafts_are_what_dflash_asks_for(
    config: Callable[[], ModelConfig], n_tensors: int, some: dict[str, object]
) -> None:
    tensors = draft_tensors(config())
    found = {t.name: (t.shape[::-1], t.only_type) for t in tensors}
    assert len(tensors) == len(found) == n_tensors
    assert {name: found[name] for name in some} == some
    assert {t.role for t in tensors} == {Role.DRAFT}
    assert not any("vl" in name or "compressor" in name or "embd" in name for name in found)


@pytest.mark.parametrize("config", [released_config, v4_config], ids=["v4.1", "v4"])
def test_a_draft_carries_its_module_but_for_the_image_bias(
    config: Callable[[], ModelConfig],
) -> None:
    stored = {s.name for s in expected_tensors(config()) if s.name.startswith("mtp.")}
    left = stored - carried_names(draft_tensors(config()))
    assert left == {name for name in stored if name.endswith("bias_vl")}
